"""One damaged object is never the end: a repair restores every message that something still has."""

from __future__ import annotations

import random

import pytest

from rocketmq_tiered.maintenance.gc import run_gc
from rocketmq_tiered.maintenance.repair.repair import Repair, apply_repair, plan_repair
from tests.archive.queue_reader import QueueReader
from tests.maintenance.compaction_scene import Scene
from tests.maintenance.damage import flip
from tests.maintenance.keyed_scene import Table
from tests.sweeps import sweep
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.garbage import referenced_by
from tiered.errors import FencedError
from tiered.formats.keys import catalog_key
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore

NOW_MS = 1_800_000_000_000
KINDS = ["commit", "root", "page", "list", "tail", "block"]
BOTH = "catalog/ pages/"
Truth = dict[QueueKey, dict[int, bytes]]


def truth_of(scene: Scene) -> Truth:
    """Every record by queue and offset."""
    return {queue: {row.offset: row.record for row in one.rows} for queue, one in scene.owner.truth.items()}


def messages(store: ObjectStore) -> Truth:
    """Every record that a reader finds."""
    state = load(store)
    found: Truth = {}
    for queue, row in state.queues():
        reader, offset = QueueReader(store, state, queue), int(row["min_queue_offset"])
        mine = found.setdefault(queue, {})
        while offset < int(row["end_queue_offset"]):
            batch = reader.read(offset, max_rows=100, max_bytes=10**6)
            for at in range(len(batch)):
                begin = int(batch.starts[at])
                mine[int(batch.queue_offsets[at])] = batch.data[
                    begin : begin + int(batch.sizes[at])
                ].tobytes()
            assert batch.next_offset > offset
            offset = batch.next_offset
    return found


def repaired(store: ObjectStore) -> Repair:
    """Repair ``store``; a plan alone writes nothing."""
    before = sorted(info.key for info in store.list(""))
    plan_repair(store, ("cluster", "broker"), NOW_MS)
    assert sorted(info.key for info in store.list("")) == before
    repair = plan_repair(store, ("cluster", "broker"), NOW_MS, applies=True)
    apply_repair(repair)
    return repair


def check(store: ObjectStore, truth: Truth, repair: Repair) -> None:
    """Every message is there, but those named as lost; a writer continues."""
    report = verify_archive(store, full=True)
    assert report.anomalies == [], report.anomalies[:3]
    found = messages(store)
    lost = {(queue, offset) for queue, begin, end in repair.lost for offset in range(begin, end)}
    for queue, wanted in truth.items():
        missing = [offset for offset in wanted if offset not in found.get(queue, {})]
        assert all((queue, offset) in lost for offset in missing), (queue, missing[:5], repair.notes)
        assert all(
            found[queue][offset] == record for offset, record in wanted.items() if offset not in missing
        )
    writer = CatalogWriter(
        store, cluster="cluster", broker="broker", instance="next", kind="run", clock_ms=lambda: NOW_MS
    )
    writer.load()
    writer.claim()
    cursor = writer.state.cursor
    for _ in range(3):
        writer.append(CommitDraft(
            CommitKind.APPEND, history=cursor.history, from_phys=cursor.phys, to_phys=cursor.phys,
            check=cursor.check, created_ms=NOW_MS,
        ))  # fmt: skip
    run_gc(store, load(store), apply=True, grace_ms=0, clock=store.clock_ms)
    assert verify_archive(store, full=True).anomalies == []
    for key in repair.quarantined:
        assert any(info.key == key for info in store.list(key)), "quarantine is kept"


def clone(store: MemoryStore) -> MemoryStore:
    copied = MemoryStore()
    for info in store.list(""):
        copied.put_if_absent(info.key, [store.get(info.key)])
    return copied


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Objects, compacted ones, pages, roots, deletion lists."""
    made = Scene(tmp_path_factory.mktemp("spool"), 40, spill_deletions=4)
    made.run(before_version=36)
    made.append(9)
    return made


def kinds(store: ObjectStore) -> dict[str, list[tuple[str, int]]]:
    """Places to damage: (key, byte)."""
    state = load(store)
    size = {info.key: info.size_bytes for info in store.list("")}
    named = referenced_by(store, state)
    data = [key for key in size if key.startswith(("data/", "sets/")) and key in named]
    pages = sorted({page.key.partition(":")[0] for page in state.pages})
    roots = [state.root.key, *(root.key for root in state.kept_roots)]
    roots += [key for one in state.log_histories for key in (one.root, one.hidden) if key]
    return {
        "commit": [(catalog_key(one), size[catalog_key(one)] // 2) for one in range(1, state.version + 1)],
        "root": [(key, size[key] // 2) for key in dict.fromkeys(roots)],
        "page": [(key, size[key] // 2) for key in pages],
        "list": [(one.key, size[one.key] // 2) for one in state.deletion_lists],
        "tail": [(key, size[key] - 60) for key in data],
        "block": [(key, 40) for key in data],
    }


def flipped_and_repaired(source: MemoryStore, truth: Truth, kind: str, place: tuple[str, int]) -> None:
    """One flipped bit."""
    store = clone(source)
    flip(store, *place)
    repair = repaired(store)
    check(store, truth, repair)
    if kind != "block":
        assert repair.lost == [], (place, repair.lost[:3], repair.notes)


@pytest.mark.parametrize("kind", sweep(KINDS, fast=["commit", "block"], rest="integration"))
def test_one_flipped_bit(scene: Scene, kind: str) -> None:
    places = kinds(scene.store)[kind]
    flipped_and_repaired(scene.store, truth_of(scene), kind, random.choice(places[-8:]))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_bit_anywhere(scene: Scene, kind: str) -> None:
    for place in kinds(scene.store)[kind]:
        flipped_and_repaired(scene.store, truth_of(scene), kind, place)


def test_a_paused_writer_cannot_commit(scene: Scene) -> None:
    """The catalog is lost while it is paused: also if its version is beyond what anything names."""
    store = clone(scene.store)
    now_ms = NOW_MS
    paused = CatalogWriter(
        store, cluster="cluster", broker="broker", instance="paused", kind="run", clock_ms=lambda: now_ms
    )
    paused.load()
    paused.claim(take_over=True)

    def append() -> CommitDraft:
        cursor = paused.state.cursor
        return CommitDraft(
            CommitKind.APPEND, history=cursor.history, from_phys=cursor.phys, to_phys=cursor.phys,
            check=cursor.check, created_ms=now_ms,
        )  # fmt: skip

    for _ in range(5):
        paused.append(append())
    store.delete([info.key for prefix in ("catalog/", "pages/") for info in store.list(prefix)])
    repair = repaired(store)
    now_ms += 60_000
    with pytest.raises(FencedError):
        paused.append(append())
    check(store, truth_of(scene), repair)


@pytest.mark.parametrize("gone", sweep(["catalog/", "pages/", BOTH], fast=[BOTH], rest="integration"))
def test_a_catalog_that_is_gone(scene: Scene, gone: str) -> None:
    store = clone(scene.store)
    store.delete([info.key for prefix in gone.split() for info in store.list(prefix)])
    repair = repaired(store)
    assert repair.lost == [], (repair.lost[:3], repair.notes)
    check(store, truth_of(scene), repair)


@pytest.fixture(scope="module")
def aged(tmp_path_factory: pytest.TempPathFactory) -> Table:
    """An archive after key compaction, cuts of the log, object compaction and expiry."""
    table = Table(tmp_path_factory.mktemp("aged"), seed=7)
    table.write(20)
    table.compact()
    table.write(8)
    table.cut_log()
    table.write(12)
    table.join()
    table.expire()
    table.write(6)
    table.cut_log()
    table.write(5)
    return table


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["commit", "root", "page", "tail", "block"])
def test_one_flipped_bit_in_an_aged_archive(aged: Table, kind: str) -> None:
    truth = messages(aged.store)
    for place in kinds(aged.store)[kind]:
        flipped_and_repaired(aged.store, truth, kind, place)


@pytest.mark.integration
@pytest.mark.parametrize("gone", ["catalog/", BOTH])
def test_an_aged_archive_whose_catalog_is_gone(aged: Table, gone: str) -> None:
    """What had expired may be visible again, until it expires again."""
    truth, store = messages(aged.store), clone(aged.store)
    store.delete([info.key for prefix in gone.split() for info in store.list(prefix)])
    repair = repaired(store)
    assert repair.lost_messages == 0 or gone == BOTH, repair.lost
    check(store, truth, repair)
