"""Plans one cycle: runs, generations, gaps, and which runs share an object. Pure; arrays in, arrays out.

Per queue, offsets are contiguous. A run that starts at its queue's tail continues it; above the tail, the offsets
between are a gap; below it, the topic was deleted and recreated, and a new generation starts, unless the broker's queue
shows that it used an offset twice (repeated_offsets.py). An LMQ row references its parent's row; if the parent is
excluded it stores the bytes itself.

A cycle costs a few numpy passes; Python loops run only over queues that do not simply continue.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.state import CatalogState
from tiered.formats.segment import RowTable
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.scan import FLAG_BATCH, RecordColumns
from tiered.kernels.split import SplitScratch, split_by_queue
from tiered.model.queue import QueueKey, TopicFilter
from tiered.model.queue_roster import QueueSelection, numbered
from tiered.model.tables import RUN_DTYPE, GapReason, RunKind, Table, positions
from uploader.lmq_dispatch import LmqOffsets, resolved_lmq_rows
from uploader.queue_tails import UNKNOWN, QueueGenerations, QueueTails, TailChange
from uploader.queue_ttl_classes import FOREVER_CLASS, QueueTtlClasses
from uploader.skipped_log import SkippedLog
from uploader.timer_entries import TimerQueues, TimerRows
from uploader.topic_selections import TopicSelections

Ints = NDArray[Any]
_LAST: Final = 1 << 30
"""In place of FOREVER_CLASS, so that messages that never expire have the longest class."""


@dataclass(frozen=True)
class PlannedGap:
    """Offsets [begin, end) that no archived or future record has."""

    queue: QueueKey
    begin_queue_offset: int
    end_queue_offset: int
    reason: GapReason


class UnusualQueue(NamedTuple):
    """A queue, by its ordinal, whose records do not continue where it ends, or a new one that starts above 0. The cause
    may be a gap, a recreated topic, or a damaged header (header_check.py). ``next_offset``: where the queue ends;
    UNKNOWN if it is new."""

    ordinal: int
    next_offset: int


class RepeatedOffset(NamedTuple):
    """A queue, by its ordinal, in which a record has ``offset``, which an earlier record had too. The queue's record
    before it in the log ends at ``end_phys``."""

    ordinal: int
    offset: int
    end_phys: int


@dataclass(frozen=True)
class ObjectPlan:
    """One object to write: ``runs.queue`` and ``rows.parent`` index ``queues``. All runs are of one TTL class."""

    is_set: bool
    ttl_class_days: int
    queues: Sequence[QueueKey]
    runs: Table
    rows: RowTable


@dataclass(frozen=True)
class CyclePlan:
    """One cycle. ``change`` must be applied to the tails before the next cycle is planned."""

    objects: list[ObjectPlan]
    gaps: list[PlannedGap]
    change: TailChange
    messages: int
    raw_bytes: int
    unusual: list[UnusualQueue]
    timers: TimerRows | None = None
    repeated: Sequence[RepeatedOffset] = ()
    """Offsets above 0 that queues have a second time. The plan begins a generation there, as for a recreated topic."""
    ends: Mapping[QueueKey, int] = field(default_factory=dict)
    """Archived queues that must end at these offsets before this is uploaded: the broker used later ones again."""


@dataclass(frozen=True)
class _Rows:
    """Consume-queue rows to archive: stored records first, then LMQ entries."""

    record: Ints  # index into the record columns
    queue: Ints
    queue_offset: Ints
    inner_num: Ints
    records: int  # the first so many rows are stored records
    is_stored: NDArray[np.bool_]  # of each record: whether its own queue has it


@dataclass
class _Runs:
    """Runs of a cycle, as columns. ``order``, which ``first`` indexes, sorts the cycle's rows by queue."""

    ordinal: Ints
    first: Ints  # index into order
    rows: Ints
    base: Ints
    end: Ints
    kind: Ints
    generation: Ints
    base_byte: Ints
    byte_count: Ints
    end_byte: Ints  # of the queue after the run; LMQ entries add nothing
    min_timestamp: Ints
    max_timestamp: Ints
    min_phys: Ints
    end_phys: Ints


class CyclePlanner:
    """Plans cycles for one queue table."""

    def __init__(
        self,
        table: QueueTable,
        tails: QueueTails,
        *,
        split_bytes: int,
        skipped: SkippedLog | None = None,
        ttl_classes: QueueTtlClasses | None = None,
        selections: TopicSelections | None = None,
        timer_topic: str = "",
    ) -> None:
        """``tails``: where each queue ends in the archive and in the cycles planned before; ``split_bytes``: a run of a
        queue with so many bytes gets an object of its own. ``skipped``: parts of the commitlog that earlier processes
        did not archive, which explain gaps; ``selections``: which topics are archived, by place in the commitlog;
        ``timer_topic``: the gateway topic, whose messages are timers; "": there is none."""
        self._table = table
        self._tails = tails
        self._split_bytes = split_bytes
        self._skipped = skipped or SkippedLog()
        self._selections = selections or TopicSelections(TopicFilter())
        self._ttl_classes = ttl_classes or QueueTtlClasses()
        self._generations = QueueGenerations(table)
        self._scratch = SplitScratch()
        self._timer_queues = TimerQueues(table, timer_topic)

    def plan(
        self,
        columns: RecordColumns,
        *,
        gap_reason: GapReason,
        excluded: Sequence[int] = (),
        aside: Sequence[int] = (),
        lmq: LmqOffsets = MappingProxyType({}),
    ) -> CyclePlan:
        """Plan the objects and gaps of one cycle, of all records of ``columns`` whose topic is archived, without the
        rows ``excluded``; the rows ``aside`` are archived in LMQs alone. ``gap_reason``: why offsets are missing;
        ``lmq``: offsets of LMQ entries where these differ from what the records say. The queue tails do not change: the
        caller applies ``change`` of the plan."""
        self._tails.grow(len(self._table))
        rows = self._admitted_rows(columns, excluded, aside, lmq)
        if len(rows.queue) == 0:
            empty = np.empty(0, np.int64)
            change = TailChange(empty, self._tails.of(empty), self._tails.of(empty))
            return CyclePlan([], [], change, 0, 0, [])
        order = self._order(rows)
        runs = self._runs(columns, rows, order)
        gaps, unusual, repeated = self._continue_queues(runs, gap_reason)
        change = self._change(runs)
        # Each large run gets an object of its own; the others of one TTL class share one, in the order of queues.
        by_queue = np.argsort(self._generations.rank()[runs.ordinal], kind="stable")
        is_large = runs.byte_count[by_queue] >= self._split_bytes
        is_large |= self._ttl_classes.is_alone(self._table)[runs.ordinal[by_queue]]
        groups = [by_queue[i : i + 1] for i in np.flatnonzero(is_large)]
        ttl_days = self._ttl_days(columns, rows, runs, order)
        small = by_queue[~is_large]
        groups += [small[ttl_days[small] == days] for days in np.unique(ttl_days[small])]
        generation_of_row = self._generation_of_row(rows, runs, order)
        objects = [
            self._object(group, int(ttl_days[group[0]]), columns, rows, runs, order, generation_of_row)
            for group in groups
        ]
        messages, timers = int((runs.end - runs.base).sum()), self._timers(columns, rows, runs, order)
        raw_bytes = int(runs.byte_count.sum())
        return CyclePlan(objects, gaps, change, messages, raw_bytes, unusual, timers, repeated)

    def next_offsets(self, ordinals: Ints) -> Ints:
        """Ends of queues, UNKNOWN for new ones."""
        self._tails.grow(len(self._table))
        return self._tails.of(ordinals)[:, 0]

    def archived_key(self, ordinal: int) -> QueueKey | None:
        """The present generation of a queue; None if nothing of it is archived."""
        next_offset, _, _, generation = (int(value) for value in self._tails.of(np.array([ordinal]))[0])
        return None if next_offset == UNKNOWN else self._generations.key(ordinal, generation)

    def reload(self, state: CatalogState, queues: Iterable[QueueKey]) -> None:
        """Take the ends of ``queues`` from ``state``; no cycle is in flight."""
        for topic, queue_id, _ in queues:
            generation = state.current_generation(topic, queue_id)
            row = state.queue(key := QueueKey(topic, queue_id, generation or 0))
            assert row is not None
            self._tails.set(self.ordinal_of(key), key.generation, row)

    def ordinal_of(self, key: QueueKey) -> int:
        """The ordinal of a queue that is in the table. The rows are compared one by one, as only the thread that scans
        the log may use the table's own search."""
        ids = self._table.queue_id[: len(self._table)]
        return next(
            at for at in np.flatnonzero(ids == key.queue_id).tolist() if self._table.topic(at) == key.topic
        )

    def _admitted_rows(
        self, columns: RecordColumns, excluded: Sequence[int], aside: Sequence[int], offsets: LmqOffsets
    ) -> _Rows:
        """The consume-queue rows to archive: one for each record of ``columns`` whose topic is archived, then one for
        each entry of an LMQ. ``excluded``: rows of records that are not archived; ``aside``: of those that only LMQs
        have; ``offsets``: of LMQ entries where these differ from what the records say."""
        count = columns.rows
        is_topic_archived = self._table.admitted[: len(self._table)] == 1
        is_stored = is_topic_archived[columns.queue[:count]]
        is_stored[[*excluded, *aside]] = False
        record = np.flatnonzero(is_stored)
        queue = columns.queue[record].astype(np.int64)
        offset = columns.queue_offset[record]
        inner = columns.inner_num[record].astype(np.int64)
        records = len(record)
        if columns.lmq_rows:
            lmq, lmq_offset = resolved_lmq_rows(columns, offsets)
            is_archived = is_topic_archived[columns.lmq_queue[lmq]] & ~np.isin(columns.lmq_row[lmq], excluded)
            # A record that lists its own queue as an LMQ is in it once, as in the broker's consume queue.
            is_archived &= columns.lmq_queue[lmq] != columns.queue[columns.lmq_row[lmq]]
            lmq, lmq_offset = lmq[is_archived], lmq_offset[is_archived]
            record = np.concatenate([record, columns.lmq_row[lmq]])
            queue = np.concatenate([queue, columns.lmq_queue[lmq]])
            offset = np.concatenate([offset, lmq_offset])
            inner = np.concatenate([inner, np.ones(len(lmq), np.int64)])
        return _Rows(record, queue.astype(np.int32), offset, inner.astype(np.int32), records, is_stored)

    def _order(self, rows: _Rows) -> Ints:
        """The indexes that sort ``rows`` by queue, and those of one queue by their place in the log."""
        stored, lmq = rows.queue[: rows.records], rows.queue[rows.records :]
        has_both = len(lmq) and bool((np.bincount(stored, minlength=len(self._table))[lmq] > 0).any())
        if has_both:  # a client sends to an LMQ's name directly
            by_queue_and_record: Ints = np.lexsort((rows.record, rows.queue))
            return by_queue_and_record
        return split_by_queue(rows.queue, len(rows.queue), len(self._table), self._scratch).order

    def _runs(self, columns: RecordColumns, rows: _Rows, order: Ints) -> _Runs:
        """Divide the rows, which ``order`` sorts by queue, into runs: rows of one queue with contiguous offsets. The
        runs are made as if each continued its queue's tail; ``_continue_queues`` corrects the others."""
        queue, base = rows.queue[order], rows.queue_offset[order]
        end = base + rows.inner_num[order]
        first = np.flatnonzero(np.concatenate([[True], (queue[1:] != queue[:-1]) | (base[1:] != end[:-1])]))
        count = np.diff(np.append(first, len(order)))
        ordinal, base, end = queue[first].astype(np.int64), base[first], end[first + count - 1]
        record = rows.record[order]
        size = columns.size[record].astype(np.int64)
        stamp = columns.store_timestamp[record]
        phys = columns.phys[record]
        # A run of LMQ entries refers to the rows of its messages, unless one of them is in no archived queue: then it
        # stores the bytes itself.
        is_lmq = np.logical_and.reduceat((order >= rows.records) & rows.is_stored[record], first)
        is_batch = np.logical_or.reduceat((columns.flags[record] & FLAG_BATCH) != 0, first)
        kind = np.where(is_lmq, RunKind.LMQ, np.where(is_batch, RunKind.BATCH, RunKind.PLAIN))
        tails = self._tails.of(ordinal)
        byte_count = np.where(is_lmq, 0, np.add.reduceat(size, first))
        return _Runs(
            ordinal=ordinal,
            first=first,
            rows=count,
            base=base,
            end=end,
            kind=kind,
            generation=tails[:, 3].copy(),
            base_byte=np.where(is_lmq, 0, tails[:, 1]),
            byte_count=byte_count,
            end_byte=tails[:, 1] + byte_count,
            min_timestamp=np.minimum.reduceat(stamp, first),
            max_timestamp=np.maximum.reduceat(stamp, first),
            min_phys=phys[first],
            end_phys=phys[first + count - 1] + size[first + count - 1],
        )

    def _continue_queues(
        self, runs: _Runs, reason: GapReason
    ) -> tuple[list[PlannedGap], list[UnusualQueue], list[RepeatedOffset]]:
        """Compare every run with the end of its queue. Sets generation and first byte, in place, of runs that do not
        continue it. Returns the gaps (``reason``: why offsets are missing), the queues with such runs, and the offsets
        that queues had before."""
        tails = self._tails.of(runs.ordinal)
        is_first = np.ones(len(runs.ordinal), bool)
        is_first[1:] = runs.ordinal[1:] != runs.ordinal[:-1]
        continues = is_first & ((tails[:, 0] == UNKNOWN) | (tails[:, 0] == runs.base))
        begins_late = is_first & (tails[:, 0] == UNKNOWN) & (runs.base > 0)
        is_unusual = (begins_late | ~continues) & (runs.kind != RunKind.LMQ)
        ordinals = np.unique(runs.ordinal[is_unusual])
        next_offsets = self._tails.of(ordinals)[:, 0]
        unusual = list(map(UnusualQueue, ordinals.tolist(), next_offsets.tolist()))
        gaps, repeated = list[PlannedGap](), list[RepeatedOffset]()
        # ``present``: the queue whose runs are compared now; the others: where it ends so far.
        present = next_offset = byte = end_phys = generation = -1
        for i in np.flatnonzero(~continues | _has_unusual_successor(runs.ordinal, continues)):
            ordinal = int(runs.ordinal[i])
            if ordinal != present:
                present = ordinal
                next_offset, byte, end_phys, generation = (int(v) for v in tails[i])
            base = int(runs.base[i])
            if next_offset != UNKNOWN and base > next_offset:
                queue = self._generations.key(ordinal, generation)
                gap_reason = self._gap_reason(queue, end_phys, int(runs.min_phys[i]), reason)
                gaps.append(PlannedGap(queue, next_offset, base, gap_reason))
            elif base < next_offset:
                # The topic was deleted and created again; or, above offset 0, the broker used an offset again.
                repeated += [RepeatedOffset(ordinal, base, end_phys)] if base else []
                generation, byte = generation + 1, 0
            runs.generation[i] = generation
            runs.base_byte[i] = byte if runs.kind[i] != RunKind.LMQ else 0
            next_offset, byte = int(runs.end[i]), byte + int(runs.byte_count[i])
            runs.end_byte[i], end_phys = byte, int(runs.end_phys[i])
        return gaps, unusual, repeated

    def _gap_reason(self, queue: QueueKey, begin_phys: int, end_phys: int, reason: GapReason) -> GapReason:
        """Why a queue has no records between two offsets of the log. ``reason``: by what this process has read."""
        if self._selections.excluded(queue.topic, begin_phys, end_phys):
            return GapReason.EXCLUDED
        return self._skipped.reason(begin_phys) if reason is GapReason.NEVER_WRITTEN else reason

    def _timers(self, columns: RecordColumns, rows: _Rows, runs: _Runs, order: Ints) -> TimerRows | None:
        """The messages of the gateway topic, which takes timers: messages to be delivered later. None without any."""
        timer_runs = self._timer_queues.among(runs.ordinal)
        if not len(timer_runs):
            return None
        row = order[positions(runs.first[timer_runs], runs.rows[timer_runs])]
        record = rows.record[row]
        keys = map(
            self._generations.key, runs.ordinal[timer_runs].tolist(), runs.generation[timer_runs].tolist()
        )
        queue = np.repeat(np.arange(len(timer_runs)), runs.rows[timer_runs])
        place = columns.position[record], columns.size[record], columns.phys[record]
        return TimerRows(list(keys), queue, rows.queue_offset[row], *place)

    def _change(self, runs: _Runs) -> TailChange:
        """How the ends of the queues of ``runs``, which are sorted by queue, change with these."""
        is_last = np.ones(len(runs.ordinal), bool)
        is_last[:-1] = runs.ordinal[1:] != runs.ordinal[:-1]
        ordinals = runs.ordinal[is_last].astype(np.int64)
        before = self._tails.of(ordinals)
        after = np.stack([runs.end, runs.end_byte, runs.end_phys, runs.generation], axis=1)[is_last]
        return TailChange(ordinals, before, after)

    def _ttl_days(self, columns: RecordColumns, rows: _Rows, runs: _Runs, order: Ints) -> Ints:
        """The TTL class of each run, in days; _LAST for those that never expire. Entries of an LMQ have the class of
        the messages to which they refer, the longest of several."""
        days = self._ttl_classes.days(self._table)
        days = np.where(days == FOREVER_CLASS, _LAST, days)
        of_run: Ints = days[runs.ordinal]
        is_lmq = runs.kind == RunKind.LMQ
        if is_lmq.any():
            of_parents = np.maximum.reduceat(days[columns.queue[rows.record[order]]], runs.first)
            of_run[is_lmq] = of_parents[is_lmq]
        return of_run

    def _generation_of_row(self, rows: _Rows, runs: _Runs, order: Ints) -> Ints | None:
        """The generation of the queue to which each row belongs, by row. Only entries of LMQs, which refer to rows of
        other queues, need it: None without any."""
        if rows.records == len(rows.queue):
            return None
        generation = np.empty(len(order), np.int64)
        generation[order] = np.repeat(runs.generation, runs.rows)
        return generation

    def _object(
        self,
        group: Ints,
        ttl_days: int,
        columns: RecordColumns,
        rows: _Rows,
        runs: _Runs,
        order: Ints,
        generation_of_row: Ints | None,
    ) -> ObjectPlan:
        """Plans the object of the runs number ``group``: its queues, its runs, and its rows in the order of the runs.
        ``ttl_days``: the TTL class of all of them; ``generation_of_row``: the generation of each row, which is required
        if there are rows of LMQs."""
        row = order[positions(runs.first[group], runs.rows[group])]
        record = rows.record[row]
        is_lmq = np.repeat(runs.kind[group] == RunKind.LMQ, runs.rows[group])
        ordinal, generation = runs.ordinal[group], runs.generation[group]
        # Runs of one generation are adjacent.
        is_new = np.ones(len(group), bool)
        is_new[1:] = (ordinal[1:] != ordinal[:-1]) | (generation[1:] != generation[:-1])
        numbers = self._generations.numbers(ordinal[is_new], generation[is_new])
        parent = np.full(len(row), -1, np.int32)
        parent_offset = np.full(len(row), -1, np.int64)
        if is_lmq.any():
            # Rows of LMQs refer to rows of parent queues, which join the queues of the object.
            assert generation_of_row is not None
            row_of_record = np.full(columns.rows, -1, np.int64)
            row_of_record[rows.record[: rows.records]] = np.arange(rows.records)
            parent_generation = generation_of_row[row_of_record[record[is_lmq]]]
            parents = self._generations.numbers(columns.queue[record[is_lmq]], parent_generation)
            parent_offset[is_lmq] = columns.queue_offset[record[is_lmq]]
            numbers = np.concatenate([numbers, parents])
            numbers = numbers[numbered(numbers)[0]]
            index_of_number = np.empty(len(self._generations.roster), np.int32)
            index_of_number[numbers] = np.arange(len(numbers))
            parent[is_lmq] = index_of_number[parents]
        table = np.zeros(len(group), RUN_DTYPE)
        table["queue"] = np.cumsum(is_new) - 1
        table["ordinal"] = np.arange(len(group))
        for name, values in (
            ("kind", runs.kind),
            ("base_queue_offset", runs.base),
            ("end_queue_offset", runs.end),
            ("rows", runs.rows),
            ("base_byte", runs.base_byte),
            ("byte_count", runs.byte_count),
            ("min_store_timestamp", runs.min_timestamp),
            ("max_store_timestamp", runs.max_timestamp),
            ("min_phys", runs.min_phys),
            ("end_phys", runs.end_phys),
        ):
            table[name] = values[group]
        key_count = columns.key_count[record].astype(np.int64)
        key_count[row >= rows.records] = 0  # the parent's row has the keys
        key_start = (
            np.cumsum(columns.key_count[: columns.rows], dtype=np.int64) - columns.key_count[: columns.rows]
        )
        return ObjectPlan(
            is_set=len(group) > 1,
            ttl_class_days=FOREVER_CLASS if ttl_days == _LAST else ttl_days,
            queues=QueueSelection(self._generations.roster, numbers),
            runs=table,
            rows=RowTable(
                position=np.where(is_lmq, -1, columns.position[record]),
                size=columns.size[record],
                tags_code=columns.tags_code[record],
                store_timestamp=columns.store_timestamp[record],
                phys=columns.phys[record],
                queue_offset=rows.queue_offset[row],
                inner_num=rows.inner_num[row],
                key_count=key_count.astype(np.uint16),
                parent=parent,
                parent_queue_offset=parent_offset,
                key_hashes=columns.key_hashes[positions(key_start[record], key_count)],
            ),
        )


def _has_unusual_successor(ordinal: Ints, continues: Ints) -> Ints:
    """Whether a later run of the same queue does not continue it."""
    followed = np.zeros(len(ordinal), bool)
    followed[:-1] = (ordinal[1:] == ordinal[:-1]) & ~continues[1:]
    return followed
