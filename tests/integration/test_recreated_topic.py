"""A topic is deleted and recreated while consumers, some of them slow, read it through the sidecar: all get the whole
new topic."""

import time
from functools import partial
from pathlib import Path

import pytest

from tests.integration.client_scene import Consumer, Line, begins_and_ends, everything, need_clients, until
from tests.integration.live import Compared
from tests.integration.live_scene import finish
from tests.integration.proxy_scene import ProxyScene, proxy_beside_broker
from tests.servers.store_directory import StoreDirectory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

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
        wanted, older = everything(begins_and_ends(scene, "live0")[1]), 0
        for consumer in consumers:
            consumer.wait_for_all(wanted)
        for count, per_second, stopped in RECREATIONS:
            until(partial(_is_archived, scene), "not archived")
            time.sleep(6)  # the Go client commits every 5 s
            if stopped:
                scene.end_children()
            older += len(wanted)
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
        scene.end_children()
        assert finish(scene.sidecar) == Compared(len(wanted), older)


def _started(scene: ProxyScene, mode: str, version: str) -> Consumer:
    if mode == "go":
        return scene.consume_by_go("G-go")
    flags = ("-Dconsume.pause.ms=5", "-Dconsume.pull.size=4") if version == "5.3.3" else ()
    return scene.consume(mode, f"G-{mode}-{version[0]}", 10**6, idle_s=600, version=version, flags=flags)


def _is_archived(scene: ProxyScene) -> bool:
    """Whether all is, except what 4.9 brokers write of positions that are none, which is not archived."""
    return scene.sidecar.status().get("lagMessages") == 0


def _has_all(consumer: Consumer, wanted: set[Line], stored_ms: int) -> bool:
    """Of what was stored since, as Consume.java and the Go client write it."""
    rows = consumer.fields()
    return wanted <= {
        (int(row[0]), int(row[1])) for row in rows if int(row[6 if len(row) > 7 else 4]) >= stored_ms
    }
