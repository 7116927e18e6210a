"""Values of a prefetch window: its limits, the progress of its reader, and ranges of a queue fetched ahead."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple


class WindowLimits(NamedTuple):
    """``offsets_min``: smallest window when batches are smaller. ``bytes_max``: largest, in raw bytes of messages.
    ``unread_s``: how long blocks may wait to be read. ``hold_off_s``: no new attempt for so long after a failure.
    ``bytes_first``: where a window begins, in raw bytes of messages."""

    offsets_min: int
    bytes_max: int
    unread_s: float
    hold_off_s: float
    bytes_first: int = 0


class RunEnds(NamedTuple):
    """Where the run that holds the last offset of a fetch begins and ends, in offsets of the queue."""

    begin: int
    end: int


class PullProgress(NamedTuple):
    """A pull from ``offset`` to ``next_offset``; the reader has blocks up to ``covered``, ``block_bytes`` raw bytes of
    them were read. ``time_s``: now."""

    offset: int
    next_offset: int
    covered: int
    block_bytes: int
    time_s: float


@dataclass(eq=False)
class PrefetchRange:
    """Offsets [begin, end) prefetched together, or being fetched. ``bytes``: raw."""

    begin: int
    end: int
    bytes: int
    since_s: float
    is_done: bool = False
    blocks: Collection[object] = ()
    """Names of the blocks, once they are there."""

    def bytes_from(self, offset: int) -> int:
        """Raw bytes of what lies at and above ``offset``, about."""
        left = self.end - max(self.begin, offset)
        return self.bytes * max(left, 0) // max(self.end - self.begin, 1)
