"""Many questions of one request asked at once, a few at a time: who asks waits for all of them together.

A tool gives up after some seconds; a question costs a request to a broker or an object store. Owns the bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE_MAX = 16


async def bounded_gather(
    ask: Callable[[T], Awaitable[R]], items: Iterable[T], at_once_max: int = AT_ONCE_MAX
) -> list[R]:
    """What ``ask`` says of each, in order. The first error ends all that is left, and is raised."""
    turns = asyncio.Semaphore(at_once_max)

    async def one(item: T) -> R:
        async with turns:
            return await ask(item)

    tasks = [asyncio.create_task(one(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
