"""How ``serve.memory_bytes`` is divided. Each share is a limit of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TENTHS: Final = {
    "large_requests": 4,  # requests of 16 KiB and more in progress; above it the oldest clients are closed
    "partial_frames": 1,  # incomplete frames; above it the oldest clients are closed
    "unread_replies": 1,  # replies that clients have not read; above it the oldest clients are closed
    "clients": 1,  # groups, members and subscriptions named by heartbeats; above it new ones are refused
    "offsets": 1,  # group offsets committed here; above it new groups and queues are refused
    "popped": 1,  # popped messages without acknowledgement; above it no message is popped
    "retries": 1,  # retry messages and dead letters; above it send-back requests are refused
}


@dataclass(frozen=True)
class MemoryShares:
    """Bytes of each share; the names are those of TENTHS."""

    large_requests: int
    partial_frames: int
    unread_replies: int
    clients: int
    offsets: int
    popped: int
    retries: int


def memory_shares(memory_bytes: int) -> MemoryShares:
    """The shares of ``memory_bytes``."""
    return MemoryShares(**{name: memory_bytes * tenths // 10 for name, tenths in TENTHS.items()})
