"""The admin pages of `tiered serve`.

What the admin page says of an archive with expired and hidden messages, and of a log that diverged.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.synthetic_store import StoreSpec, write_store
from rocketmq_tiered.page.html import sparkline
from rocketmq_tiered.page.settings_table import render_settings
from rocketmq_tiered.process.event_loop_admin import STALLED_S
from rocketmq_tiered.process.findings import of_report
from tests.end_to_end.offloading import SMALL, backfill
from tests.process.archive_admin_scene import Scene
from tests.process.page_scene import PageScene
from tests.process.status_report import REPORT
from tiered.archive.unreadable import UnreadableRange
from tiered.broker_store.bound import BoundReason
from tiered.console import size_text
from tiered.formats.memory_bound import SHORTAGES
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.settings.load import load_settings


def test_it_is_ready_while_it_serves_and_owns_the_groups() -> None:
    scene = Scene()
    assert scene.source.readiness() == (False, "starting")
    scene.source.address = "h:1"
    assert scene.source.readiness()[0]
    scene.problem = "refused"
    assert scene.source.readiness() == (False, "blocked: object store: refused")
    scene.problem = ""
    scene.offsets.holds_lease = False
    is_ready, why = scene.source.readiness()
    assert not is_ready and "another server owns the consumer groups" in why
    assert scene.source.health() == (True, "serving")


def test_it_is_healthy_while_the_event_loop_runs() -> None:
    scene = Scene()
    assert scene.source.health() == (True, "starting")
    scene.now_s += STALLED_S + 1
    is_healthy, why = scene.source.health()
    assert not is_healthy and "the event loop is held up" in why

    async def one_beat() -> None:
        beating = asyncio.create_task(scene.source.beat())
        await asyncio.sleep(0)
        beating.cancel()

    asyncio.run(one_beat())
    assert scene.source.health()[0]


def test_status_and_metrics_have_clients_groups_and_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.source.address = "h:1"
    monkeypatch.setattr(SHORTAGES, "count", 4)
    status = json.loads(scene.source.status_json())
    assert status == {
        "archive": "c/b in file:///a",
        "address": "h:1",
        "catalogVersion": 9,
        "storeProblem": "",
        "ownsGroups": True,
        "connections": 5,
        "groups": [{"name": "a", "members": 2}, {"name": "b", "members": 1}],
        "audited": {"refused": 3, "reset": 1},
        "unreadable": [],
    }
    found = scene.metrics()
    expected = {
        ("serve_connections",): 5,
        ("serve_consumers",): 3,
        ("serve_owns_groups",): 1,
        ("serve_store_blocked",): 0,
        ("serve_catalog_version",): 9,
        ("serve_refused_proxy_headers_total",): 7,
        ("serve_audited_total", "refused"): 3,
        ("serve_audited_total", "reset"): 1,
        ("decode_memory_shortages_total", "blob", "tiered"): 4,
    }
    assert expected.items() <= found.items()
    assert any(name.startswith("process_") for name, *_ in found)


def test_unreadable_messages_are_named_until_they_can_be_read(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.source.address = "h:1"
    scene.unreadable.note(UnreadableRange("orders", 3, 0, 20, 40, "sets/1.sso", "no such object"))

    async def beats() -> None:
        for _ in range(2):
            beating = asyncio.create_task(scene.source.beat())
            await asyncio.sleep(0)
            beating.cancel()

    asyncio.run(beats())
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    is_ready, text = scene.source.readiness()
    assert is_ready, "all other messages are served"
    for shown in (text, record.message):
        assert (
            "20 archived messages cannot be read: orders queue 3: offsets 20 to 39" in shown
            and "sets/1.sso" in shown
        )
    assert scene.metrics()["unreadable_messages",] == 20
    scene.unreadable.forget_read(QueueKey("orders", 3, 0), 10, 30)
    assert scene.metrics()["unreadable_messages",] == 0
    assert scene.source.readiness() == (True, "serving, and owner of the consumer groups")


Run = Callable[..., tuple[int, str, str]]
SPEC = StoreSpec(topics=1, queues_per_topic=2, body_bytes=100, file_bytes=256 << 10)
RULES = """[retention]
min_archived = "1s"
max_share = 1.0
[[topics.rules]]
pattern = "*"
max_bytes = "40KiB"
"""


def shown(scene: PageScene, target: str, text: str) -> str:
    """The page, once it has what threads of the page read."""
    page = ""
    for _ in range(50):
        page = scene.html(target)
        if text in page:
            return page
    raise AssertionError(page)


def test_bytes_of_expired_messages_are_not_counted(run: Run, tmp_path: Path) -> None:
    write_store(tmp_path / "store", SPEC, messages=2_000)
    store = FileStore(tmp_path / "archive")
    backfill(tmp_path / "store", store, settings=replace(SMALL, batch_bytes=64 << 10))
    (tmp_path / "rules.toml").write_text(RULES)
    before = json.loads(run("ls", store.url, "--by-topic", "--json")[1])["topics"][0]
    code, _, error = run("expire", store.url, "--rules", tmp_path / "rules.toml", "--apply", "--yes")
    assert code == 0, error
    (topic,) = json.loads(run("ls", store.url, "--by-topic", "--json")[1])["topics"]
    assert topic["bytes"] < before["bytes"] / 4
    queue = json.loads(run("ls", store.url, "--json")[1])["queues"][0]
    scene = PageScene(store.url)
    try:
        size = size_text(topic["bytes"])
        assert f"{size} before compression" in shown(scene, "/", f"{size} before compression")
        assert f">{size}<" in scene.html("/topics")
        assert f">{size_text(queue['bytes'])}<" in scene.html(f"/queues?topic={topic['topic']}")
    finally:
        scene.close()


def test_hidden_messages_and_log_histories_are_shown(tmp_path: Path) -> None:
    write_store(tmp_path / "short", SPEC, messages=200)
    write_store(tmp_path / "long", SPEC, messages=600)
    store = FileStore(tmp_path / "archive")
    for name in ("short", "long", "short"):
        backfill(tmp_path / name, store, replace_log=True)
    scene = PageScene(store.url)
    try:
        page = shown(scene, "/", "Log histories")
        assert "Hidden messages" in page and "of earlier log histories" in page
        assert "2 (current)" in page and ">400<" in page and "tiered cat --history N" in page
    finally:
        scene.close()


def test_a_log_that_diverged_is_named_with_what_it_would_hide_and_the_next_step(tmp_path: Path) -> None:
    write_store(tmp_path / "store", SPEC, messages=200)
    store = FileStore(tmp_path / "archive")
    backfill(tmp_path / "store", store)
    cause = "the broker's log shares nothing with the archive; continuing with it would hide 200 archived messages"
    report = replace(REPORT, state="diverged")
    scene = PageScene(
        store.url, report=report, is_ready=False, why=f"{cause}. Next: put the broker's log back"
    )
    try:
        page = scene.html("/")
        assert 'class="badge bad"' in page and ">diverged<" in page and "Log histories" not in page
        assert (
            'class="why">the broker&#39;s log shares nothing' in page
            and "hide 200 archived messages<" in page
        )
        assert '<p class="next">Next: put the broker&#39;s log back<' in page
    finally:
        scene.close()


def test_the_present_value_is_part_of_its_picture() -> None:
    assert "now 780, highest 780" in sparkline("Lag", [(10.0, 465.0)], "{:.0f}".format, 780)


def test_settings_are_rendered_without_markdown() -> None:
    rules = ("test", '[{"pattern": "orders-*", "ttl": "7d"}]')
    page = render_settings(load_settings(flags={"topics.rules": rules}))
    assert "`" not in page and "](" not in page
    assert (
        "<code>[[topics.rules]]</code> tables with <code>pattern</code>" in page and "(RETENTION.md)" in page
    )
    assert "{&#34;pattern&#34;:&#34;orders-*&#34;,&#34;ttl&#34;:&#34;7d&#34;}" in page
    assert "1 setting<" in page


@pytest.mark.parametrize(("state", "is_shown"), [("following", True), ("blocked: broker store", False)])
def test_a_stopped_broker_is_named_only_while_its_log_is_archived(state: str, is_shown: bool) -> None:
    report = replace(REPORT, state=state, bound_reason=BoundReason.DEAD.value)
    assert ("broker-down" in [found.about for found in of_report(report)]) is is_shown
