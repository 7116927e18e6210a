"""A log that diverges inside joined runs: they are cut, what is above is superseded, nothing is put or left over.

Archives of joined objects whose log diverges at the end of any commit, and what every queue must have then.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits
from rocketmq_tiered.maintenance.compaction_round import plan_rounds
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.archive.queue_reader import QueueReader, records_of
from tests.catalog.collection import run_gc
from tests.maintenance.compaction_scene import EVERYTHING, LIMITS, LMQ, QUEUES, a_round
from tests.sweeps import sweep
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.hidden_history import history_state, list_histories
from tiered.catalog.pages import RunIndex, living_runs
from tiered.catalog.run_cuts import RunCuts
from tiered.catalog.state import CatalogState
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.errors import CorruptionError
from tiered.formats.keys import is_compacted
from tiered.model.queue import QueueKey
from tiered.model.tables import FLOOR_DTYPE
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore

COMMITS = 24


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], JoinedScene]:
    """By limits and runs in memory: an archive of joined objects."""
    found = {}
    for name, limits in (("sets", SETS), ("streams", STREAMS)):
        for spill_runs in (12, 10**6):
            scene = JoinedScene(tmp_path_factory.mktemp("spool"), commits=COMMITS, spill_runs=spill_runs)
            assert scene.compact(limits) > 0
            found[name, spill_runs] = scene
    return found


@pytest.mark.parametrize("commit", sweep(range(COMMITS), fast=[0, 7, 12, 22, 23]))
@pytest.mark.parametrize("spill_runs", [12, 10**6], ids=["pages", "memory"])
@pytest.mark.parametrize("limits", ["sets", "streams"])
def test_a_log_may_diverge_at_the_end_of_every_commit(
    scenes: dict[tuple[str, int], JoinedScene], limits: str, spill_runs: int, commit: int
) -> None:
    scene = scenes[limits, spill_runs].copy()
    version, phys = scene.ends[commit]
    superseded = scene.sent(phys)
    scene.diverge(version, phys)
    scene.forget(phys)
    for _ in range(6):
        scene.grow()
    scene.collect(diverged_grace_ms=1 << 40)
    scene.check()
    rows = {queue: int(row["row_count"]) for queue, row in load(scene.store).queues()}
    assert rows == {queue: len(known.rows) for queue, known in scene.builder.truth.items()}
    if superseded:
        assert contents(scene.store, history_state(scene.store, load(scene.store), 1)) == superseded
        assert list_histories(scene.store, load(scene.store))[0].messages > 0
    scene.check_no_leftovers()
    scene.check()
    # Of what is hidden, only rows in objects that are needed are left.
    left = contents(scene.store, history_state(scene.store, load(scene.store), 1))
    assert above(left, superseded) == {queue: [] for queue in left}


SAMPLE = 9
"""A commit of which objects have rows below and above."""


def test_a_log_may_diverge_inside_what_was_cut(scenes: dict[tuple[str, int], JoinedScene]) -> None:
    scene = scenes["sets", 12].copy()
    everything = scene.sent()
    for commit in (18, 12, 3):
        version, phys = scene.ends[commit]
        scene.diverge(version, phys)
        scene.forget(phys)
        scene.check()
        for _ in range(2):
            scene.grow()
    scene.collect(diverged_grace_ms=1 << 40)
    state = load(scene.store)
    hidden = [contents(scene.store, history_state(scene.store, state, number)) for number in (1, 2, 3)]
    found = [(queue, row) for part in hidden for queue, rows in part.items() for row in rows]
    common = scene.sent()
    gone = [
        (queue, row) for queue, rows in everything.items() for row in rows if row not in common.get(queue, [])
    ]
    assert gone and set(gone) <= set(found) and len(set(found)) == len(found)
    scene.check_no_leftovers()


def test_expired_runs_do_not_come_back(scenes: dict[tuple[str, int], JoinedScene]) -> None:
    """A queue whose joined run has expired ends at the common version: what was expired stays so."""
    scene = scenes["sets", 12].copy()
    state = load(scene.store)
    version, phys = scene.ends[SAMPLE]
    rows = {queue: known.rows for queue, known in scene.builder.truth.items()}
    queue = next(one for one in QUEUES[1:] if one in rows and rows[one][0].phys < phys < rows[one][-1].phys)
    row = state.queue(queue)
    assert row is not None
    floors = np.zeros(1, FLOOR_DTYPE)
    floors[0] = (0, row["end_queue_offset"], row["row_count"])
    draft = CommitDraft(CommitKind.MAINTENANCE, queues=[queue], floors=floors, created_ms=NOW_MS)
    scene.owner(scene.store).maintain(lambda _state: draft)
    scene.diverge(version, phys)
    scene.forget(phys)
    expired = scene.builder.truth[queue].rows[:]
    scene.builder.truth[queue].rows.clear()
    assert expired
    while queue not in scene.sent():
        scene.grow()
    assert scene.sent()[queue][0][0] == expired[-1].offset + expired[-1].inner_num
    scene.check()
    scene.check_no_leftovers()


def test_the_common_part_is_a_cut_of_the_same_objects(scenes: dict[tuple[str, int], JoinedScene]) -> None:
    """No data object is put; they stay while one of the histories needs them, and go after the grace of the other."""
    scene = scenes["sets", 12].copy()
    version, phys = scene.ends[SAMPLE]
    before = {info.key for info in scene.store.list("") if info.key.startswith(("data/", "sets/"))}
    superseded = scene.sent(phys)
    scene.diverge(version, phys)
    scene.forget(phys)
    cut = [run for page in living_runs(RunIndex(scene.store), load(scene.store)) for run in page.chunk.runs]
    assert any(is_compacted(key) for key in before) and max(int(run["end_phys"]) for run in cut) == phys
    assert {info.key for info in scene.store.list("") if info.key.startswith(("data/", "sets/"))} == before
    scene.compact()  # moves what is common: the joined objects have hidden rows alone
    scene.collect(diverged_grace_ms=1 << 40)
    scene.check()
    assert contents(scene.store, history_state(scene.store, load(scene.store), 1)) == superseded
    scene.check_no_leftovers()


@pytest.mark.parametrize("commit", sweep(range(COMMITS - 1), fast=[7, 12]))
@pytest.mark.parametrize("spill_runs", [12, 10**6], ids=["pages", "memory"])
@pytest.mark.parametrize("limits", ["sets", "streams"])
def test_an_earlier_log_returns_without_another_upload(
    scenes: dict[tuple[str, int], JoinedScene], limits: str, spill_runs: int, commit: int
) -> None:
    """And the later one after it, as often as the broker's disks are changed."""
    scene = scenes[limits, spill_runs].copy()
    version, phys = scene.ends[commit]
    first, first_end = scene.sent(), load(scene.store).version
    scene.diverge(version, phys)
    scene.forget(phys)
    for _ in range(4):
        scene.grow()
    second, second_end = scene.sent(), load(scene.store).version
    scene.collect(diverged_grace_ms=1 << 40)
    for wanted, end, other in (
        (first, first_end, second),
        (second, second_end, first),
        (first, first_end, second),
    ):
        state = scene.owner_again().return_to(end)
        assert contents(scene.store, state) == wanted
        report = verify_archive(scene.store, depth="full")
        assert report.anomalies == [], report.anomalies[:3]
        hidden = contents(scene.store, history_state(scene.store, state, state.cursor.history - 1))
        assert hidden == {queue: rows for queue, rows in above(other, wanted).items() if rows}
        scene.collect(diverged_grace_ms=1 << 40)


def above(whole: Contents, common: Contents) -> Contents:
    """What ``whole`` has and ``common`` has not."""
    return {queue: [row for row in rows if row not in common.get(queue, [])] for queue, rows in whole.items()}


def test_a_damaged_tail_is_an_error_and_nothing_begins(scenes: dict[tuple[str, int], JoinedScene]) -> None:
    scene = scenes["sets", 12].copy()
    version, phys = scene.ends[SAMPLE]
    for key, (data, at) in list(scene.store._objects.items()):
        if is_compacted(key):
            scene.store._objects[key] = data[:-40] + bytes(byte ^ 1 for byte in data[-40:]), at
    with pytest.raises(CorruptionError):
        scene.diverge(version, phys)
    assert load(scene.store).cursor.history == 1


def test_a_log_cannot_diverge_inside_a_record(scenes: dict[tuple[str, int], JoinedScene]) -> None:
    scene = scenes["sets", 12].copy()
    page = next(iter(living_runs(RunIndex(scene.store), load(scene.store))))
    runs = page.chunk.runs
    middle = np.where(runs["rows"] > 1, runs["min_phys"] + 1, runs["end_phys"])
    with pytest.raises(CorruptionError, match="which is inside a record"):
        RunCuts(scene.store).divided(page, middle, np.zeros(len(runs), np.int64))


def test_a_floor_inside_a_run_stays_above_the_cut(scenes: dict[tuple[str, int], JoinedScene]) -> None:
    """What is left of the run has expired as a whole."""
    scene = scenes["sets", 12].copy()
    page = next(iter(living_runs(RunIndex(scene.store), load(scene.store))))
    runs = page.chunk.runs
    run = next(run for run in runs if run["rows"] > 3)
    phys = np.where(runs["min_phys"] < run["end_phys"], runs["end_phys"], runs["min_phys"])
    rows = RunCuts(scene.store).rows(
        page.chunk.object_keys[int(page.chunk.objects["key"][run["object"]])],
        page.chunk.objects[run["object"]],
        page.queues[int(run["queue"])],
        run,
    )
    at = int(np.flatnonzero(runs == run)[0])
    phys[at] = rows.phys[2]
    for floor, expected in ((0, 2), (int(rows.queue_offset[2]) - 1, 2), (int(rows.queue_offset[2]), 0)):
        below, _ = RunCuts(scene.store).divided(page, phys, np.full(len(runs), floor, np.int64))
        mine = below.runs[
            (below.runs["queue"] == run["queue"])
            & (below.runs["base_queue_offset"] == run["base_queue_offset"])
        ]
        assert int(mine["rows"].sum()) == expected


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
            clock=Clock(wall_ms=lambda: NOW_MS),
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
        rows = [(offset, record) for offset, _, record in records_of(QueueReader(store, state, queue))]
        if rows:
            found[queue] = rows
    return found
