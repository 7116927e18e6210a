"""Pulls answered by archive and broker together: one continuous line of offsets (TieredMessageStore.getMessageAsync).

Per pull: look at the broker's files, look at the catalog, decide (read_policy.py), ask the kernel if the policy wants
it, read, fall back. Nothing here knows how either side reads.

Owns the order of these steps and their counters. Coroutines of the core (waiting.py); the broker's files are read by
an executor, as a disk may be slow.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from fetcher.batch import EMPTY_BATCH, GetResult, GetStatus
from fetcher.hot_reader import HotReader, LocalView
from fetcher.read_policy import (
    BrokerSide,
    Follow,
    Line,
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
from fetcher.tag_filter import MessageFilter
from fetcher.waiting import Executor, InlineExecutor, Wait
from tiered.catalog.state import CatalogState
from tiered.errors import NotFoundError, TieredError
from tiered.model.queue import QueueKey, TopicFilter
from tiered.model.tables import QUEUE_SUPERSEDED
from tiered.settings.sections import ReadSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TieredReader(Protocol):
    """What of the archive's reader is needed; see message_fetcher.TieredMessageFetcher."""

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        count: int,
        max_bytes: int,
        filter: Any = None,
        group: str = "",
    ) -> Coroutine[Any, Any, GetResult]:
        """A pull from the archive alone."""


class KnownCatalog(Protocol):
    """What of the catalog's view is needed; see catalog_view.CatalogView. An older version only holds more pulls."""

    @property
    def state(self) -> CatalogState:
        """The newest version known."""

    def look(self) -> None:
        """Begin to read on if it is time; never waits."""


class ArchivedQueue(NamedTuple):
    """One queue as the catalog has it. ``queue`` is None when it does not."""

    queue: OffsetRange | None
    end_phys: int
    """Physical end of its last archived record."""
    dispatched_phys: int
    """Below this everything of the commitlog is archived."""


def archived_queue(state: CatalogState, topic: str, queue_id: int) -> ArchivedQueue:
    """The newest life of a queue. One that ended with its log line has no next offset for the broker's new one."""
    generation = state.current_generation(topic, queue_id)
    row = state.queue(QueueKey(topic, queue_id, generation)) if generation is not None else None
    if row is None or int(row["flags"]) & QUEUE_SUPERSEDED:
        return ArchivedQueue(None, 0, state.cursor.phys)
    offsets = OffsetRange(int(row["min_queue_offset"]), int(row["end_queue_offset"]))
    return ArchivedQueue(offsets, int(row["end_phys"]), state.cursor.phys)


@dataclass
class ReadCounters:
    """How pulls were answered. ``fallbacks`` by reason (rocketmq_tiered_store_get_message_fallback_total)."""

    local: int = 0
    tiered: int = 0
    held: int = 0
    residency_unknown: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A pull."""

    topic: str
    queue_id: int
    offset: int
    count: int = 1
    max_bytes: int = 1
    filter: MessageFilter | None = None
    group: str = ""


class PolicyReader:
    """Answers pulls by policy. ``hot`` is None where there is no broker: then the archive is all there is."""

    def __init__(
        self,
        tiered: TieredReader,
        catalog: KnownCatalog,
        hot: HotReader | None,
        *,
        settings: ReadSettings | None = None,
        topics: TopicFilter | None = None,
        executor: Executor | None = None,
    ) -> None:
        """``topics``: what the uploader archives. ``executor``: where the broker's files are read."""
        self._tiered = tiered
        self._catalog = catalog
        self._hot = hot
        self._topics = topics or TopicFilter()
        self._executor = executor or InlineExecutor()
        self._policies = ReadPolicies.of(settings or ReadSettings())
        self._told_of_residency = False
        self.counters = ReadCounters()

    def apply(self, settings: ReadSettings) -> None:
        """Put other policies in force from the next pull on. Callable from any thread."""
        self._policies = ReadPolicies.of(settings)

    async def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        count: int,
        max_bytes: int,
        filter: MessageFilter | None = None,
        group: str = "",
    ) -> GetResult:
        """A pull. OFFSET_FOUND_NULL means: ask the same offset again, its messages are neither here nor gone.

        Raises what reading the archive raises when the broker's files cannot answer instead.
        """
        asked = _Asked(topic, queue_id, offset, count, max_bytes, filter, group)
        policy = self._policies.of_topic(topic)
        situation = await self._situation(asked, policy)
        decision = decide(policy, situation)
        if decision.source is Source.ASK_MEMORY:
            situation = replace(situation, residency=await self._residency(asked))
            decision = decide(policy, situation)
        logger.debug(
            "%s queue %d offset %d: %s, %s", topic, queue_id, offset, decision.source.value, decision.why
        )
        return await self._answer(asked, policy, situation, decision.source)

    async def min_offset(self, topic: str, queue_id: int) -> int:
        """The smaller minimum of both; 0 for a queue that neither has."""
        archived, local = await self._bounds(topic, queue_id)
        return min((queue.min_offset for queue in (archived, local) if queue is not None), default=0)

    async def max_offset(self, topic: str, queue_id: int) -> int:
        """One past the last offset that exists, the broker's as a rule; 0 for a queue that neither has."""
        archived, local = await self._bounds(topic, queue_id)
        return max((queue.max_offset for queue in (archived, local) if queue is not None), default=0)

    async def _bounds(self, topic: str, queue_id: int) -> tuple[OffsetRange | None, OffsetRange | None]:
        asked = _Asked(topic, queue_id, 0)
        situation = await self._situation(asked, self._policies.of_topic(topic))
        return situation.archived, situation.local

    # -- what is known ----------------------------------------------------------------------------------------

    async def _situation(self, asked: _Asked, policy: ReadPolicy) -> Situation:
        is_system = self._topics.is_system(asked.topic)
        archived = ArchivedQueue(None, 0, 0)
        if self._hot is None or not (is_system or policy is ReadPolicy.DISABLE):
            # Never waits: with the object store away, what the broker has is answered all the same.
            self._catalog.look()
            archived = archived_queue(self._catalog.state, asked.topic, asked.queue_id)
        if self._hot is None:
            return Situation(asked.offset, is_system, archived.queue, BrokerSide.ABSENT)
        # After the catalog: what the broker deletes in between is then missed here, and held, rather than skipped.
        view = await self._locally(self._hot.look, asked.topic, asked.queue_id, asked.offset)
        queue = None if _is_other_life(archived, view, asked.offset) else archived.queue
        is_behind = archived.dispatched_phys < view.oldest_phys and self._topics.admits(asked.topic)
        return Situation(asked.offset, is_system, queue, view.side, view.queue, view.is_record, is_behind)

    async def _residency(self, asked: _Asked) -> Residency:
        assert self._hot is not None
        ask = partial(self._hot.residency, count=asked.count, max_bytes=asked.max_bytes)
        try:
            answer = await self._locally(ask, asked.topic, asked.queue_id, asked.offset)
        except NotFoundError:
            return Residency.COLD  # deleted since
        if answer is Residency.UNKNOWN:
            self.counters.residency_unknown += 1
            if not self._told_of_residency:
                self._told_of_residency = True
                logger.warning(
                    "read.policy NOT_IN_MEM is NOT_IN_DISK: the kernel does not tell this process what of the broker's "
                    "files is in memory; run as the user who owns them, or give write permission"
                )
        return answer

    async def _locally(self, work: Callable[[str, int, int], T], topic: str, queue_id: int, offset: int) -> T:
        return await Wait(self._executor.submit(work, topic, queue_id, offset))

    # -- answering --------------------------------------------------------------------------------------------

    async def _answer(
        self, asked: _Asked, policy: ReadPolicy, situation: Situation, source: Source
    ) -> GetResult:
        tried: set[Source] = set()
        while source in (Source.LOCAL, Source.TIERED) and source not in tried:
            tried.add(source)
            result, error = await self._read(asked, source, situation.local)
            status = result.status if result is not None else None
            if source is Source.TIERED:
                follow = after_tiered(status, situation)
            else:
                follow = after_local(policy, status, situation)
            if follow is Follow.KEEP:
                if result is None:
                    assert error is not None
                    raise error
                return self._kept(_counted(result, asked.count), source, situation)
            reason = status.value if status is not None else type(error).__name__
            self.counters.fallbacks[f"{source.value} {reason}"] += 1
            if error is not None:
                logger.warning(
                    "%s queue %d offset %d: %s answers instead of %s", asked.topic, asked.queue_id, asked.offset,
                    follow.value, source.value, exc_info=error,
                )  # fmt: skip
            source = _SOURCES[follow]
        return self._held(situation)

    async def _read(
        self, asked: _Asked, source: Source, local: OffsetRange | None
    ) -> tuple[GetResult | None, TieredError | None]:
        try:
            if source is Source.TIERED:
                return await self._read_archive(asked), None
            assert self._hot is not None
            read = partial(
                self._hot.get, count=asked.count, max_bytes=asked.max_bytes, filter=asked.filter, queue=local
            )
            return await self._locally(read, asked.topic, asked.queue_id, asked.offset), None
        except TieredError as error:
            return None, error

    async def _read_archive(self, asked: _Asked) -> GetResult:
        return await self._tiered.get(
            asked.topic,
            asked.queue_id,
            asked.offset,
            count=asked.count,
            max_bytes=asked.max_bytes,
            filter=asked.filter,
            group=asked.group,
        )

    def _kept(self, result: GetResult, source: Source, situation: Situation) -> GetResult:
        if source is Source.LOCAL:
            self.counters.local += 1
        else:
            self.counters.tiered += 1
        line = Line(result.status, result.next_offset, result.min_offset, result.max_offset)
        joined = joined_line(line, source, situation)
        return result._replace(
            status=joined.status,
            next_offset=joined.next_offset,
            min_offset=joined.min_offset,
            max_offset=joined.max_offset,
        )

    def _held(self, situation: Situation) -> GetResult:
        self.counters.held += 1
        sides = [queue for queue in (situation.archived, situation.local) if queue is not None]
        return GetResult(
            GetStatus.OFFSET_FOUND_NULL,
            EMPTY_BATCH,
            situation.offset,
            min((queue.min_offset for queue in sides), default=0),
            max((queue.max_offset for queue in sides), default=0),
        )


_SOURCES = {Follow.LOCAL: Source.LOCAL, Follow.TIERED: Source.TIERED, Follow.HOLD: Source.HOLD}


def _counted(result: GetResult, count: int) -> GetResult:
    """At most ``count`` messages, those of an inner batch counted each, as a broker does; but one record at least."""
    batch = result.batch
    if len(batch) <= 1 or int(batch.inner_num.sum()) <= count:
        return result
    rows = max(1, int(np.searchsorted(np.cumsum(batch.inner_num), count, side="right")))
    end = int(batch.queue_offsets[rows - 1]) + int(batch.inner_num[rows - 1])
    return result._replace(batch=batch.taken(np.arange(rows)), next_offset=end)


def _is_other_life(archived: ArchivedQueue, view: LocalView, offset: int) -> bool:
    """Whether the broker's queue is a recreated one of which nothing is archived yet: its records lie behind all of
    the archived ones though its offsets do not."""
    if archived.queue is None or view.queue is None:
        return False
    if view.phys >= archived.end_phys and offset < archived.queue.max_offset:
        return True
    is_shorter = view.queue.max_offset <= archived.queue.max_offset
    return is_shorter and max(view.phys, view.last_phys) >= archived.end_phys
