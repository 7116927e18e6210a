"""Consume-queue units over the rows of a run. They are nowhere stored: offsets are a prefix sum of sizes.

A unit is 20 bytes, big-endian: TieredCommitLog offset i64, size i32, tags code i64 (org.apache.rocketmq.store
ConsumeQueue, CQ_STORE_UNIT_SIZE). A BatchCQ row is one unit here too; ``queue_offset`` and ``inner_num`` say what it
spans.

Owns the logical form. Does not own where columns come from (tiered.formats.segment_index).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.formats.segment import RowTable
from tiered.model.tables import Table

UNIT_BYTES = 20
UNIT_DTYPE = np.dtype([("offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])


def byte_offsets(rows: RowTable, base_byte: int) -> NDArray[np.int64]:
    """TieredCommitLog offset of every row of a run that begins at ``base_byte``."""
    sizes = rows.size.astype(np.int64)
    offsets: NDArray[np.int64] = base_byte + np.cumsum(sizes) - sizes
    return offsets


def units(rows: RowTable, base_byte: int) -> Table:
    """The units of a run, UNIT_DTYPE; ``.tobytes()`` is what a consume-queue file would hold."""
    table = np.empty(len(rows), UNIT_DTYPE)
    table["offset"] = byte_offsets(rows, base_byte)
    table["size"] = rows.size
    table["tags_code"] = rows.tags_code
    return table


def broker_units(rows: RowTable) -> Table:
    """The units the broker had: offsets in its commitlog. Light-queue rows repeat their parents' units."""
    table = np.empty(len(rows), UNIT_DTYPE)
    table["offset"] = rows.phys
    table["size"] = rows.size
    table["tags_code"] = rows.tags_code
    return table


def row_at(rows: RowTable, queue_offset: int) -> int:
    """The row that spans ``queue_offset``, which lies within the run."""
    return int(np.searchsorted(rows.queue_offset, queue_offset, side="right")) - 1


def rows_that_fit(sizes: NDArray[Any], rows_max: int, bytes_max: int) -> int:
    """How many leading rows have at most ``bytes_max`` bytes together; may be 0."""
    ends = np.cumsum(sizes[: max(rows_max, 0)], dtype=np.int64)
    return int(np.searchsorted(ends, bytes_max, side="right"))
