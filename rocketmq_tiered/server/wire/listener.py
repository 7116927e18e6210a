"""Accepts connections on one port: plain or TLS by the first byte, with or without a PROXY header.

Owns the listening socket, the open connections, their limits in all and by address, the time until a connection is
open, and closing idle ones.
"""

import asyncio
import logging
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from rocketmq_tiered.server.wire.connection import Connection, ConnectionContext
from rocketmq_tiered.server.wire.connection_limits import BufferAccounts, ConnectionLimits
from rocketmq_tiered.server.wire.connection_preamble import (
    begins_proxy_header,
    begins_tls,
    known_address,
    take_proxy_header,
)
from rocketmq_tiered.server.wire.counted_log import CountedLog
from rocketmq_tiered.server.wire.request import Authorizer, HandlerTable
from tiered.remoting.command import ProtocolError

logger = logging.getLogger(__name__)

OPENING_S = 10.0
"""Time limit from accepting a connection until its first byte, after a PROXY header and the TLS handshake, if any."""
SWEEP_S = 5.0
BACKLOG = 1024
ACCEPTED_AT_ONCE = 2
"""Connections accepted in a row before clients already connected get their turn."""
OTHER_DESCRIPTORS = 512
PER_ADDRESS_PART, PER_ADDRESS_MIN = 4, 100
"""If no limit is set, one address may have a fourth of ``connections_max``, and at least 100 connections."""
IPV6_BITS = 64
"""A host of IPv6 has at least a network of its own."""


@dataclass(frozen=True)
class ServerOptions:
    """``version``: sent in replies (org.apache.rocketmq.common.MQVersion). ``tls``: called for each connection; plain
    clients are served too unless ``tls_only``. ``address_max``: connections of one address; 0: by PER_ADDRESS_PART.
    ``proxy_from``: from where PROXY headers are believed."""

    host: str = "127.0.0.1"
    port: int = 0
    version: int = 409
    connections_max: int = 10_000
    address_max: int = 0
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    tls: Callable[[], ssl.SSLContext | None] | None = None
    tls_only: bool = False
    proxy_from: tuple[IPv4Network | IPv6Network, ...] = ()
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
        """``handlers``: of requests on all connections; ``on_close`` is called with each connection after it has
        closed."""
        self._options = options
        self.authorizer = options.authorizer
        self._on_connection_close = on_close
        self.accounts = BufferAccounts(options.limits)
        self._context = ConnectionContext(
            handlers,
            options.limits,
            self.accounts,
            options.version,
            self._opened,
            self._closed,
            options.authorizer,
            log=CountedLog(logger),
        )
        self._log = self._context.log
        self._listener: socket.socket | None = None
        self._connections: set[Connection] = set()
        by_default = max(PER_ADDRESS_MIN, options.connections_max // PER_ADDRESS_PART)
        self._per_address_max = options.address_max or by_default
        self._by_address: Counter[str] = Counter()
        """Connections, also opening ones, by address; those of load balancers only once the client's is known."""
        self._counted: dict[Connection, str] = {}
        """The address under which each connection is counted."""
        self._opening = 0  # connections whose PROXY header or TLS handshake is not complete
        self.refused_proxy_headers = 0
        """Connections closed because of a PROXY header from outside ``proxy_from``."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> tuple[str, int]:
        """Listen and accept connections. Returns host and port that were bound. Raises OSError when the port is
        taken."""
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
        """Open connections."""
        return frozenset(self._connections)

    async def close(self, drain_s: float = 5.0) -> None:
        """Stop accepting, let requests in progress finish for ``drain_s``, close the connections."""
        for task in self._tasks:
            task.cancel()
        if self._listener is not None:
            self._listener.close()
        active = [task for connection in self._connections for task in connection.active_requests]
        if active and drain_s > 0:
            await asyncio.wait(active, timeout=drain_s)
        for connection in list(self._connections):
            connection.close("server stops")
        self._log.close()
        if self._options.authorizer is not None:
            self._options.authorizer.close()

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        """Accept connections until cancelled; one above serve.connections_max is closed at once."""
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        accepted = 0
        while True:
            try:
                client, address = await loop.sock_accept(self._listener)
            except OSError as error:
                self._log.note(logging.WARNING, f"no connection can be accepted now: {error}", "")
                await asyncio.sleep(0.1)  # out of descriptors until connections close
                continue
            if len(self._connections) + self._opening >= self._options.connections_max:
                text = f"connection refused: {len(self._connections)} are open (serve.connections_max)"
                self._log.note(logging.WARNING, text, address[0])
                client.close()
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._opening += 1
            self._spawn(self._open(client, address[0]))
            accepted += 1
            if accepted % ACCEPTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _open(self, client: socket.socket, host: str) -> None:
        """Open one accepted connection from ``host``: read its PROXY header and complete TLS, if there are any, within
        OPENING_S. A connection that is refused or fails is closed."""
        wait_s = min(OPENING_S, self._options.limits.idle_s)
        counted: list[
            str
        ] = []  # the address under which it is counted, until the open connection takes it over
        try:
            if not self._is_load_balancer(host) and not self._count(host, counted):
                client.close()
                return
            async with asyncio.timeout(wait_s):
                connection = await self._connection(client, host, counted)
            if connection is not None and connection in self._connections:
                self._counted[connection] = counted.pop()
        except (OSError, ssl.SSLError, ProtocolError) as error:
            reason = f"idle for {wait_s:g} s" if isinstance(error, TimeoutError) else error
            self._log.note(
                logging.INFO,
                f"a client's connection could not be opened: {str(reason) or type(error).__name__}",
                host,
            )
            client.close()
        except asyncio.CancelledError:  # the server stops
            client.close()
            raise
        finally:
            self._opening -= 1
            for network in counted:
                self._uncount(network)

    async def _connection(self, client: socket.socket, host: str, counted: list[str]) -> Connection | None:
        """Return the open connection for an accepted socket; None: it was refused and closed. ``host``: the other side,
        perhaps a load balancer; ``counted`` then has the address under which the client is counted."""
        options, address = self._options, None
        if await begins_proxy_header(client):
            if not self._is_load_balancer(host):
                self.refused_proxy_headers += 1
                text = f"PROXY header from {host}, which is not in serve.proxy_from: connection closed"
                self._log.note(logging.WARNING, text, host)
                client.close()
                return None
            address = await take_proxy_header(client)
        if not counted and not self._count(address.rpartition(":")[0] if address else host, counted):
            client.close()
            return None
        is_tls = options.tls is not None and await begins_tls(client)
        if options.tls_only and not is_tls:
            client.close()
            return None
        tls = options.tls() if is_tls and options.tls is not None else None
        context = self._context
        _, connection = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Connection(context, None if tls else client, address), client, ssl=tls
        )
        return connection

    @staticmethod
    def _network_of(host: str) -> str:
        """What is counted as one address."""
        plain = known_address(host.strip("[]"), 0).rpartition(":")[0].partition("%")[0]
        return str(ip_network(f"{plain}/{IPV6_BITS}", strict=False)) if ":" in plain else plain

    def _is_load_balancer(self, host: str) -> bool:
        """Whether PROXY headers from ``host`` are believed."""
        if not self._options.proxy_from:
            return False
        found = ip_address(known_address(host, 0).rpartition(":")[0].partition("%")[0])
        return any(found in network for network in self._options.proxy_from)

    def _count(self, host: str, counted: list[str]) -> bool:
        """Count one more connection of an address, and add what it is counted as to ``counted``: for IPv6 a network.
        Returns False, and counts nothing, if the address has as many as it may."""
        network = self._network_of(host)
        if self._by_address[network] >= self._per_address_max:
            text = f"connection refused: {network} has {self._per_address_max} (serve.connections_per_address_max)"
            self._log.note(logging.WARNING, text, host)
            return False
        self._by_address[network] += 1
        counted.append(network)
        return True

    def _uncount(self, network: str) -> None:
        self._by_address[network] -= 1
        if not self._by_address[network]:
            del self._by_address[network]

    def _opened(self, connection: Connection) -> None:
        self._connections.add(connection)

    def _closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if (network := self._counted.pop(connection, None)) is not None:
            self._uncount(network)
        if self._on_connection_close is not None:
            self._on_connection_close(connection)

    async def _sweep(self) -> None:
        """Every SWEEP_S, until cancelled: close the connections that have been idle or stuck too long, and let
        authorizer and log write what they have counted."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = time.monotonic()
            self._log.tick()
            if self._options.authorizer is not None:
                self._options.authorizer.tick(now_s)
            for connection in list(self._connections):
                if (reason := connection.reason_to_close(now_s)) is not None:
                    connection.close(reason)


def _allow_descriptors(connections: int) -> None:
    """Raise this process's soft limit of open files, often 1024, so that it has enough for ``connections``, as far as
    the hard limit allows; warn if that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < wanted:
        logger.warning(
            "this process may open %d files, too few for serve.connections_max = %d: raise its limit of open files"
            " (LimitNOFILE, ulimit -n), or lower the setting",
            hard,
            connections,
        )
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
