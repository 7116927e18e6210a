"""Turns of clients at work that may hold the event loop, in rotation: a client with much of it waits for itself.

Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager

from fetcher.io.waiting import new_future

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
    """In each iteration of the loop those that cost ``most`` together, at least one. ``shares_max``: after a long
    iteration so many times ``most``, one for each SHARE_S, so that requests without turns do not starve those with."""

    def __init__(self, most: int = 1, shares_max: int = 1) -> None:
        self._most, self._shares_max = most, shares_max
        self._waiting = _Rotation()
        self._next: asyncio.Handle | None = None
        self._taken_s = 0.0

    def turn(self, client: int, cost: int = 1) -> Future[None]:
        """Done when it is the client's turn, in a later iteration."""
        future = self._waiting.add(client, cost)
        if self._next is None:
            self._taken_s = time.monotonic()
            self._next = asyncio.get_running_loop().call_soon(self._take)
        return future

    def _take(self) -> None:
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
        """One of them, for as long as the context lasts."""
        if self._free:
            self._free -= 1
        else:
            future = self._waiting.add(client)
            try:
                await asyncio.wrap_future(future)
            except asyncio.CancelledError:
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
