"""`tiered detach` beside `tiered run` and consumers at work, as MOUNT.md describes it: it ends well each time."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.client_scene import need_clients
from tests.integration.mount_scene import MountScene, consumed, lines, mounting, until
from tests.servers.running_store import RunningStore
from tiered.catalog.archives import open_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.retirement import retired_since
from tiered.object_store.open_store import open_store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
MESSAGES = 1000


@pytest.mark.parametrize(
    ("version", "rounds"),
    [("5.3.3", 1), ("4.9.7", 3), ("5.3.3", 3), ("5.5.0", 3)],
    ids=str,
)
def test_a_broker_is_retired_beside_its_sidecar(
    version: str, rounds: int, tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore
) -> None:
    need_clients(version)
    with mounting(version, tmp_path_factory.mktemp("detach"), minio_url, ["live-a", "live-b"]) as scene:
        scene.settings["XDG_STATE_HOME"] = str(scene.directory / "state")
        output = scene.consumer("push", "G-push", "live0", ["-Dconsume.pause.ms=1"])
        for number in range(1, rounds + 1):
            follower = following(scene, "live-b")
            scene.fill("live-b", MESSAGES)
            until(lambda: len(lines(output)) > 0, "nothing is consumed")
            scene.retire("live-b")
            assert follower.wait(60) is not None, "tiered run still runs"
            assert archived_messages(scene, "live-b") == number * MESSAGES
            scene.brokers["live-b"].broker.start()
            scene.tiered("detach", "--undo", *scene.place("live-b"))
        until(lambda: len(consumed(output)) == rounds * MESSAGES / 2, "messages are missing", 180)


def following(scene: MountScene, broker: str) -> subprocess.Popen[bytes]:
    """`tiered run` beside a broker, once it follows."""
    log = scene.directory / f"run-{len(scene.children)}.log"
    command = [sys.executable, "-m", "rocketmq_tiered.cli", "run", *scene.place(broker)]
    with log.open("wb") as out:
        child = subprocess.Popen(command, env=scene.environment(), stdout=out, stderr=out)
    scene.children.append(child)
    until(lambda: b"state following" in Path(log).read_bytes(), "it does not follow", 90)
    return child


def archived_messages(scene: MountScene, broker: str) -> int:
    """Messages of live0 and live1 in the archive of a retired broker."""
    root = open_store(scene.url, scene.objects.options())
    try:
        state = load(open_archive(root, None, broker).store)
    finally:
        root.close()
    assert retired_since(state) is not None
    return sum(int(row["row_count"]) for key, row in state.queues() if key.topic in ("live0", "live1"))
