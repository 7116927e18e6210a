"""Routes pulls to archive or broker: view both sides, decide, read, fall back, and join the offsets.

The decisions are read_policy.py's. Used in proxy and slave mode, where the broker itself is one side. Owns the order of
these steps, their counters, and the archive's side of each queue, which is cached while the catalog's version is
current. Source: org.apache.rocketmq.tieredstore.TieredMessageStore.getMessageAsync.
"""

import logging
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from fetcher.policy.read_policy import (
    HeldOffsets,
    LocalView,
    NextStep,
    ReadPolicies,
    ReadPolicy,
    ReadSource,
    Residency,
    Situation,
    after_local,
    after_tiered,
    decide_read,
    join_offsets,
)
from fetcher.rows.pull import PullResult, PullStatus
from tiered.catalog.state import CatalogState
from tiered.errors import TieredError
from tiered.model.queue import QueueKey, TopicFilter
from tiered.model.tables import QUEUE_HIDDEN, QUEUE_SUPERSEDED


class KnownCatalog(Protocol):
    """The part of catalog_view.CatalogView used here. An older version only delays more pulls."""

    @property
    def state(self) -> CatalogState:
        """The newest version read."""

    def refresh_if_due(self) -> None:
        """Start a refresh if the interval has passed; never waits."""


class ArchivedQueue(NamedTuple):
    """One queue of the catalog; ``queue`` is None for a missing one."""

    queue: HeldOffsets | None
    end_phys: int
    """Physical end of its last archived record."""
    dispatched_phys: int
    """Below this everything of the commitlog is archived."""
    first_phys: int = 0
    """Physical offset of the first record that was ever archived of it."""
    generation: int = 0
    earlier_end: int = 0
    """The largest end of its earlier generations."""


def archived_queue(state: CatalogState, topic: str, queue_id: int) -> ArchivedQueue:
    """What the archive has of a queue: the bounds of its newest generation. It has nothing that continues in the
    broker's queue (``queue`` is None) if the topic was deleted, or recreated and not archived since."""
    generation = state.current_generation(topic, queue_id)
    row = state.queue(QueueKey(topic, queue_id, generation)) if generation is not None else None
    if row is None or int(row["flags"]) & (QUEUE_SUPERSEDED | QUEUE_HIDDEN):
        return ArchivedQueue(None, 0, state.cursor.phys)
    offsets = HeldOffsets(int(row["min_queue_offset"]), int(row["end_queue_offset"]))
    key = QueueKey(topic, queue_id, generation or 0)
    return ArchivedQueue(
        offsets,
        int(row["end_phys"]),
        state.cursor.phys,
        int(row["first_phys"]),
        key.generation,
        earlier_end(state, key),
    )


def earlier_end(state: CatalogState, queue: QueueKey) -> int:
    """The largest end of the earlier generations of ``queue``, 0 without any. A consumer beyond the queue's end, but
    not beyond this one, read an earlier generation."""
    earlier = (state.queue(queue._replace(generation=number)) for number in range(queue.generation))
    return max((int(row["end_queue_offset"]) for row in earlier if row is not None), default=0)


class ArchivedQueues:
    """The queues of ``catalog``."""

    def __init__(self, catalog: KnownCatalog) -> None:
        self._catalog = catalog
        self._found: tuple[CatalogState | None, dict[tuple[str, int], ArchivedQueue]] = None, {}

    def find(self, topic: str, queue_id: int) -> ArchivedQueue:
        """What the archive has of a queue, by the catalog version read last."""
        # A refresh is started, not awaited: the broker's messages are served while the object store is away.
        self._catalog.refresh_if_due()
        state = self._catalog.state
        known, queues = self._found
        if known is not state:
            queues = {}
            self._found = state, queues
        found = queues.get((topic, queue_id))
        if found is None:
            found = archived_queue(state, topic, queue_id)
            if found.queue is not None:  # clients choose the names: unknown ones would fill the memory
                queues[topic, queue_id] = found
        return found


logger = logging.getLogger(__name__)


class BrokerSource(Protocol):
    """The broker's state of one queue, for one offset."""

    async def local_view(self) -> LocalView:
        """The broker's queue. Never raises for an unreachable broker: LocalView.side reports that."""
        ...

    async def residency(self) -> Residency:
        """Whether the broker has the records in memory."""
        ...


class PullSources(BrokerSource, Protocol):
    """Both sources of one pull."""

    async def read(self, source: ReadSource, local: HeldOffsets | None) -> PullResult:
        """The result of LOCAL or TIERED; ``local``: the broker's range in the last view. Raises TieredError."""
        ...


@dataclass
class ReadCounters:
    """Pulls by source. ``fallbacks`` by reason (rocketmq_tiered_store_get_message_fallback_total)."""

    local: int = 0
    tiered: int = 0
    retried: int = 0
    residency_unknown: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Plan:
    """The first source of a pull, and the situation that decided it."""

    topic: str
    queue_id: int
    policy: ReadPolicy
    situation: Situation
    source: ReadSource

    @property
    def is_joined(self) -> bool:
        """Whether the archive has a part of the queue."""
        return self._may_use_archive and self.situation.archived is not None

    @property
    def may_be_joined(self) -> bool:
        """Whether it has or may get a part: messages the broker deleted may not be archived yet."""
        return self.is_joined or (self._may_use_archive and self.situation.is_admitted)

    @property
    def _may_use_archive(self) -> bool:
        return not self.situation.is_system and self.policy is not ReadPolicy.DISABLE


class ReadOutcome(NamedTuple):
    """How a pull ended. ``result`` None: neither side has the offset yet, the client retries it.

    ``joined``: status and offsets for the client, over both sources.
    """

    source: ReadSource
    result: PullResult | None
    joined: PullResult


class ReadRouter:
    """Routes pulls of one broker and its archive."""

    def __init__(
        self,
        catalog: KnownCatalog,
        policies: ReadPolicies | None = None,
        topics: TopicFilter | None = None,
        compacted: Container[str] = (),
    ) -> None:
        """``topics``: which topics are archived. ``compacted``: topics that the broker compacts by key, which are read
        from the broker alone."""
        self._queues = ArchivedQueues(catalog)
        self._topics = topics or TopicFilter()
        self._policies = policies or ReadPolicies()
        self._compacted = compacted
        self._warned_of_residency = False
        self.counters = ReadCounters()

    def apply(self, policies: ReadPolicies, topics: TopicFilter | None = None) -> None:
        """Use other policies from the next pull on, and other ``topics`` unless None. Thread-safe."""
        self._policies = policies
        self._topics = topics or self._topics

    def policy_of(self, topic: str) -> ReadPolicy:
        """The current policy; DISABLE for a topic that the broker compacts."""
        return ReadPolicy.DISABLE if topic in self._compacted else self._policies.of_topic(topic)

    async def plan(self, sources: BrokerSource, topic: str, queue_id: int, offset: int) -> Plan:
        """Decide where a pull is read from first. ``sources`` reports which pages of the broker's files are in memory
        only if the topic's policy depends on it."""
        policy = self.policy_of(topic)
        situation = await self.situation(sources, topic, queue_id, offset)
        decision = decide_read(policy, situation)
        if decision.source is ReadSource.CHECK_MEMORY:
            residency = await sources.residency()
            self._note_unknown_residency(residency)
            situation = replace(situation, residency=residency)
            decision = decide_read(policy, situation)
        logger.debug(
            "%s queue %d offset %d is read from: %s, because %s",
            topic,
            queue_id,
            offset,
            decision.source.value,
            decision.why,
        )
        return Plan(topic, queue_id, policy, situation, decision.source)

    def archived(self, topic: str, queue_id: int) -> HeldOffsets | None:
        """The archive's part of a queue."""
        return self._queues.find(topic, queue_id).queue

    async def situation(self, sources: BrokerSource, topic: str, queue_id: int, offset: int) -> Situation:
        """What decides where a message is read: what archive and broker have of the queue, and whether each has the
        message at ``offset``. The archive's part is taken from one catalog version."""
        is_system, policy = self._topics.is_system(topic), self.policy_of(topic)
        is_read = not is_system and policy is not ReadPolicy.DISABLE
        archived = self._queues.find(topic, queue_id) if is_read else ArchivedQueue(None, 0, 0)
        # Taken after the catalog's part, so that messages that the broker deletes in between are requested again by the
        # client, not skipped.
        view = await sources.local_view()
        is_recreated = _is_recreated(archived, view, offset)
        queue = None if is_recreated else archived.queue
        is_admitted = is_read and self._topics.admits(topic)
        is_behind = is_admitted and archived.dispatched_phys < view.oldest_phys
        return Situation(
            offset,
            is_system,
            queue,
            view.side,
            view.queue,
            view.is_record,
            is_behind,
            is_expiring=view.is_expiring,
            is_admitted=is_admitted,
            is_broker_older=view.oldest_phys < archived.first_phys,
            is_recreated=is_recreated,
            generation=archived.generation,
            earlier_end=archived.earlier_end,
            first_phys=archived.first_phys,
        )

    async def pull(self, sources: PullSources, plan: Plan) -> ReadOutcome:
        """Read from the source that was planned, and from the other one if that cannot answer. Raises the error of
        reading the archive if the broker does not have the messages either."""
        source, situation = plan.source, plan.situation
        tried: set[ReadSource] = set()
        while source in (ReadSource.LOCAL, ReadSource.TIERED) and source not in tried:
            tried.add(source)
            result: PullResult | None = None
            error: TieredError | None = None
            try:
                result = await sources.read(source, situation.local)
            except TieredError as raised:
                error = raised
            status = result.status if result is not None else None
            if source is ReadSource.TIERED:
                step = after_tiered(status, situation)
            else:
                step = after_local(plan.policy, status, situation)
            if step is NextStep.KEEP:
                if result is None:
                    assert error is not None
                    raise error
                self._count(source)
                return ReadOutcome(source, result, join_offsets(result, source, situation))
            self._fell_back(plan, source, step, status, error)
            source = _SOURCES[step]
        self.counters.retried += 1
        return ReadOutcome(ReadSource.RETRY, None, retry_result(situation))

    def _note_unknown_residency(self, residency: Residency) -> None:
        """If the kernel does not tell whether the bytes of a pull are in the page cache, count that, and warn once that
        NOT_IN_MEM has no effect then."""
        if residency is Residency.UNKNOWN:
            self.counters.residency_unknown += 1
            if not self._warned_of_residency:
                self._warned_of_residency = True
                logger.warning(
                    "read.policy NOT_IN_MEM acts as NOT_IN_DISK: the kernel does not report which pages of the "
                    "broker's files are in memory. Run as the owner of the files, or grant write permission"
                )

    def _count(self, source: ReadSource) -> None:
        if source is ReadSource.LOCAL:
            self.counters.local += 1
        else:
            self.counters.tiered += 1

    def _fell_back(
        self,
        plan: Plan,
        source: ReadSource,
        step: NextStep,
        status: PullStatus | None,
        error: TieredError | None,
    ) -> None:
        """Count a pull that ``source`` could not answer (``status`` or ``error`` says why) and that is read from
        another one, or retried by the client; log the error."""
        reason = status.value if status is not None else type(error).__name__
        self.counters.fallbacks[f"{source.value} {reason}"] += 1
        if error is not None:
            logger.warning(
                "%s queue %d offset %d cannot be read from %s; what follows instead: %s",
                plan.topic,
                plan.queue_id,
                plan.situation.offset,
                source.value,
                step.value,
                exc_info=error,
            )


_SOURCES = {
    NextStep.LOCAL: ReadSource.LOCAL,
    NextStep.TIERED: ReadSource.TIERED,
    NextStep.RETRY: ReadSource.RETRY,
}


def retry_result(situation: Situation) -> PullResult:
    """The result of a pull while neither the archive nor the broker can give the message: the client gets
    the same offset as the next one, with the bounds of both together."""
    sides = [queue for queue in (situation.archived, situation.local) if queue is not None]
    return PullResult(
        PullStatus.OFFSET_FOUND_NULL,
        situation.offset,
        min((queue.min_offset for queue in sides), default=0),
        max((queue.max_offset for queue in sides), default=0),
    )


def _is_recreated(archived: ArchivedQueue, view: LocalView, offset: int) -> bool:
    """Whether the topic was deleted and created again, and nothing of the new queue is archived yet: the broker's
    messages lie behind all archived ones in the log, but their queue offsets start again below the archived ones."""
    if archived.queue is None or view.queue is None:
        return False
    if view.phys >= archived.end_phys and offset < archived.queue.max_offset:
        return True
    is_shorter = view.queue.max_offset <= archived.queue.max_offset
    return is_shorter and max(view.phys, view.last_phys) >= archived.end_phys
