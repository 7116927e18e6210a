"""The admin page with 10,000 queues at 20,000 messages/s: it is there within a second, sends do not notice it, and it
costs an idle sidecar nothing. Leaves screenshots in $RESULTS_DIR."""

import json
import os
import statistics
import time
from pathlib import Path

import pytest

from tests.integration.live_scene import Load, Producer, Scene, beside_broker
from tests.servers.chromium import PROGRAM, Chromium
from tests.servers.running_store import RunningStore
from tests.soak.process_figures import core_seconds
from tests.soak.results import knob, limits, publish

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(1200)]

PHASE_S = knob("PAGE_PHASE_S", 40)
PER_SECOND = knob("PAGE_PER_SECOND", 20_000)
BATCH = 20
"""Messages of a send: single sends reach a third of the rate here."""
TOPICS, QUEUES = 10, knob("PAGE_QUEUES", 10_000) // 10
PAINT_MS_MAX, READY_S_MAX, CORES_MAX, P99_RATIO_MAX = 1000, 5, 0.01, 1.1


@pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed")
def test_the_page_under_load(tmp_path: Path, minio_url: RunningStore) -> None:
    pictures = Path(os.environ.get("RESULTS_DIR", "build/soak"))
    pictures.mkdir(parents=True, exist_ok=True)
    scene = Scene(topics=TOPICS, queues=QUEUES)
    with beside_broker(scene, tmp_path, minio_url) as sidecar:
        begun_s = time.monotonic()
        sidecar.start()
        sidecar.wait_until_following(60)
        ready_s = time.monotonic() - begun_s
        url = json.loads((tmp_path / "state" / "instance.json").read_text())["admin_url"]
        load = Load(1 << 40, 256, 4, per_second=PER_SECOND, batch=BATCH)
        with Producer(sidecar.broker, scene, load, tmp_path / "load.txt") as producer:
            time.sleep(PHASE_S / 2)  # every queue has messages
            before = len(producer.p99_us_by_second())
            time.sleep(PHASE_S)
            middle = len(producer.p99_us_by_second())
            plain = tmp_path / "plain.html"
            plain.write_text("<p>A page of one line: the raw limit of a first paint here.")
            browser = Chromium(tmp_path / "chromium")
            try:
                plain_ms = browser.open(plain.as_uri())
                painted_ms = {
                    path: browser.open(f"{url}{path}") for path in ("/", "/topics", "/queues?topic=live0")
                }
                browser.open(f"{url}/")
                opened = len(producer.p99_us_by_second())
                time.sleep(PHASE_S)
                seconds = producer.p99_us_by_second()
                for scheme in ("light", "dark"):
                    browser.screenshot(pictures / f"admin-page-{scheme}.png", scheme)
                sent = producer.finish(60, now=True)
                sidecar.wait_until_archived(60)
                time.sleep(10)
                cores = _cores(sidecar.pid)
            finally:
                browser.close()
            alone_cores = _cores(sidecar.pid)
        assert sidecar.stop() == 0
    without, beside = statistics.median(seconds[before:middle]), statistics.median(seconds[opened:])
    publish(
        "admin page",
        missed=limits(
            first_paint=max(painted_ms.values()) <= PAINT_MS_MAX,
            ready=ready_s <= READY_S_MAX,
            idle=cores <= CORES_MAX,
            p99=beside <= P99_RATIO_MAX * without,
            none_failed=sent.failed == 0,
        ),
        queues=TOPICS * QUEUES,
        per_second=round(sent.acked / sent.seconds),
        ready_s=round(ready_s, 2),
        first_paint_ms={path: round(value) for path, value in painted_ms.items()},
        send_p99_us_without=without,
        send_p99_us_beside=beside,
        idle_cores=round(cores, 4),
        idle_cores_without_page=round(alone_cores, 4),
        first_paint_ms_of_a_plain_page=round(plain_ms),
    )


def _cores(pid: int) -> float:
    cpu_s = core_seconds(pid)
    time.sleep(PHASE_S)
    return (core_seconds(pid) - cpu_s) / PHASE_S
