"""Offset by time, as a 5.x broker answers it, and the time of an offset.

LOWER: the first offset stored at or after the time, the queue's maximum after the last. UPPER: the last offset stored
at or before the time, the queue's minimum before the first (ConsumeQueue.getOffsetInQueueByTime). BatchCQ has a rule
of its own (``_batch_row``). The catalog's time ranges choose the run; a row inside it comes from the footer of one
object. Where timestamps ascend, as in a broker's log, no answer opens more than one object, BatchCQ two.

Does not own requests (``IndexOpener``) nor retries at a newer catalog version (time_reader.py). Awaits nothing but the
opener.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fetcher.rows.run_list import RunList
from tiered.catalog.state import CatalogState, RunChunk
from tiered.errors import NotFoundError
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_BATCH

IndexOpener = Callable[[str, int, int], Awaitable[SegmentIndex]]
"""(object key, size in bytes, bytes of its tail) -> the decoded tail; at most one request."""


class Boundary(StrEnum):
    """Which end of the messages of one instant is meant (org.apache.rocketmq.common.BoundaryType)."""

    LOWER = "lower"
    UPPER = "upper"


class TimeColumns(NamedTuple):
    """Rows of one run: where each begins and when it was stored, in ms since the epoch."""

    queue_offset: NDArray[np.int64]
    store_timestamp: NDArray[np.int64]


ColumnsOf = Callable[[int], Coroutine[Any, Any, TimeColumns]]
"""Number of a run in the queue -> its columns."""


@dataclass(frozen=True)
class QueueTimes:
    """What one catalog version says of a queue: its bounds and the time ranges of its runs, by base offset."""

    queue: QueueKey
    min_offset: int
    max_offset: int
    is_batch: bool
    chunk: RunChunk

    @classmethod
    def of(cls, state: CatalogState, queue: QueueKey, chunk: RunChunk) -> QueueTimes:
        """The times of ``queue`` at ``state``, whose runs are ``chunk``. Raises NotFoundError for an unknown queue."""
        row = state.queue(queue)
        if row is None:
            raise NotFoundError(f"{queue} is not in the archive")
        low, high = int(row["min_queue_offset"]), int(row["end_queue_offset"])
        return cls(queue, min(low, high), high, bool(row["flags"] & QUEUE_BATCH), chunk)

    def ends_before(self, timestamp_ms: int) -> bool:
        """Whether nothing was stored after ``timestamp_ms``: what is archived since this version may answer then."""
        return not len(self.chunk.runs) or int(self.chunk.runs["max_store_timestamp"].max()) <= timestamp_ms

    @cached_property
    def first_row(self) -> NDArray[np.int64]:
        """Rows of the queue before each run; one more entry holds the number of all."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.chunk.runs["rows"])])


# -- one object's columns -------------------------------------------------------------------------------------


def columns_from(times: QueueTimes, open_index: IndexOpener) -> ColumnsOf:
    """Columns out of the objects that the catalog names, checked against what it says of the run.

    Raises CorruptionError when the object holds another run, or what ``open_index`` raises.
    """
    runs = RunList(times.queue, times.chunk)

    async def columns_of(number: int) -> TimeColumns:
        place = runs.place(number)
        index = await open_index(place.object_key, place.size_bytes, place.tail_bytes)
        place.check(index)
        rows = index.row_columns(place)
        return TimeColumns(rows.queue_offset, rows.store_timestamp)

    return columns_of


# -- offset by time -------------------------------------------------------------------------------------------


async def offset_by_time(
    times: QueueTimes, timestamp_ms: int, boundary: Boundary, columns_of: ColumnsOf
) -> int:
    """The offset a 5.x broker answers for ``timestamp_ms``: always within the queue's minimum and maximum."""
    if not len(times.chunk.runs):
        return times.min_offset
    if times.is_batch:
        found = await _batch_offset(times, timestamp_ms, boundary, columns_of)
    elif boundary is Boundary.LOWER:
        first = await first_at_or_after(times, timestamp_ms, columns_of)
        found = times.max_offset if first is None else first
    else:
        found = await _last_at_or_before(times, timestamp_ms, columns_of)
    return min(max(found, times.min_offset), times.max_offset)


async def first_at_or_after(times: QueueTimes, timestamp_ms: int, columns_of: ColumnsOf) -> int | None:
    """Where a walk from ``timestamp_ms`` on begins, in queues of every kind: at the first row stored then or later;
    None where there is none."""
    runs = times.chunk.runs
    fitting = np.flatnonzero(runs["max_store_timestamp"] >= timestamp_ms)
    if not len(fitting):
        return None
    number = int(fitting[0])
    if int(runs["min_store_timestamp"][number]) >= timestamp_ms:
        return max(times.min_offset, int(runs["base_queue_offset"][number]))
    columns = await columns_of(number)
    return max(
        times.min_offset, int(columns.queue_offset[np.argmax(columns.store_timestamp >= timestamp_ms)])
    )


async def _last_at_or_before(times: QueueTimes, timestamp_ms: int, columns_of: ColumnsOf) -> int:
    runs = times.chunk.runs
    fitting = np.flatnonzero(runs["min_store_timestamp"] <= timestamp_ms)
    if not len(fitting):
        return times.min_offset
    number = int(fitting[-1])
    if int(runs["max_store_timestamp"][number]) <= timestamp_ms:
        return int(runs["end_queue_offset"][number]) - 1
    columns = await columns_of(number)
    return int(columns.queue_offset[np.flatnonzero(columns.store_timestamp <= timestamp_ms)[-1]])


async def _batch_offset(
    times: QueueTimes, timestamp_ms: int, boundary: Boundary, columns_of: ColumnsOf
) -> int:
    """Base offset of the batch the broker finds; -1 where its search finds none."""
    runs, first_row = times.chunk.runs, times.first_row

    async def cell(row: int, name: str) -> int:
        number = int(np.searchsorted(first_row, row, side="right")) - 1
        columns = await columns_of(number)
        column: NDArray[np.int64] = getattr(columns, name)
        return int(column[row - int(first_row[number])])

    async def compare(row: int) -> int:
        """-1, 0, 1 as the row was stored before, at or after the time; only a run that spans it is opened."""
        number = int(np.searchsorted(first_row, row, side="right")) - 1
        low, high = int(runs["min_store_timestamp"][number]), int(runs["max_store_timestamp"][number])
        if high < timestamp_ms or low > timestamp_ms or low == high:
            return _sign(low, timestamp_ms)
        return _sign(await cell(row, "store_timestamp"), timestamp_ms)

    row = await _batch_row(int(first_row[-1]), boundary, compare)
    if row is None:
        return -1
    number = int(np.searchsorted(first_row, row))
    if number < len(runs) and int(first_row[number]) == row:
        return int(runs["base_queue_offset"][number])
    return await cell(row, "queue_offset")


async def _batch_row(rows: int, boundary: Boundary, compare: Callable[[int], Awaitable[int]]) -> int | None:
    """The row BatchConsumeQueue.getOffsetInQueueByTime ends at, step for step, or None where it answers -1.

    LOWER is the first row at or after the time, but the last row from its time on. UPPER depends on the path of the
    search: it may end at the first row after the time, at an equal one that is not the last, or find none, which the
    broker turns into the queue's minimum. Steps do not depend on where the rows lie in the broker's file; a queue of
    more than one file (300,000 batches by default) is searched here as if it were one.
    """
    left, right = 0, rows - 1
    if await compare(right) <= 0:
        return right
    while left <= right:
        middle = (left + right) // 2
        order = await compare(middle)
        if middle == right:
            return middle if order >= 0 else None
        if middle == left:
            if order >= 0:
                return middle
            left = middle + 1
        elif boundary is Boundary.LOWER:
            left, right = (middle + 1, right) if order < 0 else (left, middle)
        else:
            left, right = (middle, right) if order <= 0 else (left, middle - 1)
    return None


def _sign(value: int, other: int) -> int:
    return (value > other) - (value < other)


# -- time of an offset ----------------------------------------------------------------------------------------


async def timestamp_of(times: QueueTimes, offset: int, columns_of: ColumnsOf) -> int | None:
    """When the message at ``offset`` was stored, ms since the epoch; None where the queue has none there
    (outside its bounds, or a gap)."""
    runs = times.chunk.runs
    number = int(np.searchsorted(runs["base_queue_offset"], offset, side="right")) - 1
    outside = not times.min_offset <= offset < times.max_offset
    if outside or number < 0 or int(runs["end_queue_offset"][number]) <= offset:
        return None
    if runs["min_store_timestamp"][number] == runs["max_store_timestamp"][number]:
        return int(runs["min_store_timestamp"][number])
    columns = await columns_of(number)
    row = int(np.searchsorted(columns.queue_offset, offset, side="right")) - 1
    return int(columns.store_timestamp[row])


async def earliest_time(times: QueueTimes, columns_of: ColumnsOf) -> int | None:
    """When the first message still there was stored, ms since the epoch; None for an empty queue.

    From the catalog alone, unless the queue's minimum lies inside a run.
    """
    runs = times.chunk.runs
    number = int(np.searchsorted(runs["end_queue_offset"], times.min_offset, side="right"))
    if number == len(runs):
        return None
    if int(runs["base_queue_offset"][number]) >= times.min_offset:
        return int(runs["min_store_timestamp"][number])
    return await timestamp_of(times, times.min_offset, columns_of)
