"""What the broker's own consume queues say against a record's header.

QUEUEID, QUEUEOFFSET and the topic are in no checksum of most records. One flipped bit in them passes every test of
bytes, and the record would be archived in another queue, or begin a new generation that hides the earlier one. So
where a queue does something unusual its records, and those its consume queue expects instead, are looked up. A record
is contradicted when no unit of its own queue names it and a unit of another queue, or at another offset, does.
Nothing said against it is nothing: queues of deleted topics are gone, those of a live RocksDB cannot be seen.

Owns the question and the judgement (3a, Damage). Source: org.apache.rocketmq.store.ConsumeQueue.putMessagePositionInfo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.broker_store.consume_queue_index import ConsumeQueueIndex
from tiered.errors import TieredError
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.scan import FLAG_LMQ, RecordColumns
from tiered.model.queue import LMQ_PREFIX
from tiered.model.tables import GapReason, Table
from uploader.cycle_plan import CyclePlan, CyclePlanner, UnusualQueue
from uploader.log_batch import DamagedRange, LogBatch
from uploader.queue_tails import UNKNOWN

Bools = NDArray[np.bool_]
Ints = NDArray[Any]

MISSING_MAX = 1024
"""Missing offsets of a queue that are looked up where they begin and where they end; a header may claim any offset."""


class QueueWitness:
    """The consume queues of one store, asked about batches of its log. ``table`` numbers the queues of the batches,
    ``path_at`` tells the file of a physical offset."""

    def __init__(
        self,
        table: QueueTable,
        consume_queues: Callable[[], ConsumeQueueIndex | None],
        path_at: Callable[[int], str],
    ) -> None:
        self._table = table
        self._consume_queues = consume_queues
        self._path_at = path_at

    def plan(
        self, planner: CyclePlanner, batch: LogBatch, gap_reason: Callable[[LogBatch], GapReason]
    ) -> CyclePlan:
        """Plan ``batch`` without its contradicted records, which become damage of the batch."""
        while True:
            plan = planner.plan(batch.columns, gap_reason=gap_reason(batch), left_out=batch.left_out)
            rows = self._contradicted(batch, plan.unusual)
            if not len(rows):
                return plan
            for row in rows.tolist():
                self._leave_out(batch, row)

    def _contradicted(self, batch: LogBatch, unusual: Sequence[UnusualQueue]) -> Ints:
        nothing = np.empty(0, np.int64)
        if not unusual:
            return nothing
        try:
            index = self._consume_queues()
            if index is None:
                return nothing
            return contradicted(batch.columns, self._table, unusual, index, left_out=batch.left_out)
        except TieredError:
            return nothing  # who cannot be asked says nothing

    def _leave_out(self, batch: LogBatch, row: int) -> None:
        columns = batch.columns
        phys, size = int(columns.phys[row]), int(columns.size[row])
        batch.left_out.append(row)
        batch.damaged.append(
            DamagedRange(phys, phys + size, self._path_at(phys), "its consume queue has it elsewhere")
        )


def contradicted(
    columns: RecordColumns,
    table: QueueTable,
    unusual: Sequence[UnusualQueue],
    index: ConsumeQueueIndex,
    *,
    left_out: Sequence[int] = (),
) -> Ints:
    """Rows of ``columns`` that ``index`` contradicts, ascending; of ``unusual`` queues and of those they lead to.

    Costs reading the units of these queues' records, and a search in every queue if some of them are in none.
    Raises what reading ``index`` raises.
    """
    return _Trial(columns, table, index, left_out).of(unusual)


class _Trial:
    """One batch before one index. Rows are indices into ``columns``."""

    def __init__(
        self, columns: RecordColumns, table: QueueTable, index: ConsumeQueueIndex, left_out: Sequence[int]
    ) -> None:
        count = columns.rows
        self._table, self._index = table, index
        self._phys, self._size = columns.phys[:count], columns.size[:count]
        self._queue, self._offset = columns.queue[:count], columns.queue_offset[:count]
        self._inner_num = columns.inner_num[:count]
        # A record with references to light queues is in several queues: whose unit names it proves nothing.
        self._may_be_tried = (columns.flags[:count] & FLAG_LMQ) == 0
        self._may_be_tried[list(left_out)] = False
        self._suspected = np.zeros(count, bool)
        self._confirmed = np.zeros(count, bool)
        self._accused = np.zeros(count, bool)

    def of(self, unusual: Sequence[UnusualQueue]) -> Ints:
        for queue, rows in self._rows_of(unusual):
            self._suspected[rows] = True
            for begin, end in _ranges(self._offset[rows], self._inner_num[rows], queue.next_offset):
                self._hear(queue.ordinal, self._units(queue.ordinal, begin, end - begin))
        for row in np.flatnonzero(self._accused & ~self._suspected & ~self._confirmed).tolist():
            ordinal = int(self._queue[row])
            self._hear(ordinal, self._units(ordinal, int(self._offset[row]), 1))
        self._ask_all(np.flatnonzero(self._suspected & ~self._confirmed & ~self._accused))
        found: Ints = np.flatnonzero(self._accused & ~self._confirmed & self._may_be_tried)
        return found

    def _rows_of(self, unusual: Iterable[UnusualQueue]) -> Iterator[tuple[UnusualQueue, Ints]]:
        """Each queue's rows in log order; the queues may be many."""
        by_ordinal = {queue.ordinal: queue for queue in unusual}
        rows = np.flatnonzero(np.isin(self._queue, list(by_ordinal)))
        rows = rows[np.argsort(self._queue[rows], kind="stable")]
        ordinals, first = np.unique(self._queue[rows], return_index=True)
        for ordinal, (begin, end) in zip(
            ordinals.tolist(), pairwise([*first.tolist(), len(rows)]), strict=True
        ):
            yield by_ordinal[ordinal], rows[begin:end]

    def _units(self, ordinal: int, offset: int, count: int) -> Table:
        return self._index.units(
            self._table.topic(ordinal), int(self._table.queue_id[ordinal]), offset, count
        )

    def _ask_all(self, rows: Ints) -> None:
        """Look for units of any queue at ``rows``."""
        if not len(rows):
            return
        begin, end = int(self._phys[rows[0]]), int(self._phys[rows[-1]]) + 1
        for (topic, queue_id), units in self._index.units_between(begin, end).items():
            ordinal = self._table.find(topic, queue_id)
            self._hear(UNKNOWN if ordinal is None else ordinal, units, is_light=topic.startswith(LMQ_PREFIX))

    def _hear(self, ordinal: int, units: Table, *, is_light: bool | None = None) -> None:
        """Note what ``units`` of a queue say about the records they name. Light queues name records of others."""
        if is_light is None:
            is_light = self._table.topic(ordinal).startswith(LMQ_PREFIX)
        row = np.searchsorted(self._phys, units["phys"])
        row[row == len(self._phys)] = 0
        is_here = (self._phys[row] == units["phys"]) & (self._size[row] == units["size"])
        row, units = row[is_here], units[is_here]
        agrees = (self._queue[row] == ordinal) & (self._offset[row] == units["queue_offset"])
        self._confirmed[row[agrees]] = True
        if not is_light:
            self._accused[row[~agrees]] = True


def _ranges(offset: Ints, inner_num: Ints, next_offset: int) -> Iterator[tuple[int, int]]:
    """Queue offsets to look up: what records claim, run by run, and what is missing before each run."""
    end = offset + inner_num
    first = np.flatnonzero(np.concatenate([[True], offset[1:] != end[:-1]]))
    last = np.append(first[1:], len(offset)) - 1
    for begin, behind in zip(offset[first].tolist(), end[last].tolist(), strict=True):
        missing = begin - max(next_offset, 0)
        if 0 < missing <= 2 * MISSING_MAX:
            yield max(next_offset, 0), begin
        elif missing > 0:
            yield max(next_offset, 0), max(next_offset, 0) + MISSING_MAX
            yield begin - MISSING_MAX, begin
        yield begin, behind
        next_offset = behind
