"""What a client is sent: given to the kernel without joining it; what that does not take waits, and is counted.

Owns writing and the count of what the client has not read. Does not own what to do about it (connection_limits.py,
connection.py).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from server.wire.connection_limits import BufferAccounts, Holder

PIECES_MAX = 512
"""Of one answer, given to the kernel at once; IOV_MAX is 1024."""

Piece = bytes | memoryview


class ReplyWriter:
    """One connection's way out. ``plain``: its socket, where there is no TLS over it."""

    def __init__(self, holder: Holder, ledgers: BufferAccounts, plain: socket.socket | None) -> None:
        self._holder, self._ledgers, self._plain = holder, ledgers, plain
        self._transport: asyncio.Transport | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._waiting_bytes = 0
        self._seen: tuple[int, float] = 0, float("-inf")
        self.is_writable = True
        """Whether the kernel takes more: the client has read about all it was sent before."""

    def opened(self, transport: asyncio.Transport) -> None:
        """The connection is made."""
        self._transport = transport
        # Whatever the kernel does not take counts as not read. Not high=0: a TLS transport is then always too full.
        transport.set_write_buffer_limits(high=1, low=0)

    def paused(self) -> None:
        """The kernel takes no more."""
        self.is_writable = False
        self._can_write.clear()

    def resumed(self) -> None:
        """The kernel took everything, or the connection is gone and nobody need wait for it."""
        self.is_writable = True
        self._can_write.set()

    async def writable(self) -> None:
        """Wait until the client has read all it was sent before."""
        while not self.is_writable:
            await self._can_write.wait()

    async def has_turn(self, body_bytes: int) -> None:
        """As ``writable``, for an answer of ``body_bytes`` that is kept meanwhile."""
        self._waiting_bytes += body_bytes
        self.count_unread()
        try:
            await self.writable()
        finally:
            self._waiting_bytes -= body_bytes

    def write(self, pieces: list[Piece]) -> None:
        """Send ``pieces``, one behind the other."""
        transport, plain = self._transport, self._plain
        assert transport is not None
        # A transport joins what it is given; sendmsg gathers.
        if plain is None or len(pieces) > PIECES_MAX or transport.get_write_buffer_size():
            transport.writelines(pieces)
        else:
            try:
                sent = plain.sendmsg(pieces)
            except OSError:  # full, or broken: the transport finds out which
                sent = 0
            if not (rest := behind(pieces, sent)):
                return
            transport.writelines(rest)
        self.count_unread()

    def count_unread(self) -> None:
        """Say how much is kept for the client."""
        if self._transport is not None and not self._transport.is_closing():
            unread_bytes = self._transport.get_write_buffer_size() + self._waiting_bytes
            self._ledgers.unread.set(self._holder, unread_bytes)

    def stalled_bytes(self, now_s: float, stall_s: float) -> int:
        """What waits for the client, if it has read nothing of it for ``stall_s``; else 0. Asked every few seconds."""
        unread_bytes = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if unread_bytes == 0 or unread_bytes != self._seen[0]:
            self._seen = unread_bytes, now_s
            return 0
        return unread_bytes if now_s - self._seen[1] > stall_s else 0


def behind(pieces: Sequence[Piece], sent_bytes: int) -> list[Piece]:
    """What follows the first ``sent_bytes`` of ``pieces``."""
    for number, piece in enumerate(pieces):
        if sent_bytes < len(piece):
            return [memoryview(piece)[sent_bytes:], *pieces[number + 1 :]]
        sent_bytes -= len(piece)
    return []
