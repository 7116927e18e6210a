"""Consume queue units of a whole commitlog, from its records alone, as a broker dispatches them.

Half and rolled back transactions have no unit, units of scheduled messages have the deliver time as tags code, and a
record has a further unit in each of its LMQs. A queue whose offsets go back belongs to a topic that was deleted and
created again. Offsets whose records are damaged or not in the log get units that name no record, as the queue would end
there otherwise.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.conf import BrokerConf, is_true
from tiered.broker_store.damage import record_size, stored_size
from tiered.broker_store.store import BrokerStore
from tiered.consume_queue.index import UNIT_DTYPE
from tiered.consume_queue.store import StoreKind
from tiered.errors import CorruptionError
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.split import SplitScratch, split_by_queue
from tiered.model.queue import LMQ_PREFIX, TopicFilter
from tiered.model.tables import Table
from uploader.lmq_dispatch import LmqDispatch, LmqRules, resolved_lmq_rows
from uploader.log_batch import DamagedRange, LogBatch
from uploader.log_feed import FeedBound, FeedOutcome, LogFeed
from uploader.queue_tails import UNKNOWN

GAP_BYTES: Final = 2
"""The size in a unit that names no record."""
GAP_UNITS_MAX: Final = 10_000_000
"""If more offsets than these are missing in one place, the log is taken to be damaged."""
WINDOW_BYTES: Final = 32 * 1024 * 1024
_Key = tuple[str, int]


class QueueUnits(NamedTuple):
    """Units of one queue in the order of the log; ``is_restart``: earlier ones belong to a deleted topic."""

    topic: str
    queue_id: int
    units: Table
    is_restart: bool


class LogPart(NamedTuple):
    """The units of [from_phys, to_phys) of the log, by queue, and what is no record there."""

    from_phys: int
    to_phys: int
    queues: list[QueueUnits]
    damaged: list[DamagedRange]


class LogUnits:
    """Reads the commitlog of ``store``, whose broker does not run, for queues of ``kind``.

    ``ends``: queue -> one past its last offset, to continue after an interruption. ``fills_gap``: whether a topic gets
    units at offsets without a record.
    """

    def __init__(
        self,
        store: BrokerStore,
        kind: StoreKind,
        *,
        ends: dict[_Key, int] | None = None,
        fills_gap: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """``kind``: where the queues will be, which decides how a broker adds records to LMQs. Records of which only
        ``__CRC32#`` is wrong are taken, unless the broker's configuration has forceVerifyPropCRC."""
        self._log = store.commit_log
        self._table = QueueTable()
        self._scratch = SplitScratch()
        conf = store.conf or BrokerConf()
        is_crc_binding = is_true(conf.properties, "forceVerifyPropCRC")
        self._feed = LogFeed(
            self._log,
            self._table,
            TopicFilter(include_system=True),
            delay_levels_ms=conf.delay_levels_ms,
            accepted_size=lambda phys: None if is_crc_binding else stored_size(self._log, phys),
        )
        properties = None if store.conf is None else store.conf.properties
        rules = LmqRules.of(properties, in_rocksdb=kind is StoreKind.ROCKSDB)
        self._lmqs = LmqDispatch(self._table, lambda: None, lambda: rules)
        self._ends = dict(ends or {})
        self._fills_gap = fills_gap
        self.end_phys = self._log.max_file_end

    def parts(self, begin_phys: int) -> Iterator[LogPart]:
        """The consume-queue units of the log from ``begin_phys`` to its last record, in parts of the log. A part is
        valid until the next one is requested, as they share memory."""
        bound = FeedBound(self.end_phys, _proven_phys(self._log))
        batch = LogBatch(WINDOW_BYTES)
        batch.reset(begin_phys, 0)
        while True:
            outcome = self._feed.advance(batch, bound, batch.room)
            if batch.to_phys > batch.from_phys:
                yield LogPart(batch.from_phys, batch.to_phys, self._queues(batch), batch.damaged)
            if outcome is FeedOutcome.CAUGHT_UP:
                return
            size = self._feed.oversize_bytes if outcome is FeedOutcome.OVERSIZE else WINDOW_BYTES
            to_phys = batch.to_phys
            if len(batch.arena) != size:
                batch = LogBatch(size)
            batch.reset(to_phys, 0)

    def _queues(self, batch: LogBatch) -> list[QueueUnits]:
        """The consume-queue units of one batch of the log, by queue: a record has one in its own queue, and one in each
        LMQ that the broker added it to."""
        columns = batch.columns
        lmq, lmq_offset = resolved_lmq_rows(columns, self._lmqs.offsets(columns, self._next_offsets))
        own = np.arange(columns.rows)
        row = np.concatenate([own, columns.lmq_row[lmq]])
        queue = np.concatenate([columns.queue[own], columns.lmq_queue[lmq]])
        units = np.zeros(len(row), UNIT_DTYPE)
        for name in ("phys", "size", "tags_code", "store_timestamp"):
            units[name] = getattr(columns, name)[row]
        units["queue_offset"] = np.concatenate([columns.queue_offset[own], lmq_offset])
        units["inner_num"][own] = columns.inner_num[own]
        units["inner_num"][len(own) :] = 1
        split = split_by_queue(queue, len(queue), len(self._table), self._scratch)
        units = units[split.order]
        return [
            self._queue_units(int(ordinal), units[begin:end])
            for ordinal, begin, end in zip(split.queues, split.starts, split.starts[1:], strict=False)
        ]

    def _queue_units(self, ordinal: int, units: Table) -> QueueUnits:
        """The units of the queue number ``ordinal`` in one part of the log, from all its ``units`` there. Where offsets
        go back, the topic was deleted and created again: units before that are dropped, as the broker has dropped
        them. Gaps are filled if the topic wants it."""
        key = self._table.topic(ordinal), int(self._table.queue_id[ordinal])
        ends = units["queue_offset"] + units["inner_num"]
        before = np.concatenate([[self._ends.get(key, 0)], ends[:-1]])
        restarts = np.flatnonzero(units["queue_offset"] < before)
        if len(restarts):
            units, before = units[restarts[-1] :], before[restarts[-1] :]
        if len(restarts) or key not in self._ends:
            before[0] = units["queue_offset"][0]  # a queue may begin anywhere
        self._ends[key] = int(ends[-1])
        is_hole = units["queue_offset"] > before
        if is_hole.any() and self._fills_gap(key[0]):
            units = self._without_holes(key, units, before, np.flatnonzero(is_hole).tolist())
        return QueueUnits(*key, units, len(restarts) > 0)

    def _without_holes(self, key: _Key, units: Table, before: NDArray[np.int64], holes: list[int]) -> Table:
        """``units`` of the queue ``key`` with units for the missing offsets before each of the rows ``holes``;
        ``before`` is the offset that should be in each row. The added units refer to the last byte of the oldest file,
        where no record begins, so that pulls skip them. Raises CorruptionError if more are missing than
        GAP_UNITS_MAX."""
        parts, begin = list[Table](), 0
        for row in holes:
            count = int(units["queue_offset"][row] - before[row])
            if count > GAP_UNITS_MAX:
                raise CorruptionError(
                    f"{key[0]} queue {key[1]}: {count:,} queue offsets are missing in the commitlog from "
                    f"{before[row]:,} on, more than the {GAP_UNITS_MAX:,} for which units are written"
                )
            gap = np.zeros(count, UNIT_DTYPE)
            gap["phys"], gap["size"], gap["inner_num"] = self._log.files[0].end_phys - 1, GAP_BYTES, 1
            gap["queue_offset"] = before[row] + np.arange(count)
            parts += [units[begin:row], gap]
            begin = row
        return np.concatenate([*parts, units[begin:]])

    def _next_offsets(self, ordinals: NDArray[np.int32]) -> NDArray[np.int64]:
        table = self._table
        keys = [(table.topic(ordinal), int(table.queue_id[ordinal])) for ordinal in ordinals.tolist()]
        return np.array([self._ends.get(key, UNKNOWN) for key in keys], np.int64)


def is_living_topic(topic: str, topics: Collection[str]) -> bool:
    """Whether ``topic`` is not deleted, by the topic table, which is unknown if empty. LMQs, and some topics of the
    broker itself, are never there."""
    return not topics or topic in topics or topic.startswith(LMQ_PREFIX) or TopicFilter().is_system(topic)


def _proven_phys(log: CommitLog) -> int:
    """Up to where the log was certainly written, so that an invalid record below is damage: the begin of its last file
    that begins with a record."""
    begins = (file.begin_phys for file in reversed(log.files))
    return next((begin for begin in begins if record_size(log, begin) is not None), log.min_phys)
