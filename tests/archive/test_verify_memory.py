"""Verification takes constant memory for any length of history, and finds the same in any number of passes."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.archive.archive_builder import ArchiveBuilder, Sent
from tiered.archive import run_passes
from tiered.archive.run_passes import LivingRuns, cut_windows
from tiered.archive.verify import AnomalyKind, verify_archive
from tiered.catalog.writer_limits import CatalogLimits
from tiered.formats.keys import object_of
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore

QUEUES = [QueueKey("topic", number, 0) for number in range(30)]
PAGE_RUNS = 256
SLACK_BYTES = 1_250_000
"""Names of pages and eight bytes an object do stay, and the buffers of threads differ; beside production's
windows of tens of MiB both are nothing. What must not come back took 5 MB."""


def _archive(cycles: int) -> ArchiveBuilder:
    limits = CatalogLimits(root_every=16, spill_runs=PAGE_RUNS, page_runs_max=PAGE_RUNS, merge_spills=16)
    builder = ArchiveBuilder(MemoryStore(), limits=limits)
    for cycle in range(cycles):
        builder.commit([Sent(queue, b"%d" % cycle) for queue in QUEUES])
    return builder


def _peak_bytes(builder: ArchiveBuilder, *, full: bool) -> int:
    tracemalloc.start()
    try:
        report = verify_archive(builder.store, depth="full" if full else "tails")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.anomalies == []
    assert report.counts["objects"] == len(builder.keys)
    assert report.counts["runs"] == len(builder.keys) * len(QUEUES)
    return peak_bytes


@pytest.mark.parametrize(
    "cycles", [pytest.param(12, marks=pytest.mark.integration), pytest.param(40, marks=pytest.mark.soak)]
)
def test_ten_times_the_history_takes_the_same_memory(monkeypatch: pytest.MonkeyPatch, cycles: int) -> None:
    """As in production, but for smaller pages and windows: history is many of each."""
    monkeypatch.setattr(run_passes, "WINDOW_RUNS", 2 * PAGE_RUNS)
    monkeypatch.setattr(run_passes, "MERGED_RUNS", PAGE_RUNS)
    small, large = _archive(cycles), _archive(10 * cycles)
    verify_archive(small.store, depth="full")  # what is loaded once, kernels for instance, is not counted
    before, after = _peak_bytes(small, full=True), _peak_bytes(large, full=True)
    assert after <= 1.1 * before + SLACK_BYTES, f"{before} B became {after} B"


@pytest.mark.parametrize("damage", [False, True])
def test_passes_change_nothing_that_is_found(monkeypatch: pytest.MonkeyPatch, damage: bool) -> None:
    limits = CatalogLimits(
        root_every=4,
        spill_runs=20,
        page_runs_max=7,
        merge_sequences=3,
        merge_spills=3,
        pack_bytes_max=1,
    )
    builder = ArchiveBuilder(MemoryStore(), limits=limits)
    lmq = QueueKey("%LMQ%a", 0, 0)
    for cycle in range(14):
        offset = 50 * cycle if cycle % 4 == 1 else None  # gaps, in several pages
        builder.commit([Sent(queue, b"%d" % cycle, offset=offset, lmq=[lmq]) for queue in QUEUES[:4]])
    assert len(builder.state.pages) > 5
    if damage:
        builder.store.delete([object_of(builder.state.pages[1].key), builder.keys[-2]])
    whole = verify_archive(builder.store, depth="full")
    monkeypatch.setattr(run_passes, "WINDOW_RUNS", 5)
    monkeypatch.setattr(run_passes, "MERGED_RUNS", 3)
    assert len(LivingRuns(builder.store, builder.state).windows()[0]) > 4
    parts = verify_archive(builder.store, depth="full")
    assert sorted(map(str, parts.anomalies)) == sorted(map(str, whole.anomalies))
    assert (parts.leftovers, parts.counts) == (whole.leftovers, whole.counts)
    kinds = {anomaly.kind for anomaly in whole.anomalies}
    assert kinds == ({AnomalyKind.PAGE, AnomalyKind.HOLE, AnomalyKind.MISSING} if damage else set())


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 20))
def test_windows_cover_all_runs_once_and_stay_small(counts: list[int], runs_max: int) -> None:
    windows = cut_windows(np.array(counts, np.int64), runs_max)
    covered = [version for window in windows for version in range(window.from_version, window.to_version + 1)]
    assert covered == sorted(set(covered))
    assert {version for version, count in enumerate(counts) if count} <= set(covered)
    for window in windows:
        mine = counts[window.from_version : window.to_version + 1]
        assert sum(mine) <= runs_max or sum(count > 0 for count in mine) == 1
