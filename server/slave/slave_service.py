"""The slave's port: who answers which request, and the end of clients and their connections to the master.

    11, 361             the archive, or the master's answer relayed and judged, with where to go on (pull_redirect.py)
    34, 35              noted; clients tell the master themselves, as they tell every broker of a route
    26, 28              what this process is
    codes of handlers   archive and master together, as beside the proxy
    14, 15, 38, …       relayed to the master, never twice (relay.py)
    sends, changes      refused, or acknowledged without effect (requests.py)
    everything else     not supported

Nothing about groups is kept here but who their members are, by their heartbeats: that is told while the master is away.

Owns wiring. Does not own registering (registrar.py) nor what is said without a master (relay.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from server.backend.route_handlers import runtime_table
from server.groups.client_table import ClientTable
from server.listen.options import server_options
from server.proxy.group_reads import GroupReadStats
from server.proxy.inflight_limit import InflightLimit
from server.proxy.proxy_handlers import ProxyHandlers
from server.slave.master import MasterMonitor
from server.slave.registrar import Registrar
from server.slave.registration import RegistrationState, SlaveConfig
from server.slave.slave_relay import MasterRelay, SlaveClient
from server.slave.slave_requests import ACKNOWLEDGED, AMONG_REPLICAS, READ_ONLY, RELAYED
from server.slave.slave_status import SlaveCounters, SlaveStatus
from server.wire.codes import RequestCode, ResponseCode
from server.wire.connection import Connection
from server.wire.listener import Listener
from server.wire.request import HandlerTable, Request, Response, json_response
from tiered.errors import ThrottledError
from tiered.remoting.credentials import Credentials
from tiered.settings.sections import ReadSettings, ServeSettings

logger = logging.getLogger(__name__)

EXPIRE_EVERY_S = 5.0
MEMBERS_KNOWN_S = 90.0
"""Clients look at their routes and send heartbeats every 30 s: so long after we are listed, all members are known."""


@dataclass(frozen=True)
class SlaveOptions:
    """As what the slave stands there, and what it has to go by. ``file``: the properties of broker.conf;
    ``credentials``: of what the master is asked in our own name."""

    place: SlaveConfig
    cluster: str
    serve: ServeSettings
    """Limits, TLS and access rules; ``bind`` is the slave's."""
    register_s: float = 30.0
    file: Mapping[str, str] | None = None
    credentials: Credentials | None = None


class SlaveService:
    """Serves from ``start`` to ``close``, on the running event loop; registers once ``open_archive`` was called."""

    def __init__(self, side: SlaveOptions, now_s: Callable[[], float] = time.monotonic) -> None:
        self._side, self._now_s = side, now_s
        self.watch = MasterMonitor(side.place, side.file, side.credentials)
        self._registrar = Registrar(side.place, side.register_s, self.watch)
        self.watch.on_refusal = self._registrar.wake
        self._gate = InflightLimit()
        self._members: dict[int, SlaveClient] = {}
        self._handlers: ProxyHandlers = {}
        self._is_open = False
        self._server: Listener | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._listed_s: float | None = None
        self._started_ms = time.time_ns() // 1_000_000
        self.clients = ClientTable(now_s, bytes_max=side.serve.session_bytes_max)
        """Members of groups and what they subscribe to, from their heartbeats."""
        self.counters = SlaveCounters()
        self._reads = GroupReadStats()
        self._relay = MasterRelay(self.clients, self.counters, self._are_members_known)

    async def start(self) -> tuple[str, int]:
        """Listen; the address bound. Raises OSError when the port is taken, UsageError for bad settings."""
        table = _Table(self._answer)
        options = server_options(self._side.serve)
        self._server = Listener(table, options, on_close=self._closed)
        bound = await self._server.start()
        self.watch.start()
        self._tasks = [asyncio.create_task(self._expire())]
        return bound

    def open_archive(self, handlers: ProxyHandlers) -> None:
        """From now on these answer their codes, and clients are asked to come."""
        # What is relayed is so with an archive, too: a reset there tells members by us, and here the master does that.
        self._handlers = {code: handler for code, handler in handlers.items() if code not in RELAYED}
        self._is_open = True
        self._tasks.append(asyncio.create_task(self._register()))

    def apply(self, policies: ReadSettings) -> None:
        """Other read policies: the handlers' business."""

    async def close(self, drain_s: float = 5.0) -> None:
        """Unregister, accept nothing more, let requests end, hang up on both sides."""
        for task in self._tasks:
            task.cancel()
        await self._registrar.leave()
        if self._server is not None:
            await self._server.close(drain_s)
        for client in list(self._members.values()):
            client.upstream.close()
        await self.watch.close()

    def status(self) -> SlaveStatus:
        """How it stands. Callable from any thread."""
        groups = sorted((group.name, len(group.members)) for group in self.clients.groups())
        server, place = self._server, self._side.place
        return SlaveStatus(
            place.advertise,
            place.broker_id,
            len(server.connections) if server is not None else 0,
            self._is_open,
            self.watch.is_well,
            self.watch.redirects(),
            self._registrar.standings(),
            self._reads.readings(groups),
            self.watch.failure,
        )

    async def _register(self) -> None:
        # A round before the master has answered would only say so.
        await self.watch.heard()
        self._registrar.start()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            self.clients.expire()
            stands = {standing.stand for standing in self._registrar.standings()}
            if RegistrationState.REGISTERED in stands:
                self._listed_s = self._now_s() if self._listed_s is None else self._listed_s
            elif RegistrationState.UNREACHABLE not in stands:
                self._listed_s = None  # members that came meanwhile have not heard of us

    def _are_members_known(self) -> bool:
        return self._listed_s is not None and self._now_s() - self._listed_s >= MEMBERS_KNOWN_S

    # -- clients ----------------------------------------------------------------------------------------------

    def _client(self, request: Request) -> SlaveClient:
        peer = request.peer
        found = self._members.get(peer.id)
        if found is None:
            assert isinstance(peer, Connection)
            found = SlaveClient(peer, self._side.place, self._gate, self.watch)
            self._members[peer.id] = found
        return found

    def _closed(self, connection: Connection) -> None:
        client = self._members.pop(connection.id, None)
        if client is not None:
            self.clients.closed(client.peer)
            client.upstream.close()

    # -- requests ---------------------------------------------------------------------------------------------

    async def _answer(self, request: Request) -> Response | None:
        code, client = request.code, self._client(request)
        if code in (RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT):
            return await self._membership(request, client)
        handler = self._handlers.get(code)
        if handler is not None:
            # Whoever does not take its answers gets no more of them made.
            await client.connection.writable()
            for name in ("topic", "consumerGroup"):
                request.name(name, "")  # handlers and statistics remember these
            self.counters.answered[code] += 1
            response = await handler(request, client.upstream)
            self._reads.note(request, response)
            return response
        if code in RELAYED:
            return await self._relay.relay(request, client)
        if code == RequestCode.GET_BROKER_RUNTIME_INFO:
            return json_response({"table": runtime_table(self._started_ms)})
        if code == RequestCode.GET_BROKER_CONFIG:
            return Response(body=(self._config().encode(),))
        if code == RequestCode.GET_ALL_CONSUMER_OFFSET:
            return json_response({"offsetTable": {}})  # nobody may take offsets from here
        return self._said(request)

    def _said(self, request: Request) -> Response:
        """To what is neither read nor relayed."""
        code = request.code
        if code in ACKNOWLEDGED:
            logger.warning(
                "a change was acknowledged without effect",
                extra={"code": code, "client": request.peer.address},
            )
            return Response()
        if code in READ_ONLY:
            return Response(ResponseCode.NO_PERMISSION, remark="this is a slave, and it takes nothing")
        if code in AMONG_REPLICAS:
            self.watch.suspect(
                f"the master takes this process for a replica (code {code}): its slaves may act as master"
            )
        if not self._is_open and code in (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE):
            raise ThrottledError("the archive is not open yet")
        return Response(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=f"a slave does not answer code {code}"
        )

    async def _membership(self, request: Request, client: SlaveClient) -> Response:
        self.counters.answered[request.code] += 1
        if request.code == RequestCode.UNREGISTER_CLIENT:
            group = request.text("consumerGroup", "")
            if group:
                self.clients.leave(request.text("clientID"), group, client.peer)
            return Response()
        self.clients.heartbeat(Request(request.command, client.peer))
        return Response(version=self.watch.version)

    def _config(self) -> str:
        side, place = self._side, self._side.place
        lines = {
            "brokerClusterName": side.cluster, "brokerName": place.broker, "brokerId": place.broker_id,
            "brokerRole": "SLAVE", "brokerPermission": 4, "slaveReadEnable": "true",
        }  # fmt: skip
        return "".join(f"{name}={value}\n" for name, value in lines.items())


class _Table(HandlerTable):
    """Every code goes to ``answer``."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response | None]]) -> None:
        super().__init__()
        self._answer = answer

    def find(self, code: int) -> Callable[[Request], Awaitable[Response | None]] | None:
        return self._answer


def bound_at(serve: ServeSettings, bind: str) -> ServeSettings:
    """The limits and rules of ``serve`` for a port of its own."""
    return replace(serve, bind=bind)
