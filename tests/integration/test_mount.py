"""Retired brokers, served by nodes of `tiered mount` under their names: a real name server, Java clients at work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.client_scene import need_clients
from tests.integration.mount_scene import MountScene, consumed, lines, mounting, until
from tests.servers.running_store import RunningStore
from tiered.remoting.client import BrokerClient, RequestCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
MESSAGES = 4000


@pytest.fixture
def scene(tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore) -> Iterator[MountScene]:
    need_clients("5.3.3")
    with mounting("5.3.3", tmp_path_factory.mktemp("mount"), minio_url, ["live-a", "live-b"]) as found:
        yield found


def test_a_broker_is_retired_mounted_moved_and_taken_back(scene: MountScene) -> None:
    """Consumers at work continue on the mount and get everything once in order, a retry message included; when the
    holder is killed, another node takes over; the broker that comes back has the groups' offsets."""
    scene.fill("live-b", MESSAGES)
    push = scene.consumer("push", "G-push", "live0", ["-Dconsume.pause.ms=250"])
    orderly = scene.consumer("orderly", "G-orderly", "live1", ["-Dconsume.pause.ms=90"])
    until(lambda: len(lines(push)) > 100 and len(lines(orderly)) > 50, "nothing is consumed")
    scene.retire("live-b")
    at_stop = len(lines(push))
    assert at_stop < MESSAGES / 2
    nodes = {name: scene.mount(name) for name in ("n1", "n2")}
    until(lambda: "live-b" in scene.mounted(), "not mounted", 40)
    row = scene.mounted()["live-b"]
    until(lambda: scene.listed().get("live-b") == row["address"], "not registered")
    until(lambda: len(lines(push)) > at_stop, "the consumer does not continue")
    nodes[row["node"]].end()
    other = "n2" if row["node"] == "n1" else "n1"
    took_s = until(lambda: scene.holders().get("live-b") == other, "no other node takes over", 40)
    assert took_s <= 30
    until(lambda: len(consumed(push)) == MESSAGES / 2, "messages are missing", 120)
    until(lambda: len(consumed(orderly)) == MESSAGES / 2, "messages are missing", 150)
    for queue in range(4):
        offsets = [int(line[1]) for line in lines(orderly) if line[0] == str(queue)]
        firsts = [offset for number, offset in enumerate(offsets) if offset not in offsets[:number]]
        assert firsts == sorted(firsts)
    scene.brokers["live-b"].broker.start()
    until(lambda: scene.listed().get("live-b") == scene.brokers["live-b"].broker_address, "not back")
    assert "permission" in scene.tiered("detach", "--undo", *scene.place("live-b"))
    client = BrokerClient(scene.brokers["live-b"].broker_address, 5.0)
    config = client.broker_config()
    assert config is not None and config["brokerPermission"] == "6"
    for queue in range(4):
        fields = {"consumerGroup": "G-push", "topic": "live0", "queueId": str(queue)}
        committed = client.call(14, fields).ext_fields["offset"]
        assert committed == client.call(RequestCode.GET_MAX_OFFSET, fields).ext_fields["offset"]
    client.close()
    assert scene.mounted() == {}
    assert nodes[other].stop() == 0
