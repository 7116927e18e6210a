"""`tiered run` beside real brokers, into MinIO, through everything that happens to a broker in its life.

The soak tests run the same stories at full size (tests/soak/test_live.py).

`tiered run` beside real brokers that dispatch to LMQs in their own ways, or not at all.

What befalls consume queues: a power loss, as which a copy of a running store counts, lost queues, a truncated log,
another kind of queues and back.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, beside_broker, finish
from tests.integration.live_stories import LiveSize, everything_happens, lose_the_tail
from tests.integration.live_stories import send as send_load
from tests.servers.rocketmq import BROKER
from tests.servers.running_store import RunningStore
from tests.servers.store_directory import StoreDirectory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.mark.parametrize("version", ["4.9.7", "5.3.3", "5.5.0"])
def test_everything_a_producer_sends_is_archived_while_it_sends(
    version: str, tmp_path: Path, minio_url: RunningStore
) -> None:
    scene = Scene(version)
    with beside_broker(scene, tmp_path, minio_url) as sidecar:
        sidecar.start()
        with Producer(sidecar.broker, scene, Load(15_000, 500), tmp_path / "producer.out") as producer:
            sent = producer.finish(120)
        sidecar.wait_until_archived(60)
        # A broker that has just started may refuse sends, or store ones it does not acknowledge in time.
        assert sent.acked + sent.failed == 15_000
        assert sent.acked > 10_000
        assert sent.acked <= finish(sidecar).shown <= 15_000


def test_restarts_outages_and_a_recreated_topic_lose_and_repeat_nothing(
    tmp_path: Path, minio_url: RunningStore
) -> None:
    size = LiveSize(messages=60_000, per_second=1500, outage_s=6, after_recreation=8_000)
    scene = Scene()
    with beside_broker(scene, tmp_path, minio_url) as sidecar:
        story = everything_happens(sidecar, scene, size)
        compared = finish(sidecar)
    # What was sent to the deleted topic is no longer shown, and still there.
    assert story.stored_at_least <= compared.shown + compared.older <= story.stored_at_most
    assert compared.shown >= story.stored_at_least - size.messages // 2


MESSAGES = 300
REFERENCES = {"4.9.7": 10 / 6, "5.3.3": 5 / 6, "5.5.0": 5 / 6}
"""For each message: 5.x dispatches none of a list that ends with a plain name."""
AT_ONCE = 0.8
"""Of the messages: the others are delayed, and the last of them may not be delivered yet."""


def send(sidecar: Sidecar, scene: Scene, how: str) -> None:
    said = sidecar.broker.run_java(
        "Light", sidecar.broker.name_server_address, BROKER, "live0", str(scene.queues), str(MESSAGES), how
    )
    assert f"DONE {MESSAGES}" in said


@pytest.mark.parametrize("dispatches", [True, False])
@pytest.mark.parametrize("version", ["4.9.7", pytest.param("5.3.3", marks=pytest.mark.soak), "5.5.0"])
def test_lmqs_are_the_brokers_while_it_runs_and_after_a_restart(
    version: str, dispatches: bool, tmp_path: Path
) -> None:
    """No queue that it does not have, none hidden behind another generation, no record missing."""
    switch = str(dispatches).lower()
    scene = Scene(version, topics=1, config={"enableLmq": switch, "enableMultiDispatch": switch})
    with beside_broker(scene, tmp_path, StoreDirectory(tmp_path / "objects")) as sidecar:
        sidecar.start()
        for round_number in range(2):
            if round_number:
                sidecar.broker.restart_with({})
            send(sidecar, scene, "own" if dispatches else "copied")
        sidecar.wait_until_archived(90)
        compared = finish(sidecar)
    assert compared.older == 0
    assert compared.shown >= AT_ONCE * 2 * MESSAGES * (1 + (REFERENCES[version] if dispatches else 0))


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


def send_all(sidecar: Sidecar, scene: Scene) -> int:
    """Plain messages, and some with LMQ entries; how many plain ones are acknowledged, as a new broker refuses some."""
    acked = send_load(sidecar, scene, LOAD)
    send(sidecar, scene, "own")
    return acked


STORIES = {
    "queues first": power_loss("consumequeue", "commitlog"),
    "log first": power_loss("commitlog", "consumequeue"),
    "lost queue": lost_queue,
    "truncated log": lambda sidecar, _scene: lose_the_tail(sidecar, 100_000),
    "rocksdb and back": rocksdb_and_back,
}


CASES = [(name, version) for name in STORIES for version in ("5.3.3", "4.9.7", "5.5.0")]
CASES.remove(("rocksdb and back", "4.9.7"))  # which has no RocksDB


@pytest.mark.parametrize(("name", "version"), CASES)
def test_the_archive_shows_what_the_broker_serves(name: str, version: str, tmp_path: Path) -> None:
    lmqs = {"enableLmq": "true", "enableMultiDispatch": "true"}
    scene = Scene(version, config=lmqs, settings={"TIERED_OFFLOAD__BATCH_AGE_MS": 500})
    with beside_broker(scene, tmp_path, StoreDirectory(tmp_path / "archives")) as sidecar:
        sidecar.start()
        send_all(sidecar, scene)
        sidecar.wait_until_archived(60)
        STORIES[name](sidecar, scene)
        sidecar.broker.broker.start_if_stopped()
        sent = send_all(sidecar, scene)
        sidecar.wait_until_archived(60)
        assert finish(sidecar).shown >= sent
