"""A large archive read whole with a gigabyte for the JVM: every Python worker stays below half of one.

``SOAK_SPARK_BYTES``: bytes of commitlog that are archived (10 GiB).
"""

import shutil
import threading
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from benchmarks.spark_processes import WorkerWatch
from benchmarks.synthetic_store import StoreSpec, write_store
from rocketmq_tiered.spark import read
from tests.soak.results import knob, limits, publish
from tiered.broker_store.store import open_broker_store
from tiered.model.queue import TopicFilter
from tiered.object_store.file import FileStore
from tiered.settings.sections import OffloadSettings
from uploader.bound_source import no_offsets
from uploader.offload import Offloader, OffloadIdentity

BODY_BYTES = 1024
WORKER_BYTES_MAX = 512 << 20


def big_archive(root: Path, log_bytes: int) -> int:
    """The archive of a store of ``log_bytes`` that is deleted again; how many messages it has."""
    store = root.parent / f"{root.name}-store"
    totals = write_store(store, StoreSpec(4, 4, BODY_BYTES), log_bytes=log_bytes)
    with open_broker_store(store) as broker_store:
        Offloader(
            broker_store,
            FileStore(root),
            OffloadIdentity("BenchCluster", "big", "soak", "backfill"),
            OffloadSettings(),
            topic_filter=TopicFilter(),
            offsets_source=no_offsets,
        ).run(threading.Event(), follow=False)
    shutil.rmtree(store)
    return totals.messages


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_worker_memory_does_not_grow_with_the_archive(spark: SparkSession, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    messages = big_archive(archive, knob("SPARK_BYTES", 10 << 30))
    watch = WorkerWatch()
    watch.start()
    began = time.monotonic()
    try:
        read(spark, f"file://{archive}").write.format("noop").mode("overwrite").save()
        scan_s = time.monotonic() - began
        bodies = read(spark, f"file://{archive}", columns=["body"])
        (row,) = bodies.selectExpr("count(*) AS rows", "sum(length(body)) AS bytes").collect()
        counted = read(spark, f"file://{archive}", columns=["queueOffset"]).count()
    finally:
        watch.stop()
    peaks = sorted(watch.peaks_bytes.values(), reverse=True)
    publish(
        "spark workers' memory",
        missed=limits(
            every_message_was_read=row["rows"] == counted == messages,
            every_body_was_whole=row["bytes"] == messages * BODY_BYTES,
            workers_were_seen=len(peaks) > 0,
            workers_stay_below_512_MiB=watch.peak_bytes <= WORKER_BYTES_MAX,
        ),
        messages=messages,
        body_bytes=messages * BODY_BYTES,
        archive_bytes=sum(file.stat().st_size for file in archive.rglob("*") if file.is_file()),
        driver_memory=spark.conf.get("spark.driver.memory"),
        workers_peak_bytes=peaks,
        scan_s=round(scan_s, 1),
    )
