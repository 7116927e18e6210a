"""Old roots are collected; those that are kept lead to earlier versions."""

import pytest

from tests.catalog.drafts import append_draft, queue, small_limits, writer
from tiered.catalog import apply
from tiered.catalog.apply import KEEP_EVERY, KEPT_MAX, with_root
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import describe
from tiered.catalog.state import RootRef
from tiered.object_store.memory import MemoryStore

A = queue("a")


def test_one_root_of_every_block_of_versions_is_kept() -> None:
    kept: tuple[RootRef, ...] = ()
    for version in range(64, 5 * KEEP_EVERY, 64):
        kept = with_root(kept, RootRef(f"pages/{version}", version))
    assert [root.version for root in kept] == [64, *(block * KEEP_EVERY for block in range(1, 5))]


def test_their_number_is_bounded_and_their_distance_grows_with_age() -> None:
    kept: tuple[RootRef, ...] = ()
    for block in range(1, 1500):
        kept = with_root(kept, RootRef("pages/x", block * KEEP_EVERY))
        assert len(kept) <= KEPT_MAX
    versions = [root.version for root in kept]
    assert versions == sorted(versions) and versions[-1] == 1499 * KEEP_EVERY
    assert versions[-1] - versions[-2] == KEEP_EVERY < versions[1] - versions[0]


def test_an_earlier_version_is_read_from_a_kept_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "KEEP_EVERY", 20)
    store = MemoryStore()
    made = writer(store, limits=small_limits(root_every_max=5))
    made.claim()
    states = []
    for _ in range(90):
        states.append(made.append(append_draft(made.state, {A: 1})))
    garbage = [key for key in made.state.pending_deletions if key.startswith("pages/root-")]
    kept = {root.key for root in made.state.kept_roots}
    assert len(garbage) > 10 and len(kept) == 5 and not kept & set(garbage)
    store.delete(garbage)
    for version in (7, 26, 45, 64, 88, 91):
        (wanted,) = [state for state in states if state.version == version]
        reads = _Reads(store)
        assert describe(load(reads, version=version)) == describe(wanted)
        assert reads.count <= 30


class _Reads(MemoryStore):
    """Counts requests for objects of another store."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._inner, self.count = store, 0

    def get(self, key: str, max_bytes: int) -> bytes:
        self.count += 1
        return self._inner.get(key, max_bytes)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.count += 1
        return self._inner.get_range(key, offset, length)
