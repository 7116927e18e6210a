"""A day's growth of an archive, from its newest commits: what the listing says, and what compaction leaves of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.synthetic_history import CYCLE_MS, START_MS, SyntheticHistory
from rocketmq_tiered.process.archive_growth import DAY_MS, ArchiveGrowth, GrowthMeter, archive_growth
from tests.object_store.fault_store import FaultStore
from tiered.catalog.state import Owner
from tiered.object_store.memory import MemoryStore

DAY_CYCLES = DAY_MS // CYCLE_MS


def aged(cycles: int, queues: int = 16) -> tuple[MemoryStore, SyntheticHistory]:
    store = MemoryStore(clock_ms=lambda: START_MS if history is None else history.now_ms)
    history: SyntheticHistory | None = None
    history = SyntheticHistory(store, queues)
    for _ in range(cycles):
        history.cycle()
    return store, history


def test_growth_is_that_of_the_newest_commits() -> None:
    store, history = aged(900)
    listed = FaultStore(store, (), wait=lambda seconds: None)
    growth = archive_growth(listed, history.writer.state)
    assert growth is not None
    assert growth.commits == pytest.approx(DAY_CYCLES, rel=0.01)
    assert growth.objects == pytest.approx(DAY_CYCLES, rel=0.01)
    stored = sum(info.size_bytes for prefix in ("catalog/", "pages/") for info in store.list(prefix))
    assert growth.catalog_bytes == pytest.approx(stored / 900 * DAY_CYCLES, rel=0.1)
    # 16 queues with 3 KB every 5 s have more than 8 MiB a day each.
    assert growth.compacted_objects == 16
    assert {request.operation for request in listed.requests} == {"list"} and len(listed.requests) == 4


def test_without_an_owner_or_a_span_of_time_there_is_no_rate() -> None:
    store, history = aged(5)
    state = history.writer.state
    assert archive_growth(store, state) is None
    store, history = aged(100)
    assert archive_growth(store, history.writer.state) is not None
    released = replace(history.writer.state, owner=Owner("i", "run", "host", 0, True))
    assert archive_growth(store, released) is None


def test_a_writer_measures_what_it_wrote() -> None:
    store, history = aged(0)
    writer = history.writer
    meter = GrowthMeter(0.0)

    def measured(now_s: float) -> ArchiveGrowth | None:
        return meter.measure(now_s, writer.state, writer.commits, writer.written_bytes)

    assert measured(59.0) is None
    for _ in range(900):
        history.cycle()
    assert writer.written_bytes == sum(
        info.size_bytes for prefix in ("catalog/", "pages/") for info in store.list(prefix)
    )
    growth = measured(900 * CYCLE_MS / 1000)
    assert growth is not None
    assert growth.commits == pytest.approx(DAY_CYCLES, rel=0.01)
    listed = archive_growth(store, writer.state)
    assert listed is not None
    assert growth.catalog_bytes == pytest.approx(listed.catalog_bytes, rel=0.1)
    assert growth.objects == pytest.approx(listed.objects, rel=0.01)
    assert growth.compacted_objects == 16
    for minute in range(1, 62):  # nothing is written any more: the rate falls to none in an hour
        growth = measured(900 * CYCLE_MS / 1000 + 60 * minute)
    assert growth is not None and growth.commits == 0
