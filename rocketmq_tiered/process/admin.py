"""The admin HTTP server: /metrics, /health, /ready, /status.json, and pages. GET and HEAD only; by default on
127.0.0.1.

A web page whose name resolves to this host (DNS rebinding) sends that name as Host. So a Host that is a name must be
``localhost``, the bound one, or one of ``admin.host_names``; IP addresses cannot be rebound. Requests without Host are
not from browsers.
"""

import errno
import ipaddress
import logging
import re
import socket
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, NamedTuple, Protocol

from tiered.errors import AccessDeniedError, TieredError, UsageError

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 16
REQUEST_TIMEOUT_S = 10
POLL_S = 0.25
"""How long `close` may wait for the server's thread."""
HOST_CHARS_MAX = 100
"""Limit of a refused Host in the log."""
REFUSALS_LOGGED_EVERY_S = 60.0
_HOST = re.compile(r"(?:\[(?P<address>[^\]]+)\]|(?P<name>[^:]+))(?::\d+)?")
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
METRICS = "text/plain; version=0.0.4; charset=utf-8"


class AdminSource(Protocol):
    """The content of the responses. Called from the server's threads; must not block for long."""

    def health(self) -> tuple[bool, str]:
        """Whether the process works, and its state."""
        ...

    def readiness(self) -> tuple[bool, str]:
        """Whether it is the archive's writer, and its state."""
        ...

    def status_json(self) -> bytes:
        """The whole status."""
        ...

    def metrics(self) -> bytes:
        """The Prometheus text format."""
        ...


class PageAnswer(NamedTuple):
    """The response to a request for a page."""

    code: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = {}


class Pages(Protocol):
    """Pages for browsers. Called from the server's threads."""

    def answer(self, target: str, headers: Message, client: str) -> PageAnswer | None:
        """The page at ``target``, a path with its query; None if there is none. ``client``: its address."""
        ...

    def close(self) -> None:
        """Release threads and the archive."""
        ...


class AdminServer:
    """Serves an AdminSource and ``pages`` until closed. ``host_names``: accepted in Host besides ``host``."""

    def __init__(
        self,
        host: str,
        port: int,
        source: AdminSource,
        *,
        host_names: Collection[str] = (),
        pages: Pages | None = None,
    ) -> None:
        """Bind the port (0: any free one) and start the thread that serves. Raises UsageError or AccessDeniedError if
        the port cannot be bound."""
        hosts = _HostCheck({"localhost", host, *host_names})
        handler = type("Handler", (_Handler,), {"source": source, "hosts": hosts, "pages": pages})
        self._pages = pages
        try:
            self._server = _BoundedServer((host, port), handler)
        except OSError as error:
            message = f"cannot listen on {host}:{port}: {error.strerror or error}"
            if error.errno in (errno.EACCES, errno.EPERM):
                raise AccessDeniedError(message, hint="set admin.port to a port above 1023") from None
            hint = "set admin.host to an address of this host"
            if error.errno == errno.EADDRINUSE:
                hint = "set admin.port to a free port, or to 0 for any"
            raise UsageError(message, hint=hint) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="admin", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The bound ``http://host:port``."""
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def close(self) -> None:
        """Stop listening, and close the pages."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self._pages is not None:
            self._pages.close()


class _BoundedServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 4 * CONNECTIONS_MAX
    """Backlog. Beyond it the kernel drops a client's first packet, which the client repeats after a second."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.slots = _Slots()
        host, port = address
        host = host.strip("[]")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Unlike HTTPServer's, without a DNS request, which could delay the start."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a new connection in a thread of its own. It is closed at once if as many as are allowed wait for a
        response."""
        if not self.slots.take(request):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread started; the caller closes the connection
            self.slots.leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.leave(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that disconnects during a response is not logged."""


class _Slots:
    """At most CONNECTIONS_MAX connections. A new one replaces the one that has waited longest for its client, so that
    idle or slow clients cannot hide the health of the process. A connection that waits for a response is never
    replaced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[socket.socket, None] = {}
        self._answering: set[socket.socket] = set()

    def take(self, connection: socket.socket) -> bool:
        """Count a new ``connection``, and close the one that has waited longest for its client if there are as many as
        are allowed. Returns False if none of them waits for its client, so that the new one has to be closed."""
        with self._lock:
            if len(self._idle) + len(self._answering) >= CONNECTIONS_MAX:
                if not self._idle:
                    return False
                longest = next(iter(self._idle))  # in the order in which they began to wait
                del self._idle[longest]
                with suppress(OSError):  # it has just ended
                    longest.shutdown(socket.SHUT_RDWR)  # its thread wakes up and ends
            self._idle[connection] = None
            return True

    def begin_answer(self, connection: socket.socket) -> bool:
        """Note that ``connection`` waits for a response, so that no newer one replaces it. Returns False if one already
        has."""
        with self._lock:
            if connection not in self._idle:
                return False
            del self._idle[connection]
            self._answering.add(connection)
            return True

    def end_answer(self, connection: socket.socket) -> None:
        """The connection waits for its client again."""
        with self._lock:
            self._answering.discard(connection)
            self._idle[connection] = None

    def leave(self, connection: socket.socket) -> None:
        """Remove a closed connection."""
        with self._lock:
            self._idle.pop(connection, None)
            self._answering.discard(connection)


class _HostCheck:
    """Which Host headers are accepted. Refusals are counted and logged at most once a minute."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = {name.lower().rstrip(".") for name in names if name}
        self._lock = threading.Lock()
        self._refused_count, self._logged_s = 0, float("-inf")

    def accepts(self, headers: list[str]) -> bool:
        """Whether a request with these Host headers is answered."""
        return not headers or (len(headers) == 1 and self._is_known(headers[0].strip()))

    def _is_known(self, header: str) -> bool:
        """Whether a Host header, with or without a port, has an IP address (in brackets if it is of version 6) or one
        of the accepted names."""
        found = _HOST.fullmatch(header)
        if found is None:
            return False
        try:
            ipaddress.ip_address(found["address"] or found["name"])
        except ValueError:
            return found["address"] is None and found["name"].lower().rstrip(".") in self._names
        return True

    def refused(self, client: str, host: str) -> None:
        """Count a refused request from address ``client`` with ``host`` as its Host header. At most once a minute it is
        logged, with the number of requests refused since."""
        with self._lock:
            self._refused_count += 1
            now_s = time.monotonic()
            if now_s - self._logged_s < REFUSALS_LOGGED_EVERY_S:
                return
            count, self._refused_count, self._logged_s = self._refused_count, 0, now_s
        logger.warning(
            "a request to the admin address was refused, as the name in its Host header is not accepted: if the name "
            "is right, add it to admin.host_names",
            extra={"client": client, "host": host[:HOST_CHARS_MAX], "count": count},
        )


class _Handler(BaseHTTPRequestHandler):
    server: _BoundedServer
    source: AdminSource
    hosts: _HostCheck
    pages: Pages | None
    timeout = REQUEST_TIMEOUT_S
    server_version = "rocketmq-tiered"
    sys_version = ""

    def do_HEAD(self) -> None:
        """The headers of GET; ``_answer`` omits the body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer a GET request; a failure is answered too, with code 503 or 500. A connection that a newer one has
        replaced gets no answer."""
        slots = self.server.slots
        if not slots.begin_answer(self.connection):
            return
        hosts = self.headers.get_all("Host") or []
        try:
            if not self.hosts.accepts(hosts):
                self.hosts.refused(str(self.client_address[0]), ", ".join(hosts))
                refusal = b"this Host is not accepted: use an IP address, or set admin.host_names\n"
                answer = PageAnswer(421, TEXT, refusal)
            else:
                answer = self._answer_to(self.path.split("?", 1)[0])
        except TieredError as error:
            answer = PageAnswer(503, TEXT, f"{error}\n".encode())
        except Exception:
            # Without a response the process would look dead without a reason.
            logger.critical(
                "internal error while answering a request to the admin address",
                exc_info=True,
                extra={"path": self.path},
            )
            answer = PageAnswer(500, TEXT, b"internal error: see the log\n")
        slots.end_answer(self.connection)
        self._answer(answer)

    def _answer_to(self, path: str) -> PageAnswer:
        """The answer to a GET of ``path``: metrics, status, health and readiness, else a page for browsers; code 404 if
        there is none."""
        if path == "/metrics":
            return PageAnswer(200, METRICS, self.source.metrics())
        if path == "/status.json":
            return PageAnswer(200, JSON, self.source.status_json())
        if path in ("/health", "/ready"):
            good, why = self.source.health() if path == "/health" else self.source.readiness()
            return PageAnswer(200 if good else 503, TEXT, f"{why}\n".encode())
        client = str(self.client_address[0])
        page = None if self.pages is None else self.pages.answer(self.path, self.headers, client)
        return page or PageAnswer(404, TEXT, b"/metrics /health /ready /status.json\n")

    def _answer(self, answer: PageAnswer) -> None:
        """Write an answer to the connection; a HEAD request gets the headers of GET and no body."""
        self.send_response(answer.code)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: scrapes come every few seconds."""
