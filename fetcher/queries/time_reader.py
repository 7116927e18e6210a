"""Times of an archive's queues: searches over the newest catalog version known, with a second look when data moved.

Where the answer lies at the queue's end, a version that is recent is asked: one that nobody has read on for an hour
does not know what was stored since.

Owns which version answers. Does not own the search (time_search.py) nor requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from fetcher.io.request_scheduler import Lane
from fetcher.queries.time_search import (
    Boundary,
    ColumnsOf,
    QueueTimes,
    columns_from,
    earliest_time,
    first_at_or_after,
    offset_by_time,
    timestamp_of,
)
from fetcher.rows.catalog_view import CatalogView
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError, UnavailableError
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey

T = TypeVar("T")


class IndexSource(Protocol):
    """Where tails of objects come from; segment_source.SegmentSource is the one."""

    def index(self, key: str, size_bytes: int, tail_bytes: int, lane: Lane) -> Awaitable[SegmentIndex]:
        """The decoded tail of an object."""
        ...


class TimeReader:
    """Answers by time. Coroutines of the core (waiting.py). Raise NotFoundError for an unknown queue, CorruptionError,
    or what the store raises."""

    def __init__(self, catalog: CatalogView, source: IndexSource) -> None:
        self._catalog = catalog
        self._source = source

    async def offset_by_time(self, queue: QueueKey, timestamp_ms: int, boundary: Boundary) -> int:
        """The offset a 5.x broker answers: see time_search. While the catalog cannot be read, by the version known:
        what is behind that is later still, so who begins there misses nothing."""
        return await self._answered(
            queue,
            lambda times, columns_of: offset_by_time(times, timestamp_ms, boundary, columns_of),
            lambda times: times.ends_before(timestamp_ms),
            is_known_enough=True,
        )

    async def first_at_or_after(self, queue: QueueKey, timestamp_ms: int) -> int | None:
        """Where a walk from ``timestamp_ms`` on begins, None while there is nothing; differs from LOWER at the end of a
        BatchCQ queue."""
        return await self._answered(
            queue,
            lambda times, columns_of: first_at_or_after(times, timestamp_ms, columns_of),
            lambda times: times.ends_before(timestamp_ms),
        )

    async def timestamp_of(self, queue: QueueKey, offset: int) -> int | None:
        """When the message at ``offset`` was stored, ms since the epoch; None where the queue has none."""
        return await self._answered(
            queue,
            lambda times, columns_of: timestamp_of(times, offset, columns_of),
            lambda times: offset >= times.max_offset,
        )

    async def earliest_time(self, queue: QueueKey) -> int | None:
        """When the first message still there was stored, ms since the epoch; None for an empty queue."""
        return await self._answered(queue, earliest_time, lambda times: not len(times.chunk.runs))

    async def _answered(
        self,
        queue: QueueKey,
        ask: Callable[[QueueTimes, ColumnsOf], Coroutine[Any, Any, T]],
        is_at_end: Callable[[QueueTimes], bool],
        *,
        is_known_enough: bool = False,
    ) -> T:
        """``is_at_end``: whether what was archived since could change the answer. ``is_known_enough``: it is good
        enough without that, if need be."""
        self._catalog.look()
        try:
            times = await self._times(self._catalog.state, queue)
            if is_at_end(times):
                times = await self._times(await self._recent(is_known_enough), queue)
            return await ask(times, columns_from(times, self._open))
        except NotFoundError:
            state = await self._catalog.refreshed()
        if state.queue(queue) is None:
            raise NotFoundError(f"queue {queue} is not in version {state.version} of the catalog")
        try:
            times = await self._times(state, queue)
            return await ask(times, columns_from(times, self._open))
        except NotFoundError as error:
            raise CorruptionError(
                f"{queue}: catalog version {state.version} names what is not there: {error.message}"
            ) from error

    async def _recent(self, is_known_enough: bool) -> CatalogState:
        try:
            return await self._catalog.recent()
        except UnavailableError:
            if not is_known_enough:
                raise
            return self._catalog.state

    async def _times(self, state: CatalogState, queue: QueueKey) -> QueueTimes:
        view = self._catalog.view(state, queue)
        if view is None:
            raise NotFoundError(f"queue {queue} is not in version {state.version} of the catalog")
        return QueueTimes.of(state, queue, (await self._catalog.runs_of(view)).chunk)

    def _open(self, key: str, size_bytes: int, tail_bytes: int) -> Awaitable[SegmentIndex]:
        return self._source.index(key, size_bytes, tail_bytes, Lane.USER)
