"""From a request to its reply: authorization, handler, error replies."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from rocketmq_tiered.server.wire.codes import ResponseCode
from rocketmq_tiered.server.wire.request import AtOnce, BadRequestError, HandlerTable, Request, Response
from tiered.errors import TieredError, UnavailableError

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

    def __init__(self, handlers: HandlerTable, authorizer: Authorizer | None) -> None:
        self._handlers, self._authorizer = handlers, authorizer
        self.find_at_once = handlers.at_once
        """The at-once handler of a code, if any."""
        self.is_prompt = handlers.is_prompt

    def at_once(self, at_once: AtOnce, request: Request) -> Response | None:
        """The reply if it needs no waiting; None: call ``answer``, with ``is_authorized``."""
        try:
            response = self._refusal(request) or at_once(request)
        except (TieredError, UnicodeEncodeError) as error:
            return _error_reply(request, error)
        if response is not None and self._authorizer is not None:
            self._authorizer.record(request, response)
        return response

    async def answer(self, request: Request, *, is_authorized: bool) -> Response | None:
        """The reply; None for no reply."""
        authorizer = self._authorizer
        if authorizer is None:
            return await self._answer(request, is_authorized=is_authorized)
        was_outside = authorizer.is_outside(request)
        response = await self._answer(request, is_authorized=is_authorized)
        authorizer.record(request, response, was_outside=was_outside)
        return response

    async def _answer(self, request: Request, *, is_authorized: bool) -> Response | None:
        handler = self._handlers.find(request.command.code)
        if handler is None:
            remark = f"request code {request.code} is not supported"
            return Response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
        try:
            if not is_authorized and (refusal := self._refusal(request)) is not None:
                return refusal
            response = await handler(request)
            if response is None or self._authorizer is None:
                return response
            return self._authorizer.filtered(request, response)
        except (TieredError, UnicodeEncodeError) as error:
            return _error_reply(request, error)

    def _refusal(self, request: Request) -> Response | None:
        return None if self._authorizer is None else self._authorizer.refusal(request)


def _error_reply(request: Request, error: TieredError | UnicodeEncodeError) -> Response:
    """UnicodeEncodeError: JSON can carry half a surrogate pair, which cannot be encoded."""
    if isinstance(error, BadRequestError | UnicodeEncodeError):
        return Response(ResponseCode.SYSTEM_ERROR, remark=str(error))
    where = {"client": request.peer.address, "code": request.code}
    if isinstance(error, UnavailableError):
        # Clients repeat the request; no reply may move an offset.
        logger.warning("temporarily unavailable: %s", error, extra=where)
        return Response(ResponseCode.SYSTEM_BUSY, remark=f"temporarily unavailable: {error}")
    logger.error("%s", error, extra=where)
    return Response(ResponseCode.SYSTEM_ERROR, remark=str(error))
