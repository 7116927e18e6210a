"""Slave mode: this process in the broker's routes as one of its slaves. Decides who answers which request.

    11, 361             the archive, or the master's reply, with the broker to pull from next (pull_redirect.py)
    34, 35              recorded; clients send them to the master too, as to every broker of a route
    26, 28              this process's configuration and runtime table
    codes of handlers   archive and master together, as in proxy mode
    14, 15, 38, …       relayed to the master, never twice (relay.py)
    sends, changes      refused, or acknowledged without effect
    all others          not supported

The only group state here is membership, from heartbeats: it answers member lists while the master is away. No offset is
answered or accepted then: clients keep theirs and commit again later.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rocketmq_tiered.server.backend.route_handlers import runtime_table
from rocketmq_tiered.server.groups.client_table import register_client_handlers
from rocketmq_tiered.server.proxy.proxy_handlers import ProxyHandlers
from rocketmq_tiered.server.proxy.relay import Relay, RelayClient
from rocketmq_tiered.server.proxy.relay_service import RelayService
from rocketmq_tiered.server.proxy.relay_status import RelayCounters, SlaveStatus
from rocketmq_tiered.server.proxy.upstream import RemotingUpstream
from rocketmq_tiered.server.slave.master_monitor import MasterMonitor
from rocketmq_tiered.server.slave.pull_redirect import RedirectContext, RedirectCounters
from rocketmq_tiered.server.slave.registrar import SlaveRegistrar
from rocketmq_tiered.server.slave.registration import RegistrationState, SlaveConfig
from rocketmq_tiered.server.wire.connection import Connection
from rocketmq_tiered.server.wire.counted_log import CountedLog
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response, json_response
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import ThrottledError
from tiered.remoting.command import RequestCode, ResponseCode, request_name
from tiered.remoting.command import RequestCode as R
from tiered.remoting.credentials import Credentials
from tiered.settings.sections import ServeSettings
from tiered.timestamps import wall_ms

RELAYED: Final[frozenset[int]] = frozenset(
    {
        R.QUERY_CONSUMER_OFFSET,
        R.UPDATE_CONSUMER_OFFSET,
        R.GET_ALL_TOPIC_CONFIG,
        R.GET_ALL_DELAY_OFFSET,
        R.GET_CONSUMER_LIST_BY_GROUP,
        R.CHECK_CLIENT_CONFIG,
        R.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        R.GET_CONSUMER_CONNECTION_LIST,
        R.INVOKE_BROKER_TO_RESET_OFFSET,
        R.QUERY_TOPIC_CONSUME_BY_WHO,
        R.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
        R.QUERY_CONSUME_QUEUE,
        R.QUERY_TOPICS_BY_CONSUMER,
        R.GET_TOPIC_CONFIG,
        R.GET_SUBSCRIPTIONGROUP_CONFIG,
        R.GET_BROKER_CLUSTER_ACL_INFO,
        R.GET_BROKER_CLUSTER_ACL_CONFIG,
        R.REGISTER_FILTER_SERVER,
        R.GET_CONSUMER_RUNNING_INFO,
        R.VIEW_BROKER_STATS_DATA,
        R.AUTH_GET_USER,
        R.AUTH_LIST_USER,
        R.AUTH_GET_ACL,
        R.AUTH_LIST_ACL,
    }
)
"""Answered by the master: offsets, members, configurations, statistics, access rules (read), group operations."""

ACKNOWLEDGED: Final[frozenset[int]] = frozenset(
    {
        R.UPDATE_BROKER_CONFIG,
        R.DELETE_TOPIC_IN_BROKER,
        R.UPDATE_AND_CREATE_ACL_CONFIG,
        R.DELETE_ACL_CONFIG,
        R.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG,
        R.AUTH_CREATE_USER,
        R.AUTH_UPDATE_USER,
        R.AUTH_DELETE_USER,
        R.AUTH_CREATE_ACL,
        R.AUTH_UPDATE_ACL,
        R.AUTH_DELETE_ACL,
    }
)
"""Changes that tools make at every broker of a cluster. Nothing changes here, and a refusal would stop the tool before
the next broker. """

READ_ONLY: Final[frozenset[int]] = frozenset(
    {
        R.SEND_MESSAGE,
        R.SEND_MESSAGE_V2,
        R.SEND_BATCH_MESSAGE,
        R.SEND_REPLY_MESSAGE,
        R.SEND_REPLY_MESSAGE_V2,
        R.CONSUMER_SEND_MSG_BACK,
        R.END_TRANSACTION,
        R.UPDATE_AND_CREATE_TOPIC,
        R.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        R.DELETE_SUBSCRIPTIONGROUP,
    }
)
"""Accepted by a master only: refused, as by any slave."""

BETWEEN_REPLICAS: Final[frozenset[int]] = frozenset({R.EXCHANGE_BROKER_HA_INFO})
"""Sent only by a master that starts in a cluster whose slaves may act as master. It waits for
every member to follow it."""


logger = logging.getLogger(__name__)

REGISTER_EVERY_S = 30.0
"""Brokers register as often. Name servers drop a broker after 120 s without a registration."""
MEMBERS_COMPLETE_S = 90.0
"""Clients refresh routes and send heartbeats every 30 s: this long after registration all members are here."""


@dataclass(frozen=True)
class SlaveOptions:
    """``serve``: limits, TLS and access rules, with the slave's ``bind``. ``broker_conf``: properties of the broker's
    configuration file. ``credentials``: for requests to the master in the sidecar's own name. ``checks_clients``: the
    master has access control."""

    slave: SlaveConfig
    cluster: str
    serve: ServeSettings
    register_s: float = REGISTER_EVERY_S
    broker_conf: Mapping[str, str] | None = None
    credentials: Credentials | None = None
    checks_clients: bool = False


@dataclass
class SlaveCounters(RelayCounters):
    """``commits_dropped``: offset commits that came while the master was away."""

    commits_dropped: int = 0
    pulls: RedirectCounters = field(default_factory=RedirectCounters)


class SlaveService(RelayService[RelayClient]):
    """Serves as a slave of its broker. Registers at the name servers once the archive is open."""

    section = "slave"

    def __init__(self, options: SlaveOptions, clock: Clock = MACHINE_CLOCK) -> None:
        """``options``: the master, the registration and the port. Name servers get no registration before the archive
        is open."""
        self.counters: SlaveCounters = SlaveCounters()
        relay = Relay(self.counters, self._without_master)
        super().__init__(options.serve, relay, clock, checks_clients=options.checks_clients)
        self._options = options
        self.master = MasterMonitor(options.slave, options.broker_conf, options.credentials)
        self._registrar = SlaveRegistrar(options.slave, options.register_s, self.master)
        self.master.on_refusal = self._registrar.wake
        self.redirect = RedirectContext(
            options.slave.broker_id, lambda: self.master.is_available, counters=self.counters.pulls
        )
        self._registered_s: float | None = None
        """Since when name servers list this slave, so that members of groups connect to it; None: they do not."""
        self._started_ms = wall_ms()
        self._member_handlers = HandlerTable()
        """Answer requests for the members of groups while the master is away."""
        register_client_handlers(self._member_handlers, self.clients)
        self._log = CountedLog(logger, clock)
        self._expiring += [self._note_registration, self._log.tick]
        self.table.register(RequestCode.HEART_BEAT)(self._heartbeat)
        self.table.register(RequestCode.UNREGISTER_CLIENT)(self._unregister)

    async def start(self) -> tuple[str, int]:
        bound = await super().start()
        self.master.start()
        return bound

    def open_archive(self, handlers: ProxyHandlers, key: bytes = b"") -> None:
        """Let ``handlers`` answer their codes from now on, and register at the name servers. ``key``: the archive's
        private key."""
        # Relayed codes stay relayed: a reset in proxy mode notifies members itself, here the master does.
        super().open_archive(
            {code: handler for code, handler in handlers.items() if code not in RELAYED}, key
        )
        self._spawn(self._register())

    async def close(self, drain_s: float = 5.0) -> None:
        """Unregister, then close the connections after requests in progress had ``drain_s`` to finish."""
        await self._end_tasks()
        await self._registrar.leave()
        await super().close(drain_s)
        await self.master.close()

    def status(self) -> SlaveStatus:
        """What status, metrics and the admin page show; called from their threads too."""
        slave = self._options.slave
        return SlaveStatus(
            slave.advertise,
            self._connection_count,
            self._handlers is not None,  # whether the archive is open
            self._group_readings(),
            broker_id=slave.broker_id,
            is_master_available=self.master.is_available,
            redirects=self.master.redirects(),
            name_servers=tuple(zip(slave.name_servers, map(str, self._registrar.statuses()), strict=True)),
            master_failure=self.master.failure,
            has_plain_accounts=self.has_plain_accounts,
        )

    async def _register(self) -> None:
        await self.master.answered()  # without the master's configuration every registration is refused
        self._registrar.start()

    def _note_registration(self) -> None:
        states = {status.state for status in self._registrar.statuses()}
        if RegistrationState.REGISTERED in states:
            self._registered_s = (
                self._clock.monotonic_s() if self._registered_s is None else self._registered_s
            )
        elif RegistrationState.UNREACHABLE not in states:
            self._registered_s = None  # members that join now do not see this process in their routes

    def _are_members_complete(self) -> bool:
        return (
            self._registered_s is not None
            and self._clock.monotonic_s() - self._registered_s >= MEMBERS_COMPLETE_S
        )

    def _connect(self, connection: Connection) -> RelayClient:
        slave = self._options.slave
        upstream = RemotingUpstream(slave.broker_address, self._inflight, tls=slave.tls)
        # The master sends notices itself while it is available.
        return RelayClient(connection, upstream, lambda code: not self.master.is_available)

    # -- requests ---------------------------------------------------------------------------------------------

    async def _heartbeat(self, request: Request) -> Response:
        self.counters.answered[request.code] += 1
        self._join(request, self._client(request))
        return Response(version=self.master.version)

    async def _unregister(self, request: Request) -> Response:
        self.counters.answered[request.code] += 1
        self._leave(request, self._client(request))
        return Response()

    async def _dispatch(self, request: Request) -> Response | None:
        """Answer a request as a slave does, or relay it to the master. A request that only replicas get shows that the
        master takes this process for one, so that its configuration is checked again."""
        code, client = request.code, self._client(request)
        if code in RELAYED or (self._handlers is not None and code in self._handlers):
            return await self._answer_or_relay(request, client)
        if code == RequestCode.GET_BROKER_RUNTIME_INFO:
            return json_response({"table": runtime_table(self._started_ms)})
        if code == RequestCode.GET_BROKER_CONFIG:
            return Response(body=(self._config_text().encode(),))
        if code == RequestCode.GET_ALL_CONSUMER_OFFSET:
            return json_response({"offsetTable": {}})  # no broker may copy offsets from here
        if code in ACKNOWLEDGED:
            text = f"{request_name(code)} acknowledged without effect: this is a slave"
            self._log.note(logging.WARNING, text, request.peer.address)
            return Response()
        if code in READ_ONLY:
            return Response(ResponseCode.NO_PERMISSION, remark="this is a read-only slave")
        if code in BETWEEN_REPLICAS:
            self.master.suspect(
                f"this process got request {request_name(code)}, which a master sends only to slaves that may act as"
                " master"
            )
        if self._handlers is None and code in (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE):
            raise ThrottledError(
                "this process is starting and has not opened its archive yet: repeat the request"
            )
        remark = f"slave mode does not support {request_name(code)}"
        return Response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)

    async def _without_master(self, request: Request) -> Response | None:
        """Return the reply to a request while the master is away: to a question about members, once all of them are
        known here. None: the client gets an error."""
        code = request.code
        if code == RequestCode.UPDATE_CONSUMER_OFFSET:
            # Sent later it could move the group back. The client commits again.
            self.counters.commits_dropped += 1
        if code in (RequestCode.GET_CONSUMER_LIST_BY_GROUP, RequestCode.GET_CONSUMER_CONNECTION_LIST):
            handler = self._member_handlers.find(code)
            if handler is not None and self._are_members_complete():
                return await handler(request)
        return None

    def _config_text(self) -> str:
        """Return the configuration that this process shows to mqadmin, as lines of text: that of a slave to read
        from."""
        options = self._options
        lines = {
            "brokerClusterName": options.cluster,
            "brokerName": options.slave.broker,
            "brokerId": options.slave.broker_id,
            "brokerRole": "SLAVE",
            "brokerPermission": 4,
            "slaveReadEnable": "true",
        }
        return "".join(f"{name}={value}\n" for name, value in lines.items())
