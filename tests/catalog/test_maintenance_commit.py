"""A change is committed only while what it was planned with stands, and no key that may exist is forgotten."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.catalog.drafts import NOW_MS, append_draft, clock_ms, queue, writer
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.deletions import DeletionChange, PendingDeletion, Reason
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.requirements import Floors, Requirements, histories_of
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import StoreFullError, UnansweredError
from tiered.model.tables import FLOOR_DTYPE
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore

A, B = queue("a"), queue("b")
NOTHING = CommitDraft(CommitKind.MAINTENANCE)


def grown(store: ObjectStore, cycles: int = 3) -> CatalogWriter:
    made = writer(store)
    made.claim()
    for _ in range(cycles):
        made.append(append_draft(made.state, {A: 2, B: 1}))
    return made


def raise_floor(made: CatalogWriter) -> None:
    floors = np.array([(0, 2, 2)], FLOOR_DTYPE)
    made.append(CommitDraft(CommitKind.MAINTENANCE, queues=[A], floors=floors, created_ms=NOW_MS))


def grow(made: CatalogWriter) -> None:
    for _ in range(12):
        made.append(append_draft(made.state, {A: 2, B: 1}))


def compact(made: CatalogWriter) -> None:
    made.append(CommitDraft(CommitKind.MAINTENANCE, reason=Reason.COMPACTED, created_ms=NOW_MS))


@pytest.mark.parametrize(
    ("required_of", "change", "unmet"),
    [
        (lambda state: Requirements(epoch=state.epoch), lambda made: made.claim(), "epoch"),
        (lambda state: Requirements(floors=Floors.of(state, [B, A])), raise_floor, "floors"),
        (lambda state: Requirements(memory=(state.version, state.memory_runs)), grow, "runs in memory"),
        (lambda state: Requirements(uncompacted_since=state.version), compact, "objects"),
        (lambda state: Requirements(announced=frozenset({"sets/none"})), raise_floor, "announced keys"),
    ],
)
def test_a_change_without_what_it_needs_is_not_committed(
    required_of: Callable[[CatalogState], Requirements], change: Callable[[CatalogWriter], object], unmet: str
) -> None:
    store = MemoryStore()
    owner = grown(store)
    state = load(store)
    change(owner)
    before = load(store).version
    maintenance = MaintenanceCommit.opened(store, state, "test", Clock(wall_ms=clock_ms))
    assert not maintenance.commit(lambda _newest: NOTHING, required_of(state))
    assert (maintenance.unmet, load(store).version) == (unmet, before)


def test_what_others_append_voids_nothing() -> None:
    store = MemoryStore()
    owner = grown(store)
    state = load(store)
    owner.append(append_draft(owner.state, {A: 2}))
    required = Requirements(
        epoch=state.epoch,
        histories=histories_of(state),
        floors=Floors.of(state, [A, B]),
        tombstones=0,
        uncompacted_since=state.version,
    )
    maintenance = MaintenanceCommit.opened(store, state, "test", Clock(wall_ms=clock_ms))
    assert maintenance.commit(lambda _newest: NOTHING, required)
    assert load(store).version == state.version + 2


def test_a_list_that_no_commit_names_becomes_garbage() -> None:
    store = MemoryStore()
    grown(store)
    state = load(store)
    maintenance = MaintenanceCommit.opened(store, state, "test", Clock(wall_ms=clock_ms))
    gone = {"sets/00/x-1-1.sso": PendingDeletion(NOW_MS, state.version, Reason.EXPIRED)}
    one, other = (maintenance.put_list(state, gone) for _ in range(2))
    assert not maintenance.commit(lambda _newest: NOTHING, Requirements(epoch=state.epoch + 1))
    assert set(maintenance.unnamed) == {one.key, other.key}
    draft = CommitDraft(CommitKind.MAINTENANCE, deletions=DeletionChange(added=(one,)))
    assert maintenance.commit(lambda _newest: draft)
    now = load(store)
    assert now.deletion_lists == (one,) and now.pending_deletions.keys() == {other.key}
    assert not maintenance.unnamed


@pytest.mark.parametrize(("fault", "may_exist"), [(Fault.FULL, False), (Fault.LOST_AFTER, True)])
def test_a_key_is_noted_unless_its_put_had_no_effect(fault: Fault, may_exist: bool) -> None:
    store = FaultStore(MemoryStore(), wait=lambda _seconds: None)
    maintenance = MaintenanceCommit(store, grown(store), Clock(wall_ms=clock_ms))
    store.add(FaultRule(fault, keys="index/*", times=1))
    with pytest.raises((StoreFullError, UnansweredError)):
        maintenance.put("index/1-2-1-x.idx", [b"file"])
    assert maintenance.commit(lambda _newest: NOTHING)
    assert ("index/1-2-1-x.idx" in load(store).pending_deletions) is may_exist


def test_announced_keys_are_garbage_until_a_commit_takes_them_back() -> None:
    store = MemoryStore()
    grown(store)
    maintenance = MaintenanceCommit.opened(store, load(store), "test", Clock(wall_ms=clock_ms))
    keys = ["sets/00/y-1-1.sso", "sets/00/y-1-2.sso"]
    assert maintenance.announce(keys)
    assert load(store).pending_deletions.keys() == set(keys)
    draft = CommitDraft(CommitKind.MAINTENANCE, restored=keys[:1])
    assert maintenance.commit(lambda _newest: draft, Requirements(announced=frozenset(keys[:1])))
    assert load(store).pending_deletions.keys() == {keys[1]}
    assert not maintenance.commit(lambda _newest: draft, Requirements(announced=frozenset(keys[:1])))
