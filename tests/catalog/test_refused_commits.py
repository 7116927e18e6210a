"""Commits that no writer makes, and that neither a writer nor a reader accepts; tombstones of the first queue."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.catalog.drafts import NOW_MS, append_draft, at, claim_draft, queue, small_limits, writer
from tiered.catalog.apply import apply
from tiered.catalog.catalog_reader import head_version, load, read_commit, read_root
from tiered.catalog.claims import refusal
from tiered.catalog.commit import CommitDraft, CommitInvalidError, CommitKind
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import REMOVED_DTYPE, CatalogState, LogCheck, Owner
from tiered.model.tables import FLOOR_DTYPE, GAP_DTYPE, RUN_DTYPE
from tiered.object_store.interface import Body
from tiered.object_store.memory import MemoryStore

A, B = queue("a"), queue("b")


@pytest.fixture
def started() -> CatalogState:
    claimed = apply(CatalogState(), at(CatalogState(), claim_draft()))
    return apply(claimed, at(claimed, append_draft(claimed, {A: 3, B: 2})))


def refused(state: CatalogState, draft: CommitDraft, match: str) -> None:
    with pytest.raises(CommitInvalidError, match=match):
        apply(state, at(state, draft))


def test_a_claim_names_its_maker_as_an_owner_that_stays() -> None:
    empty, owner = CatalogState(), Owner("w1", "run", "h", NOW_MS, False)
    apply(empty, at(empty, CommitDraft(CommitKind.CLAIM, owner=owner)))
    for other in (None, owner._replace(instance="w2"), owner._replace(released=True)):
        refused(empty, CommitDraft(CommitKind.CLAIM, owner=other), "as the owner")


@pytest.mark.parametrize(
    ("idle_ms", "is_advancing"), [(0, True), (59_999, True), (60_000, False), (10**9, False)]
)
def test_a_backfill_takes_over_from_one_that_has_not_advanced_for_a_minute(
    idle_ms: int, is_advancing: bool
) -> None:
    state = apply(CatalogState(), at(CatalogState(), claim_draft("b1", "backfill"), "b1"))
    claimant = Owner("b2", "backfill", "h", NOW_MS, False)
    says = refusal(state, claimant, take_over=False, now_ms=NOW_MS + idle_ms)
    assert ("archiving now" in says) == bool(says) == is_advancing


def test_a_commit_names_every_object_once(started: CatalogState) -> None:
    draft = append_draft(started, {A: 1, B: 1}, objects=2)
    apply(started, at(started, draft))
    first = draft.object_keys[0]
    refused(started, replace(draft, object_keys=[first, first]), "it names an object twice")
    refused(
        started,
        replace(draft, object_keys=[*draft.object_keys, "sets/00/1-1-9.sso"]),
        "it names an object twice",
    )


def test_an_append_removes_no_run(started: CatalogState) -> None:
    removed = np.zeros(1, REMOVED_DTYPE)
    removed["rows"], removed["end_queue_offset"], removed["version"] = 3, 3, 2
    apply(started, at(started, CommitDraft(CommitKind.MAINTENANCE, queues=[A], removed=removed)))
    refused(
        started,
        replace(append_draft(started, {A: 1}), removed=removed),
        "it appends messages, but also removes",
    )


def test_an_append_is_checked_inside_its_range(started: CatalogState) -> None:
    draft = append_draft(started, {A: 1})
    apply(started, at(started, draft))
    refused(
        started,
        replace(draft, check=draft.check._replace(end_phys=draft.to_phys + 1)),
        "before the end of its checksum's bytes",
    )
    empty = replace(append_draft(started, {}), check=started.cursor.check)
    apply(started, at(started, empty))
    before = empty.check._replace(end_phys=0)
    refused(
        started,
        replace(empty, to_phys=empty.from_phys - 1, check=before),
        "before the end of its checksum's bytes",
    )


@pytest.mark.parametrize("field", ["restored", "purged"])
def test_an_append_takes_no_garbage_back_and_purges_none(started: CatalogState, field: str) -> None:
    garbage = apply(started, at(started, CommitDraft(CommitKind.MAINTENANCE, pending_deletions=["sets/x"])))
    apply(garbage, at(garbage, CommitDraft(CommitKind.MAINTENANCE, **{field: ["sets/x"]})))  # type: ignore[arg-type]
    changed: dict[str, Any] = {field: ["sets/x"]}
    refused(
        garbage, replace(append_draft(garbage, {A: 1}), **changed), "it appends messages, but also removes"
    )


@pytest.mark.parametrize("kind", [CommitKind.CLAIM, CommitKind.LOG_HISTORY, CommitKind.RELEASE])
def test_commits_of_other_kinds_are_not_appended(kind: CommitKind) -> None:
    memory = MemoryStore()
    made = writer(memory)
    made.claim()
    made.append(append_draft(made.state, {A: 1}))
    before = made.state
    owner = Owner("w1", "run", "h", NOW_MS, False) if kind == CommitKind.CLAIM else None
    with pytest.raises(CommitInvalidError, match=f"a commit of the kind {kind} is made by"):
        made.append(CommitDraft(kind, owner=owner, created_ms=NOW_MS))
    assert made.state is before
    assert head_version(memory) == before.version
    made.append(append_draft(made.state, {A: 1}))


def with_new_history() -> tuple[CatalogState, Any, CatalogState]:
    """(state before a new log history, its commit, the state that its root holds)"""
    memory = MemoryStore()
    made = writer(memory)
    made.claim()
    made.append(append_draft(made.state, {A: 1, B: 1}))
    common = made.state
    made.append(append_draft(made.state, {A: 2}))
    before = made.state
    made.append_history(common_version=common.version, phys=common.cursor.phys)
    commit = read_commit(memory, made.state.version)
    return before, commit, read_root(memory, commit.draft.pages.root)


def test_a_new_log_history_begins_with_the_state_its_root_holds() -> None:
    before, commit, root = with_new_history()
    assert apply(before, commit, root).cursor == root.cursor
    history = root.log_histories[-1]
    assert root.owner is not None
    others = {
        "version": root.version + 1,
        "epoch": root.epoch + 1,
        "owner": root.owner._replace(instance="another"),
        "log_histories": (*root.log_histories[:-1], history._replace(begin_phys=history.begin_phys + 1)),
        "root": root.root._replace(key="pages/another"),
        "created_ms": root.created_ms + 1,
    }
    for name, value in others.items():
        with pytest.raises(CommitInvalidError, match="root page"):
            apply(before, commit, replace(root, **{name: value}))
    for cursor in (
        replace(root.cursor, check=LogCheck(0, 1, 2)),
        replace(root.cursor, phys=root.cursor.phys + 1),
        replace(root.cursor, history=root.cursor.history + 1),
    ):
        with pytest.raises(CommitInvalidError, match="root page"):
            apply(before, commit, replace(root, cursor=cursor))
    for missing in (None, replace(root, log_histories=())):
        with pytest.raises(CommitInvalidError):
            apply(before, commit, missing)


@pytest.mark.parametrize(
    ("field", "dtype"),
    [("runs", RUN_DTYPE), ("gaps", GAP_DTYPE), ("removed", REMOVED_DTYPE), ("floors", FLOOR_DTYPE)],
)
def test_a_commit_of_a_new_log_history_carries_no_data(field: str, dtype: np.dtype[Any]) -> None:
    before, commit, root = with_new_history()
    changed: dict[str, Any] = {field: np.zeros(1, dtype)}
    with pytest.raises(CommitInvalidError, match="may not add or remove messages"):
        apply(before, replace(commit, draft=replace(commit.draft, **changed)), root)


def test_tombstones_and_gaps_of_the_first_queue_outlive_a_new_log_history() -> None:
    """Its runs stand in pages: without the tombstone what was removed would be read again."""
    memory = MemoryStore()
    made = writer(memory, limits=small_limits(merge_sequences=50, merge_spills=50))
    made.claim()
    made.append(append_draft(made.state, {A: 2}))
    made.append(append_draft(made.state, {A: 2, B: 2}, gap={A: 3}))
    while not made.state.pages:
        made.append(append_draft(made.state, {A: 1, B: 1}))
    runs = RunIndex(memory).runs_of(made.state, A).runs
    removed = np.zeros(1, REMOVED_DTYPE)
    for name in ("rows", "base_queue_offset", "end_queue_offset", "version"):
        removed[name] = runs[name][:1]
    made.append(CommitDraft(CommitKind.MAINTENANCE, queues=[A], removed=removed, created_ms=NOW_MS))
    made.append(append_draft(made.state, {A: 1, B: 1}))
    common = made.state
    assert common.row_of(A) == 0 and len(common.tombstones) == 1
    made.append(append_draft(made.state, {A: 1, B: 1}))
    state = made.append_history(common_version=common.version, phys=common.cursor.phys)
    assert state.tombstones.tolist() == common.tombstones.tolist()
    assert state.gaps.tolist() == common.gaps.tolist()
    for seen in (state, load(memory)):
        living = RunIndex(memory).runs_of(seen, A).runs
        assert (
            living["base_queue_offset"].tolist()
            == RunIndex(memory).runs_of(common, A).runs["base_queue_offset"].tolist()
        )
        assert int(living["base_queue_offset"][0]) > 0


def test_tombstones_of_a_queue_that_a_new_log_history_drops_go_with_it() -> None:
    memory = MemoryStore()
    made = writer(memory, limits=small_limits(merge_sequences=50, merge_spills=50))
    made.claim()
    made.append(append_draft(made.state, {A: 2}))
    common = made.state
    made.append(append_draft(made.state, {A: 1, B: 2}))
    made.append(append_draft(made.state, {B: 2}))
    made.append(append_draft(made.state, {B: 2}, gap={B: 3}))
    while not made.state.pages:
        made.append(append_draft(made.state, {A: 1, B: 1}))
    runs = RunIndex(memory).runs_of(made.state, B).runs
    removed = np.zeros(1, REMOVED_DTYPE)
    for name in ("rows", "base_queue_offset", "end_queue_offset", "version"):
        removed[name] = runs[name][:1]
    made.append(CommitDraft(CommitKind.MAINTENANCE, queues=[B], removed=removed, created_ms=NOW_MS))
    assert len(made.state.tombstones) == len(made.state.gaps) == 1
    state = made.append_history(common_version=common.version, phys=common.cursor.phys)
    assert state.row_of(B) is None
    assert (len(state.tombstones), len(state.gaps)) == (0, 0)


class Overtaken(MemoryStore):
    """Another actor commits right before the next commit of the one under test."""

    def __init__(self) -> None:
        super().__init__()
        self.before_commit: Callable[[], object] | None = None

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        if "catalog/" in key and self.before_commit is not None:
            overtake, self.before_commit = self.before_commit, None
            overtake()
        super().put_if_absent(key, body, timeout_s=timeout_s)


def test_after_a_lost_commit_pages_wait_for_some_commits() -> None:
    """Another actor is busy: a page that is made for nothing costs more than one that comes later."""
    store = Overtaken()
    made = writer(store, limits=small_limits(root_every=1, root_every_max=1, page_retry_commits=2))
    made.claim()
    made.append(append_draft(made.state, {A: 1}))
    other = writer(store, "gc", "maintenance", limits=small_limits(root_every=1))

    def commit() -> None:
        other.maintain(lambda state: CommitDraft(CommitKind.MAINTENANCE, hide=[A], created_ms=NOW_MS))

    store.before_commit = commit
    lost_to = made.state.version + 1
    has_root = []
    for _ in range(4):
        made.append(append_draft(made.state, {A: 1}))
        has_root.append(bool(read_commit(store, made.state.version).draft.pages.root.key))
    assert read_commit(store, lost_to).place.actor == "gc"
    assert has_root == [False, False, True, True]
