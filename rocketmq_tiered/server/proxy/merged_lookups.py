"""Answers merged from broker and archive: offsets and times of a queue, messages by id and by key.

    12 by key, 33 by id  of both, each message once, newest first; while one side is unavailable, the other's
    29 offset by time    the archive's for times before the broker's first message, else the broker's
    30 maximum           the broker's; the archive's if the broker's log was truncated below it
    31 minimum           the smaller one
    32 earliest time     the earlier one
    202 topic statistics with the smaller minima
    208 group statistics with store times of messages that only the archive has

14 and 15 (group offsets) are relayed: on the broker's "not found" a client applies its ConsumeFromWhere, whose requests
come here. While the broker is unavailable, only offsets that cannot change are returned: an archive that begins at 0;
"not found" needs both sides. Sources: QueryMessageProcessor, MQAdminImpl.queryMessage.
"""

import asyncio
import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from fetcher.policy.read_policy import HeldOffsets, ReadPolicy, Situation
from fetcher.policy.read_router import ReadRouter
from fetcher.queries.source import count_within
from rocketmq_tiered.server.backend.backend import Backend
from rocketmq_tiered.server.backend.lookup_handlers import key_count, records_by_key
from rocketmq_tiered.server.groups.queue_locks import MessageQueue, queue_map
from rocketmq_tiered.server.proxy.broker_view import BrokerViews, QueueState, document_in, number_in
from rocketmq_tiered.server.proxy.offset_merge import joined_min, lower_by_time
from rocketmq_tiered.server.proxy.proxy_handlers import ProxyHandlers, Upstream, relayed
from rocketmq_tiered.server.wire.request import Buffer, Request, Response
from rocketmq_tiered.server.wire.turns import bounded_gather
from tiered.errors import CorruptionError, TieredError, UnavailableError
from tiered.formats import fastjson
from tiered.formats.record import SYS_BORN_HOST_V6, decode_record, records_in
from tiered.remoting.client import is_refusal
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode

ANSWER_S: Final = 10.0
SEARCHES_MAX = 3
TIMES_MAX = 64
"""Store times read for one group's statistics: each may cost a request to the object store."""


class _First(NamedTuple):
    """Store time of the broker's first message of a queue; -1 if it has none or does not return it."""

    stored_ms: int = -1
    is_away: bool = False
    is_refused: bool = False


class MergedOffsets:
    """Handlers. Belongs to one event loop."""

    def __init__(self, router: ReadRouter, archive: Backend, views: BrokerViews) -> None:
        self._router, self._archive, self._views = router, archive, views

    def handlers(self) -> ProxyHandlers:
        """The handlers by request code, of proxy and slave mode alike."""
        return {
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self.search,
            RequestCode.GET_MAX_OFFSET: self.maximum,
            RequestCode.GET_MIN_OFFSET: self.minimum,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self.earliest,
            RequestCode.GET_TOPIC_STATS_INFO: self.topic_stats,
            RequestCode.GET_CONSUME_STATS: self.consume_stats,
        }

    async def minimum(self, request: Request, upstream: Upstream) -> Response:
        """GET_MIN_OFFSET: the smaller minimum offset of archive and broker. While the broker is away it is 0 if the
        archive begins there; otherwise it is not known, and UnavailableError is raised."""
        archived = (await self._situation(request.command, upstream)).archived
        answer = await self._call(request.command, upstream, archived)
        if answer is None:
            return Response(ext={"offset": "0"})
        value = number_in(answer, "offset")
        if archived is None or value is None:
            return relayed(answer)
        return Response(ext={"offset": str(joined_min(archived, value))})

    async def maximum(self, request: Request, upstream: Upstream) -> Response:
        """GET_MAX_OFFSET: the broker's maximum offset, or the archive's if that is larger, as the broker's log was
        truncated."""
        archived = (await self._situation(request.command, upstream)).archived
        answer = await upstream.call(request.command, ANSWER_S)
        value = number_in(answer, "offset")
        if archived is None or value is None or value >= archived.max_offset:
            return relayed(answer)
        return Response(ext={"offset": str(archived.max_offset)})

    async def earliest(self, request: Request, upstream: Upstream) -> Response:
        """GET_EARLIEST_MSG_STORETIME: when the first message of archive and broker was stored, -1 if neither has one.
        While the broker is away it is the archive's, if that begins at offset 0."""
        archived = (await self._situation(request.command, upstream)).archived
        answer = await self._call(request.command, upstream, archived)
        value = -1 if answer is None else number_in(answer, "timestamp")
        if answer is not None and (archived is None or value is None):
            return relayed(answer)
        assert archived is not None and value is not None
        topic, queue_id = request.text("topic"), request.number("queueId")
        first_ms = await self._archive.stored_ms(topic, queue_id, archived.min_offset)
        known_ms = [time_ms for time_ms in (value, first_ms) if time_ms >= 0]
        return Response(ext={"timestamp": str(min(known_ms, default=-1))})

    async def search(self, request: Request, upstream: Upstream) -> Response:
        """SEARCH_OFFSET_BY_TIMESTAMP: the first offset at a time, from the archive if the time lies before the broker's
        first message, else from the broker. If the broker deletes messages during the search, it is repeated."""
        for _ in range(SEARCHES_MAX):
            situation = await self._situation(request.command, upstream)
            archived, local = situation.archived, situation.local
            # The broker's first message may lie before the archive's, as in an archive of its later messages.
            if archived is None or (
                local is not None and local.min_offset < min(local.max_offset, archived.min_offset)
            ):
                return relayed(await upstream.call(request.command, ANSWER_S))
            before = await self._broker_first(request.command, upstream)
            response = await self._searched(request, upstream, situation, before)
            if response is not None:
                return response
            answer = relayed(await upstream.call(request.command, ANSWER_S))
            if before == await self._broker_first(request.command, upstream):
                return answer
            # The broker deleted in between: its reply may be the first message that was left.
        raise UnavailableError(
            "the offset of this time was not found, as the broker deleted messages during each search: repeat the"
            " request"
        )

    async def _searched(
        self, request: Request, upstream: Upstream, situation: Situation, first: _First
    ) -> Response | None:
        """Return the reply to a search for a time if the archive decides it, None if the request is to be relayed to
        the broker. ``first``: when the broker's first message was stored; before that time only the archive has
        messages."""
        archived, time_ms = situation.archived, request.number("timestamp")
        is_upper = request.text("boundaryType", "LOWER").upper() == "UPPER"
        if is_upper and first.is_refused:
            return None
        if is_upper and first.is_away:
            raise UnavailableError(
                "the last offset before a time cannot be found while the broker is away: it may have later messages"
            )
        # Messages stored in the same millisecond as the broker's first one may be archived.
        is_older = time_ms < first.stored_ms if is_upper else time_ms <= first.stored_ms
        if archived is None or (first.stored_ms >= 0 and not is_older):
            return None
        if first.is_refused:
            refusal = await upstream.call(request.command, ANSWER_S)
            if number_in(refusal, "offset") is None:
                return relayed(refusal)
        offset = await self._archive.offset_by_time(
            request.text("topic"), request.number("queueId"), time_ms, upper=is_upper
        )
        if first.is_away and offset <= archived.min_offset > 0:
            raise UnavailableError(
                "the first offset at a time cannot be found while the broker is away: it may have earlier messages than"
                " the archive"
            )
        if not is_upper and offset >= archived.max_offset:
            # All archived messages are older than the time: the broker's first message at that time counts.
            answer = await upstream.call(request.command, ANSWER_S)
            value = number_in(answer, "offset")
            if value is None:
                return relayed(answer)
            offset = lower_by_time(offset, archived, value, situation.local)
        return Response(ext={"offset": str(offset)})

    async def _broker_first(self, command: RemotingCommand, upstream: Upstream) -> _First:
        query = replace(command, code=int(RequestCode.GET_EARLIEST_MSG_STORETIME))
        try:
            stored_ms = number_in(await upstream.call(query, ANSWER_S), "timestamp")
        except UnavailableError:
            return _First(is_away=True)
        return _First(is_refused=True) if stored_ms is None else _First(stored_ms)

    async def topic_stats(self, request: Request, upstream: Upstream) -> Response:
        """GET_TOPIC_STATS_INFO: the broker's statistics of a topic, with the archive's minimum offset where it is
        lower."""
        answer = await upstream.call(request.command, ANSWER_S)
        table, others = offset_table(answer)

        async def join(queue: MessageQueue) -> None:
            archived = (await self._situation(_for_queue(request.command, queue), upstream)).archived
            low = table[queue].get("minOffset")
            if archived is not None and isinstance(low, int):
                table[queue]["minOffset"] = joined_min(archived, low)

        await bounded_gather(join, table)
        return _with_table(answer, table, others)

    async def consume_stats(self, request: Request, upstream: Upstream) -> Response:
        """GET_CONSUME_STATS: the broker's statistics of a group, with the store times of consumed messages that only
        the archive has: the broker says 0 for these, which tools would show as a lag of decades."""
        answer = await upstream.call(request.command, ANSWER_S)
        table, others = offset_table(answer)
        looked_up = 0

        async def look_up(queue: MessageQueue) -> None:
            """Set when a queue's last consumed message was stored, if only the archive knows; for TIMES_MAX queues."""
            nonlocal looked_up
            row = table[queue]
            offset, time_ms = row.get("consumerOffset"), row.get("lastTimestamp")
            if not isinstance(offset, int) or not isinstance(time_ms, int) or time_ms > 0 or offset <= 0:
                return
            archived = (await self._situation(_for_queue(request.command, queue), upstream)).archived
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
            return Situation(0)  # the broker replies with the error
        return await self._router.situation(look, topic, int(queue_id), 0)

    async def _call(
        self, command: RemotingCommand, upstream: Upstream, archived: HeldOffsets | None
    ) -> RemotingCommand | None:
        """Return the broker's reply; None if the broker is away and the archive begins at offset 0, so that it knows
        the first message. Raises UnavailableError if the broker is away and the archive does not know it."""
        try:
            return await upstream.call(command, ANSWER_S)
        except UnavailableError:
            if archived is not None and archived.min_offset == 0 < archived.max_offset:
                return None
            raise


def _for_queue(command: RemotingCommand, queue: MessageQueue) -> RemotingCommand:
    fields = {**command.ext_fields, "topic": queue.topic, "queueId": str(queue.queue_id)}
    return replace(command, ext_fields=fields, body=b"")


Table = dict[MessageQueue, dict[str, Any]]


def offset_table(answer: RemotingCommand) -> tuple[Table, dict[str, Any]]:
    """Return the table in a reply with statistics, by queue, and the other members of its body. Both are empty for a
    reply without such a table."""
    document = dict(document_in(answer))
    try:
        rows: Any = document.pop("offsetTable")
        table = {_queue_of(fastjson.loads(key)): dict(row) for key, row in rows.items()}
    except (CorruptionError, AttributeError, KeyError, TypeError, ValueError):
        return {}, {}
    return table, document


def _queue_of(document: Mapping[str, Any]) -> MessageQueue:
    return MessageQueue(str(document["brokerName"]), str(document["topic"]), int(document["queueId"]))


def _with_table(answer: RemotingCommand, table: Table, others: Mapping[str, Any]) -> Response:
    if not table:
        return relayed(answer)
    return replace(relayed(answer), body=(queue_map(table, others),))


logger = logging.getLogger(__name__)

ANSWER_BYTES_MAX: Final = 15 * 1024 * 1024
"""The merged messages of both sides must fit into a frame."""
_FLAGS = struct.Struct(">i")
_PHYS = struct.Struct(">q")
_PHYS_AT, _FLAG_AT, _BORN_AT = 28, 36, 48


class MergedLookups:
    """Handlers. Belongs to one event loop."""

    def __init__(self, router: ReadRouter, archive: Backend) -> None:
        self._router, self._archive = router, archive

    def handlers(self) -> ProxyHandlers:
        return {RequestCode.VIEW_MESSAGE_BY_ID: self.view, RequestCode.QUERY_MESSAGE: self.by_key}

    async def view(self, request: Request, upstream: Upstream) -> Response:
        """VIEW_MESSAGE_BY_ID: the message at a physical offset from the broker, or from the archive if the broker is
        away or no longer has it."""
        answer, away = await _call(request.command, upstream)
        # A broker says SYSTEM_ERROR for a message that it does not have.
        if answer is not None and (is_refusal(answer) or answer.code != ResponseCode.SYSTEM_ERROR):
            return relayed(answer)
        record = await self._archived_at(request)
        if record is not None:
            return Response(body=(record,))
        if answer is None:
            assert away is not None
            raise away
        return relayed(answer)

    async def _archived_at(self, request: Request) -> Buffer | None:
        """Return the archived message at the requested physical offset; None if there is none, or its topic is not to
        be read from the archive (DISABLE), whatever topic the client names."""
        if request.text("topic", "") and not self._may_search(request):
            return None
        record = await self._archive.message_at_phys(request.number("offset"))
        if record is None or self._is_disabled(decode_record(record).topic):
            return None
        return record

    async def by_key(self, request: Request, upstream: Upstream) -> Response:
        """QUERY_MESSAGE: the messages with a key that broker and archive have. If one of both fails, the messages of
        the other are the reply; if that has none, the failure is raised, as the message may exist."""
        if not self._may_search(request):
            return relayed(_of_topic(request, await upstream.call(request.command, ANSWER_S)))
        (answer, away), (archived, failure) = await asyncio.gather(
            _call(request.command, upstream), self._archived(request)
        )
        if answer is not None and answer.code not in (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND):
            return relayed(answer)  # perhaps a refusal by access control
        answer = None if answer is None else _of_topic(request, answer)
        is_found = answer is not None and answer.code == ResponseCode.SUCCESS
        of_broker = list(records_in(answer.body)) if answer is not None and is_found else []
        records = merged(of_broker, archived, key_count(request))
        if not records:
            for error in (away, failure):
                if error is not None:
                    raise error
            assert answer is not None
            return relayed(answer)
        ext = {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}
        return Response(ext=ext | dict(answer.ext_fields) if answer is not None else ext, body=records)

    async def _archived(self, request: Request) -> tuple[Sequence[Buffer], TieredError | None]:
        """Return the archived records with a key, and the error if the archive cannot be searched, else None. After an
        error the reply has the broker's records alone, if there are any."""
        try:
            return await records_by_key(self._archive, request), None
        except TieredError as error:
            logger.warning(
                "a query by key gets only the broker's messages, as the archive cannot be searched: %s", error
            )
            return (), error

    def _may_search(self, request: Request) -> bool:
        return not self._is_disabled(request.text("topic", ""))

    def _is_disabled(self, topic: str) -> bool:
        return self._router.policy_of(topic) is ReadPolicy.DISABLE


async def _call(
    command: RemotingCommand, upstream: Upstream
) -> tuple[RemotingCommand | None, UnavailableError | None]:
    try:
        return await upstream.call(command, ANSWER_S), None
    except UnavailableError as error:
        return None, error


def _of_topic(request: Request, answer: RemotingCommand) -> RemotingCommand:
    """Return a broker's reply to a query by key without messages of other topics than the requested one: a broker finds
    messages by a hash of topic and key, and a client may choose keys that collide."""
    topic = request.text("topic", "")
    records = [record for record in records_in(answer.body) if decode_record(record).topic == topic]
    if records or answer.code != ResponseCode.SUCCESS:
        return replace(answer, body=b"".join(records))
    return replace(answer, code=int(ResponseCode.QUERY_NOT_FOUND), remark="no message has this key", body=b"")


def merged(of_broker: Sequence[Buffer], archived: Sequence[Buffer], count: int) -> list[Buffer]:
    """Return the records of broker and archive, newest first and each physical offset once: at most ``count``, and as
    many as fit into a reply."""
    by_phys: dict[int, tuple[int, Buffer]] = {}
    for record in (*archived, *of_broker):
        (phys,) = _PHYS.unpack_from(record, _PHYS_AT)
        (flags,) = _FLAGS.unpack_from(record, _FLAG_AT)
        host_bytes = 20 if flags & SYS_BORN_HOST_V6 else 8
        (stored_ms,) = _PHYS.unpack_from(record, _BORN_AT + host_bytes)
        by_phys[phys] = stored_ms, record
    newest_first = sorted(by_phys.items(), key=lambda item: (item[1][0], item[0]), reverse=True)
    records = [record for _, (_, record) in newest_first[:count]]
    return records[: count_within(map(len, records), ANSWER_BYTES_MAX)]
