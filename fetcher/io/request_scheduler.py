"""Ranged GETs as futures, scheduled by priority: prefetch and background reads never delay user reads.

Readers work over threads and a blocking store (boto3, file://) or an event loop and an asynchronous one. Each priority
has its own concurrency limit, and all share one bandwidth limit. A waiting request may be promoted. Nothing here
blocks: waiting requests start when others end, or by the timer.

Owns when a request starts, and its threads. Does not own what is requested (segment_source.py) nor retries (the store's
wrappers).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fetcher.io.waiting import Threads, Timer, check_process, new_future
from tiered.clock import Clock
from tiered.errors import ThrottledError, UnavailableError
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
        """Start the thread of the event loop on which all requests of ``store`` run. A child process does not inherit
        the thread: each request there fails."""
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
        """Run one GET, a coroutine that has not begun, on the event loop's thread and return its future.

        Raises RuntimeError if the reader is closed or was made before a fork.
        """
        with self._lock:
            try:
                check_process(self._process_id)
                if self._is_closed:
                    raise RuntimeError("the archive was closed while it was being read")
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
        """Waits for the requests in flight, then closes the connections to the store and ends the loop's thread. In a
        forked child there is nothing to close: the thread is the parent's."""
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


BURST_S = 0.05
"""Seconds of a rate that may be saved up: more would show in a measurement, less would waste a late timer."""


class Priority(IntEnum):
    """The priority of a request; the lowest number starts first."""

    USER = 0
    PREFETCH = 1
    BACKGROUND = 2


@dataclass(frozen=True)
class PriorityLimits:
    """``queue_max``: requests that may wait for their start."""

    concurrency: int
    queue_max: int = 4096


class BytePace:
    """Bytes a second on average, by debt: a request starts when nothing is owed and then owes its whole length."""

    def __init__(self, bytes_per_s: int, now_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_s = now_s

    def ready_s(self) -> float:
        """The earliest start of the next request."""
        return self._free_s if self.bytes_per_s else float("-inf")

    def take(self, byte_count: int, now_s: float) -> None:
        """A request of ``byte_count`` starts."""
        if self.bytes_per_s:
            self._free_s = max(self._free_s, now_s - BURST_S) + byte_count / self.bytes_per_s


@dataclass(eq=False)
class RangeRequest:
    """One GET of [offset, offset + length), or of the whole object when ``length`` is None."""

    key: str
    offset: int
    length: int | None
    priority: Priority
    future: Future[bytes] = field(default_factory=new_future)
    started_in: Priority | None = None


@dataclass
class RequestCounts:
    """Totals since the start: requests begun, bytes that arrived, requests that failed or found a full queue."""

    requests: int = 0
    byte_count: int = 0
    failed: int = 0
    refused: int = 0


class RequestScheduler:
    """Starts requests on ``reader``. Thread-safe. Errors in futures: the store's, or ThrottledError (queue full)."""

    def __init__(
        self,
        reader: RangeReader,
        limits: Mapping[Priority, PriorityLimits],
        *,
        clock: Clock,
        timer: Timer | None,
        bytes_per_s: int = 0,
    ) -> None:
        """``bytes_per_s`` bounds all priorities together; 0 means no limit. The ``timer`` is needed only with a limit:
        it starts requests when the limit allows them again."""
        if bytes_per_s and timer is None:
            raise ValueError("a bandwidth limit requires a timer")
        self._reader = reader
        self._clock = clock
        self._timer = timer
        self._lock = threading.Lock()
        self._queues: dict[Priority, deque[RangeRequest]] = {priority: deque() for priority in Priority}
        self._in_flight = dict.fromkeys(Priority, 0)
        self._wake_s: float | None = None  # when the timer calls next, in seconds of the monotonic clock
        self._is_pumping = False
        self._is_closed = False
        self.counts = {priority: RequestCounts() for priority in Priority}
        self._limits = dict(limits)
        self._pace = BytePace(bytes_per_s, clock.monotonic_s())

    @property
    def in_flight(self) -> dict[Priority, int]:
        """Requests started and not ended, by the priority they started in."""
        with self._lock:
            return dict(self._in_flight)

    @property
    def queued(self) -> dict[Priority, int]:
        """Requests that wait for their start."""
        with self._lock:
            return {priority: len(queue) for priority, queue in self._queues.items()}

    # -- requests ---------------------------------------------------------------------------------------------

    def submit(self, request: RangeRequest) -> Future[bytes]:
        """Queue ``request`` and return its future, which fails with ThrottledError if too many requests of the same
        priority are waiting, and with UnavailableError after ``close``."""
        with self._lock:
            queue = self._queues[request.priority]
            is_closed = self._is_closed
            is_full = is_closed or len(queue) >= self._limits[request.priority].queue_max
            if is_full:
                self.counts[request.priority].refused += 1
            else:
                queue.append(request)
        if is_closed:
            self._refuse(request)
        elif is_full:
            request.future.set_exception(
                ThrottledError(
                    f"too many {request.priority.name.lower()} reads of the object store: {len(queue)} are waiting",
                    hint="retry later",
                )
            )
        else:
            self._pump()
        return request.future

    def close(self) -> None:
        """Refuse what has not started, and everything from now on. Idempotent."""
        with self._lock:
            self._is_closed = True
            refused = [request for queue in self._queues.values() for request in queue]
            for queue in self._queues.values():
                queue.clear()
        for request in refused:
            self._refuse(request)

    def _refuse(self, request: RangeRequest) -> None:
        request.future.set_exception(UnavailableError(f"cannot read {request.key}: the archive is closed"))

    def promote(self, request: RangeRequest, priority: Priority) -> None:
        """Move ``request`` to the queue of ``priority``, because a reader with that priority waits for it as well.
        Does nothing if it has started already, or waits in a faster queue."""
        with self._lock:
            if priority >= request.priority:
                return
            was = self._queues[request.priority]
            if request.started_in is None and request in was:
                was.remove(request)
                self._queues[priority].append(request)
            request.priority = priority
        self._pump()

    # -- starting ---------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start the waiting requests that the limits of concurrency and bandwidth allow.

        A request that ends at once calls this method again from inside: the flag makes that call return, so that the
        loop of the outer call continues instead of a recursion. Another thread's call returns for the same reason.
        """
        with self._lock:
            if self._is_pumping:
                return
            self._is_pumping = True
        while True:
            with self._lock:
                request, wake_s = self._next()
                if request is None:
                    self._is_pumping = False
                    break
            self._start(request)
        if wake_s is not None and self._timer is not None:
            self._timer.call_at(wake_s, partial(self._on_wake, wake_s))

    def _next(self) -> tuple[RangeRequest | None, float | None]:
        """Take the next request that may start now out of its queue, the fastest priority first: (request, None).

        (None, time): the bandwidth limit allows none before that time, in seconds of the monotonic clock, and the
        caller sets the timer to it. (None, None): nothing waits, the limits of concurrency are reached, or the timer
        is set already.
        """
        for priority in Priority:
            if not self._queues[priority] or self._in_flight[priority] >= self._limits[priority].concurrency:
                continue
            now_s, ready_s = self._clock.monotonic_s(), self._pace.ready_s()
            if ready_s > now_s:  # the rest of the rate belongs to this priority, not to a slower one
                if self._wake_s is not None and now_s < self._wake_s <= ready_s:
                    return None, None
                self._wake_s = ready_s
                return None, ready_s
            request = self._queues[priority].popleft()
            request.started_in = priority
            self._in_flight[priority] += 1
            self.counts[priority].requests += 1
            if request.length is not None:
                self._pace.take(request.length, now_s)
            return request, None
        return None, None

    def _on_wake(self, wake_s: float) -> None:
        with self._lock:
            if self._wake_s == wake_s:
                self._wake_s = None
        self._pump()

    def _start(self, request: RangeRequest) -> None:
        """Send a request that ``_next`` counted as in flight; ``_on_end`` gets its outcome, which is UnavailableError
        if the reader has been closed since."""
        try:
            if request.length is None:
                answer = self._reader.submit_get(request.key)
            else:
                answer = self._reader.submit(request.key, request.offset, request.length)
        except RuntimeError as error:  # the reader is closed
            failed: Future[Any] = new_future()
            failed.set_exception(UnavailableError(f"cannot read {request.key}: {error}"))
            answer = failed
        answer.add_done_callback(partial(self._on_end, request))

    def _on_end(self, request: RangeRequest, answer: Future[bytes]) -> None:
        """Count a request as ended, start the next ones, and only then give its outcome to the readers that wait for
        it, so that the store is not idle while the result is used."""
        priority = request.started_in
        assert priority is not None
        error = answer.exception()
        with self._lock:
            self._in_flight[priority] -= 1
            if error is None:
                self.counts[priority].byte_count += len(answer.result())
                if request.length is None:  # of a whole object the size is known only now
                    self._pace.take(len(answer.result()), self._clock.monotonic_s())
            else:
                self.counts[priority].failed += 1
        self._pump()
        if error is not None:
            request.future.set_exception(error)
        else:
            request.future.set_result(answer.result())


class ScheduledReader:
    """RangeReader at one priority, without a cache (queries, catalog pages). ``close`` closes nothing."""

    def __init__(self, scheduler: RequestScheduler, priority: Priority) -> None:
        self._scheduler = scheduler
        self._priority = priority

    def submit(self, key: str, offset: int, length: int) -> Future[bytes]:
        return self._scheduler.submit(RangeRequest(key, offset, length, self._priority))

    def submit_get(self, key: str) -> Future[bytes]:
        return self._scheduler.submit(RangeRequest(key, 0, None, self._priority))

    def close(self) -> None:
        """Nothing: the scheduler is shared."""
