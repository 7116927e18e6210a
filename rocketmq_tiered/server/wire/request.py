"""Requests, responses, the handler table, and from a request to its reply: authorization, handler, error replies.

A missing or invalid field raises BadRequestError, answered with SYSTEM_ERROR and its text, as by a broker.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rocketmq_tiered.server.wire.counted_log import CountedLog
from rocketmq_tiered.server.wire.request_fields import decoded_fields
from tiered.errors import CorruptionError, TieredError, UnavailableError
from tiered.remoting.command import RemotingCommand, ResponseCode, parse_json, request_name

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
    place: str = ""
    """Where a timer of this request is kept, or the one that it recalls: topic, queue and offset."""

    @property
    def fields(self) -> Mapping[str, str]:
        """Its fields by name, as access rules judge them and handlers execute them."""
        return decoded_fields(self.command)

    @property
    def code(self) -> int:
        """Request code."""
        return self.command.code

    def text(self, name: str, default: str | None = None) -> str:
        """A field's value; required unless there is a ``default``."""
        value = self.fields.get(name, default)
        if value is None:
            raise BadRequestError(f"the request lacks the field {name}")
        return value

    def name(self, name: str, default: str | None = None) -> str:
        """Return the topic or group in field ``name``, or ``default`` if there is one. Raises BadRequestError for a
        missing field, or a name that is longer than servers, which cache names, take."""
        value = self.text(name, default)
        if len(value) > NAME_CHARS_MAX:
            raise BadRequestError(
                f"field {name} has {len(value)} characters, and a name may have {NAME_CHARS_MAX}"
            )
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """Return the 64-bit number in field ``name``, or ``default`` if the field is missing and there is one. Raises
        BadRequestError for a missing field and for anything else."""
        value = self.fields.get(name)
        if value is None:
            if default is None:
                raise BadRequestError(f"the request lacks the field {name}")
            return default
        try:
            # A longer text is too large a number: it is not worth parsing.
            number = int(value) if len(value) <= NUMBER_CHARS_MAX else _NUMBER_MAX + 1
        except ValueError as error:
            raise BadRequestError(f"field {name} of the request is not a number: {value[:40]}") from error
        if not _NUMBER_MIN <= number <= _NUMBER_MAX:
            raise BadRequestError(
                f"field {name} of the request is no 64-bit number, as it is too large: {value[:40]}"
            )
        return number

    def flag(self, name: str) -> bool:
        """A field's value as Java's Boolean.parseBoolean reads it; absent is false."""
        return self.fields.get(name, "").lower() == "true"

    def document(self) -> dict[str, Any]:
        """Return the JSON object in the request's body. Raises BadRequestError for another body, and for one that is
        too large to be parsed."""
        body = self.command.body
        if len(body) > DOCUMENT_BYTES_MAX:
            raise BadRequestError(
                f"the body of the request has {len(body)} bytes, and JSON of up to {DOCUMENT_BYTES_MAX} bytes is parsed"
            )
        try:
            document = parse_json(body, DOCUMENT_VALUES_MAX)
        except (CorruptionError, ValueError, RecursionError) as error:
            raise BadRequestError(f"the body of the request is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise BadRequestError("the body of the request is not a JSON object")
        return document


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
    """The reply is not sent, so that the client times out."""


def json_response(document: Any) -> Response:
    """SUCCESS with ``document`` as standard JSON, which all Java clients read unless keys are objects."""
    return Response(body=(json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode(),))


AtOnce = Callable[[Request], "Response | None"]
"""A reply without waiting; None: call the handler."""
Handler = Callable[[Request], Awaitable[Response | None]]
"""Handles a request. None: there is no reply, and the client times out."""


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
        """Return a decorator that enters a handler for ``codes``, each of which has one handler only:
        ``table.register(code, …)(handler)``.

        ``is_prompt``: it mostly replies without waiting, so that its first step runs at once instead of in a task.
        ``at_once`` is called before it, for replies that need no coroutine.
        """

        def add(handler: Handler) -> Handler:
            """Enter the decorated handler; a code with two handlers is a mistake of the program."""
            for code in codes:
                if code in self._handlers:
                    raise ValueError(f"request code {code} already has a handler")
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


logger = logging.getLogger(__name__)


class Authorizer(Protocol):
    """Decides on requests, and records them."""

    def refusal(self, request: Request) -> Response | None:
        """The reply to a request that is not allowed, or None."""
        ...

    def filtered(self, request: Request, response: Response) -> Response:
        """``response``, or a refusal if its content is not allowed."""
        ...

    def refusal_of_record(self, request: Request, data: bytes, phys: int) -> Response | None:
        """The reply to an authorized request that names the record ``data`` at physical offset ``phys``; None: allowed.
        The message's own topic counts, whatever the request names."""
        ...

    @property
    def audited(self) -> Mapping[str, int]:
        """Audited events since the start. Callable from any thread."""
        ...

    def is_outside(self, request: Request) -> bool:
        """Whether it commits an offset of a group that its client is not in."""
        ...

    def record(self, request: Request, response: Response | None, *, was_outside: bool = True) -> None:
        """Audit a request with its reply, also if that is not sent. ``was_outside``: `is_outside` when it came."""
        ...

    def note(self, request: Request, response: Response, body_bytes: int) -> None:
        """Count a reply that was sent."""
        ...

    def tick(self, now_s: float) -> None:
        """Called every few seconds."""
        ...

    def close(self) -> None:
        """The server stops."""
        ...


class Dispatcher:
    """Applies the authorizer, then the handler. Errors other than TieredError are raised and close the connection."""

    def __init__(
        self, handlers: HandlerTable, authorizer: Authorizer | None, log: CountedLog | None = None
    ) -> None:
        """``handlers``: by request code; ``authorizer``: None allows everything; ``log``: of errors that clients can
        cause."""
        self._handlers, self._authorizer = handlers, authorizer
        self._log = log or CountedLog(logger)
        self.find_at_once = handlers.at_once
        """The at-once handler of a code, if any."""
        self.is_prompt = handlers.is_prompt

    def at_once(self, at_once: AtOnce, request: Request) -> Response | None:
        """Return the reply of an ``at_once`` handler if the request is allowed and needs no waiting; None: call
        ``answer``, and say that the request is authorized already."""
        try:
            response = self._refusal(request) or at_once(request)
        except (TieredError, UnicodeEncodeError) as error:
            return self._error_reply(request, error)
        if response is not None and self._authorizer is not None:
            self._authorizer.record(request, response)
        return response

    async def answer(self, request: Request, *, is_authorized: bool) -> Response | None:
        """Return the reply to a request, None if it gets none. Both are recorded for the audit."""
        authorizer = self._authorizer
        if authorizer is None:
            return await self._answer(request, is_authorized=is_authorized)
        was_outside = authorizer.is_outside(request)
        response = await self._answer(request, is_authorized=is_authorized)
        authorizer.record(request, response, was_outside=was_outside)
        return response

    async def _answer(self, request: Request, *, is_authorized: bool) -> Response | None:
        """Return the reply to a request: the authorizer's refusal, the handler's reply, or one that says which error
        the handler raised. None: the handler sends no reply."""
        handler = self._handlers.find(request.command.code)
        if handler is None:
            remark = f"{request_name(request.code)} is not supported"
            return Response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
        try:
            if not is_authorized and (refusal := self._refusal(request)) is not None:
                return refusal
            response = await handler(request)
            if response is None or self._authorizer is None:
                return response
            return self._authorizer.filtered(request, response)
        except (TieredError, UnicodeEncodeError) as error:
            return self._error_reply(request, error)

    def _refusal(self, request: Request) -> Response | None:
        return None if self._authorizer is None else self._authorizer.refusal(request)

    def _error_reply(self, request: Request, error: TieredError | UnicodeEncodeError) -> Response:
        """Return the reply that says why a request failed. Errors that the client did not cause are logged as well."""
        # UnicodeEncodeError: JSON can carry half a surrogate pair, which cannot be encoded.
        if isinstance(error, BadRequestError | UnicodeEncodeError):
            return Response(ResponseCode.SYSTEM_ERROR, remark=str(error))
        is_away = isinstance(error, UnavailableError)
        remark = f"temporarily unavailable: {error}" if is_away else str(error)
        level = logging.WARNING if is_away else logging.ERROR
        self._log.note(level, f"{request_name(request.code)}: {remark}", request.peer.address)
        # Clients repeat a request that finds something unavailable; no reply may move an offset.
        return Response(ResponseCode.SYSTEM_BUSY if is_away else ResponseCode.SYSTEM_ERROR, remark=remark)
