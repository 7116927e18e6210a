"""A streaming query killed again and again while it writes: its checkpoint and output hold every row once."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.growing_archive import GrowingArchive

QUERY = """
import sys, time
from rocketmq_tiered.spark import session
from tests.spark.conftest import LOCAL
url, checkpoint, out, local = sys.argv[1:]
spark = session("killed", **(LOCAL | {"spark.local.dir": local}))
stream = (
    spark.readStream.format("rocketmq-tiered")
    .option("columns", "topic,generation,queueId,queueOffset,bodyCRC")
    .option("maxRowsPerTrigger", 300)
    .load(url)
)
query = stream.writeStream.format("parquet").option("checkpointLocation", checkpoint).start(out)
query.awaitTermination()
"""
KILLS = 6


def start_query(archive: GrowingArchive, work: Path) -> subprocess.Popen[bytes]:
    places = [archive.url, str(work / "checkpoint"), str(work / "out"), str(work / "local")]
    return subprocess.Popen(
        [sys.executable, "-c", QUERY, *places], start_new_session=True, stderr=subprocess.DEVNULL
    )


def committed_batches(work: Path) -> int:
    commits = work / "checkpoint" / "commits"
    return len([path for path in commits.iterdir() if path.name.isdecimal()]) if commits.is_dir() else 0


def kill(process: subprocess.Popen[bytes]) -> None:
    """Driver, JVM and workers at once: they are a process group of their own."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_nothing_is_lost_or_repeated_over_kills(
    spark: SparkSession, small_archive: Path, tmp_path: Path
) -> None:
    rng = random.Random(11)
    growing = GrowingArchive(small_archive, tmp_path / "archive", "FxCluster/K", shown=4)
    for _ in range(KILLS):
        before = committed_batches(tmp_path)
        process = start_query(growing, tmp_path)
        deadline = time.monotonic() + 120
        while committed_batches(tmp_path) < before + 2 and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(rng.random())
        kill(process)
        growing.show(1)
        assert committed_batches(tmp_path) > before
    growing.show(99)
    query = (
        spark.readStream.format("rocketmq-tiered")
        .option("columns", "topic,generation,queueId,queueOffset,bodyCRC")
        .load(growing.url)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "out"))
    )
    assert query.awaitTermination(300)
    written = spark.read.parquet(str(tmp_path / "out"))
    archived = (
        spark.read.format("rocketmq-tiered")
        .option("columns", "topic,generation,queueId,queueOffset,bodyCRC")
        .option("generation", "all")
        .load(growing.url)
    )
    assert written.count() == archived.count() > 7000
    assert written.exceptAll(archived).count() == 0
