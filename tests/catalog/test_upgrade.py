"""An archive of an older format: maintenance keeps its format until its owner is restarted with a newer program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.catalog.drafts import NOW_MS, append_draft, at, clock_ms, queue
from tests.formats.golden_archive import GOLDEN
from tiered.catalog.apply import apply
from tiered.catalog.catalog_reader import load, read_commit, refresh
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitInvalidError, CommitKind
from tiered.catalog.snapshot import describe
from tiered.catalog.state import CatalogState
from tiered.formats.container import CATALOG_MAJOR
from tiered.model.tables import FLOOR_DTYPE
from tiered.object_store.file import FileStore
from tiered.object_store.memory import MemoryStore

OLD = ["1.0", "2.0", "2.1", "2.2"]


def copied(version: str) -> MemoryStore:
    store, golden = MemoryStore(), FileStore(GOLDEN / version / "archive")
    for info in golden.list(""):
        store.put_if_absent(info.key, [golden.get(info.key)])
    return store


def actor(store: MemoryStore, kind: str) -> CatalogWriter:
    state = load(store)
    return CatalogWriter(
        store, cluster=state.cluster, broker=state.broker, instance=f"new-{kind}", kind=kind, clock_ms=clock_ms,
        wait=lambda _: None,
    )  # fmt: skip


def hide(state: CatalogState) -> CommitDraft:
    return CommitDraft(CommitKind.MAINTENANCE, hide=[state.key_of(0)], created_ms=NOW_MS)


@pytest.mark.parametrize("version", OLD)
def test_maintenance_writes_the_format_of_the_owner(version: str) -> None:
    store = copied(version)
    state = actor(store, "maintenance").maintain(hide)
    assert state.major < CATALOG_MAJOR
    assert int.from_bytes(store.get(next(iter(store.list("catalog/"))).key)[8:10], "little") == (
        1 if version < "2.2" else 2
    )
    assert describe(load(store)) == describe(state)


@pytest.mark.parametrize("version", OLD)
def test_nothing_expires_while_the_owner_writes_an_older_format(version: str) -> None:
    store = copied(version)
    floors = np.array([(0, 3, 3)], FLOOR_DTYPE)
    with pytest.raises(CommitInvalidError, match="the archive's owner writes an older format"):
        actor(store, "maintenance").maintain(
            lambda state: CommitDraft(
                CommitKind.MAINTENANCE, queues=[state.key_of(0)], floors=floors, created_ms=NOW_MS
            )
        )


@pytest.mark.parametrize("version", OLD)
def test_the_first_claim_begins_the_new_format_and_the_next_commit_names_a_root(version: str) -> None:
    store = copied(version)
    owner = actor(store, "run")
    claimed = owner.claim(take_over=True)
    assert (claimed.major, claimed.major_version) == (CATALOG_MAJOR, claimed.version)
    owner.append(append_draft(claimed, {queue("new"): 1}))
    assert owner.state.root.version == claimed.version
    for _ in range(3):
        owner.append(append_draft(owner.state, {queue("new"): 1}))
    majors = [read_commit(store, number).place.major for number in range(1, owner.state.version + 1)]
    old, new = majors[: claimed.version - 1], majors[claimed.version - 1 :]
    assert max(old) < CATALOG_MAJOR and new == [CATALOG_MAJOR] * 5
    assert describe(load(store)) == describe(owner.state) == describe(refresh(store, CatalogState()))
    floors = np.array([(0, 1, 1)], FLOOR_DTYPE)
    draft = CommitDraft(CommitKind.MAINTENANCE, queues=[queue("new")], floors=floors, created_ms=NOW_MS)
    assert actor(store, "maintenance").maintain(lambda _: draft).has_expired_runs


def test_an_older_commit_cannot_follow_a_newer_one() -> None:
    store = copied("3.0")
    state = load(store)
    commit = at(state, hide(state), actor="other")
    place = replace(commit.place, major=2, cluster=state.cluster, broker=state.broker)
    with pytest.raises(CommitInvalidError, match="of format 2 after format 3"):
        apply(state, replace(commit, place=place))
