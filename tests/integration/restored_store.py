"""A store directory that `tiered restore` made, its broker, and what a Java client finds in it."""

import json
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
from tiered.broker_store.store import open_broker_store
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RequestCode

VERSIONS = {"B": "5.5.0", "D": "5.5.0", "E": "4.9.7"}
QUERY_CONSUMER_OFFSET, QUERY_MESSAGE = 14, 12
ALWAYS_MS = (1 << 63) - 1
Queue = tuple[str, int]
Line = tuple[int, int, int]
"""Queue offset, size and CRC-32 of a record."""


def tiered(*arguments: object, code: int = 0) -> str:
    """What a command prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "rocketmq_tiered.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
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

    def settings(self) -> dict[str, str]:
        """Of its broker. Nothing is deleted for its age: the restored files are new."""
        found = recorded_settings(self.directory / "broker.conf")
        return {name: value for name, value in found.items() if name not in ("fileReservedTime", "brokerIP1")}

    def queries(self) -> Iterator[tuple[str, str, list[int]]]:
        """(topic, key, physical offsets) of queries by key without limits, and what a Java client found."""
        for line in read_jsonl(self.directory / "truth" / "query_message.jsonl.zst"):
            is_whole = (
                line["begin"] == 0 and line["end"] == ALWAYS_MS and len(line["brokerPhys"]) < line["maxNum"]
            )
            if is_whole and line["clientPhys"] and FILTER.admits(line["topic"]):
                yield line["topic"], line["key"], line["clientPhys"]

    def group_offsets(self) -> dict[tuple[str, str, int], int]:
        """Offset of each (group, topic, queue id) in the recorded queues."""
        offsets = open_broker_store(self.directory / "store").state().consumer_offsets
        return {
            (name.partition("@")[2], name.partition("@")[0], queue_id): offset
            for name, of_queues in offsets.items()
            for queue_id, offset in of_queues.items()
            if (name.partition("@")[0], queue_id) in self.truth.queues
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
    """A broker on a restored store in ``directory``, with the lines that the restore printed."""

    def __init__(self, version: str, directory: Path, config: Mapping[str, str]) -> None:
        self.directory = directory
        kept = {name: value for name, value in config.items() if not name.startswith("storePath")}
        self.server = RocketMq(version, directory, kept)
        # 4.9's does nothing without it.
        (directory / "conf" / "logback_tools.xml").write_text("<configuration/>")

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

    def query(self, topic: str, key: str) -> set[int]:
        """Physical offsets that the broker finds by a key."""
        client = BrokerClient(self.server.broker_address, 10)
        fields = {
            "topic": topic,
            "key": key,
            "maxNum": "64",
            "beginTimestamp": "0",
            "endTimestamp": str(ALWAYS_MS),
        }
        try:
            body, at, found = client.call(QUERY_MESSAGE, fields).body, 0, set()
        finally:
            client.close()
        while at < len(body):
            found.add(int.from_bytes(body[at + 28 : at + 36], "big"))
            at += int.from_bytes(body[at : at + 4], "big")
        return found

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
    version: str, url: str, directory: Path, *arguments: object, settings: Mapping[str, str]
) -> Iterator[tuple[RestoredBroker, dict[str, Any]]]:
    """A running broker on what `tiered restore` makes of ``url``; ``settings`` are those of the original one."""
    directory.mkdir(exist_ok=True)
    said = restore(url, directory / "store", *arguments)
    broker = RestoredBroker(version, directory, {**settings, **said["brokerConf"]})
    begun_s = time.monotonic()
    with broker.server:
        said["ready_s"] = time.monotonic() - begun_s
        try:
            yield broker, said
        finally:
            broker.server.broker.kill()  # ends at once


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
