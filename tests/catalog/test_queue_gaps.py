"""Recorded gaps of one queue, however many there are."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.rows.run_list import QueueView
from rocketmq_tiered.message_table.plan.archive_plan import filled, gaps_in
from rocketmq_tiered.message_table.plan.partitions import OffsetRange
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.archive.queue_reader import QueueReader
from tiered.catalog.queue_gaps import QueueGaps
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey
from tiered.model.tables import GAP_DTYPE
from tiered.object_store.memory import MemoryStore

A = QueueKey("a", 0, 0)
MANY = 100_000
CPU_S_MAX = 1.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=8))
def test_offsets_in_gaps_that_touch_or_do_not(distances: list[tuple[int, int]]) -> None:
    table, at, inside = np.zeros(len(distances), GAP_DTYPE), 0, set[int]()
    for number, (before, length) in enumerate(distances):
        begin = at + before
        at = begin + length
        table[number] = (0, 1, begin, at)
        inside |= set(range(begin, at))
    gaps = QueueGaps(table)
    offsets = np.arange(at + 2)
    assert gaps.hold(offsets).tolist() == [offset in inside for offset in offsets.tolist()]
    for offset in offsets.tolist():
        assert gaps.after(offset) == next(one for one in range(offset, at + 3) if one not in inside)


@pytest.fixture(scope="module")
def many() -> CatalogState:
    """A queue of which every other record was damaged."""
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(A)])
    gaps, table = np.zeros(MANY, GAP_DTYPE), builder.state.table.copy()
    gaps["begin_queue_offset"] = 1 + 2 * np.arange(MANY)
    gaps["end_queue_offset"] = gaps["begin_queue_offset"] + 1
    table["end_queue_offset"] = 2 * MANY + 1
    return replace(builder.state, gaps=gaps, table=table)


def test_a_pull_costs_no_look_at_every_gap(many: CatalogState) -> None:
    began_s = time.thread_time()
    view = QueueView(many, A, many.queue(A))
    for offset in range(0, 2 * MANY, 50):
        assert view.existing(offset) == offset and view.existing(offset + 1) == offset + 2
    for _ in range(50):
        assert view.are_lost(np.arange(100)).sum() == 50
    assert time.thread_time() - began_s < CPU_S_MAX


def test_nor_does_reading_a_queue(many: CatalogState) -> None:
    began_s = time.thread_time()
    reader = QueueReader(MemoryStore(), many, A)
    for offset in range(0, 2 * MANY, 1000):
        assert reader._existing(offset + 1) == offset + 2
    assert time.thread_time() - began_s < CPU_S_MAX


def test_nor_does_finding_what_was_filled(many: CatalogState) -> None:
    later = replace(many, gaps=many.gaps[np.arange(MANY) != MANY // 2])
    before, whole = gaps_in(many), {A: OffsetRange(0, 2 * MANY + 1)}
    began_s = time.thread_time()
    assert filled(later, before, whole) == [{A: OffsetRange(MANY + 1, MANY + 2)}]
    assert time.thread_time() - began_s < 3 * CPU_S_MAX
