"""Split and run cutting against the oracle, and their cost when few of many queues are present."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import oracle
from tests.kernels.record_builder import Message, build_log, properties
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.scan import FLAG_BATCH, RecordColumns, scan_log
from tiered.kernels.split import RunCuts, SplitScratch, cut_lmq_runs, cut_runs, split_by_queue

SCRATCH = SplitScratch()


@given(st.lists(st.integers(0, 40)))
def test_split_is_a_stable_grouping(queues: list[int]) -> None:
    split = split_by_queue(np.array(queues, np.int32), len(queues), 41, SCRATCH)
    expected = oracle.split_by_queue(queues)
    assert split.queues.tolist() == list(expected)
    groups = [
        split.order[begin:end].tolist() for begin, end in zip(split.starts, split.starts[1:], strict=False)
    ]
    assert groups == list(expected.values())
    assert not SCRATCH.counts.any()


def test_split_takes_only_the_first_rows() -> None:
    split = split_by_queue(np.array([1, 0, 7], np.int32), 2, 2, SCRATCH)
    assert split.queues.tolist() == [0, 1]


@pytest.mark.parametrize("queues", [[5], [-1]])
def test_an_ordinal_outside_the_table_is_refused(queues: list[int]) -> None:
    with pytest.raises(ValueError, match="ordinal"):
        split_by_queue(np.array(queues, np.int32), 1, 5, SCRATCH)


def scan(messages: list[Message]) -> tuple[RecordColumns, QueueTable]:
    log, table, columns = np.frombuffer(build_log(messages), np.uint8), QueueTable(), RecordColumns()
    scan_log(log, 0, len(log), 0, 1 << 40, table, columns, delay_levels_ms=None)
    assert columns.rows == len(messages)
    return columns, table


MESSAGES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 3), st.integers(0, 99), st.integers(0, 9)),
    max_size=60,
)


@given(MESSAGES)
def test_runs_are_the_maximal_consecutive_ones(rows: list[tuple[int, int, int, int, int]]) -> None:
    messages = []
    for queue, offset, number, timestamp, length in rows:
        text = (
            properties((b"INNER_BASE", b"%d" % offset), (b"INNER_NUM", b"%d" % number)) if number > 1 else b""
        )
        flag = FLAG_BATCH if number > 1 else 0
        messages.append(Message(b"t", queue, offset, b"x" * length, text, flag, timestamp))
    columns, table = scan(messages)
    split = split_by_queue(columns.queue, columns.rows, len(table), SCRATCH)
    runs = cut_runs(split, columns)
    spans = [(offset, offset + number) for _, offset, number, _, _ in rows]
    expected = oracle.cut_runs(oracle.split_by_queue(columns.queue[: columns.rows].tolist()), spans)
    assert [members(runs, split.order, run) for run in range(len(runs))] == expected
    for run, rows_of_run in enumerate(expected):
        assert runs.base_queue_offset[run] == spans[rows_of_run[0]][0]
        assert runs.end_queue_offset[run] == spans[rows_of_run[-1]][1]
        sizes, times = columns.size[rows_of_run], columns.store_timestamp[rows_of_run]
        phys = columns.phys[rows_of_run]
        assert runs.byte_count[run] == sizes.sum()
        assert (runs.min_store_timestamp[run], runs.max_store_timestamp[run]) == (times.min(), times.max())
        assert (runs.min_phys[run], runs.end_phys[run]) == (phys.min(), (phys + sizes).max())
        assert bool(runs.batch[run]) == any(rows[row][2] > 1 for row in rows_of_run)
        assert (columns.queue[rows_of_run] == runs.queue[run]).all()


def members(runs: RunCuts, order: np.ndarray, run: int) -> list[int]:
    rows: list[int] = order[runs.first[run] : runs.first[run] + runs.rows[run]].tolist()
    return rows


def test_lmq_runs_measure_the_records_they_refer_to() -> None:
    messages = []
    for index in range(6):
        names, offsets = b"%LMQ%a,%LMQ%b", b"%d,%d" % (index, index if index < 3 else index + 10)
        text = properties((b"INNER_MULTI_DISPATCH", names), (b"INNER_MULTI_QUEUE_OFFSET", offsets))
        messages.append(Message(properties=text, queue_offset=index, store_timestamp=100 + index))
    columns, table = scan(messages)
    split = split_by_queue(columns.lmq_queue, columns.lmq_rows, len(table), SCRATCH)
    runs = cut_lmq_runs(split, columns)
    assert [table.topic(queue) for queue in runs.queue.tolist()] == ["%LMQ%a", "%LMQ%b", "%LMQ%b"]
    assert runs.base_queue_offset.tolist() == [0, 0, 13]
    assert runs.end_queue_offset.tolist() == [6, 3, 16]
    assert runs.min_store_timestamp.tolist() == [100, 100, 103]
    assert runs.byte_count.sum() == 2 * columns.size[:6].sum()
    assert runs.end_phys.tolist()[0] == int(columns.phys[5] + columns.size[5])


def test_no_rows_give_no_runs() -> None:
    columns = RecordColumns()
    split = split_by_queue(columns.queue, 0, 0, SplitScratch())
    assert (len(split.queues), len(cut_runs(split, columns)), len(cut_lmq_runs(split, columns))) == (0, 0, 0)


def test_a_hundred_rows_among_a_hundred_thousand_queues_are_cheap() -> None:
    """Bound by rows, not by queues: far below what one pass over all queues would cost."""
    scratch, queues = SplitScratch(), np.arange(0, 100_000, 1000, dtype=np.int32)
    split_by_queue(queues, len(queues), 100_000, scratch)
    took = []
    for _ in range(50):
        begin = time.perf_counter()
        split_by_queue(queues, len(queues), 100_000, scratch)
        took.append(time.perf_counter() - begin)
    assert min(took) < 0.000_5
