"""Unmodified Java clients and mqadmin of three versions read an archive whose broker is gone."""

from __future__ import annotations

import socket
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import fetcher
from tests.end_to_end.offloading import CLUSTER, backfill
from tests.servers.child import ChildServer, free_port
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import MQADMIN, java_classes, run_java
from tiered.flat_file.verify import verify_archive
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

VERSIONS = ("4.9.7", "5.3.3", "5.5.0")
BROKER = "fx-a"
Line = tuple[int, int, int, int]
"""Queue id, queue offset, CRC-32 of the body, its length."""


@dataclass
class Served:
    """An archive and `tiered serve` over it."""

    directory: Path
    url: str
    address: str
    server: ChildServer

    def expected(
        self, topic: str, wanted: Callable[[fetcher.Message], bool] = lambda _: True
    ) -> Counter[Line]:
        """What a consumer of all of ``topic`` gets."""
        with fetcher.open(self.url) as archive:
            return Counter(
                (message.queue_id, message.queue_offset, zlib.crc32(message.body), len(message.body))
                for queue in archive.queues(topic)
                for message in archive.queue(topic, queue.queue_id).messages()
                if wanted(message)
            )

    def consume(
        self, version: str, mode: str, topic: str, wanted: int, *, group: str = "", expression: str = "*",
        flags: tuple[str, ...] = (), idle_s: int = 20,
    ) -> list[Line]:  # fmt: skip
        """Run one Java consumer until it has ``wanted`` messages or gets none for ``idle_s``; in order of arrival."""
        output = self.directory / "consumed.txt"
        name = group or f"G_{mode}_{version.replace('.', '_')}_{topic}"
        arguments = (self.address, mode, name, topic, expression, str(wanted), str(idle_s), str(output))
        run_java(version, self.directory, "Consume", *arguments, flags=flags, timeout_s=150)
        return [
            (int(fields[0]), int(fields[1]), int(fields[2]), int(fields[3]))
            for fields in (line.split() for line in output.read_text("utf-8").splitlines())
        ]

    def mqadmin(self, version: str, *arguments: str) -> str:
        """One command of mqadmin."""
        return run_java(version, self.directory, MQADMIN, *arguments, "-n", self.address)


@pytest.fixture(scope="module")
def served(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    try:
        for version in VERSIONS:
            java_classes(version)
    except NotInstallableError as error:
        pytest.skip(f"Java clients: {error}")
    directory = tmp_path_factory.mktemp("serving")
    backfill(real_store("A") / "store", FileStore(directory / "archive"))
    port = free_port()
    url = f"file://{directory}/archive"
    command = [sys.executable, "-m", "sidecar", "serve", url, "--bind", f"127.0.0.1:{port}"]
    root = {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    server = ChildServer("tiered serve", command, root, directory / "serve.log", lambda: _listens(port))
    server.start()
    try:
        yield Served(directory, url, f"127.0.0.1:{port}", server)
    finally:
        server.stop()
    store = PrefixedStore(FileStore(directory / "archive"), archive_prefix(CLUSTER, BROKER))
    report = verify_archive(store, full=True)
    assert (report.anomalies, report.leftovers) == ([], [])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("mode", ["push", "broadcast", "orderly", "lite", "assign", "pull"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_consumer_gets_every_message_once(served: Served, version: str, mode: str) -> None:
    expected = served.expected("t_keys")
    found = served.consume(version, mode, "t_keys", expected.total())
    assert Counter(found) == expected
    if mode == "orderly":
        for queue_id in {line[0] for line in found}:
            offsets = [line[1] for line in found if line[0] == queue_id]
            assert offsets == sorted(offsets)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_binary_header_serves_as_well(served: Served, version: str) -> None:
    expected = served.expected("t_order")
    flags = ("-Drocketmq.serialize.type=ROCKETMQ",)
    assert (
        Counter(
            served.consume(
                version,
                "push",
                "t_order",
                expected.total(),
                group="G_bin_" + version[0] + version[2],
                flags=flags,
            )
        )
        == expected
    )


@pytest.mark.parametrize("topic", ["t_batch", "t_sizes", "t_props", "%LMQ%t_all"])
def test_batches_large_messages_odd_properties_and_light_queues(served: Served, topic: str) -> None:
    expected = served.expected(topic)
    group = "G_" + "".join(character for character in topic if character.isalnum())
    found = Counter(served.consume("5.3.3", "push", topic, expected.total(), group=group))
    if topic.startswith("%LMQ%"):
        # A client takes offsets of light queues from a property that names all of them: only bodies are compared.
        assert sorted(line[2:] for line in found.elements()) == sorted(
            line[2:] for line in expected.elements()
        )
    else:
        assert found == expected


def test_filters_by_tag_and_by_sql(served: Served) -> None:
    by_tag = served.expected("t_tags", lambda message: message.tags == "TagA")
    assert by_tag
    assert (
        Counter(served.consume("5.3.3", "push", "t_tags", by_tag.total(), group="G_tag", expression="TagA"))
        == by_tag
    )
    by_sql = served.expected("t_tags", lambda message: message.tags in ("TagA", "TagB"))
    found = served.consume(
        "5.3.3", "push", "t_tags", by_sql.total(), group="G_sql", expression="sql:TAGS IN ('TagA','TagB')"
    )
    assert Counter(found) == by_sql


def test_a_group_goes_on_where_it_was_after_a_restart_of_the_server(served: Served) -> None:
    expected = served.expected("t_sixteen")
    first = served.consume("5.3.3", "push", "t_sixteen", 5_000, group="G_restart")
    served.server.kill()
    served.server.start()
    rest = served.consume("5.3.3", "push", "t_sixteen", expected.total(), group="G_restart", idle_s=15)
    found = Counter(first) + Counter(rest)
    assert set(found) == set(expected)  # nothing is missing
    assert found.total() - expected.total() < 5_000  # what was not committed yet comes again, no more


def test_mqadmin_reads_everything_it_asks_for(served: Served) -> None:
    version = "5.3.3"
    assert "t_keys" in served.mqadmin(version, "topicList")
    assert BROKER in served.mqadmin(version, "topicRoute", "-t", "t_keys")
    status = served.mqadmin(version, "topicStatus", "-t", "t_one")
    assert status.count(BROKER) == 1 and "9000" in status
    assert served.address in served.mqadmin(version, "clusterList")
    assert "brokerActive" in served.mqadmin(version, "brokerStatus", "-b", served.address)
    served.consume(version, "push", "t_one", 9_000, group="G_progress")
    progress = served.mqadmin(version, "consumerProgress", "-g", "G_progress")
    assert "t_one" in progress
    with fetcher.open(served.url) as archive:
        messages = list(archive.queue("t_keys", 0).messages())
    counts = Counter(key for message in messages for key in message.keys)
    message = next(message for message in messages if message.keys and counts[message.keys[0]] == 1)
    key, unique, offset = message.keys[0], message.unique_key, str(message.queue_offset)
    assert unique is not None
    assert unique in served.mqadmin(version, "queryMsgByKey", "-t", "t_keys", "-k", key)
    by_unique = served.mqadmin(version, "queryMsgByUniqueKey", "-t", "t_keys", "-i", unique)
    assert unique in by_unique
    by_offset = served.mqadmin(
        version, "queryMsgByOffset", "-b", BROKER, "-t", "t_keys", "-i", "0", "-o", offset
    )
    assert unique in by_offset
    printed = served.mqadmin(
        version, "printMsgByQueue", "-t", "t_order", "-a", BROKER, "-i", "0", "-p", "true"
    )
    assert printed.count("MSGID") + printed.count("msgId") > 0 or "t_order" in printed
    rows = served.mqadmin(
        version, "queryCq", "-t", "t_keys", "-q", "0", "-i", "5", "-c", "3", "-b", served.address
    )
    assert "minQueueIndex" in rows or "physicOffset" in rows


def test_a_group_is_moved_by_time(served: Served) -> None:
    version = "5.3.3"
    served.consume(version, "push", "t_order", 1_500, group="G_reset")
    moved = served.mqadmin(version, "resetOffsetByTime", "-g", "G_reset", "-t", "t_order", "-s", "0")
    assert "t_order" in moved or BROKER in moved
    again = served.consume(version, "push", "t_order", 1_500, group="G_reset")
    assert set(served.expected("t_order")) == set(again)


def test_the_server_ends_in_order(served: Served) -> None:
    served.server.stop()
    assert '"ended"' in served.server.log.read_text() or "ended" in served.server.log.read_text()
    served.server.start()
