"""Ranged GETs as futures, over threads and a blocking store (boto3, file://) or an event loop and an asynchronous one.

Does not own priorities and limits (request_scheduler.py) nor retries (the store's wrappers).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from fetcher.io.waiting import Threads, check_process
from tiered.formats.memory_bound import stored_bytes_max
from tiered.object_store.interface import AsyncObjectStore, ObjectStore

if TYPE_CHECKING:
    import asyncio


class RangeReader(Protocol):
    """Reads parts of objects. Thread-safe. Errors are the store's (tiered.errors), in the future."""

    def submit(self, key: str, offset: int, length: int) -> Future[bytes]:
        """Exactly ``length`` bytes of ``key`` from ``offset``."""
        ...

    def submit_get(self, key: str) -> Future[bytes]:
        """The whole object, within the memory for decoding one."""
        ...

    def close(self) -> None:
        """Wait for what is in flight and release the threads. The store is not closed. Idempotent."""
        ...


class ThreadRangeReader:
    """RangeReader over a blocking store, ``threads`` requests at once."""

    def __init__(self, store: ObjectStore, threads: int) -> None:
        self._store = store
        self._pool = Threads(threads, name="range-reader")

    def submit(self, key: str, offset: int, length: int) -> Future[bytes]:
        return self._pool.submit(self._store.get_range, key, offset, length)

    def submit_get(self, key: str) -> Future[bytes]:
        return self._pool.submit(self._store.get, key, stored_bytes_max())

    def close(self) -> None:
        self._pool.shutdown()


class LoopRangeReader:
    """RangeReader over an asynchronous store, which lives on an event loop thread of this reader's own.

    ``close`` closes the store too: it belongs to that loop.
    """

    def __init__(self, store: AsyncObjectStore) -> None:
        import asyncio  # 0.07 s, needed by no command

        self._store = store
        self._loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self._submit = asyncio.run_coroutine_threadsafe
        self._thread = threading.Thread(target=self._run, name="range-reader-loop", daemon=True)
        self._lock = threading.Lock()
        self._is_closed = False
        self._process_id = os.getpid()
        self._in_flight: set[Future[Any]] = set()
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def submit(self, key: str, offset: int, length: int) -> Future[bytes]:
        return self._start(self._store.get_range(key, offset, length))

    def submit_get(self, key: str) -> Future[bytes]:
        return self._start(self._store.get(key, stored_bytes_max()))

    def _start(self, request: Coroutine[Any, Any, bytes]) -> Future[bytes]:
        with self._lock:
            try:
                check_process(self._process_id)
                if self._is_closed:
                    raise RuntimeError("this reader is closed")
            except RuntimeError:
                request.close()
                raise
            future = self._submit(request, self._loop)
            self._in_flight.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._in_flight.discard(future)

    def close(self) -> None:
        """See RangeReader. In a forked child there is nothing to close: the loop's thread is the parent's."""
        if os.getpid() != self._process_id:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            in_flight = list(self._in_flight)
        for future in in_flight:
            future.exception()
        self._submit(self._store.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
