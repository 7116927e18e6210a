"""Pulls answered from memory: plain calls, no coroutines.

A pull is answered from the reader's buffered rows and, where a consumer crosses into another block or the next run,
from cached blocks and tails. Owns these steps and what follows them. Does not own the buffered rows (readers.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fetcher.prefetch.prefetch_window import PullProgress
from fetcher.prefetch.prefetcher import Prefetcher
from fetcher.prefetch.readers import Reader, ReaderKey, Readers
from fetcher.rows.block_fetch import Block, BlockId, BlockSource, BufferedRows
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from fetcher.rows.row_reader import BYTES_AHEAD, ROWS_AHEAD
from fetcher.rows.run_list import QueueView
from fetcher.rows.run_rows import Limits, RunRows, TakenRows, rows_of_run, take
from fetcher.rows.tag_filter import MessageFilter
from tiered.clock import Clock
from tiered.errors import CorruptionError
from tiered.model.tables import RunKind

READERS_MAX = 16_384
"""Readers found by name at the newest catalog version."""
_FOUND = PullStatus.FOUND


@dataclass
class FetcherCounters:
    """Sums since the start. ``from_memory``: pulls without a coroutine; ``waited``: pulls that waited for the store."""

    pulls: int = 0
    from_memory: int = 0
    waited: int = 0
    messages: int = 0


class _Rows(NamedTuple):
    """Rows from an offset on, the cached blocks among theirs, and message bytes per offset."""

    rows: RunRows
    blocks: Mapping[BlockId, Block]
    bytes_per_offset: float | None


class MemoryPulls:
    """Thread-safe. ``unread_s``: readers that have not pulled for this long lose their buffered rows."""

    def __init__(
        self,
        source: BlockSource,
        catalog: CatalogView,
        readers: Readers,
        prefetcher: Prefetcher,
        counters: FetcherCounters,
        *,
        clock: Clock,
        unread_s: float,
    ) -> None:
        self._source, self._catalog = source, catalog
        self._readers, self._prefetcher, self._counters = readers, prefetcher, counters
        self._clock, self._unread_s = clock, unread_s
        self._by_name: dict[tuple[str, int, str], tuple[QueueView, Reader]] = {}
        """The queue's view and the reader, by topic, queue id and group, at the newest catalog version."""
        self._by_name_of = catalog.state
        readers.on_evicted = self._forget

    def pull(self, request: PullRequest) -> PullResult | None:
        """Answer a pull without a filter from memory, without the columns of its messages; None if memory does not have
        all of the answer. Nearly all pulls of a sequential consumer end here, so this is written to be quick."""
        catalog = self._catalog
        time_s = self._clock.monotonic_s()
        catalog.refresh_if_due(time_s)
        name = request.topic, request.queue_id, request.group
        found = self._by_name.get(name)
        if found is None or found[0].state is not catalog.state:
            found = self._find(request)
            if found is None:
                return None
        view, reader = found
        slices = reader.buffered.slices
        if slices is not None and slices.view is view:
            first = request.offset - slices.base
            end = first + request.count
            if 0 <= first < end <= len(slices.ends):
                begin_byte, end_byte = slices.starts[first], slices.ends[end - 1]
                if end_byte - begin_byte <= request.max_bytes:
                    result = PullResult(
                        _FOUND,
                        request.offset + request.count,
                        view.first_offset or 0,
                        view.max_offset,
                        (slices.data[begin_byte:end_byte],),
                        request.count,
                    )
                    self._counters.pulls += 1
                    self._stepped(reader, view, request, result, time_s)
                    return result
        answered = self._read(reader, view, request, time_s)
        if answered is None:
            self._by_name.pop(name, None)  # another object may stand for the reader now, after it was evicted
        return answered

    def pull_rows(self, request: PullRequest) -> PullResult | None:
        """Answer a pull without a filter from memory, with the columns of its messages: if the block that the reader
        has buffered holds all of it, or the pull is at the queue's end; else None. The caller has called
        ``refresh_if_due``."""
        is_recent = self._catalog.is_recent
        view = self._catalog.view(self._catalog.state, (request.topic, request.queue_id, request.generation))
        if view is None or view.first_offset is None:
            return None
        if is_recent and request.offset == view.max_offset > 0:
            return PullResult(
                PullStatus.OFFSET_OVERFLOW_ONE,
                view.max_offset,
                view.first_offset,
                view.max_offset,
                version=view.state.version,
            )
        reader = self._readers.find(ReaderKey(request.group, view.queue))
        if reader is None:
            return None
        result = _rows(reader, view, request)
        if result is not None:
            self._stepped(reader, view, request, result, self._clock.monotonic_s())
        return result

    def _find(self, request: PullRequest) -> tuple[QueueView, Reader] | None:
        """The view of the queue and the reader for a request; both are cached by name as long as the catalog version is
        the same. None if the queue is not visible, its minimum offset is not known yet, or the reader is new."""
        catalog = self._catalog
        view = catalog.view(catalog.state, (request.topic, request.queue_id, None))
        reader = None if view is None else self._readers.find(ReaderKey(request.group, view.queue))
        if view is None or reader is None or view.is_hidden or view.first_offset is None:
            return None
        if len(self._by_name) >= READERS_MAX or view.state is not self._by_name_of:
            # Otherwise readers that stop keep old versions in memory.
            self._by_name, self._by_name_of = (
                {},
                view.state,
            )
        # The reader's own strings are the keys, so that those of this request are not kept in memory.
        found = self._by_name[reader.name[1], request.queue_id, reader.name[0]] = view, reader
        return found

    def _forget(self, reader: Reader) -> None:
        group, topic, queue_id = reader.name
        self._by_name.pop((topic, queue_id, group), None)

    # -- reading memory ---------------------------------------------------------------------------------------

    def _read(
        self, reader: Reader, view: QueueView, request: PullRequest, time_s: float
    ) -> PullResult | None:
        """Answer a pull from the rows that the reader has buffered, and from the run behind them if the pull reaches
        into it and its first block is in memory. Returns None if memory does not have all of the answer."""
        buffered = reader.buffered
        rows = buffered.ahead or buffered.rows
        if rows is None or not _may_answer(rows, buffered, view, request.offset):
            return None
        source = _Rows(rows, buffered.blocks, None)
        limits = _limits(request)
        body: list[memoryview] = []
        part = None
        if request.offset < rows.end and rows.row_of(request.offset) < len(rows):
            part = take(rows.sizes, rows.ends, rows.row_of(request.offset), limits, None)
        if part is None or not _is_whole(rows, part, view):
            if reader.window.position != request.offset or view.existing(request.offset) != request.offset:
                return None
            if part is not None:
                found = self._bodies(source, part)
                if found is None:
                    return None
                body = found[0]
                limits = Limits(limits.rows - part.row_count, limits.bytes - part.bytes, False)
            next_rows = self._next_run(view, rows.end, limits, buffered.blocks)
            if next_rows is None:
                return None
            source, at = next_rows, rows.end
            rows = source.rows
            part = take(rows.sizes, rows.ends, rows.row_of(at), limits, None)
            if rows.end > view.max_offset or not part.row_count or not _is_whole(rows, part, view):
                return None
        found = self._bodies(source, part)
        if found is None:
            return None
        further, last_block = found
        result = PullResult(
            _FOUND,
            rows.end_offset(part.end_row),
            view.first_offset or 0,
            view.max_offset,
            [*body, *further],
            request.count - limits.rows + part.row_count,
        )
        self._counters.pulls += 1
        if buffered.rows is not None and last_block is buffered.blocks.get(_block_id(buffered.rows)):
            reader.slice(view)
            self._stepped(reader, view, request, result, time_s)
        else:
            assert isinstance(part.rows, slice)  # nothing is filtered out
            last = rows.in_block_of(part.rows.stop - 1)
            after = BufferedRows(
                {_block_id(last): last_block},
                last,
                rows if rows.end > last.end else None,
                history=view.state.cursor.history,
            )
            self._moved(reader, view, request, result, after, source.bytes_per_offset, time_s)
        return result

    def _next_run(
        self, view: QueueView, at: int, limits: Limits, buffered: Mapping[BlockId, Block]
    ) -> _Rows | None:
        """The rows of the run that begins at offset ``at``, and its first block. None if the object's tail or that
        block is not in memory."""
        runs = self._catalog.cached_runs_of(view, at)
        number = -1 if runs is None or at >= view.max_offset or view.existing(at) != at else runs.at(at)
        if runs is None or number < 0:
            return None
        place = runs.place(number)
        index = None
        if place.kind == RunKind.PLAIN:
            index = self._source.index_in_memory(place.object_key, place.ordinal)
        if index is None:
            return None
        try:
            place.check(index)
            row = at - place.base
            block_id = index.key, index.block_span(place, row, row + 1).first_block
            block = buffered.get(block_id)
            if block is None:
                block = self._source.block_in_memory(*block_id)
            if block is None:
                return None
            rows = rows_of_run(
                index, place, at, count=limits.rows + ROWS_AHEAD, max_bytes=max(limits.bytes, BYTES_AHEAD)
            )
        except CorruptionError:
            return None  # the pull then reads the object again, and reports the damage
        return _Rows(rows, {block_id: block}, place.bytes_per_offset)

    def _bodies(self, source: _Rows, part: TakenRows) -> tuple[list[memoryview], Block] | None:
        """The bytes of the records of ``part``, the rows taken of ``source``, and the block that holds the last one.
        None if a block is not in memory."""
        rows, taken = source.rows, part.rows
        assert isinstance(taken, slice)  # nothing is filtered out
        blocks: list[Block] = []
        for number in rows.blocks_of(taken):
            block = source.blocks.get((rows.object_key, number))
            if block is None:
                block = self._source.block_in_memory(rows.object_key, number)
            if block is None or len(block) != rows.block_raw_bytes(number):
                return None
            blocks.append(block)
        return rows.bodies(taken, blocks), blocks[-1]

    # -- after a pull -----------------------------------------------------------------------------------------

    def _stepped(
        self, reader: Reader, view: QueueView, request: PullRequest, result: PullResult, time_s: float
    ) -> None:
        """Count a pull that ended inside the block that the reader has buffered, and prefetch what the reader needs
        next."""
        self._counters.from_memory += 1
        self._counters.messages += result.records
        self._prefetcher.stepped(reader, request.offset, result.next_offset, time_s)
        self._readers.used(reader, time_s)
        self.prefetch(reader, view, time_s, None)
        self.sweep(time_s)

    def _moved(
        self,
        reader: Reader,
        view: QueueView,
        request: PullRequest,
        result: PullResult,
        after: BufferedRows,
        bytes_per_offset: float | None,
        time_s: float,
    ) -> None:
        """Count a pull that ended in another block than the buffered one: buffer the rows of that block (``after``),
        and prefetch what the reader needs next."""
        self._counters.from_memory += 1
        self._counters.messages += result.records
        self._readers.buffer(reader, after)
        self._readers.used(reader, time_s)
        rows = after.rows
        assert rows is not None
        progress = PullProgress(request.offset, result.next_offset, rows.end, rows.block_bytes[-1], time_s)
        self._prefetcher.pulled(reader, progress, bytes_per_offset)
        self.prefetch(reader, view, time_s, None)
        self.sweep(time_s)

    def prefetch(
        self, reader: Reader, view: QueueView, time_s: float, message_filter: MessageFilter | None
    ) -> None:
        """Prefetch for the reader if its window is low."""
        if reader.window.is_low(time_s):
            self._prefetcher.fetch_ahead(reader, view, message_filter, inline=message_filter is None)

    def sweep(self, time_s: float) -> None:
        """Drop rows of readers that stopped, at intervals."""
        if self._prefetcher.sweep(time_s):
            self._readers.drop_unused_since(time_s - self._unread_s)


def _rows(reader: Reader, view: QueueView, request: PullRequest) -> PullResult | None:
    """Answer a pull, with the columns of its messages, from the one block that the reader has buffered; None if that
    does not hold all of the answer."""
    buffered = reader.buffered
    rows = buffered.rows
    if rows is None or request.offset >= rows.end or not _may_answer(rows, buffered, view, request.offset):
        return None
    if rows.row_of(request.offset) == len(rows):
        return None
    part = take(rows.sizes, rows.ends, rows.row_of(request.offset), _limits(request), None)
    if not _is_whole(rows, part, view):
        return None
    batch = rows.batch(part.rows, (buffered.blocks[rows.object_key, rows.first_block],))
    return PullResult(
        _FOUND,
        rows.end_offset(part.end_row),
        view.first_offset or 0,
        view.max_offset,
        (),
        part.row_count,
        batch,
        None,
        view.state.version,
    )


def _limits(request: PullRequest) -> Limits:
    return Limits(request.count, request.max_bytes, True)


def _block_id(rows: RunRows) -> BlockId:
    return rows.object_key, rows.first_block


def _may_answer(rows: RunRows, buffered: BufferedRows, view: QueueView, offset: int) -> bool:
    """Whether ``rows`` reach ``offset`` and are all visible at this version of the queue."""
    return (
        rows.base <= offset <= rows.end <= view.max_offset
        and view.min_offset <= offset
        and buffered.history == view.state.cursor.history
    )


def _is_whole(rows: RunRows, part: TakenRows, view: QueueView) -> bool:
    """Whether ``part`` of ``rows`` ends with a limit or the queue."""
    return part.is_full or rows.end_offset(part.end_row) >= view.max_offset
