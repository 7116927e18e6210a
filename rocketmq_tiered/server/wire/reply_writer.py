"""Writes replies without joining their pieces, and counts the bytes that the client has not read."""

import asyncio
import socket
from collections.abc import Sequence

from rocketmq_tiered.server.wire.connection_limits import BufferAccounts, Holder

PIECES_MAX = 512
"""Limit of one system call; IOV_MAX is 1024."""

Piece = bytes | memoryview


class ReplyWriter:
    """Writes the replies of one connection. ``plain``: its socket, if there is no TLS."""

    def __init__(self, holder: Holder, accounts: BufferAccounts, plain: socket.socket | None) -> None:
        """``holder``: the connection, which is closed if the client leaves too much unread; ``accounts`` count the
        unread bytes of all connections."""
        self._holder, self._accounts, self._plain = holder, accounts, plain
        self._transport: asyncio.Transport | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._waiting_bytes = 0
        self._last_unread: tuple[int, float] = 0, float("-inf")
        self.is_writable = True
        """Whether the kernel accepts more: the client has read nearly all earlier replies."""

    def opened(self, transport: asyncio.Transport) -> None:
        """The connection is made."""
        self._transport = transport
        # Bytes beyond the kernel's buffer count as unread. Not high=0: a TLS transport is then always over it.
        transport.set_write_buffer_limits(high=1, low=0)

    def paused(self) -> None:
        """The kernel's buffer is full."""
        self.is_writable = False
        self._can_write.clear()

    def resumed(self) -> None:
        """The kernel took everything, or the connection is gone."""
        self.is_writable = True
        self._can_write.set()

    async def writable(self) -> None:
        """Wait until the client has read earlier replies."""
        while not self.is_writable:
            await self._can_write.wait()

    async def wait_to_write(self, body_bytes: int) -> None:
        """Wait until the client has read earlier replies, while the reply that waits, of ``body_bytes``, counts as
        unread."""
        self._waiting_bytes += body_bytes
        self.count_unread()
        try:
            await self.writable()
        finally:
            self._waiting_bytes -= body_bytes

    def write(self, pieces: list[Piece]) -> None:
        """Send ``pieces`` in order. Without TLS they go straight to the socket, as asyncio's transport would copy them
        into one; what the socket does not take is left to the transport."""
        transport, plain = self._transport, self._plain
        assert transport is not None
        if plain is None or len(pieces) > PIECES_MAX or transport.get_write_buffer_size():
            transport.writelines(pieces)
        else:
            try:
                sent = plain.sendmsg(pieces)
            except OSError:  # full or broken: the transport tells which
                sent = 0
            if not (rest := after_bytes(pieces, sent)):
                return
            transport.writelines(rest)
        self.count_unread()

    def count_unread(self) -> None:
        """Update the unread count."""
        if self._transport is not None and not self._transport.is_closing():
            unread_bytes = self._transport.get_write_buffer_size() + self._waiting_bytes
            self._accounts.unread.set(self._holder, unread_bytes)

    def stalled_bytes(self, now_s: float, stall_s: float) -> int:
        """Return how many bytes the client has not read, if it has read none of them for ``stall_s``; else 0. Called
        every few seconds."""
        unread_bytes = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if unread_bytes == 0 or unread_bytes != self._last_unread[0]:
            self._last_unread = unread_bytes, now_s
            return 0
        return unread_bytes if now_s - self._last_unread[1] > stall_s else 0


def after_bytes(pieces: Sequence[Piece], sent_bytes: int) -> list[Piece]:
    """``pieces`` without their first ``sent_bytes``."""
    for number, piece in enumerate(pieces):
        if sent_bytes < len(piece):
            return [memoryview(piece)[sent_bytes:], *pieces[number + 1 :]]
        sent_bytes -= len(piece)
    return []
