"""A store directory that `tiered restore` made, its broker, and what a Java client finds in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.end_to_end.ground_truth import GroundTruth, load_truth, read_jsonl
from tests.end_to_end.offloading import FILTER
from tests.servers.rocketmq import MQADMIN, RocketMq, recorded_settings
from tiered.broker_store.commit_log import CommitLog
from tiered.model.queue import LMQ_PREFIX
from tiered.remoting.client import BrokerClient, RequestCode

VERSIONS = {"B": "5.5.0", "D": "5.5.0", "E": "4.9.7"}
QUERY_CONSUMER_OFFSET = 14
Queue = tuple[str, int]
Line = tuple[int, int, int]
"""Queue offset, size and CRC-32 of a record."""


def tiered(*arguments: object, code: int = 0) -> str:
    """What a command prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "rocketmq_tiered.cli", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout if code == 0 else done.stderr


@dataclass
class Original:
    """A real broker's store: what its archive is of, and what must be found again."""

    name: str
    directory: Path
    truth: GroundTruth = field(init=False)

    def __post_init__(self) -> None:
        self.truth = load_truth(self.directory, self.name, FILTER)

    @property
    def version(self) -> str:
        return VERSIONS.get(self.name, "5.3.3")

    def ranges(self) -> dict[Queue, tuple[int, int]]:
        """Minimum and maximum of each queue with messages."""
        lines = read_jsonl(self.directory / "truth" / "queues.jsonl.zst")
        return {
            (line["topic"], line["queueId"]): (line["minOffset"], line["maxOffset"])
            for line in lines
            if (line["topic"], line["queueId"]) in self.truth.queues
        }

    def messages(self) -> dict[Queue, list[Line]]:
        """The records of each queue."""
        log = CommitLog([self.directory / "store" / "commitlog"])

        def crc(line: Mapping[str, Any]) -> int:
            found = line.get("recCrc32")
            stored = log.read(line["commitLogOffset"], line["storeSize"]) if found is None else b""
            return zlib.crc32(stored) if found is None else int(found)

        return {
            queue: [(line["queueOffset"], line["storeSize"], crc(line)) for line in lines]
            for queue, lines in self.truth.queues.items()
        }

    def backfill(self, url: str) -> None:
        """Archive it, in small objects."""
        settings = ("--set", "offload.batch_bytes=1MiB", "--set", "offload.split_bytes=256KiB")
        tiered(
            "backfill",
            self.directory / "store",
            url,
            "--broker-conf",
            self.directory / "broker.conf",
            *settings,
        )


@dataclass
class Pulled:
    """What a Java client pulled."""

    ranges: dict[Queue, tuple[int, int]] = field(default_factory=dict)
    messages: dict[Queue, list[Line]] = field(default_factory=dict)


class RestoredBroker:
    """A broker on a restored store, with the settings of the original one."""

    def __init__(
        self, original: Original, directory: Path, needed: Mapping[str, str], **settings: str
    ) -> None:
        self.original, self.directory = original, directory
        config = recorded_settings(original.directory / "broker.conf") | dict(needed) | settings
        for name in ("storePathRootDir", "storePathCommitLog", "fileReservedTime"):
            config.pop(name, None)
        self.server = RocketMq(original.version, directory, config)

    def pull(self, queues: list[Queue]) -> Pulled:
        """Every message of ``queues``."""
        listed, output = self.directory / "queues.txt", self.directory / "pulled.txt"
        listed.write_text("".join(f"{topic}\t{queue_id}\n" for topic, queue_id in queues), "utf-8")
        self.server.run_java("Pulled", self.server.broker_address, str(listed), str(output))
        found, queue = Pulled(), ("", -1)
        for line in output.read_text("utf-8").splitlines():
            kind, *fields = line.split("\t")
            if kind == "Q":
                queue = fields[0], int(fields[1])
                found.ranges[queue] = int(fields[2]), int(fields[3])
                found.messages[queue] = []
            else:
                offset, _, size, crc = map(int, fields)
                found.messages[queue].append((offset, size, crc))
        return found

    def send(self, topic: str, body: str) -> None:
        """One message to queue 0, once the name server knows the broker."""
        arguments = (
            "sendMessage",
            "-t",
            topic,
            "-b",
            self.server.config["brokerName"],
            "-i",
            "0",
            "-p",
            body,
        )
        end = self.max_offset(topic, 0)
        while self.max_offset(topic, 0) == end:
            self.server.run_java(MQADMIN, *map(str, arguments), "-n", self.server.name_server_address)

    def consumer_offset(self, group: str, topic: str, queue_id: int) -> int:
        """Where a group resumes."""
        client = BrokerClient(self.server.broker_address, 10)
        fields = {"consumerGroup": group, "topic": topic, "queueId": str(queue_id)}
        try:
            return int(client.call(QUERY_CONSUMER_OFFSET, fields).ext_fields["offset"])
        finally:
            client.close()

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The next offset of a queue."""
        client = BrokerClient(self.server.broker_address, 10)
        try:
            fields = {"topic": topic, "queueId": str(queue_id)}
            return int(client.call(RequestCode.GET_MAX_OFFSET, fields).ext_fields["offset"])
        finally:
            client.close()


def restore(url: str, store: Path, *arguments: object) -> dict[str, Any]:
    """Run `tiered restore`; what it says."""
    found: dict[str, Any] = json.loads(tiered("restore", url, store, "--json", *arguments))
    return found


@contextmanager
def restored(
    original: Original, url: str, directory: Path, *arguments: object, **settings: str
) -> Iterator[tuple[RestoredBroker, dict[str, Any]]]:
    """A running broker on what `tiered restore` makes of ``url``."""
    directory.mkdir(exist_ok=True)
    said = restore(url, directory / "store", *arguments)
    broker = RestoredBroker(original, directory, said["brokerConf"], **settings)
    begun_s = time.monotonic()
    broker.server.start()
    said["ready_s"] = time.monotonic() - begun_s
    try:
        yield broker, said
    finally:
        broker.server.broker.kill()
        broker.server.stop()


def differences(original: Original, pulled: Pulled) -> list[str]:
    """Queues that differ from the truth in their bounds or messages."""
    expected, ranges = original.messages(), original.ranges()
    return [
        f"{queue}: {ranges[queue]} {len(expected[queue])}, found {pulled.ranges[queue]} {len(pulled.messages[queue])}"
        for queue in expected
        if queue in pulled.ranges
        and (
            ranges.get(queue, pulled.ranges[queue]) != pulled.ranges[queue]
            or expected[queue] != pulled.messages[queue]
        )
    ]


def is_lmq(queue: Queue) -> bool:
    return queue[0].startswith(LMQ_PREFIX)


def fresh(directory: Path) -> Path:
    """``directory`` without what was in it."""
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    return directory
