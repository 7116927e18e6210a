"""One client: its connection here, its own connection to the broker, and requests the broker sends it.

Owns the numbering of the broker's requests to a client (notices, resets, status, transaction checks) and closing the
client when its broker connection is lost.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from rocketmq_tiered.server.proxy.upstream import LinkEvents, RemotingUpstream
from rocketmq_tiered.server.wire.codes import RequestCode
from rocketmq_tiered.server.wire.connection import RESPONSE_FLAG, Connection
from tiered.errors import UnavailableError
from tiered.remoting.command import RemotingCommand

logger = logging.getLogger(__name__)

FORWARDED_MAX = 256
"""Requests of the broker without a client's reply yet; older ones are dropped."""


class FilteredPeer:
    """A client as the client table sees it: ``allows`` decides by request code which pushes reach it. The broker sends
    the others itself."""

    def __init__(self, connection: Connection, allows: Callable[[int], bool]) -> None:
        self._connection, self._allows = connection, allows

    @property
    def address(self) -> str:
        return self._connection.address

    @property
    def id(self) -> int:
        return self._connection.id

    def push(self, code: int, ext: Mapping[str, str], body: bytes = b"") -> None:
        if self._allows(code):
            self._connection.push(code, ext, body)


class RelayClient:
    """``connection``, and its connection to the broker, made when first needed."""

    def __init__(
        self, connection: Connection, upstream: RemotingUpstream, allows: Callable[[int], bool]
    ) -> None:
        self.connection, self.upstream = connection, upstream
        self.peer = FilteredPeer(connection, allows)


class ProxyClient(RelayClient):
    """A client that the broker may send requests to. ``connect`` makes its upstream."""

    def __init__(self, connection: Connection, connect: Callable[[LinkEvents], RemotingUpstream]) -> None:
        upstream = connect(LinkEvents(self._forward, self._lost))
        super().__init__(connection, upstream, lambda code: code != RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
        self.is_registered = False
        """Whether the broker has this client registered through our connection."""
        self._opaques = itertools.count(1)
        self._forwarded: OrderedDict[int, int] = OrderedDict()
        self._answers: set[asyncio.Task[None]] = set()
        connection.on_answer = self._answered

    def _forward(self, command: RemotingCommand) -> None:
        opaque = next(self._opaques) & 0x7FFFFFFF
        if self.connection.forward(replace(command, opaque=opaque)) and not command.is_oneway:
            self._forwarded[opaque] = command.opaque
            if len(self._forwarded) > FORWARDED_MAX:
                self._forwarded.popitem(last=False)

    def _answered(self, command: RemotingCommand) -> None:
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
        self._forwarded.clear()
        if self.is_registered or had_requests:
            # The broker has dropped its registration, and pending requests may or may not have taken effect. Clients
            # handle a closed connection.
            self.connection.close(f"connection to the broker lost: {why}")
