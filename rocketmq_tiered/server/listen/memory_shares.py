"""How ``serve.memory_bytes`` is divided. Each share is a limit of its own."""

from __future__ import annotations


class MemoryShares:
    """Bytes of each share of ``memory_bytes``."""

    def __init__(self, memory_bytes: int) -> None:
        tenth = memory_bytes // 10
        self.large_requests = memory_bytes * 4 // 10
        """Requests of 16 KiB and more in progress; above it the oldest clients are closed."""
        self.partial_frames = tenth
        """Incomplete frames; above it the oldest clients are closed."""
        self.unread_replies = tenth
        """Replies that clients have not read; above it the oldest clients are closed."""
        self.clients = tenth
        """Groups, members and subscriptions named by heartbeats; above it new ones are refused."""
        self.offsets = tenth
        """Group offsets committed here; above it new groups and queues are refused."""
        self.popped = tenth
        """Popped messages without acknowledgement; above it no message is popped."""
        self.retries = tenth
        """Retry messages and dead letters; above it send-back requests are refused."""
