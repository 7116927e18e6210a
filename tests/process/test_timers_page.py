"""The page of timers over an archive with pending, cancelled and refused ones."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from rocketmq_tiered.page.timers import DAYS_SHOWN, render_timers
from tests.end_to_end.offloading import backfill
from tests.fetcher.broker_store_writer import WrittenStore
from tests.process.page_scene import PageScene
from tiered.archive.timers import TimerCounts
from tiered.model.timer import CANCEL, DELIVER_MS, HOUR_MS, TOPIC
from tiered.object_store.file import FileStore

STORED_MS = 1_700_000_000_000
DUE_MS = STORED_MS + 30 * 24 * HOUR_MS


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("timers")
    written = WrittenStore(directory / "store")
    for number in range(5):
        put(written, f"U{number}", **{TOPIC: "orders", DELIVER_MS: str(DUE_MS + number * HOUR_MS)})
    put(written, "C", **{TOPIC: "orders", CANCEL: f"{DUE_MS + HOUR_MS} U1"})
    put(written, "R", **{TOPIC: "orders", DELIVER_MS: "soon"})
    store = FileStore(directory / "archive")
    backfill(directory / "store", store)
    return store.url


def put(written: WrittenStore, unique_key: str, **more: str) -> None:
    written.put("TIERED_TIMERS", 0, b"x", keys="order-7", more={"UNIQ_KEY": unique_key, **more})


@pytest.fixture(scope="module")
def scene(archive: str) -> Iterator[PageScene]:
    found = PageScene(archive)
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
def test_a_timer_is_found_by_its_unique_key(scene: PageScene, key: str, words: list[str]) -> None:
    page = scene.html(f"/timers?key={key}")
    assert all(word in page for word in words) and "<b>" not in page
    assert 'href="/messages?by=offset&amp;topic=TIERED_TIMERS' in page


def test_an_unknown_key_is_said(scene: PageScene) -> None:
    assert "no message with id unknown in TIERED_TIMERS" in scene.html("/timers?key=unknown", 404)


def test_hours_have_their_counts(scene: PageScene) -> None:
    page = scene.html("/timers")
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


def test_messages_of_accounts_need_a_token(archive: str) -> None:
    found = PageScene(archive, has_accounts=True)
    try:
        assert "orders" not in found.html("/timers?key=U0", 403)
        assert "Next hours" in found.html("/timers")
    finally:
        found.close()
