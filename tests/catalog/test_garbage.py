"""GC deletes only pending deletions of a committed version, and attempts of an epoch already fenced.

Lists of pending deletions: roots stay small, and garbage collection finds what they name.
"""

import pytest

from rocketmq_tiered.maintenance.gc import CLOCK_SKEW_MS_MAX
from tests.catalog.collection import run_gc
from tests.catalog.drafts import NOW_MS, Bucket, append_draft, queue, small_limits, writer
from tiered.catalog.catalog_reader import head_version, load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitInvalidError, CommitKind, describe, encode_root
from tiered.catalog.deletions import DeletionChange, PendingDeletion, Reason, encode_list, list_of, read_list
from tiered.catalog.garbage import Grace, KeySet, plan_gc, referenced_by, settled_version
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, FencedError, UsageError
from tiered.formats.keys import catalog_key
from tiered.object_store.interface import ObjectInfo
from tiered.object_store.memory import MemoryStore

HOUR_MS = 3_600_000
GRACE_MS = 72 * HOUR_MS
A = queue("a")


@pytest.fixture
def memory() -> Bucket:
    return Bucket()


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


def collect(store: Bucket, grace_ms: int = GRACE_MS, apply: bool = True) -> set[str]:
    """When the grace period of all pending deletions so far is over."""
    store.now_ms = later()
    return set(run_gc(store, load(store), apply=apply, grace_ms=grace_ms, clock=later).delete)


def test_removal_is_undoable_for_the_grace_period(memory: Bucket) -> None:
    made = filled(memory, root_every=100)  # the clock goes back: no root may be collected before
    key = "sets/00/1-1-7.sso"
    put(memory, key)
    memory.now_ms += 5_000
    made.append(CommitDraft(CommitKind.MAINTENANCE, pending_deletions=[key], created_ms=NOW_MS + 5_000))
    assert key not in collect(memory)
    made.refresh()
    memory.now_ms = NOW_MS
    made.append(CommitDraft(CommitKind.MAINTENANCE, restored=[key], created_ms=NOW_MS))
    made.append(CommitDraft(CommitKind.MAINTENANCE, pending_deletions=[key], created_ms=NOW_MS))
    assert key in collect(memory)
    assert key not in everything(memory)
    assert not load(memory).pending_deletions.keys() & {key}


@pytest.mark.parametrize("writers_clock_ms", [0, NOW_MS - 10 * GRACE_MS, NOW_MS + 1])
def test_a_writers_wrong_clock_takes_no_grace_away(memory: Bucket, writers_clock_ms: int) -> None:
    """One without a battery begins at 1970: what becomes a pending deletion now is not half a century old."""
    made = filled(memory)
    key = "sets/00/1-1-7.sso"
    put(memory, key)
    memory.now_ms = NOW_MS + GRACE_MS - 60_000
    made.append(CommitDraft(CommitKind.MAINTENANCE, pending_deletions=[key], created_ms=writers_clock_ms))
    assert key not in collect(memory)
    memory.now_ms = later() + GRACE_MS
    plan = run_gc(memory, load(memory), apply=True, grace_ms=GRACE_MS, clock=lambda: memory.now_ms)
    assert key in plan.delete


@pytest.mark.parametrize("versions", [1, 2, 7, 64])
def test_the_bucket_says_which_versions_are_older_than_the_grace_period(versions: int) -> None:
    memory = Bucket()
    for version in range(1, versions + 1):
        memory.now_ms = NOW_MS + version
        put(memory, catalog_key(version))
    for before in range(-1, versions + 3):
        assert settled_version(memory, versions, NOW_MS + before) == min(max(before, 0), versions)
    assert settled_version(memory, versions + 1, NOW_MS + 10**6) == versions, (
        "a missing commit is not settled"
    )


def test_it_is_a_dry_run_by_default(memory: Bucket) -> None:
    made = filled(memory)
    put(memory, "sets/00/1-1-7.sso")
    made.append(
        CommitDraft(CommitKind.MAINTENANCE, pending_deletions=["sets/00/1-1-7.sso"], created_ms=NOW_MS)
    )
    before, head = everything(memory), head_version(memory)
    assert "sets/00/1-1-7.sso" in collect(memory, apply=False)
    assert (everything(memory), head_version(memory)) == (before, head)


def test_never_merely_old_and_unreferenced(memory: Bucket) -> None:
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


def test_attempts_of_a_fenced_epoch_go(memory: Bucket) -> None:
    made = filled(memory)
    needed = everything(memory)
    put(memory, "sets/00/9-1-99.sso", "data/00/t/0/0/00000000000000000000-1-4.so", "state/topics-1-5-abc")
    put(memory, "pages/root-00000000000000000007-1-x")
    made.release()
    made.claim()
    put(memory, "sets/00/9-2-1.sso")
    gone = collect(memory)
    assert gone >= {"sets/00/9-1-99.sso", "data/00/t/0/0/00000000000000000000-1-4.so"}
    assert "state/topics-1-5-abc" in everything(memory), "the only copy of the table"
    assert "pages/root-00000000000000000007-1-x" in gone
    assert "sets/00/9-2-1.sso" in everything(memory)
    assert {key for key in needed if key.startswith(("catalog/", "sets/"))} <= everything(memory)


def test_what_the_head_needs_stays_and_the_catalog_with_it(memory: Bucket) -> None:
    made = filled(memory, 60)
    catalog = {key for key in everything(memory) if key.startswith("catalog/")}
    assert any(key.startswith("pages/root-") for key in collect(memory, grace_ms=0))
    assert catalog <= everything(memory)
    state = load(memory)
    assert describe(state)["queues"] == describe(made.state)["queues"]
    references = referenced_by(memory, state)
    data = {key for key in everything(memory) if key.startswith("sets/")}
    assert len(data) == 60
    assert all(key in references for key in data)
    # A second collection finds only the pending deletions of the first one's own commit.
    assert not collect(memory, grace_ms=0)


def test_a_pending_deletion_that_is_still_named_is_kept() -> None:
    state = CatalogState(
        epoch=3, pending_deletions={"sets/00/a-1-1.sso": PendingDeletion(0, 2, Reason.EXPIRED)}
    )
    listing = [ObjectInfo("sets/00/a-1-1.sso", 10, 0), ObjectInfo("sets/00/b-2-1.sso", 20, 0)]
    plan = plan_gc(
        listing,
        state,
        KeySet(["sets/00/a-1-1.sso"]),
        now_ms=GRACE_MS,
        grace=Grace(0, 0),
        settled_version=lambda _: 2,
        keys_of=lambda _: (),
    )
    assert (plan.delete, plan.purge, plan.candidates) == ([], [], listing[1:])
    assert plan.kept == {"referenced by the head": 1}


def test_what_is_taken_back_during_the_run_is_not_deleted(memory: Bucket) -> None:
    made = filled(memory)
    key = "sets/00/1-1-7.sso"
    put(memory, key)
    made.append(CommitDraft(CommitKind.MAINTENANCE, pending_deletions=[key], created_ms=NOW_MS))
    stale = load(memory)
    made.append(CommitDraft(CommitKind.MAINTENANCE, restored=[key], created_ms=NOW_MS))
    memory.now_ms = later()
    run_gc(memory, stale, apply=True, grace_ms=0, clock=later)
    assert key in everything(memory)


def test_a_paused_writer_cannot_resurrect_a_deleted_name(memory: Bucket) -> None:
    paused = filled(memory)
    draft = append_draft(paused.state, {A: 1})
    put(memory, *draft.object_keys)
    writer(memory, instance="w2").claim(take_over=True)
    assert set(draft.object_keys) <= collect(memory)
    put(memory, *draft.object_keys)  # its late PUT lands
    with pytest.raises(FencedError, match="this writer stops"):
        paused.append(draft)
    assert set(draft.object_keys) <= collect(memory)


@pytest.mark.parametrize("skew_ms", [CLOCK_SKEW_MS_MAX + 1, -CLOCK_SKEW_MS_MAX - 1])
def test_it_stops_when_the_clock_is_five_minutes_off(memory: Bucket, skew_ms: int) -> None:
    filled(memory)
    memory.now_ms = later()
    with pytest.raises(UsageError, match="clock is 300 s"):
        run_gc(memory, load(memory), apply=False, grace_ms=0, clock=lambda: later() + skew_ms)
    for allowed_ms in (CLOCK_SKEW_MS_MAX, -CLOCK_SKEW_MS_MAX):
        run_gc(memory, load(memory), apply=False, grace_ms=0, clock=lambda: later() + allowed_ms)  # noqa: B023


def test_a_key_set_finds_what_it_holds() -> None:
    keys = KeySet(f"k{number}" for number in range(1000))
    assert all(f"k{number}" in keys for number in range(1000))
    assert not any(f"k{number}" in keys for number in range(1000, 2000))
    assert "k" not in KeySet([])
    both = KeySet.union([KeySet(["a", "b"]), KeySet([]), KeySet(["c"])])
    assert all(key in both for key in "abc") and "d" not in both


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


def collect_sets(store: Bucket, after_ms: int, **options: int) -> set[str]:
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
    assert collect_sets(store, GRACE_MS - 1) == set()
    assert len(collect_sets(store, GRACE_MS + 1)) == 50
    state = load(store)
    assert not state.deletion_lists
    assert not [info.key for info in store.list("sets/00/x-")]
    assert made.state.deletion_lists[0].key in state.pending_deletions


def test_objects_of_a_truncated_log_wait_longer() -> None:
    store = Bucket()
    with_garbage(store, Reason.DIVERGED)
    assert collect_sets(store, GRACE_MS + 1, diverged_grace_ms=10 * GRACE_MS) == set()
    assert len(collect_sets(store, 10 * GRACE_MS + 1, diverged_grace_ms=10 * GRACE_MS)) == 50


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
    made = with_garbage(MemoryStore())
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
    with pytest.raises(CorruptionError, match="the catalog names 51"):
        read_list(store, listed._replace(entries=51))
