"""Resolves host names on threads of its own: a look-up cannot be cancelled and blocks for half a minute if DNS does not
answer. The event loop's default threads read ``file://`` archives, which would wait behind it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from concurrent.futures import Executor


async def addresses_of(host: str, threads: Executor) -> list[str]:
    """At least one address, in the order to try; an address resolves to itself. Raises OSError, and UnicodeError for an
    invalid name."""
    if _is_address(host):
        return [host]
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(threads, _resolve, host)
    if not found:
        raise OSError(f"{host} has no address")
    return found


def _resolve(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for _, _, _, _, place in found))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
