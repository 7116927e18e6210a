"""A `tiered run` that is listed as a slave: real name servers and brokers, Java clients that are sent there."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, beside_broker
from tests.servers.child import free_port
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import BROKER, CLUSTER, MQADMIN, RocketMq, java_classes, java_command, run_java
from tests.servers.running_store import RunningStore
from tiered.formats import fastjson
from tiered.remoting.client import BrokerClient, RequestCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

QUEUES, SLAVE_ID = 4, 7
REGISTER_MS = 2_000
Message = tuple[str, ...]
"""queueId, offset, bodyCrc32, bodyLength, uniqKey."""


@dataclass
class Slave:
    """A broker, `tiered run` as its slave, and clients that dial the real name server."""

    sidecar: Sidecar
    address: str
    scene: Scene
    directory: Path
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def broker(self) -> RocketMq:
        return self.sidecar.broker

    def produce(self, messages: int, per_second: int = 0) -> Producer:
        """Sends to the broker, round robin over all queues of the topics; a context."""
        load = Load(messages, per_second=per_second, body_bytes=1000)
        return Producer(self.broker, self.scene, load, self.directory / f"producer{time.monotonic_ns()}.out")

    def client(self, program: str, *arguments: str, version: str = "5.3.3") -> Client:
        """Start a Java consumer; its output file is the argument "OUT"."""
        output = self.directory / f"client{len(self.children)}.txt"
        arguments = tuple(str(output) if argument == "OUT" else argument for argument in arguments)
        command = java_command(version, self.directory, program, self.broker.name_server_address, *arguments)
        with (self.directory / "clients.out").open("ab") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log)
        self.children.append(child)
        return Client(child, output)

    def pinned(self, mode: str, group: str, wanted: int, **others: str) -> Client:
        """A consumer whose user says which broker id it asks."""
        return self.client("Pinned", mode, group, "live0", str(SLAVE_ID), str(wanted), "30", "OUT", **others)

    def push(self, group: str, wanted: int, idle_s: int = 30) -> Client:
        """An ordinary push consumer."""
        return self.client("Consume", "push", group, "live0", "*", str(wanted), str(idle_s), "OUT")

    def mqadmin(self, *arguments: str) -> str:
        """One command of mqadmin."""
        names = self.broker.name_server_address
        return run_java(self.broker.version, self.directory, MQADMIN, *arguments, "-n", names)

    def listed(self) -> dict[str, str]:
        """Broker id to address, as the name server lists our broker; empty while it is away."""
        client = BrokerClient(self.broker.name_server_address, 2)
        try:
            table = fastjson.loads(client.call(106).body)["brokerAddrTable"]
            return dict(table[BROKER]["brokerAddrs"]) if BROKER in table else {}
        except (OSError, Exception) as error:
            assert "does not answer" in str(error) or "closed" in str(error), error
            return {}
        finally:
            client.close()

    def route(self) -> dict[str, Any]:
        """The topic's route as the name server gives it."""
        found: dict[str, Any] = fastjson.loads(self.mqadmin("topicRoute", "-t", "live0"))
        return found

    def status(self) -> dict[str, Any]:
        """The part about slave mode."""
        found: dict[str, Any] = self.sidecar.status()["slave"]
        return found

    def answered(self, group: str) -> tuple[int, int]:
        """Pulls of ``group`` that found messages here: in the archive, at the broker."""
        for found in self.status()["groups"]:
            if found["name"] == group:
                return found["archive_pulls"], found["broker_pulls"]
        return 0, 0


@dataclass
class Client:
    """A Java consumer as a child process."""

    child: subprocess.Popen[bytes]
    output: Path

    def messages(self) -> list[Message]:
        """What it has got so far, in order of arrival."""
        text = self.output.read_text("utf-8") if self.output.exists() else ""
        return [tuple(line.split()[:5]) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def finish(self, timeout_s: float = 120) -> list[Message]:
        """Wait for its end; everything it got."""
        assert self.child.wait(timeout_s) == 0
        return self.messages()


def until(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> float:
    """Wait for ``condition``; the seconds that took."""
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begun_s < timeout_s, what
        time.sleep(0.1)
    return time.monotonic() - begun_s


@pytest.fixture(scope="module")
def slave(tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore) -> Iterator[Slave]:
    try:
        java_classes("5.3.3")
    except NotInstallableError as error:
        pytest.skip(f"Java clients: {error}")
    yield from standing("5.3.3", tmp_path_factory.mktemp("slave"), minio_url)


def standing(version: str, directory: Path, minio: RunningStore, **config: object) -> Iterator[Slave]:
    """A broker with 2,000 messages of each topic, all archived, and a slave beside it."""
    address = f"127.0.0.1:{free_port()}"
    config = {
        "mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 20 * 200, "slaveReadEnable": "true",
        "deleteWhen": f"{(time.localtime().tm_hour + 12) % 24:02d}", **config,
    }  # fmt: skip
    settings = {
        "TIERED_SLAVE__BIND": address, "TIERED_SLAVE__ADVERTISE": address, "TIERED_SLAVE__BROKER_ID": SLAVE_ID,
        "TIERED_SLAVE__REGISTER_MS": REGISTER_MS, "TIERED_OFFLOAD__BATCH_AGE_MS": 500,
    }  # fmt: skip
    scene = Scene(version=version, topics=2, queues=QUEUES, config=config, settings=settings)
    with beside_broker(scene, directory, minio) as sidecar:
        found = Slave(sidecar, address, scene, directory)
        # A broker that has only just begun refuses sends that come too fast, and every queue is to hold as many.
        with found.produce(4000, per_second=500) as producer:
            assert producer.finish(120).failed == 0
        yield found
        for child in found.children:
            if child.poll() is None:
                child.kill()
            child.wait()
        if sidecar.process is not None and sidecar.process.poll() is None:
            assert sidecar.stop() == 0, sidecar.log.read_text()[-2000:]


def minimum(slave: Slave) -> int:
    """The smallest first offset that the broker has of live0."""
    client = BrokerClient(slave.broker.broker_address, 5)
    found = [
        int(
            client.call(RequestCode.GET_MIN_OFFSET, {"topic": "live0", "queueId": str(q)}).ext_fields[
                "offset"
            ]
        )
        for q in range(QUEUES)
    ]
    client.close()
    return min(found)


def delete_old_files(slave: Slave) -> int:
    """Have the broker delete all commitlog files that are full; the smallest first offset it has left."""
    slave.sidecar.wait_until_archived(60)
    long_ago_s = time.time() - 100 * 3600
    for file in sorted((slave.broker.store / "commitlog").iterdir())[:-2]:  # the last one is not begun yet
        os.utime(file, (long_ago_s, long_ago_s))
    before = minimum(slave)
    slave.mqadmin("deleteExpiredCommitLog", "-b", slave.broker.broker_address)
    until(lambda: minimum(slave) > before, "the broker deletes nothing", 90)
    return minimum(slave)


def places(messages: Sequence[Message]) -> Counter[tuple[int, int]]:
    return Counter((int(message[0]), int(message[1])) for message in messages)


def everything(end: int) -> Counter[tuple[int, int]]:
    return Counter((queue, offset) for queue in range(QUEUES) for offset in range(end))


def test_it_is_listed_beside_the_master_and_pinned_clients_read_all_of_it(slave: Slave) -> None:
    before = slave.route()
    truth = slave.push("G-truth", QUEUES * 500).finish()  # from the broker itself
    assert places(truth) == everything(500)
    slave.sidecar.start()
    until(
        lambda: slave.listed() == {"0": slave.broker.broker_address, str(SLAVE_ID): slave.address},
        "not listed",
    )
    route = slave.route()
    assert route["brokerDatas"][0]["brokerAddrs"] == slave.listed()
    assert route["queueDatas"] == before["queueDatas"]
    assert delete_old_files(slave) > 100
    assigned, pulled = slave.pinned("assign", "G-pinned", QUEUES * 500), slave.pinned("pull", "G-pulled", 0)
    assert Counter(assigned.finish()) == Counter(pulled.finish()) == Counter(truth)
    told = slave.mqadmin("consumerProgress", "-g", "G-pinned")
    rows = [line.split() for line in told.splitlines() if line.startswith("live0")]
    assert {row[4] for row in rows} == {"500"}, told
    cluster = slave.mqadmin("clusterList")
    assert [line.split()[:4] for line in cluster.splitlines() if line.startswith(CLUSTER)] == [
        [CLUSTER, BROKER, "0", slave.broker.broker_address], [CLUSTER, BROKER, str(SLAVE_ID), slave.address],
    ]  # fmt: skip
