"""Rounds of compaction beside a live owner: rows stay, a late round changes nothing, garbage is found."""

import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from rocketmq_tiered.maintenance.compaction_round import plan_rounds
from tests.archive.archive_builder import NOW_MS
from tests.maintenance.compaction_scene import EVERYTHING, LIMITS, QUEUES, Scene
from tests.object_store.fault_store import FaultStore
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.deletions import Reason
from tiered.clock import Clock
from tiered.errors import StoreFullError
from tiered.model.tables import FLOOR_DTYPE
from tiered.object_store.interface import ObjectStore, Piece
from tiered.object_store.wrapper import StoreWrapper


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_round_replaces_objects_and_keeps_every_row(scene: Scene) -> None:
    assert scene.state.pages
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

    def compose_if_absent(
        self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None, spool: str = ""
    ) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()
        super().compose_if_absent(key, pieces, timeout_s=timeout_s, spool=spool)


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
            clock=Clock(wall_ms=lambda: NOW_MS),
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


def test_a_full_disk_ends_the_round_and_names_the_directory(scene: Scene) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(StoreFullError, match=f"as no space is left in {scene.spool}"):
            scene.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    scene.check()
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
    assert planned.range.spilled_version == scene.state.version
    assert scene.run() is not None
    assert scene.state.memory_runs == 0
    scene.check()
    scene.append(5)
    scene.check()
    scene.collect()
    scene.check()


def test_planning_reads_pages_and_no_data(scene: Scene) -> None:
    counting = FaultStore(scene.store)
    assert list(plan_rounds(counting, scene.state, LIMITS, before_version=EVERYTHING))
    assert not any(request.key.startswith(("data/", "sets/")) for request in counting.requests)


class Counted(FaultStore):
    """Counts commits that another actor was faster with."""

    @property
    def lost(self) -> int:
        return sum(
            one.outcome == "AlreadyExistsError" and one.key.startswith("catalog/") for one in self.requests
        )


def test_the_owner_loses_no_version_to_a_round_in_its_process(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    counted = Counted(scene.store)
    scene.owner.writer._store = counted
    scene.owner.writer._attempt._store = counted

    def merge_too() -> None:
        """The owner writes, long enough for merges of pages: they wait for the round."""
        scene.append(60)

    in_pages = max(page.to_version for page in scene.state.pages) + 1
    interrupted = Interrupted(scene.store, merge_too)
    assert scene.run(interrupted, scene.owner.writer, before_version=in_pages) is not None
    scene.append(60)
    scene.check()
    assert counted.lost == 0
    assert len(scene.state.pages) < 60, "pages are merged again afterwards"


def test_the_owner_keeps_runs_in_memory_while_a_round_has_them(tmp_path: Path) -> None:
    scene = Scene(tmp_path, cycles=20, spill_runs=200, root_every=16, root_every_max=16, root_runs_max=1)
    assert scene.state.memory_runs
    spilled = len(scene.state.pages)

    def append() -> None:
        scene.append(14)
        assert len(scene.state.pages) == spilled

    planned = scene.plan()
    assert planned is not None
    assert planned.range.spilled_version > 0
    assert scene.run(Interrupted(scene.store, append), scene.owner.writer) is not None
    scene.append(20)
    assert scene.state.version - scene.state.root.version <= 16, "roots are written as usual again"
    scene.check()
