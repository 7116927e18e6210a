"""Interfaces of proxy mode: the connection to the real broker, handlers, and the broker ids of a published route."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from rocketmq_tiered.server.wire.request import Request, Response
from tiered.remoting.command import RemotingCommand

SIDECAR_ID = 0
"""Our id in published routes: clients send id 0 everything but pulls, and pulls by default."""
REAL_BROKER_ID = 1
"""The real master's id there, suggested in pull replies to redirect a queue to it. Its slaves have their own id + 1."""


class Upstream(Protocol):
    """One client's own connection to the real broker, which takes its requests as that client's."""

    async def call(self, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        """The broker's reply, whatever its code, with the request's ``opaque``. Connects when needed.

        ThrottledError: not sent (not connected). UnansweredError: sent, may have taken effect (connection lost, no
        reply within ``timeout_s``). Both are UnavailableError. Never repeats a request.
        """
        ...

    async def send(self, command: RemotingCommand) -> None:
        """Send a one-way request. Raises ThrottledError when not connected."""
        ...


ProxyHandler = Callable[[Request, Upstream], Awaitable[Response | None]]
"""As request.Handler, with the client's connection to the broker. UnavailableError becomes a reply upon which the
client repeats its request; it never moves an offset."""

ProxyHandlers = Mapping[int, ProxyHandler]
"""Handlers by request code; other codes are relayed to the broker."""


def relayed(answer: RemotingCommand) -> Response:
    """The broker's reply, unchanged."""
    body = (answer.body,) if answer.body else ()
    return Response(answer.code, answer.ext_fields, body, answer.remark, answer.version)
