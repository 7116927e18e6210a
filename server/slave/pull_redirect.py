"""Where a client pulls next: here, or at the master (``suggestWhichBrokerId``), and how often it is told nothing new.

A redirected consumer stays while the archive has what comes next, and goes back where the archive ends, if the master
surely has the rest. It is never handed over by an answer without messages: what the archive does not have is relayed,
long polling included, so that a consumer that does not follow suggestions (its broker id is pinned) is served all the
same, and none goes in circles.

Pure but for the look at both sides; owns that rule. Sources: PullAPIWrapper.updatePullFromWhichNode and
recalculatePullFromWhichNode.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from fetcher.blocks.segmented_lru import Remembered
from fetcher.policy.read_policy import BrokerSide, ReadPolicy, Situation
from fetcher.policy.read_router import PolicyLine
from server.backend.backend import Bounds
from server.backend.pull_handlers import SUSPEND, pull_response
from server.proxy.broker_queue import QueueLook
from server.proxy.broker_view import BrokerViews
from server.proxy.proxy_handlers import ProxyHandler, ProxyHandlers, Upstream
from server.slave.registration import MASTER_ID
from server.wire.codes import RequestCode, ResponseCode
from server.wire.request import Request, Response

REPEAT_S: Final = 1.0
"""The same question of the same client is told "nothing" at most once in this time."""
REPEATS_BYTES_MAX: Final = 16 * 1024 * 1024
REPEAT_BYTES: Final = 500
"""Of one that is remembered, without its names: measured."""
LOOK_AGAIN_S: Final = 0.5
_NOTHING: Final = frozenset({ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY})


def next_id(own_id: int, policy: ReadPolicy, situation: Situation, *, is_master_well: bool) -> int:
    """The broker id for the pull at ``situation.offset``: ``own_id``, or the master's."""
    if not is_master_well or situation.broker in (BrokerSide.AWAY, BrokerSide.UNREADABLE):
        return own_id
    if situation.is_system or policy is ReadPolicy.DISABLE:
        return MASTER_ID
    archived, local, offset = situation.archived, situation.local, situation.offset
    if archived is not None and offset in archived:
        return own_id
    if local is None:
        # Nothing is known of the master's queue: an archived one is followed from here.
        return MASTER_ID if archived is None and not situation.is_archive_behind else own_id
    # The master moves whoever is below its minimum, to where it begins: also who is so only when he arrives.
    # One whose log was cut back moves whoever is above its maximum, too, back to its end.
    if offset < local.min_offset or offset > local.max_offset or situation.is_leaving:
        return own_id
    return MASTER_ID


class _Asked(NamedTuple):
    offset: int
    at_s: float


class Repeats:
    """How long an answer without news must wait, so that nobody asks the same in a hot loop."""

    def __init__(self, bytes_max: int = REPEATS_BYTES_MAX) -> None:
        self._told: Remembered[tuple[int, str, str, int], _Asked] = Remembered(bytes_max)

    def wait_s(self, reader: tuple[int, str], topic: str, queue_id: int, offset: int, now_s: float) -> float:
        """For an answer that leaves ``reader`` (connection and group: a client has one connection for all its groups)
        at ``offset``; it counts as told after that wait."""
        key = *reader, topic, queue_id
        before = self._told.get(key)
        is_repeat = before is not None and before.offset == offset
        left_s = before.at_s + REPEAT_S - now_s if before is not None and is_repeat else 0.0
        left_s = min(REPEAT_S, max(0.0, left_s))
        told = _Asked(offset, now_s + left_s)
        self._told.put(key, told, REPEAT_BYTES + sys.getsizeof(reader[1]) + sys.getsizeof(topic))
        return left_s


@dataclass
class RedirectCounters:
    """Answers by where they send the client next, and answers put off because nothing was new."""

    kept: int = 0
    handed_back: int = 0
    put_off: int = 0


@dataclass(frozen=True)
class RedirectContext:
    """What a hand-over depends on beside the two sides. ``now_s``, ``sleep``: monotonic."""

    own_id: int
    is_master_well: Callable[[], bool]
    hold_s_max: float = 20.0
    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    counters: RedirectCounters = field(default_factory=RedirectCounters)


class SlavePulls:
    """Pulls as ``pulls`` answers them, with the suggestion where to go on. Belongs to one event loop."""

    def __init__(
        self, pulls: ProxyHandlers, line: PolicyLine, views: BrokerViews, around: RedirectContext
    ) -> None:
        self._pulls, self._line, self._views, self._around = pulls, line, views, around
        self._repeats = Repeats()
        self._counters = around.counters

    def handlers(self) -> ProxyHandlers:
        """By request code."""
        return {code: self._wrapped(self._pulls[code]) for code in (
            RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE,
        )}  # fmt: skip

    def _wrapped(self, handler: ProxyHandler) -> ProxyHandler:
        async def pull(request: Request, upstream: Upstream) -> Response | None:
            response = await self._held(request, upstream) or await handler(request, upstream)
            return await self._finished(request, upstream, response)

        return pull

    async def _held(self, request: Request, upstream: Upstream) -> Response | None:
        """While the master is away: the answer to a pull of what only it can have, after as long as its client offered
        to wait. None: it may be answered now."""
        if self._around.is_master_well() or not request.number("sysFlag", 0) & SUSPEND:
            return None
        topic, queue_id = request.text("topic"), request.number("queueId")
        offset, hold_ms = request.number("queueOffset"), request.number("suspendTimeoutMillis", 0)
        ends_s = self._around.now_s() + min(hold_ms / 1000, self._around.hold_s_max)
        look = QueueLook(self._views, request.command, upstream, offset, has_broker=False)
        while not self._around.is_master_well():
            archived = (await self._line.situation(look, topic, queue_id, offset)).archived
            if archived is not None and offset < archived.max_offset:
                return None
            left_s = ends_s - self._around.now_s()
            if left_s <= 0:
                bounds = (
                    Bounds(archived.min_offset, archived.max_offset) if archived is not None else Bounds(0, 0)
                )
                return pull_response(ResponseCode.PULL_NOT_FOUND, offset, bounds, "the master is away")
            await self._around.sleep(min(LOOK_AGAIN_S, left_s))
        return None

    async def _finished(
        self, request: Request, upstream: Upstream, response: Response | None
    ) -> Response | None:
        told = "" if response is None else response.ext.get("nextBeginOffset", "")
        if response is None or not told.isdecimal():
            return response
        topic, queue_id = request.text("topic"), request.number("queueId")
        offset, next_offset = request.number("queueOffset"), int(told)
        is_waiting = bool(request.number("sysFlag", 0) & SUSPEND)  # else it is its user who asks again
        if response.code in _NOTHING and next_offset == offset and is_waiting:
            now_s = self._around.now_s()
            reader = request.peer.id, request.text("consumerGroup", "")
            wait_s = self._repeats.wait_s(reader, topic, queue_id, offset, now_s)
            if wait_s > 0:
                self._counters.put_off += 1
                await self._around.sleep(wait_s)
        if _goes_on_in_archive(response, next_offset):
            goes_to = self._around.own_id
        else:
            # Looked at last: what is true when the answer leaves.
            goes_to = await self._next_id(request, upstream, next_offset)
        if goes_to == MASTER_ID:
            self._counters.handed_back += 1
        else:
            self._counters.kept += 1
        return replace(response, ext={**response.ext, "suggestWhichBrokerId": str(goes_to)})

    async def _next_id(self, request: Request, upstream: Upstream, next_offset: int) -> int:
        around, topic = self._around, request.text("topic")
        if not around.is_master_well():
            return around.own_id  # it need not be asked
        look = QueueLook(self._views, request.command, upstream, next_offset)
        situation = await self._line.situation(look, topic, request.number("queueId"), next_offset)
        policy = self._line.policy_of(topic)
        return next_id(around.own_id, policy, situation, is_master_well=around.is_master_well())


def _goes_on_in_archive(response: Response, next_offset: int) -> bool:
    """Whether messages came from the archive (what is relayed carries the broker's version) and more follow: the end
    it names is its own."""
    end = response.ext.get("maxOffset", "")
    is_archived = response.code == ResponseCode.SUCCESS and response.version is None
    return is_archived and end.isdecimal() and next_offset < int(end)
