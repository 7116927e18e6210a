"""The two sources of a pull in proxy mode: the archive, and the broker by relay; and its commit, sent once.

Owns the wire fields of a relayed pull. Does not own the choice of source (read_router.py) nor the meaning of a reply
(offset_merge.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from fetcher.policy.read_policy import LocalView, OffsetRange, Residency, Source
from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from rocketmq_tiered.server.backend.backend import Backend
from rocketmq_tiered.server.backend.pull_handlers import COMMIT_OFFSET, SUBSCRIPTION, SUSPEND, Subscriptions
from rocketmq_tiered.server.proxy.accepted_accounts import AcceptedAccounts
from rocketmq_tiered.server.proxy.broker_requests import SIGNATURE
from rocketmq_tiered.server.proxy.broker_view import BrokerViews
from rocketmq_tiered.server.proxy.offset_merge import OFFSET_RESET, BrokerReply, interpret
from rocketmq_tiered.server.proxy.proxy_handlers import Upstream
from rocketmq_tiered.server.wire.codes import RequestCode, ResponseCode
from rocketmq_tiered.server.wire.request import Request
from tiered.errors import ThrottledError, TieredError, UnavailableError
from tiered.model.queue import LMQ_PREFIX
from tiered.remoting.command import RemotingCommand

ANSWER_S: Final = 10.0
"""A broker's reply may take this much longer than the client's hold time."""
RECOMMIT_S: Final = 1.0
"""A signed pull whose commit was sent may be relayed with it within this time."""
_ONEWAY: Final = 2


class UnsubscribedError(UnavailableError):
    """The group's filter is not known yet, so the archive cannot be read."""


class RefusedError(TieredError):
    """The broker denies this client the pull, so the archive does too. ``reply``: the broker's."""

    def __init__(self, reply: RemotingCommand) -> None:
        super().__init__(reply.remark or f"code {reply.code}")
        self.reply = reply


@dataclass
class PullContext:
    """Shared by all pulls."""

    archive: Backend
    views: BrokerViews
    subscriptions: Subscriptions
    accepted: AcceptedAccounts | None = None
    """The broker has access control: the archive serves accounts that it accepted lately. None: it has none."""
    now_s: Callable[[], float] = time.monotonic


class PullSources:
    """One pull, read from the archive or relayed; see read_router.Sources."""

    def __init__(
        self, context: PullContext, request: Request, upstream: Upstream, pull: PullRequest | None
    ) -> None:
        self._context, self._upstream, self._pull = context, upstream, pull
        self._command, self._connection_id = request.command, request.peer.id
        self._flags = request.number("sysFlag", 0)
        self._topic, self._queue_id = request.text("topic"), request.number("queueId")
        self._group = request.text("consumerGroup", "")
        self._offset = request.number("queueOffset")
        self._hold_ms = request.number("suspendTimeoutMillis", 0) if self._flags & SUSPEND else 0
        self._commits = bool(self._flags & COMMIT_OFFSET) and request.number("commitOffset", -1) >= 0
        self._committed_s: float | None = None
        self.may_relay = True
        self.is_joined = True
        """Whether the archive has or may get a part of this queue; else the broker's reply is returned unchanged."""

    async def local_view(self) -> LocalView:
        """See BrokerSource."""
        return await self._context.views.local_view(self._command, self._upstream, self._offset)

    async def residency(self) -> Residency:
        """See BrokerSource."""
        count, max_bytes = (self._pull.count, self._pull.max_bytes) if self._pull is not None else (1, 1)
        return await self._context.views.residency(
            self._topic, self._queue_id, self._offset, count, max_bytes
        )

    async def read(self, source: Source, local: OffsetRange | None) -> PullResult:
        """See Sources."""
        return await (self._archived() if source is Source.TIERED else self._relayed())

    async def commit(self) -> None:
        """Send the offset committed with the pull, once. The fields are the pull's, so its signature stays valid."""
        if not self._commits or self._committed_s is not None:
            return
        self._committed_s = self._context.now_s()
        command = replace(self._command, code=int(RequestCode.UPDATE_CONSUMER_OFFSET), flag=_ONEWAY, body=b"")
        with suppress(UnavailableError):  # the client commits again in a few seconds
            await self._upstream.send(command)

    async def _archived(self) -> PullResult:
        if self._pull is None:
            raise UnsubscribedError(f"{self._topic}: the SQL92 subscription is not known yet")
        result = await self._context.archive.pull(self._pull)
        if result.records:
            await self.check_permission()
        return result

    async def relay(self) -> RemotingCommand:
        """The broker's reply to this pull, be it an error."""
        return await self._upstream.call(self._to_relay(), self._hold_ms / 1000 + ANSWER_S)

    async def _relayed(self) -> PullResult:
        command = await self.relay()
        if command.code == ResponseCode.SYSTEM_BUSY:
            raise UnavailableError(command.remark or "the broker is busy")
        reply = BrokerReply.of(command)
        if reply is None:
            return PullResult(PullStatus.REFUSED, self._offset, reply=command)
        self._accept()
        self._context.views.note(self._topic, self._queue_id, reply.min_offset, reply.max_offset)
        has_all = self.is_joined and self._is_unfiltered()
        result = interpret(reply, self._offset, has_all=has_all)._replace(reply=command)
        may_skip = self.is_joined and not has_all and reply.remark != OFFSET_RESET
        if not (may_skip and result.next_offset > self._offset and result.status in _PASSED):
            return result
        # A broker deletes the oldest first: if it still has the offset, it read on from there without a hole.
        has_offset = await self._context.views.still_has(self._command, self._upstream, self._offset)
        return result if has_offset else result._replace(status=PullStatus.OFFSET_TOO_SMALL)

    async def check_permission(self) -> None:
        """Raises RefusedError if the broker denies this client the pull, UnavailableError if it is unreachable."""
        accepted = self._context.accepted
        if accepted is None or accepted.accepts(
            self._command.ext_fields, self._upstream, self._group, self._topic
        ):
            return
        command = await self.relay()
        if BrokerReply.of(command) is None:
            raise RefusedError(command)
        self._accept()

    def _accept(self) -> None:
        if self._context.accepted is not None:
            fields = self._command.ext_fields
            self._context.accepted.accept(fields, self._upstream, self._group, self._topic)

    def _to_relay(self) -> RemotingCommand:
        if not self.may_relay:
            raise ThrottledError("the pull has waited too long to be relayed: the client sends it again")
        if self._context.accepted is not None:
            # LITE_PULL_MESSAGE is the same request, but not every version's access control judges it.
            return replace(self._with_commit(), code=int(RequestCode.PULL_MESSAGE))
        return self._with_commit()

    def _with_commit(self) -> RemotingCommand:
        """The pull, so that its offset is not committed a second time."""
        if self._committed_s is None:
            return self._command
        if SIGNATURE not in self._command.ext_fields:
            flags = str(self._flags & ~COMMIT_OFFSET)
            return replace(self._command, ext_fields={**self._command.ext_fields, "sysFlag": flags})
        if self._context.now_s() - self._committed_s > RECOMMIT_S:
            raise ThrottledError("relaying this signed pull would commit an old offset again")
        return self._command

    def _is_unfiltered(self) -> bool:
        """Whether the broker sends every message, with the queue's own offsets."""
        pull = self._pull
        if pull is None or self._topic.startswith(LMQ_PREFIX) or pull.expression not in ("", "*"):
            return False
        if self._flags & SUBSCRIPTION:
            return True
        known = self._context.subscriptions.subscription(pull.group, pull.topic, self._connection_id)
        return known is not None


_PASSED = frozenset({PullStatus.FOUND, PullStatus.NO_MATCHED_MESSAGE})
