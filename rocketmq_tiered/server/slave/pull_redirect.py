"""Pull redirect: whether a client pulls next from here or from the master (``suggestWhichBrokerId``), and the pace of
empty replies.

A redirected consumer stays while the archive has its next messages. It returns to the master at the archive's end, if
the master certainly has the rest. An empty reply never redirects: what the archive lacks is relayed, long polling
included, so a consumer with a pinned broker id is served too, and no consumer goes in circles.

Sources: PullAPIWrapper.updatePullFromWhichNode and recalculatePullFromWhichNode.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from fetcher.policy.read_policy import BrokerSide, ReadPolicy, Situation
from fetcher.policy.read_router import ReadRouter
from rocketmq_tiered.server.backend.pull_handlers import SUSPEND, pull_response
from rocketmq_tiered.server.proxy.broker_view import BrokerViews, QueueState
from rocketmq_tiered.server.proxy.proxy_handlers import ProxyHandler, ProxyHandlers, Upstream
from rocketmq_tiered.server.slave.registration import MASTER_ID
from rocketmq_tiered.server.wire.request import Request, Response
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.model.lru import Lru
from tiered.remoting.command import RequestCode, ResponseCode

REPEAT_S: Final = 1.0
"""The least time between two empty replies to the same pull of the same client."""
REPEATS_BYTES_MAX: Final = 16 * 1024 * 1024
REPEAT_BYTES: Final = 500
"""Memory of one entry without its names: measured."""
CHECK_EVERY_S: Final = 0.5
_NOTHING: Final = frozenset({ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY})


def next_id(own_id: int, policy: ReadPolicy, situation: Situation, *, is_master_available: bool) -> int:
    """Return the broker id that a client is to pull from next, at ``situation.offset``: ``own_id``, that of this
    process, or the master's. ``situation``: what archive and master have of the queue; ``policy``: from where its topic
    is read."""
    if not is_master_available or situation.broker in (BrokerSide.AWAY, BrokerSide.UNREADABLE):
        return own_id
    if situation.is_system or policy is ReadPolicy.DISABLE:
        return MASTER_ID
    archived, local, offset = situation.archived, situation.local, situation.offset
    if archived is not None and offset in archived:
        return own_id
    if local is None:
        # The master's queue is unknown: an archived one is read from here.
        return MASTER_ID if archived is None and not situation.is_archive_behind else own_id
    # The master moves a reader below its minimum to that minimum, also one that falls below it on the way. A master
    # whose log was truncated moves a reader above its maximum back to its end.
    if offset < local.min_offset or offset > local.max_offset or situation.is_expiring:
        return own_id
    return MASTER_ID


class _Reply(NamedTuple):
    offset: int
    at_s: float


class EmptyReplyPacer:
    """Delays repeated empty replies, so that no client pulls in a hot loop."""

    def __init__(self) -> None:
        self._last: Lru[tuple[int, str, str, int], _Reply] = Lru(REPEATS_BYTES_MAX, resists_floods=True)

    def wait_s(self, reader: tuple[int, str], topic: str, queue_id: int, offset: int, now_s: float) -> float:
        """Return by how many seconds to delay an empty reply to a pull at ``offset``: until REPEAT_S after the last
        one, if that was at the same offset. ``reader``: connection and group, as groups of one client share a
        connection."""
        key = *reader, topic, queue_id
        before = self._last.peek(key)
        is_repeat = before is not None and before.offset == offset
        left_s = before.at_s + REPEAT_S - now_s if before is not None and is_repeat else 0.0
        left_s = min(REPEAT_S, max(0.0, left_s))
        reply = _Reply(offset, now_s + left_s)
        self._last.put(key, reply, REPEAT_BYTES + sys.getsizeof(reader[1]) + sys.getsizeof(topic))
        return left_s


@dataclass
class RedirectCounters:
    """Pull replies by the broker they suggest, and empty replies delayed."""

    to_slave: int = 0
    to_master: int = 0
    delayed: int = 0


@dataclass(frozen=True)
class RedirectContext:
    """State and clocks the redirect depends on, besides archive and broker. ``sleep`` waits in the event loop."""

    own_id: int
    is_master_available: Callable[[], bool]
    hold_s_max: float = 20.0
    clock: Clock = MACHINE_CLOCK
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    counters: RedirectCounters = field(default_factory=RedirectCounters)


class SlavePulls:
    """Wraps pull handlers: adds the broker to pull from next. Belongs to one event loop."""

    def __init__(
        self, pulls: ProxyHandlers, router: ReadRouter, views: BrokerViews, context: RedirectContext
    ) -> None:
        self._pulls, self._router, self._views, self._context = pulls, router, views, context
        self._pacer = EmptyReplyPacer()
        self._counters = context.counters

    def handlers(self) -> ProxyHandlers:
        """Return the handlers of pulls by request code, each of which calls the one it wraps."""
        codes = RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE
        return {code: self._wrapped(self._pulls[code]) for code in codes}

    def _wrapped(self, handler: ProxyHandler) -> ProxyHandler:
        async def pull(request: Request, upstream: Upstream) -> Response | None:
            response = await self._wait_for_master(request) or await handler(request, upstream)
            return await self._finished(request, upstream, response)

        return pull

    async def _wait_for_master(self, request: Request) -> Response | None:
        """Hold a pull past the archive's end while the master is away, and return an empty reply after the client's
        long-poll time. None: the pull can be answered now."""
        if self._context.is_master_available() or not request.number("sysFlag", 0) & SUSPEND:
            return None
        topic, queue_id = request.text("topic"), request.number("queueId")
        offset, hold_ms = request.number("queueOffset"), request.number("suspendTimeoutMillis", 0)
        ends_s = self._context.clock.monotonic_s() + min(hold_ms / 1000, self._context.hold_s_max)
        while not self._context.is_master_available():
            archived = self._router.archived(topic, queue_id)
            if archived is not None and offset < archived.max_offset:
                return None
            left_s = ends_s - self._context.clock.monotonic_s()
            if left_s <= 0:
                bounds = (0, 0) if archived is None else (archived.min_offset, archived.max_offset)
                return pull_response(ResponseCode.PULL_NOT_FOUND, offset, *bounds, "master not available")
            await self._context.sleep(min(CHECK_EVERY_S, left_s))
        return None

    async def _finished(
        self, request: Request, upstream: Upstream, response: Response | None
    ) -> Response | None:
        """Return the reply to a pull with the broker to pull from next. A repeated empty reply is delayed for a
        consumer that waits for messages, as it would pull again at once. Replies without a next offset are returned as
        they are."""
        text = "" if response is None else response.ext.get("nextBeginOffset", "")
        if response is None or not text.isdecimal():
            return response
        topic, queue_id = request.text("topic"), request.number("queueId")
        offset, next_offset = request.number("queueOffset"), int(text)
        is_waiting = bool(request.number("sysFlag", 0) & SUSPEND)  # else the application repeats it
        if response.code in _NOTHING and next_offset == offset and is_waiting:
            now_s = self._context.clock.monotonic_s()
            reader = request.peer.id, request.text("consumerGroup", "")
            wait_s = self._pacer.wait_s(reader, topic, queue_id, offset, now_s)
            if wait_s > 0:
                self._counters.delayed += 1
                await self._context.sleep(wait_s)
        if _continues_in_archive(response, next_offset):
            broker_id = self._context.own_id
        else:
            # Decided last, on the state at the time of the reply.
            broker_id = await self._next_id(request, upstream, next_offset)
        if broker_id == MASTER_ID:
            self._counters.to_master += 1
        else:
            self._counters.to_slave += 1
        return replace(response, ext={**response.ext, "suggestWhichBrokerId": str(broker_id)})

    async def _next_id(self, request: Request, upstream: Upstream, next_offset: int) -> int:
        """Return the broker id that the client is to pull from next, by what archive and master have at
        ``next_offset``; that of this process while the master is away."""
        context, topic = self._context, request.text("topic")
        if not context.is_master_available():
            return context.own_id  # no need to query it
        queue_state = QueueState(self._views, request.command, upstream, next_offset)
        situation = await self._router.situation(queue_state, topic, request.number("queueId"), next_offset)
        policy = self._router.policy_of(topic)
        return next_id(context.own_id, policy, situation, is_master_available=context.is_master_available())


def _continues_in_archive(response: Response, next_offset: int) -> bool:
    """Whether the messages came from the archive (relayed replies carry the broker's version) and more follow there."""
    end = response.ext.get("maxOffset", "")
    is_archived = response.code == ResponseCode.SUCCESS and response.version is None
    return is_archived and end.isdecimal() and next_offset < int(end)
