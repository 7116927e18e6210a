"""The pages of the admin server over a real archive: hostile names, keys and bodies, access, limits, searches.

docs/METRICS.md names every metric that a process exports, with its type, and no other.

The page of timers over an archive with pending, cancelled and refused ones.
"""

import base64
import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from rocketmq_tiered.maintenance.task_figures import CompactionStatus, KeyCompactionStatus, ScrubStatus
from rocketmq_tiered.page import archive_view
from rocketmq_tiered.page.html import STATIC_TYPES
from rocketmq_tiered.page.timers import DAYS_SHOWN, render_timers
from rocketmq_tiered.process.admin import CONNECTIONS_MAX, AdminServer
from rocketmq_tiered.process.metrics import (
    PREFIX,
    decoding_families,
    status_families,
    store_families,
)
from rocketmq_tiered.process.mount_report import MountAdminSource
from rocketmq_tiered.process.report import QueueReport, StatusReport
from rocketmq_tiered.process.serving_metrics import serving_families
from rocketmq_tiered.sending.timer_status import TimerStatus
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveStatus
from rocketmq_tiered.server.proxy.proxy_service import ProxyCounters, ProxyService
from rocketmq_tiered.server.proxy.relay_status import GroupReading, ProxyStatus, SlaveStatus
from rocketmq_tiered.server.slave.slave_service import SlaveCounters, SlaveService
from tests.end_to_end.offloading import backfill
from tests.fetcher.broker_store_writer import WrittenStore
from tests.process.archive_admin_scene import Scene
from tests.process.page_scene import Alive, PageScene, token_file
from tests.process.status_report import REPORT
from tiered.archive.task import EXPIRY, GARBAGE_COLLECTION, TaskStatus
from tiered.archive.timers import TimerCounts
from tiered.errors import UsageError
from tiered.model.timer import CANCEL, DELIVER_MS, HOUR_MS, TOPIC
from tiered.object_store.file import FileStore
from tiered.object_store.request_metrics import StoreMetrics
from tiered.settings.sections import AdminSettings

HOSTILE = '"><img src=x onerror=alert(1)>\u202e'
ESCAPED = "&#34;&gt;&lt;img src=x onerror=alert(1)&gt;\\u202e"
STORED = "2023-11-14T22:13:20Z"
TOKEN = "0123456789abcdef-token"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A hostile topic, and one with text and bytes."""
    directory = tmp_path_factory.mktemp("page")
    written = WrittenStore(directory / "store")
    written.put(HOSTILE, 0, HOSTILE.encode(), tags=HOSTILE, keys=HOSTILE)
    for number in range(30):
        written.put(
            "orders", number % 2, b'{"order": %d}' % number, keys=f"k{number} all", later_ms=1000 * number
        )
    written.put("orders", 0, bytes(range(256)), keys="raw", later_ms=30_000)
    store = FileStore(directory / "archive")
    backfill(directory / "store", store)
    return store.url


@pytest.fixture(scope="module")
def scene(archive: str) -> Iterator[PageScene]:
    found = PageScene(archive)
    yield found
    found.close()


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/topics",
        "/topics?filter=%22%3E%3Cimg&order=%3Cb%3E",
        "/queues?topic={}",
        "/messages?topic={}&value={}",
        "/messages?topic={}&value={}&by=time",
        "/messages?by=id&value={}",
        "/settings",
        "/messages?topic={}&by=offset&queue=0&value=0",
        "/messages?topic={}&by=time&value=0",
        "/messages?topic={}&by=offset&queue=0&value=0&form=hex",
        "/messages?by={}&value=1",
    ],
)
def test_names_keys_and_bodies_add_no_markup(scene: PageScene, target: str) -> None:
    quoted = "%22%3E%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E%E2%80%AE"
    answer = scene.answer(target.replace("{}", quoted))
    assert answer is not None
    page = answer.body.decode()
    assert "<img" not in page and "\u202e" not in page
    assert "style=" not in page and "<script src=" in page and page.count("<script") == 1


def test_a_hostile_message_is_shown_escaped(scene: PageScene) -> None:
    page = scene.html(
        "/messages?by=time&value=0&topic=%22%3E%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E%E2%80%AE"
    )
    assert page.count(ESCAPED) >= 5, "topic, tags, keys, properties and body"


def test_the_overview_shows_state_lag_and_archive(scene: PageScene) -> None:
    page = scene.html("/")
    for text in ("Lag behind the broker", "the uploader is running", "Pending deletions", "Stored", "Writer"):
        assert text in page
    assert "Cost a month" not in page, "a directory has no price"
    assert 'lang="en"' in page and "<main" in page and 'href="#content"' in page and "Clients" not in page


def test_trouble_is_never_shown_as_well(archive: str) -> None:
    trouble = PageScene(archive, is_ready=False, why="access denied; check the account")
    try:
        page = trouble.html("/")
        assert "badge bad" in page and "access denied; check the account" in page and "not ready" in page
    finally:
        trouble.close()


def test_an_archive_that_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    away = PageScene(f"file://{tmp_path}/none")
    try:
        page = away.html("/")
        assert "cannot be read" in page and "Lag behind the broker" in page
        assert "cannot be read" in away.html("/topics")
        assert "notice" in away.html("/messages?topic=orders&value=k1", 404)
    finally:
        away.close()


def test_topics_have_their_figures(scene: PageScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is never time for more than one queue at once: later pages show what earlier ones began."""
    monkeypatch.setattr(archive_view, "OLDEST_WORK_S", 0.0)
    for _ in range(100):
        page = scene.html("/topics?filter=ORD")
        if "2023-11-14 22:13:20" in page:
            break
    assert "1 found" in page and "2023-11-14 22:13:50" in page and "forever" in page and "NOT_IN_DISK" in page
    assert "2023-11-14 22:13:20" in page, "the oldest message"
    assert ">31<" in page
    assert "No topic matches" in scene.html("/topics?filter=zzz")


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("by=key&value=k7", "{&#34;order&#34;: 7}"),
        ("by=key&value=k7&queue=1", "{&#34;order&#34;: 7}"),
        ("by=key&value=all&whole=1", "the first 20"),
        ("by=offset&queue=1&value=2", "{&#34;order&#34;: 5}"),
        (f"by=time&value={STORED}", "the first 20"),
        ("by=time&value=2023-11-14T22:13:48Z", "3 found"),
        ("by=offset&queue=0&value=15", "000000f0  f0 f1 f2"),
        ("by=offset&queue=0&value=0&form=hex", "00000000  7b 22 6f 72 64 65 72"),
    ],
)
def test_messages_are_found(scene: PageScene, query: str, shown: str) -> None:
    assert shown in scene.html(f"/messages?topic=orders&{query}")


def test_a_message_is_found_by_the_id_of_the_broker(scene: PageScene) -> None:
    page = scene.html("/messages?topic=orders&by=key&value=k7")
    found = page.partition("Message id (offsetMsgId)</dt><dd>")[2].partition("<")[0]
    assert "{&#34;order&#34;: 7}" in scene.html(f"/messages?by=id&value={found}")


def test_settings_have_their_source(scene: PageScene) -> None:
    assert "ARCHIVE_URL" in scene.html("/settings") and "offload.batch_bytes" in scene.html("/settings")


def test_every_page_forbids_foreign_and_inline_content(scene: PageScene) -> None:
    for target in ("/", "/settings", *(f"/page/{name}" for name in STATIC_TYPES)):
        answer = scene.answer(target)
        assert answer is not None and answer.code == 200
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        for foreign in (b"http:", b"https:", b"//cdn"):
            content = answer.body.replace(b"http://www.w3.org/2000/svg", b"").replace(
                b"http://127.0.0.1:9000", b""
            )
            assert foreign not in content, target
    for missing in ("/elsewhere", "/page/", "/page/../page_requests.py", "/page/style.css/x", "/clients"):
        assert scene.answer(missing) is None, missing


def test_pages_of_other_sites_read_nothing(scene: PageScene) -> None:
    cross = scene.answer(
        "/messages?topic=orders&value=all", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors"
    )
    assert cross is not None and cross.code == 403
    link = scene.answer("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")
    assert link is not None and link.code == 200


def test_long_requests_are_refused(scene: PageScene) -> None:
    for target, code in (("/topics?filter=" + "x" * 9000, 414), ("/topics?" + "a=1&" * 50, 400)):
        answer = scene.answer(target)
        assert answer is not None and answer.code == code


def test_pages_that_wait_for_the_store_do_not_hide_the_health_of_the_process(
    archive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, released = PageScene(archive), threading.Event()
    scene.html("/topics")
    monkeypatch.setattr(scene.view, "access", lambda: released.wait(30))
    server = AdminServer("127.0.0.1", 0, Alive(), pages=scene.pages)
    host, _, port = server.url.removeprefix("http://").rpartition(":")

    def get(target: str) -> int:
        with closing(HTTPConnection(host, int(port), timeout=10)) as client:
            client.request("GET", target)
            return client.getresponse().status

    try:
        with ThreadPoolExecutor(2 * CONNECTIONS_MAX) as pool:
            waiting = [pool.submit(get, "/queues?topic=orders") for _ in range(CONNECTIONS_MAX)]
            try:
                assert next(as_completed(waiting, 5)).result() == 503
                assert [get("/health") for _ in range(3)] == [200] * 3
            finally:
                released.set()
    finally:
        server.close()


# -- access ---------------------------------------------------------------------------------------------------


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()


def test_with_a_token_every_page_needs_it(
    archive: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = PageScene(archive, admin=token_file(tmp_path, f"{TOKEN}\nsecond line\n"))
    try:
        for target in ("/", "/page/style.css", "/messages?topic=orders&value=k1"):
            refused = scene.answer(target)
            assert refused is not None and refused.code == 401 and b"orders" not in refused.body
            assert refused.headers["WWW-Authenticate"].startswith("Basic ")
            for authorization in (basic(TOKEN), f"Bearer {TOKEN}"):
                answer = scene.answer(target, Authorization=authorization)
                assert answer is not None and answer.code == 200
        with caplog.at_level(logging.WARNING):
            for wrong in (
                "Basic !",
                basic("wrong"),
                basic(""),
                "Bearer ",
                "Digest x",
                basic(TOKEN + "x"),
                "Bearer \u00fc",
            ):
                answer = scene.answer("/", Authorization=wrong)
                assert answer is not None and answer.code == 401
        assert caplog.text.count("its token is wrong") == 1 and TOKEN not in caplog.text
        (entry,) = [found for found in caplog.records if "its token is wrong" in found.message]
        assert vars(entry)["client"] == "192.0.2.7"
        answer = scene.answer("/settings", Authorization=basic(TOKEN))
        assert answer is not None and TOKEN.encode() not in answer.body
    finally:
        scene.close()


@pytest.mark.parametrize("text", ["", "short\n", " \n" + TOKEN])
def test_a_short_token_is_refused(archive: str, tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="fewer than 16 characters"):
        PageScene(archive, admin=token_file(tmp_path, text))
    with pytest.raises(UsageError, match="cannot be read"):
        PageScene(archive, admin=AdminSettings(token_file=str(tmp_path / "none")))


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "broker.example"])
def test_beyond_loopback_nothing_is_shown_without_a_token(archive: str, host: str) -> None:
    scene = PageScene(archive, admin=AdminSettings(host=host))
    try:
        answer = scene.answer("/")
        assert answer is not None and answer.code == 403 and b"admin.token_file" in answer.body
    finally:
        scene.close()


def test_where_clients_need_an_account_messages_need_a_token(archive: str) -> None:
    scene = PageScene(archive)
    try:
        assert "k1" in scene.html("/messages?topic=orders&value=k1")
        scene.has_accounts = True  # as after a reload
        assert "admin.token_file" in scene.html("/messages?topic=orders&value=k1", 403)
        scene.html("/")
    finally:
        scene.close()


# -- modes ----------------------------------------------------------------------------------------------------


def test_proxy_mode_shows_its_groups(archive: str) -> None:
    groups = (GroupReading(HOSTILE, 3, 75, 25, 1234),)
    scene = PageScene(archive, relays=[ProxyStatus("h:9876", 8, True, groups, 2)])
    try:
        page = scene.html("/clients")
        assert ESCAPED in page and ">75<" in page and "1,234" in page and "h:9876" in page
    finally:
        scene.close()


def test_serve_shows_no_lag(archive: str) -> None:
    scene = PageScene(archive, report=None, served=ArchiveStatus(5, [("billing", 2)], True))
    try:
        page = scene.html("/")
        assert "Lag behind" not in page and "Connections" in page
        assert "billing" in scene.html("/clients")
    finally:
        scene.close()


PAGE = Path(__file__).parents[2] / "docs" / "METRICS.md"
FULL: StatusReport = replace(
    REPORT,
    retention_margin_seconds=60.0,
    queues=(QueueReport("t", 0, 1, 1, 1.0),),
    tasks=(TaskStatus(EXPIRY, last_ms=1), TaskStatus(GARBAGE_COLLECTION, last_ms=1)),
    compaction=CompactionStatus(last_ms=1),
    key_compaction=KeyCompactionStatus(last_ms=1),
    timers=TimerStatus(),
    scrub=ScrubStatus(cycle_ms=1),
)
"""A report in which nothing is unknown."""


def service(kind: type[Any], status: object, counters: object) -> Any:
    found = MagicMock(spec=kind)
    found.status.return_value, found.counters = status, counters
    found.audited, found.refused_proxy_headers = {}, 0
    return found


def exported() -> Iterator[Metric]:
    store = StoreMetrics()
    store.record("put", 0.1, 10, "ThrottledError")
    proxy = service(ProxyService, ProxyStatus("h:1", 1, True, (), 1), ProxyCounters())
    slave = service(
        SlaveService,
        SlaveStatus("h:1", 1, True, (), 7, True, None, (("h:2", "registered"),)),
        SlaveCounters(),
    )
    yield from status_families(FULL)
    yield from store_families(store)
    yield from decoding_families()
    yield from serving_families(proxy)
    yield from serving_families(slave)
    for source in (Scene().source, MountAdminSource([])):
        served = text_string_to_metric_families(source.metrics().decode())
        yield from (family for family in served if family.name.startswith(PREFIX))


def test_the_page_of_metrics_names_all_that_is_exported() -> None:
    found = {
        (family.name.removeprefix(f"{PREFIX}_") + ("_total" if family.type == "counter" else ""), family.type)
        for family in exported()
    }
    assert set(re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE.read_text("utf-8"), re.MULTILINE)) == found


STORED_MS = 1_700_000_000_000
DUE_MS = STORED_MS + 30 * 24 * HOUR_MS


@pytest.fixture(scope="module")
def timer_archive(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("timers")
    written = WrittenStore(directory / "store")
    for number in range(5):
        put(written, f"U{number}", **{TOPIC: "orders", DELIVER_MS: str(DUE_MS + number * HOUR_MS)})
    put(written, "C", **{TOPIC: "orders", CANCEL: f"{DUE_MS + HOUR_MS} U1"})
    put(written, "R", **{TOPIC: "orders", DELIVER_MS: "soon"})
    store = FileStore(directory / "timer_archive")
    backfill(directory / "store", store)
    return store.url


def put(written: WrittenStore, unique_key: str, **more: str) -> None:
    written.put("TIERED_TIMERS", 0, b"x", keys="order-7", more={"UNIQ_KEY": unique_key, **more})


@pytest.fixture(scope="module")
def timer_scene(timer_archive: str) -> Iterator[PageScene]:
    found = PageScene(timer_archive)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("U0", ["pending", "2023-12-14 22:13:20", "orders", "order-7"]),
        ("U1", ["cancelled"]),
        ("C", [f"cancels {DUE_MS + HOUR_MS} U1"]),
        ("R", ["refused: its TIERED_DELIVER_MS is not a time"]),
    ],
)
def test_a_timer_is_found_by_its_unique_key(timer_scene: PageScene, key: str, words: list[str]) -> None:
    page = timer_scene.html(f"/timers?key={key}")
    assert all(word in page for word in words) and "<b>" not in page
    assert 'href="/messages?by=offset&amp;topic=TIERED_TIMERS' in page


def test_an_unknown_key_is_said(timer_scene: PageScene) -> None:
    assert "no message with id unknown in topic TIERED_TIMERS" in timer_scene.html("/timers?key=unknown", 404)


def test_hours_have_their_counts(timer_scene: PageScene) -> None:
    page = timer_scene.html("/timers")
    rows = re.findall(r'<th scope="row">([^<]*)</th><td class="n">(\d+)', page)
    assert rows[0] == ("2023-12-14 22:00", "1") and rows[1] == ("2023-12-15 00:00", "1")
    assert len(rows) == 4, "one was cancelled"
    assert "Not delivered" in page
    assert page.count('class="bad">late<') == len(rows), "their time has passed: 2023"


def test_days_follow_the_hours() -> None:
    now = 472_222
    hours = {now - 1: 2, now: 1, now + 47: 3} | {now + 48 + 24 * day: 10 for day in range(40)}
    page = render_timers(TimerCounts(hours), now * HOUR_MS, "", [], None)
    assert page.count("<tr>") == 2 + 3 + DAYS_SHOWN
    assert f"the first {DAYS_SHOWN} of 40 days" in page and ">406<" in page
    assert "No timer is pending." in render_timers(TimerCounts(), now * HOUR_MS, "", [], None)


def test_messages_of_accounts_need_a_token(timer_archive: str) -> None:
    found = PageScene(timer_archive, has_accounts=True)
    try:
        assert "orders" not in found.html("/timers?key=U0", 403)
        assert "Next hours" in found.html("/timers")
    finally:
        found.close()
