"""When the broker may delete what is not archived."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from tiered.broker_store.commit_log import LogFile
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.retention import DeletionMargin, DiskUse, Growth, deletion_margin, short_margin_s

GIB = 1 << 30
NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
NOW_MS = int(NOW.timestamp() * 1000)
CONF = BrokerConf(file_reserved_hours=72, delete_when_hours=(4,))
HALF = DiskUse(0.50, 100 * GIB)


def file(number: int, age_hours: float) -> tuple[LogFile, int]:
    written = NOW - timedelta(hours=age_hours)
    return LogFile(number * GIB, GIB, Path(str(number))), int(written.timestamp() * 1000)


def margin(files: list[tuple[LogFile, int]], archived: int = 0, disk: DiskUse = HALF) -> DeletionMargin:
    return deletion_margin(files, archived, CONF, disk, now_ms=NOW_MS)


def hours(found: DeletionMargin) -> float | None:
    return None if found.seconds is None else found.seconds / 3600


def test_files_go_at_the_hour_after_their_time() -> None:
    assert hours(margin([file(0, 10), file(1, 1)])) == 64  # 62 h from now is 02:00, so at 04:00


def test_overdue_files_go_at_the_next_hour() -> None:
    assert hours(margin([file(0, 500), file(1, 1)])) == 16


def test_within_the_hour_they_go_at_once() -> None:
    at_four = int(NOW.replace(hour=4, minute=30).timestamp() * 1000)
    assert deletion_margin([file(0, 500), file(1, 1)], 0, CONF, HALF, now_ms=at_four).seconds == 0


def test_the_hour_is_the_brokers_local_one() -> None:
    zone = timezone(timedelta(hours=8))
    found = deletion_margin([file(0, 500), file(1, 1)], 0, CONF, HALF, now_ms=NOW_MS, zone=zone)
    assert hours(found) == 8  # 20:00 there


def test_a_fuller_disk_does_not_wait_for_the_hour() -> None:
    disk = DiskUse(0.80, 100 * GIB)
    assert hours(margin([file(0, 500), file(1, 1)], disk=disk)) == 0
    assert hours(margin([file(0, 10), file(1, 1)], disk=disk)) == 62


def test_a_full_disk_waits_for_nothing() -> None:
    found = margin([file(0, 0), file(1, 0)], disk=DiskUse(0.86, 100 * GIB))
    assert found.seconds == 0
    assert "files of any age" in found.why


def test_a_growing_disk_is_foreseen() -> None:
    found = margin([file(0, 1), file(1, 0)], disk=DiskUse(0.50, 100 * GIB, [Growth(GIB / 100, 600)]))
    assert found.seconds == pytest.approx(3500)


def test_a_short_burst_is_not_taken_to_last_for_hours() -> None:
    """Of a fresh broker, say, whose first messages come all at once."""
    burst = [Growth(GIB / 100, 10), Growth(GIB / 100, 60)]
    assert hours(margin([file(0, 1), file(1, 0)], disk=DiskUse(0.50, 100 * GIB, burst))) == 88
    burst += [Growth(GIB, 10)]
    assert margin([file(0, 1), file(1, 0)], disk=DiskUse(0.50, 100 * GIB, burst)).seconds == pytest.approx(35)


def test_a_short_margin_is_less_than_every_file_has_when_the_next_begins() -> None:
    hours = {kept: short_margin_s(replace(CONF, file_reserved_hours=kept)) / 3600 for kept in (0, 1, 12, 72)}
    assert hours == {0: pytest.approx(1 / 6), 1: 0.5, 12: 6, 72: 6}


def test_archived_files_are_no_worry() -> None:
    found = margin([file(0, 500), file(1, 10), file(2, 1)], archived=GIB)
    assert found.file == file(1, 0)[0]
    assert hours(found) == 64


def test_the_last_file_never_goes() -> None:
    assert margin([file(0, 500)]).seconds is None
    assert margin([file(0, 500), file(1, 500)], archived=GIB).seconds is None
    assert margin([]).seconds is None
