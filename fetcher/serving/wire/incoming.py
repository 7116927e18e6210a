"""What a client sends, up to whole commands: a PROXY header before the first frame, then frames.

Owns what is half received, and since when. Does not own what all connections hold of that (limits.py) nor what commands
mean.
"""

from __future__ import annotations

from fetcher.serving.wire.proxy_header import split_proxy_header
from tiered.remoting.command import FrameDecoder, RemotingCommand


class Incoming:
    """Bytes in, commands out. After a ProtocolError it must not be used again."""

    def __init__(self, frame_bytes_max: int, *, accepts_proxy: bool) -> None:
        self._decoder = FrameDecoder(frame_bytes_max=frame_bytes_max)
        self._head: bytes | None = b"" if accepts_proxy else None
        self._frame_begun_s: float | None = None
        self.pop = self._decoder.pop
        """The next command that is complete, or None. Raises ProtocolError."""

    def only(self, data: bytes) -> RemotingCommand | None:
        """The command of ``data`` where that is all there is; else None, and ``push`` is to take it. Raises
        ProtocolError."""
        return self._decoder.only(data) if self._head is None else None

    def push(self, data: bytes) -> str | None:
        """Take what the connection delivered; the client's address where a PROXY header that ends here names it.
        Raises ProtocolError."""
        if self._head is None:
            self._decoder.push(data)
            return None
        head = self._head + data
        found = split_proxy_header(head)
        if found is None:
            self._head = head
            return None
        self._head = None
        address, header_bytes = found
        self._decoder.push(head[header_bytes:])
        return address

    def unfinished(self, now_s: float, *, is_held_back: bool) -> int:
        """Bytes no command was made of, after all were that may be. ``is_held_back``: commands may be among them, so
        the client is not the one who is late."""
        held_bytes = self._decoder.held_bytes
        if is_held_back or not held_bytes:
            self._frame_begun_s = None
        elif self._frame_begun_s is None:
            self._frame_begun_s = now_s
        return held_bytes

    def is_late(self, now_s: float, frame_s: float) -> bool:
        """Whether a frame began more than ``frame_s`` ago and is not complete."""
        return self._frame_begun_s is not None and now_s - self._frame_begun_s > frame_s

    def forget(self) -> None:
        """The connection is closed: let go of what is held."""
        self._decoder.forget()
