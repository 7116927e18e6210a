"""Pacing of the dispatch loop. Pure.

The broker writes by mmap, so inotify never fires: the tail is polled every 1 to 100 ms, faster while it grows. The
broker is queried only when new bytes are there, at most every ``ASK_EVERY_MS``: an idle broker costs neither requests
nor a visible share of a core.
"""

from __future__ import annotations

ASK_EVERY_MS = 100
REFRESH_FILES_EVERY_MS = 1_000


class AdaptivePoll:
    """Doubles the wait while nothing happens, returns to the minimum when something does."""

    def __init__(self, *, min_ms: int, max_ms: int) -> None:
        self._min_ms = min_ms
        self._max_ms = max_ms
        self._wait_ms = min_ms

    def next_wait_ms(self, *, progressed: bool) -> int:
        """How long to wait now."""
        self._wait_ms = self._min_ms if progressed else min(self._max_ms, self._wait_ms * 2)
        return self._wait_ms


class Every:
    """True at most once per period, also for the first call, and after the clock was set back."""

    def __init__(self, period_ms: int) -> None:
        self._period_ms = period_ms
        self._due_ms: int | None = None

    def is_due(self, now_ms: int) -> bool:
        """Whether the period has passed since the last True."""
        if self._due_ms is not None and self._due_ms - self._period_ms <= now_ms < self._due_ms:
            return False
        self._due_ms = now_ms + self._period_ms
        return True
