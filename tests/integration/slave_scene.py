"""A broker, `tiered run` that is listed as its slave, and Java clients that are sent there: what its tests share.

Owns the place and the requests made in it. Does not own clients' lives (client_scene.py) nor what must come of it.
"""

import json
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tests.integration.client_scene import (
    QUEUES,
    ClientScene,
    Consumer,
    Job,
    ask,
    beside_clients,
    broker_config,
    until,
)
from tests.integration.live import Sidecar
from tests.integration.live_scene import Scene
from tests.servers.child import free_port
from tests.servers.rocketmq import BROKER
from tests.servers.running_store import RunningStore
from tiered.errors import UnavailableError
from tiered.formats import fastjson
from tiered.remoting.command import RequestCode

SLAVE_ID = 7
Message = tuple[str, ...]
"""Queue id, queue offset, the body's CRC and length, unique key."""


@dataclass
class Slave(ClientScene):
    """A broker, `tiered run` as its slave, and clients that dial the real name server."""

    def pinned(
        self, mode: str, group: str, wanted: int, idle_s: int = 30, flags: Sequence[str] = ()
    ) -> Consumer:
        """A consumer whose user says which broker id it asks."""
        output, names = self.output(group), self.broker.name_server_address
        arguments = names, mode, group, "live0", str(SLAVE_ID), str(wanted), str(idle_s), str(output)
        return self.start(output, self.broker.version, "Pinned", *arguments, flags=flags)

    def push(self, group: str, topic: str, wanted: int, pause_ms: int = 0) -> Consumer:
        """An ordinary push consumer that takes so long for a message, in each of its twenty threads."""
        output, job = self.output(group), Job("push", group, wanted, topic, idle_s=300)
        arguments, flags = job.arguments(output), [f"-Dconsume.pause.ms={pause_ms}"]
        names, version = self.broker.name_server_address, self.broker.version
        return self.start(output, version, "Consume", names, *arguments, flags=flags)

    def mqadmin(self, *arguments: str) -> str:
        """One command of mqadmin."""
        return self.tool(self.broker.name_server_address, *arguments)

    def listed(self, name_server: str = "", name: str = BROKER) -> dict[str, str]:
        """Broker id to address, as the (first) name server lists the broker ``name``; empty while it is away, or
        too busy to say."""
        try:
            answer = ask(name_server or self.broker.name_server_address, RequestCode.GET_BROKER_CLUSTER_INFO)
        except UnavailableError:
            return {}
        if not answer.body:
            return {}
        table = fastjson.loads(answer.body)["brokerAddrTable"]
        return dict(table[name]["brokerAddrs"]) if name in table else {}

    def be_listed(self) -> None:
        """Start the sidecar, unless a test before did; each test may run alone."""
        if self.sidecar.process is None:
            self.sidecar.start()
        self.wait_until_listed()

    def wait_until_listed(self, timeout_s: float = 60) -> float:
        """Until the name server lists master and slave; the seconds that took."""
        both = {"0": self.broker.broker_address, str(SLAVE_ID): self.address}
        return until(lambda: self.listed() == both, "not listed", timeout_s)

    def route(self) -> dict[str, Any]:
        """The topic's route as the name server gives it."""
        answer = ask(self.broker.name_server_address, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="live0")
        found: dict[str, Any] = fastjson.loads(answer.body)
        return found

    def committed(self, group: str) -> list[int]:
        """The group's offset of every queue of live0, as the master has it."""
        code = RequestCode.QUERY_CONSUMER_OFFSET
        fields: dict[str, object] = {"consumerGroup": group, "topic": "live0"}
        answers = [ask(self.broker.broker_address, code, b"", **fields, queueId=q) for q in range(QUEUES)]
        return [int(answer.ext_fields.get("offset", "-1")) for answer in answers]

    def commit(self, group: str, queue_id: int, offset: int) -> None:
        """Set the offset of a queue of live0 at the master, for a group made now."""
        self.create_group(group)
        code = RequestCode.UPDATE_CONSUMER_OFFSET
        fields: dict[str, object] = {"consumerGroup": group, "topic": "live0", "commitOffset": offset}
        assert ask(self.broker.broker_address, code, b"", **fields, queueId=queue_id).code == 0

    def configure(self, **settings: object) -> None:
        """Change the broker's configuration while it runs."""
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        assert ask(self.broker.broker_address, RequestCode.UPDATE_BROKER_CONFIG, text.encode()).code == 0

    def create_group(self, group: str, broker_id_when_slow: int = 1) -> None:
        """A group whose slow consumers are sent to the broker of that id."""
        config = {
            "groupName": group,
            "consumeEnable": True,
            "consumeBroadcastEnable": True,
            "consumeFromMinEnable": True,
            "retryQueueNums": 1,
            "retryMaxTimes": 16,
            "brokerId": 0,
            "notifyConsumerIdsChangedEnable": True,
            "whichBrokerWhenConsumeSlowly": broker_id_when_slow,
        }
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        assert ask(self.broker.broker_address, code, orjson.dumps(config)).code == 0

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
                return found["archivePulls"], found["brokerPulls"]
        return 0, 0


def got(consumer: Consumer) -> Counter[Message]:
    """Everything it got, at its end."""
    consumer.finish(120)
    return Counter(tuple(fields[:5]) for fields in consumer.fields())


@contextmanager
def standing(
    version: str,
    directory: Path,
    minio: RunningStore,
    messages: int = 4000,
    topics: int = 2,
    name_servers: int = 1,
    **config: object,
) -> Iterator[Slave]:
    """A broker with ``messages`` in two topics, and a sidecar beside it that is not started yet."""
    address = f"127.0.0.1:{free_port()}"
    config = {**broker_config(), "slaveReadEnable": "true", "registerNameServerPeriod": 10_000, **config}
    settings = {
        "TIERED_SLAVE__BIND": address,
        "TIERED_SLAVE__ADVERTISE": address,
        "TIERED_SLAVE__BROKER_ID": SLAVE_ID,
        "TIERED_OFFLOAD__BATCH_AGE_MS": 500,
    }
    scene = Scene(version, topics, QUEUES, config, settings, name_servers=name_servers)

    def made(sidecar: Sidecar) -> Slave:
        return Slave(sidecar, address, scene, directory)

    with beside_clients(scene, directory, minio, made) as found:
        if messages:
            found.fill(messages)
        yield found
        found.end_children()
        sidecar = found.sidecar
        if sidecar.process is not None and sidecar.process.poll() is None:
            assert sidecar.stop() == 0, sidecar.log.read_text()[-2000:]
