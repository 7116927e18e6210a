"""The rows of an open object that a partition reads, window by window, and their blocks.

Selects by footer columns: runs, offsets, predicate, positions in blocks. Reads column pages, no block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.message_table.scan.row_chunk import Lost
from tiered.errors import CorruptionError
from tiered.formats.segment_index import BlockSpan, SegmentIndex
from tiered.model.tables import RunKind, Table

WINDOW_ROWS = 65_536
_EXPLICIT = (RunKind.BATCH, RunKind.SPARSE)
"""Runs whose rows are at offsets that only their columns have."""


@dataclass(frozen=True)
class Window:
    """Matching rows of some consecutive blocks, and the spans of their blocks. ``rows`` number the object's rows."""

    rows: NDArray[np.int64]
    run: NDArray[np.int64]
    offset: NDArray[np.int64]
    columns: tuple[NDArray[Any], ...]
    position: NDArray[np.int64]
    """Raw bytes before the record in the object."""
    spans: list[BlockSpan]


class ObjectRows:
    """The slices of one object. Raises CorruptionError where the object contradicts the catalog."""

    def __init__(
        self,
        part: Slices,
        table: Table,
        index: SegmentIndex,
        predicate: Predicate,
        *,
        with_records: bool,
        window_bytes: int,
    ) -> None:
        self._part = part
        self._table = table
        self._index = index
        self._predicate = predicate
        self._with_records = with_records
        self._window_bytes = window_bytes
        # Rows are numbered as in blocks: LMQ rows, which have no bytes, do not count.
        self._first_row, _, self._block_row, self._block_raw = index.bounds
        self._block_offset = index.block_offsets
        self.queue_of_run = np.zeros(len(index), np.uint32)
        """The queue's number in the partition, for each run that is read."""
        inside = table["ordinal"] < len(index)
        self.queue_of_run[table["ordinal"][inside]] = table["queue"][inside]

    def check_runs(self) -> None:
        """Raises CorruptionError unless the object has the runs that the catalog names."""
        index, table = self._index, self._table
        ordinals = table["ordinal"].astype(np.int64)
        if int(ordinals.max()) >= len(index):
            raise CorruptionError(f"{index.key}: has {len(index)} runs, fewer than the catalog names")
        mine = index.runs[ordinals]
        wrong = (mine["base_queue_offset"] > table["begin"]) | (mine["end_queue_offset"] < table["end"])
        wrong &= mine["kind"] != RunKind.SPARSE  # the catalog has holes at both ends
        wrong |= mine["kind"] != table["kind"]
        queues = [self._part.queues[number] for number in table["queue"].tolist()]
        other = [index.queue_of(run) != queue for run, queue in zip(ordinals.tolist(), queues, strict=True)]
        if wrong.any() or any(other):
            run = int(ordinals[int(np.argmax(wrong | np.array(other)))])
            raise CorruptionError(f"{index.key}: run {run} does not match the catalog")

    def windows(self, on_corrupt: Callable[[str, Sequence[Lost]], None]) -> Iterator[Window]:
        """Windows in order. A column page that fails its check goes to ``on_corrupt``; its rows are skipped."""
        for begin, end, offsets in self._ranges():
            for first, last in self._cut(begin, end):
                try:
                    window = self._window(first, last, offsets)
                except CorruptionError as error:
                    on_corrupt(error.message, self._lost(first, last))
                    continue
                if len(window.rows):
                    yield window

    def _lost(self, first: int, end: int) -> list[Lost]:
        """The messages of the rows [first, end); of BatchCQ and sparse runs the whole slices."""
        found = []
        for row in self._table:
            run = self._index.runs[int(row["ordinal"])]
            shift = int(run["base_queue_offset"]) - int(self._first_row[int(row["ordinal"])])
            low, high = int(row["begin"]), int(row["end"])
            if int(row["kind"]) not in _EXPLICIT:
                low, high = max(low, first + shift), min(high, end + shift)
            elif not first - int(run["rows"]) < low - shift < end:
                continue
            if low < high:
                found.append((self._part.queues[int(row["queue"])], low, high))
        return found

    def _ranges(self) -> Iterator[tuple[int, int, tuple[int, int] | None]]:
        """Row ranges [begin, end), neighbours merged; for a BatchCQ or sparse run with the offsets to read."""
        index, table = self._index, self._table
        ordinals = table["ordinal"].astype(np.int64)
        mine = index.runs[ordinals]
        first = self._first_row[ordinals]
        batch = np.isin(mine["kind"], _EXPLICIT)
        begins = np.where(batch, first, first + table["begin"] - mine["base_queue_offset"])
        ends = np.where(batch, first + mine["rows"], first + table["end"] - mine["base_queue_offset"])
        at = 0
        while at < len(table):
            last = at
            if not batch[at]:
                while last + 1 < len(table) and not batch[last + 1] and begins[last + 1] == ends[last]:
                    last += 1
            wanted = (int(table["begin"][at]), int(table["end"][at])) if batch[at] else None
            yield int(begins[at]), int(ends[last]), wanted
            at = last + 1

    def _cut(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """[begin, end) in windows; all but the last end with a block."""
        if not self._with_records:
            for first in range(begin, end, WINDOW_ROWS):
                yield first, min(first + WINDOW_ROWS, end)
            return
        first = begin
        while first < end:
            block = int(np.searchsorted(self._block_row, first, side="right")) - 1
            by_bytes = int(
                np.searchsorted(self._block_raw, self._block_raw[block] + self._window_bytes, "right")
            )
            by_rows = int(np.searchsorted(self._block_row, self._block_row[block] + WINDOW_ROWS, "right"))
            last = max(min(by_bytes, by_rows) - 1, block + 1)
            stop = min(int(self._block_row[last]), end)
            yield first, stop
            first = stop

    def _window(self, first: int, end: int, offsets: tuple[int, int] | None) -> Window:
        """The matching rows of [first, end), with their blocks."""
        low, high = first, end
        block = last = 0
        if self._with_records:  # positions are sums from the start of a block
            block = int(np.searchsorted(self._block_row, first, side="right")) - 1
            last = int(np.searchsorted(self._block_row, end, side="left"))
            low, high = int(self._block_row[block]), int(self._block_row[last])
        rows = np.arange(low, high)
        run = np.searchsorted(self._first_row, rows, side="right") - 1
        columns = self._columns(rows, run)
        offset = self._offsets(rows, run)
        position = np.zeros(len(rows), np.int64)
        if self._with_records:
            sizes = columns[0].astype(np.int64)
            position = int(self._block_raw[block]) + np.cumsum(sizes) - sizes
            self._check_sizes(sizes, block, last, low)
        kept = (rows >= first) & (rows < end)
        if offsets is not None:
            kept &= (offset >= offsets[0]) & (offset < offsets[1])
        matching = self._matching(run, offset, columns)
        if matching is not None:
            kept &= matching
        at = np.flatnonzero(kept)
        spans = self._spans(rows[at]) if self._with_records else []
        return Window(
            rows[at], run[at], offset[at], tuple(column[at] for column in columns), position[at], spans
        )

    def _columns(self, rows: NDArray[np.int64], run: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """Footer columns of ``rows``, without the LMQ rows between them."""
        inside = self._index.first_row[run] + rows - self._first_row[run]
        first, end = int(inside[0]), int(inside[-1]) + 1
        columns = self._index.stored_columns(first, end)
        if end - first != len(rows):
            columns = tuple(column[inside - first] for column in columns)
        spans = np.where(self._index.runs["kind"][run] == RunKind.SPARSE, np.int32(1), columns[4])
        return (*columns[:4], spans, *columns[5:])

    def _offsets(self, rows: NDArray[np.int64], run: NDArray[np.int64]) -> NDArray[np.int64]:
        """Queue offset of each row."""
        runs = self._index.runs
        offset: NDArray[np.int64] = runs["base_queue_offset"][run] + rows - self._first_row[run]
        for number in np.unique(run[np.isin(runs["kind"][run], _EXPLICIT)]).tolist():
            mine = run == number
            whole = self._index.row_columns(number).queue_offset
            offset[mine] = whole[rows[mine] - int(self._first_row[number])]
        return offset

    def _check_sizes(self, sizes: NDArray[np.int64], block: int, last: int, low: int) -> None:
        """Raises CorruptionError unless the sizes of each block's rows add up to the block."""
        sums = np.add.reduceat(sizes, self._block_row[block:last] - low)
        if (sums != self._index.blocks["raw_bytes"][block:last]).any():
            raise CorruptionError(
                f"{self._index.key}: row sizes do not add up to the size of blocks [{block}, {last})"
            )

    def _matching(
        self, run: NDArray[np.int64], offset: NDArray[np.int64], columns: tuple[NDArray[Any], ...]
    ) -> NDArray[np.bool_] | None:
        size, tags_code, stamp, phys, inner = columns[:5]
        topics = {self._part.queues[number].topic for number in self.queue_of_run[np.unique(run)].tolist()}
        return self._predicate.for_topics(topics).mask({
            "queueOffset": offset, "storeTimestamp": stamp, "commitLogOffset": phys, "storeSize": size,
            "innerNum": inner, "tagsCode": tags_code,
        })  # fmt: skip

    def _spans(self, rows: NDArray[np.int64]) -> list[BlockSpan]:
        """The blocks of ``rows``, neighbours merged."""
        if len(rows) == 0:
            return []
        wanted = np.unique(np.searchsorted(self._block_row, rows, side="right") - 1)
        groups = np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1)
        return [self.span(int(group[0]), int(group[-1]) + 1) for group in groups]

    def span(self, first: int, end: int) -> BlockSpan:
        """Blocks [first, end)."""
        offset, raw = int(self._block_offset[first]), int(self._block_raw[first])
        return BlockSpan(
            first, end, offset, int(self._block_offset[end]) - offset,
            int(self._block_row[first]), int(self._block_row[end]), raw, int(self._block_raw[end]) - raw,
        )  # fmt: skip
