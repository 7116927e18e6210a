"""Consumers and streams read on across 20 compactions and garbage collection: every message once.

All of them hold a version of the catalog, or their place, while the objects of their messages are joined and deleted:
Java consumers of `tiered serve` and a streaming query of Spark on MinIO. Readers of one process: tests/world.

Java consumers of a served archive, and a streaming query of Spark: what each of them has got so far.

Push and orderly consumers are slow while a file exists, lite consumers are not, and the query reads a few messages a
batch until it finishes. Does not own what must come of it.
"""

from __future__ import annotations

import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from fetcher.archive import Archive, open_archive
from rocketmq_tiered.spark import session
from tests.integration.client_scene import need_clients, until
from tests.integration.served_scene import Job, Line, Served
from tests.maintenance.compaction_scene import QUEUES, Scene
from tests.servers.rocketmq import java_command
from tests.servers.running_store import REGION, RunningStore
from tests.servers.tiered_serve import tiered_serve
from tests.soak.results import knob, limits, publish
from tests.spark.conftest import LOCAL
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import Settings

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

COMPACTIONS = knob("COMPACTIONS", 20)
CYCLES = 12
"""That are archived between two compactions."""
COLLECTED_EVERY = 4
BACKLOG_CYCLES = 60
"""Archived before clients begin."""
PROGRESS_S_MAX = 120
"""In which every client gets something."""
FINISH_S_MAX = 300
Found = list[tuple[Job, Counter[Line]]]
"""Each Java consumer, and what it has got."""


@dataclass
class Compactions:
    """Joins all that can be joined, ``COMPACTIONS`` times, and archives more after each; sometimes the sources are
    deleted before. Gives the number of the compaction before each round and each deletion."""

    scene: Scene
    rounds: int = 0
    made: int = 0
    deleted: int = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(COMPACTIONS):
            made_before = self.made
            while self.scene.plan() is not None:
                yield number
                result = self.scene.run()
                assert result is not None
                self.rounds += 1
                self.made += len(result.object_keys)
            assert self.made > made_before, "every compaction makes objects"
            if number % COLLECTED_EVERY == COLLECTED_EVERY - 1:
                yield number
                self._collect()
            self.scene.append(CYCLES)

    def _collect(self) -> None:
        before = self.scene.data_objects()
        sources = [key for key in self.scene.collect() if key.startswith(("data/", "sets/"))]
        assert sources, "sources are deleted under the readers"
        assert self.scene.data_objects() == before - len(sources)
        self.deleted += len(sources)


@dataclass(frozen=True)
class Clients:
    """Java consumers and a query of Spark that read ``scene``."""

    scene: Scene
    consumers: JavaConsumers
    query: ArchiveQuery

    def archived(self) -> list[int]:
        """How many messages there are for each consumer."""
        return [len(self.scene.owner.truth[QueueKey(job.topic, 0, 0)].rows) for job in self.consumers.jobs]

    def wait_for_progress(self) -> None:
        """Until each consumer has got another message or all, and the query has committed another batch."""
        archived, before, batches = self.archived(), self.consumers.counts(), self.query.batches()

        def has_come() -> bool:
            now = zip(self.consumers.counts(), before, archived, strict=True)
            return self.query.batches() > batches and all(
                got > then or got == there for got, then, there in now
            )

        until(has_come, "a client gets nothing", PROGRESS_S_MAX)

    def are_in_the_middle(self) -> bool:
        """Whether orderly consumers, which are slow, and the query have got a part of the messages only."""
        places = zip(self.consumers.jobs, self.consumers.counts(), self.archived(), strict=True)
        partly = [0 < got < there for job, got, there in places if job.mode == "orderly"]
        rows = sum(len(known.rows) for known in self.scene.owner.truth.values())
        return all(partly) and 0 < self.query.rows().total() < rows


def _read_across(
    compactions: Compactions, served: Served, server: RunningStore
) -> tuple[Found, Counter[Row]]:
    """What clients get that read all the time: each Java consumer, and the query."""
    topics = [queue.topic for queue in QUEUES]
    with archive_query(served.url, server, served.directory / "spark") as query:
        until(lambda: query.batches() > 0, "no batch", PROGRESS_S_MAX)  # a session takes long to start
        with java_consumers(served, topics) as consumers:
            clients = Clients(compactions.scene, consumers, query)
            for number, steps in groupby(compactions):
                if number == COMPACTIONS // 2:
                    query.restart()
                for _ in steps:
                    clients.wait_for_progress()
                    assert clients.are_in_the_middle()
            consumers.slow.unlink()
            rows = query.finish()
            found = consumers.finish(FINISH_S_MAX)
    return list(zip(consumers.jobs, found, strict=True)), rows


def test_java_consumers_and_a_streaming_query(
    tmp_path: Path,
    minio_url: RunningStore,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., tuple[int, str, str]],
) -> None:
    need_clients(VERSION)
    for name, value in minio_url.environment().items():
        monkeypatch.setenv(name, value)
    url = minio_url.fresh_bucket()
    with closing(open_store(url, minio_url.options())) as root:
        store = PrefixedStore(root, archive_prefix("cluster", "broker"))
        compactions = Compactions(Scene(tmp_path / "spool", BACKLOG_CYCLES, store))
        server, address = tiered_serve(url, tmp_path)
        with server:
            found, rows = _read_across(compactions, Served(tmp_path, url, address, server), minio_url)
        compactions.scene.check()
        compactions.scene.collect()
        compactions.scene.collect()
    with open_archive(url, settings=Settings(object_store=minio_url.options().settings)) as archive:
        expected = _rows(archive)
    code, verified, _ = run("verify", url, "--full", "--strict")
    consumed_once = [
        lines
        == Counter(
            (queue_id, offset, zlib.crc32(body), len(body))
            for topic, queue_id, offset, body in expected
            if topic == job.topic
        )
        for job, lines in found
    ]
    publish(
        "clients across compactions",
        compactions=COMPACTIONS,
        rounds=compactions.rounds,
        made=compactions.made,
        deleted=compactions.deleted,
        consumers=len(found),
        consumed=sum(lines.total() for _, lines in found),
        streamed=rows.total(),
        verified=verified,
        missed=limits(
            every_message_is_consumed_once=all(consumed_once),
            every_message_is_streamed_once=rows == expected,
            verify_is_clean=code == 0,
        ),
    )


def _rows(archive: Archive) -> Counter[Row]:
    """All that is archived."""
    return Counter(
        (queue.topic, queue.queue_id, message.queue_offset, message.body)
        for topic in archive.topics()
        for queue in archive.queues(topic)
        for message in archive.queue(topic, queue.queue_id).messages()
    )


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
