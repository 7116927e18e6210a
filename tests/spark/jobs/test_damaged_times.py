"""Jobs work with any damaged store timestamp: most records have no checksum over it."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rocketmq_tiered.message_table.plan.archive_plan import pinned_versions, plan
from rocketmq_tiered.spark.jobs.export import batch_frame
from tests.end_to_end.offloading import backfill
from tests.fetcher.broker_store_writer import WrittenStore
from tests.spark.jobs.export_runs import exported, run, source
from tiered.object_store.file import FileStore

pytestmark = pytest.mark.integration

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

USUAL_MS = 1_700_000_000_000
STAMPS_MS = (USUAL_MS, -1, 1 << 62, 1 - (1 << 63), (1 << 63) - 1, 253_402_300_800_000, USUAL_MS)
DAYS = {
    date(2023, 11, 14): [0, 6],
    date(1969, 12, 31): [1],
    date.min: [3],
    date.max: [2, 4, 5],
}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """One message for each of STAMPS_MS."""
    store = WrittenStore(tmp_path / "store")
    for stamp_ms in STAMPS_MS:
        store.put("t", 0, b"body", later_ms=stamp_ms - USUAL_MS)
    backfill(store.path, FileStore(tmp_path / "archive"))
    return tmp_path / "archive"


def test_export_clips_them_to_the_first_and_last_day(archive: Path, tmp_path: Path) -> None:
    assert run(source(archive), tmp_path / "table").rows == len(STAMPS_MS)
    assert set(exported(tmp_path / "table").values()) == {1}
    days = {directory.name for directory in (tmp_path / "table" / "topic=t").iterdir()}
    assert days == {f"date={day.isoformat()}" for day in DAYS}


def test_a_delta_table_has_the_same_days(spark: SparkSession, archive: Path) -> None:
    options = source(archive)
    parts = plan(options, pinned_versions(options), options.times, is_header_only=False)
    frame = batch_frame(spark, options, ("queueOffset", "topic"), parts)
    found: dict[date, list[int]] = {}
    for row in frame.orderBy("queueOffset").collect():
        found.setdefault(row["date"], []).append(row["queueOffset"])
    assert found == DAYS
