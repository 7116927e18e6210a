"""The admin page in headless Chromium, beside a real broker that takes messages."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from rocketmq_tiered.process.admin import AdminServer
from tests.end_to_end.offloading import backfill
from tests.fetcher.broker_store_writer import WrittenStore
from tests.integration.live_scene import Load, Producer, Scene, beside_broker
from tests.process.page_scene import Alive, PageScene
from tests.servers.chromium import Chromium
from tests.servers.store_directory import StoreDirectory
from tiered.object_store.file import FileStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1000")
THEMES = {"light": 1, "dark": 0}


def browser(directory: Path, url: str, *flags: str) -> str:
    """What Chromium makes of a page, after its script has run."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            *FLAGS,
            f"--user-data-dir={directory}/chromium",
            "--virtual-time-budget=2000",
            *flags,
            url,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "Content Security Policy" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_beside_a_broker(tmp_path: Path) -> None:
    scene = Scene(topics=2, queues=4, settings={"TIERED_OFFLOAD__BATCH_AGE_MS": 500})
    with beside_broker(scene, tmp_path, StoreDirectory(tmp_path / "objects")) as sidecar:
        sidecar.start()
        sidecar.wait_until_following(60)
        url = json.loads((tmp_path / "state" / "instance.json").read_text())["admin_url"]
        load = Load(messages=200_000, per_second=2000)
        with Producer(sidecar.broker, scene, load, tmp_path / "load.txt"):
            page = shown(tmp_path, url, "<polyline", "objects at", ">8 queues<")
            assert "badge good" in page and ">following<" in page
            for theme, scheme in THEMES.items():
                flag = f"--blink-settings=preferredColorScheme={scheme}"
                browser(tmp_path, url, flag, f"--screenshot={tmp_path}/overview-{theme}.png")
                assert (tmp_path / f"overview-{theme}.png").stat().st_size > 20_000
        shown(tmp_path, f"{url}/topics", "live0", "live1")
        message = browser(tmp_path, f"{url}/messages?topic=live0&by=offset&queue=0&value=0", "--dump-dom")
        assert "offsetMsgId" in message and "UNIQ_KEY" in message
        assert sidecar.stop() == 0


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [420, 1280])
def test_rows_stay_low_and_names_whole(tmp_path: Path, width: int) -> None:
    store = WrittenStore(tmp_path / "store")
    for topic in ("orders-of-the-region-eu-west", "%RETRY%" + 100 * "g"):
        store.put(topic, 0, b"body", keys="k")
    archive = FileStore(tmp_path / "archive")
    backfill(tmp_path / "store", archive)
    scene = PageScene(archive.url)
    server = AdminServer("127.0.0.1", 0, Alive(), pages=scene.pages)
    page = Chromium(tmp_path / "chromium")
    try:
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        for path, row_px in (("/topics", 145), ("/settings", 110), ("/", 0)):
            page.open(f"{server.url}{path}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert (
                page.evaluate(f"Math.max(0, ...[...document.querySelectorAll('{ROWS}')].map({HEIGHT}))")
                <= row_px
            )
        page.open(f"{server.url}/settings")
        assert page.evaluate(
            "[...document.querySelectorAll('th code')].every(e => e.getClientRects().length < 2)"
        )
    finally:
        page.close()
        server.close()
        scene.close()


ROWS, HEIGHT = "section > div tbody tr", "row => row.offsetHeight"


def shown(directory: Path, url: str, *texts: str) -> str:
    """The page, once it shows all of ``texts``."""
    deadline_s = time.monotonic() + 60
    while True:
        page = browser(directory, url, "--dump-dom")
        if all(text in page for text in texts):
            return page
        assert time.monotonic() < deadline_s, page
        time.sleep(1)
