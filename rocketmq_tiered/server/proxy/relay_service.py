"""Base of proxy and slave mode: handlers over archive and broker together, everything else relayed to the broker."""

from abc import abstractmethod
from typing import ClassVar, Generic, TypeVar

from fetcher.policy.read_policy import ReadPolicies
from rocketmq_tiered.server.backend.pull_handlers import RECREATED
from rocketmq_tiered.server.listen.options import server_options
from rocketmq_tiered.server.listen.service import Service
from rocketmq_tiered.server.proxy.proxy_handlers import ProxyHandlers
from rocketmq_tiered.server.proxy.relay import Relay, RelayClient
from rocketmq_tiered.server.proxy.relay_status import GroupReading, GroupReadStats, RelayCounters, RelayStatus
from rocketmq_tiered.server.proxy.upstream import InflightLimit
from rocketmq_tiered.server.wire.connection import Connection
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.settings.sections import ServeSettings

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
        clock: Clock = MACHINE_CLOCK,
        *,
        checks_clients: bool = False,
    ) -> None:
        """``relay`` sends requests to the broker; ``checks_clients``: the broker verifies signatures, which cover
        bodies, so that bodies are relayed as they came."""
        super().__init__(settings, HandlerTable(default=self._dispatch), clock)
        self._relay, self._inflight = relay, InflightLimit()
        self._handlers: ProxyHandlers | None = None
        self._relay_clients: dict[int, ClientT] = {}
        self._reads = GroupReadStats()
        self._checks_clients = checks_clients

    @property
    def bind(self) -> str:
        """The address to listen on, as set."""
        return self._settings.bind

    async def start(self) -> tuple[str, int]:
        """Listen; returns the bound address. Raises OSError when the port is taken, UsageError for bad settings."""
        options = server_options(self._settings, self.clients.names_group, keeps_bodies=self._checks_clients)
        return await self._listen(options)

    def open_archive(self, handlers: ProxyHandlers, key: bytes = b"") -> None:
        """Let ``handlers`` answer their codes from now on. ``key``: the archive's private key."""
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
            self.clients.closed(client)
            client.upstream.close()

    async def _answer_or_relay(self, request: Request, client: ClientT) -> Response | None:
        """Answer a request by the handler of its code if the archive is open and there is one; else relay it to the
        broker."""
        handler = None if self._handlers is None else self._handlers.get(request.code)
        await client.connection.writable()  # no further replies for a client that does not read
        if handler is None:
            return await self._relay.relay(request, client)
        for name in ("topic", "consumerGroup"):
            request.name(name, "")  # checks the length: handlers and statistics cache these
        self.counters.answered[request.code] += 1
        response = await handler(request, client.upstream)
        self._reads.note(request, response)
        self.counters.recreated += response is not None and response.remark == RECREATED
        return response

    def _join(self, request: Request, client: ClientT) -> None:
        """Apply a consumer's heartbeat."""
        self.clients.heartbeat(Request(request.command, client))

    def _leave(self, request: Request, client: ClientT) -> None:
        group = request.text("consumerGroup", "")
        if group:
            self.clients.leave(request.text("clientID"), group, client)

    def _group_readings(self) -> tuple[GroupReading, ...]:
        return self._reads.readings(self._group_sizes())
