"""A broker, `tiered run` beside it, and Java clients of both: what tests of the tiered proxy and of the slave share.

Owns starting clients and ending them, what they got, and making the broker delete. Does not own which address they dial
(proxy_scene.py, slave_scene.py) nor what must come of it.
"""

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, beside_broker
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import MQADMIN, RocketMq, java_classes, java_command, run_java
from tests.servers.running_store import RunningStore
from tests.servers.store_directory import StoreDirectory
from tiered.catalog.catalog_reader import load
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RemotingCommand, RequestCode

QUEUES = 4
DELETE_EXPIRED_COMMITLOG = 329
Line = tuple[int, int]
"""Queue id and queue offset."""


def broker_config() -> dict[str, object]:
    """Of a broker with small files, that deletes on command and not by the hour."""
    return {
        "mappedFileSizeCommitLog": 1 << 20,
        "mappedFileSizeConsumeQueue": 20 * 200,
        "deleteWhen": f"{(time.localtime().tm_hour + 12) % 24:02d}",
    }


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
            self.mode,
            self.group,
            self.topic,
            self.expression,
            str(self.wanted),
            str(self.idle_s),
            str(output),
            str(self.failures),
            str(self.times_max),
        ]


@dataclass
class Consumer:
    """A Java consumer as a child process."""

    child: subprocess.Popen[bytes]
    output: Path

    def fields(self) -> list[list[str]]:
        """What it has got so far, in order of arrival: queue id, queue offset, body's CRC and length, unique key, and
        what else Consume.java says."""
        text = self.output.read_text("utf-8") if self.output.exists() else ""
        return [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def lines(self) -> list[Line]:
        """The places of what it has got."""
        return [(int(fields[0]), int(fields[1])) for fields in self.fields()]

    def wait_for(self, count: int, timeout_s: float = 90) -> None:
        """Until it has got ``count`` messages."""
        self._wait(lambda: max(0, count - len(self.lines())), timeout_s)

    def wait_for_all(self, wanted: set[Line], timeout_s: float = 90) -> None:
        """Until it has got everything ``wanted``, however often."""
        self._wait(lambda: len(wanted - set(self.lines())), timeout_s)

    def _wait(self, missing: Callable[[], int], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while count := missing():
            assert time.monotonic() < deadline_s, f"{count} did not come"
            assert self.child.poll() is None, f"ended without {count}"
            time.sleep(0.2)

    def finish(self, timeout_s: float = 150) -> list[Line]:
        """Wait for its end; everything it got."""
        assert self.child.wait(timeout_s) == 0
        return self.lines()

    def kill(self) -> None:
        """End it at once."""
        self.child.kill()
        self.child.wait()


FILLS_MAX = 5
"""Times that `ClientScene.fill` sends what is left."""


@dataclass
class ClientScene:
    """``address``: where the sidecar serves."""

    sidecar: Sidecar
    address: str
    scene: Scene
    directory: Path
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def broker(self) -> RocketMq:
        return self.sidecar.broker

    def produce(self, messages: int, per_second: int = 0, warm_up_s: int = 0) -> Producer:
        """Sends straight to the broker, round robin over all queues of the topics; a context."""
        load = Load(messages, per_second=per_second, body_bytes=1000, warm_up_s=warm_up_s)
        return Producer(self.broker, self.scene, load, self.directory / f"producer{time.monotonic_ns()}.out")

    def fill(self, messages: int, per_second: int = 500) -> None:
        """Send about so many: a broker that has only just begun, or is busy, refuses what comes too fast. A busy one
        for seconds: the rest is sent again."""
        acked = 0
        for _ in range(FILLS_MAX):
            with self.produce(messages - acked, per_second) as producer:
                acked += producer.finish(120).acked
            if acked > 0.8 * messages:
                return
        raise AssertionError(f"{acked} of {messages} taken")

    def output(self, group: str) -> Path:
        """Where the next consumer writes what it gets."""
        return self.directory / f"{group}-{len(self.children)}.txt"

    def start(
        self, output: Path, version: str, program: str, *arguments: str, flags: Sequence[str] = ()
    ) -> Consumer:
        """Start a Java consumer that writes to ``output``."""
        return self.launch(output, java_command(version, self.directory, program, *arguments, flags=flags))

    def launch(self, output: Path, command: Sequence[str]) -> Consumer:
        """Start a consumer that writes to ``output``."""
        with output.with_suffix(".out").open("ab") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log)
        self.children.append(child)
        return Consumer(child, output)

    def tool(self, name_server: str, *arguments: str) -> str:
        """What one command of mqadmin prints."""
        logging = self.directory / "conf" / "logback_tools.xml"
        logging.parent.mkdir(exist_ok=True)
        logging.write_text("<configuration/>")  # 4.9's does nothing without it
        return run_java(self.broker.version, self.directory, MQADMIN, *arguments, "-n", name_server)

    def end_children(self) -> None:
        """Kill what still consumes."""
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait()


S = TypeVar("S", bound=ClientScene)


@contextmanager
def beside_clients(
    scene: Scene, directory: Path, objects: RunningStore | StoreDirectory, made: Callable[[Sidecar], S]
) -> Iterator[S]:
    """A running broker and what ``made`` puts beside it, the sidecar not started yet. Everything ends with it."""
    with beside_broker(scene, directory, objects) as sidecar:
        found = made(sidecar)
        try:
            yield found
        finally:
            found.end_children()
            if sidecar.process is not None and sidecar.process.poll() is None:
                sidecar.kill()
            sidecar.broker.broker.kill()  # its files are no longer read


def need_clients(*versions: str) -> None:
    """Skip when Java clients cannot be had."""
    try:
        for version in versions:
            java_classes(version)
    except NotInstallableError as error:
        pytest.skip(f"Java clients: {error}")


def until(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> float:
    """Wait for ``condition``; the seconds that took."""
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begun_s < timeout_s, what
        time.sleep(0.1)
    return time.monotonic() - begun_s


def wait_for(log: Path, text: str, times: int = 1) -> None:
    """Until ``log`` has ``text`` so many times."""
    until(lambda: log.read_text("utf-8").count(text) >= times, f"no {text} in {log}")


def ask(address: str, code: int, body: bytes = b"", **fields: object) -> RemotingCommand:
    """One request to a server, as a tool would send it."""
    client = BrokerClient(address, 5)
    try:
        return client.call(code, {name: str(value) for name, value in fields.items()}, body)
    finally:
        client.close()


def broker_range(scene: ClientScene, topic: str, queue_id: int) -> tuple[int, int]:
    """[minimum, maximum) of a queue, as the broker itself says."""
    first, end = (
        int(ask(scene.broker.broker_address, code, topic=topic, queueId=queue_id).ext_fields["offset"])
        for code in (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
    )
    return first, end


def begins_and_ends(scene: ClientScene, topic: str) -> tuple[list[int], list[int]]:
    """Minima and maxima of all queues of ``topic``."""
    ranges = [broker_range(scene, topic, queue) for queue in range(QUEUES)]
    return [first for first, _ in ranges], [end for _, end in ranges]


def begin_deleting(scene: ClientScene, archived_phys: int) -> None:
    """Have the broker begin to delete the commitlog files that are full and below ``archived_phys``."""
    long_ago_s = time.time() - 100 * 3600
    files = sorted((scene.broker.store / "commitlog").iterdir())
    for file, following in itertools.pairwise(files[:-1]):  # the last one is not begun yet
        if int(following.name) <= archived_phys:
            os.utime(file, (long_ago_s, long_ago_s))
    ask(scene.broker.broker_address, DELETE_EXPIRED_COMMITLOG)


def delete_old_files(scene: ClientScene, topic: str = "live0", *, wait: bool = True) -> int:
    """Have the broker delete all commitlog files that are full; the smallest first offset it has left of ``topic``.
    ``wait`` until they are archived, or delete what is now."""
    if wait:
        scene.sidecar.wait_until_archived(60)
    before = min(begins_and_ends(scene, topic)[0])
    begin_deleting(scene, load(scene.sidecar.open_archive()).cursor.phys)
    until(lambda: min(begins_and_ends(scene, topic)[0]) > before, "the broker deletes nothing", 90)
    return min(begins_and_ends(scene, topic)[0])


def everything(ends: Sequence[int], begins: Sequence[int] = (0,) * QUEUES) -> set[Line]:
    """All lines of queues from their begins to their ends."""
    ranges = enumerate(zip(begins, ends, strict=False))
    return {(queue, offset) for queue, (begin, end) in ranges for offset in range(begin, end)}


def all_there_is(scene: ClientScene, topic: str) -> set[Line]:
    """Every line of ``topic`` from 0 on to what the broker has now."""
    return everything(begins_and_ends(scene, topic)[1])
