"""How the reading core waits: coroutines that await nothing but ``Wait``, and their drivers.

The core is ``async def`` without threads or an event loop. ``run_sync`` blocks the calling thread, ``run_async`` runs
in asyncio, a simulation steps coroutines by a virtual clock. A coroutine that finds everything in memory never
yields, so it costs no switch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Executor(Protocol):
    """Where CPU work of the core runs: a thread pool, or InlineExecutor."""

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``work`` some time; the future has its result or error."""
        ...


class InlineExecutor:
    """Runs work in the thread that submits it: for simulations and one-shot commands."""

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See Executor. Done when it returns."""
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
        future = self.future
        if not future.done():
            yield self
        try:
            return future.result()
        finally:
            # An error refers to this frame: without this it would refer to itself, and to all its readers' blocks.
            del self, future


class _Bell:
    """The coroutines of a gather that can continue. Rung from any thread."""

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
    """Results of ``coroutines``, run concurrently, in their order. The first error closes the others and is raised."""
    coroutines = list(coroutines)
    results: dict[int, T] = {}
    bell = _Bell()

    def step(number: int) -> None:
        try:
            wait: Wait[Any] = coroutines[number].send(None)
        except StopIteration as stop:
            results[number] = stop.value
        else:
            wait.future.add_done_callback(partial(bell.ring, number))

    try:
        for number in range(len(coroutines)):
            step(number)
        while len(results) < len(coroutines):
            step(await bell.next())
    finally:
        for coroutine in coroutines:
            coroutine.close()
    return [results[number] for number in range(len(coroutines))]


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the core to its end; the calling thread blocks while it waits."""
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
    """Run a coroutine of the core inside asyncio. Cancelling leaves what it waits for to others."""
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
