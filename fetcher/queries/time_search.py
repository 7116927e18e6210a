"""Offset by time, as a 5.x broker answers it, the time of an offset, and where the messages of a time range are.

LOWER: the first offset stored at or after the time, the queue's maximum after the last. UPPER: the last offset stored
at or before the time, the queue's minimum before the first. Where times do not ascend, as after a broker's clock was
ahead, the answer is that of the broker's own search (``_PlainSearch``); BatchCQ has one of its own (``_batch_row``).
The catalog's time ranges decide for whole runs; only a run whose range holds the time is opened. Where times ascend
these are two at most.

``TimeReader`` searches over a cached catalog version, or a recent one at a queue's end. Does not own requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fetcher.io.request_scheduler import Priority
from fetcher.rows.block_fetch import BlockSource
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.run_list import QueueView, RunList
from tiered.catalog.broker_facts import recorded_facts
from tiered.catalog.queue_gaps import QueueGaps
from tiered.catalog.state import EMPTY_CHUNK, CatalogState, RunChunk
from tiered.errors import CorruptionError, NotFoundError, UnavailableError
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.tables import GAP_DTYPE, QUEUE_BATCH, RunKind

FILE_ROWS, UNIT_BYTES = 300_000, 20
"""Messages in a broker's consume-queue file by default (mappedFileSizeConsumeQueue), and bytes of each there."""

IndexOpener = Callable[[str, int, int, int], Awaitable[SegmentIndex]]
"""(object key, size in bytes, bytes of its tail, run) -> the decoded tail, as far as it is needed for the run; at most
one request."""


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
    gaps: QueueGaps = field(default_factory=lambda: QueueGaps(np.zeros(0, GAP_DTYPE)))
    file_rows: int = FILE_ROWS
    """Messages in a file of the broker's consume queue."""

    @classmethod
    def of(cls, state: CatalogState, queue: QueueKey, chunk: RunChunk) -> QueueTimes:
        """The times of ``queue`` at ``state``, whose runs are ``chunk``. Raises NotFoundError for an unknown queue."""
        row = state.queue(queue)
        if row is None:
            raise NotFoundError(f"{queue} is not in the archive", hint="tiered ls lists the queues")
        low, high = int(row["min_queue_offset"]), int(row["end_queue_offset"])
        gaps = QueueGaps(state.gaps_of(queue))
        file_rows = recorded_facts(state).consume_queue_file_bytes // UNIT_BYTES or FILE_ROWS
        return cls(queue, min(low, high), high, bool(row["flags"] & QUEUE_BATCH), chunk, gaps, file_rows)

    def ends_before(self, timestamp_ms: int) -> bool:
        """Whether the last messages may be stored at or before ``timestamp_ms``: then messages archived since this
        version may be the result."""
        return not len(self.chunk.runs) or int(self.chunk.runs["min_store_timestamp"][-1]) <= timestamp_ms

    def number_at(self, offset: int) -> int:
        """Number of the last run that begins at or before ``offset``, or -1."""
        return int(self.chunk.runs["base_queue_offset"].searchsorted(offset, side="right")) - 1

    @cached_property
    def first_row(self) -> NDArray[np.int64]:
        """Rows of the queue before each run; one more entry holds the number of all."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.chunk.runs["rows"])])


# -- one object's columns -------------------------------------------------------------------------------------


def columns_from(times: QueueTimes, open_index: IndexOpener) -> ColumnsOf:
    """A function that reads the offsets and store times of one run of the queue, given the run's number in ``times``.
    ``open_index`` opens the tail of the object that holds the run.

    The function raises CorruptionError when the object does not hold the run that the catalog names, or what
    ``open_index`` raises.
    """
    runs = RunList(times.queue, times.chunk)

    async def columns_of(number: int) -> TimeColumns:
        place = runs.place(number)
        index = await open_index(place.object_key, place.size_bytes, place.tail_bytes, place.ordinal)
        place.check(index)
        rows = index.row_columns(place)
        return TimeColumns(rows.queue_offset, rows.store_timestamp)

    return columns_of


# -- offset by time -------------------------------------------------------------------------------------------


async def offset_by_time(
    times: QueueTimes, timestamp_ms: int, boundary: Boundary, columns_of: ColumnsOf
) -> int:
    """The queue offset that a 5.x broker returns for ``timestamp_ms``, moved into the queue's bounds where the broker
    would return one outside. ``boundary``: LOWER finds the first message not before the time, UPPER the last one not
    after it."""
    if times.gaps.after(times.min_offset) >= times.max_offset:
        return times.min_offset
    if times.is_batch:
        found = await _batch_offset(times, timestamp_ms, boundary, columns_of)
    else:
        search = _PlainSearch(times, timestamp_ms, columns_of)
        found = await (search.lower() if boundary is Boundary.LOWER else search.upper())
    return min(max(found, times.min_offset), times.max_offset)


class _PlainSearch:
    """A binary search over the offsets of one consume-queue file, which is chosen by the times at its ends; step for
    step ConsumeQueue.getOffsetInQueueByTime and MappedFileQueue.getConsumeQueueMappedFileByTime. ``times`` may lack
    runs at its begin that are all earlier, and runs before those in memory that are all later."""

    def __init__(self, times: QueueTimes, timestamp_ms: int, columns_of: ColumnsOf) -> None:
        self._times, self._time_ms, self._columns_of = times, timestamp_ms, columns_of
        self._first = times.gaps.after(times.min_offset)
        self._last = times.gaps.before(times.max_offset - 1)

    async def lower(self) -> int:
        """The offset of the first message stored at or after the time: a binary search in the first file whose last
        message is not earlier. The queue's maximum if all are earlier."""
        first, last = self._first, self._last
        file_rows = self._times.file_rows
        for file in range(first // file_rows, last // file_rows + 1):
            first, last = self._ends(file)
            if first <= last and await self._order(last) >= 0:
                break
        else:
            return self._times.max_offset
        if await self._order(first) > 0:
            return first
        found, low, high = last, first, last
        while low <= high:
            middle = self._times.gaps.after((low + high) // 2)
            order = await self._order(middle) if middle <= last else 1
            if order == 0:
                return await self._edge(middle, -1, first)
            if order < 0:
                low = middle + 1
            else:
                found, high = min(middle, last), (low + high) // 2 - 1
        return found

    async def upper(self) -> int:
        """The offset of the last message stored at or before the time: a binary search in the last file whose first
        message is not later. The queue's minimum if all are later."""
        first, last = self._first, self._last
        file_rows = self._times.file_rows
        for file in range(last // file_rows, first // file_rows - 1, -1):
            first, last = self._ends(file)
            if first <= last and await self._order(first) <= 0:
                break
        else:
            return self._times.min_offset
        if await self._order(last) < 0:
            return last
        found, low, high = first, first, last
        while low <= high:
            middle = self._times.gaps.after((low + high) // 2)
            order = await self._order(middle) if middle <= last else 1
            if order == 0:
                return await self._edge(middle, 1, last)
            if order < 0:
                found, low = middle, middle + 1
            else:
                high = (low + high) // 2 - 1
        return found

    def _ends(self, file: int) -> tuple[int, int]:
        """First and last offset with a record in a file; the first is larger for one without any."""
        gaps, file_rows = self._times.gaps, self._times.file_rows
        begin, end = file * file_rows, (file + 1) * file_rows - 1
        return gaps.after(max(begin, self._first)), gaps.before(min(end, self._last))

    async def _order(self, offset: int) -> int:
        """-1, 0 or 1: the message at ``offset`` was stored before, at or after the time that is searched for. An offset
        in front of all runs counts as before, one behind them as after."""
        runs, number = self._times.chunk.runs, self._times.number_at(offset)
        if number < 0:
            return -1
        if int(runs["end_queue_offset"][number]) <= offset:
            return 1
        low, high = int(runs["min_store_timestamp"][number]), int(runs["max_store_timestamp"][number])
        if high < self._time_ms or low > self._time_ms or low == high:
            return _sign(low, self._time_ms)
        columns = await self._columns_of(number)
        return _sign(int(columns.store_timestamp[_row_of(columns, offset)]), self._time_ms)

    async def _edge(self, offset: int, step: int, bound: int) -> int:
        """From ``offset``, whose message was stored exactly at the time, continue towards ``bound`` (down if ``step``
        is -1, up if it is 1) as long as messages were stored at the time. Returns the last offset of these.

        Whole runs are passed by their times in the catalog; objects are opened only where a run has several times.
        """
        runs, gaps = self._times.chunk.runs, self._times.gaps
        while True:
            number = self._times.number_at(offset)
            bound_name = "base_queue_offset" if step < 0 else "end_queue_offset"
            edge = int(runs[bound_name][number]) - (step > 0)
            if runs["min_store_timestamp"][number] != runs["max_store_timestamp"][number]:
                columns = await self._columns_of(number)
                row = _row_of(columns, offset)
                others = np.flatnonzero(columns.store_timestamp != self._time_ms)
                others = others[others < row] if step < 0 else others[others > row]
                if len(others):
                    nearest = int(others[-1] if step < 0 else others[0]) - step
                    edge = int(columns.queue_offset[nearest])
                    return max(edge, bound) if step < 0 else min(edge, bound)
            if (edge - bound) * step >= 0:
                return bound
            following = gaps.before(edge - 1) if step < 0 else gaps.after(edge + 1)
            if (following - bound) * step > 0 or await self._order(following) != 0:
                return edge
            offset = following


def _row_of(columns: TimeColumns, offset: int) -> int:
    """The row that holds ``offset``: of a run with holes, the first at or after it."""
    return min(int(columns.queue_offset.searchsorted(offset)), len(columns.queue_offset) - 1)


# -- the messages of a time range -----------------------------------------------------------------------------


async def next_part(
    times: QueueTimes, offset: int, range_ms: tuple[int, int], columns_of: ColumnsOf
) -> tuple[int, int] | None:
    """The first offsets [begin, end), at or after ``offset``, that hold messages stored within ``range_ms``, which is
    [begin, end) in ms since the epoch. None if no run in ``times`` has such a message.

    Messages of other times may lie between them, as store times need not ascend; the reader leaves these out. Objects
    are opened only for runs that lie partly within the time range.
    """
    runs, (since_ms, until_ms) = times.chunk.runs, range_ms
    is_left = runs["end_queue_offset"] > offset
    touching = (runs["max_store_timestamp"] >= since_ms) & (runs["min_store_timestamp"] < until_ms)
    outside = (runs["min_store_timestamp"] < since_ms) | (runs["max_store_timestamp"] >= until_ms)
    for number in np.flatnonzero(touching & is_left).tolist():
        base, end = int(runs["base_queue_offset"][number]), int(runs["end_queue_offset"][number])
        if not outside[number]:
            others = np.flatnonzero(outside[number:])
            last = number + int(others[0]) - 1 if len(others) else len(runs) - 1
            # All runs up to the next one with other times are taken together. A recorded gap between ``offset`` and
            # the first remaining run is included, so that the reader reports it.
            begin = offset if number == int(np.argmax(is_left)) else base
            return begin, int(runs["end_queue_offset"][last])
        columns = await columns_of(number)
        ends = np.append(columns.queue_offset[1:], end)
        wanted = (columns.store_timestamp >= since_ms) & (columns.store_timestamp < until_ms)
        rows = np.flatnonzero(wanted & (ends > offset))
        if len(rows):
            return max(offset, int(columns.queue_offset[rows[0]])), int(ends[rows[-1]])
    return None


async def _batch_offset(
    times: QueueTimes, timestamp_ms: int, boundary: Boundary, columns_of: ColumnsOf
) -> int:
    """Base offset of the batch that a broker would find for the time; -1 where its search finds none.

    Each batch is a row, numbered across the ``runs`` of the queue.
    """
    runs, first_row = times.chunk.runs, times.first_row

    def run_of(row: int) -> int:
        return int(np.searchsorted(first_row, row, side="right")) - 1

    async def cell(row: int, name: str) -> int:
        number = run_of(row)
        columns = await columns_of(number)
        column: NDArray[np.int64] = getattr(columns, name)
        return int(column[row - int(first_row[number])])

    async def compare(row: int) -> int:
        """-1, 0 or 1: the row was stored before, at or after the time. An object is opened only if the time lies
        between the first and the last store time of its run."""
        number = run_of(row)
        low, high = int(runs["min_store_timestamp"][number]), int(runs["max_store_timestamp"][number])
        if high < timestamp_ms or low > timestamp_ms or low == high:
            return _sign(low, timestamp_ms)
        return _sign(await cell(row, "store_timestamp"), timestamp_ms)

    row = await _batch_row(int(first_row[-1]), boundary, compare)
    if row is None:
        return -1
    number = run_of(row)
    if int(first_row[number]) == row:  # the catalog has its offset
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
    """When the message at ``offset`` was stored, in ms since the epoch; None if the offset is outside the queue's
    bounds or in a gap. At an offset that key compaction dropped: the time of the next message."""
    runs = times.chunk.runs
    number = int(np.searchsorted(runs["base_queue_offset"], offset, side="right")) - 1
    outside = not times.min_offset <= offset < times.max_offset
    if outside or number < 0 or int(runs["end_queue_offset"][number]) <= offset:
        return None
    if runs["min_store_timestamp"][number] == runs["max_store_timestamp"][number]:
        return int(runs["min_store_timestamp"][number])
    columns = await columns_of(number)
    if runs["kind"][number] == RunKind.SPARSE:
        row = _row_of(columns, offset)
    else:
        row = int(np.searchsorted(columns.queue_offset, offset, side="right")) - 1
    return int(columns.store_timestamp[row])


async def earliest_time(times: QueueTimes, columns_of: ColumnsOf) -> int | None:
    """When the first message of the queue that has not expired was stored, in ms since the epoch; None for an empty
    queue. An object is opened only if the queue's minimum offset lies inside a run.
    """
    runs = times.chunk.runs
    number = int(np.searchsorted(runs["end_queue_offset"], times.min_offset, side="right"))
    if number == len(runs):
        return None
    if int(runs["base_queue_offset"][number]) >= times.min_offset:
        return int(runs["min_store_timestamp"][number])
    return await timestamp_of(times, times.min_offset, columns_of)


T = TypeVar("T")


class TimeReader:
    """Searches by time. Coroutines of the core (waiting.py). Raise NotFoundError for an unknown queue, CorruptionError,
    or what the store raises."""

    def __init__(self, catalog: CatalogView, source: BlockSource) -> None:
        self._catalog = catalog
        self._source = source

    async def offset_by_time(self, queue: QueueKey, timestamp_ms: int, boundary: Boundary) -> int:
        """The queue offset that a 5.x broker returns for a time.

        While the catalog cannot be read, the version read last answers: messages archived since are later, so a reader
        that starts at the result misses none.
        """
        return await self._answered(
            queue,
            lambda times, columns_of: offset_by_time(times, timestamp_ms, boundary, columns_of),
            lambda times: times.ends_before(timestamp_ms),
            partial(self._runs_across, timestamp_ms=timestamp_ms),
            is_stale_allowed=True,
        )

    async def next_part(
        self, queue: QueueKey, offset: int, range_ms: tuple[int, int]
    ) -> tuple[int, int] | None:
        """The next offsets [begin, end), at or after ``offset``, that may hold messages stored within ``range_ms``
        (begin and end in ms since the epoch); a reader of a time range passes over all others.

        None if the archive has no such message yet: before that is said, the newest catalog version is read.
        """

        async def read(state: CatalogState) -> tuple[int, int] | None:
            found = await self._next_part(self._view(state, queue), offset, range_ms)
            if found is None and (recent := await self._catalog.recent()) is not state:
                found = await self._next_part(self._view(recent, queue), offset, range_ms)
            return found

        self._catalog.refresh_if_due()
        return await self._catalog.read(self._catalog.state, read, name=str(queue), queue=queue)

    async def _next_part(
        self, view: QueueView, offset: int, range_ms: tuple[int, int]
    ) -> tuple[int, int] | None:
        """``TimeReader.next_part`` at the catalog version of ``view``: loads the queue's runs chunk by chunk and
        returns the first offsets found in one."""
        last = await self._catalog.runs_by_time(view, range_ms[1] - 1, is_lower=False)
        ends = last.runs["end_queue_offset"][last.runs["min_store_timestamp"] < range_ms[1]]
        if offset <= view.min_offset:
            first = await self._catalog.runs_by_time(view, range_ms[0], is_lower=True)
            begins = first.runs["base_queue_offset"][first.runs["max_store_timestamp"] >= range_ms[0]]
            if not len(begins):
                return None
            offset = max(view.min_offset, int(begins[0]))
        while len(ends) and (at := view.existing(offset)) < min(int(ends[-1]), view.max_offset):
            chunk = (await self._catalog.runs_of(view, at)).around(at)
            if not len(chunk.runs):
                raise CorruptionError(f"{view.queue}: offset {at} is in no segment and in no recorded gap")
            times = QueueTimes.of(view.state, view.queue, chunk)
            found = await next_part(times, offset, range_ms, columns_from(times, self._open))
            if found is not None:
                return found
            offset = int(chunk.runs["end_queue_offset"][-1])
        return None

    async def timestamp_of(self, queue: QueueKey, offset: int) -> int | None:
        """When the message at ``offset`` was stored, in ms since the epoch; None if the queue has no message there.
        An offset at or above the queue's maximum is looked up in the newest catalog version."""
        return await self._answered(
            queue,
            lambda times, columns_of: timestamp_of(times, offset, columns_of),
            lambda times: offset >= times.max_offset,
            partial(self._runs_at, offset=offset),
        )

    async def earliest_time(self, queue: QueueKey) -> int | None:
        """When the first message was stored, ms since the epoch; None for an empty queue."""
        return await self._answered(
            queue, earliest_time, lambda times: times.min_offset == times.max_offset, self._first_runs
        )

    async def _answered(
        self,
        queue: QueueKey,
        ask: Callable[[QueueTimes, ColumnsOf], Coroutine[Any, Any, T]],
        is_at_end: Callable[[QueueTimes], bool],
        runs_of: Callable[[QueueView], Coroutine[Any, Any, RunChunk]],
        *,
        is_stale_allowed: bool = False,
    ) -> T:
        """Answer a question about a queue's times by the catalog version read last, or by the newest one where messages
        archived since could change the answer.

        ``ask`` computes the answer from the runs that ``runs_of`` loads; ``is_at_end`` tells whether newer messages
        could change it. With ``is_stale_allowed`` the version read last answers while the catalog cannot be read.
        """

        async def read(state: CatalogState) -> T:
            times = await self._times(state, queue, runs_of)
            if is_at_end(times):
                times = await self._times(await self._recent(is_stale_allowed), queue, runs_of)
            return await ask(times, columns_from(times, self._open))

        self._catalog.refresh_if_due()
        return await self._catalog.read(self._catalog.state, read, name=str(queue), queue=queue)

    async def _recent(self, is_stale_allowed: bool) -> CatalogState:
        try:
            return await self._catalog.recent()
        except UnavailableError:
            if not is_stale_allowed:
                raise
            return self._catalog.state

    async def _runs_across(self, view: QueueView, timestamp_ms: int) -> RunChunk:
        if view.is_batch:
            return await self._catalog.all_runs_of(view)  # the broker's search depends on the number of rows
        return await self._catalog.runs_across(view, timestamp_ms)

    async def _runs_at(self, view: QueueView, offset: int) -> RunChunk:
        if not view.min_offset <= offset < view.max_offset or view.existing(offset) != offset:
            return EMPTY_CHUNK
        return (await self._catalog.runs_of(view, offset)).around(offset)

    async def _first_runs(self, view: QueueView) -> RunChunk:
        return await self._runs_at(view, view.existing(view.min_offset))

    async def _times(
        self,
        state: CatalogState,
        queue: QueueKey,
        runs_of: Callable[[QueueView], Coroutine[Any, Any, RunChunk]],
    ) -> QueueTimes:
        return QueueTimes.of(state, queue, await runs_of(self._view(state, queue)))

    def _view(self, state: CatalogState, queue: QueueKey) -> QueueView:
        view = self._catalog.view(state, queue)
        if view is None:
            raise NotFoundError(f"{queue} is not in the archive", hint="tiered ls lists the queues")
        return view

    def _open(self, key: str, size_bytes: int, tail_bytes: int, ordinal: int) -> Awaitable[SegmentIndex]:
        return self._source.index(key, size_bytes, tail_bytes, Priority.USER, ordinal)
