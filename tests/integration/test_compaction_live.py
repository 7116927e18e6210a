"""`tiered run` compacts beside a broker that takes messages: what is archived stays what the broker wrote."""

import time
from pathlib import Path

import pytest

from tests.integration.live_scene import Load, Producer, Scene, beside_broker, finish
from tests.servers.running_store import RunningStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SETTINGS = {
    "TIERED_COMPACTION__EVERY_MS": 1000,
    "TIERED_COMPACTION__MIN_AGE_MS": 0,
    "TIERED_OFFLOAD__BATCH_AGE_MS": 100,
}


def test_objects_are_joined_while_messages_arrive(tmp_path: Path, minio_url: RunningStore) -> None:
    scene = Scene(topics=3, queues=4, settings=SETTINGS)
    with beside_broker(scene, tmp_path, minio_url) as sidecar:
        sidecar.start()
        sidecar.wait_until_following(60)
        with Producer(sidecar.broker, scene, Load(16_000, per_second=800), tmp_path / "load.log") as load:
            sent = load.finish(120)
        sidecar.wait_until_archived(60)
        deadline_s = time.monotonic() + 60
        while not (found := sidecar.status()["compaction"])["rounds"] or found["backlogObjects"]:
            assert time.monotonic() < deadline_s, (found, sidecar.log.read_text()[-3000:])
            time.sleep(0.5)
        shown = sidecar.tiered("status", "--state-dir", str(tmp_path / "state")).stdout
        assert " objects joined to " in shown
        assert found["problem"] == ""
        assert found["joinedObjects"] >= 2 * found["madeObjects"]
        assert finish(sidecar).shown >= sent.acked
        assert not any((tmp_path / "state" / "compaction").iterdir())
