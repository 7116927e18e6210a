"""Which references to light queues a broker made of its records, and at what offsets.

A record names light queues in properties, with the offsets that the broker gave them. What becomes of it is not in the
record: 4.9 and 5.0 dispatch records of every topic, later ones leave some topics out; 4.9 dispatches plain names too;
names with a slash are only good in RocksDB; a broker without ``enableMultiDispatch`` dispatches nothing, and what a
client copied from a message elsewhere looks the same. A consume queue in files takes a record named twice once, though
two offsets were counted: all offsets that follow are ahead of the places in the queue, until the broker starts anew.

So where references do something unusual the queue's own units are asked, and what they show is what was made. Where
they show nothing (they went with the broker's old files, or are in the RocksDB of a broker that runs), what every
broker would have made is believed, and of the rest only what goes on where its queue ended: an offset that came with a
copied message is below that.

Owns the question and the decision. Source: ConsumeQueue.multiDispatchLmqQueue and putMessagePositionInfo,
MultiDispatchUtils, RocksDBConsumeQueueStore.dispatchLMQ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.broker_store.consume_queue_index import ConsumeQueueIndex
from tiered.kernels.queue_table import ADMITTED, QueueTable
from tiered.kernels.scan import DOUBT_PLAIN, DOUBT_SLASH, DOUBT_TOPIC, RecordColumns
from uploader.queue_tails import UNKNOWN

logger = logging.getLogger(__name__)

Ints = NDArray[Any]
LmqOffsets = Mapping[tuple[int, int], int]
"""(physical offset of the record, ordinal of the queue) → the record's offset there, or LEFT_OUT. References that it
does not name are made if they are not in doubt."""

LEFT_OUT = -1
NO_WORD = -1
NOT_THERE = -2
ASKED_MAX = 20_000
"""Queues asked about one batch."""
LOOKED_UP_MAX = 1024
"""References of a queue that are looked up one by one."""
_AHEAD_MAX = 10_000
_NAMES_FEW = 16


@dataclass(frozen=True)
class LmqRules:
    """What is known of the broker. ``in_rocksdb``: where its light queues are; not in files. ``is_off``: it says that
    it dispatches to none now."""

    in_rocksdb: bool = False
    is_off: bool = False


class Place(NamedTuple):
    """Where a queue goes on: at ``offset``, UNKNOWN if nobody knows; what the next record will claim if the broker
    counted on."""

    offset: int
    claimed: int


class Claims(NamedTuple):
    """References to one queue, in log order: offset claimed, times the record names the queue, DOUBT bits, and what the
    queue's units say (the offset, NO_WORD, or NOT_THERE)."""

    offset: Sequence[int]
    times: Sequence[int]
    doubt: Sequence[int]
    said: Sequence[int]


def resolved_lmq_rows(columns: RecordColumns, word: LmqOffsets) -> tuple[Ints, Ints]:
    """(light-queue row, queue offset) of the references to make, in log order; each once."""
    index, _ = _named_once(columns)
    offset = columns.lmq_queue_offset[index]
    is_made = columns.lmq_doubt[index] == 0
    if word:
        phys, queue = columns.phys[columns.lmq_row[index]], columns.lmq_queue[index]
        for at in np.flatnonzero(np.isin(phys, [phys for phys, _ in word])).tolist():
            told = word.get((int(phys[at]), int(queue[at])))
            if told is not None:
                is_made[at], offset[at] = told != LEFT_OUT, told
    return index[is_made], offset[is_made]


def _named_once(columns: RecordColumns) -> tuple[Ints, Ints]:
    """The first of the references of each record to each queue, and how many there are."""
    count = columns.lmq_rows
    queue, row = columns.lmq_queue[:count], columns.lmq_row[:count]
    if not _has_named_twice(queue, row):
        return np.arange(count), np.ones(count, np.int64)
    code = queue.astype(np.int64) * max(columns.rows, 1) + row
    _, first, times = np.unique(code, return_index=True, return_counts=True)
    order = np.argsort(first)
    return first[order], times[order]


def _has_named_twice(queue: Ints, row: Ints) -> bool:
    """Whether a record names a queue twice, or so many that it must be looked at. A record's references stand together,
    and are few: comparing neighbours costs less than sorting all."""
    for distance in range(1, _NAMES_FEW):
        is_same_record = row[distance:] == row[:-distance]
        if not is_same_record.any():
            return False
        if (is_same_record & (queue[distance:] == queue[:-distance])).any():
            return True
    return True


def decide(claims: Claims, begin: Place, rules: LmqRules) -> tuple[list[int], Place]:
    """The offset of each reference in its queue, or LEFT_OUT; and where the queue goes on. Pure."""
    offsets, place = [], begin
    for claimed, times, doubt, said in zip(*claims, strict=True):
        if said == NO_WORD:
            offset = _without_units(claimed, doubt, place, rules)
        else:
            offset = LEFT_OUT if said == NOT_THERE else said
        offsets.append(offset)
        if offset != LEFT_OUT:
            place = Place(offset + 1, claimed + times)
    return offsets, place


def _without_units(claimed: int, doubt: int, place: Place, rules: LmqRules) -> int:
    if doubt & DOUBT_PLAIN:
        return LEFT_OUT
    if rules.in_rocksdb:  # never of the topics in doubt, whatever the name
        is_sure, may_go_on = not doubt & DOUBT_TOPIC, False
    else:
        is_sure, may_go_on = doubt == 0, not doubt & DOUBT_SLASH
    if claimed == place.offset and (is_sure or (may_go_on and place.claimed == place.offset)):
        return claimed
    if not is_sure or rules.is_off:
        return LEFT_OUT
    counted_on = not rules.in_rocksdb and place.offset != UNKNOWN and claimed == place.claimed
    return place.offset if counted_on else claimed


class _Records(NamedTuple):
    """Of references to one queue, in log order: where the record is, its offset as it claims, DOUBT bits."""

    phys: Ints
    size: Ints
    claimed: Ints
    doubt: Ints


class LmqDispatch:
    """Asked about batches of one log, in order. ``rules`` are asked for each time."""

    def __init__(
        self,
        table: QueueTable,
        consume_queues: Callable[[], ConsumeQueueIndex | None],
        rules: Callable[[], LmqRules],
    ) -> None:
        self._table = table
        self._consume_queues = consume_queues
        self._rules = rules
        self._claimed: dict[tuple[int, int], int] = {}
        """What is claimed next, by (queue, where it goes on), where that differs."""

    def offsets(self, columns: RecordColumns, next_offsets: Callable[[Ints], Ints]) -> LmqOffsets:
        """What is unusual. ``next_offsets``: where queues end, by ordinal.

        Costs nothing where queues go on as they were; else some reads for each that does not.
        """
        if not columns.lmq_rows:
            return {}
        index, times = _named_once(columns)
        is_admitted = self._table.admitted[columns.lmq_queue[index]] == ADMITTED
        index, times = index[is_admitted], times[is_admitted]
        order = np.argsort(columns.lmq_queue[index], kind="stable")
        index, times = index[order], times[order]
        queue = columns.lmq_queue[index]
        first = np.flatnonzero(np.concatenate([[True], queue[1:] != queue[:-1]])) if len(queue) else index
        ends, rules = next_offsets(queue[first]), self._rules()
        unusual = np.flatnonzero(_is_unusual(columns, index, times, first, ends) | rules.is_off)
        units = self._index(len(unusual))
        word: dict[tuple[int, int], int] = {}
        behind = np.append(first[1:], len(queue))
        for at in unusual.tolist():
            mine = slice(int(first[at]), int(behind[at]))
            rows, ordinal, end = index[mine], int(queue[first[at]]), int(ends[at])
            records = _Records(
                columns.phys[columns.lmq_row[rows]],
                columns.size[columns.lmq_row[rows]],
                columns.lmq_queue_offset[rows],
                columns.lmq_doubt[rows],
            )
            said = self._asked(units, ordinal, records)
            claims = Claims(
                records.claimed.tolist(), times[mine].tolist(), records.doubt.tolist(), said.tolist()
            )
            offsets, place = decide(claims, Place(end, self._claimed.get((ordinal, end), end)), rules)
            self._remember(ordinal, place)
            word |= zip(((phys, ordinal) for phys in records.phys.tolist()), offsets, strict=True)
        return word

    def _index(self, questions: int) -> ConsumeQueueIndex | None:
        if not 0 < questions <= ASKED_MAX:
            return None
        try:
            return self._consume_queues()
        except Exception as error:
            logger.warning("consume queues not asked about light queues: %s", error)
            return None

    def _asked(self, index: ConsumeQueueIndex | None, ordinal: int, records: _Records) -> Ints:
        topic, queue_id = self._table.topic(ordinal), int(self._table.queue_id[ordinal])
        try:
            if index is not None and queue_id >= 0:
                return _units_say(index, topic, queue_id, records)
        except Exception as error:
            # As in header_check.py: nobody may stop archiving for being no header_check.
            logger.warning("consume queue of %s/%d not asked about its records: %s", topic, queue_id, error)
        return np.full(len(records.phys), NO_WORD)

    def _remember(self, ordinal: int, place: Place) -> None:
        if place.claimed != place.offset:
            self._claimed[ordinal, place.offset] = place.claimed
        if len(self._claimed) > _AHEAD_MAX:
            del self._claimed[next(iter(self._claimed))]


def _is_unusual(
    columns: RecordColumns, index: Ints, times: Ints, first: Ints, ends: Ints
) -> NDArray[np.bool_]:
    """Queues, whose references begin at ``first`` of ``index``, with one in doubt, named twice, or not going on."""
    if not len(index):
        return np.zeros(0, bool)
    claimed = columns.lmq_queue_offset[index]
    expected = np.append([0], claimed[:-1] + 1)
    expected[first] = np.where(ends == UNKNOWN, 0, ends)
    is_odd = (claimed != expected) | (columns.lmq_doubt[index] != 0) | (times > 1)
    found: NDArray[np.bool_] = np.logical_or.reduceat(is_odd, first)
    return found


def _units_say(index: ConsumeQueueIndex, topic: str, queue_id: int, records: _Records) -> Ints:
    """For each record the offset of the unit that names it, NO_WORD, or NOT_THERE.

    Places are never ahead of what was counted: a unit above the claimed offset is left over from before a truncation. A
    record is not there if another has its offset, or the queue has some before it and behind. But where all are behind
    it in the log, the queue may have been deleted and made anew, and the record is of the one before: unless in doubt
    it is believed.
    """
    phys, size, claimed, doubt = records
    found_phys, found_size = _units_at(index, topic, queue_id, claimed)
    said = np.where((found_phys == phys) & (found_size == size), claimed, NO_WORD)
    rows = np.flatnonzero(said == NO_WORD)
    if not len(rows):
        return said
    units = index.units_of_records(topic, queue_id, int(phys[rows[0]]), int(phys[rows[-1]]) + 1)
    at = np.searchsorted(phys[rows], units["phys"])
    at[at == len(rows)] = 0
    at = rows[at]
    is_named = (
        (phys[at] == units["phys"]) & (size[at] == units["size"]) & (units["queue_offset"] < claimed[at])
    )
    said[at[is_named][::-1]] = units["queue_offset"][is_named][::-1]
    is_absent = (found_phys >= 0) & ((doubt != 0) | (found_phys < phys))
    first, last = index.units(topic, queue_id, 0, 1), index.last_unit(topic, queue_id)
    if len(first) and len(last):
        is_absent |= (first["phys"][0] < phys) & (phys < last["phys"][0])
    said[(said == NO_WORD) & is_absent] = NOT_THERE
    return said


def _units_at(index: ConsumeQueueIndex, topic: str, queue_id: int, offsets: Ints) -> tuple[Ints, Ints]:
    """(phys, size) of the units at ``offsets``; -1 where there is none, or where so many were not looked up. What a
    record claims may be any number."""
    phys, size = np.full(len(offsets), -1), np.full(len(offsets), -1)
    first, count = int(offsets.min()), int(offsets.max()) - int(offsets.min()) + 1
    if count <= 2 * len(offsets) + LOOKED_UP_MAX:
        units = index.units(topic, queue_id, first, count)
        at = np.searchsorted(units["queue_offset"], offsets)
        at[at == len(units)] = 0
        found = np.flatnonzero(units["queue_offset"][at] == offsets) if len(units) else at[:0]
        phys[found], size[found] = units["phys"][at[found]], units["size"][at[found]]
        return phys, size
    for row in range(min(len(offsets), LOOKED_UP_MAX)):
        unit = index.units(topic, queue_id, int(offsets[row]), 1)
        if len(unit) and unit["queue_offset"][0] == offsets[row]:
            phys[row], size[row] = unit["phys"][0], unit["size"][0]
    return phys, size
