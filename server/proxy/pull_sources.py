"""How one pull beside a live broker is read: from the archive, or by relaying it; and its commit, sent once.

Owns the wire's fields of a relayed pull and of its answer. Does not own who is asked (read_router.py), nor what an
answer means (offset_merge.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from weakref import WeakKeyDictionary

from fetcher.policy.read_policy import LocalView, OffsetRange, Residency, Source
from fetcher.rows.batch import GetStatus
from server.backend.backend import Backend, Buffer, PullWish
from server.backend.pull_handlers import COMMIT_OFFSET, SUBSCRIPTION, SUSPEND, Subscriptions
from server.proxy.broker_requests import SIGNATURE
from server.proxy.broker_view import BrokerViews
from server.proxy.offset_merge import OFFSET_RESET, PULL_CODES, Said, judged
from server.proxy.proxy_handlers import Upstream
from server.wire.codes import RequestCode, ResponseCode
from server.wire.request import Request
from tiered.errors import ThrottledError, TieredError, UnavailableError
from tiered.model.queue import LMQ_PREFIX
from tiered.remoting.command import RemotingCommand

ANSWER_S: Final = 10.0
"""A broker may take so much longer for an answer than the client lets it wait."""
LEAVE_S: Final = 60.0
LEAVES_MAX: Final = 1_000
"""Of one connection: a client that reads more asks the broker more often."""
RECOMMIT_S: Final = 1.0
"""A signed pull whose commit was sent may be relayed, commit and all, within this time."""
_ONEWAY: Final = 2


class UnsubscribedError(UnavailableError):
    """The group's filter is not known yet: nothing may come from the archive."""


class RefusedError(TieredError):
    """The broker does not let this client pull: nor may the archive. ``command``: its words."""

    def __init__(self, command: RemotingCommand) -> None:
        super().__init__(command.remark or f"code {command.code}")
        self.command = command


@dataclass(frozen=True)
class Answered:
    """What a side says; see policy_line.Answer. ``command``: the broker's own words, ``is_error``: and no pull's."""

    status: GetStatus
    next_offset: int
    min_offset: int
    max_offset: int
    body: Sequence[Buffer] = ()
    command: RemotingCommand | None = None
    is_error: bool = False


@dataclass
class PullCounters:
    """``commits``: sent for pulls that the archive answered; ``commits_failed``: the client commits again itself.
    ``relayed_errors`` by code."""

    commits: int = 0
    commits_failed: int = 0
    told_to_ask_again: int = 0
    relayed_errors: Counter[int] = field(default_factory=Counter)


Leave = tuple[str, str, str]
"""Access key, group, topic. A connection that showed a good signature once is that client's."""


@dataclass
class PullContext:
    """What all pulls share."""

    archive: Backend
    views: BrokerViews
    subscriptions: Subscriptions
    checks_clients: bool = False
    """The broker checks who asks: the archive answers whom it lets pull, as it said within LEAVE_S."""
    now_s: Callable[[], float] = time.monotonic
    leaves: WeakKeyDictionary[Upstream, dict[Leave, float]] = field(default_factory=WeakKeyDictionary)
    counters: PullCounters = field(default_factory=PullCounters)


class PullSides:
    """One pull, read from the archive or relayed; see policy_line.Sides."""

    has_broker = True

    def __init__(
        self, context: PullContext, request: Request, upstream: Upstream, wish: PullWish | None
    ) -> None:
        self._context, self._upstream, self._wish = context, upstream, wish
        self._command = request.command
        self._flags = request.number("sysFlag", 0)
        self._topic, self._queue_id = request.text("topic"), request.number("queueId")
        self._offset = request.number("queueOffset")
        self._hold_ms = request.number("suspendTimeoutMillis", 0) if self._flags & SUSPEND else 0
        self._commits = bool(self._flags & COMMIT_OFFSET) and request.number("commitOffset", -1) >= 0
        self._committed_s: float | None = None
        self.may_relay = True
        self.is_joined = True
        """Whether the archive has a part in this queue's line, or may soon; else the broker's word stands as it is."""

    async def look(self) -> LocalView:
        """See BrokerLook."""
        return await self._context.views.look(self._command, self._upstream, self._offset)

    async def residency(self) -> Residency:
        """See BrokerLook."""
        count, max_bytes = (self._wish.count, self._wish.max_bytes) if self._wish is not None else (1, 1)
        return await self._context.views.residency(
            self._topic, self._queue_id, self._offset, count, max_bytes
        )

    async def read(self, source: Source, local: OffsetRange | None) -> Answered:
        """See Sides."""
        return await (self._archived() if source is Source.TIERED else self._relayed())

    async def commit(self) -> None:
        """Send the group's offset that came with the pull, once. Fields are the pull's: its signature holds."""
        if not self._commits or self._committed_s is not None:
            return
        self._committed_s = self._context.now_s()
        counters = self._context.counters
        command = replace(self._command, code=int(RequestCode.UPDATE_CONSUMER_OFFSET), flag=_ONEWAY, body=b"")
        try:
            await self._upstream.send(command)
            counters.commits += 1
        except UnavailableError:
            counters.commits_failed += 1  # the broker is away; its client commits by itself every few seconds

    async def _archived(self) -> Answered:
        if self._wish is None:
            raise UnsubscribedError(f"{self._topic}: the SQL92 subscription is not known yet")
        found = await self._context.archive.pull(self._wish)
        if found.body:
            await self.ask_leave()
        status, bounds = GetStatus[found.status.name], found.bounds
        return Answered(status, found.next_offset, bounds.minimum, bounds.maximum, found.body)

    async def asked_broker(self) -> RemotingCommand:
        """The broker's answer to this pull, whatever it is."""
        return await self._upstream.call(self._to_relay(), self._hold_ms / 1000 + ANSWER_S)

    async def _relayed(self) -> Answered:
        answer = await self.asked_broker()
        if answer.code == ResponseCode.SYSTEM_BUSY:
            raise UnavailableError(answer.remark or "the broker is busy")
        said = said_by(answer)
        if said is None:
            return Answered(GetStatus.NO_MATCHED_MESSAGE, self._offset, 0, 0, (), answer, is_error=True)
        if self._context.checks_clients:
            self._left()
        self._context.views.note(self._topic, self._queue_id, said.min_offset, said.max_offset)
        has_all = self.is_joined and self._is_unfiltered()
        meant = judged(said, self._offset, has_all=has_all)
        status, next_offset = meant.status, meant.next_offset
        is_to_prove = self.is_joined and not has_all and next_offset > self._offset and status in _PASSED
        if is_to_prove and said.remark != OFFSET_RESET and not await self._is_proven():
            status = GetStatus.OFFSET_TOO_SMALL
        body = (meant.body,) if len(meant.body) else ()
        return Answered(status, next_offset, said.min_offset, said.max_offset, body, answer)

    async def ask_leave(self) -> None:
        """Raises RefusedError where the broker does not let this client pull, UnavailableError where it is away."""
        if not self._context.checks_clients or self._has_leave():
            return
        answer = await self.asked_broker()
        if said_by(answer) is None:
            raise RefusedError(answer)
        self._left()

    def _has_leave(self) -> bool:
        given_s = self._context.leaves.get(self._upstream, {}).get(self._leave)
        return given_s is not None and self._context.now_s() - given_s < LEAVE_S

    def _left(self) -> None:
        leaves, now_s = self._context.leaves.setdefault(self._upstream, {}), self._context.now_s()
        leaves.pop(self._leave, None)
        leaves[self._leave] = now_s  # in the order they were given
        while len(leaves) > LEAVES_MAX or now_s - next(iter(leaves.values())) >= LEAVE_S:
            del leaves[next(iter(leaves))]

    @property
    def _leave(self) -> Leave:
        fields = self._command.ext_fields
        return fields.get("AccessKey", ""), fields.get("consumerGroup", ""), self._topic

    def _to_relay(self) -> RemotingCommand:
        if not self.may_relay:
            raise ThrottledError("this pull has waited: its client asks the broker again")
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
        wish = self._wish
        if wish is None or self._topic.startswith(LMQ_PREFIX) or wish.expression not in ("", "*"):
            return False
        known = self._flags & SUBSCRIPTION
        return bool(known) or self._context.subscriptions.subscription(wish.group, wish.topic) is not None

    async def _is_proven(self) -> bool:
        """A broker deletes from the oldest on: what it still has at the offset, it had behind it when it read on."""
        return await self._context.views.still_has(self._command, self._upstream, self._offset)


_PASSED = frozenset({GetStatus.FOUND, GetStatus.NO_MATCHED_MESSAGE})


def said_by(answer: RemotingCommand) -> Said | None:
    """None for what is no answer to a pull."""
    fields = answer.ext_fields
    texts = [fields.get(name, "") for name in ("nextBeginOffset", "minOffset", "maxOffset")]
    if answer.code not in PULL_CODES or not all(text.lstrip("-").isdecimal() for text in texts):
        return None
    next_offset, minimum, maximum = map(int, texts)
    delta = fields.get("offsetDelta", "0")
    return Said(
        answer.code,
        answer.remark or "",
        next_offset,
        minimum,
        maximum,
        memoryview(answer.body),
        int(delta) if delta.lstrip("-").isdecimal() else 0,
    )
