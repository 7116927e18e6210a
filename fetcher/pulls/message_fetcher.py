"""TieredMessageFetcher: pulls from an archive, with a RocketMQ broker's statuses and offsets.

A pull reads status, bounds and records from one catalog version. Only recorded gaps, and LMQ rows whose parents are
lost, move the next offset past missing messages. If an object is missing, the pull is repeated once at the newest
catalog version; where it is missing still or damaged, the records before the damage are read (``ReadableRows``). Does
not own rows (row_reader.py), readers' state (readers.py), pulls answered from memory (memory_pull.py), nor prefetch
(prefetcher.py). Coroutines of the core (waiting.py): they never wait if memory has all.
"""

import types
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fetcher.blocks.budget import ByteBudget
from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import Executor, Turn, Wait
from fetcher.prefetch.prefetch_window import PullProgress
from fetcher.prefetch.prefetcher import Prefetcher, RangeFetcher, window_limits
from fetcher.prefetch.readers import Reader, ReaderKey, Readers
from fetcher.pulls.memory_pull import FetcherCounters, MemoryPulls
from fetcher.pulls.neighbours import Neighbours
from fetcher.rows.block_fetch import BlockFetch, BlockSource, BufferedRows
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from fetcher.rows.row_reader import ROWS_AHEAD, ReadRows, RowReader, chosen_rows
from fetcher.rows.run_list import QueueView, RunPlace, status_at
from fetcher.rows.run_rows import rows_of_run
from tiered.archive.unreadable import UnreadableMessagesError, UnreadableRange, UnreadableRanges
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import CorruptionError, NotFoundError, UnavailableError
from tiered.model.tables import RunKind
from tiered.settings.sections import PrefetchSettings


@dataclass(frozen=True)
class ReadableRows:
    """Reads with ``rows`` what other reads failed at. ``unreadable``: what nothing could be read of."""

    source: BlockSource
    catalog: CatalogView
    rows: RowReader
    unreadable: UnreadableRanges

    async def read(self, request: PullRequest, view: QueueView, failure: CorruptionError) -> ReadRows:
        """The first records of ``request``, which failed with ``failure``. Raises UnreadableMessagesError when the
        first one cannot be read, ``failure`` when no object should hold it, or what the store raises."""
        at = view.existing(request.offset)
        runs = await self.catalog.runs_of(view, at)
        number = runs.at(at)
        if at >= view.max_offset or number < 0:
            raise failure
        place = runs.place(number)
        end = place.end
        why: CorruptionError | NotFoundError = failure
        try:
            return await self._rows(request, view, end)
        except (CorruptionError, NotFoundError) as error:
            why = error
        try:
            end = min(end, await self._block_end(place, at))
            return await self._rows(request, view, end)
        except (CorruptionError, NotFoundError) as error:
            why = error
        queue = view.queue
        found = UnreadableRange(*queue, at, end, place.object_key, why.message, runs.min_phys(number))
        self.unreadable.note(found)
        raise UnreadableMessagesError.of(found) from failure

    async def _rows(self, request: PullRequest, view: QueueView, end: int) -> ReadRows:
        return await self.rows.read(view, request, Priority.USER, BufferedRows(), end=end)

    async def _block_end(self, place: RunPlace, at: int) -> int:
        """One past the last offset of the block that holds ``at``; of LMQs, whose blocks are other queues', ``at``."""
        if place.kind == RunKind.LMQ:
            return at + 1
        (index,) = await BlockFetch(self.source, Priority.USER, BufferedRows()).indexes([place])
        return rows_of_run(index, place, at).end


T = TypeVar("T")

UNREAD_MS = 180_000

_MAY_BE_NEWER = frozenset(
    {
        PullStatus.NO_MATCHED_LOGIC_QUEUE,
        PullStatus.NO_MESSAGE_IN_QUEUE,
        PullStatus.OFFSET_OVERFLOW_ONE,
        PullStatus.OFFSET_OVERFLOW_BADLY,
    }
)
"""Statuses a newer catalog version may change to FOUND."""
_HARMLESS = frozenset({PullStatus.NO_MESSAGE_IN_QUEUE, PullStatus.OFFSET_OVERFLOW_ONE})
"""Statuses after which a client only pulls again: returned while the catalog cannot be read."""


class TieredMessageFetcher:
    """Reads queues of one archive. Thread-safe. The caller closes ``source`` and ``catalog``.

    ``executor`` runs steps of prefetch; ``unread_ms``: when the block source drops unread
    blocks (fetch.unread_expiry_ms). ``budget``: reserves the readers' own memory.
    """

    def __init__(
        self,
        source: BlockSource,
        catalog: CatalogView,
        settings: PrefetchSettings,
        *,
        executor: Executor,
        clock: Clock,
        unread_ms: int = UNREAD_MS,
        budget: ByteBudget | None = None,
    ) -> None:
        """Makes what all pulls share: row readers, prefetcher, readers and the ranges that could not be read. Without
        ``budget``, small queues are not read together."""
        self.catalog = catalog
        self.counters = FetcherCounters()
        self._clock = clock
        self._unread_s = unread_ms / 1000
        self._rows = RowReader(source, catalog)
        self.unreadable = UnreadableRanges()
        """What pulls could not read, until one can."""
        self._readable = ReadableRows(source, catalog, self._rows, self.unreadable)
        self.readers = Readers(window_limits(settings, self._unread_s), settings.buffered_bytes, budget)
        self._neighbours = None if budget is None else Neighbours(source, catalog, budget)
        self._ranges = RangeFetcher(source, catalog, self._rows)
        self.prefetcher = Prefetcher(
            self._ranges,
            catalog,
            settings,
            unread_s=self._unread_s,
            executor=executor,
            clock=clock,
        )
        self._memory = MemoryPulls(
            source,
            catalog,
            self.readers,
            self.prefetcher,
            self.counters,
            clock=clock,
            unread_s=self._unread_s,
        )
        self.pull_from_memory = self._memory.pull
        """The result of an unfiltered ``pull`` without columns, if memory has all of it; None: call ``pull``."""

    def close(self) -> None:
        """Stop prefetch. Idempotent."""
        self.prefetcher.close()

    # -- pulling ----------------------------------------------------------------------------------------------

    async def pull(self, request: PullRequest) -> PullResult:
        """The records from ``request.offset`` on; a first record above ``max_bytes`` comes alone. Only the end of the
        queue, a gap, a filter without a match, or damage behind them makes it fewer than requested.

        Raises UnreadableMessagesError when the first record is in an object that is damaged, or that the newest catalog
        names but the store does not have; CorruptionError for an offset neither stored nor a recorded gap; or what the
        store raises.
        """
        if request.count < 1 or request.max_bytes < 0:
            raise ValueError(
                f"count must be 1 or more and max_bytes 0 or more, not {request.count} and {request.max_bytes}"
            )
        catalog = self.catalog
        catalog.refresh_if_due()
        self.counters.pulls += 1
        if request.filter is None:
            result = self._memory.pull_rows(request)
            if result is not None:
                return result
        name = f"{request.topic} queue {request.queue_id}"
        try:
            result = await catalog.read(catalog.state, partial(self._attempt, request), name=name)
        except CorruptionError as error:
            result = await self._around_damage(request, error)
        if self.unreadable and (view := catalog.view(catalog.state, _name(request))) is not None:
            self.unreadable.forget_read(view.queue, request.offset, result.next_offset)
        return result

    async def _around_damage(self, request: PullRequest, failure: CorruptionError) -> PullResult:
        view = self.catalog.view(self.catalog.state, _name(request))
        if view is None:
            raise failure
        read = await self._readable.read(request, view, failure)
        self.counters.messages += len(read.batch)
        return _result(view, read)

    async def _attempt(self, request: PullRequest, state: CatalogState) -> PullResult:
        """Answer a pull at catalog version ``state``, or at the newest one if messages archived since could change the
        status. Raises what reading raises, and NotFoundError for an object that does not exist."""
        name = _name(request)
        view = self.catalog.view(state, name)
        status, next_offset = status_at(view, request.offset)
        if status in _MAY_BE_NEWER:
            state = await self._newer(state, status)
            view = self.catalog.view(state, name)
            status, next_offset = status_at(view, request.offset)
        if view is not None and view.first_offset is None:
            view.first_offset = await self._rows.first_offset(view)
        if view is not None and status is PullStatus.FOUND:
            return await self._read(request, view)
        bounds = (0, 0) if view is None else (view.first_offset or 0, view.max_offset)
        return PullResult(status, next_offset, *bounds, version=state.version)

    async def _newer(self, state: CatalogState, status: PullStatus) -> CatalogState:
        """The newest catalog version; ``state`` if it cannot be read and ``status`` does no harm if it is out of
        date."""
        try:
            return await self.catalog.recent()
        except UnavailableError:
            if status not in _HARMLESS:
                raise
            return state

    async def _read(self, request: PullRequest, view: QueueView) -> PullResult:
        """Read from an offset that the queue has. The messages come from those that were read together with other small
        queues, from the rows that the reader has buffered, from prefetched blocks, or from the store. What the reader's
        next pull can use is kept."""
        began_s = self._clock.monotonic_s()
        offset, key = request.offset, ReaderKey(request.group, view.queue)
        until = 0 if request.until is None else min(request.until, view.max_offset)
        # A reader whose first pull takes the whole rest of the queue has no next pull: nothing is kept for it.
        is_new = self.readers.find(key) is None
        is_rest = is_new and 0 < until - offset <= request.count
        is_pulled = is_new and request.until is None and request.filter is None
        if (is_pulled or (is_rest and until == view.max_offset)) and self._neighbours is not None:
            batch = await self._neighbours.rest_of(view, offset, request.count if is_pulled else None)
            if batch is not None and batch.record_bytes <= request.max_bytes:
                return _result(view, await chosen_rows(batch, request))
        reader = None if is_rest else self.readers.open(key, began_s)
        ready, buffered, rows_ahead = None, BufferedRows(), 0
        if reader is not None:
            if reader.buffered.history == view.state.cursor.history:
                buffered = reader.buffered
            ready = self.prefetcher.ready(reader, offset)
            is_sequential = await self._prefetched(reader, request, view, until)
            # A reader whose buffered rows were dropped gets nothing, because memory is short.
            has_room = is_sequential and buffered.rows is not None and request.until is None
            rows_ahead = ROWS_AHEAD if has_room else 0
        reading = self._rows.read(view, request, Priority.USER, buffered, rows_ahead=rows_ahead)
        read, waits = await counting_waits(reading)
        time_s = self._clock.monotonic_s()
        if waits:
            self.counters.waited += 1
        self.counters.messages += len(read.batch)
        if reader is None and read.next_offset < until:
            # If the rest did not fit into this result, there is a next pull.
            reader = self.readers.open(key, began_s)
        if reader is not None:
            if waits and ready is not None:
                self.prefetcher.waited(reader, ready, read.next_offset)
            self._keep(reader, view, request, read, time_s)
        self._memory.sweep(time_s)
        return _result(view, read)

    async def _prefetched(self, reader: Reader, request: PullRequest, view: QueueView, until: int) -> bool:
        """Before a pull is read, start to prefetch what the reader needs next. Returns whether the pull continues where
        the reader's last one ended."""
        prefetcher, offset = self.prefetcher, request.offset
        if reader.window.position < 0 and until - offset > request.count:
            # The first block then shares a request with those behind it.
            await self._ranges.open(view, offset)
            runs = await self.catalog.runs_of(view, offset)
            prefetcher.announced(reader, offset, until, runs.bytes_per_offset(offset))
        is_sequential = reader.window.position == offset
        if is_sequential:
            prefetcher.fetch_ahead(reader, view, request.filter, inline=True)
        return is_sequential

    def _keep(
        self, reader: Reader, view: QueueView, request: PullRequest, read: ReadRows, time_s: float
    ) -> None:
        """After a pull, keep the rows and blocks that the reader's next pull can use, and tell the prefetcher how far
        the reader has come, so that it fetches what follows."""
        offset = request.offset
        self.readers.buffer(reader, read.buffered)
        rows = read.buffered.rows
        block_bytes = read.block_bytes if rows is None else rows.block_bytes[-1]
        per_offset = read.bytes_per_offset
        if per_offset == 0 and len(read.batch):  # unknown: as in the messages that were read
            per_offset = read.batch.record_bytes / (read.next_offset - offset)
        progress = PullProgress(offset, read.next_offset, read.covered, block_bytes, time_s)
        self.prefetcher.pulled(reader, progress, per_offset or None)
        self._memory.prefetch(reader, view, time_s, request.filter)


def _name(request: PullRequest) -> tuple[str, int, int | None]:
    return request.topic, request.queue_id, request.generation


def _result(view: QueueView, read: ReadRows) -> PullResult:
    """The result of a pull with the messages that were read, and the queue's bounds at the catalog version of
    ``view``."""
    return PullResult(
        PullStatus.FOUND if len(read.batch) else PullStatus.NO_MATCHED_MESSAGE,
        read.next_offset,
        view.first_offset or view.min_offset,
        view.max_offset,
        (),
        len(read.batch),
        read.batch,
        read.gap,
        view.state.version,
    )


@types.coroutine
def counting_waits(coroutine: Coroutine[Any, Any, T]) -> Generator[Wait[Any], None, tuple[T, int]]:
    """The result of ``coroutine``, and how often it waited for data."""
    waits = 0
    try:
        while True:
            try:
                wait = coroutine.send(None)
            except StopIteration as stop:
                return stop.value, waits
            waits += not isinstance(wait, Turn)
            yield wait
    finally:
        coroutine.close()
