"""The split by queue against the oracle, and its cost when few of many queues are present."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import oracle
from tiered.kernels.split import SplitScratch, split_by_queue

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
    assert split_by_queue(np.array([1, 0, 7], np.int32), 2, 2, SCRATCH).queues.tolist() == [0, 1]


@pytest.mark.parametrize("queues", [[5], [-1]])
def test_an_ordinal_outside_the_table_is_refused(queues: list[int]) -> None:
    with pytest.raises(ValueError, match="has no number below"):
        split_by_queue(np.array(queues, np.int32), 1, 5, SCRATCH)


def test_no_rows_give_no_queues() -> None:
    assert len(split_by_queue(np.empty(0, np.int32), 0, 0, SplitScratch()).queues) == 0


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
