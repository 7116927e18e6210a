"""Simulated nodes share retired brokers: no two acknowledge a commit of the same group and queue, whatever fails.

Three nodes that share retired brokers in a simulated store: pauses, partitions, crashes, lost replies, skewed
clocks.

The nodes run the real `Membership` and `GroupLog`. While a node pauses inside a request, the others run on. Owns the
world and what must hold in it: a commit that was acknowledged is in every later version of the groups, and two clients
never trust locks of one queue at the same time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from rocketmq_tiered.server.groups.group_state import GroupLog, load_snapshot
from rocketmq_tiered.server.groups.queue_locks import TRUST_S, LockTable, MessageQueue
from rocketmq_tiered.server.mount.membership import Membership
from rocketmq_tiered.server.mount.node_lease import (
    BrokerName,
    MountRecord,
    NodeLease,
    NodeState,
    announce_archive,
    encode_lease,
    lapsed_leases,
    lease_key,
)
from tiered.errors import AlreadyExistsError, FencedError, TieredError, UnavailableError
from tiered.object_store.interface import Body, ObjectInfo, ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.wrapper import StoreWrapper

SEEDS = 120


def test_no_two_holders_acknowledge() -> None:
    commits = moves = 0
    for seed in range(SEEDS):
        world = World(seed, is_attacked=seed % 2 == 1)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        commits += world.commits
        moves += world.moves
    assert commits > 20 * SEEDS and moves > 3 * SEEDS


@pytest.mark.soak
def test_no_two_holders_acknowledge_in_many_worlds() -> None:
    for seed in range(SEEDS, SEEDS + 10_000):
        World(seed, is_attacked=seed % 2 == 1).run()


BROKERS = [BrokerName("c", f"b{number}") for number in range(2)]
KEY = ("group", "topic")
FAULTS_END_S = 50.0
SETTLED_S = 50.0


class FaultyStore(StoreWrapper):
    """A node's way to the store."""

    def __init__(self, store: ObjectStore, world: World, node: SimulatedNode) -> None:
        super().__init__(store)
        self._world, self._node = world, node

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self._world.fault(self._node)
        self._store.put_if_absent(key, body, timeout_s=timeout_s)
        self._world.fault(self._node)

    def get(self, key: str, max_bytes: int = 1 << 30) -> bytes:
        self._world.fault(self._node)
        return self._store.get(key, max_bytes)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        self._world.fault(self._node)
        return self._store.list(prefix, start_after=start_after, limit=limit)

    def delete(self, keys: Sequence[str]) -> None:
        self._world.fault(self._node)
        self._store.delete(keys)


@dataclass
class Held:
    """A broker as a node serves it."""

    log: GroupLog
    lease: str
    locks: LockTable
    locks_from_s: float


@dataclass
class SimulatedNode:
    """``rate`` and ``offset_s``: its clock against the world's. Until ``paused_until_s`` it does not run."""

    world: World
    name: str
    rate: float
    offset_s: float
    paused_until_s: float = 0.0
    cut_until_s: float = 0.0
    next_s: float = 0.0
    process: int = 0
    held: dict[BrokerName, Held] = field(default_factory=dict)
    member: Membership = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def now_s(self) -> float:
        return self.world.time_s * self.rate + self.offset_s

    def start(self) -> None:
        """As a new process."""
        self.process += 1
        self.held = {}
        self.store = FaultyStore(self.world.store, self.world, self)
        wall = lambda: int(self.now_s() * 1000)  # noqa: E731
        self.member = Membership(self.store, self.name, self.now_s, wall)

    def run(self) -> None:
        """One round: renew, act, and answer clients."""
        process = self.process
        self.next_s = self.world.time_s + self.world.random.uniform(1.0, 6.0)
        try:
            records = [MountRecord(*name, address=f"{self.name}:{process}", queues=4) for name in self.held]
            decision = self.member.step(NodeState.ACTIVE, records)
            for name in decision.give:
                held = self.held.pop(name, None)
                if held is not None:
                    self.release(name, held)
            for name in decision.take:
                if process == self.process:
                    self.take(name)
        except FencedError:
            if process == self.process:
                self.held = {}
        except TieredError:
            pass
        if process == self.process:
            self.serve()

    def release(self, name: BrokerName, held: Held) -> None:
        held.log.locks = held.locks.held() if self.now_s() >= held.locks_from_s else None
        try:
            held.log.write(held.log.offsets, released=True)
        except UnavailableError:
            self.member.claiming.add(name)
        except FencedError:
            return

    def take(self, name: BrokerName) -> None:
        member, lease = self.member, self.member.lease
        log = GroupLog(
            PrefixedStore(self.store, "/".join(name)),
            self.name,
            lambda: int(self.now_s() * 1000),
            lease=lease,
            has_lapsed=lapsed_leases(self.store),
        )
        acknowledged = self.world.acknowledged.get(name, 0)
        try:
            log.claim(60_000)
        except UnavailableError:
            return
        except FencedError:
            member.claiming.discard(name)
            return
        self.world.claimed(name, log, acknowledged)
        member.claiming.discard(name)
        if member is self.member:
            locks = LockTable(self.now_s)
            locks.restore(log.locks or ())
            self.held[name] = Held(log, lease, locks, self.now_s() + TRUST_S * (log.locks is None))

    def serve(self) -> None:
        """A commit and a lock request of one of two clients, for each broker held."""
        for name, held in list(self.held.items()):
            holds = self.member.lease == held.lease and self.member.holds()
            if holds and self.now_s() >= held.locks_from_s:
                client = self.world.random.choice(("a", "b"))
                if held.locks.lock(KEY[0], client, [MessageQueue(name.broker, KEY[1], 0)]):
                    self.world.grant(name, client)
            offset = self.world.next_offset()
            try:
                held.log.write({KEY: {0: offset}})
            except FencedError:
                self.held.pop(name, None)
            except TieredError:
                continue  # without a reply: not acknowledged
            else:
                self.world.acknowledge(name, held.log, offset)


class World:
    """One seed. ``run`` raises AssertionError for what must not happen. ``is_attacked``: an account with the rights of
    a node plants objects while there are faults."""

    def __init__(self, seed: int, *, is_attacked: bool) -> None:
        self.random = random.Random(seed)
        self.is_attacked = is_attacked
        self.store = MemoryStore()
        self.time_s = 0.0
        self.acknowledged: dict[BrokerName, int] = {}
        self.claims: dict[BrokerName, list[tuple[int, GroupLog]]] = {name: [] for name in BROKERS}
        self.granted: dict[BrokerName, tuple[str, float]] = {}
        self.commits = 0
        self.moves = 0
        self._offset = 0
        self._running: list[SimulatedNode] = []
        for name in BROKERS:
            announce_archive(self.store, name, 4)
        self.nodes = [
            SimulatedNode(self, f"n{number}", self.random.uniform(0.99, 1.01), self.random.uniform(-1e6, 1e6))
            for number in range(3)
        ]

    def run(self) -> None:
        """Faults for a while, then none: every broker has one holder in the end."""
        self._until(FAULTS_END_S + SETTLED_S)
        held = [Counter(name for node in self.nodes for name in node.held)[name] for name in BROKERS]
        assert held == [1] * len(BROKERS), {node.name: list(node.held) for node in self.nodes}
        assert all(len(node.held) <= 1 for node in self.nodes), "not balanced"
        for name, offset in self.acknowledged.items():
            assert self.offset_of(name) >= offset

    def _until(self, end_s: float) -> None:
        """Let nodes that do nothing run, in the order of their times."""
        while True:
            ready = [node for node in self.nodes if node not in self._running]
            node = min(ready, key=lambda node: max(node.next_s, node.paused_until_s), default=None)
            at_s = end_s if node is None else max(node.next_s, node.paused_until_s)
            if node is None or at_s >= end_s:
                self.time_s = max(self.time_s, end_s)
                return
            self.time_s = max(self.time_s, at_s)
            self._running.append(node)
            self._crash_or_run(node)
            self._running.remove(node)

    def _attack(self) -> None:
        """Plant an object that no node wrote."""
        version, victim = self.random.randrange(1, 10**6), self.random.choice(self.nodes)
        if victim.name in victim.member.leases and self.random.random() < 0.5:
            version = victim.member.leases[victim.name].version + self.random.randrange(1, 4)
        forged = NodeLease(victim.name, "forged", version, NodeState.ACTIVE, 0)
        fake = replace(forged, node=f"evil-{version}")
        key, data = self.random.choice(
            [
                (lease_key(victim.name, version), b"garbage"),
                (lease_key("evil", version), encode_lease(forged)),
                (lease_key(fake.node, version), encode_lease(fake)),
                (f"mount.archives/evil/{version}", b"garbage"),
            ]
        )
        with suppress(AlreadyExistsError):
            self.store.put_if_absent(key, [data])

    def _crash_or_run(self, node: SimulatedNode) -> None:
        if self.is_attacked and self.time_s < FAULTS_END_S and self.random.random() < 0.2:
            self._attack()
        if self.time_s < FAULTS_END_S and self.random.random() < 0.03:
            node.start()
            node.paused_until_s = self.time_s + self.random.uniform(0, 20)
            return
        node.run()

    def fault(self, node: SimulatedNode) -> None:
        """Before or after a request of ``node``: nothing, a pause inside it, or no reply."""
        if self.time_s >= FAULTS_END_S:
            return
        drawn = self.random.random()
        if self.time_s < node.cut_until_s or drawn < 0.03:
            raise UnavailableError("no reply")
        if drawn < 0.04:
            node.cut_until_s = self.time_s + self.random.uniform(0, 30)
        elif drawn < 0.07 and len(self._running) < len(self.nodes):
            self._until(self.time_s + self.random.uniform(0.1, 30))

    # -- what must hold ---------------------------------------------------------------------------------------

    def next_offset(self) -> int:
        self._offset += 1
        return self._offset

    def offset_of(self, name: BrokerName) -> int:
        return load_snapshot(PrefixedStore(self.store, "/".join(name))).offsets.get(KEY, {}).get(0, 0)

    def claimed(self, name: BrokerName, log: GroupLog, acknowledged: int) -> None:
        """The new holder has all that was acknowledged before."""
        assert log.offsets.get(KEY, {}).get(0, 0) >= acknowledged, f"{name}: {acknowledged} is lost"
        self.claims[name].append((log.version, log))
        self.moves += 1

    def acknowledge(self, name: BrokerName, log: GroupLog, offset: int) -> None:
        """It is durable, and no other node claimed the groups before it was written."""
        assert self.offset_of(name) >= offset, f"{name}: {offset} is acknowledged and lost"
        before = [claim for claim in self.claims[name] if claim[0] < log.version]
        assert max(before, key=lambda claim: claim[0])[1] is log, f"{name}: acknowledged by two holders"
        self.acknowledged[name] = max(offset, self.acknowledged.get(name, 0))
        self.commits += 1

    def grant(self, name: BrokerName, client: str) -> None:
        """Another client no longer trusts the lock that it had."""
        holder, at_s = self.granted.get(name, (client, 0.0))
        assert client == holder or self.time_s - at_s >= TRUST_S * 0.98, f"{name}: locked by two clients"
        self.granted[name] = client, self.time_s
