"""What to read: the rows of a run that lie in one block, and which of them a pull takes. Pure: no I/O.

Rows are looked at block by block, so that neither memory nor time follows the length of a run. A filter by tag looks at
columns, which come with the object's tail: blocks without a wanted row are never fetched.

Owns which rows a pull takes. Does not own requests (row_reader.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fetcher.batch import MessageBatch
from fetcher.pulls.queue_view import RunPlace
from fetcher.pulls.tag_filter import MessageFilter
from tiered.consume_queue.unit_view import row_at
from tiered.errors import CorruptionError
from tiered.formats.segment import RowTable
from tiered.formats.segment_index import BlockSpan, SegmentIndex
from tiered.model.tables import RunKind

_ROW_BYTES = 56
_ZEROS = np.zeros(4096, np.int32)


class BlockRows:
    """Rows of one run that lie in one block, offsets [base, end): record i is bytes [starts[i], ends[i]) of it.

    Records stand one behind the other. Columns are read-only; each has an entry per row.
    """

    __slots__ = (
        "base", "block", "end", "ends", "inner_num", "is_plain", "object_key", "phys", "queue_offsets",
        "raw_bytes", "sizes", "starts", "store_timestamp", "tags_code",
    )  # fmt: skip

    def __init__(self, index: SegmentIndex, place: RunPlace, span: BlockSpan, columns: RowTable) -> None:
        """``span``: the one block. ``columns``: its rows of the run (position is not looked at)."""
        self.object_key = index.key
        self.block = span.first_block
        self.is_plain = place.kind == RunKind.PLAIN
        self.sizes = columns.size
        self.ends = columns.size.cumsum(dtype=np.int64) + max(0, -span.raw_offset)
        self.starts = self.ends - columns.size
        self.queue_offsets = columns.queue_offset
        self.inner_num = columns.inner_num
        self.phys = columns.phys
        self.tags_code = columns.tags_code
        self.store_timestamp = columns.store_timestamp
        self.base = int(columns.queue_offset[0])
        self.end = int(columns.queue_offset[-1]) + int(columns.inner_num[-1])
        self.raw_bytes = span.raw_bytes
        last = int(self.ends[-1])
        goes_on = span.end_row < place.rows
        if int(columns.size.min()) <= 0 or last > span.raw_bytes or (goes_on and last != span.raw_bytes):
            raise CorruptionError(
                f"{index.key}: rows {span.first_row} to {span.end_row} of run {place.ordinal} do not fit block "
                f"{span.first_block} [{span.offset}, {span.offset + span.length})"
            )

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Memory of the columns, about."""
        return 400 + _ROW_BYTES * len(self.sizes)

    def row_of(self, offset: int) -> int:
        """The row that spans ``offset``, which lies in [base, end)."""
        if self.is_plain:
            return offset - self.base
        return bisect_right(cast("Sequence[int]", self.queue_offsets), offset) - 1

    def end_offset(self, end_row: int) -> int:
        """The queue offset behind row ``end_row - 1``."""
        if self.is_plain:
            return self.base + end_row
        return int(self.queue_offsets[end_row - 1]) + int(self.inner_num[end_row - 1])

    def body(self, rows: slice, block: NDArray[np.uint8]) -> memoryview:
        """The records of ``rows``, which are at least one, back to back."""
        return block.data[int(self.starts[rows.start]) : int(self.ends[rows.stop - 1])]

    def batch(self, rows: slice | NDArray[np.intp], block: NDArray[np.uint8]) -> MessageBatch:
        """``rows`` with their records in ``block``, this block's decoded bytes."""
        starts = self.starts[rows]
        count = len(starts)
        piece = _ZEROS[:count] if count <= len(_ZEROS) else np.zeros(count, np.int32)
        return MessageBatch(
            (block,), piece, starts, self.sizes[rows], self.queue_offsets[rows], self.inner_num[rows],
            self.phys[rows], self.tags_code[rows], self.store_timestamp[rows],
            is_one_piece=isinstance(rows, slice),
        )  # fmt: skip


def blocks_of_run(
    index: SegmentIndex, place: RunPlace, offset: int, table: RowTable | None = None
) -> Iterator[BlockRows]:
    """Blocks of the run from the one that holds ``offset`` on, without their bytes. Not for light queues.

    ``table``: ``index.row_columns`` of the run; needed where rows span several offsets. Raises CorruptionError.
    """
    if place.kind == RunKind.PLAIN:
        row = offset - place.base
    else:
        table = table or index.row_columns(place.ordinal)
        row = row_at(table, offset)
    while row < place.rows:
        span = index.block_span(place.ordinal, row, row + 1)
        if table is None:
            columns = _plain_columns(index, place, span)
        else:
            columns = rows_of(table, slice(span.first_row, span.end_row))
        yield BlockRows(index, place, span, columns)
        row = span.end_row


def blocks_of_rows(
    index: SegmentIndex, place: RunPlace, offsets: NDArray[np.int64]
) -> Iterator[tuple[BlockRows, NDArray[np.intp]]]:
    """The blocks that hold the rows at ``offsets`` (ascending, all in the run), each with its own of these rows."""
    table = None if place.kind == RunKind.PLAIN else index.row_columns(place.ordinal)
    at = 0
    while at < len(offsets):
        rows = next(blocks_of_run(index, place, int(offsets[at]), table))
        end = int(offsets.searchsorted(rows.end))
        mine = offsets[at:end]
        yield (
            rows,
            mine - rows.base if rows.is_plain else rows.queue_offsets.searchsorted(mine, side="right") - 1,
        )
        at = end


def _plain_columns(index: SegmentIndex, place: RunPlace, span: BlockSpan) -> RowTable:
    first = int(index.first_row[place.ordinal])
    found = index.stored_columns(first + span.first_row, first + span.end_row)
    # Copies: a view of some rows would keep whole column pages in memory.
    size, tags_code, stamp, phys, inner, parent, parent_offset = (column.copy() for column in found)
    offsets = np.arange(place.base + span.first_row, place.base + span.end_row)
    return RowTable(offsets, size, tags_code, stamp, phys, offsets, inner, inner, parent, parent_offset)


def rows_of(table: RowTable, rows: slice | NDArray[np.intp]) -> RowTable:
    """Some rows of a run, without keys."""
    return RowTable(
        *(getattr(table, name)[rows] for name in RowTable.__dataclass_fields__ if name != "key_hashes")
    )


NO_END = 1 << 62


@dataclass(frozen=True)
class Wish:
    """What a pull asks for: at most ``count`` rows and ``max_bytes``, but for a single larger record, below ``end``.

    ``judges``: whether the filter's exact half is asked too; reading ahead, its columns are enough.
    """

    count: int
    max_bytes: int
    filter: MessageFilter | None = None
    judges: bool = True
    end: int = NO_END


class Step(NamedTuple):
    """Rows of some consecutive runs that may be wanted. ``is_last``: read no further for this reply.

    ``lost_to``: no row was read, and those before this offset have lost their parents; else None.
    """

    batch: MessageBatch
    next_offset: int
    is_last: bool
    covered: int
    lost_to: int | None = None


class Limits(NamedTuple):
    """What a reply may still take. ``is_first``: it has nothing yet, so one record is taken whatever its size."""

    rows: int
    bytes: int
    is_first: bool


class Taken(NamedTuple):
    """Rows a reply takes, ascending: a slice or indexes. ``is_full``: a limit was reached, look no further;
    ``end_row``: rows before it were looked at."""

    rows: slice | NDArray[np.intp]
    row_count: int
    bytes: int
    end_row: int
    is_full: bool


def take(
    sizes: NDArray[np.int32],
    ends: NDArray[np.int64],
    first: int,
    limits: Limits,
    mask: NDArray[np.bool_] | None,
) -> Taken:
    """Which rows from ``first`` on are taken, of those in ``mask``. ``ends``: running sum of ``sizes`` plus anything.

    At most ``limits.rows``; the first that does not fit into ``limits.bytes`` ends it.
    """
    if mask is not None:
        return _take_masked(sizes, first, limits, mask)
    before = int(ends[first]) - int(sizes[first])
    end = min(len(sizes), first + limits.rows)
    is_full = first + limits.rows <= len(sizes)
    if int(ends[end - 1]) - before > limits.bytes:
        end = max(bisect_right(cast("Sequence[int]", ends), before + limits.bytes), first + limits.is_first)
        is_full = True
    if end <= first:
        return Taken(slice(first, first), 0, 0, first, True)
    return Taken(slice(first, end), end - first, int(ends[end - 1]) - before, end, is_full)


def _take_masked(sizes: NDArray[np.int32], first: int, limits: Limits, mask: NDArray[np.bool_]) -> Taken:
    rows = np.flatnonzero(mask[first:])[: limits.rows] + first
    ends = np.cumsum(sizes[rows], dtype=np.int64)
    count = int(ends.searchsorted(limits.bytes, side="right"))
    if count == 0 and limits.is_first and len(rows):
        count = 1
    fits = count == len(rows)
    is_full = not fits or count == limits.rows
    taken_bytes = int(ends[count - 1]) if count else 0
    if not is_full:
        return Taken(rows, count, taken_bytes, len(sizes), False)
    end_row = int(rows[count - 1]) + 1 if count else first
    return Taken(rows[:count], count, taken_bytes, end_row, True)
