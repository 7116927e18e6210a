"""gRPC clients read an archive without its broker, through a RocketMQ 5 proxy."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rocketmq_tiered
from tests.end_to_end.offloading import CLUSTER, backfill
from tests.servers.child import ChildServer
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import MQADMIN, java_classes, run_java
from tests.servers.rocketmq_proxy import PROXY_VERSION, RocketMqProxy
from tests.servers.tiered_serve import tiered_serve
from tiered.object_store.file import FileStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]


@dataclass
class Served:
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
def served(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("serving-grpc")
    backfill(real_store("A") / "store", FileStore(directory / "archive"))
    url = f"file://{directory}/archive"
    server, address = tiered_serve(url, directory)
    try:
        java_classes(PROXY_VERSION)
        proxy = RocketMqProxy(directory / "proxy", address, CLUSTER)
    except NotInstallableError as error:
        pytest.skip(f"proxy: {error}")
    server.start()
    try:
        proxy.start()
        yield Served(directory, url, server, address, proxy)
        proxy.stop()
    finally:
        proxy.server.kill()
        server.stop()


def test_a_grpc_client_gets_everything_and_again_what_it_did_not_acknowledge(served: Served) -> None:
    expected = served.expected("t_order")
    found = served.receive("G_grpc", "t_order", expected.total(), forget=10)
    done = [tuple(line[:3]) for line in found if line[5] == "ok"]
    assert Counter(done) == expected
    forgot = {line[2] for line in found if line[5] == "forgot"}
    assert len(forgot) == 10
    log = served.directory / "proxy" / "logs" / "rocketmqlogs" / "proxy.log"
    assert "send system message failed" not in log.read_text("utf-8")  # proxies tell each other their clients
    assert forgot == {line[2] for line in found if line[5] == "ok" and line[4] == "2"}  # its second attempt


def test_a_grpc_client_gets_the_tag_it_asks_for(served: Served) -> None:
    expected = served.expected("t_tags", lambda message: message.tags == "TagA")
    found = served.receive("G_tag", "t_tags", expected.total(), tag="TagA")
    assert Counter(tuple(line[:3]) for line in found) == expected


def test_a_remoting_client_consumes_through_the_proxy(served: Served) -> None:
    expected = served.expected("t_order")
    output = served.directory / "remoting.txt"
    arguments = ("push", "G_remoting", "t_order", "*", str(expected.total()), "20", str(output))
    run_java(PROXY_VERSION, served.directory, "Consume", served.proxy.remoting_address, *arguments)
    lines = [line.split(" ") for line in output.read_text("utf-8").splitlines()]
    assert Counter((line[2], line[3], line[4]) for line in lines) == expected


def test_a_group_in_pop_mode_gets_everything_and_again_what_failed(served: Served) -> None:
    expected = served.expected("t_props")
    run_java(
        PROXY_VERSION,
        served.directory,
        MQADMIN,
        "setConsumeMode",
        "-n",
        served.address,
        "-b",
        served.address,
        "-t",
        "t_props",
        "-g",
        "G_pop",
        "-m",
        "POP",
    )
    output = served.directory / "pop.txt"
    arguments = ("pop", "G_pop", "t_props", "*", str(expected.total()), "20", str(output), "1")
    run_java(PROXY_VERSION, served.directory, "Consume", served.address, *arguments)
    lines = [line.split(" ") for line in output.read_text("utf-8").splitlines()]
    assert {(line[2], line[3], line[4]) for line in lines if line[8] == "ok"} == set(expected)
    assert any(line[8] == "back" for line in lines)
