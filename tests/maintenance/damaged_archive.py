"""An archive with all of its messages, the places at which it can be damaged, and the check of a repair."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from rocketmq_tiered.maintenance.repair.repair import Repair, apply_repair, plan_repair
from tests.archive.queue_reader import QueueReader, records_of
from tests.catalog.collection import run_gc
from tests.maintenance.compaction_scene import Scene
from tests.maintenance.damage import flip
from tests.maintenance.keyed_scene import Table
from tiered.archive.run_passes import LivingRuns
from tiered.archive.segment_reader import SegmentReader
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import FencedError
from tiered.formats.keys import catalog_key
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore

NOW_MS = 1_800_000_000_000
COMMITS = 64
"""The newest ones, each of which is damaged."""
KINDS = ["commit", "root", "page", "list", "index", "table", "tail", "block"]
LOSING = ("block",)
"""Kinds of which a damaged one loses its messages when neither a broker nor a pin has them."""
BOTH = "catalog/ pages/"
Truth = dict[QueueKey, dict[int, bytes]]
Place = tuple[str, int]
"""Key and byte."""


@dataclass
class Sound:
    """An archive before it is damaged. ``names``: of its cluster and broker."""

    store: MemoryStore
    truth: Truth
    names: tuple[str, str] = ("cluster", "broker")

    @classmethod
    def of(cls, store: ObjectStore, names: tuple[str, str] = ("cluster", "broker")) -> Sound:
        """A copy of ``store`` with the messages that readers find there now."""
        copied = clone(store)
        return cls(copied, messages(copied), names)

    def places(self) -> dict[str, list[Place]]:
        """Where to damage it, by kind."""
        state = load(self.store)
        size = {info.key: info.size_bytes for info in self.store.list("")}
        roots = [state.root.key, *(root.key for root in state.kept_roots)]
        roots += [key for one in state.log_histories for key in (one.root, one.hidden) if key]
        found: dict[str, list[Place]] = {kind: [] for kind in KINDS}
        objects = LivingRuns(self.store, state).of_objects(
            {key for key in size if key.startswith(("data/", "sets/"))}
        )
        for key, check in objects.items():
            tail_bytes = int(check.place["tail_bytes"])
            found["tail"].append((key, size[key] - 60))
            index = SegmentReader.open(self.store, key, size_bytes=size[key], tail_bytes=tail_bytes).index
            for begin, end in zip(index.block_offsets, index.block_offsets[1:], strict=False):
                found["block"].append((key, int(begin + end) // 2))
        named = {
            "commit": map(catalog_key, range(max(1, state.version - COMMITS + 1), state.version + 1)),
            "root": dict.fromkeys(roots),
            "page": sorted({page.key.partition(":")[0] for page in state.pages}),
            "list": (one.key for one in state.deletion_lists),
            "index": (one.key for one in state.indexes),
            "table": state.state_objects.values(),
        }
        return found | {kind: [(key, size[key] // 2) for key in keys] for kind, keys in named.items()}

    def flipped_and_repaired(self, kind: str, place: Place, *, runs_dry: bool = True) -> Repair:
        """One flipped bit."""
        store = clone(self.store)
        paused = writer_of(store, self.names, "paused")
        flip(store, *place)
        return self.repaired(store, paused, may_lose=kind in LOSING, runs_dry=runs_dry)

    def robbed_and_repaired(self, gone: str, *, may_lose: bool = False) -> Repair:
        """Without the objects below each prefix of ``gone``."""
        store = clone(self.store)
        paused = writer_of(store, self.names, "paused")
        store.delete([info.key for prefix in gone.split() for info in store.list(prefix)])
        return self.repaired(store, paused, may_lose=may_lose)

    def repaired(
        self, store: ObjectStore, paused: CatalogWriter, *, may_lose: bool, runs_dry: bool = True
    ) -> Repair:
        """Repair ``store``: a plan alone writes nothing; then every message is there, but those named as lost; the
        former writer cannot commit, and another one continues."""
        if runs_dry:
            before = sorted(info.key for info in store.list(""))
            plan_repair(store, self.names, NOW_MS)
            assert sorted(info.key for info in store.list("")) == before
        repair = plan_repair(store, self.names, NOW_MS, applies=True)
        apply_repair(repair)
        report = verify_archive(store, depth="full")
        assert report.anomalies == [], report.anomalies[:3]
        self._compare(messages(store), repair, may_lose=may_lose)
        with pytest.raises(FencedError):
            paused.append(empty_cycle(paused.state))
        writer = writer_of(store, self.names, "next")
        for _ in range(3):
            writer.append(empty_cycle(writer.state))
        run_gc(store, load(store), apply=True, grace_ms=0, clock=store.clock_ms)
        assert verify_archive(store).anomalies == []
        kept = {info.key for info in store.list("")}
        assert kept >= repair.quarantined, "quarantine is kept"
        return repair

    def _compare(self, found: Truth, repair: Repair, *, may_lose: bool) -> None:
        lost = {(queue, offset) for queue, begin, end in repair.lost for offset in range(begin, end)}
        for queue, wanted in self.truth.items():
            mine = found.get(queue, {})
            missing = [offset for offset in wanted if offset not in mine]
            assert may_lose or not missing, (queue, missing[:5], repair.notes)
            assert all((queue, offset) in lost for offset in missing), (queue, missing[:5], repair.notes)
            assert all(mine[offset] == record for offset, record in wanted.items() if offset in mine)


def compacted_archive(spool: Path) -> Sound:
    """Objects, compacted ones, pages, roots, deletion lists."""
    made = Scene(spool, 40, spill_deletions=4)
    made.run(before_version=36)
    made.append(9)
    truth = {queue: {row.offset: row.record for row in one.rows} for queue, one in made.owner.truth.items()}
    found = Sound.of(made.store)
    assert all(found.truth[queue] == rows for queue, rows in truth.items())
    return found


def aged_archive(spool: Path) -> Sound:
    """After key compaction, cuts of the log, object compaction and expiry."""
    table = Table(spool, seed=7)
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
    return Sound.of(table.store)


def messages(store: ObjectStore) -> Truth:
    """Every record that a reader finds."""
    state = load(store)
    found: Truth = {}
    for queue, _ in state.queues():
        found[queue] = {offset: record for offset, _, record in records_of(QueueReader(store, state, queue))}
    return found


def clone(store: ObjectStore) -> MemoryStore:
    """A copy of all objects."""
    copied = MemoryStore()
    for info in store.list(""):
        copied.put_if_absent(info.key, [store.get(info.key)])
    return copied


def writer_of(
    store: ObjectStore, names: tuple[str, str], instance: str, *, root_every: int | None = None
) -> CatalogWriter:
    """A writer that owns the archive, and is paused for a minute again and again."""
    (cluster, broker), minutes = names, itertools.count(NOW_MS, 60_000)
    writer = CatalogWriter(
        store,
        cluster=cluster,
        broker=broker,
        instance=instance,
        kind="run",
        clock=Clock(wall_ms=lambda: next(minutes)),
        root_every=root_every,
    )
    writer.load()
    writer.claim(take_over=True)
    return writer


def empty_cycle(state: CatalogState) -> CommitDraft:
    """A cycle without messages."""
    cursor = state.cursor
    return CommitDraft(
        CommitKind.APPEND,
        history=cursor.history,
        from_phys=cursor.phys,
        to_phys=cursor.phys,
        check=cursor.check,
        created_ms=NOW_MS,
    )
