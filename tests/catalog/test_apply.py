"""The commit state machine, rule by rule."""

from dataclasses import replace

import numpy as np
import pytest

from tests.catalog.drafts import NOW_MS, append_draft, at, claim_draft, queue
from tiered.catalog.apply import apply
from tiered.catalog.commit import Commit, CommitDraft, CommitInvalidError, CommitKind, PageChange
from tiered.catalog.state import REMOVED_DTYPE, CatalogState, LogCheck, PageRef
from tiered.model.queue import QueueKey
from tiered.model.tables import GAP_DTYPE, QUEUE_BATCH, QUEUE_FILLED, QUEUE_HIDDEN, QUEUE_LMQ, RunKind

A, B = queue("a"), queue("b", 3)


@pytest.fixture
def claimed() -> CatalogState:
    return step(CatalogState(), claim_draft())


@pytest.fixture
def started(claimed: CatalogState) -> CatalogState:
    return step(claimed, append_draft(claimed, {A: 3, B: 2}, first={B: 40}))


def step(state: CatalogState, draft: CommitDraft, actor: str = "w1") -> CatalogState:
    return apply(state, at(state, draft, actor))


def refused(state: CatalogState, draft: CommitDraft, match: str, actor: str = "w1") -> None:
    with pytest.raises(CommitInvalidError, match=match):
        step(state, draft, actor)


def test_an_append_moves_queues_and_cursor(started: CatalogState) -> None:
    row = started.queue(B)
    assert row is not None
    assert (row["min_queue_offset"], row["end_queue_offset"], row["row_count"]) == (40, 42, 2)
    assert (row["first_phys"], row["end_phys"], row["end_byte"]) == (600, 1000, 200)
    assert started.cursor.phys == 1000
    assert started.started
    assert started.visible_queues() == [A, B]


def test_the_first_append_may_begin_anywhere(claimed: CatalogState) -> None:
    draft = append_draft(claimed, {A: 1})
    runs = draft.runs.copy()
    runs["min_phys"] += 5000
    runs["end_phys"] += 5000
    moved = replace(draft, runs=runs, from_phys=5000, to_phys=5200, check=LogCheck(5100, 5200, 1))
    state = step(claimed, moved)
    assert state.cursor.phys == 5200
    refused(state, replace(moved, object_keys=["sets/00/x-1-9.sso"]), "log is archived up to 5200")


def test_a_commit_follows_its_predecessor_by_version_and_put_id(started: CatalogState) -> None:
    commit = at(started, append_draft(started, {A: 1}))
    for place, match in (
        (replace(commit.place, version=9), "version 9 is invalid: it does not follow"),
        (replace(commit.place, predecessor_put_id="other"), "a commit with put id 'other'"),
        (replace(commit.place, epoch=2), "after epoch 1 has epoch 2"),
        (replace(commit.place, broker="other"), "the archive is of c/b"),
    ):
        with pytest.raises(CommitInvalidError, match=match):
            apply(started, Commit(commit.draft, place, commit.put_id))


def test_one_cursor_an_append_begins_where_the_last_one_ended(started: CatalogState) -> None:
    draft = append_draft(started, {})
    refused(started, replace(draft, from_phys=900), "log is archived up to 1000")
    refused(started, replace(draft, from_phys=1100, to_phys=1200), "log is archived up to 1000")
    refused(started, replace(draft, history=2), "history 2")


def test_filtered_traffic_moves_the_cursor_without_data(started: CatalogState) -> None:
    state = step(started, replace(append_draft(started, {}), to_phys=50_000))
    assert state.cursor.phys == 50_000
    assert state.table is started.table


def test_every_run_starts_at_its_queues_end(started: CatalogState) -> None:
    draft = append_draft(started, {A: 2})
    for delta, match in ((1, "begins at queue offset 4"), (-1, "begins at queue offset 2")):
        runs = draft.runs.copy()
        runs["base_queue_offset"] += delta
        runs["end_queue_offset"] += delta
        refused(started, replace(draft, runs=runs), match)


def test_a_gap_in_the_same_commit_bridges(started: CatalogState) -> None:
    state = step(started, append_draft(started, {A: 2}, gap={A: 10}))
    row = state.queue(A)
    assert row is not None
    assert (row["end_queue_offset"], row["row_count"]) == (15, 5)
    assert state.gaps_of(A)[["begin_queue_offset", "end_queue_offset"]].tolist() == [(3, 13)]
    assert not len(state.gaps_of(B))


def test_a_gap_must_fit_exactly(started: CatalogState) -> None:
    draft = append_draft(started, {A: 2}, gap={A: 10})
    for begin, end in ((4, 13), (3, 12), (2, 13), (3, 3)):
        gaps = draft.gaps.copy()
        gaps["begin_queue_offset"], gaps["end_queue_offset"] = begin, end
        refused(started, replace(draft, gaps=gaps), "begins at|gap of no offsets")


def test_a_gap_may_end_a_queue_but_not_begin_one(started: CatalogState) -> None:
    gap = np.array([(0, 1, 3, 9)], GAP_DTYPE)
    state = step(started, replace(append_draft(started, {}), queues=[A], gaps=gap))
    assert state.queue(A)["end_queue_offset"] == 9  # type: ignore[index]
    refused(started, replace(append_draft(started, {}), queues=[queue("new")], gaps=gap), "has no message")


def test_a_run_starts_at_the_end_of_its_bytes(started: CatalogState) -> None:
    draft = append_draft(started, {A: 2})
    runs = draft.runs.copy()
    runs["base_byte"] += 1
    refused(started, replace(draft, runs=runs), "and the archive ends at 300")


def test_a_record_below_the_queues_physical_end_is_a_re_read(started: CatalogState) -> None:
    draft = append_draft(started, {B: 2})
    runs = draft.runs.copy()
    runs["min_phys"] -= 1
    refused(started, replace(draft, runs=runs), "outside its commitlog range")
    # A gap may not hide it either: the range is checked first, then the queue.
    wide = replace(append_draft(started, {A: 1, B: 1}), to_phys=2000)
    swapped = wide.runs.copy()
    swapped["min_phys"], swapped["end_phys"] = [1000, 1100], [1200, 1300]
    assert step(started, replace(wide, runs=swapped)).cursor.phys == 2000
    twice = append_draft(started, {A: 2})
    runs = np.concatenate([twice.runs, twice.runs])
    runs["base_queue_offset"][1], runs["end_queue_offset"][1], runs["base_byte"][1] = 5, 7, 500
    refused(started, replace(twice, runs=runs), "archived before")


def test_a_lower_offset_is_a_new_generation(started: CatalogState) -> None:
    again = A._replace(generation=1)
    state = step(started, append_draft(started, {again: 2}))
    assert state.current_generation("a", 0) == 1
    assert state.queue(A)["flags"] & QUEUE_HIDDEN  # type: ignore[index]
    assert state.visible_queues() == [again, B]
    assert state.queue(again)["end_byte"] == 200  # type: ignore[index]
    assert [key for key, _ in state.current_queues()] == [B, again]
    refused(state, append_draft(state, {A: 1}), "has ended")


def test_generations_are_counted_without_holes(started: CatalogState) -> None:
    refused(started, append_draft(started, {A._replace(generation=2): 1}), "the next one is generation 1")
    refused(started, append_draft(started, {queue("new", 0, 1): 1}), "the next one is generation 0")
    both = append_draft(started, {A._replace(generation=2): 1, A._replace(generation=1): 1})
    # In the log generation 1 must come first.
    refused(started, both, "archived before")
    ordered = append_draft(started, {A: 1, A._replace(generation=1): 1, A._replace(generation=2): 1})
    state = step(started, ordered)
    assert [bool(state.queue(A._replace(generation=g))["flags"] & QUEUE_HIDDEN) for g in range(3)] == [  # type: ignore[index]
        True,
        True,
        False,
    ]


def test_older_states_do_not_see_newer_queues(started: CatalogState) -> None:
    later = step(started, append_draft(started, {queue("new"): 1, A._replace(generation=1): 1}))
    other = step(started, append_draft(started, {queue("else"): 1}))
    assert started.row_of(queue("new")) is None
    assert started.current_generation("a", 0) == 0
    assert later.row_of(queue("else")) is None
    assert other.row_of(queue("new")) is None
    assert other.key_of(2) == queue("else")
    assert later.key_of(2) == queue("new")


def test_inner_num_counts(started: CatalogState) -> None:
    batch = queue("batch")
    draft = append_draft(started, {batch: 4})
    runs = draft.runs.copy()
    runs["kind"], runs["end_queue_offset"] = RunKind.BATCH, 10
    row = step(started, replace(draft, runs=runs)).queue(batch)
    assert row is not None
    assert (row["end_queue_offset"], row["row_count"], row["flags"]) == (10, 4, QUEUE_BATCH)
    runs["rows"] = 11
    refused(started, replace(draft, runs=runs), "contradict one another")


def test_an_lmq_has_no_bytes_of_its_own(started: CatalogState) -> None:
    lmq = queue("%LMQ%x")
    draft = append_draft(started, {A: 2, lmq: 2})
    refused_runs = draft.runs.copy()
    refused_runs["kind"][1] = RunKind.LMQ
    refused(started, replace(draft, runs=refused_runs), "contradict one another")
    runs = refused_runs
    runs["byte_count"][1] = 0
    row = step(started, replace(draft, runs=runs)).queue(lmq)
    assert row is not None
    assert (row["end_byte"], row["end_queue_offset"], row["flags"]) == (0, 2, QUEUE_LMQ)


def test_queues_without_runs_are_not_made(started: CatalogState) -> None:
    draft = append_draft(started, {A: 1})
    state = step(started, replace(draft, queues=[*draft.queues, queue("only a parent")]))
    assert state.row_of(queue("only a parent")) is None


def test_an_attempt_of_a_fenced_epoch_can_never_be_committed(started: CatalogState) -> None:
    refused(started, append_draft(started, {A: 1}, epoch=0), "which has lost the archive")


def test_once_a_retry_starts_the_older_attempt_can_never_be_committed(started: CatalogState) -> None:
    abandoned = "sets/00/1-1-7.sso"
    refused(
        started,
        replace(append_draft(started, {A: 1}, keys=[abandoned]), pending_deletions=[abandoned]),
        "is a pending deletion",
    )
    state = step(started, replace(append_draft(started, {A: 1}), pending_deletions=[abandoned]))
    assert state.pending_deletions[abandoned] == (NOW_MS, state.version, "abandoned")
    refused(state, append_draft(state, {A: 1}, keys=[abandoned]), "is a pending deletion")


def test_only_the_owner_moves_the_log(started: CatalogState) -> None:
    refused(started, append_draft(started, {A: 1}), "w2 is not the owner", actor="w2")
    refused(started, CommitDraft(CommitKind.RELEASE), "w2 is not the owner", actor="w2")
    released = step(started, CommitDraft(CommitKind.RELEASE))
    assert released.owner is not None
    assert released.owner.released
    refused(released, append_draft(released, {A: 1}), "w1 is not the owner")
    refused(CatalogState(), append_draft(CatalogState(), {A: 1}), "has no owner")


def test_a_claim_brings_no_data(started: CatalogState) -> None:
    draft = append_draft(started, {A: 1})
    for kind in (CommitKind.CLAIM, CommitKind.RELEASE):
        owner = claim_draft().owner if kind == CommitKind.CLAIM else None
        refused(started, replace(draft, kind=kind, owner=owner), "may not add or remove messages")


def test_hiding_hides_and_records_bring_back(started: CatalogState) -> None:
    hidden = step(started, CommitDraft(CommitKind.MAINTENANCE, hide=[A]), actor="expiry")
    assert hidden.visible_queues() == [B]
    assert hidden.queue(A)["end_queue_offset"] == 3  # type: ignore[index]
    assert step(hidden, CommitDraft(CommitKind.MAINTENANCE, unhide=[A])).visible_queues() == [A, B]
    assert step(hidden, append_draft(hidden, {A: 1})).visible_queues() == [A, B]
    refused(started, CommitDraft(CommitKind.MAINTENANCE, hide=[queue("none")]), "not in the archive")


def test_state_objects_replaced_become_pending_deletions(started: CatalogState) -> None:
    one = step(started, CommitDraft(CommitKind.MAINTENANCE, state_objects={"topics": "state/t-1-1-a"}))
    two = step(
        one, CommitDraft(CommitKind.MAINTENANCE, state_objects={"topics": "state/t-1-2-b"}, created_ms=NOW_MS)
    )
    assert two.state_objects == {"topics": "state/t-1-2-b"}
    assert set(two.pending_deletions) == {"state/t-1-1-a"}


def test_only_a_pending_deletion_is_purged_and_that_is_final(started: CatalogState) -> None:
    key = "sets/00/1-1-7.sso"
    pending_deletions = step(started, CommitDraft(CommitKind.MAINTENANCE, pending_deletions=[key]))
    assert not step(pending_deletions, CommitDraft(CommitKind.MAINTENANCE, restored=[key])).pending_deletions
    purged = step(pending_deletions, CommitDraft(CommitKind.MAINTENANCE, purged=[key]))
    assert not purged.pending_deletions
    refused(
        purged,
        CommitDraft(CommitKind.MAINTENANCE, restored=[key]),
        "out of the pending deletions, but this object is none",
    )


# -- replacing, expiring, filling -----------------------------------------------------------------------------


def _removal(state: CatalogState, key: QueueKey, *bases: int) -> CommitDraft:
    row = state.row_of(key)
    assert row is not None
    found = [run for run in state.memory_runs_of(row).runs if run["base_queue_offset"] in bases]
    removed = np.zeros(len(found), REMOVED_DTYPE)
    for index, run in enumerate(found):
        for name in ("rows", "base_queue_offset", "end_queue_offset", "version"):
            removed[name][index] = run[name]
    return CommitDraft(CommitKind.MAINTENANCE, queues=[key], removed=removed, created_ms=NOW_MS)


@pytest.fixture
def several(started: CatalogState) -> CatalogState:
    state = started
    for lost in (0, 4, 0):
        state = step(state, append_draft(state, {A: 2, B: 1}, gap={A: lost}))
    return state  # A: [0,3) [3,5) gap [5,9) [9,11) [11,13)


def _compacted(state: CatalogState, *bases: int) -> CommitDraft:
    removal = _removal(state, A, *bases)
    added = append_draft(state, {A: 1}, keys=["data/c"])
    runs = added.runs.copy()
    runs["base_queue_offset"] = removal.removed["base_queue_offset"].min()
    runs["end_queue_offset"] = removal.removed["end_queue_offset"].max()
    runs["rows"] = removal.removed["rows"].sum()
    return replace(removal, runs=runs, objects=added.objects, object_keys=added.object_keys)


def test_compaction_replaces_exactly_the_same_offsets(several: CatalogState) -> None:
    draft = _compacted(several, 0, 3)
    state = step(several, draft, actor="compactor")
    row = state.row_of(A)
    assert row is not None
    assert state.memory_runs_of(row).runs["base_queue_offset"].tolist() == [0, 9, 11]
    before = several.table[row].copy()
    before["flags"] |= QUEUE_FILLED  # its runs were replaced in a later version
    assert state.table[row] == before
    refused(several, _compacted(several, 3, 9), "would replace")
    shorter = draft.runs.copy()
    shorter["end_queue_offset"] -= 1
    refused(several, replace(draft, runs=shorter), "would replace")


def test_a_removed_run_is_still_there_else_the_delta_is_void(several: CatalogState) -> None:
    draft = _compacted(several, 0, 3)
    state = step(several, draft)
    refused(state, replace(draft, objects=draft.objects, object_keys=["data/d"]), "no longer exists")


def test_expiry_takes_the_oldest_and_the_gaps_behind_them(several: CatalogState) -> None:
    state = step(several, _removal(several, A, 0))
    assert state.queue(A)["min_queue_offset"] == 3  # type: ignore[index]
    state = step(several, _removal(several, A, 0, 3))
    assert state.queue(A)["min_queue_offset"] == 9  # type: ignore[index]
    assert not len(state.gaps_of(A))
    assert state.queue(A)["row_count"] == 4  # type: ignore[index]
    refused(several, _removal(several, A, 3), "only the oldest")
    everything = step(several, _removal(several, A, 0, 3, 9, 11))
    assert everything.queue(A)["min_queue_offset"] == 13  # type: ignore[index]
    assert everything.queue(A)["row_count"] == 0  # type: ignore[index]
    assert step(everything, append_draft(everything, {A: 1})).queue(A)["end_queue_offset"] == 14  # type: ignore[index]


@pytest.mark.parametrize(
    ("begin", "end", "left"), [(5, 9, []), (5, 6, [(6, 9)]), (7, 8, [(5, 7), (8, 9)]), (8, 9, [(5, 8)])]
)
def test_a_gap_may_be_filled_by_a_commit_that_fits_inside(
    several: CatalogState, begin: int, end: int, left: list[tuple[int, int]]
) -> None:
    draft = replace(append_draft(several, {A: end - begin}), kind=CommitKind.MAINTENANCE)
    runs = draft.runs.copy()
    runs["base_queue_offset"], runs["end_queue_offset"] = begin, end
    state = step(several, replace(draft, runs=runs))
    assert state.gaps_of(A)[["begin_queue_offset", "end_queue_offset"]].tolist() == left
    assert state.queue(A)["end_queue_offset"] == 13  # type: ignore[index]
    for wrong in ((4, 6), (8, 10), (13, 14)):
        runs["base_queue_offset"], runs["end_queue_offset"] = wrong
        refused(several, replace(draft, runs=runs), "are in no recorded gap")


# -- pages ----------------------------------------------------------------------------------------------------


def _page(name: str, first: int, last: int) -> PageRef:
    return PageRef(f"pages/{name}", 0, first, last, 1, 1, A, B, 0, 0, 0, 0)


def _paged(state: CatalogState, **change: object) -> CommitDraft:
    return CommitDraft(CommitKind.MAINTENANCE, pages=PageChange(**change), created_ms=NOW_MS)  # type: ignore[arg-type]


def test_spilled_runs_leave_memory_and_only_they(several: CatalogState) -> None:
    spilled = several.version - 2
    state = step(several, _paged(several, spilled_version=spilled, added=[_page("x", 1, spilled)]))
    assert set(state.memory.runs["version"].tolist()) == {spilled + 1, spilled + 2}
    assert [page.key for page in state.pages] == ["pages/x"]
    assert state.table is several.table
    refused(several, _paged(several, spilled_version=several.version + 1), "it moves its own runs")


def test_merged_pages_replace_theirs_which_become_pending_deletions(several: CatalogState) -> None:
    state = step(several, _paged(several, spilled_version=3, added=[_page("x", 1, 2), _page("y", 3, 3)]))
    merged = _paged(state, removed=["pages/x", "pages/y"], added=[_page("z", 1, 3)])
    state = step(state, merged)
    assert [page.key for page in state.pages] == ["pages/z"]
    assert {"pages/x", "pages/y"} <= state.pending_deletions.keys()
    refused(state, merged, "another commit has replaced")


def test_a_run_removed_while_its_page_was_merged_stays_dead(several: CatalogState) -> None:
    state = step(several, _paged(several, spilled_version=3, added=[_page("x", 2, 3)]))
    gone = np.zeros(1, REMOVED_DTYPE)
    gone["end_queue_offset"], gone["rows"], gone["version"] = 3, 3, 2
    state = step(state, CommitDraft(CommitKind.MAINTENANCE, queues=[A], removed=gone))
    assert len(state.tombstones) == 1
    # The merge had begun before the removal: its page still holds the run.
    late = step(
        state,
        _paged(state, removed=["pages/x"], added=[_page("z", 2, 3)], resolved_version=state.version - 1),
    )
    assert len(late.tombstones) == 1
    done = step(
        state, _paged(state, removed=["pages/x"], added=[_page("z", 2, 3)], resolved_version=state.version)
    )
    assert not len(done.tombstones)
    absent = gone.copy()
    absent["version"] = 9
    refused(several, CommitDraft(CommitKind.MAINTENANCE, queues=[A], removed=absent), "no longer exists")
    refused(state, CommitDraft(CommitKind.MAINTENANCE, queues=[A], removed=gone), "no longer exists")
