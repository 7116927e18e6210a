"""Accepts connections on one port: plain or TLS, told apart by the first byte, with or without a PROXY header.

Owns the listening socket, the set of connections, their number and their idle end. Frames are connection.py's.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from server.wire.connection import Connection, ConnectionContext
from server.wire.connection_limits import BufferAccounts, ConnectionLimits
from server.wire.connection_preamble import begins_tls, take_proxy_header
from server.wire.dispatch import Authorizer
from server.wire.request import HandlerTable
from tiered.remoting.command import ProtocolError

logger = logging.getLogger(__name__)

FIRST_BYTE_S = 10.0
"""Of what comes before frames: a PROXY header, and the byte that tells whether TLS follows."""
SWEEP_S = 5.0
BACKLOG = 1024
OTHER_DESCRIPTORS = 512


@dataclass(frozen=True)
class ServerOptions:
    """``version`` is what answers carry (org.apache.rocketmq.common.MQVersion); ``tls``, asked for each connection,
    also serves plain clients unless ``tls_only``."""

    host: str = "127.0.0.1"
    port: int = 0
    version: int = 409
    connections_max: int = 10_000
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    tls: Callable[[], ssl.SSLContext | None] | None = None
    tls_only: bool = False
    accepts_proxy: bool = False
    authorizer: Authorizer | None = None


class Listener:
    """One listening port on the running event loop."""

    def __init__(
        self,
        handlers: HandlerTable,
        options: ServerOptions,
        *,
        on_close: Callable[[Connection], None] | None = None,
    ) -> None:
        self._options = options
        self._on_connection_close = on_close
        self.ledgers = BufferAccounts(options.limits)
        self._place = ConnectionContext(
            handlers, options.limits, self.ledgers, options.version, self._opened, self._closed,
            options.authorizer,
        )  # fmt: skip
        self._listener: socket.socket | None = None
        self._connections: set[Connection] = set()
        self._opening = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> tuple[str, int]:
        """Listen; the address really bound."""
        family = socket.AF_INET6 if ":" in self._options.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        try:
            listener.bind((self._options.host, self._options.port))
        except OSError:
            listener.close()
            raise
        listener.listen(BACKLOG)
        _allow_descriptors(self._options.connections_max)
        self._listener = listener
        self._spawn(self._accept())
        self._spawn(self._sweep())
        host, port = listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def connections(self) -> frozenset[Connection]:
        """All that are open."""
        return frozenset(self._connections)

    async def close(self, drain_s: float = 5.0) -> None:
        """Accept nothing more, let requests at work end for ``drain_s``, hang up."""
        for task in self._tasks:
            task.cancel()
        if self._listener is not None:
            self._listener.close()
        at_work = [task for connection in self._connections for task in connection.requests_at_work]
        if at_work and drain_s > 0:
            await asyncio.wait(at_work, timeout=drain_s)
        for connection in list(self._connections):
            connection.close("the server stops")
        if self._options.authorizer is not None:
            self._options.authorizer.close()

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                logger.warning("accepting failed: %s", error)
                await asyncio.sleep(0.1)  # out of descriptors: some will be closed
                continue
            if len(self._connections) + self._opening >= self._options.connections_max:
                logger.warning("connection refused: %d are open", len(self._connections))
                client.close()
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._opening += 1
            self._spawn(self._open(client))

    async def _open(self, client: socket.socket) -> None:
        options = self._options
        try:
            async with asyncio.timeout(FIRST_BYTE_S):
                address = await take_proxy_header(client) if options.accepts_proxy else None
                is_tls = options.tls is not None and await begins_tls(client)
            if options.tls_only and not is_tls:
                client.close()
                return
            tls = options.tls() if is_tls and options.tls is not None else None
            place = self._place
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(place, None if tls else client, address), client, ssl=tls
            )
        except (OSError, TimeoutError, ssl.SSLError, ProtocolError) as error:
            logger.info("a connection did not open: %r", error)
            client.close()
        except asyncio.CancelledError:  # the server stops
            client.close()
            raise
        finally:
            self._opening -= 1

    def _opened(self, connection: Connection) -> None:
        self._connections.add(connection)

    def _closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if self._on_connection_close is not None:
            self._on_connection_close(connection)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = time.monotonic()
            if self._options.authorizer is not None:
                self._options.authorizer.tick(now_s)
            for connection in list(self._connections):
                if (reason := connection.reason_to_close(now_s)) is not None:
                    connection.close(reason)


def _allow_descriptors(connections: int) -> None:
    """Raise the process's own limit of open files, which is often 1024, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < wanted:
        logger.warning(
            "at most %d files may be open: too few for serve.connections_max = %d", hard, connections
        )
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
