"""Times of an archive's queues: searches over the newest catalog version known, with a second look when data moved.

Owns which version answers. Does not own the search (time_search.py) nor requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from fetcher.blocks.lanes import Lane
from fetcher.pulls.catalog_view import CatalogView
from fetcher.time_search import (
    Boundary,
    ColumnsOf,
    QueueTimes,
    columns_from,
    earliest_time,
    first_at_or_after,
    offset_by_time,
    timestamp_of,
)
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError
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
        """The offset a 5.x broker answers: see time_search."""
        return await self._answered(
            queue, lambda times, columns_of: offset_by_time(times, timestamp_ms, boundary, columns_of)
        )

    async def first_at_or_after(self, queue: QueueKey, timestamp_ms: int) -> int:
        """Where a walk from ``timestamp_ms`` on begins; differs from LOWER at the end of a BatchCQ queue."""
        return await self._answered(
            queue, lambda times, columns_of: first_at_or_after(times, timestamp_ms, columns_of)
        )

    async def timestamp_of(self, queue: QueueKey, offset: int) -> int | None:
        """When the message at ``offset`` was stored, ms since the epoch; None where the queue has none."""
        return await self._answered(queue, lambda times, columns_of: timestamp_of(times, offset, columns_of))

    async def earliest_time(self, queue: QueueKey) -> int | None:
        """When the first message still there was stored, ms since the epoch; None for an empty queue."""
        return await self._answered(queue, earliest_time)

    async def _answered(
        self, queue: QueueKey, ask: Callable[[QueueTimes, ColumnsOf], Coroutine[Any, Any, T]]
    ) -> T:
        self._catalog.look()
        try:
            return await self._ask(self._catalog.state, queue, ask)
        except NotFoundError:
            state = await self._catalog.refreshed()
        if state.queue(queue) is None:
            raise NotFoundError(f"queue {queue} is not in version {state.version} of the catalog")
        try:
            return await self._ask(state, queue, ask)
        except NotFoundError as error:
            raise CorruptionError(
                f"{queue}: catalog version {state.version} names what is not there: {error.message}"
            ) from error

    async def _ask(
        self,
        state: CatalogState,
        queue: QueueKey,
        ask: Callable[[QueueTimes, ColumnsOf], Coroutine[Any, Any, T]],
    ) -> T:
        view = self._catalog.view(state, queue)
        if view is None:
            raise NotFoundError(f"queue {queue} is not in version {state.version} of the catalog")
        times = QueueTimes.of(state, queue, (await self._catalog.runs_of(view)).chunk)
        return await ask(times, columns_from(times, self._open))

    def _open(self, key: str, size_bytes: int, tail_bytes: int) -> Awaitable[SegmentIndex]:
        return self._source.index(key, size_bytes, tail_bytes, Lane.USER)
