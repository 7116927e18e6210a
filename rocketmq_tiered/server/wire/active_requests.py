"""Requests of one connection in progress: their number, and the bytes of large ones."""

from __future__ import annotations

import asyncio

from rocketmq_tiered.server.wire.connection_limits import BufferAccounts, ConnectionLimits, Holder

LARGE_BYTES = 16 * 1024
"""Smaller requests do not count: pulls are small and may wait long."""
LARGE_BYTES_MAX = 4 * 1024 * 1024
"""Limit of one connection; the request that exceeds it is the last to start."""


class ActiveRequests:
    """Belongs to one event loop."""

    def __init__(self, holder: Holder, limits: ConnectionLimits, accounts: BufferAccounts) -> None:
        self._holder, self._accounts, self._most = holder, accounts, limits.requests_max
        self._tasks: dict[asyncio.Task[None], int] = {}
        """Task -> bytes of its request, 0 unless it is large."""
        self._large_bytes = 0
        self.is_full = False
        """Whether no further request may start."""

    def __bool__(self) -> bool:
        return bool(self._tasks)

    @property
    def tasks(self) -> frozenset[asyncio.Task[None]]:
        """All of them."""
        return frozenset(self._tasks)

    def add(self, task: asyncio.Task[None], frame_bytes: int) -> None:
        """``task`` serves a request of ``frame_bytes``."""
        large_bytes = frame_bytes if frame_bytes >= LARGE_BYTES else 0
        self._tasks[task] = large_bytes
        self._count(large_bytes)

    def ended(self, task: asyncio.Task[None]) -> None:
        """``task`` has finished."""
        self._count(-self._tasks.pop(task, 0))

    def cancel(self) -> None:
        """The client is gone. Its connection drops the memory count."""
        for task in self._tasks:
            task.cancel()
            self._tasks[task] = 0
        self._large_bytes = 0

    def _count(self, more_bytes: int) -> None:
        if more_bytes:
            self._large_bytes += more_bytes
            self._accounts.large.set(self._holder, self._large_bytes)
        self.is_full = len(self._tasks) >= self._most or self._large_bytes >= LARGE_BYTES_MAX
