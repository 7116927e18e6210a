"""UPDATE_CONSUMER_OFFSET as members send it: one-way, every few seconds, whatever became of the topic."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rocketmq_tiered.server.backend.offset_handlers import OffsetHandlers
from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog, load_snapshot
from rocketmq_tiered.server.wire.connection_limits import ConnectionLimits
from rocketmq_tiered.server.wire.listener import Listener, ServerOptions
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from tests.server.connection_scene import Client
from tests.server.group_archive import Archive
from tests.server.group_clock import LEASE_MS, Clock, writing
from tests.server.serving_peer import RecordingPeer
from tiered.object_store.memory import MemoryStore
from tiered.remoting.codes import RequestCode
from tiered.remoting.command import RemotingCommand

ONEWAY = 2


def commit(offset: int, *, flag: int = 0, group: str = "g", queue_id: int = 0) -> RemotingCommand:
    fields = {"consumerGroup": group, "topic": "t", "queueId": str(queue_id), "commitOffset": str(offset)}
    return RemotingCommand(RequestCode.UPDATE_CONSUMER_OFFSET, 7, flag=flag, ext_fields=fields)


def handlers_of(offsets: GroupOffsets) -> OffsetHandlers:
    archive: Any = Archive()
    return OffsetHandlers(archive, RouteTable(archive, "h:1"), ClientTable(lambda: 0.0), offsets)


def test_a_member_can_pull_while_its_offsets_cannot_be_written() -> None:
    """What it commits one-way does not fill its connection: no thread waits for the answer."""

    async def scene() -> None:
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

    asyncio.run(scene())


@pytest.mark.parametrize("flag", [0, ONEWAY])
def test_offsets_of_an_earlier_generation_are_not_taken_for_the_new_one(flag: int) -> None:
    """Messages of the new one up to there were skipped."""

    async def scene() -> None:
        life = 0
        log = GroupLog(MemoryStore(), "one", Clock(), generation_of=lambda *_: life)
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

    asyncio.run(scene())


class OneQueue(Archive):
    """Without the queues that it does not have."""

    def bounds(self, topic: str, queue_id: int) -> Any:
        return super().bounds(topic, queue_id) if (topic, queue_id) == ("t", 0) else None

    def subscription_groups(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("flag", [0, ONEWAY])
def test_no_offset_of_a_queue_that_the_archive_does_not_have_is_committed(flag: int) -> None:
    async def scene() -> None:
        store, offsets, running = await writing()
        store.may_continue.set()
        archive: Any = OneQueue()
        handlers = OffsetHandlers(archive, RouteTable(archive, "h:1"), ClientTable(lambda: 0.0), offsets)
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

    asyncio.run(scene())
