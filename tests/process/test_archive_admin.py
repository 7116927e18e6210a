"""The admin pages of `tiered serve`."""

from __future__ import annotations

import asyncio
import json

import pytest

from rocketmq_tiered.process.event_loop_admin import STALLED_S
from tests.process.archive_admin_scene import Scene
from tiered.archive.unreadable import UnreadableRange
from tiered.formats.memory_bound import SHORTAGES
from tiered.model.queue import QueueKey


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
