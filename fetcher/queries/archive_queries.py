"""Blocking queries of one archive. Counts requests; does not own the queries (by_key.py, by_id.py)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fetcher.io.request_scheduler import ThreadRangeReader
from fetcher.io.waiting import InlineExecutor, run_sync
from fetcher.queries.by_id import OffsetMsgId, find_by_id
from fetcher.queries.by_key import KeyQuery, QueryCost, QueryPage, cost_of, find_by_key, find_by_keys
from fetcher.queries.source import PartCache, QuerySource
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.message import Message
from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK
from tiered.object_store.interface import ObjectStore

T = TypeVar("T")
READ_THREADS = 8
CACHE_BYTES = 32 * 1024 * 1024
"""Parts of the archive cached between queries."""


class ArchiveQueries:
    """Queries the archive at ``store``, its own prefix. Not thread-safe. Close it."""

    def __init__(self, store: ObjectStore, state: CatalogState) -> None:
        self._store = store
        self._catalog = CatalogView(store, state, executor=InlineExecutor(), clock=MACHINE_CLOCK)
        self._reader = ThreadRangeReader(store, READ_THREADS)
        self._cache = PartCache(CACHE_BYTES)
        self.requests = 0
        """Object requests so far, without those that refresh the catalog."""

    @property
    def state(self) -> CatalogState:
        """The catalog version read last."""
        return self._catalog.state

    def __enter__(self) -> ArchiveQueries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the threads."""
        self._reader.close()

    def by_key(self, query: KeyQuery) -> QueryPage:
        """Messages with a key, newest first. Raises CorruptionError or what the store raises."""
        return self._answered(lambda source, state: find_by_key(source, state, query))

    def by_keys(self, queries: Sequence[KeyQuery]) -> list[QueryPage]:
        """``by_key`` for each query, of one topic each: a key section is read once for all."""
        return self._answered(lambda source, state: find_by_keys(source, state, queries))

    def by_id(self, wanted: OffsetMsgId) -> Message | None:
        """The message with an offsetMsgId, or None. Raises CorruptionError or what the store raises."""
        return self._answered(lambda source, state: find_by_id(source, state, wanted))

    def cost_of(self, queries: Sequence[KeyQuery]) -> QueryCost:
        """The requests of ``by_keys``."""
        return self._answered(lambda source, state: cost_of(source, state, queries))

    def _answered(self, query: Callable[[QuerySource, CatalogState], Coroutine[Any, Any, T]]) -> T:
        """Run a query at the catalog version read last and count its requests. If an object that this version names
        has been deleted since, read the catalog again and repeat the query."""

        async def read(state: CatalogState) -> T:
            source = QuerySource(self._reader, self._store, self._cache)
            try:
                return await query(source, state)
            finally:
                self.requests += source.requests

        return run_sync(self._catalog.read(self.state, read))
