"""From a request to its answer: who may ask, who answers, what a client is told of an error.

Owns the order of these. Does not own when requests begin nor how answers are sent (connection.py).
"""

from __future__ import annotations

import logging
from typing import Protocol

from server.wire.codes import ResponseCode
from server.wire.request import AtOnce, BadRequestError, HandlerTable, Request, Response
from tiered.errors import TieredError, UnavailableError

logger = logging.getLogger(__name__)


class Authorizer(Protocol):
    """Who may ask what, and the record of who did."""

    def refusal(self, request: Request) -> Response | None:
        """What to answer instead of serving the request, or None."""
        ...

    def shown(self, request: Request, response: Response) -> Response:
        """``response``, or what to say instead: it may show what the request did not name."""
        ...

    def note(self, request: Request, response: Response, body_bytes: int) -> None:
        """The request was answered so."""
        ...

    def tick(self, now_s: float) -> None:
        """Called every few seconds."""
        ...

    def close(self) -> None:
        """The server ends."""
        ...


class Dispatcher:
    """Asks the authorizer, then the handlers. An error that is none of ours is raised: it ends the connection."""

    def __init__(self, handlers: HandlerTable, authorizer: Authorizer | None) -> None:
        self._handlers, self._door = handlers, authorizer
        self.finds_at_once = handlers.at_once
        """What ``at_once`` may ask for a code, if anything."""
        self.is_prompt = handlers.is_prompt

    def at_once(self, at_once: AtOnce, request: Request) -> Response | None:
        """The answer to what needs no waiting; None: ask ``answer``, which need not judge again."""
        try:
            return self._judged(request) or at_once(request)
        except (TieredError, UnicodeEncodeError) as error:
            return _refused(request, error)

    async def answer(self, request: Request, *, is_judged: bool) -> Response | None:
        """The answer to any request; None: none is given."""
        handler = self._handlers.find(request.command.code)
        if handler is None:
            remark = f"request code {request.code} is not supported"
            return Response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
        try:
            if not is_judged and (refusal := self._judged(request)) is not None:
                return refusal
            response = await handler(request)
            return response if response is None or self._door is None else self._door.shown(request, response)
        except (TieredError, UnicodeEncodeError) as error:
            return _refused(request, error)

    def _judged(self, request: Request) -> Response | None:
        """What to answer instead of serving the request, or None. Asked once."""
        return None if self._door is None else self._door.refusal(request)


def _refused(request: Request, error: TieredError | UnicodeEncodeError) -> Response:
    """What a client is told of an error. Half a surrogate pair can be written in JSON, and is no text."""
    if isinstance(error, BadRequestError | UnicodeEncodeError):
        return Response(ResponseCode.SYSTEM_ERROR, remark=str(error))
    where = {"client": request.peer.address, "code": request.code}
    if isinstance(error, UnavailableError):
        # The client asks again by itself; never an answer that could move an offset.
        logger.warning("not available now: %s", error, extra=where)
        return Response(ResponseCode.SYSTEM_BUSY, remark=f"temporarily unavailable: {error}")
    logger.error("%s", error, extra=where)
    return Response(ResponseCode.SYSTEM_ERROR, remark=str(error))
