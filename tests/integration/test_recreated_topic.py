"""A topic is deleted and recreated while slow consumers read it through the sidecar: all get the whole new topic."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from tests.integration.client_scene import Consumer, Line, begins_and_ends, everything, need_clients, until
from tests.integration.proxy_scene import ProxyScene, proxy_beside_broker
from tests.servers.store_directory import StoreDirectory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MODES = "push", "orderly", "pop"


@pytest.mark.parametrize("version", ["5.3.3", pytest.param("5.5.0", marks=pytest.mark.soak)])
def test_consumers_of_a_recreated_topic_get_all_its_messages(tmp_path: Path, version: str) -> None:
    need_clients(version)
    objects = StoreDirectory(tmp_path / "archives")
    with proxy_beside_broker(tmp_path, objects, {}, {}, topics=1, version=version) as scene:
        scene.fill(600)
        scene.wait_until_serving()
        flags = "-Dconsume.pause.ms=5", "-Dconsume.pull.size=4"
        consumers = [
            scene.consume(mode, f"G-{mode}", 10**6, idle_s=200, version=version, flags=flags)
            for mode in MODES
        ]
        before = everything(begins_and_ends(scene, "live0")[1])
        for consumer in consumers:
            consumer.wait_for_all(before)
        scene.sidecar.wait_until_archived(60)
        deleted_ms = time.time_ns() // 1_000_000
        scene.broker.delete_topic("live0")
        time.sleep(3)
        scene.broker.create_topic("live0", 4)
        scene.fill(300)
        wanted = everything(begins_and_ends(scene, "live0")[1])
        for mode, consumer in zip(MODES, consumers, strict=True):
            until(partial(_has_all, consumer, wanted, deleted_ms), f"{mode}: messages are missing", 100)


KINDS = (
    ("go", ""),
    ("push", "4.9.7"),
    ("push", "5.5.0"),
    ("orderly", "5.3.3"),
    ("lite", "5.3.3"),
    ("pop", "5.3.3"),
)
"""Modes and versions of clients."""
RECREATIONS = (300, 40, False), (600, 10, False), (300, 40, False), (600, 40, False), (600, 40, True)
"""Messages of a topic, how many a second, and whether its consumers are stopped while it changes."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", ["4.9.7", "5.3.3", "5.5.0"])
def test_consumers_at_the_end_of_a_topic_get_all_of_the_next_one(tmp_path: Path, version: str) -> None:
    """The new topic ends where the old one did, or passes that offset before its consumers pull again."""
    need_clients("4.9.7", "5.3.3", "5.5.0")
    objects = StoreDirectory(tmp_path / "archives")
    with proxy_beside_broker(tmp_path, objects, {}, {}, topics=1, version=version) as scene:
        scene.fill(300)
        scene.wait_until_serving()
        kinds = KINDS if version != "4.9.7" else KINDS[:-2]  # which has no requests for them
        consumers = [_started(scene, *kind) for kind in kinds]
        for consumer in consumers:
            consumer.wait_for_all(everything(begins_and_ends(scene, "live0")[1]))
        for count, per_second, stopped in RECREATIONS:
            until(partial(_is_archived, scene), "not archived")
            time.sleep(6)  # the Go client commits every 5 s
            if stopped:
                scene.end_children()
            deleted_ms = time.time_ns() // 1_000_000
            scene.broker.delete_topic("live0")
            scene.broker.create_topic("live0", 4)
            scene.fill(count, per_second)
            wanted = everything(begins_and_ends(scene, "live0")[1])
            if stopped:
                consumers = [_started(scene, *kind) for kind in kinds]
            for kind, consumer in zip(kinds, consumers, strict=True):
                until(
                    partial(_has_all, consumer, wanted, deleted_ms), f"{kind}: {count} at {per_second}/s", 100
                )


def _started(scene: ProxyScene, mode: str, version: str) -> Consumer:
    if mode == "go":
        return scene.consume_by_go("G-go")
    return scene.consume(mode, f"G-{mode}-{version[0]}", 10**6, idle_s=600, version=version)


def _is_archived(scene: ProxyScene) -> bool:
    """Whether all is, except what 4.9 brokers write of positions that are none, which is not archived."""
    return scene.sidecar.status().get("lagMessages") == 0


def _since(consumer: Consumer, stored_ms: int) -> set[Line]:
    """The places of what was stored since, as Consume.java and the Go client write it."""
    rows = consumer.fields()
    return {(int(row[0]), int(row[1])) for row in rows if int(row[6 if len(row) > 7 else 4]) >= stored_ms}


def _has_all(consumer: Consumer, wanted: set[Line], stored_ms: int) -> bool:
    return wanted <= _since(consumer, stored_ms)
