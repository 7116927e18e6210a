"""Verify, and the command line of all jobs, on a real store's archive."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from rocketmq_tiered.maintenance.key_job import compact_keys
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.spark import read
from rocketmq_tiered.spark.cli.main import main
from rocketmq_tiered.spark.jobs.export import export
from rocketmq_tiered.spark.jobs.verify import verify
from tests.end_to_end.ground_truth import load_truth
from tests.end_to_end.offloading import CLUSTER, FILTER
from tests.spark.conftest import archive_store
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.verify import AnomalyKind, verify_archive
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import Settings

pytestmark = [pytest.mark.integration]
RealStore = Callable[[str], Path]


@pytest.fixture(scope="module")
def truth(real_store: RealStore) -> list[dict[str, Any]]:
    return [line for lines in load_truth(real_store("K"), "K", FILTER).queues.values() for line in lines]


def damaged_copy(archive: Path, target: Path) -> str:
    """A copy with one byte changed in the first stream set object; its key."""
    shutil.copytree(archive, target)
    (file, *_) = sorted(target.rglob("*.sso"))
    data = bytearray(file.read_bytes())
    data[5_000] ^= 0xFF
    file.chmod(0o644)
    file.write_bytes(data)
    return file.name


# -- verify ---------------------------------------------------------------------------------------------------


def test_spark_verify_finds_the_same_as_verify(
    spark: SparkSession, small_archive: Path, tmp_path: Path
) -> None:
    (clean,) = verify(spark, SourceOptions(f"file://{small_archive}"))
    archive = PrefixedStore(FileStore(small_archive), archive_prefix(CLUSTER, "K"))
    assert clean.report == verify_archive(archive, depth="full")
    assert clean.report.anomalies == []
    name = damaged_copy(small_archive, tmp_path / "damaged")
    (missing, *_) = sorted((tmp_path / "damaged").rglob("*.so"))
    missing.unlink()
    (found,) = verify(spark, SourceOptions(f"file://{tmp_path / 'damaged'}"))
    damaged = PrefixedStore(FileStore(tmp_path / "damaged"), archive_prefix(CLUSTER, "K"))
    assert found.report == verify_archive(damaged, depth="full")
    kinds = {anomaly.kind for anomaly in found.report.anomalies}
    assert {AnomalyKind.DAMAGED, AnomalyKind.MISSING} <= kinds
    assert any(name in anomaly.key and anomaly.range for anomaly in found.report.anomalies)


def test_messages_dropped_by_key_compaction_are_not_exported(
    spark: SparkSession, real_store: RealStore, tmp_path: Path
) -> None:
    archive_store(real_store("H2") / "store", tmp_path / "archive", "H2")
    archive = PrefixedStore(FileStore(tmp_path / "archive"), archive_prefix(CLUSTER, "H2"))
    settings = Settings()
    own = replace(settings.key_compaction, min_age_ms=-(10**12))
    dropped = compact_keys(
        archive,
        load(archive),
        replace(settings, key_compaction=own),
        RewriteOptions(tmp_path / "spool", 1 << 30),
        lambda topic: topic == "t_compact_hot",
        apply=True,
    )
    assert dropped.figures.messages - dropped.figures.new_messages > 1000
    target = f"file://{tmp_path / 'table'}"
    exported = export(
        spark, SourceOptions(f"file://{tmp_path / 'archive'}", topics=("t_compact_hot",)), target
    )
    again = export(spark, SourceOptions(f"file://{tmp_path / 'archive'}", topics=("t_compact_hot",)), target)
    kept = read(
        spark, f"file://{tmp_path / 'archive'}", topic="t_compact_hot", columns=["queueOffset"]
    ).count()
    assert (exported.rows, exported.expired, again.rows) == (kept, 0, 0)


# -- the command line -----------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(one) for one in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_verbs_and_exit_codes(
    spark: SparkSession,
    small_archive: Path,
    real_store: RealStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"file://{small_archive}"
    code, out, _ = run(capsys, "verify", url, "--json", "--quick")
    assert (code, json.loads(out)[0]["ok"]) == (0, True)
    damaged_copy(small_archive, tmp_path / "damaged")
    code, out, _ = run(capsys, "verify", f"file://{tmp_path / 'damaged'}")
    assert code == 1
    assert "anomaly: damaged" in out
    code, out, _ = run(capsys, "export", url, f"file://{tmp_path / 'table'}", "--topic", "t_one", "--json")
    assert (code, json.loads(out)["batches"]) == (0, 1)
    for wrong, expected, word in (
        (("verify", f"file://{tmp_path / 'nothing'}"), 3, "no archive"),
        (("export", url, f"file://{tmp_path / 'none'}", "--topic", "nowhere"), 3, "nowhere"),
        (("backfill", url), 2, "no store directory is given"),
        (("verify", "nonsense://"), 2, "nonsense"),
    ):
        code, out, err = run(capsys, *wrong)
        assert (code, out) == (expected, ""), wrong
        assert err.count("\n") == 1, err
        assert word in err


def test_backfill_verb_archives_its_store(
    spark: SparkSession, real_store: RealStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = real_store("K") / "store"
    arguments = (
        "backfill",
        store,
        f"file://{tmp_path}",
        "--cluster",
        CLUSTER,
        "--broker",
        "K",
        "--set",
        "offload.batch_bytes=1048576",
        "--json",
    )
    code, out, _ = run(capsys, *arguments)
    (report,) = json.loads(out)
    assert (code, report["damaged"], report["messages"] > 5000, report["commits"] > 3) == (0, 0, True, True)
    assert report["rawBytes"] > report["storedBytes"] > 0
    found = verify_archive(PrefixedStore(FileStore(tmp_path), archive_prefix(CLUSTER, "K")), depth="full")
    assert (found.anomalies, found.leftovers, found.counts["messages"]) == ([], [], report["messages"])
    code, out, _ = run(capsys, *arguments[:-1])
    assert "nothing to do" in out
