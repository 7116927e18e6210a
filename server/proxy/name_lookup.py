"""Addresses of a host's name, asked by threads of their own.

The system's look-up cannot be given up: with a DNS that does not answer it holds its thread for half a minute. The
event loop's own threads read archives on ``file://``, which would wait behind it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from concurrent.futures import Executor


async def addresses_of(host: str, threads: Executor) -> list[str]:
    """One at least, in the order to be tried; an address is its own. Raises OSError, and UnicodeError for what no name
    can be."""
    if _is_address(host):
        return [host]
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(threads, _looked_up, host)
    if not found:
        raise OSError(f"{host} has no address")
    return found


def _looked_up(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for _, _, _, _, place in found))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
