"""A broker that was restored from an older copy of its store: nothing that it lost is lost to the archive."""

from pathlib import Path

import pytest

from tests.integration.live_scene import Load, Scene, beside_broker
from tests.integration.restored_scene import a_broker_is_restored
from tests.servers.running_store import RunningStore
from tests.soak.results import knob, limits, publish

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(5400)]

LIMIT_MIB = knob("RESTORED_LIMIT_MIB", 256)
LOST_MIB = [knob("RESTORED_LITTLE_MIB", 100), knob("RESTORED_MUCH_MIB", 1024)]
BODY_BYTES = 4096
ALERT_S_MAX = 30


@pytest.mark.parametrize("lost_mib", LOST_MIB)
def test_what_a_restored_broker_lost_stays_readable(
    lost_mib: int, tmp_path: Path, minio_url: RunningStore
) -> None:
    scene = Scene(
        settings={
            "TIERED_ARCHIVE__TRUNCATE_MAX_BYTES": LIMIT_MIB << 20,
            "TIERED_OFFLOAD__BATCH_AGE_MS": 1_000,
        }
    )
    with beside_broker(scene, tmp_path, minio_url) as sidecar:
        lost = Load((lost_mib << 20) // BODY_BYTES, BODY_BYTES)
        found = a_broker_is_restored(sidecar, scene, Load(5_000, body_bytes=500), lost)
    publish(
        "restored broker",
        lost_mib=lost_mib,
        limit_mib=LIMIT_MIB,
        messages=lost.messages,
        equal=found.lost,
        alert_s=round(found.alert_s, 1),
        stopped=found.stopped,
        deleted=found.deleted,
        missed=limits(
            stops_and_asks_above_the_limit_only=found.stopped == (lost_mib > LIMIT_MIB),
            an_alert_holds_at_once=found.alert_s < ALERT_S_MAX,
            nothing_is_lost=found.lost >= lost.messages * 0.99,
        ),
    )
