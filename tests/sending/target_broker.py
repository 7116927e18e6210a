"""A broker that takes messages, at the level of the protocol, and a name server that lists it."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.remoting.scripted_peer import peer, reply
from tiered.formats.record import parse_properties
from tiered.remoting.command import RemotingCommand

TOPICS, CONFIG, CLUSTER_INFO, SEND, SEND_BATCH = 21, 26, 106, 310, 320
STORED_UNANSWERED = -1
"""A fault: the message is stored, and the connection ends without an answer."""
ITEM = struct.Struct(">iIIii")


@dataclass(frozen=True)
class Stored:
    """A message as it came."""

    body: bytes
    properties: Mapping[str, str]
    sys_flag: int
    flag: int
    born_timestamp: int


@dataclass
class TargetScene:
    """``topics``: name -> (queues that take messages, perm). ``fault``: the n-th send -> 0, or a response code."""

    topics: dict[str, tuple[int, int]]
    fault: Callable[[int], int] = lambda _number: 0
    name: str = "target-a"
    cluster: str = "TargetCluster"
    max_message_bytes: int = 4 << 20
    address: str = ""
    stored: dict[tuple[str, int], list[Stored]] = field(default_factory=dict)
    sends: int = 0
    accounts: set[str | None] = field(default_factory=set)
    """Access keys of the requests."""
    brokers: list[TargetScene] = field(default_factory=list)
    """Others of the name server."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, request: RemotingCommand) -> bytes:
        self.accounts.add(request.ext_fields.get("AccessKey"))
        if request.code == TOPICS:
            table = {
                name: {"topicName": name, "writeQueueNums": queues, "readQueueNums": queues, "perm": perm}
                for name, (queues, perm) in self.topics.items()
            }
            return reply(request, json.dumps({"topicConfigTable": table}).encode())
        if request.code == CONFIG:
            lines = f"brokerName={self.name}\nbrokerClusterName={self.cluster}\nbrokerPermission=6\n"
            return reply(request, f"{lines}maxMessageSize={self.max_message_bytes}\n".encode())
        if request.code not in (SEND, SEND_BATCH):
            return reply(request, code=3)
        with self._lock:
            self.sends += 1
            code = self.fault(self.sends)
            if code in (0, 10, STORED_UNANSWERED):
                self._store(request)
        return b"" if code == STORED_UNANSWERED else reply(request, code=code)

    def _store(self, request: RemotingCommand) -> None:
        fields, body = request.ext_fields, request.body
        flag, properties = int(fields["h"]), fields["i"].encode()
        if request.code == SEND_BATCH:
            size, _, _, flag, body_bytes = ITEM.unpack_from(body)
            assert (size, body_bytes) == (len(body), 0)
            body, properties = b"", body[ITEM.size + 2 :]
        message = Stored(body, parse_properties(properties), int(fields["f"]), flag, int(fields["g"]))
        self.stored.setdefault((fields["b"], int(fields["e"])), []).append(message)

    def answer_as_name_server(self, request: RemotingCommand) -> bytes:
        if request.code != CLUSTER_INFO:
            return reply(request, code=3)
        table = {one.name: {"brokerAddrs": {"0": one.address}} for one in (self, *self.brokers)}
        return reply(request, json.dumps({"brokerAddrTable": table}).encode())

    @contextmanager
    def running(self) -> Iterator[TargetScene]:
        with peer(self.answer) as self.address:
            yield self
