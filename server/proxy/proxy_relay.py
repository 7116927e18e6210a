"""A request relayed to the broker by its client's own connection, once, and what the client is told without an answer.

Owns relaying, and what is known of the broker by it: its version, whether it was said to be away.
Which requests are relayed is service.py's, what becomes of one without an answer relay_rules.py's.
"""

from __future__ import annotations

import logging

from server.proxy.proxy_client import ProxyClient
from server.proxy.proxy_handlers import relayed
from server.proxy.proxy_status import ProxyCounters
from server.proxy.relay_rules import Failure, failure_of, relay_timeout_s
from server.proxy.upstream import TimedOutError
from server.wire.codes import RequestCode
from server.wire.request import Request, Response
from tiered.errors import ThrottledError, UnavailableError
from tiered.remoting.command import RemotingCommand

logger = logging.getLogger(__name__)


class Relay:
    """To one broker, for all clients. Belongs to one event loop."""

    def __init__(self, counters: ProxyCounters) -> None:
        self._counters = counters
        self._version: int | None = None
        self._told_away = False

    async def version(self, client: ProxyClient) -> int | None:
        """The broker's version, which consumers learn from heartbeats: they refuse SQL92 to an old one."""
        if self._version is None:
            with_nothing = RemotingCommand(
                RequestCode.GET_CONSUMER_LIST_BY_GROUP, 0, ext_fields={"consumerGroup": "-"}
            )
            try:
                self._version = (await client.upstream.call(with_nothing, 1.0)).version
            except UnavailableError:
                return None
        return self._version

    async def relay(self, request: Request, client: ProxyClient) -> Response | None:
        """The broker's answer, or what there is to say instead; None for nothing."""
        command = request.command
        self._counters.relayed[request.code] += 1
        try:
            if command.is_oneway:
                await client.upstream.send(command)
                return None
            answer = await client.upstream.relay(
                command, relay_timeout_s(command.ext_fields), client.connection.writable
            )
        except UnavailableError as error:
            return self._failed(request, client, error)
        self._version = answer.version
        if self._told_away:
            self._told_away = False
            logger.info("requests are relayed to the broker again")
        return relayed(answer)

    def _failed(self, request: Request, client: ProxyClient, error: UnavailableError) -> Response | None:
        failure = failure_of(
            request.code,
            was_sent=not isinstance(error, ThrottledError),
            timed_out=isinstance(error, TimedOutError),
        )
        self._counters.failed[failure.name] += 1
        # Once, until something is relayed again: every client repeats its requests as long as the broker is away.
        level = logging.DEBUG if self._told_away else logging.WARNING
        self._told_away = True
        where = {"client": client.connection.address, "code": request.code}
        logger.log(level, "not relayed: %s", error, extra=where)
        if failure is Failure.HANG_UP:
            client.connection.close(f"request {request.code} cannot be answered: {error}")
        if failure in (Failure.HANG_UP, Failure.SILENCE):
            return None
        return Response(failure.value, remark=f"the broker is not reachable: {error}")
