"""Real brokers serve the consume queues that we write, continue them, and we read what they added."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rocketmq_tiered.process.consume_queues import (
    build,
    check_queues,
    convert,
    has_tables_in_rocksdb,
    plan_of,
)
from tests.broker_store.opened_store import consume_queues_of
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import RocketMq, recorded_settings
from tests.truth import archived_messages, compaction_topics, read_lines
from tiered.broker_store.conf import read_broker_conf
from tiered.broker_store.store import open_broker_store
from tiered.consume_queue.store import StoreKind

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

CASES = [
    ("5.3.3", "A", (build, StoreKind.FILE)),
    ("5.3.3", "A", (build, StoreKind.ROCKSDB)),
    ("5.3.3", "G", (build, StoreKind.ROCKSDB)),
    ("5.3.3", "C", (convert, StoreKind.FILE)),
    ("5.5.0", "D", (build, StoreKind.ROCKSDB)),
    ("5.5.0", "B", (convert, StoreKind.ROCKSDB)),
    ("5.5.0", "D", (convert, StoreKind.FILE)),
    ("4.9.7", "E", (build, StoreKind.FILE)),
]
SENT = ("t_one", 0, 5)
_GROWING = ("rmq_sys_", "RMQ_SYS_", "TRANS_CHECK_MAX_TIME_TOPIC", "t_delay", "t_timer", "%RETRY%")
"""Topics into which a broker that starts again writes: it delivers what it had delivered since its last checkpoint."""


@dataclass
class Case:
    """A broker whose queues we wrote."""

    broker: RocketMq
    truth: Path
    kind: StoreKind
    start_s: float = 0.0

    def expected(self) -> tuple[dict[tuple[str, int], tuple[int, int]], set[tuple[str, int, int, int]]]:
        """Minimum and maximum by queue; (topic, queue id, offset, physical offset) of the messages."""
        # They are in no topic table at first.
        skipped = compaction_topics(self.truth) | {"RMQ_SYS_TRANS_OP_HALF_TOPIC"}
        skipped |= {"t_bcq"} if self.kind is StoreKind.ROCKSDB else set()
        queues = {
            (line["topic"], line["queueId"]): (line["minOffset"], line["maxOffset"])
            for line in read_lines(self.truth / "queues.jsonl.zst")
            if line["maxOffset"] and line["topic"] not in skipped
        }
        messages = {
            (line["topic"], line["queueId"], line["queueOffset"], line["commitLogOffset"])
            for line in archived_messages(self.truth)
            if line["topic"] not in skipped and (line["topic"], line["queueId"]) in queues
        }
        return queues, messages

    def assert_serves_the_truth(self, *, more: int = 0) -> None:
        """All that the original broker served, and ``more`` messages that were sent since."""
        queues, messages = self.expected()
        listed, found = self.broker.directory / "queues", self.broker.directory / "found"
        listed.write_text("".join(f"{topic} {queue_id}\n" for topic, queue_id in sorted(queues)))
        self.broker.run_java(
            "Queues", self.broker.name_server_address, "read", "fx-a", str(listed), str(found)
        )
        rows = [line.split(" ") for line in found.read_text().splitlines()]
        bounds = {(row[1], int(row[2])): (int(row[3]), int(row[4])) for row in rows if row[0] == "queue"}
        served = {(row[0], int(row[1]), int(row[2]), int(row[3])) for row in rows if row[0] != "queue"}
        assert messages - served == set()
        assert {
            row[:2] for row in served - messages if not row[0].startswith(_GROWING) and row[0] != "t_bcq"
        } <= {SENT[:2]}
        for key, (first, before) in queues.items():
            end = before + (more if key == SENT[:2] else 0)
            if key[0].startswith(_GROWING):
                assert bounds[key][0] == first, key
                assert bounds[key][1] >= end, key
            else:
                assert bounds[key] == (first, end), key

    def send(self) -> list[int]:
        """Queue offsets of new messages."""
        topic, queue_id, count = SENT
        out = self.broker.run_java(
            "Queues", self.broker.name_server_address, "send", "fx-a", topic, str(queue_id), str(count)
        )
        return [int(line) for line in out.splitlines() if line.isdecimal()]  # others are of logback


@pytest.fixture(
    params=CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2][0].__name__}-{case[2][1].value}"
)
def case(request: pytest.FixtureRequest, real_store: Callable[[str], Path], tmp_path: Path) -> Iterator[Case]:
    version, name, (write, kind) = request.param
    original = real_store(name)
    settings = recorded_settings(original / "broker.conf")
    settings["storeType"] = "defaultRocksDB" if kind is StoreKind.ROCKSDB else "default"
    settings["enableCompaction"] = str(kind is StoreKind.FILE).lower()  # else 5.5.0 does not start
    try:
        broker = RocketMq(version, tmp_path, settings)
    except NotInstallableError as error:
        pytest.skip(str(error))
    write_queues(broker, original, write, kind)
    found = Case(broker, original / "truth", kind)
    begun_s = time.monotonic()
    with broker:
        found.start_s = time.monotonic() - begun_s
        yield found


def write_queues(broker: RocketMq, original: Path, write: Callable[..., object], kind: StoreKind) -> None:
    """Give ``broker`` a copy of the ``original`` store, with queues of ours."""
    shutil.copytree(original / "store", broker.store)
    with open_broker_store(broker.store, conf=read_broker_conf(original / "broker.conf")) as store:
        write(plan_of(store, kind), lambda done, total: None)
        if has_tables_in_rocksdb(broker.store):
            table = {"topicConfigTable": store.topics(), "dataVersion": {"counter": 1, "timestamp": 1}}
            (broker.store / "config" / "topics.json").write_text(json.dumps(table))


@pytest.mark.parametrize(("version", "name"), [("5.3.3", "G"), ("5.5.0", "D")])
def test_a_broker_writes_both_kinds_and_goes_back_to_either(
    version: str, name: str, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    original = real_store(name)
    both = recorded_settings(original / "broker.conf") | {"enableCompaction": "false", "storeType": "default"}
    try:
        both |= {"rocksdbCQDoubleWriteEnable": "true", "combineCQUseRocksdbForLmq": "true"}
        broker = RocketMq(version, tmp_path, both)
    except NotInstallableError as error:
        pytest.skip(str(error))
    write_queues(broker, original, build, StoreKind.BOTH)
    case = Case(broker, original / "truth", StoreKind.BOTH)
    for settings in ({}, {"rocksdbCQDoubleWriteEnable": "false"}, {"storeType": "defaultRocksDB"}):
        with broker.broker_conf.open("a") as conf:
            conf.writelines(f"\n{name}={value}\n" for name, value in settings.items())
        case.kind = StoreKind.ROCKSDB if "storeType" in settings else StoreKind.BOTH
        with broker:
            case.assert_serves_the_truth()


def test_a_broker_serves_and_continues_the_queues_we_wrote(case: Case) -> None:
    print(f"servers started in {case.start_s:.1f} s")
    case.assert_serves_the_truth()
    queues, _ = case.expected()
    end = queues[SENT[:2]][1]
    assert case.send() == list(range(end, end + SENT[2]))
    case.broker.broker.kill()
    case.broker.broker.start()
    case.assert_serves_the_truth(more=SENT[2])
    case.broker.broker.stop(timeout_s=60)
    conf = read_broker_conf(case.broker.broker_conf)
    with open_broker_store(case.broker.store, conf=conf) as store:
        check = check_queues(store, lambda done, total: None)
        assert check.is_good, check.problems
        assert check.undispatched == 0
        index = consume_queues_of(store)
        assert index.max_offset(*SENT[:2]) == end + SENT[2]
