"""One queue at one catalog version: its bounds and gaps. Pure values; its runs are in run_list.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fetcher.rows.pull import PullStatus
from fetcher.rows.run_list import RunList
from tiered.catalog.queue_gaps import QueueGaps
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_BATCH, QUEUE_FILLED, QUEUE_HIDDEN, QUEUE_SPARSE


class QueueView:
    """Bounds and gaps of ``queue`` in ``state``: offsets [min_offset, max_offset)."""

    __slots__ = (
        "_gaps", "first_offset", "is_batch", "is_filled", "is_hidden", "is_sparse", "max_offset", "min_offset", "queue",
        "state", "tail",
    )  # fmt: skip

    def __init__(self, state: CatalogState, queue: QueueKey, row: Any) -> None:
        self.state = state
        self.queue = queue
        self.max_offset = max(0, int(row["end_queue_offset"]))
        self.min_offset = min(int(row["min_queue_offset"]), self.max_offset)
        self.is_hidden = bool(int(row["flags"]) & QUEUE_HIDDEN)
        """The queue is of a deleted topic, or an earlier generation: read by name only, never by consumers."""
        self.is_batch = bool(int(row["flags"]) & QUEUE_BATCH)
        self.is_filled = bool(int(row["flags"]) & QUEUE_FILLED)
        """A later version may have added lower offsets."""
        self.is_sparse = bool(int(row["flags"]) & QUEUE_SPARSE)
        self.first_offset = None if self.is_sparse else self.min_offset
        """The minimum in replies: of a queue with dropped rows the first one left, once it was read."""
        self._gaps = QueueGaps(state.gaps_of(queue))
        self.tail: RunList | None = None
        """The newest runs, kept by RunWindows."""

    def existing(self, offset: int) -> int:
        """The first offset from ``offset`` on that is no recorded gap and not below the minimum."""
        return self._gaps.after(max(offset, self.min_offset))

    def are_lost(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of ``offsets`` hold no record at this version."""
        lost: NDArray[np.bool_] = (offsets < self.min_offset) | self._gaps.hold(offsets)
        return lost


def status_at(view: QueueView | None, offset: int) -> tuple[PullStatus, int]:
    """The status of a pull at ``offset`` by the queue's bounds, and the next offset; FOUND when there may be a record
    (MessageStoreFetcherImpl.getMessageAsync)."""
    if view is None:
        return PullStatus.NO_MATCHED_LOGIC_QUEUE, offset
    if view.max_offset <= 0:
        return PullStatus.NO_MESSAGE_IN_QUEUE, offset
    if offset < view.min_offset:
        return PullStatus.OFFSET_TOO_SMALL, view.min_offset
    if offset == view.max_offset:
        return PullStatus.OFFSET_OVERFLOW_ONE, offset
    if offset > view.max_offset:
        return PullStatus.OFFSET_OVERFLOW_BADLY, view.max_offset
    return PullStatus.FOUND, offset
