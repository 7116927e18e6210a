"""Queries of one archive from an ordinary thread: runs the coroutines, and looks again when the catalog moved on.

Owns that, and counts of requests. Does not own what a query does (by_key.py, by_id.py).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fetcher.io.range_reader import RangeReader, ThreadRangeReader
from fetcher.io.waiting import run_sync
from fetcher.queries.by_id import OffsetMsgId, find_by_id
from fetcher.queries.by_key import KeyQuery, QueryCost, QueryPage, cost_of, find_by_key
from fetcher.queries.found import FoundMessage
from fetcher.queries.part_cache import KeptParts
from fetcher.queries.source import QuerySource
from tiered.catalog.catalog_reader import refresh
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError
from tiered.object_store.interface import ObjectStore

T = TypeVar("T")
READ_THREADS = 8
KEPT_BYTES = 32 * 1024 * 1024
"""Parts of the archive kept between queries."""


class ArchiveQueries:
    """Asks the archive at ``store``, its own prefix. Not for several threads at once. Close it."""

    def __init__(self, store: ObjectStore, state: CatalogState, *, reader: RangeReader | None = None) -> None:
        self._store = store
        self.state = state
        self._reader = reader or ThreadRangeReader(store, READ_THREADS)
        self._owns_reader = reader is None
        self._kept = KeptParts(KEPT_BYTES)
        self.requests = 0
        """Object requests so far, but for those that refresh the catalog."""

    def __enter__(self) -> ArchiveQueries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the threads."""
        if self._owns_reader:
            self._reader.close()

    def by_key(self, query: KeyQuery) -> QueryPage:
        """Messages with a key, newest first. Raises CorruptionError or what the store raises."""
        return self._answered(lambda source: find_by_key(source, self.state, query))

    def by_id(self, wanted: OffsetMsgId) -> FoundMessage | None:
        """The message with an offsetMsgId, or None. Raises CorruptionError or what the store raises."""
        return self._answered(lambda source: find_by_id(source, self.state, wanted))

    def cost_of(self, query: KeyQuery) -> QueryCost:
        """What ``by_key`` will read."""
        return self._answered(lambda source: cost_of(source, self.state, query))

    def _answered(self, ask: Callable[[QuerySource], Coroutine[Any, Any, T]]) -> T:
        try:
            return self._run(ask)
        except NotFoundError:
            self.state = refresh(self._store, self.state)
        try:
            return self._run(ask)
        except NotFoundError as error:
            raise CorruptionError(
                f"catalog version {self.state.version} names what is not there: {error.message}"
            ) from error

    def _run(self, ask: Callable[[QuerySource], Coroutine[Any, Any, T]]) -> T:
        source = QuerySource(self._reader, self._store, self._kept)
        try:
            return run_sync(ask(source))
        finally:
            self.requests += source.requests
