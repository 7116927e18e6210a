"""The job `compact-keys`: the archive that `tiered compact-keys` makes, and the report."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from rocketmq_tiered.maintenance.key_job import compact_keys as compact_keys_here
from rocketmq_tiered.process.loaded_archive import open_for_reading
from rocketmq_tiered.spark.cli.main import main
from rocketmq_tiered.spark.jobs import compact as job
from tests.catalog.collection import run_gc
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.spark.jobs.archive_contents import TINY, contents
from tests.spark.jobs.inline_tasks import InlineTasks
from tests.sweeps import sweep
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.errors import UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import KeyCompactionSettings, Settings

RealStore = Callable[[str], Path]
SETTINGS = replace(Settings(), key_compaction=KeyCompactionSettings(min_age_ms=-(10**12)))
STORES = {"H": "t_", "H2": "t_", "K": "t_", "C": "t_"}


def no_spark() -> SparkSession:
    raise AssertionError("Spark was started")


@pytest.mark.parametrize(
    ("name", "keyless"),
    sweep(
        [(name, kept) for name in STORES for kept in ("keep", "drop")],
        fast=[("H2", "drop")],
        rest="integration",
    ),
)
def test_the_same_result_as_one_process(
    name: str, keyless: str, real_store: RealStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "TASK_BYTES", 64 << 10)
    monkeypatch.setattr(job, "PART_MESSAGES", 1000)
    settings = replace(SETTINGS, key_compaction=replace(SETTINGS.key_compaction, keyless=keyless))
    backfill(real_store(name) / "store", FileStore(tmp_path / "here"), settings=TINY)
    shutil.copytree(tmp_path / "here", tmp_path / "tasks")
    here, there = (
        PrefixedStore(FileStore(tmp_path / way), archive_prefix(CLUSTER, BROKER)) for way in ("here", "tasks")
    )
    is_keyed = lambda topic: topic.startswith(STORES[name])  # noqa: E731
    options = RewriteOptions(tmp_path / "spool", 1 << 30)
    expected = compact_keys_here(here, load(here), settings, options, is_keyed, apply=True)
    with open_for_reading(f"file://{tmp_path / 'tasks'}", settings) as archive:
        dry = job.compact_keys(no_spark, archive, settings, is_keyed, tasks=InlineTasks())
        found = job.compact_keys(no_spark, archive, settings, is_keyed, apply=True, tasks=InlineTasks())
    figures = replace(expected.figures, spooled_bytes=0)
    assert (dry.figures, dry.rounds, dry.is_applied) == (figures, 0, False)
    assert (found.figures, found.rounds) == (figures, expected.rounds)
    assert expected.rounds == 1 or name == "C"
    assert contents(there) == contents(here)
    run_gc(there, load(there), apply=True, grace_ms=0, clock=lambda: there.clock_ms() + 1)
    report = verify_archive(there, depth="full")
    assert (report.anomalies, report.leftovers) == ([], [])
    assert contents(there) == contents(here)


def test_a_dead_task_changes_nothing(real_store: RealStore, tmp_path: Path) -> None:
    backfill(real_store("H2") / "store", FileStore(tmp_path / "archive"), settings=TINY)
    calls = iter(range(100))

    def dies(task: object) -> None:
        if next(calls) == 3:
            raise UnavailableError("the executor died")

    with open_for_reading(f"file://{tmp_path / 'archive'}", SETTINGS) as archive:
        before = contents(archive.store)
        with pytest.raises(UnavailableError):
            job.compact_keys(
                no_spark, archive, SETTINGS, lambda topic: True, apply=True, tasks=InlineTasks(dies)
            )
        assert contents(archive.store) == before
        again = job.compact_keys(
            no_spark, archive, SETTINGS, lambda topic: True, apply=True, tasks=InlineTasks()
        )
        assert again.rounds > 0
        assert verify_archive(archive.store, depth="full").anomalies == []


@pytest.mark.integration
def test_the_verb_with_spark(
    spark: SparkSession, real_store: RealStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backfill(real_store("H2") / "store", FileStore(tmp_path / "archive"), settings=TINY)
    rules = tmp_path / "rules.toml"
    rules.write_text('[[topics.rules]]\npattern = "t_compact*"\nkey_compaction = "on"\n')
    url = f"file://{tmp_path / 'archive'}"
    arguments = ["compact-keys", url, "--rules", str(rules), "--older-than", "0s", "--json"]
    assert main(arguments) == 0
    dry = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--apply"]) == 0
    applied = json.loads(capsys.readouterr().out)
    assert applied == dry | {"applied": True, "rounds": applied["rounds"]}
    assert applied["newMessages"] < applied["messages"]
    assert main([*arguments, "--topic", "t_normal"]) == 2
    assert "do not have the keys of topic t_normal compacted" in capsys.readouterr().err
