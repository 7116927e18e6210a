"""One archive on one port: wires the handlers, the group offsets and the server, and ends them in order.

Owns start, the periodic work (expiring members and locks) and the end. Does not own what requests mean.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from server.backend.backend import Backend, TopicConfig
from server.backend.lookup_handlers import LookupHandlers
from server.backend.offset_handlers import OffsetHandlers
from server.backend.pull_handlers import PullLimits, PullService
from server.backend.route_handlers import RouteHandlers, RouteTable
from server.groups.client_table import ClientTable, register_client_handlers
from server.groups.group_offsets import GroupOffsets
from server.groups.queue_locks import LockTable, register_lock_handlers
from server.listen.options import server_options
from server.listen.own_address import advertised_host, check_advertised, is_wildcard
from server.pop.pop_assignment import AssignmentHandlers
from server.pop.pop_handlers import PopHandlers
from server.retries.proxy_topic import ProxyTopic
from server.retries.retry_handlers import RetryHandlers
from server.retries.retry_queue import RetryQueues
from server.retries.retry_topics import ArchiveWithRetries
from server.security.authorizer import RulesAuthorizer
from server.wire.listener import Listener
from server.wire.request import HandlerTable
from tiered.errors import TieredError
from tiered.settings.sections import ServeSettings

logger = logging.getLogger(__name__)

EXPIRE_EVERY_S = 5.0


@dataclass(frozen=True)
class ArchiveStatus:
    """A moment's view. ``groups``: (name, members)."""

    address: str
    connections: int
    owns_groups: bool
    groups: list[tuple[str, int]]


class ArchiveService:
    """Serves ``archive`` from ``start`` to ``close``, on the running event loop."""

    def __init__(
        self, archive: Backend, offsets: GroupOffsets, retries: RetryQueues, settings: ServeSettings
    ) -> None:
        self._made: dict[str, TopicConfig] = {}
        self._proxy_topic = ProxyTopic(self._made, lambda: time.time_ns() // 1_000_000)
        self._archive, self._settings = ArchiveWithRetries(archive, retries, self._proxy_topic), settings
        self.clients = ClientTable(time.monotonic, bytes_max=settings.session_bytes_max)
        self.locks = LockTable(time.monotonic)
        self.offsets, self.retries = offsets, retries
        self._expiring: list[Callable[[], None]] = [self.clients.expire, self.locks.expire]
        self._server: Listener | None = None
        self._address = ""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Listen and serve; the address that clients dial. Raises OSError when the port is taken, UsageError where that
        address cannot be."""
        settings = self._settings
        options = server_options(settings)
        if settings.advertise:
            check_advertised(settings.advertise, "serve")
        advertised = "" if settings.advertise else advertised_host(options.host)
        await self.offsets.claim()
        try:
            await self.retries.claim()
        except TieredError as error:  # asked for again every second; the archive can be read without
            logger.error("messages sent back are not there: %s", error)
        table = HandlerTable()
        assert isinstance(options.authorizer, RulesAuthorizer)
        self._server = Listener(table, options, on_close=self.clients.closed)
        bound_host, bound_port = await self._server.start()
        host = advertised if is_wildcard(bound_host) else bound_host
        shown = f"[{host}]" if ":" in host else host
        self._address = settings.advertise or f"{shown}:{bound_port}"
        if not settings.advertise and is_wildcard(bound_host):
            logger.warning(
                "serve.advertise is not set: clients are told to dial this machine's address",
                extra={"address": self._address, "bound": bound_host},
            )
        self._register(table, RouteTable(self._archive, self._address, made=self._made), options.authorizer)
        work = (self.offsets.run(), self.retries.run(), self._expire())
        self._tasks = [asyncio.create_task(one) for one in work]
        return self._address

    def _register(self, table: HandlerTable, routes: RouteTable, authorizer: RulesAuthorizer) -> None:
        settings = self._settings
        limits = PullLimits(
            count_max=settings.pull_messages_max,
            bytes_max=settings.pull_bytes_max,
            hold_s_max=settings.hold_ms_max / 1000,
            stale_s=settings.refresh_ms / 1000 + 0.2,
        )
        RouteHandlers(routes).register(table)
        register_client_handlers(table, self.clients)
        register_lock_handlers(table, self.locks)
        OffsetHandlers(self._archive, routes, self.clients, self.offsets).register(table)
        PullService(self._archive, routes, self.clients, self.offsets, limits).register(table)
        LookupHandlers(self._archive, routes).register(table)
        RetryHandlers(self._archive, routes, self.retries, authorizer.refusal_of_message).register(table)
        pop = PopHandlers(
            self._archive,
            routes,
            self.offsets,
            bytes_max=settings.pull_bytes_max,
            held_bytes_max=settings.pop_bytes_max,
        )
        pop.register(table)
        self._expiring.append(pop.expire)
        AssignmentHandlers(routes, self.clients).register(table)
        self._proxy_topic.register(table)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            for expire in self._expiring:
                expire()

    async def close(self, drain_s: float = 5.0) -> None:
        """Hang up and write what is left of the group offsets."""
        if self._server is not None:
            await self._server.close(drain_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.retries.close()
        await self.offsets.close()

    def status(self) -> ArchiveStatus:
        """Who is connected."""
        groups = sorted((group.name, len(group.members)) for group in self.clients.groups())
        connections = len(self._server.connections) if self._server is not None else 0
        return ArchiveStatus(self._address, connections, self.offsets.is_owner, groups)
