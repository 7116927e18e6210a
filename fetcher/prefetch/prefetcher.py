"""Prefetches for sequential readers, within a shared memory bound.

Each reader's window has a size (prefetch_window.py), limited by the room left for all: many slow readers share it
evenly, and none takes everything (Choudhury and Hahne's dynamic threshold). Blocks go to the cache of the block source;
only counts are kept here. Owns when prefetch starts, its bound, its errors, and the fetch of a range: the catalog and
the objects' tables name the blocks of plain runs, so no row is decoded; a filter by tag, rows that span several offsets
and LMQs need columns, and are read as by a pull.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from fetcher.blocks.block_cache import DroppedUnread, DropReason
from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import Background, Executor, gather
from fetcher.prefetch.prefetch_window import (
    PrefetchRange,
    PrefetchWindow,
    PullProgress,
    RunEnds,
    WindowLimits,
)
from fetcher.prefetch.readers import Reader
from fetcher.rows.block_fetch import BlockFetch, BlockId, BlockSource, BufferedRows
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.pull import PullRequest
from fetcher.rows.row_reader import RUNS_AT_ONCE, RowReader
from fetcher.rows.run_list import QueueView, RunList, RunPlace
from fetcher.rows.run_rows import NO_END
from fetcher.rows.tag_filter import MessageFilter
from tiered.clock import Clock
from tiered.errors import TieredError
from tiered.formats.segment_index import BlockSpan
from tiered.model.tables import RunKind
from tiered.settings.sections import PrefetchSettings


class FetchedBlocks(NamedTuple):
    """Blocks now in memory, up to offset ``covered``, with ``block_bytes`` raw bytes."""

    covered: int
    block_bytes: int
    blocks: tuple[BlockId, ...]


def run_ends(runs: RunList, offset: int) -> RunEnds | None:
    """Ends of the run that holds ``offset``; None where there is none."""
    number = runs.at(offset)
    if number < 0:
        return None
    return RunEnds(*runs.bounds(number))


class RangeFetcher:
    """Fetches ranges of queues at prefetch priority. Stateless: threads may share it."""

    def __init__(self, source: BlockSource, catalog: CatalogView, rows: RowReader) -> None:
        self._source = source
        self._catalog = catalog
        self._rows = rows

    async def read(
        self, view: QueueView, begin: int, end: int, message_filter: MessageFilter | None
    ) -> FetchedBlocks:
        """Load the blocks with the messages at offsets [begin, end) into the block cache; stop in front of a gap. Only
        blocks with messages that match ``message_filter`` are loaded, if it is given. Raises what RowReader.read
        raises."""
        if message_filter is None:
            at = view.existing(begin)
            if at >= end:
                return FetchedBlocks(end, 0, ())
            places = await self._places(view, at, end)
            if all(place.kind == RunKind.PLAIN for place in places):
                return await self._plain(places, at, min(end, places[-1].end))
        topic, queue_id, _ = view.queue
        request = PullRequest(topic, queue_id, begin, end - begin, NO_END, filter=message_filter)
        read = await self._rows.read(
            view, request, Priority.PREFETCH, BufferedRows(), end=end, is_prefetch=True
        )
        return FetchedBlocks(read.covered, read.block_bytes, read.blocks)

    async def _places(self, view: QueueView, begin: int, end: int) -> list[RunPlace]:
        """Where the messages at offsets [begin, end) lie: at most RUNS_AT_ONCE consecutive runs (rows of one object),
        which may stop in front of a gap."""
        places: list[RunPlace] = []
        at = begin
        while at < end and len(places) < RUNS_AT_ONCE and view.existing(at) == at:
            runs = await self._catalog.runs_of(view, at)
            places += runs.places(at, end=end, bytes_max=NO_END, runs_max=RUNS_AT_ONCE - len(places))
            at = places[-1].end
        return places

    async def open(self, view: QueueView, offset: int) -> None:
        """Load the tail of the object that holds ``offset``: then ``read`` requests its blocks at once."""
        at = view.existing(offset)
        if at < view.max_offset:
            runs = await self._catalog.runs_of(view, at)
            places = runs.places(at, end=at + 1, bytes_max=0, runs_max=1)
            await BlockFetch(self._source, Priority.USER, BufferedRows()).indexes(places)

    async def _plain(self, places: list[RunPlace], begin: int, end: int) -> FetchedBlocks:
        """Fetch concurrently the blocks of the runs ``places`` that hold offsets [begin, end). The result covers all
        offsets up to the end of the last block."""
        if len(places) == 1:
            found = [await self._place(places[0], begin, end)]
        else:
            found = await gather(self._place(place, begin, end) for place in places)
        blocks = [
            (place.object_key, number)
            for place, span in zip(places, found, strict=True)
            for number in range(span.first_block, span.end_block)
        ]
        covered = places[-1].base + found[-1].end_row
        return FetchedBlocks(covered, sum(span.raw_bytes for span in found), tuple(blocks))

    async def _place(self, place: RunPlace, begin: int, end: int) -> BlockSpan:
        """Fetch the blocks of one run that hold offsets [begin, end); returns which these are. Runs are fetched
        independently, so that none waits for another object's tail."""
        (index,) = await BlockFetch(self._source, Priority.PREFETCH, BufferedRows()).indexes([place])
        first, last = max(0, begin - place.base), min(place.rows, end - place.base)
        span = index.block_span(place, first, last)
        numbers = range(span.first_block, span.end_block)
        await self._source.blocks_at(index, place.ordinal, numbers, Priority.PREFETCH)
        return span


SWEEPS_PER_EXPIRY = 8


def window_limits(settings: PrefetchSettings, unread_s: float) -> WindowLimits:
    """The limits of one reader's prefetch window, by the settings. ``unread_s``: seconds after which the block cache
    drops blocks that no reader has used."""
    return WindowLimits(
        settings.window_min_messages,
        min(settings.window_max_bytes, settings.memory_bytes),
        unread_s,
        settings.hold_off_ms / 1000,
        min(settings.window_first_bytes, settings.window_max_bytes, settings.memory_bytes),
    )


@dataclass
class PrefetchCounters:
    """Sums since the start. Bytes are raw."""

    fetches: int = 0
    fetched_bytes: int = 0
    expired_bytes: int = 0
    evicted: int = 0
    failures: int = 0


class WindowStatus(NamedTuple):
    """The window of one reader. ``size``: offsets to be ahead by; ``fetched``: offsets ahead of its position that were
    fetched or requested; ``unread_bytes``: raw."""

    group: str
    topic: str
    queue_id: int
    position: int
    size: int
    fetched: int
    unread_bytes: int


class Prefetcher:
    """Prefetches for all readers of a fetcher. Thread-safe; never blocks."""

    def __init__(
        self,
        fetcher: RangeFetcher,
        catalog: CatalogView,
        settings: PrefetchSettings,
        *,
        unread_s: float,
        executor: Executor,
        clock: Clock,
    ) -> None:
        """``fetcher`` reads ranges into the block cache, in steps that ``executor`` runs. ``unread_s``: seconds after
        which that cache drops blocks that no reader has used."""
        self._fetcher = fetcher
        self._catalog = catalog
        self._settings = settings
        self._clock = clock
        self._background = Background(executor)
        self._lock = threading.Lock()
        self._ahead: set[Reader] = set()  # those with prefetched ranges
        self._sweep_s = unread_s / SWEEPS_PER_EXPIRY
        self._swept_s = clock.monotonic_s()
        self.unread_bytes = 0
        """Decompressed bytes that are prefetched or being prefetched for all readers, and not read yet."""
        self.counters = PrefetchCounters()

    def windows(self) -> list[WindowStatus]:
        """The windows of readers with prefetched ranges, the largest first."""
        with self._lock:
            found = [
                WindowStatus(
                    *reader.name,
                    window.position,
                    window.size,
                    max(0, window.fetched - window.position),
                    window.unread_bytes,
                )
                for reader in self._ahead
                for window in (reader.window,)
            ]
        return sorted(found, key=lambda window: (-window.unread_bytes, window[:3]))

    def pulled(self, reader: Reader, pull: PullProgress, bytes_per_offset: float | None = None) -> None:
        """Note in the reader's window that its pull ended, and how far. ``bytes_per_offset``: the average size of the
        queue's messages, if known."""
        window = reader.window
        with self._lock:
            before = window.unread_bytes if window.ranges else 0
            if bytes_per_offset is not None:
                window.bytes_per_offset = bytes_per_offset
            window.pulled(pull)
            self._account(reader, before)

    def stepped(self, reader: Reader, offset: int, next_offset: int, time_s: float) -> None:
        """A reader's pull ended within its buffered block."""
        window = reader.window
        with self._lock:
            is_within_block = window.stepped(offset, next_offset, time_s)
        if not is_within_block:
            self.pulled(reader, PullProgress(offset, next_offset, window.covered, 0, time_s))

    def announced(self, reader: Reader, offset: int, until: int, bytes_per_offset: float) -> None:
        """A new reader announces that it reads [offset, until) completely."""
        with self._changing(reader) as window:
            window.bytes_per_offset = bytes_per_offset
            window.announced(offset, until, self._clock.monotonic_s())

    def ready(self, reader: Reader, offset: int) -> PrefetchRange | None:
        """The prefetched range that holds ``offset``: needed after a wait."""
        with self._lock:
            return reader.window.ready(offset)

    def waited(self, reader: Reader, ready: PrefetchRange, next_offset: int) -> None:
        """A pull waited although ``ready`` had been prefetched."""
        with self._changing(reader) as window:
            is_lost = window.waited(ready, next_offset, self._clock.monotonic_s())
        if is_lost:
            self.counters.evicted += 1

    def fetch_ahead(
        self, reader: Reader, view: QueueView, message_filter: MessageFilter | None, *, inline: bool
    ) -> None:
        """Start to prefetch what the reader's window asks for, if anything. With ``inline`` the requests are sent
        before this returns, so that a pull of the same messages waits for them instead of sending its own."""
        window = reader.window
        time_s = self._clock.monotonic_s()
        if not self._settings.enabled or not window.is_low(time_s):
            return
        if max(window.fetched, window.position) >= view.max_offset:
            return  # everything up to the queue's end is prefetched: no lock is needed to see that
        with self._lock:
            before = window.unread_bytes
            room_bytes = self._settings.memory_bytes - self.unread_bytes - before
            span = window.wanted(view.max_offset, room_bytes)
            if span is None:
                return
            begin, end = span
            runs = self._catalog.cached_runs_of(view, end - 1)
            last = None if runs is None else run_ends(runs, end - 1)
            if last is not None:
                end = min(window.aligned(begin, end, last, room_bytes), view.max_offset)
            part = window.started(begin, end, time_s)
            self._account(reader, before)
        self._background.start(self._fetch(reader, view, part, message_filter), inline=inline)

    async def _fetch(
        self, reader: Reader, view: QueueView, part: PrefetchRange, message_filter: MessageFilter | None
    ) -> None:
        """Prefetch one range and note in the reader's window up to which offset it reaches. A TieredError ends only
        this prefetch, because the pull that comes to the range reads it again."""
        begin, end = part.begin, part.end
        try:
            read = await self._fetcher.read(view, begin, end, message_filter)
        except TieredError:
            # The error is not hidden: a pull of these offsets meets it as well, if it persists.
            self._failed(reader, part)
            return
        except BaseException:
            self._failed(reader, part)
            raise
        with self._changing(reader) as window:
            part.blocks = frozenset(read.blocks)
            window.finished(part, read.covered, read.block_bytes, self._clock.monotonic_s())
            self.counters.fetches += 1
            self.counters.fetched_bytes += read.block_bytes

    def _failed(self, reader: Reader, part: PrefetchRange) -> None:
        with self._changing(reader) as window:
            window.failed(part, self._clock.monotonic_s())
            self.counters.failures += 1

    def dropped(self, gone: Sequence[DroppedUnread]) -> None:
        """The block cache dropped prefetched blocks that no reader had used: halve the windows of the readers for which
        they had been prefetched, and count them by the reason."""
        keys = {tuple(drop.key): drop.reason for drop in gone}
        time_s = self._clock.monotonic_s()
        with self._lock:
            for reader in list(self._ahead):
                window = reader.window
                for part in [*window.ranges]:
                    key = next((key for key in keys if key in part.blocks), None)
                    if key is None:
                        continue
                    before = window.unread_bytes
                    lost_bytes = part.bytes_from(window.read_end)
                    window.lost(part, time_s)
                    self._account(reader, before)
                    if keys[key] is DropReason.EXPIRED:
                        self.counters.expired_bytes += lost_bytes
                    else:
                        self.counters.evicted += 1

    def sweep(self, time_s: float) -> bool:
        """At intervals, let the windows of all readers forget prefetched ranges that were not read in time. Returns
        whether it was time to do so."""
        if time_s - self._swept_s < self._sweep_s:
            return False
        with self._lock:
            self._swept_s = time_s
            for reader in list(self._ahead):
                before = reader.window.unread_bytes
                self.counters.expired_bytes += reader.window.expire(time_s)
                self._account(reader, before)
        return True

    @contextmanager
    def _changing(self, reader: Reader) -> Iterator[PrefetchWindow]:
        """The reader's window, to be changed with the lock held."""
        with self._lock:
            before_bytes = reader.window.unread_bytes
            yield reader.window
            self._account(reader, before_bytes)

    def _account(self, reader: Reader, before_bytes: int) -> None:
        """Add to ``unread_bytes`` what a change of the reader's window has added to its own ``unread_bytes``, which
        were ``before_bytes``. The caller holds the lock."""
        window: PrefetchWindow = reader.window
        if window.ranges:
            self._ahead.add(reader)
            self.unread_bytes += window.unread_bytes - before_bytes
        else:
            self._ahead.discard(reader)
            self.unread_bytes -= before_bytes

    def close(self) -> None:
        """Stop prefetch."""
        self._background.close()
