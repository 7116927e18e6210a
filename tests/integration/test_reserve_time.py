"""Topics with the attribute reserve.time, of real brokers: their messages expire by it."""

import json
from pathlib import Path

import pytest

from rocketmq_tiered.maintenance.expire import commit_pass, plan_pass
from rocketmq_tiered.process.loaded_archive import rules_in
from tests.integration.live_scene import Load, Producer, Scene, beside_broker
from tests.integration.restored_scene import Later
from tests.servers.rocketmq import MQADMIN
from tests.servers.running_store import RunningStore
from tiered.catalog.catalog_reader import load
from tiered.clock import Clock
from tiered.settings.sections import Settings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

HOURS = {"live0": 48, "live1": 96}


@pytest.mark.parametrize("version", ["5.3.3", "5.5.0"])
def test_messages_expire_by_the_attribute_of_their_topic(
    version: str, tmp_path: Path, minio_url: RunningStore
) -> None:
    scene = Scene(version=version, topics=3, queues=2, settings={"TIERED_OFFLOAD__BATCH_AGE_MS": 500})
    with beside_broker(scene, tmp_path, minio_url) as sidecar:
        broker = sidecar.broker
        for topic, hours in HOURS.items():
            words = f"updateTopic -b {broker.broker_address} -t {topic} -r 2 -w 2 -a +reserve.time={hours}"
            assert "success" in broker.run_java(MQADMIN, *words.split(), "-n", broker.name_server_address)
        sidecar.start()
        with Producer(broker, scene, Load(600, per_second=200), tmp_path / "producer.out") as producer:
            producer.finish(60)
        sidecar.wait_until_archived(60)
        assert sidecar.stop() == 0

        def listed() -> dict[tuple[str, int], dict[str, object]]:
            rows = json.loads(sidecar.tiered("ls", sidecar.url, "--json").stdout)["queues"]
            return {(row["topic"], row["queueId"]): row for row in rows}

        before = listed()
        assert {(topic, row["ttlMs"], row["ttlFrom"]) for (topic, _), row in before.items()} == {
            ("live0", HOURS["live0"] * 3_600_000, "topic attribute reserve.time"),
            ("live1", HOURS["live1"] * 3_600_000, "topic attribute reserve.time"),
            ("live2", None, "retention.ttl"),
        }
        store = Later(sidecar.open_archive())  # 72 hours: longer than one, shorter than the other
        state = load(store)
        found = plan_pass(
            store, state, rules_in(store, state, Settings()), clock=Clock(wall_ms=store.clock_ms)
        )
        commit_pass(store, state, found, clock=Clock(wall_ms=store.clock_ms))
        assert found.is_committed
        for queue, row in listed().items():
            assert row["maxOffset"] == before[queue]["maxOffset"]
            assert row["minOffset"] == (row["maxOffset"] if queue[0] == "live0" else 0), queue
        verified = sidecar.tiered("verify", sidecar.url, "--full")
        assert verified.returncode == 0, verified.stdout
