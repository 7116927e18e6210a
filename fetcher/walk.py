"""A walk over one queue: batches from the beginning of a span to its end, for both forms of the API.

Owns the position of the walk. Does not own reading (message_fetcher.py) nor waiting: ``next_batch`` is a coroutine of
the core.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

import numpy as np

from fetcher.blocks.memory_admission import MemoryShortError
from fetcher.rows.batch import MessageBatch
from fetcher.rows.message import Message
from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from fetcher.rows.read_plan import NO_END
from fetcher.rows.tag_filter import MessageFilter
from fetcher.span import Span
from tiered.errors import NotFoundError
from tiered.model.queue import QueueKey

logger = logging.getLogger(__name__)

_numbers = itertools.count(1)
BATCH_BYTES_MIN = 64 * 1024
_SMALLER = 8
_PASSING = (PullStatus.NO_MATCHED_MESSAGE, PullStatus.OFFSET_TOO_SMALL)
"""No messages, but a higher next offset."""

Reading = Callable[[Coroutine[Any, Any, MessageBatch | None]], Coroutine[Any, Any, MessageBatch | None]]
"""See ArchiveAccess.while_open."""


class Puller(Protocol):
    """What a walk pulls from: TieredMessageFetcher."""

    async def pull(self, request: PullRequest) -> PullResult:
        """See TieredMessageFetcher.pull."""
        ...


class Walk:
    """The position of a reader of ``queue``. Every walk prefetches for itself, as a consumer group of its own."""

    def __init__(
        self,
        puller: Puller,
        queue: QueueKey,
        start: int,
        span: Span,
        message_filter: MessageFilter | None = None,
        find_part: Callable[[int], Coroutine[Any, Any, tuple[int, int] | None]] | None = None,
        reading: Reading | None = None,
        has_expired: Callable[[], bool] = lambda: False,
    ) -> None:
        """``find_part``: offset -> the next part of the queue with messages of the span's times; None: there is none
        yet. ``reading``: wraps every read of the next batch. ``has_expired``: whether messages
        below the minimum offset have expired."""
        self._puller = puller
        self._reading = reading
        self._queue = queue
        self._span = span
        self._filter = message_filter
        self._left = span.limit
        self._batch_bytes = span.batch_bytes
        self._group = f"walk-{next(_numbers)}"
        self.offset = start
        """The next offset to read."""
        self._find_part = find_part
        self._part_end = NO_END if find_part is None else start
        self._has_expired = has_expired
        self._reported_end: int | None = None

    def __repr__(self) -> str:
        return f"Walk({self._queue}, at {self.offset})"

    @property
    def _until(self) -> int | None:
        """Every offset below is going to be read. Unknown with a filter or times and a limit."""
        if self._left is None:
            return self._part_end
        is_known = self._filter is None and self._span.until_ms is None
        return self.offset + self._left if is_known else None

    @property
    def is_finished(self) -> bool:
        """Whether the end of the span was reached."""
        return self._left is not None and self._left <= 0

    async def next_batch(self) -> MessageBatch | None:
        """The next messages, never an empty batch; None at the end of the span or the current end of the queue.

        Gaps are logged. After an error the walk continues at the same offset.
        """
        found = self._next_batch()
        return await (found if self._reading is None else self._reading(found))

    async def _next_batch(self) -> MessageBatch | None:
        while not self.is_finished:
            if self._find_part is not None and self.offset >= self._part_end:
                part = await self._find_part(self.offset)
                if part is None:
                    return None
                self.offset, self._part_end = part
                if self._span.until_ms is None:
                    self._part_end = NO_END  # ``since_ms`` is where the walk begins
            try:
                result = await self._puller.pull(self._request())
            except MemoryShortError:
                # Concurrent walks, each holding its last batch until it has the next, would wait for each other for
                # ever: smaller batches fit.
                if self._batch_bytes <= BATCH_BYTES_MIN:
                    raise
                self._batch_bytes = max(self._batch_bytes // _SMALLER, BATCH_BYTES_MIN)
                continue
            gap, why = result.gap, "are missing"
            if result.status is PullStatus.OFFSET_TOO_SMALL:
                gap = self.offset, result.next_offset
                why = "have expired" if self._has_expired() else "were never archived"
            if gap is not None:
                begin, end = gap
                logger.warning("%s queue %d: offsets %d to %d %s", *self._queue[:2], begin, end - 1, why)
            if result.status is PullStatus.FOUND:
                batch = self._of_times(result.batch)
                self.offset = result.next_offset
                if self._left is not None:
                    self._left -= len(batch)
                if len(batch):
                    return batch
                continue
            if result.status is PullStatus.OFFSET_OVERFLOW_BADLY and result.max_offset != self._reported_end:
                self._reported_end = result.max_offset
                logger.warning(
                    "%s queue %d ends at %d, before %d: the start is beyond its end, or the broker's log was replaced",
                    *self._queue[:2], result.max_offset, self.offset,
                )  # fmt: skip
            if result.status is PullStatus.NO_MATCHED_LOGIC_QUEUE:
                raise NotFoundError(
                    f"queue {self._queue} is no longer in the archive, at offset {self.offset}"
                )
            if result.status not in _PASSING or result.next_offset <= self.offset:
                return None
            self.offset = result.next_offset
        return None

    def _of_times(self, batch: MessageBatch) -> MessageBatch:
        """The rows of the span's times."""
        if self._span.range_ms is None or self._span.until_ms is None:
            return batch
        begin_ms, end_ms = self._span.range_ms
        wanted = (batch.store_timestamp >= begin_ms) & (batch.store_timestamp < end_ms)
        return batch if wanted.all() else batch.select(np.flatnonzero(wanted))

    def _request(self) -> PullRequest:
        limit = max(1, min(self._span.batch_messages, self._part_end - self.offset))
        return PullRequest(
            self._queue.topic,
            self._queue.queue_id,
            self.offset,
            limit if self._left is None else min(limit, self._left),
            self._batch_bytes,
            self._group,
            filter=self._filter,
            generation=self._queue.generation,
            until=self._until,
        )


def messages_of(batch: MessageBatch, queue: QueueKey, *, is_batch: bool) -> Iterator[Message]:
    """The messages of ``batch``, decoded on access. ``is_batch``: ``queue`` is a BatchCQ."""
    rows = zip(
        batch.records(),
        batch.queue_offsets.tolist(),
        batch.store_timestamp.tolist(),
        batch.inner_num.tolist(),
        strict=True,
    )
    for data, offset, stored_ms, inner_num in rows:
        yield Message(queue, offset, data, stored_ms, inner_num=inner_num, is_in_batch_queue=is_batch)
