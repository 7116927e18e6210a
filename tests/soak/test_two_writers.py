"""Two `tiered run` beside one broker, both alive for half an hour, through a hung owner and an outage of the object
store: one takes over once at most. The standby's metrics show the lag while it can read the archive."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, beside_broker, finish
from tests.servers.running_store import RunningStore
from tests.soak.results import knob, limits, publish

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(7200)]

MINUTES = knob("TWO_WRITERS_MINUTES", 30)
LAG_MS = knob("TWO_WRITERS_LAG_MS", 60_000)
PER_SECOND = knob("TWO_WRITERS_PER_SECOND", 500)
HANG_S = LAG_MS / 2 / 1000
OUTAGE_S = 2 * LAG_MS / 1000
BEHIND, MARGIN = "rocketmq_tiered_store_behind_seconds", "rocketmq_tiered_store_retention_margin_seconds"


def test_two_live_writers_take_over_once_at_most(tmp_path: Path, minio_url: RunningStore) -> None:
    settings = {"TIERED_PROCESS__TAKE_OVER_LAG_MS": LAG_MS}
    scene = Scene(settings=settings)
    quiet_s = (MINUTES * 60 - HANG_S - OUTAGE_S) / 3
    with beside_broker(scene, tmp_path, minio_url) as first:
        first.start()
        first.wait_until_following(60)
        (tmp_path / "other").mkdir()
        second = Sidecar(first.broker, first.objects, first.url, tmp_path / "other", settings=settings)
        second.start()
        try:
            load = Load(1 << 40, body_bytes=500, per_second=PER_SECOND)
            with Producer(first.broker, scene, load, tmp_path / "producer.out") as producer:
                time.sleep(quiet_s)
                following_s = second.metric(BEHIND)
                os.kill(first.pid, signal.SIGSTOP)
                time.sleep(HANG_S)
                hung_s, margin_s = second.metric(BEHIND), second.metric(MARGIN)
                os.kill(first.pid, signal.SIGCONT)
                time.sleep(quiet_s)
                epoch_after_hang = first.status().get("epoch")
                first.object_server.stop()
                time.sleep(OUTAGE_S)
                outage_behind_s, standby_state = first.metric(BEHIND), second.status().get("state")
                first.object_server.start()
                time.sleep(quiet_s)
                sent = producer.finish(60, now=True)
            first.wait_until_archived(120)
            standby, owner = sorted((first, second), key=lambda one: int(one.status().get("epoch") or 0))
            epochs = owner.status()["epoch"]
            standby.kill()
            shown = finish(owner).shown
        finally:
            for one in (first, second):
                if one.process is not None and one.process.poll() is None:
                    one.kill()
    publish(
        "two live writers",
        minutes=MINUTES,
        lag_ms=LAG_MS,
        outage_s=OUTAGE_S,
        sent=sent.acked,
        failed=sent.failed,
        shown=shown,
        takeovers=epochs - 1,
        standby_behind_s=[following_s, hung_s],
        standby_margin_s=margin_s,
        owner_behind_in_outage_s=outage_behind_s,
        standby_in_outage=standby_state,
        missed=limits(
            at_most_one_takeover=epochs <= 2,
            a_hang_below_the_lag_moves_nothing=epoch_after_hang == 1,
            the_standby_shows_the_lag=(following_s or 0) < HANG_S / 2 <= (hung_s or 0)
            and margin_s is not None,
            the_owner_shows_an_outage=(outage_behind_s or 0) >= OUTAGE_S / 2,
            the_standby_shows_an_outage=standby_state == "blocked: object store",
            nothing_lost_or_twice=sent.acked <= shown <= sent.acked + sent.failed,
        ),
    )
