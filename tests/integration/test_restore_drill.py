"""The drill of docs/RESTORE.md: broker, disk and sidecar are gone, the bucket is left; clients resume, and the archive
continues."""

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.integration.client_scene import (
    ClientScene,
    Consumer,
    Job,
    all_there_is,
    beside_clients,
    need_clients,
    until,
)
from tests.integration.live_scene import Scene, finish
from tests.servers.running_store import RunningStore
from tiered.catalog.catalog_reader import load
from tiered.formats.memory_bound import stored_bytes_max
from tiered.formats.state_object import decode_state

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

GROUP, TABLE = "G-drill", "consumer_offsets"
SETTINGS = {"TIERED_OFFLOAD__BATCH_AGE_MS": 500}


def consumer(scene: ClientScene, wanted: int, idle_s: int, *flags: str) -> Consumer:
    """A push consumer of the group at the broker."""
    output = scene.output(GROUP)
    job = Job("push", GROUP, wanted, idle_s=idle_s)
    arguments = scene.broker.name_server_address, *job.arguments(output)
    return scene.start(output, scene.broker.version, "Consume", *arguments, flags=flags)


def archived_offsets(scene: ClientScene) -> dict[int, int]:
    """Where the group is, by queue, according to the archive."""
    store = scene.sidecar.open_archive()
    key = load(store).state_objects.get(TABLE)
    table = {} if key is None else decode_state(store.get(key, stored_bytes_max()), TABLE, source=key)
    return {int(queue): int(offset) for queue, offset in table.get(f"live0@{GROUP}", {}).items()}


@pytest.mark.parametrize(("version", "queues"), [("5.3.3", "file"), ("5.5.0", "rocksdb")])
def test_clients_and_archive_continue_with_a_broker_made_from_the_bucket(
    version: str, queues: str, tmp_path: Path, minio_url: RunningStore
) -> None:
    need_clients(version)
    story = Scene(version, topics=1, settings=SETTINGS)
    with beside_clients(
        story, tmp_path, minio_url, lambda sidecar: ClientScene(sidecar, "", story, tmp_path)
    ) as scene:
        sidecar, broker = scene.sidecar, scene.broker
        sidecar.start()
        sidecar.wait_until_following(60)
        scene.fill(2000)
        first = consumer(scene, 800, 30, "-Dconsume.pause.ms=5", "-Dconsume.pull.size=4")
        assert first.child.wait(120) == 0
        sidecar.wait_until_archived(60)
        until(lambda: sum(archived_offsets(scene).values()) >= 700, "the group's offsets are not archived")
        before, committed = all_there_is(scene, "live0"), archived_offsets(scene)
        assert sum(committed.values()) < len(before), "nothing is left to consume"

        sidecar.kill()
        broker.broker.kill()
        shutil.rmtree(broker.store)
        shutil.rmtree(sidecar.directory / "state")
        lost_s = time.monotonic()
        arguments = ("--broker-conf", str(broker.broker_conf), "--consume-queue", queues, "--index", "--json")
        done = sidecar.tiered("restore", sidecar.url, str(broker.store), *arguments)
        assert done.returncode == 2 and "may still archive" in done.stderr, "the owner was there just now"
        version = done.stderr.split()[-1]
        done = sidecar.tiered("restore", sidecar.url, str(broker.store), *arguments, "--at-version", version)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["messages"] == len(before)
        restored_s = time.monotonic() - lost_s
        broker.restart_with(said["brokerConf"])
        ready_s = time.monotonic() - lost_s
        assert all_there_is(scene, "live0") == before

        second = consumer(scene, 10**6, 60)
        scene.fill(300)
        wanted = all_there_is(scene, "live0")
        assert len(wanted) >= len(before) + 240
        second.wait_for_all({line for line in wanted if line[1] >= committed[line[0]]})
        resumed_s = time.monotonic() - lost_s
        assert all(offset >= committed[queue] for queue, offset in second.lines()), "the group starts over"
        print(
            f"restored after {restored_s:.0f} s, broker ready {ready_s:.0f} s, all consumed {resumed_s:.0f} s"
        )

        sidecar.arguments = ("--take-over",)
        sidecar.start()
        sidecar.wait_until_following(60)
        sidecar.wait_until_archived(60)
        assert not load(sidecar.open_archive()).log_histories
        second.kill()
        assert finish(sidecar).shown == len(wanted)
