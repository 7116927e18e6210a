"""Java consumers of a served archive, and a streaming query of Spark: what each of them has got so far.

Push and orderly consumers are slow while a file exists, lite consumers are not, and the query reads a few messages a
batch until it finishes. Does not own what must come of it.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rocketmq_tiered.spark import session
from tests.integration.served_scene import Job, Line, Served
from tests.servers.rocketmq import java_command
from tests.servers.running_store import REGION, RunningStore
from tests.spark.conftest import LOCAL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

VERSION = "5.3.3"
MODES = ("push", "orderly", "lite")
IDLE_S = 90
"""Consumers end when they get nothing for so long."""
FIELDS = 13
"""Of a whole line of Consume.java."""
PAUSE_MS = 2000
PULL_SIZE = 4
COLUMNS = ("topic", "queueId", "queueOffset", "body")
BATCH_ROWS = 10
STARTS_MAX = 5
Row = tuple[str, int, int, bytes]
"""Topic, queue id, queue offset, body."""


@dataclass(frozen=True)
class JavaConsumers:
    """A consumer for each of ``jobs``, all in the JVM ``child``. They are slow while the file ``slow`` exists."""

    served: Served
    jobs: Sequence[Job]
    child: subprocess.Popen[bytes]
    slow: Path

    def found(self) -> list[Counter[Line]]:
        """What each has got so far."""
        assert self.child.poll() is None or not self.slow.exists(), "they ended too early"
        return [self._found(number) for number in range(len(self.jobs))]

    def _found(self, number: int) -> Counter[Line]:
        if not (self.served.directory / f"consumed-{number}.txt").exists():
            return Counter()
        whole = [fields for fields in self.served.lines(number) if len(fields) == FIELDS]
        return Counter((int(f[0]), int(f[1]), int(f[2]), int(f[3])) for f in whole)

    def counts(self) -> list[int]:
        """How many messages each has got so far."""
        return [found.total() for found in self.found()]

    def finish(self, timeout_s: float) -> list[Counter[Line]]:
        """Wait until each ends, as nothing comes; everything that each has got."""
        assert self.child.wait(timeout_s) == 0
        return self.found()


@contextmanager
def java_consumers(served: Served, topics: Sequence[str]) -> Iterator[JavaConsumers]:
    """A consumer of each of ``MODES`` for each topic."""
    jobs = [
        Job(mode, topic, 1 << 30, f"G_{mode}_{topic}", idle_s=IDLE_S) for mode in MODES for topic in topics
    ]
    slow = served.directory / "slow"
    slow.touch()
    flags = (
        "-Xmx512m",
        f"-Dconsume.pause.ms={PAUSE_MS}",
        f"-Dconsume.pause.while={slow}",
        f"-Dconsume.pull.size={PULL_SIZE}",
    )
    command = java_command(VERSION, served.directory, "Consume", *served.job_arguments(*jobs), flags=flags)
    with (served.directory / "consumers.log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield JavaConsumers(served, jobs, child, slow)
    finally:
        child.kill()
        child.wait()


class ArchiveQuery:
    """A streaming query that writes the archive at ``url`` to Parquet files, with a checkpoint."""

    def __init__(self, spark: SparkSession, url: str, server: RunningStore, directory: Path) -> None:
        self._spark = spark
        self._out, self._checkpoint = directory / "out", directory / "checkpoint"
        self._url = url
        self._options: dict[str, str | int] = {
            "endpoint": server.endpoint,
            "region": REGION,
            "accessKey": server.access_key,
            "secretKey": server.secret_key,
            "columns": ",".join(COLUMNS),
        }
        self._query = self._start(maxRowsPerTrigger=BATCH_ROWS)

    def _start(self, **others: int) -> StreamingQuery:
        """A query whose source is initialized. Spark gives a new Python process 10 s, too few on a busy machine."""
        for _ in range(STARTS_MAX):
            query = self._begun(**others)
            while query.isActive and query.status["message"].startswith("Initializing"):
                time.sleep(0.2)
            if query.isActive:
                return query
            assert "failed to connect back" in str(query.exception()), query.exception()
        raise AssertionError("no Python process connects to Spark")

    def _begun(self, **others: int) -> StreamingQuery:
        stream = self._spark.readStream.format("rocketmq-tiered").options(**self._options, **others)
        return (
            stream.load(self._url)
            .writeStream.format("parquet")
            .option("checkpointLocation", str(self._checkpoint))
            .trigger(processingTime="3 seconds")
            .start(str(self._out))
        )

    def stop(self) -> None:
        """Stop it, wherever it is."""
        self._query.stop()

    def restart(self) -> None:
        """Stop it, and continue from the checkpoint."""
        self.stop()
        self._query = self._start(maxRowsPerTrigger=BATCH_ROWS)

    def batches(self) -> int:
        """How many it has committed."""
        assert self._query.isActive, self._query.exception()
        commits = self._checkpoint / "commits"
        return sum(path.name.isdecimal() for path in commits.iterdir()) if commits.is_dir() else 0

    def rows(self) -> Counter[Row]:
        """What it has written."""
        written = self._spark.read.parquet(str(self._out)).select(*COLUMNS).collect()
        return Counter((row[0], row[1], row[2], bytes(row[3])) for row in written)

    def finish(self) -> Counter[Row]:
        """Continue from the checkpoint, with batches of any size, until it has read everything; what it has written."""
        self.stop()
        self._query = self._start()
        self._query.processAllAvailable()
        return self.rows()


@contextmanager
def archive_query(url: str, server: RunningStore, directory: Path) -> Iterator[ArchiveQuery]:
    """The query in a Spark session of its own."""
    places = {
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
    }
    spark = session("readers", **(LOCAL | places))
    query = ArchiveQuery(spark, url, server, directory)
    try:
        yield query
    finally:
        query.stop()
        spark.stop()
