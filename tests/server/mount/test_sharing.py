"""Which node serves which retired broker.

Groups that a node's lease keeps: no write while idle, and none acknowledged after another node has them.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import KIND as GROUPS_KIND
from rocketmq_tiered.server.groups.group_state import GroupLog, GroupSnapshot, decode_snapshot, load_snapshot
from rocketmq_tiered.server.mount.membership import Membership
from rocketmq_tiered.server.mount.node_lease import (
    BrokerName,
    MountRecord,
    NodeLease,
    NodeLog,
    NodeState,
    announce_archive,
    encode_lease,
    lapsed_leases,
    lease_key,
)
from rocketmq_tiered.server.mount.sharing import LEASE_S, SharingDecision, Sightings, decide_sharing
from tiered.clock import Clock
from tiered.errors import CorruptionError, FencedError
from tiered.formats import container
from tiered.formats.container import encode_container
from tiered.object_store.memory import MemoryStore

NODES = {f"n{number}" for number in range(4)}


def lease(
    node: str, *mounts: MountRecord, state: NodeState = NodeState.ACTIVE, version: int = 1
) -> NodeLease:
    return NodeLease(node, f"p-{node}", version, state, 0, mounts)


def held(number: int, queues: int = 8) -> MountRecord:
    return MountRecord("c", f"b{number}", "10.0.0.1:10940", queues=queues)


def leases_of(*found: NodeLease) -> dict[str, NodeLease]:
    return {one.node: one for one in found}


def test_free_brokers_go_to_the_node_with_the_least_load() -> None:
    leases = leases_of(lease("n1", held(0)), lease("n2"))
    announced = {BrokerName("c", f"b{number}"): 8 for number in range(4)}
    assert decide_sharing("n2", leases, announced, NODES).take == (
        BrokerName("c", "b1"),
        BrokerName("c", "b3"),
    )
    assert decide_sharing("n1", leases, announced, NODES).take == (BrokerName("c", "b2"),)


def test_a_draining_node_gives_everything_and_takes_nothing() -> None:
    leases = leases_of(lease("n1", held(0), state=NodeState.DRAINING), lease("n2"))
    announced = {BrokerName("c", "b0"): 8, BrokerName("c", "b1"): 8}
    assert decide_sharing("n1", leases, announced, NODES) == SharingDecision(give=(BrokerName("c", "b0"),))
    assert decide_sharing("n2", leases, announced, NODES).take == (BrokerName("c", "b1"),)


def test_a_broker_that_is_no_longer_announced_is_stopped() -> None:
    assert decide_sharing("n1", leases_of(lease("n1", held(0))), {}, NODES) == SharingDecision(
        give=(BrokerName("c", "b0"),)
    )


def test_a_new_node_gets_its_share_and_balance_comes_to_rest() -> None:
    announced = {BrokerName("c", f"b{number}"): 8 for number in range(20)}
    nodes: dict[str, list[MountRecord]] = {"n1": [held(n) for n in range(20)], "n2": [], "n3": []}
    for _ in range(12):
        decisions = {node: decide_sharing(node, _leases(nodes), announced, NODES) for node in nodes}
        for node, decision in decisions.items():
            nodes[node] = [record for record in nodes[node] if record.name not in decision.give]
        taken = {node: decide_sharing(node, _leases(nodes), announced, NODES).take for node in nodes}
        for node, names in taken.items():
            nodes[node] += [MountRecord(*name, "10.0.0.1:10940", queues=8) for name in names]
    assert sorted(len(records) for records in nodes.values()) == [6, 7, 7]
    assert all(decide_sharing(node, _leases(nodes), announced, NODES) == SharingDecision() for node in nodes)


def _leases(nodes: Mapping[str, list[MountRecord]]) -> dict[str, NodeLease]:
    return {node: lease(node, *records) for node, records in nodes.items()}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 500)), max_size=30), st.integers(0, 30))
def test_nodes_with_one_view_take_each_broker_once(found: list[tuple[int, int]], free: int) -> None:
    nodes: dict[str, list[MountRecord]] = {f"n{number}": [] for number in range(3)}
    for number, (node, queues) in enumerate(found):
        nodes[f"n{node}"].append(held(number, queues))
    announced = {BrokerName("c", f"b{number}"): 8 for number in range(len(found) + free)}
    decisions = [decide_sharing(node, _leases(nodes), announced, NODES) for node in nodes]
    taken = [name for decision in decisions for name in decision.take]
    assert sorted(taken) == sorted(
        BrokerName("c", f"b{number}") for number in range(len(found), len(found) + free)
    )


def test_a_node_is_silent_when_its_lease_stood_for_the_time_of_a_lease() -> None:
    sightings = Sightings()
    sightings.note(leases_of(lease("n1"), lease("n2")), 0.0, 1.0)
    sightings.note(leases_of(lease("n1"), lease("n2")), 5.0, 5.1)
    sightings.note(leases_of(lease("n1", version=2), lease("n2")), LEASE_S, LEASE_S + 0.1)
    assert sightings.silent() == []  # the first reading ended at 1.0
    sightings.note(leases_of(lease("n1", version=2), lease("n2")), LEASE_S + 1, LEASE_S + 1)
    assert sightings.silent() == ["n2"]


def test_a_process_that_stood_still_says_nothing_of_others() -> None:
    """They could not renew either if it was the store that did not reply."""
    sightings = Sightings()
    sightings.note(leases_of(lease("n1")), 0.0, 0.1)
    sightings.note(leases_of(lease("n1")), LEASE_S + 10, LEASE_S + 10.1)
    assert sightings.silent() == []


def test_nothing_is_given_while_a_broker_is_opened() -> None:
    leases = leases_of(lease("n1", *map(held, range(4))), lease("n2", MountRecord("c", "b4", queues=8)))
    announced = {BrokerName("c", f"b{number}"): 8 for number in range(5)}
    assert decide_sharing("n1", leases, announced, NODES) == SharingDecision()
    leases["n2"] = lease("n2", held(4))
    assert decide_sharing("n1", leases, announced, NODES).give == (BrokerName("c", "b0"),)


LEASE_MS = 60_000


def log_of(store: MemoryStore, member: Membership) -> GroupLog:
    return GroupLog(
        store, member.node, Clock(wall_ms=lambda: 1), lease=member.lease, has_lapsed=lapsed_leases(store)
    )


def member_of(store: MemoryStore, name: str, now_s: Callable[[], float] = lambda: 0.0) -> Membership:
    member = Membership(store, name, Clock(monotonic_s=now_s, wall_ms=lambda: 1))
    member.step(NodeState.ACTIVE, [])
    return member


async def committed_in(store: MemoryStore) -> tuple[Membership, GroupOffsets, asyncio.Task[None]]:
    """A node that holds the groups, whose offset 5 of g is committed, and the task of its groups."""
    member = member_of(store, "n1")
    offsets = GroupOffsets(log_of(store, member), lease_ms=LEASE_MS, node_holds=member.holds)
    await offsets.claim()
    task = asyncio.create_task(offsets.run())
    await offsets.commit("g", "t", 0, 5)
    return member, offsets, task


async def test_an_idle_holder_writes_nothing_and_holds_while_its_node_does() -> None:
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


async def test_a_holder_whose_groups_were_taken_refuses_commits() -> None:
    store = MemoryStore()
    first, offsets, task = await committed_in(store)
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


def test_a_server_without_a_lease_does_not_take_what_a_node_holds() -> None:
    store = MemoryStore()
    log_of(store, member_of(store, "n1")).claim(0)
    with pytest.raises(FencedError):
        GroupLog(store, "tiered serve", Clock(wall_ms=lambda: 10**12)).claim(LEASE_MS)
    GroupLog(store, "tiered serve", Clock(wall_ms=lambda: 10**12)).claim(LEASE_MS, take_over=True)


async def test_a_forged_end_of_a_lease_takes_the_groups_and_no_offset_is_acknowledged_twice() -> None:
    """An account that writes leases of other nodes can move a broker: see THREATS.md."""

    store = MemoryStore()
    first, offsets, task = await committed_in(store)
    newest = NodeLog(store, "", Clock(wall_ms=lambda: 0)).newest()["n1"]
    forged = replace(newest, version=newest.version + 1, state=NodeState.ENDED)
    store.put_if_absent(lease_key("n1", forged.version), [encode_lease(forged)])
    successor = log_of(store, member_of(store, "n2"))
    successor.claim(0)
    assert successor.offsets == {("g", "t"): {0: 5}}
    with pytest.raises(FencedError):
        await offsets.commit("g", "t", 0, 6)
    assert not offsets.is_owner and not offsets.holds_lease
    with pytest.raises(FencedError):
        first.step(NodeState.ACTIVE, [])
    first.step(NodeState.ACTIVE, [])  # joins again above the forged lease
    assert first.holds() and NodeLog(store, "", Clock(wall_ms=lambda: 0)).newest()["n1"].lease == first.lease
    task.cancel()


@pytest.mark.parametrize(
    "locks", [[[1]], [[[], [], [], [], []]], [["g", "b", "t", "x", "c"]], 7, {"a": 1}, "text"]
)
def test_forged_locks_that_are_handed_over_are_a_damaged_snapshot(locks: object) -> None:
    header = vars(GroupSnapshot()) | {"locks": locks, "offsets": []}
    with pytest.raises(CorruptionError, match="this snapshot of the consumer groups' offsets is damaged"):
        decode_snapshot(encode_container(GROUPS_KIND, header, {}), source="a snapshot")


def test_objects_that_others_plant_are_no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now_s = MemoryStore(), [0.0]
    member, other = (member_of(store, name, lambda: now_s[0]) for name in ("n1", "n2"))
    forged = encode_lease(NodeLease("n1", "forged", 9, NodeState.ACTIVE, 0))
    with monkeypatch.context() as patched:
        patched.setattr(container, "FORMAT_MAJOR", 2)
        newer = encode_lease(lease("n2", version=999))
    strange = {
        lease_key("evil", 1): b"garbage",
        lease_key("evil", 2): forged,
        lease_key("n1", 2): b"garbage",
        lease_key("n1", 999): b"garbage",
        lease_key("n2", 999): newer,
    }
    for key, data in strange.items():
        store.put_if_absent(key, [data])
    store.put_if_absent("mount.archives/c/other", [b"garbage"])
    for number in range(3):
        store.put_if_absent(lease_key(f"fake{number}", 1), [encode_lease(lease(f"fake{number}"))])
    for name in ("b0", "b1", "b2"):
        announce_archive(store, BrokerName("c", name), 8)
    for _ in range(6):
        now_s[0] += 4
        decisions = [one.step(NodeState.ACTIVE, []) for one in (member, other)]
    assert set(member.strangers) == set(strange) - {lease_key("n1", 2)}, "removed with older leases"
    assert not any(node.startswith("fake") and found.is_living for node, found in member.leases.items())
    assert [len(one.take) for one in decisions] == [2, 1] or [len(one.take) for one in decisions] == [1, 2]
    assert lapsed_leases(store)("n1/earlier") and not lapsed_leases(store)("n2/earlier"), "n2 may be newer"
    assert other.lease and lapsed_leases(store)(member.lease) is False
