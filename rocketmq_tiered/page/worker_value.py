"""A value that is made by a thread of its own and kept for a while: what pages show of a slow object store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

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
