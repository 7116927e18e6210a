"""Pulls (11, 361) in proxy mode: from the archive, relayed, or held, as the read policy decides per pull.

A relayed pull is the client's own, long polling included. Its reply is checked first: messages that the broker lost
come from the archive; offsets that neither side has yet are held and get 20 at the same offset. A consumer of a
generation that ended gets 21 and the next generation's minimum, where a broker may name its maximum. Clients keep
pulling from the proxy. While the broker is unreachable, the archive is still served.

A commit in a pull (sysFlag 1) always reaches the broker: with the relayed pull, or as a commit of its own, sent before
the archive is read. It is never sent again later, as that could move the group back: a held pull is not relayed, and
its client sends it again.

Owns the order of these steps and the responses. Does not own the sources (pull_sources.py) nor the decision
(read_router.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fetcher.policy.read_policy import Source, join_offsets
from fetcher.policy.read_router import Outcome, Plan, ReadRouter, retry_result
from fetcher.rows.pull import PullResult, PullStatus
from rocketmq_tiered.server.backend.pull_handlers import (
    SUBSCRIPTION,
    SUSPEND,
    PullLimits,
    pull_request_of,
    pull_response,
    unknown_subscription,
)
from rocketmq_tiered.server.proxy.offset_merge import BrokerReply, reply_code
from rocketmq_tiered.server.proxy.proxy_handlers import ProxyHandlers, Upstream, relayed
from rocketmq_tiered.server.proxy.pull_sources import (
    PullContext,
    PullSources,
    RefusedError,
    UnsubscribedError,
)
from rocketmq_tiered.server.wire.codes import RequestCode, ResponseCode
from rocketmq_tiered.server.wire.request import Request, Response
from tiered.errors import UsageError
from tiered.remoting.command import RemotingCommand

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
        """The response to one pull, after at most as long as the client offered to wait.

        Raises UnavailableError and other TieredErrors, which move nothing.
        """
        topic, queue_id = request.text("topic"), request.number("queueId")
        offset, flags = request.number("queueOffset"), request.number("sysFlag", 0)
        pull = pull_request_of(request, self._context.subscriptions, self._limits)
        sources = PullSources(self._context, request, upstream, pull)
        if offset < 0:
            plan = await self._planned(sources, topic, queue_id, offset)
            return _below_zero(await sources.relay(), plan)
        ends_s = self._context.now_s() + self._hold_s(request, flags)
        plan = await self._planned(sources, topic, queue_id, offset)
        if plan.source is not Source.LOCAL:
            await sources.commit()
        is_pull_api = bool(flags & SUBSCRIPTION)
        try:
            archived = plan.situation.archived
            if plan.source is Source.TIERED and archived is not None and offset in archived:
                await sources.check_permission()
            outcome = await self._router.pull(sources, plan)
            while (
                response := self._response(outcome, is_pull_api=is_pull_api, is_joined=sources.is_joined)
            ) is None:
                left_s = ends_s - self._context.now_s()
                if left_s <= 0:
                    break
                await self._context.archive.changed(min(left_s, LOOK_AGAIN_S))
                before, plan = plan, await self._planned(sources, topic, queue_id, offset)
                if plan.situation.has_replaced(before.situation):
                    return _recreated(plan)
                if plan.source is Source.LOCAL:
                    break  # the client pulls again, with the commit that is current then
                sources.may_relay = False
                outcome = await self._router.pull(sources, plan)
        except RefusedError as error:
            return relayed(error.reply)
        except UnsubscribedError:
            return unknown_subscription()
        except UsageError as error:
            return Response(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark=str(error))
        return response if response is not None else self._retry(offset, outcome)

    async def _planned(self, sources: PullSources, topic: str, queue_id: int, offset: int) -> Plan:
        plan = await self._router.plan(sources, topic, queue_id, offset)
        sources.is_joined = plan.may_be_joined
        return plan

    def _hold_s(self, request: Request, flags: int) -> float:
        if not flags & SUSPEND:
            return LOOK_AGAIN_S
        return min(max(0, request.number("suspendTimeoutMillis", 0)) / 1000, self._limits.hold_s_max)

    def _response(self, outcome: Outcome, *, is_pull_api: bool, is_joined: bool) -> Response | None:
        """None: hold the request."""
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

    def _retry(self, offset: int, outcome: Outcome) -> Response:
        is_at_end = outcome.result is not None
        code = ResponseCode.PULL_NOT_FOUND if is_at_end else ResponseCode.PULL_RETRY_IMMEDIATELY
        return _pull_response(code, offset, outcome.joined)


def _pull_response(code: int, next_offset: int, joined: PullResult) -> Response:
    body = joined.body if code == ResponseCode.SUCCESS else ()
    return pull_response(code, next_offset, joined.min_offset, joined.max_offset, joined.status.value, body)


def _recreated(plan: Plan) -> Response:
    """Moves a consumer of the generation that ended to the next one's minimum."""
    joined = retry_result(plan.situation)
    return _pull_response(ResponseCode.PULL_OFFSET_MOVED, joined.min_offset, joined)


def _below_zero(command: RemotingCommand, plan: Plan) -> Response:
    """The broker's reply to a negative offset, moved to the minimum of both sides."""
    reply = BrokerReply.of(command)
    if reply is None:
        return relayed(command)
    response = _staying(relayed(command))
    if command.code != ResponseCode.PULL_OFFSET_MOVED or not plan.is_joined:
        return response
    moved = PullResult(PullStatus.OFFSET_TOO_SMALL, reply.next_offset, reply.min_offset, reply.max_offset)
    joined = join_offsets(moved, Source.LOCAL, plan.situation)
    numbers = {
        "nextBeginOffset": joined.next_offset,
        "minOffset": joined.min_offset,
        "maxOffset": joined.max_offset,
    }
    return replace(response, ext={**response.ext, **{name: str(value) for name, value in numbers.items()}})


def _staying(response: Response) -> Response:
    """The broker's reply, with the suggestion to keep pulling from the proxy."""
    return replace(response, ext={**response.ext, "suggestWhichBrokerId": "0"})
