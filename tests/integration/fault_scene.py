"""A broker with a sidecar, MinIO behind a proxy, and Prometheus where it is installed: what tests of a fault look at.

Owns moving stores, counting objects, and waiting until every surface names the fault. Does not own the faults.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.client_scene import DELETE_EXPIRED_COMMITLOG, ask, until
from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene
from tests.integration.operator_view import OperatorView, Seen, Signs
from tests.integration.troubles import Case, case
from tests.servers.install import NotInstallableError
from tests.servers.prometheus import EVERY_S, Prometheus
from tests.servers.rocketmq import RocketMq
from tests.servers.running_store import RunningStore
from tiered.errors import UnavailableError
from tiered.remoting.client import BrokerClient

LIMIT_S = 30
"""Within which every surface names a fault."""
WATCHED_S = 60
SMALL_FILES = {
    "mappedFileSizeCommitLog": 1 << 20,
    "mappedFileSizeConsumeQueue": 20 * 200,
    "brokerIP2": "127.0.0.1",
    "deleteWhen": f"{(time.localtime().tm_hour + 12) % 24:02d}",
}
"""Configuration of a broker that deletes on command, and replicates on this host."""


@dataclass
class Watched:
    """One sidecar and what an operator sees of it. ``prometheus``: None if it is not installed."""

    name: str
    case: Case
    prometheus: Prometheus | None

    @property
    def sidecar(self) -> Sidecar:
        return self.case.sidecar

    def begin(self) -> OperatorView:
        """Look from now on."""
        return OperatorView(self.case.admin, self.sidecar.log)

    def after(self, make: Callable[[], object]) -> OperatorView:
        """Look from the end of ``make`` on, at the log from its begin."""
        view = self.begin()
        make()
        view.began_s = time.monotonic()
        return view

    def named(self, view: OperatorView, signs: Signs, ready: int, alert: str) -> Seen:
        """Wait until every surface names it, within LIMIT_S of ``view``'s begin, with the code of /ready; and the alert
        after the next scrapes."""
        is_ready = f"{ready} "
        seen = view.until_named(signs, WATCHED_S, lambda: view.ready().startswith(is_ready))
        assert not seen.missing(), f"{seen.missing()}: {seen.last}"
        assert max(seen.after_s.values()) <= LIMIT_S, seen.after_s
        assert seen.last["ready"].startswith(is_ready), seen.last["ready"]
        if alert:
            self.await_alert(alert)
        times = {surface: f"{after_s:.1f} s" for surface, after_s in seen.after_s.items()}
        alerted = f"{alert} {time.monotonic() - view.began_s:.1f} s"
        print(f"{self.name}: {times}, {alerted}: {seen.said['status']}", flush=True)
        return seen

    def await_alert(self, alert: str) -> None:
        """Wait until the rule ``alert`` holds; nothing without Prometheus."""
        if (prometheus := self.prometheus) is not None:
            until(lambda: prometheus.alert(alert, self.name) is not None, alert, 5 * EVERY_S)

    def stored(self) -> tuple[int, int]:
        """Data objects of the archive, and their bytes."""
        sizes = list(self.objects().values())
        return len(sizes), sum(sizes)

    def objects(self) -> Mapping[str, int]:
        """Keys of data objects in the bucket, with their sizes."""
        client = self.case.minio.client()
        bucket = self.sidecar.url.split("/")[2]
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        found = {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", ())}
        client.close()
        return {key: size for key, size in found.items() if "/data/" in key or "/sets/" in key}

    @contextmanager
    def without(self, key: str) -> Iterator[None]:
        """An object is missing in the bucket."""
        client, bucket = self.case.minio.client(), self.sidecar.url.split("/")[2]
        body = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        client.delete_object(Bucket=bucket, Key=key)
        yield
        client.put_object(Bucket=bucket, Key=key, Body=body)
        client.close()

    def send(self, messages: int, broker: RocketMq | None = None) -> int:
        """Send to ``broker``, by default the sidecar's own; how many were acknowledged."""
        output = self.case.directory / f"producer{time.monotonic_ns()}.out"
        with Producer(
            broker or self.sidecar.broker, Scene(topics=1), Load(messages, 500, 2), output
        ) as producer:
            return producer.finish(120).acked

    def archive(self, messages: int) -> int:
        """Start following, and archive so many; how many there are."""
        self.sidecar.start()
        self.sidecar.wait_until_following(60)
        sent = self.send(messages)
        self.sidecar.wait_until_archived(60)
        return sent


@dataclass
class FaultScene:
    """Brokers and sidecars under ``directory``. Everything ends with the context of ``fault_scene``."""

    version: str
    directory: Path
    minio: RunningStore
    prometheus: Prometheus | None
    opened: ExitStack

    def broker(self, name: str, name_servers: int = 1) -> RocketMq:
        """A running broker; all have the same names."""
        broker = RocketMq(self.version, self.directory / name, SMALL_FILES, name_servers)
        broker.start()
        self.opened.callback(broker.stop)
        broker.create_topic("live0", 4)
        return broker

    def slave(self, name: str, master: RocketMq) -> RocketMq:
        """A running slave, which has the whole log of its master."""
        role = {"brokerRole": "SLAVE", "brokerId": 1, "namesrvAddr": master.name_server_address}
        slave = RocketMq(self.version, self.directory / name, SMALL_FILES | role)
        slave.name_server_address = master.name_server_address
        slave.broker.start()
        self.opened.callback(slave.broker.stop)
        until(lambda: log_end(slave) == log_end(master) > 0, "the slave lags", 90)
        return slave

    def watch(self, name: str, broker: RocketMq, **settings: object) -> Watched:
        """A sidecar beside ``broker``, not started."""
        found = self.opened.enter_context(case(self.directory / name, broker, self.minio))
        found.set(**settings)
        if self.prometheus is not None:
            self.prometheus.scrape(name, found.admin.removeprefix("http://"))
        return Watched(name, found, self.prometheus)


@contextmanager
def fault_scene(version: str, directory: Path, minio: RunningStore) -> Iterator[FaultScene]:
    """A scene with brokers of ``version``."""
    with ExitStack() as opened:
        try:
            prometheus = Prometheus(directory / "prometheus")
        except NotInstallableError:
            prometheus = None
        else:
            prometheus.server.start()
            opened.callback(prometheus.server.stop)
        try:
            yield FaultScene(version, directory, minio, prometheus, opened)
        except NotInstallableError as error:
            pytest.skip(f"RocketMQ {version} is not available: {error}")


def log_end(broker: RocketMq) -> int:
    """The end of its commitlog that a broker reports; 0 while it has none, as a slave at first."""
    client = BrokerClient(broker.broker_address, 5)
    try:
        return int(client.runtime_info()["commitLogMaxOffset"])
    except UnavailableError:
        return 0
    finally:
        client.close()


def delete_old_files(broker: RocketMq, archived_phys: int) -> None:
    """Have the broker delete the commitlog files that are full, some of them above ``archived_phys``."""
    log, long_ago_s = broker.store / "commitlog", time.time() - 100 * 3600
    for file in sorted(log.iterdir())[:-2]:
        os.utime(file, (long_ago_s, long_ago_s))
    ask(broker.broker_address, DELETE_EXPIRED_COMMITLOG)
    until(lambda: min(int(path.name) for path in log.iterdir()) > archived_phys, "nothing is deleted", 120)


def swap_store(broker: RocketMq, aside: str, back: str | None = None) -> None:
    """Kill the broker and put its store to the name ``aside``; in its place comes the one put to ``back`` before, or an
    empty directory. The broker is not started."""
    broker.broker.kill()
    store = broker.store
    store.rename(store.with_name(aside))
    if back is None:
        store.mkdir()
    else:
        store.with_name(back).rename(store)
