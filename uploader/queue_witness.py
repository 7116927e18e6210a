"""What the broker's own consume queues say against a record's header.

QUEUEID, QUEUEOFFSET and the topic are in no checksum of most records. One flipped bit in them passes every test of
bytes, and the record would be archived in another queue, or begin a new generation that hides the earlier one. So
where a queue does something unusual its records, and those its consume queue expects instead, are looked up. A record
is contradicted when no unit of its own queue names it at its offset and

- a unit of another queue does: a broker chooses the queue by the record itself; or
- its own queue has it at another offset, with the units before and behind where their records say. A broker that once
  lost count appends all that follows to the wrong places: such records are sound.

Nothing said against it is nothing: queues of deleted topics are gone, those of a live RocksDB cannot be seen.

Owns the question and the judgement (3a, Damage). Source: org.apache.rocketmq.store.ConsumeQueue.putMessagePositionInfo.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.broker_store.commit_log import CommitLog
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

SEARCHED_MAX = 20_000
"""Queues that are searched for a record; the broker's consume queues are locked meanwhile."""
_CLAIMS = struct.Struct(">12xi4xq")
"""QUEUEID and QUEUEOFFSET of a record's header."""
MISSING_MAX = 1024
"""Missing offsets of a queue that are looked up where they begin and where they end; a header may claim any offset."""


class QueueWitness:
    """The consume queues of one store, asked about batches of its log. ``table`` numbers the queues of the batches."""

    def __init__(
        self,
        table: QueueTable,
        consume_queues: Callable[[], ConsumeQueueIndex | None],
        log: CommitLog,
    ) -> None:
        self._table = table
        self._consume_queues = consume_queues
        self._log = log

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
            return contradicted(
                batch.columns, self._table, unusual, index, self._log, left_out=batch.left_out
            )
        except TieredError:
            return nothing  # who cannot be asked says nothing

    def _leave_out(self, batch: LogBatch, row: int) -> None:
        columns = batch.columns
        phys, size = int(columns.phys[row]), int(columns.size[row])
        file = self._log.file_at(phys)
        path = "" if file is None else str(file.path)
        batch.left_out.append(row)
        batch.damaged.append(DamagedRange(phys, phys + size, path, "a consume queue has it elsewhere"))


def contradicted(
    columns: RecordColumns,
    table: QueueTable,
    unusual: Sequence[UnusualQueue],
    index: ConsumeQueueIndex,
    log: CommitLog,
    *,
    left_out: Sequence[int] = (),
) -> Ints:
    """Rows of ``columns`` that ``index`` contradicts, ascending; of ``unusual`` queues and of those they lead to.

    Costs reading the units of these queues' records, and a search in every queue, of at most SEARCHED_MAX, if some of
    them are in none. Raises what reading ``index`` and ``log`` raises.
    """
    return _Trial(columns, table, index, log, left_out).of(unusual)


class _Trial:
    """One batch before one index. Rows are indices into ``columns``."""

    def __init__(
        self,
        columns: RecordColumns,
        table: QueueTable,
        index: ConsumeQueueIndex,
        log: CommitLog,
        left_out: Sequence[int],
    ) -> None:
        count = columns.rows
        self._table, self._index, self._log = table, index, log
        self._phys, self._size = columns.phys[:count], columns.size[:count]
        self._queue, self._offset = columns.queue[:count], columns.queue_offset[:count]
        self._inner_num = columns.inner_num[:count]
        # A record with references to light queues is in several queues: whose unit names it proves nothing.
        self._may_be_tried = (columns.flags[:count] & FLAG_LMQ) == 0
        self._may_be_tried[list(left_out)] = False
        self._suspected = np.zeros(count, bool)
        self._confirmed = np.zeros(count, bool)
        self._accused = np.zeros(count, bool)
        """By another queue."""
        self._offset_named = np.full(count, UNKNOWN, np.int64)
        """By the own queue, elsewhere."""

    def of(self, unusual: Sequence[UnusualQueue]) -> Ints:
        for queue, rows in self._rows_of(unusual):
            self._suspected[rows] = True
            for begin, end in _ranges(self._offset[rows], self._inner_num[rows], queue.next_offset):
                self._hear(queue.ordinal, self._units(queue.ordinal, begin, end - begin))
        for row in np.flatnonzero(self._is_named_elsewhere() & ~self._suspected).tolist():
            ordinal = int(self._queue[row])
            self._hear(ordinal, self._units(ordinal, int(self._offset[row]), 1))
        self._ask_all(np.flatnonzero(self._suspected & ~self._confirmed & ~self._is_named_elsewhere()))
        tried = np.flatnonzero(self._is_named_elsewhere() & self._may_be_tried).tolist()
        return np.array([row for row in tried if self._accused[row] or self._is_alone(row)], np.int64)

    def _is_named_elsewhere(self) -> Bools:
        named: Bools = (self._accused | (self._offset_named != UNKNOWN)) & ~self._confirmed
        return named

    def _is_alone(self, row: int) -> bool:
        """Whether the records before and behind ``row`` in its consume queue say they are where they are; there need be
        none before."""
        ordinal, offset = int(self._queue[row]), int(self._offset_named[row])
        units = self._units(ordinal, max(offset - 1, 0), 3)
        agrees = {
            int(unit["queue_offset"]): self._claims_at(int(unit["phys"]))
            in ((int(self._table.queue_id[ordinal]), int(unit["queue_offset"])), None)
            for unit in units
        }
        return agrees.get(offset - 1, True) and agrees.get(offset + 1, False)

    def _claims_at(self, phys: int) -> tuple[int, int] | None:
        """Queue id and offset in the header at ``phys``; None where the log has nothing any more."""
        data = self._log.read(phys, _CLAIMS.size)
        if len(data) < _CLAIMS.size:
            return None
        queue_id, offset = _CLAIMS.unpack(data)
        return queue_id, offset

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
        if not len(rows) or len(self._index.queues()) > SEARCHED_MAX:
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
            is_own = self._queue[row] == ordinal
            self._accused[row[~is_own]] = True
            named = is_own & ~agrees
            self._offset_named[row[named]] = units["queue_offset"][named]


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
