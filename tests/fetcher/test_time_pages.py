"""Searches by time read the pages of the catalog that decide, and answer as if all of them had been read."""

from __future__ import annotations

import random
import time

import pytest

from fetcher.io.waiting import InlineExecutor, run_sync
from fetcher.queries.time_search import (
    Boundary,
    QueueTimes,
    TimeReader,
    columns_from,
    earliest_time,
    offset_by_time,
    timestamp_of,
)
from fetcher.rows.catalog_view import CatalogView
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.object_store.fault_store import FaultStore
from tiered.catalog.pages import RunIndex
from tiered.catalog.writer_limits import CatalogLimits
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore

PLAIN, OTHER = QueueKey("plain", 0, 0), QueueKey("zother", 1, 0)


class Source:
    """Decoded tails of objects."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def index(
        self, key: str, size_bytes: int, tail_bytes: int, priority: object, ordinal: int | None = None
    ) -> SegmentIndex:
        return SegmentIndex(key, size_bytes, self._store.get_range(key, size_bytes - tail_bytes, tail_bytes))


def built(seed: int, cycles: int, jitter_ms: int) -> ArchiveBuilder:
    rand = random.Random(seed)
    limits = CatalogLimits(root_every=4, root_runs_max=6, page_runs_max=16, merge_sequences=3, merge_spills=3)
    builder = ArchiveBuilder(MemoryStore(), limits=limits)
    for cycle in range(cycles):
        now_ms = NOW_MS + cycle * 1_000
        stamps = [max(0, now_ms + rand.randint(-jitter_ms, jitter_ms)) for _ in range(2)]
        builder.commit([Sent(PLAIN, stored_ms=stamp) for stamp in stamps] + [Sent(OTHER, stored_ms=now_ms)])
    return builder


@pytest.mark.parametrize("jitter_ms", [0, 900, 20_000])
@pytest.mark.parametrize("cycles", [3, 57, 96])
def test_answers_are_those_of_all_runs(cycles: int, jitter_ms: int) -> None:
    builder = built(cycles, cycles, jitter_ms)
    source = Source(builder.store)
    view = CatalogView(builder.store, builder.state, executor=InlineExecutor(), clock_s=time.monotonic)
    reader = TimeReader(view, source)
    runs = RunIndex(builder.store).runs_of(builder.state, PLAIN)
    times = QueueTimes.of(builder.state, PLAIN, runs)

    def opened(key: str, size_bytes: int, tail_bytes: int, ordinal: int):  # type: ignore[no-untyped-def]
        return source.index(key, size_bytes, tail_bytes, None, ordinal)

    columns_of = columns_from(times, opened)
    stamps = sorted({int(row.store_timestamp) for row in builder.truth[PLAIN].rows})
    for stamp in [0, stamps[0] - 1, *stamps[:: max(1, len(stamps) // 25)], stamps[-1], stamps[-1] + 1]:
        for boundary in Boundary:
            expected = run_sync(offset_by_time(times, stamp, boundary, columns_of))
            assert run_sync(reader.offset_by_time(PLAIN, stamp, boundary)) == expected, (stamp, boundary)
    for offset in range(-1, times.max_offset + 2, 3):
        assert run_sync(reader.timestamp_of(PLAIN, offset)) == run_sync(
            timestamp_of(times, offset, columns_of)
        )
    assert run_sync(reader.earliest_time(PLAIN)) == run_sync(earliest_time(times, columns_of))


def test_a_time_takes_a_page_or_two_whatever_the_history() -> None:
    builder = built(1, 300, 0)
    store = FaultStore(builder.store, (), wait=lambda seconds: None)
    pages = [page for page in builder.state.pages if page.first <= PLAIN <= page.last]
    assert len(pages) > 12
    for cycle in (0, 1, 100, 222, 298):
        for boundary in Boundary:
            view = CatalogView(store, builder.state, executor=InlineExecutor(), clock_s=time.monotonic)
            before = len(store.requests)
            reader = TimeReader(view, Source(builder.store))
            found = run_sync(reader.offset_by_time(PLAIN, NOW_MS + cycle * 1_000, boundary))
            assert found == 2 * cycle + (boundary is Boundary.UPPER)
            assert len(store.requests) - before <= 3
