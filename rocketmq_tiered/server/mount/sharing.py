"""Which node serves which retired broker, and which node is silent. Pure.

Every node decides for itself from the leases it read. Nodes that decide differently for a moment both try to claim the
groups of a broker, which only one of them can (groups/group_state.py).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from rocketmq_tiered.server.mount.node_lease import BrokerName, MountRecord, NodeLease, NodeState

RENEW_S: Final = 5.0
LEASE_S: Final = 12.0
"""A lease that was not renewed for this long, by the reader's own clock, may be ended. It is first seen up to RENEW_S
after it was written, so a dead node's brokers are free 7 to 17 s after its death."""
MARGIN_S: Final = 2.0
"""A holder stops this much earlier: clocks do not run equally fast. One renewal may fail before that."""
CONSUMER_WEIGHT: Final = 10
"""A connected consumer counts as this many queues."""
GIVES_MAX: Final = 8
"""Brokers that a node gives away at once to balance."""
SLACK: Final = 0.1
"""Share of a node's load by which a move must help."""


class Sightings:
    """When the version of each lease was first seen, by this process's monotonic clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, int, float]] = {}
        self._read_s = 0.0
        self.renewing: set[str] = set()
        """Nodes whose process has renewed its lease since it was first seen."""

    def note(self, leases: Mapping[str, NodeLease], began_s: float, ended_s: float) -> None:
        """Note which version each node's lease has, as read between the times ``began_s`` and ``ended_s``. After a
        pause of this process, or of the store, that was as long as a lease, no node counts as silent for its length."""
        before = self._seen if began_s - self._read_s < LEASE_S else {}
        self._read_s = began_s
        self._seen = {}
        for node, lease in leases.items():
            seen = before.get(node)
            if seen is None or seen[0] != lease.process:
                self.renewing.discard(node)
            elif seen[1] != lease.version:
                self.renewing.add(node)
            if seen is None or seen[:2] != (lease.process, lease.version):
                seen = lease.process, lease.version, ended_s
            self._seen[node] = seen

    def silent(self) -> list[str]:
        """Nodes whose lease was not renewed for LEASE_S."""
        return [node for node, seen in self._seen.items() if self._read_s - seen[2] >= LEASE_S]

    def next_silent_s(self, nodes: Iterable[str]) -> float:
        """When the first of ``nodes`` is silent unless it renews."""
        return min(
            (self._seen[node][2] + LEASE_S for node in nodes if node in self._seen), default=float("inf")
        )


@dataclass(frozen=True)
class SharingDecision:
    """``take``: claim and serve; ``give``: release, to another node or because it is no longer announced."""

    take: tuple[BrokerName, ...] = ()
    give: tuple[BrokerName, ...] = ()


def weight_of(queues: int, consumers: int = 0) -> int:
    """The load of a broker."""
    return max(1, queues) + CONSUMER_WEIGHT * consumers


def decide_sharing(
    me: str, leases: Mapping[str, NodeLease], announced: Mapping[BrokerName, int], renewing: Collection[str]
) -> SharingDecision:
    """Decide which brokers node ``me`` takes and which it gives away. ``leases``: by node; ``announced``: brokers to be
    mounted, with their numbers of queues; ``renewing``: the nodes that renew their leases. Only these get brokers: a
    lease alone, which anyone may have written, proves nothing."""
    held = {
        node: [record for record in lease.mounts if not record.is_leaving]
        for node, lease in leases.items()
        if lease.is_living
    }
    mine = held.get(me, [])
    gone = tuple(record.name for record in mine if record.name not in announced)
    mine = [record for record in mine if record.name in announced]
    if leases[me].state is not NodeState.ACTIVE:
        return SharingDecision(give=(*gone, *(record.name for record in mine)))
    loads = {
        node: sum(weight_of(record.queues, record.consumers) for record in records)
        for node, records in held.items()
        if leases[node].state is NodeState.ACTIVE and (node == me or node in renewing)
    }
    held_names = {record.name for records in held.values() for record in records}
    # Every node computes the same: the heaviest broker goes to the node with the least load, and so on.
    free = sorted((-weight_of(queues), name) for name, queues in announced.items() if name not in held_names)
    take = []
    for negative_weight, name in free:
        target = min(loads, key=lambda node: (loads[node], node))
        loads[target] -= negative_weight
        if target == me:
            take.append(name)
    # The load is balanced only once no broker is free or being opened.
    is_moving = free or any(not record.address for records in held.values() for record in records)
    return SharingDecision(tuple(take), gone if is_moving else (*gone, *_given(me, mine, loads)))


def _given(me: str, mine: list[MountRecord], loads: dict[str, int]) -> tuple[BrokerName, ...]:
    """Return the brokers that node ``me``, which serves ``mine``, gives away to balance the load: each to the node with
    the least load, while ``me`` has clearly more afterwards as well. ``loads``: by node, changed as brokers are
    given."""
    given: list[BrokerName] = []
    for record in sorted(mine, key=lambda record: (record.consumers, -record.queues, record.name)):
        target = min(loads, key=lambda node: (loads[node], node))
        weight = weight_of(record.queues, record.consumers)
        if target == me or len(given) == GIVES_MAX:
            break
        if loads[me] - (loads[target] + weight) >= max(1, SLACK * loads[me]):
            given.append(record.name)
            loads[me] -= weight
            loads[target] += weight
    return tuple(given)
