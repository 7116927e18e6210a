"""What a client sends, up to whole commands.

Owns the partial frame and its start time.
"""

from __future__ import annotations

from tiered.remoting.command import FrameDecoder


class FrameReader:
    """Bytes in, commands out. After a ProtocolError it must not be used again."""

    def __init__(self, frame_bytes_max: int) -> None:
        self._decoder = FrameDecoder(frame_bytes_max=frame_bytes_max)
        self._frame_begun_s: float | None = None
        self.push = self._decoder.push
        """Take what the connection delivered."""
        self.pop = self._decoder.pop
        """The next command that is complete, or None. Raises ProtocolError."""
        self.only = self._decoder.only
        """The command of what was delivered where that is all there is; else None, and ``push`` is to take it. Raises
        ProtocolError."""

    def unfinished(self, now_s: float, *, is_held_back: bool, has_taken: bool) -> int:
        """Bytes no command was made of, after all were that may be. ``is_held_back``: commands may be among them, so
        the client is not the one who is late. ``has_taken``: some were made now, so that what is left is another frame
        than before: a client that sends without a pause is never seen between two."""
        held_bytes = self._decoder.held_bytes
        if is_held_back or not held_bytes:
            self._frame_begun_s = None
        elif has_taken or self._frame_begun_s is None:
            self._frame_begun_s = now_s
        return held_bytes

    def is_late(self, now_s: float, frame_s: float) -> bool:
        """Whether a frame began more than ``frame_s`` ago and is not complete."""
        return self._frame_begun_s is not None and now_s - self._frame_begun_s > frame_s

    def forget(self) -> None:
        """The connection is closed: let go of what is held."""
        self._decoder.forget()
