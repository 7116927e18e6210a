"""Sends the SDK's requests on our connections: a total deadline, bodies without copies, typed failures.

The SDK only has timeouts of single socket operations, wants a body in one buffer, and cannot tell whether a failed
request was sent. It lets a handler respond to a signed request instead of sending it (``before-send``); this is that
handler. It guarantees:

- after the deadline nothing is sent or awaited, and the connection is closed;
- likewise once the request is cancelled (abandonment.py);
- a failure before the first byte was sent is ThrottledError (no effect), after it UnansweredError;
- a refusal during the upload is read, not taken for a broken connection.
"""

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

from tiered.errors import CorruptionError, RefusedRequestError, ThrottledError, TieredError, UnansweredError
from tiered.object_store.abandonment import Abandonment, current_abandonment
from tiered.object_store.body import PieceReader, coalesced
from tiered.object_store.interface import too_large

SEND_BYTES = 256 * 1024
SOL_SOCKET, SO_LINGER, SHUT_RDWR = 1, 13, 2
"""Linux values: urllib3 owns the sockets, this module only sets an option or shuts one down."""

CONNECTIONS_MAX = 80
"""Kept open for reuse: more than the maximum of upload threads."""

_NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class _Call:
    """The current request of this thread. ``deadline_s`` is on the monotonic clock."""

    deadline_s: float
    abandonment: Abandonment | None = None
    sent: bool = False

    def remaining_s(self) -> float:
        remaining = self.deadline_s - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("timed out")
        return remaining

    def begin(self, sock: Any) -> None:
        """Register ``sock`` to be shut down when the request is cancelled."""
        if self.abandonment is not None:
            self.abandonment.begin(self, partial(_shut_down, sock))

    def finish(self) -> None:
        """The request has ended."""
        if self.abandonment is not None:
            self.abandonment.finish(self)


def _plain(sock: Any) -> Any:
    """The socket below urllib3's TLS-in-TLS through a TLS proxy."""
    return getattr(sock, "socket", sock)


def _shut_down(sock: Any) -> None:
    """Fail another thread's request on ``sock``, and discard unsent bytes."""
    sock = _plain(sock)
    sock.setsockopt(SOL_SOCKET, SO_LINGER, _NO_LINGER)
    # On the plain socket: shutdown of a TLS socket drops the state that the reading thread uses.
    super(type(sock), sock).shutdown(SHUT_RDWR)


_call: ContextVar[_Call | None] = ContextVar("_call", default=None)
_deadline: ContextVar[float | None] = ContextVar("_deadline", default=None)


@contextmanager
def deadline(timeout_s: float) -> Iterator[None]:
    """All requests of this thread inside the block end within ``timeout_s`` altogether."""
    token = _deadline.set(time.monotonic() + timeout_s)
    try:
        yield
    finally:
        _deadline.reset(token)


class _DeadlineSend:
    """Mixin: sends in bounded steps within the call's deadline."""

    sock: Any

    def send(self, data: Any) -> None:
        """Send a part of the request in steps, each with the time that is left until the deadline of the current
        request. From the first step on the request counts as sent, as it may take effect."""
        call = _call.get()
        if call is None or self.sock is None:
            self.connect()  # type: ignore[attr-defined]
        if call is None:  # no request of S3Transport
            return super().send(data)  # type: ignore[misc,no-any-return]
        call.begin(self.sock)
        view = memoryview(data)
        for start in range(0, view.nbytes, SEND_BYTES):
            call.sent = True
            try:
                self.sock.settimeout(call.remaining_s())
                self.sock.sendall(view[start : start + SEND_BYTES])
            except ConnectionResetError as error:
                # The server refused early and closed. As for a broken pipe, urllib3 then reads the
                # response; without one, that read fails.
                raise BrokenPipeError(*error.args) from error
            except TimeoutError:
                self._forget_unsent()
                raise
        return None

    def getresponse(self) -> Any:
        try:
            return super().getresponse()  # type: ignore[misc]
        except TimeoutError:
            self._forget_unsent()
            raise

    def _forget_unsent(self) -> None:
        """Reset on close: otherwise the kernel sends the rest of the abandoned request."""
        if self.sock is not None:
            _plain(self.sock).setsockopt(SOL_SOCKET, SO_LINGER, _NO_LINGER)


def _pool_classes() -> dict[str, Any]:
    """urllib3's connection pools for http and https, with connections that send within a deadline. urllib3 is imported
    here, as that takes 0.1 s, which file:// archives save."""
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

    def with_deadlines(pool: Any) -> Any:
        connection = type("Connection", (_DeadlineSend, pool.ConnectionCls), {})
        return type("Pool", (pool,), {"ConnectionCls": connection})

    return {"http": with_deadlines(HTTPConnectionPool), "https": with_deadlines(HTTPSConnectionPool)}


class S3Transport:
    """Handler of the SDK's ``before-send`` event. Thread-safe."""

    def __init__(
        self, connect_timeout_s: float, read_timeout_s: float, ca_certs: str | None, proxy_url: str | None
    ) -> None:
        """``ca_certs``: the path of the CA bundle; ``proxy_url``: the proxy of the environment for the endpoint."""
        from urllib3 import PoolManager, proxy_from_url

        self._connect_timeout_s, self._read_timeout_s = connect_timeout_s, read_timeout_s
        arguments: dict[str, Any] = {"maxsize": CONNECTIONS_MAX, "retries": False}
        if ca_certs is not None:
            arguments |= {"ca_certs": ca_certs, "cert_reqs": "CERT_REQUIRED"}
        self._manager = (
            PoolManager(**arguments)
            if proxy_url is None
            else proxy_from_url(proxy_url, proxy_headers=_proxy_headers(proxy_url), **arguments)
        )
        self._manager.pool_classes_by_scheme = _pool_classes()

    def __call__(self, request: Any, **_event: Any) -> Any:
        """Send ``request``, which the SDK has prepared and signed, within the caller's deadline, and return the
        response in the SDK's form. Raises ThrottledError if the request had no effect, UnansweredError if it may have
        had one."""
        from botocore.awsrequest import AWSResponse  # the SDK is loaded: it is the caller
        from urllib3 import Timeout
        from urllib3.exceptions import HTTPError

        read_s = self._read_timeout_s
        limit_s = _deadline.get()
        # Without a deadline of the caller, connecting, sending and reading each have a timeout.
        call = _Call(time.monotonic() + read_s if limit_s is None else limit_s, current_abandonment())
        token = _call.set(call)
        try:
            left_s = call.remaining_s()
            answer = self._manager.urlopen(
                request.method,
                request.url,
                body=_body_of(request),
                headers=_headers_of(request),
                timeout=Timeout(
                    connect=min(self._connect_timeout_s, left_s),
                    read=read_s if limit_s is None else None,
                    total=None if limit_s is None else left_s,
                ),
                preload_content=False,
                decode_content=False,
            )
            call.finish()  # a connection read to the end may be reused
            response = AWSResponse(request.url, answer.status, answer.headers, answer)
            if not request.stream_output:
                _ = response.content
            return response
        except (HTTPError, OSError) as error:
            raise transport_error(error, sent=call.sent, url=request.url) from error
        finally:
            call.finish()
            _call.reset(token)

    def close(self) -> None:
        """Close idle connections."""
        self._manager.clear()


def _proxy_headers(proxy_url: str) -> dict[str, str] | None:
    """The header with the name and the password that ``proxy_url`` has, which urllib3 does not make from it; None if it
    has none."""
    from urllib3.util import make_headers

    place = urlsplit(proxy_url)
    if place.username is None:
        return None
    return dict(make_headers(proxy_basic_auth=f"{unquote(place.username)}:{unquote(place.password or '')}"))


def transport_error(error: Exception, *, sent: bool, url: str) -> TieredError:
    """The error of tiered.errors for a failed request to ``url``. ``sent``: whether a byte of the request may have
    arrived, so that it may have had an effect."""
    endpoint = url.split("?", 1)[0].split("//", 1)[-1].split("/", 1)[0]
    reason = _reason(error)
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        hint = "set AWS_CA_BUNDLE to a file that contains the certificate of its CA"
        return RefusedRequestError(f"{endpoint}: the server's certificate is not trusted", hint=hint)
    if not sent:
        return ThrottledError(f"object store {endpoint} is unreachable: {reason}")
    return UnansweredError(f"object store {endpoint} did not answer: {reason}")


def _reason(error: BaseException) -> str:
    """The text of the innermost cause of a failed request. urllib3 nests errors in the arguments of others, and its
    texts begin with the addresses of Python objects, which are cut off."""
    cause = error
    while True:
        nested = [argument for argument in cause.args if isinstance(argument, BaseException)]
        following = nested[-1] if nested else cause.__cause__
        if following is None:
            break
        cause = following
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    if isinstance(cause, TimeoutError):
        return "timed out"
    return str(cause).rsplit("): ", 1)[-1] or type(cause).__name__


def _body_of(request: Any) -> Any:
    body = request.body
    return coalesced(body.views) if isinstance(body, PieceReader) else body


def _headers_of(request: Any) -> dict[str, str]:
    """The headers of a signed request as text, as urllib3 expects them, without "Expect: 100-continue": that costs a
    round trip and only helps against early refusals, which ``send`` handles. It is not signed."""
    return {
        name: value.decode("ascii") if isinstance(value, bytes) else value
        for name, value in request.headers.items()
        if name.lower() != "expect"
    }


PIECE_BYTES = 1024 * 1024
"""Read at once from a response without a length."""


class ResponseLimit:
    """At most ``max_bytes`` of the object or, with ``is_range``, of the range ``where``."""

    def __init__(self, max_bytes: int, where: str, *, is_range: bool) -> None:
        self._max_bytes = max_bytes
        self._where = where
        self._is_range = is_range
        self._read_bytes = 0

    def refusal(self, response: dict[str, Any]) -> TieredError | None:
        """The error for a response whose headers announce too much."""
        length = response.get("ContentLength")
        return self._too_long(length) if length is not None and length > self._max_bytes else None

    def is_bounded(self, response: dict[str, Any]) -> bool:
        """Whether the response ends after its ``Content-Length``, which a chunked one ignores."""
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return response.get("ContentLength") is not None and "transfer-encoding" not in headers

    def within(self, piece: bytes) -> bytes:
        """``piece``, which was read, unless it is more than was requested: then it raises."""
        self._read_bytes += len(piece)
        if self._read_bytes > self._max_bytes:
            raise self._too_long(self._read_bytes)
        return piece

    def _too_long(self, byte_count: int) -> TieredError:
        if not self._is_range:
            return too_large(byte_count, self._max_bytes, self._where)
        return CorruptionError(
            f"{self._where}: the store sent {byte_count} bytes or more, though {self._max_bytes} were requested"
        )
