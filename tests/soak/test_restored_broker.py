"""A broker that was restored from an older copy of its store: nothing that it lost is lost to the archive."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live_scene import Load, Scene, beside_broker
from tests.integration.restored_scene import a_broker_is_restored
from tests.servers.running_store import RunningStore

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

LIMIT_BYTES = 8 << 20


@pytest.mark.parametrize("lost_bytes", [2 << 20, 16 << 20], ids=["little", "much"])
def test_what_a_restored_broker_lost_stays_readable(
    lost_bytes: int, tmp_path: Path, minio_url: RunningStore
) -> None:
    settings = {"TIERED_ARCHIVE__TRUNCATE_MAX_BYTES": LIMIT_BYTES, "TIERED_OFFLOAD__BATCH_AGE_MS": 1_000}
    scene = Scene(settings=settings)
    with beside_broker(scene, tmp_path, minio_url) as sidecar:
        lost = Load(lost_bytes // 1_000, body_bytes=1_000, per_second=0)
        found = a_broker_is_restored(sidecar, scene, Load(5_000, body_bytes=500), lost)
        assert found.stopped == (lost_bytes > LIMIT_BYTES)
        assert found.alert_s < 30 and found.lost >= lost.messages * 0.99
