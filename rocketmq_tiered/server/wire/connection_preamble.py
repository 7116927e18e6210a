"""Reads the start of a connection: a load balancer's PROXY header (versions 1 and 2), then the byte that distinguishes
TLS; and the client address used in logs, rules and routes.

Bytes after the header stay in the socket. The caller limits the time. Source: haproxy's proxy-protocol.txt.
"""

import asyncio
import ipaddress
import re
import socket

from tiered.remoting.command import ProtocolError

PROXY_V2 = b"\x0d\x0a\x0d\x0a\x00\x0d\x0a\x51\x55\x49\x54\x0a"
_PROXY_V1 = re.compile(rb"PROXY (?:TCP4|TCP6) (\S+) \S+ (\d+) \d+\r\n|PROXY UNKNOWN[^\r\n]*\r\n")
FIRST_BYTES = frozenset({PROXY_V2[0], ord("P")})
"""First bytes of a header; no frame and no TLS handshake starts with them."""
_V1_BYTES_MIN, _V1_BYTES_MAX = len(b"PROXY UNKNOWN\r\n"), 107
_V2_HEAD_BYTES = 16
_LOCAL = 0
"""The load balancer's own connection; the header's addresses do not count."""
_V2_BYTES_MAX = _V2_HEAD_BYTES + 4096
"""Addresses take at most 216 bytes; extensions after them are skipped."""


def missing_bytes(head: bytes) -> int:
    """At least this many bytes are missing from an incomplete header ``head``."""
    if head[:1] != PROXY_V2[:1]:
        return max(1, _V1_BYTES_MIN - len(head))
    if len(head) < _V2_HEAD_BYTES:
        return _V2_HEAD_BYTES - len(head)
    return max(1, _V2_HEAD_BYTES + int.from_bytes(head[14:16], "big") - len(head))


def split_proxy_header(head: bytes) -> tuple[str | None, int] | None:
    """Return the client's address and the length of the PROXY header at the begin of ``head``, the first bytes of a
    connection. The address is None if the header has none; the length is 0 if there is no header.

    Returns None while the header is incomplete. Raises ProtocolError for a header that does not parse or is too long.
    """
    if head[:1] == PROXY_V2[:1] and head.startswith(PROXY_V2[: len(head)]):
        return _version_2(head)
    if head.startswith(b"PROXY "[: len(head)]):
        return _version_1(head)
    return None, 0


def _version_1(head: bytes) -> tuple[str | None, int] | None:
    """Return the address in a PROXY header of version 1, a line of text, and the header's length; None while it is
    incomplete. The address is None if the load balancer does not know it. Raises ProtocolError."""
    if b"\r\n" not in head:
        if len(head) > _V1_BYTES_MAX:
            raise ProtocolError(f"the PROXY header has no end in its first {_V1_BYTES_MAX} bytes")
        return None
    found = _PROXY_V1.match(head)
    if found is None:
        raise ProtocolError("the PROXY header is not one of version 1 as load balancers write it")
    if found[1] is None:
        return None, found.end()
    return f"{found[1].decode('ascii', 'replace')}:{found[2].decode()}", found.end()


def _version_2(head: bytes) -> tuple[str | None, int] | None:
    """Return the address in a PROXY header of version 2, which is binary, and the header's length; None while it is
    incomplete. The address is None for a health check of the load balancer. Raises ProtocolError."""
    if len(head) < _V2_HEAD_BYTES:
        return None
    end = _V2_HEAD_BYTES + int.from_bytes(head[14:16], "big")
    if end > _V2_BYTES_MAX:
        raise ProtocolError(f"the PROXY header says it has {end} bytes, more than {_V2_BYTES_MAX}")
    if len(head) < end:
        return None
    if head[12] & 0xF == _LOCAL:
        return None, end
    family, address = head[13] >> 4, head[_V2_HEAD_BYTES:end]
    if family == 1 and len(address) >= 12:
        return f"{'.'.join(map(str, address[:4]))}:{int.from_bytes(address[8:10], 'big')}", end
    if family == 2 and len(address) >= 36:
        return f"[{address[:16].hex(':', 2)}]:{int.from_bytes(address[32:34], 'big')}", end
    return None, end


def known_address(host: str, port: int | str) -> str:
    """Return ``host:port``, where an IPv4 address in IPv6 form (``::ffff:10.0.0.1``) is written as an IPv4 address."""
    if ":" in host:
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return f"{host}:{port}"
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        if mapped is not None:
            return f"{mapped}:{port}"
    return f"{host}:{port}"


TLS_CLIENT_HELLO = 0x16


async def begins_proxy_header(client: socket.socket) -> bool:
    """Whether the next byte begins a PROXY header. Raises OSError."""
    return await _first_byte(client) in FIRST_BYTES


async def take_proxy_header(client: socket.socket) -> str | None:
    """Read the PROXY header at the begin of a connection, and return the client's address in it, None if it has none.
    What follows stays in the socket. Raises ProtocolError and OSError."""
    loop = asyncio.get_running_loop()
    head = b""
    while (split := split_proxy_header(head)) is None:
        more = await loop.sock_recv(client, missing_bytes(head))
        if not more:
            raise ProtocolError("the connection ended within its PROXY header")
        head += more
    address, header_bytes = split
    if header_bytes != len(head):
        raise ProtocolError("the connection begins with neither a RocketMQ frame nor a PROXY header")
    return address


async def begins_tls(client: socket.socket) -> bool:
    """Whether the next byte begins a TLS handshake (frames begin with 0 or 1). Raises OSError."""
    return await _first_byte(client) == TLS_CLIENT_HELLO


async def _first_byte(client: socket.socket) -> int:
    """Wait for the next byte of a connection and return it, but leave it in the socket; -1: the other side closed
    it."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(client.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(client.fileno())
    return next(iter(client.recv(1, socket.MSG_PEEK)), -1)
