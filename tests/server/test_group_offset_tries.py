"""Group offsets that cannot be written are tried again after a wait, and acknowledged only then."""

from __future__ import annotations

import asyncio

import pytest

from rocketmq_tiered.server.groups import group_offsets
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog
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
