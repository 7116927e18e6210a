"""When timers are handed over, and which objects of them are merged. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tiered.catalog.timer_refs import TimerRef

FAN_IN = 16
"""Objects of about one size that are merged into one: so many are read for each hour, times the number of sizes."""
MERGED_MAX = 1 << 22
"""Entries of a merged object: 80 MB."""
STEP_MS = 60_000
RETRY_S = 600.0
"""A timer that the broker refuses is tried again after this long."""


def horizon_ms(now_ms: int, ahead_ms: int, longest_ms: int) -> int:
    """Timers before this time are handed over now: in steps, so that one commit covers many; to a broker that takes no
    timers (``longest_ms`` 0) those that are due."""
    ahead_ms = min(ahead_ms, longest_ms * 9 // 10)
    step_ms = max(1, min(STEP_MS, ahead_ms // 4))
    return max(now_ms + 1, (now_ms + ahead_ms) // step_ms * step_ms)


def to_merge(refs: Sequence[TimerRef]) -> list[TimerRef]:
    """FAN_IN objects of about one size, or one of which most is over: they become one. Empty: nothing to merge."""
    idle = [ref for ref in refs if ref.done == ref.claimed]
    by_size: dict[int, list[TimerRef]] = {}
    for ref in idle:
        if 2 * ref.done > ref.entries > FAN_IN**3:
            return [ref]
        by_size.setdefault((ref.entries.bit_length() - 1) // 4, []).append(ref)
    for size in sorted(by_size):
        group = by_size[size][:FAN_IN]
        if len(group) == FAN_IN and sum(ref.entries for ref in group) <= MERGED_MAX:
            return group
    return []
