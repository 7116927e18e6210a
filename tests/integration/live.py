"""A broker, an object store and a `tiered run` process side by side, and the comparison of archive and broker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.servers.rocketmq import BROKER, CLUSTER, RocketMq
from tests.servers.running_store import RunningStore
from tiered.broker_store.store import open_broker_store
from tiered.catalog.protocol import load
from tiered.flat_file.composite_flat_file import QueueReader
from tiered.flat_file.segment_reader import SegmentCache
from tiered.formats.keys import archive_prefix
from tiered.model.queue import TopicFilter
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.url import open_store
from tiered.remoting.client import BrokerClient

TIERED = [sys.executable, "-m", "sidecar"]


@dataclass
class Sidecar:
    """`tiered run` as a child process."""

    broker: RocketMq
    objects: RunningStore
    url: str
    directory: Path
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def log(self) -> Path:
        """Its JSON log."""
        return self.directory / "tiered.log"

    def environment(self) -> dict[str, str]:
        """What it and every other `tiered` command need to reach the store."""
        return {**os.environ, **self.objects.environment(), "TIERED_ADMIN__PORT": "0"}

    def start(self) -> None:
        """Start following."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*TIERED, "run", "--store", str(self.broker.store), "--url", self.url, "--state-dir",
                 str(self.directory / "state"), "--broker-conf", str(self.broker.broker_conf), *self.arguments],
                env=self.environment(), stdout=log, stderr=log,
            )  # fmt: skip

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

    def tiered(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another command to its end."""
        return subprocess.run(
            [*TIERED, *arguments],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def status(self) -> dict[str, Any]:
        """The admin server's status document; empty while it does not answer."""
        try:
            instance = json.loads((self.directory / "state" / "instance.json").read_text())
            address = instance.get("admin_url") or instance.get("adminUrl") or instance["admin"]
            with urllib.request.urlopen(f"{address}/status.json", timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, ValueError, KeyError, urllib.error.URLError):
            return {}

    def wait_until_archived(self, timeout_s: float) -> None:
        """Wait until the catalog's cursor has reached the end of the broker's log."""
        client = BrokerClient(self.broker.broker_address, 5)
        deadline_s = time.monotonic() + timeout_s
        store = PrefixedStore(open_store(self.url, self.objects.options()), archive_prefix(CLUSTER, BROKER))
        while time.monotonic() < deadline_s:
            end = int(client.runtime_info()["commitLogMaxOffset"])
            state = load(store)
            if state.cursor.phys >= end:
                client.close()
                return
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            time.sleep(0.5)
        raise AssertionError(f"archived to {state.cursor.phys} of {end}: {self.log.read_text()[-2000:]}")


def wait_for_line(path: Path, text: str, timeout_s: float) -> str:
    """The last line of ``path`` that starts with ``text``."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        lines = [line for line in path.read_text().splitlines() if line.startswith(text)]
        if lines:
            return lines[-1]
        time.sleep(0.5)
    raise AssertionError(f"no {text!r} in {path}: {path.read_text()[-1000:]}")


def records_of(reader: QueueReader) -> Iterator[tuple[int, int, bytes]]:
    """(queue offset, physical offset, record) of a whole queue, in order."""
    offset = reader.min_offset
    while offset < reader.max_offset:
        batch = reader.read(offset, max_rows=4096, max_bytes=4 << 20)
        for i in range(len(batch)):
            start, size = int(batch.starts[i]), int(batch.sizes[i])
            yield int(batch.queue_offsets[i]), int(batch.phys[i]), batch.data[start : start + size].tobytes()
        assert batch.next_offset > offset
        offset = batch.next_offset


def compare_with_broker(sidecar: Sidecar) -> int:
    """Every unit of every consume queue of the stopped broker has its record in the archive, byte for byte, and the
    archive shows nothing else; the number of messages."""
    store = PrefixedStore(open_store(sidecar.url, sidecar.objects.options()), archive_prefix(CLUSTER, BROKER))
    state = load(store)
    admits = TopicFilter(cluster=CLUSTER, broker=BROKER).admits
    segments = SegmentCache(store)
    shown = {key[:2]: key for key in state.visible_queues()}
    compared = 0
    with open_broker_store(sidecar.broker.store) as broker:
        index = broker.consume_queues()
        assert index is not None
        for queue in index.queues():
            last = index.max_offset(queue.topic, queue.queue_id)
            if not admits(queue.topic) or last == 0:
                continue
            first = index.min_offset(queue.topic, queue.queue_id)
            units = index.units(queue.topic, queue.queue_id, first, last - first)
            reader = QueueReader(store, state, shown.pop(queue[:2]), segments=segments)
            assert (reader.min_offset, reader.max_offset) == (first, last), queue
            for (offset, phys, record), unit in zip(records_of(reader), units, strict=True):
                assert (offset, phys) == (int(unit["queue_offset"]), int(unit["phys"])), queue
                assert record == broker.commit_log.read(phys, int(unit["size"])), (queue, offset)
                compared += 1
    assert not shown, f"not at the broker: {sorted(shown)}"
    return compared
