"""Timers for pacing and time limits; injected, so that a simulation has one clock."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

LOG = logging.getLogger(__name__)


class Timer(Protocol):
    """A clock that can call back."""

    def call_at(self, when_s: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, as soon as the injected clock shows ``when_s``. Callbacks are short."""
        ...


class ThreadTimer:
    """Timer on ``time.monotonic`` with one daemon thread, started when first needed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def call_at(self, when_s: float, callback: Callable[[], None]) -> None:
        """See Timer. No effect after ``close``."""
        with self._changed:
            if self._is_closed:
                return
            heapq.heappush(self._calls, (when_s, next(self._numbers), callback))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fetcher-timer", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Stop the thread; calls still outstanding are dropped. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._calls.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (callback := self._next()) is not None:
            try:
                callback()
            except Exception:
                LOG.exception("a timed call failed")

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._is_closed:
                if not self._calls:
                    self._changed.wait()
                elif (left_s := self._calls[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    return heapq.heappop(self._calls)[2]
            return None
