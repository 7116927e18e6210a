"""The numpy tables of kernels, segments and the catalog. Units are in the names.

All are little-endian structured arrays. A *row* is one consume-queue row: a stored record, or an LMQ entry. A row spans
one queue offset, in BatchCQ queues several.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[Any]
"""A structured array of one of the dtypes below."""


class RunKind(IntEnum):
    """What the rows of a run are."""

    PLAIN = 0
    """One record per queue offset, bytes stored in blocks."""
    BATCH = 1
    """BatchCQ: one record spans ``inner_num`` queue offsets, bytes stored in blocks."""
    LMQ = 2
    """LMQ: rows refer to (parent queue, parent queue offset) and have no bytes of their own."""
    SPARSE = 3
    """Like PLAIN, with rows at explicit queue offsets: key compaction dropped those between. Nothing is missing."""


QUEUE_DTYPE = np.dtype([("topic", "<u4"), ("queue_id", "<i4"), ("generation", "<u4")])
"""A queue in a container: ``topic`` indexes the container's string list ``topics``."""

RUN_DTYPE = np.dtype([
    ("queue", "<u4"),                # index into the container's queue table
    ("object", "<u4"),               # index into the container's object table (0 in a segment's own footer)
    ("ordinal", "<u4"),              # position of the run inside its object
    ("kind", "<u4"),                 # RunKind
    ("version", "<i8"),              # catalog version that added it (0 in a segment's own footer)
    ("base_queue_offset", "<i8"),    # first queue offset
    ("end_queue_offset", "<i8"),     # one past the last queue offset
    ("first_row", "<i8"),            # rows of the object's run before it: 0 unless it was cut (0 in a footer)
    ("rows", "<i8"),                 # consume-queue rows
    ("base_byte", "<i8"),            # TieredCommitLog offset of the first byte (LMQ: 0)
    ("byte_count", "<i8"),           # TieredCommitLog bytes (LMQ: 0)
    ("min_store_timestamp", "<i8"),
    ("max_store_timestamp", "<i8"),
    ("min_phys", "<i8"),             # physical commitlog offset of the first record
    ("end_phys", "<i8"),             # physical end of the last record
])  # fmt: skip
"""Consecutive rows of one queue inside one object: all of one of its runs, or a part."""

QUEUE_STATE_DTYPE = np.dtype([
    ("topic", "<u4"), ("queue_id", "<i4"), ("generation", "<u4"),
    ("flags", "<u4"),                # QUEUE_HIDDEN | QUEUE_LMQ | QUEUE_BATCH | QUEUE_SUPERSEDED
    ("min_queue_offset", "<i8"),     # first archived offset of this generation
    ("end_queue_offset", "<i8"),     # one past the last archived offset
    ("end_byte", "<i8"),             # end of the TieredCommitLog
    ("first_phys", "<i8"),           # physical offset of the first archived record
    ("end_phys", "<i8"),             # physical end of the last archived record
    ("max_store_timestamp", "<i8"),
    ("row_count", "<i8"),
])  # fmt: skip
"""One live queue at one version of the catalog."""

QUEUE_HIDDEN = 1  # deleted at the broker, or an earlier generation: archived, not listed by default
QUEUE_LMQ = 2
QUEUE_BATCH = 4
QUEUE_SUPERSEDED = 8  # of an earlier log history; its next record starts a new generation
QUEUE_EXPIRED = 16  # a floor was set: runs in pages may lie below ``min_queue_offset``
QUEUE_FILLED = 32  # a gap or the begin was filled, or runs replaced: later versions have lower offsets
QUEUE_SPARSE = 64  # key compaction dropped rows: the first one may be above ``min_queue_offset``

COPIED_PHYS = -(1 << 50)
"""Physical offsets of records that a broker's compaction log had, and no commitlog: from here on, and negative. What
the record itself says is its position in that log."""

FLOOR_DTYPE = np.dtype([
    ("queue", "<u4"),
    ("min_queue_offset", "<i8"),     # the queue's new minimum; older runs have expired
    ("rows", "<i8"),                 # consume-queue rows that expire with this, or were dropped if it stays
])  # fmt: skip
"""The floor of a queue, which only rises."""

OBJECT_DTYPE = np.dtype([
    ("key", "<u4"),                  # index into the container's string list ``object_keys``
    ("rows", "<u4"),
    ("size_bytes", "<i8"),
    ("tail_bytes", "<i8"),           # one ranged GET of this many last bytes opens the object
    ("tail_crc32c", "<u4"), ("epoch", "<u4"),
    ("min_phys", "<i8"), ("end_phys", "<i8"),
    ("raw_bytes", "<i8"),            # message bytes before compression
    ("ttl_class_days", "<u4"),       # its messages expire after at most so many days; 0: unknown, or never
])  # fmt: skip
"""One data object named by a commit."""

GAP_DTYPE = np.dtype([
    ("queue", "<u4"), ("reason", "<u4"),
    ("begin_queue_offset", "<i8"), ("end_queue_offset", "<i8"),
])  # fmt: skip
"""Offsets [begin, end) of a queue that are permanently missing."""


class GapReason(IntEnum):
    """Why offsets are missing."""

    BROKER_DELETED = 1
    """The broker removed its files before they were uploaded."""
    DAMAGED = 2
    """The record in the commitlog is damaged; quarantined."""
    NEVER_WRITTEN = 3
    """The broker skipped these offsets; no record has them."""
    EXCLUDED = 4
    """The topic was not selected for archiving when the log with these records was read."""
    LOST = 5
    """A repair has found no object with them."""


ROW_COLUMNS = {
    "size": np.dtype("<i4"),  # bytes of the stored record
    "tags_code": np.dtype("<i8"),
    "store_timestamp": np.dtype("<i8"),  # ms since the epoch
    "phys": np.dtype("<i8"),  # physical commitlog offset
    "queue_offset": np.dtype("<i8"),  # base offset of the row
    "inner_num": np.dtype("<i4"),  # queue offsets the row spans; 1 but in BatchCQ
}
"""Consume-queue columns of a row, in the order they are stored. LMQ rows add ``parent`` (index into the footer's
queue table, i4) and ``parent_queue_offset`` (i8)."""


def concatenated(tables: Iterable[Table], dtype: np.dtype[Any]) -> Table:
    """One table with all rows of ``tables``. Raises TypeError if one of them has another type than ``dtype``.

    ``np.concatenate`` would compare the fields of each two tables in Python, which is slow for many small ones."""
    parts = []
    for table in tables:
        if table.dtype != dtype:
            raise TypeError(f"a table has the type {table.dtype} instead of {dtype}")
        parts.append(np.ascontiguousarray(table).data)
    return np.frombuffer(bytearray().join(parts), dtype)


def picked(table: Table, which: NDArray[Any]) -> Table:
    """A copy of rows ``which``, positions or a mask. ``table[which]`` copies each field of each row apart, and takes
    twenty times as long."""
    found: Table = table.compress(which) if which.dtype == np.bool_ else table.take(which)
    return found


def copied(table: Table) -> Table:
    """A copy of all rows, as bytes and not field by field."""
    return concatenated([table], table.dtype)


def sorted_ties(order: NDArray[Any], *columns: NDArray[Any]) -> NDArray[Any]:
    """Indices that sort rows by ``columns``, from those that sort them by the first of these. It is meant to decide
    nearly always: the others are looked at only where it does not, as sorting by all takes several times as long."""
    is_equal = columns[0][order[1:]] == columns[0][order[:-1]]
    if is_equal.any():
        among = np.append(is_equal, False) | np.append(False, is_equal)
        rows = order[among]
        order[among] = rows[np.lexsort([column[rows] for column in reversed(columns)])]
    return order


def begins(counts: NDArray[Any]) -> NDArray[np.int64]:
    """Where each of consecutive parts of these lengths begins, and the end of the last."""
    found = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=found[1:])
    return found


def positions(starts: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """All of [start, start + count), for each of ``starts``."""
    counts = counts.astype(np.int64)
    found: NDArray[np.int64] = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    found += np.arange(len(found))
    return found
