"""Offset by time over any cut into runs: equal to a search of every row, and few objects opened where times ascend.

Searches by time read the pages of the catalog that decide, and answer as if all of them had been read.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.io.waiting import InlineExecutor, run_sync
from fetcher.queries.time_search import (
    Boundary,
    QueueTimes,
    TimeColumns,
    TimeReader,
    columns_from,
    earliest_time,
    next_part,
    offset_by_time,
    timestamp_of,
)
from fetcher.rows.catalog_view import CatalogView
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.object_store.fault_store import FaultStore
from tiered.archive.segment_reader import SegmentCache
from tiered.catalog.pages import RunIndex
from tiered.catalog.queue_gaps import QueueGaps
from tiered.catalog.state import RunChunk
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.errors import CorruptionError, NotFoundError
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.tables import GAP_DTYPE, OBJECT_DTYPE, RUN_DTYPE
from tiered.object_store.memory import MemoryStore

QUEUE = QueueKey("t", 0, 0)
LOWER, UPPER = Boundary.LOWER, Boundary.UPPER


@dataclass
class Rows:
    """A queue whose rows are at hand, and which of its runs were opened."""

    times: QueueTimes
    columns: list[TimeColumns]
    opened: set[int] = field(default_factory=set)

    async def columns_of(self, number: int) -> TimeColumns:
        self.opened.add(number)
        return self.columns[number]

    def find(self, timestamp_ms: int, boundary: Boundary) -> int:
        self.opened.clear()
        return run_sync(offset_by_time(self.times, timestamp_ms, boundary, self.columns_of))


def queue_of(
    runs: Sequence[Sequence[tuple[int, int]]],
    *,
    base: int = 0,
    gaps: Sequence[int] = (),
    is_batch: bool = False,
    min_offset: int | None = None,
) -> Rows:
    """Runs of (store timestamp, offsets the row spans); ``gaps[i]`` offsets are missing before run i."""
    table = np.zeros(len(runs), RUN_DTYPE)
    columns = []
    offset = base
    missing = np.zeros(len(runs), GAP_DTYPE)
    for number, rows in enumerate(runs):
        missing[number]["begin_queue_offset"] = offset
        offset += gaps[number] if number < len(gaps) else 0
        missing[number]["end_queue_offset"] = offset
        stamps = np.array([stamp for stamp, _ in rows], np.int64)
        spans = np.array([span for _, span in rows], np.int64)
        columns.append(TimeColumns(offset + np.cumsum(spans) - spans, stamps))
        run = table[number]
        run["base_queue_offset"], run["end_queue_offset"] = offset, offset + spans.sum()
        run["rows"], offset = len(rows), int(run["end_queue_offset"])
        run["min_store_timestamp"], run["max_store_timestamp"] = stamps.min(), stamps.max()
    low = base if min_offset is None else min_offset
    chunk = RunChunk(table, np.zeros(0, OBJECT_DTYPE), ())
    lost = QueueGaps(missing[missing["end_queue_offset"] > missing["begin_queue_offset"]])
    return Rows(QueueTimes(QUEUE, low, offset, is_batch, chunk, lost), columns)


def test_the_example_of_the_documentation_as_the_broker_itself_answers_it() -> None:
    """40, 50, 50, 50, 60, 60, 70 at offsets 10 to 16. The Java tiered store differs where no message has the time."""
    stamps = [(stamp, 1) for stamp in (40, 50, 50, 50, 60, 60, 70)]
    expected = {
        35: (10, 10),
        40: (10, 10),
        45: (11, 10),
        50: (11, 13),
        55: (14, 13),
        60: (14, 15),
        65: (16, 15),
        70: (16, 16),
        75: (17, 16),
    }
    for cut in range(1, 7):
        rows = queue_of([stamps[:cut], stamps[cut:]], base=10)
        found = {t: (rows.find(t, LOWER), rows.find(t, UPPER)) for t in expected}
        assert found == expected, cut


@st.composite
def queues(
    draw: st.DrawFn, *, is_batch: bool = False, ascending: bool = True, with_gaps: bool = True
) -> Rows:
    """A queue of up to six runs; few different times, so that many are equal."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    stamps = draw(st.lists(st.integers(0, 30), min_size=sum(sizes), max_size=sum(sizes)))
    spans = draw(st.lists(st.integers(1, 5 if is_batch else 1), min_size=len(stamps), max_size=len(stamps)))
    if ascending:
        stamps.sort()
    ends = np.cumsum(sizes).tolist()
    rows = list(zip(stamps, spans, strict=True))
    gaps = draw(st.lists(st.integers(0, 3), max_size=len(sizes))) if with_gaps else []
    runs = [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return queue_of(runs, base=draw(st.integers(0, 50)), gaps=[0, *gaps], is_batch=is_batch)


def every_row(rows: Rows) -> list[tuple[int, int]]:
    """(queue offset, store timestamp)."""
    return [
        pair
        for columns in rows.columns
        for pair in zip(columns.queue_offset.tolist(), columns.store_timestamp.tolist(), strict=True)
    ]


@given(queues(), st.integers(-1, 31))
def test_plain_queues_answer_like_a_search_of_every_row(rows: Rows, timestamp_ms: int) -> None:
    at_or_after = [offset for offset, stamp in every_row(rows) if stamp >= timestamp_ms]
    at_or_before = [offset for offset, stamp in every_row(rows) if stamp <= timestamp_ms]
    assert rows.find(timestamp_ms, LOWER) == min(at_or_after, default=rows.times.max_offset)
    assert len(rows.opened) <= 2
    assert rows.find(timestamp_ms, UPPER) == max(at_or_before, default=rows.times.min_offset)
    assert len(rows.opened) <= 2


def java_search(
    stamps: dict[int, int], low: int, timestamp_ms: int, boundary: Boundary, file_rows: int
) -> int:
    """MappedFileQueue.getConsumeQueueMappedFileByTime and ConsumeQueue.binarySearchInQueueByTime, written out.
    ``stamps``: store time by offset, from ``low`` on."""
    last = max(stamps)
    files = list(range(low // file_rows, last // file_rows + 1))
    if boundary is LOWER:
        stops = [file for file in files[:-1] if stamps[(file + 1) * file_rows - 1] >= timestamp_ms]
        file = (stops or files[-1:])[0]
    else:
        starts = [file for file in files if stamps[max(file * file_rows, low)] <= timestamp_ms]
        if not starts:
            return low
        file = starts[-1]
    floor, ceiling = max(file * file_rows, low), min((file + 1) * file_rows - 1, last)
    if stamps[ceiling] < timestamp_ms:
        return ceiling + 1 if boundary is LOWER else ceiling
    if stamps[floor] > timestamp_ms:
        return floor if boundary is LOWER else low
    left = right = -1
    begin, end = floor, ceiling
    while end >= begin:
        middle = (begin + end) // 2
        if stamps[middle] == timestamp_ms:
            step = -1 if boundary is LOWER else 1
            while floor <= middle + step <= ceiling and stamps[middle + step] == timestamp_ms:
                middle += step
            return middle
        if stamps[middle] > timestamp_ms:
            end, right = middle - 1, middle
        else:
            begin, left = middle + 1, middle
    return right if boundary is LOWER else left


@given(
    queues(ascending=False, with_gaps=False),
    st.integers(0, 6),
    st.integers(-1, 31),
    st.sampled_from(Boundary),
    st.integers(1, 20),
)
def test_times_in_any_order_are_searched_as_the_broker_does(
    rows: Rows, expired: int, timestamp_ms: int, boundary: Boundary, file_rows: int
) -> None:
    times = rows.times
    low = min(times.min_offset + expired, times.max_offset - 1)
    later = Rows(replace(times, min_offset=low, file_rows=file_rows), rows.columns)
    stamps = {offset: stamp for offset, stamp in every_row(rows) if offset >= low}
    expected = java_search(stamps, low, timestamp_ms, boundary, file_rows)
    assert later.find(timestamp_ms, boundary) == expected


def test_a_clock_that_was_ahead_is_searched_as_a_5_5_0_broker_answers() -> None:
    """100 messages 40 days ago, one of 2050, 100 each 38 and 30 days ago; searched for 33 days and one day ago."""
    day = 86_400_000
    runs = [[(number, 1) for number in range(100)], [(9_000 * day, 1)]]
    runs += [[(days * day + number, 1) for number in range(100)] for days in (2, 10)]
    rows = queue_of(runs)
    assert (rows.find(7 * day, LOWER), rows.find(39 * day, LOWER)) == (201, 301)
    assert rows.find(7 * day, UPPER) == 200


@given(
    queues(ascending=False) | queues(is_batch=True, ascending=False), st.integers(-1, 31), st.integers(0, 15)
)
def test_parts_of_a_time_range_hold_all_its_messages(rows: Rows, since_ms: int, length_ms: int) -> None:
    times, range_ms = rows.times, (since_ms, since_ms + length_ms)
    parts, offset = [], times.min_offset
    while (part := run_sync(next_part(times, offset, range_ms, rows.columns_of))) is not None:
        assert offset <= part[0] < part[1] <= times.max_offset
        parts.append(part)
        offset = part[1]
    for offset, stamp in every_row(rows):
        if since_ms <= stamp < since_ms + length_ms:
            assert any(begin <= offset < end for begin, end in parts)
    if length_ms == 0:
        assert not parts


def java_batch_search(stamps: Sequence[int], timestamp_ms: int, boundary: Boundary) -> int | None:
    """BatchConsumeQueue.binarySearchRight, written out over all rows."""
    if timestamp_ms >= stamps[-1]:
        return len(stamps) - 1
    left, right = 0, len(stamps) - 1
    while left <= right:
        middle = (left + right) // 2
        value = stamps[middle]
        if middle == right:
            return middle if value >= timestamp_ms else None
        if middle == left:
            if value >= timestamp_ms:
                return middle
            left = middle + 1
        elif boundary is LOWER:
            if value < timestamp_ms:
                left = middle + 1
            else:
                right = middle
        elif value <= timestamp_ms:
            left = middle
        else:
            right = middle - 1
    return None


@given(queues(is_batch=True), st.integers(-1, 31), st.sampled_from(Boundary))
def test_batch_queues_answer_as_the_broker_searches(
    rows: Rows, timestamp_ms: int, boundary: Boundary
) -> None:
    every = every_row(rows)
    row = java_batch_search([stamp for _, stamp in every], timestamp_ms, boundary)
    expected = rows.times.min_offset if row is None else every[row][0]
    assert rows.find(timestamp_ms, boundary) == expected
    assert len(rows.opened) <= 2


@given(queues(is_batch=True), st.integers(-1, 31))
def test_lower_of_a_batch_queue_is_the_first_batch_or_the_last_one(rows: Rows, timestamp_ms: int) -> None:
    every = every_row(rows)
    last_offset, last_stamp = every[-1]
    expected = last_offset
    if timestamp_ms < last_stamp:
        expected = next(offset for offset, stamp in every if stamp >= timestamp_ms)
    assert rows.find(timestamp_ms, LOWER) == expected


@given(queues() | queues(is_batch=True), st.integers(0, 3), st.integers(-1, 31), st.sampled_from(Boundary))
def test_no_answer_lies_outside_the_queue(
    rows: Rows, expired: int, timestamp_ms: int, boundary: Boundary
) -> None:
    low = min(rows.times.min_offset + expired, rows.times.max_offset)
    later = Rows(replace(rows.times, min_offset=low), rows.columns)
    assert low <= later.find(timestamp_ms, boundary) <= rows.times.max_offset


def test_an_empty_queue_answers_its_minimum() -> None:
    rows = queue_of([], base=7)
    assert (rows.find(5, LOWER), rows.find(5, UPPER)) == (7, 7)
    assert run_sync(earliest_time(rows.times, rows.columns_of)) is None
    assert run_sync(timestamp_of(rows.times, 7, rows.columns_of)) is None


@given(queues() | queues(is_batch=True))
def test_the_time_of_every_offset_and_of_none_in_a_gap(rows: Rows) -> None:
    known: dict[int, int] = {}
    for (offset, stamp), (begin, end) in zip(every_row(rows), spans_of(rows), strict=True):
        assert begin == offset
        known |= dict.fromkeys(range(begin, end), stamp)
    for offset in range(rows.times.min_offset - 2, rows.times.max_offset + 2):
        assert run_sync(timestamp_of(rows.times, offset, rows.columns_of)) == known.get(offset)


def spans_of(rows: Rows) -> list[tuple[int, int]]:
    """[begin, end) of every row."""
    found = []
    for run, columns in zip(rows.times.chunk.runs, rows.columns, strict=True):
        begins = columns.queue_offset.tolist()
        found += list(zip(begins, [*begins[1:], int(run["end_queue_offset"])], strict=True))
    return found


def test_the_earliest_time_is_that_of_the_first_message_still_there() -> None:
    runs = [[(40, 1), (50, 1)], [(50, 1), (60, 1)]]
    for low, expected in ((0, 40), (1, 50), (2, 50), (3, 60), (4, None)):
        rows = queue_of(runs, min_offset=low)
        assert run_sync(earliest_time(rows.times, rows.columns_of)) == expected
        assert len(rows.opened) == int(low in (1, 3))


# -- on an archive --------------------------------------------------------------------------------------------


@pytest.fixture
def archive() -> ArchiveBuilder:
    """Two queues in one object."""
    builder = ArchiveBuilder(MemoryStore("memory://times"))
    builder.commit([Sent(QUEUE), Sent(QUEUE._replace(queue_id=1)), Sent(QUEUE)])
    return builder


def opener(builder: ArchiveBuilder) -> Any:
    """Opens objects of ``builder`` without waiting."""
    segments = SegmentCache(builder.store)

    async def open_index(key: str, size_bytes: int, tail_bytes: int, ordinal: int) -> SegmentIndex:
        return segments.open(key, size_bytes=size_bytes, tail_bytes=tail_bytes).index

    return open_index


def test_columns_come_from_the_object_the_catalog_names(archive: ArchiveBuilder) -> None:
    chunk = RunIndex(archive.store).runs_of(archive.state, QUEUE)
    columns = run_sync(columns_from(QueueTimes.of(archive.state, QUEUE, chunk), opener(archive))(0))
    assert columns.queue_offset.tolist() == [0, 1]
    assert columns.store_timestamp.tolist() == [NOW_MS, NOW_MS]


def test_an_object_with_another_queues_run_is_corrupt(archive: ArchiveBuilder) -> None:
    chunk = RunIndex(archive.store).runs_of(archive.state, QUEUE)
    other = QueueTimes.of(archive.state, QUEUE._replace(queue_id=1), chunk)
    with pytest.raises(CorruptionError, match="differs from the catalog"):
        run_sync(columns_from(other, opener(archive))(0))


def test_an_unknown_queue_does_not_exist(archive: ArchiveBuilder) -> None:
    with pytest.raises(NotFoundError, match="is not in the archive"):
        QueueTimes.of(
            archive.state, QueueKey("absent", 0, 0), RunIndex(archive.store).runs_of(archive.state, QUEUE)
        )


PLAIN, OTHER = QueueKey("plain", 0, 0), QueueKey("zother", 1, 0)


class Source:
    """Decoded tails of objects."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def index(
        self, key: str, size_bytes: int, tail_bytes: int, priority: object, ordinal: int | None = None
    ) -> SegmentIndex:
        return SegmentIndex(key, size_bytes, self._store.get_range(key, size_bytes - tail_bytes, tail_bytes))


def built(seed: int, cycles: int, jitter_ms: int) -> ArchiveBuilder:
    rand = random.Random(seed)
    limits = CatalogLimits(root_every=4, root_runs_max=6, page_runs_max=16, merge_sequences=3, merge_spills=3)
    builder = ArchiveBuilder(MemoryStore(), limits=limits)
    for cycle in range(cycles):
        now_ms = NOW_MS + cycle * 1_000
        stamps = [max(0, now_ms + rand.randint(-jitter_ms, jitter_ms)) for _ in range(2)]
        builder.commit([Sent(PLAIN, stored_ms=stamp) for stamp in stamps] + [Sent(OTHER, stored_ms=now_ms)])
    return builder


@pytest.mark.parametrize("jitter_ms", [0, 900, 20_000])
@pytest.mark.parametrize("cycles", [3, 57, 96])
def test_answers_are_those_of_all_runs(cycles: int, jitter_ms: int) -> None:
    builder = built(cycles, cycles, jitter_ms)
    source = Source(builder.store)
    view = CatalogView(builder.store, builder.state, executor=InlineExecutor(), clock=Clock())
    reader = TimeReader(view, source)
    runs = RunIndex(builder.store).runs_of(builder.state, PLAIN)
    times = QueueTimes.of(builder.state, PLAIN, runs)

    def opened(key: str, size_bytes: int, tail_bytes: int, ordinal: int):  # type: ignore[no-untyped-def]
        return source.index(key, size_bytes, tail_bytes, None, ordinal)

    columns_of = columns_from(times, opened)
    stamps = sorted({int(row.store_timestamp) for row in builder.truth[PLAIN].rows})
    for stamp in [0, stamps[0] - 1, *stamps[:: max(1, len(stamps) // 25)], stamps[-1], stamps[-1] + 1]:
        for boundary in Boundary:
            expected = run_sync(offset_by_time(times, stamp, boundary, columns_of))
            assert run_sync(reader.offset_by_time(PLAIN, stamp, boundary)) == expected, (stamp, boundary)
    for offset in range(-1, times.max_offset + 2, 3):
        assert run_sync(reader.timestamp_of(PLAIN, offset)) == run_sync(
            timestamp_of(times, offset, columns_of)
        )
    assert run_sync(reader.earliest_time(PLAIN)) == run_sync(earliest_time(times, columns_of))


def test_a_time_takes_a_page_or_two_whatever_the_history() -> None:
    builder = built(1, 300, 0)
    store = FaultStore(builder.store, (), wait=lambda seconds: None)
    pages = [page for page in builder.state.pages if page.first <= PLAIN <= page.last]
    assert len(pages) > 12
    for cycle in (0, 1, 100, 222, 298):
        for boundary in Boundary:
            view = CatalogView(store, builder.state, executor=InlineExecutor(), clock=Clock())
            before = len(store.requests)
            reader = TimeReader(view, Source(builder.store))
            found = run_sync(reader.offset_by_time(PLAIN, NOW_MS + cycle * 1_000, boundary))
            assert found == 2 * cycle + (boundary is Boundary.UPPER)
            assert len(store.requests) - before <= 3
