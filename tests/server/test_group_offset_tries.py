"""Group offsets that cannot be written are tried again after a wait, and acknowledged only then."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rocketmq_tiered.server.groups import group_offsets
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog, load_snapshot
from tiered.errors import UnavailableError
from tiered.object_store.interface import Body
from tiered.object_store.memory import MemoryStore

WAIT_S = 0.05


class Away(MemoryStore):
    """Takes nothing for the next ``away`` puts; ``tries``: when each came."""

    def __init__(self) -> None:
        super().__init__()
        self.away = 0
        self.tries = 0

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self.tries += 1
        if self.away:
            self.away -= 1
            raise UnavailableError("the store is away")
        super().put_if_absent(key, body, timeout_s=timeout_s)


@pytest.mark.asyncio
async def test_a_write_that_fails_is_tried_again_after_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await real_sleep(0)

    real_sleep = asyncio.sleep
    store = Away()
    offsets = GroupOffsets(GroupLog(store, "me", lambda: 1_000_000), lease_ms=60_000)
    assert await offsets.claim()
    work = asyncio.create_task(offsets.run())
    await real_sleep(0)
    store.away, store.tries = 3, 0
    monkeypatch.setattr(group_offsets.asyncio, "sleep", sleep)
    await offsets.commit("g", "t", 0, 7)
    work.cancel()
    assert waits == [group_offsets.FLUSH_EVERY_S, *[group_offsets.RETRY_S] * 3]
    assert store.tries == 4
    assert load_snapshot(store).offsets == {("g", "t"): {0: 7}}


@pytest.mark.asyncio
async def test_a_commit_waits_as_long_as_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_offsets, "RETRY_S", WAIT_S)
    store = Away()
    offsets = GroupOffsets(GroupLog(store, "me", lambda: 1_000_000), lease_ms=60_000)
    await offsets.claim()
    work = asyncio.create_task(offsets.run())
    store.away = 1 << 30
    commit = asyncio.create_task(offsets.commit("g", "t", 0, 7))
    await asyncio.sleep(group_offsets.FLUSH_EVERY_S + 4 * WAIT_S)
    assert not commit.done()
    assert 1 <= store.tries - 1 <= 6
    assert offsets.durable("g", "t", 0) == 0
    assert offsets.find("g", "t", 0) == 7
    store.away = 0
    async with asyncio.timeout(10):
        await commit
    assert offsets.durable("g", "t", 0) == 7
    work.cancel()


class Gated(MemoryStore):
    """Puts wait at the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self.gate.wait(10)
        super().put_if_absent(key, body, timeout_s=timeout_s)


@pytest.mark.asyncio
async def test_the_same_offset_committed_while_it_is_written_is_acknowledged_soon() -> None:
    """Not only when the lease is renewed."""
    store = Gated()
    offsets = GroupOffsets(GroupLog(store, "me", lambda: 1_000_000), lease_ms=60_000)
    await offsets.claim()
    store.gate.clear()
    work = asyncio.create_task(offsets.run())
    first = asyncio.create_task(offsets.commit("g", "t", 0, 7))
    await asyncio.sleep(group_offsets.FLUSH_EVERY_S + 0.1)
    second = asyncio.create_task(offsets.commit("g", "t", 0, 7))
    await asyncio.sleep(0.05)
    assert not first.done() and not second.done()
    store.gate.set()
    async with asyncio.timeout(10):
        await asyncio.gather(first, second)
    work.cancel()


@pytest.mark.asyncio
async def test_a_new_group_takes_more_room_than_a_new_queue_of_a_known_one() -> None:
    one_group = group_offsets.KEY_BYTES + 2 * group_offsets.CHAR_BYTES + group_offsets.QUEUE_BYTES
    log = GroupLog(MemoryStore(), "me", lambda: 1_000_000)
    offsets = GroupOffsets(log, lease_ms=60_000, bytes_max=one_group + group_offsets.QUEUE_BYTES)
    await offsets.claim()
    offsets.note("g", "t", 0, 7)
    assert offsets.has_room("g", "t", 1)
    assert not offsets.has_room("h", "t", 0)
    offsets.note("g", "t", 1, 8)
    offsets.note("h", "t", 0, 9)
    assert [offsets.find("g", "t", 1), offsets.find("h", "t", 0)] == [8, None]
    assert not offsets.has_room("g", "t", 2)
    assert offsets.has_room("g", "t", 0)
