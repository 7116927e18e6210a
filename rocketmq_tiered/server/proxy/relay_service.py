"""Base of proxy and slave mode: handlers over archive and broker together, everything else relayed to the broker."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

from fetcher.policy.read_policy import ReadPolicies
from rocketmq_tiered.server.listen.options import server_options
from rocketmq_tiered.server.listen.service import Service
from rocketmq_tiered.server.proxy.accepted_accounts import JUDGED, AcceptedAccounts, is_refusal
from rocketmq_tiered.server.proxy.proxy_handlers import ProxyHandlers, relayed
from rocketmq_tiered.server.proxy.relay import Relay, RelayClient
from rocketmq_tiered.server.proxy.relay_status import GroupReading, GroupReadStats, RelayCounters, RelayStatus
from rocketmq_tiered.server.proxy.upstream import InflightLimit
from rocketmq_tiered.server.security.authorizer import FIRST_5
from rocketmq_tiered.server.wire.codes import RequestCode
from rocketmq_tiered.server.wire.connection import Connection
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from tiered.errors import UnavailableError
from tiered.remoting.command import RemotingCommand
from tiered.settings.sections import ServeSettings

LOCKS = frozenset({RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ})
ClientT = TypeVar("ClientT", bound=RelayClient)


class RelayService(Service, Generic[ClientT]):
    """Serves from ``start`` to ``close``, on the running event loop; ``open_archive`` provides the handlers."""

    section: ClassVar[str]
    """The section of the settings that has ``bind`` and ``advertise``."""
    counters: RelayCounters

    def __init__(
        self,
        settings: ServeSettings,
        relay: Relay,
        now_s: Callable[[], float] = time.monotonic,
        *,
        checks_clients: bool = False,
        judges_locks: bool = False,
    ) -> None:
        """``checks_clients``: the broker has access control. ``judges_locks``: not ACL 1.0 only, which does not judge
        queue locks in any version."""
        super().__init__(settings, HandlerTable(default=self._dispatch), now_s)
        self._relay, self._inflight = relay, InflightLimit()
        self._handlers: ProxyHandlers | None = None
        self._relay_clients: dict[int, ClientT] = {}
        self._reads = GroupReadStats()
        self._judges_locks = judges_locks
        self.accepted = AcceptedAccounts(now_s) if checks_clients else None
        """What the broker accepted; None: it has no access control."""

    @property
    def bind(self) -> str:
        """The address to listen on, as set."""
        return self._settings.bind

    async def start(self) -> tuple[str, int]:
        """Listen; returns the bound address. Raises OSError when the port is taken, UsageError for bad settings."""
        options = server_options(
            self._settings, self.clients.names_group, keeps_bodies=self.accepted is not None
        )
        return await self._listen(options)

    def open_archive(self, handlers: ProxyHandlers) -> None:
        """Let ``handlers`` answer their codes from now on."""
        self._handlers = handlers

    def apply(self, policies: ReadPolicies) -> None:
        """Use other read policies; handlers have their own."""

    async def close(self, drain_s: float = 5.0) -> None:
        """Close connections of both sides, after requests in progress had ``drain_s`` to finish."""
        await super().close(drain_s)
        for client in list(self._relay_clients.values()):
            client.upstream.close()

    @abstractmethod
    def status(self) -> RelayStatus:
        """The current state. Callable from any thread."""

    @abstractmethod
    def _connect(self, connection: Connection) -> ClientT:
        """The client of a new connection."""

    @abstractmethod
    async def _dispatch(self, request: Request) -> Response | None:
        """The reply to a request whose code has no entry in the table."""

    def _client(self, request: Request) -> ClientT:
        found = self._relay_clients.get(request.peer.id)
        if found is None:
            assert isinstance(request.peer, Connection)
            found = self._relay_clients[request.peer.id] = self._connect(request.peer)
        return found

    def _connection_closed(self, connection: Connection) -> None:
        client = self._relay_clients.pop(connection.id, None)
        if client is not None:
            self.clients.closed(client.peer)
            client.upstream.close()

    async def _answer_or_relay(self, request: Request, client: ClientT) -> Response | None:
        handler = None if self._handlers is None else self._handlers.get(request.code)
        await client.connection.writable()  # no further replies for a client that does not read
        if self.accepted is not None and request.code in JUDGED:
            refusal = await self._refusal(request, client, self.accepted)
            if refusal is not None:
                return refusal
        if handler is None:
            return await self._relayed(request, client)
        for name in ("topic", "consumerGroup"):
            request.name(name, "")  # checks the length: handlers and statistics cache these
        self.counters.answered[request.code] += 1
        response = await handler(request, client.upstream)
        self._reads.note(request, response)
        return response

    async def _refusal(
        self, request: Request, client: ClientT, accepted: AcceptedAccounts
    ) -> Response | None:
        """The broker's refusal of a request that it would not judge otherwise."""
        is_offset = request.code == RequestCode.QUERY_CONSUMER_OFFSET
        if (
            request.code in LOCKS
            and self._judges_locks
            and (await self._relay.version(client) or 0) >= FIRST_5
        ):
            return None  # the broker judges it, before the client's first pull
        try:
            refusal = await accepted.refusal(request, client.upstream)
        except UnavailableError:
            if is_offset:
                return None  # the relay fails too, and closes the connection
            raise
        if refusal is None:
            return None
        is_silent = is_offset and request.command.version < FIRST_5
        return replace(relayed(refusal), is_withheld=is_silent)

    async def _relayed(self, request: Request, client: ClientT) -> Response | None:
        if self.accepted is None:
            return await self._relay.relay(request, client)
        if request.code == RequestCode.SEND_BATCH_MESSAGE:
            # The same request, but ACL 1.0 does not judge it.
            command = replace(request.command, code=int(RequestCode.SEND_MESSAGE_V2))
            request = Request(command, request.peer)
        response = await self._relay.relay(request, client)
        if (
            response is not None
            and response.version is not None
            and not is_refusal(RemotingCommand(response.code, 0, remark=response.remark))
        ):
            await self.accepted.note(request, client.upstream, response.code)
        return response

    def _join(self, request: Request, client: ClientT) -> None:
        """Apply a consumer's heartbeat. Without ``serve.acl_file`` only the broker judges accounts: by pulls over the
        same connection, as it may not get the heartbeat."""
        sent = Request(request.command, client.peer)
        if self.accepted is None or self._settings.acl_file:
            self.clients.heartbeat(sent)
        else:
            accepted, fields, upstream = self.accepted, request.command.ext_fields, client.upstream

            def accepts(group: str, topic: str) -> bool:
                if not topic:
                    return accepted.accepts_group(fields, upstream, group)
                return accepted.accepts(fields, upstream, group, topic)

            self.clients.heartbeat(sent, accepts)

    def _leave(self, request: Request, client: ClientT) -> None:
        group = request.text("consumerGroup", "")
        if group:
            self.clients.leave(request.text("clientID"), group, client.peer)

    def _group_readings(self) -> tuple[GroupReading, ...]:
        return self._reads.readings(self._group_sizes())
