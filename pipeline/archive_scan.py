"""Reads the slices of a partition: footers first, then only the blocks whose rows pass.

Rows of consecutive runs are read together, so that an object of 100,000 small runs costs what one large run does.
Requests run a few windows ahead; everything held is bounded by windows of ``window_bytes`` message bytes.

Owns which bytes of which object are read. Does not own what to read (partitions.py) nor decoding (formats).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.light_scan import QueueScanner
from pipeline.partitions import ObjectRef, Slices
from pipeline.predicate import Predicate
from pipeline.row_chunk import NO_BYTES, CorruptPlace, RowChunk
from tiered.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from tiered.flat_file.segment_reader import SegmentReader
from tiered.formats.segment_index import BlockSpan, SegmentIndex
from tiered.formats.segment_layout import HEADER_BYTES
from tiered.model.tables import RunKind, Table
from tiered.object_store.protocol import ObjectStore

T = TypeVar("T")
R = TypeVar("R")

WINDOWS_AHEAD = 2
OBJECTS_AHEAD = 2
WINDOW_ROWS = 65_536
OnCorrupt = Callable[[CorruptPlace], None]


@dataclass(frozen=True)
class _Window:
    """Rows of some consecutive blocks that pass, and the spans of blocks that hold them."""

    rows: NDArray[np.int64]
    """Numbers in the object."""
    run: NDArray[np.int64]
    offset: NDArray[np.int64]
    columns: tuple[NDArray[Any], ...]
    position: NDArray[np.int64]
    """Raw bytes of the object before the record."""
    spans: list[BlockSpan]


class ArchiveScanner:
    """Reads partitions of one archive. ``store`` is rooted at it.

    Raises CorruptionError naming object and range unless ``on_corrupt`` returns, and what the store raises.
    """

    def __init__(
        self,
        store: ObjectStore,
        predicate: Predicate,
        *,
        with_records: bool,
        window_bytes: int,
        on_corrupt: OnCorrupt,
    ) -> None:
        self._store = store
        self._predicate = predicate
        self._with_records = with_records
        self._window_bytes = window_bytes
        self._on_corrupt = on_corrupt

    def chunks(self, part: Slices) -> Iterator[RowChunk]:
        """All rows of ``part`` that pass, a window at a time."""
        light = part.table["kind"] == RunKind.LMQ
        queues = QueueScanner(self._store, part, self._predicate, self._window_bytes, self._on_corrupt)
        yield from queues.chunks(part.table[light])
        table = part.table[~light]
        groups = [
            group for group in np.split(table, np.flatnonzero(np.diff(table["object"])) + 1) if len(group)
        ]
        refs = [part.objects[int(group["object"][0])] for group in groups]
        with ThreadPoolExecutor(WINDOWS_AHEAD + OBJECTS_AHEAD, thread_name_prefix="scan") as pool:
            opened = _ahead(pool, self._open, refs, OBJECTS_AHEAD)
            for group, ref, index in zip(groups, refs, opened, strict=True):
                if isinstance(index, SegmentIndex):
                    yield from _ObjectScan(self, pool, part, group, index).chunks()
                elif isinstance(index, NotFoundError):
                    yield from queues.moved_chunks(group, index)
                else:
                    self._on_corrupt(self._place(part, f"{ref.key}: {index.message}"))

    def _open(self, ref: ObjectRef) -> SegmentIndex | NotFoundError | CorruptionError:
        try:
            reader = SegmentReader.open(
                self._store, ref.key, size_bytes=ref.size_bytes, tail_bytes=ref.tail_bytes
            )
        except (NotFoundError, CorruptionError) as error:
            return error
        except UnsupportedFormatError as error:
            raise UnsupportedFormatError(f"{self._store.url}/{ref.key}: {error.message}") from error
        return reader.index

    def _place(self, part: Slices, message: str) -> CorruptPlace:
        return CorruptPlace(part.archive.cluster, part.archive.broker, None, f"{self._store.url}/{message}")


class _ObjectScan:
    """The slices of one open object."""

    def __init__(
        self,
        scanner: ArchiveScanner,
        pool: ThreadPoolExecutor,
        part: Slices,
        table: Table,
        index: SegmentIndex,
    ) -> None:
        self._scanner = scanner
        self._pool = pool
        self._part = part
        self._table = table
        self._index = index
        self._block_row = _sums(index.blocks["rows"])
        self._block_raw = _sums(index.blocks["raw_bytes"])
        self._block_offset = _sums(index.blocks["stored_bytes"]) + HEADER_BYTES
        # Rows are numbered here as they lie in blocks: light-queue rows, which have no bytes, do not count.
        is_light = index.runs["kind"] == RunKind.LMQ
        self._first_row = _sums(np.where(is_light, 0, index.runs["rows"]))
        self._queue_of_run = np.zeros(len(index), np.uint32)
        self._queue_of_run[table["ordinal"][table["ordinal"] < len(index)]] = table["queue"][
            table["ordinal"] < len(index)
        ]

    def chunks(self) -> Iterator[RowChunk]:
        """Rows that pass, window after window."""
        try:
            self._check_runs()
        except CorruptionError as error:
            self._report(error.message)
            return
        windows = self._windows()
        if not self._scanner._with_records:
            for window in windows:
                yield self._chunk(window, NO_BYTES, np.zeros(0, np.int64))
            return
        for window, (pieces, corrupt) in _ahead_with(self._pool, self._fetch, windows, WINDOWS_AHEAD):
            for message in corrupt:
                self._report(message)
            for span, data in pieces:
                inside = _between(window.position, span.raw_offset, span.raw_offset + span.raw_bytes)
                chunk = self._chunk(window, data, window.position - span.raw_offset, inside)
                if len(chunk):
                    yield chunk

    # -- choosing rows ----------------------------------------------------------------------------------------

    def _check_runs(self) -> None:
        """The object must hold the runs that the catalog says are in it."""
        index, table = self._index, self._table
        ordinals = table["ordinal"].astype(np.int64)
        if int(ordinals.max()) >= len(index):
            raise CorruptionError(f"{index.key}: has {len(index)} runs, not the ones the catalog names")
        mine = index.runs[ordinals]
        wrong = (mine["kind"] != table["kind"]) | (mine["base_queue_offset"] > table["begin"])
        wrong |= mine["end_queue_offset"] < table["end"]
        queues = [self._part.queues[number] for number in table["queue"].tolist()]
        other = [index.queue_of(run) != queue for run, queue in zip(ordinals.tolist(), queues, strict=True)]
        if wrong.any() or any(other):
            run = int(ordinals[int(np.argmax(wrong | np.array(other)))])
            raise CorruptionError(f"{index.key}: run {run} is not what the catalog says")

    def _windows(self) -> Iterator[_Window]:
        for begin, end, offsets in self._ranges():
            for first, last in self._cut(begin, end):
                try:
                    window = self._window(first, last, offsets)
                except CorruptionError as error:  # a page of columns: its rows are lost with it
                    self._report(error.message)
                    continue
                if len(window.rows):
                    yield window

    def _report(self, message: str) -> None:
        self._scanner._on_corrupt(self._scanner._place(self._part, message))

    def _ranges(self) -> Iterator[tuple[int, int, tuple[int, int] | None]]:
        """Rows [begin, end) to look at, neighbours together; of a BatchCQ run with the offsets wanted."""
        index, table = self._index, self._table
        ordinals = table["ordinal"].astype(np.int64)
        mine = index.runs[ordinals]
        first = self._first_row[ordinals]
        batch = mine["kind"] == RunKind.BATCH
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
        """[begin, end) in windows that end with a block, but for the last one."""
        if not self._scanner._with_records:
            for first in range(begin, end, WINDOW_ROWS):
                yield first, min(first + WINDOW_ROWS, end)
            return
        first = begin
        while first < end:
            block = int(np.searchsorted(self._block_row, first, side="right")) - 1
            by_bytes = int(
                np.searchsorted(
                    self._block_raw, self._block_raw[block] + self._scanner._window_bytes, "right"
                )
            )
            by_rows = int(np.searchsorted(self._block_row, self._block_row[block] + WINDOW_ROWS, "right"))
            last = max(min(by_bytes, by_rows) - 1, block + 1)
            stop = min(int(self._block_row[last]), end)
            yield first, stop
            first = stop

    def _window(self, first: int, end: int, offsets: tuple[int, int] | None) -> _Window:
        """The rows of [first, end) that pass, with their blocks."""
        low, high = first, end
        block = last = 0
        if self._scanner._with_records:  # positions are sums from the begin of a block
            block = int(np.searchsorted(self._block_row, first, side="right")) - 1
            last = int(np.searchsorted(self._block_row, end, side="left"))
            low, high = int(self._block_row[block]), int(self._block_row[last])
        rows = np.arange(low, high)
        run = np.searchsorted(self._first_row, rows, side="right") - 1
        columns = self._columns(rows, run)
        offset = self._offsets(rows, run)
        position = np.zeros(len(rows), np.int64)
        if self._scanner._with_records:
            sizes = columns[0].astype(np.int64)
            position = int(self._block_raw[block]) + np.cumsum(sizes) - sizes
            self._check_sizes(sizes, block, last, low)
        kept = (rows >= first) & (rows < end)
        if offsets is not None:
            kept &= (offset >= offsets[0]) & (offset < offsets[1])
        passing = self._passing(run, offset, columns)
        if passing is not None:
            kept &= passing
        at = np.flatnonzero(kept)
        spans = self._spans(rows[at]) if self._scanner._with_records else []
        return _Window(
            rows[at], run[at], offset[at], tuple(column[at] for column in columns), position[at], spans
        )

    def _columns(self, rows: NDArray[np.int64], run: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """Footer columns of ``rows``, without those of light queues that lie between."""
        inside = self._index.first_row[run] + rows - self._first_row[run]
        first, end = int(inside[0]), int(inside[-1]) + 1
        columns = self._index.stored_columns(first, end)
        if end - first == len(rows):
            return columns
        return tuple(column[inside - first] for column in columns)

    def _offsets(self, rows: NDArray[np.int64], run: NDArray[np.int64]) -> NDArray[np.int64]:
        """Queue offset of each row."""
        runs = self._index.runs
        offset: NDArray[np.int64] = runs["base_queue_offset"][run] + rows - self._first_row[run]
        for number in np.unique(run[runs["kind"][run] == RunKind.BATCH]).tolist():
            mine = run == number
            whole = self._index.row_columns(number).queue_offset
            offset[mine] = whole[rows[mine] - int(self._first_row[number])]
        return offset

    def _check_sizes(self, sizes: NDArray[np.int64], block: int, last: int, low: int) -> None:
        """Sizes of a block's rows must add up to the block, or records would be cut at wrong places."""
        sums = np.add.reduceat(sizes, self._block_row[block:last] - low)
        if (sums != self._index.blocks["raw_bytes"][block:last]).any():
            raise CorruptionError(
                f"{self._index.key}: sizes of rows do not add up to blocks [{block}, {last})"
            )

    def _passing(
        self, run: NDArray[np.int64], offset: NDArray[np.int64], columns: tuple[NDArray[Any], ...]
    ) -> NDArray[np.bool_] | None:
        size, tags_code, stamp, phys, inner = columns[:5]
        known = {
            "queueOffset": offset, "storeTimestamp": stamp, "commitLogOffset": phys, "storeSize": size,
            "innerNum": inner, "tagsCode": tags_code,
        }  # fmt: skip
        predicate = self._scanner._predicate
        topics = {self._part.queues[number].topic for number in self._queue_of_run[np.unique(run)].tolist()}
        if predicate.tags is not None and any(
            predicate.for_topic(topic) is not predicate for topic in topics
        ):
            predicate = predicate.without_tags()
        return predicate.mask(known)

    def _spans(self, rows: NDArray[np.int64]) -> list[BlockSpan]:
        """The blocks of these stored rows, neighbours together."""
        if len(rows) == 0:
            return []
        wanted = np.unique(np.searchsorted(self._block_row, rows, side="right") - 1)
        groups = np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1)
        return [self._span(int(group[0]), int(group[-1]) + 1) for group in groups]

    def _span(self, first: int, end: int) -> BlockSpan:
        offset, raw = int(self._block_offset[first]), int(self._block_raw[first])
        return BlockSpan(
            first, end, offset, int(self._block_offset[end]) - offset,
            int(self._block_row[first]), int(self._block_row[end]), raw, int(self._block_raw[end]) - raw,
        )  # fmt: skip

    # -- bytes ------------------------------------------------------------------------------------------------

    def _fetch(self, window: _Window) -> tuple[list[tuple[BlockSpan, NDArray[np.uint8]]], list[str]]:
        """(decoded spans, what is wrong with the blocks that are not among them). Runs in the pool."""
        pieces: list[tuple[BlockSpan, NDArray[np.uint8]]] = []
        corrupt: list[str] = []
        for span in window.spans:
            stored = memoryview(self._scanner._store.get_range(self._index.key, span.offset, span.length))
            try:
                pieces.append((span, self._index.decode_blocks(span, stored)))
            except CorruptionError:
                for block in range(span.first_block, span.end_block):
                    one = self._span(block, block + 1)
                    begin = one.offset - span.offset
                    try:
                        data = self._index.decode_blocks(one, stored[begin : begin + one.length])
                        pieces.append((one, data))
                    except CorruptionError as error:
                        corrupt.append(error.message)
        return pieces, corrupt

    def _chunk(
        self,
        window: _Window,
        data: NDArray[np.uint8],
        starts: NDArray[np.int64],
        at: slice = slice(None),
    ) -> RowChunk:
        size, tags_code, stamp, phys, inner = (column[at] for column in window.columns[:5])
        run = window.run[at]
        return RowChunk(
            cluster=self._part.archive.cluster,
            broker=self._part.archive.broker,
            queues=self._part.queues,
            queue=self._queue_of_run[run],
            queue_offset=window.offset[at],
            inner_num=inner,
            phys=phys,
            size=size,
            store_timestamp=stamp,
            tags_code=tags_code,
            is_batch=self._index.runs["kind"][run] == RunKind.BATCH,
            data=data,
            starts=starts[at] if len(starts) else starts,
            source=f"{self._scanner._store.url}/{self._index.key}",
        )


def _between(position: NDArray[np.int64], low: int, high: int) -> slice:
    """Ascending ``position`` in [low, high)."""
    return slice(int(np.searchsorted(position, low)), int(np.searchsorted(position, high)))


def _sums(column: NDArray[Any]) -> NDArray[np.int64]:
    sums = np.zeros(len(column) + 1, np.int64)
    np.cumsum(column, out=sums[1:])
    return sums


def _ahead(pool: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T], count: int) -> Iterator[R]:
    return (result for _, result in _ahead_with(pool, work, items, count))


def _ahead_with(
    pool: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T], count: int
) -> Iterator[tuple[T, R]]:
    """(item, work(item)) in order; ``count`` items are in work ahead of the one handed out."""
    pending: deque[tuple[T, Future[R]]] = deque()
    try:
        for item in items:
            pending.append((item, pool.submit(work, item)))
            if len(pending) > count:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    finally:
        for _, future in pending:
            future.cancel()
