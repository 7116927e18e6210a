"""Large sequences of pages are compacted part by part: no run is lost, and memory follows ``runs_max``."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rocketmq_tiered.maintenance.compaction_ranges as ranges
from rocketmq_tiered.maintenance.compaction_job import CompactionForecast, carried_out, forecast
from rocketmq_tiered.maintenance.compaction_ranges import ObjectRunCounter, ranges_of
from rocketmq_tiered.maintenance.compaction_round import PlannedRound, plan_rounds
from tests.archive.archive_builder import NOW_MS
from tests.maintenance.compaction_scene import EVERYTHING, LIMITS, QUEUES, Scene, a_round
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tiered.archive.rewrite.plan import length_of
from tiered.catalog.commit import REMOVED_DTYPE, CommitDraft, CommitKind
from tiered.catalog.page_merge import between, sequences_of
from tiered.catalog.pages import Page, RunIndex, cut
from tiered.catalog.state import CatalogState, PageRef, RunChunk
from tiered.errors import StoreFullError, ThrottledError
from tiered.model.queue import QueueKey
from tiered.model.tables import FLOOR_DTYPE, OBJECT_DTYPE, RUN_DTYPE

SMALL = replace(LIMITS, runs_max=40)


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "PAGE_RUNS", 9)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """One sequence of many pages, larger than a round takes, and some smaller ones."""
    found = Scene(tmp_path, cycles=60, merge_sequences=3, merge_spills=3)
    assert max(sum(page.runs for page in one) for one in sequences_of(found.state.pages)) > 3 * SMALL.runs_max
    return found


@pytest.fixture
def similar(tmp_path: Path) -> Scene:
    """Several sequences of about 30 runs."""
    found = Scene(tmp_path, cycles=60, spill_runs=30, merge_spills=99)
    assert len(sequences_of(found.state.pages)) > 5
    return found


def compact_all(scene: Scene, *, check: bool = False) -> int:
    """Rounds until nothing is left to do; with ``check`` all rows are read after each."""
    rounds = 0
    while (
        planned := next(plan_rounds(scene.store, scene.state, SMALL, before_version=EVERYTHING), None)
    ) is not None:
        in_memory = scene.state.memory_runs if planned.range.spilled_version else 0
        assert len(planned.candidates.runs) <= SMALL.runs_max + in_memory
        assert a_round(scene.store, scene.state, planned, scene.spool) is not None
        assert_ordered(scene.state)
        if check:
            scene.check()
        rounds += 1
        assert rounds < 60, "rounds come to an end"
    return rounds


def assert_ordered(state: CatalogState) -> None:
    """Readers search the pages of a sequence by queue and offset."""
    for sequence in sequences_of(state.pages):
        places = [(page.first, page.first_offset) for page in sequence]
        assert places == sorted(places)


def test_rounds_take_a_part_of_a_large_sequence_and_nothing_is_lost(scene: Scene) -> None:
    objects = scene.data_objects()
    assert compact_all(scene, check=True) > 4
    scene.collect()
    scene.check()
    assert scene.data_objects() * 3 < objects
    scene.append(30)
    assert compact_all(scene) > 0
    scene.collect()
    scene.check()


def test_a_source_is_deleted_by_the_last_round_that_moves_its_runs(scene: Scene) -> None:
    planned = next(plan_rounds(scene.store, scene.state, SMALL, before_version=EVERYTHING))
    shared = [
        key
        for key, share in zip(planned.candidates.object_keys, planned.candidates.share, strict=True)
        if share < 1
    ]
    assert shared
    a_round(scene.store, scene.state, planned, scene.spool)
    assert not scene.state.pending_deletions.keys() & set(shared)
    compact_all(scene)
    assert set(shared) <= scene.state.pending_deletions.keys()


def test_sources_and_messages_of_many_rounds_are_counted_once(scene: Scene) -> None:
    before = scene.data_sizes()
    done = CompactionForecast()
    while (
        planned := next(plan_rounds(scene.store, scene.state, SMALL, before_version=EVERYTHING), None)
    ) is not None:
        mine = carried_out(planned)
        result = a_round(scene.store, scene.state, planned, scene.spool)
        assert result is not None
        assert mine.message_bytes == length_of(result.runs).sum()
        done += mine
        before |= scene.data_sizes()
    scene.collect()
    gone = before.keys() - scene.data_sizes().keys()
    assert (done.objects, done.source_bytes) == (len(gone), sum(before[key] for key in gone))


def test_the_queues_of_a_large_sequence_are_in_one_object_each_in_the_end(scene: Scene) -> None:
    (large,) = [one for one in sequences_of(scene.state.pages) if one[0].level == 2][:1]
    versions = large[0].from_version, large[0].to_version
    compact_all(scene)
    index, state = RunIndex(scene.store), scene.state
    for queue in QUEUES:
        mine = index.runs_of(state, queue)
        chosen = (mine.runs["version"] >= versions[0]) & (mine.runs["version"] <= versions[1])
        assert len(np.unique(mine.runs["object"][chosen])) <= 3, "cut by memory and at borders of pages"


def test_similar_sequences_are_merged_by_the_first_round(similar: Scene) -> None:
    before = len(sequences_of(similar.state.pages))
    planned = next(plan_rounds(similar.store, similar.state, SMALL, before_version=EVERYTHING))
    assert planned.range.end == SMALL.runs_max
    assert planned.copied_runs > 0
    assert a_round(similar.store, similar.state, planned, similar.spool) is not None
    assert len(sequences_of(similar.state.pages)) < before
    similar.check()
    compact_all(similar)
    similar.collect()
    similar.check()


def test_a_large_sequence_that_is_not_compacted_is_merged_with_a_small_one(tmp_path: Path) -> None:
    """Each queue would otherwise be in two objects."""
    scene = Scene(tmp_path, cycles=100, spill_runs=30, merge_spills=12)
    while len(sequences_of(scene.state.pages)) < 2:
        scene.append(1)
    large, small = sorted(sequences_of(scene.state.pages), key=lambda one: -sum(page.runs for page in one))
    assert sum(page.runs for page in large) > ranges.SIMILAR * sum(page.runs for page in small)
    chosen = next(ranges.ranges_of(scene.state, EVERYTHING, SMALL.runs_max))[0]
    assert {page.key for page in chosen.pages} == {page.key for page in (*large, *small)}
    assert compact_all(scene) > 4
    assert len(sequences_of(scene.state.pages)) == 1
    scene.collect()
    scene.check()


def test_a_large_compacted_sequence_is_not_written_again_for_a_small_one() -> None:
    def sequence(version: int, runs: int) -> list[PageRef]:
        name = QueueKey("t", 0, 0)
        return [PageRef(str(version), 0, version, version, runs, 1, name, name, 0, 0, 0, 0)]

    stack = [sequence(1, 1000), sequence(2, 10)]
    assert ranges.is_merged(stack, 2000, queues=1000 // ranges.SIMILAR)
    assert not ranges.is_merged(stack, 2000, queues=1000 // ranges.SIMILAR + 1)
    assert not ranges.is_merged(stack, 1000, queues=1), "pages of both do not fit in memory"
    assert ranges.is_merged([sequence(1, 1000), sequence(2, 200)], 2000, queues=10**6)


def test_runs_in_memory_are_merged_with_the_newest_sequences(similar: Scene) -> None:
    limits = replace(LIMITS, runs_max=90)
    planned = [
        one
        for one in plan_rounds(similar.store, similar.state, limits, before_version=EVERYTHING)
        if one.range.end is not None and one.range.memory_runs
    ]
    assert len(planned) == 1
    assert planned[0].range.memory_runs == similar.state.memory_runs > 0
    assert len(planned[0].candidates.runs) == 90
    assert a_round(similar.store, similar.state, planned[0], similar.spool) is not None
    assert similar.state.memory_runs == 0
    assert_ordered(similar.state)
    similar.check()
    compact_all(similar, check=True)
    similar.collect()
    similar.check()


def test_runs_in_memory_are_not_merged_when_there_is_no_room_beside_the_pages(similar: Scene) -> None:
    found = list(ranges_of(similar.state, EVERYTHING, 25))
    assert any(one.end is not None for group in found for one in group)
    assert [one.pages for group in found for one in group if one.memory_runs] == [[]]


def test_a_later_part_of_similar_sequences_may_be_the_first_that_is_worth_a_round(similar: Scene) -> None:
    plans = 0

    def third(*_: object) -> bool:
        nonlocal plans
        plans += 1
        return plans >= 3

    planned = next(
        plan_rounds(similar.store, similar.state, SMALL, before_version=EVERYTHING, is_wanted=third)
    )
    assert planned.range.begin > 0
    assert a_round(similar.store, similar.state, planned, similar.spool) is not None
    assert_ordered(similar.state)
    similar.check()


@pytest.mark.parametrize(
    "rule",
    [
        FaultRule(Fault.THROTTLED, frozenset({"get_range"}), "[ds]*", skip=9),
        FaultRule(Fault.FULL, frozenset({"compose"}), "[ds]*"),
        FaultRule(Fault.THROTTLED, frozenset({"put"}), "pages/*", skip=2),
    ],
    ids=["source", "output", "page"],
)
def test_a_refused_request_ends_a_round_that_merges_sequences_and_the_next_one_completes(
    similar: Scene, rule: FaultRule
) -> None:
    planned = next(plan_rounds(similar.store, similar.state, SMALL, before_version=EVERYTHING))
    assert planned.range.end is not None
    assert planned.copied_runs
    faulty = FaultStore(similar.store, [rule])
    pages = similar.state.pages
    with pytest.raises((ThrottledError, StoreFullError)):
        a_round(faulty, similar.state, planned, similar.spool)
    assert similar.state.pages == pages
    similar.check()
    assert similar.collect(), "outputs and pages are garbage"
    again = next(plan_rounds(similar.store, similar.state, SMALL, before_version=EVERYTHING))
    assert a_round(similar.store, similar.state, again, similar.spool) is not None
    similar.collect()
    similar.check()


def test_a_large_sequence_is_not_merged_with_small_ones(scene: Scene) -> None:
    for found in ranges_of(scene.state, EVERYTHING, 10):
        if len(found) > 1 and found[0].end is not None:
            sizes = [sum(page.runs for page in one) for one in sequences_of(found[0].pages)]
            assert max(sizes) <= ranges.SIMILAR * (sum(sizes) - max(sizes))


@pytest.mark.parametrize("which", ["scene", "similar"])
def test_ranges_cover_all_runs_once(which: str, request: pytest.FixtureRequest) -> None:
    scene: Scene = request.getfixturevalue(which)
    state, index = scene.state, RunIndex(scene.store)
    seen: Counter[tuple[object, int]] = Counter()
    for found in ranges_of(state, EVERYTHING, SMALL.runs_max):
        assert [one.is_partial for one in found] == [len(found) > 1] * len(found)
        for one in found:
            mine = list(one.compacted(index, state))
            assert sum(len(page.chunk.runs) for page in mine) == one.runs
            assert one.runs <= SMALL.runs_max + (one.memory_runs if one.end is None else 0)
            for page in mine:
                seen.update(
                    (page.queues[queue], base)
                    for queue, base in page.chunk.runs[["queue", "base_queue_offset"]].tolist()
                )
        if len(found) > 1:
            runs = [one.runs for one in found]
            assert [one.share for one in found] == [runs[at] / sum(runs[at:]) for at in range(len(runs))]
            first, last = ({*one.pages, *one.others} for one in (found[0], found[-1]))
            assert first == last
    assert set(seen.values()) == {1}
    assert seen.total() == sum(page.runs for page in state.pages) + state.memory_runs


def test_runs_of_objects_are_counted_over_rounds_and_expiry(scene: Scene) -> None:
    counter, index = ObjectRunCounter(), RunIndex(scene.store)

    def check() -> None:
        state = scene.state
        expected: Counter[str] = Counter()
        for ref in state.pages:
            chunk = index.living(state, index.read_page(ref)).chunk
            expected.update(
                chunk.object_keys[int(chunk.objects["key"][at])] for at in chunk.runs["object"].tolist()
            )
        keys = sorted({*expected, "data/unknown"})
        found = counter.count(index, state, state.pages)
        assert dict(zip(keys, found.of(keys).tolist(), strict=True)) == {key: expected[key] for key in keys}
        assert int(found.runs.sum()) == expected.total()

    check()
    a_round(scene.store, scene.state, planned_part(scene), scene.spool)
    check()
    raise_floor(scene, QUEUES[-1])
    check()
    scene.append(30)
    check()


def raise_floor(scene: Scene, queue: QueueKey) -> None:
    """The oldest run of ``queue`` expires."""
    oldest = RunIndex(scene.store).runs_of(scene.state, queue).runs[0]
    floors = np.zeros(1, FLOOR_DTYPE)
    floors["min_queue_offset"], floors["rows"] = oldest["end_queue_offset"], oldest["rows"]
    draft = CommitDraft(CommitKind.MAINTENANCE, queues=[queue], floors=floors, created_ms=NOW_MS)
    scene.owner.writer.append(draft)


def planned_part(scene: Scene) -> PlannedRound:
    """A round that leaves other pages of its sequence."""
    while not (
        found := next(plan_rounds(scene.store, scene.state, SMALL, before_version=EVERYTHING))
    ).range.others:
        assert a_round(scene.store, scene.state, found, scene.spool) is not None
    return found


def test_expiry_of_another_queue_voids_the_round_of_a_part(scene: Scene) -> None:
    """It may have expired the other runs of a source, which nothing would reference after the round."""
    planned = planned_part(scene)
    queue = QUEUES[-1]
    assert queue not in planned.candidates.queues
    state = scene.state
    raise_floor(scene, queue)
    assert a_round(scene.store, state, planned, scene.spool) is None
    scene.check()


def test_removed_runs_of_other_queues_stay_removed(scene: Scene) -> None:
    """A round replaces some pages of its versions: removals in the others are still needed."""
    planned_part(scene)
    queue = QUEUES[-1]
    removed = RunIndex(scene.store).runs_of(scene.state, queue).runs[:1]
    gone = np.zeros(1, REMOVED_DTYPE)
    for name in ("base_queue_offset", "end_queue_offset", "version"):
        gone[name] = removed[name]
    draft = CommitDraft(CommitKind.MAINTENANCE, queues=[queue], removed=gone, created_ms=NOW_MS)
    scene.owner.writer.append(draft)
    assert len(scene.state.tombstones) == 1
    found = planned_part(scene)
    assert found.range.pages[-1].last < queue <= found.range.others[-1].last
    assert a_round(scene.store, scene.state, found, scene.spool) is not None
    left = RunIndex(scene.store).runs_of(scene.state, queue).runs
    assert int(removed["base_queue_offset"][0]) not in left["base_queue_offset"].tolist()


def test_the_forecast_of_a_large_sequence_is_that_of_its_first_part_times_their_number(scene: Scene) -> None:
    exact = forecast(plan_rounds(scene.store, scene.state, LIMITS, before_version=EVERYTHING))
    about = forecast(plan_rounds(scene.store, scene.state, SMALL, before_version=EVERYTHING))
    assert about.objects == pytest.approx(exact.objects, rel=0.3)
    assert about.message_bytes == pytest.approx(exact.message_bytes, rel=0.3)
    assert about.rounds > exact.rounds
    assert 0 < about.estimated < about.rounds
    assert exact.estimated == 0


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(0, 70),
    st.none() | st.integers(0, 70),
)
def test_runs_between_two_places(
    rows: list[tuple[int, int]], page_runs: int, begin: int, end: int | None
) -> None:
    rows.sort()
    runs = np.zeros(len(rows), RUN_DTYPE)
    runs["queue"], runs["version"] = zip(*rows, strict=True)
    runs["base_queue_offset"] = np.arange(len(rows))
    page = Page(QUEUES, RunChunk(runs, np.zeros(1, OBJECT_DTYPE), ("sets/1",)))
    found = [
        (one.queues[int(run["queue"])], int(run["base_queue_offset"]), int(run["version"]))
        for one in between(cut(page, page_runs), begin, end)
        for run in one.chunk.runs
    ]
    assert found == [(QUEUES[queue], at, version) for at, (queue, version) in enumerate(rows)][begin:end]
