"""Unmodified Java clients and mqadmin of three versions read an archive whose broker is gone.

The Go client reads an archive whose broker is gone: a client that is not Java's.

gRPC clients read an archive without its broker, through a RocketMQ 5 proxy.
"""

import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import rocketmq_tiered
from rocketmq_tiered.cli import main
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.integration.served_scene import Job, Served
from tests.servers.child import ChildServer
from tests.servers.go_client import go_consumer
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import MQADMIN, java_classes, java_command, run_java
from tests.servers.rocketmq_proxy import PROXY_VERSION, RocketMqProxy
from tests.servers.tiered_serve import tiered_serve
from tiered.archive.verify import verify_archive
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

VERSIONS = ("4.9.7", "5.3.3", "5.5.0")


@contextmanager
def store_a_served(
    real_store: Callable[[str], Path], directory: Path
) -> Iterator[tuple[str, str, ChildServer]]:
    """Archive store A below ``directory`` and serve it: the URL, the address and the server."""
    backfill(real_store("A") / "store", FileStore(directory / "archive"))
    url = f"file://{directory}/archive"
    server, address = tiered_serve(url, directory)
    with server:
        yield url, address, server


@pytest.fixture(scope="module")
def served(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    try:
        for version in VERSIONS:
            java_classes(version)
    except NotInstallableError as error:
        pytest.skip(f"Java clients: {error}")
    directory = tmp_path_factory.mktemp("serving")
    with store_a_served(real_store, directory) as (url, address, server):
        yield Served(directory, url, address, server)
    store = PrefixedStore(FileStore(directory / "archive"), archive_prefix(CLUSTER, BROKER))
    report = verify_archive(store, depth="full")
    assert (report.anomalies, report.leftovers) == ([], [])


@pytest.mark.parametrize("version", VERSIONS)
def test_a_consumer_of_each_kind_gets_every_message_once(served: Served, version: str) -> None:
    modes = ("push", "broadcast", "orderly", "lite", "assign", "pull")
    expected = served.expected("t_keys")
    tag = version.replace(".", "_")
    jobs = [Job(mode, "t_keys", expected.total(), f"G_{mode}_{tag}") for mode in modes]
    for mode, found in zip(modes, served.consume(version, *jobs), strict=True):
        assert Counter(found) == expected, mode
        if mode == "orderly":
            for queue_id in {line[0] for line in found}:
                offsets = [line[1] for line in found if line[0] == queue_id]
                assert offsets == sorted(offsets)


def test_odd_messages_and_filters(served: Served) -> None:
    topics = ("t_batch", "t_sizes", "t_props", "%LMQ%t_all")
    expected = [served.expected(topic) for topic in topics]
    by_tag = served.expected("t_tags", lambda message: message.tags == "TagA")
    by_sql = served.expected("t_tags", lambda message: message.tags in ("TagA", "TagB"))
    assert by_tag
    jobs = [
        Job("push", topic, all_.total(), f"G_odd_{n}")
        for n, (topic, all_) in enumerate(zip(topics, expected, strict=True))
    ]
    jobs.append(Job("push", "t_tags", by_tag.total(), "G_tag", "TagA"))
    jobs.append(Job("push", "t_tags", by_sql.total(), "G_sql", "sql:TAGS IN ('TagA','TagB')"))
    found = served.consume("5.3.3", *jobs)
    for topic, got, wanted in zip(topics, found, expected, strict=False):
        if topic.startswith("%LMQ%"):
            # A client takes offsets of LMQs from a property that names all of them: only bodies are compared.
            assert sorted(line[2:] for line in got) == sorted(line[2:] for line in wanted.elements())
        else:
            assert Counter(got) == wanted, topic
    assert Counter(found[4]) == by_tag
    assert Counter(found[5]) == by_sql


def test_a_group_continues_where_it_was_after_a_restart_of_the_server(served: Served) -> None:
    expected = served.expected("t_sixteen")
    (first,) = served.consume("5.3.3", Job("push", "t_sixteen", 5_000, "G_restart"))
    served.server.kill()
    served.server.start()
    (rest,) = served.consume(
        "5.3.3", Job("push", "t_sixteen", expected.total() - 5_000, "G_restart", idle_s=12)
    )
    found = Counter(first) + Counter(rest)
    assert set(found) == set(expected)  # nothing is missing
    assert found.total() - expected.total() < 5_000  # only what was not committed yet comes again


def test_retry_messages_come_again_and_end_as_dead_letters_over_kill_9(served: Served) -> None:
    expected = served.expected("t_props")
    wanted = expected.total()
    jobs = (
        Job("push", "t_props", wanted, "G_again", failures=2, idle_s=40),
        Job("push", "t_props", wanted, "G_dead", failures=99, times_max=1, idle_s=15),
    )
    command = java_command("5.3.3", served.directory, "Consume", *served.job_arguments(*jobs))
    consumers = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while sum(fields[8] == "back" for fields in _written(served, 0)) < wanted + 10:
            assert time.monotonic() < deadline_s, "nothing came again"
            time.sleep(0.05)
        served.server.kill()  # some wait for their delay, some are delivered and not consumed
        served.server.start()
        assert consumers.wait(120) == 0
    finally:
        consumers.kill()
    done = [fields for fields in served.lines(0) if fields[8] == "ok"]
    assert {(int(f[2]), int(f[3])) for f in done} == {line[2:] for line in expected}
    assert all(int(fields[7]) >= 2 and fields[9] == "t_props" for fields in done)
    with rocketmq_tiered.open(served.url) as archive:
        origins = {
            message.offset_msg_id: (zlib.crc32(message.body), len(message.body))
            for queue in archive.queues("t_props")
            for message in archive.queue("t_props", queue.queue_id).messages()
        }
    # The rest was consumed again by the client itself.
    again = [fields for fields in done if fields[10] == "t_props"]
    assert len(again) >= wanted // 2
    assert all(origins[fields[11]] == (int(fields[2]), int(fields[3])) for fields in again)
    # Dead letters: everything, read by the pull API.
    (dead,) = served.consume("5.3.3", Job("pull", "%DLQ%G_dead", wanted, "G_reads_dead", idle_s=5))
    assert {line[2:] for line in dead} == {line[2:] for line in expected}
    assert [line[1] for line in dead] == list(range(len(dead)))


def _written(served: Served, number: int) -> list[list[str]]:
    """Whole lines so far."""
    try:
        return [fields for fields in served.lines(number) if len(fields) == 13]
    except FileNotFoundError:
        return []


def test_mqadmin_reads_everything_it_asks_for(served: Served) -> None:
    with rocketmq_tiered.open(served.url) as archive:
        messages = list(archive.queue("t_keys", 0).messages())
        per_queue = [queue.max_offset for queue in archive.queues("t_one")]
    counts = Counter(key for message in messages for key in message.keys)
    message = next(message for message in messages if message.keys and counts[message.keys[0]] == 1)
    key, unique, offset = message.keys[0], message.unique_key, message.queue_offset
    assert unique is not None
    served.consume("5.3.3", Job("push", "t_one", 9_000, "G_progress"))
    (
        topics,
        route,
        status,
        clusters,
        broker,
        progress,
        by_id,
        by_key,
        by_unique,
        by_offset,
        printed,
        of_queue,
        consumed,
        rows,
    ) = served.mqadmin(
        "5.3.3",
        "topicList",
        "topicRoute -t t_keys",
        "topicStatus -t t_one",
        "clusterList",
        f"brokerStatus -b {served.address}",
        "consumerProgress -g G_progress",
        f"queryMsgById -t t_keys -i {unique}",
        f"queryMsgByKey -t t_keys -k {key}",
        f"queryMsgByUniqueKey -t t_keys -i {unique}",
        f"queryMsgByOffset -b {BROKER} -t t_keys -i 0 -o {offset}",
        "printMsg -t t_order -d true",
        f"printMsgByQueue -t t_order -a {BROKER} -i 0 -p true",
        f"consumeMessage -t t_keys -b {BROKER} -i 0 -c 5",
        f"queryCq -t t_keys -q 0 -i 5 -c 3 -b {served.address}",
    )
    assert "t_keys" in topics.splitlines()
    assert served.address in route and BROKER in route
    assert [line.split()[:4] for line in status.splitlines() if BROKER in line] == [
        [BROKER, str(number), "0", str(maximum)] for number, maximum in enumerate(per_queue)
    ]
    assert served.address in clusters and BROKER in clusters
    assert "brokerActive" in broker
    assert [line.split()[:5] for line in progress.splitlines() if line.startswith("t_one")] == [
        ["t_one", BROKER, str(number), str(maximum), str(maximum)] for number, maximum in enumerate(per_queue)
    ]
    assert unique in by_id and unique in by_key and unique in by_unique and unique in by_offset
    assert printed.count("MSGID") == served.expected("t_order").total()
    in_queue = sum(n for line, n in served.expected("t_order").items() if line[0] == 0)
    assert of_queue.count("MSGID") == in_queue
    assert consumed.count("MSGID") == 5
    assert rows.count("physicOffset") == 3


def test_a_running_group_is_reset_by_mqadmin_and_by_reset_offset(served: Served) -> None:
    expected = served.expected("t_order")
    # A client that gets a reset sleeps for 10 s, and looks at its queues every 20 s.
    job = Job("push", "t_order", 3 * expected.total(), "G_reset", idle_s=80)
    command = java_command("5.3.3", served.directory, "Consume", *served.job_arguments(job))
    with (served.directory / "consumer.log").open("wb") as log:
        consumer = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_for_lines(served, expected.total(), consumer)
        (moved,) = served.mqadmin("5.3.3", "resetOffsetByTime -g G_reset -t t_order -s 0")
        assert BROKER in moved
        _wait_for_lines(served, 2 * expected.total(), consumer)
        arguments = ["--serve", served.address, "--group", "G_reset", "--topic", "t_order", "--earliest"]
        assert main(["reset-offset", *arguments]) == 0
        assert consumer.wait(90) == 0
    finally:
        consumer.kill()
        consumer.wait()
    found = Counter((int(f[0]), int(f[1]), int(f[2]), int(f[3])) for f in served.lines(0))
    assert set(found) == set(expected)
    assert min(found.values()) >= 3


def _wait_for_lines(served: Served, count: int, consumer: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 90
    while len(_written(served, 0)) < count:
        assert consumer.poll() is None, "the consumer ended"
        assert time.monotonic() < deadline_s, f"{len(_written(served, 0))} of {count} messages came"
        time.sleep(0.1)


def test_the_server_ends_in_order(served: Served) -> None:
    served.server.stop()
    assert '"ended"' in served.server.log.read_text() or "ended" in served.server.log.read_text()
    served.server.start()


@dataclass
class GoServed:
    """An archive, `tiered serve` over it, and the Go consumer."""

    program: Path
    directory: Path
    url: str
    address: str

    def consume(
        self, mode: str, topic: str, wanted: int, group: str, idle_s: int = 15
    ) -> list[tuple[str, ...]]:
        """What one consumer got, in order of arrival: the fields that main.go writes."""
        output = self.directory / f"{group}.txt"
        with rocketmq_tiered.open(self.url) as archive:
            queues = str(1 + max((queue.queue_id for queue in archive.queues(topic)), default=0))
        command = [
            str(self.program),
            mode,
            self.address,
            group,
            topic,
            str(wanted),
            str(idle_s),
            str(output),
            BROKER,
            queues,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return [tuple(line.split(" ")) for line in output.read_text("utf-8").splitlines()]

    def expected(self, topic: str) -> Counter[tuple[str, ...]]:
        """The same of every archived message."""
        with rocketmq_tiered.open(self.url) as archive:
            return Counter(
                _go_line(message)
                for queue in archive.queues(topic)
                for message in archive.queue(topic, queue.queue_id).messages()
            )


def _go_line(message: rocketmq_tiered.Message) -> tuple[str, ...]:
    pairs = sorted(f"{name}={value}".encode() for name, value in message.properties.items())
    numbers = (
        message.queue_id,
        message.queue_offset,
        zlib.crc32(message.body),
        len(message.body),
        message.record.store_timestamp,
        message.record.reconsume_times,
    )
    return (*map(str, numbers), b"\0".join(pairs).hex())


@pytest.fixture(scope="module")
def go_served(
    real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GoServed]:
    try:
        program = go_consumer()
    except NotInstallableError as error:
        pytest.skip(f"Go client: {error}")
    directory = tmp_path_factory.mktemp("serving-go")
    with store_a_served(real_store, directory) as (url, address, _):
        yield GoServed(program, directory, url, address)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("topic", ["t_keys", "t_order"])
def test_a_go_consumer_gets_every_message_as_it_was_stored(
    go_served: GoServed, mode: str, topic: str
) -> None:
    expected = go_served.expected(topic)
    assert Counter(go_served.consume(mode, topic, expected.total(), f"G_{mode}_{topic}")) == expected


@dataclass
class GrpcServed:
    """An archive, `tiered serve` over it, and a proxy before that."""

    directory: Path
    url: str
    server: ChildServer
    address: str
    proxy: RocketMqProxy

    def receive(
        self, group: str, topic: str, wanted: int, *, tag: str = "*", forget: int = 0
    ) -> list[list[str]]:
        """What a simple consumer got, in order: body's CRC-32, length, message id, tag, attempt, outcome."""
        output = self.directory / f"{group}.txt"
        self.proxy.consume(group, topic, str(wanted), "8", str(output), "10", tag, str(forget))
        return [line.split(" ") for line in output.read_text("utf-8").splitlines()]

    def expected(
        self, topic: str, wanted: Callable[[rocketmq_tiered.Message], bool] = lambda _: True
    ) -> Counter[tuple[str, str, str | None]]:
        """Body's CRC-32, length and message id of every archived message."""
        with rocketmq_tiered.open(self.url) as archive:
            return Counter(
                (str(zlib.crc32(message.body)), str(len(message.body)), message.unique_key)
                for queue in archive.queues(topic)
                for message in archive.queue(topic, queue.queue_id).messages()
                if wanted(message)
            )


@pytest.fixture(scope="module")
def grpc_served(
    real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GrpcServed]:
    directory = tmp_path_factory.mktemp("serving-grpc")
    backfill(real_store("A") / "store", FileStore(directory / "archive"))
    url = f"file://{directory}/archive"
    server, address = tiered_serve(url, directory)
    try:
        java_classes(PROXY_VERSION)
        proxy = RocketMqProxy(directory / "proxy", address, CLUSTER)
    except NotInstallableError as error:
        pytest.skip(f"proxy: {error}")
    with server, proxy:
        yield GrpcServed(directory, url, server, address, proxy)


def test_a_grpc_client_gets_everything_and_again_what_it_did_not_acknowledge(grpc_served: GrpcServed) -> None:
    expected = grpc_served.expected("t_order")
    found = grpc_served.receive("G_grpc", "t_order", expected.total(), forget=10)
    done = [tuple(line[:3]) for line in found if line[5] == "ok"]
    assert Counter(done) == expected
    forgot = {line[2] for line in found if line[5] == "forgot"}
    assert len(forgot) == 10
    log = grpc_served.directory / "proxy" / "logs" / "rocketmqlogs" / "proxy.log"
    assert "send system message failed" not in log.read_text("utf-8")  # proxies tell each other their clients
    assert forgot == {line[2] for line in found if line[5] == "ok" and line[4] == "2"}  # its second attempt


def test_a_grpc_client_gets_the_tag_it_asks_for(grpc_served: GrpcServed) -> None:
    expected = grpc_served.expected("t_tags", lambda message: message.tags == "TagA")
    found = grpc_served.receive("G_tag", "t_tags", expected.total(), tag="TagA")
    assert Counter(tuple(line[:3]) for line in found) == expected


def test_a_remoting_client_consumes_through_the_proxy(grpc_served: GrpcServed) -> None:
    expected = grpc_served.expected("t_order")
    output = grpc_served.directory / "remoting.txt"
    arguments = ("push", "G_remoting", "t_order", "*", str(expected.total()), "20", str(output))
    run_java(PROXY_VERSION, grpc_served.directory, "Consume", grpc_served.proxy.remoting_address, *arguments)
    lines = [line.split(" ") for line in output.read_text("utf-8").splitlines()]
    assert Counter((line[2], line[3], line[4]) for line in lines) == expected


def test_a_group_in_pop_mode_gets_everything_and_again_what_failed(grpc_served: GrpcServed) -> None:
    expected = grpc_served.expected("t_props")
    run_java(
        PROXY_VERSION,
        grpc_served.directory,
        MQADMIN,
        "setConsumeMode",
        "-n",
        grpc_served.address,
        "-b",
        grpc_served.address,
        "-t",
        "t_props",
        "-g",
        "G_pop",
        "-m",
        "POP",
    )
    output = grpc_served.directory / "pop.txt"
    arguments = ("pop", "G_pop", "t_props", "*", str(expected.total()), "20", str(output), "1")
    run_java(PROXY_VERSION, grpc_served.directory, "Consume", grpc_served.address, *arguments)
    lines = [line.split(" ") for line in output.read_text("utf-8").splitlines()]
    assert {(line[2], line[3], line[4]) for line in lines if line[8] == "ok"} == set(expected)
    assert any(line[8] == "back" for line in lines)
