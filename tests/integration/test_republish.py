"""`tiered republish` into a live broker, killed on the way, and what a Java consumer finds there."""

import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.parse
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import rocketmq_tiered
from tests.end_to_end.offloading import backfill
from tests.integration.restored_store import tiered
from tests.servers.rocketmq import CLUSTER, RocketMq, run_java
from tiered.formats.record import inner_messages
from tiered.object_store.file import FileStore
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RequestCode

pytestmark = pytest.mark.integration
VERSION = "5.3.3"
QUEUES = 4
KILLS = 5
REPEATS_MAX = 200
ACTED_ON = {
    "DELAY",
    "TIMER_DELIVER_MS",
    "TIMER_DELAY_SEC",
    "TIMER_DELAY_MS",
    "TIMER_OUT_MS",
    "TIMER_ENQUEUE_MS",
    "REAL_QID",
    "TIMER_DEQUEUE_MS",
    "TIMER_ROLL_TIMES",
    "REAL_TOPIC",
    "TRAN_MSG",
    "PGROUP",
    "__transactionId__",
    "WAIT",
    "INNER_MULTI_DISPATCH",
    "INNER_MULTI_QUEUE_OFFSET",
    "INNER_NUM",
    "INNER_BASE",
    "TRANSACTION_CHECK_TIMES",
    "TRAN_PREPARED_QUEUE_OFFSET",
    "RETRY_TOPIC",
    "CLUSTER",
    "MSG_REGION",
    "TRACE_ON",
}
OWN = {"CLUSTER": CLUSTER, "MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}


@dataclass(frozen=True)
class Seen:
    """A message as a consumer sees it."""

    crc: int
    size: int
    properties: str
    flag: int
    born_timestamp: int


def java_map(properties: dict[str, str]) -> str:
    ordered = sorted(properties, key=lambda name: name.encode("utf-16-be"))
    return "{" + ", ".join(f"{name}={properties[name]}" for name in ordered) + "}"


def expected(url: str) -> dict[tuple[str, int], list[Seen]]:
    """What every queue of an ordinary topic becomes."""
    found: dict[tuple[str, int], list[Seen]] = {}
    with rocketmq_tiered.open(url) as archive:
        for listing in archive.queues():
            if listing.topic.startswith("%"):
                continue
            queue = found[listing.topic, listing.queue_id] = []
            for message in archive.queue(listing.topic, listing.queue_id).messages():
                record = message.record
                parts = [(one.body, one.properties, one.flag) for one in inner_messages(record)]
                for body, stored, flag in parts or [(record.body(), record.properties, record.flag)]:
                    kept = {name: value for name, value in stored.items() if name not in ACTED_ON} | OWN
                    queue.append(
                        Seen(zlib.crc32(body), len(body), java_map(kept), flag, record.born_timestamp)
                    )
    return found


class Target:
    """A live broker with a topic r_X for each topic t_X."""

    def __init__(self, directory: Path, topics: set[str], version: str = VERSION) -> None:
        self.server = RocketMq(version, directory)
        self.topics = {topic: "r_" + topic.removeprefix("t_") for topic in sorted(topics)}

    def start(self) -> None:
        self.server.start()
        client = BrokerClient(self.server.broker_address, 10)
        for topic in self.topics.values():
            fields = {
                "topic": topic,
                "defaultTopic": "TBW102",
                "readQueueNums": QUEUES,
                "writeQueueNums": QUEUES,
                "perm": 6,
                "topicFilterType": "SINGLE_TAG",
                "topicSysFlag": 0,
                "order": "false",
            }
            answer = client.call(
                RequestCode.UPDATE_AND_CREATE_TOPIC, {name: str(value) for name, value in fields.items()}
            )
            assert answer.code == 0, answer
        client.close()

    def arguments(self, url: str, position: Path) -> list[str]:
        maps = [word for topic, to in self.topics.items() for word in ("--topic-map", f"{topic}={to}")]
        return ["republish", url, "--to", self.server.broker_address, *maps, "--position", str(position)]

    def consumed(self) -> dict[tuple[str, int], list[Seen]]:
        """Every message of every target queue, in order, by a Java pull consumer."""
        directory = self.server.directory
        jobs = directory / "jobs.txt"
        jobs.write_text(
            "".join(
                f"pull\tG_{topic}\t{topic}\t*\t0\t1\t{directory / topic}.out\n"
                for topic in self.topics.values()
            )
        )
        run_java(
            VERSION,
            directory,
            "Consume",
            self.server.name_server_address,
            f"@{jobs}",
            flags=["-Dconsume.everything=true"],
        )
        found: dict[tuple[str, int], list[Seen]] = {}
        for topic in self.topics.values():
            for line in (directory / f"{topic}.out").read_text("utf-8").splitlines():
                words = line.split(" ")
                properties, flag, _, born, *_ = urllib.parse.unquote_plus(words[-1]).rsplit("|", 9)
                seen = Seen(int(words[2]), int(words[3]), properties, int(flag), int(born))
                found.setdefault((topic, int(words[0])), []).append(seen)
        return found


@pytest.fixture
def url(real_store: Callable[[str], Path], tmp_path: Path) -> str:
    directory = tmp_path / "archive"
    directory.mkdir()
    backfill(real_store("B") / "store", FileStore(directory))
    return f"file://{directory}"


@pytest.fixture
def target(url: str, tmp_path: Path) -> Iterator[Target]:
    with rocketmq_tiered.open(url) as archive:
        topics = {topic for topic in archive.topics() if not topic.startswith("%")}
    found = Target(tmp_path / "broker", topics)
    found.start()
    yield found
    found.server.broker.kill()
    found.server.stop()


def sent_of(position: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return sum(one["next"] - one["begin"] for one in json.loads(position.read_bytes())["queues"])
    return 0


def killed_after(arguments: list[str], position: Path, count: int) -> None:
    """Run the command, and kill it when so many messages are in its position."""
    child = subprocess.Popen(
        [sys.executable, "-m", "rocketmq_tiered.cli", *arguments], stderr=subprocess.PIPE
    )
    ends_s = time.monotonic() + 60
    while sent_of(position) < count:
        assert child.poll() is None and time.monotonic() < ends_s, (child.communicate(), sent_of(position))
        time.sleep(0.002)
    child.kill()
    child.communicate()


def known(message: Seen, numbers: dict[Seen, int]) -> int | None:
    """Its number. A broker gives a message without a unique key one."""
    bare = replace(message, properties=re.sub(r", UNIQ_KEY=\w+}$", "}", message.properties))
    return numbers.get(message, numbers.get(bare))


def rewinds(numbers: list[int]) -> list[int]:
    """By how many messages a sequence goes back, each time; it never skips one."""
    back = []
    for before, number in zip([-1, *numbers], numbers, strict=False):
        assert number <= before + 1
        if number <= before:
            back.append(before + 1 - number)
    return back


def test_a_republish_killed_five_times_delivers_all_in_order(
    url: str, target: Target, tmp_path: Path
) -> None:
    truth, position = expected(url), tmp_path / "position.json"
    total = sum(map(len, truth.values()))
    arguments = target.arguments(url, position)
    for number in range(KILLS):
        killed_after(arguments, position, total * (number + 1) // (KILLS + 1))
    said = json.loads(tiered(*arguments, "--json"))
    assert said["complete"] and not said["refused"] and not said["unreadable"]
    assert json.loads(tiered(*arguments, "--json"))["sent"] == {}
    consumed, repeated = target.consumed(), 0
    for (topic, queue_id), messages in truth.items():
        numbers = {message: number for number, message in enumerate(messages)}
        arrived = [known(message, numbers) for message in consumed[target.topics[topic], queue_id % QUEUES]]
        order = [number for number in arrived if number is not None]
        back = rewinds(order)
        assert set(order) == set(range(len(messages))), (topic, queue_id)
        assert len(back) <= KILLS and max(back, default=0) <= REPEATS_MAX, (topic, queue_id, back)
        repeated += sum(back)
    assert sum(map(len, consumed.values())) == total + repeated
    print(f"{total} messages, {repeated} repeated by {KILLS} kills")


@pytest.mark.parametrize("version", ["4.9.7", "5.3.3", "5.5.0"])
def test_commands_take_the_name_server_and_the_broker_of_each_version(
    version: str, url: str, tmp_path: Path
) -> None:
    """Name servers of 4.9 never answer a request that they do not know."""
    with rocketmq_tiered.open(url) as archive:
        topics = {topic for topic in archive.topics() if not topic.startswith("%")}
    target = Target(tmp_path / "broker", topics, version)
    target.start()
    try:
        names, broker, begun_s = (
            target.server.name_server_address,
            target.server.broker_address,
            time.monotonic(),
        )
        count = sum(map(len, expected(url).values()))
        for number, address in enumerate((names, broker)):
            arguments = target.arguments(url, tmp_path / f"position-{number}")
            arguments[arguments.index("--to") + 1] = address
            assert sum(json.loads(tiered(*arguments, "--json"))["sent"].values()) == count
        topic = next(iter(target.topics.values()))
        reset = (
            "reset-offset",
            "--serve",
            names,
            "--group",
            "G_reset",
            "--topic",
            topic,
            "--earliest",
            "--new-group",
        )
        assert "queues" in tiered(*reset, "--dry-run", "--json")
        assert time.monotonic() - begun_s < 60
    finally:
        target.server.broker.kill()
        target.server.stop()
