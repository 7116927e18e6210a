"""Every job once against an object store server: endpoint and keys are options, no library of Hadoop's has a part."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.spark.jobs.backfill import BackfillOptions, StoreToBackfill, backfill
from rocketmq_tiered.spark.jobs.export import export
from rocketmq_tiered.spark.jobs.verify import verify
from tests.end_to_end.ground_truth import load_truth
from tests.end_to_end.offloading import CLUSTER, FILTER
from tests.servers.running_store import REGION, RunningStore
from tests.spark.jobs.export_runs import exported
from tiered.object_store.interface import S3Credentials

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
RealStore = Callable[[str], Path]


def source_of(server: RunningStore, url: str) -> SourceOptions:
    return SourceOptions(url, store=server.options())


def download(server: RunningStore, url: str, target: Path) -> None:
    """All objects below ``url`` as files, by the SDK's own client."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = server.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/"):
        for item in page["Contents"]:
            if item["Key"].endswith("/"):
                continue  # a directory, as Hadoop marks them
            path = target / item["Key"].removeprefix(f"{prefix}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(bucket, item["Key"], str(path))


def test_every_job_works_over_s3(
    spark: SparkSession, minio_url: RunningStore, real_store: RealStore, tmp_path: Path
) -> None:
    """From a store directory through MinIO to files, a lake table, and answers: each as the broker's truth has it."""
    directory = real_store("K")
    truth = [line for lines in load_truth(directory, "K", FILTER).queues.values() for line in lines]
    bucket = minio_url.fresh_bucket()
    url = f"{bucket}/archives"
    options = BackfillOptions(topics=FILTER, store=minio_url.options())
    store = StoreToBackfill(str(directory / "store"), CLUSTER, "K")

    (moved,) = backfill(spark, [store], url, options=options)
    assert (moved.damaged, moved.lost) == (0, 0)
    assert moved.messages > 5000
    (again,) = backfill(spark, [store], url, options=options)
    assert (again.messages, again.commits) == (0, 0)

    archive = source_of(minio_url, url)
    (audited,) = verify(spark, archive)
    assert audited.report.anomalies == []

    written = export(spark, archive, f"{bucket}/table", store=minio_url.options())
    assert written.rows > len(truth) * 0.9
    assert export(spark, archive, f"{bucket}/table", store=minio_url.options()).batches == 0
    download(minio_url, f"{bucket}/table", tmp_path / "table")
    rows = exported(tmp_path / "table")
    assert set(rows.values()) == {1}
    assert len(rows) == written.rows
    offsets = {(topic, queue, offset) for topic, queue, _, offset in rows}
    assert {(line["topic"], line["queueId"], line["queueOffset"]) for line in truth} <= offsets | {
        (line["topic"], line["queueId"], line["queueOffset"])
        for line in truth
        if line["topic"] == "t_compact"
    }

    # A key that is wrong is an error that says so, and is never shown.
    assert minio_url.secret_key not in repr(archive)
    wrong = replace(
        archive, store=replace(archive.store, credentials=S3Credentials(minio_url.access_key, "wrong"))
    )
    with pytest.raises(Exception, match=r"(?i)access|forbidden|signature|credential") as refused:
        verify(spark, wrong)
    assert minio_url.secret_key not in str(refused.value)
    check_delta_export(minio_url, url, tmp_path, f"{bucket}/delta", written.rows)
    check_delta_export(minio_url, url, tmp_path, f"{bucket}/delta", 0)
    download(minio_url, f"{bucket}/delta", tmp_path / "from-bucket")
    assert (tmp_path / "from-bucket" / "_delta_log" / f"{0:020d}.json").exists()
    assert exported(tmp_path / "from-bucket") == rows


def check_delta_export(server: RunningStore, url: str, work: Path, target: str, rows: int) -> None:
    """The command line with keys from the environment; input and Delta table in a bucket."""
    command = [
        sys.executable,
        "-m",
        "rocketmq_tiered.spark",
        "export",
        url,
        target,
        "--format",
        "delta",
        "--endpoint-url",
        server.endpoint,
        "--region",
        REGION,
        "--master",
        "local[2]",
        "--json",
    ]
    keys = {
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
        "PATH": "/usr/bin:/bin",
        "HOME": str(Path.home()),
        "PYTHONPATH": str(ROOT),
    }
    child = subprocess.run(
        command, cwd=work, env=keys, capture_output=True, text=True, timeout=300, check=False
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert json.loads(child.stdout)["rows"] == rows
    assert not (work / "spark-warehouse").exists(), "nothing is left where the command was started"
