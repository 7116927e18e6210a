"""Consume-queue rows between scan and Arrow: columns, and the records' bytes if they were fetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.message_table.options.predicate import Predicate
from tiered.model.queue import QueueKey

NO_BYTES = np.zeros(0, np.uint8)
Lost = tuple[QueueKey, int, int]
"""Queue, first offset and end of messages that cannot be read."""


@dataclass(frozen=True)
class RowChunk:
    """Rows of some queues: row i is of ``queues[queue[i]]``; its record is ``data[starts[i] : starts[i] + size[i]]``.

    ``data`` and ``starts`` are empty when no records were read. ``source`` names the place in errors. Offsets of
    ``is_batch`` rows (BatchCQ) are the records' own and may jump.
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
    data: NDArray[np.uint8] = field(default_factory=lambda: NO_BYTES)
    starts: NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.int64))
    source: str = ""

    def __len__(self) -> int:
        return len(self.size)

    def taken(self, index: NDArray[Any] | slice) -> RowChunk:
        """The rows at ``index``; they share the bytes."""
        columns = {name: getattr(self, name)[index] for name in ROW_COLUMNS}
        starts = self.starts[index] if len(self.starts) else self.starts
        return replace(self, starts=starts, **columns)

    def matching(self, predicate: Predicate, *, is_lmq: bool) -> RowChunk:
        """The rows that match ``predicate``."""
        topics = {self.queues[number].topic for number in np.unique(self.queue).tolist()}
        predicate = predicate.without_tags() if is_lmq else predicate.for_topics(topics)
        ids = np.array([queue.queue_id for queue in self.queues] or [0], np.int64)
        mask = predicate.mask({
            "queueId": ids[self.queue], "queueOffset": self.queue_offset, "storeTimestamp": self.store_timestamp,
            "commitLogOffset": self.phys, "storeSize": self.size, "innerNum": self.inner_num,
            "tagsCode": self.tags_code,
        })  # fmt: skip
        return self if mask is None or mask.all() else self.taken(np.flatnonzero(mask))


ROW_COLUMNS = (
    "queue", "queue_offset", "inner_num", "phys", "size", "store_timestamp", "tags_code", "is_batch",
)  # fmt: skip


@dataclass(frozen=True)
class CorruptPlace:
    """Damage that mode PERMISSIVE reports: the error's text, and the messages that it hides, as ``rows`` without
    records or as ``ranges`` (queue, offset, end), if they are known."""

    cluster: str
    broker: str
    message: str
    ranges: Sequence[Lost] = ()
    rows: RowChunk | None = None

    @property
    def queue(self) -> QueueKey | None:
        """The queue of ``ranges``, if they are of one."""
        queues = {queue for queue, _, _ in self.ranges}
        return queues.pop() if len(queues) == 1 else None


OnCorrupt = Callable[[CorruptPlace], None]
"""Handles damage: raises, or records it and returns."""
