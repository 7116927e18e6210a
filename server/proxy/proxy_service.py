"""The proxy on one port: who answers which request, and the end of clients and their broker connections.

    105, 106                  the name server's answer with us in it (routes.py)
    name-server codes         relayed to a name server
    34, 35 of consumers       noted; the client tells the broker itself, as it tells every broker of a route
    codes of ``handlers``     answered from the archive and the broker together
    all others                relayed to the broker by the client's own connection, never twice

Consumers' heartbeats are not relayed: a broker lists a member once for each connection it came by, and a client that
is listed twice is given half of its queues only. Those of mere producers are: they dial id 0 only.

Owns wiring. Does not own the socket (listener.py), relaying (relay.py) nor what is archived.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from server.groups.client_table import ClientTable
from server.listen.options import parse_address, server_options
from server.proxy.group_reads import GroupReadStats
from server.proxy.inflight_limit import InflightLimit
from server.proxy.name_servers import NameServers
from server.proxy.proxy_client import ProxyClient
from server.proxy.proxy_handlers import ProxyHandler, ProxyHandlers, relayed
from server.proxy.proxy_relay import Relay
from server.proxy.proxy_routes import Published, may_dial, reads_anything, rewritten
from server.proxy.proxy_status import ProxyCounters, ProxyStatus
from server.proxy.relay_rules import Way, destination_of
from server.wire.codes import RequestCode, ResponseCode
from server.wire.connection import Connection
from server.wire.listener import Listener
from server.wire.request import Handler, HandlerTable, Request, Response
from tiered.errors import CorruptionError, ThrottledError, UnavailableError
from tiered.remoting.tls import ClientTls
from tiered.settings.sections import ReadSettings, ServeSettings

logger = logging.getLogger(__name__)

EXPIRE_EVERY_S = 5.0
MERGED_CODES = frozenset({
    RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE, RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, RequestCode.GET_EARLIEST_MSG_STORETIME, RequestCode.VIEW_MESSAGE_BY_ID,
    RequestCode.QUERY_MESSAGE, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
})  # fmt: skip
"""Answers of the broker alone would be wrong for these: until the archive is open they are put off."""


@dataclass(frozen=True)
class ProxyConfig:
    """Whose proxy it is: the broker's name and address, its name servers, and where clients dial us. ``tls``: how the
    broker and the name servers are dialled; None: plain."""

    broker: str
    broker_address: str
    name_servers: Sequence[str]
    advertise: str
    tls: ClientTls | None = None


class _Table(HandlerTable):
    """Codes nobody registered go to ``others``."""

    def __init__(self, others: Handler) -> None:
        super().__init__()
        self._others = others

    def find(self, code: int) -> Handler | None:
        return super().find(code) or self._others


class ProxyService:
    """Serves from ``start`` to ``close``, on the running event loop; ``open_archive`` gives it the handlers."""

    def __init__(self, place: ProxyConfig, settings: ServeSettings, policies: ReadSettings) -> None:
        self._place, self._settings, self._policies = place, settings, policies
        self._published = Published(place.broker, place.advertise)
        self._gate = InflightLimit()
        # Not behind what a broker that hangs leaves unanswered.
        self._name_servers = NameServers(place.name_servers, InflightLimit(), place.tls)
        self._handlers: ProxyHandlers | None = None
        self._members: dict[int, ProxyClient] = {}
        self._server: Listener | None = None
        self._expiry: asyncio.Task[None] | None = None
        self._told_loopback = False
        self.clients = ClientTable(time.monotonic, bytes_max=settings.session_bytes_max)
        """What consumers subscribe to, from their heartbeats."""
        self.counters = ProxyCounters()
        self._relay = Relay(self.counters)
        self._reads = GroupReadStats()

    async def start(self) -> tuple[str, int]:
        """Listen and serve; the address bound. Raises OSError when the port is taken, UsageError for bad settings."""
        settings = self._settings
        parse_address(self._place.advertise, "serve.advertise")
        table = _Table(self._other)
        table.register(RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.GET_BROKER_CLUSTER_INFO)(self._route)
        table.register(RequestCode.HEART_BEAT)(self._heartbeat)
        table.register(RequestCode.UNREGISTER_CLIENT)(self._unregister)
        self._server = Listener(table, server_options(settings), on_close=self._closed)
        bound = await self._server.start()
        self._expiry = asyncio.create_task(self._expire())
        return bound

    def open_archive(self, handlers: ProxyHandlers) -> None:
        """From now on these answer their codes."""
        self._handlers = handlers

    def apply(self, policies: ReadSettings) -> None:
        """Other read policies: routes follow when clients ask next. On the event loop's thread."""
        self._policies = policies

    async def close(self, drain_s: float = 5.0) -> None:
        """Accept nothing more, let requests end, hang up on both sides."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._server is not None:
            await self._server.close(drain_s)
        for client in list(self._members.values()):
            client.close()
        self._name_servers.close()

    def status(self) -> ProxyStatus:
        """Who is connected. Callable from any thread."""
        groups = sorted((group.name, len(group.members)) for group in self.clients.groups())
        server, members = self._server, list(self._members.values())
        return ProxyStatus(
            self._place.advertise,
            len(server.connections) if server is not None else 0,
            sum(client.upstream.is_connected for client in members),
            self._handlers is not None,
            groups,
            self._reads.readings(groups),
        )

    # -- clients ----------------------------------------------------------------------------------------------

    def _client(self, request: Request) -> ProxyClient:
        peer = request.peer
        found = self._members.get(peer.id)
        if found is None:
            assert isinstance(peer, Connection)
            place = self._place
            found = ProxyClient(peer, place.broker_address, self._gate, place.tls)
            self._members[peer.id] = found
        return found

    def _closed(self, connection: Connection) -> None:
        client = self._members.pop(connection.id, None)
        if client is not None:
            self.clients.closed(client.quiet)
            client.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            self.clients.expire()

    # -- name server ------------------------------------------------------------------------------------------

    async def _route(self, request: Request) -> Response:
        answer = await self._name_servers.ask(request.command)
        found = relayed(answer)
        if (
            answer.code != ResponseCode.SUCCESS
            or not answer.body
            or not self._may_publish(request.peer.address)
        ):
            return found
        try:
            body = rewritten(answer.body, self._published)
        except CorruptionError as error:
            raise UnavailableError(f"the name server's answer does not parse: {error}") from error
        self.counters.routes += 1
        return Response(found.code, found.ext, (body,), found.remark, found.version)

    def _may_publish(self, client_address: str) -> bool:
        if not reads_anything(self._policies):
            return False
        if may_dial(self._place.advertise, client_address):
            return True
        if not self._told_loopback:
            self._told_loopback = True
            logger.warning(
                "clients on other hosts get the real routes: serve.advertise names this host only",
                extra={"advertise": self._place.advertise, "client": client_address},
            )
        return False

    # -- membership -------------------------------------------------------------------------------------------

    async def _heartbeat(self, request: Request) -> Response | None:
        client = self._client(request)
        if request.document().get("consumerDataSet"):
            self.clients.heartbeat(Request(request.command, client.quiet))
            self.counters.answered[request.code] += 1
            return Response(version=await self._relay.version(client))
        client.is_registered = True
        return await self._relay.relay(request, client)

    async def _unregister(self, request: Request) -> Response | None:
        client = self._client(request)
        group = request.text("consumerGroup", "")
        if group:
            self.clients.leave(request.text("clientID"), group, client.quiet)
        if client.is_registered:
            return await self._relay.relay(request, client)
        return Response()

    # -- all the rest -----------------------------------------------------------------------------------------

    async def _other(self, request: Request) -> Response | None:
        code = request.code
        way = destination_of(code)
        if way is Way.NAME_SERVER:
            return relayed(await self._name_servers.ask(request.command))
        if way is Way.NAME_SERVERS:
            return relayed(await self._name_servers.tell_all(request.command))
        if way is Way.REFUSED:
            return Response(ResponseCode.NO_PERMISSION, remark="brokers register at the real name servers")
        client = self._client(request)
        if code == RequestCode.CONSUMER_SEND_MSG_BACK and request.number("offset", -1) == 0:
            # A broker that has deleted its first message takes the oldest it has for it, and sends that one again.
            # Told that it is not there, the client sends the message itself.
            return Response(ResponseCode.SYSTEM_ERROR, remark="look message by offset failed, 0")
        if self._handlers is None and code in MERGED_CODES:
            raise ThrottledError("the archive is not open yet")
        handler = self._handlers.get(code) if self._handlers is not None else None
        # Whoever does not take its answers gets no more of them made.
        await client.connection.writable()
        return await (
            self._relay.relay(request, client) if handler is None else self._merged(handler, request, client)
        )

    async def _merged(self, handler: ProxyHandler, request: Request, client: ProxyClient) -> Response | None:
        for name in ("topic", "consumerGroup"):
            request.name(name, "")  # handlers and statistics remember these
        self.counters.answered[request.code] += 1
        response = await handler(request, client.upstream)
        self._reads.note(request, response)
        return response
