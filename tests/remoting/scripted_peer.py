"""A remoting peer that plays a script."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.remoting.tls_peer import listening
from tiered.remoting.command import FrameDecoder, RemotingCommand, encode

Answer = Callable[[RemotingCommand], bytes]


@contextmanager
def peer(answer: Answer) -> Iterator[str]:
    """A broker that answers every request with what ``answer`` returns; empty bytes hang up."""

    def serve(connection: socket.socket) -> None:
        decoder = FrameDecoder()
        while data := connection.recv(65536):
            for command in decoder.feed(data):
                reply = answer(command)
                if not reply:
                    return
                connection.sendall(reply)

    with listening(serve) as address:
        yield address


def reply(request: RemotingCommand, body: bytes = b"", code: int = 0) -> bytes:
    return encode(RemotingCommand(code, request.opaque, flag=1, body=body))
