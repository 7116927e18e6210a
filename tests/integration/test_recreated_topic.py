"""A topic is deleted and recreated while slow consumers read it through the sidecar: all get the whole new topic."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.client_scene import Consumer, Line, begins_and_ends, everything, need_clients, until
from tests.integration.proxy_scene import proxy_beside_broker
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
            until(
                lambda one=consumer: wanted <= _since(one, deleted_ms), f"{mode}: messages are missing", 100
            )  # type: ignore[misc]


def _since(consumer: Consumer, stored_ms: int) -> set[Line]:
    """The places of what was stored since."""
    return {(int(row[0]), int(row[1])) for row in consumer.fields() if int(row[6]) >= stored_ms}
