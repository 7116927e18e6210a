"""Requests, responses and the handler table.

A missing or invalid field raises BadRequestError, answered with SYSTEM_ERROR and its text, as by a broker.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rocketmq_tiered.server.wire.codes import ResponseCode
from tiered.errors import CorruptionError, TieredError
from tiered.remoting.command import RemotingCommand, parse_json

Buffer = bytes | bytearray | memoryview

_NUMBER_MIN, _NUMBER_MAX = -(1 << 63), (1 << 63) - 1


class BadRequestError(TieredError):
    """A field of the request is missing or invalid."""


class Peer(Protocol):
    """The connection of a request."""

    @property
    def address(self) -> str:
        """``ip:port`` of the other side."""
        ...

    @property
    def id(self) -> int:
        """Unique while the server runs."""
        ...

    def push(self, code: int, ext: Mapping[str, str], body: bytes = b"") -> None:
        """Send a one-way request to the client, if it is still connected."""
        ...


SUCCESS = int(ResponseCode.SUCCESS)
"""An enum member lookup costs as much as a call."""
DOCUMENT_BYTES_MAX, DOCUMENT_VALUES_MAX = 1024 * 1024, 8192
"""Limits of a body that is parsed: two thousand queues to lock, or subscriptions of a client."""
NUMBER_CHARS_MAX = 20
"""A sign and the digits of a 64-bit number."""
NAME_CHARS_MAX = 1024
"""Brokers allow 255 for groups, fewer for topics; derived names are slightly longer."""


@dataclass(slots=True)
class Request:
    """One request and its connection. Immutable by convention."""

    command: RemotingCommand
    peer: Peer
    account: str = ""
    """Whose signature was verified; empty without access rules."""

    @property
    def code(self) -> int:
        """Request code."""
        return self.command.code

    def text(self, name: str, default: str | None = None) -> str:
        """A field's value; required unless there is a ``default``."""
        found = self.command.ext_fields.get(name, default)
        if found is None:
            raise BadRequestError(f"request has no field {name}")
        return found

    def name(self, name: str, default: str | None = None) -> str:
        """Like ``text``, for a topic or group name. Servers cache names, so the length is bounded as at a broker."""
        found = self.text(name, default)
        if len(found) > NAME_CHARS_MAX:
            raise BadRequestError(
                f"field {name} has {len(found)} characters, a name has at most {NAME_CHARS_MAX}"
            )
        return found

    def number(self, name: str, default: int | None = None) -> int:
        """A field's value as a 64-bit number."""
        value = self.command.ext_fields.get(name)
        if value is None:
            if default is None:
                raise BadRequestError(f"request has no field {name}")
            return default
        try:
            number = int(value) if len(value) <= NUMBER_CHARS_MAX else _NUMBER_MAX + 1
        except ValueError as error:
            raise BadRequestError(f"field {name} is not a number: {value[:40]}") from error
        if not _NUMBER_MIN <= number <= _NUMBER_MAX:
            raise BadRequestError(f"field {name} is out of range: {value[:40]}")
        return number

    def flag(self, name: str) -> bool:
        """A field's value as Java's Boolean.parseBoolean reads it; absent is false."""
        return self.command.ext_fields.get(name, "").lower() == "true"

    def document(self) -> dict[str, Any]:
        """The body as a JSON object."""
        body = self.command.body
        if len(body) > DOCUMENT_BYTES_MAX:
            raise BadRequestError(f"body of {len(body)} bytes, at most {DOCUMENT_BYTES_MAX} are parsed")
        try:
            found = parse_json(body, DOCUMENT_VALUES_MAX)
        except (CorruptionError, ValueError, RecursionError) as error:
            raise BadRequestError(f"body is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise BadRequestError("body is not a JSON object")
        return found


@dataclass(slots=True)
class Response:
    """A reply. ``body``: consecutive pieces, sent without joining. Immutable by convention."""

    code: int = SUCCESS
    ext: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[Buffer] = ()
    remark: str | None = None
    version: int | None = None
    """The broker's version in a relayed reply; None in our own."""
    is_withheld: bool = False
    """Not sent: the client times out."""


def json_response(document: Any) -> Response:
    """SUCCESS with ``document`` as standard JSON, which all Java clients read unless keys are objects."""
    return Response(body=(json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode(),))


AtOnce = Callable[[Request], "Response | None"]
"""A reply without waiting; None: call the handler."""
Handler = Callable[[Request], Awaitable[Response | None]]
"""None: no reply; the client times out."""


class HandlerTable:
    """Handlers by request code; ``default`` serves other codes."""

    def __init__(self, default: Handler | None = None) -> None:
        self._handlers: dict[int, Handler] = {}
        self._default = default
        self._prompt: set[int] = set()
        self._at_once: dict[int, AtOnce] = {}
        self.at_once: Callable[[int], AtOnce | None] = self._at_once.get
        """The at-once handler of a code, if any."""

    def register(
        self, *codes: int, is_prompt: bool = False, at_once: AtOnce | None = None
    ) -> Callable[[Handler], Handler]:
        """``table.register(code, …)(handler)``; one handler per code.

        ``is_prompt``: it mostly replies without waiting, so it starts eagerly (turns.py). ``at_once`` is called
        first, for replies that need no coroutine.
        """

        def add(handler: Handler) -> Handler:
            for code in codes:
                if code in self._handlers:
                    raise ValueError(f"code {code} already has a handler")
                self._handlers[int(code)] = handler
                if is_prompt:
                    self._prompt.add(int(code))
                if at_once is not None:
                    self._at_once[int(code)] = at_once
            return handler

        return add

    def find(self, code: int) -> Handler | None:
        """The handler of ``code``, or the default one, or None."""
        return self._handlers.get(code, self._default)

    def codes(self) -> Iterable[int]:
        """Codes with a handler of their own."""
        return self._handlers.keys()

    def is_prompt(self, code: int) -> bool:
        """Whether requests of ``code`` start eagerly."""
        return code in self._prompt
