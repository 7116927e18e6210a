"""Reads the slices of a partition: footers first, then only the blocks with matching rows.

Rows of consecutive runs are read together, so that an object of 100,000 small runs costs as much as one large run.
Requests run a few windows ahead; memory is bounded by windows of ``window_bytes`` message bytes.

Rows of LMQs, and those whose object no longer exists, are read by queue offset instead, as a consumer reads them.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import InlineExecutor, run_sync
from fetcher.rows.block_fetch import Block, BufferedRows
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.message import MessageBatch
from fetcher.rows.pull import PullRequest
from fetcher.rows.row_reader import ReadRows, RowReader
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.plan.archive_plan import KeptEnds, expired, taken_back
from rocketmq_tiered.message_table.plan.partitions import ObjectRef, OffsetRange, Slices
from rocketmq_tiered.message_table.scan.object_rows import (
    NO_BYTES,
    CorruptPlace,
    Lost,
    ObjectRows,
    OnCorrupt,
    RowChunk,
    RowWindow,
    ahead_with,
)
from tiered.archive.segment_reader import SegmentCache, SegmentReader
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK
from tiered.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from tiered.formats.segment_index import BlockSpan, SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, Table
from tiered.object_store.interface import ObjectStore


class _StoreSource:
    """A BlockSource that reads in the calling thread; consecutive blocks share a request."""

    def __init__(self, store: ObjectStore, cache_bytes: int) -> None:
        self._store = store
        self._segments = SegmentCache(store, cache_bytes=cache_bytes)

    async def index(
        self, key: str, size_bytes: int, tail_bytes: int, priority: Priority, ordinal: int | None = None
    ) -> SegmentIndex:
        """The decoded tail of an object, or only the part of it with the run ``ordinal``; it is cached."""
        return self._segments.open(key, size_bytes=size_bytes, tail_bytes=tail_bytes, ordinal=ordinal).index

    def index_in_memory(self, key: str, ordinal: int) -> SegmentIndex | None:
        return None

    def block_in_memory(self, object_key: str, number: int) -> Block | None:
        return None

    async def blocks_at(
        self, index: SegmentIndex, run: int, numbers: Sequence[int], priority: Priority
    ) -> Sequence[Block]:
        """Read and decompress the blocks ``numbers`` of an object. Consecutive ones share a request of up to
        RANGE_BYTES_MAX."""
        groups = np.split(np.array(numbers), np.flatnonzero(np.diff(numbers) > 1) + 1)
        read = SegmentReader(self._store, index).whole_blocks
        return [block for group in groups for block in read(int(group[0]), int(group[-1]) + 1)]


class ScanReader:
    """Reads queues of the archive at ``store``, its own prefix. Not thread-safe."""

    def __init__(self, store: ObjectStore, state: CatalogState, *, cache_bytes: int) -> None:
        self._catalog = CatalogView(
            store, state, executor=InlineExecutor(), clock=MACHINE_CLOCK, runs_bytes=cache_bytes
        )
        self._rows = RowReader(_StoreSource(store, cache_bytes), self._catalog)
        self._buffered: tuple[QueueKey | None, BufferedRows] = None, BufferedRows()

    def read(
        self, state: CatalogState, queue: QueueKey, offset: int, *, count: int, max_bytes: int
    ) -> tuple[ReadRows, CatalogState]:
        """Read rows of a queue from ``offset`` on. Returns them and the catalog version by which they were read:
        ``state``, or the newest one if ``state`` names an object that no longer exists. Raises NotFoundError if the
        archive no longer has the queue, and what RowReader.read raises."""

        async def read(state: CatalogState) -> tuple[ReadRows, CatalogState]:
            """Read at one catalog version. The rows buffered by the last read are used if they belong to the same queue
            and log history."""
            view = self._catalog.view(state, queue)
            if view is None:
                raise NotFoundError(f"{queue} is not in the archive")
            buffered = self._buffered[1]
            if self._buffered[0] != queue or buffered.history != state.cursor.history:
                buffered = BufferedRows()
            request = PullRequest(queue.topic, queue.queue_id, offset, count, max_bytes)
            return await self._rows.read(view, request, Priority.BACKGROUND, buffered), state

        found = run_sync(self._catalog.read(state, read, name=str(queue), queue=queue))
        self._buffered = queue, found[0].buffered
        return found


READ_ROWS = 8192
CACHE_BYTES = 16 << 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArchiveScan:
    """How the partitions of one archive are read. ``store`` is rooted at the archive."""

    store: ObjectStore
    predicate: Predicate
    with_records: bool
    window_bytes: int
    on_corrupt: OnCorrupt
    may_have_expired: bool = False

    def report(
        self, part: Slices, message: str, ranges: Sequence[Lost] = (), rows: RowChunk | None = None
    ) -> None:
        """Pass damage to ``on_corrupt``, which may raise."""
        self.on_corrupt(CorruptPlace(part.archive.cluster, part.archive.broker, message, ranges, rows))


class QueueScanner:
    """Reads slices of one partition by queue offset."""

    def __init__(self, scan: ArchiveScan, part: Slices) -> None:
        self._scan = scan
        self._store = scan.store
        self._part = part
        self._reader: ScanReader | None = None
        self._ends: KeptEnds | None = None

    def chunks(self, table: Table) -> Iterator[RowChunk]:
        """The rows of the slices in ``table``, from the catalog version of the plan."""
        if len(table):
            state = load(self._store, version=self._part.archive.version)
            for row in table:
                yield from self._read(state, row)

    def moved_chunks(self, table: Table, missing: NotFoundError) -> Iterator[RowChunk]:
        """Read the rows of ``table`` by the newest catalog version, because the object in which they were planned no
        longer exists (``missing`` is the error). If the version has not changed, the archive is damaged, which is
        reported."""
        state = load(self._store)
        if state.version == self._part.archive.version:
            message = f"catalog version {state.version} names a missing object: {missing.message}"
            self._report(message, lost(self._part, table))
            return
        for row in table:
            queue = self._part.queues[int(row["queue"])]
            self._require(queue, int(row["begin"]), int(row["end"]), state)
            yield from self._read(state, row)

    def _require(self, queue: QueueKey, begin: int, end: int, newest: CatalogState) -> None:
        """Raise NotFoundError unless the catalog version ``newest`` still has all messages in [begin, end) that were
        planned. If the scan allows for expired messages, the first of them may have expired, which is logged.
        """
        version = self._part.archive.version
        row = newest.queue(queue)
        floor = end if row is None else int(row["min_queue_offset"])
        if floor > begin:
            error = expired(queue, OffsetRange(begin, min(floor, end)), version)
            if not self._scan.may_have_expired:
                raise error
            logger.warning("skipped: %s", error.message)
        if self._ends is None or self._ends.newest.version != newest.version:
            self._ends = KeptEnds(self._store, newest, version)
        if end > self._ends.of(queue):
            raise taken_back(queue, end, version)

    def _read(self, state: CatalogState, row: np.void) -> Iterator[RowChunk]:
        """Read the offsets of one part of a run in steps of up to READ_ROWS rows. Where data is damaged, it continues
        row by row and reports each row that cannot be read. Where an object no longer exists, it continues by the
        newest catalog version."""
        queue, end = self._part.queues[int(row["queue"])], int(row["end"])
        reader = self._reader = self._reader or ScanReader(self._store, state, cache_bytes=CACHE_BYTES)
        offset, rows, max_bytes = int(row["begin"]), READ_ROWS, self._scan.window_bytes
        while offset < end:
            try:
                read, state_read = reader.read(
                    state, queue, offset, count=min(rows, end - offset), max_bytes=max_bytes
                )
            except CorruptionError as error:
                if rows > 1:
                    rows = 1
                    continue
                self._report(error.message, [(queue, offset, offset + 1)])
                offset += 1
                continue
            if state_read.version != state.version:  # an object was missing
                self._require(queue, offset, end, state_read)
                state = state_read
            rows = min(rows * 2, READ_ROWS)
            if len(read.batch):
                yield self._chunk(read.batch, row)
            if read.next_offset <= offset:
                return
            offset = read.next_offset

    def _chunk(self, batch: MessageBatch, row: np.void) -> RowChunk:
        """The messages of ``batch`` that lie in the offsets of ``row``, a part of a run, and match the predicate."""
        data, starts = batch.joined()
        chunk = RowChunk(
            cluster=self._part.archive.cluster,
            broker=self._part.archive.broker,
            queues=self._part.queues,
            queue=np.full(len(batch), int(row["queue"]), np.uint32),
            queue_offset=batch.queue_offsets,
            inner_num=batch.inner_num,
            phys=batch.phys,
            size=batch.sizes,
            store_timestamp=batch.store_timestamp,
            tags_code=batch.tags_code,
            is_batch=np.full(len(batch), int(row["kind"]) == RunKind.BATCH),
            data=data,
            starts=starts,
            source=f"{self._store.url} version {self._part.archive.version}",
        )
        inside = (chunk.queue_offset >= int(row["begin"])) & (chunk.queue_offset < int(row["end"]))
        chunk = chunk if inside.all() else chunk.taken(np.flatnonzero(inside))
        return chunk.matching(self._scan.predicate, is_lmq=int(row["kind"]) == RunKind.LMQ)

    def _report(self, message: str, ranges: Sequence[Lost]) -> None:
        self._scan.report(self._part, f"{self._store.url}: {message}", ranges)


def lost(part: Slices, table: Table) -> list[Lost]:
    """The messages of the slices in ``table``."""
    return [(part.queues[int(row["queue"])], int(row["begin"]), int(row["end"])) for row in table]


WINDOWS_AHEAD = 2
OBJECTS_AHEAD = 2


def archive_chunks(scan: ArchiveScan, part: Slices) -> Iterator[RowChunk]:
    """Read all matching rows of a partition, window by window (rows whose blocks are read together). The bytes of a
    chunk are valid only until the next window is taken, whose memory is the same.

    Raises CorruptionError, which names object and range, unless ``scan.on_corrupt`` returns; also raises what the store
    raises.
    """
    lmq = part.table["kind"] == RunKind.LMQ
    queues = QueueScanner(scan, part)
    yield from queues.chunks(part.table[lmq])
    table = part.table[~lmq]
    groups = [group for group in np.split(table, np.flatnonzero(np.diff(table["object"])) + 1) if len(group)]
    refs = [part.objects[int(group["object"][0])] for group in groups]
    with ThreadPoolExecutor(WINDOWS_AHEAD + OBJECTS_AHEAD, thread_name_prefix="scan") as pool:
        opened = ahead_with(pool, lambda ref: _open(scan.store, ref), refs, OBJECTS_AHEAD)

        def reads() -> Iterator[_Read]:
            """The reads of all objects, in order. Of an object that opens, its blocks are read. Of one that no longer
            exists, its rows are read from the objects in which they are now. A damaged one is reported."""
            for group, (ref, index) in zip(groups, opened, strict=True):
                if isinstance(index, SegmentIndex):
                    yield from _ObjectScan(scan, part, group, index).reads(free)
                elif isinstance(index, NotFoundError):
                    yield partial(queues.moved_chunks, group, index), NO_BYTES
                else:
                    scan.report(part, f"{scan.store.url}/{ref.key}: {index.message}", lost(part, group))

        free = list[NDArray[np.uint8]]()
        for (_, memory), chunks in ahead_with(pool, lambda read: read[0](), reads(), WINDOWS_AHEAD):
            yield from chunks
            free.append(memory)


def _open(store: ObjectStore, ref: ObjectRef) -> SegmentIndex | NotFoundError | CorruptionError:
    """Open the tail of an object. An error that concerns only this object, because it is missing or damaged, is
    returned instead of raised, so that the scan can continue."""
    try:
        reader = SegmentReader.open(store, ref.key, size_bytes=ref.size_bytes, tail_bytes=ref.tail_bytes)
    except (NotFoundError, CorruptionError) as error:
        return error
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{store.url}/{ref.key}: {error.message}") from error
    return reader.index


_Read = tuple[Callable[[], Iterator[RowChunk]], NDArray[np.uint8]]
"""A function that reads the rows of one window of an object, and the memory for their records, which a later window
uses again."""


class _ObjectScan:
    """The slices of one open object."""

    def __init__(self, scan: ArchiveScan, part: Slices, table: Table, index: SegmentIndex) -> None:
        self._scan = scan
        self._part = part
        self._table = table
        self._index = index
        self._rows = ObjectRows(
            part, table, index, scan.predicate, with_records=scan.with_records, window_bytes=scan.window_bytes
        )

    def reads(self, free: list[NDArray[np.uint8]]) -> Iterator[_Read]:
        """A function that reads, and the memory it reads into, for each window of the object with matching rows. The
        memory is one of ``free``, buffers of windows that were consumed, if that is large enough."""
        try:
            self._rows.check_runs()
        except CorruptionError as error:
            self._report(error.message, lost(self._part, self._table))
            return
        for window in self._rows.windows(self._report):
            memory = free.pop() if free else NO_BYTES
            if len(memory) < (needed := sum(span.raw_bytes for span in window.spans)):
                memory = np.empty(needed, np.uint8)
            yield partial(self._read, window, memory), memory

    def _read(self, window: RowWindow, memory: NDArray[np.uint8]) -> Iterator[RowChunk]:
        if not self._scan.with_records:
            return iter([self._chunk(window, NO_BYTES, np.zeros(0, np.int64))])
        return self._chunks(window, *self._pieces(window, memory))

    def _chunks(
        self,
        window: RowWindow,
        pieces: Sequence[tuple[BlockSpan, NDArray[np.uint8]]],
        corrupt: Sequence[tuple[BlockSpan, str]],
    ) -> Iterator[RowChunk]:
        """The rows of a window in the blocks that were read, ``pieces``. The rows of its damaged blocks, ``corrupt``,
        are reported."""
        for span, message in corrupt:
            inside = _between(window.position, span.raw_offset, span.raw_offset + span.raw_bytes)
            rows = self._chunk(window, NO_BYTES, np.zeros(0, np.int64), inside)
            self._scan.report(self._part, f"{self._scan.store.url}/{message}", rows=rows)
        for span, data in pieces:
            inside = _between(window.position, span.raw_offset, span.raw_offset + span.raw_bytes)
            chunk = self._chunk(window, data, window.position - span.raw_offset, inside)
            if len(chunk):
                yield chunk

    def _report(self, message: str, ranges: Sequence[Lost]) -> None:
        self._scan.report(self._part, f"{self._scan.store.url}/{message}", ranges)

    def _pieces(
        self, window: RowWindow, memory: NDArray[np.uint8]
    ) -> tuple[list[tuple[BlockSpan, NDArray[np.uint8]]], list[tuple[BlockSpan, str]]]:
        """Read the blocks of a window into ``memory``: (consecutive blocks with their decompressed bytes, damaged
        blocks with their errors)."""
        pieces: list[tuple[BlockSpan, NDArray[np.uint8]]] = []
        corrupt: list[tuple[BlockSpan, str]] = []
        filled = 0
        for span in window.spans:
            stored = memoryview(self._scan.store.get_range(self._index.key, span.offset, span.length))
            try:
                pieces.append((span, self._index.decode_into(memory[filled:], span, stored)))
                filled += span.raw_bytes
            except CorruptionError:
                for block in range(span.first_block, span.end_block):
                    one = self._rows.span(block, block + 1)
                    begin = one.offset - span.offset
                    try:
                        data = self._index.decode_blocks(one, stored[begin : begin + one.length])
                        pieces.append((one, data))
                    except CorruptionError as error:
                        corrupt.append((one, error.message))
        return pieces, corrupt

    def _chunk(
        self,
        window: RowWindow,
        data: NDArray[np.uint8],
        starts: NDArray[np.int64],
        at: slice = slice(None),
    ) -> RowChunk:
        """The rows ``at`` of a window as a chunk. ``starts``: where the records of the window's rows begin in
        ``data``."""
        size, tags_code, stamp, phys, inner = (column[at] for column in window.columns[:5])
        run = window.run[at]
        return RowChunk(
            cluster=self._part.archive.cluster,
            broker=self._part.archive.broker,
            queues=self._part.queues,
            queue=self._rows.queue_of_run[run],
            queue_offset=window.offset[at],
            inner_num=inner,
            phys=phys,
            size=size,
            store_timestamp=stamp,
            tags_code=tags_code,
            is_batch=self._index.runs["kind"][run] == RunKind.BATCH,
            data=data,
            starts=starts[at] if len(starts) else starts,
            source=f"{self._scan.store.url}/{self._index.key}",
        )


def _between(position: NDArray[np.int64], low: int, high: int) -> slice:
    """Ascending ``position`` in [low, high)."""
    return slice(int(np.searchsorted(position, low)), int(np.searchsorted(position, high)))
