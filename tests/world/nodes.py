"""Nodes of `tiered mount` that share retired brokers: the real `Membership` and `GroupLog`, clocks that are off, and an
account with the rights of a node that plants objects.

Owns what must hold of them: a commit that was acknowledged is in every later version of the groups, and two clients
never trust locks of one queue at the same time.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
from tests.world.actors import Actor
from tiered.clock import Clock
from tiered.errors import AlreadyExistsError, FencedError, UnavailableError
from tiered.object_store.interface import ObjectStore
from tiered.object_store.prefixed import PrefixedStore

if TYPE_CHECKING:
    from tests.world.world import World

BROKERS = [BrokerName("c", f"b{number}") for number in range(2)]
KEY = ("group", "topic")
SETTLED_S = 50


class Groups:
    """What the nodes have said to their clients. ``root``: the prefix that they share."""

    def __init__(self, world: World) -> None:
        self.world, self.root = world, PrefixedStore(world.root, "retired")
        self.acknowledged: dict[BrokerName, int] = {}
        self._claims: dict[BrokerName, list[tuple[int, GroupLog]]] = {name: [] for name in BROKERS}
        self._granted: dict[BrokerName, tuple[str, float]] = {}
        self._offset = 0
        for name in BROKERS:
            announce_archive(self.root, name, 4)

    def next_offset(self) -> int:
        self._offset += 1
        return self._offset

    def claimed(self, name: BrokerName, log: GroupLog, acknowledged: int) -> None:
        """The new holder has all that was acknowledged before."""
        assert log.offsets.get(KEY, {}).get(0, 0) >= acknowledged, f"{name}: {acknowledged} is lost"
        self._claims[name].append((log.version, log))
        self.world.counts["groups taken over"] += 1

    def acknowledge(self, name: BrokerName, log: GroupLog, offset: int) -> None:
        """It is durable, and no other node claimed the groups before it was written."""
        assert self.offset_of(name) >= offset, f"{name}: {offset} is acknowledged and lost"
        before = [claim for claim in self._claims[name] if claim[0] < log.version]
        assert max(before, key=lambda claim: claim[0])[1] is log, f"{name}: acknowledged by two holders"
        self.acknowledged[name] = max(offset, self.acknowledged.get(name, 0))
        self.world.counts["group commits"] += 1

    def offset_of(self, name: BrokerName) -> int:
        return load_snapshot(PrefixedStore(self.root, "/".join(name))).offsets.get(KEY, {}).get(0, 0)

    def grant(self, name: BrokerName, client: str) -> None:
        """Another client no longer trusts the lock that it had."""
        now_s = self.world.now_ms / 1000
        holder, at_s = self._granted.get(name, (client, 0.0))
        assert client == holder or now_s - at_s >= TRUST_S * 0.98, f"{name}: locked by two clients"
        self._granted[name] = client, now_s


@dataclass
class Held:
    """A broker as a node serves it."""

    log: GroupLog
    lease: str
    locks: LockTable
    locks_from_s: float


class Node(Actor):
    """``due_ms``: when it acts next, by the world's clock. Its own runs at another rate."""

    def __init__(self, world: World, groups: Groups, name: str) -> None:
        self.world, self.groups, self.name = world, groups, name
        self.store: ObjectStore = PrefixedStore(world.store_of(name), "retired")
        self._rate, self._offset_s = world.random.uniform(0.99, 1.01), world.random.uniform(-1e6, 1e6)
        self._process = self.due_ms = 0
        self.clock = Clock(lambda: int(self.now_s() * 1000), self.now_s)
        self.die()

    def now_s(self) -> float:
        return self.world.now_ms / 1000 * self._rate + self._offset_s

    def die(self) -> None:
        self._process += 1
        self.held: dict[BrokerName, Held] = {}
        self.due_ms = self.world.now_ms + self.world.random.randrange(20_000)
        self.member = Membership(self.store, self.name, self.clock)

    def act(self) -> None:
        """One round: renew, act, and answer clients."""
        self.due_ms = self.world.now_ms + self.world.random.randrange(1_000, 6_000)
        try:
            records = [
                MountRecord(*name, address=f"{self.name}:{self._process}", queues=4) for name in self.held
            ]
            decision = self.member.step(NodeState.ACTIVE, records)
            for name in decision.give:
                if (held := self.held.pop(name, None)) is not None:
                    self._release(name, held)
            for name in decision.take:
                self._take(name)
        except FencedError:
            self.held = {}
        except UnavailableError:
            pass
        self._serve()

    def _release(self, name: BrokerName, held: Held) -> None:
        held.log.locks = held.locks.held() if self.now_s() >= held.locks_from_s else None
        try:
            held.log.write(held.log.offsets, released=True)
        except UnavailableError:
            self.member.claiming.add(name)
        except FencedError:
            return

    def _take(self, name: BrokerName) -> None:
        member, lease = self.member, self.member.lease
        log = GroupLog(
            PrefixedStore(self.store, "/".join(name)),
            self.name,
            self.clock,
            lease=lease,
            has_lapsed=lapsed_leases(self.store),
        )
        acknowledged = self.groups.acknowledged.get(name, 0)
        try:
            log.claim(60_000)
        except UnavailableError:
            return
        except FencedError:
            member.claiming.discard(name)
            return
        self.groups.claimed(name, log, acknowledged)
        member.claiming.discard(name)
        locks = LockTable(self.clock)
        locks.restore(log.locks or ())
        self.held[name] = Held(log, lease, locks, self.now_s() + TRUST_S * (log.locks is None))

    def _serve(self) -> None:
        """A commit and a lock request of one of two clients, for each broker held."""
        for name, held in list(self.held.items()):
            holds = self.member.lease == held.lease and self.member.holds()
            if holds and self.now_s() >= held.locks_from_s:
                client = self.world.random.choice(("a", "b"))
                if held.locks.lock(KEY[0], client, [MessageQueue(name.broker, KEY[1], 0)]):
                    self.groups.grant(name, client)
            offset = self.groups.next_offset()
            try:
                held.log.write({KEY: {0: offset}})
            except FencedError:
                self.held.pop(name, None)
            except UnavailableError:
                continue  # without a reply: not acknowledged
            else:
                self.groups.acknowledge(name, held.log, offset)


class Nodes(Actor):
    """Plants objects that no node wrote. At the end every broker has one holder, and what was acknowledged."""

    name = "nodes"

    def __init__(self, world: World) -> None:
        self.world, self.groups = world, Groups(world)
        self.nodes = [Node(world, self.groups, f"node {number}") for number in range(3)]

    def due(self) -> list[Actor]:
        """Nodes that are to act now."""
        return [
            node
            for node in self.nodes
            if node.due_ms <= self.world.now_ms and node.name not in self.world.busy
        ]

    def act(self) -> None:
        source = self.world.random
        version, victim = source.randrange(1, 10**6), source.choice(self.nodes)
        if victim.name in victim.member.leases and source.random() < 0.5:
            version = victim.member.leases[victim.name].version + source.randrange(1, 4)
        forged = NodeLease(victim.name, "forged", version, NodeState.ACTIVE, 0)
        fake = replace(forged, node=f"evil-{version}")
        key, data = source.choice(
            [
                (lease_key(victim.name, version), b"garbage"),
                (lease_key("evil", version), encode_lease(forged)),
                (lease_key(fake.node, version), encode_lease(fake)),
                (f"mount.archives/evil/{version}", b"garbage"),
            ]
        )
        with suppress(AlreadyExistsError):
            self.groups.root.put_if_absent(key, [data])

    def settle(self) -> None:
        """Without faults for a while."""
        for _ in range(SETTLED_S + 20):
            self.world.now_ms += 1_000
            for node in self.due():
                node.act()
        held = [Counter(name for node in self.nodes for name in node.held)[name] for name in BROKERS]
        assert held == [1] * len(BROKERS), {node.name: list(node.held) for node in self.nodes}
        assert all(len(node.held) <= 1 for node in self.nodes), "not balanced"
        for name, offset in self.groups.acknowledged.items():
            assert self.groups.offset_of(name) >= offset
