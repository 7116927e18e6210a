"""Limits of a connection, and the memory accounts of all connections of a server."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from server.wire.buffered_bytes import BufferedBytes

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
RECEIVE_BYTES = 64 * 1024


@dataclass(frozen=True)
class ConnectionLimits:
    """Of one connection: ``requests_max`` in progress, waiting pulls included; ``idle_s`` without a byte in or out, as
    in Netty's idle handler; ``frame_s`` from a frame's first byte to its last; ``stall_s`` without reading anything
    that was sent. Of all connections: bytes of unread replies, partial frames and large requests (active_requests.py).
    """

    requests_max: int = 4_096
    frame_bytes_max: int = 16 * MIB
    idle_s: float = 120.0
    frame_s: float = 30.0
    stall_s: float = 60.0
    unread_bytes_max: int = 64 * MIB
    partial_bytes_max: int = 64 * MIB
    large_bytes_max: int = 256 * MIB


class Holder(Protocol):
    """A connection whose memory is counted."""

    @property
    def address(self) -> str:
        """``ip:port`` of the client."""
        ...

    def close(self, why: str) -> None:
        """Close the connection."""
        ...


class BufferAccounts:
    """Memory that all connections of a server hold."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.unread: BufferedBytes[Holder] = BufferedBytes(limits.unread_bytes_max, "unread replies", _close)
        self.partial: BufferedBytes[Holder] = BufferedBytes(
            limits.partial_bytes_max, "partial frames", _close
        )
        self.large: BufferedBytes[Holder] = BufferedBytes(limits.large_bytes_max, "large requests", _close)
        self.buffer = memoryview(bytearray(RECEIVE_BYTES))
        """Receive buffer of all connections; its bytes are copied out at once."""

    def forget(self, holder: Holder) -> None:
        """The connection is closed."""
        self.unread.forget(holder)
        self.partial.forget(holder)
        self.large.forget(holder)


def _close(holder: Holder, why: str) -> None:
    logger.warning("client closed to free memory: %s", why, extra={"client": holder.address})
    holder.close(why)
