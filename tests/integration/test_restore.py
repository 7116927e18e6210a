"""Real brokers serve what `tiered restore` makes of an archive: every message, and new ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.restored_store import Original, differences, restored, tiered
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import java_classes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CASES = [
    ("G", "file"), ("A", "file"), ("C", "rocksdb"), ("E", "file"),
    ("B", "file"), ("D", "rocksdb"), ("K", "none"), ("A", "none"), ("G", "rocksdb"), ("A", "rocksdb"), ("C", "file"),
]  # fmt: skip


@pytest.fixture(params=CASES, ids="-".join)
def case(
    request: pytest.FixtureRequest, real_store: Callable[[str], Path], tmp_path: Path
) -> tuple[Original, str, Path]:
    name, queues = request.param
    original = Original(name, real_store(name))
    try:
        java_classes(original.version)
    except NotInstallableError as error:
        pytest.skip(f"RocketMQ: {error}")
    original.backfill(f"file://{tmp_path}/archive")
    return original, queues, tmp_path


def test_a_broker_serves_every_message_and_its_archive_continues(case: tuple[Original, str, Path]) -> None:
    original, queues, directory = case
    url = f"file://{directory}/archive"
    settings = {"forceVerifyPropCRC": "true"} if original.name == "K" else {}
    wanted = sorted(original.truth.queues)
    if queues == "rocksdb":
        wanted = [queue for queue in wanted if queue[0] != "t_bcq"]
    arguments = ("--consume-queue", queues, "--broker-conf", original.directory / "broker.conf")
    with restored(original, url, directory / "broker", *arguments, **settings) as (broker, said):
        pulled = broker.pull(wanted)
        assert differences(original, pulled) == []
        assert sum(map(len, pulled.messages.values())) > 5_000
        end = broker.max_offset("t_one", 0)
        broker.send("t_one", "after the restore")
        broker.server.broker.kill()
        broker.server.broker.start()
        again = broker.pull(wanted)
        assert again.ranges[("t_one", 0)] == (pulled.ranges[("t_one", 0)][0], end + 1)
        before = {queue: lines for queue, lines in pulled.messages.items() if queue != ("t_one", 0)}
        assert {queue: again.messages[queue] for queue in before} == before
        assert again.messages[("t_one", 0)][:-1] == pulled.messages[("t_one", 0)]
        broker.server.broker.stop(timeout_s=60)
        printed = tiered("backfill", directory / "broker" / "store", url)
        assert "1 message," in printed
        assert "clean" in tiered("verify", url, "--full")
        assert said["messages"] > 5_000
