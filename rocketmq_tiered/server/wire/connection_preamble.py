"""Reads the start of a connection: a load balancer's PROXY header, then the byte that distinguishes TLS.

Bytes after the header stay in the socket. The caller limits the time.
"""

from __future__ import annotations

import asyncio
import socket

from rocketmq_tiered.server.wire.proxy_header import FIRST_BYTES, missing_bytes, split_proxy_header
from tiered.remoting.command import ProtocolError

TLS_CLIENT_HELLO = 0x16


async def begins_proxy_header(client: socket.socket) -> bool:
    """Whether the next byte begins a PROXY header. Raises OSError."""
    return await _first_byte(client) in FIRST_BYTES


async def take_proxy_header(client: socket.socket) -> str | None:
    """Read the PROXY header that begins; returns its address, or None. Raises ProtocolError and OSError."""
    loop = asyncio.get_running_loop()
    head = b""
    while (found := split_proxy_header(head)) is None:
        more = await loop.sock_recv(client, missing_bytes(head))
        if not more:
            raise ProtocolError("PROXY header is incomplete")
        head += more
    address, header_bytes = found
    if header_bytes != len(head):
        raise ProtocolError("neither a frame nor a PROXY header")
    return address


async def begins_tls(client: socket.socket) -> bool:
    """Whether the next byte begins a TLS handshake (frames begin with 0 or 1). Raises OSError."""
    return await _first_byte(client) == TLS_CLIENT_HELLO


async def _first_byte(client: socket.socket) -> int:
    """The next byte, left in the socket; -1 at the end of the stream."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(client.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(client.fileno())
    return next(iter(client.recv(1, socket.MSG_PEEK)), -1)
