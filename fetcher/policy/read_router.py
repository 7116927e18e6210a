"""From a pull to its answer, whoever reads: look at both sides, decide, ask the kernel, read, fall back, join.

The one place that puts archive and broker together (read_policy.py decides, purely). Two use it: PolicyReader, whose
broker side are the broker's own files, and the proxy, whose broker side is the broker itself.

Owns the order of these steps and their counters. Knows neither what the catalog has (archived_queues.py), how a side is
read nor what drives the coroutines.
Source: org.apache.rocketmq.tieredstore.TieredMessageStore.getMessageAsync.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from fetcher.policy.archived_queues import ArchivedQueue, ArchivedQueues, KnownCatalog
from fetcher.policy.read_policy import (
    BrokerSide,
    Follow,
    Line,
    LocalView,
    OffsetRange,
    ReadPolicies,
    ReadPolicy,
    Residency,
    Situation,
    Source,
    after_local,
    after_tiered,
    decide,
    joined_line,
)  # fmt: skip
from fetcher.rows.batch import GetStatus
from tiered.errors import TieredError
from tiered.model.queue import TopicFilter
from tiered.settings.sections import ReadSettings

logger = logging.getLogger(__name__)


class Answer(Protocol):
    """What a side says of a pull; GetResult is one."""

    @property
    def status(self) -> GetStatus: ...
    @property
    def next_offset(self) -> int: ...
    @property
    def min_offset(self) -> int: ...
    @property
    def max_offset(self) -> int: ...


A = TypeVar("A", bound=Answer)
A_co = TypeVar("A_co", bound=Answer, covariant=True)


class BrokerLook(Protocol):
    """How the broker's side of one queue is looked at, for one offset."""

    @property
    def has_broker(self) -> bool:
        """False where the archive is all there is; then the others are not called."""
        ...

    async def look(self) -> LocalView:
        """What the broker has. Never raises for one that cannot be asked: that is a side."""
        ...

    async def residency(self) -> Residency:
        """Whether the broker has the answer in memory."""
        ...


class Sides(BrokerLook, Protocol[A_co]):
    """How one pull is read."""

    async def read(self, source: Source, local: OffsetRange | None) -> A_co:
        """The answer of LOCAL or TIERED; ``local``: the broker's range as just looked up. Raises TieredError."""
        ...


@dataclass
class ReadCounters:
    """How pulls were answered. ``fallbacks`` by reason (rocketmq_tiered_store_get_message_fallback_total)."""

    local: int = 0
    tiered: int = 0
    held: int = 0
    residency_unknown: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a pull goes first, and all that was known when that was decided."""

    topic: str
    queue_id: int
    policy: ReadPolicy
    situation: Situation
    source: Source

    @property
    def is_joined(self) -> bool:
        """Whether the archive belongs to the queue's line at all."""
        return self._may_use_archive and self.situation.archived is not None

    @property
    def may_be_joined(self) -> bool:
        """Whether it does, or may soon: what the broker has lost may be on its way there."""
        return self.is_joined or (self._may_use_archive and self.situation.is_admitted)

    @property
    def _may_use_archive(self) -> bool:
        return not self.situation.is_system and self.policy is not ReadPolicy.DISABLE


class Outcome(NamedTuple, Generic[A]):
    """How a pull ended. ``answer`` None: nobody has it yet, the same offset is to be asked again.

    ``line``: status and offsets to tell, on the one line both sides make.
    """

    source: Source
    answer: A | None
    line: Line


class PolicyLine:
    """Decides pulls of one broker and its archive."""

    def __init__(
        self, catalog: KnownCatalog, settings: ReadSettings | None = None, topics: TopicFilter | None = None
    ) -> None:
        """``topics``: what the uploader archives."""
        self._queues = ArchivedQueues(catalog)
        self._topics = topics or TopicFilter()
        self._policies = ReadPolicies.of(settings or ReadSettings())
        self._told_of_residency = False
        self.counters = ReadCounters()

    def apply(self, settings: ReadSettings, topics: TopicFilter | None = None) -> None:
        """Put other policies in force from the next pull on, and other ``topics`` unless None. Callable from any
        thread."""
        self._policies = ReadPolicies.of(settings)
        self._topics = topics or self._topics

    def policy_of(self, topic: str) -> ReadPolicy:
        """The policy in force."""
        return self._policies.of_topic(topic)

    async def plan(self, sides: BrokerLook, topic: str, queue_id: int, offset: int) -> Plan:
        """Where a pull goes first."""
        policy = self._policies.of_topic(topic)
        situation = await self.situation(sides, topic, queue_id, offset)
        decision = decide(policy, situation)
        if decision.source is Source.ASK_MEMORY:
            situation = replace(situation, residency=self._told(await sides.residency()))
            decision = decide(policy, situation)
        logger.debug(
            "%s queue %d offset %d: %s, %s", topic, queue_id, offset, decision.source.value, decision.why
        )
        return Plan(topic, queue_id, policy, situation, decision.source)

    async def situation(self, sides: BrokerLook, topic: str, queue_id: int, offset: int) -> Situation:
        """What is known of a queue, for one offset; the archive's side by one catalog version."""
        is_system, policy = self._topics.is_system(topic), self._policies.of_topic(topic)
        archived = ArchivedQueue(None, 0, 0)
        if not sides.has_broker or not (is_system or policy is ReadPolicy.DISABLE):
            archived = self._queues.find(topic, queue_id)
        if not sides.has_broker:
            return Situation(offset, is_system, archived.queue, BrokerSide.ABSENT)
        # After the catalog: what the broker deletes in between is then missed here, and held, rather than skipped.
        view = await sides.look()
        queue = None if _is_other_life(archived, view, offset) else archived.queue
        is_admitted = self._topics.admits(topic)
        is_behind = is_admitted and archived.dispatched_phys < view.oldest_phys
        return Situation(
            offset, is_system, queue, view.side, view.queue, view.is_record, is_behind, is_leaving=view.is_leaving,
            is_admitted=is_admitted, is_broker_older=view.oldest_phys < archived.first_phys,
        )  # fmt: skip

    async def follow(self, sides: Sides[A], plan: Plan) -> Outcome[A]:
        """The answer. Raises what reading the archive raises when the broker cannot answer instead."""
        source, situation = plan.source, plan.situation
        tried: set[Source] = set()
        while source in (Source.LOCAL, Source.TIERED) and source not in tried:
            tried.add(source)
            answer: A | None = None
            error: TieredError | None = None
            try:
                answer = await sides.read(source, situation.local)
            except TieredError as raised:
                error = raised
            status = answer.status if answer is not None else None
            if source is Source.TIERED:
                follow = after_tiered(status, situation)
            else:
                follow = after_local(plan.policy, status, situation)
            if follow is Follow.KEEP:
                if answer is None:
                    assert error is not None
                    raise error
                return self._kept(answer, source, situation)
            self._fell_back(plan, source, follow, status, error)
            source = _SOURCES[follow]
        self.counters.held += 1
        return Outcome(Source.HOLD, None, held_line(situation))

    def _told(self, residency: Residency) -> Residency:
        if residency is Residency.UNKNOWN:
            self.counters.residency_unknown += 1
            if not self._told_of_residency:
                self._told_of_residency = True
                logger.warning(
                    "read.policy NOT_IN_MEM is NOT_IN_DISK: the kernel does not tell this process what of the broker's "
                    "files is in memory; run as the user who owns them, or give write permission"
                )
        return residency

    # -- answering --------------------------------------------------------------------------------------------

    def _kept(self, answer: A, source: Source, situation: Situation) -> Outcome[A]:
        if source is Source.LOCAL:
            self.counters.local += 1
        else:
            self.counters.tiered += 1
        said = Line(answer.status, answer.next_offset, answer.min_offset, answer.max_offset)
        return Outcome(source, answer, joined_line(said, source, situation))

    def _fell_back(
        self, plan: Plan, source: Source, follow: Follow, status: GetStatus | None, error: TieredError | None
    ) -> None:
        reason = status.value if status is not None else type(error).__name__
        self.counters.fallbacks[f"{source.value} {reason}"] += 1
        if error is not None:
            logger.warning(
                "%s queue %d offset %d: %s answers instead of %s", plan.topic, plan.queue_id, plan.situation.offset,
                follow.value, source.value, exc_info=error,
            )  # fmt: skip


_SOURCES = {Follow.LOCAL: Source.LOCAL, Follow.TIERED: Source.TIERED, Follow.HOLD: Source.HOLD}


def held_line(situation: Situation) -> Line:
    """What a reader is told while nobody has its offset: the same offset, and the ends of both sides together."""
    sides = [queue for queue in (situation.archived, situation.local) if queue is not None]
    return Line(
        GetStatus.OFFSET_FOUND_NULL,
        situation.offset,
        min((queue.min_offset for queue in sides), default=0),
        max((queue.max_offset for queue in sides), default=0),
    )


def _is_other_life(archived: ArchivedQueue, view: LocalView, offset: int) -> bool:
    """Whether the broker's queue is a recreated one of which nothing is archived yet: its records lie behind all of
    the archived ones though its offsets do not."""
    if archived.queue is None or view.queue is None:
        return False
    if view.phys >= archived.end_phys and offset < archived.queue.max_offset:
        return True
    is_shorter = view.queue.max_offset <= archived.queue.max_offset
    return is_shorter and max(view.phys, view.last_phys) >= archived.end_phys
