"""Requests about group offsets: query, commit, statistics, consumers of a topic, reset."""

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
        """Enter into ``table`` the handlers of requests about the offsets of consumer groups."""
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
        """QUERY_CONSUMER_OFFSET: the group's offset of a queue. To QUERY_NOT_FOUND a client answers by starting where
        its ConsumeFromWhere says."""
        offset = self.offset_of(
            request.text("consumerGroup"), request.text("topic"), request.number("queueId")
        )
        if offset is None:
            return Response(ResponseCode.QUERY_NOT_FOUND, remark="the group has no offset of this queue")
        return Response(ext={"offset": str(offset)})

    async def update(self, request: Request) -> Response:
        """UPDATE_CONSUMER_OFFSET: commit a group's offset of a queue, and reply once it is stored. An offset that
        belongs to an earlier generation of a topic that was deleted and created again is acknowledged and dropped."""
        offset = request.number("commitOffset")
        if offset < 0:
            return Response(ResponseCode.SYSTEM_ERROR, remark=f"commitOffset {offset} is negative")
        group, topic = request.name("consumerGroup"), request.name("topic")
        queue_id = request.number("queueId")
        for refusal in (self._routes.group_refusal(group), self._routes.queue_refusal(topic, queue_id)):
            if refusal is not None:
                return refusal
        bounds = self._archive.bounds(topic, queue_id)
        if bounds is not None and self._offsets.is_earlier_generation(
            group, topic, queue_id, offset, bounds.maximum
        ):
            return Response()
        if request.command.is_oneway:
            # No reply, so no wait: without the object store such requests would fill their connection.
            self._offsets.note(group, topic, queue_id, offset, request.account)
            return Response()
        try:
            await self._offsets.commit(group, topic, queue_id, offset, request.account)
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
        """GET_BROKER_CONSUME_STATS: offset and lag of all groups in all queues; with isOrder only those of topics that
        are consumed in order."""
        is_order = request.text("isOrder", "false") == "true"
        group_texts, lag_sum = [], 0
        for group in sorted(self._archive.subscription_groups()):
            topic_texts = []
            for topic in self._topics_of(group):
                config = self._routes.find(topic)
                if config is None or (is_order and not config.order):
                    continue
                table = await self._stats_of(group, [topic])
                lag_sum += sum(row["brokerOffset"] - row["consumerOffset"] for row in table.values())
                topic_texts.append(queue_map(table, {"consumeTps": 0.0}).decode())
            group_texts.append(f"{{{quoted(group)}:[{','.join(topic_texts)}]}}")
        # The map keys of queue_map are objects, as fastjson writes them, so that the text is put together by hand.
        head = f'"brokerAddr":{quoted(self._routes.address)},"totalDiff":{lag_sum},"totalInflightDiff":0'
        return Response(body=(f'{{{head},"consumeStatsList":[{",".join(group_texts)}]}}'.encode(),))

    async def _stats_of(self, group: str, topics: Iterable[str]) -> dict[MessageQueue, dict[str, int]]:
        """Return offset and lag of a group in all queues of ``topics``, as RocketMQ's OffsetWrapper names them."""
        configs = {topic: self._routes.find(topic) for topic in topics}
        queues = [
            MessageQueue(self._archive.broker, topic, queue_id)
            for topic, config in configs.items()
            for queue_id in range(config.read_queues if config is not None else 0)
        ]

        async def row(queue: MessageQueue) -> dict[str, int]:
            return await self._stats_row(group, queue.topic, queue.queue_id)

        return dict(zip(queues, await bounded_gather(row, queues), strict=True))

    async def _stats_row(self, group: str, topic: str, queue_id: int) -> dict[str, int]:
        """Return a group's statistics of one queue, with the field names of RocketMQ's OffsetWrapper."""
        bounds = self._archive.bounds(topic, queue_id)
        # Of a topic that is not archived, such as half messages, only the groups' offsets are known.
        maximum = bounds.maximum if bounds is not None else self._archive.consumed_end(topic, queue_id)
        offset = self.offset_of(group, topic, queue_id) or 0
        stored_ms = 0
        if offset > 0:  # when the last consumed message was stored
            stored_ms = max(0, await self._archive.stored_ms(topic, queue_id, offset - 1))
        return {
            "brokerOffset": maximum,
            "consumerOffset": offset,
            "lastTimestamp": stored_ms,
            "pullOffset": offset,
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
        """INVOKE_BROKER_TO_RESET_OFFSET: move a group's offsets of a topic, or of one queue, to a time or to an offset,
        notify the group's members, and reply with the new offsets."""
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

        # mqadmin waits five seconds for the reply: the queues are searched, and their offsets committed, together.
        offsets = await bounded_gather(new_offset, queues)
        new_offsets = {
            MessageQueue(self._archive.broker, topic, number): offset
            for number, offset in zip(queues, offsets, strict=True)
        }
        commits = (
            self._offsets.commit(group, topic, queue.queue_id, offset, request.account)
            for queue, offset in new_offsets.items()
        )
        for error in await asyncio.gather(*commits, return_exceptions=True):
            if isinstance(error, FencedError):
                return Response(ResponseCode.NO_PERMISSION, remark=str(error))
            if error is not None:
                raise error
        online = self._clients.group(group)
        push_reset(online.members.values() if online is not None else (), request, new_offsets)
        return Response(body=(queue_map(new_offsets),))

    async def _reset_offset(self, request: Request, group: str, topic: str, queue_id: int) -> int:
        """Return the offset to which a reset moves a group in one queue: the requested one, kept within the archive, or
        that of the requested time, where a negative time means the end. Unless the request says isForce, a group is not
        moved forward by time."""
        bounds = self._archive.bounds(topic, queue_id)
        low, high = (bounds.minimum, bounds.maximum) if bounds is not None else (0, 0)
        requested = request.number("offset", -1)
        if requested >= 0:
            return min(max(requested, low), high)
        time_ms = request.number("timestamp")
        offset = (
            high if time_ms < 0 else await self._archive.offset_by_time(topic, queue_id, time_ms, upper=False)
        )
        present = self.offset_of(group, topic, queue_id)
        is_forced = request.text("isForce", "true").lower() == "true"
        return offset if is_forced or present is None else min(offset, present)


def push_reset(members: Iterable[Member], request: Request, offsets: Mapping[MessageQueue, int]) -> None:
    """Notify the members of a group that its offsets were reset (RESET_CONSUMER_CLIENT_OFFSET). ``request``: the one
    that reset them; ``offsets``: where each queue was moved to."""
    ext = {
        "topic": request.text("topic"),
        "group": request.text("group"),
        "timestamp": request.text("timestamp", "0"),
        "isForce": request.text("isForce", "true"),
    }
    for member in members:
        member.peer.push(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, ext, offsets_for(member.language, offsets))
