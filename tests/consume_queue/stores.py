"""Consume queue stores for tests: units that look like a log's, and both kinds opened on a directory."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.consume_queue.file_store import FileSizes
from tiered.consume_queue.index import UNIT_DTYPE
from tiered.consume_queue.open_store import open_for_writing
from tiered.consume_queue.store import ConsumeQueueStore, LogView, StoreKind
from tiered.model.tables import Table

SIZES = FileSizes(plain_bytes=20 * 10, batch_bytes=46 * 5)
"""Small files: 10 and 5 units."""
BATCH_TOPIC = "batches"


class FakeLog:
    """A commitlog in which a record at physical offset p was stored at p ms."""

    def __init__(self) -> None:
        self.min_phys = 0

    def view(self) -> LogView:
        return LogView(lambda: self.min_phys, self._stored_at)

    def _stored_at(self, phys: NDArray[Any]) -> NDArray[np.int64]:
        return np.asarray(phys, np.int64)


def units_of(first: int, count: int, phys: int, *, size: int = 100, inner: int = 1) -> Table:
    """``count`` units from queue offset ``first``, of records that follow one another from ``phys`` on."""
    units = np.zeros(count, UNIT_DTYPE)
    step = np.arange(count)
    units["phys"], units["size"], units["tags_code"] = phys + size * step, size, -7 * step
    units["queue_offset"], units["inner_num"] = first + inner * step, inner
    units["store_timestamp"] = units["phys"]
    return units


def opened(path: Path, kind: StoreKind, log: FakeLog) -> ConsumeQueueStore:
    return open_for_writing(path, kind, log.view(), sizes=SIZES, batch_topics={BATCH_TOPIC})


def assert_units(found: Table, expected: Table) -> None:
    """Equal in what every kind keeps."""
    for name in ("queue_offset", "phys", "size", "tags_code", "inner_num"):
        assert found[name].tolist() == expected[name].tolist(), name
