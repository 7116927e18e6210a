"""Readers, consumers and streams read on across 20 compactions and garbage collection: every message once.

All of them hold a version of the catalog, or their place, while the objects of their messages are joined and deleted:
readers of this process in a directory, Java consumers of `tiered serve` and a streaming query of Spark on MinIO.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from fetcher.archive import Archive, open_archive
from fetcher.rows.message import Message
from tests.integration.client_scene import need_clients, until
from tests.integration.served_scene import Job, Line, Served
from tests.maintenance.compaction_scene import QUEUES, Scene
from tests.servers.running_store import RunningStore
from tests.servers.tiered_serve import tiered_serve
from tests.soak.results import knob, limits, publish
from tests.soak.streaming_clients import (
    VERSION,
    ArchiveQuery,
    JavaConsumers,
    Row,
    archive_query,
    java_consumers,
)
from tests.spark.stream_reading import rows_of, stream_reader
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import Settings

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

COMPACTIONS = knob("COMPACTIONS", 20)
CYCLES = 12
"""That are archived between two compactions."""
COLLECTED_EVERY = 4
STREAM_ROWS = 40
READ_AT_ONCE = 5
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


class Reader:
    """Reads a queue from begin to end, a few messages at a time; also what is archived until it gets there."""

    def __init__(self, archive: Archive, queue: QueueKey) -> None:
        self.queue = queue
        self.end = archive.queue(queue.topic, queue.queue_id).max_offset
        self.found: list[tuple[int, bytes]] = []
        self._messages: Iterator[Message] = iter(archive.queue(queue.topic, queue.queue_id).messages())

    def read(self, count: int) -> None:
        self.found += [(one.queue_offset, one.body) for one in islice(self._messages, count)]


class Consumer:
    """Reads a queue on from its place, at the newest version."""

    def __init__(self, archive: Archive, queue: QueueKey) -> None:
        self.queue = queue
        self._archive = archive
        self.found: list[tuple[int, bytes]] = []

    def read(self, count: int) -> None:
        place = self.found[-1][0] + 1 if self.found else 0
        messages = self._archive.queue(self.queue.topic, self.queue.queue_id).messages(place)
        new = [(one.queue_offset, one.body) for one in islice(messages, count)]
        self.found += [one for one in new if one[0] >= place]  # a batch is found by any offset in it


def _read(all_of_them: Sequence[Reader | Consumer], count: int) -> None:
    for one in all_of_them:
        one.read(count)


def test_every_message_once(tmp_path: Path) -> None:
    root = tmp_path / "archive"
    store = PrefixedStore(FileStore(root), archive_prefix("cluster", "broker"))
    scene = Scene(tmp_path / "spool", cycles=CYCLES, store=store)
    url = f"file://{root}"
    readers: list[Reader] = []
    stream = stream_reader(url)
    place, streamed = stream.initialOffset(), list[dict[str, Any]]()
    with open_archive(url) as archive:
        consumers = [Consumer(archive, queue) for queue in QUEUES]
        for number in Compactions(scene):
            if len(readers) == number * len(QUEUES):
                archive.refresh()
                readers += [Reader(archive, queue) for queue in QUEUES]
            _read([*readers, *consumers], READ_AT_ONCE)
            end = json.loads(json.dumps(stream.latestOffset(place, ReadMaxRows(STREAM_ROWS))))
            streamed += rows_of(stream, place, end)
            place = end
        archive.refresh()
        _read([*readers, *consumers], 1 << 30)
    while (end := json.loads(json.dumps(stream.latestOffset(place, ReadMaxRows(STREAM_ROWS))))) != place:
        streamed += rows_of(stream, place, end)
        place = end
    truth = {queue: scene.owner.truth[queue].rows for queue in QUEUES}
    for reader in readers:
        assert reader.found[-1][0] >= reader.end - 2
        expected = [row for row in truth[reader.queue] if row.offset <= reader.found[-1][0]]
        assert [offset for offset, _ in reader.found] == [row.offset for row in expected]
        assert all(body in row.record for (_, body), row in zip(reader.found, expected, strict=True))
    for consumer in consumers:
        assert [offset for offset, _ in consumer.found] == [row.offset for row in truth[consumer.queue]]
    for queue in QUEUES:
        mine = sorted(row["queueOffset"] for row in streamed if row["topic"] == queue.topic)
        assert mine == [row.offset for row in truth[queue]]
    scene.check()
    scene.collect()
    scene.collect()


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
        server.start()
        try:
            found, rows = _read_across(compactions, Served(tmp_path, url, address, server), minio_url)
        finally:
            server.stop()
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
