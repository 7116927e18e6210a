"""Pulling messages (11, 361): from what the archive holds to the codes clients act on, and waiting for more.

The rules that keep offsets right: an offset is moved (21) only for users of the pull API and only below the minimum or
beyond the end, and for whoever asks on in a former life of a queue that was made anew, to the beginning of the new one;
a push consumer below the minimum is led on with 20, because 4.9 broadcasting consumers never get past 21; beyond the
end and in empty queues a client is held and then told to ask again at the same offset.

The decision is pure (``answer_of``). Sources: PullMessageProcessor, MQClientAPIImpl.processPullResponse.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from fetcher.rows.tag_filter import ANY_TAG
from server.backend.backend import Backend, Bounds, PullFound, PullStatus, PullWish
from server.backend.route_handlers import RouteTable
from server.groups.client_table import TAG, ClientTable, Subscription
from server.groups.group_names import is_legal_group
from server.groups.group_offsets import GroupOffsets
from server.wire.codes import RequestCode, ResponseCode
from server.wire.request import (
    SUCCESS,
    Buffer,
    HandlerTable,
    Request,
    Response,
)
from tiered.errors import UsageError

PLAIN_KEPT, PLAIN_CHARS_MAX = 1024, 1024
DIGITS_MAX = 18
_TAGS = None, "", TAG
_FOUND, _FOUND_NAME = PullStatus.FOUND, PullStatus.FOUND.name
COMMIT_OFFSET, SUSPEND, SUBSCRIPTION = 1, 2, 4
"""Bits of a pull's sysFlag (org.apache.rocketmq.common.sysflag.PullSysFlag)."""


@dataclass(frozen=True)
class PullLimits:
    """Of one pull: messages and bytes at most (a single larger message goes alone), and how long it may wait."""

    count_max: int = 1024
    bytes_default: int = 256 * 1024
    bytes_max: int = 4 * 1024 * 1024
    hold_s_max: float = 20.0
    stale_s: float = 1.2
    """Another server of the archive may know a commit for so long before this one does."""


def answer_of(status: PullStatus, *, is_pull_api: bool) -> int | None:
    """The code for what was found; None: nothing to give now, hold the request and then say 19. Pure."""
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
    """Answers pulls of one archive."""

    def __init__(
        self,
        archive: Backend,
        routes: RouteTable,
        clients: ClientTable,
        offsets: GroupOffsets,
        limits: PullLimits | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._archive, self._routes = archive, routes
        self._clients, self._offsets = clients, offsets
        self._limits = limits or PullLimits()
        self._now_s = now_s

    def register(self, table: HandlerTable) -> None:
        """PULL_MESSAGE and LITE_PULL_MESSAGE are the same."""
        codes = RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE
        table.register(*codes, is_prompt=True, at_once=self.pull_in_hand)(self.pull)

    def pull_in_hand(self, request: Request) -> Response | None:
        """Answer a plain pull of messages that its group has in hand; None for any other. What consumers ask most."""
        get = request.command.ext_fields.get
        try:
            asked = _plain_of(
                get("topic"), get("consumerGroup"), get("queueId"), get("sysFlag"), get("maxMsgNums"),
                get("maxMsgBytes"), get("expressionType"), get("subVersion"),
            )  # fmt: skip
        except _TooLongError:
            return None
        if asked is None:
            return None
        topic, group, queue_id, flags = asked.topic, asked.group, asked.queue_id, asked.flags
        if flags & SUBSCRIPTION:
            expression: str | None = get("subscription", ANY_TAG)
        else:
            known = self._clients.subscription(group, topic)
            is_known = known is not None and known.version >= asked.version and known.expression_type == TAG
            expression = known.expression if known is not None and is_known else None
        config = self._routes.find(topic)
        if expression != ANY_TAG or config is None or queue_id >= max(config.read_queues, 1):
            return None
        limits = self._limits
        wish = PullWish(
            topic, queue_id, request.number("queueOffset"), min(asked.count, limits.count_max),
            min(limits.bytes_default if asked.max_bytes is None else asked.max_bytes, limits.bytes_max), group,
        )  # fmt: skip
        found = self._archive.pull_in_hand(wish) if wish.offset >= 0 else None
        if found is None or found.status is not _FOUND:
            return None
        if flags & COMMIT_OFFSET and (committed := request.number("commitOffset", -1)) >= 0:
            place = group, topic, queue_id
            if not self._offsets.is_earlier_generation(*place, committed, found.bounds.maximum):
                self._offsets.note(*place, committed)
        return pull_response(SUCCESS, found.next_offset, found.bounds, _FOUND_NAME, found.body)

    async def pull(self, request: Request) -> Response:
        """Answer one pull; may take as long as the client said it would wait."""
        flags = request.number("sysFlag", 0)
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        wish = wish_of(request, self._clients, self._limits)
        if wish is None:
            return unsubscribed()
        place = wish.group, wish.topic, wish.queue_id
        was_anew = self._offsets.is_new_generation(*place)
        if flags & COMMIT_OFFSET and (committed := request.number("commitOffset", -1)) >= 0:
            bounds = self._archive.bounds(*place[1:]) if was_anew else None
            if bounds is None or not self._offsets.is_earlier_generation(*place, committed, bounds.maximum):
                self._offsets.note(*place, committed)
        is_pull_api = bool(flags & SUBSCRIPTION)
        try:
            found = await self._archive.pull(wish)
        except UsageError as error:
            return Response(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark=str(error))
        is_moved = is_pull_api or self._offsets.is_new_generation(*place)
        if is_moved and found.status is PullStatus.OFFSET_OVERFLOW_BADLY:
            # Behind a balancer the client may have read so far at the other one: it is not moved back yet.
            await self._archive.changed(self._limits.stale_s)
            found = await self._archive.pull(wish)
        if (anew := self._anew(wish, found, was_anew=was_anew)) is not None:
            return anew
        code = answer_of(found.status, is_pull_api=is_pull_api)
        if code is None and flags & SUSPEND:
            ends_s = self._now_s() + min(
                request.number("suspendTimeoutMillis", 0) / 1000, self._limits.hold_s_max
            )
            while code is None and (left_s := ends_s - self._now_s()) > 0:
                await self._archive.changed(left_s)
                found = await self._archive.pull(wish)
                if (anew := self._anew(wish, found, was_anew=was_anew)) is not None:
                    return anew
                code = answer_of(found.status, is_pull_api=is_pull_api)
        if code is None:
            held = PullFound(found.status, wish.offset, found.bounds)
            return _response(ResponseCode.PULL_NOT_FOUND, held)
        return _response(code, found)

    def _anew(self, wish: PullWish, found: PullFound, *, was_anew: bool) -> Response | None:
        """To who asks on in a life of the queue that is over: where the new one begins, or its messages were skipped.
        That of an offset it has, too, is known where the new life came while the pull waited (not ``was_anew``)."""
        is_over = not was_anew or found.status is PullStatus.OFFSET_OVERFLOW_BADLY
        if not is_over or not self._offsets.is_new_generation(wish.group, wish.topic, wish.queue_id):
            return None
        bounds = self._archive.bounds(wish.topic, wish.queue_id) or found.bounds
        remark = "the topic was made anew"
        return pull_response(ResponseCode.PULL_OFFSET_MOVED, bounds.minimum, bounds, remark)

    def _refusal(self, request: Request) -> Response | None:
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


@dataclass(slots=True)
class _Plain:
    """What a client repeats with each of its pulls of a queue. ``max_bytes`` None: the default."""

    topic: str
    group: str
    queue_id: int
    flags: int
    count: int
    max_bytes: int | None
    version: int


class _TooLongError(Exception):
    """What a pull repeats is not remembered: an exception is kept in no cache."""


@lru_cache(maxsize=PLAIN_KEPT)
def _plain_of(
    topic: str | None, group: str | None, queue_id: str | None, flags: str | None, count: str | None,
    max_bytes: str | None, expression_type: str | None, version: str | None,
) -> _Plain | None:  # fmt: skip
    """Fields of a pull as numbers, or None where anything is unusual: ``wish_of`` judges that. Raises _TooLongError for
    more text than pulls have: whatever is answered is remembered by it."""
    fields = topic, group, queue_id, flags, count, max_bytes, expression_type, version
    if sum(len(text) for text in fields if text is not None) > PLAIN_CHARS_MAX:
        raise _TooLongError
    numbers = (
        "" if queue_id is None else queue_id, "0" if flags is None else flags, "32" if count is None else count,
        "0" if max_bytes is None else max_bytes, "0" if version is None else version,
    )  # fmt: skip
    if not topic or not group or not is_legal_group(group) or expression_type not in _TAGS:
        return None
    if not all(text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX for text in numbers):
        return None
    queue, flag, most, size, sub_version = map(int, numbers)
    bytes_asked = None if max_bytes is None else max(1, size)
    return _Plain(topic, group, queue, flag, max(1, most), bytes_asked, sub_version)


class Subscriptions(Protocol):
    """What groups want, from their heartbeats; session.ClientTable is one."""

    def subscription(self, group: str, topic: str) -> Subscription | None:
        """What ``group`` wants of ``topic``, as its members last said."""
        ...


def wish_of(request: Request, subscriptions: Subscriptions, limits: PullLimits) -> PullWish | None:
    """What a pull asks for; None when its expression is needed and not known. Raises BadRequestError."""
    group, topic = request.name("consumerGroup"), request.name("topic")
    expression_type = request.text("expressionType", TAG) or TAG
    no_expression = (
        ANY_TAG if expression_type == TAG else ""
    )  # of another type it is an error, not everything
    if request.number("sysFlag", 0) & SUBSCRIPTION:
        expression: str | None = request.text("subscription", no_expression)
    else:
        known = subscriptions.subscription(group, topic)
        expression = None
        if known is not None and known.version >= request.number("subVersion", 0):
            expression, expression_type = known.expression, known.expression_type
        elif known is not None and expression_type == TAG:
            expression_type = known.expression_type  # a newer one is on its way, most likely of the same kind
    if expression is None and expression_type != TAG:
        return None
    max_bytes = request.number("maxMsgBytes", limits.bytes_default)
    return PullWish(
        topic=topic,
        queue_id=request.number("queueId"),
        offset=request.number("queueOffset"),
        count=max(1, min(request.number("maxMsgNums", 32), limits.count_max)),
        max_bytes=max(1, min(max_bytes, limits.bytes_max)),
        group=group,
        expression=expression or (ANY_TAG if expression_type == TAG else ""),
        expression_type=expression_type,
    )


def unsubscribed() -> Response:
    """To a pull whose filter is not known: unfiltered messages would be consumed, as nobody filters again."""
    return Response(ResponseCode.SUBSCRIPTION_NOT_EXIST, remark="the SQL92 subscription is not known yet")


def pull_response(
    code: int, next_offset: int, bounds: Bounds, remark: str, body: Sequence[Buffer] = ()
) -> Response:
    """The answer to a pull. All four numbers must be there, or Java does not decode it."""
    ext = {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": str(next_offset),
        "minOffset": str(bounds.minimum),
        "maxOffset": str(bounds.maximum),
    }
    return Response(code, ext, body, remark)


def _response(code: int, found: PullFound) -> Response:
    body = found.body if code == ResponseCode.SUCCESS else ()
    return pull_response(code, found.next_offset, found.bounds, found.status.name, body)
