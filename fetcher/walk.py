"""A walk over one queue: one batch after another from a span's beginning to its end. Shared by both forms of the API.

Owns where the walk stands. Does not own reading (message_fetcher.py) nor waiting: ``next_batch`` is a coroutine of the
core.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

from fetcher.blocks.memory_admission import MemoryShortError
from fetcher.rows.batch import GetResult, GetStatus, MessageBatch
from fetcher.rows.message import Message
from fetcher.rows.read_plan import NO_END
from fetcher.rows.tag_filter import MessageFilter
from fetcher.span import Span
from tiered.errors import NotFoundError
from tiered.model.queue import QueueKey

logger = logging.getLogger(__name__)

_numbers = itertools.count(1)
BATCH_BYTES_MIN = 64 * 1024
_SMALLER = 8
_PASSING = (GetStatus.NO_MATCHED_MESSAGE, GetStatus.OFFSET_TOO_SMALL)
"""Nothing to show, but the next offset is further on."""


Asking = Callable[[Coroutine[Any, Any, MessageBatch | None]], Coroutine[Any, Any, MessageBatch | None]]
"""See ArchiveAccess.while_open."""


class Puller(Protocol):
    """What a walk pulls from."""

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
        generation: int | None = None,
        until: int | None = None,
    ) -> GetResult:
        """See TieredMessageFetcher.get."""
        ...


class Walk:
    """Where a reader of ``queue`` stands. Every walk prefetches for itself, as a consumer group of its own."""

    def __init__(
        self,
        puller: Puller,
        queue: QueueKey,
        start_offset: int,
        span: Span,
        message_filter: MessageFilter | None = None,
        find_start: Callable[[], Coroutine[Any, Any, int | None]] | None = None,
        asking: Asking | None = None,
    ) -> None:
        """``find_start``: where a walk from a time begins, None while nothing was stored then or later: until it is
        known, nothing is read. ``asking``: what every search for the next batch goes through."""
        self._puller = puller
        self._asking = asking
        self._queue = queue
        self._span = span
        self._filter = message_filter
        self._left = span.count
        self._batch_bytes = span.batch_bytes
        self._group = f"walk-{next(_numbers)}"
        self.offset = start_offset
        """The next offset to read."""
        self._find_start = find_start
        self._told_end: int | None = None

    def __repr__(self) -> str:
        return f"Walk({self._queue}, at {self.offset})"

    @property
    def _until(self) -> int | None:
        """Every offset below is going to be read. With a filter nobody knows how far the last wanted message is."""
        if self._left is None:
            return NO_END
        return None if self._filter is not None else self.offset + self._left

    @property
    def is_finished(self) -> bool:
        """Whether all messages asked for were handed out."""
        return self._left is not None and self._left <= 0

    async def next_batch(self) -> MessageBatch | None:
        """The next messages, never an empty batch; None at the end of the span or, for now, of the queue.

        Gaps on the way are logged. Raises what reading raises; the walk then stands where it stood.
        """
        found = self._next_batch()
        return await (found if self._asking is None else self._asking(found))

    async def _next_batch(self) -> MessageBatch | None:
        if self._find_start is not None:
            start = await self._find_start()
            if start is None:
                return None
            self.offset, self._find_start = start, None
        while not self.is_finished:
            try:
                result = await self._pull()
            except MemoryShortError:
                # Walks side by side, each of which holds its last batch until it has the next, would wait for each
                # other for ever: there is room for smaller batches.
                if self._batch_bytes <= BATCH_BYTES_MIN:
                    raise
                self._batch_bytes = max(self._batch_bytes // _SMALLER, BATCH_BYTES_MIN)
                continue
            gap = result.gap
            if result.status is GetStatus.OFFSET_TOO_SMALL:
                gap = self.offset, result.next_offset
            if gap is not None:
                begin, end = gap
                logger.warning(
                    "%s queue %d: offsets %d to %d are not there", *self._queue[:2], begin, end - 1
                )
            if result.status is GetStatus.FOUND:
                self.offset = result.next_offset
                if self._left is not None:
                    self._left -= len(result.batch)
                return result.batch
            if result.status is GetStatus.OFFSET_OVERFLOW_BADLY and result.max_offset != self._told_end:
                self._told_end = result.max_offset
                logger.warning(
                    "%s queue %d ends at %d, before %d: this is begun beyond its end, or the broker's log was replaced",
                    *self._queue[:2], result.max_offset, self.offset,
                )  # fmt: skip
            if result.status is GetStatus.NO_MATCHED_LOGIC_QUEUE:
                raise NotFoundError(
                    f"queue {self._queue} is not in the archive any more, at offset {self.offset}"
                )
            if result.status not in _PASSING or result.next_offset <= self.offset:
                return None
            self.offset = result.next_offset
        return None

    async def _pull(self) -> GetResult:
        count = self._span.batch_messages
        return await self._puller.get(
            self._queue.topic,
            self._queue.queue_id,
            self.offset,
            count=count if self._left is None else min(count, self._left),
            max_bytes=self._batch_bytes,
            filter=self._filter,
            group=self._group,
            generation=self._queue.generation,
            until=self._until,
        )


def messages_of(batch: MessageBatch, queue: QueueKey, *, is_batch: bool) -> Iterator[Message]:
    """The messages of ``batch`` one by one, decoded later. ``is_batch``: ``queue`` is one of batches."""
    rows = zip(
        batch.records(),
        batch.queue_offsets.tolist(),
        batch.store_timestamp.tolist(),
        batch.inner_num.tolist(),
        strict=True,
    )
    for data, offset, stored_ms, inner_num in rows:
        yield Message(queue, offset, data, stored_ms, inner_num=inner_num, is_in_batch_queue=is_batch)
