"""Lists of pending deletions: roots stay small, and garbage collection finds what they name."""

from __future__ import annotations

import pytest

from tests.catalog.collection import run_gc
from tests.catalog.drafts import NOW_MS, append_draft, queue, small_limits, writer
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitInvalidError, CommitKind
from tiered.catalog.deletions import DeletionChange, PendingDeletion, Reason, encode_list, list_of, read_list
from tiered.catalog.snapshot import describe, encode_root
from tiered.errors import CorruptionError
from tiered.object_store.memory import MemoryStore

A = queue("a")
GRACE_MS = 72 * 3_600_000


class Bucket(MemoryStore):
    def __init__(self) -> None:
        self.now_ms = NOW_MS
        super().__init__(clock_ms=lambda: self.now_ms)


def with_garbage(store: MemoryStore, reason: str = Reason.ABANDONED, count: int = 50) -> CatalogWriter:
    made = writer(store, limits=small_limits(spill_deletions=20))
    made.claim()
    keys = [f"sets/00/x-1-{number}.sso" for number in range(count)]
    for key in keys:
        store.put_if_absent(key, [b"x"])
    draft = append_draft(made.state, {A: 1})
    for key in draft.object_keys:
        store.put_if_absent(key, [b"x"])
    made.append(draft)
    made.append(CommitDraft(CommitKind.MAINTENANCE, pending_deletions=keys, reason=reason, created_ms=NOW_MS))
    for _ in range(12):
        made.append(CommitDraft(CommitKind.MAINTENANCE, hide=[A], created_ms=NOW_MS))
    return made


def collect(store: Bucket, after_ms: int, **options: int) -> set[str]:
    store.now_ms = NOW_MS + after_ms
    plan = run_gc(store, load(store), apply=True, grace_ms=GRACE_MS, clock=lambda: store.now_ms, **options)
    return {key for key in plan.delete if key.startswith("sets/")}


def test_many_pending_deletions_move_into_a_list() -> None:
    store = Bucket()
    state = with_garbage(store).state
    (listed,) = state.deletion_lists
    assert (listed.reason, listed.entries, state.pending_deletion_count) == (
        Reason.ABANDONED,
        50,
        50 + len(state.pending_deletions),
    )
    assert not any(key.startswith("sets/") for key in state.pending_deletions)
    assert len(read_list(store, listed)) == 50
    assert "sets/00/x-1-50.sso" not in {*read_list(store, listed), *state.pending_deletions}
    assert len(encode_root(state)) < 1_500
    assert describe(load(store)) == describe(state)
    assert state.oldest_pending_deletion_ms == NOW_MS


def test_a_list_is_collected_after_its_grace_period() -> None:
    store = Bucket()
    made = with_garbage(store)
    assert collect(store, GRACE_MS - 1) == set()
    assert len(collect(store, GRACE_MS + 1)) == 50
    state = load(store)
    assert not state.deletion_lists
    assert not [info.key for info in store.list("sets/00/x-")]
    assert made.state.deletion_lists[0].key in state.pending_deletions


def test_objects_of_a_truncated_log_wait_longer() -> None:
    store = Bucket()
    with_garbage(store, Reason.DIVERGED)
    assert collect(store, GRACE_MS + 1, diverged_grace_ms=10 * GRACE_MS) == set()
    assert len(collect(store, 10 * GRACE_MS + 1, diverged_grace_ms=10 * GRACE_MS)) == 50


def test_a_list_replaced_in_the_meantime_is_not_collected() -> None:
    store = Bucket()
    made = with_garbage(store)
    stale = load(store)
    (listed,) = stale.deletion_lists
    entries = read_list(store, listed)
    rescued = entries.popitem()[0]
    data = encode_list(entries)
    key = "pages/deletions-00000000000000000099-1-other"
    store.put_if_absent(key, [data])
    change = DeletionChange(added=[list_of(key, entries, len(data))], removed=[listed.key])
    made.append(CommitDraft(CommitKind.MAINTENANCE, deletions=change, created_ms=NOW_MS))
    store.now_ms = NOW_MS + GRACE_MS + 1
    run_gc(store, stale, apply=True, grace_ms=GRACE_MS, clock=lambda: store.now_ms)
    assert store.get(rescued)
    assert len(list(store.list("sets/00/x-"))) == 50


def test_a_list_that_does_not_fit_is_refused() -> None:
    store = MemoryStore()
    made = with_garbage(store)
    entry = {"sets/x": PendingDeletion(1, 2, Reason.EXPIRED)}
    for change in (
        DeletionChange(removed=["pages/unknown"]),
        DeletionChange(spilled=[list_of("pages/y", entry, 1)]),
    ):
        with pytest.raises(CommitInvalidError, match="deletion"):
            made.append(CommitDraft(CommitKind.MAINTENANCE, deletions=change, created_ms=NOW_MS))


def test_a_damaged_list_is_named() -> None:
    store = MemoryStore()
    (listed,) = with_garbage(store).state.deletion_lists
    data = bytearray(store.get(listed.key))
    data[-1] ^= 1
    damaged = MemoryStore()
    damaged.put_if_absent(listed.key, [bytes(data)])
    with pytest.raises(CorruptionError, match=listed.key):
        read_list(damaged, listed)
    with pytest.raises(CorruptionError, match="expected 51"):
        read_list(store, listed._replace(entries=51))
