"""Exports that continue after gaps were filled, rows expired, and pages of the plan became garbage."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from rocketmq_tiered.export.export_job import ExportReport
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from tests.spark.gapped_archive import ONE, OTHER, GappedArchive, with_a_gap
from tests.spark.jobs.export_runs import exported, run
from tests.spark.jobs.inline_tasks import InlineTasks
from tiered.errors import SnapshotExpiredError, UnavailableError


@pytest.fixture
def archive(tmp_path: Path) -> GappedArchive:
    """See ``with_a_gap``."""
    return with_a_gap(tmp_path / "archive")


def export_once(
    archive: GappedArchive, target: Path, *topics: str, version: int | None = None
) -> ExportReport:
    return run(SourceOptions(archive.url, topics=topics, version=version, partition_bytes=1000), target)


def killed(archive: GappedArchive, target: Path, after: int, version: int | None = None) -> None:
    """An export that dies when so many of its parts are written."""
    parts = iter(range(after))

    def die(task: object) -> None:
        if next(parts, None) is None:
            raise UnavailableError("killed")

    with pytest.raises(UnavailableError, match="killed"):
        run(SourceOptions(archive.url, version=version, partition_bytes=1000), target, InlineTasks(die))


def offsets(target: Path, topic: str = "one") -> Counter[int]:
    found: Counter[int] = Counter()
    for (name, _, _, offset), count in exported(target).items():
        if name == topic:
            found[offset] += count
    return found


def test_a_batch_without_a_topic_keeps_its_gaps(archive: GappedArchive, tmp_path: Path) -> None:
    target = tmp_path / "table"
    export_once(archive, target)
    archive.fill(ONE, range(10, 12))
    archive.put(OTHER, [5])
    export_once(archive, target, "other")
    assert offsets(target) == Counter([*range(10), *range(15, 25)])
    export_once(archive, target)
    archive.fill(ONE, range(12, 15))
    export_once(archive, target, "*")
    assert offsets(target) == Counter(range(25))


def test_a_gap_recorded_while_a_topic_was_excluded_is_not_filled_twice(
    archive: GappedArchive, tmp_path: Path
) -> None:
    target = tmp_path / "table"
    export_once(archive, target)
    archive.put(ONE, range(28, 30))
    archive.put(OTHER, [5])
    export_once(archive, target, "other")
    archive.fill(ONE, range(25, 28))
    export_once(archive, target)
    assert offsets(target) == Counter([*range(10), *range(15, 30)])


@pytest.mark.parametrize("written", [0, 2])
def test_a_killed_export_continues_after_its_plan_became_garbage(
    archive: GappedArchive, tmp_path: Path, written: int
) -> None:
    """Merge, compaction and filled gaps change neither rows nor file names of the batch."""
    target, whole = tmp_path / "table", tmp_path / "whole"
    archive.age()
    shutil.copytree(tmp_path / "archive", tmp_path / "copy")
    run(SourceOptions(f"file://{tmp_path / 'copy'}", partition_bytes=1000), whole)
    killed(archive, target, written)
    archive.fill(ONE, range(11, 13))
    archive.age()
    assert export_once(archive, target).batches == 2
    assert offsets(target) == Counter([*range(10), 11, 12, *range(15, 25)])
    assert offsets(target, "other") == Counter(range(31))
    first = {path.relative_to(target) for path in target.rglob("00000001-*.parquet")}
    assert first == {path.relative_to(whole) for path in whole.rglob("*.parquet")}


@pytest.mark.parametrize(("runs", "left"), [(1, range(15, 25)), (2, range(0))])
def test_a_killed_export_continues_after_rows_expired(
    archive: GappedArchive, tmp_path: Path, runs: int, left: range
) -> None:
    target = tmp_path / "table"
    killed(archive, target, 0)
    archive.expire(ONE, runs)
    archive.age()
    assert export_once(archive, target).expired == 20 - len(left)
    assert offsets(target) == Counter(left)
    assert offsets(target, "other") == Counter(range(18))
    assert export_once(archive, target).batches == 0


@pytest.mark.parametrize("written", [None, 0])
def test_an_earlier_version_is_exported_with_what_expired_since(
    archive: GappedArchive, tmp_path: Path, written: int | None
) -> None:
    target, version = tmp_path / "table", archive.state.version
    archive.put(OTHER, [5])
    archive.expire(ONE)
    if written is not None:
        killed(archive, target, written, version)
    assert export_once(archive, target, version=version).expired == 0
    assert offsets(target) == Counter([*range(10), *range(15, 25)])
    assert offsets(target, "other") == Counter(range(5))
    assert export_once(archive, target, version=version).batches == 0
    export_once(archive, target)
    assert offsets(target) == Counter([*range(10), *range(15, 25)])
    assert offsets(target, "other") == Counter(range(6))
    archive.age()
    with pytest.raises(
        SnapshotExpiredError, match=rf"offsets \[0, 5\) have expired .* {version}; run the job"
    ):
        export_once(archive, tmp_path / "late", version=version)
