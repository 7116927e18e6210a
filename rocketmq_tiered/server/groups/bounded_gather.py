"""Concurrent sub-requests of one request, a few at a time, and waiting for the first of several events.

Tools time out after some seconds, and each sub-request costs a request to a broker or an object store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE_MAX = 16


async def bounded_gather(call: Callable[[T], Awaitable[R]], items: Iterable[T]) -> list[R]:
    """``call`` of each item, in order. The first error cancels the rest and is raised."""
    turns = asyncio.Semaphore(AT_ONCE_MAX)

    async def one(item: T) -> R:
        async with turns:
            return await call(item)

    tasks = [asyncio.create_task(one(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when one of ``waits`` ends; the others are cancelled."""
    tasks = {asyncio.create_task(one) for one in waits}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
