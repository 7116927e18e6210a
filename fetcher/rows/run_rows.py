"""Rows of a run that lie in consecutive blocks: the place of each record in their bytes, its columns, and which rows a
read takes. Pure: no I/O.

Only the rows a pull may take are decoded, so memory and time do not grow with the run; rows of many blocks are decoded
at once, as the cost per block exceeds that per row. A filter by tag needs only columns, which come with the object's
tail: blocks without a wanted row are never fetched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fetcher.rows.message import MessageBatch
from fetcher.rows.run_list import RunPlace
from tiered.errors import CorruptionError
from tiered.formats.segment import RowTable, row_at
from tiered.formats.segment_index import BlockSpan, SegmentIndex
from tiered.model.tables import RunKind

NO_END = 1 << 62


class ReadStep(NamedTuple):
    """Rows of consecutive runs that may be wanted. ``is_last``: the read ends here.

    ``lost_to``: no row was read, and the parents of those before this offset are lost; else None.
    """

    batch: MessageBatch
    next_offset: int
    is_last: bool
    covered: int
    lost_to: int | None = None


class Limits(NamedTuple):
    """What a read may still take. ``is_first``: nothing was taken yet, so one record is taken whatever its size."""

    rows: int
    bytes: int
    is_first: bool


class TakenRows(NamedTuple):
    """Rows a read takes, ascending: a slice or indexes. ``is_full``: a limit was reached; ``end_row``: rows before it
    were examined."""

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
) -> TakenRows:
    """Choose the rows that a reply takes: from row ``first`` on, only those that ``mask`` selects (None: all), at most
    ``limits.rows`` of them, up to the first that does not fit into ``limits.bytes``.

    ``sizes``: the sizes of all rows. ``ends``: their running sum, plus any constant.
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
        return TakenRows(slice(first, first), 0, 0, first, True)
    return TakenRows(slice(first, end), end - first, int(ends[end - 1]) - before, end, is_full)


def _take_masked(sizes: NDArray[np.int32], first: int, limits: Limits, mask: NDArray[np.bool_]) -> TakenRows:
    """Choose rows as ``take`` does, of those that ``mask`` selects. The first row of a reply is taken whatever its
    size."""
    rows = np.flatnonzero(mask[first:])[: limits.rows] + first
    ends = np.cumsum(sizes[rows], dtype=np.int64)
    count = int(ends.searchsorted(limits.bytes, side="right"))
    if count == 0 and limits.is_first and len(rows):
        count = 1
    is_full = count < len(rows) or count == limits.rows
    taken_bytes = int(ends[count - 1]) if count else 0
    if not is_full:
        return TakenRows(rows, count, taken_bytes, len(sizes), False)
    end_row = int(rows[count - 1]) + 1 if count else first
    return TakenRows(rows[:count], count, taken_bytes, end_row, True)


_ROW_BYTES = 56
_ZEROS = np.zeros(4096, np.int32)


class RunRows:
    """Rows of one run that lie in consecutive blocks [first_block, end_block) of an object, offsets [base, end).

    Record i is bytes [starts[i], starts[i] + sizes[i]) of its block, ``piece[i]`` counted from the first; records lie
    back to back, the i-th ends at ``ends[i]`` of all these blocks' bytes. Columns are read-only.
    """

    __slots__ = (
        "base",
        "block_bytes",
        "block_rows",
        "end",
        "end_block",
        "ends",
        "first_block",
        "inner_num",
        "is_plain",
        "object_key",
        "phys",
        "piece",
        "queue_offsets",
        "sizes",
        "starts",
        "store_timestamp",
        "tags_code",
    )

    def __init__(self, index: SegmentIndex, place: RunPlace, span: BlockSpan, columns: RowTable) -> None:
        """The rows in the blocks ``span`` of the run ``place``. ``columns``: their columns, of which ``position`` is
        not used. Raises CorruptionError if the rows do not fill the blocks."""
        self.object_key = index.key
        self.first_block, self.end_block = span.first_block, span.end_block
        self.block_rows, self.block_bytes = index.bounds_of_blocks(place, span)
        """Where each block begins and the last one ends: as a number among these rows, and in bytes of all blocks."""
        self.is_plain = place.kind == RunKind.PLAIN
        self.sizes = columns.size
        # Written with few calls, and few of those that hand the interpreter's lock to other threads, as numpy does for
        # more than 500 numbers: this runs for every pull.
        self.ends = columns.size.cumsum(dtype=np.int64)
        if span.raw_offset < 0:
            self.ends -= span.raw_offset
        self.starts = np.empty_like(self.ends)
        self.starts[0] = self.ends[0] - columns.size[0]
        self.starts[1:] = self.ends[:-1]
        self.piece: NDArray[np.int32] | None = None
        """The number of the block in which each row lies; None if all lie in one."""
        if span.end_block - span.first_block > 1:
            self.piece = np.empty(len(self.starts), np.int32)
            bounds = zip(pairwise(self.block_rows), self.block_bytes, strict=False)
            for number, ((first, end), begin_bytes) in enumerate(bounds):
                self.piece[first:end] = number
                self.starts[first:end] -= begin_bytes
        self.queue_offsets = columns.queue_offset
        self.inner_num = columns.inner_num
        self.phys = columns.phys
        self.tags_code = columns.tags_code
        self.store_timestamp = columns.store_timestamp
        self.base = int(columns.queue_offset[0])
        self.end = int(columns.queue_offset[-1]) + int(columns.inner_num[-1])
        if span.end_row == place.rows:
            self.end = place.end  # key compaction may have dropped messages behind the last row
        if not self._fit(span.end_row < place.rows):
            raise CorruptionError(
                f"{index.key}: rows {span.first_row} to {span.end_row} of run {place.ordinal} do not fill "
                f"{_name(span)}, bytes {span.offset} to {span.offset + span.length} of the object"
            )

    def _fit(self, is_continued: bool) -> bool:
        """Whether the rows fill their blocks: each block ends where one of its rows ends. Only the last block may also
        hold rows of other runs, unless this run continues (``is_continued``)."""
        if any(self.sizes[first:end].min() <= 0 for first, end in pairwise(self.block_rows)):
            return False
        for row, end_bytes in zip(self.block_rows[1:-1], self.block_bytes[1:-1], strict=True):
            if int(self.ends[row - 1]) != end_bytes:
                return False
        last, end_bytes = int(self.ends[-1]), self.block_bytes[-1]
        return last == end_bytes if is_continued else last <= end_bytes

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Approximate memory of the columns."""
        return 400 + _ROW_BYTES * len(self.sizes)

    @property
    def blocks(self) -> range:
        """Numbers of the blocks."""
        return range(self.first_block, self.end_block)

    def block_raw_bytes(self, number: int) -> int:
        """Raw bytes of block ``number``."""
        at = number - self.first_block
        return self.block_bytes[at + 1] - self.block_bytes[at]

    def row_of(self, offset: int) -> int:
        """The row that spans ``offset``, which lies in [base, end), or the next one; ``len(self)``: none follows."""
        if self.is_plain:
            return offset - self.base
        row = bisect_right(cast("Sequence[int]", self.queue_offsets), offset) - 1
        is_past = row < 0 or offset >= int(self.queue_offsets[row]) + int(self.inner_num[row])
        return row + is_past

    def end_offset(self, end_row: int) -> int:
        """The queue offset after row ``end_row - 1``."""
        if self.is_plain:
            return self.base + end_row
        return int(self.queue_offsets[end_row - 1]) + int(self.inner_num[end_row - 1])

    def blocks_of(self, rows: slice | NDArray[np.intp]) -> range:
        """Numbers of the blocks from the first to the last of ``rows``, at least one."""
        if self.piece is None:
            return self.blocks
        first, last = (rows.start, rows.stop - 1) if isinstance(rows, slice) else (rows[0], rows[-1])
        return range(self.first_block + int(self.piece[first]), self.first_block + int(self.piece[last]) + 1)

    def in_block_of(self, row: int) -> RunRows:
        """The rows that lie in the same block as ``row``. Their columns are views of these."""
        if self.piece is None:
            return self
        at = int(self.piece[row])
        first, end = self.block_rows[at : at + 2]
        begin_bytes, end_bytes = self.block_bytes[at : at + 2]
        part = object.__new__(RunRows)
        part.object_key, part.is_plain, part.piece = self.object_key, self.is_plain, None
        part.first_block, part.end_block = self.first_block + at, self.first_block + at + 1
        part.block_rows, part.block_bytes = [0, end - first], [0, end_bytes - begin_bytes]
        part.base = self.end_offset(first) if first else self.base
        part.end = self.end_offset(end) if end < len(self.sizes) else self.end
        part.ends = self.ends[first:end] - begin_bytes
        for name in ("sizes", "starts", "queue_offsets", "inner_num", "phys", "tags_code", "store_timestamp"):
            setattr(part, name, getattr(self, name)[first:end])
        return part

    def bodies(self, rows: slice, blocks: Sequence[NDArray[np.uint8]]) -> list[memoryview]:
        """The records of ``rows`` (at least one), a view of each of ``blocks``: the bytes of ``blocks_of(rows)``."""
        last = rows.stop - 1
        begin, end = int(self.starts[rows.start]), int(self.starts[last]) + int(self.sizes[last])
        if len(blocks) == 1:
            return [blocks[0].data[begin:end]]
        return [blocks[0].data[begin:], *(block.data for block in blocks[1:-1]), blocks[-1].data[:end]]

    def batch(self, rows: slice | NDArray[np.intp], blocks: Sequence[NDArray[np.uint8]]) -> MessageBatch:
        """The messages of ``rows``. ``blocks``: the decompressed bytes of the blocks ``blocks_of(rows)``, which hold
        their records."""
        starts = self.starts[rows]
        count = len(starts)
        if self.piece is None or len(blocks) == 1:
            piece = _ZEROS[:count] if count <= len(_ZEROS) else np.zeros(count, np.int32)
        else:
            piece = self.piece[rows]
            if piece[0]:
                piece = piece - piece[0]
        return MessageBatch(
            blocks,
            piece,
            starts,
            self.sizes[rows],
            self.queue_offsets[rows],
            self.inner_num[rows],
            self.phys[rows],
            self.tags_code[rows],
            self.store_timestamp[rows],
            is_dense=isinstance(rows, slice),
        )


def _name(span: BlockSpan) -> str:
    count = span.end_block - span.first_block
    return f"block {span.first_block}" if count == 1 else f"blocks {span.first_block} to {span.end_block - 1}"


def rows_of_run(
    index: SegmentIndex,
    place: RunPlace,
    offset: int,
    table: RowTable | None = None,
    *,
    count: int = 1,
    max_bytes: int = 0,
) -> RunRows:
    """The columns of some rows of a run, without the records: whole blocks, from the block that holds ``offset`` on up
    to the block with the ``count``-th row, or in which ``max_bytes`` is reached. Where no row has ``offset``, the next
    one counts, or the last one. Not for runs of an LMQ.

    ``table``: ``index.row_columns`` of the run, if the caller has it. Raises CorruptionError.
    """
    if place.kind == RunKind.PLAIN:
        row = offset - place.base
    else:
        table = table or index.row_columns(place)
        row = min(row_at(table, offset), place.rows - 1)
    span = index.block_span(place, row, min(row + count, place.rows), raw_bytes_max=max_bytes)
    if table is None:
        columns = _plain_columns(index, place, span)
    else:
        columns = rows_of(table, slice(span.first_row, span.end_row))
    return RunRows(index, place, span, columns)


def blocks_of_rows(
    index: SegmentIndex, place: RunPlace, offsets: NDArray[np.int64]
) -> Iterator[tuple[RunRows, NDArray[np.intp]]]:
    """For each block that holds messages at the given offsets of a run (ascending): the columns of its rows, and which
    of these rows are at the given offsets."""
    table = None if place.kind == RunKind.PLAIN else index.row_columns(place)
    at = 0
    while at < len(offsets):
        rows = rows_of_run(index, place, int(offsets[at]), table)
        end = int(offsets.searchsorted(rows.end))
        mine = offsets[at:end]
        yield (
            rows,
            mine - rows.base if rows.is_plain else rows.queue_offsets.searchsorted(mine, side="right") - 1,
        )
        at = end


def _plain_columns(index: SegmentIndex, place: RunPlace, span: BlockSpan) -> RowTable:
    """The columns of the rows in the blocks ``span`` of a plain run, in which each row has the next queue offset, so
    that these are computed."""
    first = index.row_of(place.ordinal) + place.first_row
    found = index.stored_columns(first + span.first_row, first + span.end_row)
    # Views would keep whole column pages in memory, so they are copied; rows of several pages are copies already.
    # ``tobytes`` instead of ``copy``, which hands the interpreter's lock to other threads.
    size, tags_code, stamp, phys, inner = (
        column if column.base is None else np.frombuffer(column.tobytes(), column.dtype)
        for column in found[:5]
    )
    parent, parent_offset = found[5:]  # not kept
    offsets = np.arange(place.base + span.first_row, place.base + span.end_row)
    return RowTable(offsets, size, tags_code, stamp, phys, offsets, inner, inner, parent, parent_offset)


def rows_of(table: RowTable, rows: slice | NDArray[np.intp]) -> RowTable:
    """The rows ``rows`` of a run, without keys."""
    return RowTable(
        *(getattr(table, name)[rows] for name in RowTable.__dataclass_fields__ if name != "key_hashes")
    )
