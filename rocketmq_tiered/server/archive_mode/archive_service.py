"""Archive mode: serves one archive on one port, without a broker. Wires handlers, group offsets and retries."""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from rocketmq_tiered.server.backend.backend import Backend, TopicConfig
from rocketmq_tiered.server.backend.lookup_handlers import LookupHandlers
from rocketmq_tiered.server.backend.offset_handlers import OffsetHandlers
from rocketmq_tiered.server.backend.pull_handlers import PullLimits, PullService
from rocketmq_tiered.server.backend.route_handlers import RouteHandlers, RouteTable
from rocketmq_tiered.server.groups.client_table import register_client_handlers
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.queue_locks import LockTable, register_lock_handlers
from rocketmq_tiered.server.listen.options import (
    advertised_host,
    check_advertised,
    is_wildcard,
    server_options,
)
from rocketmq_tiered.server.listen.service import Service
from rocketmq_tiered.server.pop.pop_handlers import AssignmentHandlers, PopHandlers
from rocketmq_tiered.server.retries.retry_queue import RetryHandlers, RetryQueues
from rocketmq_tiered.server.retries.retry_topics import ArchiveWithRetries, ProxyTopic
from rocketmq_tiered.server.security.authorizer import RulesAuthorizer
from rocketmq_tiered.server.wire.request import HandlerTable
from tiered.clock import MACHINE_CLOCK
from tiered.errors import TieredError
from tiered.settings.sections import ServeSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArchiveStatus:
    """``groups``: (group, members), by name. ``owns_groups``: commits are accepted here."""

    connections: int
    groups: list[tuple[str, int]]
    owns_groups: bool


class ArchiveService(Service):
    """Serves ``archive`` from ``start`` to ``close``, on the running event loop."""

    def __init__(
        self, archive: Backend, offsets: GroupOffsets, retries: RetryQueues, settings: ServeSettings
    ) -> None:
        """``archive``: what is served; ``offsets`` and ``retries``: the offsets and retry messages of its consumer
        groups. One server at a time owns these; ``start`` claims them for this one."""
        super().__init__(settings, HandlerTable())
        self.created: dict[str, TopicConfig] = {}
        """Topics created here, in memory."""
        self._proxy_topic = ProxyTopic(self.created, MACHINE_CLOCK)
        self._archive = ArchiveWithRetries(archive, retries, self._proxy_topic)
        self._locks = LockTable(MACHINE_CLOCK)
        self._expiring.append(self._locks.expire)
        self.offsets, self.retries = offsets, retries
        self.earliest_ms: Callable[[], int] = lambda: 0
        """When the oldest message of the archive was stored, for routes."""
        self._group_tasks: list[asyncio.Task[None]] = []
        self.on_group_change: Callable[[], None] = lambda: None
        """Called after a heartbeat that changed a group."""
        self.locks_from_s = 0.0
        """Locks are granted from then on, by the monotonic clock."""

    def topics(self) -> dict[str, TopicConfig]:
        """All topics of routes."""
        return self._archive.topics() | self.created

    def grants_locks(self) -> bool:
        """Whether queue locks are granted now."""
        return self.offsets.holds_lease and self._clock.monotonic_s() >= self.locks_from_s

    async def start(self) -> str:
        """Claim the consumer groups, listen and serve. Returns the address that clients are given in routes. Raises
        OSError when the port is taken, and UsageError for an address that clients cannot dial."""
        settings = self._settings
        options = server_options(settings, self.clients.names_group)
        if settings.advertise:
            check_advertised(settings.advertise, "serve")
        host = "" if settings.advertise else advertised_host(options.host)
        if not self.offsets.is_owner:
            await self.offsets.claim()
        self._locks.restore(self.offsets.claimed_locks or ())
        try:
            await self.retries.claim()
        except TieredError as error:  # claimed again every second; reads do not need them
            logger.error(
                "the retry messages of the archive cannot be read, and until this succeeds none is delivered or"
                " stored: %s",
                error,
            )
        bound_host, bound_port = await self._listen(options)
        if not is_wildcard(bound_host):
            host = bound_host
        address = settings.advertise or f"{f'[{host}]' if ':' in host else host}:{bound_port}"
        if address.endswith(":0"):  # serve.advertise with port 0 means the port that the system chose
            address = f"{address[:-1]}{bound_port}"
        if not settings.advertise and is_wildcard(bound_host):
            logger.warning(
                "serve.advertise is not set: clients are given an address of this machine, which may be the wrong one",
                extra={"address": address, "bound": bound_host},
            )
        assert isinstance(options.authorizer, RulesAuthorizer)
        routes = RouteTable(self._archive, address, earliest_ms=self.earliest_ms, made=self.created)
        self._register(routes, options.authorizer)
        self._group_tasks = [self._spawn(self.offsets.run()), self._spawn(self.retries.run())]
        return address

    async def release_groups(self) -> None:
        """Write pending group offsets, and release the consumer groups with their queue locks for another server; reads
        continue here. May be called again."""
        # Before that time clients may trust locks of an earlier owner, which this server does not know.
        knows_locks = self._clock.monotonic_s() >= self.locks_from_s
        self.locks_from_s = math.inf
        tasks, self._group_tasks = self._group_tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.retries.close()
        await self.offsets.close(self._locks.held() if knows_locks else None)

    def status(self) -> ArchiveStatus:
        """The current state. Callable from any thread."""
        return ArchiveStatus(self._connection_count, self._group_sizes(), self.offsets.holds_lease)

    def _register(self, routes: RouteTable, authorizer: RulesAuthorizer) -> None:
        """Enter the handlers of all requests into the table. ``routes``: topics and queues that are served;
        ``authorizer``: the access rules, which retry messages are checked with again."""
        settings, table, archive = self._settings, self.table, self._archive
        limits = PullLimits(
            count_max=settings.pull_messages_max,
            bytes_max=settings.pull_bytes_max,
            stale_s=settings.refresh_ms / 1000 + 0.2,
        )
        RouteHandlers(routes).register(table)
        register_client_handlers(table, self.clients, self.on_group_change)
        register_lock_handlers(
            table,
            self._locks,
            self.grants_locks,
            lambda queue: queue.broker == archive.broker and routes.has_queue(*queue[1:]),
        )
        OffsetHandlers(archive, routes, self.clients, self.offsets).register(table)
        PullService(archive, routes, self.clients, self.offsets, limits).register(table)
        LookupHandlers(archive, routes).register(table)
        RetryHandlers(archive, routes, self.retries, authorizer.refusal_of_record).register(table)
        pop = PopHandlers(
            archive,
            routes,
            self.offsets,
            bytes_max=settings.pull_bytes_max,
            unacked_bytes_max=self._memory.popped,
        )
        pop.register(table)
        self._expiring.append(pop.expire)
        AssignmentHandlers(routes, self.clients).register(table)
        self._proxy_topic.register(table)

    async def close(self, drain_s: float = 5.0) -> None:
        """Close connections and write pending group offsets."""
        await super().close(drain_s)
        await self.release_groups()
