"""TieredMessageFetcher: pulls from an archive, answered as a RocketMQ broker answers them (seed 3.5).

A pull takes one catalog version and answers status, bounds and records from it. Only recorded gaps, and light rows
whose parents are gone, move the next offset past what is not there. An object that is not found is looked up in the
newest catalog once before it counts as missing.

Owns the order of these steps. Does not own rows (row_reader.py), readers' state (readers.py), pulls they answer alone
(memory_pull.py), nor reading ahead (prefetcher.py). Coroutines of the core (waiting.py): a pull that finds all in
memory
never waits.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from fetcher.blocks.budget import ByteBudget
from fetcher.io.request_scheduler import Lane
from fetcher.io.waiting import Executor, Wait
from fetcher.prefetch.event_log import EventKind, EventLog
from fetcher.prefetch.prefetch_range import Pulled
from fetcher.prefetch.prefetcher import Prefetcher, window_limits
from fetcher.prefetch.range_fetch import AheadReader
from fetcher.prefetch.readers import InHand, ReaderKey, Readers
from fetcher.pulls.memory_pull import FetcherCounters, HandPulls
from fetcher.rows.batch import EMPTY_BATCH, GetResult, GetStatus
from fetcher.rows.block_fetch import BlockSource, Held
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.queue_view import QueueView, standing
from fetcher.rows.read_plan import Wish
from fetcher.rows.row_reader import ROWS_AHEAD, RowReader
from fetcher.rows.tag_filter import MessageFilter
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError, UnavailableError
from tiered.settings.sections import PrefetchSettings

__all__ = ["FetcherCounters", "MessageFilter", "TieredMessageFetcher"]

T = TypeVar("T")

UNREAD_MS = 180_000

_MAY_BE_NEWER = frozenset({
    GetStatus.NO_MATCHED_LOGIC_QUEUE, GetStatus.NO_MESSAGE_IN_QUEUE, GetStatus.OFFSET_OVERFLOW_ONE,
    GetStatus.OFFSET_OVERFLOW_BADLY,
})  # fmt: skip
"""Statuses a newer catalog version may turn into FOUND."""
_HARMLESS = frozenset({GetStatus.NO_MESSAGE_IN_QUEUE, GetStatus.OFFSET_OVERFLOW_ONE})
"""Those of them that make a client only ask again: given while the catalog cannot be read."""


@dataclass(frozen=True, slots=True)
class _Pull:
    """What was asked."""

    topic: str
    queue_id: int
    offset: int
    count: int
    max_bytes: int
    filter: MessageFilter | None
    group: str
    generation: int | None
    until: int | None

    @property
    def name(self) -> tuple[str, int, int | None]:
        return self.topic, self.queue_id, self.generation


class TieredMessageFetcher:
    """Reads queues of one archive. Thread-safe. ``source`` and ``catalog`` are the caller's to close.

    ``executor`` runs steps of reading ahead; ``clock_s`` is monotonic; ``unread_ms``: when the block source drops
    blocks that nobody has read (fetch.unread_expiry_ms). ``budget``: where readers' own memory is set aside.
    """

    def __init__(
        self,
        source: BlockSource,
        catalog: CatalogView,
        settings: PrefetchSettings,
        *,
        executor: Executor,
        clock_s: Callable[[], float],
        unread_ms: int = UNREAD_MS,
        log: EventLog | None = None,
        budget: ByteBudget | None = None,
    ) -> None:
        self.catalog = catalog
        self.log = log or EventLog(settings.events, clock_s=clock_s)
        self.counters = FetcherCounters()
        self._clock_s = clock_s
        self._unread_s = unread_ms / 1000
        self._rows = RowReader(source, catalog)
        self.readers = Readers(window_limits(settings, self._unread_s), settings.in_hand_bytes, budget)
        self._ahead = AheadReader(source, catalog, self._rows)
        self.prefetcher = Prefetcher(
            self._ahead, catalog, settings,
            unread_s=self._unread_s, executor=executor, clock_s=clock_s, log=self.log,
        )  # fmt: skip
        self._hand = HandPulls(
            source,
            catalog,
            self.readers,
            self.prefetcher,
            self.counters,
            clock_s=clock_s,
            unread_s=self._unread_s,
        )

    def __repr__(self) -> str:
        return f"TieredMessageFetcher({self.catalog!r}, {self.readers!r}, {self.prefetcher!r})"

    def close(self) -> None:
        """Stop reading ahead. Idempotent."""
        self.prefetcher.close()

    # -- pulling ----------------------------------------------------------------------------------------------

    async def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        count: int,
        max_bytes: int,
        filter: MessageFilter | None = None,
        group: str = "",
        generation: int | None = None,
        until: int | None = None,
    ) -> GetResult:
        """At most ``count`` records and ``max_bytes`` from the row that spans ``offset`` on; a first record that is
        larger comes alone. Only the end of the queue, a gap, or a filter that found nothing for long makes it fewer.

        ``group`` names the reader: its position decides what is read ahead, so readers that walk a queue side by side
        need names of their own. ``generation``: None for the newest life of the queue. ``until``: this reader is going
        to read every offset below, so what follows is fetched at once (walks know; consumers are watched instead).
        Raises CorruptionError (bytes that fail a check, an offset neither stored nor a recorded gap, an object the
        newest catalog names but the store does not have) or what the store raises.
        """
        if count < 1 or max_bytes < 0:
            raise ValueError(f"count {count}, max_bytes {max_bytes}")
        catalog = self.catalog
        catalog.look()
        self.counters.pulls += 1
        if filter is None:
            view = catalog.view(catalog.state, (topic, queue_id, generation))
            reader = None if view is None else self.readers.find(ReaderKey(group, view.queue))
            if view is not None and reader is not None:
                result = reader.from_hand(view, offset, count, max_bytes)
                if result is not None:
                    self._hand.answered(
                        reader, view, offset, result.next_offset, len(result.batch), self._clock_s()
                    )
                    return result
        pull = _Pull(topic, queue_id, offset, count, max_bytes, filter, group, generation, until)
        return await self._answer(pull)

    def in_hand(
        self, topic: str, queue_id: int, offset: int, count: int, max_bytes: int, group: str
    ) -> InHand | None:
        """What an unfiltered ``get`` would answer, where the reader has all of it in hand: no coroutine, no columns.
        None: ask ``get``. Thread-safe."""
        return self._hand.find(topic, queue_id, offset, count, max_bytes, group)

    async def _answer(self, pull: _Pull) -> GetResult:
        try:
            return await self._attempt(pull, self.catalog.state)
        except NotFoundError:
            state = await self.catalog.refreshed()
            self.counters.retried += 1
        try:
            return await self._attempt(pull, state)
        except NotFoundError as error:
            raise CorruptionError(
                f"{pull.topic} queue {pull.queue_id}: catalog version {state.version} names what is not there: "
                f"{error.message}"
            ) from error

    async def _attempt(self, pull: _Pull, state: CatalogState) -> GetResult:
        view = self.catalog.view(state, pull.name)
        status, next_offset = standing(view, pull.offset)
        if status in _MAY_BE_NEWER:
            state = await self._newer(state, status)
            view = self.catalog.view(state, pull.name)
            status, next_offset = standing(view, pull.offset)
        if view is None:
            return GetResult(status, EMPTY_BATCH, next_offset, 0, 0, None, state.version)
        if status is not GetStatus.FOUND:
            return GetResult(
                status, EMPTY_BATCH, next_offset, view.min_offset, view.max_offset, None, state.version
            )
        return await self._read(pull, view)

    async def _newer(self, state: CatalogState, status: GetStatus) -> CatalogState:
        """A newer state, when the one known is not fresh."""
        try:
            return await self.catalog.recent()
        except UnavailableError:
            if status not in _HARMLESS:
                raise
            return state

    async def _read(self, pull: _Pull, view: QueueView) -> GetResult:
        began_s = self._clock_s()
        prefetcher = self.prefetcher
        reader = self.readers.open(ReaderKey(pull.group, view.queue), began_s)
        held = reader.held
        if held.line != view.state.cursor.history:
            held = Held()
        ready = prefetcher.ready(reader, pull.offset)
        until = 0 if pull.until is None else min(pull.until, view.max_offset)
        if reader.window.position < 0 and until - pull.offset > pull.count:
            await self._ahead.open(view, pull.offset)  # the first block comes with what follows it
            runs = await self.catalog.runs_of(view)
            prefetcher.announced(reader, pull.offset, until, runs.bytes_per_offset(pull.offset))
        if reader.window.position == pull.offset:
            prefetcher.fetch_ahead(reader, view, pull.filter, inline=True)
        # Not for who lost what it had in hand: there is no room for more.
        goes_on = held.rows is not None and pull.until is None and reader.window.position == pull.offset
        wish = Wish(pull.count, pull.max_bytes, pull.filter, rows_ahead=ROWS_AHEAD if goes_on else 0)
        read, waits = await _counting(self._rows.read(view, pull.offset, wish, Lane.USER, held))
        time_s = self._clock_s()
        if waits:
            self.counters.waited += 1
            self.log.add(EventKind.WAIT, reader.name, time_s - began_s, str(pull.offset))
            if ready is not None:
                prefetcher.waited(reader, ready, read.next_offset)
        self.counters.messages += len(read.batch)
        self.readers.hold(reader, read.held)
        rows = read.held.rows
        block_bytes = read.block_bytes if rows is None else rows.block_bytes[-1]
        runs = await self.catalog.runs_of(view)
        per_offset = runs.bytes_per_offset(read.next_offset - 1)
        if per_offset == 0 and len(read.batch):
            per_offset = read.batch.record_bytes / (read.next_offset - pull.offset)
        prefetcher.pulled(
            reader,
            Pulled(pull.offset, read.next_offset, read.covered, block_bytes, time_s),
            per_offset or None,
        )
        self._hand.go_on(reader, view, time_s, pull.filter)
        return GetResult(
            GetStatus.FOUND if len(read.batch) else GetStatus.NO_MATCHED_MESSAGE,
            read.batch, read.next_offset, view.min_offset, view.max_offset, read.gap, view.state.version,
        )  # fmt: skip

    # -- bounds -----------------------------------------------------------------------------------------------

    async def bounds(
        self, topic: str, queue_id: int, *, generation: int | None = None
    ) -> tuple[int, int] | None:
        """[minimum, maximum) offset by a catalog version that is recent; None for an unknown queue."""
        state = await self.catalog.recent()
        view = self.catalog.view(state, (topic, queue_id, generation))
        return None if view is None else (view.min_offset, view.max_offset)


@types.coroutine
def _counting(coroutine: Coroutine[Any, Any, T]) -> Generator[Wait[Any], None, tuple[T, int]]:
    """The result of ``coroutine``, and how often it waited."""
    waits = 0
    try:
        while True:
            try:
                wait = coroutine.send(None)
            except StopIteration as stop:
                return stop.value, waits
            waits += 1
            yield wait
    finally:
        coroutine.close()
