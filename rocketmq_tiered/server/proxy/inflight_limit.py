"""Limits what is in flight to brokers and name servers: request bytes, TLS handshakes, name look-ups."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

REQUEST_BYTES_MAX = 64 * 1024 * 1024
HANDSHAKES_MAX = 128
"""Concurrent TLS handshakes, some milliseconds of CPU each. If two thousand clients reconnect at once, unlimited
handshakes would mostly time out."""
LOOKUPS_MAX = 4


class InflightLimit:
    """Bytes of requests in flight of all clients, first come, first served. Belongs to one event loop. ``handshakes``:
    held during a handshake. ``lookups``: threads for name look-ups."""

    def __init__(self, limit_bytes: int = REQUEST_BYTES_MAX, handshakes_max: int = HANDSHAKES_MAX) -> None:
        self._limit = limit_bytes
        self.handshakes = asyncio.Semaphore(handshakes_max)
        self.lookups = ThreadPoolExecutor(LOOKUPS_MAX, thread_name_prefix="names")
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used_bytes = 0

    async def enter(self, byte_count: int) -> None:
        """Wait for room. A request larger than the limit goes alone; one without a body needs no room."""
        if not byte_count or (not self._waiting and self._fits(byte_count)):
            self.used_bytes += byte_count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (byte_count, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(byte_count)
            else:
                with suppress(ValueError):
                    self._waiting.remove(entry)
                self._admit()
            raise

    def leave(self, byte_count: int) -> None:
        """Free the room that ``enter`` took."""
        self.used_bytes -= byte_count
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            byte_count, turn = self._waiting.popleft()
            if not turn.done():
                self.used_bytes += byte_count
                turn.set_result(None)

    def _fits(self, byte_count: int) -> bool:
        return self.used_bytes == 0 or self.used_bytes + byte_count <= self._limit
