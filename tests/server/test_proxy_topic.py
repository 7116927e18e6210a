"""The topic of the proxies: written and read in memory, and nothing else is written."""

import asyncio
from typing import Any

import pytest

from fetcher.rows.pull import PullRequest, PullStatus
from rocketmq_tiered.server.backend.backend import Backend, Bounds, TopicConfig
from rocketmq_tiered.server.backend.route_handlers import (
    MADE_QUEUES_MAX,
    PROXY_TOPIC,
    RouteHandlers,
    RouteTable,
)
from rocketmq_tiered.server.retries.retry_topics import (
    BODY_BYTES_MAX,
    HELD_BYTES_MAX,
    MESSAGES_KEPT,
    ArchiveWithRetries,
    ProxyTopic,
)
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from tests.server.serving_peer import RecordingPeer, request
from tiered.clock import Clock
from tiered.formats.record import decode_record
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode

SENT_V2 = {
    "a": "PID",
    "b": PROXY_TOPIC,
    "c": "TBW102",
    "d": "4",
    "e": "0",
    "f": "0",
    "g": "77",
    "h": "0",
    "i": "UNIQ_KEY\x01k\x02",
}
SENT_V1 = {
    "topic": PROXY_TOPIC,
    "queueId": "0",
    "sysFlag": "0",
    "bornTimestamp": "77",
    "flag": "0",
    "properties": "",
}


class Nothing(Backend):
    """An archive that never heard of the topic."""

    cluster, broker = "c", "b"

    def topics(self) -> dict[str, TopicConfig]:
        return {"t": TopicConfig("t", 1, 1)}

    def bounds(self, topic: str, queue_id: int) -> Bounds | None:
        return None

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


class Scene:
    """The topic, created unless ``made`` is False."""

    def __init__(self, *, made: bool = True) -> None:
        self.topic = ProxyTopic(
            {PROXY_TOPIC: TopicConfig(PROXY_TOPIC, 1, 1, 6)} if made else {}, Clock(wall_ms=lambda: 500)
        )
        archive: Any = Nothing()
        self.archive = ArchiveWithRetries(archive, self.topic)
        self._table = HandlerTable()
        self.topic.register(self._table)

    def send(self, code: int, body: bytes, fields: dict[str, str]) -> Response:
        request = Request(RemotingCommand(code, 1, ext_fields=fields, body=body), RecordingPeer())

        async def answer() -> Response:
            handler = self._table.find(code)
            assert handler is not None
            found = await handler(request)
            assert found is not None
            return found

        return asyncio.run(answer())

    def read(self, offset: int) -> tuple[PullStatus, list[bytes]]:
        found = asyncio.run(self.archive.pull(PullRequest(PROXY_TOPIC, 0, offset, 32, 1 << 20, "g")))
        return found.status, [decode_record(bytes(data)).body() for data in found.body]


def test_what_is_sent_is_read() -> None:
    scene = Scene()
    first = scene.send(RequestCode.SEND_MESSAGE_V2, b"one", SENT_V2)
    second = scene.send(RequestCode.SEND_MESSAGE, b"two", SENT_V1)
    assert (first.code, first.ext["queueOffset"], second.ext["queueOffset"]) == (0, "0", "1")
    assert scene.read(0) == (PullStatus.FOUND, [b"one", b"two"])
    assert scene.read(2)[0] is PullStatus.OFFSET_OVERFLOW_ONE
    found = asyncio.run(scene.archive.pull(PullRequest(PROXY_TOPIC, 0, 0, 1, 1 << 20, "g")))
    record = decode_record(bytes(found.body[0]))
    assert (record.topic, record.properties, record.born_timestamp) == (PROXY_TOPIC, {"UNIQ_KEY": "k"}, 77)
    assert (record.offset_msg_id, record.store_timestamp) == (first.ext["msgId"], 500)


def test_only_the_last_messages_are_kept() -> None:
    scene = Scene()
    for number in range(MESSAGES_KEPT + 5):
        scene.send(RequestCode.SEND_MESSAGE_V2, b"%d" % number, SENT_V2)
    assert scene.archive.bounds(PROXY_TOPIC, 0) == Bounds(5, MESSAGES_KEPT + 5)
    assert len(scene.topic.state.messages) == MESSAGES_KEPT
    assert scene.read(0)[1][0] == b"5"


def test_everything_else_is_refused() -> None:
    other = SENT_V2 | {"b": "t"}
    assert Scene().send(RequestCode.SEND_MESSAGE_V2, b"x", other).code == ResponseCode.NO_PERMISSION
    assert (
        Scene(made=False).send(RequestCode.SEND_MESSAGE_V2, b"x", SENT_V2).code == ResponseCode.NO_PERMISSION
    )
    large = Scene().send(RequestCode.SEND_MESSAGE_V2, bytes(BODY_BYTES_MAX + 1), SENT_V2)
    assert large.code == ResponseCode.SYSTEM_ERROR
    weird = SENT_V2 | {"f": str(0x30), "h": "-1"}  # flags that say IPv6 hosts, which are not what is stored
    assert Scene().send(RequestCode.SEND_MESSAGE_V2, b"x", weird).code == 0


@pytest.mark.parametrize(("asked", "made"), [("1", 1), ("-3", 1), ("9223372036854775807", MADE_QUEUES_MAX)])
def test_a_topic_has_at_most_as_many_queues_as_fit_an_answer(asked: str, made: int) -> None:
    archive: Any = Nothing()
    routes = RouteTable(archive, "h:1")
    sent = request(17, None, None, topic=PROXY_TOPIC, readQueueNums=asked, writeQueueNums=asked)
    assert asyncio.run(RouteHandlers(routes).make_topic(sent)).code == 0
    assert (routes.made[PROXY_TOPIC].read_queues, routes.made[PROXY_TOPIC].write_queues) == (made, made)


def test_what_is_kept_is_bounded_by_bytes_too() -> None:
    scene = Scene()
    for _ in range(2 * HELD_BYTES_MAX // BODY_BYTES_MAX):
        assert scene.send(RequestCode.SEND_MESSAGE_V2, bytes(BODY_BYTES_MAX), SENT_V2).code == 0
    assert HELD_BYTES_MAX - 2 * BODY_BYTES_MAX < scene.topic.state.held_bytes <= HELD_BYTES_MAX
