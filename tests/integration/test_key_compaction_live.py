"""A compaction topic of a live broker through its own rounds and the expiry of its commitlog: broker, proxy mode and
archive mode give the same view.

A live broker with a compaction topic, messages with keys for it, and what consumers of all three servers see.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from rocketmq_tiered.sending.outgoing import OutgoingMessage
from tests.integration.client_scene import (
    ClientScene,
    ask,
    begin_deleting,
    beside_clients,
    broker_config,
    need_clients,
    until,
    wait_for,
)
from tests.integration.live import Sidecar
from tests.integration.live_scene import Scene
from tests.servers.child import free_port
from tests.servers.rocketmq import MQADMIN
from tests.servers.store_directory import StoreDirectory
from tests.servers.tiered_serve import tiered_serve
from tiered.formats.record import decode_record
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RequestCode, ResponseCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Keyed]:
    """A broker with a compaction topic, and a sidecar that is not started; its proxy at ``scene.address``."""
    need_clients("5.3.3")
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "TIERED_SERVE__BIND": address,
        "TIERED_SERVE__ADVERTISE": address,
        "TIERED_READ__POLICY": "FORCE",
        "TIERED_OFFLOAD__BATCH_AGE_MS": 300,
    }
    scene = Scene(topics=1, config=compacting_broker(), settings=settings)
    with beside_clients(
        scene,
        tmp_path,
        StoreDirectory(tmp_path / "objects"),
        lambda sidecar: ClientScene(sidecar, address, scene, tmp_path),
    ) as clients:
        found = Keyed(clients)
        found.create()
        yield found


def compact_keys(keyed: Keyed, cut: int) -> int:
    """A round of the archive after one with ``cut``; its cut."""
    done = keyed.scene.sidecar.tiered(
        "compact-keys", keyed.scene.sidecar.url, "--apply", "--older-than", "0", "--json"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["rounds"] == 1
    return keyed.kept(cut)[document["messages"]]


def check_views(keyed: Keyed, archive: str, cut: int, *, is_expired: bool = False) -> int:
    """``cut``: of the archive's last round. Of the broker's cuts, the one that it has at the end."""
    check_server(keyed, archive, cut, minimum=0)
    while True:
        brokers = keyed.compacted_by_broker()
        try:
            for address in (keyed.scene.broker.broker_address, keyed.scene.address):
                # A broker's minimum is that of its commitlog, though its pulls begin before it.
                check_server(keyed, address, brokers, minimum=len(keyed.sent) if is_expired else 0)
        except AssertionError:
            if brokers == keyed.compacted_by_broker():
                raise
        else:
            return brokers


def check_server(keyed: Keyed, address: str, cut: int, minimum: int) -> None:
    """It gives the view of all messages, and replies to pulls at every edge as a broker with ``cut``."""
    end, kept = len(keyed.sent), keyed.kept(cut)
    until(
        lambda: set(pulled(address, 0, 32)[0].offsets) <= set(kept), "a server shows what a round dropped", 10
    )
    assert Reader().read(address, kept).view == keyed.view
    for offset in (0, kept[0] - 1, kept[0], kept[3] + 1, cut - 1, cut, end - 1, end, end + 1, end + 100):
        reply, wanted = pulled(address, offset)[0], expected(kept, end, offset)
        if reply.offsets:  # a broker's reply ends with a file
            shown = wanted.offsets[: len(reply.offsets)]
            wanted = wanted._replace(offsets=shown, following=shown[-1] + 1)
        assert reply == wanted, (address, offset)
    offsets = [
        int(ask(address, code, topic=KEYED, queueId=0).ext_fields["offset"])
        for code in (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
    ]
    assert offsets == [minimum, end]


def test_broker_proxy_and_archive_give_the_same_view(keyed: Keyed, tmp_path: Path) -> None:
    sidecar = keyed.scene.sidecar
    sidecar.start()
    wait_for(sidecar.log, '"the archive is open for clients"')
    archive, address = None, ""
    cuts = 0, 0
    lagging: list[Reader] = []
    try:
        for keys in (range(30), range(20, 60)):
            for _ in range(4):
                keyed.send(100, keys)
                sidecar.wait_until_archived(60)
            if archive is None:
                archive, address = tiered_serve(sidecar.url, tmp_path)
                archive.start()
            servers = [keyed.scene.broker.broker_address, keyed.scene.address, address]
            everything = range(len(keyed.sent))  # what rounds leave is checked once they ended
            lagging += [Reader().read(server, everything, 150) for server in servers]
            lagging = [one.read(servers[at % 3], everything, 40) for at, one in enumerate(lagging, 1)]
            keyed.wait_for_round(cuts[0] + 200)
            cut = compact_keys(keyed, cuts[1])
            cuts = check_views(keyed, address, cut), cut
        keyed.expire_commitlog()
        cuts = check_views(keyed, address, cuts[1], is_expired=True), cuts[1]
        for at, one in enumerate(lagging):
            one.read(servers[at % 3], keyed.kept(cuts[at % 3 == 2]))
            late = {key for key in one.view if key not in keyed.view}
            assert {key: found for key, found in one.view.items() if key not in late} == keyed.view
            # They stopped between a value and its tombstone, which went before they read on: min_age_ms is for these.
            assert all(one.view[key][0] < keyed.latest[key][0] < max(cuts) for key in late)
    finally:
        if archive is not None:
            archive.stop()
    finish(sidecar)


def test_an_archive_that_began_late_gets_its_begin_from_the_broker(keyed: Keyed, tmp_path: Path) -> None:
    sidecar = keyed.scene.sidecar
    keyed.send(300, range(50))
    keyed.wait_for_round(200)
    keyed.expire_commitlog()
    sidecar.start()
    sidecar.wait_until_following(60)
    for _ in range(3):
        keyed.send(40, range(30, 70))
        sidecar.wait_until_archived(60)
    command = (
        "compact-keys",
        sidecar.url,
        "--older-than",
        "0",
        "--from-broker",
        keyed.scene.broker.broker_address,
    )
    dry = sidecar.tiered(*command)
    assert dry.returncode == 0 and "dry run, add --apply to copy" in dry.stdout, dry.stdout + dry.stderr
    done = sidecar.tiered(*command, "--apply", "--json")
    assert done.returncode == 0, done.stderr
    copied = json.loads(done.stdout)["copied"]
    assert 5 < copied["messages"] < 50 and copied["queues"] == 1
    again = sidecar.tiered(*command, "--apply")
    assert "nothing to copy" in again.stdout, again.stdout + again.stderr
    keyed.send(40, range(30, 70))
    sidecar.wait_until_archived(60)
    archive, address = tiered_serve(sidecar.url, tmp_path)
    with archive:
        assert Reader().read(address, range(len(keyed.sent))).view == keyed.view
        assert pulled(address, 0)[0].minimum < 300
    finish(sidecar)


def finish(sidecar: Sidecar) -> None:
    """Nothing is damaged or left over."""
    assert sidecar.stop() == 0, sidecar.log.read_text()[-2000:]
    for command in (
        ("gc", sidecar.url, "--apply", "--grace", "0s"),
        ("verify", sidecar.url, "--full", "--strict"),
    ):
        done = sidecar.tiered(*command)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


KEYED = "state"
BLOCK_BYTES = 46 * 100
"""Of a file of the broker's compacted queue: 100 units. Its log's files have 23,000 bytes, about 90 messages."""


def compacting_broker() -> dict[str, object]:
    """Of a broker that compacts small files every few seconds."""
    return broker_config() | {
        "enableCompaction": "true",
        "compactionScheduleInternal": 2000,
        "compactionThreadNum": 1,
        "maxOffsetMapSize": 1 << 20,
        "compactionCqMappedFileSize": BLOCK_BYTES,
        "compactionMappedFileSize": 5 * BLOCK_BYTES,
        "mappedFileSizeCommitLog": 256 << 10,
    }


class Reply(NamedTuple):
    """A reply to a pull: its code, next, minimum and maximum offset, and offsets of messages."""

    code: int
    following: int
    minimum: int
    maximum: int
    offsets: list[int]


@dataclass
class Reader:
    """A consumer that keeps the last message of each key, and may stop, then continue at another server."""

    offset: int = 0
    state: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """The offset and body of each key's latest message, tombstones too."""

    def read(self, address: str, kept: Collection[int], messages: int = 1 << 30) -> Reader:
        """Up to the end, or some ``messages``, of a server that has ``kept``."""
        while messages > 0:
            reply, records = pulled(address, self.offset, min(32, messages))
            if reply.code == ResponseCode.PULL_RETRY_IMMEDIATELY:
                time.sleep(0.05)
                continue
            if reply.code != ResponseCode.SUCCESS:
                return self
            for offset, (key, body) in records.items():
                assert offset in kept and offset >= self.offset, "a replaced value came back"
                self.state[key] = offset, body
            messages -= len(records)
            self.offset = reply.following
        return self

    @property
    def view(self) -> dict[str, tuple[int, bytes]]:
        """Of keys that are not deleted."""
        return {key: found for key, found in self.state.items() if key and found[1]}


def pulled(address: str, offset: int, count: int = 8) -> tuple[Reply, dict[int, tuple[str, bytes]]]:
    """One pull of queue 0, and key and body of what came."""
    answer = ask(
        address,
        RequestCode.PULL_MESSAGE,
        consumerGroup="G_keyed",
        topic=KEYED,
        queueId=0,
        queueOffset=offset,
        maxMsgNums=count,
        sysFlag=4,
        commitOffset=0,
        suspendTimeoutMillis=0,
        subVersion=0,
        subscription="*",
        expressionType="TAG",
    )
    found = {}
    at = 0
    while answer.code == 0 and at < len(answer.body):
        size = int.from_bytes(answer.body[at : at + 4], "big")
        record = decode_record(answer.body[at : at + size])
        found[record.queue_offset] = " ".join(record.keys), record.body()
        at += size
    names = "nextBeginOffset", "minOffset", "maxOffset"
    return Reply(answer.code, *(int(answer.ext_fields[name]) for name in names), list(found)), found


def expected(kept: list[int], end: int, offset: int, count: int = 8) -> Reply:
    """A broker's reply, if ``kept`` are the offsets of its messages below ``end``."""
    mine = [one for one in kept if one >= offset][:count]
    if mine:
        return Reply(0, mine[-1] + 1, kept[0], end, mine)
    return Reply(19 if offset == end else 21, end, kept[0], end, [])


@dataclass
class Keyed:
    """Messages with keys sent to a broker, and a dict of them."""

    scene: ClientScene
    random: random.Random = field(default_factory=lambda: random.Random(45))
    sent: list[tuple[str, bytes]] = field(default_factory=list)
    """Key and body by offset."""

    def create(self) -> None:
        """The topic, with one queue."""
        broker = self.scene.broker
        words = f"updateTopic -b {broker.broker_address} -t {KEYED} -r 1 -w 1 -a +cleanup.policy=COMPACTION"
        assert "success" in broker.run_java(MQADMIN, *words.split(), "-n", broker.name_server_address)

    def send(self, messages: int, keys: range) -> None:
        """One in six deletes its key."""
        client = BrokerClient(self.scene.broker.broker_address, 10)
        for _ in range(messages):
            key = f"k{self.random.choice(keys)}"
            body = b"" if self.random.random() < 1 / 6 else self.random.randbytes(40)
            request = OutgoingMessage(KEYED, body, {"KEYS": key}).request("P_keyed", 0)
            answer = client.call(request.code, request.ext_fields, request.body)
            assert answer.code == 0, answer.remark
            assert int(answer.ext_fields["queueOffset"]) == len(self.sent)
            self.sent.append((key, body))
        client.close()

    @property
    def latest(self) -> dict[str, tuple[int, bytes]]:
        """The offset and body of each key's latest message."""
        return {key: (at, body) for at, (key, body) in enumerate(self.sent)}

    @property
    def view(self) -> dict[str, tuple[int, bytes]]:
        """The same of keys that are not deleted."""
        return {key: found for key, found in self.latest.items() if found[1]}

    def kept(self, cut: int) -> list[int]:
        """What stays of a round that compacts offsets below ``cut``."""
        latest = {key: at for at, (key, _) in enumerate(self.sent[:cut])}
        return sorted(at for at in latest.values() if self.sent[at][1]) + list(range(cut, len(self.sent)))

    def compacted_by_broker(self) -> int:
        """The offset up to which it compacted, or 0."""
        path: Path = self.scene.broker.store / "compaction" / "position-checkpoint"
        table = json.loads(path.read_text()) if path.exists() else {}
        return int(table.get("queueOffsetMap", {}).get(f"{KEYED}_0", -1)) + 1

    def wait_for_round(self, beyond: int) -> int:
        """Until the broker compacted above offset ``beyond``; its cut."""
        until(lambda: self.compacted_by_broker() > beyond, "the broker does not compact", 60)
        return self.compacted_by_broker()

    def expire_commitlog(self) -> None:
        """Its messages are no longer in the broker's commitlog, archived or not."""
        self.scene.fill(600)
        end = len(self.sent)
        begin_deleting(self.scene, 1 << 60)
        address, code = self.scene.broker.broker_address, RequestCode.GET_MIN_OFFSET

        def is_gone() -> bool:
            return int(ask(address, code, topic=KEYED, queueId=0).ext_fields["offset"]) == end

        until(is_gone, "the broker deletes nothing", 90)
