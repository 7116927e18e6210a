"""One client's connection: frames in, answers out, bounded in both directions.

At most ``requests_max`` requests of a connection are at work; above, nothing more is read from it, and TCP pushes back.
An answer waits until the ones before it have left when the client reads slowly, so memory held for a connection is
bounded by requests times the largest answer. A frame that breaks the protocol closes the connection.

Owns the asyncio protocol. Does not own what requests mean (handlers) nor accepting (server.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fetcher.serving.codes import ResponseCode
from fetcher.serving.request import BadRequestError, HandlerTable, Request, Response
from tiered.errors import TieredError, UnavailableError
from tiered.remoting.command import FrameDecoder, ProtocolError, RemotingCommand, encode, encode_head

logger = logging.getLogger(__name__)

RESPONSE_FLAG, ONEWAY_FLAG = 1, 2
PROXY_V2 = b"\x0d\x0a\x0d\x0a\x00\x0d\x0a\x51\x55\x49\x54\x0a"
_PROXY_V1 = re.compile(rb"PROXY (?:TCP4|TCP6) (\S+) \S+ (\d+) \d+\r\n|PROXY UNKNOWN[^\r\n]*\r\n")
_PROXY_V1_BYTES_MAX = 107
_numbers = itertools.count(1)


@dataclass(frozen=True)
class ConnectionLimits:
    """``requests_max`` at work at once; ``idle_s`` without a byte in or out closes, as Netty's idle handler does."""

    requests_max: int = 64
    frame_bytes_max: int = 16 * 1024 * 1024
    idle_s: float = 120.0
    write_buffer_bytes: int = 4 * 1024 * 1024


class Connection(asyncio.Protocol):
    """Peer of the requests it reads. Lives on one event loop."""

    def __init__(
        self,
        handlers: HandlerTable,
        limits: ConnectionLimits,
        *,
        version: int,
        on_open: Callable[[Connection], None],
        on_close: Callable[[Connection], None],
        accepts_proxy: bool = False,
    ) -> None:
        self.id = next(_numbers)
        self._handlers = handlers
        self._limits = limits
        self._version = version
        self._on_open, self._on_close = on_open, on_close
        self._decoder = FrameDecoder(frame_bytes_max=limits.frame_bytes_max)
        self._head: bytearray | None = bytearray() if accepts_proxy else None
        self._transport: asyncio.Transport | None = None
        self._address = ""
        self._at_work: set[asyncio.Task[None]] = set()
        self._waiting: list[RemotingCommand] = []
        self._can_write = asyncio.Event()
        self._can_write.set()
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
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        peer = transport.get_extra_info("peername")
        self._address = f"{peer[0]}:{peer[1]}" if peer else "?"
        self._on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol. Requests at work end with it: nobody is left to answer."""
        self._can_write.set()
        for task in self._at_work:
            task.cancel()
        self._waiting.clear()
        self._on_close(self)

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self.last_active_s = time.monotonic()
        try:
            if self._head is not None:
                data = self._without_proxy_header(data)
            self._waiting += self._decoder.feed(data)
        except ProtocolError as error:
            self.close(str(error))
            return
        self._start_waiting()

    # -- requests ---------------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        while self._waiting and len(self._at_work) < self._limits.requests_max:
            command = self._waiting.pop(0)
            if command.flag & RESPONSE_FLAG:
                if self.on_answer is not None:
                    self.on_answer(command)
                continue
            task = asyncio.get_running_loop().create_task(self._serve(command))
            self._at_work.add(task)
            task.add_done_callback(self._ended)
        if self._transport is not None and not self._transport.is_closing():
            if self._waiting:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._at_work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request failed unexpectedly: %r", error, extra={"client": self._address})
            self.close("internal error")
        self._start_waiting()

    async def _serve(self, command: RemotingCommand) -> None:
        response = await self._answer(Request(command, self))
        if response is None or command.is_oneway:
            return
        await self._can_write.wait()
        self._send(command, response)

    async def _answer(self, request: Request) -> Response | None:
        handler = self._handlers.find(request.code)
        if handler is None:
            remark = f"request code {request.code} is not supported"
            return Response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
        try:
            return await handler(request)
        except BadRequestError as error:
            return Response(ResponseCode.SYSTEM_ERROR, remark=str(error))
        except UnavailableError as error:
            # The client asks again by itself; never an answer that could move an offset.
            logger.warning(
                "not available now: %s", error, extra={"client": self._address, "code": request.code}
            )
            return Response(ResponseCode.SYSTEM_BUSY, remark=f"temporarily unavailable: {error}")
        except TieredError as error:
            logger.error("%s", error, extra={"client": self._address, "code": request.code})
            return Response(ResponseCode.SYSTEM_ERROR, remark=str(error))

    def _send(self, command: RemotingCommand, response: Response) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        answer = replace(
            command,
            code=int(response.code),
            flag=RESPONSE_FLAG,
            language="PYTHON",
            version=self._version if response.version is None else response.version,
            remark=response.remark,
            ext_fields=response.ext,
            body=b"",
        )
        pieces = [memoryview(piece).cast("B") for piece in response.body]
        try:
            head = encode_head(answer, sum(map(len, pieces)))
        except ValueError as error:
            logger.error("an answer cannot be sent: %s", error, extra={"client": self._address})
            refusal = replace(answer, code=int(ResponseCode.SYSTEM_ERROR), ext_fields={}, remark=str(error))
            head, pieces = encode_head(refusal, 0), []
        self._transport.writelines([head, *pieces])
        self.last_active_s = time.monotonic()

    def push(self, code: int, ext: Mapping[str, str], body: bytes = b"") -> None:
        """See Peer. A client that does not read gets none: pushes are hints, it would only pile them up."""
        if self._transport is None or self._transport.is_closing() or not self._can_write.is_set():
            return
        command = RemotingCommand(
            code, next(self._opaques), ONEWAY_FLAG, version=self._version, ext_fields=ext, body=body
        )
        self._transport.write(encode(command))

    def forward(self, command: RemotingCommand) -> bool:
        """Send a request as it is; False where ``push`` would send none. Its answer goes to ``on_answer``."""
        if self._transport is None or self._transport.is_closing() or not self._can_write.is_set():
            return False
        self._transport.write(encode(command))
        return True

    async def writable(self) -> None:
        """Wait until the client has read enough of what it was sent before."""
        await self._can_write.wait()

    # -- ending -----------------------------------------------------------------------------------------------

    def close(self, why: str) -> None:
        """Hang up, at once; ``why`` goes into the log."""
        if self._transport is not None and not self._transport.is_closing():
            logger.info("connection closed: %s", why, extra={"client": self._address})
            self._transport.abort()

    def is_idle(self, now_s: float) -> bool:
        """Whether nothing came or went for the limit, and nothing is at work."""
        return not self._at_work and now_s - self.last_active_s > self._limits.idle_s

    @property
    def requests_at_work(self) -> frozenset[asyncio.Task[None]]:
        """Requests being answered."""
        return frozenset(self._at_work)

    # -- PROXY protocol ---------------------------------------------------------------------------------------

    def _without_proxy_header(self, data: bytes) -> bytes:
        """``data`` without a PROXY header before the first frame; nothing while it is incomplete."""
        assert self._head is not None
        self._head += data
        head = bytes(self._head)
        if head.startswith(PROXY_V2[: len(head)]) and head[:1] == PROXY_V2[:1]:
            return self._after_v2(head)
        if head.startswith(b"PROXY "[: len(head)]):
            if b"\r\n" not in head:
                if len(head) > _PROXY_V1_BYTES_MAX:
                    raise ProtocolError("a PROXY header without an end")
                return b""
            found = _PROXY_V1.match(head)
            if found is None:
                raise ProtocolError("a PROXY header that does not parse")
            if found[1] is not None:
                self._address = f"{found[1].decode('ascii', 'replace')}:{found[2].decode()}"
            self._head = None
            return head[found.end() :]
        self._head = None
        return head

    def _after_v2(self, head: bytes) -> bytes:
        if len(head) < 16:
            return b""
        length = int.from_bytes(head[14:16], "big")
        if len(head) < 16 + length:
            return b""
        family, address = head[13] >> 4, head[16 : 16 + length]
        if family == 1 and length >= 12:
            self._address = f"{'.'.join(map(str, address[:4]))}:{int.from_bytes(address[8:10], 'big')}"
        elif family == 2 and length >= 36:
            self._address = f"[{address[:16].hex(':', 2)}]:{int.from_bytes(address[32:34], 'big')}"
        self._head = None
        return head[16 + length :]
