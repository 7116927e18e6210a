"""A `tiered run` that is listed as a slave: real name servers and brokers, Java clients that are sent there."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from fetcher.serving.slave.registration import Listed, SlavePlace, register_command
from fetcher.serving.wire.codes import RequestCode
from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, beside_broker
from tests.servers.child import ChildServer, free_port, free_port_block
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import (
    BROKER,
    CLUSTER,
    JAVA_OPENS,
    MQADMIN,
    RocketMq,
    java_classes,
    java_command,
    run_java,
)  # fmt: skip
from tests.servers.running_store import RunningStore
from tiered.errors import UnavailableError
from tiered.formats import fastjson
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RemotingCommand

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

QUEUES, SLAVE_ID = 4, 7
REGISTER_MS = 2_000
DELETE_EXPIRED_COMMITLOG = 329
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

    def client(self, program: str, *arguments: str, flags: Sequence[str] = ()) -> Client:
        """Start a Java consumer of the broker's version; its output file is the argument "OUT"."""
        output = self.directory / f"client{len(self.children)}.txt"
        arguments = tuple(str(output) if argument == "OUT" else argument for argument in arguments)
        names, version = self.broker.name_server_address, self.broker.version
        command = java_command(version, self.directory, program, names, *arguments, flags=flags)
        with (self.directory / "clients.out").open("ab") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log)
        self.children.append(child)
        return Client(child, output)

    def pinned(self, mode: str, group: str, wanted: int, idle_s: int = 30) -> Client:
        """A consumer whose user says which broker id it asks."""
        return self.client("Pinned", mode, group, "live0", str(SLAVE_ID), str(wanted), str(idle_s), "OUT")

    def push(self, group: str, topic: str, wanted: int, pause_ms: int = 0) -> Client:
        """An ordinary push consumer that takes so long for a message, in each of its twenty threads."""
        arguments = "push", group, topic, "*", str(wanted), "300", "OUT"
        return self.client("Consume", *arguments, flags=[f"-Dconsume.pause.ms={pause_ms}"])

    def mqadmin(self, *arguments: str) -> str:
        """One command of mqadmin."""
        names, logging = self.broker.name_server_address, self.directory / "conf" / "logback_tools.xml"
        logging.parent.mkdir(exist_ok=True)
        logging.write_text("<configuration/>")  # 4.9's does nothing without it
        return run_java(self.broker.version, self.directory, MQADMIN, *arguments, "-n", names)

    def ask(self, address: str, code: int, body: bytes = b"", **fields: object) -> RemotingCommand:
        """One request to a server, as a tool would send it."""
        client = BrokerClient(address, 5)
        try:
            return client.call(code, {name: str(value) for name, value in fields.items()}, body)
        finally:
            client.close()

    def listed(self, name_server: str = "", name: str = BROKER) -> dict[str, str]:
        """Broker id to address, as the (first) name server lists the broker ``name``; empty while it is away."""
        try:
            answer = self.ask(
                name_server or self.broker.name_server_address, RequestCode.GET_BROKER_CLUSTER_INFO
            )
        except UnavailableError:
            return {}
        table = fastjson.loads(answer.body)["brokerAddrTable"]
        return dict(table[name]["brokerAddrs"]) if name in table else {}

    def wait_until_listed(self, timeout_s: float = 60) -> float:
        """Until the name server lists master and slave; the seconds that took."""
        both = {"0": self.broker.broker_address, str(SLAVE_ID): self.address}
        return until(lambda: self.listed() == both, "not listed", timeout_s)

    def route(self) -> dict[str, Any]:
        """The topic's route as the name server gives it."""
        answer = self.ask(self.broker.name_server_address, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="live0")
        found: dict[str, Any] = fastjson.loads(answer.body)
        return found

    def committed(self, group: str) -> list[int]:
        """The group's offset of every queue of live0, as the master has it."""
        code = RequestCode.QUERY_CONSUMER_OFFSET
        fields: dict[str, object] = {"consumerGroup": group, "topic": "live0"}
        answers = [
            self.ask(self.broker.broker_address, code, b"", **fields, queueId=q) for q in range(QUEUES)
        ]
        return [int(answer.ext_fields.get("offset", "-1")) for answer in answers]

    def configure(self, **settings: object) -> None:
        """Change the broker's configuration while it runs."""
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        assert self.ask(self.broker.broker_address, RequestCode.UPDATE_BROKER_CONFIG, text.encode()).code == 0

    def create_slow_group(self, group: str) -> None:
        """A group whose slow consumers are sent to us."""
        config = {
            "groupName": group, "consumeEnable": True, "consumeBroadcastEnable": True, "consumeFromMinEnable": True,
            "retryQueueNums": 1, "retryMaxTimes": 16, "brokerId": 0, "whichBrokerWhenConsumeSlowly": SLAVE_ID,
            "notifyConsumerIdsChangedEnable": True,
        }  # fmt: skip
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        assert self.ask(self.broker.broker_address, code, orjson.dumps(config)).code == 0

    def ends(self, topic: str, code: int) -> list[int]:
        """Minima or maxima of the topic's queues at the broker."""
        address = self.broker.broker_address
        answers = [self.ask(address, code, topic=topic, queueId=queue) for queue in range(QUEUES)]
        return [int(answer.ext_fields["offset"]) for answer in answers]

    def status(self) -> dict[str, Any]:
        """The part about slave mode."""
        found: dict[str, Any] = self.sidecar.status()["slave"]
        return found

    def pulls(self) -> int:
        """Answers to pulls since its start, with messages or without."""
        instance = json.loads((self.sidecar.directory / "state" / "instance.json").read_text())
        with urllib.request.urlopen(f"{instance['admin_url']}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        counted = [line for line in lines if line.startswith("rocketmq_tiered_store_slave_pulls_total{")]
        return sum(int(float(line.rpartition(" ")[2])) for line in counted)

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
    with standing("5.3.3", tmp_path_factory.mktemp("slave"), minio_url) as found:
        yield found


@contextmanager
def standing(
    version: str, directory: Path, minio: RunningStore, messages: int = 4000, topics: int = 2, name_servers: int = 1,
    **config: object,
) -> Iterator[Slave]:  # fmt: skip
    """A broker with ``messages`` in two topics, and a sidecar beside it that is not started yet."""
    address = f"127.0.0.1:{free_port()}"
    config = {
        "mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 20 * 200, "slaveReadEnable": "true",
        "registerNameServerPeriod": 10_000,
        "deleteWhen": f"{(time.localtime().tm_hour + 12) % 24:02d}", **config,
    }  # fmt: skip
    settings = {
        "TIERED_SLAVE__BIND": address, "TIERED_SLAVE__ADVERTISE": address, "TIERED_SLAVE__BROKER_ID": SLAVE_ID,
        "TIERED_SLAVE__REGISTER_MS": REGISTER_MS, "TIERED_OFFLOAD__BATCH_AGE_MS": 500,
    }  # fmt: skip
    scene = Scene(version, topics, QUEUES, config, settings, name_servers=name_servers)
    with beside_broker(scene, directory, minio) as sidecar:
        found = Slave(sidecar, address, scene, directory)
        # A broker that has only just begun refuses sends that come too fast, and every queue is to hold as many.
        if messages:
            with found.produce(messages, per_second=500) as producer:
                assert producer.finish(120).acked > 0.8 * messages
        yield found
        for child in found.children:
            if child.poll() is None:
                child.kill()
            child.wait()
        if sidecar.process is not None and sidecar.process.poll() is None:
            assert sidecar.stop() == 0, sidecar.log.read_text()[-2000:]
        sidecar.broker.broker.kill()  # nobody looks at its files any more


def delete_old_files(slave: Slave) -> int:
    """Have the broker delete all commitlog files that are full; the smallest first offset it has left of live0."""
    slave.sidecar.wait_until_archived(60)
    long_ago_s = time.time() - 100 * 3600
    for file in sorted((slave.broker.store / "commitlog").iterdir())[:-2]:  # the last one is not begun yet
        os.utime(file, (long_ago_s, long_ago_s))
    slave.ask(slave.broker.broker_address, DELETE_EXPIRED_COMMITLOG)

    def minimum() -> int:
        return min(slave.ends("live0", RequestCode.GET_MIN_OFFSET))

    until(lambda: minimum() > 0, "the broker deletes nothing", 90)
    return minimum()


def places(messages: Sequence[Message]) -> Counter[tuple[int, int]]:
    return Counter((int(message[0]), int(message[1])) for message in messages)


def everything(begins: Sequence[int], ends: Sequence[int]) -> Counter[tuple[int, int]]:
    """Every place of queues from their begin to their end, once."""
    ranges = enumerate(zip(begins, ends, strict=True))
    return Counter((queue, offset) for queue, (begin, end) in ranges for offset in range(begin, end))


def read_all_of_it(slave: Slave) -> None:
    """Pinned clients read from offset 0 what the broker has deleted, equal to what it gave while it had it."""
    before = slave.route()
    ends = slave.ends("live0", RequestCode.GET_MAX_OFFSET)
    truth = slave.push("G-truth", "live0", sum(ends)).finish()  # from the broker itself
    assert places(truth) == everything([0] * QUEUES, ends)
    slave.sidecar.start()
    slave.wait_until_listed()
    route = slave.route()
    assert route["brokerDatas"][0]["brokerAddrs"] == slave.listed()
    assert route["queueDatas"] == before["queueDatas"]
    assert delete_old_files(slave) > 100
    assert Counter(slave.pinned("pull", "G-pulled", 0).finish()) == Counter(truth)
    before_pulls = slave.pulls()
    assigned = slave.pinned("assign", "G-pinned", 10**6, idle_s=8)
    assert Counter(assigned.finish()) == Counter(truth)
    # Ten messages a pull, and then eight seconds at the end, where it is not told to go back again and again.
    assert slave.pulls() - before_pulls < sum(ends) / 10 + QUEUES * 10
    assert slave.committed("G-pinned") == ends


def redirect_and_return(slave: Slave) -> None:
    """A consumer that the master finds slow reads here and goes back; the master's ratio is 0, so all are slow."""
    with slave.produce(2000, per_second=500) as producer:
        assert producer.finish(60).acked > 1600
    slave.sidecar.wait_until_archived(60)
    slave.create_slow_group("G-slow")
    slave.configure(accessMessageInMemoryMaxRatio=0)
    begins = slave.ends("live1", RequestCode.GET_MIN_OFFSET)
    ends = slave.ends("live1", RequestCode.GET_MAX_OFFSET)
    wanted = everything(begins, ends)
    consumer = slave.push("G-slow", "live1", 10**6)
    until(lambda: len(consumer.messages()) >= wanted.total(), "not all came", 60)
    assert slave.answered("G-slow")[0] > 0, slave.status()
    slave.configure(accessMessageInMemoryMaxRatio=40)
    with slave.produce(
        80, per_second=40
    ) as producer:  # whoever waits here is handed back by the next message
        producer.finish(30)
    wanted = everything(begins, slave.ends("live1", RequestCode.GET_MAX_OFFSET))
    until(lambda: len(consumer.messages()) >= wanted.total(), "not all came", 60)
    here = slave.answered("G-slow")
    with slave.produce(200, per_second=50) as producer:
        producer.finish(30)
    wanted = everything(begins, slave.ends("live1", RequestCode.GET_MAX_OFFSET))
    until(lambda: len(consumer.messages()) >= wanted.total(), "not all came", 60)
    assert slave.answered("G-slow") == here, "it is back at the master"
    assert places(consumer.messages()) == wanted, "nothing is missing, nothing comes twice"
    consumer.child.kill()


def come_and_go(slave: Slave) -> None:
    """Name server and sidecar end and come back while a producer sends."""
    mq = slave.broker
    with slave.produce(10**6, per_second=200) as producer:
        mq.name_server.stop()
        mq.name_server.start()
        until(lambda: str(SLAVE_ID) in slave.listed(), "not listed again", 15)
        until(lambda: "0" in slave.listed(), "the broker does not register again", 60)
        slave.sidecar.kill()
        until(lambda: slave.listed() == {"0": mq.broker_address}, "still listed", 5)
        slave.sidecar.start()
        slave.wait_until_listed()
        assert slave.route()["brokerDatas"][0]["brokerAddrs"]["0"] == mq.broker_address
        sent = producer.finish(30, now=True)
    assert sent.failed == 0 and sent.acked > 500
    slave.sidecar.wait_until_archived(60)
    assert slave.sidecar.stop() == 0, slave.sidecar.log.read_text()[-2000:]
    assert slave.listed() == {"0": mq.broker_address}
    # Who was killed may have left what nobody names.
    for command in (
        ("gc", slave.sidecar.url, "--apply", "--grace", "0s"),
        ("verify", slave.sidecar.url, "--full", "--strict"),
    ):
        done = slave.sidecar.tiered(*command)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_it_is_listed_beside_the_master_and_pinned_clients_read_all_of_it(slave: Slave) -> None:
    read_all_of_it(slave)


def test_a_slow_consumer_is_redirected_and_goes_back(slave: Slave) -> None:
    redirect_and_return(slave)


def test_name_server_and_sidecar_come_and_go_and_producers_do_not_notice(slave: Slave) -> None:
    come_and_go(slave)


def several_name_servers(slave: Slave) -> None:
    """It is listed at both or, beside a broker of another name at its address, at none; one may go and come back."""
    mq, both = slave.broker, slave.broker.name_server_addresses
    master, beside = {"0": mq.broker_address}, {"0": mq.broker_address, str(SLAVE_ID): slave.address}

    def stands() -> dict[str, str]:
        return dict(slave.status().get("name_servers", ()))

    other = BrokerClient(both[1], 5)
    command = register_command(SlavePlace("other-a", "", (), slave.address, 0), Listed(cluster="Other"))
    assert other.call(command.code, dict(command.ext_fields), command.body).code == 0
    slave.sidecar.start()
    slave.sidecar.wait_until_following(60)
    of_other = f"{slave.address} is listed as id 0 of other-a"
    until(lambda: of_other in stands().get(both[1], ""), "it does not say who has its address")
    until(lambda: "another name server" in stands()[both[0]], "it stays at the other one")
    # 5.x answers before it takes who unregisters off its list.
    until(lambda: [slave.listed(at) for at in both] == [master, master], "listed where it is refused", 5)
    assert slave.listed(both[1], "other-a") == {"0": slave.address}
    other.close()
    until(lambda: [slave.listed(at) for at in both] == [beside, beside], "not listed at both", 30)

    mq.name_servers[0].kill()
    until(lambda: stands()[both[0]].startswith("not reachable"), "it does not notice", 15)
    time.sleep(2 * REGISTER_MS / 1000)
    assert slave.listed(both[1]) == beside and stands()[both[1]] == "registered"
    mq.name_servers[0].start()
    until(lambda: str(SLAVE_ID) in slave.listed(both[0]), "not listed again", 15)
    until(lambda: slave.listed(both[0]) == beside, "the broker does not register again", 60)
    assert slave.sidecar.stop() == 0, slave.sidecar.log.read_text()[-2000:]
    until(lambda: [slave.listed(at) for at in both] == [master, master], "still listed", 5)


@pytest.mark.timeout(120)
def test_it_is_listed_at_all_name_servers_and_unregisters_from_all(
    tmp_path: Path, minio_url: RunningStore
) -> None:
    with standing("5.3.3", tmp_path, minio_url, 0, 0, 2) as slave:
        several_name_servers(slave)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_same_at_name_servers_of_4_9(tmp_path: Path, minio_url: RunningStore) -> None:
    """They know brokers by address alone, and unregister an id whoever has it."""
    with standing("4.9.7", tmp_path, minio_url, 0, 0, 2) as slave:
        several_name_servers(slave)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
def test_the_same_beside_other_versions(version: str, tmp_path: Path, minio_url: RunningStore) -> None:
    with standing(version, tmp_path, minio_url) as slave:
        read_all_of_it(slave)
        told = slave.mqadmin("clusterList")
        assert [line.split()[:4] for line in told.splitlines() if line.startswith(CLUSTER)] == [
            [CLUSTER, BROKER, "0", slave.broker.broker_address], [CLUSTER, BROKER, str(SLAVE_ID), slave.address],
        ]  # fmt: skip
        assert "brokerVersionDesc" in slave.mqadmin("brokerStatus", "-b", slave.address)
        redirect_and_return(slave)
        come_and_go(slave)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_without_the_master_a_group_reads_on_and_loses_nothing(
    tmp_path: Path, minio_url: RunningStore
) -> None:
    """The master is killed while a redirected group reads: it goes on here, as far as the archive goes. When the master
    is back the group's offsets are true."""
    with standing("5.3.3", tmp_path, minio_url) as slave:
        slave.sidecar.start()
        slave.wait_until_listed()
        with slave.produce(40_000, per_second=1500) as producer:
            assert producer.finish(120).acked > 32_000
        slave.sidecar.wait_until_archived(60)
        slave.create_slow_group("G-alone")
        slave.configure(accessMessageInMemoryMaxRatio=0)
        ends = slave.ends("live0", RequestCode.GET_MAX_OFFSET)
        consumer = slave.push("G-alone", "live0", 10**6, pause_ms=20)
        until(
            lambda: len(consumer.messages()) > 2000 and slave.answered("G-alone")[0] > 0,
            "nobody came here",
            60,
        )
        slave.broker.broker.kill()
        seen = len(consumer.messages())
        until(lambda: slave.listed() == {str(SLAVE_ID): slave.address}, "the master is still listed", 30)
        wanted = everything([0] * QUEUES, ends)
        until(lambda: len(set(consumer.messages())) >= wanted.total(), "it does not go on", 120)
        assert seen < wanted.total() / 2
        time.sleep(5)  # at the archive's end, with nothing to read
        slave.broker.broker.start()
        with slave.produce(400, per_second=100) as producer:
            assert producer.finish(60).failed == 0
        ends = slave.ends("live0", RequestCode.GET_MAX_OFFSET)
        wanted = everything([0] * QUEUES, ends)
        until(lambda: len(set(consumer.messages())) >= wanted.total(), "new messages do not come", 120)
        assert set(places(consumer.messages())) == set(wanted)
        until(lambda: slave.committed("G-alone") == ends, "its offsets do not come to the master", 60)
        consumer.child.kill()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_it_stays_out_of_a_cluster_with_acting_masters(tmp_path: Path, minio_url: RunningStore) -> None:
    with standing("5.3.3", tmp_path, minio_url, 0, enableSlaveActingMaster="true") as slave:
        slave.sidecar.start()
        slave.sidecar.wait_until_following(60)

        def told() -> str:
            return str(slave.status()["name_servers"])

        until(lambda: "enableSlaveActingMaster" in told(), "it does not say why it stays out")
        assert slave.listed() == {"0": slave.broker.broker_address}


@pytest.fixture(params=["4.9.7", "5.3.3", "5.5.0"])
def replicated(request: pytest.FixtureRequest, tmp_path: Path, minio_url: RunningStore) -> Iterator[Slave]:
    """A SYNC_MASTER with a real slave, and ours."""
    version = str(request.param)
    port = free_port_block(6)
    with standing(version, tmp_path, minio_url, 0, brokerRole="SYNC_MASTER", inSyncReplicas=2) as found:
        mq, directory = found.broker, tmp_path / "real-slave"
        (directory / "conf").mkdir(parents=True)
        (directory / "conf" / "logback_broker.xml").write_text("<configuration/>")
        conf = {
            "brokerClusterName": CLUSTER, "brokerName": BROKER, "brokerId": 1, "brokerRole": "SLAVE",
            "brokerIP1": "127.0.0.1", "listenPort": port + 4, "haListenPort": port + 5,
            "namesrvAddr": mq.name_server_address, "mappedFileSizeCommitLog": 1 << 20,
            "mappedFileSizeConsumeQueue": 20 * 200, "storePathRootDir": directory / "store",
            "storePathCommitLog": directory / "store" / "commitlog",
        }  # fmt: skip
        (directory / "broker.conf").write_text("".join(f"{name}={value}\n" for name, value in conf.items()))
        log = directory / "out"
        server = ChildServer(
            "slave broker",
            ["java", "-Xmx512m", *JAVA_OPENS, f"-Duser.home={directory}", "-cp", f"{mq.jars}/*",
             "org.apache.rocketmq.broker.BrokerStartup", "-c", str(directory / "broker.conf")],
            {"ROCKETMQ_HOME": str(directory)}, log, lambda: b"boot success" in log.read_bytes(),
        )  # fmt: skip
        server.start()
        try:
            until(lambda: "1" in found.listed(), "the real slave is not listed", 60)
            until(lambda: is_replicated(found), "the real slave does not follow", 180)
            yield found
        finally:
            server.stop()


def is_replicated(slave: Slave) -> bool:
    """Whether sends are acknowledged: the real slave follows."""
    with slave.produce(100, per_second=40) as producer:
        return producer.finish(60).acked == 100


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_producers_of_a_sync_master_do_not_notice(replicated: Slave) -> None:
    """Sends wait for the real slave; ours acknowledges nothing and takes no part, listed or killed."""
    slave = replicated
    with slave.produce(10**6, per_second=300) as producer:
        time.sleep(15)
        without = producer.p99_us_by_second()[5:]
        slave.sidecar.start()
        until(lambda: str(SLAVE_ID) in slave.listed(), "not listed")
        at = len(producer.p99_us_by_second())
        time.sleep(15)
        beside = producer.p99_us_by_second()[at + 5 :]
        slave.sidecar.kill()
        until(lambda: str(SLAVE_ID) not in slave.listed(), "still listed", 5)
        at = len(producer.p99_us_by_second())
        time.sleep(10)
        killed = producer.p99_us_by_second()[at:]
        sent = producer.finish(30, now=True)
    figures = [int(np.median(seconds)) for seconds in (without, beside, killed)]
    print(f"{slave.broker.version}: {sent}, median p99 of a second in us without, beside, killed: {figures}")
    assert sent.failed == 0 and sent.acked >= sent.sends, "each is stored twice when it is acknowledged"
    assert set(slave.listed()) == {"0", "1"}
    # Sends take milliseconds; who waits for a replica that never acknowledges waits three seconds.
    assert max(figures[1:]) < 1_000_000
