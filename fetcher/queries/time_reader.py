"""Times of an archive's queues: searches over a cached catalog version, or a recent one at a queue's end.

Owns the choice of the version. Does not own the search (time_search.py) nor requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from fetcher.io.request_scheduler import Priority
from fetcher.queries.time_search import (
    Boundary,
    ColumnsOf,
    QueueTimes,
    columns_from,
    earliest_time,
    next_part,
    offset_by_time,
    timestamp_of,
)
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.queue_view import QueueView
from tiered.catalog.state import EMPTY_CHUNK, CatalogState, RunChunk
from tiered.errors import CorruptionError, NotFoundError, UnavailableError
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey

T = TypeVar("T")


class IndexSource(Protocol):
    """Reads tails of objects: segment_source.SegmentSource."""

    def index(
        self, key: str, size_bytes: int, tail_bytes: int, priority: Priority
    ) -> Awaitable[SegmentIndex]:
        """The decoded tail of an object."""
        ...


class TimeReader:
    """Searches by time. Coroutines of the core (waiting.py). Raise NotFoundError for an unknown queue, CorruptionError,
    or what the store raises."""

    def __init__(self, catalog: CatalogView, source: IndexSource) -> None:
        self._catalog = catalog
        self._source = source

    async def offset_by_time(self, queue: QueueKey, timestamp_ms: int, boundary: Boundary) -> int:
        """The offset a 5.x broker returns: see time_search. By the cached version while the catalog cannot be read:
        messages after it are later, so a reader that starts there misses none."""
        return await self._answered(
            queue,
            lambda times, columns_of: offset_by_time(times, timestamp_ms, boundary, columns_of),
            lambda times: times.ends_before(timestamp_ms),
            partial(self._runs_across, timestamp_ms=timestamp_ms),
            is_stale_allowed=True,
        )

    async def next_part(
        self, queue: QueueKey, offset: int, range_ms: tuple[int, int]
    ) -> tuple[int, int] | None:
        """Offsets [begin, end) from ``offset`` on that may hold messages stored in [begin, end) of ``range_ms``; none
        before them do. None: nor does any after them, yet."""

        async def read(state: CatalogState) -> tuple[int, int] | None:
            found = await self._next_part(self._view(state, queue), offset, range_ms)
            if found is None and (recent := await self._catalog.recent()) is not state:
                found = await self._next_part(self._view(recent, queue), offset, range_ms)
            return found

        self._catalog.refresh_if_due()
        return await self._catalog.read(self._catalog.state, read, name=str(queue), queue=queue)

    async def _next_part(
        self, view: QueueView, offset: int, range_ms: tuple[int, int]
    ) -> tuple[int, int] | None:
        """Like ``next_part`` of time_search, over all runs of ``view`` that may have such messages."""
        last = await self._catalog.runs_by_time(view, range_ms[1] - 1, is_lower=False)
        ends = last.runs["end_queue_offset"][last.runs["min_store_timestamp"] < range_ms[1]]
        if offset <= view.min_offset:
            first = await self._catalog.runs_by_time(view, range_ms[0], is_lower=True)
            begins = first.runs["base_queue_offset"][first.runs["max_store_timestamp"] >= range_ms[0]]
            if not len(begins):
                return None
            offset = max(view.min_offset, int(begins[0]))
        while len(ends) and (at := view.existing(offset)) < min(int(ends[-1]), view.max_offset):
            chunk = (await self._catalog.runs_of(view, at)).around(at)
            if not len(chunk.runs):
                raise CorruptionError(f"{view.queue}: offset {at} is in no segment and in no recorded gap")
            times = QueueTimes.of(view.state, view.queue, chunk)
            found = await next_part(times, offset, range_ms, columns_from(times, self._open))
            if found is not None:
                return found
            offset = int(chunk.runs["end_queue_offset"][-1])
        return None

    async def timestamp_of(self, queue: QueueKey, offset: int) -> int | None:
        """When the message at ``offset`` was stored, ms since the epoch; None if the queue has none."""
        return await self._answered(
            queue,
            lambda times, columns_of: timestamp_of(times, offset, columns_of),
            lambda times: offset >= times.max_offset,
            partial(self._runs_at, offset=offset),
        )

    async def earliest_time(self, queue: QueueKey) -> int | None:
        """When the first message was stored, ms since the epoch; None for an empty queue."""
        return await self._answered(
            queue, earliest_time, lambda times: times.min_offset == times.max_offset, self._first_runs
        )

    async def _answered(
        self,
        queue: QueueKey,
        ask: Callable[[QueueTimes, ColumnsOf], Coroutine[Any, Any, T]],
        is_at_end: Callable[[QueueTimes], bool],
        runs_of: Callable[[QueueView], Coroutine[Any, Any, RunChunk]],
        *,
        is_stale_allowed: bool = False,
    ) -> T:
        """``runs_of``: the runs that decide. ``is_at_end``: whether messages archived since could change the result.
        ``is_stale_allowed``: the cached
        version is good enough if the catalog cannot be read."""

        async def read(state: CatalogState) -> T:
            times = await self._times(state, queue, runs_of)
            if is_at_end(times):
                times = await self._times(await self._recent(is_stale_allowed), queue, runs_of)
            return await ask(times, columns_from(times, self._open))

        self._catalog.refresh_if_due()
        return await self._catalog.read(self._catalog.state, read, name=str(queue), queue=queue)

    async def _recent(self, is_stale_allowed: bool) -> CatalogState:
        try:
            return await self._catalog.recent()
        except UnavailableError:
            if not is_stale_allowed:
                raise
            return self._catalog.state

    async def _runs_across(self, view: QueueView, timestamp_ms: int) -> RunChunk:
        if view.is_batch:
            return await self._catalog.all_runs_of(view)  # the broker's search depends on the number of rows
        return await self._catalog.runs_across(view, timestamp_ms)

    async def _runs_at(self, view: QueueView, offset: int) -> RunChunk:
        if not view.min_offset <= offset < view.max_offset or view.existing(offset) != offset:
            return EMPTY_CHUNK
        return (await self._catalog.runs_of(view, offset)).around(offset)

    async def _first_runs(self, view: QueueView) -> RunChunk:
        return await self._runs_at(view, view.existing(view.min_offset))

    async def _times(
        self,
        state: CatalogState,
        queue: QueueKey,
        runs_of: Callable[[QueueView], Coroutine[Any, Any, RunChunk]],
    ) -> QueueTimes:
        return QueueTimes.of(state, queue, await runs_of(self._view(state, queue)))

    def _view(self, state: CatalogState, queue: QueueKey) -> QueueView:
        view = self._catalog.view(state, queue)
        if view is None:
            raise NotFoundError(f"{queue} is not in the archive")
        return view

    def _open(self, key: str, size_bytes: int, tail_bytes: int) -> Awaitable[SegmentIndex]:
        return self._source.index(key, size_bytes, tail_bytes, Priority.USER)
