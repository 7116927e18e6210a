"""A block source without caches or threads, and a fetcher over it: for tests of what is read, not of how it is kept."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fetcher.blocks.budget import ByteBudget
from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import InlineExecutor
from fetcher.pulls.message_fetcher import TieredMessageFetcher
from fetcher.rows.catalog_view import CatalogView
from tiered.catalog.catalog_reader import load
from tiered.clock import Clock
from tiered.formats.segment_index import SegmentIndex
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import PrefetchSettings

NO_PREFETCH = PrefetchSettings(enabled=False)


class PlainSource:
    """Reads straight from the store, at once. ``fetched``: (key, numbers of blocks) of each call."""

    def __init__(self, store: ObjectStore, *, has_all: bool = False) -> None:
        """``has_all``: whatever was opened counts as being in memory."""
        self._store, self._has_all = store, has_all
        self._indexes: dict[str, SegmentIndex] = {}
        self.opened: list[str] = []
        self.fetched: list[tuple[str, list[int]]] = []

    async def index(
        self, key: str, size_bytes: int, tail_bytes: int, priority: Priority, ordinal: int | None = None
    ) -> SegmentIndex:
        """See BlockSource."""
        if key not in self._indexes:
            tail = self._store.get_range(key, size_bytes - tail_bytes, tail_bytes)
            self._indexes[key] = SegmentIndex(key, size_bytes, tail)
            self.opened.append(key)
        return self._indexes[key]

    def index_in_memory(self, key: str, ordinal: int) -> SegmentIndex | None:
        """See BlockSource."""
        return self._indexes.get(key) if self._has_all else None

    def block_in_memory(self, object_key: str, number: int) -> NDArray[np.uint8] | None:
        """See BlockSource."""
        if not self._has_all:
            return None
        index = self._indexes[object_key]
        blocks = index.blocks["raw_bytes"]
        run = int(np.searchsorted(np.cumsum(index.runs["blocks"]), number, side="right"))
        span = index.span_of_blocks(run, number, number + 1)
        assert span.raw_bytes == int(blocks[number])
        return index.decode_blocks(span, self._store.get_range(index.key, span.offset, span.length))

    async def blocks_at(
        self, index: SegmentIndex, run: int, numbers: Sequence[int], priority: Priority
    ) -> Sequence[NDArray[np.uint8]]:
        """See BlockSource."""
        self.fetched.append((index.key, list(numbers)))
        found = []
        for block in numbers:
            span = index.span_of_blocks(run, block, block + 1)
            found.append(
                index.decode_blocks(span, self._store.get_range(index.key, span.offset, span.length))
            )
        return found


def plain_fetcher(
    store: ObjectStore,
    source: PlainSource | None = None,
    settings: PrefetchSettings = NO_PREFETCH,
    *,
    clock_s: Callable[[], float] = lambda: 0.0,
    refresh_ms: int = 1000,
    budget: ByteBudget | None = None,
) -> TieredMessageFetcher:
    """A fetcher at the head of the archive in ``store``; everything happens in the calling thread."""
    executor = InlineExecutor()
    clock = Clock(monotonic_s=clock_s)
    catalog = CatalogView(store, load(store), executor=executor, clock=clock, refresh_ms=refresh_ms)
    return TieredMessageFetcher(
        source or PlainSource(store), catalog, settings, executor=executor, clock=clock, budget=budget
    )
