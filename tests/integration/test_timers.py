"""Timers through a live broker: a Java producer sends to the gateway topic, `tiered run` hands over and is killed
on the way, and the target topic has each message once, in time."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.integration.live_scene import Scene, beside_broker, finish
from tests.integration.timer_live import Wave, delivered, late_ms, quantiles, started
from tests.servers.running_store import RunningStore
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]
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
        sent = started(sidecar, tmp_path, Wave(COUNT, 8_000, SPREAD_MS))
        for _ in range(KILLS):
            time.sleep(5)
            sidecar.kill()
            sidecar.start()
        # Rows that a killed process had claimed wait until its claim has ended.
        calm_ms = int(time.time() * 1000) + 15_000
        rows = delivered(sidecar.broker, tmp_path / "consumed", COUNT)
        late = late_ms(rows, sent)
        calm = late_ms([row for row in rows if int(sent[row[4]]) > calm_ms], sent)
        print(f"{version}: {KILLS} kills, late ms: all {quantiles(late)}, afterwards {quantiles(calm)}")
        assert sorted(row[4] for row in rows) == sorted(sent)
        assert late[0] >= 0, "early"
        sidecar.wait_until_archived(60)
        assert sidecar.stop() == 0
        report = verify_archive(sidecar.open_archive(), depth="full")
        assert not report.anomalies and not report.counts.get("timers")


def test_timers_wait_for_a_broker_that_is_away(tmp_path: Path, minio_url: RunningStore) -> None:
    with beside_broker(Scene("5.3.3", config=WHEEL, settings=SETTINGS), tmp_path, minio_url) as sidecar:
        sent = started(sidecar, tmp_path, Wave(COUNT, 40_000, SPREAD_MS))
        sidecar.wait_until_archived(60)
        # Before the first is handed over: after kill -9 a broker may deliver timers of its own wheel again.
        sidecar.broker.broker.kill()
        time.sleep(100)
        overdue_s = sidecar.metric("rocketmq_tiered_store_timers_overdue_seconds")
        assert overdue_s is not None and overdue_s > 20
        sidecar.broker.broker.start()
        rows = delivered(sidecar.broker, tmp_path / "consumed", COUNT)
        assert sorted(row[4] for row in rows) == sorted(sent)
        assert late_ms(rows, sent)[0] >= 0
        print(f"broker away for 100 s: late ms {quantiles(late_ms(rows, sent))}")


def test_pending_timers_survive_the_broker_s_disk(tmp_path: Path, minio_url: RunningStore) -> None:
    """Broker, disk and sidecar are gone; a broker made from the bucket delivers what was pending."""
    with beside_broker(Scene("5.3.3", config=WHEEL, settings=SETTINGS), tmp_path, minio_url) as sidecar:
        broker = sidecar.broker
        sent = started(sidecar, tmp_path, Wave(COUNT, 120_000, SPREAD_MS))
        sidecar.wait_until_archived(60)
        pending = sum(ref.entries for ref in load(sidecar.open_archive()).timers)
        assert pending == COUNT
        sidecar.kill()
        broker.broker.kill()
        shutil.rmtree(broker.store)
        shutil.rmtree(sidecar.directory / "state")
        arguments = ("--broker-conf", str(broker.broker_conf), "--json")
        done = sidecar.tiered("restore", sidecar.url, str(broker.store), *arguments)
        assert done.returncode == 2 and "may still archive" in done.stderr, "the owner was there just now"
        arguments += ("--at-version", done.stderr.split()[-1])
        done = sidecar.tiered("restore", sidecar.url, str(broker.store), *arguments)
        assert done.returncode == 0, done.stderr
        broker.restart_with(json.loads(done.stdout)["brokerConf"])
        sidecar.arguments = ("--take-over",)
        sidecar.start()
        rows = delivered(broker, tmp_path / "consumed", COUNT)
        assert sorted(row[4] for row in rows) == sorted(sent)
        assert late_ms(rows, sent)[0] >= 0
        print(f"restored: late ms {quantiles(late_ms(rows, sent))}")
        finish(sidecar)
