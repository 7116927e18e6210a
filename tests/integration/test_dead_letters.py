"""Java consumers read an archived dead letter topic, which its broker only allowed to be written (perm 2)."""

import json
from collections import Counter
from pathlib import Path

import pytest

from rocketmq_tiered.cli import main
from tests.integration.client_scene import need_clients
from tests.integration.served_scene import Job, Served
from tests.servers.tiered_serve import tiered_serve
from tests.uploader.small_broker import SmallBroker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]

TOPIC = "%DLQ%billing"
MESSAGES = 5


def write_only(topic: str) -> str:
    """A topic table with ``topic``, one queue, perm 2."""
    config = {
        "topicName": topic,
        "readQueueNums": 1,
        "writeQueueNums": 1,
        "perm": 2,
        "topicSysFlag": 0,
        "order": False,
    }
    return json.dumps({"dataVersion": {}, "topicConfigTable": {topic: config}})


@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
def test_a_dead_letter_topic_that_allows_only_writes_is_read(tmp_path: Path, version: str) -> None:
    need_clients(version)
    broker, url = SmallBroker(tmp_path / "store"), f"file://{tmp_path}/archive"
    (broker.path / "config" / "topics.json").write_text(write_only(TOPIC))
    broker.send(MESSAGES, TOPIC)
    assert main(["backfill", str(broker.path), url, "--cluster", "c", "--broker", "b"]) == 0
    server, address = tiered_serve(url, tmp_path)
    with server:
        served = Served(tmp_path, url, address, server)
        expected = served.expected(TOPIC)
        assert expected.total() == MESSAGES
        jobs = [Job(mode, TOPIC, MESSAGES, f"G_{mode}") for mode in ("push", "pull")]
        for found in served.consume(version, *jobs):
            assert Counter(found) == expected
