"""Requests of one connection that are being answered: how many, and the bytes of large ones.

Owns that count. Does not own when requests begin (connection.py).
"""

from __future__ import annotations

import asyncio

from server.wire.connection_limits import BufferAccounts, ConnectionLimits, Holder

LARGE_BYTES = 16 * 1024
"""Requests of clients that only read are smaller, and their pulls wait long: those do not count."""
LARGE_BYTES_MAX = 4 * 1024 * 1024
"""Of one connection, before the last one: what is read behind it would only wait."""


class ActiveRequests:
    """Belongs to one event loop."""

    def __init__(self, holder: Holder, limits: ConnectionLimits, ledgers: BufferAccounts) -> None:
        self._holder, self._ledgers, self._most = holder, ledgers, limits.requests_max
        self._tasks: dict[asyncio.Task[None], int] = {}
        """And the bytes of each, if it is large."""
        self._large_bytes = 0
        self.is_full = False
        """Whether no more may be begun."""

    def __bool__(self) -> bool:
        return bool(self._tasks)

    @property
    def tasks(self) -> frozenset[asyncio.Task[None]]:
        """All of them."""
        return frozenset(self._tasks)

    def add(self, task: asyncio.Task[None], frame_bytes: int) -> None:
        """A request of this size is being answered by ``task``."""
        large_bytes = frame_bytes if frame_bytes >= LARGE_BYTES else 0
        self._tasks[task] = large_bytes
        self._count(large_bytes)

    def ended(self, task: asyncio.Task[None]) -> None:
        """It has been answered."""
        self._count(-self._tasks.pop(task, 0))

    def cancel(self) -> None:
        """Nobody is left to answer. What they hold is forgotten with their connection."""
        for task in self._tasks:
            task.cancel()
            self._tasks[task] = 0
        self._large_bytes = 0

    def _count(self, more_bytes: int) -> None:
        if more_bytes:
            self._large_bytes += more_bytes
            self._ledgers.requests.set(self._holder, self._large_bytes)
        self.is_full = len(self._tasks) >= self._most or self._large_bytes >= LARGE_BYTES_MAX
