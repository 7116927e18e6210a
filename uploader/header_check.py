"""Checks record headers against the broker's consume queues.

QUEUEID, QUEUEOFFSET and the topic are in no checksum of most records. A flipped bit in them passes all checks of
bytes, and the record would be archived in another queue, or start a generation that hides the earlier one. So where a
queue does not continue as expected, its records, and those its consume queue expects instead, are looked up. A record
is contradicted when no unit of its own queue references it at its offset, and a unit that differs in one byte of one
of the three does. An offset needs more evidence, because a broker that once miscounted appends later records to wrong
places of the queue, and such records are sound: the units before and after must be where their records say, and no
neighbouring record may continue from it.

Missing evidence contradicts nothing: queues of deleted topics are gone, those of a live RocksDB are not visible.

Source: org.apache.rocketmq.store.ConsumeQueue.putMessagePositionInfo.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.state import CatalogState
from tiered.consume_queue.index import ConsumeQueueIndex, empty_units
from tiered.errors import UnavailableError
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.scan import FLAG_LMQ, RecordColumns
from tiered.model.queue import LMQ_PREFIX, QueueKey
from tiered.model.tables import QUEUE_HIDDEN, QUEUE_LMQ, GapReason, Table
from uploader.cycle_plan import CyclePlan, CyclePlanner, PlannedGap, RepeatedOffset, UnusualQueue
from uploader.lmq_dispatch import LmqDispatch, LmqRules
from uploader.log_batch import DamagedRange, LogBatch
from uploader.queue_tails import UNKNOWN
from uploader.repeated_offsets import RepeatedOffsets, record_place

logger = logging.getLogger(__name__)

Bools = NDArray[np.bool_]
Ints = NDArray[Any]

SEARCHED_MAX = 20_000
"""If a broker has more queues than this, no record is searched in all of them."""
SEARCH_SHARE = 0.05
"""Searches in all queues may take this share of a thread's time."""
MISSING_MAX = 1024
"""So many missing offsets at either end of a gap are looked up: a gap may be of any size, as a damaged header may hold
any offset."""


class HeaderCheck:
    """Plans batches of one log against its consume queues. ``table`` numbers the queues of the batches."""

    def __init__(
        self,
        table: QueueTable,
        consume_queues: Callable[[], ConsumeQueueIndex | None],
        log: CommitLog,
        *,
        lmq_rules: Callable[[], LmqRules] = LmqRules,
    ) -> None:
        """``consume_queues`` returns None while the broker's consume queues cannot be read: nothing is checked then."""
        self._table = table
        self._consume_queues = consume_queues
        self._log = log
        self._lmq = LmqDispatch(table, consume_queues, lmq_rules)
        self._search_again_s = 0.0
        """No search in all queues before this time of the monotonic clock."""

    def plan(
        self, planner: CyclePlanner, batch: LogBatch, gap_reason: Callable[[LogBatch], GapReason]
    ) -> CyclePlan:
        """Plan the cycle of ``batch``, with what the broker's consume queues say where record headers are not enough:
        records whose headers they contradict are excluded as damaged, LMQ entries are those that the broker made, and
        where a queue used an offset twice its records are where the consume queue has them. ``gap_reason`` says why
        offsets of a batch are missing. Raises what reading a consume queue raises."""
        may_search = True
        batch.lmq = self._lmq.offsets(batch.columns, planner.next_offsets)
        while True:  # each round excludes or moves records, until none is left to correct
            plan = planner.plan(
                batch.columns,
                gap_reason=gap_reason(batch),
                excluded=batch.excluded,
                aside=batch.aside,
                lmq=batch.lmq,
            )
            rows = self._contradicted(batch, plan.unusual, may_search=may_search)
            self.exclude(batch, rows.tolist())
            may_search = may_search and not len(rows)
            if not len(rows) and (ends := self._repeated_ends(planner, batch, plan.repeated)) is not None:
                return replace(plan, ends=ends)

    def _repeated_ends(
        self, planner: CyclePlanner, batch: LogBatch, repeated: Sequence[RepeatedOffset]
    ) -> dict[QueueKey, int] | None:
        """The archived queues that must end, and at which offsets, before ``batch`` is archived, because the broker
        used later offsets again (``repeated``). None: records of ``batch`` were moved or set aside, so that it must be
        planned again."""
        index = self._consume_queues() if repeated else None
        if index is None:
            return {}
        offsets, ends, is_moved = RepeatedOffsets(self._table, index, self._log), dict[QueueKey, int](), False
        for one in offsets.continued(repeated):
            was_moved = offsets.placed(batch, one.ordinal)
            is_moved |= bool(was_moved)
            # The records are where the queue has them, so the archived ones are not.
            if was_moved is False and (key := planner.archived_key(one.ordinal)) is not None:
                ends[key] = offsets.first_difference(one.ordinal, one.offset)
        return None if is_moved else ends

    def to_read_again(self, state: CatalogState, ends: Mapping[QueueKey, int]) -> list[PlannedGap]:
        """The offsets that are read again from the broker's consume queues, once queues end at ``ends``, as the broker
        used later offsets again. The LMQs of ``state`` join them from their first offset on, if a queue with messages
        of its own ends: their entries refer to its offsets, and records do not tell their places there. Raises
        UnavailableError if the broker's consume queues can no longer be read."""
        if (index := self._consume_queues()) is None:
            raise UnavailableError("the broker's consume queues can no longer be read")
        begins = {
            key: index.min_offset(*key[:2])
            for key, row in state.current_queues()
            if row["flags"] & (QUEUE_LMQ | QUEUE_HIDDEN) == QUEUE_LMQ
            and index.min_offset(*key[:2]) < row["end_queue_offset"]
        }
        is_mixed = bool(ends.keys() - begins.keys())
        ends = {**ends, **{key: begin for key, begin in begins.items() if is_mixed or key in ends}}
        return [
            PlannedGap(key, end, index.max_offset(*key[:2]), GapReason.NEVER_WRITTEN)
            for key, end in ends.items()
        ]

    def read_again(self, ordinal: int, gap: PlannedGap, before_phys: int) -> Iterator[LogBatch]:
        """The records below commitlog offset ``before_phys`` that the broker's consume queue has at the offsets of
        ``gap``, in batches; no batch if consume queues cannot be read. ``ordinal``: the number of the queue."""
        index = self._consume_queues()
        if index is not None:
            yield from RepeatedOffsets(self._table, index, self._log).read_again(ordinal, gap, before_phys)

    def _contradicted(self, batch: LogBatch, unusual: Sequence[UnusualQueue], *, may_search: bool) -> Ints:
        """The rows of ``batch`` whose headers are damaged, as consume queues of the broker have the records elsewhere.
        Only the queues ``unusual``, which do not simply continue, are checked. ``may_search``: whether other queues may
        be searched too, which is costly and takes a bounded share of time. A check that fails finds none."""
        nothing = np.empty(0, np.int64)
        if not unusual:
            return nothing
        began_s = time.monotonic()
        may_search = may_search and began_s >= self._search_again_s
        try:
            index = self._consume_queues()
            if index is None:
                return nothing
            comparison = HeaderComparison(
                batch.columns, self._table, index, self._log, [*batch.excluded, *batch.aside]
            )
            rows = comparison.contradicted(unusual, may_search=may_search)
        except Exception as error:
            # A failed check must not stop archiving; the broker may just have started.
            logger.warning(
                "messages of %d queues are archived without a check of their headers against the broker's consume "
                "queues: %s",
                len(unusual),
                error,
            )
            return nothing
        if comparison.has_searched:
            ended_s = time.monotonic()
            self._search_again_s = ended_s + (ended_s - began_s) / SEARCH_SHARE
        return rows

    def exclude(self, batch: LogBatch, rows: Sequence[int]) -> None:
        """Exclude the records in ``rows`` from ``batch``, and note them as damaged: a consume queue of the broker says
        that their headers are."""
        columns = batch.columns
        for row in rows:
            phys, size = int(columns.phys[row]), int(columns.size[row])
            file = self._log.file_at(phys)
            path = "" if file is None else str(file.path)
            batch.excluded.append(row)
            damage = "a consume queue of the broker contradicts the record's header"
            batch.damaged.append(DamagedRange(phys, phys + size, path, damage))


class HeaderComparison:
    """Compares the record headers of one batch with the broker's consume queues, once. Rows are indexes into
    ``columns``, the batch's records."""

    def __init__(
        self,
        columns: RecordColumns,
        table: QueueTable,
        index: ConsumeQueueIndex,
        log: CommitLog,
        excluded: Sequence[int] = (),
    ) -> None:
        """``table`` numbers the queues of ``columns``; ``index``: the broker's consume queues; ``excluded``: rows that
        an earlier comparison has excluded."""
        count = columns.rows
        self._index, self._log = index, log
        self._phys, self._size = columns.phys[:count], columns.size[:count]
        self._queue, self._offset = columns.queue[:count], columns.queue_offset[:count]
        self._inner_num = columns.inner_num[:count]
        # Only the scanning thread may search the table.
        self._names = {
            ordinal: (table.topic(ordinal), int(table.queue_id[ordinal]))
            for ordinal in np.unique(self._queue).tolist()
        }
        self._ordinals = {name: ordinal for ordinal, name in self._names.items()}
        # A record with LMQ entries is in several queues: a unit of another queue proves nothing.
        self._is_checkable = (columns.flags[:count] & FLAG_LMQ) == 0
        self._is_checkable[list(excluded)] = False
        self._suspected = np.zeros(count, bool)
        """By row, as the next ones: whether the record is of a queue that does not simply continue."""
        self._stands_alone = np.zeros(count, bool)
        """Whether, besides, no record of the queue in this batch continues it or is continued by it."""
        self._confirmed = np.zeros(count, bool)
        """Whether a unit of its queue refers to it at its offset."""
        self._in_other_queue = np.zeros(count, bool)
        """Whether a unit of a queue refers to it whose name or id differs from the header's in one byte."""
        self._other_offset = np.full(count, UNKNOWN, np.int64)
        """Another offset, different in one byte, at which its queue refers to it."""
        self.has_searched = False
        """Whether all queues of the broker were searched."""

    def contradicted(self, unusual: Sequence[UnusualQueue], *, may_search: bool = True) -> Ints:
        """The rows, ascending, of records whose headers the consume queues contradict: such a record is not in the
        queue, or not at the offset, that its header names. Rows of the queues ``unusual`` are checked, and those that
        these queues have instead.

        Reads the units of these queues and, with ``may_search``, searches every queue for records found in none. Raises
        what reading consume queues and log raises.
        """
        for queue, rows in self._rows_of(unusual):
            offset, end = self._offset[rows], self._offset[rows] + self._inner_num[rows]
            self._suspected[rows] = True
            continues = offset == np.append(queue.next_offset, end[:-1])
            self._stands_alone[rows] = ~continues & ~np.append(continues[1:], False)
            for first, behind in _ranges(offset, end, queue.next_offset):
                self._note_units(
                    self._names[queue.ordinal], self._units(queue.ordinal, first, behind - first)
                )
        if may_search:
            self._search_all(np.flatnonzero(self._suspected & ~self._confirmed & ~self._is_named_elsewhere()))
        for row in np.flatnonzero(self._is_named_elsewhere()).tolist():
            ordinal = int(self._queue[row])
            self._note_units(self._names[ordinal], self._units(ordinal, int(self._offset[row]), 1))
        candidates = np.flatnonzero(self._is_named_elsewhere() & self._is_checkable).tolist()
        return np.array(
            [row for row in candidates if self._in_other_queue[row] or self._is_misplaced(row)], np.int64
        )

    def _is_named_elsewhere(self) -> Bools:
        named: Bools = (self._in_other_queue | (self._other_offset != UNKNOWN)) & ~self._confirmed
        return named

    def _is_misplaced(self, row: int) -> bool:
        """Whether the offset in the header of ``row``, which its consume queue has at another offset, is damaged: then
        the queue has the records before and after it where their headers say. Otherwise the broker miscounted, and the
        record is sound."""
        # Offset 0 may be that of a recreated topic.
        if not self._stands_alone[row] or self._offset[row] == 0:
            return False
        ordinal, offset = int(self._queue[row]), int(self._other_offset[row])
        headers = {
            int(unit["queue_offset"]): record_place(self._log, int(unit["phys"]))
            for unit in self._units(ordinal, max(offset - 1, 0), 3)
        }
        queue_id = self._names[ordinal][1]
        before, behind = headers.get(offset - 1), headers.get(offset + 1)
        return before in (None, (queue_id, offset - 1)) and behind == (queue_id, offset + 1)

    def _rows_of(self, unusual: Iterable[UnusualQueue]) -> Iterator[tuple[UnusualQueue, Ints]]:
        """Each of the queues ``unusual`` with the rows of its records in the batch, in the order of the log."""
        by_ordinal = {queue.ordinal: queue for queue in unusual}
        rows = np.flatnonzero(np.isin(self._queue, list(by_ordinal)))
        rows = rows[np.argsort(self._queue[rows], kind="stable")]
        ordinals, first = np.unique(self._queue[rows], return_index=True)
        for ordinal, (begin, end) in zip(
            ordinals.tolist(), pairwise([*first.tolist(), len(rows)]), strict=True
        ):
            yield by_ordinal[ordinal], rows[begin:end]

    def _units(self, ordinal: int, offset: int, count: int) -> Table:
        topic, queue_id = self._names[ordinal]
        return empty_units() if queue_id < 0 else self._index.units(topic, queue_id, offset, count)

    def _search_all(self, rows: Ints) -> None:
        """Look in all consume queues of the broker for units that refer to the records in ``rows``, and note what they
        say. Does nothing at a broker with more than SEARCHED_MAX queues."""
        if not len(rows) or len(self._index.queues()) > SEARCHED_MAX:
            return
        self._index.refresh()  # for queues created since
        self.has_searched = True
        begin, end = int(self._phys[rows[0]]), int(self._phys[rows[-1]]) + 1
        for name, units in self._index.units_between(begin, end).items():
            self._note_units(name, units)

    def _note_units(self, name: tuple[str, int], units: Table) -> None:
        """Compare consume-queue units of the queue ``name`` (topic, queue id) with the headers of the records to which
        they refer, if these are in the batch: note which headers they confirm, and which have another queue or offset
        that differs in one byte, as after a flipped bit."""
        row = np.searchsorted(self._phys, units["phys"])
        row[row == len(self._phys)] = 0
        is_in_batch = (self._phys[row] == units["phys"]) & (self._size[row] == units["size"])
        row, offset = row[is_in_batch], units["queue_offset"][is_in_batch]
        is_same_queue = self._queue[row] == self._ordinals.get(name, UNKNOWN)
        is_same_offset = self._offset[row] == offset
        self._confirmed[row[is_same_queue & is_same_offset]] = True
        if name[0].startswith(LMQ_PREFIX):
            return  # LMQs refer to records of other queues
        for at in np.flatnonzero(is_same_queue != is_same_offset).tolist():
            header = self._names[int(self._queue[row[at]])]
            if is_same_offset[at]:
                self._in_other_queue[row[at]] |= _differ_in_one_byte(header, name)
            elif _is_in_one_byte(int(self._offset[row[at]]) ^ int(offset[at])):
                self._other_offset[row[at]] = offset[at]


def _differ_in_one_byte(queue: tuple[str, int], other: tuple[str, int]) -> bool:
    """Whether two queues (topic, queue id) differ in one byte only, of the topic or of the queue id, as after a flipped
    bit."""
    (topic, queue_id), (other_topic, other_id) = queue, other
    if topic == other_topic:
        return _is_in_one_byte((queue_id ^ other_id) & 0xFFFFFFFF)
    topic_bytes, other_bytes = topic.encode(), other_topic.encode()
    differing = sum(a != b for a, b in zip(topic_bytes, other_bytes, strict=False))
    return queue_id == other_id and len(topic_bytes) == len(other_bytes) and differing == 1


def _is_in_one_byte(difference: int) -> bool:
    """Whether all set bits are in one byte."""
    return any(difference & ~(0xFF << shift) == 0 for shift in range(0, 64, 8))


def _ranges(offset: Ints, end: Ints, next_offset: int) -> Iterator[tuple[int, int]]:
    """The offsets (first, one past the last) of a queue whose consume-queue units are looked up: those in the headers
    of its records, whose first offsets and ends are ``offset`` and ``end``, and those that are missing before or
    between them. ``next_offset``: where the queue ended before, UNKNOWN if it is new."""
    first = np.flatnonzero(np.concatenate([[True], offset[1:] != end[:-1]]))
    last = np.append(first[1:], len(offset)) - 1
    for begin, behind in zip(offset[first].tolist(), end[last].tolist(), strict=True):
        # Only the begin and the end of a large gap: a damaged header may hold any offset.
        missing = begin - max(next_offset, 0)
        if 0 < missing <= 2 * MISSING_MAX:
            yield max(next_offset, 0), begin
        elif missing > 0:
            yield max(next_offset, 0), max(next_offset, 0) + MISSING_MAX
            yield begin - MISSING_MAX, begin
        yield begin, behind
        next_offset = behind
