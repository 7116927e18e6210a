"""Pulling messages (11, 361): response codes for what the archive has, and long polling.

PULL_OFFSET_MOVED (21) moves the consumer's offset. It is returned to users of the pull API below the minimum and beyond
the end, and to consumers of an earlier generation of a recreated queue, who start at the new one's minimum. A push
consumer below the minimum gets 20 and the minimum instead, because 4.9 broadcasting consumers never get past 21. Beyond
the end and in empty queues a request waits, then retries the same offset (19).

Sources: PullMessageProcessor, MQClientAPIImpl.processPullResponse.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from fetcher.rows.tag_filter import ANY_TAG
from rocketmq_tiered.server.backend.backend import Backend
from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.groups.client_table import TAG, ClientTable, Subscription, is_legal_group
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.wire.request import SUCCESS, Buffer, HandlerTable, Request, Response
from tiered.errors import UsageError
from tiered.remoting.command import RequestCode, ResponseCode

PLAIN_CACHED, PLAIN_CHARS_MAX = 1024, 1024
DIGITS_MAX = 18
_TAGS = None, "", TAG
_FOUND_NAME = PullStatus.FOUND.name
COMMIT_OFFSET, SUSPEND, SUBSCRIPTION = 1, 2, 4
"""Bits of a pull's sysFlag (org.apache.rocketmq.common.sysflag.PullSysFlag)."""
RECREATED = "the topic was recreated"


@dataclass(frozen=True)
class PullLimits:
    """Limits of one pull: messages, bytes (a single larger message comes alone), and how long it may wait."""

    count_max: int = 1024
    bytes_default: int = 256 * 1024
    bytes_max: int = 4 * 1024 * 1024
    hold_s_max: float = 20.0
    stale_s: float = 1.2
    """How long this server may lag behind another one of the archive."""


def response_code(status: PullStatus, *, is_pull_api: bool) -> int | None:
    """Return the response code for the status of a pull, None if the request is to wait for messages.
    ``is_pull_api``: the client uses the pull API and handles PULL_OFFSET_MOVED; a push consumer may not."""
    if status is PullStatus.FOUND:
        return ResponseCode.SUCCESS
    if status is PullStatus.NO_MATCHED_MESSAGE:
        return ResponseCode.PULL_RETRY_IMMEDIATELY
    if status is PullStatus.OFFSET_TOO_SMALL:
        return ResponseCode.PULL_OFFSET_MOVED if is_pull_api else ResponseCode.PULL_RETRY_IMMEDIATELY
    if status is PullStatus.OFFSET_OVERFLOW_BADLY and is_pull_api:
        return ResponseCode.PULL_OFFSET_MOVED
    return None


class PullService:
    """Pulls from one archive."""

    def __init__(
        self,
        archive: Backend,
        routes: RouteTable,
        clients: ClientTable,
        offsets: GroupOffsets,
        limits: PullLimits | None = None,
    ) -> None:
        """``clients`` know the subscriptions of pulls that send none; ``offsets`` take the commits that pulls carry."""
        self._archive, self._routes = archive, routes
        self._clients, self._offsets = clients, offsets
        self._limits = limits or PullLimits()
        # A client repeats the fields of a pull but for the offset, so that they need not be parsed again.
        self._plain = lru_cache(PLAIN_CACHED)(self._parse_plain)

    def register(self, table: HandlerTable) -> None:
        """PULL_MESSAGE and LITE_PULL_MESSAGE are the same."""
        codes = RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE
        table.register(*codes, is_prompt=True, at_once=self.pull_from_memory)(self.pull)

    def pull_from_memory(self, request: Request) -> Response | None:
        """Return the response to a pull without a filter, the most frequent request, if memory has its messages. None:
        anything is unusual, or would have to be read or waited for, and ``pull`` is to be called."""
        get = request.command.ext_fields.get
        try:
            plain = self._plain(
                get("topic"),
                get("consumerGroup"),
                get("queueId"),
                get("sysFlag"),
                get("maxMsgNums"),
                get("maxMsgBytes"),
                get("expressionType"),
                get("subVersion"),
            )
        except _TooLongError:
            return None
        if plain is None:
            return None
        pull, flags, version = plain
        topic, group, queue_id = pull.topic, pull.group, pull.queue_id
        if flags & SUBSCRIPTION:  # the request has a filter expression; else the client's heartbeat had it
            expression: str | None = get("subscription", ANY_TAG)
        else:
            known = self._clients.subscription(group, topic, request.peer.id)
            is_known = known is not None and known.version >= version and known.expression_type == TAG
            expression = known.expression if known is not None and is_known else None
        config = self._routes.find(topic)
        if expression != ANY_TAG or config is None or queue_id >= max(config.read_queues, 1):
            return None
        offset = request.number("queueOffset")
        result = self._archive.pull_from_memory(pull.at(offset)) if offset >= 0 else None
        if result is None or result.status is not PullStatus.FOUND:
            return None
        committed = request.number("commitOffset", -1) if flags & COMMIT_OFFSET else -1
        queue_of_group = group, topic, queue_id
        # Members of a group that has not yet moved to the new generation keep committing their old offset.
        if committed >= 0 and not self._offsets.is_earlier_generation(
            *queue_of_group, committed, result.max_offset
        ):
            self._offsets.note(*queue_of_group, committed, request.account)
        return pull_response(
            SUCCESS, result.next_offset, result.min_offset, result.max_offset, _FOUND_NAME, result.body
        )

    async def pull(self, request: Request) -> Response:
        """Return the response to one pull. Without messages it waits until there are some, but no longer than the
        client offered to wait."""
        flags = request.number("sysFlag", 0)
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        pull = pull_request_of(request, self._clients, self._limits)
        if pull is None:
            return unknown_subscription()
        queue_of_group = pull.group, pull.topic, pull.queue_id
        # The topic was deleted and created again, and the group has not yet consumed of the new generation.
        was_new = self._offsets.is_new_generation(*queue_of_group)
        if flags & COMMIT_OFFSET and (committed := request.number("commitOffset", -1)) >= 0:
            bounds = self._archive.bounds(pull.topic, pull.queue_id) if was_new else None
            if bounds is None or not self._offsets.is_earlier_generation(
                *queue_of_group, committed, bounds.maximum
            ):
                self._offsets.note(*queue_of_group, committed, request.account)
        is_pull_api = bool(flags & SUBSCRIPTION)  # push consumers send their filter by heartbeat alone
        try:
            result = await self._archive.pull(pull)
        except UsageError as error:
            return Response(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark=str(error))
        is_beyond_end = result.status is PullStatus.OFFSET_OVERFLOW_BADLY
        if is_beyond_end and (is_pull_api or self._is_earlier(pull, result)):
            # Behind a load balancer the client may have read this far from another server: wait before moving it back.
            await self._archive.changed(self._limits.stale_s)
            result = await self._archive.pull(pull)
        ends_s = time.monotonic()
        if flags & SUSPEND:
            ends_s += min(request.number("suspendTimeoutMillis", 0) / 1000, self._limits.hold_s_max)
        while True:
            if (moved := self._moved(pull, result, was_new=was_new)) is not None:
                return moved
            code = response_code(result.status, is_pull_api=is_pull_api)
            if code is not None or (left_s := ends_s - time.monotonic()) <= 0:
                break
            await self._archive.changed(left_s)
            result = await self._archive.pull(pull)
        return pull_response(
            ResponseCode.PULL_NOT_FOUND if code is None else code,
            pull.offset if code is None else result.next_offset,
            result.min_offset,
            result.max_offset,
            result.status.name,
            result.body if code == ResponseCode.SUCCESS else (),
        )

    def _moved(self, pull: PullRequest, result: PullResult, *, was_new: bool) -> Response | None:
        """Return the response that moves a consumer to the first message of a topic that was deleted and created again
        while it read the earlier generation; None if it did not. ``was_new``: the new generation was known when the
        pull began: then an offset within it is the consumer's own, and only one beyond the end is of the earlier
        one."""
        if result.status is PullStatus.OFFSET_OVERFLOW_BADLY:
            is_moved = self._is_earlier(pull, result)
        else:
            is_moved = not was_new and self._offsets.is_new_generation(pull.group, pull.topic, pull.queue_id)
        if not is_moved:
            return None
        bounds = self._archive.bounds(pull.topic, pull.queue_id)
        low, high = (result.min_offset, result.max_offset) if bounds is None else bounds[:2]
        return pull_response(ResponseCode.PULL_OFFSET_MOVED, low, low, high, RECREATED)

    def _is_earlier(self, pull: PullRequest, result: PullResult) -> bool:
        """Whether a consumer beyond the queue's end read an earlier generation."""
        is_recreated = result.next_offset < result.max_offset
        return is_recreated or self._offsets.is_new_generation(pull.group, pull.topic, pull.queue_id)

    def _refusal(self, request: Request) -> Response | None:
        """Return the refusal of a pull that needs no reading, with the code that a broker has for it; None: the group,
        the queue and the offset are possible ones."""
        topic, queue_id = request.text("topic"), request.number("queueId")
        if (refusal := self._routes.group_refusal(request.text("consumerGroup"))) is not None:
            return refusal
        config = self._routes.find(topic)
        if config is None:
            return Response(ResponseCode.TOPIC_NOT_EXIST, remark=f"topic {topic} is not in the archive")
        if not 0 <= queue_id < max(config.read_queues, 1):
            remark = f"queue {queue_id} of {topic} does not exist: it has {config.read_queues}"
            return Response(ResponseCode.SYSTEM_ERROR, remark=remark)
        if request.number("queueOffset") < 0:
            return Response(
                ResponseCode.SYSTEM_ERROR, remark=f"queueOffset {request.number('queueOffset')} is negative"
            )
        return None

    def _parse_plain(
        self,
        topic: str | None,
        group: str | None,
        queue_id: str | None,
        flags: str | None,
        count: str | None,
        max_bytes: str | None,
        expression_type: str | None,
        version: str | None,
    ) -> _PlainPull | None:
        """Parse the fields that a client repeats with each pull of a queue, whose result is cached. Returns None where
        one is missing, wrong or unusual. Raises _TooLongError for fields that are too long to be cached."""
        fields = topic, group, queue_id, flags, count, max_bytes, expression_type, version
        if sum(len(text) for text in fields if text is not None) > PLAIN_CHARS_MAX:
            raise _TooLongError
        numbers = (
            "" if queue_id is None else queue_id,
            "0" if flags is None else flags,
            "32" if count is None else count,
            "0" if max_bytes is None else max_bytes,
            "0" if version is None else version,
        )
        if not topic or not group or not is_legal_group(group) or expression_type not in _TAGS:
            return None
        if not all(text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX for text in numbers):
            return None
        queue, flag, most, size, sub_version = map(int, numbers)
        limits = self._limits
        size = limits.bytes_default if max_bytes is None else max(1, size)
        # Each pull sets its own offset.
        pull = PullRequest(
            topic, queue, 0, min(max(1, most), limits.count_max), min(size, limits.bytes_max), group
        )
        return _PlainPull(pull, flag, sub_version)


class _PlainPull(NamedTuple):
    """The pull at offset 0, its sysFlag and the version of its subscription."""

    pull: PullRequest
    flags: int
    version: int


class _TooLongError(Exception):
    """Raised so that nothing is cached."""


class Subscriptions(Protocol):
    """Subscriptions of connections, from their heartbeats: ClientTable."""

    def subscription(self, group: str, topic: str, connection_id: int) -> Subscription | None:
        """The subscription to ``topic`` that this connection sent for ``group``."""
        ...


def pull_request_of(request: Request, subscriptions: Subscriptions, limits: PullLimits) -> PullRequest | None:
    """Return the pull that ``request`` describes. None: its filter is an SQL92 expression, which the request does not
    have and no heartbeat has sent yet. Raises BadRequestError for a missing or wrong field."""
    group, topic = request.name("consumerGroup"), request.name("topic")
    expression_type = request.text("expressionType", TAG) or TAG
    if request.number("sysFlag", 0) & SUBSCRIPTION:
        # An empty expression of another type is an error, not every message.
        expression: str | None = request.text("subscription", ANY_TAG if expression_type == TAG else "")
    else:
        known = subscriptions.subscription(group, topic, request.peer.id)
        expression = None
        if known is not None and known.version >= request.number("subVersion", 0):
            expression, expression_type = known.expression, known.expression_type
        elif known is not None and expression_type == TAG:
            expression_type = known.expression_type  # the newer subscription is most likely of the same type
    if expression is None and expression_type != TAG:
        return None
    max_bytes = request.number("maxMsgBytes", limits.bytes_default)
    return PullRequest(
        topic=topic,
        queue_id=request.number("queueId"),
        offset=request.number("queueOffset"),
        count=max(1, min(request.number("maxMsgNums", 32), limits.count_max)),
        max_bytes=max(1, min(max_bytes, limits.bytes_max)),
        group=group,
        expression=expression or (ANY_TAG if expression_type == TAG else ""),
        expression_type=expression_type,
        client=request.peer.id,
    )


def unknown_subscription() -> Response:
    """The refusal of a pull with an unknown filter: clients do not filter SQL92 messages again."""
    return Response(ResponseCode.SUBSCRIPTION_NOT_EXIST, remark="the SQL92 subscription is not known yet")


def pull_response(
    code: int, next_offset: int, min_offset: int, max_offset: int, remark: str, body: Sequence[Buffer] = ()
) -> Response:
    """Return the response to a pull, with the offset to continue at and the bounds of the queue. Java clients decode it
    only with all four fields."""
    ext = {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": str(next_offset),
        "minOffset": str(min_offset),
        "maxOffset": str(max_offset),
    }
    return Response(code, ext, body, remark)
