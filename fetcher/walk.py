"""A walk over one queue: batches from the beginning of a span to its end, and iterators over it, for both forms of the
API.

Owns the span, the position of the walk, and iterators that continue after an error: a generator that has raised is
exhausted, and after an outage or a time limit it would report the end of the queue. One thread or task uses an iterator
at a time. Does not own reading (message_fetcher.py) nor waiting: ``next_batch`` is a coroutine of the core.
"""

import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from fetcher.blocks.budget import MemoryShortError
from fetcher.io.waiting import run_async, run_sync
from fetcher.pulls.message_fetcher import TieredMessageFetcher
from fetcher.queries.source import ALWAYS_MS
from fetcher.rows.message import Message, MessageBatch
from fetcher.rows.pull import PullRequest, PullStatus
from fetcher.rows.run_rows import NO_END
from fetcher.rows.tag_filter import MessageFilter
from tiered.errors import NotFoundError, UsageError
from tiered.model.queue import QueueKey
from tiered.timestamps import TimePoint, milliseconds

BATCH_MESSAGES = 4096
BATCH_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Span:
    """From offset ``start``, or the first message stored at or after ``since_ms``, or the queue's minimum; with
    ``until_ms`` only messages stored at or after ``since_ms`` and before it, also where times do not ascend; at most
    ``limit`` messages. Batches have at most ``batch_messages`` and ``batch_bytes``, except for a single larger
    record."""

    start: int | None = None
    since_ms: int | None = None
    limit: int | None = None
    batch_messages: int = BATCH_MESSAGES
    batch_bytes: int = BATCH_BYTES
    until_ms: int | None = None

    @property
    def range_ms(self) -> tuple[int, int] | None:
        """Store times [begin, end) of messages to find; None for all."""
        if self.since_ms is None and self.until_ms is None:
            return None
        begin_ms = ALWAYS_MS[0] if self.since_ms is None else self.since_ms
        return begin_ms, ALWAYS_MS[1] if self.until_ms is None else self.until_ms

    def __post_init__(self) -> None:
        """Check the span. Raises UsageError if ``start`` and ``since_ms`` are both given, a number is negative, or a
        batch has less than one message or byte."""
        if self.start is not None and self.since_ms is not None:
            raise UsageError("start and since cannot be combined", hint="give either start or since")
        for name in ("start", "limit"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"{name} {value} is negative", hint="count from 0")
        for name in ("batch_messages", "batch_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} is less than 1", hint="give 1 or more")


def span_of(
    start: int | None,
    since: TimePoint | None,
    until: TimePoint | None,
    limit: int | None,
    batch_messages: int | None = None,
) -> Span:
    """The part of a queue that a program asks for: from offset ``start`` or time ``since`` to time ``until``, at most
    ``limit`` messages. Raises UsageError if these contradict each other or are negative."""
    return Span(
        start,
        None if since is None else milliseconds(since),
        limit,
        BATCH_MESSAGES if batch_messages is None else batch_messages,
        until_ms=None if until is None else milliseconds(until),
    )


logger = logging.getLogger(__name__)

_numbers = itertools.count(1)
BATCH_BYTES_MIN = 64 * 1024
_SMALLER = 8
_PASSING = (PullStatus.NO_MATCHED_MESSAGE, PullStatus.OFFSET_TOO_SMALL)
"""No messages, but a higher next offset."""

Reading = Callable[[Coroutine[Any, Any, MessageBatch | None]], Coroutine[Any, Any, MessageBatch | None]]
"""Runs a read, and fails once the archive is closed."""


class Walk:
    """The position of a reader of ``queue``. Every walk prefetches for itself, as a consumer group of its own."""

    def __init__(
        self,
        fetcher: TieredMessageFetcher,
        queue: QueueKey,
        start: int,
        span: Span,
        message_filter: MessageFilter | None = None,
        find_part: Callable[[int], Coroutine[Any, Any, tuple[int, int] | None]] | None = None,
        reading: Reading | None = None,
        has_expired: Callable[[], bool] = lambda: False,
    ) -> None:
        """A walk that pulls the messages of ``span`` from offset ``start`` on, batch by batch.

        ``find_part`` is given for a span of times: it takes an offset and returns the next offsets [begin, end) with
        messages of these times, or None if there are none yet. ``reading`` wraps each read of a batch; the archive
        checks in it that it is still open. ``has_expired`` tells whether messages below the queue's minimum offset
        have expired.
        """
        self._fetcher = fetcher
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
        """Pull until a batch has messages, and return it; None at the end of the span or at the present end of the
        queue.

        Logs offsets that are missing. Asks for smaller batches when memory is short. Raises NotFoundError if the queue
        is no longer in the archive.
        """
        while not self.is_finished:
            if self._find_part is not None and self.offset >= self._part_end:
                part = await self._find_part(self.offset)
                if part is None:
                    return None
                self.offset, self._part_end = part
                if self._span.until_ms is None:
                    self._part_end = NO_END  # without ``until_ms`` only the begin was looked for
            try:
                result = await self._fetcher.pull(self._request())
            except MemoryShortError:
                # Each walk keeps its last batch until it has the next one, so concurrent walks could wait for each
                # other's memory for ever. Smaller batches fit.
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
                    *self._queue[:2],
                    result.max_offset,
                    self.offset,
                )
            if result.status is PullStatus.NO_MATCHED_LOGIC_QUEUE:
                raise NotFoundError(
                    f"queue {self._queue} was removed from the archive while it was read: it was read up to offset "
                    f"{self.offset}"
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
        """The request for the next batch: from the walk's position, for no more messages than a batch may have, the
        part of the span holds and the limit leaves."""
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


Decode = Callable[[MessageBatch], Iterator[Message]]


@contextmanager
def _alone(lock: threading.Lock) -> Iterator[None]:
    """Exclusive use; concurrent use is an error, not a wait."""
    if not lock.acquire(blocking=False):
        raise UsageError(
            "iterator already in use by another thread or task", hint="use one iterator per thread or task"
        )
    try:
        yield
    finally:
        lock.release()


class _Batches:
    """Batches of a walk, which ``begin`` starts with the first."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, Walk]]) -> None:
        self._begin = begin
        self._walk: Walk | None = None
        self._is_over = False
        self._lock = threading.Lock()

    async def _next(self) -> MessageBatch | None:
        if not self._is_over:
            self._walk = self._walk or await self._begin()
            batch = await self._walk.next_batch()
            self._is_over = batch is None
            return batch
        return None


class Batches(_Batches, Iterator[MessageBatch]):
    """Batches of a walk, for threads."""

    def __next__(self) -> MessageBatch:
        with _alone(self._lock):
            batch = run_sync(self._next())
        if batch is None:
            raise StopIteration
        return batch

    def close(self) -> None:
        """End the iteration."""
        self._is_over = True


class Messages(Iterator[Message]):
    """Messages of batches."""

    def __init__(self, batches: Batches, decode: Decode) -> None:
        self._batches = batches
        self._decode = decode
        self._rest: Iterator[Message] = iter(())
        self._lock = threading.Lock()

    def __next__(self) -> Message:
        """The next message; reads the next batch when all messages of the last one have been returned. Raises
        StopIteration at the end."""
        for message in self._rest:
            return message
        with _alone(self._lock):
            for message in self._rest:  # another thread has read the next batch while this one waited
                return message
            self._rest = iter(())  # free its memory while the next batch is read
            self._rest = self._decode(next(self._batches))
            return next(self._rest)

    def close(self) -> None:
        """End the iteration."""
        self._batches.close()
        self._rest = iter(())


class AsyncBatches(_Batches, AsyncIterator[MessageBatch]):
    """Batches of a walk, for an event loop."""

    async def __anext__(self) -> MessageBatch:
        with _alone(self._lock):
            batch = await run_async(self._next())
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def aclose(self) -> None:
        """End the iteration."""
        self._is_over = True


class AsyncMessages(AsyncIterator[Message]):
    """The messages of a walk one by one, for an event loop."""

    def __init__(self, batches: AsyncBatches, decode: Decode) -> None:
        self._batches = batches
        self._decode = decode
        self._rest: Iterator[Message] = iter(())
        self._lock = threading.Lock()

    async def __anext__(self) -> Message:
        for message in self._rest:
            return message
        with _alone(self._lock):
            self._rest = iter(())  # free its memory while the next batch is read
            self._rest = self._decode(await anext(self._batches))
            return next(self._rest)

    async def aclose(self) -> None:
        """End the iteration."""
        await self._batches.aclose()
        self._rest = iter(())
