"""INVOKE_BROKER_TO_RESET_OFFSET where there is no broker: where a group continues, and which members are notified."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_tiered.server.backend.backend import TopicConfig
from rocketmq_tiered.server.backend.offset_handlers import OffsetHandlers
from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog, load_snapshot
from rocketmq_tiered.server.wire.turns import AT_ONCE_MAX
from tests.server.group_archive import Archive
from tests.server.serving_peer import RecordingPeer, request
from tiered.formats import fastjson
from tiered.object_store.memory import MemoryStore
from tiered.remoting.codes import RequestCode


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
def test_where_a_group_continues(group: str, fields: dict[str, Any], expected: int) -> None:
    async def scene() -> None:
        archive: Any = Archive()
        offsets = GroupOffsets(GroupLog(MemoryStore(), "one", lambda: 1), lease_ms=60_000)
        assert await offsets.claim()
        running = asyncio.create_task(offsets.run())
        clients, member = ClientTable(lambda: 0.0), RecordingPeer()
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

    asyncio.run(scene())


def test_members_of_each_language_are_notified_in_their_own_form() -> None:
    async def scene() -> None:
        archive: Any = Archive()
        offsets = GroupOffsets(GroupLog(MemoryStore(), "one", lambda: 1), lease_ms=60_000)
        assert await offsets.claim()
        running = asyncio.create_task(offsets.run())
        clients, members = ClientTable(lambda: 0.0), {}
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

    asyncio.run(scene())


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


def test_a_group_of_many_queues_is_moved_while_the_tool_waits() -> None:
    """mqadmin waits for five seconds: neither a search nor a version of its own for each queue."""

    async def scene() -> None:
        found = Wide()
        archive: Any = found
        store = MemoryStore()
        offsets = GroupOffsets(GroupLog(store, "one", lambda: 1), lease_ms=60_000)
        assert await offsets.claim()
        running = asyncio.create_task(offsets.run())
        handlers = OffsetHandlers(archive, RouteTable(archive, "h:1"), ClientTable(lambda: 0.0), offsets)
        code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
        async with asyncio.timeout(1.5):
            answer = await handlers.reset(request(code, topic="t", group="g", timestamp=120))
        assert answer.code == 0 and found.most <= AT_ONCE_MAX
        assert load_snapshot(store).offsets["g", "t"] == {queue: 10 + queue % 20 for queue in range(64)}
        running.cancel()

    asyncio.run(scene())


def test_statistics_of_many_queues_are_answered_while_the_tool_waits() -> None:
    async def scene() -> None:
        found = Wide()
        archive: Any = found
        offsets = GroupOffsets(GroupLog(MemoryStore(), "one", lambda: 1), lease_ms=60_000)
        handlers = OffsetHandlers(archive, RouteTable(archive, "h:1"), ClientTable(lambda: 0.0), offsets)
        async with asyncio.timeout(1.5):
            answer = await handlers.stats(
                request(RequestCode.GET_CONSUME_STATS, consumerGroup="g", topic="t")
            )
        assert 1 < found.most <= AT_ONCE_MAX
        rows = fastjson.loads(b"".join(map(bytes, answer.body)))["offsetTable"].items()
        times = {fastjson.loads(queue)["queueId"]: row["lastTimestamp"] for queue, row in rows}
        assert times == {queue: 1_000 + queue for queue in range(64)}

    asyncio.run(scene())
