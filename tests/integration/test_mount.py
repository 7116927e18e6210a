"""Retired brokers, served by nodes of `tiered mount` under their names: a real name server, Java clients at work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.client_scene import need_clients
from tests.integration.mount_scene import MountScene, Node, consumed, lines, mounting, until
from tests.servers.running_store import RunningStore
from tiered.remoting.client import BrokerClient, RequestCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
MESSAGES = 2000


@pytest.fixture
def scene(tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore) -> Iterator[MountScene]:
    need_clients("5.3.3")
    with mounting("5.3.3", tmp_path_factory.mktemp("mount"), minio_url, ["live-a", "live-b"]) as found:
        yield found


def test_a_broker_is_retired_mounted_moved_and_taken_back(scene: MountScene) -> None:
    """Consumers at work continue on the mount and get everything once in order, a retry message included; when the
    holder is killed, another node takes over; the broker that comes back has the groups' offsets."""
    scene.fill("live-b", MESSAGES)
    slow = scene.directory / "slow"
    slow.touch()
    flags = [f"-Dconsume.pause.while={slow}"]
    push = scene.consumer("push", "G-push", "live0", [*flags, "-Dconsume.pause.ms=3000"])
    orderly = scene.consumer("orderly", "G-orderly", "live1", [*flags, "-Dconsume.pause.ms=1000"])
    until(lambda: len(lines(push)) > 10 and len(lines(orderly)) > 10, "nothing is consumed")
    scene.retire("live-b")
    nodes = {name: scene.mount(name) for name in ("n1", "n2")}
    until(lambda: "live-b" in scene.mounted(), "not mounted", 40)
    row = scene.mounted()["live-b"]
    until(lambda: scene.listed().get("live-b") == row["address"], "not registered")
    at_mount = len(lines(push))
    until(lambda: len(lines(push)) > at_mount, "the consumer does not continue")
    back = scene.consumer("push", "G-back", "live1", failures=1)
    until(lambda: consumed(back).total() >= 20, "retry messages do not come", 90)
    nodes[row["node"]].end()
    other = "n2" if row["node"] == "n1" else "n1"
    took_s = until(lambda: scene.holders().get("live-b") == other, "no other node takes over", 40)
    assert took_s <= 30
    slow.unlink()
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
    scene.tiered("verify", scene.url, "--full", "--broker", "live-b")
    nodes[other].end()


RETIRED = ("live-b", "live-c")


@pytest.mark.timeout(1500)
def test_a_drill_of_three_nodes(tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore) -> None:
    run_drill(tmp_path_factory.mktemp("drill"), minio_url, 12_000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_drill_with_120_000_messages(
    tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore
) -> None:
    run_drill(tmp_path_factory.mktemp("drill"), minio_url, 40_000)


def run_drill(place: Path, objects: RunningStore, messages: int) -> None:
    """Two brokers are retired under producers and consumers; then the nodes are killed, paused past their lease and
    drained in turn: nothing is missing, orderly queues keep their order, no send fails."""
    need_clients("5.3.3")
    with mounting("5.3.3", place, objects, ["live-a", *RETIRED]) as scene:
        drill(scene, messages)


def drill(scene: MountScene, messages: int) -> None:
    producer = scene.producer("live-a", messages, per_second=100)
    for broker in RETIRED:
        scene.fill(broker, messages)
    push = scene.consumer("push", "G-push", "live0", ["-Dconsume.pause.ms=200"])
    orderly = scene.consumer("orderly", "G-orderly", "live1", ["-Dconsume.pause.ms=40"])
    until(lambda: len(lines(push)) > 100 and len(lines(orderly)) > 100, "nothing is consumed")
    scene.retire(*RETIRED)
    for name in ("n1", "n2", "n3"):
        scene.mount(name)
    until(lambda: set(scene.holders()) == set(RETIRED), "not mounted", 60)
    took = []
    for number, act in enumerate((Node.end, Node.pause, Node.stop, Node.end)):
        node = scene.nodes[scene.holders()["live-b"]]
        before = scene.holders()
        lost = [broker for broker, holder in before.items() if holder == node.name]
        began_s = time.monotonic()
        act(node)
        until(lambda: _moved(scene, lost, node.name), f"{lost} are not taken over: {act.__name__}", 60)  # noqa: B023
        took.append(time.monotonic() - began_s)
        count = len(lines(push))
        until(
            lambda: len(lines(push)) > count or _all(push, messages),  # noqa: B023
            f"no consumption after {act.__name__} {number}", 90,
        )  # fmt: skip
        if act is Node.pause:
            node.resume()
        else:
            scene.mount(node.name)
    until(lambda: _all(push, messages), "messages are missing", 400)
    until(lambda: _all(orderly, messages), "orderly messages are missing", 400)
    assert in_order(orderly)
    sent = producer.communicate(timeout=400)[0].decode()
    assert f"DONE {messages} 0" in sent, sent[-200:]
    repeats = [sum(consumed(output).values()) - len(consumed(output)) for output in (push, orderly)]
    print(f"\ntook {[round(s, 1) for s in took]} s, repeats {repeats} of {messages * 3 // 2}")


def _moved(scene: MountScene, brokers: list[str], node: str) -> bool:
    listed, rows = scene.listed(), scene.mounted()
    return all(
        broker in rows and rows[broker]["node"] != node and listed.get(broker) == rows[broker]["address"]
        for broker in brokers
    )


def _all(output: Path, messages: int) -> bool:
    return len(consumed(output)) == messages * 3 // 2


def in_order(output: Path) -> bool:
    """Whether the first deliveries of each queue are in order; keys begin with their producer, one for each broker."""
    seen: dict[tuple[str, str], int] = {}
    known = set()
    for line in lines(output):
        if line[4] in known:
            continue
        known.add(line[4])
        place = line[4][:-12], line[0]
        if int(line[1]) < seen.get(place, -1):
            return False
        seen[place] = int(line[1])
    return True
