"""The real name servers, asked in turn; every client's questions go over one connection to each.

Owns which of them is asked. Does not own what clients are shown (routes.py). Only reads are asked of another one when
the first does not answer; a change goes to all of them, as mqadmin would do itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.proxy.inflight_limit import InflightLimit
from server.proxy.upstream import RemotingUpstream
from server.wire.codes import ResponseCode
from tiered.errors import UnavailableError
from tiered.remoting.command import RemotingCommand
from tiered.remoting.tls import ClientTls

TOTAL_S = 2.4
"""For all of them together: clients wait 3 s and then close their connection."""


class NameServers:
    """``addresses``: at least one, as host:port; without ``tls`` they are dialled plain."""

    def __init__(self, addresses: Sequence[str], gate: InflightLimit, tls: ClientTls | None = None) -> None:
        if not addresses:
            raise ValueError("no name server")
        self._servers = [RemotingUpstream(address, gate, tls=tls) for address in addresses]
        self._limit_s = TOTAL_S / len(self._servers)

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        """The first answer there is. Raises UnavailableError when nobody answers."""
        failure: UnavailableError | None = None
        for server in list(self._servers):
            try:
                answer = await server.call(command, self._limit_s)
            except UnavailableError as error:
                failure = error
                continue
            # Who answered is asked first from now on: an absent one costs time only once.
            self._servers.remove(server)
            self._servers.insert(0, server)
            return answer
        assert failure is not None
        raise failure

    async def tell_all(self, command: RemotingCommand) -> RemotingCommand:
        """Ask every one; the first answer that is no success, else the last. Raises UnavailableError as soon as one is
        not there: the others may have made the change."""
        answer: RemotingCommand | None = None
        for server in list(self._servers):
            answer = await server.call(command, self._limit_s)
            if answer.code != ResponseCode.SUCCESS:
                break
        assert answer is not None
        return answer

    def close(self) -> None:
        """Hang up."""
        for server in self._servers:
            server.close("the proxy stops")
