"""How the reading core waits: coroutines that await nothing but ``Wait``, their drivers, and what they wait for.

The core is ``async def`` without threads or an event loop. ``run_sync`` blocks the calling thread, ``run_async`` runs
in asyncio, ``Background`` runs prefetch in an executor, a simulation steps coroutines by a virtual clock. A coroutine
that finds everything in memory never yields, so it costs no switch. Executors and timers are injected, so that a
simulation has one clock. A read that may take long waits for slices of time (``SlicePace``): between them the event
loop serves others.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Executor(Protocol):
    """Where CPU work of the core runs: a thread pool, or InlineExecutor."""

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``work`` now or later; the future gets its result or its error."""
        ...


class InlineExecutor:
    """Runs work in the thread that submits it: for simulations and one-shot commands."""

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``work`` before returning; the future has its result or its error."""
        future: Future[T] = new_future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def new_future() -> Future[Any]:
    """A future that cannot be cancelled: several readers may wait for it, and one that leaves must not hurt."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class Wait(Generic[T]):
    """Awaitable over a concurrent future: its result or its error, without a switch when it is done."""

    __slots__ = ("future",)

    def __init__(self, future: Future[T]) -> None:
        self.future = future

    def __await__(self) -> Generator[Wait[T], None, T]:
        """Give the result of the future, or raise its error. If it is not done, yield this object once to the driver
        of the coroutine (``run_sync``, ``run_async``), which continues the coroutine when it is."""
        future = self.future
        if not future.done():
            yield self
        try:
            return future.result()
        finally:
            # An error refers to this frame: without this it would refer to itself, and to all its readers' blocks.
            del self, future


class _Bell:
    """Tells ``gather`` which of its coroutines can continue: futures ring it from any thread, with the coroutine's
    number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rung: deque[int] = deque()
        self._heard: Future[None] | None = None

    def ring(self, number: int, _done: Future[Any]) -> None:
        with self._lock:
            self._rung.append(number)
            heard, self._heard = self._heard, None
        if heard is not None:
            heard.set_result(None)

    async def next(self) -> int:
        """The next coroutine that can continue."""
        while True:
            with self._lock:
                if self._rung:
                    return self._rung.popleft()
                self._heard = heard = new_future()
            await Wait(heard)


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run ``coroutines`` of the core concurrently and return their results in the order given. The first error is
    raised, and the other coroutines are closed.

    Each coroutine runs until it waits for a future; the future's completion puts its number on the bell, and this
    loop then continues that coroutine.
    """
    coroutines = list(coroutines)
    results: dict[int, T] = {}
    bell = _Bell()

    def run_until_wait(number: int) -> None:
        try:
            wait: Wait[Any] = coroutines[number].send(None)
        except StopIteration as stop:
            results[number] = stop.value
        else:
            wait.future.add_done_callback(partial(bell.ring, number))

    try:
        for number in range(len(coroutines)):
            run_until_wait(number)
        while len(results) < len(coroutines):
            run_until_wait(await bell.next())
    finally:
        for coroutine in coroutines:
            coroutine.close()
    return [results[number] for number in range(len(coroutines))]


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the core to its end and return its result; the calling thread blocks whenever the coroutine
    waits for a future."""
    try:
        while True:
            try:
                wait: Wait[Any] = coroutine.send(None)
            except StopIteration as stop:
                result: T = stop.value
                return result
            wait.future.exception()  # blocks; the coroutine itself looks at the outcome
    finally:
        coroutine.close()


async def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the core to its end from asyncio and return its result. If the asyncio task is cancelled, the
    coroutine is closed, but the requests it waited for continue, because other readers may wait for them too."""
    import asyncio  # 0.07 s, needed by no command

    loop = asyncio.get_running_loop()
    try:
        while True:
            try:
                wait: Wait[Any] = coroutine.send(None)
            except StopIteration as stop:
                result: T = stop.value
                return result
            woken = loop.create_future()
            wait.future.add_done_callback(partial(_wake, loop, woken))
            await woken
    finally:
        coroutine.close()


def _wake(loop: Any, woken: Any, _done: Future[Any]) -> None:
    if not loop.is_closed():  # a closed loop has no reader to wake
        loop.call_soon_threadsafe(_set_woken, woken)


def _set_woken(woken: Any) -> None:
    if not woken.done():
        woken.set_result(None)


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
        """Begin ``work``. With ``inline`` this thread runs it up to its first wait, so that its first requests have
        been sent when this returns; otherwise the executor does."""
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
        """Let the executor continue ``work``, because the future it waited for is done. After ``close`` the work is
        dropped instead."""
        with self._lock:
            if work not in self._running:
                work.close()
                return
        try:
            self._executor.submit(self._step, work)
        except RuntimeError:  # the executor was shut down first
            self._end(work)

    def _step(self, work: Work) -> None:
        """Continue ``work`` up to its next wait. An error ends the work and is logged, because a failed prefetch must
        not fail a reader."""
        try:
            wait = work.send(None)
        except StopIteration:
            self._end(work)
        except Exception:
            logger.exception(
                "prefetch failed unexpectedly: readers fetch the blocks themselves, which is slower"
            )
            self._end(work)
        else:
            wait.future.add_done_callback(lambda done: self._submit(work, done))

    def _end(self, work: Work) -> None:
        with self._lock:
            self._running.discard(work)
        work.close()

    def close(self) -> None:
        """Start no further work; work that waits for requests is dropped when these end. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._running.clear()


SLICE_S: Final = 0.002
READ_S: Final = 0.04


class Turn(Wait[None]):
    """Waits for a slice, not for data."""


class SlicePace:
    """Slices of SLICE_S, waits for data included, together READ_S. ``turn``: a future that is done when a slice may
    begin."""

    def __init__(self, turn: Callable[[], Future[None]]) -> None:
        self._turn = turn
        self._slices = round(READ_S / SLICE_S)
        self._ends_s = float("-inf")

    @property
    def is_over(self) -> bool:
        """Whether the slice has ended, or none has begun."""
        return time.perf_counter() >= self._ends_s

    async def next_slice(self) -> bool:
        """Wait until this read may use its next slice of SLICE_S seconds; False if it has used all that READ_S
        allows."""
        if not self._slices:
            return False
        self._slices -= 1
        await Turn(self._turn())
        self._ends_s = time.perf_counter() + SLICE_S
        return True


def check_process(process_id: int) -> None:
    """Raises RuntimeError, as a pool that is shut down does, if this process is not the one with ``process_id``: it is
    a forked child, which has none of the threads that read."""
    if os.getpid() != process_id:
        raise RuntimeError("archive opened before a fork: open it in the child process")


class Threads(ThreadPoolExecutor):
    """A pool that refuses work after a fork: the child has none of its threads, and would wait for them for ever."""

    def __init__(self, count: int, *, name: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        self._process_id = os.getpid()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Hands ``fn`` to a thread. Raises RuntimeError after ``shutdown``, and in a forked child, which has no
        threads."""
        check_process(self._process_id)
        return super().submit(fn, *args, **kwargs)


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
        """Calls ``callback`` in the timer's thread at the monotonic time ``when_s``; never after ``close``."""
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
                LOG.exception(
                    "a delayed start of archive reads failed unexpectedly; later ones are started as before"
                )

    def _next(self) -> Callable[[], None] | None:
        """Wait until the earliest call of the heap is due and take it out; None once the timer is closed."""
        with self._changed:
            while not self._is_closed:
                if not self._calls:
                    self._changed.wait()
                elif (left_s := self._calls[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    return heapq.heappop(self._calls)[2]
            return None
