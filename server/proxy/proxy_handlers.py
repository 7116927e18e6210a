"""What the proxy's parts agree on: the way to the real broker, and what a handler beside it looks like.

Owns interfaces and the two broker ids of a published route; no behaviour.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from server.wire.request import Request, Response
from tiered.remoting.command import RemotingCommand

SIDECAR_ID = 0
"""The id our address has in every route we publish: clients ask id 0 first and for all that is no pull."""
REAL_BROKER_ID = 1
"""The id the real master has there, always: what a pull answer suggests to hand a queue over to it. Its slaves follow
with their own id + 1."""


class Upstream(Protocol):
    """One client's own way to the real broker: what is sent by it, the broker takes as that client's."""

    async def call(self, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        """The broker's answer, whatever its code; ``opaque`` of the answer is the request's. Connects when needed.

        ThrottledError: nothing was sent (not connected). UnansweredError: sent, and it may have taken effect
        (connection lost, no answer within ``timeout_s``). Both are UnavailableError. Never repeats a request.
        """
        ...

    async def send(self, command: RemotingCommand) -> None:
        """A one-way request: nobody learns what became of it. Raises ThrottledError when not connected."""
        ...


ProxyHandler = Callable[[Request, Upstream], Awaitable[Response | None]]
"""As request.Handler, with the way to the broker of the client that asks. UnavailableError raised from it becomes an
answer that makes the client ask again (service.py), never one that moves an offset."""

ProxyHandlers = Mapping[int, ProxyHandler]
"""Request code to who answers it instead of the broker. Codes that are not in it are relayed."""


def relayed(answer: RemotingCommand) -> Response:
    """The broker's answer as ours: code, fields, text, version and body as they are."""
    body = (answer.body,) if answer.body else ()
    return Response(answer.code, answer.ext_fields, body, answer.remark, answer.version)
