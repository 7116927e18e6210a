"""Bytes buffered for all holders together. Above the limit the holder that has buffered longest is closed: a client
that keeps up holds nothing, so it is never closed. Pure but for the close callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Holder = TypeVar("Holder")


class BufferedBytes(Generic[Holder]):
    """``close`` gets a holder and the reason; it may call ``forget``."""

    def __init__(self, limit_bytes: int, what: str, close: Callable[[Holder, str], None]) -> None:
        self._limit_bytes, self._what, self._close = limit_bytes, what, close
        self._held: dict[Holder, int] = {}
        """In the order in which holders began to hold bytes."""
        self.total_bytes = 0
        self.peak_bytes = 0

    def set(self, holder: Holder, held_bytes: int) -> None:
        """``holder`` holds ``held_bytes`` now."""
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
            oldest = next(iter(self._held))
            reason = (
                f"{self._what} of all clients take {self.total_bytes} bytes, this client's are the oldest"
            )
            self.forget(oldest)
            self._close(oldest, reason)

    def forget(self, holder: Holder) -> None:
        """``holder`` is gone."""
        self.total_bytes -= self._held.pop(holder, 0)
