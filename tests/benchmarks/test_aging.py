"""The costs of a long history, with limits scaled down so that pages of all levels occur; counted, not timed."""

from __future__ import annotations

import pytest

from benchmarks import aging
from benchmarks.synthetic_history import SyntheticHistory
from fetcher.rows.catalog_view import CatalogView
from tiered.catalog.catalog_reader import load
from tiered.catalog.snapshot import describe
from tiered.catalog.writer_limits import CatalogLimits

SMALL = CatalogLimits(
    root_every=8,
    root_every_max=32,
    root_runs_max=32,
    page_runs_max=128,
    merge_sequences=4,
    merge_spills=4,
    spill_deletions=32,
)
SHORT, LONG = 500, 4_000


@pytest.mark.integration
@pytest.mark.parametrize("queues", [1, 16, 200])
def test_reading_costs_the_same_after_a_long_history(queues: int) -> None:
    store = aging.CountingStore()
    history = SyntheticHistory(store, queues, active=16, limits=SMALL)
    found = {}
    for count in (SHORT, LONG):
        while history.writer.state.version < count:
            history.cycle()
        found[count] = aging._reads(store, history) | {"bytes": store.put_bytes / count}
    state = history.writer.state
    assert max(page.level for page in state.pages) >= 2
    short, long = found[SHORT], found[LONG]
    assert long["open_requests"] <= 2 * SMALL.root_every_max
    assert long["first_requests"] == 1 and long["middle_requests"] <= 6
    for name in ("open", "first", "middle", "list"):
        assert long[f"{name}_peak_bytes"] <= short[f"{name}_peak_bytes"] + (4 << 20)
    stored = history.stored_bytes / history.writer.state.version
    assert long["bytes"] <= 3_000 + stored / 10  # pages are short here: a larger share of roots and merges
    assert len(state.pending_deletions) < 4 * SMALL.spill_deletions
    assert describe(load(store)) == describe(state)
    # Every offset of a queue is found, whatever the level of its page.
    view = CatalogView(store, state, executor=aging._Inline(), clock_s=lambda: 0.0)
    row = state.queue(history.keys[0])
    assert row is not None
    end = int(row["end_queue_offset"])
    for offset in range(0, end, max(1, end // 200)):
        aging._runs_at(view, history.keys[0], offset)
