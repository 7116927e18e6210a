"""Values that threads keep for pages: made when they are read and old, or measured every few seconds."""

from __future__ import annotations

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
    """Makes its value when it is read and older than ``keep_s(value)``, in one thread at a time. Thread-safe."""

    def __init__(self, name: str, make: Callable[[], T], keep_s: Callable[[T], float]) -> None:
        self._name, self._make, self._keep_s = name, make, keep_s
        self._lock = threading.Lock()
        self._made = threading.Event()
        self._made.set()
        self._value: T | None = None
        self._problem = ""
        self._due_s = float("-inf")

    def get(self, wait_s: float, newer_wait_s: float = 0.0) -> Reading[T]:
        """The value. Waits at most ``wait_s`` for the first one, and ``newer_wait_s`` for each other one."""
        with self._lock:
            if self._made.is_set() and time.monotonic() >= self._due_s:
                self._made.clear()
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            is_first = self._value is None
        self._made.wait(wait_s if is_first else newer_wait_s)
        with self._lock:
            return Reading(self._value, self._problem, self._value is None and not self._made.is_set())

    def _run(self) -> None:
        """Makes the value. If that fails, the last value stays beside the reason, and the next attempt is due after
        RETRY_S."""
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
            self._due_s = time.monotonic() + (RETRY_S if value is None else self._keep_s(value))
            self._made.set()


EVERY_S = 10.0
KEPT_S = 3600.0
COST_SHARE = 500
"""A measurement may take this part of the time between two, or the next one comes later."""
Measurement = Mapping[str, float | None]


class History:
    """Measurements by name. Thread-safe."""

    def __init__(self, clock: Clock = MACHINE_CLOCK) -> None:
        self._clock = clock
        self._kept: deque[tuple[float, Measurement]] = deque(maxlen=int(KEPT_S / EVERY_S))

    def add(self, measured: Measurement) -> None:
        """Keep ``measured`` as of now. A value of None is unknown."""
        self._kept.append((self._clock.monotonic_s(), measured))

    def points(self, name: str) -> list[tuple[float, float]]:
        """(age in seconds, value) of one name, from old to new."""
        now_s = self._clock.monotonic_s()
        return [
            (now_s - at_s, value)
            for at_s, measured in list(self._kept)
            if now_s - at_s <= KEPT_S and (value := measured.get(name)) is not None
        ]


class Sampler:
    """Adds ``measure()`` to ``history`` from the start on, every EVERY_S or less often if it takes long."""

    def __init__(self, history: History, measure: Callable[[], Measurement]) -> None:
        self._history, self._measure = history, measure
        self._stop = threading.Event()
        self._logged = ""
        threading.Thread(target=self._run, name="page-history", daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._stop.set()

    def _run(self) -> None:
        wait_s = 1.0
        while not self._stop.wait(wait_s):
            began_s = time.thread_time()
            self._sample()
            wait_s = max(EVERY_S, COST_SHARE * (time.thread_time() - began_s))

    def _sample(self) -> None:
        """Adds one measurement; an error is logged once, and the measurement is missing."""
        try:
            self._history.add(self._measure())
        except Exception as error:
            # The process may be starting or stopping: this measurement is missing then.
            if str(error) != self._logged:
                self._logged = str(error)
                logger.debug("the page has no values for this moment: %s", error)
