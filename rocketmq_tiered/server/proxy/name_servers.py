"""The real name servers, over one connection each for all clients.

Reads go to the first that answers, changes to all of them, as from mqadmin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from rocketmq_tiered.server.proxy.upstream import InflightLimit, RemotingUpstream
from rocketmq_tiered.server.wire.codes import RequestCode, ResponseCode
from tiered.errors import UnavailableError
from tiered.remoting.command import RemotingCommand
from tiered.remoting.tls import ClientTls

WATCH_S = 10.0
TOTAL_S = 2.4
"""Time for all name servers together: clients close their connection after 3 s."""


class NameServers:
    """``addresses``: at least one, as host:port. ``tls`` None: plain connections."""

    def __init__(self, addresses: Sequence[str], gate: InflightLimit, tls: ClientTls | None = None) -> None:
        if not addresses:
            raise ValueError("no name servers")
        self._servers = [RemotingUpstream(address, gate, tls=tls) for address in addresses]
        self._limit_s = TOTAL_S / len(self._servers)
        self.problem = ""
        """Why none answered the last request; empty if one did."""

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        """The first reply. Raises UnavailableError if none answers."""
        failure: UnavailableError | None = None
        for server in list(self._servers):
            try:
                answer = await server.call(command, self._limit_s)
            except UnavailableError as error:
                failure = error
                continue
            # It comes first from now on: an unavailable one costs time only once.
            self._servers.remove(server)
            self._servers.insert(0, server)
            self.problem = ""
            return answer
        assert failure is not None
        self.problem = str(failure)
        raise failure

    async def watch(self) -> None:
        """Ask every WATCH_S until cancelled, so that ``problem`` is known before a client needs a route."""
        while True:
            with suppress(UnavailableError):
                await self.ask(RemotingCommand(RequestCode.GET_BROKER_CLUSTER_INFO, 0))
            await asyncio.sleep(WATCH_S)

    async def ask_all(self, command: RemotingCommand) -> RemotingCommand:
        """The first reply that is not SUCCESS, else the last. Raises UnavailableError at the first that does not
        answer: the others may have made the change."""
        answer: RemotingCommand | None = None
        for server in list(self._servers):
            answer = await server.call(command, self._limit_s)
            if answer.code != ResponseCode.SUCCESS:
                break
        assert answer is not None
        return answer

    def close(self) -> None:
        """Close the connections."""
        for server in self._servers:
            server.close("the service stops")
