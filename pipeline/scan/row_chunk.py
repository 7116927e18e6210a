"""Consume-queue rows on their way into Arrow: columns from a footer, and the records' bytes if they were fetched.

Owns the value only. Where rows come from is in archive_scan.py and store_scan.py, what becomes of them in
message_batches.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.model.queue import QueueKey

NO_BYTES = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class RowChunk:
    """Rows of some queues: row i is of ``queues[queue[i]]``; its record is ``data[starts[i] : starts[i] + size[i]]``.

    ``data`` and ``starts`` are empty when no record was asked for. ``source`` names where the bytes are, for errors.
    """

    cluster: str
    broker: str
    queues: Sequence[QueueKey]
    queue: NDArray[Any]
    queue_offset: NDArray[Any]
    inner_num: NDArray[Any]
    phys: NDArray[Any]
    size: NDArray[Any]
    store_timestamp: NDArray[Any]
    tags_code: NDArray[Any]
    is_batch: NDArray[Any]
    """Whether the queue is a BatchCQ one: offsets are the records' own and may jump."""
    data: NDArray[np.uint8] = field(default_factory=lambda: NO_BYTES)
    starts: NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.int64))
    source: str = ""

    def __len__(self) -> int:
        return len(self.size)

    def taken(self, index: NDArray[Any] | slice) -> RowChunk:
        """The rows at ``index``; their bytes are shared."""
        columns = {name: getattr(self, name)[index] for name in ROW_COLUMNS}
        starts = self.starts[index] if len(self.starts) else self.starts
        return replace(self, starts=starts, **columns)


ROW_COLUMNS = (
    "queue",
    "queue_offset",
    "inner_num",
    "phys",
    "size",
    "store_timestamp",
    "tags_code",
    "is_batch",
)


@dataclass(frozen=True)
class CorruptPlace:
    """Something that fails a check, in mode PERMISSIVE: which queue if it is known, and the error's text."""

    cluster: str
    broker: str
    queue: QueueKey | None
    message: str
