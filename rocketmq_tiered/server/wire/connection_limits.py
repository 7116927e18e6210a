"""Limits of a connection, and the memory accounts of all connections of a server."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
RECEIVE_BYTES = 64 * 1024

HolderT = TypeVar("HolderT")


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one connection: ``requests_max`` in progress, waiting pulls included; ``idle_s`` without a byte in or
    out, as in Netty's idle handler; ``frame_s`` from a frame's first byte to its last; ``stall_s`` without reading
    anything that was sent. Limits of all connections: bytes of unread replies, partial frames and large requests.
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


class BufferedBytes(Generic[HolderT]):
    """Bytes buffered for all holders together. Above the limit the holder that has buffered longest is closed: a client
    that keeps up holds nothing, so it is never closed. ``close`` gets a holder and the reason; it may call ``forget``.
    """

    def __init__(self, limit_bytes: int, what: str, close: Callable[[HolderT, str], None]) -> None:
        self._limit_bytes, self._what, self._close = limit_bytes, what, close
        self._held: dict[HolderT, int] = {}
        """Bytes by holder, in the order in which holders began to hold some."""
        self.total_bytes = 0
        self.peak_bytes = 0

    def set(self, holder: HolderT, held_bytes: int) -> None:
        """Note that ``holder`` now has ``held_bytes`` buffered. If all holders together are above the limit, those that
        have held bytes longest are closed."""
        before = self._held.get(holder, 0)
        if before == held_bytes:
            return
        self.total_bytes += held_bytes - before
        if held_bytes:
            self._held[holder] = held_bytes
        else:
            del self._held[holder]
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)
        while self.total_bytes > self._limit_bytes:
            oldest = next(iter(self._held))
            reason = (
                f"{self._what} of all clients take {self.total_bytes} bytes, this client's are the oldest"
            )
            self.forget(oldest)
            self._close(oldest, reason)

    def forget(self, holder: HolderT) -> None:
        """``holder`` is gone."""
        self.total_bytes -= self._held.pop(holder, 0)


class BufferAccounts:
    """Memory that all connections of a server hold."""

    def __init__(self, limits: ConnectionLimits) -> None:
        """``limits``: above each of them, the connections that have held such bytes longest are closed."""
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
    logger.warning(
        "a client's connection is closed, so that memory stays within serve.memory_bytes: %s",
        why,
        extra={"client": holder.address},
    )
    holder.close(why)
