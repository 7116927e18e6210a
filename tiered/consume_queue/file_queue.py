"""One consume queue in files: what its units say, whether plain (tags perhaps in ``consumequeue_ext``) or BatchCQ.

Sources: org.apache.rocketmq.store.ConsumeQueue, BatchConsumeQueue.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from tiered.consume_queue.ext import resolve_tags_codes
from tiered.consume_queue.index import UNIT_DTYPE, QueueKind, empty_units
from tiered.consume_queue.unit_files import OpenFiles, UnitFiles, is_filler
from tiered.model.tables import Table

PLAIN_DTYPE: Final = np.dtype([("phys", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
BATCH_DTYPE: Final = np.dtype([
    ("phys", ">i8"), ("size", ">i4"), ("tags_code", ">i8"), ("store_timestamp", ">i8"),
    ("base_offset", ">i8"), ("count", ">i2"), ("compacted_offset", ">i4"), ("reserved", ">i4"),
])  # fmt: skip
STORED_DTYPES: Final[dict[QueueKind, np.dtype[Any]]] = {
    QueueKind.PLAIN: PLAIN_DTYPE,
    QueueKind.BATCH: BATCH_DTYPE,
}


class FileQueue:
    """One queue's files, which are read without a trace. Not thread-safe."""

    def __init__(self, kind: QueueKind, directory: Path, topic_ext: Path, open_files: OpenFiles) -> None:
        self.kind = kind
        self.files = UnitFiles(directory, STORED_DTYPES[kind], open_files)
        self._topic_ext = topic_ext
        self._open_files = open_files

    def read(self, first: int, count: int) -> Table:
        """Units by index, as UNIT_DTYPE."""
        stored, indices = self.files.read(first, count)
        units = np.zeros(len(stored), UNIT_DTYPE)
        units["phys"], units["size"] = stored["phys"], stored["size"]
        if self.kind is QueueKind.BATCH:
            units["tags_code"] = stored["tags_code"]
            units["queue_offset"], units["inner_num"] = stored["base_offset"], stored["count"]
            units["store_timestamp"] = stored["store_timestamp"]
        else:
            codes = stored["tags_code"].astype(np.int64)
            ext = self._topic_ext / self.files.directory.name
            units["tags_code"] = resolve_tags_codes(codes, ext, self._open_files)
            units["queue_offset"], units["inner_num"] = indices, 1
        return units

    def stored(self, units: Table) -> Table:
        """``units`` (UNIT_DTYPE) as they are in the files."""
        stored = np.zeros(len(units), STORED_DTYPES[self.kind])
        for name in ("phys", "size", "tags_code"):
            stored[name] = units[name]
        if self.kind is QueueKind.BATCH:
            stored["base_offset"], stored["count"] = units["queue_offset"], units["inner_num"]
            stored["store_timestamp"], stored["compacted_offset"] = units["store_timestamp"], -1
        return stored

    def end_phys(self) -> int:
        """Physical end of the last unit's record, 0 without any."""
        last = self.last_record()
        return sum(last) if last is not None else 0

    def has_places(self) -> bool:
        """Whether its files contain anything, including fillers."""
        return self.files.end() > self.files.first

    def has_units(self) -> bool:
        return self.last_record() is not None

    def last(self) -> Table:
        end = self.files.end()
        return self.read(end - 1, 1) if end > self.files.first else empty_units()

    def last_record(self) -> tuple[int, int] | None:
        """(phys, size) of the last unit's record."""
        return self.record_of(self.files.tail()[1])

    def record_of(self, last: Table) -> tuple[int, int] | None:
        """(phys, size) of the record of a queue's last stored unit."""
        if len(last) == 0 or is_filler(last)[0]:
            return None
        return int(last["phys"][0]), int(last["size"][0])

    def max_offset(self) -> int:
        end, last = self.files.tail()
        if self.kind is QueueKind.PLAIN:
            return end
        return int(last["base_offset"][0] + last["count"][0]) if self.record_of(last) is not None else 0

    def min_offset(self, min_phys: int) -> int:
        index = self.files.lower_bound("phys", min_phys)
        if self.kind is QueueKind.PLAIN:
            return index
        unit = self.read(index, 1)
        return int(unit["queue_offset"][0]) if len(unit) else self.max_offset()

    def index_of(self, queue_offset: int) -> int:
        """Index of the unit that holds ``queue_offset``, or of the first after it."""
        if self.kind is QueueKind.PLAIN:
            return max(queue_offset, self.files.first)
        after = self.files.lower_bound("base_offset", queue_offset + 1)
        before = self.read(after - 1, 1) if after > self.files.first else empty_units()
        holds = len(before) and before["queue_offset"][0] + before["inner_num"][0] > queue_offset
        return after - 1 if holds else after
