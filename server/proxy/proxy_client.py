"""One client of the proxy: its connection to us, its own to the broker, and what goes down from there.

Owns the numbering of the broker's requests to a client (notices, resets, status, transaction checks) and what becomes
of the client when its broker connection is lost. Does not own what is relayed (service.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from server.proxy.inflight_limit import InflightLimit
from server.proxy.upstream import LinkEvents, RemotingUpstream, as_answer
from server.wire.codes import RequestCode
from server.wire.connection import Connection
from tiered.errors import UnavailableError
from tiered.remoting.command import RemotingCommand
from tiered.remoting.tls import ClientTls

logger = logging.getLogger(__name__)

ASKED_MAX = 256
"""Requests of the broker that a client has not answered yet; older ones are given up."""


class FilteredPeer:
    """A client as a table of members knows it, who is told only what ``tells`` says by the notice's code: the rest is
    its broker's to tell."""

    def __init__(self, connection: Connection, tells: Callable[[int], bool]) -> None:
        self._connection, self._tells = connection, tells

    @property
    def address(self) -> str:
        """See Peer."""
        return self._connection.address

    @property
    def id(self) -> int:
        """See Peer."""
        return self._connection.id

    def push(self, code: int, ext: Mapping[str, str], body: bytes = b"") -> None:
        """See Peer."""
        if self._tells(code):
            self._connection.push(code, ext, body)


class ProxyClient:
    """``connection`` and what belongs to it."""

    def __init__(
        self, connection: Connection, broker_address: str, gate: InflightLimit, tls: ClientTls | None = None
    ) -> None:
        self.connection = connection
        self.quiet = FilteredPeer(connection, lambda code: code != RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
        self.upstream = RemotingUpstream(broker_address, gate, LinkEvents(self._down, self._lost), tls)
        self.is_registered = False
        """Whether the broker knows this client by our connection to it."""
        self._opaques = itertools.count(1)
        self._asked: OrderedDict[int, int] = OrderedDict()
        self._answers: set[asyncio.Task[None]] = set()
        connection.on_answer = self._up

    def close(self) -> None:
        """The client is gone."""
        self.upstream.close()

    def _down(self, command: RemotingCommand) -> None:
        opaque = next(self._opaques) & 0x7FFFFFFF
        if self.connection.forward(replace(command, opaque=opaque)) and not command.is_oneway:
            self._asked[opaque] = command.opaque
            if len(self._asked) > ASKED_MAX:
                self._asked.popitem(last=False)

    def _up(self, command: RemotingCommand) -> None:
        asked = self._asked.pop(command.opaque, None)
        if asked is None:
            return
        task = asyncio.get_running_loop().create_task(self._answer(as_answer(command, asked)))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, command: RemotingCommand) -> None:
        with suppress(UnavailableError):  # the broker that asked is gone
            await self.upstream.answer(command)

    def _lost(self, why: str, had_requests: bool) -> None:
        self._asked.clear()
        if self.is_registered or had_requests:
            # What the broker knew of it is gone, and its requests may or may not have taken effect: a client knows
            # what to do about a closed connection.
            self.connection.close(f"its connection to the broker was lost: {why}")
