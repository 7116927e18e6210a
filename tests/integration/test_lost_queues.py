"""What befalls consume queues of real brokers: a power loss, as which a copy of a running store counts, lost queues, a
lost end of the log, another kind of queues and back. The archive shows what the broker serves, hides no more."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, beside_broker, finish
from tests.integration.live_stories import lose_the_tail, send
from tests.servers.rocketmq import BROKER
from tests.servers.store_directory import StoreDirectory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
LOAD = Load(2000, per_second=1000)


def power_loss(*order: str) -> Callable[[Sidecar, Scene], None]:
    """Copies the directories of a broker that takes messages, in this order, and starts it on the copy."""

    def story(sidecar: Sidecar, scene: Scene) -> None:
        store = sidecar.broker.store
        copy = store.with_name("copy")
        with Producer(sidecar.broker, scene, LOAD, sidecar.directory / "producer.out") as producer:
            for name in order:
                shutil.copytree(store / name, copy / name, dirs_exist_ok=True)
            rest = shutil.ignore_patterns(*order)
            shutil.copytree(store, copy, ignore=rest, dirs_exist_ok=True)
            producer.finish(60)
        sidecar.wait_until_archived(60)
        sidecar.broker.broker.kill()
        store.rename(store.with_name("lost"))
        copy.rename(store)

    return story


def lost_queue(sidecar: Sidecar, scene: Scene) -> None:
    sidecar.broker.broker.stop(timeout_s=40)
    shutil.rmtree(sidecar.broker.store / "consumequeue" / "live1")


def rocksdb_and_back(sidecar: Sidecar, scene: Scene) -> None:
    for kind in ("defaultRocksDB", "default"):
        sidecar.broker.broker.stop(timeout_s=40)
        sidecar.broker.restart_with({"storeType": kind})
        send_all(sidecar, scene)
    sidecar.broker.broker.stop(timeout_s=40)


def send_all(sidecar: Sidecar, scene: Scene) -> None:
    """Plain messages, and some with LMQ entries."""
    assert send(sidecar, scene, LOAD) == LOAD.messages
    broker = sidecar.broker
    broker.run_java("Light", broker.name_server_address, BROKER, "live0", str(scene.queues), "60", "own")


STORIES = {
    "queues first": power_loss("consumequeue", "commitlog"),
    "log first": power_loss("commitlog", "consumequeue"),
    "lost queue": lost_queue,
    "tail lost": lambda sidecar, _scene: lose_the_tail(sidecar, 100_000),
    "rocksdb and back": rocksdb_and_back,
}


@pytest.mark.parametrize("name", STORIES)
@pytest.mark.parametrize("version", ["5.3.3"])
def test_the_archive_shows_what_the_broker_serves(name: str, version: str, tmp_path: Path) -> None:
    scene = Scene(
        version=version,
        config={"enableLmq": "true", "enableMultiDispatch": "true"},
        settings={"TIERED_OFFLOAD__BATCH_AGE_MS": 500},
    )
    with beside_broker(scene, tmp_path, StoreDirectory(tmp_path / "archives")) as sidecar:
        sidecar.start()
        send_all(sidecar, scene)
        sidecar.wait_until_archived(60)
        STORIES[name](sidecar, scene)
        sidecar.broker.broker.start_if_stopped()
        send_all(sidecar, scene)
        sidecar.wait_until_archived(60)
        found = finish(sidecar)
        print(name, found)
        assert found.shown >= 2 * LOAD.messages
