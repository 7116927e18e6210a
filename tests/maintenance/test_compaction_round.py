"""Rounds of compaction beside a live owner: rows stay, a late round changes nothing, garbage is found."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maintenance.compaction_plan import CompactionLimits
from maintenance.compaction_round import PlannedRound, plan_rounds, run_round
from maintenance.compaction_run import CompactionOptions, CompactionResult
from maintenance.gc import run_gc
from tests.flat_file.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.flat_file.queue_reader import QueueReader
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.deletions import Reason
from tiered.catalog.state import CatalogState
from tiered.catalog.writer_limits import CatalogLimits
from tiered.errors import UnansweredError, UsageError
from tiered.flat_file.verify import verify_archive
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.model.tables import FLOOR_DTYPE
from tiered.object_store.interface import ObjectStore, Piece
from tiered.object_store.memory import MemoryStore
from tiered.object_store.wrapper import StoreWrapper

QUEUES = [QueueKey(f"topic{number}", 0, 0) for number in range(5)]
LMQ = QueueKey("%LMQ%a", 0, 0)
LIMITS = CompactionLimits(
    memory_bytes=30_000, split_bytes=20_000, block_bytes=600, object_bytes_max=60_000, set_bytes_max=60_000,
    row_bytes=8, run_bytes=0,
)  # fmt: skip
EVERYTHING = 1 << 40


class Scene:
    """An archive whose owner can write more."""

    def __init__(self, spool: Path, cycles: int = 40, **limits: int) -> None:
        self.store = MemoryStore()
        values: dict[str, int] = {"root_every": 4, "spill_runs": 12, "page_runs_max": 9, "merge_sequences": 6}
        self.owner = ArchiveBuilder(self.store, limits=CatalogLimits(**(values | limits)))
        self.rng = random.Random(3)
        self.spool = spool
        self.append(cycles)

    def append(self, cycles: int) -> None:
        for _ in range(cycles):
            sent = [
                Sent(
                    queue := self.rng.choice(QUEUES), self.rng.randbytes(60), keys=[str(self.rng.random())],
                    lmq=[LMQ] if queue == QUEUES[0] else [], inner_num=2 if queue == QUEUES[1] else 1,
                )
                for _ in range(self.rng.randint(3, 9))
            ]  # fmt: skip
            self.owner.commit(sent)

    @property
    def state(self) -> CatalogState:
        return load(self.store)

    def plan(self, **others: Any) -> PlannedRound | None:
        bounds = {"before_version": EVERYTHING} | others
        return next(plan_rounds(self.store, self.state, LIMITS, **bounds), None)

    def run(self, store: ObjectStore | None = None) -> CompactionResult | None:
        """One round, on ``store``."""
        planned = self.plan()
        assert planned is not None
        options = CompactionOptions(
            self.spool, 10**7, BlockCodec(block_bytes=600), wait=lambda _seconds: None
        )
        return run_round(
            store or self.store, self.state, planned, options, clock=lambda: NOW_MS, page_runs_max=9
        )

    def check(self) -> None:
        """The archive is sound, and every row is what was sent."""
        report = verify_archive(self.store, full=True)
        assert report.anomalies == [], report.anomalies[:3]
        state = self.state
        for queue, truth in self.owner.truth.items():
            row = state.queue(queue)
            assert row is not None
            found, offset = [], int(row["min_queue_offset"])
            reader = QueueReader(self.store, state, queue)
            while offset < int(row["end_queue_offset"]):
                batch = reader.read(offset, max_rows=100, max_bytes=10**6)
                for at in range(len(batch)):
                    begin = int(batch.starts[at])
                    found.append(
                        (
                            int(batch.queue_offsets[at]),
                            batch.data[begin : begin + int(batch.sizes[at])].tobytes(),
                        )
                    )
                offset = batch.next_offset
            expected = [
                (row.offset, row.record)
                for row in truth.rows
                if row.offset >= int(state.queue(queue)["min_queue_offset"])
            ]  # type: ignore[index]
            assert found == expected, queue

    def collect(self) -> list[str]:
        """Garbage collection without a grace period."""
        return run_gc(
            self.store, self.state, apply=True, grace_ms=0, clock=lambda: self.store.clock_ms() + 10
        ).delete

    def data_objects(self) -> int:
        return sum(1 for prefix in ("data/", "sets/") for _ in self.store.list(prefix))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_round_replaces_objects_and_keeps_every_row(scene: Scene) -> None:
    before = scene.state
    assert before.pages
    planned = scene.plan()
    result = scene.run()
    assert planned is not None
    assert result is not None
    after = scene.state
    scene.check()
    reasons = {pending.reason for pending in after.pending_deletions.values()}
    assert Reason.INTENT not in reasons, "all outputs are taken back"
    sources = {planned.candidates.object_keys[int(number)] for number in planned.plan.sources}
    assert {key for key, one in after.pending_deletions.items() if one.reason == Reason.COMPACTED} >= sources
    assert len(result.object_keys) * 2 <= len(sources)
    assert set(result.runs["version"].tolist()) == {planned.plan.last_version}
    objects = scene.data_objects()
    assert set(scene.collect()) >= sources
    assert scene.data_objects() == objects - len(sources)
    scene.check()


def test_the_owner_writes_between_rounds_until_nothing_is_left_to_do(scene: Scene) -> None:
    rounds = 0
    for _ in range(6):
        while scene.plan() is not None:
            assert scene.run() is not None
            rounds += 1
            assert rounds < 40, "rounds come to an end"
        scene.append(10)
        scene.check()
    scene.collect()
    scene.check()
    assert rounds >= 3
    assert scene.data_objects() * 3 < len(scene.owner.keys)


class Interrupted(StoreWrapper):
    """Calls ``act`` before the first output."""

    def __init__(self, store: ObjectStore, act: Callable[[], object]) -> None:
        super().__init__(store)
        self._act: Callable[[], object] | None = act

    def compose_if_absent(self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()
        super().compose_if_absent(key, pieces, timeout_s=timeout_s)


def test_the_owner_commits_during_a_round(tmp_path: Path) -> None:
    scene = Scene(tmp_path, spill_runs=10**6)
    assert scene.run(Interrupted(scene.store, lambda: scene.append(3))) is not None
    scene.append(3)
    scene.check()


def without_effect(scene: Scene, act: Callable[[], object]) -> None:
    """The round ends without effect if ``act`` comes between; its leftovers are collected, the next one succeeds."""
    assert scene.run(Interrupted(scene.store, act)) is None
    assert Reason.INTENT in {pending.reason for pending in scene.state.pending_deletions.values()}
    scene.check()
    scene.collect()
    scene.check()
    assert Reason.INTENT not in {pending.reason for pending in scene.state.pending_deletions.values()}
    assert scene.run() is not None
    scene.check()


def test_pages_merged_during_a_round_void_it(scene: Scene) -> None:
    without_effect(scene, lambda: scene.append(60))


def test_a_takeover_during_a_round_voids_it(scene: Scene) -> None:
    def take_over() -> None:
        writer = CatalogWriter(
            scene.store,
            cluster="cluster",
            broker="broker",
            instance="other",
            kind="run",
            clock_ms=lambda: NOW_MS,
        )
        writer.claim(take_over=True)

    without_effect(scene, take_over)


def test_a_floor_raised_during_a_round_voids_it(scene: Scene) -> None:
    def raise_floor() -> None:
        state = scene.state
        queue = QUEUES[3]
        planned = scene.plan()
        assert planned is not None
        number = planned.candidates.queues.index(queue)
        first = planned.candidates.runs[planned.candidates.runs["queue"] == number][0]
        floors = np.zeros(1, FLOOR_DTYPE)
        floors["min_queue_offset"], floors["rows"] = first["end_queue_offset"], first["rows"]
        assert state.queue(queue) is not None
        scene.owner.writer.append(
            CommitDraft(CommitKind.MAINTENANCE, queues=[queue], floors=floors, created_ms=NOW_MS)
        )

    without_effect(scene, raise_floor)


def test_a_round_that_dies_leaves_garbage(scene: Scene) -> None:
    dying = FaultStore(scene.store, [FaultRule(Fault.LOST_AFTER, frozenset({"compose"}))])
    with pytest.raises(UnansweredError):
        scene.run(dying)
    scene.check()
    collected = scene.collect()
    assert any(key.startswith(("data/", "sets/")) for key in collected)
    assert scene.run() is not None
    scene.check()


def test_newer_versions_stay_as_they_are(scene: Scene) -> None:
    bound = scene.state.pages[len(scene.state.pages) // 2].to_version
    planned = scene.plan(before_version=bound)
    assert planned is not None
    assert planned.plan.last_version < bound
    assert planned.candidates.runs["version"].max() < bound
    assert scene.plan(before_version=1) is None


def test_runs_that_are_in_no_page_yet_are_joined_too(tmp_path: Path) -> None:
    scene = Scene(tmp_path, spill_runs=10**6)
    assert scene.state.pages == ()
    planned = scene.plan()
    assert planned is not None
    assert planned.spilled_version == scene.state.version
    assert scene.run() is not None
    assert scene.state.memory_runs == 0
    scene.check()
    scene.append(5)
    scene.check()
    scene.collect()
    scene.check()


def test_an_older_format_is_refused(scene: Scene) -> None:
    with pytest.raises(UsageError, match="older format"):
        next(plan_rounds(scene.store, replace(scene.state, major=2), LIMITS, before_version=EVERYTHING))


def test_planning_reads_pages_and_no_data(scene: Scene) -> None:
    counting = FaultStore(scene.store)
    state = scene.state
    assert list(plan_rounds(counting, state, LIMITS, before_version=EVERYTHING))
    assert not any(request.key.startswith(("data/", "sets/")) for request in counting.requests)
