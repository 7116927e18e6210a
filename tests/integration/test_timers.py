"""Timers through a live broker: a Java producer sends to the gateway topic, `tiered run` hands over and is killed
on the way, and the target topic has each message once, in time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.live import Sidecar
from tests.integration.live_scene import Scene, beside_broker
from tests.servers.running_store import RunningStore
from tiered.archive.verify import verify_archive
from tiered.remoting.client import BrokerClient

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]
GATEWAY = "TIERED_TIMERS"
COUNT = 600
KILLS = 3
SPREAD_MS = 45_000
LONGEST_S = 20
"""timerMaxDelaySec: most timers are beyond."""
SETTINGS = {"TIERED_TIMERS__AHEAD_MS": 8_000, "TIERED_OFFLOAD__BATCH_AGE_MS": 500}
WHEEL = {"timerWheelEnable": "true", "timerMaxDelaySec": LONGEST_S}


@pytest.mark.parametrize("version", ["5.3.3", "4.9.7", "5.5.0"])
def test_each_timer_is_delivered_once_though_the_sidecar_is_killed(
    version: str, tmp_path: Path, minio_url: RunningStore
) -> None:
    config = {} if version.startswith("4") else WHEEL
    with beside_broker(Scene(version, config=config, settings=SETTINGS), tmp_path, minio_url) as sidecar:
        sent = _started(sidecar, tmp_path, in_ms=8_000)
        for _ in range(KILLS):
            time.sleep(5)
            sidecar.kill()
            sidecar.start()
        # Rows that a killed process had claimed wait until its claim has ended.
        calm_ms = int(time.time() * 1000) + 15_000
        rows = _delivered(sidecar, tmp_path / "consumed")
        late = _late_ms(rows, sent)
        calm = _late_ms([row for row in rows if int(sent[row[4]]) > calm_ms], sent)
        print(f"{version}: {KILLS} kills, late ms: all {_quantiles(late)}, afterwards {_quantiles(calm)}")
        assert sorted(row[4] for row in rows) == sorted(sent)
        assert late[0] >= 0, "early"
        sidecar.wait_until_archived(60)
        assert sidecar.stop() == 0
        report = verify_archive(sidecar.open_archive(), full=True)
        assert not report.anomalies and not report.counts.get("timers")


def test_timers_wait_for_a_broker_that_is_away(tmp_path: Path, minio_url: RunningStore) -> None:
    with beside_broker(Scene("5.3.3", config=WHEEL, settings=SETTINGS), tmp_path, minio_url) as sidecar:
        sent = _started(sidecar, tmp_path, in_ms=10_000)
        sidecar.wait_until_archived(60)
        sidecar.broker.broker.kill()
        time.sleep(70)
        overdue_s = sidecar.metric("rocketmq_tiered_store_timers_overdue_seconds")
        assert overdue_s is not None and overdue_s > 20
        sidecar.broker.broker.start()
        rows = _delivered(sidecar, tmp_path / "consumed")
        assert sorted(row[4] for row in rows) == sorted(sent)
        assert _late_ms(rows, sent)[0] >= 0
        print(f"broker away for 70 s: late ms {_quantiles(_late_ms(rows, sent))}")


def _started(sidecar: Sidecar, directory: Path, *, in_ms: int) -> dict[str, str]:
    """COUNT timers within SPREAD_MS, from ``in_ms`` on; unique key -> time of delivery."""
    broker, output = sidecar.broker, directory / "sent"
    broker.create_topic(GATEWAY, 4)
    sidecar.start()
    sidecar.wait_until_following(60)
    first_ms = int(time.time() * 1000) + in_ms
    arguments = GATEWAY, "live0", str(COUNT), str(first_ms), str(SPREAD_MS), str(output)
    broker.run_java("Timers", broker.name_server_address, *arguments)
    sent = dict(line.split() for line in output.read_text().splitlines())
    assert len(sent) == COUNT
    return sent


def _delivered(sidecar: Sidecar, output: Path) -> list[list[str]]:
    """What a consumer of the target topic gets, once all came, or for three minutes."""
    broker, deadline_s = sidecar.broker, time.monotonic() + 180
    while _stored(broker.broker_address) < COUNT and time.monotonic() < deadline_s:
        time.sleep(1)
    time.sleep(2)
    broker.run_java("Consume", broker.name_server_address, "pull", "G", "live0", "*", "0", "2", str(output))
    return [line.split() for line in output.read_text().splitlines()]


def _stored(address: str) -> int:
    client = BrokerClient(address, 10)
    try:
        found = [client.call(30, {"topic": "live0", "queueId": str(queue)}) for queue in range(4)]
        return sum(int(answer.ext_fields.get("offset", 0)) for answer in found)
    finally:
        client.close()


def _late_ms(rows: list[list[str]], sent: dict[str, str]) -> list[int]:
    """How late the broker stored each in its topic, in order."""
    return sorted(int(row[6]) - int(sent[row[4]]) for row in rows)


def _quantiles(late: list[int]) -> str:
    found = [late[int(share * (len(late) - 1))] for share in (0, 0.5, 0.99, 1)] if late else []
    return f"{len(late)}: min, p50, p99, max {found}"
