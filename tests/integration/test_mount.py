"""Retired brokers, served by nodes of `tiered mount` under their names: a real name server, Java clients at work."""

import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.client_scene import need_clients
from tests.integration.mount_scene import MountScene, Node, consumed, lines, mounting, until
from tests.object_store.sealed_scene import key_file
from tests.servers.go_client import go_consumer
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import rocketmq_jars
from tests.servers.rocketmq_proxy import PROXY_VERSION, grpc_programs, proxy_jars
from tests.servers.running_store import RunningStore
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RequestCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
MESSAGES = 2000


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore
) -> Iterator[MountScene]:
    """With ring keys as the parameter, the archives are encrypted."""
    need_clients("5.3.3")
    directory = tmp_path_factory.mktemp("mount")
    with mounting("5.3.3", directory, minio_url, ["live-a", "live-b"]) as found:
        if names := getattr(request, "param", ()):
            found.settings["TIERED_OBJECT_STORE__KEY_RING"] = str(key_file(directory / "ring", *names))
        yield found


@pytest.mark.parametrize("scene", [(), ("k1",)], ids=["plain", "encrypted"], indirect=True)
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
    until(lambda: _registered(scene), "not mounted", 60)
    assert scene.mounted()["live-b"].lag > 0
    at_mount = len(lines(push))
    until(lambda: len(lines(push)) > at_mount, "the consumer does not continue")
    back = scene.consumer("push", "G-back", "live1", failures=1)
    until(lambda: consumed(back).total() >= 20, "retry messages do not come", 90)
    holder = scene.node_of["live-b"]
    nodes[holder].end()
    other = "n2" if holder == "n1" else "n1"
    assert until(lambda: scene.holders().get("live-b") == other, "no other node takes over", 40) <= 30
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


def _registered(scene: MountScene) -> bool:
    row = scene.mounted().get("live-b")
    return row is not None and scene.listed().get("live-b") == row.address


@pytest.mark.timeout(1500)
def test_a_restored_broker_takes_its_name_back(scene: MountScene) -> None:
    """Its disk is gone. The mount does not register beside it, and hands over the groups; consumers continue with new
    messages and get nothing twice."""
    scene.fill("live-b", MESSAGES)
    push = scene.consumer("push", "G-push", "live0")
    until(lambda: len(lines(push)) > 10, "nothing is consumed")
    scene.retire("live-b")
    node = scene.mount("n1")
    until(lambda: _registered(scene), "not mounted", 60)
    until(lambda: len(consumed(push)) == MESSAGES / 2, "messages are missing", 120)
    broker = scene.brokers["live-b"]
    shutil.rmtree(broker.store)
    place = scene.url, str(broker.store), "--broker", "live-b", "--broker-conf", str(broker.broker_conf)
    restored = json.loads(scene.tiered("restore", *place, "--json"))
    assert restored["messages"] == MESSAGES
    broker.restart_with({**restored["brokerConf"], "brokerPermission": 0})
    until(lambda: scene.listed().get("live-b") == broker.broker_address, "not back", 120)
    until(lambda: scene.states().get("live-b") == "not registered", "registered beside its master", 90)
    assert "a master of this broker is registered" in scene.tiered("mount", "ls", scene.url, code=4)
    assert scene.listed()["live-b"] == broker.broker_address
    assert "permission" in scene.tiered("detach", "--undo", *scene.place("live-b"))
    assert scene.mounted() == {}
    scene.fill("live-b", MESSAGES)
    until(lambda: len(consumed(push)) == MESSAGES, "messages of the restored broker are missing", 120)
    assert consumed(push).total() == MESSAGES, "something came twice"
    scene.tiered("verify", scene.url, "--full", "--broker", "live-b")
    assert node.stop() == 0


@pytest.mark.timeout(1500)
def test_a_broker_whose_messages_have_expired_leaves_the_routes(scene: MountScene) -> None:
    """Until then it is read as far as nothing expires; then it is no longer announced, and its port is closed."""
    scene.settings |= {"TIERED_RETENTION__TTL": "30s", "TIERED_RETENTION__MIN_ARCHIVED": "1s"}
    scene.fill("live-b", MESSAGES)
    scene.retire("live-b")
    node = scene.mount("n1")
    until(lambda: _registered(scene), "not mounted", 60)
    expire = "expire", scene.url, "--broker", "live-b", "--yes"
    until(lambda: json.loads(scene.tiered(*expire, "--json"))["rows"] >= MESSAGES, "not past their time", 180)
    scene.tiered(*expire, "--apply")
    until(lambda: "live-b" not in scene.listed(), "still registered", 150)
    until(lambda: scene.states() == {}, "still announced", 30)
    assert "live-a" in scene.listed()
    scene.tiered("verify", scene.url, "--full", "--broker", "live-b")
    assert node.stop() == 0


RETIRED = ("live-b", "live-c")
TAKEN_S = 30


@dataclass(frozen=True)
class Drill:
    """Versions, the consumers beside two of Java, and messages to each broker."""

    broker: str
    name_server: str
    others: tuple[str, ...] = ()
    messages: int = 12_000

    def need(self) -> None:
        """Skip if a client or server cannot be had."""
        need_clients(self.broker)
        try:
            rocketmq_jars(self.name_server)
            if "go" in self.others:
                go_consumer()
            if "grpc" in self.others:
                need_clients(PROXY_VERSION)
                proxy_jars()
                grpc_programs()
        except NotInstallableError as error:
            pytest.skip(f"drill: {error}")


DRILLS = {
    "5.3.3": Drill("5.3.3", "5.3.3"),
    "5.3.3 go grpc": Drill("5.3.3", "5.3.3", ("go", "grpc")),
    "5.5.0 names 4.9.7 go": Drill("5.5.0", "4.9.7", ("go",), messages=8_000),
}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", DRILLS)
def test_a_drill_of_three_nodes(
    name: str, tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore
) -> None:
    run_drill(tmp_path_factory.mktemp("drill"), minio_url, DRILLS[name])


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_a_drill_with_120_000_messages(
    tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore
) -> None:
    run_drill(
        tmp_path_factory.mktemp("drill"), minio_url, Drill("5.3.3", "5.3.3", ("go", "grpc"), messages=40_000)
    )


def run_drill(place: Path, objects: RunningStore, kind: Drill) -> None:
    """Two brokers are retired under producers and consumers; then the nodes are killed, paused past their lease and
    drained in turn: nothing is missing, orderly queues keep their order, no send fails."""
    kind.need()
    with mounting(kind.broker, place, objects, ["live-a", *RETIRED], kind.name_server) as scene:
        drill(scene, kind)


def drill(scene: MountScene, kind: Drill) -> None:
    messages, routed = kind.messages, kind.messages // 4
    producers = {
        messages: scene.producer("live-a", messages, per_second=100),
        routed: scene.producer("*", routed, per_second=50, topics=1),  # to live0, wherever routes lead it
    }
    for broker in RETIRED:
        scene.fill(broker, messages)
    push = scene.consumer("push", "G-push", "live0", ["-Dconsume.pause.ms=200"])
    orderly = scene.consumer("orderly", "G-orderly", "live1", ["-Dconsume.pause.ms=40"])
    wanted = {push: messages * 3 // 2 + routed, orderly: messages * 3 // 2}
    if "go" in kind.others:
        wanted[scene.go_consumer("G-go", "live0", 200)] = wanted[push]
    if "grpc" in kind.others:
        wanted[scene.grpc_consumer("G-grpc", "live0", 80)] = wanted[push]
    for output in wanted:
        until(lambda: len(lines(output)) > 100, f"nothing is consumed: {output.name}", 120)  # noqa: B023
    scene.retire(*RETIRED)
    for name in ("n1", "n2", "n3"):
        scene.mount(name)
    until(lambda: set(scene.holders()) == set(RETIRED), "not mounted", 120)
    took = [_act(scene, act, push, wanted[push]) for act in (Node.end, Node.pause, Node.drain, Node.end)]
    for output, count in wanted.items():
        until(lambda: len(consumed(output)) >= count, f"messages are missing: {output.name}", 600)  # noqa: B023
    counts = {output.stem: consumed(output) for output in wanted}
    assert {name: len(found) for name, found in counts.items()} == {
        output.stem: count for output, count in wanted.items()
    }
    assert in_order(orderly)
    for count, producer in producers.items():
        sent = producer.communicate(timeout=400)[0].decode()
        assert f"DONE {count} 0" in sent, sent[-200:]
    repeats = {name: found.total() - len(found) for name, found in counts.items()}
    print(
        f"\ntook {took}, p50 {statistics.median(took)} s, max {max(took)} s, repeats {repeats} of {wanted[push]}"
    )
    scene.tiered("verify", scene.url, "--full", "--broker", "live-b")
    assert max(took) <= TAKEN_S


def _act(scene: MountScene, act: Callable[[Node], object], push: Path, wanted: int) -> float:
    """Do that to the node that serves live-b; returns the seconds until all its brokers are registered elsewhere. A
    node killed or drained starts again, a paused one continues."""
    until(lambda: set(scene.holders()) == set(RETIRED), "not served", 60)
    holders = scene.holders()
    node = scene.nodes[holders["live-b"]]
    lost = [broker for broker, holder in holders.items() if holder == node.name]
    before = scene.listed()
    began_s = time.monotonic()
    act(node)
    until(lambda: _moved(scene.listed(), before, lost), f"{lost} are not taken over: {act.__name__}", 90)
    took_s = round(time.monotonic() - began_s, 1)
    count = len(lines(push))
    until(
        lambda: len(lines(push)) > count or len(consumed(push)) == wanted,
        f"no consumption after {act.__name__}",
        90,
    )
    if act is Node.pause:
        node.resume()
    else:
        node.process.wait(120)
        scene.mount(node.name)
    return took_s


def _moved(listed: Mapping[str, str], before: Mapping[str, str], brokers: list[str]) -> bool:
    return all(listed.get(broker, before[broker]) != before[broker] for broker in brokers)


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
