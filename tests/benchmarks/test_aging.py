"""The costs of a long history, with limits scaled down so that pages of all levels occur; counted, not timed."""

import pytest

from benchmarks import aging, aging_queries
from benchmarks.aging_readers import verified
from benchmarks.counting_store import CountingStore
from benchmarks.synthetic_history import SyntheticHistory
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import describe
from tiered.catalog.writer_limits import CatalogLimits
from tiered.settings.sections import IndexSettings

SMALL = CatalogLimits(
    root_every=8,
    root_every_max=32,
    root_runs_max=32,
    page_runs_max=128,
    merge_sequences=4,
    merge_spills=4,
    spill_deletions=32,
    pack_bytes_max=80 << 10,
)
"""The usual ones, about a hundredth, so that pages of level 3 occur after some thousand commits."""
SHORT, LONG = 500, 5_000


@pytest.mark.integration
@pytest.mark.parametrize("queues", [1, 16, 200])
def test_everything_costs_the_same_after_a_long_history(queues: int) -> None:
    store = CountingStore()
    history = SyntheticHistory(store, queues, active=16, limits=SMALL)
    history.is_traced = True
    found = {}
    for count in (SHORT, LONG):
        puts, versions = store.puts, history.writer.state.version
        while history.writer.state.version < count:
            history.cycle()
        found[count] = aging._reads(store, history) | {
            "bytes": store.put_bytes / count,
            "puts": (store.puts - puts) / (history.writer.state.version - versions),
            "merge_peak_bytes": history.merge_peak_bytes,
        }
    state = history.writer.state
    assert max(page.level for page in state.pages) >= 3
    short, long = found[SHORT], found[LONG]
    assert long["open_requests"] <= SMALL.root_every_max + 6
    assert long["first_requests"] == 1 and long["middle_requests"] <= 6
    for name in ("open", "first", "middle", "list"):
        assert long[f"{name}_peak_bytes"] <= short[f"{name}_peak_bytes"] + (4 << 20)
    assert long["merge_peak_bytes"] <= short["merge_peak_bytes"] + (1 << 20)
    assert long["puts"] <= 1.2 * short["puts"]
    stored = history.stored_bytes / history.writer.state.version
    assert long["bytes"] <= 3_500 + stored / 10  # pages are short here: a larger share of roots and merges
    assert len(state.pending_deletions) < 4 * SMALL.spill_deletions
    assert describe(load(store)) == describe(state)
    assert verified(store, state)["verify_requests"] <= len(state.pages) + 2 * SMALL.root_every_max
    # Every offset of a queue is found, whatever the level of its page.
    view = aging.catalog_view(store, state)
    row = state.queue(history.keys[0])
    assert row is not None
    end = int(row["end_queue_offset"])
    for offset in range(0, end, max(1, end // 200)):
        aging.runs_at(view, history.keys[0], offset)


@pytest.mark.integration
def test_queries_take_as_many_requests_after_a_long_history() -> None:
    settings = IndexSettings(unindexed_objects_max=16)
    short, long = aging_queries.measured([200, 2_000], traced_cycles=200, limits=SMALL, settings=settings)
    assert long["index_files"] <= settings.day_files_max
    for row in (short, long):
        assert max(row["time_requests"], row["id_requests"]) <= 5
        # Pages are short.
        assert max(row["key_requests"], row["unique_key_requests"]) <= settings.day_files_max + 7
    for name in ("time", "key", "unique_key", "id"):
        assert long[f"{name}_peak_bytes"] <= short[f"{name}_peak_bytes"] + (4 << 20), name
    assert long["index_peak_bytes"] <= short["index_peak_bytes"] + (4 << 20)
