"""A request relayed to the master by its client's own connection, once, and what the client is told while it is away.

No offset is told then and none is taken: clients hold theirs and commit them again when it is back. Only who the
members of a group are is told, once all of them had time to send us a heartbeat, so that the queues of a member that
ends go to others.

Owns relaying and the client it is done for. Which requests are relayed is requests.py's.
"""

from __future__ import annotations

from collections.abc import Callable

from server.groups.client_table import ClientTable, register_client_handlers
from server.proxy.inflight_limit import InflightLimit
from server.proxy.proxy_client import FilteredPeer
from server.proxy.proxy_handlers import relayed
from server.proxy.relay_rules import Failure, failure_of, relay_timeout_s
from server.proxy.upstream import RemotingUpstream, TimedOutError
from server.slave.master import MasterMonitor
from server.slave.registration import SlaveConfig
from server.slave.slave_status import SlaveCounters
from server.wire.codes import RequestCode
from server.wire.connection import Connection
from server.wire.request import HandlerTable, Request, Response
from tiered.errors import ThrottledError, UnavailableError


class SlaveClient:
    """One connection, and its own one to the master, made when first needed."""

    def __init__(
        self, connection: Connection, place: SlaveConfig, gate: InflightLimit, watch: MasterMonitor
    ) -> None:
        self.connection = connection
        # Notices are the master's business while it is there.
        self.peer = FilteredPeer(connection, lambda code: not watch.is_well)
        self.upstream = RemotingUpstream(place.broker_address, gate, tls=place.tls)


class MasterRelay:
    """For all clients. ``are_members_known``: whether the members of groups in ``clients`` are all there are."""

    def __init__(
        self, clients: ClientTable, counters: SlaveCounters, are_members_known: Callable[[], bool]
    ) -> None:
        self._counters, self._are_members_known = counters, are_members_known
        # How members are listed while the master is away.
        self._sessions = HandlerTable()
        register_client_handlers(self._sessions, clients)

    async def relay(self, request: Request, client: SlaveClient) -> Response | None:
        """The master's answer, or what there is to say while it is away; None for nothing."""
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
            return await self._unanswered(request, client, error)
        self._counters.relayed[request.code] += 1
        return relayed(answer)

    async def _unanswered(
        self, request: Request, client: SlaveClient, error: UnavailableError
    ) -> Response | None:
        """The master is away. Any code would tell a 4.9 client that its group has no offset: it is hung up on."""
        code = request.code
        if code == RequestCode.UPDATE_CONSUMER_OFFSET:
            # Told to the master later it could move the group back: its client commits again.
            self._counters.commits_dropped += 1
        if code in (RequestCode.GET_CONSUMER_LIST_BY_GROUP, RequestCode.GET_CONSUMER_CONNECTION_LIST):
            listed = self._sessions.find(code)
            if self._are_members_known() and listed is not None:
                return await listed(request)
        failure = failure_of(
            code, was_sent=not isinstance(error, ThrottledError), timed_out=isinstance(error, TimedOutError)
        )
        self._counters.failed[failure.name] += 1
        if failure is Failure.HANG_UP:
            client.connection.close(f"request {code} cannot be answered: {error}")
        if failure in (Failure.HANG_UP, Failure.SILENCE):
            return None
        return Response(failure.value, remark=f"the master is not reachable: {error}")
