"""Rows of many parts of runs at once, as columns across runs: what handles all queues of an object takes time by its
rows. ``SegmentIndex.row_columns`` is for one run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.errors import CorruptionError
from tiered.formats.run_part import CatalogRun
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import selection_of
from tiered.model.tables import RunKind, Table, begins, picked, positions

ROWS_AT_ONCE = 128 * 1024


class PartRows(NamedTuple):
    """Consecutive rows of some parts. ``part`` is the number of a row's part, ``row`` its number in the object; the
    other columns are those of ``RowTable``."""

    part: NDArray[np.int64]
    row: NDArray[np.int64]
    position: NDArray[np.int64]
    size: NDArray[Any]
    tags_code: NDArray[Any]
    store_timestamp: NDArray[Any]
    phys: NDArray[Any]
    inner_num: NDArray[Any]
    parent: NDArray[Any]
    parent_queue_offset: NDArray[Any]
    queue_offset: NDArray[np.int64]

    def where(self, which: NDArray[np.bool_] | slice) -> PartRows:
        """Some of the rows."""
        return PartRows(*(column[which] for column in self))

    def first_of_parts(self, mask: NDArray[np.bool_]) -> list[int]:
        """The first row of ``mask`` in each part that has one."""
        rows = np.flatnonzero(mask)
        found: list[int] = rows[np.flatnonzero(np.diff(self.part[rows], prepend=-1))].tolist()
        return found


def is_inside(part: Table, whole: Table) -> NDArray[np.bool_]:
    """For each run of rows in the catalog's table ``part``, whether it can be a part of the object's run in the same
    row of ``whole``: by kind, rows, bytes and queue offsets."""
    skipped = part["base_byte"] - whole["base_byte"]
    inside: NDArray[np.bool_] = (
        (part["kind"] == whole["kind"]) & (part["first_row"] >= 0) & (part["rows"] > 0)
    )
    inside &= part["first_row"] + part["rows"] <= whole["rows"]
    inside &= (skipped >= 0) & (skipped + part["byte_count"] <= whole["byte_count"])
    # A sparse run may begin and end in holes, which the catalog adds to it: its offsets are not compared.
    inside &= (part["kind"] == RunKind.SPARSE) | (
        (part["base_queue_offset"] >= whole["base_queue_offset"])
        & (part["end_queue_offset"] <= whole["end_queue_offset"])
    )
    has_offset_per_row = (part["kind"] != RunKind.BATCH) & (part["kind"] != RunKind.SPARSE)
    inside &= ~has_offset_per_row | (
        part["base_queue_offset"] == whole["base_queue_offset"] + part["first_row"]
    )
    return inside


def in_object_order(index: SegmentIndex, parts: Table, queues: Sequence[QueueKey] | None = None) -> Table:
    """``parts``, runs of rows that the catalog names in an object (RUN_DTYPE), in the order in which their rows lie
    there. Raises CorruptionError unless the object, by its ``index``, has all of them. With ``queues``, to which
    ``parts["queue"]`` refers, they also have to be of these queues."""
    ordinal, first_row = parts["ordinal"], parts["first_row"]
    is_there = ordinal < len(index)
    stored = picked(index.runs, np.where(is_there, ordinal, 0))
    is_there &= (first_row >= 0) & (parts["rows"] > 0) & (parts["rows"] <= stored["rows"] - first_row)
    if queues is not None:
        is_there &= is_inside(parts, stored)
        own = index.queues.taken(stored["queue"])
        is_there &= own.equals(selection_of(queues).taken(parts["queue"]))
    if not is_there.all():
        raise CorruptionError(f"{index.key}: the catalog names messages in this object that it does not have")
    return picked(parts, np.lexsort((first_row, ordinal)))


def rows_of_parts(index: SegmentIndex, parts: Table, ends: Sequence[int] | None = None) -> Iterator[PartRows]:
    """All rows of ``parts``, runs of rows in the order of ``in_object_order``, some at a time: up to each of ``ends``,
    which count the rows of all parts; the last of them is the number of all rows. Raises CorruptionError if rows do not
    agree with what the catalog says of their part."""
    first = begins(parts["rows"])
    if ends is None:
        ends = [*range(ROWS_AT_ONCE, int(first[-1]), ROWS_AT_ONCE), int(first[-1])]
    window, begin = _Window(index, parts, first), 0
    for end in ends:
        if end > begin:
            yield window.rows(begin, end)
        begin = end


def ends_by_blocks(index: SegmentIndex, parts: Table, raw_bytes_max: int) -> list[int]:
    """Where ``rows_of_parts`` should pause, so that the rows between two ends have as many whole blocks (records that
    were compressed together) as ``raw_bytes_max`` decompressed bytes allow, or a single larger one. ``parts`` have
    bytes of their own, as LMQs have not."""
    raw, cuts = index.bounds.block_raw, [0]
    while cuts[-1] < len(index.blocks):
        fitting = int(np.searchsorted(raw, raw[cuts[-1]] + raw_bytes_max, side="right")) - 1
        cuts.append(max(cuts[-1] + 1, fitting))
    # Both are rows of the object: where each part begins, and where each group of blocks ends.
    begin, ends = (
        index.bounds.run_rows[parts["ordinal"]] + parts["first_row"],
        index.bounds.block_rows[cuts[1:]],
    )
    part = np.maximum(np.searchsorted(begin, ends) - 1, 0)
    rows_of_parts_before: list[int] = (
        begins(parts["rows"])[part] + np.clip(ends - begin[part], 0, parts["rows"][part])
    ).tolist()
    return rows_of_parts_before


class _Window:
    """What ``rows_of_parts`` keeps from call to call: the queue offset of each part's next row, as rows may span
    several offsets, and the bytes of its rows so far, both of which must agree with the catalog at the part's end."""

    def __init__(self, index: SegmentIndex, parts: Table, first: NDArray[np.int64]) -> None:
        """Find out for each of ``parts`` where its rows begin in the object, and the queue offset of its first row.
        ``first``: where each part begins among the rows of all parts."""
        self._index, self._parts, self._first = index, parts, first
        self._object_row = index.first_row[parts["ordinal"]] + parts["first_row"] - first[:-1]
        kind = index.runs["kind"][parts["ordinal"]]
        self._is_lmq, self._is_sparse = kind == RunKind.LMQ, kind == RunKind.SPARSE
        # In a sparse run key compaction dropped rows: the catalog's part may begin at an offset that has none.
        own = index.runs["base_queue_offset"][parts["ordinal"]]
        self._offset = np.where(self._is_sparse, own, parts["base_queue_offset"])
        for cut in np.flatnonzero(self._is_sparse & (parts["first_row"] > 0)).tolist():
            self._offset[cut] = index.spans_begin(CatalogRun.of(parts[cut]))
        self._bytes = np.zeros(len(parts), np.int64)

    def rows(self, begin: int, end: int) -> PartRows:
        """Rows [begin, end) of the rows of all parts, which follow those of the last call, with their queue offsets and
        positions. Raises CorruptionError for a part that they contradict."""
        low = int(np.searchsorted(self._first, begin, side="right")) - 1
        high = int(np.searchsorted(self._first, end, side="left"))
        mine = slice(low, high)
        starts = np.maximum(self._first[mine], begin)
        counts = np.minimum(self._first[low + 1 : high + 1], end) - starts
        part = np.repeat(np.arange(low, high), counts)
        row = positions(self._object_row[mine] + starts, counts)
        columns = self._index.columns_of(row)  # size is the first, and offsets spanned are the fifth
        spans, at = columns[4].astype(np.int64), starts - begin
        sums = np.cumsum(spans)
        before = sums[at] - spans[at]
        offset = sums - spans + np.repeat(self._offset[mine] - before, counts)
        is_sparse = self._is_sparse[part]
        if is_sparse.any():
            offset = np.where(is_sparse, offset + spans - 1, offset)
            columns = (*columns[:4], np.where(is_sparse, 1, columns[4]).astype(np.int32), *columns[5:])
        size = np.where(self._is_lmq[part], 0, columns[0].astype(np.int64))
        ends = np.cumsum(size)
        position = ends - size + np.repeat(self._bytes[mine] - ends[at] + size[at], counts)
        position[self._is_lmq[part]] = -1
        found = PartRows(*(part, row, position, *columns, offset))
        self._offset[mine] += np.add.reduceat(spans, at)
        self._bytes[mine] += np.add.reduceat(size, at)
        self._check(low, int(np.searchsorted(self._first, end, side="right")) - 1, at, found)
        return found

    def _check(self, low: int, done: int, at: NDArray[np.int64], found: PartRows) -> None:
        """Raise CorruptionError if the rows ``found`` contradict what the catalog says of their parts. ``low``: the
        first part with rows here; ``at``: for it and those after it, where its rows begin in ``found``. Parts before
        ``done`` have no more rows, so that their sums are complete."""
        parts, ended = self._parts, np.arange(low, low + len(at)) < done
        some = slice(low, low + len(at))
        is_lmq, is_sparse = self._is_lmq[some], self._is_sparse[some]
        last = np.append(at[1:], len(found.row)) - 1
        base, end = parts["base_queue_offset"][some], parts["end_queue_offset"][some]
        outside = (found.queue_offset[at] < base) | (found.queue_offset[last] >= end)
        short = np.where(is_sparse, outside, ended & (self._offset[some] != end))
        self._require(low, short, "the rows of run {} do not reach the run's end offset")
        other = ended & ~is_lmq & (self._bytes[some] != parts["byte_count"][some])
        self._require(low, other, "the messages of run {} have another size together than its footer says")
        if is_lmq.any():
            stranger = np.maximum.reduceat(found.parent, at) >= len(self._index.queue_table)
            self._require(
                low,
                is_lmq & stranger,
                "an LMQ entry of run {} refers to a queue that its footer does not list",
            )

    def _require(self, low: int, wrong: NDArray[np.bool_], what: str) -> None:
        if wrong.any():
            ordinal = int(self._parts["ordinal"][low + int(wrong.argmax())])
            raise CorruptionError(f"{self._index.key} is damaged: {what.format(ordinal)}")
