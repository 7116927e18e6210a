"""The log may be replaced: a new history starts at the last common record, and nothing archived is destroyed for it."""

from dataclasses import replace

import numpy as np
import pytest

from tests.catalog.drafts import NOW_MS, append_draft, log_checks, queue, writer
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tiered.catalog.catalog_reader import load, refresh
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitInvalidError, CommitKind, describe
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import UNKNOWN_OFFSET, CatalogState
from tiered.errors import FencedError
from tiered.model.queue import QueueKey
from tiered.model.tables import FLOOR_DTYPE, QUEUE_HIDDEN
from tiered.object_store.memory import MemoryStore

A, B, LATE = queue("a"), queue("b"), queue("late")


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


def grow(made: CatalogWriter, count: int, *names: QueueKey) -> None:
    for number in range(count):
        made.append(append_draft(made.state, dict.fromkeys(names, 1 + number % 2)))


def offsets(store: MemoryStore, state: CatalogState, key: QueueKey) -> list[int]:
    covered: list[int] = []
    for run in RunIndex(store).runs_of(state, key).runs:
        covered += range(int(run["base_queue_offset"]), int(run["end_queue_offset"]))
    return covered


@pytest.mark.parametrize("before", [3, 11, 40])
@pytest.mark.parametrize("after", [1, 7, 30])
def test_walk_back_to_the_last_common_record(memory: MemoryStore, before: int, after: int) -> None:
    made = writer(memory)
    made.claim()
    grow(made, before, A, B)
    common = made.state
    grow(made, after, A, LATE)
    superseded = made.state
    state = made.append_history(common_version=common.version, phys=common.cursor.phys)
    assert (state.cursor.history, state.cursor.phys, state.cursor.check) == (
        2,
        common.cursor.phys,
        common.cursor.check,
    )
    assert state.row_of(LATE) is None
    fields = [
        "min_queue_offset",
        "end_queue_offset",
        "end_byte",
        "end_phys",
        "row_count",
        "flags",
        "max_store_timestamp",
    ]
    for key in (A, B):
        assert state.queue(key)[fields] == common.queue(key)[fields]  # type: ignore[index]
        assert offsets(memory, state, key) == offsets(memory, common, key)
    # Superseded objects are pending deletions, those still needed are not.
    index = RunIndex(memory)
    living = {key for name in (A, B) for key in index.runs_of(state, name).object_keys}
    dead = {key for name in (A, LATE) for key in index.runs_of(superseded, name).object_keys} - living
    assert dead <= state.pending_deletions.keys()
    assert not living & state.pending_deletions.keys()
    assert describe(load(memory)) == describe(state) == describe(refresh(memory, common))
    # The new history continues.
    state = made.append(append_draft(made.state, {A: 2, LATE: 1}))
    assert describe(load(memory)) == describe(state)
    assert offsets(memory, state, A) == list(range(len(offsets(memory, common, A)) + 2))
    assert made.append(append_draft(state, {LATE: 1})).queue(LATE)["end_queue_offset"] == 2  # type: ignore[index]


def test_superseded_records_stay_marked(memory: MemoryStore) -> None:
    made = writer(memory)
    made.claim()
    grow(made, 4, A)
    common = made.state
    grow(made, 3, A)
    state = made.append_history(common_version=common.version, phys=common.cursor.phys)
    (line,) = state.log_histories
    assert (line.number, line.common_version, line.version) == (2, common.version, common.version + 4)
    # The versions in between are kept and still name the superseded records.
    old = load(memory, version=line.version - 1)
    assert offsets(memory, old, A)[: len(offsets(memory, state, A))] == offsets(memory, state, A)
    assert len(offsets(memory, old, A)) > len(offsets(memory, state, A))
    assert [version for version, _, _ in log_checks(memory, state)] == list(range(common.version, 1, -1))


def test_a_history_that_begins_before_the_last_one_supersedes_both(memory: MemoryStore) -> None:
    made = writer(memory)
    made.claim()
    grow(made, 3, A)
    first = made.state
    grow(made, 3, A)
    second = made.state
    grow(made, 3, A)
    made.append_history(common_version=second.version, phys=second.cursor.phys)
    grow(made, 3, A)
    state = made.append_history(common_version=first.version, phys=first.cursor.phys)
    assert [version for version, _, _ in log_checks(memory, state)] == list(range(first.version, 1, -1))
    grow(made, 2, A)
    newest = [state.version + 2, state.version + 1]
    assert [version for version, _, _ in log_checks(memory, made.state)] == [
        *newest,
        *range(first.version, 1, -1),
    ]


def test_nothing_in_common_ends_every_queue_but_destroys_nothing(memory: MemoryStore) -> None:
    made = writer(memory)
    made.claim()
    grow(made, 20, A, B)
    before = made.state
    state = made.append_history(common_version=0, phys=0)
    assert state.cursor.phys == 0
    assert not state.visible_queues()
    assert offsets(memory, state, A) == offsets(memory, before, A)
    assert not any(key.startswith(("sets/", "data/")) for key in state.pending_deletions)
    fresh = dict(state.current_queues())
    following = A._replace(generation=1)
    assert fresh[following]["end_queue_offset"] == UNKNOWN_OFFSET
    assert fresh[following]["flags"] & QUEUE_HIDDEN
    with pytest.raises(CommitInvalidError, match="has ended"):
        made.append(append_draft(state, {A: 1}))
    # Physical offsets of the old history mean nothing now, and the first record may have any queue offset.
    state = made.append(append_draft(made.state, {following: 2}, first={following: 500}))
    assert state.visible_queues() == [following]
    assert describe(load(memory)) == describe(state)
    # Walking back on the new history leaves the ended queues alone.
    common = made.state
    grow(made, 15, following, queue("other"))
    state = made.append_history(common_version=common.version, phys=common.cursor.phys)
    assert offsets(memory, state, A) == offsets(memory, before, A)
    assert offsets(memory, state, following) == [500, 501]
    assert list(log_checks(memory, state))[-1][0] == common.version


def test_a_generation_begun_above_the_cut_is_undone(memory: MemoryStore) -> None:
    made = writer(memory)
    made.claim()
    grow(made, 2, A, B)
    common = made.state
    again = A._replace(generation=1)
    grow(made, 2, again)
    made.append(CommitDraft(CommitKind.MAINTENANCE, hide=[B], created_ms=NOW_MS))
    state = made.append_history(common_version=common.version, phys=common.cursor.phys)
    assert state.visible_queues() == [A]  # B was hidden for another reason
    assert state.current_generation("a", 0) == 0
    assert made.append(append_draft(state, {again: 1})).visible_queues() == [again]


def test_gaps_above_the_cut_are_undone(memory: MemoryStore) -> None:
    made = writer(memory)
    made.claim()
    made.append(append_draft(made.state, {A: 2}))
    made.append(append_draft(made.state, {A: 2}, gap={A: 5}))
    common = made.state
    made.append(append_draft(made.state, {A: 2}, gap={A: 7}))
    state = made.append_history(common_version=common.version, phys=common.cursor.phys)
    assert state.gaps_of(A)["begin_queue_offset"].tolist() == [2]


def test_a_history_starts_only_at_a_commit_of_its_predecessor(memory: MemoryStore) -> None:
    made = writer(memory)
    made.claim()
    grow(made, 6, A)
    state = made.state
    with pytest.raises(CommitInvalidError, match="does not end at"):
        made.append_history(common_version=4, phys=state.cursor.phys)
    made.append_history(common_version=3, phys=load(memory, version=3).cursor.phys)
    left = load(memory, version=5)
    with pytest.raises(CommitInvalidError, match="a log history that was replaced"):
        made.append_history(common_version=5, phys=left.cursor.phys)
    with pytest.raises(CommitInvalidError, match="log history 1, but the archive is at history 2"):
        made.append(replace(append_draft(made.state, {A: 1}), history=1))


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.STALLED, Fault.THROTTLED])
def test_a_new_history_survives_lost_answers(memory: MemoryStore, fault: Fault) -> None:
    store = FaultStore(memory, wait=lambda seconds: None, seed=5)
    made = writer(store)
    made.claim()
    grow(made, 12, A, B)
    common = made.state
    grow(made, 9, A)
    store.add(FaultRule(fault, frozenset({"put", "get"}), "*", probability=0.4))
    state = made.append_history(common_version=common.version, phys=common.cursor.phys)
    store.clear()
    store.land_stalled()
    assert describe(load(memory)) == describe(state)
    assert not state.catalog_keys() & state.pending_deletions.keys()
    store.add(FaultRule(fault, frozenset({"put", "get"}), "*", probability=0.4))
    assert offsets(memory, made.end_queues({A: 7}, 0), A) == [*range(7)], "in the same log"
    store.clear()
    store.land_stalled()
    made.release()
    existing = {info.key for info in memory.list("pages/")}
    assert existing <= made.state.catalog_keys() | made.state.pending_deletions.keys()
    for key in (A, B):
        assert offsets(memory, state, key) == offsets(memory, common, key)


def test_objects_that_other_queues_need_stay_when_a_queue_ends(memory: MemoryStore) -> None:
    made = writer(memory)
    made.claim()
    grow(made, 30, A, B)
    state = made.end_queues({A: 0}, 0)
    assert not state.pending_deletions.keys() & {*RunIndex(memory).runs_of(state, B).object_keys}


def test_only_the_owner_starts_a_history(memory: MemoryStore) -> None:
    made = writer(memory)
    made.claim()
    grow(made, 2, A)
    writer(memory, instance="w2").claim(take_over=True)
    with pytest.raises(FencedError):
        made.append_history(common_version=0, phys=0)


def expire(made: CatalogWriter) -> None:
    """All messages of A."""
    row = made.state.queue(A)
    assert row is not None
    floors = np.array([(0, row["end_queue_offset"], row["row_count"])], FLOOR_DTYPE)
    made.append(CommitDraft(CommitKind.MAINTENANCE, queues=[A], floors=floors, created_ms=NOW_MS))


def test_a_queue_that_has_expired_stays_as_it_is_when_another_ends(memory: MemoryStore) -> None:
    """Also if the broker used offsets of it again before."""
    made = writer(memory)
    made.claim()
    grow(made, 10, A, B)
    made.end_queues({A: 7}, 0)
    expire(made)
    before = made.state.queue(A)
    made.end_queues({B: 3}, 0)
    assert made.state.queue(A) == before


@pytest.mark.parametrize("is_repeated", [True, False])
def test_expired_runs_do_not_come_back(memory: MemoryStore, is_repeated: bool) -> None:
    """They stand in a page without living runs, and the floor comes down to the end of the common version. Also in a
    queue in which the broker has used offsets twice."""
    made = writer(memory)
    made.claim()
    grow(made, 10, A)
    if is_repeated:
        made.end_queues({A: int(made.state.queue(A)["end_queue_offset"])}, 0)  # type: ignore[index]
    common = made.state
    grow(made, 30, A)
    assert made.state.pages
    expire(made)
    made.append_history(common_version=common.version, phys=common.cursor.phys)
    end = common.queue(A)["end_queue_offset"]  # type: ignore[index]
    grow(made, 3, A)
    assert offsets(memory, made.state, A) == list(range(end, end + 4))
