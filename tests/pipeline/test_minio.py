"""The same rows from an object store server as from a directory; endpoint and credentials travel as options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pipeline
from tests.servers.running_store import REGION, RunningStore
from tiered.object_store.url import open_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = [
    "brokerName",
    "topic",
    "queueId",
    "queueOffset",
    "tags",
    "properties",
    "body",
    "bodyCrcOk",
    "recCrc32",
]


@pytest.mark.integration
@pytest.mark.xdist_group("spark")
def test_every_store_reads_the_same_from_minio(
    spark: SparkSession, all_archives: Path, minio_url: RunningStore
) -> None:
    bucket = minio_url.fresh_bucket()
    store = open_store(f"{bucket}/archives", minio_url.options())
    for path in sorted(path for path in all_archives.rglob("*") if path.is_file()):
        store.put_if_absent(path.relative_to(all_archives).as_posix(), [path.read_bytes()])
    store.close()
    remote = pipeline.read(
        spark,
        f"{bucket}/archives",
        columns=COLUMNS,
        endpoint=minio_url.endpoint,
        region=REGION,
        accessKey=minio_url.access_key,
        secretKey=minio_url.secret_key,
    )
    local = pipeline.read(spark, f"file://{all_archives}", columns=COLUMNS)
    keys = ["brokerName", "topic", "queueId", "queueOffset"]
    found, expected = (
        frame.selectExpr(*keys, "tags", "bodyCrcOk", "recCrc32", "sha2(body, 256)", "to_json(properties)")
        for frame in (remote, local)
    )
    assert found.exceptAll(expected).isEmpty()
    assert found.count() == expected.count() > 300_000
    plan_text = found._jdf.queryExecution().toString()  # type: ignore[operator]
    assert minio_url.secret_key not in plan_text
