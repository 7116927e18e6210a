"""A broker, `tiered run` with a façade beside it, and Java clients that dial the façade: what its tests share.

Owns starting and stopping them, what they got, and making the broker delete. Does not own what must come of it.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, beside_broker
from tests.servers.child import free_port
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import MQADMIN, RocketMq, java_classes, java_command, run_java
from tests.servers.running_store import RunningStore
from tiered.catalog.protocol import load
from tiered.remoting.client import BrokerClient, RequestCode

QUEUES = 4
DELETE_EXPIRED_COMMITLOG = 329
Line = tuple[int, int]
"""Queue id and queue offset."""


@dataclass(frozen=True)
class Job:
    """One consumer of java/Consume.java. It gives each message back ``failures`` times."""

    mode: str
    group: str
    wanted: int
    topic: str = "live0"
    expression: str = "*"
    idle_s: int = 30
    failures: int = 0
    times_max: int = 16

    def arguments(self, output: Path) -> list[str]:
        """As Consume.java takes them, after the name server."""
        return [
            self.mode, self.group, self.topic, self.expression, str(self.wanted), str(self.idle_s), str(output),
            str(self.failures), str(self.times_max),
        ]  # fmt: skip


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

    def wait_for_all(self, wanted: set[Line], timeout_s: float = 90) -> None:
        """Until it has got everything ``wanted``, however often."""
        deadline_s = time.monotonic() + timeout_s
        while missing := wanted - set(self.lines()):
            assert time.monotonic() < deadline_s, f"{len(missing)} are missing: {sorted(missing)[:5]}"
            assert self.child.poll() is None, f"ended without {len(missing)}"
            time.sleep(0.5)

    def finish(self, timeout_s: float = 150) -> list[Line]:
        """Wait for its end; everything it got."""
        assert self.child.wait(timeout_s) == 0
        return self.lines()

    def kill(self) -> None:
        """End it at once."""
        self.child.kill()
        self.child.wait()


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

    @property
    def settings_file(self) -> Path:
        """The sidecar's, empty at first."""
        return self.directory / "tiered.toml"

    def produce(self, messages: int, per_second: int = 0, warm_up_s: int = 0) -> Producer:
        """Sends straight to the broker, round robin over all queues of the topics; a context."""
        load = Load(messages, per_second=per_second, body_bytes=1000, warm_up_s=warm_up_s)
        return Producer(self.broker, self.scene, load, self.directory / "producer.out")

    def fill(self, messages: int, per_second: int = 500) -> None:
        """Send about so many: a broker that has only just begun, or is busy, refuses what comes too fast."""
        with self.produce(messages, per_second) as producer:
            assert producer.finish(120).acked > 0.8 * messages

    def consume(
        self, mode: str, group: str, wanted: int, *, topic: str = "live0", idle_s: int = 30, failures: int = 0,
        times_max: int = 16, version: str = "5.3.3", expression: str = "*", real: bool = False,
        flags: Sequence[str] = (),
    ) -> Consumer:  # fmt: skip
        """Start a Java consumer behind the façade, or by the ``real`` name server."""
        output = self.directory / f"{group}-{len(self.children)}.txt"
        job = Job(mode, group, wanted, topic, expression, idle_s, failures, times_max)
        command = java_command(
            version, self.directory, "Consume", self._dialled(real), *job.arguments(output), flags=flags
        )
        with (self.directory / f"{group}.out").open("ab") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log)
        self.children.append(child)
        return Consumer(child, output)

    def consume_all(
        self, version: str, jobs: Sequence[Job], *, flags: Sequence[str] = (), real: bool = False
    ) -> list[list[list[str]]]:
        """Run consumers at once in one process until each has what it wants: the fields of what each got."""
        outputs = [self.directory / f"{job.group}.txt" for job in jobs]
        path = self.directory / "jobs.txt"
        rows = ["\t".join(job.arguments(output)) for job, output in zip(jobs, outputs, strict=True)]
        path.write_text("\n".join(rows) + "\n", "utf-8")
        run_java(
            version, self.directory, "Consume", self._dialled(real), f"@{path}", flags=("-Xmx1g", *flags),
            timeout_s=200,
        )  # fmt: skip
        return [[line.split() for line in output.read_text("utf-8").splitlines()] for output in outputs]

    def mqadmin(self, *arguments: str, real: bool = False) -> str:
        """One command of mqadmin, through the façade or the real name server."""
        return run_java(self.broker.version, self.directory, MQADMIN, *arguments, "-n", self._dialled(real))

    def tools(self, commands: Sequence[str], *, real: bool = False, version: str = "5.3.3") -> list[str]:
        """What mqadmin prints of each command, all in one process."""
        path = self.directory / "commands.txt"
        rows = [[*command.split(" "), "-n", self._dialled(real)] for command in commands]
        path.write_text("".join("\t".join(row) + "\n" for row in rows), "utf-8")
        printed = run_java(version, self.directory, "Tools", str(path))
        return [part.partition("\n")[2] for part in printed.split("=== ")[1:]]

    def wait_until_serving(self, times: int = 1) -> None:
        """The archive is open for clients, for the ``times``-th time."""
        self.sidecar.wait_until_following(60)
        wait_for(self.sidecar.log, '"clients read the archive"', times)

    def end_children(self) -> None:
        """Kill what still consumes."""
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait()

    def _dialled(self, real: bool) -> str:
        return self.broker.name_server_address if real else self.address


def wait_for(log: Path, text: str, times: int = 1, timeout_s: float = 60) -> None:
    """Until ``log`` has ``text`` so many times."""
    deadline_s = time.monotonic() + timeout_s
    while log.read_text("utf-8").count(text) < times:
        assert time.monotonic() < deadline_s, f"no {text} in {log.read_text()[-2000:]}"
        time.sleep(0.1)


def need_clients(*versions: str) -> None:
    """Skip when Java clients cannot be had."""
    try:
        for version in versions:
            java_classes(version)
    except NotInstallableError as error:
        pytest.skip(f"Java clients: {error}")


@contextmanager
def beside_facade(
    directory: Path, minio: RunningStore, config: Mapping[str, object], settings: Mapping[str, object],
    *, topics: int = 2,
) -> Iterator[Facade]:  # fmt: skip
    """A broker that deletes when told to, and a façade beside it, being started."""
    address = f"127.0.0.1:{free_port()}"
    defaults = {
        "mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 20 * 200,
        "deleteWhen": f"{(time.localtime().tm_hour + 12) % 24:02d}",
    }  # fmt: skip
    environment = {
        "TIERED_SERVE__BIND": address, "TIERED_SERVE__ADVERTISE": address, "TIERED_OFFLOAD__BATCH_AGE_MS": 500,
    }  # fmt: skip
    scene = Scene(
        topics=topics, queues=QUEUES, config={**defaults, **config}, settings={**environment, **settings}
    )
    with beside_broker(scene, directory, minio) as sidecar:
        found = Facade(sidecar, address, scene, directory)
        try:
            found.settings_file.write_text("")
            sidecar.arguments = ("--config", str(found.settings_file))
            sidecar.start()
            yield found
        finally:
            found.end_children()
            if sidecar.process is not None and sidecar.process.poll() is None:
                sidecar.kill()
            sidecar.broker.broker.kill()  # nobody looks at its files any more


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


def begin_deleting(facade: Facade, archived_phys: int) -> None:
    """Have the broker begin to delete the commitlog files that are full and below ``archived_phys``."""
    long_ago_s = time.time() - 100 * 3600
    files = sorted((facade.broker.store / "commitlog").iterdir())
    for file, following in itertools.pairwise(files[:-1]):  # the last one is not begun yet
        if int(following.name) <= archived_phys:
            os.utime(file, (long_ago_s, long_ago_s))
    client = BrokerClient(facade.broker.broker_address, 5)
    client.call(DELETE_EXPIRED_COMMITLOG, {})
    client.close()


def delete_old_files(facade: Facade, topic: str = "live0", *, wait: bool = True) -> int:
    """Have the broker delete all commitlog files that are full; the smallest first offset it has left of ``topic``.
    ``wait`` until they are archived, or delete what is now."""
    if wait:
        facade.sidecar.wait_until_archived(60)
    deadline_s = time.monotonic() + 90
    before = min(broker_range(facade, topic, queue)[0] for queue in range(QUEUES))
    begin_deleting(facade, load(facade.sidecar.open_archive()).cursor.phys)
    while True:
        found = min(broker_range(facade, topic, queue)[0] for queue in range(QUEUES))
        if found > before:
            return found
        assert time.monotonic() < deadline_s, "the broker deletes nothing"
        time.sleep(1)


def everything(ends: Sequence[int]) -> set[Line]:
    """All lines of queues that end there."""
    return {(queue, offset) for queue, end in enumerate(ends) for offset in range(end)}


def all_there_is(facade: Facade, topic: str) -> set[Line]:
    """Every line of ``topic`` from 0 on to what the broker has now."""
    return everything([broker_range(facade, topic, queue)[1] for queue in range(QUEUES)])
