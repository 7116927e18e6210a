"""Pulls (11, 361) beside a live broker: from the archive, relayed, or held, as the read policy decides per pull.

A relayed pull is the client's own, long polling included. Its answer is judged before it is believed: what the broker
lost and the archive has comes from the archive, what nobody has yet is held and answered with 20 at the same offset.
The client is told to stay here. While the broker is away the archive goes on serving what it has.

A commit in a pull (sysFlag 1) always reaches the broker: with the relayed pull, or as a commit of its own, sent before
the archive is read. It is never sent a second time later, which could move the group back: a pull that was held is not
relayed any more, its client asks again.

Owns the order of these steps and what clients are told. How a side is read is pull_sources.py's, the decision
read_router.py's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fetcher.policy.read_policy import Line, Source, joined_line
from fetcher.policy.read_router import Outcome, Plan, PolicyLine
from fetcher.rows.batch import GetStatus
from server.backend.backend import Bounds
from server.backend.pull_handlers import (
    SUBSCRIPTION,
    SUSPEND,
    PullLimits,
    pull_response,
    unsubscribed,
    wish_of,
)
from server.proxy.offset_merge import reply_code
from server.proxy.proxy_handlers import ProxyHandlers, Upstream, relayed
from server.proxy.pull_sources import (
    Answered,
    PullContext,
    PullSides,
    RefusedError,
    UnsubscribedError,
    said_by,
)
from server.wire.codes import RequestCode, ResponseCode
from server.wire.request import Request, Response
from tiered.errors import UsageError
from tiered.remoting.command import RemotingCommand

LOOK_AGAIN_S: Final = 1.0
"""How often a held pull is decided anew, and how long one is held that did not offer to wait."""


class ProxyPulls:
    """Answers pulls. Belongs to one event loop."""

    def __init__(self, line: PolicyLine, context: PullContext, limits: PullLimits | None = None) -> None:
        self._line, self._context = line, context
        self._limits = limits or PullLimits()

    def handlers(self) -> ProxyHandlers:
        """By request code."""
        return {RequestCode.PULL_MESSAGE: self.pull, RequestCode.LITE_PULL_MESSAGE: self.pull}

    async def pull(self, request: Request, upstream: Upstream) -> Response:
        """Answer one pull; may take as long as the client said it would wait.

        Raises UnavailableError and other TieredErrors that move nothing.
        """
        topic, queue_id = request.text("topic"), request.number("queueId")
        offset, flags = request.number("queueOffset"), request.number("sysFlag", 0)
        wish = wish_of(request, self._context.subscriptions, self._limits)
        sides = PullSides(self._context, request, upstream, wish)
        if offset < 0:
            plan = await self._planned(sides, topic, queue_id, offset)
            return _below_zero(await sides.asked_broker(), plan)
        ends_s = self._context.now_s() + self._hold_s(request, flags)
        plan = await self._planned(sides, topic, queue_id, offset)
        if plan.source is not Source.LOCAL:
            await sides.commit()
        is_pull_api = bool(flags & SUBSCRIPTION)
        try:
            archived = plan.situation.archived
            if plan.source is Source.TIERED and archived is not None and offset in archived:
                await sides.ask_leave()
            outcome = await self._line.follow(sides, plan)
            while (
                response := self._response(outcome, is_pull_api=is_pull_api, is_joined=sides.is_joined)
            ) is None:
                left_s = ends_s - self._context.now_s()
                if left_s <= 0:
                    break
                await self._context.archive.changed(min(left_s, LOOK_AGAIN_S))
                plan = await self._planned(sides, topic, queue_id, offset)
                if plan.source is Source.LOCAL:
                    break  # asked again, the client commits what is true then
                sides.may_relay = False
                outcome = await self._line.follow(sides, plan)
        except RefusedError as error:
            self._context.counters.relayed_errors[error.command.code] += 1
            return relayed(error.command)
        except UnsubscribedError:
            return unsubscribed()
        except UsageError as error:
            return Response(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark=str(error))
        return response if response is not None else self._ask_again(offset, outcome)

    async def _planned(self, sides: PullSides, topic: str, queue_id: int, offset: int) -> Plan:
        plan = await self._line.plan(sides, topic, queue_id, offset)
        sides.is_joined = plan.may_be_joined
        return plan

    def _hold_s(self, request: Request, flags: int) -> float:
        if not flags & SUSPEND:
            return LOOK_AGAIN_S
        return min(max(0, request.number("suspendTimeoutMillis", 0)) / 1000, self._limits.hold_s_max)

    def _response(self, outcome: Outcome[Answered], *, is_pull_api: bool, is_joined: bool) -> Response | None:
        """None: nothing to tell now."""
        answer, line = outcome.answer, outcome.line
        if answer is None:
            return None
        if answer.is_error and answer.command is not None:
            self._context.counters.relayed_errors[answer.command.code] += 1
            return relayed(answer.command)
        if answer.command is not None and not is_joined:
            return _staying(relayed(answer.command))
        said = answer.command.code if answer.command is not None else None
        code = reply_code(line.status, is_pull_api=is_pull_api, said=said, meant=answer.status)
        if code is None:
            return None
        body = answer.body if code == ResponseCode.SUCCESS else ()
        bounds = Bounds(line.min_offset, line.max_offset)
        response = pull_response(code, line.next_offset, bounds, line.status.value, body)
        if answer.command is None:
            return response
        ext = {**answer.command.ext_fields, **response.ext}
        remark = answer.command.remark if said == code else response.remark
        return Response(code, ext, response.body, remark, answer.command.version)

    def _ask_again(self, offset: int, outcome: Outcome[Answered]) -> Response:
        self._context.counters.told_to_ask_again += 1
        is_at_end = outcome.answer is not None
        code = ResponseCode.PULL_NOT_FOUND if is_at_end else ResponseCode.PULL_RETRY_IMMEDIATELY
        bounds = Bounds(outcome.line.min_offset, outcome.line.max_offset)
        return pull_response(code, offset, bounds, outcome.line.status.value)


def _below_zero(answer: RemotingCommand, plan: Plan) -> Response:
    """What the broker says, which moves whoever asks so: to where the whole line begins."""
    said = said_by(answer)
    if said is None:
        return relayed(answer)
    response = _staying(relayed(answer))
    if answer.code != ResponseCode.PULL_OFFSET_MOVED or not plan.is_joined:
        return response
    told = Line(GetStatus.OFFSET_TOO_SMALL, said.next_offset, said.min_offset, said.max_offset)
    line = joined_line(told, Source.LOCAL, plan.situation)
    numbers = {
        "nextBeginOffset": line.next_offset,
        "minOffset": line.min_offset,
        "maxOffset": line.max_offset,
    }
    return replace(response, ext={**response.ext, **{name: str(value) for name, value in numbers.items()}})


def _staying(response: Response) -> Response:
    """The broker's own answer, but the client stays here."""
    return replace(response, ext={**response.ext, "suggestWhichBrokerId": "0"})
