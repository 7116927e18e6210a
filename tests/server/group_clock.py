"""A clock set by hand and a running group table."""

import asyncio
import threading
import time

from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import (
    GroupLog,
)
from tiered.clock import Clock
from tiered.object_store.interface import Body
from tiered.object_store.memory import MemoryStore

LEASE_MS = 60_000


class Time:
    """Milliseconds set by hand."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


class Slow(MemoryStore):
    """Puts wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_continue = threading.Event(), threading.Event()
        self.may_continue.set()
        self.is_overtaken = False

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self.begun.set()
        if not self.may_continue.is_set() and not self.is_overtaken:
            assert self.may_continue.wait(10)
            time.sleep(0.1 if self.is_overtaken else 0)  # as a request that is sent again
        super().put_if_absent(key, body, timeout_s=timeout_s)


async def writing() -> tuple[Slow, GroupOffsets, asyncio.Task[None]]:
    """Offset 5 of (g, t) and queue 0 on its way into a store that has not answered, and what writes it."""
    store = Slow()
    offsets = GroupOffsets(GroupLog(store, "one", Clock(wall_ms=Time())), lease_ms=LEASE_MS)
    assert await offsets.claim()
    running = asyncio.create_task(offsets.run())
    store.begun.clear()
    store.may_continue.clear()
    offsets.note("g", "t", 0, 5)
    assert await asyncio.to_thread(store.begun.wait, 10)
    return store, offsets, running
