"""Unmodified Java clients beside a live broker: their name server address is the sidecar's, nothing else changes."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.live import Sidecar, wait_for_line
from tests.integration.live_scene import Load, Producer, Scene, beside_broker
from tests.servers.child import free_port
from tests.servers.rocketmq import BROKER, CLUSTER, MQADMIN, RocketMq, run_java
from tests.servers.running_store import RunningStore
from tiered.formats import fastjson

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

QUEUES = 4
Line = tuple[int, int]
"""Queue id and queue offset."""


@dataclass
class Facade:
    """A broker, `tiered run` with a façade beside it, and the clients that dial it."""

    sidecar: Sidecar
    address: str
    scene: Scene
    directory: Path
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def broker(self) -> RocketMq:
        return self.sidecar.broker

    def produce(self, messages: int, per_second: int = 0) -> Producer:
        """Sends straight to the broker, round robin over all queues of the topics; a context."""
        load = Load(messages, per_second=per_second, body_bytes=1000)
        return Producer(self.broker, self.scene, load, self.directory / "producer.out")

    def consume(
        self, mode: str, group: str, wanted: int, *, topic: str = "live0", idle_s: int = 30
    ) -> Consumer:
        """Start a Java consumer behind the façade."""
        output = self.directory / f"{group}-{len(self.children)}.txt"
        command = self.broker.java_command(
            "Consume", self.address, mode, group, topic, "*", str(wanted), str(idle_s), str(output)
        )
        with (self.directory / f"{group}.out").open("ab") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log)
        self.children.append(child)
        return Consumer(child, output)

    def mqadmin(self, *arguments: str, real: bool = False) -> str:
        """One command of mqadmin, through the façade or the real name server."""
        address = self.broker.name_server_address if real else self.address
        return run_java(self.broker.version, self.directory, MQADMIN, *arguments, "-n", address)

    def wait_until_serving(self) -> None:
        """The archive is open for clients."""
        self.sidecar.wait_until_following(60)
        wait_for(self.sidecar.log, '"clients read the archive"')


@dataclass
class Consumer:
    """java/Consume.java as a child process."""

    child: subprocess.Popen[bytes]
    output: Path

    def lines(self) -> list[Line]:
        """What it has got so far, in order of arrival."""
        text = self.output.read_text("utf-8") if self.output.exists() else ""
        whole = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [(int(fields[0]), int(fields[1])) for fields in whole]

    def wait_for(self, count: int, timeout_s: float = 90) -> None:
        """Until it has got ``count`` messages."""
        deadline_s = time.monotonic() + timeout_s
        while len(self.lines()) < count:
            assert time.monotonic() < deadline_s, f"{len(self.lines())} of {count} came"
            assert self.child.poll() is None, f"ended with {len(self.lines())} of {count}"
            time.sleep(0.1)

    def finish(self, timeout_s: float = 150) -> list[Line]:
        """Wait for its end; everything it got."""
        assert self.child.wait(timeout_s) == 0
        return self.lines()


def wait_for(log: Path, text: str, times: int = 1, timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while log.read_text("utf-8").count(text) < times:
        assert time.monotonic() < deadline_s, f"no {text} in {log.read_text()[-2000:]}"
        time.sleep(0.1)


def progress(facade: Facade, group: str, topic: str) -> dict[int, tuple[int, int]]:
    """Queue id -> (broker's, consumer's) offset, as the real broker tells mqadmin."""
    told = facade.mqadmin("consumerProgress", "-g", group, real=True)
    rows = [line.split() for line in told.splitlines() if line.startswith(topic)]
    return {int(row[2]): (int(row[3]), int(row[4])) for row in rows}


def lines_of(table: str) -> Counter[str]:
    return Counter(" ".join(line.split()) for line in table.splitlines() if line.strip())


@pytest.fixture(scope="module")
def facade(tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore) -> Iterator[Facade]:
    directory = tmp_path_factory.mktemp("facade")
    address = f"127.0.0.1:{free_port()}"
    # Files are deleted when mqadmin says so, and then all but the last one.
    config = {
        "mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 20 * 200, "fileReservedTime": 0,
        "deleteWhen": f"{(time.localtime().tm_hour + 12) % 24:02d}",
    }  # fmt: skip
    settings = {
        "TIERED_SERVE__BIND": address, "TIERED_SERVE__ADVERTISE": address, "TIERED_OFFLOAD__BATCH_AGE_MS": 500,
    }  # fmt: skip
    scene = Scene(topics=2, queues=QUEUES, config=config, settings=settings)
    with beside_broker(scene, directory, minio_url) as sidecar:
        found = Facade(sidecar, address, scene, directory)
        sidecar.start()
        with found.produce(4000) as producer:
            assert producer.finish(120).failed == 0
        found.wait_until_serving()
        yield found
        for child in found.children:
            if child.poll() is None:
                child.kill()
            child.wait()
        assert sidecar.stop() == 0, sidecar.log.read_text()[-2000:]


def test_routes_show_the_sidecar_before_the_broker(facade: Facade) -> None:
    route = fastjson.loads(facade.mqadmin("topicRoute", "-t", "live0"))
    (broker,) = route["brokerDatas"]
    assert broker["brokerName"] == BROKER
    assert broker["brokerAddrs"] == {"0": facade.address, "1": facade.broker.broker_address}
    real = fastjson.loads(facade.mqadmin("topicRoute", "-t", "live0", real=True))
    assert real["brokerDatas"][0]["brokerAddrs"] == {"0": facade.broker.broker_address}
    assert route["queueDatas"] == real["queueDatas"]
    cluster = facade.mqadmin("clusterList")
    assert [line.split()[:4] for line in cluster.splitlines() if line.startswith(CLUSTER)] == [
        [CLUSTER, BROKER, "0", facade.address], [CLUSTER, BROKER, "1", facade.broker.broker_address],
    ]  # fmt: skip


def test_a_push_group_consumes_and_its_offsets_are_the_brokers(facade: Facade) -> None:
    got = facade.consume("push", "G-push", 2000).finish()
    assert Counter(got) == Counter((queue, offset) for queue in range(QUEUES) for offset in range(500))
    assert progress(facade, "G-push", "live0") == dict.fromkeys(range(QUEUES), (500, 500))


def test_two_members_share_the_queues_and_are_listed_once_each(facade: Facade) -> None:
    one = facade.consume("push", "G-two", 10**6, idle_s=25)
    two = facade.consume("push", "G-two", 10**6, idle_s=25)
    one.wait_for(1)
    deadline_s = time.monotonic() + 60
    while len(one.lines()) + len(two.lines()) < 2000:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    connected = facade.mqadmin("consumerConnection", "-g", "G-two")
    members = [line.split() for line in connected.splitlines() if line[:1].isdigit() and "@" in line]
    assert len(members) == len({row[1] for row in members}) == 2, connected
    assert set(one.finish()) | set(two.finish()) == {(q, o) for q in range(QUEUES) for o in range(500)}


def test_orderly_consumption_stays_in_order(facade: Facade) -> None:
    got = facade.consume("orderly", "G-orderly", 2000).finish()
    for queue in range(QUEUES):
        assert [offset for q, offset in got if q == queue] == list(range(500))


def test_clients_live_through_a_kill_of_the_sidecar(facade: Facade) -> None:
    """kill -9 while a group consumes what a producer sends; back after a few seconds; nothing is missing."""
    before = sum(offset for offset, _ in progress(facade, "G-push", "live0").values())
    consumer = facade.consume("push", "G-kill", before + 3000, idle_s=40)
    with facade.produce(6000, per_second=300) as producer:
        consumer.wait_for(before + 200)
        facade.sidecar.kill()
        time.sleep(5)
        facade.sidecar.start()
        sent = producer.finish(120)
    assert sent.failed == 0, "the producer does not use the façade"
    got = consumer.finish()
    end = (before + 3000) // QUEUES
    assert set(got) >= {(queue, offset) for queue in range(QUEUES) for offset in range(end)}
    facade.wait_until_serving()
    assert wait_for_line(facade.directory / "producer.out", "DONE", 5)
