"""Values that threads keep for pages: made when they are read and old, or measured every few seconds."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import TieredError

logger = logging.getLogger(__name__)
T = TypeVar("T")
RETRY_S = 5.0


@dataclass(frozen=True)
class Reading(Generic[T]):
    """The last value, if there is one. ``problem``: why there is none, or no newer one. ``is_pending``: the first is
    being made."""

    value: T | None
    problem: str = ""
    is_pending: bool = False


class WorkerValue(Generic[T]):
    """Makes its value when it is read and older than ``keep_s``, in one thread at a time. Thread-safe."""

    def __init__(self, name: str, make: Callable[[], T], keep_s: float) -> None:
        """``make`` returns the value, which a page calls ``name``, and may take long."""
        self._name, self._make = name, make
        self.keep_s = keep_s
        """How old the value may become before another one is made; ``make`` may change it."""
        self._lock = threading.Lock()
        self._is_idle = threading.Event()  # set while no thread makes the value
        self._is_idle.set()
        self._value: T | None = None
        self._problem = ""
        self._due_s = float("-inf")

    def get(self, wait_s: float, newer_wait_s: float = 0.0) -> Reading[T]:
        """Return the value made last, and start a thread that makes a newer one if it is too old. Waits at most
        ``wait_s`` for the first value, and ``newer_wait_s`` for a newer one."""
        with self._lock:
            if self._is_idle.is_set() and time.monotonic() >= self._due_s:
                self._is_idle.clear()
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            is_first = self._value is None
        self._is_idle.wait(wait_s if is_first else newer_wait_s)
        with self._lock:
            return Reading(self._value, self._problem, self._value is None and not self._is_idle.is_set())

    def _run(self) -> None:
        """Make the value, in a thread of its own. If that fails, the last value stays, with the reason why there is no
        newer one, and the next attempt is due after RETRY_S."""
        value, problem = None, ""
        try:
            value = self._make()
        except TieredError as error:
            problem = str(error)
        except Exception as error:
            logger.exception("the admin page cannot show its %s", self._name)
            problem = f"internal error: {error}"
        with self._lock:
            self._value = self._value if value is None else value
            self._problem = problem
            self._due_s = time.monotonic() + (RETRY_S if value is None else self.keep_s)
            self._is_idle.set()


EVERY_S = 10.0
KEPT_S = 3600.0
COST_SHARE = 500
"""The next measurement comes after EVERY_S, or later: after COST_SHARE times the CPU time that the last one took."""
Measurement = Mapping[str, float | None]


class History:
    """Measurements of the last hour, taken every EVERY_S or less often if they take long. Thread-safe."""

    def __init__(self, measure: Callable[[], Measurement], clock: Clock = MACHINE_CLOCK) -> None:
        """``measure`` returns the present figures by name, None for an unknown one. Nothing is measured before
        ``start``."""
        self._measure, self._clock = measure, clock
        self._kept: deque[tuple[float, Measurement]] = deque(maxlen=int(KEPT_S / EVERY_S))
        self._stop = threading.Event()
        self._logged = ""  # the last error

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return the measurements of one figure in the last KEPT_S, as (age in seconds, value) from old to new. Those
        in which the figure was unknown are skipped."""
        now_s = self._clock.monotonic_s()
        return [
            (now_s - measured_s, value)
            for measured_s, measured in list(self._kept)  # a copy, as another thread adds to it
            if now_s - measured_s <= KEPT_S and (value := measured.get(name)) is not None
        ]

    def start(self) -> None:
        """Measure from now on, in a thread, until ``close``."""
        threading.Thread(target=self._run, name="page-history", daemon=True).start()

    def close(self) -> None:
        """Stop measuring."""
        self._stop.set()

    def _run(self) -> None:
        wait_s = 1.0
        while not self._stop.wait(wait_s):
            began_s = time.thread_time()
            self.sample()
            wait_s = max(EVERY_S, COST_SHARE * (time.thread_time() - began_s))

    def sample(self) -> None:
        """Measure once. A measurement that fails, as the process is starting or stopping, is missing; the same error is
        logged once."""
        try:
            self._kept.append((self._clock.monotonic_s(), self._measure()))
        except Exception as error:
            if str(error) != self._logged:
                self._logged = str(error)
                logger.debug("the charts of the admin page miss one measurement: %s", error)
