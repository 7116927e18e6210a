"""A living broker, retired ones, nodes of `tiered mount` over an object store, and Java clients at work."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rocketmq_tiered.process.mount_report import MountRow, mount_rows
from rocketmq_tiered.server.mount.node_lease import MountRecord
from tests.deploy.bucket_policies import for_minio, policy_of
from tests.servers.child import free_port_block
from tests.servers.go_client import go_consumer
from tests.servers.rocketmq import CLUSTER, RocketMq, java_command
from tests.servers.rocketmq_proxy import RocketMqProxy
from tests.servers.running_store import RunningStore
from tiered.formats import fastjson
from tiered.object_store.interface import S3Credentials
from tiered.object_store.open_store import open_store
from tiered.remoting.client import BrokerClient

ROOT = Path(__file__).parents[2]
QUEUES = 4
PREFIX = "archives"
_QUICK = """
import sys
from rocketmq_tiered.cli import main
from rocketmq_tiered.process import detach
detach.ROUTE_POLL_S, detach.QUIET_S = 4, 3
sys.exit(main(sys.argv[1:]))
"""
"""`tiered`, with less time to wait in detach: these clients read routes every second."""
Line = tuple[str, ...]
"""Queue id, queue offset, the body's CRC and length, unique key."""


@dataclass
class Node:
    """One `tiered mount`."""

    process: subprocess.Popen[bytes]
    log: Path
    name: str

    def drain(self) -> None:
        """SIGTERM: it gives its brokers away, and serves reads for 30 s more."""
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """Drain it and wait for its end."""
        self.drain()
        return self.process.wait(120)

    def pause(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill it, paused or not."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@dataclass
class MountScene:
    """Brokers by name; the first is never retired."""

    directory: Path
    objects: RunningStore
    url: str
    brokers: dict[str, RocketMq]
    names: RocketMq
    """Only its name server runs."""
    version: str
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    node_of: dict[str, str] = field(default_factory=dict)
    """As last listed, by broker."""
    proxy: RocketMqProxy | None = None
    node_keys: S3Credentials | None = None
    """Of nodes: the policy of deploy/s3 for a server; None: those of other commands."""
    settings: dict[str, str] = field(default_factory=dict)
    """Of our processes, as environment."""

    @property
    def name_server(self) -> str:
        """Its address."""
        return self.names.name_server_address

    # -- commands ---------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Of our processes."""
        store = self.objects.environment()
        return {**os.environ, **store, "PYTHONPATH": str(ROOT), "TIERED_ADMIN__PORT": "0", **self.settings}

    def tiered(self, *arguments: str, code: int = 0) -> str:
        """What a command prints."""
        command = [sys.executable, "-m", "rocketmq_tiered.cli", *arguments]
        done = subprocess.run(
            command, env=self.environment(), capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def place(self, broker: str) -> list[str]:
        """Arguments of `tiered detach` for a broker."""
        found = self.brokers[broker]
        return [
            "--store",
            str(found.store),
            "--url",
            self.url,
            "--broker-conf",
            str(found.broker_conf),
            "--broker",
            broker,
        ]

    def detach(self, broker: str, *more: str) -> subprocess.Popen[bytes]:
        """`tiered detach` as a child that waits for the broker's end; its output is ``detach-BROKER.txt``."""
        command = [sys.executable, "-c", _QUICK, "detach", *self.place(broker), *more]
        with (self.directory / f"detach-{broker}.txt").open("wb") as out:
            child = subprocess.Popen(command, env=self.environment(), stdout=out, stderr=out)
        self.children.append(child)
        return child

    def retire(self, *brokers: str) -> None:
        """Detach brokers, and stop each when it is closed."""
        running = {broker: self.detach(broker) for broker in brokers}
        for broker, child in running.items():
            said = self.directory / f"detach-{broker}.txt"
            until(lambda: b"stop the broker now" in said.read_bytes(), f"{broker} is not closed", 400)  # noqa: B023
            self.brokers[broker].broker.stop(timeout_s=60)
            assert child.wait(120) == 0, said.read_text()

    def mount(self, name: str) -> Node:
        """Start a node."""
        log = self.directory / f"node-{name}.log"
        command = [
            sys.executable,
            "-m",
            "rocketmq_tiered.cli",
            "mount",
            self.url,
            "--name-servers",
            self.name_server,
            "--node",
            name,
            "--advertise",
            "127.0.0.1",
            "--set",
            "mount.bind=127.0.0.1",
            "--set",
            f"mount.first_port={free_port_block(6)}",
        ]
        environment = self.environment()
        if (keys := self.node_keys) is not None:
            environment |= {
                "AWS_ACCESS_KEY_ID": keys.access_key,
                "AWS_SECRET_ACCESS_KEY": keys.secret_key,
                "AWS_SESSION_TOKEN": keys.session_token or "",
            }
        with log.open("ab") as out:
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        self.children.append(process)
        self.nodes[name] = node = Node(process, log, name)
        return node

    # -- what there is ----------------------------------------------------------------------------------------

    def _rows(self) -> list[MountRow]:
        store = open_store(self.url, self.objects.options())
        try:
            return mount_rows(store)
        finally:
            store.close()

    def states(self) -> dict[str, str]:
        """What `mount ls` says of each broker."""
        return {row.record.broker: row.state for row in self._rows()}

    def mounted(self) -> dict[str, MountRecord]:
        """What `mount ls` lists as served, by broker."""
        rows = [row for row in self._rows() if row.state == "served"]
        self.node_of = {row.record.broker: row.node for row in rows}
        return {row.record.broker: row.record for row in rows}

    def listed(self) -> dict[str, str]:
        """Address of id 0 by broker, as the name server lists it."""
        client = BrokerClient(self.name_server, 5.0)
        try:
            table = fastjson.loads(client.call(106).body or b"{}").get("brokerAddrTable", {})
        finally:
            client.close()
        return {name: data["brokerAddrs"].get("0", "") for name, data in table.items()}

    def holders(self) -> dict[str, str]:
        """Node by broker."""
        return {broker: self.node_of[broker] for broker in self.mounted()}

    def consumer(
        self, mode: str, group: str, topic: str, flags: Sequence[str] = (), failures: int = 0
    ) -> Path:
        """Start a Java consumer, which gives each message back ``failures`` times; returns its output."""
        output = self.directory / f"{group}.txt"
        arguments = self.name_server, mode, group, topic, "*", "100000000", "400", str(output), str(failures)
        command = java_command(self.version, self.directory, "Consume", *arguments, flags=flags)
        with output.with_suffix(".out").open("ab") as log:
            self.children.append(subprocess.Popen(command, stdout=log, stderr=log))
        return output

    def go_consumer(self, group: str, topic: str, pause_ms: int) -> Path:
        """Start a push consumer of the Go client; returns its output."""
        output = self.directory / f"{group}.txt"
        command = [
            str(go_consumer()),
            "push",
            self.name_server,
            group,
            topic,
            "100000000",
            "400",
            str(output),
        ]
        with output.with_suffix(".out").open("ab") as log:
            environment = {**os.environ, "CONSUME_PAUSE_MS": str(pause_ms)}
            self.children.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        return output

    def grpc_consumer(self, group: str, topic: str, pause_ms: int) -> Path:
        """Start a simple consumer of the gRPC client, and a proxy between it and the brokers; returns its output."""
        output = self.directory / f"{group}.txt"
        self.proxy = RocketMqProxy(self.directory / "proxy", self.name_server, CLUSTER)
        self.proxy.start()
        arguments = group, topic, "100000000", "400", str(output), "20", "*", "0"
        command = self.proxy.command(
            "GrpcConsume", *arguments, flags=[f"-Dconsume.pause.ms={pause_ms}", "-Dconsume.threads=8"]
        )
        with output.with_suffix(".out").open("ab") as log:
            self.children.append(subprocess.Popen(command, stdout=log, stderr=log))
        return output

    def fill(self, broker: str, messages: int) -> None:
        """Send messages to a broker, round robin over the queues of live0 and live1."""
        found = self.brokers[broker]
        arguments = self.name_server, broker, "2", str(QUEUES), str(messages), "200", "2", "0"
        text = found.run_java("Produce", *arguments)
        assert f"DONE {messages} " in text, text[-300:]

    def producer(
        self, broker: str, messages: int, per_second: int, topics: int = 2
    ) -> subprocess.Popen[bytes]:
        """Start sending to a broker, or ("*") to those of the routes; the last line of its output counts what was sent
        and what failed."""
        counts = map(str, (topics, QUEUES, messages, 200, 1, per_second))
        command = java_command(self.version, self.directory, "Produce", self.name_server, broker, *counts)
        with (self.directory / f"producer{len(self.children)}.err").open("wb") as errors:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        self.children.append(child)
        return child

    def end(self) -> None:
        """End everything."""
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait()
        if self.proxy is not None:
            self.proxy.server.kill()


@contextmanager
def mounting(
    version: str, directory: Path, objects: RunningStore, names: Sequence[str], name_server: str = ""
) -> Iterator[MountScene]:
    """Brokers ``names`` at one name server, of version ``name_server``, with topics live0 and live1."""
    brokers: dict[str, RocketMq] = {}
    server = RocketMq(name_server or version, directory / "names")
    try:
        server.name_server.start()
        for name in names:
            config = {"brokerName": name, "namesrvAddr": server.name_server_address}
            brokers[name] = RocketMq(version, directory / name, config)
            brokers[name].broker.start()
        for broker in brokers.values():
            for topic in ("live0", "live1"):
                place = server.name_server_address, broker.broker_address
                broker.run_java("Admin", *place, "create", CLUSTER, topic, str(QUEUES))
        bucket = objects.fresh_bucket()
        scene = MountScene(directory, objects, f"{bucket}/{PREFIX}", brokers, server, version)
        policy = for_minio(policy_of("server", bucket.removeprefix("s3://"), PREFIX), has_tls=False)
        scene.node_keys = objects.account(policy)
        try:
            yield scene
        finally:
            scene.end()
    finally:
        for broker in brokers.values():
            broker.broker.kill()
        server.name_server.stop()


def lines(output: Path) -> list[Line]:
    """Complete lines of a consumer, in order of arrival."""
    text = output.read_text() if output.exists() else ""
    return [tuple(line.split()) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def consumed(output: Path) -> Counter[str]:
    """Unique keys of what a consumer has consumed successfully, by what its lines look like: Java's, Go's, gRPC's."""
    found = lines(output)
    if found and len(found[0]) == 7:
        return Counter(map(_unique_key, found))
    if found and len(found[0]) == 6:
        return Counter(line[2] for line in found if line[5] == "ok")
    return Counter(line[4] for line in found if line[8] == "ok")


def _unique_key(line: Line) -> str:
    return dict(pair.split("=", 1) for pair in bytes.fromhex(line[6]).decode().split("\0"))["UNIQ_KEY"]


def until(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> float:
    """Wait; returns the seconds that took."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < timeout_s, what
        time.sleep(0.2)
    return time.monotonic() - began_s
