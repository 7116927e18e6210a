"""`tiered mount ls`: who serves which retired broker, in one of five states, and its exit code."""

import json
import time
from pathlib import Path

import pytest

from rocketmq_tiered.cli import main
from rocketmq_tiered.process.mount_report import LATE_MS, STATES, mount_rows
from rocketmq_tiered.server.mount.node_lease import (
    BrokerName,
    MountRecord,
    NodeLog,
    NodeState,
    announce_archive,
)
from tiered.clock import Clock
from tiered.object_store.file import FileStore

ADDRESS = "10.0.0.1:10940"
RECORDS = [
    MountRecord("c", "b0", ADDRESS),
    MountRecord("c", "b1", ADDRESS, is_leaving=True),
    MountRecord("c", "b2", ADDRESS, problem="a master of this broker is registered"),
    MountRecord("c", "b3"),
]


def renewed(store: FileStore, node: str, at_ms: int, *records: MountRecord) -> None:
    log = NodeLog(store, node, Clock(wall_ms=lambda: at_ms))
    log.join()
    log.renew(NodeState.ACTIVE, records)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    now_ms = time.time_ns() // 1_000_000
    found = FileStore(tmp_path / "archives")
    for number in range(6):
        announce_archive(found, BrokerName("c", f"b{number}"), 8)
    renewed(found, "n1", now_ms, *RECORDS)
    renewed(found, "n2", now_ms - LATE_MS - 1000, MountRecord("c", "b4", ADDRESS))
    return found


def test_every_broker_is_in_a_state(store: FileStore) -> None:
    found = [(row.record.broker, row.state) for row in mount_rows(store)]
    assert found == [
        ("b0", "served"),
        ("b1", "leaving"),
        ("b1", "not served"),
        ("b2", "not registered"),
        ("b3", "not registered"),
        ("b4", "late"),
        ("b5", "not served"),
    ]
    assert {state for _, state in found} == set(STATES)


def test_the_exit_code_says_whether_all_are_served(
    store: FileStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mount", "ls", store.url, "--json"]) == 4
    rows = json.loads(capsys.readouterr().out)["brokers"]
    assert [row["state"] for row in rows if row["broker"] == "b2"] == ["not registered"]
    renewed(store, "n1", time.time_ns() // 1_000_000, *(MountRecord("c", f"b{n}", ADDRESS) for n in range(6)))
    renewed(store, "n2", time.time_ns() // 1_000_000)
    assert main(["mount", "ls", store.url]) == 0
    assert "not" not in capsys.readouterr().out
