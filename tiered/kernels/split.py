"""Splitting scanned rows by queue and cutting them into runs of consecutive queue offsets.

Owns the stable counting sort that touches only the queues present (100 rows among 100,000 queues cost 100
steps), and the run boundaries. Oracles: ``tests.kernels.oracle.split_by_queue`` and ``cut_runs``. Does not
decide what a jump in queue offsets means: gap, re-read or new generation is the dispatcher's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.jit import Int, kernel
from tiered.kernels.record_columns import FLAG_BATCH, RecordColumns


class SplitScratch:
    """Memory of the splitter, kept between cycles: one counter per queue, all zero outside a call."""

    def __init__(self) -> None:
        self.counts = np.zeros(64, np.int32)

    def for_queues(self, queue_count: int) -> NDArray[np.int32]:
        """Counters for ordinals below ``queue_count``."""
        if queue_count > len(self.counts):
            self.counts = np.zeros(max(queue_count, 2 * len(self.counts)), np.int32)
        return self.counts


@dataclass(frozen=True)
class QueueSplit:
    """Rows grouped by queue: those of ``queues[i]`` are ``order[starts[i]:starts[i + 1]]``, in log order.

    ``queues`` holds the ordinals present, ascending; ``order`` holds row numbers (light-queue rows: numbers
    into the ``lmq_*`` columns).
    """

    queues: NDArray[np.int32]
    starts: NDArray[np.int64]
    order: NDArray[np.int32]


@dataclass(frozen=True)
class RunCuts:
    """Maximal runs of consecutive queue offsets, by queue, in log order within a queue. One entry per run.

    A run's rows are ``order[first[i] : first[i] + rows[i]]`` of the split it was cut from. ``byte_count`` is
    the sum of record sizes, timestamps are store timestamps in ms, ``end_phys`` is the largest physical end,
    ``batch`` says whether any row is an inner batch.
    """

    queue: NDArray[np.int32]
    batch: NDArray[np.uint8]
    first: NDArray[np.int64]
    rows: NDArray[np.int64]
    base_queue_offset: NDArray[np.int64]
    end_queue_offset: NDArray[np.int64]
    byte_count: NDArray[np.int64]
    min_store_timestamp: NDArray[np.int64]
    max_store_timestamp: NDArray[np.int64]
    min_phys: NDArray[np.int64]
    end_phys: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.queue)


def split_by_queue(
    queue: NDArray[np.int32], rows: int, queue_count: int, scratch: SplitScratch
) -> QueueSplit:
    """Group the first ``rows`` entries of ``queue``, ordinals below ``queue_count``, stably."""
    if rows > len(queue) or (
        rows and not 0 <= int(queue[:rows].min()) <= int(queue[:rows].max()) < queue_count
    ):
        raise ValueError(f"{rows} rows of {len(queue)}, or an ordinal outside {queue_count} queues")
    present = np.empty(min(rows, queue_count), np.int32)
    counts = scratch.for_queues(queue_count)
    found = _count_queues(queue, rows, counts, present)
    present = np.sort(present[:found])
    starts = np.empty(found + 1, np.int64)
    order = np.empty(rows, np.int32)
    _place_rows(queue, rows, counts, present, starts, order)
    return QueueSplit(present, starts, order)


def cut_runs(split: QueueSplit, columns: RecordColumns) -> RunCuts:
    """Runs of stored records; ``split`` is of ``columns.queue``. Inner batches span ``inner_num`` offsets."""
    return _cut(split, columns, columns.queue_offset, _EVERY_ROW)


def cut_lmq_runs(split: QueueSplit, columns: RecordColumns) -> RunCuts:
    """Runs of light-queue references; ``split`` is of ``columns.lmq_queue``.

    Sizes, timestamps and physical offsets are those of the records referred to.
    """
    return _cut(split, columns, columns.lmq_queue_offset, columns.lmq_row)


_EVERY_ROW = np.zeros(0, np.int32)
"""Stands for "row i is record i"."""


def _cut(
    split: QueueSplit, columns: RecordColumns, queue_offset: NDArray[np.int64], record: NDArray[np.int32]
) -> RunCuts:
    where = (split.starts, split.order, queue_offset, record, columns.inner_num)
    count = int(_count_runs(*where))
    queue, batch = np.empty(count, np.int32), np.empty(count, np.uint8)
    numbers = np.empty((_RUN_NUMBERS, count), np.int64)
    _fill_runs(split.queues, *where, columns.size, columns.phys, columns.store_timestamp, columns.flags,
               queue, numbers, batch)  # fmt: skip
    return RunCuts(queue, batch, *numbers)


@kernel
def _count_queues(
    queue: NDArray[np.int32], rows: Int, counts: NDArray[np.int32], present: NDArray[np.int32]
) -> Int:
    found = 0
    for row in range(rows):
        ordinal = queue[row]
        if counts[ordinal] == 0:
            present[found] = ordinal
            found += 1
        counts[ordinal] += 1
    return found


@kernel
def _place_rows(
    queue: NDArray[np.int32],
    rows: Int,
    counts: NDArray[np.int32],
    present: NDArray[np.int32],
    starts: NDArray[np.int64],
    order: NDArray[np.int32],
) -> None:
    """Counts become cursors, rows are placed, the counters used are cleared."""
    total = 0
    for index in range(len(present)):
        starts[index] = total
        count = counts[present[index]]
        counts[present[index]] = total
        total += count
    starts[len(present)] = total
    for row in range(rows):
        ordinal = queue[row]
        order[counts[ordinal]] = row
        counts[ordinal] += 1
    for index in range(len(present)):
        counts[present[index]] = 0


@kernel
def _span_of(record: NDArray[np.int32], inner_num: NDArray[np.int32], row: Int) -> Int:
    """Queue offsets a row covers: a light-queue reference is always one."""
    return np.int64(1) if len(record) > 0 else np.int64(inner_num[row])


@kernel
def _count_runs(
    starts: NDArray[np.int64],
    order: NDArray[np.int32],
    queue_offset: NDArray[np.int64],
    record: NDArray[np.int32],
    inner_num: NDArray[np.int32],
) -> Int:
    count = 0
    for index in range(len(starts) - 1):
        expected = np.int64(0)
        for at in range(starts[index], starts[index + 1]):
            row = np.int64(order[at])
            if at == starts[index] or queue_offset[row] != expected:
                count += 1
            expected = queue_offset[row] + _span_of(record, inner_num, row)
    return count


@kernel
def _fill_runs(
    queues: NDArray[np.int32],
    starts: NDArray[np.int64],
    order: NDArray[np.int32],
    queue_offset: NDArray[np.int64],
    record: NDArray[np.int32],
    inner_num: NDArray[np.int32],
    size: NDArray[np.int32],
    phys: NDArray[np.int64],
    store_timestamp: NDArray[np.int64],
    flags: NDArray[np.uint32],
    run_queue: NDArray[np.int32],
    numbers: NDArray[np.int64],
    batch: NDArray[np.uint8],
) -> None:
    run = -1
    for index in range(len(queues)):
        expected = np.int64(0)
        for at in range(starts[index], starts[index + 1]):
            row = np.int64(order[at])
            source = np.int64(record[row]) if len(record) > 0 else row
            offset, timestamp, begin = queue_offset[row], store_timestamp[source], phys[source]
            if at == starts[index] or offset != expected:
                run += 1
                run_queue[run], batch[run] = queues[index], 0
                numbers[_FIRST, run], numbers[_ROWS, run] = at, 0
                numbers[_BASE, run], numbers[_BYTES, run] = offset, 0
                numbers[_MIN_TIME, run], numbers[_MAX_TIME, run] = timestamp, timestamp
                numbers[_MIN_PHYS, run], numbers[_END_PHYS, run] = begin, begin
            expected = offset + _span_of(record, inner_num, row)
            numbers[_END, run] = expected
            numbers[_ROWS, run] += 1
            numbers[_BYTES, run] += size[source]
            numbers[_MIN_TIME, run] = min(numbers[_MIN_TIME, run], timestamp)
            numbers[_MAX_TIME, run] = max(numbers[_MAX_TIME, run], timestamp)
            numbers[_MIN_PHYS, run] = min(numbers[_MIN_PHYS, run], begin)
            numbers[_END_PHYS, run] = max(numbers[_END_PHYS, run], begin + size[source])
            if flags[source] & FLAG_BATCH:
                batch[run] = 1


# Rows of ``numbers``, in the order of RunCuts.
_FIRST, _ROWS, _BASE, _END, _BYTES, _MIN_TIME, _MAX_TIME, _MIN_PHYS, _END_PHYS = range(9)
_RUN_NUMBERS = 9
