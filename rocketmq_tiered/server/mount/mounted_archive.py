"""One retired broker as a node serves it: the archive, the groups, a port and a registration of their own.

claim the groups → listen → register; release the groups → serve reads until clients have moved → close

Registers a retired broker's name at the name servers, as a read-only master.

A registration replaces that of an earlier holder, never after it was removed: clients that see the name vanish drop
their queues and repeat what they have not committed. A real master keeps its name.
Sources: RouteInfoManager.registerBroker, BrokerOuterAPI.registerBrokerAll, TopicConfigSerializeWrapper.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fetcher.access import ArchiveAccess, open_async_access
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveService
from rocketmq_tiered.server.backend.backend import TopicConfig
from rocketmq_tiered.server.backend.served_archive import ServedArchive
from rocketmq_tiered.server.groups.client_table import is_legal_group
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog
from rocketmq_tiered.server.groups.queue_locks import TRUST_S
from rocketmq_tiered.server.listen.options import MemoryShares
from rocketmq_tiered.server.mount.membership import Membership
from rocketmq_tiered.server.mount.node_lease import BrokerName, MountRecord, lapsed_leases
from rocketmq_tiered.server.retries.retry_log import RetryLog
from rocketmq_tiered.server.retries.retry_queue import RetryLimits, RetryQueues
from rocketmq_tiered.server.slave.registrar import Registrar
from rocketmq_tiered.server.slave.registration import (
    MASTER_ID,
    Listing,
    SlaveConfig,
    address_refusal,
    register_command,
)
from tiered.catalog.retirement import retired_since
from tiered.clock import MACHINE_CLOCK
from tiered.errors import FencedError, TieredError, UsageError
from tiered.model.queue import LMQ_PREFIX, RETRY_PREFIX, TopicFilter
from tiered.object_store.interface import ObjectStore
from tiered.remoting.command import RemotingCommand
from tiered.remoting.tls import ClientTls
from tiered.settings.sections import Settings
from tiered.timestamps import wall_ms

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
        """``place``: the broker's name, this node's address to be registered as its master's, and the name servers."""
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
        """Return why this node may not register the broker at a name server, None if it may. ``listed``: what that name
        server has for the broker."""
        holder = listed.addresses.get(MASTER_ID)  # the address that is registered as the broker's master
        if (why := address_refusal(listed, self.slave)) is not None:
            return why
        if not self._holds() or self.has_ended:
            return "this node does not serve the broker's consumer groups"
        if holder not in (None, self.slave.advertise) and holder not in self._holders():
            return f"{MASTER_THERE} at {holder}: stop it, or let it archive again with tiered detach --undo"
        return None

    def registration(self, listed: Listing) -> RemotingCommand:
        """The request that registers the broker with its topics."""
        table = registered_topics(self._topics(), self._cluster, self.slave.broker)
        if table != self._table:
            self._table, self._version = table, self._version + 1
        return register_command(self.slave, replace(listed, cluster=self._cluster), table, self._version)

    def withdrawal(self, listed: Listing) -> RemotingCommand | None:
        """The request that takes the registration back, once nothing is left to serve."""
        return super().withdrawal(listed) if self.has_ended else None


def registered_topics(
    topics: Mapping[str, TopicConfig], cluster: str, broker: str
) -> dict[str, dict[str, Any]]:
    """Return the topic table that a broker is registered with, as JSON objects by name: its topics, read-only, without
    system topics and LMQs. Two that every broker has are added: name servers of 5.x refuse a table of one topic."""
    topic_filter = TopicFilter(cluster=cluster, broker=broker)
    of_every_broker = {name: TopicConfig(name, 1, 1) for name in (cluster, broker)}
    ordinary = {
        name: config
        for name, config in topics.items()
        if not name.startswith(LMQ_PREFIX) and not topic_filter.is_system(name)
    }
    return {
        name: {**config.document(), "perm": PERM_READ}
        for name, config in sorted((ordinary | of_every_broker).items())
    }


logger = logging.getLogger(__name__)

REFRESH_S = 60.0
"""How often the catalog is read: only maintenance changes it."""
SERVE_BYTES_MIN = 32 << 20
"""The least memory for one broker, of ``serve.memory_bytes``."""
RETRY_TOPICS_MAX = 10_000
"""Retry topics made for groups of clients, which choose names freely."""


@dataclass(frozen=True)
class MountPlace:
    """What all brokers mounted below ``url`` share. ``store``: at the URL; ``host``: that clients dial."""

    url: str
    store: ObjectStore
    settings: Settings
    membership: Membership
    host: str
    name_servers: tuple[str, ...]
    tls: ClientTls | None = None
    measuring: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Measures one archive at a time: a large one takes thousands of requests."""

    def shares(self) -> int:
        """How many brokers this node may serve: each gets an equal share of its memory."""
        return max(1, len(self.membership.announced))


class MountedArchive:
    """Belongs to one event loop, from ``take`` to ``close``."""

    def __init__(self, place: MountPlace, access: ArchiveAccess, archive: ServedArchive) -> None:
        """``access`` and ``archive``: the broker's open archive. Nothing is claimed and no port opened before
        ``_start``."""
        self.name = BrokerName(access.cluster, access.broker)
        self._place, self._access, self._archive = place, access, archive
        self.address, self.since_ms = "", 0
        self.is_leaving = self._is_released = False
        self._tasks: list[asyncio.Task[None]] = []
        settings, member = place.settings.serve, place.membership
        memory = MemoryShares(max(SERVE_BYTES_MIN, settings.memory_bytes // place.shares()))
        owner = f"node {member.node} of tiered mount"
        log = GroupLog(
            access.store,
            owner,
            MACHINE_CLOCK,
            generation_of=access.generation,
            lease=member.lease,
            has_lapsed=lapsed_leases(place.store),
        )
        # Kept, as the node may lose it and get another one, under which these groups are not claimed.
        self._lease = member.lease
        self._offsets = GroupOffsets(
            log, lease_ms=settings.lease_ms, bytes_max=memory.offsets, node_holds=self._node_holds
        )
        limits = RetryLimits(memory.retries, settings.dead_letter_keep_ms)
        self._retries = RetryQueues(RetryLog(access.store, owner), self._offsets, limits, MACHINE_CLOCK)
        self._settings = settings
        self.service: ArchiveService | None = None
        self.registrar: MountRegistrar | None = None
        self._lag = self._stored_bytes = 0

    def _node_holds(self) -> bool:
        member = self._place.membership
        return member.lease == self._lease and member.holds()

    @classmethod
    async def take(cls, place: MountPlace, name: BrokerName, port: int) -> MountedArchive:
        """Open the archive of a retired broker, claim its consumer groups and serve it on ``port``. Raises FencedError
        if another server owns the groups, UsageError if the broker is not retired, OSError if the port is taken, and
        UnavailableError if it is unknown whether the groups were claimed."""
        access = await asyncio.to_thread(
            lambda: open_async_access(
                place.url,
                cluster=name.cluster,
                broker=name.broker,
                settings=place.settings,
                shares=place.shares(),
            )
        )
        archive = ServedArchive(access)
        mounted = cls(place, access, archive)
        try:
            if retired_since(access.state) is None:
                raise UsageError(
                    f"the archive {access.title} is not retired: a sidecar writes to it",
                    hint="retire the broker with tiered detach, or let clients use it again with tiered detach"
                    " --undo",
                )
            await archive.load()
            await mounted._start(port)
        except BaseException:
            await mounted.close()
            raise
        return mounted

    async def _start(self, port: int) -> None:
        """Claim the broker's consumer groups, listen on ``port`` and register there, in this order. Raises FencedError
        if another server owns the groups."""
        if not await self._offsets.claim():
            raise FencedError(
                f"another server owns the consumer groups of broker {self.name.broker}",
                hint="this node mounts the broker once that server has released them, or its lease has ended",
            )
        mount, place = self._place.settings.mount, self._place
        serve = replace(
            self._settings,
            bind=f"{mount.bind}:{port}",
            advertise=f"{place.host}:{port}",
            refresh_ms=int(REFRESH_S * 1000),
            memory_bytes=max(SERVE_BYTES_MIN, self._settings.memory_bytes // place.shares()),
        )
        service = ArchiveService(self._archive, self._offsets, self._retries, serve)
        # A node that crashed, or the broker, has left no list of queue locks: clients trust theirs for TRUST_S.
        if self._offsets.claimed_locks is None:
            service.locks_from_s = time.monotonic() + TRUST_S
        service.earliest_ms = self._archive.earliest_stored_ms
        service.on_group_change = self._make_retry_topics
        self.service = service
        self.address, self.since_ms = await service.start(), wall_ms()
        self._make_retry_topics()
        self.note_lag()
        config = SlaveConfig(self.name.broker, "", place.name_servers, self.address, MASTER_ID, place.tls)
        self.registrar = MountRegistrar(
            config,
            self.name.cluster,
            service.topics,
            holds=lambda: self._offsets.holds_lease and not self.is_leaving,
            holders=lambda: place.membership.addresses_of(self.name),
        )
        self.registrar.start()
        self._tasks = [
            asyncio.create_task(self._archive.watch(REFRESH_S)),
            asyncio.create_task(self._measure()),
        ]

    async def _measure(self) -> None:
        store = self._access.store
        async with self._place.measuring:
            listed = asyncio.to_thread(lambda: sum(info.size_bytes for info in store.list("")))
            self._stored_bytes = await listed

    def _make_retry_topics(self) -> None:
        """Create, in memory, the retry topic of each consumer group that has none, as a broker does at the group's
        first heartbeat: clients find the topic only by a route. New ones are registered soon."""
        service = self.service
        assert service is not None
        topics = service.topics()
        names = {group.name for group in service.clients.groups()} | self._offsets.groups()
        missing = [name for name in names if is_legal_group(name) and f"{RETRY_PREFIX}{name}" not in topics]
        for name in missing[: max(0, RETRY_TOPICS_MAX - len(service.created))]:
            topic = f"{RETRY_PREFIX}{name}"
            service.created[topic] = TopicConfig(topic, 1, 1)
        if missing and self.registrar is not None:
            self.registrar.wake()

    # -- state ------------------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """Where it listens; 0 before it does."""
        return int(self.address.rpartition(":")[2] or 0)

    @property
    def is_lost(self) -> bool:
        """Whether another server has the groups, or may have ended the lease that keeps them."""
        is_ended = self._place.membership.lease != self._lease
        return (is_ended or not self._offsets.is_owner) and not self.is_leaving

    @property
    def owns_groups(self) -> bool:
        """Whether the groups are this process's: after ``close``, they were not released."""
        return self._offsets.is_owner

    @property
    def is_retired(self) -> bool:
        """Whether the broker has no writer, by the catalog read last."""
        return retired_since(self._access.state) is not None

    def is_empty(self) -> bool:
        """Whether all messages have expired, and none wait to be consumed again."""
        if self._retries.state.messages:
            return False
        every = (self._archive.bounds(*queue) for queue in self._queues())
        return all(bounds is None or bounds.minimum >= bounds.maximum for bounds in every)

    def _queues(self) -> set[tuple[str, int]]:
        return {(queue.topic, queue.queue_id) for queue in self._access.state.visible_queues()}

    def problem(self) -> str:
        """What an operator should look at; empty if all is well."""
        if self.registrar is None:
            return "starting"
        found = [status.why for status in self.registrar.statuses() if status.why]
        return self._archive.problem or next(iter(sorted(found, key=lambda why: MASTER_THERE not in why)), "")

    def note_lag(self) -> None:
        """Count again how many messages the consumer groups have not consumed, by their offsets here, or by those that
        the broker had where there are none."""
        self._lag = 0
        for topic, queue_id in self._queues():
            bounds = self._archive.bounds(topic, queue_id)
            for group in {*self._offsets.groups_of(topic), *self._archive.archived_groups(topic)}:
                offset = self._offsets.find(group, topic, queue_id)
                if offset is None:
                    offset = self._archive.archived_offset(group, topic, queue_id)
                if bounds is not None and offset is not None:
                    self._lag += max(0, bounds.maximum - max(offset, bounds.minimum))

    def record(self) -> MountRecord:
        """Return what the node's lease says of this broker, for other nodes and for tiered mount ls."""
        service, state = self.service, self._access.state
        groups = [] if service is None else service.status().groups
        return MountRecord(
            *self.name,
            self.address,
            self.since_ms,
            queues=len(state.table),
            consumers=sum(members for _, members in groups),
            groups=len(self._offsets.groups()),
            lag=self._lag,
            stored_bytes=self._stored_bytes,
            is_leaving=self._is_released,
            problem="" if self.is_leaving else self.problem(),
        )

    # -- end --------------------------------------------------------------------------------------------------

    async def release(self) -> None:
        """Release the groups, durably; reads continue."""
        self.is_leaving = True
        if self.service is not None:
            await self.service.release_groups()
        self._is_released = True

    async def await_move(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until every name server lists another node's address for this broker, and return
        whether they do. Their listings are read each second, more often than otherwise, so that this node stops serving
        soon after its clients can move."""
        ends_s = time.monotonic() + timeout_s
        while self.registrar is not None and time.monotonic() < ends_s:
            if self.registrar.is_replaced:
                return True
            self.registrar.wake()
            await asyncio.sleep(1.0)
        return False

    async def close(self) -> None:
        """Stop serving, write the last group offsets and close the archive. The registration at the name servers stays
        until the next node replaces it, unless ``registrar.has_ended``."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.registrar is not None:
            await self.registrar.leave()
        closing = self._offsets.close() if self.service is None else self.service.close(drain_s=1.0)
        try:
            await closing
        except TieredError as error:
            logger.warning(
                "the last consumer offsets of broker %s could not be written when this node stopped serving it: %s",
                self.name.broker,
                error,
                extra={"broker": self.name.broker},
            )
        await asyncio.to_thread(self._access.close)
