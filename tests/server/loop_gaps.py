"""How long an event loop leaves a callback waiting that is due every millisecond."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

EVERY_S = 0.001


class Gaps:
    """CPU seconds of the loop's thread between two ticks: a machine that is busy with others does not count."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []

    @property
    def worst_s(self) -> float:
        return max(self.cpu_s)


@asynccontextmanager
async def gaps() -> AsyncIterator[Gaps]:
    """Measured while the context lasts."""
    found = Gaps()

    async def tick() -> None:
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(EVERY_S)
            now_s = time.thread_time()
            found.cpu_s.append(now_s - last_s)
            last_s = now_s

    gc.collect()
    gc.disable()  # a full collection of a test run's objects takes longer than what is measured
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    try:
        yield found
        await asyncio.sleep(0.01)
    finally:
        ticking.cancel()
        gc.enable()
