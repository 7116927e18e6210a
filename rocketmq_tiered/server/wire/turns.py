"""Turns of clients at work that may hold the event loop, in rotation: a client with much of it waits for itself;
sub-requests of one request, a few at a time; and coroutines that start at once instead of in the next iteration of the
loop.

A pull answered from memory never waits: started eagerly it costs no task, no callback and no loop iteration. asyncio
has this from Python 3.12 on. For 3.11 the first step runs outside a task, and the rest becomes one. Belongs to one
event loop.
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fetcher.io.waiting import new_future


def begin(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run ``coroutine`` up to its first wait, and return the rest as a task; None if it finished without waiting. An
    error before the first wait is raised here.

    On Python 3.11 ``asyncio.current_task()`` is another task until the first wait.
    """
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12):
        task = asyncio.Task(coroutine, loop=loop, eager_start=True)
        if not task.done():
            return task
        task.result()
        return None
    try:
        wait = coroutine.send(None)
    except StopIteration:
        return None
    return loop.create_task(_rest(coroutine, wait))


async def _rest(coroutine: Coroutine[Any, Any, None], wait: Any) -> None:
    await _Begun(coroutine, wait)


class _Begun:
    """Awaits the rest of a coroutine that is waiting for ``wait``."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], wait: Any) -> None:
        self._coroutine, self._wait = coroutine, wait

    def __await__(self) -> Generator[Any, Any, None]:
        """Pass on what the coroutine waits for to the task that awaits this object, and pass results and errors back,
        until the coroutine has finished."""
        coroutine, wait = self._coroutine, self._wait
        try:
            while True:
                try:
                    value = yield wait
                except BaseException as error:
                    wait = coroutine.throw(error)
                else:
                    wait = coroutine.send(value)
        except StopIteration:
            return
        finally:
            coroutine.close()


T = TypeVar("T")
R = TypeVar("R")

AT_ONCE_MAX = 16


async def bounded_gather(call: Callable[[T], Awaitable[R]], items: Iterable[T]) -> list[R]:
    """Return the results of ``call`` for each item, in the order of the items; AT_ONCE_MAX calls run at once. The first
    error cancels the other calls and is raised."""
    slots = asyncio.Semaphore(AT_ONCE_MAX)

    async def call_in_slot(item: T) -> R:
        async with slots:
            return await call(item)

    tasks = [asyncio.create_task(call_in_slot(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when one of ``waits`` ends; the others are cancelled."""
    tasks = {asyncio.create_task(wait) for wait in waits}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


SHARE_S = 0.008


class _Rotation:
    """Futures of clients, taken from one client after the other."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[tuple[Future[None], int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, client: int, cost: int = 1) -> Future[None]:
        future: Future[None] = new_future()
        self._waiting.setdefault(client, deque()).append((future, cost))
        return future

    def take(self) -> tuple[Future[None], int]:
        client = next(iter(self._waiting))
        waiting = self._waiting.pop(client)
        taken = waiting.popleft()
        if waiting:
            self._waiting[client] = waiting
        return taken


class Turns:
    """Gives turns to the tasks that wait: in each iteration of the event loop to as many as cost ``most`` together, at
    least one. ``shares_max``: after a long iteration up to so many times ``most``, once for each SHARE_S, so that
    requests without turns do not starve those with."""

    def __init__(self, most: int = 1, shares_max: int = 1) -> None:
        self._most, self._shares_max = most, shares_max
        self._waiting = _Rotation()
        self._next: asyncio.Handle | None = None
        self._taken_s = 0.0

    def turn(self, client: int, cost: int = 1) -> Future[None]:
        """Return a future that is done when it is the client's turn, in a later iteration of the event loop. ``cost``:
        how much of an iteration the work takes."""
        future = self._waiting.add(client, cost)
        if self._next is None:
            self._taken_s = time.monotonic()
            self._next = asyncio.get_running_loop().call_soon(self._take)
        return future

    def _take(self) -> None:
        """Give turns to waiting clients in this iteration of the event loop; more of them if the iteration before took
        long, as requests that wait for no turn then took its time."""
        now_s = time.monotonic()
        left = self._most * max(1, min(self._shares_max, int((now_s - self._taken_s) / SHARE_S)))
        self._taken_s = now_s
        while self._waiting and left > 0:
            future, cost = self._waiting.take()
            future.set_result(None)
            left -= cost
        self._next = asyncio.get_running_loop().call_soon(self._take) if self._waiting else None


class Slots:
    """``count`` at a time."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting = _Rotation()

    @asynccontextmanager
    async def slot(self, client: int) -> AsyncIterator[None]:
        """Wait for one of the slots, clients in rotation, and hold it for as long as the context lasts."""
        if self._free:
            self._free -= 1
        else:
            future = self._waiting.add(client)
            try:
                await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                # It stays in the rotation, and passes its slot on when it gets it.
                future.add_done_callback(lambda _: self._release())
                raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        if self._waiting:
            self._waiting.take()[0].set_result(None)
        else:
            self._free += 1
