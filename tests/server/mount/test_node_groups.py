"""Groups that a node's lease keeps: no write while idle, and none acknowledged after another node has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog, load_snapshot
from rocketmq_tiered.server.mount.membership import Membership
from rocketmq_tiered.server.mount.node_lease import NodeState, lapsed_leases
from tiered.errors import FencedError
from tiered.object_store.memory import MemoryStore

LEASE_MS = 60_000


def log_of(store: MemoryStore, member: Membership) -> GroupLog:
    return GroupLog(store, member.node, lambda: 1, lease=member.lease, has_lapsed=lapsed_leases(store))


def member_of(store: MemoryStore, name: str, now_s: Callable[[], float] = lambda: 0.0) -> Membership:
    member = Membership(store, name, now_s, lambda: 1)
    member.step(NodeState.ACTIVE, [])
    return member


def test_an_idle_holder_writes_nothing_and_holds_while_its_node_does() -> None:
    async def story() -> None:
        store, now_s = MemoryStore(), [0.0]
        member = member_of(store, "n1", lambda: now_s[0])
        offsets = GroupOffsets(log_of(store, member), lease_ms=30, node_holds=member.holds)
        assert await offsets.claim()
        task = asyncio.create_task(offsets.run())
        await asyncio.sleep(0.2)
        assert load_snapshot(store).version == 1 and offsets.holds_lease and offsets.may_pop
        now_s[0] = 60.0
        assert not offsets.holds_lease and not offsets.may_pop
        task.cancel()

    asyncio.run(story())


def test_a_holder_whose_groups_were_taken_refuses_commits() -> None:
    async def story() -> None:
        store = MemoryStore()
        first = member_of(store, "n1")
        offsets = GroupOffsets(log_of(store, first), lease_ms=LEASE_MS, node_holds=first.holds)
        await offsets.claim()
        task = asyncio.create_task(offsets.run())
        await offsets.commit("g", "t", 0, 5)
        with pytest.raises(FencedError):
            log_of(store, member_of(store, "n2")).claim(0)
        again = member_of(store, "n1")  # a new process of the same name ends the first one's lease
        successor = log_of(store, again)
        successor.claim(0)
        assert successor.locks is None and successor.offsets == {("g", "t"): {0: 5}}
        with pytest.raises(FencedError):
            await offsets.commit("g", "t", 0, 6)
        assert not offsets.is_owner
        with pytest.raises(FencedError):
            first.step(NodeState.ACTIVE, [])
        task.cancel()

    asyncio.run(story())


def test_a_server_without_a_lease_does_not_take_what_a_node_holds() -> None:
    store = MemoryStore()
    log_of(store, member_of(store, "n1")).claim(0)
    with pytest.raises(FencedError):
        GroupLog(store, "tiered serve", lambda: 10**12).claim(LEASE_MS)
    GroupLog(store, "tiered serve", lambda: 10**12).claim(LEASE_MS, take_over=True)
