"""Registers a retired broker's name at the name servers, as a read-only master.

A registration replaces that of an earlier holder, never after it was removed: clients that see the name vanish drop
their queues and repeat what they have not committed. A real master keeps its name.
Sources: RouteInfoManager.registerBroker, BrokerOuterAPI.registerBrokerAll, TopicConfigSerializeWrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from rocketmq_tiered.server.backend.backend import TopicConfig
from rocketmq_tiered.server.slave.registrar import Registrar
from rocketmq_tiered.server.slave.registration import (
    MASTER_ID,
    Listing,
    SlaveConfig,
    address_refusal,
    register_command,
)
from tiered.model.queue import LMQ_PREFIX, TopicFilter
from tiered.remoting.command import RemotingCommand

REGISTER_EVERY_S: Final = 30.0
PERM_READ: Final = 4
MASTER_THERE: Final = "a master of this broker is registered"


class MountRegistrar(Registrar):
    """``topics``: those to be registered. ``holds``: whether this process certainly serves the broker's groups.
    ``holders``: addresses of nodes that serve the broker, or did: a registration of theirs is replaced."""

    what = "mounted broker"

    def __init__(
        self,
        place: SlaveConfig,
        cluster: str,
        topics: Callable[[], Mapping[str, TopicConfig]],
        *,
        holds: Callable[[], bool],
        holders: Callable[[], Collection[str]],
    ) -> None:
        super().__init__(place, REGISTER_EVERY_S)
        self._cluster, self._topics, self._holds, self._holders = cluster, topics, holds, holders
        self._table: dict[str, Any] = {}
        self._version = 0
        self.has_ended = False
        """Nothing is left to serve: unregister."""

    @property
    def is_replaced(self) -> bool:
        """Whether every name server lists another address."""
        return all(claim.holder is not None for claim in self.claims())

    def refusal(self, listed: Listing) -> str | None:
        """See Registrar."""
        holder = listed.addresses.get(MASTER_ID)
        if (why := address_refusal(listed, self.slave)) is not None:
            return why
        if not self._holds() or self.has_ended:
            return "this node does not serve the broker's consumer groups"
        if holder not in (None, self.slave.advertise) and holder not in self._holders():
            return f"{MASTER_THERE} at {holder}: take it back with tiered detach --undo, or stop it"
        return None

    def registration(self, listed: Listing) -> RemotingCommand:
        """See Registrar."""
        table = registered_topics(self._topics(), self._cluster, self.slave.broker)
        if table != self._table:
            self._table, self._version = table, self._version + 1
        return register_command(self.slave, replace(listed, cluster=self._cluster), table, self._version)

    def withdrawal(self, listed: Listing) -> RemotingCommand | None:
        """See Registrar: only when nothing is left to serve."""
        return super().withdrawal(listed) if self.has_ended else None


def registered_topics(
    topics: Mapping[str, TopicConfig], cluster: str, broker: str
) -> dict[str, dict[str, Any]]:
    """The topic table of a registration: read-only, without system topics, with the two that every broker has: name
    servers of 5.x refuse a single topic."""
    system = TopicFilter(cluster=cluster, broker=broker)
    names = {cluster: TopicConfig(cluster, 1, 1), broker: TopicConfig(broker, 1, 1)}
    kept = {
        name: config
        for name, config in topics.items()
        if not name.startswith(LMQ_PREFIX) and not system.is_system(name)
    }
    return {name: {**config.document(), "perm": PERM_READ} for name, config in sorted((kept | names).items())}
