"""Index files in the catalog: coverage has no hole, fenced attempts are refused, replaced files are deleted later."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.catalog.collection import run_gc
from tests.catalog.drafts import NOW_MS, append_draft, at, queue, writer
from tiered.catalog.apply import apply
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import (
    CommitDraft,
    CommitInvalidError,
    CommitKind,
    decode_root,
    describe,
    encode_root,
)
from tiered.catalog.index_refs import (
    UNINDEXED,
    IndexChange,
    IndexRef,
    after_change,
    indexed_version,
    unindexed,
    with_unindexed,
)
from tiered.clock import Clock
from tiered.errors import CorruptionError
from tiered.formats.keys import index_key
from tiered.object_store.memory import MemoryStore


def ref(first: int, last: int, epoch: int = 1, name: str = "a") -> IndexRef:
    """A file that covers versions [first, last]."""
    key = index_key(NOW_MS, NOW_MS, epoch, f"{name}_{first}_{last}")
    return IndexRef(key, 0, first, last, NOW_MS, NOW_MS, 0, 1, 0, 0, (0, 0, 0, 0), 0, 100, 60)


def change(added: list[IndexRef], removed: list[IndexRef] | None = None) -> IndexChange:
    """What a commit does."""
    return IndexChange(added, [gone.key for gone in removed or []])


def applied(before: tuple[IndexRef, ...], delta: IndexChange, version: int = 100) -> tuple[IndexRef, ...]:
    """After a commit of epoch 1."""
    return after_change(before, delta, epoch=1, version=version, pending_deletions=())


def test_coverage_is_extended_and_merged() -> None:
    two = applied(applied((), change([ref(1, 4)])), change([ref(5, 9)]))
    assert indexed_version(two) == 9
    merged = applied(two, change([ref(1, 9, name="m")], list(two)))
    assert [(r.from_version, r.to_version) for r in merged] == [(1, 9)]
    assert applied(two, change([], [two[0]])) == two[1:]


@pytest.mark.parametrize(
    ("delta", "says"),
    [
        (change([ref(11, 12)]), "not covered exactly once"),
        (change([ref(8, 12)]), "not covered exactly once"),
        (change([ref(10, 100)]), "before 100"),
        (change([ref(10, 11, epoch=2)]), "has lost the archive"),
        (change([], [ref(10, 12)]), "that the catalog does not have"),
        (change([], [ref(5, 9)]), "without one that covers their versions"),
        (change([ref(1, 8, name="m")], [ref(1, 4), ref(5, 9)]), "without one that covers their versions"),
        (change([ref(3, 9, name="m")], [ref(1, 4), ref(5, 9)]), "covers all versions before 3"),
        (change([ref(1, 4)]), "an index file that the catalog already has"),
        (IndexChange([], [ref(1, 4).key] * 2), "that the catalog does not have"),
    ],
)
def test_any_other_change_is_refused(delta: IndexChange, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        applied((ref(1, 4), ref(5, 9)), delta)


def test_the_first_file_covers_from_the_first_version() -> None:
    with pytest.raises(ValueError, match="covers all versions before 2"):
        applied((), change([ref(2, 4)]))


def test_a_pending_deletion_is_never_published() -> None:
    with pytest.raises(ValueError, match="pending deletion"):
        after_change((), change([ref(1, 2)]), epoch=1, version=9, pending_deletions=[ref(1, 2).key])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.data())
def test_merging_neighbours_keeps_coverage(lengths: list[int], data: st.DataObject) -> None:
    files: tuple[IndexRef, ...] = ()
    for length in lengths:
        end = indexed_version(files)
        files = applied(files, change([ref(end + 1, end + length)]))
    low = data.draw(st.integers(0, len(files) - 1))
    gone = list(files[low : data.draw(st.integers(low, len(files) - 1)) + 1])
    merged = applied(files, change([ref(gone[0].from_version, gone[-1].to_version, name="m")], gone))
    assert indexed_version(merged) == sum(lengths)
    assert len(merged) == len(files) - len(gone) + 1


# -- through commits ------------------------------------------------------------------------------------------


def filled(store: MemoryStore) -> CatalogWriter:
    made = writer(store)
    made.claim()
    for _ in range(6):
        draft = append_draft(made.state, {queue("a"): 1})
        for key in draft.object_keys:
            store.put_if_absent(key, [b"x"])
        made.append(draft)
    return made


def publish(made: CatalogWriter, delta: IndexChange) -> None:
    made.maintain(lambda state: CommitDraft(CommitKind.MAINTENANCE, index=delta, created_ms=NOW_MS))


def test_readers_see_index_files_through_roots_and_commits() -> None:
    store = MemoryStore()
    made = filled(store)
    publish(made, change([ref(1, 3)]))
    for _ in range(7):
        made.append(append_draft(made.state, {queue("a"): 1}))
    assert load(store).indexes == (ref(1, 3),) == made.state.indexes
    assert load(store).indexed_version == 3
    assert describe(decode_root(encode_root(made.state), source="x")) == describe(made.state)


def test_only_maintenance_publishes() -> None:
    made = filled(MemoryStore())
    draft = replace(append_draft(made.state, {queue("a"): 1}), index=change([ref(1, 3)]))
    with pytest.raises(CommitInvalidError, match="may not change the index"):
        apply(made.state, at(made.state, draft))


def test_replaced_files_are_deleted_after_the_grace_period() -> None:
    now_ms = NOW_MS
    store = MemoryStore(clock=Clock(wall_ms=lambda: now_ms))
    made = filled(store)
    files = [ref(1, 3), ref(4, 5), ref(1, 5, name="merged"), ref(1, 2, name="abandoned")]
    for file in files:
        store.put_if_absent(file.key, [b"x"])
    publish(made, change(files[:1]))
    publish(made, change(files[1:2]))
    publish(made, change(files[2:3], files[:2]))
    assert set(made.state.pending_deletions) >= {files[0].key, files[1].key}

    def collected(grace_ms: int) -> set[str]:
        return set(run_gc(store, load(store), apply=True, grace_ms=grace_ms, clock=lambda: now_ms).delete)

    now_ms += 2_000

    assert not collected(3_000) & {file.key for file in files}
    assert collected(1_000) >= {files[0].key, files[1].key}
    present = {info.key for info in store.list("index/")}
    # What is named stays; an attempt of the epoch in force may still be published.
    assert present == {files[2].key, files[3].key}
    made.release()
    writer(store, "w2").claim()
    assert files[3].key in collected(5)
    assert {info.key for info in store.list("index/")} == {files[2].key}


def test_unindexed_keys_add_up() -> None:
    one = with_unindexed({}, {"data/x": [3]})
    two = with_unindexed(unindexed(one), {"data/x": [5, 3], "data/y": [4]})
    assert unindexed(two) == {"data/x": (3, 5), "data/y": (4,)}
    assert with_unindexed(unindexed(two), {}) == {} == unindexed({})
    assert with_unindexed(unindexed(two), {"data/x": [3]}) == {}, "nothing to say"
    three = with_unindexed(unindexed(two), {"data/z": [6]}, {"data/x": {3, 5}, "data/y": {7}})
    assert unindexed(three) == {"data/y": (4,), "data/z": (6,)}
    assert unindexed(with_unindexed(unindexed(one), {}, {"data/x": {3}})) == {}


@pytest.mark.parametrize("value", [3, ["data/x"], {"data/x": 3}, {"data/x": ["3"]}])
def test_impossible_values_of_unindexed_keys_are_damage(value: object) -> None:
    with pytest.raises(CorruptionError, match=UNINDEXED):
        unindexed({UNINDEXED: value})
