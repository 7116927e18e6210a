"""The read router over the archive and the broker's own files, for tests."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from fetcher.io.waiting import Executor, InlineExecutor, Wait
from fetcher.policy.read_policy import HeldOffsets, LocalView, ReadPolicies, ReadSource, Residency
from fetcher.policy.read_router import KnownCatalog, ReadCounters, ReadRouter
from fetcher.rows.pull import PullResult
from fetcher.rows.tag_filter import MessageFilter
from tests.fetcher.hot_reader import HotReader
from tiered.errors import NotFoundError
from tiered.model.queue import TopicFilter

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
    ) -> Coroutine[Any, Any, PullResult]:
        """A pull from the archive only."""


class PolicyReader:
    """Answers pulls by policy."""

    def __init__(
        self,
        tiered: TieredReader,
        catalog: KnownCatalog,
        hot: HotReader,
        *,
        settings: ReadPolicies | None = None,
        topics: TopicFilter | None = None,
        executor: Executor | None = None,
    ) -> None:
        """``topics``: what the uploader archives. ``executor``: where the broker's files are read."""
        self._tiered = tiered
        self._hot = hot
        self._executor = executor or InlineExecutor()
        self._router = ReadRouter(catalog, settings, topics)

    @property
    def counters(self) -> ReadCounters:
        """How pulls were answered so far."""
        return self._router.counters

    def apply(self, settings: ReadPolicies) -> None:
        """Put other policies in force from the next pull on. Callable from any thread."""
        self._router.apply(settings)

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
    ) -> PullResult:
        """A pull. OFFSET_FOUND_NULL means: ask the same offset again, its messages are neither here nor gone.

        Raises what reading the archive raises when the broker's files cannot answer instead.
        """
        sides = self._sides(topic, queue_id, offset, count, max_bytes, filter, group)
        plan = await self._router.plan(sides, topic, queue_id, offset)
        return (await self._router.pull(sides, plan)).joined

    async def min_offset(self, topic: str, queue_id: int) -> int:
        """The smaller minimum of both; 0 for a queue that neither has."""
        archived, local = await self._bounds(topic, queue_id)
        return min((queue.min_offset for queue in (archived, local) if queue is not None), default=0)

    async def max_offset(self, topic: str, queue_id: int) -> int:
        """One past the last offset that exists, the broker's as a rule; 0 for a queue that neither has."""
        archived, local = await self._bounds(topic, queue_id)
        return max((queue.max_offset for queue in (archived, local) if queue is not None), default=0)

    async def _bounds(self, topic: str, queue_id: int) -> tuple[HeldOffsets | None, HeldOffsets | None]:
        situation = await self._router.situation(self._sides(topic, queue_id, 0), topic, queue_id, 0)
        return situation.archived, situation.local

    def _sides(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        count: int = 1,
        max_bytes: int = 1,
        filter: MessageFilter | None = None,
        group: str = "",
    ) -> _FileSides:
        return _FileSides(
            self._tiered, self._hot, self._executor, topic, queue_id, offset, count, max_bytes, filter, group
        )


@dataclass(frozen=True, slots=True)
class _FileSides:
    """One pull of the archive or of the broker's files; see read_router.Sides."""

    tiered: TieredReader
    hot: HotReader
    executor: Executor
    topic: str
    queue_id: int
    offset: int
    count: int
    max_bytes: int
    filter: MessageFilter | None
    group: str

    async def local_view(self) -> LocalView:
        return await self._locally(self.hot.local_view)

    async def residency(self) -> Residency:
        try:
            return await self._locally(
                partial(self.hot.residency, count=self.count, max_bytes=self.max_bytes)
            )
        except NotFoundError:
            return Residency.COLD  # deleted since

    async def read(self, source: ReadSource, local: HeldOffsets | None) -> PullResult:
        if source is ReadSource.TIERED:
            result = await self.tiered.get(
                self.topic,
                self.queue_id,
                self.offset,
                count=self.count,
                max_bytes=self.max_bytes,
                filter=self.filter,
                group=self.group,
            )
            return counted(result, self.count)
        read = partial(
            self.hot.get, count=self.count, max_bytes=self.max_bytes, filter=self.filter, queue=local
        )
        return await self._locally(read)

    async def _locally(self, work: Callable[[str, int, int], T]) -> T:
        return await Wait(self.executor.submit(work, self.topic, self.queue_id, self.offset))


def counted(result: PullResult, count: int) -> PullResult:
    """At most ``count`` messages, those of an inner batch counted each, as a broker does; but one record at least."""
    batch = result.batch
    if len(batch) <= 1 or int(batch.inner_num.sum()) <= count:
        return result
    rows = max(1, int(np.searchsorted(np.cumsum(batch.inner_num), count, side="right")))
    end = int(batch.queue_offsets[rows - 1]) + int(batch.inner_num[rows - 1])
    return result._replace(batch=batch.select(np.arange(rows)), next_offset=end)
