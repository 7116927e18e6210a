"""Determines which LMQ entries the broker made of its records, and at which offsets.

A record lists LMQs in properties, with the offsets the broker assigned. The record does not tell what was dispatched:
4.9 and 5.0 dispatch records of every topic, later versions exclude some topics; 4.9 dispatches plain names too; names
with a slash work in RocksDB only; a broker without ``enableMultiDispatch`` dispatches nothing; and properties that a
client copied from another message look the same. A consume queue in files takes a record listed twice once, though two
offsets were counted: later offsets are ahead of the places in the queue until the broker restarts.

So where entries do not continue their queue, the queue's own units are read, and decide. Where there are none (deleted
with the broker's old files, or in the RocksDB of a running broker), entries that every version dispatches are accepted;
of the others only those that continue their queue, because a copied offset is below its end.

Source: ConsumeQueue.multiDispatchLmqQueue and putMessagePositionInfo, MultiDispatchUtils,
RocksDBConsumeQueueStore.dispatchLMQ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.broker_store.conf import is_true
from tiered.consume_queue.index import ConsumeQueueIndex
from tiered.kernels.queue_table import ADMITTED, QueueTable
from tiered.kernels.scan import DOUBT_PLAIN, DOUBT_SLASH, DOUBT_TOPIC, RecordColumns
from uploader.queue_tails import UNKNOWN

logger = logging.getLogger(__name__)

Ints = NDArray[Any]
LmqOffsets = Mapping[tuple[int, int], int]
"""(physical offset of the record, ordinal of the queue) → the record's offset there, or NOT_DISPATCHED. Other entries
are dispatched unless in doubt."""

NOT_DISPATCHED = -1
"""In place of an offset: the broker did not make the entry."""
NO_UNIT = -1
"""In place of an offset: no unit of the queue was found, which proves nothing."""
ABSENT = -2
"""In place of an offset: the queue surely has no unit."""
QUEUES_READ_MAX = 20_000
"""If more queues of a batch need a decision, none of their units is read."""
LOOKED_UP_MAX = 1024
"""Units at the offsets of records are read at once if so many offsets at most lie between these."""
_AHEAD_MAX = 10_000
"""Queues of which it is noted that the broker's count is ahead."""
_NAMES_FEW = 16
"""A record mostly lists fewer queues than this."""


@dataclass(frozen=True)
class LmqRules:
    """The broker's configuration. ``in_rocksdb``: its LMQs are in RocksDB, not in files. ``is_off``: it dispatches
    none."""

    in_rocksdb: bool = False
    is_off: bool = False

    @classmethod
    def of(cls, properties: Mapping[str, str] | None, *, in_rocksdb: bool) -> LmqRules:
        """The rules by the broker's configuration; without one (None) the broker may dispatch to LMQs. Consume queues
        in files take LMQs with ``enableMultiDispatch``, those in RocksDB with ``enableLmq``."""
        name = "enableLmq" if in_rocksdb else "enableMultiDispatch"
        return cls(in_rocksdb, properties is not None and not is_true(properties, name))


class UnitPlace(NamedTuple):
    """Where an LMQ ends: the next ``offset`` in it, UNKNOWN if it is not known, and ``claimed``, the offset that the
    next record says that it has, by the broker's count."""

    offset: int
    claimed: int


class UnitClaims(NamedTuple):
    """What is known of the entries of one LMQ, in the order of the log: the offset that the record says, how often the
    record lists the queue, why it is in doubt whether the broker made the entry (DOUBT bits), and the offset that the
    queue's units say (or NO_UNIT, ABSENT)."""

    offset: Sequence[int]
    times: Sequence[int]
    doubt: Sequence[int]
    by_units: Sequence[int]


def resolved_lmq_rows(columns: RecordColumns, offsets: LmqOffsets) -> tuple[Ints, Ints]:
    """The LMQ entries of ``columns`` that the broker made, in the order of the log, each once: their indexes in the
    ``lmq_…`` columns, and their offsets in the LMQs.

    ``offsets``: for the physical offset of a record and an LMQ, the offset that the LMQ has for it, which goes before
    what the record says, or NOT_DISPATCHED. Entries of which records leave it in doubt whether the broker made them
    count only if they are in it."""
    index, _ = _distinct(columns)
    offset = columns.lmq_queue_offset[index]
    is_dispatched = columns.lmq_doubt[index] == 0
    if offsets:
        phys, queue = columns.phys[columns.lmq_row[index]], columns.lmq_queue[index]
        for at in np.flatnonzero(np.isin(phys, [phys for phys, _ in offsets])).tolist():
            resolved = offsets.get((int(phys[at]), int(queue[at])))
            if resolved is not None:
                is_dispatched[at], offset[at] = resolved != NOT_DISPATCHED, resolved
    return index[is_dispatched], offset[is_dispatched]


def _distinct(columns: RecordColumns) -> tuple[Ints, Ints]:
    """The LMQ entries of ``columns`` without repetitions: the index of the first entry of each record in each queue,
    and how often the record lists that queue."""
    count = columns.lmq_rows
    queue, row = columns.lmq_queue[:count], columns.lmq_row[:count]
    if not _has_duplicates(queue, row):
        return np.arange(count), np.ones(count, np.int64)
    code = queue.astype(np.int64) * max(columns.rows, 1) + row
    _, first, times = np.unique(code, return_index=True, return_counts=True)
    order = np.argsort(first)
    return first[order], times[order]


def _has_duplicates(queue: Ints, row: Ints) -> bool:
    """Whether the entries (``queue`` and ``row`` of the record of each) may have a record that lists a queue twice: one
    does, or lists many queues. A record's entries are few and adjacent, so comparing neighbours costs less than sorting
    all."""
    for distance in range(1, _NAMES_FEW):
        is_same_record = row[distance:] == row[:-distance]
        if not is_same_record.any():
            return False
        if (is_same_record & (queue[distance:] == queue[:-distance])).any():
            return True
    return True


def decide_lmqs(claims: UnitClaims, begin: UnitPlace, rules: LmqRules) -> tuple[list[int], UnitPlace]:
    """The offset in one LMQ of each of its entries ``claims``, or NOT_DISPATCHED if the broker did not make it, and
    where the queue then ends. ``begin``: where it ended before; ``rules``: how the broker is configured. Pure."""
    offsets, place = [], begin
    for claimed, times, doubt, by_units in zip(*claims, strict=True):
        # The queue's own units decide where they could be read.
        if by_units == NO_UNIT:
            offset = _without_units(claimed, doubt, place, rules)
        else:
            offset = NOT_DISPATCHED if by_units == ABSENT else by_units
        offsets.append(offset)
        if offset != NOT_DISPATCHED:
            place = UnitPlace(offset + 1, claimed + times)
    return offsets, place


def _without_units(claimed: int, doubt: int, place: UnitPlace, rules: LmqRules) -> int:
    """The offset in its queue of an LMQ entry whose consume queue cannot be read: ``claimed``, as the record says, if
    the broker surely made the entry or it continues the queue, which ends at ``place``; else NOT_DISPATCHED. ``doubt``:
    DOUBT bits of why the broker may not have made it."""
    if doubt & DOUBT_PLAIN:
        return NOT_DISPATCHED
    if rules.in_rocksdb:  # excluded topics are never dispatched
        is_sure, may_continue = not doubt & DOUBT_TOPIC, False
    else:
        is_sure, may_continue = doubt == 0, not doubt & DOUBT_SLASH
    if claimed == place.offset and (is_sure or (may_continue and place.claimed == place.offset)):
        return claimed
    if not is_sure or rules.is_off:
        return NOT_DISPATCHED
    # A record that listed the queue twice was counted twice: the broker's count is ahead of the places in the queue.
    is_count_ahead = not rules.in_rocksdb and place.offset != UNKNOWN and claimed == place.claimed
    return place.offset if is_count_ahead else claimed


class _Records(NamedTuple):
    """Records with entries of one LMQ, in the order of the log: commitlog offset and size, the offset in the LMQ that
    the record says, and its DOUBT bits."""

    phys: Ints
    size: Ints
    claimed: Ints
    doubt: Ints


class LmqDispatch:
    """Resolves the batches of one log, in order. ``rules`` is called for each."""

    def __init__(
        self,
        table: QueueTable,
        consume_queues: Callable[[], ConsumeQueueIndex | None],
        rules: Callable[[], LmqRules],
    ) -> None:
        """``consume_queues`` returns None while the broker's consume queues cannot be read."""
        self._table = table
        self._consume_queues = consume_queues
        self._rules = rules
        self._claimed: dict[tuple[int, int], int] = {}
        """Offset of the next record by the broker's count, by (queue, end), where it differs from the end."""

    def offsets(self, columns: RecordColumns, next_offsets: Callable[[Ints], Ints]) -> LmqOffsets:
        """The offsets of the LMQ entries of a batch, of queues that do not simply continue: by the broker's consume
        queues where these can be read, otherwise by its rules. All other entries are as the records say.
        ``next_offsets`` returns where queues end, by their numbers.
        """
        if not columns.lmq_rows:
            return {}
        index, times = _distinct(columns)
        is_admitted = self._table.admitted[columns.lmq_queue[index]] == ADMITTED
        index, times = index[is_admitted], times[is_admitted]
        order = np.argsort(columns.lmq_queue[index], kind="stable")
        index, times = index[order], times[order]
        queue = columns.lmq_queue[index]
        first = np.flatnonzero(np.concatenate([[True], queue[1:] != queue[:-1]])) if len(queue) else index
        ends, rules = next_offsets(queue[first]), self._rules()
        unusual = np.flatnonzero(_is_unusual(columns, index, times, first, ends) | rules.is_off)
        units = self._index(len(unusual))
        resolved: dict[tuple[int, int], int] = {}
        behind = np.append(first[1:], len(queue))
        for at in unusual.tolist():
            entries = slice(int(first[at]), int(behind[at]))
            rows, ordinal, end = index[entries], int(queue[first[at]]), int(ends[at])
            records = _Records(
                columns.phys[columns.lmq_row[rows]],
                columns.size[columns.lmq_row[rows]],
                columns.lmq_queue_offset[rows],
                columns.lmq_doubt[rows],
            )
            by_units = self._offsets_by_units(units, ordinal, records, max(end, 0))
            claims = UnitClaims(
                records.claimed.tolist(), times[entries].tolist(), records.doubt.tolist(), by_units.tolist()
            )
            offsets, place = decide_lmqs(
                claims, UnitPlace(end, self._claimed.get((ordinal, end), end)), rules
            )
            self._store_claimed(ordinal, place)
            resolved |= zip(((phys, ordinal) for phys in records.phys.tolist()), offsets, strict=True)
        return resolved

    def _index(self, queues: int) -> ConsumeQueueIndex | None:
        """The broker's consume queues; None if they cannot be read, or if more than QUEUES_READ_MAX of them would be:
        then entries are decided without them."""
        if not 0 < queues <= QUEUES_READ_MAX:
            return None
        try:
            return self._consume_queues()
        except Exception as error:
            # A failed check must not stop archiving.
            logger.warning(
                "entries of %d LMQs are archived without a check against the broker's consume queues: %s",
                queues,
                error,
            )
            return None

    def _offsets_by_units(
        self, index: ConsumeQueueIndex | None, ordinal: int, records: _Records, end: int
    ) -> Ints:
        """The offset at which the broker's consume queue number ``ordinal`` refers to each of ``records``; NO_UNIT
        where it does not or cannot be read, ABSENT where it surely does not. ``end``: where the queue ends in the
        archive."""
        topic, queue_id = self._table.topic(ordinal), int(self._table.queue_id[ordinal])
        try:
            if index is not None and queue_id >= 0:
                return _offsets_in_units(index, topic, queue_id, records, end)
        except Exception as error:
            # A failed check must not stop archiving.
            logger.warning(
                "entries of the LMQ %s queue %d are archived without a check against the broker's consume queue: %s",
                topic,
                queue_id,
                error,
            )
        return np.full(len(records.phys), NO_UNIT)

    def _store_claimed(self, ordinal: int, place: UnitPlace) -> None:
        if place.claimed != place.offset:
            self._claimed[ordinal, place.offset] = place.claimed
        if len(self._claimed) > _AHEAD_MAX:
            del self._claimed[next(iter(self._claimed))]


def _is_unusual(
    columns: RecordColumns, index: Ints, times: Ints, first: Ints, ends: Ints
) -> NDArray[np.bool_]:
    """Whether each LMQ has an entry that needs a decision: the broker may not have made it, a record lists it more than
    once, or it does not continue the queue.

    ``index``: the entries, queue by queue; ``times``: how often each is listed; ``first``: the first of each queue;
    ``ends``: the next offset of each queue.
    """
    if not len(index):
        return np.zeros(0, bool)
    claimed = columns.lmq_queue_offset[index]
    expected = np.append([0], claimed[:-1] + 1)
    expected[first] = np.where(ends == UNKNOWN, 0, ends)
    is_odd = (claimed != expected) | (columns.lmq_doubt[index] != 0) | (times > 1)
    is_unusual: NDArray[np.bool_] = np.logical_or.reduceat(is_odd, first)
    return is_unusual


def _offsets_in_units(
    index: ConsumeQueueIndex, topic: str, queue_id: int, records: _Records, end: int
) -> Ints:
    """The offset at which a consume queue refers to each of ``records``; ABSENT if it surely does not, NO_UNIT if that
    cannot be known.

    First the unit at the offset that the record claims is compared; then any unit with the record's place in the log
    counts, unless its offset is higher: a truncation of the log left it there. Such units mislead a search by place in
    the log, so the units behind ``end``, where the queue ends in the archive, are read as well. A record is absent if
    another has its offset, or the queue has units before and after it. If all units are after it in the log, the queue
    may have been deleted and recreated, and the record belongs to the earlier one: it is absent only if in doubt, which
    means that the broker may have stored the record without an entry in this queue (``doubt`` is not 0).
    """
    phys, size, claimed, doubt = records
    unit_phys, unit_size = _units_at(index, topic, queue_id, claimed)
    offsets = np.where((unit_phys == phys) & (unit_size == size), claimed, NO_UNIT)
    rows = np.flatnonzero(offsets == NO_UNIT)
    if not len(rows):
        return offsets
    units = np.concatenate(
        [
            index.units(topic, queue_id, end, len(rows) + _NAMES_FEW),
            index.units_of_records(topic, queue_id, int(phys[rows[0]]), int(phys[rows[-1]]) + 1),
        ]
    )
    at = np.searchsorted(phys[rows], units["phys"])
    at[at == len(rows)] = 0
    at = rows[at]
    is_referenced = (
        (phys[at] == units["phys"]) & (size[at] == units["size"]) & (units["queue_offset"] <= claimed[at])
    )
    # Reversed, so that the first unit of a record counts.
    offsets[at[is_referenced][::-1]] = units["queue_offset"][is_referenced][::-1]
    is_absent = (unit_phys >= 0) & ((doubt != 0) | (unit_phys < phys))
    first, last = index.units(topic, queue_id, 0, 1), index.last_unit(topic, queue_id)
    if len(first) and len(last):
        is_absent |= (first["phys"][0] < phys) & (phys < last["phys"][0])
    offsets[(offsets == NO_UNIT) & is_absent] = ABSENT
    return offsets


def _units_at(index: ConsumeQueueIndex, topic: str, queue_id: int, offsets: Ints) -> tuple[Ints, Ints]:
    """The commitlog offset and size in the consume-queue units at ``offsets``; -1 where there is no unit. If the
    offsets are far apart none is read: an offset in a record may be any number."""
    phys, size = np.full(len(offsets), -1), np.full(len(offsets), -1)
    first, count = int(offsets.min()), int(offsets.max()) - int(offsets.min()) + 1
    if count <= 2 * len(offsets) + LOOKED_UP_MAX:
        units = index.units(topic, queue_id, first, count)
        at = np.searchsorted(units["queue_offset"], offsets)
        at[at == len(units)] = 0
        has_unit = np.flatnonzero(units["queue_offset"][at] == offsets) if len(units) else at[:0]
        phys[has_unit], size[has_unit] = units["phys"][at[has_unit]], units["size"][at[has_unit]]
    return phys, size
