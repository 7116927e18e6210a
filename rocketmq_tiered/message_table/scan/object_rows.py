"""The rows of an open object that a partition reads, window by window, and their blocks.

Selects by footer columns: runs, offsets, predicate, positions in blocks. Reads column pages, no block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.plan.partitions import Slices
from tiered.errors import CorruptionError
from tiered.formats.segment_index import BlockSpan, SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, Table

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
        """The rows that match the predicate. A row of an LMQ may have another tag than its message, so the tag is not
        compared for these."""
        topics = {self.queues[number].topic for number in np.unique(self.queue).tolist()}
        predicate = replace(predicate, tags=None) if is_lmq else predicate.for_topics(topics)
        ids = np.array([queue.queue_id for queue in self.queues] or [0], np.int64)
        mask = predicate.mask(
            {
                "queueId": ids[self.queue],
                "queueOffset": self.queue_offset,
                "storeTimestamp": self.store_timestamp,
                "commitLogOffset": self.phys,
                "storeSize": self.size,
                "innerNum": self.inner_num,
                "tagsCode": self.tags_code,
            }
        )
        return self if mask is None or mask.all() else self.taken(np.flatnonzero(mask))


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


T = TypeVar("T")
R = TypeVar("R")


def ahead_with(
    pool: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T], count: int
) -> Iterator[tuple[T, R]]:
    """Each item with the result of ``work`` on it, in order. Threads of ``pool`` work on up to ``count`` items ahead of
    the consumer; only from the third item on, because a consumer with a small limit stops after the first ones."""
    pending: deque[tuple[T, Future[R]]] = deque()
    try:
        for done, item in enumerate(items):
            pending.append((item, pool.submit(work, item)))
            if len(pending) > min(count, done - 1):
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    finally:
        for _, future in pending:
            future.cancel()


CHUNK_ROWS = 1 << 18


def catalog_chunks(part: Slices) -> Iterator[RowChunk]:
    """A row for each message of a partition of plain runs, for queries that read no column but the queue's: all
    other columns are 0. No object is read."""
    table = part.table
    rows = table["end"] - table["begin"]
    groups = np.cumsum(rows) // CHUNK_ROWS
    for mine in np.split(np.arange(len(table)), np.flatnonzero(np.diff(groups)) + 1):
        queue = np.repeat(table["queue"][mine], rows[mine])
        zeros = np.broadcast_to(np.int64(0), len(queue))
        yield RowChunk(
            part.archive.cluster,
            part.archive.broker,
            part.queues,
            queue,
            zeros,
            zeros,
            zeros,
            zeros,
            zeros,
            zeros,
            zeros,
        )


WINDOW_ROWS = 65_536
_EXPLICIT = (RunKind.BATCH, RunKind.SPARSE)
"""Runs whose rows are at offsets that only their columns have."""


@dataclass(frozen=True)
class RowWindow:
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
        """The rows to read in one object. ``table``: the parts of runs that the partition ``part`` has in it.
        ``index``: its tail. Reads nothing yet."""
        self._part = part
        self._table = table
        self._index = index
        topics = {part.queues[number].topic for number in np.unique(table["queue"]).tolist()}
        self._predicate = predicate.for_topics(topics)
        self._with_records = with_records
        self._window_bytes = window_bytes
        # Rows are counted as they lie in blocks, so that LMQ rows, which have no bytes, do not count.
        self._first_row, _, self._block_row, self._block_raw = index.bounds
        self._block_offset = index.block_offsets
        self.queue_of_run = np.zeros(len(index), np.uint32)
        """The queue's number in the partition, for each run that is read."""
        inside = table["ordinal"] < len(index)
        self.queue_of_run[table["ordinal"][inside]] = table["queue"][inside]

    def check_runs(self) -> None:
        """Raise CorruptionError unless the object has the runs that the catalog names: of the same queue and kind, with
        these offsets."""
        index, table = self._index, self._table
        ordinals = table["ordinal"].astype(np.int64)
        if int(ordinals.max()) >= len(index):
            raise CorruptionError(f"{index.key} has {len(index)} runs, fewer than the catalog lists")
        mine = index.runs[ordinals]
        wrong = (mine["base_queue_offset"] > table["begin"]) | (mine["end_queue_offset"] < table["end"])
        wrong &= mine["kind"] != RunKind.SPARSE  # the catalog counts dropped messages at both ends
        wrong |= mine["kind"] != table["kind"]
        queues = [self._part.queues[number] for number in table["queue"].tolist()]
        other = [index.queue_of(run) != queue for run, queue in zip(ordinals.tolist(), queues, strict=True)]
        if wrong.any() or any(other):
            run = int(ordinals[int(np.argmax(wrong | np.array(other)))])
            raise CorruptionError(f"{index.key}: run {run} does not match the catalog")

    def windows(self, on_corrupt: Callable[[str, Sequence[Lost]], None]) -> Iterator[RowWindow]:
        """The windows of the object with matching rows, in order. If a page of columns is damaged, ``on_corrupt`` is
        called with the error and the rows that it concerns, and they are skipped."""
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
        """Which messages the rows [first, end) hold, by queue and offsets, to report them. Of a BatchCQ's run, or one
        from which key compaction dropped messages, all offsets to read are returned, because a row's offset is not
        known."""
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
        """The rows to read as ranges [begin, end); adjacent ranges are joined. For a run whose rows state their offsets
        (of a BatchCQ, or after key compaction) the range is the whole run and comes with the offsets to read."""
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
        """Cut the rows [begin, end) into windows of at most ``window_bytes`` and WINDOW_ROWS. A window ends where a
        block ends, unless it is the last one."""
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

    def _window(self, first: int, end: int, offsets: tuple[int, int] | None) -> RowWindow:
        """The rows of [first, end) that match the predicate, with their columns and the blocks that hold them."""
        low, high = first, end
        block = last = 0
        if self._with_records:  # a record's position is a sum of sizes from the begin of its block on
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
        size, tags_code, stamp, phys, inner = columns[:5]
        matching = self._predicate.mask(
            {
                "queueOffset": offset,
                "storeTimestamp": stamp,
                "commitLogOffset": phys,
                "storeSize": size,
                "innerNum": inner,
                "tagsCode": tags_code,
            }
        )
        if matching is not None:
            kept &= matching
        at = np.flatnonzero(kept)
        spans = self._spans(rows[at]) if self._with_records else []
        return RowWindow(
            rows[at], run[at], offset[at], tuple(column[at] for column in columns), position[at], spans
        )

    def _columns(self, rows: NDArray[np.int64], run: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """The columns of ``rows`` in the object's tail. ``run``: the run of each row. LMQ rows between them are
        skipped."""
        inside = self._index.first_row[run] + rows - self._first_row[run]
        first, end = int(inside[0]), int(inside[-1]) + 1
        columns = self._index.stored_columns(first, end)
        if end - first != len(rows):
            columns = tuple(column[inside - first] for column in columns)
        spans = np.where(self._index.runs["kind"][run] == RunKind.SPARSE, np.int32(1), columns[4])
        return (*columns[:4], spans, *columns[5:])

    def _offsets(self, rows: NDArray[np.int64], run: NDArray[np.int64]) -> NDArray[np.int64]:
        """The queue offset of each row; ``run``: the run of each."""
        runs = self._index.runs
        offset: NDArray[np.int64] = runs["base_queue_offset"][run] + rows - self._first_row[run]
        kinds = runs["kind"][run[0] : run[-1] + 1]
        for number in (run[0] + np.flatnonzero(np.isin(kinds, _EXPLICIT))).tolist():
            mine = run == number
            whole = self._index.row_columns(number).queue_offset
            offset[mine] = whole[rows[mine] - int(self._first_row[number])]
        return offset

    def _check_sizes(self, sizes: NDArray[np.int64], block: int, last: int, low: int) -> None:
        """Raises CorruptionError unless the sizes of each block's rows add up to the block."""
        sums = np.add.reduceat(sizes, self._block_row[block:last] - low)
        if (sums != self._index.blocks["raw_bytes"][block:last]).any():
            raise CorruptionError(
                f"{self._index.key} is damaged: the messages of blocks [{block}, {last}) do not fill these blocks"
            )

    def _spans(self, rows: NDArray[np.int64]) -> list[BlockSpan]:
        """The blocks of ``rows``, neighbours merged."""
        if len(rows) == 0:
            return []
        wanted = np.unique(np.searchsorted(self._block_row, rows, side="right") - 1)
        groups = np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1)
        return [self.span(int(group[0]), int(group[-1]) + 1) for group in groups]

    def span(self, first: int, end: int) -> BlockSpan:
        """Where the blocks [first, end) lie in the object, which rows they hold, and their decompressed bytes."""
        offset, raw = int(self._block_offset[first]), int(self._block_raw[first])
        return BlockSpan(
            first,
            end,
            offset,
            int(self._block_offset[end]) - offset,
            int(self._block_row[first]),
            int(self._block_row[end]),
            raw,
            int(self._block_raw[end]) - raw,
        )
