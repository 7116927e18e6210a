"""One client's connection: frames in, answers out, bounded in both directions.

At most ``requests_max`` requests of a connection are in progress, bounded in bytes too (``ActiveRequests``), and none
starts while a reply waits for the client to read. Above the limit the connection stops reading, so TCP pushes back.
``BufferAccounts`` counts what all connections buffer: partial frames, large requests in progress, unread replies. A
frame that breaks the protocol closes the connection and logs why. A connection starts requests for TURN_S, at most
TURN_REQUESTS, before other connections get their turn; connections take turns at requests with a body, too.

Owns the asyncio protocol, received bytes and when requests start; reply_writer.py owns the bytes sent, request.py
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

from rocketmq_tiered.server.wire.connection_limits import BufferAccounts, ConnectionLimits, Holder
from rocketmq_tiered.server.wire.connection_preamble import known_address
from rocketmq_tiered.server.wire.counted_log import CountedLog
from rocketmq_tiered.server.wire.reply_writer import ReplyWriter
from rocketmq_tiered.server.wire.request import Authorizer, Dispatcher, HandlerTable, Request, Response
from rocketmq_tiered.server.wire.turns import Turns, begin
from tiered.remoting.command import (
    FrameDecoder,
    ProtocolError,
    RemotingCommand,
    RequestCode,
    ResponseCode,
    encode,
    encode_answer,
    request_name,
)

LARGE_BYTES = 16 * 1024
"""Smaller requests do not count: pulls are small and may wait long."""
LARGE_BYTES_MAX = 4 * 1024 * 1024
"""Limit of one connection; the request that exceeds it is the last to start."""


class ActiveRequests:
    """Belongs to one event loop."""

    def __init__(self, holder: Holder, limits: ConnectionLimits, accounts: BufferAccounts) -> None:
        self._holder, self._accounts, self._most = holder, accounts, limits.requests_max
        self._tasks: dict[asyncio.Task[None], int] = {}
        """Task -> bytes of its request, 0 unless it is large."""
        self._large_bytes = 0
        self.is_full = False
        """Whether no further request may start."""

    def __bool__(self) -> bool:
        return bool(self._tasks)

    @property
    def tasks(self) -> frozenset[asyncio.Task[None]]:
        """The tasks of all requests in progress."""
        return frozenset(self._tasks)

    def add(self, task: asyncio.Task[None], frame_bytes: int) -> None:
        """``task`` serves a request of ``frame_bytes``."""
        large_bytes = frame_bytes if frame_bytes >= LARGE_BYTES else 0
        self._tasks[task] = large_bytes
        self._count(large_bytes)

    def ended(self, task: asyncio.Task[None]) -> None:
        """Called when ``task`` has finished."""
        self._count(-self._tasks.pop(task, 0))

    def cancel(self) -> None:
        """The client is gone. Its connection drops the memory count."""
        for task in self._tasks:
            task.cancel()
            self._tasks[task] = 0
        self._large_bytes = 0

    def _count(self, more_bytes: int) -> None:
        if more_bytes:
            self._large_bytes += more_bytes
            self._accounts.large.set(self._holder, self._large_bytes)
        self.is_full = len(self._tasks) >= self._most or self._large_bytes >= LARGE_BYTES_MAX


class FrameReader:
    """Bytes in, commands out. Unusable after a ProtocolError."""

    def __init__(self, frame_bytes_max: int) -> None:
        """``frame_bytes_max``: a longer frame is a ProtocolError before any of it is buffered."""
        self._decoder = FrameDecoder(frame_bytes_max=frame_bytes_max)
        self._frame_started_s: float | None = None
        self.push = self._decoder.push
        """Add received bytes."""
        self.pop = self._decoder.pop
        """The next complete command, or None. Raises ProtocolError."""
        self.only = self._decoder.only
        """The command, if the received bytes are exactly one; else None, and the bytes must be pushed. Raises
        ProtocolError."""

    def partial_bytes(self, now_s: float, *, is_paused: bool, has_popped: bool) -> int:
        """Bytes left after popping. ``is_paused``: whole commands may be among them, so the client is not late.
        ``has_popped``: commands were popped now, so the rest is a new frame: a client that sends without pause is never
        seen between two frames."""
        held_bytes = self._decoder.held_bytes
        if is_paused or not held_bytes:
            self._frame_started_s = None
        elif has_popped or self._frame_started_s is None:
            self._frame_started_s = now_s
        return held_bytes

    def is_late(self, now_s: float, frame_s: float) -> bool:
        """Whether a frame is still incomplete after ``frame_s``."""
        return self._frame_started_s is not None and now_s - self._frame_started_s > frame_s

    def forget(self) -> None:
        """The connection is closed: free the buffer."""
        self._decoder.forget()


logger = logging.getLogger(__name__)

RESPONSE_FLAG, ONEWAY_FLAG = 1, 2
TURN_REQUESTS, TURN_S = 16, 0.001
PARSED_BYTES = 16 * 1024
"""Requests with a body that start in one iteration of the loop, of all connections together: bodies take long."""
HINTS = frozenset({RequestCode.NOTIFY_CONSUMER_IDS_CHANGED})
"""Notices that a client may miss: it polls for the same state."""
_numbers = itertools.count(1)


@dataclass(frozen=True)
class ConnectionContext:
    """Shared by all connections of a server. ``version``: sent in replies."""

    handlers: HandlerTable
    limits: ConnectionLimits
    accounts: BufferAccounts
    version: int
    on_open: Callable[[Connection], None] = field(default=lambda _: None)
    on_close: Callable[[Connection], None] = field(default=lambda _: None)
    authorizer: Authorizer | None = None
    turns: Turns = field(default_factory=lambda: Turns(PARSED_BYTES))
    log: CountedLog = field(default_factory=lambda: CountedLog(logger))
    """Logs what any client can cause, which is counted and limited."""


class Connection(asyncio.BufferedProtocol):
    """Peer of the requests it reads. Lives on one event loop. ``plain``: its socket, if there is no TLS; ``address``:
    the client's, if a load balancer named it."""

    def __init__(
        self, context: ConnectionContext, plain: socket.socket | None = None, address: str | None = None
    ) -> None:
        """``context``: what all connections of a listener share."""
        self.id = next(_numbers)
        self._context = context
        self._limits, self._accounts, self._authorizer = context.limits, context.accounts, context.authorizer
        self._dispatcher = Dispatcher(context.handlers, context.authorizer, context.log)
        self._in = FrameReader(context.limits.frame_bytes_max)
        self._out = ReplyWriter(self, context.accounts, plain)
        self._transport: asyncio.Transport | None = None
        self._address = "" if address is None else known_address(*address.rsplit(":", 1))
        self._active = ActiveRequests(self, context.limits, context.accounts)
        self._is_reading = True
        self._turn: asyncio.Handle | None = None
        self._opaques = itertools.count(1)
        self.last_active_s = time.monotonic()
        self.on_answer: Callable[[RemotingCommand], None] | None = None
        """Gets the client's replies to forwarded requests."""

    @property
    def address(self) -> str:
        return self._address

    # -- asyncio ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio; the client's address is the socket's unless a load balancer named another."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._out.opened(transport)
        if not self._address:
            peer = transport.get_extra_info("peername")
            self._address = known_address(peer[0], peer[1]) if peer else "?"
        self._context.on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the connection has ended: cancels requests in progress, and frees what is buffered."""
        self._out.resumed()
        if self._turn is not None:
            self._turn.cancel()
        self._active.cancel()
        self._in.forget()
        self._accounts.forget(self)
        self._context.on_close(self)

    def pause_writing(self) -> None:
        self._out.paused()

    def resume_writing(self) -> None:
        self._out.resumed()
        self.last_active_s = time.monotonic()
        self._out.count_unread()
        # Not now: the transport is about to write, and a reply that meets a closed socket would close it twice.
        self._schedule_turn()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._accounts.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._accounts.buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client, and start the requests that are complete. If the bytes are no frames, the
        connection is closed."""
        self.last_active_s = time.monotonic()
        try:
            # Mostly the bytes are one whole request, which need not be buffered.
            if self._may_start() and (command := self._in.only(data)) is not None:
                self._start(command)
                if not self._may_start():
                    self._start_received()
                return
        except ProtocolError as error:
            self.close(str(error))
            return
        self._in.push(data)
        self._start_received()

    # -- requests ---------------------------------------------------------------------------------------------

    def _start_received(self) -> None:
        """Start received requests, as many as the limits allow and for TURN_S at most, as other connections wait.
        Reading from the client stops while more could be started."""
        transport, out, active = self._transport, self._out, self._active
        if transport is None or transport.is_closing():
            return
        pop, left, ends_s = self._in.pop, TURN_REQUESTS, time.monotonic() + TURN_S
        try:
            while not (is_full := not out.is_writable or active.is_full or not left):
                command = pop()
                if command is None:
                    break
                left -= 1
                self._start(command)
                if time.monotonic() >= ends_s:
                    left = 0
        except ProtocolError as error:
            self.close(str(error))
            return
        if not left:
            self._schedule_turn()
        if is_full == self._is_reading and not transport.is_closing():
            self._is_reading = not is_full
            if is_full:
                transport.pause_reading()
            else:
                transport.resume_reading()
        # What is left in the buffer counts for the memory of all connections, and for how long a frame takes to arrive.
        partial_bytes = self._in.partial_bytes(
            self.last_active_s, is_paused=is_full, has_popped=left < TURN_REQUESTS
        )
        self._accounts.partial.set(self, partial_bytes)

    def _may_start(self) -> bool:
        """Whether another request may start."""
        transport = self._transport
        return (
            self._out.is_writable
            and not self._active.is_full
            and transport is not None
            and not transport.is_closing()
        )

    def _schedule_turn(self) -> None:
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn = None
        self._start_received()

    def _start(self, command: RemotingCommand) -> None:
        """Start one request: it is answered right here if that needs no waiting, else in a task, which waits for its
        turn if the request has a body. A reply of the client to a request of the broker goes to ``on_answer``."""
        if command.flag & RESPONSE_FLAG:
            if self.on_answer is not None:
                self.on_answer(command)
            return
        request, dispatcher = Request(command, self), self._dispatcher
        task: asyncio.Task[None] | None
        try:
            at_once = dispatcher.find_at_once(command.code)
            if at_once is not None:
                response = dispatcher.at_once(at_once, request)
                if response is not None:
                    self._respond(request, response)
                    return
            if dispatcher.is_prompt(command.code):
                task = begin(self._serve(request, is_authorized=at_once is not None))
                if task is None:
                    return
            else:
                serve = self._serve_in_turn if command.body else self._serve
                task = asyncio.get_running_loop().create_task(
                    serve(request, is_authorized=at_once is not None)
                )
        except Exception as error:
            self._close_on_error(error)
            return
        self._active.add(task, command.frame_bytes)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._active.ended(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._close_on_error(error)
        self._start_received()

    def _close_on_error(self, error: BaseException) -> None:
        self._context.log.note(
            logging.ERROR,
            f"a request failed because of an unexpected error, and its connection is closed: {error!r}",
            self._address,
        )
        self.close("internal error")

    async def _serve_in_turn(self, request: Request, *, is_authorized: bool) -> None:
        await asyncio.wrap_future(self._context.turns.turn(self.id, request.command.frame_bytes))
        await self._serve(request, is_authorized=is_authorized)

    async def _serve(self, request: Request, *, is_authorized: bool) -> None:
        """Answer one request, and send the reply once the client has read what was sent before. A one-way request gets
        no reply."""
        response = await self._dispatcher.answer(request, is_authorized=is_authorized)
        if response is None or request.command.flag & ONEWAY_FLAG or response.is_withheld:
            return
        if not self._out.is_writable:
            await self._out.wait_to_write(sum(memoryview(piece).nbytes for piece in response.body))
        self._respond(request, response)
        self.last_active_s = time.monotonic()

    # -- sending ----------------------------------------------------------------------------------------------

    def _respond(self, request: Request, response: Response) -> None:
        """Send the reply to ``request``, unless that is one-way or the reply is to be withheld, and count it for the
        audit. A reply that cannot be encoded becomes an error."""
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
            version = self._context.version if response.version is None else response.version
            try:
                pieces[0] = encode_answer(
                    command, int(response.code), version, response.remark, response.ext, body_bytes
                )
            except ValueError as error:
                text = f"the reply to {request_name(command.code)} cannot be encoded: {error}"
                self._context.log.note(logging.ERROR, text, self._address)
                code = int(ResponseCode.SYSTEM_ERROR)
                pieces = [encode_answer(command, code, version, str(error), {}, 0)]
            self._out.write(pieces)
        if self._authorizer is not None:
            self._authorizer.note(request, response, body_bytes)

    def push(self, code: int, ext: Mapping[str, str], body: bytes = b"") -> None:
        """Send a one-way request to the client. A client that does not read gets none of HINTS, notices that it may
        miss; others are buffered behind its unread replies and count as such."""
        command = RemotingCommand(
            code, next(self._opaques), ONEWAY_FLAG, version=self._context.version, ext_fields=ext, body=body
        )
        if code in HINTS:
            self.forward(command)
        elif self._transport is not None and not self._transport.is_closing():
            self._out.write([encode(command)])

    def forward(self, command: RemotingCommand) -> bool:
        """Send a request unchanged; False if the client does not read. The reply goes to ``on_answer``."""
        if self._transport is None or self._transport.is_closing() or not self._out.is_writable:
            return False
        self._out.write([encode(command)])
        return True

    async def writable(self) -> None:
        """Wait until the client has read earlier replies."""
        await self._out.writable()

    # -- ending -----------------------------------------------------------------------------------------------

    def close(self, why: str) -> None:
        """Close at once; ``why`` is logged, or counted."""
        if self._transport is not None and not self._transport.is_closing():
            self._context.log.note(logging.INFO, f"connection closed: {why}", self._address)
            self._transport.abort()

    def reason_to_close(self, now_s: float) -> str | None:
        """Return why this connection is to be closed, None if it is not: a frame did not arrive in time, the client
        does not read, or nothing was sent for long. Called every few seconds."""
        limits = self._limits
        if self._in.is_late(now_s, limits.frame_s):
            return f"frame incomplete after {limits.frame_s:g} s"
        if stalled_bytes := self._out.stalled_bytes(now_s, limits.stall_s):
            return f"client has read none of {stalled_bytes} bytes for {limits.stall_s:g} s"
        is_idle = not self._active and now_s - self.last_active_s > limits.idle_s
        return f"idle for {limits.idle_s:g} s" if is_idle else None

    @property
    def active_requests(self) -> frozenset[asyncio.Task[None]]:
        """Requests in progress."""
        return self._active.tasks
