"""A server with TLS, or with none, that answers every request; and the certificates that tests of it share.

Owns the other side. What must be made of it is the tests'.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.certificates import LOCAL, Authority, Certificate
from tiered.remoting.command import FrameDecoder, RemotingCommand, encode
from tiered.remoting.tls import TlsOptions


@dataclass(frozen=True)
class Papers:
    """Of two CAs that do not know each other, and what they signed."""

    ca: Path
    other_ca: Path
    server: Certificate
    elsewhere: Certificate
    expired: Certificate
    own: Certificate
    client: Certificate
    stranger: Certificate

    @classmethod
    def made(cls, directory: Path) -> Papers:
        ours, others = Authority(directory), Authority(directory, "other-ca")
        found = cls(
            ours.certificate,
            others.certificate,
            ours.signed("server", LOCAL),
            ours.signed("elsewhere", "DNS:broker.example"),
            ours.signed("expired", LOCAL, days=0),
            ours.self_signed("own"),
            ours.signed("client"),
            others.signed("stranger"),
        )
        time.sleep(1.1)  # the expired one expires
        return found


def shows(found: Certificate, asks: Path | None = None, newest: bool = True) -> ssl.SSLContext:
    """A server's context with this certificate; it ``asks`` clients for one of this CA, and speaks TLS 1.3 or 1.2."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(found.certificate, found.key)
    if asks is not None:
        context.load_verify_locations(asks)
        context.verify_mode = ssl.CERT_REQUIRED
    if not newest:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def trusting(ca: Path | None, shown: Certificate | None = None, verify: str = "full") -> TlsOptions:
    """Options of ours."""
    files = ("", "") if shown is None else (str(shown.certificate), str(shown.key))
    return TlsOptions(verify, str(ca or ""), *files)


Serve = Callable[[socket.socket], None]


@contextmanager
def listening(serve: Serve) -> Iterator[str]:
    """``serve`` has every connection, one after the other; the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    try:
                        serve(connection)
                    except OSError:
                        continue  # the client did not like us

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def answering(context: ssl.SSLContext | None) -> Serve:
    """Answer every request with success, with TLS or without."""

    def serve(plain: socket.socket) -> None:
        plain.settimeout(5)
        if context is None:
            _answer(plain)
            return
        with context.wrap_socket(plain, server_side=True) as secured:
            _answer(secured)

    return serve


def _answer(connection: socket.socket) -> None:
    decoder = FrameDecoder()
    while data := connection.recv(65536):
        for command in decoder.feed(data):
            connection.sendall(
                encode(RemotingCommand(0, command.opaque, flag=1, body=b'{"table":{"a":"1"}}'))
            )


def hanging_up_on(first_byte: int) -> Serve:
    """As a RocketMQ server does on the first byte of what it does not take."""

    def serve(plain: socket.socket) -> None:
        plain.settimeout(5)
        assert plain.recv(1, socket.MSG_PEEK)[0] == first_byte

    return serve


def http(plain: socket.socket) -> None:
    """Something else altogether."""
    plain.settimeout(5)
    plain.recv(65536)
    plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
