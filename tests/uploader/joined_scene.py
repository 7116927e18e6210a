"""Archives of joined objects whose log diverges at the end of any commit, and what every queue must have then."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits
from rocketmq_tiered.maintenance.compaction_round import plan_rounds
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.archive.queue_reader import QueueReader
from tests.catalog.collection import run_gc
from tests.maintenance.compaction_scene import EVERYTHING, LIMITS, LMQ, QUEUES, a_round
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.state import CatalogState
from tiered.catalog.writer_limits import CatalogLimits
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore

SETS = LIMITS
OTHERS = [QueueKey("other", number, 0) for number in range(16)]
"""Of most of these a joined object has one or two rows, and more than one page has their runs."""
STREAMS = replace(LIMITS, split_bytes=500)
"""Every queue has stream objects of its own."""
Contents = dict[QueueKey, list[tuple[int, bytes]]]


class JoinedScene:
    """An archive of ``commits`` of one to three messages each. ``ends``: (version, physical end) of each."""

    def __init__(self, spool: Path, *, commits: int = 24, spill_runs: int = 12) -> None:
        self.spool = spool
        self.store = MemoryStore("memory://joined")
        self.limits = CatalogLimits(
            root_every=4, spill_runs=spill_runs, page_runs_max=9, merge_sequences=6, merge_spills=6
        )
        self.builder = ArchiveBuilder(self.store, limits=self.limits)
        self.random = random.Random(5)
        self.ends: list[tuple[int, int]] = []
        for _ in range(commits):
            self.grow()

    def grow(self) -> CatalogState:
        """One commit."""
        queues = [*QUEUES, *QUEUES, *OTHERS]
        sent = [
            Sent(
                queue := self.random.choice(queues),
                self.random.randbytes(60),
                keys=[str(self.random.random())],
                lmq=[LMQ] if queue == QUEUES[0] else [],
                inner_num=2 if queue == QUEUES[1] else 1,
            )
            for _ in range(self.random.randint(1, 3))
        ]
        state = self.builder.commit(sent)
        self.ends.append((state.version, state.cursor.phys))
        return state

    def compact(self, limits: CompactionLimits = SETS, before_version: int = EVERYTHING) -> int:
        """All rounds that are due; how many there were."""
        for rounds in range(20):
            state = load(self.store)
            planned = next(plan_rounds(self.store, state, limits, before_version=before_version), None)
            if planned is None:
                return rounds
            assert a_round(self.store, state, planned, self.spool) is not None
        raise AssertionError("rounds come to an end")

    def copy(self) -> JoinedScene:
        """The same archive in another store."""
        scene = JoinedScene.__new__(JoinedScene)
        scene.spool, scene.limits, scene.ends = self.spool, self.limits, list(self.ends)
        scene.random = random.Random(self.random.random())
        scene.store = MemoryStore("memory://joined")
        scene.store._objects.update(self.store._objects)
        scene.store._keys += self.store._keys
        scene.builder = ArchiveBuilder.__new__(ArchiveBuilder)
        scene.builder.__dict__.update(self.builder.__dict__)
        scene.builder.store = scene.store
        scene.builder.truth = {
            queue: replace(known, rows=list(known.rows), gaps=list(known.gaps))
            for queue, known in self.builder.truth.items()
        }
        scene.builder.writer = scene.owner(scene.store)
        return scene

    def owner(self, store: ObjectStore) -> CatalogWriter:
        """The archive's writer after a restart."""
        return CatalogWriter(
            store,
            cluster="cluster",
            broker="broker",
            instance="test",
            kind="run",
            clock_ms=lambda: NOW_MS,
            limits=self.limits,
            random=random.Random(2),
            wait=lambda _seconds: None,
        )

    def diverge(self, version: int, phys: int, store: ObjectStore | None = None) -> CatalogState:
        """The owner claims the archive and begins a log history at ``phys``, through ``store``."""
        store = store or self.store
        writer = self.owner(store)
        writer.claim(take_over=True)
        state = writer.append_history(common_version=version, phys=phys)
        self.builder.writer = writer
        return state

    def owner_again(self) -> CatalogWriter:
        """The next owner, which has claimed the archive."""
        self.builder.writer = self.owner(self.store)
        self.builder.writer.claim(take_over=True)
        return self.builder.writer

    def forget(self, phys: int) -> None:
        """What was sent above ``phys`` was not."""
        self.builder.forget_above(phys)
        self.ends = [end for end in self.ends if end[1] <= phys]

    def sent(self, begin_phys: int = 0) -> Contents:
        """What queues have of the log from ``begin_phys`` on."""
        found = {
            queue: [(row.offset, row.record) for row in known.rows if row.phys >= begin_phys]
            for queue, known in self.builder.truth.items()
        }
        return {queue: rows for queue, rows in found.items() if rows}

    def collect(self, *, diverged_grace_ms: int = 0) -> list[str]:
        """Garbage collection without grace."""
        return run_gc(
            self.store,
            load(self.store),
            apply=True,
            grace_ms=0,
            diverged_grace_ms=diverged_grace_ms,
            clock=lambda: self.store.clock_ms() + 10,
        ).delete

    def check(self) -> None:
        """The archive is sound, and queues have what was sent."""
        report = verify_archive(self.store, depth="full")
        assert report.anomalies == [], report.anomalies[:3]
        assert contents(self.store, load(self.store)) == self.sent()

    def check_no_leftovers(self) -> None:
        """After garbage collection in the next epoch."""
        self.owner_again()
        for _ in range(2):
            self.collect()
        report = verify_archive(self.store, depth="full")
        assert (report.anomalies, report.leftovers) == ([], [])


def contents(store: ObjectStore, state: CatalogState) -> Contents:
    """All rows of all visible queues."""
    found: Contents = {}
    for queue in state.visible_queues():
        reader = QueueReader(store, state, queue)
        rows, offset = [], reader.min_offset
        while offset < reader.max_offset:
            batch = reader.read(offset, max_rows=100, max_bytes=10**6)
            for at, begin in enumerate(batch.starts.tolist()):
                record = batch.data[begin : begin + int(batch.sizes[at])].tobytes()
                rows.append((int(batch.queue_offsets[at]), record))
            assert batch.next_offset > offset
            offset = batch.next_offset
        if rows:
            found[queue] = rows
    return found
