"""Compacts archives of real stores, in memory, in a directory and on MinIO: every row of every queue is what it was."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits, plan_join, plan_rewrite
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.end_to_end.offloading import BROKER, CLUSTER, SMALL, backfill
from tests.maintenance.archived import after, archived_candidates, contents
from tests.object_store.fault_store import FaultStore
from tests.servers.running_store import RunningStore
from tiered.archive.rewrite.outputs import compact
from tiered.archive.rewrite.plan import Candidates
from tiered.archive.rewrite.result import OutputIdentity, RewriteCost, RewriteOptions
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore

pytestmark = pytest.mark.integration

MIB = 1 << 20
TINY = replace(SMALL, batch_bytes=64 << 10, split_bytes=1 << 20)
LIMITS = CompactionLimits(
    memory_bytes=4 * MIB, split_bytes=256 << 10, block_bytes=64 << 10, object_bytes_max=2 * MIB
)


class Compacting:
    """An archive that is compacted step by step; what it cost."""

    def __init__(self, store: ObjectStore, spool: Path) -> None:
        self.store = store
        self.state = archived_candidates(store)
        self.objects_before = len(self.state.objects)
        self.expected = contents(store, self.state)
        self._options = RewriteOptions(spool, 10**9)
        self._attempt = 10**9

    def step(
        self, level: Callable[[Candidates, CompactionLimits], object], limits: CompactionLimits
    ) -> RewriteCost:
        """One compaction, checked against the rows before."""
        plan = level(self.state, limits)
        if plan is None:
            return RewriteCost()
        self._attempt += 10**6
        identity = OutputIdentity(CLUSTER, BROKER, 1, 0, 1, 1_700_000_000_000, self._attempt)
        result = compact(self.store, self.state, plan, identity, self._options)
        self.state = after(self.state, plan, result)
        assert contents(self.store, self.state) == self.expected
        self.store.delete([self.state.object_keys[int(number)] for number in plan.sources])
        assert contents(self.store, self.state) == self.expected, "nothing refers to the sources any longer"
        return result.cost

    @property
    def objects(self) -> int:
        """How many hold the rows now."""
        return len(set(self.state.runs["object"].tolist()))


@pytest.mark.parametrize("name", ["A", "C", "D", "E", "F"])
def test_rows_of_real_stores_stay_what_they_are(
    real_store: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    archive = MemoryStore()
    backfill(real_store(name) / "store", archive, settings=TINY)
    run = Compacting(PrefixedStore(archive, archive_prefix(CLUSTER, BROKER)), tmp_path)
    assert run.objects_before > 3
    run.step(plan_rewrite, LIMITS)
    run.step(plan_join, replace(LIMITS, object_bytes_max=16 * MIB, joined_bytes_min=12 * MIB))
    assert run.objects < run.objects_before


def test_a_directory(real_store: Callable[[str], Path], tmp_path: Path) -> None:
    archive = FileStore(tmp_path / "archive")
    backfill(real_store("F") / "store", archive, settings=TINY)
    run = Compacting(PrefixedStore(archive, archive_prefix(CLUSTER, BROKER)), tmp_path / "spool")
    run.step(plan_rewrite, LIMITS)
    assert run.step(plan_join, replace(LIMITS, object_bytes_max=64 * MIB)).bytes_sent < 10 * MIB


def test_a_bucket(real_store: Callable[[str], Path], tmp_path: Path, minio_url: RunningStore) -> None:
    """Joined objects are multipart uploads of copied parts where sources are large enough."""
    options = minio_url.options(multipart_threshold_bytes=5 * MIB, multipart_part_bytes=5 * MIB)
    archive = open_store(minio_url.fresh_bucket(), options)
    try:
        backfill(real_store("C") / "store", archive, settings=TINY)
        faulty = FaultStore(PrefixedStore(archive, archive_prefix(CLUSTER, BROKER)))
        run = Compacting(faulty, tmp_path)
        run.step(plan_rewrite, replace(LIMITS, object_bytes_max=8 * MIB, memory_bytes=32 * MIB))
        run.step(plan_join, replace(LIMITS, object_bytes_max=64 * MIB, joined_bytes_min=32 * MIB))
        assert run.objects * 5 < run.objects_before
        assert {request.operation for request in faulty.requests} >= {"compose", "get_range"}
    finally:
        archive.close()


@pytest.mark.parametrize("server", ["minio_url", "localstack_url"])
def test_a_server_copies_the_blocks_of_large_objects(
    request: pytest.FixtureRequest, tmp_path: Path, server: str
) -> None:
    """Keys and tails are sent, and no message."""
    running: RunningStore = request.getfixturevalue(server)
    made, rng = MemoryStore(), random.Random(1)
    builder = ArchiveBuilder(made)
    for _ in range(3):
        builder.commit([Sent(QueueKey("large", 0, 0), rng.randbytes(MIB)) for _ in range(8)], as_set=False)
    archive = open_store(running.fresh_bucket(), running.options(multipart_threshold_bytes=5 * MIB))
    try:
        for info in made.list("data/"):
            archive.put_if_absent(info.key, [made.get(info.key)])
        run = Compacting(archive, tmp_path)
        cost = run.step(plan_join, replace(LIMITS, object_bytes_max=64 * MIB, joined_bytes_min=32 * MIB))
        assert run.objects == 1
        assert cost.gets <= 2 * run.objects_before
        assert cost.bytes_read < 64 << 10
        assert cost.bytes_sent < 64 << 10
        assert cost.bytes_copied > 24 * MIB
    finally:
        archive.close()
