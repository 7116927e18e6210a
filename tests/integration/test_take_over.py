"""A dead writer's archive is taken over without a command, beside a real broker and MinIO."""

import shutil
import time
from pathlib import Path

import pytest

from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, beside_broker, finish
from tests.servers.running_store import RunningStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

LAG_MS = 8_000


def test_another_sidecar_takes_over_from_one_that_died_with_its_state(
    tmp_path: Path, minio_url: RunningStore
) -> None:
    settings = {"TIERED_PROCESS__TAKE_OVER_LAG_MS": LAG_MS}
    scene = Scene(settings=settings)
    with beside_broker(scene, tmp_path, minio_url) as owner:
        owner.start()
        owner.wait_until_following(60)
        other = tmp_path / "other"
        other.mkdir()
        standby = Sidecar(owner.broker, owner.objects, owner.url, other, settings=settings)
        standby.start()
        try:
            with Producer(
                owner.broker, scene, Load(20_000, 500, per_second=500), tmp_path / "out"
            ) as producer:
                time.sleep(1.5 * LAG_MS / 1000)  # both live: nothing is taken over
                assert owner.status()["epoch"] == 1 and standby.status()["state"] == "standby"
                owner.kill()
                shutil.rmtree(owner.directory / "state")
                killed_s = time.monotonic()
                while standby.status().get("epoch") != 2 or standby.status().get("state") == "standby":
                    assert time.monotonic() < killed_s + LAG_MS / 1000 + 60, standby.log.read_text()[-2000:]
                    time.sleep(0.5)
                sent = producer.finish(180)
            standby.wait_until_archived(60)
            assert "archived nothing while the log grew" in standby.log.read_text()
            assert sent.acked <= finish(standby).shown <= 20_000
        finally:
            if standby.process is not None and standby.process.poll() is None:
                standby.kill()
