"""An export killed under c922a86 is finished: every row once, in the files that its plan names."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow.dataset as ds

from rocketmq_tiered.spark.jobs.export import ExportReport, export
from rocketmq_tiered.spark.jobs.export_progress import ExportProgress
from rocketmq_tiered.spark.options.source_options import SourceOptions
from tests.spark.jobs.inline_tasks import InlineTasks
from tests.upgrade.left_behind import QUEUES
from tiered.object_store.file import FileStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(left: Path, target: Path) -> ExportReport:
    options = SourceOptions((left / "reading" / "archive").as_uri(), partition_bytes=300)
    return export(cast("SparkSession", None), options, target.as_uri(), tasks=InlineTasks())


def files(target: Path) -> dict[str, bytes]:
    return {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*.parquet")}


def test_a_killed_export_is_finished_and_holds_every_row_once(left: Path, tmp_path: Path) -> None:
    target = left / "export"
    before = files(target)
    assert len(before) == 2
    report = run(left, target)
    assert report.batches == 1
    after = files(target)
    assert before.items() <= after.items()
    run(left, tmp_path / "whole")
    assert sorted(after) == sorted(files(tmp_path / "whole"))
    table = ds.dataset(target, format="parquet", partitioning="hive", exclude_invalid_files=True).to_table()
    rows = Counter(zip(table["queueId"].to_pylist(), table["queueOffset"].to_pylist(), strict=True))
    expected = Counter((queue_id, offset) for (_, queue_id), offsets in QUEUES.items() for offset in offsets)
    assert rows == expected
    assert run(left, target).batches == 0


def test_records_of_progress_written_today_are_the_same(left: Path, tmp_path: Path) -> None:
    """But for the time at which the export began."""
    run(left, tmp_path / "whole")
    old, new = (ExportProgress(FileStore(target)) for target in (left / "export", tmp_path / "whole"))
    one, other = old.intent(1), new.intent(1)
    assert one is not None and other is not None
    assert replace(other, created_ms=one.created_ms) == one
    assert new.plan(1) == old.plan(1)
    for part in range(2):
        assert new.part(1, part) == old.part(1, part)
