"""Compaction inside `tiered run`: passes, what refuses them, how they yield, spool and stop.

Key compaction inside `tiered run`: a child writes the outputs; status, metrics and report say what was done.
"""

import shutil
import threading
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from rocketmq_tiered.maintenance.compaction_task import CompactionTask
from rocketmq_tiered.maintenance.task_figures import CompactionStatus
from rocketmq_tiered.maintenance.throttle import Level, Load, Stopping, Throttle, level_of
from rocketmq_tiered.process.archive_tasks import ArchiveTasks
from rocketmq_tiered.process.compaction_process import ChildRewrite, ChildStore
from rocketmq_tiered.process.metrics import status_families
from rocketmq_tiered.process.report import StatusReport, decode_report
from rocketmq_tiered.process.status_rows import compaction_text
from tests.archive.archive_builder import NOW_MS
from tests.maintenance.compaction_scene import Scene
from tests.maintenance.keyed_scene import KEYED, Table
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tiered.archive.task import KEY_COMPACTION, StoppedError, TaskLoop
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.index_refs import with_unindexed
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.pages import RunIndex, living_runs
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import AccessDeniedError, StoreFullError, UnansweredError, UnavailableError
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore, StoreOptions
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.request_metrics import StoreMetrics
from tiered.object_store.wrapper import StoreWrapper
from tiered.settings.rule_entries import RuleEntry
from tiered.settings.sections import CompactionSettings, GcSettings, OffloadSettings, Settings

HOUR_MS = 3_600_000
SETTINGS = Settings(
    compaction=CompactionSettings(
        every_ms=20,
        min_age_ms=0,
        split_bytes=20_000,
        object_bytes=60_000,
        bytes_per_s=1 << 40,
        requests_per_s=1 << 30,
    ),
    offload=OffloadSettings(block_bytes=600),
)


class Beside:
    """A schedule beside the owner of a scene's archive."""

    def __init__(
        self, directory: Path, settings: Settings = SETTINGS, store: ObjectStore | None = None
    ) -> None:
        self.scene = Scene(directory / "unused")
        self.load = Load()
        self.now_ms = NOW_MS + 1000
        self.spool = directory / "compaction"
        self.stopping = Stopping()
        writer = self.scene.owner.writer
        self.task = CompactionTask(
            store or self.scene.store,
            writer,
            settings,
            self.spool,
            Throttle(lambda: self.load),
            self.stopping,
            clock=Clock(wall_ms=lambda: self.now_ms),
        )

        def owned_state() -> CatalogState | None:
            state = writer.refresh()
            return state if writer.is_claimed else None

        self.loop = TaskLoop(self.task, owned_state, clock=Clock(wall_ms=lambda: self.now_ms))

    def compact(self) -> None:
        self.loop.make_pass()

    @property
    def report(self) -> CompactionStatus:
        return self.task.status(self.loop.status)


@pytest.fixture
def beside(tmp_path: Path) -> Beside:
    return Beside(tmp_path)


def test_a_pass_joins_all_that_is_due(beside: Beside) -> None:
    before = beside.scene.data_objects()
    beside.compact()
    report = replace(beside.report, idle_seconds=0.0)
    assert report.rounds >= 1
    assert report.last_ms == beside.now_ms
    assert report.joined_objects > 5 * report.made_objects > 0
    assert report.bytes_sent > 1000 < report.bytes_read
    assert (report.backlog_objects, report.problem) == (0, "")
    assert not any(beside.spool.iterdir())
    assert beside.spool.stat().st_mode & 0o777 == 0o700
    beside.scene.check()
    beside.scene.collect()
    assert beside.scene.data_objects() * 5 < before
    beside.scene.check()
    beside.compact()
    assert beside.report.rounds == report.rounds, "nothing is left to do"
    status = StatusReport(compaction=report)
    assert decode_report(status.to_json()) == status
    families = {
        family.name: family.samples[0].value
        for family in status_families(replace(status, cluster="c"))
        if "compaction" in family.name
    }
    assert families["rocketmq_tiered_store_compaction_joined_objects"] == report.joined_objects


@pytest.mark.parametrize("damage", ["missing", "a flipped byte", "a flipped tail"])
def test_a_damaged_object_stays_and_all_others_are_joined(beside: Beside, damage: str) -> None:
    store, before = beside.scene.store, beside.scene.data_sizes()
    key = sorted(before)[len(before) // 2]
    whole = store.get_range(key, 0, before[key])
    damaged = bytearray(whole)
    damaged[100 if damage == "a flipped byte" else -60] ^= 1
    store.delete([key])
    if damage != "missing":
        store.put_if_absent(key, [bytes(damaged)])
    beside.compact()
    assert (beside.report.problem, beside.report.backlog_objects) == ("", 0)
    assert beside.report.joined_objects > len(before) * 0.8
    ranges = beside.task.damaged.ranges
    assert {found.object_key for found in ranges} == {key}
    rows = sum(len(truth.rows) for truth in beside.scene.owner.truth.values())
    assert 0 < sum(found.end - found.begin for found in ranges) < rows / 4 and ranges[0].why
    store.delete([key])
    store.put_if_absent(key, [whole])
    beside.scene.check()
    beside.now_ms += 1000
    beside.scene.append(20)
    beside.compact()
    assert beside.task.damaged.ranges == ()
    beside.scene.check()


def test_a_round_that_ends_at_one_damaged_object_notes_the_other_ones_too(beside: Beside) -> None:
    planned = beside.task.plan(beside.scene.state)
    assert planned is not None
    objects = planned.candidates.objects["key"][planned.plan.sources[:2]]
    keys = {planned.candidates.object_keys[number] for number in objects.tolist()}
    beside.scene.store.delete(sorted(keys))
    assert beside.task.step(beside.scene.state, planned)
    assert beside.task.damaged.keys == keys


@pytest.mark.parametrize("is_missing", [True, False])
def test_an_unindexed_object_stays_and_its_messages_are_named_if_it_is_damaged(
    beside: Beside, is_missing: bool
) -> None:
    store, before = beside.scene.store, beside.scene.data_sizes()
    key = sorted(before)[len(before) // 2]
    versions: set[int] = set()
    for page in living_runs(RunIndex(store), beside.scene.state):
        keys = [page.chunk.object_keys[number] for number in page.chunk.objects["key"].tolist()]
        versions |= {int(run["version"]) for run in page.chunk.runs if keys[int(run["object"])] == key}
    draft = CommitDraft(CommitKind.MAINTENANCE, settings=with_unindexed({}, {key: versions}))
    assert MaintenanceCommit(store, beside.scene.owner.writer, Clock(wall_ms=lambda: NOW_MS)).commit(
        lambda _state: draft
    )
    if is_missing:
        store.delete([key])
    beside.compact()
    assert beside.report.joined_objects > len(before) * 0.8
    assert {found.object_key for found in beside.task.damaged.ranges} == ({key} if is_missing else set())
    assert key not in beside.scene.state.pending_deletions, "queries read it by its name"


def test_a_backlog_in_parts_of_a_sequence_is_an_estimate(beside: Beside) -> None:
    beside.scene.append(60)
    reports: list[CompactionStatus] = []
    task = beside.task
    task._limits = replace(task._limits, runs_max=40)
    task._round = lambda *_: reports.append(beside.report)  # type: ignore[assignment,func-returns-value]
    with pytest.raises(UnavailableError, match="changed each time"):
        beside.compact()
    assert reports[0].is_backlog_estimated
    assert ", about " in compaction_text(reports[0])
    assert reports[0].backlog_objects == pytest.approx(beside.scene.data_objects(), rel=0.3)


def test_only_the_owner_compacts(beside: Beside) -> None:
    other = CatalogWriter(
        beside.scene.store,
        cluster="cluster",
        broker="broker",
        instance="other",
        kind="run",
        clock=Clock(wall_ms=lambda: NOW_MS),
    )
    other.claim(take_over=True)
    beside.scene.owner.writer.refresh()
    beside.compact()
    assert beside.report.rounds == 0


def test_uncollected_garbage_refuses_a_pass(tmp_path: Path) -> None:
    beside = Beside(tmp_path, replace(SETTINGS, gc=GcSettings(grace_ms=0, every_ms=HOUR_MS)))
    beside.compact()
    beside.scene.append(40)
    beside.now_ms += 2 * HOUR_MS
    beside.compact()
    beside.scene.append(40)
    beside.now_ms = NOW_MS + 4 * HOUR_MS
    with pytest.raises(
        UnavailableError, match=r"objects are not joined while garbage is not collected.*; .*tiered gc"
    ):
        beside.compact()
    beside.scene.collect()
    beside.compact()


def test_a_full_disk_refuses_a_round(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    version = beside.scene.state.version
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(1000))
    with pytest.raises(StoreFullError, match=r"compaction needs .*, where 1000 B are free"):
        beside.compact()
    assert beside.scene.state.version == version, "nothing was announced"


class Denied(StoreWrapper):
    """An account that may not read data."""

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        if key.startswith(("data/", "sets/")):
            raise AccessDeniedError(f"GET of {key} was refused")
        return super().get_range(key, offset, length)


def wait_for(condition: object, what: str) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def test_the_thread_reports_failures_and_tries_again(
    beside: Beside, caplog: pytest.LogCaptureFixture
) -> None:
    (beside.spool / "compaction-left").mkdir(parents=True, mode=0o700)
    beside.spool.chmod(0o700)
    (beside.spool / "compaction-left" / "0").write_bytes(b"left by a killed process")
    beside.task._store._store = Denied(beside.scene.store)
    thread = threading.Thread(target=beside.loop.run)
    thread.start()
    wait_for(lambda: beside.report.failures >= 2, "two passes fail")
    assert "was refused; allow the account" in beside.report.problem
    assert "compaction has not run, and is tried again: GET of" in caplog.text
    assert not any(beside.spool.iterdir()), "what a killed process left is removed"
    beside.task._store._store = beside.scene.store
    wait_for(lambda: beside.report.last_ms is not None, "a pass ends well")
    beside.loop.stop()
    beside.stopping.stopped.set()
    thread.join(20)
    assert (beside.report.problem, beside.report.level) == ("", "")
    beside.scene.check()


def test_a_lost_reply_costs_a_round_and_no_message(beside: Beside) -> None:
    lost = FaultStore(beside.scene.store, [FaultRule(Fault.LOST_AFTER, frozenset({"compose"}), times=2)])
    beside.task._store._store = lost
    beside.compact()
    beside.scene.check()
    beside.scene.collect()
    beside.scene.check()


def test_a_drain_ends_a_pass(beside: Beside) -> None:
    drain = threading.Event()

    class Draining(StoreWrapper):
        def compose_if_absent(self, *args: object, **others: object) -> None:
            drain.set()
            raise UnansweredError("gone")

    beside.task._store._store = Draining(beside.scene.store)
    beside.stopping.drain = drain
    with pytest.raises(StoppedError):
        beside.compact()
    beside.scene.check()
    beside.scene.append(5)
    beside.scene.collect()
    beside.scene.check()


@pytest.mark.parametrize(
    ("load", "is_reading", "is_overdue", "expected"),
    [
        (Load(10, 100), False, False, Level.FULL),
        (Load(10, 100), True, False, Level.REDUCED),
        (Load(30, 100), False, False, Level.REDUCED),
        (Load(401, 100), False, False, Level.PAUSED),
        (Load(401, 100), True, True, Level.FORCED),
        (Load(0, 100, "no response"), False, True, Level.PAUSED),
    ],
)
def test_it_yields_to_uploads_and_reads(
    load: Load, is_reading: bool, is_overdue: bool, expected: Level
) -> None:
    assert level_of(load, is_reading=is_reading, is_overdue=is_overdue) == expected


def test_reads_slow_it_down_for_some_seconds(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    assert beside.task._share() == 1.0
    beside.load = Load(reads=3)
    assert beside.task._share() == 0.25
    later_s = time.monotonic() + 6
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert beside.task._share() == 1.0


def test_a_pass_compacts_what_is_new(tmp_path: Path) -> None:
    store = PrefixedStore(FileStore(tmp_path / "archive"), "cluster/broker/")
    table = Table(tmp_path / "unused", store=store)
    table.write(40)
    settings = replace(
        table.settings,
        topics=replace(table.settings.topics, rules=(RuleEntry(KEYED.topic, key_compaction="on"),)),
    )
    tasks = ArchiveTasks(store, table.owner.writer, settings, Load)
    place = ChildStore(store.url, StoreOptions(), settings.compaction, "INFO")
    metrics = StoreMetrics()
    tasks.add_key_compaction(store, tmp_path / "spool", lambda share: ChildRewrite(place, metrics, share))
    loop = tasks.loops[KEY_COMPACTION]
    (tmp_path / "spool").mkdir(exist_ok=True)
    loop.make_pass()
    assert not any((tmp_path / "spool").iterdir())
    status = tasks.figures["key_compaction"]
    assert status.last_ms is not None and not status.problem
    assert status.rounds == 1 and 0 < status.kept_messages < status.read_messages
    found = table.check()
    loop.make_pass()
    again = tasks.figures["key_compaction"]
    assert (again.rounds, again.read_messages) == (1, status.read_messages), "nothing is new"
    assert table.check() == found

    report = StatusReport(cluster="c", key_compaction=status)
    assert decode_report(report.to_json() | {"later": 1}) == report
    assert f"{status.kept_messages:,} of {status.read_messages:,} messages (" in status.text
    values = {
        sample.name.removeprefix("rocketmq_tiered_store_"): sample.value
        for family in status_families(report)
        for sample in family.samples
    }
    assert values["key_compaction_kept_messages_total"] == status.kept_messages
