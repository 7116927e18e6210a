"""What bounds connections: each one's limits, and the counts of what all of a server's hold together."""

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
    """``requests_max`` at work at once; ``idle_s`` without a byte in or out closes, as Netty's idle handler does.

    ``frame_s``: a frame must be complete so long after its first byte. ``stall_s``: a client must have read something
    of what it was sent. ``unread_bytes_max``: answers waiting for clients to read, and ``unfinished_bytes_max``: frames
    half received, of all connections together. ``requests_bytes_max``: large requests that are being answered, of
    all together (active_requests.py).
    """

    requests_max: int = 64
    frame_bytes_max: int = 16 * MIB
    idle_s: float = 120.0
    frame_s: float = 30.0
    stall_s: float = 60.0
    unread_bytes_max: int = 64 * MIB
    unfinished_bytes_max: int = 64 * MIB
    requests_bytes_max: int = 256 * MIB


class Holder(Protocol):
    """A connection, as far as it is counted here. Known by its identity."""

    @property
    def address(self) -> str:
        """``ip:port`` of the client."""
        ...

    def close(self, why: str) -> None:
        """Hang up."""
        ...


class BufferAccounts:
    """What all connections of a server hold."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.unread: BufferedBytes[Holder] = BufferedBytes(limits.unread_bytes_max, "unread answers", _close)
        self.unfinished: BufferedBytes[Holder] = BufferedBytes(
            limits.unfinished_bytes_max, "unfinished frames", _close
        )
        self.requests: BufferedBytes[Holder] = BufferedBytes(
            limits.requests_bytes_max, "large requests", _close
        )
        self.buffer = memoryview(bytearray(RECEIVE_BYTES))
        """Where every connection's bytes arrive; they are taken out at once."""

    def forget(self, holder: Holder) -> None:
        """The connection is closed."""
        self.unread.forget(holder)
        self.unfinished.forget(holder)
        self.requests.forget(holder)


def _close(holder: Holder, why: str) -> None:
    logger.warning("a client is closed to save memory: %s", why, extra={"client": holder.address})
    holder.close(why)
