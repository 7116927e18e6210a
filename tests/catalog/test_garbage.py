"""GC deletes only what a committed version has given up, or attempts of an epoch already fenced."""

from __future__ import annotations

import pytest

from tests.catalog.drafts import NOW_MS, append_draft, queue, small_limits, writer
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.garbage import CLOCK_SKEW_MS_MAX, KeySet, plan_gc, referenced_by, run_gc
from tiered.catalog.protocol import CatalogWriter, load
from tiered.catalog.reading import head_version
from tiered.catalog.snapshot import describe
from tiered.catalog.state import CatalogState, Doom
from tiered.errors import UsageError
from tiered.object_store.memory import MemoryStore
from tiered.object_store.protocol import ObjectInfo

HOUR_MS = 3_600_000
GRACE_MS = 72 * HOUR_MS
A = queue("a")


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(clock_ms=lambda: NOW_MS + GRACE_MS)


def later() -> int:
    return NOW_MS + GRACE_MS


def put(store: MemoryStore, *keys: str) -> None:
    for key in keys:
        store.put_if_absent(key, [b"x"])


def filled(store: MemoryStore, commits: int = 30, **limits: float) -> CatalogWriter:
    made = writer(store, limits=small_limits(**limits))
    made.claim()
    for _ in range(commits):
        draft = append_draft(made.state, {A: 1})
        put(store, *draft.object_keys)
        made.append(draft)
    return made


def everything(store: MemoryStore) -> set[str]:
    return {info.key for info in store.list("")}


def collect(store: MemoryStore, grace_ms: int = GRACE_MS, apply: bool = True) -> set[str]:
    return set(run_gc(store, load(store), apply=apply, grace_ms=grace_ms, clock=later).delete)


def test_removal_is_undoable_for_the_grace_period(memory: MemoryStore) -> None:
    made = filled(memory)
    key = "sets/00/1-1-7.sso"
    put(memory, key)
    made.append(CommitDraft(CommitKind.MAINTENANCE, doomed=[key], created_ms=NOW_MS + 1))
    assert key not in collect(memory)
    made.refresh()
    made.append(CommitDraft(CommitKind.MAINTENANCE, undoomed=[key], created_ms=NOW_MS + 1))
    made.append(CommitDraft(CommitKind.MAINTENANCE, doomed=[key], created_ms=NOW_MS))
    assert key in collect(memory)
    assert key not in everything(memory)
    assert not load(memory).doomed.keys() & {key}


def test_it_is_a_dry_run_unless_told_otherwise(memory: MemoryStore) -> None:
    made = filled(memory)
    put(memory, "sets/00/1-1-7.sso")
    made.append(CommitDraft(CommitKind.MAINTENANCE, doomed=["sets/00/1-1-7.sso"], created_ms=NOW_MS))
    before, head = everything(memory), head_version(memory)
    assert "sets/00/1-1-7.sso" in collect(memory, apply=False)
    assert (everything(memory), head_version(memory)) == (before, head)


def test_never_merely_old_and_unreferenced(memory: MemoryStore) -> None:
    filled(memory)
    # In flight, by the writer or by a compaction: unreferenced, and of the epoch that may still name it.
    put(memory, "sets/00/9-1-99.sso", "data/00/t/0/0/00000000000000000000-1-4.so", "state/topics-1-5-abc")
    put(memory, "index/0000000000001-0000000000002-x.idx", "data/00/foreign")
    collect(memory, grace_ms=0)
    for key in (
        "sets/00/9-1-99.sso",
        "state/topics-1-5-abc",
        "index/0000000000001-0000000000002-x.idx",
        "data/00/foreign",
    ):
        assert key in everything(memory)


def test_attempts_of_a_fenced_epoch_go(memory: MemoryStore) -> None:
    made = filled(memory)
    needed = everything(memory)
    put(memory, "sets/00/9-1-99.sso", "data/00/t/0/0/00000000000000000000-1-4.so", "state/topics-1-5-abc")
    put(memory, "pages/root-00000000000000000007-1-x")
    made.release()
    made.claim()
    put(memory, "sets/00/9-2-1.sso")
    gone = collect(memory)
    assert gone >= {"sets/00/9-1-99.sso", "data/00/t/0/0/00000000000000000000-1-4.so", "state/topics-1-5-abc"}
    assert "pages/root-00000000000000000007-1-x" in gone
    assert "sets/00/9-2-1.sso" in everything(memory)
    assert {key for key in needed if key.startswith(("catalog/", "sets/"))} <= everything(memory)


@pytest.mark.parametrize("carried_bytes_max", [4 << 20, 0])
def test_what_the_head_needs_stays_and_the_catalog_with_it(
    memory: MemoryStore, carried_bytes_max: int
) -> None:
    made = filled(memory, 60, carried_bytes_max=carried_bytes_max)
    catalog = {key for key in everything(memory) if key.startswith("catalog/")}
    gone = collect(memory, grace_ms=0)
    assert any(key.startswith("pages/") for key in gone) == (not carried_bytes_max)
    assert catalog <= everything(memory)
    state = load(memory)
    assert describe(state)["queues"] == describe(made.state)["queues"]
    references = referenced_by(memory, state)
    data = {key for key in everything(memory) if key.startswith("sets/")}
    assert len(data) == 60
    assert all(key in references for key in data)
    # A second collection finds nothing but what the first one's own commit gave up.
    assert not collect(memory, grace_ms=0)


def test_an_object_still_named_is_kept_even_if_doomed() -> None:
    state = CatalogState(epoch=3, doomed={"sets/00/a-1-1.sso": Doom(0, 2)})
    listing = [ObjectInfo("sets/00/a-1-1.sso", 10, 0), ObjectInfo("sets/00/b-2-1.sso", 20, 0)]
    plan = plan_gc(listing, state, KeySet(["sets/00/a-1-1.sso"]), now_ms=GRACE_MS, grace_ms=0)
    assert (plan.delete, plan.purge, plan.delete_bytes) == (["sets/00/b-2-1.sso"], [], 20)
    assert plan.kept == {"named by the head": 1}


def test_what_is_taken_back_meanwhile_is_not_deleted(memory: MemoryStore) -> None:
    made = filled(memory)
    key = "sets/00/1-1-7.sso"
    put(memory, key)
    made.append(CommitDraft(CommitKind.MAINTENANCE, doomed=[key], created_ms=NOW_MS))
    stale = load(memory)
    made.append(CommitDraft(CommitKind.MAINTENANCE, undoomed=[key], created_ms=NOW_MS))
    run_gc(memory, stale, apply=True, grace_ms=0, clock=later)
    assert key in everything(memory)


def test_a_paused_writer_cannot_resurrect_a_deleted_name(memory: MemoryStore) -> None:
    paused = filled(memory)
    draft = append_draft(paused.state, {A: 1})
    put(memory, *draft.object_keys)
    writer(memory, instance="w2").claim(take_over=True)
    assert set(draft.object_keys) <= collect(memory)
    put(memory, *draft.object_keys)  # its late PUT lands
    with pytest.raises(Exception, match="fenced"):
        paused.append(draft)
    assert set(draft.object_keys) <= collect(memory)


@pytest.mark.parametrize("skew_ms", [CLOCK_SKEW_MS_MAX + 1, -CLOCK_SKEW_MS_MAX - 1])
def test_it_stops_when_the_clock_is_five_minutes_off(memory: MemoryStore, skew_ms: int) -> None:
    filled(memory)
    with pytest.raises(UsageError, match="clock is 300 s"):
        run_gc(memory, load(memory), apply=False, grace_ms=0, clock=lambda: later() + skew_ms)
    run_gc(memory, load(memory), apply=False, grace_ms=0, clock=lambda: later() + skew_ms // 2)


def test_a_key_set_finds_what_it_holds() -> None:
    keys = KeySet(f"k{number}" for number in range(1000))
    assert all(f"k{number}" in keys for number in range(1000))
    assert not any(f"k{number}" in keys for number in range(1000, 2000))
    assert "k" not in KeySet([])
