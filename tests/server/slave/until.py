"""Waits for a condition."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float = 5) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what a real connection did is seen by looking
            await asyncio.sleep(0.005)
