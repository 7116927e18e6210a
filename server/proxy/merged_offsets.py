"""Offsets and times of a queue beside a live broker: the broker's answers, with what the archive adds in front.

    29 offset by time    the archive's for times before the broker's first message, else the broker's
    30 maximum           the broker's; the archive's where the broker's log was cut back below it
    31 minimum           the smaller one
    32 earliest time     the earlier one
    202 topic statistics with joined minima
    208 group statistics with the time of a message that only the archive has

14 and 15 (group offsets) are the broker's alone and relayed: its "not found" makes a client apply its ConsumeFromWhere,
whose questions come here. While the broker is away only what cannot change is answered: the archive's part when it
begins at 0. Everything else is not available then; no number is guessed.

Owns these merges. What of the archive belongs to the line is read_router.py's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from fetcher.policy.query_policy import earliest_time
from fetcher.policy.read_policy import OffsetRange, Situation
from fetcher.policy.read_router import ReadRouter
from server.backend.backend import Backend
from server.groups.bounded_gather import bounded_gather
from server.groups.fastjson_text import queue_map
from server.groups.queue_locks import MessageQueue
from server.proxy.broker_queue import QueueState
from server.proxy.broker_view import BrokerViews
from server.proxy.offset_merge import joined_min, lower_by_time
from server.proxy.proxy_handlers import ProxyHandlers, Upstream, relayed
from server.wire.codes import RequestCode, ResponseCode
from server.wire.request import Request, Response
from tiered.errors import CorruptionError, UnavailableError
from tiered.formats import fastjson
from tiered.remoting.command import RemotingCommand

ANSWER_S = 10.0
SEARCHES_MAX = 3
TIMES_MAX = 64
"""Messages looked up for one group's statistics: each may cost a request to the object store."""


class _First(NamedTuple):
    """The store time of the broker's first message of a queue; -1 without any, or where it is not told."""

    stored_ms: int = -1
    is_away: bool = False
    is_refused: bool = False


class MergedOffsets:
    """Handlers. Belongs to one event loop."""

    def __init__(self, line: ReadRouter, archive: Backend, views: BrokerViews) -> None:
        self._line, self._archive, self._views = line, archive, views

    def handlers(self) -> ProxyHandlers:
        """By request code."""
        return {
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self.search,
            RequestCode.GET_MAX_OFFSET: self.maximum,
            RequestCode.GET_MIN_OFFSET: self.minimum,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self.earliest,
            RequestCode.GET_TOPIC_STATS_INFO: self.topic_stats,
            RequestCode.GET_CONSUME_STATS: self.consume_stats,
        }

    async def minimum(self, request: Request, upstream: Upstream) -> Response:
        """GET_MIN_OFFSET."""
        archived = (await self._situation(request.command, upstream)).archived
        answer = await self._asked(request.command, upstream, archived)
        if answer is None:
            return Response(ext={"offset": "0"})
        told = named_number(answer, "offset")
        if archived is None or told is None:
            return relayed(answer)
        return Response(ext={"offset": str(joined_min(archived, told))})

    async def maximum(self, request: Request, upstream: Upstream) -> Response:
        """GET_MAX_OFFSET."""
        archived = (await self._situation(request.command, upstream)).archived
        answer = await upstream.call(request.command, ANSWER_S)
        told = named_number(answer, "offset")
        if archived is None or told is None or told >= archived.max_offset:
            return relayed(answer)
        return Response(ext={"offset": str(archived.max_offset)})

    async def earliest(self, request: Request, upstream: Upstream) -> Response:
        """GET_EARLIEST_MSG_STORETIME."""
        archived = (await self._situation(request.command, upstream)).archived
        answer = await self._asked(request.command, upstream, archived)
        told = -1 if answer is None else named_number(answer, "timestamp")
        if answer is not None and (archived is None or told is None):
            return relayed(answer)
        assert archived is not None and told is not None
        topic, queue_id = request.text("topic"), request.number("queueId")
        first_ms = await self._archive.stored_ms(topic, queue_id, archived.min_offset)
        return Response(ext={"timestamp": str(earliest_time(told, first_ms))})

    async def search(self, request: Request, upstream: Upstream) -> Response:
        """SEARCH_OFFSET_BY_TIMESTAMP."""
        for _ in range(SEARCHES_MAX):
            situation = await self._situation(request.command, upstream)
            archived = situation.archived
            if archived is None or _begins_earlier(situation.local, archived):
                return relayed(await upstream.call(request.command, ANSWER_S))
            before = await self._broker_first(request.command, upstream)
            found = await self._searched(request, upstream, situation, before)
            if found is not None:
                return found
            answer = relayed(await upstream.call(request.command, ANSWER_S))
            if before == await self._broker_first(request.command, upstream):
                return answer
            # Deleted meanwhile: what it answered may be only the first that was left.
        raise UnavailableError("the broker deletes faster than it can be asked")

    async def _searched(
        self, request: Request, upstream: Upstream, situation: Situation, first: _First
    ) -> Response | None:
        """The answer where the archive knows it; None: the broker does."""
        archived, time_ms = situation.archived, request.number("timestamp")
        is_upper = request.text("boundaryType", "LOWER").upper() == "UPPER"
        if is_upper and first.is_refused:
            return None
        if is_upper and first.is_away:
            raise UnavailableError("the broker is away: it may have a later message")
        # Of messages stored in the same millisecond as the broker's first one, earlier ones may be archived.
        is_older = time_ms < first.stored_ms if is_upper else time_ms <= first.stored_ms
        if archived is None or (first.stored_ms >= 0 and not is_older):
            return None
        if first.is_refused:
            told_off = await upstream.call(request.command, ANSWER_S)
            if named_number(told_off, "offset") is None:
                return relayed(told_off)
        found = await self._archive.offset_by_time(
            request.text("topic"), request.number("queueId"), time_ms, upper=is_upper
        )
        if first.is_away and found <= archived.min_offset > 0:
            raise UnavailableError("the broker is away: it may have earlier messages than the archive")
        if not is_upper and found >= archived.max_offset:
            answer = await upstream.call(request.command, ANSWER_S)
            told = named_number(answer, "offset")
            if told is None:
                return relayed(answer)
            found = lower_by_time(found, archived, told, situation.local)
        return Response(ext={"offset": str(found)})

    async def _broker_first(self, command: RemotingCommand, upstream: Upstream) -> _First:
        asked = replace(command, code=int(RequestCode.GET_EARLIEST_MSG_STORETIME))
        try:
            told = named_number(await upstream.call(asked, ANSWER_S), "timestamp")
        except UnavailableError:
            return _First(is_away=True)
        return _First(is_refused=True) if told is None else _First(told)

    async def topic_stats(self, request: Request, upstream: Upstream) -> Response:
        """GET_TOPIC_STATS_INFO."""
        answer = await upstream.call(request.command, ANSWER_S)
        table, others = offset_table(answer)

        async def join(queue: MessageQueue) -> None:
            archived = (await self._situation(_naming(request.command, queue), upstream)).archived
            low = table[queue].get("minOffset")
            if archived is not None and isinstance(low, int):
                table[queue]["minOffset"] = joined_min(archived, low)

        await bounded_gather(join, table)
        return _with_table(answer, table, others)

    async def consume_stats(self, request: Request, upstream: Upstream) -> Response:
        """GET_CONSUME_STATS."""
        answer = await upstream.call(request.command, ANSWER_S)
        table, others = offset_table(answer)
        looked_up = 0

        async def look_up(queue: MessageQueue) -> None:
            nonlocal looked_up
            row = table[queue]
            offset, time_ms = row.get("consumerOffset"), row.get("lastTimestamp")
            if not isinstance(offset, int) or not isinstance(time_ms, int) or time_ms > 0 or offset <= 0:
                return
            archived = (await self._situation(_naming(request.command, queue), upstream)).archived
            if archived is not None and offset - 1 in archived and looked_up < TIMES_MAX:
                looked_up += 1
                stored_ms = await self._archive.stored_ms(queue.topic, queue.queue_id, offset - 1)
                row["lastTimestamp"] = max(stored_ms, time_ms)

        await bounded_gather(look_up, table)
        return _with_table(answer, table, others)

    async def _situation(self, command: RemotingCommand, upstream: Upstream) -> Situation:
        look = QueueState(self._views, command, upstream, 0)
        topic, queue_id = command.ext_fields.get("topic", ""), command.ext_fields.get("queueId", "")
        if not topic or not queue_id.isdecimal():
            return Situation(0)  # the broker says what is wrong with it
        return await self._line.situation(look, topic, int(queue_id), 0)

    async def _asked(
        self, command: RemotingCommand, upstream: Upstream, archived: OffsetRange | None
    ) -> RemotingCommand | None:
        """The broker's answer; None while it is away and nothing can be before what the archive has."""
        try:
            return await upstream.call(command, ANSWER_S)
        except UnavailableError:
            if archived is not None and archived.min_offset == 0 < archived.max_offset:
                return None
            raise


def _begins_earlier(local: OffsetRange | None, archived: OffsetRange) -> bool:
    has_messages = local is not None and local.max_offset > local.min_offset
    return has_messages and local is not None and local.min_offset < archived.min_offset


def named_number(answer: RemotingCommand, name: str) -> int | None:
    """A field of a good answer; None where it does not tell one."""
    text = answer.ext_fields.get(name, "")
    is_number = answer.code == ResponseCode.SUCCESS and text.removeprefix("-").isdecimal()
    return int(text) if is_number else None


def _naming(command: RemotingCommand, queue: MessageQueue) -> RemotingCommand:
    fields = {**command.ext_fields, "topic": queue.topic, "queueId": str(queue.queue_id)}
    return replace(command, ext_fields=fields, body=b"")


Table = dict[MessageQueue, dict[str, Any]]


def offset_table(answer: RemotingCommand) -> tuple[Table, dict[str, Any]]:
    """The map keyed by queues in a statistics body (202, 208), and what else is in it; empty for any other answer."""
    if answer.code != ResponseCode.SUCCESS or not answer.body:
        return {}, {}
    try:
        document = fastjson.loads(answer.body)
        rows = document.pop("offsetTable")
        table = {_queue_of(fastjson.loads(key)): dict(row) for key, row in rows.items()}
    except (CorruptionError, AttributeError, KeyError, TypeError, ValueError):
        return {}, {}
    return table, dict(document)


def _queue_of(document: Mapping[str, Any]) -> MessageQueue:
    return MessageQueue(str(document["brokerName"]), str(document["topic"]), int(document["queueId"]))


def _with_table(answer: RemotingCommand, table: Table, others: Mapping[str, Any]) -> Response:
    if not table:
        return relayed(answer)
    return replace(relayed(answer), body=(queue_map("offsetTable", table, others),))
