"""One client's connection: frames in, answers out, bounded in both directions.

At most ``requests_max`` requests of a connection are in progress, bounded in bytes too (active_requests.py), and none
starts while a reply waits for the client to read. Above the limit the connection stops reading, so TCP pushes back.
``BufferAccounts`` counts what all connections buffer: partial frames, large requests in progress, unread replies. A
frame that breaks the protocol closes the connection and logs why. A connection starts at most TURN_REQUESTS requests
before other connections get their turn.

Owns the asyncio protocol and when requests start; frame_reader.py and reply_writer.py own the bytes, dispatch.py
the handler, listener.py the accept loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from server.wire.active_requests import ActiveRequests
from server.wire.codes import RequestCode, ResponseCode
from server.wire.connection_limits import BufferAccounts, ConnectionLimits
from server.wire.dispatch import Authorizer, Dispatcher
from server.wire.eager_task import begin
from server.wire.frame_reader import FrameReader
from server.wire.peer_address import known_address
from server.wire.reply_writer import ReplyWriter
from server.wire.request import HandlerTable, Request, Response
from tiered.remoting.command import ProtocolError, RemotingCommand, encode, encode_answer

logger = logging.getLogger(__name__)

RESPONSE_FLAG, ONEWAY_FLAG = 1, 2
TURN_REQUESTS = 16
HINTS = frozenset({RequestCode.NOTIFY_CONSUMER_IDS_CHANGED})
"""Told again and again, or found out without."""
_numbers = itertools.count(1)


@dataclass(frozen=True)
class ConnectionContext:
    """What a connection shares with the others of its server. ``version`` is what answers carry."""

    handlers: HandlerTable
    limits: ConnectionLimits
    ledgers: BufferAccounts
    version: int
    on_open: Callable[[Connection], None] = field(default=lambda _: None)
    on_close: Callable[[Connection], None] = field(default=lambda _: None)
    authorizer: Authorizer | None = None


class Connection(asyncio.BufferedProtocol):
    """Peer of the requests it reads. Lives on one event loop. ``plain``: its socket, where there is no TLS over it;
    ``address``: of who is behind the load balancer it comes from, where that says so."""

    def __init__(
        self, place: ConnectionContext, plain: socket.socket | None = None, address: str | None = None
    ) -> None:
        self.id = next(_numbers)
        self._place = place
        self._limits, self._ledgers, self._door = place.limits, place.ledgers, place.authorizer
        self._answerer = Dispatcher(place.handlers, place.authorizer)
        self._in = FrameReader(place.limits.frame_bytes_max)
        self._out = ReplyWriter(self, place.ledgers, plain)
        self._transport: asyncio.Transport | None = None
        self._address = "" if address is None else known_address(*address.rsplit(":", 1))
        self._at_work = ActiveRequests(self, place.limits, place.ledgers)
        self._is_reading = True
        self._goes_on: asyncio.Handle | None = None
        self._opaques = itertools.count(1)
        self.last_active_s = time.monotonic()
        self.on_answer: Callable[[RemotingCommand], None] | None = None
        """Gets what the client answers to requests that ``forward`` sent; otherwise nobody waits for it."""

    @property
    def address(self) -> str:
        """See Peer."""
        return self._address

    # -- asyncio ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.BaseProtocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._out.opened(transport)
        if not self._address:
            peer = transport.get_extra_info("peername")
            self._address = known_address(peer[0], peer[1]) if peer else "?"
        self._place.on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.BaseProtocol. Requests at work end with it: nobody is left to answer."""
        self._out.resumed()
        if self._goes_on is not None:
            self._goes_on.cancel()
        self._at_work.cancel()
        self._in.forget()
        self._ledgers.forget(self)
        self._place.on_close(self)

    def pause_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._out.paused()

    def resume_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._out.resumed()
        self.last_active_s = time.monotonic()
        self._out.count_unread()
        # Not now: a transport that is about to write cannot bear an answer that meets a closed socket, and ends twice.
        self._go_on_later()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol."""
        return self._ledgers.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        self.data_received(bytes(self._ledgers.buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        """See asyncio.BufferedProtocol: close."""
        return None

    def data_received(self, data: bytes) -> None:
        """The next bytes of the client."""
        self.last_active_s = time.monotonic()
        try:
            if self._may_begin() and (command := self._in.only(data)) is not None:
                self._start(command)
                if not self._may_begin():
                    self._start_waiting()
                return
        except ProtocolError as error:
            self.close(str(error))
            return
        self._in.push(data)
        self._start_waiting()

    # -- requests ---------------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        """Begin requests that were received, as many as may be."""
        transport, out, at_work = self._transport, self._out, self._at_work
        if transport is None or transport.is_closing():
            return
        pop, turn = self._in.pop, TURN_REQUESTS
        try:
            while not (is_full := not out.is_writable or at_work.is_full or not turn):
                command = pop()
                if command is None:
                    break
                turn -= 1
                self._start(command)
        except ProtocolError as error:
            self.close(str(error))
            return
        if not turn:
            self._go_on_later()
        if is_full == self._is_reading and not transport.is_closing():
            self._is_reading = not is_full
            if is_full:
                transport.pause_reading()
            else:
                transport.resume_reading()
        unfinished_bytes = self._in.unfinished(
            self.last_active_s, is_held_back=is_full, has_taken=turn < TURN_REQUESTS
        )
        self._ledgers.unfinished.set(self, unfinished_bytes)

    def _may_begin(self) -> bool:
        """Whether one more request may be begun."""
        transport = self._transport
        return (
            self._out.is_writable
            and not self._at_work.is_full
            and transport is not None
            and not transport.is_closing()
        )

    def _go_on_later(self) -> None:
        if self._goes_on is None:
            self._goes_on = asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._goes_on = None
        self._start_waiting()

    def _start(self, command: RemotingCommand) -> None:
        if command.flag & RESPONSE_FLAG:
            if self.on_answer is not None:
                self.on_answer(command)
            return
        request, answerer = Request(command, self), self._answerer
        task: asyncio.Task[None] | None
        try:
            at_once = answerer.finds_at_once(command.code)
            if at_once is not None:
                response = answerer.at_once(at_once, request)
                if response is not None:
                    self._respond(request, response)
                    return
            work = self._serve(request, is_judged=at_once is not None)
            if answerer.is_prompt(command.code):
                task = begin(work)
                if task is None:
                    return
            else:
                task = asyncio.get_running_loop().create_task(work)
        except Exception as error:
            self._failed(error)
            return
        self._at_work.add(task, command.frame_bytes)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._at_work.ended(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
        self._start_waiting()

    def _failed(self, error: BaseException) -> None:
        logger.error("a request failed unexpectedly: %r", error, extra={"client": self._address})
        self.close("internal error")

    async def _serve(self, request: Request, *, is_judged: bool) -> None:
        response = await self._answerer.answer(request, is_judged=is_judged)
        if response is None or request.command.flag & ONEWAY_FLAG or response.is_withheld:
            return
        if not self._out.is_writable:
            await self._out.has_turn(sum(memoryview(piece).nbytes for piece in response.body))
        self._respond(request, response)
        self.last_active_s = time.monotonic()

    # -- sending ----------------------------------------------------------------------------------------------

    def _respond(self, request: Request, response: Response) -> None:
        """Send an answer; nothing waits before it."""
        command, transport = request.command, self._transport
        if command.flag & ONEWAY_FLAG or response.is_withheld:
            return
        pieces: list[bytes | memoryview] = [b""]
        body_bytes = 0
        for piece in response.body:
            view = memoryview(piece).cast("B")
            body_bytes += len(view)
            pieces.append(view)
        if transport is not None and not transport.is_closing():
            version = self._place.version if response.version is None else response.version
            try:
                pieces[0] = encode_answer(
                    command, int(response.code), version, response.remark, response.ext, body_bytes
                )
            except ValueError as error:
                logger.error("an answer cannot be sent: %s", error, extra={"client": self._address})
                code = int(ResponseCode.SYSTEM_ERROR)
                pieces = [encode_answer(command, code, version, str(error), {}, 0)]
            self._out.write(pieces)
        if self._door is not None:
            self._door.note(request, response, body_bytes)

    def push(self, code: int, ext: Mapping[str, str], body: bytes = b"") -> None:
        """See Peer. A client that does not read gets no hints, it would only pile them up; what else it is told waits
        behind what it has not read, and is counted with that."""
        command = RemotingCommand(
            code, next(self._opaques), ONEWAY_FLAG, version=self._place.version, ext_fields=ext, body=body
        )
        if code in HINTS:
            self.forward(command)
        elif self._transport is not None and not self._transport.is_closing():
            self._out.write([encode(command)])

    def forward(self, command: RemotingCommand) -> bool:
        """Send a request as it is; False where ``push`` would send none. Its answer goes to ``on_answer``."""
        if self._transport is None or self._transport.is_closing() or not self._out.is_writable:
            return False
        self._out.write([encode(command)])
        return True

    async def writable(self) -> None:
        """Wait until the client has read enough of what it was sent before."""
        await self._out.writable()

    # -- ending -----------------------------------------------------------------------------------------------

    def close(self, why: str) -> None:
        """Hang up, at once; ``why`` goes into the log."""
        if self._transport is not None and not self._transport.is_closing():
            logger.info("connection closed: %s", why, extra={"client": self._address})
            self._transport.abort()

    def reason_to_close(self, now_s: float) -> str | None:
        """Why the connection has been of no use for too long; asked every few seconds."""
        limits = self._limits
        if self._in.is_late(now_s, limits.frame_s):
            return f"a frame is not complete after {limits.frame_s:g} s"
        if stalled_bytes := self._out.stalled_bytes(now_s, limits.stall_s):
            return f"{stalled_bytes} bytes have not been read for {limits.stall_s:g} s"
        is_idle = not self._at_work and now_s - self.last_active_s > limits.idle_s
        return f"idle for {limits.idle_s:g} s" if is_idle else None

    @property
    def requests_at_work(self) -> frozenset[asyncio.Task[None]]:
        """Requests being answered."""
        return self._at_work.tasks
