"""Bytes that connections make the server hold, all together: frames half received, answers not read yet.

When they are more than the limit, whoever has held some for longest is closed: a client that keeps up holds nothing, so
it is never the one. Pure but for the call that closes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Holder = TypeVar("Holder")


class BufferedBytes(Generic[Holder]):
    """``close`` is called with a holder and the reason; it may call ``forget``, and need not."""

    def __init__(self, limit_bytes: int, what: str, close: Callable[[Holder, str], None]) -> None:
        self._limit_bytes, self._what, self._close = limit_bytes, what, close
        self._held: dict[Holder, int] = {}
        """In the order in which they began to hold any."""
        self.total_bytes = 0
        self.peak_bytes = 0

    def set(self, holder: Holder, held_bytes: int) -> None:
        """``holder`` holds this much now."""
        before = self._held.get(holder, 0)
        if before == held_bytes:
            return
        self.total_bytes += held_bytes - before
        if held_bytes:
            self._held[holder] = held_bytes
        else:
            del self._held[holder]
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)
        while self.total_bytes > self._limit_bytes:
            longest = next(iter(self._held))
            reason = (
                f"{self._what} of all clients have {self.total_bytes} bytes, and this one's are the oldest"
            )
            self.forget(longest)
            self._close(longest, reason)

    def forget(self, holder: Holder) -> None:
        """``holder`` is gone."""
        self.total_bytes -= self._held.pop(holder, 0)
