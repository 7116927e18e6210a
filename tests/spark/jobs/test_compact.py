"""The job `compact`: the same archive as `tiered compact` makes, from tasks that may be repeated."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from rocketmq_tiered.spark.jobs.compact import CompactTask, compact, output_groups
from tests.catalog.collection import run_gc
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.servers.running_store import RunningStore
from tests.spark.jobs.archive_contents import TINY, contents
from tests.spark.jobs.inline_tasks import InlineTasks, Twice
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.errors import UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import CompactionSettings, IndexSettings, OffloadSettings, Settings

MIB = 1 << 20
RealStore = Callable[[str], Path]
SETTINGS = replace(
    Settings(),
    compaction=CompactionSettings(min_age_ms=0, split_bytes=64 << 10, object_bytes=2 * MIB),
    offload=OffloadSettings(block_bytes=32 << 10),
)


def no_spark() -> SparkSession:
    raise AssertionError("Spark was started")


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tasks a round, although the archive is small."""
    monkeypatch.setattr(
        "rocketmq_tiered.spark.jobs.compact.output_groups", lambda plan, _: output_groups(plan, 256 << 10)
    )


@pytest.fixture
def archived(real_store: RealStore, tmp_path: Path) -> tuple[str, ObjectStore]:
    root = FileStore(tmp_path / "archive")
    backfill(
        real_store("F") / "store", root, settings=TINY, index_settings=IndexSettings(after_backfill=True)
    )
    return f"file://{tmp_path / 'archive'}", PrefixedStore(root, archive_prefix(CLUSTER, BROKER))


def data_objects(store: ObjectStore) -> int:
    return sum(1 for prefix in ("data/", "sets/") for _ in store.list(prefix))


def checked(store: ObjectStore, expected: dict[object, list[bytes]]) -> None:
    """Sound, nothing left over after garbage collection, and all records are what they were."""
    later = store.clock_ms() + 2_000  # some buckets have a clock of whole seconds
    run_gc(store, load(store), apply=True, grace_ms=0, clock=lambda: later)
    report = verify_archive(store, depth="full")
    assert report.anomalies == []
    assert report.leftovers == []
    assert contents(store) == expected


def test_tasks_write_and_the_driver_commits_each_round_once(
    archived: tuple[str, ObjectStore], tmp_path: Path
) -> None:
    url, store = archived
    expected, before = contents(store), data_objects(store)
    dry = compact(no_spark, url, SETTINGS).report
    assert not dry.is_applied
    assert dry.rounds.objects == before
    tasks: list[CompactTask] = []
    steps: list[tuple[int, int]] = []
    runner = InlineTasks(lambda task: tasks.append(task) if isinstance(task, CompactTask) else None)
    version = load(store).version
    found = compact(
        no_spark,
        url,
        SETTINGS,
        apply=True,
        spool=str(tmp_path / "spool"),
        tasks=runner,
        report=lambda done, total: steps.append((done, total)),
    )
    assert (found.cluster, found.broker) == (CLUSTER, BROKER)
    rounds = found.report.rounds
    assert found.report.is_applied
    assert rounds.objects >= before
    assert load(store).version == version + 2 * rounds.rounds, "an intent and a commit each"
    assert steps[-1][0] == steps[-1][1] > 0
    assert len(tasks) > 2 * rounds.rounds
    for task in tasks:
        assert len(task.candidates.object_keys) <= before, "no more than the task needs"
    assert compact(no_spark, url, SETTINGS).report.rounds.objects == 0, "it ends"
    checked(store, expected)
    assert data_objects(store) * 4 < before


@pytest.mark.integration
def test_a_repeated_task_leaves_garbage_that_is_found(
    archived: tuple[str, ObjectStore], tmp_path: Path
) -> None:
    url, store = archived
    expected = contents(store)
    compact(no_spark, url, SETTINGS, apply=True, spool=str(tmp_path), tasks=Twice())
    checked(store, expected)


@pytest.mark.integration
def test_a_job_that_dies_changes_nothing_and_the_next_one_completes(
    archived: tuple[str, ObjectStore], tmp_path: Path
) -> None:
    url, store = archived
    expected, seen = contents(store), 0

    def die(task: object) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            raise UnavailableError("the worker is gone")

    with pytest.raises(UnavailableError, match="the worker is gone"):
        compact(no_spark, url, SETTINGS, apply=True, spool=str(tmp_path), tasks=InlineTasks(die))
    assert contents(store) == expected
    compact(no_spark, url, SETTINGS, apply=True, spool=str(tmp_path), tasks=InlineTasks())
    checked(store, expected)


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_on_spark_over_s3(
    spark: SparkSession, minio_url: RunningStore, real_store: RealStore, tmp_path: Path
) -> None:
    """Small and large objects: level 1 in tasks, then level 2 copies inside the store."""
    url, options = minio_url.fresh_bucket(), minio_url.options()
    root = open_store(url, options)
    try:
        backfill(
            real_store("F") / "store", root, settings=TINY, index_settings=IndexSettings(after_backfill=True)
        )
        store = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
        expected, before = contents(store), data_objects(store)
        assert compact(spark, url, SETTINGS, apply=True, store=options).report.rounds.objects >= before
        checked(store, expected)
        assert data_objects(store) * 4 < before
    finally:
        root.close()
