"""What comes before a connection's frames: a load balancer's PROXY header, then perhaps TLS, told by its first byte.

Nothing behind the header is taken from the socket: TLS and frames find theirs. Owns reading these bytes; the caller
bounds how long they may take. What a PROXY header says is proxy_header.py's.
"""

from __future__ import annotations

import asyncio
import socket

from server.wire.proxy_header import FIRST_BYTES, missing_bytes, split_proxy_header
from tiered.remoting.command import ProtocolError

TLS_CLIENT_HELLO = 0x16


async def take_proxy_header(client: socket.socket) -> str | None:
    """Take a PROXY header, if there is one; the address it names, or None. Raises ProtocolError and OSError."""
    if await _first_byte(client) not in FIRST_BYTES:
        return None
    loop = asyncio.get_running_loop()
    head = b""
    while (found := split_proxy_header(head)) is None:
        more = await loop.sock_recv(client, missing_bytes(head))
        if not more:
            raise ProtocolError("a PROXY header without an end")
        head += more
    address, header_bytes = found
    if header_bytes != len(head):
        raise ProtocolError("neither a frame nor a PROXY header")
    return address


async def begins_tls(client: socket.socket) -> bool:
    """Whether the next byte begins a TLS handshake (frames begin with 0 or 1). Raises OSError."""
    return await _first_byte(client) == TLS_CLIENT_HELLO


async def _first_byte(client: socket.socket) -> int:
    """The next byte, left where it is; -1 where none comes any more."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(client.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(client.fileno())
    return next(iter(client.recv(1, socket.MSG_PEEK)), -1)
