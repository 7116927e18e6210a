"""A request as handlers see it, what they answer, and the table that says who answers what.

Pure values. Owns typed access to a request's fields; a missing or impossible one is a BadRequestError, answered as
SYSTEM_ERROR with its text, as a broker does.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.wire.codes import ResponseCode
from tiered.errors import CorruptionError, TieredError
from tiered.formats import fastjson
from tiered.remoting.command import DIALECT_BYTES_MAX, RemotingCommand

Buffer = bytes | bytearray | memoryview

_NUMBER_MIN, _NUMBER_MAX = -(1 << 63), (1 << 63) - 1


class BadRequestError(TieredError):
    """The request lacks a field or carries an impossible value."""


class Peer(Protocol):
    """The connection a request came by."""

    @property
    def address(self) -> str:
        """``ip:port`` of the other side."""
        ...

    @property
    def id(self) -> int:
        """Unique while the server runs."""
        ...

    def push(self, code: int, ext: Mapping[str, str], body: bytes = b"") -> None:
        """Send a one-way request to the client; nothing happens if it is gone."""
        ...


SUCCESS = int(ResponseCode.SUCCESS)
"""Looking up a member of an enum costs as much as a call."""
NUMBER_CHARS_MAX = 20
"""A sign and the digits of a 64-bit number."""
NAME_CHARS_MAX = 1024
"""Brokers allow 255 for groups and fewer for topics; names they derive from those are a little longer."""


@dataclass(slots=True)
class Request:
    """One request and where it came from. Never changed once made."""

    command: RemotingCommand
    peer: Peer

    @property
    def code(self) -> int:
        """Request code."""
        return self.command.code

    def text(self, name: str, default: str | None = None) -> str:
        """A field's value; without ``default`` it must be there."""
        found = self.command.ext_fields.get(name, default)
        if found is None:
            raise BadRequestError(f"the request has no field {name}")
        return found

    def name(self, name: str, default: str | None = None) -> str:
        """As ``text``, of a topic or group: what servers remember, so no longer than a broker could keep it."""
        found = self.text(name, default)
        if len(found) > NAME_CHARS_MAX:
            raise BadRequestError(
                f"field {name} has {len(found)} characters, at most {NAME_CHARS_MAX} are a name"
            )
        return found

    def number(self, name: str, default: int | None = None) -> int:
        """A field's value as a 64-bit number."""
        value = self.command.ext_fields.get(name)
        if value is None:
            if default is None:
                raise BadRequestError(f"the request has no field {name}")
            return default
        try:
            number = int(value) if len(value) <= NUMBER_CHARS_MAX else _NUMBER_MAX + 1
        except ValueError as error:
            raise BadRequestError(f"field {name} is no number: {value[:40]!r}") from error
        if not _NUMBER_MIN <= number <= _NUMBER_MAX:
            raise BadRequestError(f"field {name} is out of range: {value[:40]}")
        return number

    def flag(self, name: str) -> bool:
        """A field's value as Java's Boolean.parseBoolean reads it; absent is false."""
        return self.command.ext_fields.get(name, "").lower() == "true"

    def document(self) -> dict[str, Any]:
        """The body as a JSON object, of fastjson's dialect."""
        try:
            found = fastjson.loads(self.command.body, dialect_max=DIALECT_BYTES_MAX)
        except (CorruptionError, ValueError, RecursionError) as error:
            raise BadRequestError(f"the body is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise BadRequestError("the body is no JSON object")
        return found


@dataclass(slots=True)
class Response:
    """An answer; ``body`` are consecutive pieces, sent without joining them. Never changed once made."""

    code: int = SUCCESS
    ext: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[Buffer] = ()
    remark: str | None = None
    version: int | None = None
    """Version of who really answers, where it is not this server."""
    is_withheld: bool = False
    """Not sent: the client's own time limit ends its wait."""


def json_response(document: Any) -> Response:
    """SUCCESS with ``document`` as standard JSON, which every Java version reads where keys are not objects."""
    return Response(body=(json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode(),))


AtOnce = Callable[[Request], "Response | None"]
"""Answers what needs no waiting; None: ask the handler."""
Handler = Callable[[Request], Awaitable[Response | None]]
"""None: no answer at all; the client's own time limit ends its wait."""


class HandlerTable:
    """Who answers which code."""

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._prompt: set[int] = set()
        self._at_once: dict[int, AtOnce] = {}
        self.at_once: Callable[[int], AtOnce | None] = self._at_once.get
        """What is asked before the handler of a code, if anything."""

    def register(
        self, *codes: int, is_prompt: bool = False, at_once: AtOnce | None = None
    ) -> Callable[[Handler], Handler]:
        """``table.register(code, …)(handler)``; a code has one handler.

        ``is_prompt``: it mostly answers without waiting, and is begun where its request was read (eager_task.py).
        ``at_once`` is asked before it, and answers what needs no coroutine.
        """

        def add(handler: Handler) -> Handler:
            for code in codes:
                if code in self._handlers:
                    raise ValueError(f"code {code} has a handler already")
                self._handlers[int(code)] = handler
                if is_prompt:
                    self._prompt.add(int(code))
                if at_once is not None:
                    self._at_once[int(code)] = at_once
            return handler

        return add

    def find(self, code: int) -> Handler | None:
        """The handler of ``code``, or None."""
        return self._handlers.get(code)

    def is_prompt(self, code: int) -> bool:
        """Whether requests of ``code`` are begun at once."""
        return code in self._prompt
