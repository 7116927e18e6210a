"""Queries of one archive, with a count of the requests for its objects; and tails and blocks without any cache."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fetcher.access import ArchiveAccess
from fetcher.io.request_scheduler import ThreadRangeReader
from fetcher.io.waiting import run_sync
from fetcher.queries.by_id import OffsetMsgId, find_by_id
from fetcher.queries.by_key import KeyQuery, QueryCost, QueryPage, cost_of, find_by_keys
from fetcher.queries.source import QuerySource
from fetcher.rows.block_fetch import Block
from fetcher.rows.message import Message
from tiered.catalog.archives import Archive
from tiered.catalog.state import CatalogState
from tiered.formats.segment_index import SegmentIndex
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import Settings

T = TypeVar("T")
DEFAULTS = Settings()


class CountedQueries:
    """Queries the archive at ``store``, its own prefix. ``requests`` may be set to count again from there."""

    def __init__(self, store: ObjectStore, state: CatalogState, settings: Settings = DEFAULTS) -> None:
        place, reader = Archive("cluster", "broker", store), ThreadRangeReader(store, 8)
        self.access = ArchiveAccess(store.url, MemoryStore(), place, state, reader, settings)
        self._before = 0

    def __enter__(self) -> CountedQueries:
        return self

    def __exit__(self, *_: object) -> None:
        self.access.close()

    @property
    def requests(self) -> int:
        return self.access.source.statistics().requests - self._before

    @requests.setter
    def requests(self, count: int) -> None:
        self._before += self.requests - count

    def by_key(self, query: KeyQuery) -> QueryPage:
        return self.by_keys([query])[0]

    def by_keys(self, queries: Sequence[KeyQuery]) -> list[QueryPage]:
        return self._answered(lambda source, state: find_by_keys(source, state, queries))

    def by_id(self, wanted: OffsetMsgId) -> Message | None:
        return self._answered(lambda source, state: find_by_id(source, state, wanted))

    def cost_of(self, queries: Sequence[KeyQuery]) -> QueryCost:
        return self._answered(lambda source, state: cost_of(source, state, queries))

    def _answered(self, query: Callable[[QuerySource, CatalogState], Coroutine[Any, Any, T]]) -> T:
        return run_sync(self.access.query(self.access.state, query))


class PlainBlocks:
    """Reads tails and blocks of the objects in ``store`` again each time."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def index(self, key: str, size_bytes: int, tail_bytes: int, *_: object) -> SegmentIndex:
        return SegmentIndex(key, size_bytes, self._store.get_range(key, size_bytes - tail_bytes, tail_bytes))

    async def blocks_at(
        self, index: SegmentIndex, run: int, numbers: Sequence[int], *_: object
    ) -> list[Block]:
        return [
            index.decode_blocks(span, self._store.get_range(index.key, span.offset, span.length))
            for span in index.spans_of_single_blocks(run, numbers)
        ]
