"""Pulls (11, 361) in proxy mode: from the archive, relayed, or held, as the read policy decides per pull.

A relayed pull is the client's own, long polling included. Its reply is checked first: messages that the broker lost
come from the archive; offsets that neither side has yet are held and get 20 at the same offset. A consumer of a
generation that ended gets 21 and the next generation's minimum, where a broker may name its maximum, or continue at the
same offset: at every reply, the last record that its group got here is compared with the queue's first. Clients keep
pulling from the proxy. While the broker is unreachable, the archive is still served.

A commit in a pull (sysFlag 1) always reaches the broker: with the relayed pull, or as a commit of its own, sent before
the archive is read. It is never sent again later, as that could move the group back: a held pull is not relayed, and
its client sends it again.

Owns the order of these steps, the two sources of a pull, the wire fields of a relayed one, and the responses. Does not
own the choice of source (read_router.py) nor the meaning of a broker's reply (offset_merge.py).
"""

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from fetcher.policy.read_policy import HeldOffsets, LocalView, ReadSource, Residency, Situation, join_offsets
from fetcher.policy.read_router import Plan, ReadOutcome, ReadRouter, retry_result
from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from rocketmq_tiered.server.backend.backend import Backend
from rocketmq_tiered.server.backend.pull_handlers import (
    COMMIT_OFFSET,
    RECREATED,
    SUBSCRIPTION,
    SUSPEND,
    PullLimits,
    Subscriptions,
    pull_request_of,
    pull_response,
    unknown_subscription,
)
from rocketmq_tiered.server.proxy.broker_view import SIGNATURE, BrokerViews, QueueBegin
from rocketmq_tiered.server.proxy.offset_merge import (
    OFFSET_RESET,
    PULL_CODES,
    BrokerReply,
    interpret,
    reply_code,
)
from rocketmq_tiered.server.proxy.proxy_handlers import ProxyHandlers, Upstream, relayed
from rocketmq_tiered.server.wire.request import Buffer, Request, Response
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import ThrottledError, UnavailableError, UsageError
from tiered.model.lru import Lru
from tiered.model.queue import LMQ_PREFIX
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode

logger = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""A broker's reply may take this much longer than the client's hold time."""
RECOMMIT_S: Final = 1.0
"""A signed pull whose commit was sent may be relayed with it within this time."""
_ONEWAY: Final = 2
READ_BYTES_MAX: Final = 16 * 1024 * 1024
READ_BYTES: Final = 300
"""Memory of what is kept for a group and queue, without its name."""
PHYS_END: Final = 36
"""The first bytes of a record, up to PHYSICALOFFSET."""
GroupQueueKey = tuple[str, str, int]
"""Group, topic, queue id."""


class UnsubscribedError(UnavailableError):
    """The group's filter is not known yet, so the archive cannot be read."""


@dataclass
class PullContext:
    """Shared by all pulls."""

    archive: Backend
    views: BrokerViews
    subscriptions: Subscriptions
    clock: Clock = MACHINE_CLOCK
    read: Lru[GroupQueueKey, QueueBegin] = field(
        default_factory=lambda: Lru(READ_BYTES_MAX, resists_floods=True)
    )
    """A record that each group got of a queue, the newest."""


class PullSources:
    """One pull, read from the archive or relayed; see read_router.Sources."""

    def __init__(
        self, context: PullContext, request: Request, upstream: Upstream, pull: PullRequest | None
    ) -> None:
        """``context``: what all pulls share; ``upstream``: the client's connection to the broker; ``pull``: the same
        request for the archive, None if its filter is not known, so that only the broker can answer it."""
        self._context, self._upstream, self._pull = context, upstream, pull
        self._command, self._connection_id = request.command, request.peer.id
        self._flags = request.number("sysFlag", 0)
        self._topic, self._queue_id = request.text("topic"), request.number("queueId")
        self._group = request.text("consumerGroup", "")
        self._offset = request.number("queueOffset")
        self._group_queue = self._group, self._topic, self._queue_id
        # How long the client offers to wait for messages, whether the pull commits an offset, and when this was sent.
        self._hold_ms = request.number("suspendTimeoutMillis", 0) if self._flags & SUSPEND else 0
        self._commits = bool(self._flags & COMMIT_OFFSET) and request.number("commitOffset", -1) >= 0
        self._committed_s: float | None = None
        self.may_relay = True
        self.waited_s = 0.0
        """How long the broker took."""
        self.is_joined = True
        """Whether the archive has or may get a part of this queue; else the broker's reply is returned unchanged."""

    async def local_view(self) -> LocalView:
        return await self._context.views.local_view(self._command, self._upstream, self._offset)

    async def residency(self) -> Residency:
        count, max_bytes = (self._pull.count, self._pull.max_bytes) if self._pull is not None else (1, 1)
        return await self._context.views.residency(
            self._topic, self._queue_id, self._offset, count, max_bytes
        )

    async def read(self, source: ReadSource, local: HeldOffsets | None) -> PullResult:
        return await (self._archived() if source is ReadSource.TIERED else self._relayed())

    async def commit(self) -> None:
        """Send the offset that the pull commits to the broker, in a request of its own, once. It has the pull's fields,
        so that a signature on them stays valid."""
        if not self._commits or self._committed_s is not None:
            return
        self._committed_s = self._context.clock.monotonic_s()
        command = replace(self._command, code=int(RequestCode.UPDATE_CONSUMER_OFFSET), flag=_ONEWAY, body=b"")
        with suppress(UnavailableError):  # the client commits again in a few seconds
            await self._upstream.send(command)

    async def _archived(self) -> PullResult:
        if self._pull is None:
            raise UnsubscribedError(
                f"topic {self._topic} cannot be read from the archive yet: no heartbeat has sent the SQL92 filter of"
                f" group {self._group}"
            )
        return await self._context.archive.pull(self._pull)

    async def relay(self) -> RemotingCommand:
        """The broker's reply to this pull, be it an error."""
        begun_s = self._context.clock.monotonic_s()
        reply = await self._upstream.call(self._to_relay(), self._hold_ms / 1000 + ANSWER_S)
        self.waited_s = self._context.clock.monotonic_s() - begun_s
        return reply

    async def has_ended(self, situation: Situation) -> bool:
        """Return whether the last message that the group got here belongs to an earlier generation of the topic: the
        topic was deleted and created again since, as the first messages of archive and broker show."""
        read, archived = self._context.read.peek(self._group_queue), situation.archived
        if read is None or self._offset <= 0:
            return False
        if archived is not None and QueueBegin(archived.min_offset, situation.first_phys).is_after(read):
            return True
        begin = await self._context.views.begin(self._command, self._upstream, self.waited_s)
        return begin is not None and begin.is_after(read)

    def note(self, body: Sequence[Buffer]) -> None:
        """Keep the place of the first record of ``body``, if it has one and the client names a group."""
        record = memoryview(body[0])[:PHYS_END] if body and self._group else b""
        if len(record) == PHYS_END:
            read = QueueBegin(self._offset, int.from_bytes(record[-8:]))
            self._context.read.put(self._group_queue, read, READ_BYTES + sys.getsizeof(self._group))

    async def _relayed(self) -> PullResult:
        """Relay the pull, and return what the broker's reply means. If the reply skips messages that the broker has
        deleted, its status is OFFSET_TOO_SMALL, so that the archive is read. Raises UnavailableError if the broker is
        busy or away."""
        command = await self.relay()
        if command.code == ResponseCode.SYSTEM_BUSY:
            raise UnavailableError(command.remark or "the broker is busy")
        reply = BrokerReply.of(command)
        if reply is None:
            return PullResult(PullStatus.REFUSED, self._offset, reply=command)
        self._context.views.note(self._topic, self._queue_id, reply.min_offset, reply.max_offset)
        has_all = self.is_joined and self._is_unfiltered()
        result = interpret(reply, self._offset, has_all=has_all)._replace(reply=command)
        may_skip = self.is_joined and not has_all and reply.remark != OFFSET_RESET
        if not (may_skip and result.next_offset > self._offset and result.status in _PASSED):
            return result
        # A broker deletes the oldest first: if it still has the offset, it read on from there without a hole.
        has_offset = await self._context.views.still_has(self._command, self._upstream, self._offset)
        return result if has_offset else result._replace(status=PullStatus.OFFSET_TOO_SMALL)

    def _to_relay(self) -> RemotingCommand:
        """Return the pull to relay to the broker, without its commit if that was sent already. Raises ThrottledError if
        the pull was held, so that the client pulls again: its commit could move the group back."""
        if not self.may_relay:
            raise ThrottledError("this pull was held, and is too old to be relayed to the broker: pull again")
        if self._committed_s is None:
            return self._command
        if SIGNATURE not in self._command.ext_fields:
            flags = str(self._flags & ~COMMIT_OFFSET)
            return replace(self._command, ext_fields={**self._command.ext_fields, "sysFlag": flags})
        if self._context.clock.monotonic_s() - self._committed_s > RECOMMIT_S:
            raise ThrottledError(
                "this signed pull was held, and the offset that it commits may be too old by now: pull again"
            )
        return self._command

    def _is_unfiltered(self) -> bool:
        """Return whether the broker is to send every message of the queue, so that a missing one is a lost one. An
        LMQ's messages have the offsets of other queues."""
        pull = self._pull
        if pull is None or self._topic.startswith(LMQ_PREFIX) or pull.expression not in ("", "*"):
            return False
        if self._flags & SUBSCRIPTION:
            return True
        known = self._context.subscriptions.subscription(pull.group, pull.topic, self._connection_id)
        return known is not None


_PASSED = frozenset({PullStatus.FOUND, PullStatus.NO_MATCHED_MESSAGE})


LOOK_AGAIN_S: Final = 1.0
"""How often a held pull is decided again, and how long a pull without a hold time is held."""


class ProxyPulls:
    """Pulls in proxy mode. Belongs to one event loop."""

    def __init__(self, router: ReadRouter, context: PullContext, limits: PullLimits | None = None) -> None:
        self._router, self._context = router, context
        self._limits = limits or PullLimits()

    def handlers(self) -> ProxyHandlers:
        """Handlers by request code."""
        return {RequestCode.PULL_MESSAGE: self.pull, RequestCode.LITE_PULL_MESSAGE: self.pull}

    async def pull(self, request: Request, upstream: Upstream) -> Response:
        """PULL_MESSAGE: messages from archive or broker. Without any the reply waits, but no longer than the client
        offered.

        Raises UnavailableError and other TieredErrors; the client then stays at its offset.
        """
        topic, queue_id = request.text("topic"), request.number("queueId")
        offset, flags = request.number("queueOffset"), request.number("sysFlag", 0)
        pull = pull_request_of(request, self._context.subscriptions, self._limits)
        sources = PullSources(self._context, request, upstream, pull)
        if offset < 0:  # the broker's reply moves the consumer to its first message
            plan = await self._planned(sources, topic, queue_id, offset)
            return _below_zero(await sources.relay(), plan)
        ends_s = self._context.clock.monotonic_s() + self._hold_s(request, flags)
        # The plan says what archive and broker have of the queue, and which of both is read.
        plan = await self._planned(sources, topic, queue_id, offset)
        if plan.source is not ReadSource.LOCAL:  # the pull itself does not reach the broker
            await sources.commit()
        is_pull_api = bool(flags & SUBSCRIPTION)
        try:
            outcome = await self._router.pull(sources, plan)
            while (
                response := self._response(outcome, is_pull_api=is_pull_api, is_joined=sources.is_joined)
            ) is None:
                left_s = ends_s - self._context.clock.monotonic_s()
                if left_s <= 0:
                    break
                await self._context.archive.changed(min(left_s, LOOK_AGAIN_S))
                before, plan = plan, await self._planned(sources, topic, queue_id, offset)
                if plan.situation.has_replaced(before.situation):  # the topic was deleted and created again
                    return self._recreated(plan, request)
                if plan.source is ReadSource.LOCAL:
                    break  # the client pulls again, with the commit that is current then
                sources.may_relay = False  # the offset that the held pull commits may be too old by now
                outcome = await self._router.pull(sources, plan)
        except UnsubscribedError:
            return unknown_subscription()
        except UsageError as error:
            return Response(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark=str(error))
        response = response if response is not None else self._retry(offset, outcome)
        # The last message that the group got may be of an earlier generation of the topic.
        if response.code in PULL_CODES and sources.is_joined and await sources.has_ended(plan.situation):
            plan = await self._planned(sources, topic, queue_id, offset)
            if retry_result(plan.situation).min_offset < offset:
                return self._recreated(plan, request)
        sources.note(response.body)
        return response

    async def _planned(self, sources: PullSources, topic: str, queue_id: int, offset: int) -> Plan:
        plan = await self._router.plan(sources, topic, queue_id, offset)
        sources.is_joined = plan.may_be_joined
        return plan

    def _hold_s(self, request: Request, flags: int) -> float:
        if not flags & SUSPEND:
            return LOOK_AGAIN_S
        return min(max(0, request.number("suspendTimeoutMillis", 0)) / 1000, self._limits.hold_s_max)

    def _response(self, outcome: ReadOutcome, *, is_pull_api: bool, is_joined: bool) -> Response | None:
        """Return the response to a pull whose reading had this outcome; None: the request is held until there are
        messages. ``is_joined``: the archive may have a part of the queue, else the broker's reply is returned as it
        is."""
        result, joined = outcome.result, outcome.joined
        if result is None:
            return None
        reply = result.reply
        if reply is not None and result.status is PullStatus.REFUSED:
            return relayed(reply)
        if reply is not None and not is_joined:
            return _staying(relayed(reply))
        code = reply_code(
            joined.status,
            is_pull_api=is_pull_api,
            broker_code=None if reply is None else reply.code,
            broker_status=result.status,
        )
        if code is None:
            return None
        response = _pull_response(code, joined.next_offset, joined)
        if reply is None:
            return response
        ext = {**reply.ext_fields, **response.ext}
        remark = reply.remark if reply.code == code else response.remark
        return Response(code, ext, response.body, remark, reply.version)

    def _recreated(self, plan: Plan, request: Request) -> Response:
        """Return the response that moves a consumer to the first message of a topic that was deleted and created again
        while it read the earlier generation."""
        joined = retry_result(plan.situation)
        logger.info(
            "a consumer continues at the beginning of a topic that was deleted and created again",
            extra={
                "group": request.text("consumerGroup", ""),
                "queue": f"{plan.topic} queue {plan.queue_id}",
                "offset": plan.situation.offset,
            },
        )
        low = joined.min_offset
        return pull_response(ResponseCode.PULL_OFFSET_MOVED, low, low, joined.max_offset, RECREATED)

    def _retry(self, offset: int, outcome: ReadOutcome) -> Response:
        is_at_end = outcome.result is not None
        code = ResponseCode.PULL_NOT_FOUND if is_at_end else ResponseCode.PULL_RETRY_IMMEDIATELY
        return _pull_response(code, offset, outcome.joined)


def _pull_response(code: int, next_offset: int, joined: PullResult) -> Response:
    body = joined.body if code == ResponseCode.SUCCESS else ()
    return pull_response(code, next_offset, joined.min_offset, joined.max_offset, joined.status.value, body)


def _below_zero(command: RemotingCommand, plan: Plan) -> Response:
    """Return the response to a pull at a negative offset: the broker's reply, which moves the consumer to the first
    message, with the archive's first one if that is earlier."""
    reply = BrokerReply.of(command)
    if reply is None:
        return relayed(command)
    response = _staying(relayed(command))
    if command.code != ResponseCode.PULL_OFFSET_MOVED or not plan.is_joined:
        return response
    moved = PullResult(PullStatus.OFFSET_TOO_SMALL, reply.next_offset, reply.min_offset, reply.max_offset)
    joined = join_offsets(moved, ReadSource.LOCAL, plan.situation)
    numbers = {
        "nextBeginOffset": joined.next_offset,
        "minOffset": joined.min_offset,
        "maxOffset": joined.max_offset,
    }
    return replace(response, ext={**response.ext, **{name: str(value) for name, value in numbers.items()}})


def _staying(response: Response) -> Response:
    """The broker's reply, with the suggestion to keep pulling from the proxy."""
    return replace(response, ext={**response.ext, "suggestWhichBrokerId": "0"})
