"""UPDATE_CONSUMER_OFFSET as members send it: one-way, every few seconds, whatever became of the topic.

Group offsets that cannot be written are tried again after a wait, and acknowledged only then.

INVOKE_BROKER_TO_RESET_OFFSET where there is no broker: where a group continues, and which members are notified.
"""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_tiered.server.backend.backend import TopicConfig
from rocketmq_tiered.server.backend.offset_handlers import OffsetHandlers
from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.groups import group_offsets
from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog, load_snapshot
from rocketmq_tiered.server.wire.connection_limits import ConnectionLimits
from rocketmq_tiered.server.wire.listener import Listener, ServerOptions
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from rocketmq_tiered.server.wire.turns import AT_ONCE_MAX
from tests.server.connection_scene import Client
from tests.server.group_archive import Archive
from tests.server.group_clock import LEASE_MS, Time, writing
from tests.server.serving_peer import RecordingPeer, request
from tiered.clock import Clock
from tiered.errors import UnavailableError
from tiered.formats import fastjson
from tiered.object_store.interface import Body
from tiered.object_store.memory import MemoryStore
from tiered.remoting.command import RemotingCommand, RequestCode

ONEWAY = 2


def commit(offset: int, *, flag: int = 0, group: str = "g", queue_id: int = 0) -> RemotingCommand:
    fields = {"consumerGroup": group, "topic": "t", "queueId": str(queue_id), "commitOffset": str(offset)}
    return RemotingCommand(RequestCode.UPDATE_CONSUMER_OFFSET, 7, flag=flag, ext_fields=fields)


def handlers_of(offsets: GroupOffsets) -> OffsetHandlers:
    archive: Any = Archive()
    return OffsetHandlers(
        archive, RouteTable(archive, "h:1"), ClientTable(Clock(monotonic_s=lambda: 0.0)), offsets
    )


async def test_a_member_can_pull_while_its_offsets_cannot_be_written() -> None:
    """What it commits one-way does not fill its connection: no thread waits for the answer."""

    store, offsets, running = await writing()
    table = HandlerTable()
    handlers_of(offsets).register(table)

    @table.register(RequestCode.PULL_MESSAGE)
    async def pull(request: Request) -> Response:
        return Response()

    server = Listener(table, ServerOptions(limits=ConnectionLimits(requests_max=4)))
    member = Client(*await asyncio.open_connection(*await server.start()))
    async with asyncio.timeout(2):
        await member.send(*(commit(20, flag=ONEWAY, queue_id=queue) for queue in range(20)))
        assert (await member.ask(RemotingCommand(RequestCode.PULL_MESSAGE, 99))).opaque == 99
        assert load_snapshot(store).offsets == {}
        store.may_continue.set()
        await offsets.commit("g", "t", 20, 20)
    assert load_snapshot(store).offsets == {("g", "t"): dict.fromkeys(range(21), 20)}
    running.cancel()
    member.writer.close()
    await server.close(0)


@pytest.mark.parametrize("flag", [0, ONEWAY])
async def test_offsets_of_an_earlier_generation_are_not_taken_for_the_new_one(flag: int) -> None:
    """Messages of the new one up to there were skipped."""

    life = 0
    log = GroupLog(MemoryStore(), "one", Clock(wall_ms=Time()), generation_of=lambda *_: life)
    offsets = GroupOffsets(log, lease_ms=LEASE_MS)
    assert await offsets.claim()
    running = asyncio.create_task(offsets.run())
    handlers = handlers_of(offsets)

    async def after(command: RemotingCommand) -> int | None:
        assert (await handlers.update(Request(command, RecordingPeer()))).code == 0
        return offsets.find(command.ext_fields["consumerGroup"], "t", 0)

    assert await after(commit(1000, flag=flag)) == 1000
    life = 1
    assert await after(commit(1000, flag=flag)) == 0
    assert await after(commit(1000, flag=flag, group="new")) == 1000, "it had no former one"
    assert await after(commit(30, flag=flag)) == 30
    assert await after(commit(31, flag=flag)) == 31, "it has begun: another server may know more by now"
    running.cancel()


class OneQueue(Archive):
    """Without the queues that it does not have."""

    def bounds(self, topic: str, queue_id: int) -> Any:
        return super().bounds(topic, queue_id) if (topic, queue_id) == ("t", 0) else None

    def subscription_groups(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("flag", [0, ONEWAY])
async def test_no_offset_of_a_queue_that_the_archive_does_not_have_is_committed(flag: int) -> None:
    store, offsets, running = await writing()
    store.may_continue.set()
    archive: Any = OneQueue()
    handlers = OffsetHandlers(
        archive, RouteTable(archive, "h:1"), ClientTable(Clock(monotonic_s=lambda: 0.0)), offsets
    )
    for topic, queue_id, is_there in (
        ("t", 0, True),
        ("t", 1, False),
        ("t", -1, False),
        ("no topic", 0, False),
        ("%RETRY%g", 0, True),
        ("%RETRY%g", 1, False),
        ("%RETRY%no group", 0, False),
    ):
        fields = {"consumerGroup": "g", "topic": topic, "queueId": str(queue_id), "commitOffset": "12"}
        sent = RemotingCommand(RequestCode.UPDATE_CONSUMER_OFFSET, 7, flag=flag, ext_fields=fields)
        response = await handlers.update(Request(sent, RecordingPeer()))
        assert (response.code == 0) is is_there, topic
        assert (offsets.find("g", topic, queue_id) == 12) is is_there
    ext = {"topic": "t", "group": "g", "queueId": "7", "offset": "3", "timestamp": "0"}
    reset = RemotingCommand(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, 8, ext_fields=ext)
    assert (await handlers.reset(Request(reset, RecordingPeer()))).code != 0
    assert offsets.find("g", "t", 7) is None
    running.cancel()


WAIT_S = 0.05


class Away(MemoryStore):
    """Takes nothing for the next ``away`` puts; ``tries``: when each came."""

    def __init__(self) -> None:
        super().__init__()
        self.away = 0
        self.tries = 0

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self.tries += 1
        if self.away:
            self.away -= 1
            raise UnavailableError("the store is away")
        super().put_if_absent(key, body, timeout_s=timeout_s)


async def test_a_commit_waits_as_long_as_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_offsets, "RETRY_S", WAIT_S)
    store = Away()
    offsets = GroupOffsets(GroupLog(store, "me", Clock(wall_ms=lambda: 1_000_000)), lease_ms=60_000)
    await offsets.claim()
    work = asyncio.create_task(offsets.run())
    store.away = 1 << 30
    commit = asyncio.create_task(offsets.commit("g", "t", 0, 7))
    await asyncio.sleep(group_offsets.FLUSH_EVERY_S + 4 * WAIT_S)
    assert not commit.done()
    assert 1 <= store.tries - 1 <= 6
    assert offsets.durable("g", "t", 0) == 0
    assert offsets.find("g", "t", 0) == 7
    store.away = 0
    async with asyncio.timeout(10):
        await commit
    assert offsets.durable("g", "t", 0) == 7
    work.cancel()


@pytest.mark.parametrize(
    ("group", "fields", "expected"),
    [
        ("g", {"timestamp": 120}, 12),
        ("g", {"timestamp": 250}, 25),
        ("g", {"timestamp": 120, "isForce": "false"}, 12),
        ("g", {"timestamp": 250, "isForce": "false"}, 15),  # never further on than it is
        ("g", {"timestamp": -1, "isForce": "false"}, 15),
        ("g", {"timestamp": -1}, 30),
        ("new", {"timestamp": 250, "isForce": "false"}, 25),
        ("g", {"timestamp": 0, "offset": 20, "queueId": 0, "isForce": "false"}, 20),
        ("g", {"timestamp": 0, "offset": 99, "queueId": 0, "isForce": "false"}, 30),
    ],
)
async def test_where_a_group_continues(group: str, fields: dict[str, Any], expected: int) -> None:
    archive: Any = Archive()
    offsets = GroupOffsets(GroupLog(MemoryStore(), "one", Clock(wall_ms=lambda: 1)), lease_ms=60_000)
    assert await offsets.claim()
    running = asyncio.create_task(offsets.run())
    clients, member = ClientTable(Clock(monotonic_s=lambda: 0.0)), RecordingPeer()
    clients.heartbeat(request(34, member, {"clientID": "m", "consumerDataSet": [{"groupName": group}]}))
    handlers = OffsetHandlers(archive, RouteTable(archive, "h:1"), clients, offsets)
    sent = {"topic": "t", "group": group, "isForce": "true"} | fields
    code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
    answer = await handlers.reset(request(code, None, None, **sent))
    assert (answer.code, offsets.find(group, "t", 0)) == (0, expected)
    pushed_code, ext, body = member.pushed[-1]
    assert (pushed_code, ext["isForce"]) == (RequestCode.RESET_CONSUMER_CLIENT_OFFSET, sent["isForce"])
    for table in (fastjson.loads(body), fastjson.loads(bytes(answer.body[0]))):
        assert list(table["offsetTable"].values()) == [expected]
    running.cancel()


async def test_members_of_each_language_are_notified_in_their_own_form() -> None:
    archive: Any = Archive()
    offsets = GroupOffsets(GroupLog(MemoryStore(), "one", Clock(wall_ms=lambda: 1)), lease_ms=60_000)
    assert await offsets.claim()
    running = asyncio.create_task(offsets.run())
    clients, members = ClientTable(Clock(monotonic_s=lambda: 0.0)), {}
    for number, language in enumerate(("JAVA", "CPP", "GO")):
        members[language] = RecordingPeer(number)
        body = {"clientID": language, "consumerDataSet": [{"groupName": "g"}]}
        sent = request(34, members[language], body)
        clients.heartbeat(replace(sent, command=replace(sent.command, language=language)))
    handlers = OffsetHandlers(archive, RouteTable(archive, "h:1"), clients, offsets)
    code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
    await handlers.reset(request(code, topic="t", group="g", timestamp=120))
    running.cancel()
    pushed = {language: member.pushed[-1][2] for language, member in members.items()}
    queue = {"topic": "t", "brokerName": "b", "queueId": 0}
    assert json.loads(pushed["CPP"]) == {"offsetTable": [queue | {"offset": 12}]}
    assert pushed["GO"] == pushed["JAVA"]
    assert list(fastjson.loads(pushed["JAVA"])["offsetTable"].values()) == [12]


class Wide(Archive):
    """A topic of 64 queues, in which a time is found in 50 ms. ``most``: queues that were searched at once."""

    at_work, most = 0, 0

    def topics(self) -> dict[str, TopicConfig]:
        return {"t": TopicConfig("t", 64, 64)}

    async def offset_by_time(self, topic: str, queue_id: int, store_ms: int, *, upper: bool) -> int:
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        await asyncio.sleep(0.05)
        self.at_work -= 1
        return 10 + queue_id % 20

    async def stored_ms(self, topic: str, queue_id: int, offset: int) -> int:
        await self.offset_by_time(topic, queue_id, 0, upper=False)
        return 1_000 + queue_id


async def test_a_group_of_many_queues_is_moved_while_the_tool_waits() -> None:
    """mqadmin waits for five seconds: neither a search nor a version of its own for each queue."""

    found = Wide()
    archive: Any = found
    store = MemoryStore()
    offsets = GroupOffsets(GroupLog(store, "one", Clock(wall_ms=lambda: 1)), lease_ms=60_000)
    assert await offsets.claim()
    running = asyncio.create_task(offsets.run())
    handlers = OffsetHandlers(
        archive, RouteTable(archive, "h:1"), ClientTable(Clock(monotonic_s=lambda: 0.0)), offsets
    )
    code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
    async with asyncio.timeout(1.5):
        answer = await handlers.reset(request(code, topic="t", group="g", timestamp=120))
    assert answer.code == 0 and found.most <= AT_ONCE_MAX
    assert load_snapshot(store).offsets["g", "t"] == {queue: 10 + queue % 20 for queue in range(64)}
    running.cancel()


async def test_statistics_of_many_queues_are_answered_while_the_tool_waits() -> None:
    found = Wide()
    archive: Any = found
    offsets = GroupOffsets(GroupLog(MemoryStore(), "one", Clock(wall_ms=lambda: 1)), lease_ms=60_000)
    handlers = OffsetHandlers(
        archive, RouteTable(archive, "h:1"), ClientTable(Clock(monotonic_s=lambda: 0.0)), offsets
    )
    async with asyncio.timeout(1.5):
        answer = await handlers.stats(request(RequestCode.GET_CONSUME_STATS, consumerGroup="g", topic="t"))
    assert 1 < found.most <= AT_ONCE_MAX
    rows = fastjson.loads(b"".join(map(bytes, answer.body)))["offsetTable"].items()
    times = {fastjson.loads(queue)["queueId"]: row["lastTimestamp"] for queue, row in rows}
    assert times == {queue: 1_000 + queue for queue in range(64)}
