"""Compaction inside `tiered run`: passes, what refuses them, how they yield, spool and stop."""

from __future__ import annotations

import shutil
import threading
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from rocketmq_tiered.cli.status import _compaction
from rocketmq_tiered.maintenance.yielding_store import StoppedError
from rocketmq_tiered.process.compaction_schedule import CompactionSchedule, Level, Load, level_of
from rocketmq_tiered.process.metrics import StatusCollector
from rocketmq_tiered.process.report import CompactionStatus, StatusReport, decode_report
from tests.archive.archive_builder import NOW_MS
from tests.maintenance.compaction_scene import Scene
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.errors import AccessDeniedError, StoreFullError, UnansweredError, UnavailableError
from tiered.object_store.interface import ObjectStore
from tiered.object_store.wrapper import StoreWrapper
from tiered.settings.compaction_section import CompactionSettings
from tiered.settings.retention_sections import GcSettings
from tiered.settings.sections import OffloadSettings, Settings

HOUR_MS = 3_600_000
SETTINGS = Settings(
    compaction=CompactionSettings(
        every_ms=20, min_age_ms=0, split_bytes=20_000, object_bytes=60_000, bytes_per_s=1 << 40,
        requests_per_s=1 << 30,
    ),
    offload=OffloadSettings(block_bytes=600),
)  # fmt: skip


class Beside:
    """A schedule beside the owner of a scene's archive."""

    def __init__(
        self, directory: Path, settings: Settings = SETTINGS, store: ObjectStore | None = None
    ) -> None:
        self.scene = Scene(directory / "unused")
        self.load = Load()
        self.now_ms = NOW_MS + 1000
        self.spool = directory / "compaction"
        self.schedule = CompactionSchedule(
            store or self.scene.store, self.scene.owner.writer, settings, self.spool, lambda: self.load,
            clock_ms=lambda: self.now_ms,
        )  # fmt: skip


def test_a_pass_joins_all_that_is_due(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    before = beside.scene.data_objects()
    beside.schedule.compact()
    report = replace(beside.schedule.report, idle_seconds=0.0)
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
    beside.schedule.compact()
    assert beside.schedule.report.rounds == report.rounds, "nothing is left to do"
    status = StatusReport(compaction=report)
    assert decode_report(status.to_json()) == status
    families = {
        family.name: family.samples[0].value
        for family in StatusCollector(lambda: replace(status, cluster="c")).collect()
        if "compaction" in family.name
    }
    assert families["rocketmq_tiered_store_compaction_joined_objects"] == report.joined_objects


def test_a_backlog_in_parts_of_a_sequence_is_an_estimate(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.scene.append(60)
    reports: list[CompactionStatus] = []
    schedule = beside.schedule
    schedule._limits = replace(schedule._limits, runs_max=40)
    schedule._round = lambda *_: reports.append(schedule.report)  # type: ignore[assignment,func-returns-value]
    with pytest.raises(UnavailableError, match="change faster"):
        schedule.compact()
    assert reports[0].is_backlog_estimated
    assert ", about " in _compaction(reports[0])
    assert reports[0].backlog_objects == pytest.approx(beside.scene.data_objects(), rel=0.3)


def test_only_the_owner_compacts(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    other = CatalogWriter(
        beside.scene.store,
        cluster="cluster",
        broker="broker",
        instance="other",
        kind="run",
        clock_ms=lambda: NOW_MS,
    )
    other.claim(take_over=True)
    beside.scene.owner.writer.refresh()
    beside.schedule.compact()
    assert beside.schedule.report.rounds == 0


def test_uncollected_garbage_refuses_a_pass(tmp_path: Path) -> None:
    settings = replace(SETTINGS, gc=GcSettings(grace_ms=0, every_ms=HOUR_MS))
    beside = Beside(tmp_path, settings)
    beside.schedule.compact()
    beside.scene.append(40)
    beside.now_ms += 2 * HOUR_MS
    beside.schedule.compact()
    beside.scene.append(40)
    beside.now_ms = NOW_MS + 4 * HOUR_MS
    with pytest.raises(UnavailableError, match=r"garbage is not collected; .*tiered gc"):
        beside.schedule.compact()
    beside.scene.collect()
    beside.schedule.compact()


def test_a_full_disk_refuses_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Beside(tmp_path)
    version = beside.scene.state.version
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(1000))
    with pytest.raises(StoreFullError, match=r"1000 B free of .* for objects in progress"):
        beside.schedule.compact()
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
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beside = Beside(tmp_path)
    (beside.spool / "compaction-left").mkdir(parents=True, mode=0o700)
    beside.spool.chmod(0o700)
    (beside.spool / "compaction-left" / "0").write_bytes(b"left by a killed process")
    beside.schedule._store._store = Denied(beside.scene.store)
    beside.schedule.start(threading.Event())
    wait_for(lambda: beside.schedule.report.failures >= 2, "two passes fail")
    report = beside.schedule.report
    assert "was refused; allow the account" in report.problem
    assert "compaction has not run: GET of" in caplog.text
    assert not any(beside.spool.iterdir()), "what a killed process left is removed"
    beside.schedule._store._store = beside.scene.store
    wait_for(lambda: beside.schedule.report.last_ms is not None, "a pass ends well")
    beside.schedule.stop()
    assert (beside.schedule.report.problem, beside.schedule.report.level) == ("", "")
    beside.scene.check()


def test_a_lost_reply_costs_a_round_and_no_message(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    lost = FaultStore(beside.scene.store, [FaultRule(Fault.LOST_AFTER, frozenset({"compose"}), times=2)])
    beside.schedule._store._store = lost
    beside.schedule.compact()
    beside.scene.check()
    beside.scene.collect()
    beside.scene.check()


def test_a_drain_ends_a_pass(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    drain = threading.Event()

    class Draining(StoreWrapper):
        def compose_if_absent(self, *args: object, **others: object) -> None:
            drain.set()
            raise UnansweredError("gone")

    beside.schedule._store._store = Draining(beside.scene.store)
    beside.schedule._drain = drain
    with pytest.raises(StoppedError):
        beside.schedule.compact()
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


def test_reads_slow_it_down_for_some_seconds(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    assert beside.schedule._share() == 1.0
    beside.load = Load(reads=3)
    assert beside.schedule._share() == 0.25
    beside.schedule._monotonic_s = lambda: time.monotonic() + 6
    assert beside.schedule._share() == 1.0
