"""Prefetches by threads, or reads at once while the store answers faster than threads take turns.

A directory in the page cache is such a store: its readers and the thread that decodes would take the interpreter's lock
from each other for each system call, which took a tenth of a compaction's CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SLOW_READ_S = 0.1
"""Reads that have taken less than this say nothing yet."""
SLOW_SHARE = 0.2
"""Threads make the reads for good once these have taken more of the time."""


class PrefetchedReads:
    """Not thread-safe. It has up to ``threads`` threads."""

    def __init__(self, threads: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compaction-read")
        self._clock_s = clock_s
        self._begun_s = clock_s()
        self._read_s = 0.0
        self._is_slow = False

    def submit(self, read: Callable[P, T], *args: P.args, **more: P.kwargs) -> Future[T]:
        """The result of ``read``, in progress or done. Raises as it, if it is called at once."""
        if self._is_slow:
            return self._pool.submit(read, *args, **more)
        begin_s = self._clock_s()
        done: Future[T] = Future()
        done.set_result(read(*args, **more))
        now_s = self._clock_s()
        self._read_s += now_s - begin_s
        self._is_slow = self._read_s > max(SLOW_READ_S, SLOW_SHARE * (now_s - self._begun_s))
        return done

    def close(self) -> None:
        """Cancel reads that have not begun, and wait for the others, which use the store. Idempotent."""
        self._pool.shutdown(cancel_futures=True)
