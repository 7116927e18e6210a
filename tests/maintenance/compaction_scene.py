"""An archive of many small objects whose owner can write more, rounds of compaction in it, and a check of all rows."""

import random
from pathlib import Path
from typing import Any

from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits
from rocketmq_tiered.maintenance.compaction_round import PlannedRound, plan_rounds, run_round
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.archive.queue_reader import QueueReader, records_of
from tests.catalog.collection import run_gc
from tiered.archive.rewrite.result import RewriteOptions, RewriteResult
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.state import CatalogState
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore

QUEUES = [QueueKey(f"topic{number}", 0, 0) for number in range(5)]
LMQ = QueueKey("%LMQ%a", 0, 0)
LIMITS = CompactionLimits(
    memory_bytes=30_000,
    split_bytes=20_000,
    block_bytes=600,
    object_bytes_max=60_000,
    set_bytes_max=60_000,
    row_bytes=8,
    run_bytes=0,
)
EVERYTHING = 1 << 40


def a_round(
    store: ObjectStore,
    state: CatalogState,
    planned: PlannedRound,
    spool: Path,
    owner: CatalogWriter | None = None,
) -> RewriteResult | None:
    """Carry ``planned`` out with blocks and pages as small as the archive."""
    mine = None if owner is None else MaintenanceCommit(store, owner, Clock(wall_ms=lambda: NOW_MS))
    options = RewriteOptions(spool, 10**7, BlockCodec(block_bytes=600), wait=lambda _seconds: None)
    return run_round(
        store, state, planned, options, clock=Clock(wall_ms=lambda: NOW_MS), page_runs_max=9, maintenance=mine
    )


class Scene:
    """An archive whose owner can write more."""

    def __init__(
        self, spool: Path, cycles: int = 40, store: ObjectStore | None = None, **limits: int
    ) -> None:
        self.store = store or MemoryStore()
        values: dict[str, int] = {
            "root_every": 4,
            "spill_runs": 12,
            "page_runs_max": 9,
            "merge_sequences": 6,
            "merge_spills": 6,
        }
        self.owner = ArchiveBuilder(self.store, limits=CatalogLimits(**(values | limits)))
        self.rng = random.Random(3)
        self.spool = spool
        self.append(cycles)

    def append(self, cycles: int) -> None:
        for _ in range(cycles):
            sent = [
                Sent(
                    queue := self.rng.choice(QUEUES),
                    self.rng.randbytes(60),
                    keys=[str(self.rng.random())],
                    lmq=[LMQ] if queue == QUEUES[0] else [],
                    inner_num=2 if queue == QUEUES[1] else 1,
                )
                for _ in range(self.rng.randint(3, 9))
            ]
            self.owner.commit(sent)

    @property
    def state(self) -> CatalogState:
        return load(self.store)

    def plan(self, **others: Any) -> PlannedRound | None:
        bounds = {"before_version": EVERYTHING} | others
        return next(plan_rounds(self.store, self.state, LIMITS, **bounds), None)

    def run(
        self, store: ObjectStore | None = None, owner: CatalogWriter | None = None, **bounds: int
    ) -> RewriteResult | None:
        """One round, on ``store``, through the writer ``owner``."""
        planned = self.plan(**bounds)
        assert planned is not None
        return a_round(store or self.store, self.state, planned, self.spool, owner)

    def check(self) -> None:
        """The archive is sound, and every row is what was sent."""
        report = verify_archive(self.store, depth="full")
        assert report.anomalies == [], report.anomalies[:3]
        state = self.state
        for queue, truth in self.owner.truth.items():
            row = state.queue(queue)
            assert row is not None
            reader = QueueReader(self.store, state, queue)
            found = [(offset, record) for offset, _, record in records_of(reader)]
            expected = [
                (one.offset, one.record) for one in truth.rows if one.offset >= int(row["min_queue_offset"])
            ]
            assert found == expected, queue

    def collect(self) -> list[str]:
        """Garbage collection without a grace period."""
        return run_gc(
            self.store, self.state, apply=True, grace_ms=0, clock=lambda: self.store.clock_ms() + 10
        ).delete

    def data_objects(self) -> int:
        return len(self.data_sizes())

    def data_sizes(self) -> dict[str, int]:
        """Data objects with their bytes."""
        return {one.key: one.size_bytes for prefix in ("data/", "sets/") for one in self.store.list(prefix)}
