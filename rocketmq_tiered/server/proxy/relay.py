"""Relays a request to the broker over its client's own connection, once; where a request goes, how long its reply may
take, and the reply while the broker is away.

Owns the broker's version, as last seen in a reply; the numbering of the broker's requests to a client (notices, resets,
status, transaction checks); and closing the client when its broker connection is lost. Which requests are relayed is
the services' decision. Sources: org.apache.rocketmq.remoting.protocol.RequestCode;
DefaultMQProducer.retryResponseCodes; RemoteBrokerOffsetStore.readOffset.
"""

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import Enum

from rocketmq_tiered.server.proxy.proxy_handlers import relayed
from rocketmq_tiered.server.proxy.relay_status import RelayCounters
from rocketmq_tiered.server.proxy.upstream import LinkEvents, RemotingUpstream, TimedOutError
from rocketmq_tiered.server.wire.connection import RESPONSE_FLAG, Connection
from rocketmq_tiered.server.wire.request import Request, Response
from tiered.errors import ThrottledError, UnavailableError
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode, request_name


class Destination(Enum):
    """Who answers a request."""

    ANY_NAME_SERVER = "any name server"
    ALL_NAME_SERVERS = "all name servers"
    BROKER = "broker"
    NONE = "none"


READS_OF_NAME_SERVERS = frozenset(
    {
        RequestCode.GET_KV_CONFIG,
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        RequestCode.GET_KVLIST_BY_NAMESPACE,
        RequestCode.GET_TOPICS_BY_CLUSTER,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
        RequestCode.GET_UNIT_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
        RequestCode.GET_NAMESRV_CONFIG,
        RequestCode.GET_BROKER_MEMBER_GROUP,
    }
)
WRITES_OF_NAME_SERVERS = frozenset(
    {
        RequestCode.PUT_KV_CONFIG,
        RequestCode.DELETE_KV_CONFIG,
        RequestCode.WIPE_WRITE_PERM_OF_BROKER,
        RequestCode.RESET_CONSUMER_OFFSET_IN_BROKER,
        RequestCode.DELETE_TOPIC_IN_NAMESRV,
        RequestCode.REGISTER_TOPIC_IN_NAMESRV,
        RequestCode.UPDATE_NAMESRV_CONFIG,
        RequestCode.ADD_WRITE_PERM_OF_BROKER,
    }
)
AMONG_SERVERS = frozenset(
    {
        RequestCode.REGISTER_BROKER,
        RequestCode.UNREGISTER_BROKER,
        RequestCode.QUERY_DATA_VERSION,
        RequestCode.ADD_BROKER,
        RequestCode.REMOVE_BROKER,
        RequestCode.BROKER_HEARTBEAT,
        RequestCode.NOTIFY_MIN_BROKER_ID_CHANGE,
        RequestCode.EXCHANGE_BROKER_HA_INFO,
        RequestCode.RESET_MASTER_FLUSH_OFFSET,
        RequestCode.NOTIFY_BROKER_ROLE_CHANGED,
    }
)
"""Codes between brokers, name servers and controllers: relayed they would act for the wrong process."""
_SENDS = frozenset(
    {
        RequestCode.SEND_MESSAGE,
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
        RequestCode.CONSUMER_SEND_MSG_BACK,
        RequestCode.END_TRANSACTION,
    }
)
_TIMEOUT_S = 60.0
"""Longer than any client's own limit, which decides."""
_MARGIN_S = 10.0
_WAIT_FIELDS = ("suspendTimeoutMillis", "pollTime")


class Failure(Enum):
    """The outcome for a client whose request gets no reply from the broker."""

    BUSY = ResponseCode.SYSTEM_BUSY
    NOT_AVAILABLE = ResponseCode.SERVICE_NOT_AVAILABLE
    SILENCE = -1
    CLOSE = -2


def destination_of(code: int) -> Destination:
    """Who answers request ``code``."""
    if code in READS_OF_NAME_SERVERS:
        return Destination.ANY_NAME_SERVER
    if code in WRITES_OF_NAME_SERVERS:
        return Destination.ALL_NAME_SERVERS
    return Destination.NONE if code in AMONG_SERVERS else Destination.BROKER


def relay_timeout_s(fields: Mapping[str, str]) -> float:
    """How long the broker may take: longer than the client's own long poll."""
    waits = [int(value) for name in _WAIT_FIELDS if (value := fields.get(name, "")).isdecimal()]
    return max(_TIMEOUT_S, max(waits, default=0) / 1000 + _MARGIN_S)


def failure_of(code: int, *, was_sent: bool, timed_out: bool = False) -> Failure:
    """Return what a client gets for a request ``code`` without the broker's reply, so that it repeats the request only
    if that is safe. ``was_sent``: the request may have taken effect; ``timed_out``: the broker took too long."""
    if timed_out:
        return Failure.SILENCE  # the client's own limit has passed
    if code == RequestCode.QUERY_CONSUMER_OFFSET:
        # A 4.9 client reads any code as "no offset yet" and starts over; it retries after a closed connection.
        return Failure.CLOSE
    if code in _SENDS:
        return Failure.CLOSE if was_sent else Failure.NOT_AVAILABLE
    return Failure.BUSY


logger = logging.getLogger(__name__)

FORWARDED_MAX = 256
"""Requests of the broker without a client's reply yet; older ones are dropped."""


class RelayClient:
    """A client's ``connection``, and its connection to the broker, made when first needed. To the table of clients it
    is a peer."""

    def __init__(
        self, connection: Connection, upstream: RemotingUpstream, allows: Callable[[int], bool]
    ) -> None:
        """``allows`` decides by request code which pushes of the table of clients reach the client: the broker sends it
        the others."""
        self.connection, self.upstream, self._allows = connection, upstream, allows

    @property
    def address(self) -> str:
        return self.connection.address

    @property
    def id(self) -> int:
        return self.connection.id

    def push(self, code: int, ext: Mapping[str, str], body: bytes = b"") -> None:
        if self._allows(code):
            self.connection.push(code, ext, body)


class ProxyClient(RelayClient):
    """A client that the broker may send requests to. ``connect`` makes its upstream."""

    def __init__(self, connection: Connection, connect: Callable[[LinkEvents], RemotingUpstream]) -> None:
        """``connect`` makes the connection to the broker for the given callbacks. The broker's requests are forwarded
        to the client under numbers of this process. It also notifies the client of changed groups, so that the table of
        clients need not."""
        upstream = connect(LinkEvents(self._forward, self._lost))
        super().__init__(connection, upstream, lambda code: code != RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
        self.is_registered = False
        """Whether the broker has this client registered through our connection."""
        self._opaques = itertools.count(1)
        self._forwarded: OrderedDict[int, int] = OrderedDict()
        self._answers: set[asyncio.Task[None]] = set()
        connection.on_answer = self._forward_reply

    def _forward(self, command: RemotingCommand) -> None:
        opaque = next(self._opaques) & 0x7FFFFFFF
        if self.connection.forward(replace(command, opaque=opaque)) and not command.is_oneway:
            self._forwarded[opaque] = command.opaque
            if len(self._forwarded) > FORWARDED_MAX:
                self._forwarded.popitem(last=False)

    def _forward_reply(self, command: RemotingCommand) -> None:
        """Send the client's reply to a request of the broker on, under the number that the broker gave the request.
        Replies to unknown or dropped requests are ignored."""
        opaque = self._forwarded.pop(command.opaque, None)
        if opaque is None:
            return
        task = asyncio.get_running_loop().create_task(
            self._answer(replace(command, opaque=opaque, flag=command.flag | RESPONSE_FLAG))
        )
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, command: RemotingCommand) -> None:
        with suppress(UnavailableError):  # the broker connection is gone
            await self.upstream.answer(command)

    def _lost(self, why: str, had_requests: bool) -> None:
        """Close the client's connection too, as that to the broker was lost, if the broker knew this client or
        ``had_requests`` of it without a reply."""
        self._forwarded.clear()
        if self.is_registered or had_requests:
            # The broker has dropped its registration, and pending requests may or may not have taken effect. Clients
            # handle a closed connection.
            self.connection.close(f"the connection to the broker for this client was lost: {why}")


async def _no_fallback(request: Request) -> Response | None:
    return None


class Relay:
    """Relays requests of all clients to one broker. ``fallback`` may reply instead while the broker is away."""

    def __init__(
        self,
        counters: RelayCounters,
        fallback: Callable[[Request], Awaitable[Response | None]] = _no_fallback,
    ) -> None:
        """``counters``: what was relayed, for the status of the service; ``fallback`` returns a reply to a request
        while the broker is away, or None."""
        self._counters, self._fallback = counters, fallback
        self._version: int | None = None
        self._is_outage_logged = False

    async def version(self, client: RelayClient) -> int | None:
        """Return the broker's version, which replies to heartbeats carry, as consumers do not use SQL92 with old
        brokers. Unless a reply has shown it, the broker is queried; None if it is away."""
        if self._version is None:
            probe = RemotingCommand(
                RequestCode.GET_CONSUMER_LIST_BY_GROUP, 0, ext_fields={"consumerGroup": "-"}
            )
            try:
                self._version = (await client.upstream.call(probe, 1.0)).version
            except UnavailableError:
                return None
        return self._version

    async def relay(self, request: Request, client: RelayClient) -> Response | None:
        """Relay a request to the broker over its client's connection, and return the reply to the client: the broker's,
        or one that says it is away. None: the client gets no reply, as to a one-way request."""
        command = request.command
        try:
            if command.is_oneway:
                await client.upstream.send(command)
                self._counters.relayed[request.code] += 1
                return None
            answer = await client.upstream.relay(
                command, relay_timeout_s(command.ext_fields), client.connection.writable
            )
        except UnavailableError as error:
            return await self._fallback(request) or self._failure_reply(request, client, error)
        self._counters.relayed[request.code] += 1
        self._version = answer.version
        if self._is_outage_logged:
            self._is_outage_logged = False
            logger.info("the broker can be reached again, and requests are relayed to it")
        return relayed(answer)

    def _failure_reply(
        self, request: Request, client: RelayClient, error: UnavailableError
    ) -> Response | None:
        """Return what a client gets if the broker did not reply because of ``error``: a refusal, or None after which it
        gets nothing or its connection is closed, whichever makes clients of its version repeat safely."""
        failure = failure_of(
            request.code,
            was_sent=not isinstance(error, ThrottledError),
            timed_out=isinstance(error, TimedOutError),
        )
        self._counters.failed[failure.name] += 1
        # One warning an outage: every client repeats its requests while the broker is away.
        level = logging.DEBUG if self._is_outage_logged else logging.WARNING
        self._is_outage_logged = True
        where = {"client": client.connection.address, "request": request_name(request.code)}
        logger.log(level, "a client's request got no reply from the broker: %s", error, extra=where)
        if failure is Failure.CLOSE:
            client.connection.close(
                f"the broker did not reply to request {request_name(request.code)}: {error}"
            )
        if failure in (Failure.CLOSE, Failure.SILENCE):
            return None
        return Response(failure.value, remark=f"the broker cannot be reached: {error}")
