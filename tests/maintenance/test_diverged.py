"""Messages of truncated logs: listed, read, and kept from garbage collection."""

from __future__ import annotations

import pytest

from rocketmq_tiered.maintenance.diverged_messages import DivergedQueue, diverged_queues, keep_history
from rocketmq_tiered.maintenance.gc import run_gc
from tests.catalog.drafts import NOW_MS, append_draft, queue, writer
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.deletions import KEPT_MS
from tiered.catalog.diverged import superseded_histories, superseded_state
from tiered.errors import NotFoundError
from tiered.object_store.memory import MemoryStore

A, B = queue("a"), queue("b")
DAY_MS = 86_400_000


def grow(store: MemoryStore, made: CatalogWriter, count: int, *names: object) -> list[str]:
    """``count`` commits with one row of each queue; returns the keys of their objects."""
    keys: list[str] = []
    for _ in range(count):
        draft = append_draft(made.state, dict.fromkeys(names, 1))  # type: ignore[arg-type]
        for key in draft.object_keys:
            store.put_if_absent(key, [b"x"])
        made.append(draft)
        keys += draft.object_keys
    return keys


def truncated(store: MemoryStore, lost: int = 20) -> tuple[CatalogWriter, list[str]]:
    """An archive of which the last ``lost`` commits were superseded, with the keys of their objects."""
    made = writer(store)
    made.claim()
    grow(store, made, 4, A, B)
    common = made.state
    keys = grow(store, made, lost, A)
    made.append_history(common_version=common.version, phys=common.cursor.phys)
    grow(store, made, 3, B)
    return made, keys


def spans(found: list[DivergedQueue]) -> list[tuple[int, str, int, int, int, int]]:
    return [(q.log_history, q.queue.topic, q.min_offset, q.max_offset, q.messages, q.objects) for q in found]


@pytest.mark.parametrize("lost", [1, 20, 60])
def test_superseded_messages_are_found_in_commits_also_without_pages_and_roots(lost: int) -> None:
    store = MemoryStore()
    made, _ = truncated(store, lost)
    grow(store, made, 20, A, B)
    for info in list(store.list("pages/")):
        if info.key not in load(store).catalog_keys():
            store.delete([info.key])
    assert superseded_histories(load(store)) == [1]
    found = superseded_state(store, load(store), 1)
    assert found.visible_queues() == [A] and found.memory_runs == lost
    row = found.queue(A)
    assert row is not None
    assert (row["min_queue_offset"], row["end_queue_offset"], row["row_count"]) == (4, 4 + lost, lost)
    assert spans(diverged_queues(store, load(store))) == [(1, "a", 4, 4 + lost, lost, lost)]


def test_each_message_belongs_to_the_log_history_that_archived_it() -> None:
    store = MemoryStore()
    made = writer(store)
    made.claim()
    grow(store, made, 3, A)
    first = made.state
    grow(store, made, 3, A)
    second = made.state
    grow(store, made, 2, A)
    made.append_history(common_version=second.version, phys=second.cursor.phys)
    grow(store, made, 4, A)
    assert spans(diverged_queues(store, load(store))) == [(1, "a", 6, 8, 2, 2)]
    made.append_history(common_version=first.version, phys=first.cursor.phys)
    grow(store, made, 1, A)
    assert spans(diverged_queues(store, load(store))) == [(1, "a", 3, 8, 5, 5), (2, "a", 6, 10, 4, 4)]


def test_a_log_that_shares_nothing_supersedes_no_objects() -> None:
    store = MemoryStore()
    made = writer(store)
    made.claim()
    grow(store, made, 5, A)
    made.append_history(common_version=0, phys=0)
    assert superseded_histories(load(store)) == [] == diverged_queues(store, load(store))
    with pytest.raises(NotFoundError, match="no messages of log history 1"):
        superseded_state(store, load(store), 1)


@pytest.mark.parametrize("spilled", [False, True], ids=["recent", "listed"])
def test_gc_never_deletes_a_kept_log_history(spilled: bool) -> None:
    now_ms = [NOW_MS]
    store = MemoryStore(clock_ms=lambda: now_ms[0])
    made, keys = truncated(store)
    other = ["sets/00/other-1-1.sso"]
    store.put_if_absent(other[0], [b"x"])
    made.append(CommitDraft(CommitKind.MAINTENANCE, pending_deletions=other, created_ms=NOW_MS))
    if spilled:
        keep_history(store, load(store), 1, clock=lambda: NOW_MS)  # into a list; a second time is no error
    before = load(store)
    assert before.diverged_count == (0 if spilled else 20)
    assert keep_history(store, load(store), 1, clock=lambda: NOW_MS) == 20
    state = load(store)
    assert state.diverged_count == 0 and len(state.deletion_lists) == 1
    assert (state.version == before.version) is spilled
    assert {found.since_ms for found in diverged_queues(store, state)} == {KEPT_MS}
    now_ms[0] += 1000 * DAY_MS
    writer(store, "w2").claim(take_over=True)  # objects of an earlier epoch that no commit names are garbage
    plan = run_gc(
        store, load(store), apply=True, grace_ms=DAY_MS, diverged_grace_ms=0, clock=lambda: now_ms[0]
    )
    assert other[0] in plan.delete and not set(keys) & set(plan.delete)
    assert set(keys) <= {info.key for info in store.list("sets/")}
    assert spans(diverged_queues(store, load(store))) == [(1, "a", 4, 24, 20, 20)]


def test_what_gc_has_deleted_is_neither_listed_nor_kept() -> None:
    store = MemoryStore(clock_ms=lambda: NOW_MS)
    _, keys = truncated(store)
    plan = run_gc(store, load(store), apply=True, grace_ms=DAY_MS, diverged_grace_ms=0, clock=lambda: NOW_MS)
    assert set(keys) <= set(plan.delete)
    assert diverged_queues(store, load(store)) == []
    with pytest.raises(NotFoundError, match="no objects of log history 1 are left"):
        keep_history(store, load(store), 1, clock=lambda: NOW_MS)
