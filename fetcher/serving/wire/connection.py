"""One client's connection: frames in, answers out, bounded in both directions.

At most ``requests_max`` requests of a connection are at work, and none is begun while an answer waits for the client to
read: above, nothing more is read from it, and TCP pushes back. What all connections together make the server hold
(frames half received, answers not read) is counted in ``Ledgers``. A frame that breaks the protocol closes the
connection, with a reason.

Owns the asyncio protocol. Does not own what requests mean (handlers), who may ask (``Door``), accepting (server.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fetcher.serving.wire.codes import ResponseCode
from fetcher.serving.wire.eager import begin
from fetcher.serving.wire.held_bytes import HeldBytes
from fetcher.serving.wire.proxy_header import split_proxy_header
from fetcher.serving.wire.request import BadRequestError, HandlerTable, Request, Response
from tiered.errors import TieredError, UnavailableError
from tiered.remoting.command import FrameDecoder, ProtocolError, RemotingCommand, encode, encode_head

logger = logging.getLogger(__name__)

RESPONSE_FLAG, ONEWAY_FLAG = 1, 2
MIB = 1024 * 1024
PIECES_MAX = 512
"""Of one answer, given to the kernel at once; IOV_MAX is 1024."""
RECEIVE_BYTES = 64 * 1024
_numbers = itertools.count(1)


@dataclass(frozen=True)
class ConnectionLimits:
    """``requests_max`` at work at once; ``idle_s`` without a byte in or out closes, as Netty's idle handler does.

    ``frame_s``: a frame must be complete so long after its first byte. ``stall_s``: a client must have read something
    of what it was sent. ``unread_bytes_max``: answers waiting for clients to read, and ``unfinished_bytes_max``: frames
    half received, of all connections together.
    """

    requests_max: int = 64
    frame_bytes_max: int = 16 * MIB
    idle_s: float = 120.0
    frame_s: float = 30.0
    stall_s: float = 60.0
    unread_bytes_max: int = 64 * MIB
    unfinished_bytes_max: int = 64 * MIB


class Door(Protocol):
    """Who may ask what, and the record of who did."""

    def refusal(self, request: Request) -> Response | None:
        """What to answer instead of serving the request, or None."""
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


class Ledgers:
    """What all connections of a server hold."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.unread: HeldBytes[Connection] = HeldBytes(limits.unread_bytes_max, "unread answers", _close)
        self.unfinished: HeldBytes[Connection] = HeldBytes(
            limits.unfinished_bytes_max, "unfinished frames", _close
        )
        self.buffer = memoryview(bytearray(RECEIVE_BYTES))
        """Where every connection's bytes arrive; they are taken out at once."""

    def forget(self, connection: Connection) -> None:
        """The connection is closed."""
        self.unread.forget(connection)
        self.unfinished.forget(connection)


@dataclass(frozen=True)
class ConnectionPlace:
    """What a connection shares with the others of its server. ``version`` is what answers carry."""

    handlers: HandlerTable
    limits: ConnectionLimits
    ledgers: Ledgers
    version: int
    on_open: Callable[[Connection], None] = field(default=lambda _: None)
    on_close: Callable[[Connection], None] = field(default=lambda _: None)
    accepts_proxy: bool = False
    door: Door | None = None


class Connection(asyncio.BufferedProtocol):
    """Peer of the requests it reads. Lives on one event loop. ``plain``: its socket, where there is no TLS over it."""

    def __init__(self, place: ConnectionPlace, plain: socket.socket | None = None) -> None:
        self.id = next(_numbers)
        self._place, self._plain = place, plain
        self._handlers, self._limits, self._ledgers = place.handlers, place.limits, place.ledgers
        self._door = place.door
        self._decoder = FrameDecoder(frame_bytes_max=place.limits.frame_bytes_max)
        self._head: bytes | None = b"" if place.accepts_proxy else None
        self._transport: asyncio.Transport | None = None
        self._address = ""
        self._at_work: set[asyncio.Task[None]] = set()
        self._waiting_bytes = 0
        self._is_writable = True
        self._is_reading = True
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._opaques = itertools.count(1)
        self.last_active_s = time.monotonic()
        self._frame_begun_s: float | None = None
        self._unread_seen = (0, self.last_active_s)
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
        # Whatever the kernel does not take counts as not read. Not high=0: a TLS transport is then always too full.
        transport.set_write_buffer_limits(high=1, low=0)
        peer = transport.get_extra_info("peername")
        self._address = f"{peer[0]}:{peer[1]}" if peer else "?"
        self._place.on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.BaseProtocol. Requests at work end with it: nobody is left to answer."""
        self._is_writable = True
        self._can_write.set()
        for task in self._at_work:
            task.cancel()
        self._decoder = FrameDecoder()
        self._ledgers.forget(self)
        self._place.on_close(self)

    def pause_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._is_writable = False
        self._can_write.clear()

    def resume_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._is_writable = True
        self._can_write.set()
        self.last_active_s = time.monotonic()
        self._count_unread()
        self._start_waiting()

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
        if self._head is not None:
            try:
                data = self._without_proxy_header(data)
            except ProtocolError as error:
                self.close(str(error))
                return
        self._decoder.push(data)
        self._start_waiting()

    # -- requests ---------------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        """Begin requests that were received, as many as may be."""
        if self._transport is None or self._transport.is_closing():
            return
        decoder = self._decoder
        is_full = False
        try:
            while not (is_full := not self._is_writable or len(self._at_work) >= self._limits.requests_max):
                command = decoder.pop()
                if command is None:
                    break
                self._start(command)
        except ProtocolError as error:
            self.close(str(error))
            return
        if is_full == self._is_reading and not self._transport.is_closing():
            self._is_reading = not is_full
            if is_full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
        held_bytes = decoder.held_bytes
        self._ledgers.unfinished.set(self, held_bytes)
        if is_full or not held_bytes:
            self._frame_begun_s = None
        elif self._frame_begun_s is None:
            self._frame_begun_s = self.last_active_s

    def _start(self, command: RemotingCommand) -> None:
        if command.flag & RESPONSE_FLAG:
            if self.on_answer is not None:
                self.on_answer(command)
            return
        request = Request(command, self)
        at_once = self._handlers.at_once(command.code)
        if at_once is not None:
            try:
                response = self._judged(request) or at_once(request)
            except TieredError as error:
                response = self._refused(request, error)
            except Exception as error:
                self._failed(error)
                return
            if response is not None:
                self._respond(request, response)
                return
        work = self._serve(request, is_judged=at_once is not None)
        if self._handlers.is_prompt(command.code):
            try:
                task = begin(work)
            except Exception as error:
                self._failed(error)
                return
            if task is None:
                return
        else:
            task = asyncio.get_running_loop().create_task(work)
        self._at_work.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._at_work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
        self._start_waiting()

    def _failed(self, error: BaseException) -> None:
        logger.error("a request failed unexpectedly: %r", error, extra={"client": self._address})
        self.close("internal error")

    def _judged(self, request: Request) -> Response | None:
        """What to answer instead of serving the request, or None. Asked once."""
        return None if self._door is None else self._door.refusal(request)

    def _respond(self, request: Request, response: Response) -> None:
        """Send an answer; nothing waits before it."""
        if request.command.flag & ONEWAY_FLAG or response.is_withheld:
            return
        pieces = [memoryview(piece).cast("B") for piece in response.body]
        body_bytes = sum(map(len, pieces))
        self._send(request.command, response, pieces, body_bytes)
        if self._door is not None:
            self._door.note(request, response, body_bytes)

    async def _serve(self, request: Request, *, is_judged: bool) -> None:
        command = request.command
        response = await self._answer(request, is_judged=is_judged)
        if response is None or command.flag & ONEWAY_FLAG or response.is_withheld:
            return
        if self._is_writable:
            self._respond(request, response)
            return
        body_bytes = sum(memoryview(piece).nbytes for piece in response.body)
        self._waiting_bytes += body_bytes
        self._count_unread()
        try:
            while not self._is_writable:
                await self._can_write.wait()
        finally:
            self._waiting_bytes -= body_bytes
        self._respond(request, response)

    async def _answer(self, request: Request, *, is_judged: bool) -> Response | None:
        handler = self._handlers.find(request.command.code)
        if handler is None:
            remark = f"request code {request.code} is not supported"
            return Response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
        try:
            if not is_judged and (refusal := self._judged(request)) is not None:
                return refusal
            return await handler(request)
        except TieredError as error:
            return self._refused(request, error)

    def _refused(self, request: Request, error: TieredError) -> Response:
        """What a client is told of an error."""
        if isinstance(error, BadRequestError):
            return Response(ResponseCode.SYSTEM_ERROR, remark=str(error))
        if isinstance(error, UnavailableError):
            # The client asks again by itself; never an answer that could move an offset.
            logger.warning(
                "not available now: %s", error, extra={"client": self._address, "code": request.code}
            )
            return Response(ResponseCode.SYSTEM_BUSY, remark=f"temporarily unavailable: {error}")
        logger.error("%s", error, extra={"client": self._address, "code": request.code})
        return Response(ResponseCode.SYSTEM_ERROR, remark=str(error))

    # -- sending ----------------------------------------------------------------------------------------------

    def _send(
        self, command: RemotingCommand, response: Response, pieces: Sequence[memoryview], body_bytes: int
    ) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        version = self._place.version if response.version is None else response.version
        answer = RemotingCommand(
            int(response.code), command.opaque, RESPONSE_FLAG, "PYTHON", version, response.remark, response.ext,
            b"", command.serialize_type,
        )  # fmt: skip
        try:
            head = encode_head(answer, body_bytes)
        except ValueError as error:
            logger.error("an answer cannot be sent: %s", error, extra={"client": self._address})
            answer.code, answer.ext_fields, answer.remark = int(ResponseCode.SYSTEM_ERROR), {}, str(error)
            head, pieces = encode_head(answer, 0), ()
        self._write([head, *pieces])
        self.last_active_s = time.monotonic()

    def _write(self, pieces: list[bytes | memoryview]) -> None:
        """Give ``pieces`` to the kernel without joining them; what it does not take waits in the transport."""
        transport, plain = self._transport, self._plain
        assert transport is not None
        if plain is None or len(pieces) > PIECES_MAX or transport.get_write_buffer_size():
            transport.writelines(pieces)
        else:
            try:
                sent = plain.sendmsg(pieces)
            except OSError:  # full, or broken: the transport finds out which
                sent = 0
            if not (rest := _behind(pieces, sent)):
                return
            transport.writelines(rest)
        self._count_unread()

    def _count_unread(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            unread_bytes = self._transport.get_write_buffer_size() + self._waiting_bytes
            self._ledgers.unread.set(self, unread_bytes)

    def push(self, code: int, ext: Mapping[str, str], body: bytes = b"") -> None:
        """See Peer. A client that does not read gets none: pushes are hints, it would only pile them up."""
        self.forward(
            RemotingCommand(
                code, next(self._opaques), ONEWAY_FLAG, version=self._place.version, ext_fields=ext, body=body
            )
        )

    def forward(self, command: RemotingCommand) -> bool:
        """Send a request as it is; False where ``push`` would send none. Its answer goes to ``on_answer``."""
        if self._transport is None or self._transport.is_closing() or not self._is_writable:
            return False
        self._write([encode(command)])
        return True

    async def writable(self) -> None:
        """Wait until the client has read enough of what it was sent before."""
        while not self._is_writable:
            await self._can_write.wait()

    # -- ending -----------------------------------------------------------------------------------------------

    def close(self, why: str) -> None:
        """Hang up, at once; ``why`` goes into the log."""
        if self._transport is not None and not self._transport.is_closing():
            logger.info("connection closed: %s", why, extra={"client": self._address})
            self._transport.abort()

    def reason_to_close(self, now_s: float) -> str | None:
        """Why the connection has been of no use for too long; asked every few seconds."""
        limits = self._limits
        if self._frame_begun_s is not None and now_s - self._frame_begun_s > limits.frame_s:
            return f"a frame is not complete after {limits.frame_s:g} s"
        unread_bytes = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if unread_bytes == 0 or unread_bytes != self._unread_seen[0]:
            self._unread_seen = unread_bytes, now_s
        elif now_s - self._unread_seen[1] > limits.stall_s:
            return f"{unread_bytes} bytes have not been read for {limits.stall_s:g} s"
        is_idle = not self._at_work and now_s - self.last_active_s > limits.idle_s
        return f"idle for {limits.idle_s:g} s" if is_idle else None

    @property
    def requests_at_work(self) -> frozenset[asyncio.Task[None]]:
        """Requests being answered."""
        return frozenset(self._at_work)

    def _without_proxy_header(self, data: bytes) -> bytes:
        """``data`` without a PROXY header before the first frame; nothing while it is incomplete."""
        assert self._head is not None
        head = self._head + data
        found = split_proxy_header(head)
        if found is None:
            self._head = head
            return b""
        self._head = None
        address, header_bytes = found
        if address is not None:
            self._address = address
        return head[header_bytes:]


def _close(connection: Connection, why: str) -> None:
    logger.warning("a client is closed to save memory: %s", why, extra={"client": connection.address})
    connection.close(why)


def _behind(pieces: Sequence[bytes | memoryview], sent_bytes: int) -> list[bytes | memoryview]:
    """What follows the first ``sent_bytes`` of ``pieces``."""
    for number, piece in enumerate(pieces):
        if sent_bytes < len(piece):
            return [memoryview(piece)[sent_bytes:], *pieces[number + 1 :]]
        sent_bytes -= len(piece)
    return []
