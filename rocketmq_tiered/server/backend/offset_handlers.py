"""Requests about group offsets: query, commit, statistics, consumers of a topic, reset."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from rocketmq_tiered.server.backend.backend import Backend
from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.groups.client_table import ClientTable, Member
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.queue_locks import MessageQueue, offsets_for, queue_map, quoted
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response, json_response
from rocketmq_tiered.server.wire.turns import bounded_gather
from tiered.errors import FencedError
from tiered.remoting.command import RequestCode, ResponseCode


class OffsetHandlers:
    """Requests about group offsets."""

    def __init__(
        self, archive: Backend, routes: RouteTable, clients: ClientTable, offsets: GroupOffsets
    ) -> None:
        self._archive, self._routes, self._clients, self._offsets = archive, routes, clients, offsets

    def register(self, table: HandlerTable) -> None:
        """Enter the handlers of these codes."""
        table.register(RequestCode.QUERY_CONSUMER_OFFSET)(self.query)
        table.register(RequestCode.UPDATE_CONSUMER_OFFSET)(self.update)
        table.register(RequestCode.GET_ALL_CONSUMER_OFFSET, RequestCode.GET_ALL_DELAY_OFFSET)(self.nothing)
        table.register(RequestCode.GET_CONSUME_STATS)(self.stats)
        table.register(RequestCode.GET_BROKER_CONSUME_STATS)(self.broker_stats)
        table.register(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET)(self.reset)
        table.register(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO)(self.who_consumes)
        table.register(RequestCode.QUERY_TOPICS_BY_CONSUMER)(self.consumed_topics)

    def offset_of(self, group: str, topic: str, queue_id: int) -> int | None:
        """The offset committed here, else the one archived from the broker."""
        found = self._offsets.find(group, topic, queue_id)
        return self._archive.archived_offset(group, topic, queue_id) if found is None else found

    async def query(self, request: Request) -> Response:
        """QUERY_CONSUMER_OFFSET; on 22 (no offset) a client applies its ConsumeFromWhere."""
        found = self.offset_of(
            request.text("consumerGroup"), request.text("topic"), request.number("queueId")
        )
        if found is None:
            return Response(ResponseCode.QUERY_NOT_FOUND, remark="the group has no offset of this queue")
        return Response(ext={"offset": str(found)})

    async def update(self, request: Request) -> Response:
        """Commit an offset, and reply once it is stored. That of a consumer still in an earlier generation of the
        queue is acknowledged and dropped: it is past the new one's end."""
        offset = request.number("commitOffset")
        if offset < 0:
            return Response(ResponseCode.SYSTEM_ERROR, remark=f"commitOffset {offset} is negative")
        place = request.name("consumerGroup"), request.name("topic"), request.number("queueId")
        for refusal in (self._routes.group_refusal(place[0]), self._routes.queue_refusal(*place[1:])):
            if refusal is not None:
                return refusal
        bounds = self._archive.bounds(*place[1:])
        if bounds is not None and self._offsets.is_earlier_generation(*place, offset, bounds.maximum):
            return Response()
        if request.command.is_oneway:
            # No reply, so no wait: without the object store such requests would fill their connection.
            self._offsets.note(*place, offset, request.account)
            return Response()
        try:
            await self._offsets.commit(*place, offset, request.account)
        except FencedError as error:
            return Response(ResponseCode.NO_PERMISSION, remark=str(error))
        return Response()

    async def nothing(self, request: Request) -> Response:
        """Tables that slaves copy from a master; empty here."""
        return json_response({"offsetTable": {}})

    async def stats(self, request: Request) -> Response:
        """GET_CONSUME_STATS: a group's offset and lag in each queue."""
        group, only = request.text("consumerGroup"), request.text("topic", "")
        table = await self._stats_of(group, [only] if only else self._topics_of(group))
        return Response(body=(queue_map(table, {"consumeTps": 0.0}),))

    async def broker_stats(self, request: Request) -> Response:
        """GET_BROKER_CONSUME_STATS: offset and lag of all groups in all queues."""
        is_order = request.text("isOrder", "false") == "true"
        texts, behind = [], 0
        for group in sorted(self._archive.subscription_groups()):
            found = []
            for topic in self._topics_of(group):
                config = self._routes.find(topic)
                if config is None or (is_order and not config.order):
                    continue
                table = await self._stats_of(group, [topic])
                behind += sum(lag["brokerOffset"] - lag["consumerOffset"] for lag in table.values())
                found.append(queue_map(table, {"consumeTps": 0.0}).decode())
            texts.append(f"{{{quoted(group)}:[{','.join(found)}]}}")
        head = f'"brokerAddr":{quoted(self._routes.address)},"totalDiff":{behind},"totalInflightDiff":0'
        return Response(body=(f'{{{head},"consumeStatsList":[{",".join(texts)}]}}'.encode(),))

    async def _stats_of(self, group: str, topics: Iterable[str]) -> dict[MessageQueue, dict[str, int]]:
        """The lag of a group in all queues of these topics."""
        found = {topic: self._routes.find(topic) for topic in topics}
        queues = [
            MessageQueue(self._archive.broker, topic, queue_id)
            for topic, config in found.items()
            for queue_id in range(config.read_queues if config is not None else 0)
        ]

        async def lag(queue: MessageQueue) -> dict[str, int]:
            return await self._lag(group, queue.topic, queue.queue_id)

        return dict(zip(queues, await bounded_gather(lag, queues), strict=True))

    async def _lag(self, group: str, topic: str, queue_id: int) -> dict[str, int]:
        """One row of a group's statistics, in the names of RocketMQ."""
        bounds = self._archive.bounds(topic, queue_id)
        # Of a topic that is not archived, such as half messages, only the groups' offsets are known.
        maximum = bounds.maximum if bounds is not None else self._archive.consumed_end(topic, queue_id)
        offset = self.offset_of(group, topic, queue_id)
        stored_ms = 0
        if offset is not None and offset > 0:
            stored_ms = max(0, await self._archive.stored_ms(topic, queue_id, offset - 1))
        consumed = offset if offset is not None else 0
        return {
            "brokerOffset": maximum,
            "consumerOffset": consumed,
            "lastTimestamp": stored_ms,
            "pullOffset": consumed,
        }

    def _topics_of(self, group: str) -> list[str]:
        online = self._clients.group(group)
        subscribed = set(online.subscriptions) if online is not None else set()
        archived = self._archive.archived_topics(group)
        return sorted(subscribed.union(self._offsets.topics_of(group), archived))

    async def who_consumes(self, request: Request) -> Response:
        topic = request.text("topic")
        online = {group.name for group in self._clients.groups() if topic in group.subscriptions}
        archived = self._archive.archived_groups(topic)
        return json_response({"groupList": sorted(online.union(self._offsets.groups_of(topic), archived))})

    async def consumed_topics(self, request: Request) -> Response:
        return json_response({"topicList": self._topics_of(request.text("group"))})

    async def reset(self, request: Request) -> Response:
        """INVOKE_BROKER_TO_RESET_OFFSET: reset a group by time or to an offset, and notify its members."""
        topic, group = request.name("topic"), request.name("group")
        if (refusal := self._routes.group_refusal(group)) is not None:
            return refusal
        config = self._routes.find(topic)
        if config is None:
            return Response(ResponseCode.TOPIC_NOT_EXIST, remark=f"topic {topic} is not in the archive")
        queue_id = request.number("queueId", -1)
        queues = [queue_id] if queue_id >= 0 else list(range(config.read_queues))
        if queue_id >= 0 and (refusal := self._routes.queue_refusal(topic, queue_id)) is not None:
            return refusal

        async def new_offset(number: int) -> int:
            return await self._reset_offset(request, group, topic, number)

        # The tool waits five seconds for all offsets by time and the snapshot with all commits.
        found = await bounded_gather(new_offset, queues)
        moved = {
            MessageQueue(self._archive.broker, topic, number): offset
            for number, offset in zip(queues, found, strict=True)
        }
        commits = (
            self._offsets.commit(group, topic, queue.queue_id, moved[queue], request.account)
            for queue in moved
        )
        for error in await asyncio.gather(*commits, return_exceptions=True):
            if isinstance(error, FencedError):
                return Response(ResponseCode.NO_PERMISSION, remark=str(error))
            if error is not None:
                raise error
        online = self._clients.group(group)
        push_reset(online.members.values() if online is not None else (), request, moved)
        return Response(body=(queue_map(moved),))

    async def _reset_offset(self, request: Request, group: str, topic: str, queue_id: int) -> int:
        """Where a reset moves a queue: to the given offset, within the archive, or to that of the time, which only a
        forced reset moves forward to."""
        bounds = self._archive.bounds(topic, queue_id)
        low, high = (bounds.minimum, bounds.maximum) if bounds is not None else (0, 0)
        wanted = request.number("offset", -1)
        if wanted >= 0:
            return min(max(wanted, low), high)
        time_ms = request.number("timestamp")
        offset = (
            high if time_ms < 0 else await self._archive.offset_by_time(topic, queue_id, time_ms, upper=False)
        )
        at = self.offset_of(group, topic, queue_id)
        # Unless forced, a group is not moved forward.
        is_forced = request.text("isForce", "true").lower() == "true"
        return offset if is_forced or at is None else min(offset, at)


def push_reset(members: Iterable[Member], request: Request, offsets: Mapping[MessageQueue, int]) -> None:
    """Notify members of a reset (RESET_CONSUMER_CLIENT_OFFSET)."""
    ext = {
        "topic": request.text("topic"),
        "group": request.text("group"),
        "timestamp": request.text("timestamp", "0"),
        "isForce": request.text("isForce", "true"),
    }
    for member in members:
        member.peer.push(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, ext, offsets_for(member.language, offsets))
