"""Received bytes, up to whole commands."""

from __future__ import annotations

from tiered.remoting.command import FrameDecoder


class FrameReader:
    """Bytes in, commands out. Unusable after a ProtocolError."""

    def __init__(self, frame_bytes_max: int) -> None:
        self._decoder = FrameDecoder(frame_bytes_max=frame_bytes_max)
        self._frame_started_s: float | None = None
        self.push = self._decoder.push
        """Add received bytes."""
        self.pop = self._decoder.pop
        """The next complete command, or None. Raises ProtocolError."""
        self.only = self._decoder.only
        """The command, if the received bytes are exactly one; else None, and the bytes must be pushed. Raises
        ProtocolError."""

    def partial_bytes(self, now_s: float, *, is_paused: bool, has_popped: bool) -> int:
        """Bytes left after popping. ``is_paused``: whole commands may be among them, so the client is not late.
        ``has_popped``: commands were popped now, so the rest is a new frame: a client that sends without pause is never
        seen between two frames."""
        held_bytes = self._decoder.held_bytes
        if is_paused or not held_bytes:
            self._frame_started_s = None
        elif has_popped or self._frame_started_s is None:
            self._frame_started_s = now_s
        return held_bytes

    def is_late(self, now_s: float, frame_s: float) -> bool:
        """Whether a frame is still incomplete after ``frame_s``."""
        return self._frame_started_s is not None and now_s - self._frame_started_s > frame_s

    def forget(self) -> None:
        """The connection is closed: free the buffer."""
        self._decoder.forget()
