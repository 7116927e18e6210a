"""What live tests share: a broker with a sidecar beside it, Java producers, and the end of every story.

Owns starting and stopping all of it. Does not own what happens in between (the tests) nor the comparison (live.py).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.live import Compared, Sidecar, compare_with_broker, wait_for_line
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import BROKER, RocketMq
from tests.servers.running_store import RunningStore
from tests.servers.store_directory import StoreDirectory

CHECK_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Scene:
    """What to start. ``config`` and ``settings`` are the broker's and the sidecar's; ``endpoint`` a proxy's."""

    version: str = "5.3.3"
    topics: int = 2
    queues: int = 4
    config: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    endpoint: str = ""
    name_servers: int = 1


@contextmanager
def beside_broker(scene: Scene, directory: Path, objects: RunningStore | StoreDirectory) -> Iterator[Sidecar]:
    """A running broker with its topics, and a sidecar that is not started yet. Everything ends with the context."""
    try:
        broker = RocketMq(scene.version, directory / "mq", scene.config, scene.name_servers)
        broker.start()
    except NotInstallableError as error:
        pytest.skip(f"RocketMQ {scene.version} is not available: {error}")
    url = f"{objects.fresh_bucket()}/live"
    sidecar = Sidecar(broker, objects, url, directory, settings=scene.settings, endpoint=scene.endpoint)
    try:
        for topic in range(scene.topics):
            broker.create_topic(f"live{topic}", scene.queues)
        yield sidecar
    finally:
        if sidecar.process is not None and sidecar.process.poll() is None:
            sidecar.kill()
        broker.stop()
        if isinstance(objects, RunningStore):
            objects.server.start_if_stopped()


@dataclass(frozen=True)
class Load:
    """How java/Load.java sends. ``per_second`` 0: as fast as it can. A small pool makes bodies that compress well."""

    messages: int
    body_bytes: int = 256
    threads: int = 4
    per_second: int = 0
    batch: int = 1
    pool_bytes: int = 1 << 20
    warm_up_s: int = 0
    """Sends of this first while are not timed."""


@dataclass(frozen=True)
class Sent:
    """What a producer said at its end; times of sends in microseconds."""

    acked: int
    failed: int
    seconds: float
    sends: int
    p50_us: int
    p99_us: int
    p999_us: int
    max_us: int


_ACKED = ("RATE", "DONE")
"""Lines that begin with the messages acknowledged. A small load ends before its first second, without a rate."""


class Producer:
    """java/Load.java as a child process. Ends when all is sent, or on command."""

    def __init__(self, broker: RocketMq, scene: Scene, load: Load, output: Path) -> None:
        self.output = output
        with output.open("wb") as out:
            self._process = subprocess.Popen(
                broker.java_command(
                    "Load",
                    broker.name_server_address,
                    BROKER,
                    str(scene.topics),
                    str(scene.queues),
                    str(load.messages),
                    str(load.body_bytes),
                    str(load.threads),
                    str(load.per_second),
                    str(load.batch),
                    str(load.pool_bytes),
                    str(load.warm_up_s),
                ),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
            )

    def __enter__(self) -> Producer:
        try:
            wait_for_line(self.output, _ACKED, 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    @property
    def is_running(self) -> bool:
        """Whether it still sends."""
        return self._process.poll() is None

    @property
    def acked(self) -> int:
        """Messages acknowledged up to about a second ago."""
        return int(wait_for_line(self.output, _ACKED, 60).split()[1])

    def p99_us_by_second(self) -> list[int]:
        """The sends' p99 of every second so far."""
        lines = self.output.read_text().splitlines()
        return [int(line.split()[3]) for line in lines if line.startswith("RATE ")]

    def finish(self, timeout_s: float, *, now: bool = False) -> Sent:
        """Wait until all is sent, or stop it ``now``; what became of the sends."""
        if now:
            assert self._process.stdin is not None
            self._process.stdin.close()
        assert self._process.wait(timeout_s) == 0, self.output.read_text()[-1000:]
        words = wait_for_line(self.output, "DONE", 5).split()[1:]
        return Sent(int(words[0]), int(words[1]), float(words[2]), *map(int, words[3:8]))


def drained(sidecar: Sidecar) -> None:
    """Drain and stop the sidecar, collect garbage, verify that all is there and nothing left over."""
    assert sidecar.stop() == 0, sidecar.log.read_text()[-2000:]
    commands = (
        ("gc", sidecar.url, "--apply", "--grace", "0s"),
        ("verify", sidecar.url, "--full", "--strict"),
    )
    for command in commands:
        done = sidecar.tiered(*command, timeout_s=CHECK_TIMEOUT_S)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def finish(sidecar: Sidecar) -> Compared:
    """The end of every story: see ``drained``; then stop the broker and compare."""
    drained(sidecar)
    sidecar.broker.broker.stop(timeout_s=60)
    return compare_with_broker(sidecar)


def cut_tail(store: Path, byte_count: int) -> None:
    """Zero the last ``byte_count`` written bytes of the commitlog and the begin of the record there, as a power loss
    may; the units of the consume queues that point there stay. A record without its last properties alone would be
    valid to a broker, which serves it in LMQs that it no longer names."""
    log = max(path for path in (store / "commitlog").iterdir() if any(path.read_bytes()[:8]))
    data = log.read_bytes().rstrip(b"\0")
    begin = behind = 0
    while behind <= len(data) - byte_count:
        begin, behind = behind, behind + int.from_bytes(data[behind : behind + 4], "big")
    with log.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(len(data) - begin))
