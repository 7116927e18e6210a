"""Relays a request to the broker over its client's own connection, once; and the reply when the broker is away.

Owns the broker's version, as last seen in a reply. Which requests are relayed is the services' decision.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from rocketmq_tiered.server.proxy.proxy_handlers import relayed
from rocketmq_tiered.server.proxy.relay_client import RelayClient
from rocketmq_tiered.server.proxy.relay_rules import Failure, failure_of, relay_timeout_s
from rocketmq_tiered.server.proxy.relay_status import RelayCounters
from rocketmq_tiered.server.proxy.upstream import TimedOutError
from rocketmq_tiered.server.wire.codes import RequestCode
from rocketmq_tiered.server.wire.request import Request, Response
from tiered.errors import ThrottledError, UnavailableError
from tiered.remoting.command import RemotingCommand

logger = logging.getLogger(__name__)


async def _no_fallback(request: Request) -> Response | None:
    return None


class Relay:
    """To one broker, for all clients. ``fallback`` may reply instead while the broker is away."""

    def __init__(
        self,
        counters: RelayCounters,
        fallback: Callable[[Request], Awaitable[Response | None]] = _no_fallback,
    ) -> None:
        self._counters, self._fallback = counters, fallback
        self._version: int | None = None
        self._is_outage_logged = False

    async def version(self, client: RelayClient) -> int | None:
        """The broker's version for replies to heartbeats: consumers refuse SQL92 with an old broker."""
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
        """The broker's reply, or the reply while it is away; None for no reply."""
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
            return await self._fallback(request) or self._failed(request, client, error)
        self._counters.relayed[request.code] += 1
        self._version = answer.version
        if self._is_outage_logged:
            self._is_outage_logged = False
            logger.info("requests reach the broker again")
        return relayed(answer)

    def _failed(self, request: Request, client: RelayClient, error: UnavailableError) -> Response | None:
        failure = failure_of(
            request.code,
            was_sent=not isinstance(error, ThrottledError),
            timed_out=isinstance(error, TimedOutError),
        )
        self._counters.failed[failure.name] += 1
        # One warning an outage: every client repeats its requests while the broker is away.
        level = logging.DEBUG if self._is_outage_logged else logging.WARNING
        self._is_outage_logged = True
        where = {"client": client.connection.address, "code": request.code}
        logger.log(level, "request not relayed: %s", error, extra=where)
        if failure is Failure.CLOSE:
            client.connection.close(f"no reply to request {request.code}: {error}")
        if failure in (Failure.CLOSE, Failure.SILENCE):
            return None
        return Response(failure.value, remark=f"broker not reachable: {error}")
