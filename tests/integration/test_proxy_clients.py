"""Beside a live broker, consumers of every kind get every message as the broker stored it, and mqadmin prints the same
as at the broker itself while that still has everything."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

from tests.integration.client_scene import QUEUES, Job, broker_range, delete_old_files, need_clients
from tests.integration.proxy_scene import ProxyScene, proxy_beside_broker
from tests.servers.rocketmq import BROKER, CLUSTER
from tests.servers.running_store import RunningStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

VERSIONS = ("4.9.7", "5.3.3", "5.5.0")
MODES = ("push", "broadcast", "orderly", "lite", "assign", "pull")
SENDS, LARGE = 320, 10
EVERYTHING = "-Dconsume.everything=true"
BINARY = "-Drocketmq.serialize.type=ROCKETMQ"
LMQS = ("%LMQ%one", "%LMQ%0", "%LMQ%1", "%LMQ%2")


@dataclass
class Deleted:
    """The same after the broker deleted most of it: what its own clients had got before, and what came since.
    ``first``: the smallest offset it still has."""

    tiered_proxy: ProxyScene
    truth: Counter[str]
    lmq: dict[str, Counter[str]]
    first: int


@dataclass
class Asked:
    """Commands of mqadmin by the tiered proxy, and what each printed at the broker itself, by a name for each."""

    commands: dict[str, str]
    wanted: dict[str, str]


@pytest.fixture(scope="module")
def tiered_proxy(tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore) -> Iterator[ProxyScene]:
    need_clients(*VERSIONS)
    # A commitlog file has to hold a message of 4 MiB.
    config = {
        "mappedFileSizeCommitLog": 8 << 20,
        "enableLmq": "true",
        "enableMultiDispatch": "true",
        "cleanResourceInterval": 1000,
    }
    with proxy_beside_broker(tmp_path_factory.mktemp("clients"), minio_url, config, {}) as found:
        found.fill(200, 80)
        send_odd(found, SENDS, LARGE)
        found.wait_until_serving()
        yield found
        found.end_children()
        assert found.sidecar.stop() == 0, found.sidecar.log.read_text()[-2000:]


@pytest.fixture(scope="module")
def deleted(tiered_proxy: ProxyScene, asked: Asked) -> Deleted:
    before = pulled_from_broker(tiered_proxy, "before")
    first = delete_old_files(tiered_proxy)
    send_odd(tiered_proxy, QUEUES * 8, 0, first=10**7)
    after = pulled_from_broker(tiered_proxy, "after")
    truth, *lmqs = [earlier | later for earlier, later in zip(before, after, strict=True)]
    return Deleted(tiered_proxy, truth, dict(zip(LMQS, lmqs, strict=True)), first)


def send_odd(tiered_proxy: ProxyScene, sends: int, large: int, *, first: int = 0) -> None:
    """Messages of all sorts to live0, straight to the broker."""
    broker = tiered_proxy.broker
    arguments = (broker.name_server_address, BROKER, "live0", str(QUEUES), str(sends), str(large), str(first))
    assert "DONE" in broker.run_java("Odd", *arguments)


def pulled_from_broker(tiered_proxy: ProxyScene, name: str) -> list[Counter[str]]:
    """Every message of live0 and of the LMQs as a client of the real name server gets it."""
    jobs = [Job("pull", f"T-{name}", 10**6, "live0", idle_s=2)]
    jobs += [_lmq_job(f"T-{name}-{lmq[5:]}", lmq) for lmq in LMQS]
    return [
        messages(found) for found in tiered_proxy.consume_all("5.3.3", jobs, flags=(EVERYTHING,), real=True)
    ]


def _lmq_job(group: str, topic: str) -> Job:
    return Job("light", group, 10**6, topic, expression="live0", idle_s=2)


def messages(found: Sequence[Sequence[str]]) -> Counter[str]:
    """What was stored: of what Consume.java says all but the outcome of consuming and the id a client makes up."""
    return Counter(" ".join([*fields[:7], *fields[9:12], fields[13]]) for fields in found)


# -- mqadmin ------------------------------------------------------------------------------------------------------


OF_MESSAGES = (
    "queryMsgById unique",
    "queryMsgByKey",
    "queryMsgByUniqueKey",
    "queryMsgByOffset",
    "printMsg",
    "printMsgByQueue",
    "consumeMessage",
)


def mqadmin_commands(tiered_proxy: ProxyScene, found: Sequence[str], address: str) -> dict[str, str]:
    """Commands to compare; ``found``: fields of a message with a key, ``address``: whom -b names."""
    queue, offset, unique, key, offset_id = found
    return {
        "topicList": "topicList",
        "topicList -c": "topicList -c",
        "topicRoute": "topicRoute -t live0",
        "topicStatus": "topicStatus -t live0",
        "clusterList": "clusterList",
        "brokerStatus": f"brokerStatus -b {address}",
        "consumerProgress": "consumerProgress -g G-progress",
        "consumerProgress of all": "consumerProgress",
        "queryMsgById unique": f"queryMsgById -t live0 -i {unique}",
        "queryMsgById offset": f"queryMsgById -t live0 -i {offset_id}",
        "queryMsgByKey": f"queryMsgByKey -t live0 -k {key}",
        "queryMsgByUniqueKey": f"queryMsgByUniqueKey -t live0 -i {unique}",
        "queryMsgByOffset": f"queryMsgByOffset -b {BROKER} -t live0 -i {queue} -o {offset}",
        "printMsg": "printMsg -t live1 -d true",
        "printMsgByQueue": f"printMsgByQueue -t live1 -a {BROKER} -i 0 -p true",
        "consumeMessage": f"consumeMessage -t live1 -b {BROKER} -i 0 -c 5",
        "queryCq": f"queryCq -t live0 -q {queue} -i {offset} -c 3 -b {address}",
        "resetOffsetByTime": "resetOffsetByTime -g G-progress -t live1 -s now",
    }


@pytest.fixture(scope="module")
def asked(tiered_proxy: ProxyScene) -> Asked:
    (got,) = tiered_proxy.consume_all(
        "5.3.3", [Job("pull", "T-admin", 10**6, idle_s=2)], flags=(EVERYTHING,), real=True
    )
    tiered_proxy.consume_all("5.3.3", [Job("push", "G-progress", 100, "live1")], real=True)
    fields = next(
        fields for fields in got if fields[5] == "Tag1" and "odd-" in fields[13] and int(fields[3]) < 300
    )
    key = re.search(r"KEYS%3D(odd-\d+)\+both", fields[13])
    assert key is not None
    found = fields[0], fields[1], fields[4], key[1], offset_id_of(tiered_proxy, fields)
    at_broker = mqadmin_commands(tiered_proxy, found, tiered_proxy.broker.broker_address)
    printed = tiered_proxy.tools(list(at_broker.values()), real=True)
    return Asked(
        mqadmin_commands(tiered_proxy, found, tiered_proxy.address),
        {name: alike(tiered_proxy, name, text) for name, text in zip(at_broker, printed, strict=True)},
    )


def test_mqadmin_prints_what_it_prints_at_the_broker(tiered_proxy: ProxyScene, asked: Asked) -> None:
    reset = "resetOffsetByTime -g G-progress -t live1 -s 0"
    *printed, reset_output = tiered_proxy.tools([*asked.commands.values(), reset])
    the_same(tiered_proxy, asked, dict(zip(asked.commands, printed, strict=True)))
    rows = [line.split()[1:] for line in reset_output.splitlines() if line.startswith(BROKER)]
    assert sorted(rows) == [[str(queue), "0"] for queue in range(QUEUES)]


@pytest.mark.soak
def test_mqadmin_finds_what_the_broker_has_deleted(deleted: Deleted, asked: Asked) -> None:
    commands = {name: text for name, text in asked.commands.items() if name in OF_MESSAGES}
    printed = deleted.tiered_proxy.tools(list(commands.values()))
    the_same(deleted.tiered_proxy, asked, dict(zip(commands, printed, strict=True)))


def the_same(tiered_proxy: ProxyScene, asked: Asked, printed: Mapping[str, str]) -> None:
    """As at the broker itself before."""
    differs = []
    for name, text in printed.items():
        there, here = asked.wanted[name], alike(tiered_proxy, name, text)
        (tiered_proxy.directory / f"mqadmin {name}.txt").write_text(f"{there}\n==== tiered_proxy\n{here}")
        assert there.strip(), name
        if there != here:
            differs.append(name)
    assert not differs


def offset_id_of(tiered_proxy: ProxyScene, fields: Sequence[str]) -> str:
    """Store host and physical offset in hex, as brokers make ids."""
    phys = int(fields[13].split("%7C")[6])
    host, _, port = tiered_proxy.broker.broker_address.rpartition(":")
    return "".join(f"{int(part):02X}" for part in host.split(".")) + f"{int(port):08X}{phys:016X}"


def alike(tiered_proxy: ProxyScene, command: str, printed: str) -> str:
    """Without what differs between two calls at the broker itself, nor by design (docs/SERVING.md)."""
    text = printed
    if command in ("topicRoute", "clusterList"):
        text = _without_sidecar(tiered_proxy, command, text)
    text = text.replace(tiered_proxy.address, tiered_proxy.broker.broker_address)
    if command == "brokerStatus":
        # Figures of a moment: those that say which broker it is, and the names of the others.
        said = ("brokerVersion", "bootTimestamp", "brokerActive", "startAcceptSend")
        lines = text.splitlines()
        text = "\n".join(line if line.startswith(said) else line.partition(":")[0] for line in lines)
    if command == "clusterList":
        text = re.sub(r"[-+]?\d[\d.,]*(E-?\d+)?", "N", text)
    text = re.sub(r"Consume TPS: .*|putMessageDistributeTime.*|\(long\)\[\d+\]", "", text)
    if command in OF_MESSAGES:
        # The last part of the line, which grows.
        text = re.sub(r"(MIN|MAX)_OFFSET=\d+,? ?|(min|max)Offset=\d+, ", "", text)
    if command == "consumerProgress of all":
        text = re.sub(r"(?m)\S+([ \t]+\S+)[ \t]*$", r"\1", text)  # TPS
    if command.startswith(("topicList", "consumerProgress of")):
        # In no order, and mqadmin's own group is there from its first pull on.
        text = "\n".join(sorted(line for line in text.splitlines() if "TOOLS_CONSUMER" not in line))
    return re.sub(r"[ \t]+", " ", text)


def _without_sidecar(tiered_proxy: ProxyScene, command: str, text: str) -> str:
    if command == "clusterList":
        lines = text.splitlines()
        rows = [line for line in lines if line.startswith(CLUSTER)]
        if any(tiered_proxy.address in row for row in rows):
            lines = [line for line in lines if tiered_proxy.address not in line]
        return "\n".join(lines)
    pattern = rf'"?0"?:\s*"{re.escape(tiered_proxy.address)}",\s*"?1"?:'
    return re.sub(pattern, "0:", text.replace('"0":', "0:"))


# -- consumers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_a_consumer_of_each_kind_gets_all_that_was_stored(deleted: Deleted, version: str) -> None:
    each_kind_gets_everything(deleted, version, binary=version == "5.3.3")


def each_kind_gets_everything(deleted: Deleted, version: str, *, binary: bool) -> None:
    """Undisturbed: nothing is missing, nothing comes twice, all is as the broker stored it."""
    assert deleted.first > 50
    tag = f"{version.replace('.', '_')}-{'binary' if binary else 'json'}"
    wanted = deleted.truth.total()
    jobs = [Job(mode, f"G-{mode}-{tag}", wanted) for mode in MODES]
    flags = (EVERYTHING, BINARY) if binary else (EVERYTHING,)
    for job, found in zip(jobs, deleted.tiered_proxy.consume_all(version, jobs, flags=flags), strict=True):
        got = messages(found)
        assert got == deleted.truth, (job.mode, difference(got, deleted.truth))
        if job.mode == "orderly":
            for queue in range(QUEUES):
                offsets = [int(fields[1]) for fields in found if int(fields[0]) == queue]
                assert offsets == list(range(broker_range(deleted.tiered_proxy, "live0", queue)[1]))


def difference(got: Counter[str], wanted: Counter[str]) -> str:
    """For reading: how many are missing and too many, and the first of each."""
    missing, extra = wanted - got, got - wanted
    return f"missing {missing.total()}: {list(missing)[:1]}; not wanted {extra.total()}: {list(extra)[:1]}"


def test_lmqs_too(deleted: Deleted) -> None:
    jobs = [_lmq_job(f"G-light-{name[5:]}", name) for name in LMQS]
    found = deleted.tiered_proxy.consume_all("5.3.3", jobs, flags=(EVERYTHING,))
    for name, got in zip(LMQS, found, strict=True):
        assert messages(got) == deleted.lmq[name], (name, difference(messages(got), deleted.lmq[name]))
        assert deleted.lmq[name].total() > 5
