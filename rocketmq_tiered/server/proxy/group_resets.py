"""Resets a group's offsets in proxy mode (222), also to messages that only the archive has.

A broker resets a group only within its own log. For an offset below that, members connected here are notified (220), as
by a broker before 5.0: each resets its queue and commits. A group without members is moved by commits. Refused, because
the broker would reset to its own minimum: groups with members elsewhere, who would not be notified, and lite pull
consumers, which ignore the notice. Everything else is relayed: resets within the broker's log, and all resets if the
broker has access control, as sub-requests from here lack the operator's signature.

Sources: AdminBrokerProcessor.resetOffset, Broker2Client.resetOffset, MQClientInstance.resetOffset.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from fetcher.policy.read_policy import ReadPolicy
from fetcher.policy.read_router import ReadRouter
from rocketmq_tiered.server.backend.offset_handlers import push_reset
from rocketmq_tiered.server.groups.client_table import ClientTable, Member
from rocketmq_tiered.server.groups.queue_locks import MessageQueue, queue_map
from rocketmq_tiered.server.proxy.broker_view import document_in, number_in
from rocketmq_tiered.server.proxy.merged_lookups import ANSWER_S, MergedOffsets, offset_table
from rocketmq_tiered.server.proxy.proxy_handlers import ProxyHandlers, Upstream, relayed
from rocketmq_tiered.server.wire.request import Request, Response
from rocketmq_tiered.server.wire.turns import bounded_gather
from tiered.errors import UnavailableError
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode

logger = logging.getLogger(__name__)

LISTENS: Final = "CONSUME_PASSIVELY"
"""Consume type of push consumers, the only ones that obey a reset notice."""


class _Move(NamedTuple):
    """A queue's new offset, and the broker's minimum."""

    queue: MessageQueue
    offset: int
    broker_min: int


class GroupResets:
    """Handlers. Belongs to one event loop."""

    def __init__(
        self, router: ReadRouter, offsets: MergedOffsets, clients: ClientTable, *, checks_clients: bool
    ) -> None:
        self._router, self._offsets, self._clients = router, offsets, clients
        self._checks_clients = checks_clients

    def handlers(self) -> ProxyHandlers:
        return {RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: self.reset}

    async def reset(self, request: Request, upstream: Upstream) -> Response:
        """INVOKE_BROKER_TO_RESET_OFFSET: move a group's offsets. Only a reset to messages that the broker no longer has
        is done here, as the broker would stop at its minimum; others are relayed to it."""
        topic, group = request.name("topic"), request.name("group")
        if self._checks_clients or self._router.policy_of(topic) is ReadPolicy.DISABLE:
            return relayed(await upstream.call(request.command, ANSWER_S))
        moves = await self._moves(request, upstream, topic)
        if all(move.offset >= move.broker_min for move in moves):
            return relayed(await upstream.call(request.command, ANSWER_S))
        members = await self._listeners(group, upstream, request.command)
        if members is None:
            why = "only the archive has the offset, and some of its consumers cannot be notified"
            remark = f"group {group} is not reset: {why}. Stop the group's consumers and repeat the command"
            return Response(ResponseCode.SYSTEM_ERROR, remark=remark)
        table = {move.queue: move.offset for move in moves}
        if members:
            push_reset(members, request, table)
        else:
            refused = await self._commit(request.command, upstream, group, moves)
            if refused is not None:
                return relayed(refused)
        where = {"group": group, "topic": topic, "queues": len(moves), "members": len(members)}
        logger.info("a consumer group was reset to messages that only the archive has", extra=where)
        return Response(body=(queue_map(table),))

    async def _moves(self, request: Request, upstream: Upstream, topic: str) -> list[_Move]:
        """Return where the reset moves each queue of the topic, or the one that ``request`` names. The list is empty if
        the broker does not list its queues."""
        stats = _command(request.command, RequestCode.GET_TOPIC_STATS_INFO, topic=topic)
        table, _ = offset_table(await upstream.call(stats, ANSWER_S))
        queue_id = request.number("queueId", -1)
        rows = [
            (queue, row.get("minOffset"), row.get("maxOffset"))
            for queue, row in sorted(table.items(), key=lambda item: item[0].queue_id)
            if queue_id in (-1, queue.queue_id)
        ]
        ranges = [
            (queue, low, high) for queue, low, high in rows if isinstance(low, int) and isinstance(high, int)
        ]

        async def move(queue_range: tuple[MessageQueue, int, int]) -> _Move:
            queue, low, high = queue_range
            return _Move(queue, await self._offset(request, upstream, queue, high), low)

        return await bounded_gather(move, ranges)

    async def _offset(self, request: Request, upstream: Upstream, queue: MessageQueue, high: int) -> int:
        """Return the offset to which the reset moves one queue: the requested one, kept between the first message of
        archive and broker and the broker's end ``high``, or that of the requested time, to which only a forced reset
        moves a group forward."""
        queue_fields = {"topic": queue.topic, "queueId": queue.queue_id}

        def sub_request(code: RequestCode, **fields: object) -> Request:
            return Request(_command(request.command, code, **queue_fields, **fields), request.peer)

        offset, time_ms = request.number("offset", -1), request.number("timestamp", -1)
        if offset >= 0:
            low = await self._offsets.minimum(sub_request(RequestCode.GET_MIN_OFFSET), upstream)
            return min(max(offset, _checked(low)), high)
        if time_ms < 0:
            offset = high
        else:
            code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
            by_time = sub_request(code, timestamp=time_ms, boundaryType="LOWER")
            offset = max(0, _checked(await self._offsets.search(by_time, upstream)))
        if request.flag("isForce"):
            return offset
        query = sub_request(RequestCode.QUERY_CONSUMER_OFFSET, consumerGroup=request.text("group")).command
        committed = number_in(await upstream.call(query, ANSWER_S), "offset")
        return offset if committed is None else min(offset, committed)

    async def _listeners(
        self, group: str, upstream: Upstream, command: RemotingCommand
    ) -> Sequence[Member] | None:
        """Return the members of a group to notify of a reset; None if some of them cannot be, as they are connected
        elsewhere or ignore notices."""
        here = self._clients.group(group)
        members = here.members if here is not None else {}
        query = _command(command, RequestCode.GET_CONSUMER_LIST_BY_GROUP, consumerGroup=group)
        # The broker's list is missing if it has no consumer of the group.
        listed = document_in(await upstream.call(query, ANSWER_S)).get("consumerIdList")
        names = set(map(str, listed)) if isinstance(listed, list) else set[str]()
        if not names <= members.keys() or (here is not None and members and here.consume_type != LISTENS):
            return None
        return list(members.values())

    async def _commit(
        self, command: RemotingCommand, upstream: Upstream, group: str, moves: Sequence[_Move]
    ) -> RemotingCommand | None:
        """Commit the new offsets of a group without members at the broker. Returns the broker's first refusal, None if
        it took all."""

        async def commit(move: _Move) -> RemotingCommand:
            fields = {"topic": move.queue.topic, "queueId": move.queue.queue_id, "commitOffset": move.offset}
            code = RequestCode.UPDATE_CONSUMER_OFFSET
            return await upstream.call(_command(command, code, consumerGroup=group, **fields), ANSWER_S)

        answers = await bounded_gather(commit, moves)
        return next((answer for answer in answers if answer.code != ResponseCode.SUCCESS), None)


def _command(command: RemotingCommand, code: RequestCode, **fields: object) -> RemotingCommand:
    ext = {name: str(value) for name, value in fields.items()}
    return replace(command, code=int(code), ext_fields=ext, body=b"")


def _checked(response: Response) -> int:
    text = response.ext.get("offset", "")
    if response.code != ResponseCode.SUCCESS or not text.removeprefix("-").isdecimal():
        raise UnavailableError(
            f"the group is not reset, as the broker returned no offset of a queue: {response.remark or response.code}"
        )
    return int(text)
