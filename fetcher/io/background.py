"""Runs coroutines of the core in the background: prefetch. They handle their own errors; others are logged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from fetcher.io.waiting import Executor, Wait

logger = logging.getLogger(__name__)

Work = Coroutine["Wait[Any]", None, None]


class Background:
    """Runs coroutines on ``executor``, one step whenever what they wait for is there. Thread-safe."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._running: set[Work] = set()
        self._is_closed = False

    def start(self, work: Work, *, inline: bool) -> None:
        """Begin ``work``; ``inline``: up to its first wait in this thread, so that its requests are under way."""
        with self._lock:
            if self._is_closed:
                work.close()
                return
            self._running.add(work)
        if inline:
            self._step(work)
        else:
            self._submit(work)

    def _submit(self, work: Work, _done: Future[Any] | None = None) -> None:
        with self._lock:
            if work not in self._running:
                work.close()
                return
        try:
            self._executor.submit(self._step, work)
        except RuntimeError:  # the executor was shut down first
            self._end(work)

    def _step(self, work: Work) -> None:
        try:
            wait = work.send(None)
        except StopIteration:
            self._end(work)
        except Exception:
            logger.exception("prefetch failed")
            self._end(work)
        else:
            wait.future.add_done_callback(lambda done: self._submit(work, done))

    def _end(self, work: Work) -> None:
        with self._lock:
            self._running.discard(work)
        work.close()

    def close(self) -> None:
        """Start nothing more; what waits is dropped when its requests end. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._running.clear()
