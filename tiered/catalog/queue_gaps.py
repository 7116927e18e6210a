"""Recorded gaps of one queue, for repeated lookups: a queue may have as many as it has records."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.model.tables import Table


class QueueGaps:
    """Offsets without a record, from GAP_DTYPE rows by offset (CatalogState.gaps_of)."""

    __slots__ = ("_begins", "_ends", "_is_empty")

    def __init__(self, table: Table) -> None:
        """``table``: the queue's gaps, sorted by their first offset. Overlapping and adjacent ones are kept as one."""
        self._is_empty = len(table) == 0
        if self._is_empty:
            return
        # A gap may end inside an earlier one: the end so far is the largest of all before it.
        begins, ends = table["begin_queue_offset"], np.maximum.accumulate(table["end_queue_offset"])
        is_apart = begins[1:] > ends[:-1]
        self._begins: NDArray[np.int64] = np.concatenate([begins[:1], begins[1:][is_apart]])
        self._ends: NDArray[np.int64] = np.concatenate([ends[:-1][is_apart], ends[-1:]])

    def after(self, offset: int) -> int:
        """The first offset from ``offset`` on that is in no gap."""
        if self._is_empty:
            return offset
        at = int(self._begins.searchsorted(offset, "right")) - 1
        return offset if at < 0 else max(offset, int(self._ends[at]))

    def before(self, offset: int) -> int:
        """The last offset up to ``offset`` that is in no gap."""
        if self._is_empty:
            return offset
        at = int(self._begins.searchsorted(offset, "right")) - 1
        return int(self._begins[at]) - 1 if at >= 0 and offset < int(self._ends[at]) else offset

    def hold(self, offsets: NDArray[Any]) -> NDArray[np.bool_]:
        """Which of ``offsets`` are in a gap."""
        if self._is_empty:
            return np.zeros(len(offsets), bool)
        at = self._begins.searchsorted(offsets, "right") - 1
        held: NDArray[np.bool_] = (at >= 0) & (offsets < self._ends[at])
        return held
