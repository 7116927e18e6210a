"""Timers through a live broker: a Java producer sends to the gateway topic, `tiered run` hands over and is killed
on the way, and the target topic has each message once, in time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.live_scene import Scene, beside_broker
from tests.servers.running_store import RunningStore
from tiered.archive.verify import verify_archive
from tiered.remoting.client import BrokerClient

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
GATEWAY = "TIERED_TIMERS"
COUNT = 600
LONGEST_S = 20
"""timerMaxDelaySec: most timers are beyond."""
SETTINGS = {
    "TIERED_TIMERS__AHEAD_MS": 8_000, "TIERED_OFFLOAD__BATCH_AGE_MS": 500,
}  # fmt: skip


@pytest.mark.parametrize("version", ["5.3.3", "4.9.7", "5.5.0"])
def test_each_timer_is_delivered_once_though_the_sidecar_is_killed(
    version: str, tmp_path: Path, minio_url: RunningStore
) -> None:
    config = {} if version.startswith("4") else {"timerWheelEnable": "true", "timerMaxDelaySec": LONGEST_S}
    with beside_broker(Scene(version, config=config, settings=SETTINGS), tmp_path, minio_url) as sidecar:
        broker = sidecar.broker
        broker.create_topic(GATEWAY, 4)
        sidecar.start()
        sidecar.wait_until_following(60)
        first_ms = int(time.time() * 1000) + 20_000
        broker.run_java(
            "Timers", broker.name_server_address, GATEWAY, "live0", str(COUNT), str(first_ms), "30000",
            str(tmp_path / "sent"),
        )  # fmt: skip
        sent = dict(line.split() for line in (tmp_path / "sent").read_text().splitlines())
        assert len(sent) == COUNT
        kills = 0
        while time.time() * 1000 < first_ms + 35_000:
            time.sleep(7)
            sidecar.kill()
            sidecar.start()
            kills += 1
        deadline_s = time.monotonic() + 90
        while _stored(broker.broker_address) < COUNT and time.monotonic() < deadline_s:
            time.sleep(1)
        time.sleep(3)
        output = tmp_path / "consumed"
        broker.run_java(
            "Consume", broker.name_server_address, "pull", "G", "live0", "*", "0", "2", str(output)
        )
        rows = [line.split() for line in output.read_text().splitlines()]
        print(f"{version}: {kills} kills, lateness ms", lateness := _lateness(rows, sent))
        assert sorted(row[4] for row in rows) == sorted(sent)
        assert lateness[0] >= (-1000 if version == "5.5.0" else 0), "early"
        sidecar.wait_until_archived(60)
        assert sidecar.stop() == 0
        report = verify_archive(sidecar.open_archive(), full=True)
        assert not report.anomalies and not report.counts.get("timers")


def _stored(address: str) -> int:
    client = BrokerClient(address, 10)
    try:
        found = [client.call(30, {"topic": "live0", "queueId": str(queue)}) for queue in range(4)]
        return sum(int(answer.ext_fields.get("offset", 0)) for answer in found)
    finally:
        client.close()


def _lateness(rows: list[list[str]], sent: dict[str, str]) -> list[int]:
    """Minimum, median, p99, maximum of how late the broker stored each in its topic."""
    late = sorted(int(row[6]) - int(sent[row[4]]) for row in rows)
    return [late[0], late[len(late) // 2], late[len(late) * 99 // 100], late[-1]]
