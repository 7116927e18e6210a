"""A broker, an object store and a `tiered run` process side by side, and the comparison of archive and broker."""

import json
import mmap
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.archive.queue_reader import Batch, QueueReader
from tests.broker_store.opened_store import consume_queues_of
from tests.servers.child import ChildServer
from tests.servers.rocketmq import BROKER, CLUSTER, RocketMq
from tests.servers.running_store import RunningStore
from tests.servers.store_directory import StoreDirectory
from tiered.archive.segment_reader import SegmentCache
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.conf import read_broker_conf
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.errors import NotFoundError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import TopicFilter
from tiered.model.tables import QUEUE_SUPERSEDED
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.remoting.client import BrokerClient

TIERED = [sys.executable, "-m", "rocketmq_tiered.cli"]


@dataclass
class Sidecar:
    """`tiered run` as a child process."""

    broker: RocketMq
    objects: RunningStore | StoreDirectory
    url: str
    directory: Path
    arguments: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    """Environment variables of settings, ``TIERED_OFFLOAD__BATCH_BYTES`` and the like."""
    endpoint: str = ""
    """Where `tiered run` finds the store, when it is not the server itself but a proxy before it."""
    command: Sequence[str] = tuple(TIERED)
    """What `run` is a verb of."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def log(self) -> Path:
        """Its JSON log."""
        return self.directory / "tiered.log"

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self.process is not None
        return self.process.pid

    @property
    def object_server(self) -> ChildServer:
        """The object store's process."""
        assert isinstance(self.objects, RunningStore)
        return self.objects.server

    def environment(self) -> dict[str, str]:
        """What every `tiered` command needs to reach the store."""
        return {**os.environ, **self.objects.environment(), "TIERED_ADMIN__PORT": "0"}

    def _run_environment(self) -> dict[str, str]:
        settings = {name: str(value) for name, value in self.settings.items()}
        if self.endpoint:
            settings["TIERED_OBJECT_STORE__ENDPOINT_URL"] = self.endpoint
        return {**self.environment(), **settings}

    def start(self) -> None:
        """Start following."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *self.command,
                    "run",
                    "--store",
                    str(self.broker.store),
                    "--url",
                    self.url,
                    "--state-dir",
                    str(self.directory / "state"),
                    "--broker-conf",
                    str(self.broker.broker_conf),
                    *self.arguments,
                ],
                env=self._run_environment(),
                stdout=log,
                stderr=log,
            )

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def tiered(self, *arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run another command to its end, straight to the server."""
        return subprocess.run(
            [*TIERED, *arguments],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def status(self) -> dict[str, Any]:
        """The admin server's status document; empty while it does not answer."""
        try:
            found: dict[str, Any] = json.loads(self._admin("/status.json"))
        except (OSError, ValueError, KeyError):
            return {}
        return found

    def metric(self, name: str) -> float | None:
        """A value as Prometheus reads it; None if there is none, or the admin server does not answer."""
        try:
            lines = self._admin("/metrics").decode().splitlines()
        except (OSError, ValueError, KeyError):
            return None
        values = [line.split()[-1] for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return float(values[0]) if values else None

    def _admin(self, path: str) -> bytes:
        instance = json.loads((self.directory / "state" / "instance.json").read_text())
        address = instance.get("admin_url") or instance.get("adminUrl") or instance["admin"]
        with urllib.request.urlopen(f"{address}{path}", timeout=5) as answer:
            data: bytes = answer.read()
            return data

    def wait_until_following(self, timeout_s: float) -> None:
        """Wait until it owns the archive."""
        deadline_s = time.monotonic() + timeout_s
        while not self.status().get("epoch"):
            assert time.monotonic() < deadline_s, self.log.read_text()[-2000:]
            assert self.process is not None and self.process.poll() is None, self.log.read_text()[-2000:]
            time.sleep(0.1)

    def open_archive(self) -> PrefixedStore:
        """The archive, straight from the server."""
        options = self.objects.options()
        ring = os.environ.get("TIERED_OBJECT_STORE__KEY_RING", "")
        options = replace(options, settings=replace(options.settings, key_ring=ring))
        return PrefixedStore(open_store(self.url, options), archive_prefix(CLUSTER, BROKER))

    def wait_until_archived(self, timeout_s: float) -> None:
        """Wait until the catalog's cursor has reached the end of the broker's log."""
        client = BrokerClient(self.broker.broker_address, 5)
        deadline_s = time.monotonic() + timeout_s
        store = self.open_archive()
        while time.monotonic() < deadline_s:
            end = int(client.runtime_info()["commitLogMaxOffset"])
            try:
                phys = load(store).cursor.phys
            except NotFoundError:  # nothing committed yet
                phys = 0
            if phys >= end:
                client.close()
                return
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            time.sleep(0.5)
        raise AssertionError(f"archived to {phys} of {end}: {self.log.read_text()[-2000:]}")


def wait_for_line(path: Path, text: str | tuple[str, ...], timeout_s: float) -> str:
    """The last line of ``path`` that starts with ``text``, or with one of them."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        lines = [line for line in path.read_text().splitlines() if line.startswith(text)]
        if lines:
            return lines[-1]
        time.sleep(0.5)
    raise AssertionError(f"no {text!r} in {path}: {path.read_text()[-1000:]}")


def batches_of(reader: QueueReader) -> Iterator[Batch]:
    """A whole queue, in order."""
    offset = reader.min_offset
    while offset < reader.max_offset:
        batch = reader.read(offset, max_rows=1 << 16, max_bytes=16 << 20)
        yield batch
        assert batch.next_offset > offset
        offset = batch.next_offset


class LogView:
    """A stopped broker's commitlog, mapped: the bytes that the archive must have."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self._mapped: dict[Path, mmap.mmap] = {}

    def difference(self, batch: Batch, queue: object) -> str:
        """Empty when every record of ``batch`` stands in the log at the physical offset the archive tells."""
        data = batch.data.data
        places = zip(batch.starts.tolist(), batch.sizes.tolist(), batch.phys.tolist(), strict=True)
        for i, (start, size, phys) in enumerate(places):
            if bytes(data[start : start + size]) != self._record(phys, size):
                return f"{queue} at offset {batch.queue_offsets[i]}, physical offset {phys}"
        return ""

    def _record(self, phys: int, size: int) -> bytes:
        file = self._log.file_at(phys)
        if file is None:
            return b""
        if file.path not in self._mapped:
            with file.path.open("rb") as opened:
                self._mapped[file.path] = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        return self._mapped[file.path][phys - file.begin_phys : phys - file.begin_phys + size]


@dataclass(frozen=True)
class Compared:
    """Messages found equal. ``shown``: in what the broker shows; ``older``: of generations it no longer shows."""

    shown: int
    older: int


def compare_with_broker(sidecar: Sidecar) -> Compared:
    """Every unit of every consume queue of the stopped broker has its record in the archive, byte for byte, and the
    archive shows nothing else; older generations of recreated topics equal the commitlog."""
    store = sidecar.open_archive()
    state = load(store)
    admits = TopicFilter(cluster=CLUSTER, broker=BROKER).admits
    segments = SegmentCache(store)
    shown = {key[:2]: key for key in state.visible_queues()}
    compared = older = 0
    with open_broker_store(sidecar.broker.store, conf=read_broker_conf(sidecar.broker.broker_conf)) as broker:
        index = consume_queues_of(broker)
        log = LogView(broker.commit_log)
        for queue in index.queues():
            last = index.max_offset(queue.topic, queue.queue_id)
            if not admits(queue.topic) or last == 0:
                continue
            first = index.min_offset(queue.topic, queue.queue_id)
            units = index.units(queue.topic, queue.queue_id, first, last - first)
            reader = QueueReader(store, state, shown.pop(queue[:2]), segments=segments)
            assert (reader.min_offset, reader.max_offset) == (first, last), queue
            at = 0
            for batch in batches_of(reader):
                shown_units = units[at : at + len(batch)]
                for mine, theirs in (("queue_offsets", "queue_offset"), ("phys", "phys"), ("sizes", "size")):
                    assert np.array_equal(getattr(batch, mine), shown_units[theirs]), (queue, mine)
                assert log.difference(batch, queue) == ""
                at += len(batch)
            assert at == len(units), queue
            compared += at
        assert not shown, f"not at the broker: {sorted(shown)}"
        # Superseded ones belong to a log that is gone: nothing to compare them with.
        living = {key for key, row in state.queues() if not row["flags"] & QUEUE_SUPERSEDED}
        for key in sorted(living - set(state.visible_queues())):
            for batch in batches_of(QueueReader(store, state, key, segments=segments)):
                assert log.difference(batch, key) == ""
                older += len(batch)
    return Compared(compared, older)
