"""Unmodified Java clients beside a live broker: their name server address is the sidecar's, nothing else changes."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
        self, mode: str, group: str, wanted: int, *, topic: str = "live0", idle_s: int = 30, failures: int = 0,
        version: str = "5.3.3",
    ) -> Consumer:  # fmt: skip
        """Start a Java consumer behind the façade; it gives a message back the first ``failures`` times."""
        output = self.directory / f"{group}-{len(self.children)}.txt"
        arguments = (
            self.address,
            mode,
            group,
            topic,
            "*",
            str(wanted),
            str(idle_s),
            str(output),
            str(failures),
        )
        command = java_command(version, self.directory, "Consume", *arguments)
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

    def fields(self) -> list[list[str]]:
        """What it has got so far, in order of arrival; see Consume.java."""
        text = self.output.read_text("utf-8") if self.output.exists() else ""
        return [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def lines(self) -> list[Line]:
        """The places of what it has got."""
        return [(int(fields[0]), int(fields[1])) for fields in self.fields()]

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


@pytest.fixture(scope="module")
def facade(tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore) -> Iterator[Facade]:
    try:
        for version in ("4.9.7", "5.3.3", "5.5.0"):
            java_classes(version)
    except NotInstallableError as error:
        pytest.skip(f"Java clients: {error}")
    directory = tmp_path_factory.mktemp("facade")
    address = f"127.0.0.1:{free_port()}"
    config = {
        "mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 20 * 200,
        "deleteWhen": f"{(time.localtime().tm_hour + 12) % 24:02d}",
    }  # fmt: skip
    settings = {
        "TIERED_SERVE__BIND": address, "TIERED_SERVE__ADVERTISE": address, "TIERED_OFFLOAD__BATCH_AGE_MS": 500,
    }  # fmt: skip
    scene = Scene(topics=2, queues=QUEUES, config=config, settings=settings)
    with beside_broker(scene, directory, minio_url) as sidecar:
        found = Facade(sidecar, address, scene, directory)
        sidecar.start()
        # A broker that has only just begun refuses sends that come too fast, and every queue is to hold as many.
        with found.produce(4000, per_second=500) as producer:
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


def test_two_members_share_the_queues_and_are_listed_once_each(facade: Facade) -> None:
    members = [facade.consume("push", "G-two", 10**6) for _ in range(2)]
    deadline_s = time.monotonic() + 60
    while sum(len(member.lines()) for member in members) < 2000:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    (status,) = [group for group in facade.sidecar.status()["serving"]["groups"] if group["name"] == "G-two"]
    assert status["members"] == 2 and status["archive_pulls"] + status["broker_pulls"] > 0
    told = facade.mqadmin("consumerConnection", "-g", "G-two")
    listed = [line.split()[1] for line in told.splitlines() if line[:1].isdigit() and "@" in line]
    assert len(listed) == len(set(listed)) == 2, told
    for member in members:
        member.child.kill()
    assert {line for member in members for line in member.lines()} == everything([500] * QUEUES)


def broker_range(facade: Facade, topic: str, queue_id: int) -> tuple[int, int]:
    """[minimum, maximum) of a queue, as the broker itself says."""
    client = BrokerClient(facade.broker.broker_address, 5)
    fields = {"topic": topic, "queueId": str(queue_id)}
    found = tuple(
        int(client.call(code, fields).ext_fields["offset"])
        for code in (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
    )
    client.close()
    return found[0], found[1]


def delete_old_files(facade: Facade) -> int:
    """Have the broker delete all commitlog files that are full; the smallest first offset it has left of live0."""
    facade.sidecar.wait_until_archived(60)
    long_ago_s = time.time() - 100 * 3600
    for file in sorted((facade.broker.store / "commitlog").iterdir())[:-2]:  # the last one is not begun yet
        os.utime(file, (long_ago_s, long_ago_s))
    deadline_s = time.monotonic() + 90
    before = min(broker_range(facade, "live0", queue)[0] for queue in range(QUEUES))
    facade.mqadmin("deleteExpiredCommitLog", "-b", facade.broker.broker_address, real=True)
    while True:
        found = min(broker_range(facade, "live0", queue)[0] for queue in range(QUEUES))
        if found > before:
            return found
        assert time.monotonic() < deadline_s, "the broker deletes nothing"
        time.sleep(1)


def everything(ends: Sequence[int]) -> set[Line]:
    """All lines of queues that end there."""
    return {(queue, offset) for queue, end in enumerate(ends) for offset in range(end)}


def test_a_group_reads_from_the_archive_on_into_what_is_sent_now(facade: Facade) -> None:
    """The broker has deleted most of it. From offset 0 nothing is missing, nothing comes twice, what is given back
    comes again, and an orderly group stays in order. Clients of three versions."""
    assert delete_old_files(facade) > 100
    end = broker_range(facade, "live0", 0)[1] + 250
    with facade.produce(2000, per_second=200) as producer:
        plain = facade.consume("push", "G-cold", QUEUES * end, version="4.9.7")
        orderly = facade.consume("orderly", "G-cold-orderly", QUEUES * end, version="5.5.0")
        retried = facade.consume("push", "G-cold-retry", QUEUES * end, topic="live1", failures=1)
        assert producer.finish(120).failed == 0
        got, in_order = plain.finish(), orderly.finish()
        assert retried.child.wait(120) == 0
    assert Counter(got) == Counter(in_order) == Counter(everything([end] * QUEUES))
    for queue in range(QUEUES):
        assert [offset for q, offset in in_order if q == queue] == list(range(end))
    consumed = [fields[4] for fields in retried.fields() if fields[8] == "ok"]
    given_back = {fields[4] for fields in retried.fields() if fields[8] == "back"}
    assert len(set(consumed)) == QUEUES * end and set(consumed) == given_back
    assert progress(facade, "G-cold", "live0") == dict.fromkeys(range(QUEUES), (end, end))
    told = facade.mqadmin("topicStatus", "-t", "live0")
    rows = [line.split() for line in told.splitlines() if line.startswith(BROKER)]
    assert {(int(row[1]), int(row[2]), int(row[3])) for row in rows} == {(q, 0, end) for q in range(QUEUES)}


@pytest.mark.soak
def test_nothing_is_missing_whatever_goes_away(facade: Facade) -> None:
    """While a group reads what only the archive has, and then what a producer sends: the sidecar is killed, the object
    store, the name server and the broker go away and come back."""
    delete_old_files(facade)
    mq = facade.broker
    with facade.produce(10**6, per_second=200) as producer:
        consumer = facade.consume("push", "G-storm", 10**6, idle_s=300)
        consumer.wait_for(50)
        facade.sidecar.kill()
        seen = len(consumer.lines())
        assert seen < sum(broker_range(facade, "live0", queue)[0] for queue in range(QUEUES)), (
            "it was past the archive"
        )
        time.sleep(5)
        facade.sidecar.start()
        consumer.wait_for(seen + 200)
        facade.sidecar.objects.server.stop()
        time.sleep(3)
        mq.name_server.stop()
        facade.sidecar.objects.server.start()
        mq.name_server.start()
        mq.broker.stop(patience_s=40)
        mq.broker.start()
        time.sleep(3)
        producer.finish(30, now=True)
    wanted = everything([broker_range(facade, "live0", queue)[1] for queue in range(QUEUES)])
    consumer.wait_for(len(wanted))
    consumer.child.kill()
    assert set(consumer.lines()) == wanted
