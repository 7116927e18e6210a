"""Offsets that a queue has twice in the log, and which the broker's consume queue then decides.

A recreated topic begins at offset 0 again. A broker that lost units, or whose consume queues were rebuilt one place
shifted, uses an offset again as well; but its queue still refers to the records before. Such records are of one
generation, and each is at the place where the queue has it, whatever its header says. A record without a unit is not
served by the broker: it is set aside and counted. What is archived already at or above the first place that differs is
superseded: the queue must end there first (CatalogWriter.end_queues), and what the broker serves from there on is read
again.

LMQs refer to offsets of other queues, which move then: where another queue ends, they end where the broker's log
begins, and are read again with records of their own. Queues that are not visible, and archives with very many LMQs, are
left alone.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.broker_store.commit_log import CommitLog
from tiered.consume_queue.index import ConsumeQueueIndex
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.scan import DOUBT_TOPIC, scan_log
from tiered.model.tables import Table
from uploader.cycle_plan import PlannedGap, RepeatedOffset
from uploader.log_batch import LogBatch

Ints = NDArray[Any]

READ_AGAIN_BYTES = 8 << 20
"""Bytes of a batch of records that are read again."""
UNITS_AT_ONCE = 64 * 1024
_PLACE = struct.Struct(">12xi4xq")
"""QUEUEID and QUEUEOFFSET of a record's header."""


class RepeatedOffsets:
    """Looks up queues of ``table`` in ``index``, the broker's consume queues, and reads records of ``log``. Methods
    raise what both raise."""

    def __init__(self, table: QueueTable, index: ConsumeQueueIndex, log: CommitLog) -> None:
        self._table, self._index, self._log = table, index, log

    def continued(self, repeated: Sequence[RepeatedOffset]) -> list[RepeatedOffset]:
        """Of the offsets ``repeated``, which queues had before, the first of each queue whose topic was not deleted and
        created again: the broker's queue still refers to an earlier record at the offset before it."""
        first_of_queue: dict[int, RepeatedOffset] = {}
        for one in repeated:
            unit = self._index.units(*self._name(one.ordinal), one.offset - 1, 1)
            # The unit of a batch of messages has the offset of the first one.
            has_unit = len(unit) and unit["queue_offset"][0] < one.offset
            if has_unit and 0 <= unit["phys"][0] < one.end_phys:
                first_of_queue.setdefault(one.ordinal, one)
        return list(first_of_queue.values())

    def placed(self, batch: LogBatch, ordinal: int) -> bool | None:
        """Give the records of one queue in ``batch`` the offsets at which the broker's consume queue has them, and set
        aside, and count, those that it does not have. Returns whether any record was changed or set aside; None if the
        consume queue has no unit for the range of the log that would show it."""
        columns = batch.columns
        rows = np.flatnonzero(columns.queue[: columns.rows] == ordinal)
        rows = np.setdiff1d(rows, [*batch.excluded, *batch.aside])
        if not len(rows):
            return False  # of an LMQ, whose entries are where its units are
        phys = columns.phys[rows]
        units = self._index.units_of_records(*self._name(ordinal), int(phys[0]), int(phys[-1]) + 1)
        if not len(units):
            return None
        at = np.minimum(np.searchsorted(units["phys"], phys), len(units) - 1)
        has_unit = units["phys"][at] == phys
        # Records behind the last unit may not be dispatched yet.
        aside = rows[~has_unit & (phys < units["phys"][-1])].tolist()
        is_moved = has_unit & (columns.queue_offset[rows] != units["queue_offset"][at])
        columns.queue_offset[rows[is_moved]] = units["queue_offset"][at][is_moved]
        batch.aside += aside
        batch.repeated[ordinal] = batch.repeated.get(ordinal, 0) + int(columns.inner_num[aside].sum())
        return bool(aside or is_moved.any())

    def first_difference(self, ordinal: int, end: int) -> int:
        """The first offset of a queue, below ``end``, at which the broker's consume queue has a record whose header
        names another offset; ``end`` if there is none. Found by halving: from there on all differ."""
        topic, queue_id = self._name(ordinal)

        def differs(offset: int) -> bool:
            """Whether the record at ``offset`` of the consume queue names another place in its header."""
            unit = self._index.units(topic, queue_id, offset, 1)
            if not len(unit) or unit["queue_offset"][0] > offset:
                return False
            header = record_place(self._log, int(unit["phys"][0]))
            return header is not None and header != (queue_id, int(unit["queue_offset"][0]))

        return bisect_left(range(end), True, key=differs)

    def read_again(self, ordinal: int, gap: PlannedGap, before_phys: int) -> Iterator[LogBatch]:
        """The records below commitlog offset ``before_phys`` that the broker's consume queue has at the offsets of
        ``gap``, in batches of an empty range at ``before_phys``: committing them does not move the archive's end.
        ``ordinal``: the number of the queue."""
        topic, queue_id, at = gap.queue.topic, gap.queue.queue_id, gap.begin_queue_offset
        while at < gap.end_queue_offset:
            units = self._index.units(topic, queue_id, at, min(gap.end_queue_offset - at, UNITS_AT_ONCE))
            units = units[(units["queue_offset"] >= at) & (units["queue_offset"] < gap.end_queue_offset)]
            if not len(units):
                return
            at = int(units["queue_offset"][-1]) + 1
            units = units[(units["phys"] >= 0) & (units["phys"] < before_phys)]
            batch_number = np.cumsum(units["size"], dtype=np.int64) // READ_AGAIN_BYTES
            for number in np.unique(batch_number):
                batch = self._read(units[batch_number == number], ordinal, before_phys)
                if batch.columns.rows:
                    yield batch

    def _read(self, units: Table, ordinal: int, at_phys: int) -> LogBatch:
        """A batch of the records to which ``units`` of one consume queue refer, at the offsets that the units have.
        Records that cannot be read are skipped. Its range is empty, at commitlog offset ``at_phys``."""
        batch = LogBatch(int(units["size"].sum()), pooled=False)
        batch.reset(at_phys, 0)
        batch.repeated[ordinal] = 0
        columns, names = batch.columns, QueueTable()
        for phys, size, offset in units[["phys", "size", "queue_offset"]].tolist():
            file, begin, rows = self._log.file_at(phys), batch.filled, columns.rows
            got = self._log.read_into(batch.arena.data[begin : begin + size], phys)
            if file is None or got < size:
                continue
            scan_log(
                batch.arena, begin, begin + size, phys, file.end_phys, names, columns, delay_levels_ms=None
            )
            if columns.rows == rows + 1:
                columns.queue_offset[rows] = offset
                batch.filled = batch.chunk_begin = begin + size
        columns.queue[: columns.rows] = ordinal
        columns.lmq_doubt[: columns.lmq_rows] = DOUBT_TOPIC  # its LMQ entries are archived
        batch.is_wanted = True
        return batch

    def _name(self, ordinal: int) -> tuple[str, int]:
        return self._table.topic(ordinal), int(self._table.queue_id[ordinal])


def record_place(log: CommitLog, phys: int) -> tuple[int, int] | None:
    """Queue id and offset in the header at ``phys``; None where the log is gone."""
    data = log.read(phys, _PLACE.size)
    if len(data) < _PLACE.size:
        return None
    queue_id, offset = _PLACE.unpack(data)
    return queue_id, offset
