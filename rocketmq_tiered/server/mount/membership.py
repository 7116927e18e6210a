"""One node among those that share the retired brokers below a prefix: its lease, those of others, what to do.

    renew the lease → read all leases → end those of silent nodes → read the brokers to be mounted → decide

Blocking: ``step`` is called by one thread at a time, the questions from any. Owns this order.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rocketmq_tiered.server.mount.node_lease import (
    AnnouncedArchives,
    BrokerName,
    MountRecord,
    NodeLease,
    NodeLog,
    NodeState,
)
from rocketmq_tiered.server.mount.sharing import (
    LEASE_S,
    MARGIN_S,
    RENEW_S,
    SharingDecision,
    Sightings,
    decide_sharing,
)
from tiered.clock import Clock
from tiered.errors import FencedError
from tiered.object_store.interface import ObjectStore

logger = logging.getLogger(__name__)


class Membership:
    """``clock``: leases end by its monotonic time; its wall time is only shown."""

    def __init__(self, store: ObjectStore, node: str, clock: Clock) -> None:
        """``store``: the prefix that the nodes of `tiered mount` share; ``node``: this node's name, which no two
        running ones may have."""
        self.node, self._clock = node, clock
        self._log = NodeLog(store, node, clock)
        self._archives = AnnouncedArchives(store)
        self._sightings = Sightings()
        self._held_until_s = self._joined_s = -math.inf
        """Until when no other node can have ended this node's lease, and when this process joined."""
        self.leases: Mapping[str, NodeLease] = {}
        """The leases of all nodes as they were read last."""
        self.announced: Mapping[BrokerName, int] = {}
        self.claiming: set[BrokerName] = set()
        """Brokers whose groups this node may have claimed without knowing: no other node tries until this one knows.
        The caller removes those that are settled."""
        self.takeovers = 0
        """Leases of others that this node ended."""

    @property
    def lease(self) -> str:
        """The identity of this node's lease."""
        return self._log.lease

    @property
    def strangers(self) -> list[str]:
        """Keys of objects below the prefix of leases that are no lease of the node whose name they have."""
        return sorted(self._log.strangers)

    def holds(self) -> bool:
        """Whether no other node can have ended this node's lease."""
        return self._clock.monotonic_s() < self._held_until_s

    def addresses_of(self, name: BrokerName) -> set[str]:
        """Addresses at which nodes serve a broker, or did."""
        records = (record for lease in self.leases.values() for record in lease.mounts)
        return {record.address for record in records if record.name == name}

    def step(self, state: NodeState, mounts: Sequence[MountRecord]) -> SharingDecision:
        """Renew this node's lease, end the leases of silent nodes, and return which brokers this node is to take and to
        give away. ``mounts``: the brokers that it serves now. Raises FencedError if the lease is lost: then all of them
        are to be closed, and the next call joins as a new process. Raises the errors of the object store."""
        held = {record.name for record in mounts}
        mounts = [*mounts, *(MountRecord(*name) for name in sorted(self.claiming - held))]
        began_s = self._clock.monotonic_s()
        try:
            if not self._log.lease:
                self._held_until_s, self._joined_s = -math.inf, began_s
                self._log.join()
            else:
                self._log.renew(state, mounts)
            read_s = self._clock.monotonic_s()
            leases = self._log.newest()
        except FencedError:
            self._held_until_s = -math.inf
            self.claiming.clear()
            raise
        self._held_until_s = began_s + LEASE_S - MARGIN_S
        self._sightings.note(leases, read_s, self._clock.monotonic_s())
        for node in self._sightings.silent():
            if node != self.node and leases[node].is_living and (ended := self._log.end(leases[node])):
                logger.warning(
                    "node %s of tiered mount has not renewed its lease: this node ends it, and other nodes take its"
                    " brokers",
                    node,
                    extra={"node": node},
                )
                self.takeovers += 1
                leases[node] = ended
        self.leases = leases
        self.announced = self._archives.read()
        renewing = self._sightings.renewing
        decision = decide_sharing(self.node, leases, self.announced, renewing)
        others = {node for node, lease in leases.items() if lease.state is NodeState.ACTIVE} - {self.node}
        # Nodes that start together wait for each other's first renewal, so that none takes all brokers at first.
        if others - renewing and read_s < self._joined_s + RENEW_S + 1:
            decision = replace(decision, take=())
        self.claiming = {name for name in self.claiming if name in self.announced} | set(decision.take)
        return replace(decision, take=tuple(sorted(self.claiming - held)))

    def wait_s(self) -> float:
        """Time to the next round: a renewal, or the moment at which a node is silent."""
        others = [node for node, lease in self.leases.items() if node != self.node and lease.is_living]
        renew_s = self._held_until_s - LEASE_S + MARGIN_S + RENEW_S
        return max(1.0, min(renew_s, self._sightings.next_silent_s(others)) - self._clock.monotonic_s())
