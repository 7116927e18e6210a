"""Floors: expired runs are gone for every reader, in memory, in pages and after merges; a floor never comes down.

Recorded gaps of one queue, however many there are.
"""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fetcher.rows.run_list import QueueView
from rocketmq_tiered.message_table.plan.archive_plan import filled, gaps_in
from rocketmq_tiered.message_table.plan.partitions import OffsetRange
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.archive.queue_reader import QueueReader
from tests.catalog.drafts import NOW_MS, append_draft, queue, small_limits, writer
from tests.sweeps import examples
from tiered.catalog.catalog_reader import load, refresh
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitInvalidError, CommitKind, describe
from tiered.catalog.garbage import referenced_by
from tiered.catalog.pages import RunIndex
from tiered.catalog.queue_gaps import QueueGaps
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey
from tiered.model.tables import FLOOR_DTYPE, GAP_DTYPE
from tiered.object_store.memory import MemoryStore

A, B = queue("a"), queue("b")


def expire(made: CatalogWriter, key: QueueKey, below: int, rows: int) -> CatalogState:
    floors = np.array([(0, below, rows)], FLOOR_DTYPE)
    return made.append(CommitDraft(CommitKind.MAINTENANCE, queues=[key], floors=floors, created_ms=NOW_MS))


def offsets(store: MemoryStore, state: CatalogState, key: QueueKey) -> list[int]:
    return [int(base) for base in RunIndex(store).runs_of(state, key).runs["base_queue_offset"]]


def grown(store: MemoryStore, commits: int, **limits: float) -> CatalogWriter:
    made = writer(store, limits=small_limits(**limits))
    made.claim()
    for _ in range(commits):
        made.append(append_draft(made.state, {A: 2, B: 1}))
    return made


@pytest.mark.parametrize("commits", [3, 40])
def test_runs_below_the_floor_are_gone_in_memory_and_in_pages(commits: int) -> None:
    store = MemoryStore()
    made = grown(store, commits)
    first_key = RunIndex(store).runs_of(made.state, A).object_keys[0]
    state = expire(made, A, 4, 4)
    row = state.queue(A)
    assert row is not None
    assert (int(row["min_queue_offset"]), int(row["row_count"])) == (4, 2 * commits - 4)
    assert offsets(store, state, A) == list(range(4, 2 * commits, 2))
    assert offsets(store, state, B) == list(range(commits))
    assert first_key in referenced_by(store, state)  # of B too
    state = expire(made, B, 2, 2)
    assert first_key not in referenced_by(store, state)
    assert describe(load(store)) == describe(made.state) == describe(refresh(store, CatalogState()))


def test_a_merge_drops_expired_runs() -> None:
    store = MemoryStore()
    made = grown(store, 8)
    expire(made, A, 16, 16)
    for _ in range(60):
        made.append(append_draft(made.state, {A: 2, B: 1}))
    index = RunIndex(store)
    in_pages = [index.read_page(ref) for ref in made.state.pages if ref.from_version <= 9]
    assert in_pages
    for page in in_pages:
        runs = page.chunk.runs
        names = [page.queues[number] for number in runs["queue"]]
        assert not [run for run, name in zip(runs, names, strict=True) if name == A and run["version"] <= 9]


@pytest.mark.parametrize(("below", "rows"), [(0, 0), (4, 4), (7, 1), (99, 1), (6, 9), (6, -1)])
def test_a_floor_rises_and_stays_within_its_queue(below: int, rows: int) -> None:
    made = grown(MemoryStore(), 3)
    expire(made, A, 4, 4)
    with pytest.raises(CommitInvalidError, match="the minimum offset cannot move"):
        expire(made, A, below, rows)


def test_a_floor_moves_over_the_gap_that_follows() -> None:
    store = MemoryStore()
    made = grown(store, 2)
    made.append(append_draft(made.state, {A: 1}, gap={A: 5}))
    state = expire(made, A, 4, 4)
    row = state.queue(A)
    assert row is not None and int(row["min_queue_offset"]) == 9
    assert not len(state.gaps)
    assert offsets(store, state, A) == [9]


def test_only_maintenance_sets_floors() -> None:
    made = grown(MemoryStore(), 2)
    draft = append_draft(made.state, {A: 1})
    with pytest.raises(CommitInvalidError, match="it appends messages, but also removes"):
        made.append(replace(draft, floors=np.array([(0, 2, 2)], FLOOR_DTYPE)))


def test_floors_survive_a_log_divergence() -> None:
    store = MemoryStore()
    made = grown(store, 6)
    common = made.state
    for _ in range(6):
        made.append(append_draft(made.state, {A: 2, B: 1}))
    expire(made, A, 4, 4)
    expire(made, B, 9, 9)  # above the common point
    state = made.append_history(common_version=common.version, phys=common.cursor.phys)
    assert offsets(store, state, A) == [4, 6, 8, 10]
    assert offsets(store, state, B) == []
    rows = {key: (int(row["row_count"]), int(row["end_queue_offset"])) for key, row in state.queues()}
    assert rows == {A: (8, 12), B: (0, 6)}
    state = made.append(append_draft(state, {A: 2, B: 1}))
    assert offsets(store, state, B) == [6]


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=40))
def test_what_is_read_is_what_did_not_expire(steps: list[tuple[bool, int]]) -> None:
    store = MemoryStore()
    made = grown(store, 1)
    living = {A: [(0, 2)], B: [(0, 1)]}
    for is_append, number in steps:
        key = A if number % 2 else B
        if is_append:
            end = living[key][-1][1] if living[key] else int(made.state.queue(key)["end_queue_offset"])  # type: ignore[index]
            made.append(append_draft(made.state, {key: number}))
            living[key].append((end, end + number))
        elif living[key]:
            gone, living[key] = living[key][:number], living[key][number:]
            expire(made, key, gone[-1][1], gone[-1][1] - gone[0][0])
    for key, runs in living.items():
        assert offsets(store, made.state, key) == [base for base, _ in runs]
    assert describe(load(store)) == describe(made.state)


QUEUE = QueueKey("a", 0, 0)
MANY = 100_000
CPU_S_MAX = 1.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=8))
def test_offsets_in_gaps_that_touch_or_do_not(distances: list[tuple[int, int]]) -> None:
    table, at, inside = np.zeros(len(distances), GAP_DTYPE), 0, set[int]()
    for number, (before, length) in enumerate(distances):
        begin = at + before
        at = begin + length
        table[number] = (0, 1, begin, at)
        inside |= set(range(begin, at))
    gaps = QueueGaps(table)
    offsets = np.arange(at + 2)
    assert gaps.hold(offsets).tolist() == [offset in inside for offset in offsets.tolist()]
    for offset in offsets.tolist():
        assert gaps.after(offset) == next(one for one in range(offset, at + 3) if one not in inside)


@pytest.fixture(scope="module")
def many() -> CatalogState:
    """QUEUE queue of which every other record was damaged."""
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(QUEUE)])
    gaps, table = np.zeros(MANY, GAP_DTYPE), builder.state.table.copy()
    gaps["begin_queue_offset"] = 1 + 2 * np.arange(MANY)
    gaps["end_queue_offset"] = gaps["begin_queue_offset"] + 1
    table["end_queue_offset"] = 2 * MANY + 1
    return replace(builder.state, gaps=gaps, table=table)


def test_a_pull_costs_no_look_at_every_gap(many: CatalogState) -> None:
    began_s = time.thread_time()
    view = QueueView(many, QUEUE, many.queue(QUEUE))
    for offset in range(0, 2 * MANY, 50):
        assert view.existing(offset) == offset and view.existing(offset + 1) == offset + 2
    for _ in range(50):
        assert view.are_lost(np.arange(100)).sum() == 50
    assert time.thread_time() - began_s < CPU_S_MAX


def test_nor_does_reading_a_queue(many: CatalogState) -> None:
    began_s = time.thread_time()
    reader = QueueReader(MemoryStore(), many, QUEUE)
    for offset in range(0, 2 * MANY, 1000):
        assert reader._existing(offset + 1) == offset + 2
    assert time.thread_time() - began_s < CPU_S_MAX


def test_nor_does_finding_what_was_filled(many: CatalogState) -> None:
    later = replace(many, gaps=many.gaps[np.arange(MANY) != MANY // 2])
    before, whole = gaps_in(many), {QUEUE: OffsetRange(0, 2 * MANY + 1)}
    began_s = time.thread_time()
    assert filled(later, before, whole) == [{QUEUE: OffsetRange(MANY + 1, MANY + 2)}]
    assert time.thread_time() - began_s < 3 * CPU_S_MAX
