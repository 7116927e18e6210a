"""A live broker with a compaction topic, messages with keys for it, and what consumers of all three servers see.

Owns sending, reading and the broker's rounds. Does not own when what happens (test_key_compaction_live.py).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rocketmq_tiered.sending.outgoing import OutgoingMessage
from tests.integration.client_scene import ClientScene, ask, begin_deleting, broker_config, until
from tests.servers.rocketmq import MQADMIN
from tiered.formats.record import decode_record
from tiered.remoting.client import BrokerClient
from tiered.remoting.codes import RequestCode, ResponseCode

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
