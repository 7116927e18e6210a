"""A connection to the real broker for one client, in both directions, and limits of what is in flight to brokers and
name servers.

A broker identifies consumers, lock owners and receivers of notices by connection, so every client has its own, made for
its first request to the broker. Requests get new numbers; none is sent twice. The owner is notified when an established
connection is lost, because the broker drops that client's state with it. Host names are resolved on threads of their
own: a look-up cannot be cancelled and blocks for half a minute if DNS does not answer, and ``file://`` archives, which
the event loop's default threads read, would wait behind it.
"""

import asyncio
import ipaddress
import itertools
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from ssl import SSLContext
from typing import Any

from rocketmq_tiered.server.security.addresses import host_of
from tiered.errors import ThrottledError, UnansweredError
from tiered.remoting.command import FrameDecoder, ProtocolError, RemotingCommand, encode
from tiered.remoting.tls import TLS_WANTED, ClientTls, closed


async def addresses_of(host: str, threads: Executor) -> list[str]:
    """Return the addresses of ``host`` in the order to try them, at least one; an address is its own. Names are looked
    up in ``threads``. Raises OSError, and UnicodeError for an invalid name."""
    if _is_address(host):
        return [host]
    loop = asyncio.get_running_loop()
    addresses = await loop.run_in_executor(threads, _resolve, host)
    if not addresses:
        raise OSError(f"the host name {host} has no address")
    return addresses


def _resolve(host: str) -> list[str]:
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in infos))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


REQUEST_BYTES_MAX = 64 * 1024 * 1024
HANDSHAKES_MAX = 128
"""Concurrent TLS handshakes, some milliseconds of CPU each. If two thousand clients reconnect at once, unlimited
handshakes would mostly time out."""
LOOKUPS_MAX = 4


class InflightLimit:
    """Bytes of requests in flight of all clients, first come, first served. Belongs to one event loop. ``handshakes``:
    held during a handshake. ``lookups``: threads for name look-ups."""

    def __init__(self, limit_bytes: int = REQUEST_BYTES_MAX, handshakes_max: int = HANDSHAKES_MAX) -> None:
        self._limit = limit_bytes
        self.handshakes = asyncio.Semaphore(handshakes_max)
        self.lookups = ThreadPoolExecutor(LOOKUPS_MAX, thread_name_prefix="names")
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used_bytes = 0

    async def enter(self, byte_count: int) -> None:
        """Wait until a request with a body of ``byte_count`` may be sent, as those before it leave memory for it. A
        larger request than the limit is sent alone; one without a body does not wait."""
        if not byte_count or (not self._waiting and self._fits(byte_count)):
            self.used_bytes += byte_count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (byte_count, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was admitted at the same moment
                self.leave(byte_count)
            else:
                with suppress(ValueError):
                    self._waiting.remove(entry)
                self._admit()
            raise

    def leave(self, byte_count: int) -> None:
        """Free the room that ``enter`` took."""
        self.used_bytes -= byte_count
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            byte_count, turn = self._waiting.popleft()
            if not turn.done():
                self.used_bytes += byte_count
                turn.set_result(None)

    def _fits(self, byte_count: int) -> bool:
        return self.used_bytes == 0 or self.used_bytes + byte_count <= self._limit


logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
CONNECT_AGAIN_S = 0.5
"""After a refused connection, calls fail at once for this long."""
UNTAKEN_BYTES_MAX = 4 * 1024 * 1024
"""Replies the client has not read yet; above it, reading from the broker connection pauses."""


class TimedOutError(UnansweredError):
    """No reply within the time limit; the connection stays open."""


@dataclass(frozen=True)
class LinkEvents:
    """``on_request``: the broker sent a request. ``on_lost``: an established connection ended; why, and whether
    requests were waiting for replies."""

    on_request: Callable[[RemotingCommand], None] = lambda _: None
    on_lost: Callable[[str, bool], None] = lambda _why, _had_requests: None


class _Link(asyncio.Protocol):
    """One connection to ``address``."""

    def __init__(self, address: str, events: LinkEvents, tls: ClientTls | None) -> None:
        """``address`` names the other side in errors; ``events`` are called for its requests and at the end; ``tls``
        None: the connection is plain."""
        self._address, self._events, self._tls = address, events, tls
        self._decoder = FrameDecoder()
        self._pending: dict[int, asyncio.Future[RemotingCommand]] = {}
        """Who waits for the reply to which request."""
        self._transport: asyncio.Transport | None = None
        self._why = ""  # why it was closed
        self._has_answered = False
        self._untaken_bytes = 0  # of replies that their callers have not passed on yet
        self._can_write = asyncio.Event()
        self._can_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio: take the replies and requests in ``data``, and stop reading while too many bytes of
        replies have not been passed on."""
        if not self._has_answered:
            self._has_answered = True
            if self._tls is not None:
                self._tls.note_success(self._address)
        try:
            for command in self._decoder.feed(data):
                self._take(command)
        except ProtocolError as error:
            self.close(str(error))
            return
        if self._untaken_bytes > UNTAKEN_BYTES_MAX and self._transport is not None:
            self._transport.pause_reading()

    def _take(self, command: RemotingCommand) -> None:
        """Pass a reply to the caller that waits for it, or a request of the broker to the owner of this connection. A
        reply that came too late is dropped."""
        if not command.is_response:
            self._events.on_request(command)
            return
        waiting = self._pending.pop(command.opaque, None)
        if waiting is not None and not waiting.done():
            self._untaken_bytes += len(command.body)
            waiting.set_result(command)

    def note_read(self, byte_count: int) -> None:
        """Note that a reply of this size was passed on, and read on if reading was stopped because of it."""
        was_over = self._untaken_bytes > UNTAKEN_BYTES_MAX
        self._untaken_bytes -= byte_count
        if was_over and self._untaken_bytes <= UNTAKEN_BYTES_MAX and self.is_open:
            assert self._transport is not None
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the connection has ended: fail the requests that wait for a reply, as each may have
        taken effect, and notify the owner."""
        why = self._why = self._why or self._why_lost(exc)
        self._can_write.set()
        waiting = [answer for answer in self._pending.values() if not answer.done()]
        self._pending.clear()
        for answer in waiting:
            answer.set_exception(UnansweredError(f"{self._address}: {why}"))
        self._events.on_lost(why, bool(waiting))

    def _why_lost(self, exc: Exception | None) -> str:
        """Return why the connection ended, with asyncio's error ``exc`` if there is one. Before the first reply TLS is
        a likely cause: it is expected on one side and not used on the other."""
        why = "the broker closed the connection"
        if self._has_answered:
            return f"{why} ({exc})" if exc else why
        if self._tls is None:
            return f"{why}; {TLS_WANTED}"
        explained = self._tls.explain(exc, host_of(self._address)) if exc else None
        failure = explained or closed(self._tls.options)
        self._tls.note_failure(self._address, failure)
        return str(failure)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self, why: str) -> None:
        self._why = why
        if self._transport is not None:
            self._transport.abort()

    async def write(self, command: RemotingCommand) -> None:
        """Send ``command`` once the other side has taken what was sent before. Raises ThrottledError if the connection
        has ended, so that it was not sent."""
        frame = encode(command)
        await self._can_write.wait()
        if not self.is_open:
            await asyncio.sleep(0)  # connection_lost comes next and sets the reason
            raise ThrottledError(
                f"the connection to {self._address} has ended: {self._why or 'it was being closed'}"
            )
        assert self._transport is not None
        self._transport.write(frame)

    async def ask(self, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        """Send a request and return its reply, which must come within ``timeout_s``. Raises ThrottledError if the
        request was surely not sent, TimedOutError and UnansweredError if it may have taken effect."""
        waiting: asyncio.Future[RemotingCommand] = asyncio.get_running_loop().create_future()
        self._pending[command.opaque] = waiting
        was_sent = False
        try:
            async with asyncio.timeout(timeout_s):
                await self.write(command)
                was_sent = True
                return await waiting
        except BaseException as error:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.note_read(len(waiting.result().body))  # the reply came as the caller was cancelled
            if isinstance(error, TimeoutError) and not was_sent:
                raise ThrottledError(
                    f"{self._address} did not take this request within {timeout_s:g} s, as it does not read"
                ) from error
            if isinstance(error, TimeoutError):
                raise TimedOutError(f"{self._address} did not answer within {timeout_s:g} s") from error
            raise
        finally:
            self._pending.pop(command.opaque, None)
            retrieve_exception(waiting)  # a failed write raises first


class RemotingUpstream:
    """The broker at ``address``, over one connection that is made when needed and kept until ``close``. ``tls`` None:
    the connection is plain."""

    def __init__(
        self,
        address: str,
        inflight: InflightLimit,
        events: LinkEvents | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        """``address``: host:port; ``inflight``: the limit of requests in progress, which many connections share;
        ``events``: None ignores the broker's requests."""
        self.address, self._tls = address, tls
        self._inflight = inflight
        self._events = events or LinkEvents()
        self._opaques = itertools.count(1)
        self._link: _Link | None = None
        self._connecting: asyncio.Task[_Link] | None = None
        self._refused_at_s = -CONNECT_AGAIN_S  # when the last attempt to connect failed
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        """Whether the connection is open."""
        return self._link is not None and self._link.is_open

    async def call(self, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        answer, link = await self._ask_link(command, timeout_s)
        link.note_read(len(answer.body))
        return answer

    async def relay(
        self, command: RemotingCommand, timeout_s: float, can_take: Callable[[], Awaitable[None]]
    ) -> RemotingCommand:
        """Send a request and return its reply. The reply counts as not passed on until ``can_take()`` returns: a client
        that does not read slows down the broker's connection for it. Raises ThrottledError and UnansweredError."""
        answer, link = await self._ask_link(command, timeout_s)
        try:
            await can_take()
        finally:
            link.note_read(len(answer.body))
        return answer

    async def _ask_link(self, command: RemotingCommand, timeout_s: float) -> tuple[RemotingCommand, _Link]:
        """Send a request under a number of this connection, and return the reply under the caller's number, and the
        link that it came by. Raises ThrottledError and UnansweredError."""
        byte_count = len(command.body)
        await self._inflight.enter(byte_count)
        ends_s = time.monotonic() + timeout_s
        try:
            link = await self._connected_within(timeout_s)
            numbered = replace(command, opaque=next(self._opaques) & 0x7FFFFFFF)
            answer = await link.ask(numbered, max(0.0, ends_s - time.monotonic()))
        finally:
            self._inflight.leave(byte_count)
        return replace(answer, opaque=command.opaque), link

    async def send(self, command: RemotingCommand) -> None:
        """Send a request, under a number of this connection, without waiting for a reply. Raises ThrottledError if
        there is no connection."""
        byte_count = len(command.body)
        await self._inflight.enter(byte_count)
        try:
            link = await self._connected()
            await link.write(replace(command, opaque=next(self._opaques) & 0x7FFFFFFF))
        finally:
            self._inflight.leave(byte_count)

    async def answer(self, command: RemotingCommand) -> None:
        """Send the client's reply to a request of the broker, if still connected."""
        if self._link is not None:
            await self._link.write(command)

    def close(self, why: str = "the client is gone") -> None:
        """Close the connection. Calls that wait for a reply raise UnansweredError, later ones ThrottledError."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is not None:
            self._link.close(why)

    async def _connected_within(self, timeout_s: float) -> _Link:
        """Return the open connection, which is made if there is none. Raises ThrottledError if that fails or takes
        longer than ``timeout_s``."""
        if timeout_s >= CONNECT_TIMEOUT_S or self.is_connected:
            return await self._connected()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._connected()
        except TimeoutError as error:
            raise ThrottledError(f"{self.address} cannot be reached within {timeout_s:g} s") from error

    async def _connected(self) -> _Link:
        """Return the open connection; the first of several callers makes it, and the others wait for that. Raises
        ThrottledError if it cannot be made, and for CONNECT_AGAIN_S after a failure without another attempt."""
        if self._link is not None and self._link.is_open:
            return self._link
        if self._is_closed:
            raise ThrottledError(f"{self.address}: connection closed")
        if time.monotonic() - self._refused_at_s < CONNECT_AGAIN_S:
            raise ThrottledError(
                f"{self.address} could not be reached less than {CONNECT_AGAIN_S:g} s ago: repeat the request"
            )
        if self._connecting is None:
            # A task of its own: cancelling one caller does not affect the others.
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add_done_callback(retrieve_exception)
        try:
            return await asyncio.shield(self._connecting)
        except asyncio.CancelledError:
            if self._is_closed:
                raise ThrottledError(f"{self.address}: connection closed") from None
            raise

    async def _connect(self) -> _Link:
        """Make the connection, over TLS if there are settings of it. Raises ThrottledError whatever fails, as nothing
        was sent and the request may be repeated. A failure of TLS is also noted for this address, so that its cause is
        logged once."""
        host = host_of(self.address)
        try:
            transport, link = await (
                self._opened(host) if self._tls is None else self._secured(host, self._tls)
            )
        except (OSError, TimeoutError, UnicodeError) as error:  # UnicodeError: an invalid host name
            self._refused_at_s = time.monotonic()
            failure = self._tls.explain(error, host) if self._tls is not None else None
            if failure is not None and self._tls is not None:
                self._tls.note_failure(self.address, failure)
            raise ThrottledError(f"{self.address} cannot be reached: {failure or _reason(error)}") from error
        finally:
            self._connecting = None
        plain_socket = transport.get_extra_info("socket")
        if plain_socket is not None:
            plain_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link = link
        return link

    async def _secured(self, host: str, tls: ClientTls) -> tuple[asyncio.Transport, _Link]:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await self._inflight.handshakes.acquire()
        try:
            return await self._opened(host, tls.context())
        finally:
            self._inflight.handshakes.release()

    async def _opened(self, host: str, context: SSLContext | None = None) -> tuple[asyncio.Transport, _Link]:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            *others, last = await addresses_of(host, self._inflight.lookups)
            for address in others:
                with suppress(OSError):
                    return await self._opened_at(address, host, context)
            return await self._opened_at(last, host, context)

    async def _opened_at(
        self, address: str, host: str, context: SSLContext | None
    ) -> tuple[asyncio.Transport, _Link]:
        """Connect to ``address``, one of those that ``host`` has. Over TLS (``context``) the certificate has to be one
        of ``host``."""
        return await asyncio.get_running_loop().create_connection(
            lambda: _Link(self.address, self._events, self._tls),
            address,
            int(self.address.rpartition(":")[2]),
            ssl=context,
            server_hostname=None if context is None else host,
        )


def retrieve_exception(outcome: asyncio.Future[Any]) -> None:
    """Retrieve its exception, which may have no waiter left."""
    if outcome.done() and not outcome.cancelled():
        outcome.exception()


def _reason(error: Exception) -> str:
    """The error in the system's words, without the address and error number that asyncio adds."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error) or "no answer"
