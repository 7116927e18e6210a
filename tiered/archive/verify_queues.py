"""Verifies that runs and gaps of each queue cover its offsets from minimum to end, without hole or overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.archive.verify_segment import Anomaly, AnomalyKind
from tiered.catalog.pages import Page
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey

Ints = NDArray[Any]


def check_queues(state: CatalogState, pages: Iterable[Page]) -> Iterator[Anomaly]:
    """``pages``: all live runs by (queue, base offset). One page and the state of one queue are in memory."""
    gaps = _Gaps(state)
    seen = np.zeros(len(state.table), bool)
    chain: _Chain | None = None
    for page in pages:
        rows = np.array(
            [-1 if (row := state.row_of(queue)) is None else row for queue in page.queues], np.int64
        )
        row = rows[page.chunk.runs["queue"]]
        runs, row = page.chunk.runs[row >= 0], row[row >= 0]
        if len(runs) == 0:
            continue
        begin, end = runs["base_queue_offset"].astype(np.int64), runs["end_queue_offset"].astype(np.int64)
        starts = np.flatnonzero(np.concatenate([[True], row[1:] != row[:-1]]))
        ends = np.append(starts[1:], len(row))
        seen[row] = True
        suspects = _suspects(state, gaps, row, begin, end, starts)
        # The first queue of a page may begin in the page before, the last may continue in the next.
        suspects[0] = suspects[-1] = True
        for part in np.flatnonzero(suspects).tolist():
            own = int(row[starts[part]])
            if chain is None or chain.row != own:
                if chain is not None:
                    yield from chain.finish()
                chain = _Chain(state, gaps, own)
            mine = slice(starts[part], ends[part])
            yield from chain.advance(begin[mine], end[mine])
    if chain is not None:
        yield from chain.finish()
    for unseen in np.flatnonzero(~seen).tolist():
        yield from _Chain(state, gaps, unseen).finish()


def _suspects(
    state: CatalogState, gaps: _Gaps, row: Ints, begin: Ints, end: Ints, starts: Ints
) -> NDArray[np.bool_]:
    """Whether each queue of a page has gaps, or its runs alone do not cover it from minimum to end."""
    first = np.zeros(len(row), bool)
    first[starts] = True
    last = np.roll(first, -1)
    low = state.table["min_queue_offset"][row]
    before = np.where(first, low, np.roll(end, 1))
    wrong = (before != np.maximum(begin, low)) | (last & (end != state.table["end_queue_offset"][row]))
    return np.logical_or.reduceat(wrong, starts) | gaps.has_any[row[starts]]


class _Gaps:
    """Recorded gaps by queue and offset."""

    def __init__(self, state: CatalogState) -> None:
        table = state.gaps[np.lexsort((state.gaps["begin_queue_offset"], state.gaps["queue"]))]
        self._first = np.searchsorted(table["queue"], np.arange(len(state.table) + 1))
        self._begin = table["begin_queue_offset"].astype(np.int64)
        self._end = table["end_queue_offset"].astype(np.int64)
        self.has_any = np.diff(self._first) > 0

    def of(self, row: int) -> tuple[Ints, Ints]:
        """(begin, end) of the gaps of a queue."""
        mine = slice(self._first[row], self._first[row + 1])
        return self._begin[mine], self._end[mine]


class _Chain:
    """One queue, covered from its minimum so far."""

    def __init__(self, state: CatalogState, gaps: _Gaps, row: int) -> None:
        self.row = row
        self._queue = state.key_of(row)
        self._floor = self._expected = int(state.table["min_queue_offset"][row])
        self._end = int(state.table["end_queue_offset"][row])
        self._gap_begin, self._gap_end = gaps.of(row)

    def advance(self, begin: Ints, end: Ints) -> Iterator[Anomaly]:
        """The next runs, by base offset."""
        due = int(np.searchsorted(self._gap_begin, begin[-1], side="right"))
        begin = np.maximum(begin, self._floor)  # it may divide a run
        begins = np.concatenate([begin, self._gap_begin[:due]])
        ends = np.concatenate([end, self._gap_end[:due]])
        self._gap_begin, self._gap_end = self._gap_begin[due:], self._gap_end[due:]
        order = np.argsort(begins, kind="stable")
        return self._lead(begins[order], ends[order])

    def finish(self) -> Iterator[Anomaly]:
        """Finish after the last run."""
        begins = np.append(self._gap_begin, self._end)
        return self._lead(begins, np.append(self._gap_end, self._end))

    def _lead(self, begins: Ints, ends: Ints) -> Iterator[Anomaly]:
        expected = np.concatenate([[self._expected], ends[:-1]])
        self._expected = int(ends[-1])
        for at in np.flatnonzero(expected != begins).tolist():
            yield _anomaly(self._queue, int(expected[at]), int(begins[at]))


def _anomaly(queue: QueueKey, expected: int, found: int) -> Anomaly:
    kind = AnomalyKind.HOLE if expected < found else AnomalyKind.OVERLAP
    low, high = sorted((expected, found))
    what = "in no run and no gap" if kind == AnomalyKind.HOLE else "in two runs or gaps"
    return Anomaly(kind, queue_name(queue), (low, high), f"offsets [{low}, {high}) are {what}")


def queue_name(queue: QueueKey) -> str:
    """The queue's name in reports."""
    return f"{queue.topic}/{queue.queue_id}" + (f" generation {queue.generation}" if queue.generation else "")
