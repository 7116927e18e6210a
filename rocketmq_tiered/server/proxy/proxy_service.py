"""Proxy mode: the sidecar stands in front of a live broker. Decides who answers which request.

    105, 106                  the name server's reply with this process in it (name_servers.py)
    name-server codes         relayed to a name server
    34, 35 of consumers       recorded; the client sends them to the broker too, as to every broker of a route
    sends of far timers       sent to the gateway topic instead, recalls of these too (timer_gateway.py)
    codes of ``handlers``     answered from the archive and the broker together
    all others                relayed to the broker over the client's own connection, never twice

Heartbeats of consumers are not relayed: a broker lists a member once for each connection, and a client listed twice
gets half of its queues. Heartbeats of pure producers are relayed: producers dial id 0 only.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fetcher.policy.read_policy import ReadPolicies
from rocketmq_tiered.server.listen.options import parse_address
from rocketmq_tiered.server.proxy.broker_view import query_record
from rocketmq_tiered.server.proxy.name_servers import NameServers, Published, may_dial, rewritten
from rocketmq_tiered.server.proxy.proxy_handlers import ProxyHandlers, relayed
from rocketmq_tiered.server.proxy.relay import (
    Destination,
    ProxyClient,
    Relay,
    destination_of,
)
from rocketmq_tiered.server.proxy.relay_service import RelayService
from rocketmq_tiered.server.proxy.relay_status import ProxyStatus, RelayCounters
from rocketmq_tiered.server.proxy.timer_gateway import CODES as TIMER_CODES
from rocketmq_tiered.server.proxy.timer_gateway import GatewayConfig, TimerGateway, new_counts
from rocketmq_tiered.server.proxy.upstream import InflightLimit, RemotingUpstream
from rocketmq_tiered.server.security.authorizer import record_at
from rocketmq_tiered.server.wire.connection import Connection
from rocketmq_tiered.server.wire.request import Request, Response
from tiered.errors import CorruptionError, ThrottledError, UnavailableError
from tiered.remoting.client import is_refusal
from tiered.remoting.command import RequestCode, ResponseCode
from tiered.remoting.tls import ClientTls
from tiered.settings.sections import ServeSettings

logger = logging.getLogger(__name__)

MERGED_CODES = frozenset(
    {
        RequestCode.PULL_MESSAGE,
        RequestCode.LITE_PULL_MESSAGE,
        RequestCode.GET_MIN_OFFSET,
        RequestCode.GET_MAX_OFFSET,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        RequestCode.GET_EARLIEST_MSG_STORETIME,
        RequestCode.VIEW_MESSAGE_BY_ID,
        RequestCode.QUERY_MESSAGE,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
    }
)
"""The broker's reply alone would be wrong for these: clients retry them until the archive is open."""


NAMED_BY_OFFSET: Mapping[int, str] = {
    RequestCode.CONSUMER_SEND_MSG_BACK: "offset",
    RequestCode.END_TRANSACTION: "commitLogOffset",
}
"""Fields with the physical offset of a message, which the broker copies whatever topic the request names."""


@dataclass(frozen=True)
class ProxyConfig:
    """The broker's name and address, its name servers, and the address clients dial. ``tls``: for the connections to
    broker and name servers; None: plain. ``checks_clients``: the broker has access control.
    ``timers``: None: timers are relayed."""

    broker: str
    broker_address: str
    name_servers: Sequence[str]
    advertise: str
    tls: ClientTls | None = None
    checks_clients: bool = False
    timers: GatewayConfig | None = None


@dataclass
class ProxyCounters(RelayCounters):
    """``routes``: routes sent to clients with this process in them. ``timers``: see TimerGateway."""

    routes: int = 0
    timers: dict[str, int] = field(default_factory=new_counts)


class ProxyService(RelayService[ProxyClient]):
    """Serves clients from the archive and, over their own connections, from the broker."""

    section = "serve"

    def __init__(self, config: ProxyConfig, settings: ServeSettings, policies: ReadPolicies) -> None:
        """``config``: the broker and its name servers; ``policies``: which topics are read from the archive. If none
        is, clients get the broker's own routes."""
        self.counters: ProxyCounters = ProxyCounters()
        super().__init__(
            settings,
            Relay(self.counters),
            checks_clients=config.checks_clients,
        )
        self._config, self._policies = config, policies
        self._published = Published(config.broker, config.advertise)
        # A limit of its own: a hanging broker does not hold up routes.
        self._name_servers = NameServers(config.name_servers, InflightLimit(), config.tls)
        self.timers: TimerGateway | None = None
        if config.timers is not None:
            self.timers = TimerGateway(config.timers, config.broker, self.counters.timers)
        self._is_loopback_logged = False
        self.table.register(RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.GET_BROKER_CLUSTER_INFO)(
            self._route
        )
        self.table.register(RequestCode.HEART_BEAT)(self._heartbeat)
        self.table.register(RequestCode.UNREGISTER_CLIENT)(self._unregister)

    async def start(self) -> tuple[str, int]:
        parse_address(self._config.advertise, "serve.advertise")
        bound = await super().start()
        self._spawn(self._name_servers.watch())
        return bound

    def open_archive(self, handlers: ProxyHandlers, key: bytes = b"") -> None:
        super().open_archive(handlers, key)
        if self.timers is not None:
            self.timers.key = key

    def apply(self, policies: ReadPolicies) -> None:
        """Use other read policies, in routes from the next request on. On the event loop's thread."""
        self._policies = policies

    async def close(self, drain_s: float = 5.0) -> None:
        await super().close(drain_s)
        self._name_servers.close()

    def status(self) -> ProxyStatus:
        """What status, metrics and the admin page show; called from their threads too."""
        clients = list(self._relay_clients.values())
        return ProxyStatus(
            self._config.advertise,
            self._connection_count,
            is_archive_open=self._handlers is not None,
            groups=self._group_readings(),
            broker_connections=sum(client.upstream.is_connected for client in clients),
            has_plain_accounts=self.has_plain_accounts,
            name_server_problem=self._name_servers.problem,
        )

    def _connect(self, connection: Connection) -> ProxyClient:
        config = self._config
        return ProxyClient(
            connection,
            lambda events: RemotingUpstream(config.broker_address, self._inflight, events, config.tls),
        )

    # -- name server ------------------------------------------------------------------------------------------

    async def _route(self, request: Request) -> Response:
        """GET_ROUTEINFO_BY_TOPIC and GET_BROKER_CLUSTER_INFO: the name server's reply, with this process at the
        broker's place for clients that can reach its address."""
        answer = await self._name_servers.ask(request.command)
        response = relayed(answer)
        if (
            answer.code != ResponseCode.SUCCESS
            or not answer.body
            or not self._may_publish(request.peer.address)
        ):
            return response
        try:
            body = rewritten(answer.body, self._published)
        except CorruptionError as error:
            raise UnavailableError(
                f"the name server's reply to a request for routes is damaged: {error}"
            ) from error
        self.counters.routes += 1
        return Response(response.code, response.ext, (body,), response.remark, response.version)

    def _may_publish(self, client_address: str) -> bool:
        """Return whether a client may get this process's address in routes. It may not if no topic is read from the
        archive, or if the address is a loopback one and the client is on another host, which is logged once."""
        if not self._policies.reads_anything:
            return False
        if may_dial(self._config.advertise, client_address):
            return True
        if not self._is_loopback_logged:
            self._is_loopback_logged = True
            logger.warning(
                "serve.advertise is a loopback address: clients on other hosts get the broker's own routes",
                extra={"advertise": self._config.advertise, "client": client_address},
            )
        return False

    # -- membership -------------------------------------------------------------------------------------------

    async def _heartbeat(self, request: Request) -> Response | None:
        """HEART_BEAT: record the groups of a consumer, and answer it; consumers send the broker a heartbeat of their
        own. A producer's is relayed, as the broker checks transactions over this connection."""
        client = self._client(request)
        if request.document().get("consumerDataSet"):
            self._join(request, client)
            self.counters.answered[request.code] += 1
            return Response(version=await self._relay.version(client))
        client.is_registered = True
        return await self._relay.relay(request, client)

    async def _unregister(self, request: Request) -> Response | None:
        client = self._client(request)
        self._leave(request, client)
        if client.is_registered:
            return await self._relay.relay(request, client)
        return Response()

    # -- other requests ---------------------------------------------------------------------------------------

    async def _dispatch(self, request: Request) -> Response | None:
        """Answer or relay a request: to a name server or the broker, as its code says, or with the archive's part in
        the reply. Until the archive is open, requests that need it are refused, so that the client repeats them."""
        code = request.code
        destination = destination_of(code)
        if destination is Destination.ANY_NAME_SERVER:
            return relayed(await self._name_servers.ask(request.command))
        if destination is Destination.ALL_NAME_SERVERS:
            return relayed(await self._name_servers.ask_all(request.command))
        if destination is Destination.NONE:
            return Response(ResponseCode.NO_PERMISSION, remark="brokers register at the real name servers")
        client = self._client(request)
        if code == RequestCode.CONSUMER_SEND_MSG_BACK and request.number("offset", -1) == 0:
            # A broker that has deleted its first message reads its oldest one instead, and would retry that. On this
            # reply the client sends the message itself.
            return _no_message(0)
        if (field := NAMED_BY_OFFSET.get(code)) is not None:
            refusal = await self._refusal_of_record(request, client, field)
            if refusal is not None:
                return refusal
        if self._handlers is None and code in MERGED_CODES:
            raise ThrottledError(
                "this process is starting and has not opened its archive yet: repeat the request"
            )
        if self.timers is not None and code in TIMER_CODES:
            try:
                answer = await self.timers.answer(
                    request, client.upstream, lambda send: self._relay.relay(send, client)
                )
            except UnavailableError as error:
                return Response(
                    ResponseCode.SERVICE_NOT_AVAILABLE, remark=f"the broker cannot be reached: {error}"
                )
            if answer is not None:
                return answer[0]
        return await self._answer_or_relay(request, client)

    async def _refusal_of_record(self, request: Request, client: ProxyClient, field: str) -> Response | None:
        """Return the refusal of a request that names a message by the physical offset in ``field``, if the client's
        account may not use the topic of that message; None if it may. The message is read from the broker."""
        if not self._settings.acl_file:
            return None
        phys = request.number(field)
        answer = await query_record(request.command, client.upstream, field)
        if is_refusal(answer):
            return relayed(answer)
        if record_at(answer.body, phys) is None:
            return _no_message(phys)
        return self._authorizer.refusal_of_record(request, answer.body, phys)


def _no_message(phys: int) -> Response:
    """The reply of a broker that does not have the message; a consumer then sends a retry message with the whole
    content."""
    return Response(ResponseCode.SYSTEM_ERROR, remark=f"look message by offset failed, {phys}")
