"""A reverse proxy that loses, stalls, damages and refuses real HTTP requests, and writes down every one.

Stands between a client and a real object store. The Host header passes unchanged, so signatures stay valid.
Owns the faults of a network; tests.object_store.fault_store does the same inside a process.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

HOP_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "expect"})


class Action(Enum):
    """The outcome of one request."""

    PASS = "forwarded, answered"
    LOST_BEFORE = "not forwarded, connection closed"
    LOST_AFTER = "forwarded, connection closed instead of an answer"
    STALL = "not forwarded, no answer until the client times out"
    STALL_BODY = "the body is not even read until the client times out"
    STALL_AFTER = "forwarded, no answer until the client times out"
    DAMAGE = "one byte of the body is flipped on its way"
    TRUNCATE_ANSWER = "half of the answer's body, then the connection is closed"
    SLOW_DOWN = "503 SlowDown"
    INTERNAL_ERROR = "500 InternalError"
    CONFLICT = "409 ConditionalRequestConflict"
    FULL = "507 XMinioStorageFull"
    SKEWED = "403 RequestTimeTooSkewed"
    WRONG_REGION = "400 AuthorizationHeaderMalformed"
    DENIED = "403 AccessDenied"
    EXPIRED = "400 ExpiredToken"
    NO_BUCKET = "404 NoSuchBucket"


class Stage(Enum):
    """How far one request has come."""

    ARRIVED = "its head is read"
    RECEIVED = "its body is read too"
    TAKEN = "the store has answered, the client has not heard"
    ANSWERED = "the client has been sent the answer"


_CANNED = {
    Action.SLOW_DOWN: (503, "SlowDown"),
    Action.INTERNAL_ERROR: (500, "InternalError"),
    Action.CONFLICT: (409, "ConditionalRequestConflict"),
    Action.FULL: (507, "XMinioStorageFull"),
    Action.SKEWED: (403, "RequestTimeTooSkewed"),
    Action.WRONG_REGION: (400, "AuthorizationHeaderMalformed"),
    Action.DENIED: (403, "AccessDenied"),
    Action.EXPIRED: (400, "ExpiredToken"),
    Action.NO_BUCKET: (404, "NoSuchBucket"),
}
_CANNED_BY_KMS = {
    Action.SLOW_DOWN: (400, "ThrottlingException"),
    Action.INTERNAL_ERROR: (500, "KMSInternalException"),
    Action.DENIED: (400, "AccessDeniedException"),
    Action.EXPIRED: (400, "ExpiredTokenException"),
}


@dataclass
class ProxiedRequest:
    """One line of the log. ``client_closed``: the client was seen closing its end of a stalled connection.

    ``size_bytes`` is what the head says of the body; ``ended_s`` is 0 until the answer was sent or withheld.
    """

    method: str
    path: str
    query: str
    began_s: float
    action: Action = Action.PASS
    status: int = 0
    client_closed: bool = False
    size_bytes: int = 0
    ended_s: float = 0.0
    stage: Stage = Stage.ARRIVED


class FaultProxy:
    """Forwards to ``upstream``; ``decide`` says what to do with each request, from any thread."""

    def __init__(
        self, upstream: str, decide: Callable[[ProxiedRequest], Action] = lambda _request: Action.PASS
    ) -> None:
        self.upstream = urlsplit(upstream)
        self.decide = decide
        self.on_stage: Callable[[ProxiedRequest], None] = lambda _request: None
        """Called from the request's thread each time it has come a stage further."""
        self.requests: list[ProxiedRequest] = []
        self.closing = threading.Event()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def log_of(self, method: str, path_ending: str = "") -> list[ProxiedRequest]:
        """The logged requests of ``method`` whose path ends so."""
        return [one for one in list(self.requests) if one.method == method and one.path.endswith(path_ending)]

    def close(self) -> None:
        """Stop, releasing what is stalled."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is the point of a fault, not an error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *arguments: Any) -> None:
        """The proxy has its own log."""

    def _handle(self) -> None:
        split = urlsplit(self.path)
        seen = ProxiedRequest(self.command, split.path, split.query, time.monotonic())
        seen.size_bytes = int(self.headers.get("Content-Length") or 0)
        seen.action = self.proxy.decide(seen)
        self.proxy.requests.append(seen)
        self.proxy.on_stage(seen)
        try:
            self._take(seen)
        finally:
            seen.ended_s = time.monotonic()

    def _take(self, seen: ProxiedRequest) -> None:
        if seen.action is Action.STALL_BODY:
            self._stall(seen, peeking=False)
            return
        body = self.rfile.read(seen.size_bytes)
        if len(body) < seen.size_bytes:
            self._hang_up()  # the client died while sending
            return
        self._reach(seen, Stage.RECEIVED)
        if seen.action is Action.DAMAGE and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        if seen.action in _CANNED:
            self._answer_canned(seen)
        elif seen.action is Action.LOST_BEFORE:
            self._hang_up()
        elif seen.action is Action.STALL:
            self._stall(seen)
        else:
            self._forward(seen, body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815

    def _forward(self, seen: ProxiedRequest, body: bytes) -> None:
        upstream = self.proxy.upstream
        connection = http.client.HTTPConnection(str(upstream.hostname), upstream.port, timeout=120)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS}
            connection.request(self.command, self.path, body=body or None, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
        except OSError:
            self._hang_up()
            return
        finally:
            connection.close()
        seen.status = answer.status
        self._reach(seen, Stage.TAKEN)
        if seen.action is Action.LOST_AFTER:
            self._hang_up()
        elif seen.action is Action.STALL_AFTER:
            self._stall(seen)
        else:
            self._answer(seen, answer, content)
            self._reach(seen, Stage.ANSWERED)

    def _reach(self, seen: ProxiedRequest, stage: Stage) -> None:
        seen.stage = stage
        self.proxy.on_stage(seen)

    def _answer(self, seen: ProxiedRequest, answer: http.client.HTTPResponse, content: bytes) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_HEADERS | {"content-length"}:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.command == "HEAD":
            return
        if seen.action is Action.TRUNCATE_ANSWER:
            self.wfile.write(content[: len(content) // 2])
            self._hang_up()
            return
        self.wfile.write(content)

    def _answer_canned(self, seen: ProxiedRequest) -> None:
        if "X-Amz-Target" in self.headers:
            seen.status, code = _CANNED_BY_KMS[seen.action]
            content = json.dumps({"__type": code, "message": "injected"}).encode()
        else:
            seen.status, code = _CANNED[seen.action]
            content = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        self.send_response_only(seen.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stall(self, seen: ProxiedRequest, *, peeking: bool = True) -> None:
        """Wait until the client closes. Unread body bytes hide its close, so then only the hang-up counts."""
        poller = select.poll()
        poller.register(
            self.connection, select.POLLRDHUP | select.POLLHUP | (select.POLLIN if peeking else 0)
        )
        while not self.proxy.closing.is_set():
            if poller.poll(50):
                seen.client_closed = True
                break
        self.close_connection = True

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
