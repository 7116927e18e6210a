"""Compares the consume queues of a stopped broker with its commitlog."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tiered.broker_store.config import is_batch_topic
from tiered.broker_store.damage import RECORD_BYTES_MIN
from tiered.broker_store.store import BrokerStore
from tiered.consume_queue.index import ConsumeQueueIndex
from tiered.consume_queue.store import StoreKind
from tiered.errors import UnavailableError
from tiered.model.tables import Table
from uploader.queue_units import LogUnits, is_living_topic

NAMED_QUEUES: Final = 20
_UNITS: Final = 64 * 1024
_FIELDS: Final = ("phys", "size", "tags_code", "inner_num")


@dataclass
class QueueProblems:
    """``missing``: records without a unit; ``wrong``: units that differ from their records; ``extra``: units without a
    record. ``begin`` and ``end``: offsets of the records."""

    topic: str
    queue_id: int
    begin: int = 0
    end: int = 0
    missing: int = 0
    wrong: int = 0
    extra: int = 0

    @property
    def count(self) -> int:
        """All problems."""
        return self.missing + self.wrong + self.extra


@dataclass
class QueueCheck:
    """``undispatched``: missing units at the log's end, which the broker writes when it starts. ``damaged``: (begin,
    end) of the log that is no record."""

    queues: int = 0
    units: int = 0
    undispatched: int = 0
    problems: list[QueueProblems] = field(default_factory=list)
    damaged: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether queues and log agree."""
        return not self.problems and not self.damaged


def check_queues(store: BrokerStore, observe: Callable[[int, int], None]) -> QueueCheck:
    """Check all queues. Raises UnavailableError while a broker keeps its queues in RocksDB, where they are hidden."""
    index = store.consume_queues()
    if index is None or not store.liveness().is_dead:
        raise UnavailableError(
            f"the broker of {store.path} runs", hint="stop it: its queues change while they are checked"
        )
    return _Check(store, index).run(observe)


class _Check:
    def __init__(self, store: BrokerStore, index: ConsumeQueueIndex) -> None:
        self._store, self._index = store, index
        self._topics = store.topics()
        self._kind = StoreKind.ROCKSDB if store.has_rocksdb_queues else StoreKind.FILE
        self._found: dict[tuple[str, int], QueueProblems] = {}
        self._result = QueueCheck()
        self._frontier = index.frontier_phys()

    def run(self, observe: Callable[[int, int], None]) -> QueueCheck:
        log = self._store.commit_log
        begin, total = log.broker_min_phys, log.data_end_phys()
        for part in LogUnits(self._store, self._kind).parts(begin):
            for queue in part.queues:
                if self._is_expected(queue.topic, queue.queue_id):
                    self._compare(queue.topic, queue.queue_id, queue.units, is_restart=queue.is_restart)
            self._result.damaged += [(damage.begin_phys, damage.end_phys) for damage in part.damaged]
            observe(part.to_phys - begin, max(total, part.to_phys) - begin)
        for stored in self._index.queues():
            if not self._is_batch_in_rocksdb(stored.topic):
                self._count_extra(stored.topic, stored.queue_id)
        self._result.queues = len(self._found)
        self._result.problems = [problems for problems in self._found.values() if problems.count]
        return self._result

    def _is_expected(self, topic: str, queue_id: int) -> bool:
        """Records of deleted topics stay in the log."""
        is_known = is_living_topic(topic, self._topics) or self._index.contains(topic, queue_id)
        return is_known and not self._is_batch_in_rocksdb(topic)

    def _is_batch_in_rocksdb(self, topic: str) -> bool:
        """RocksDB has no BatchCQ, but a broker may write units of such records all the same."""
        return self._kind is StoreKind.ROCKSDB and is_batch_topic(self._topics.get(topic))

    def _compare(self, topic: str, queue_id: int, units: Table, *, is_restart: bool) -> None:
        found = self._found.get((topic, queue_id))
        if found is None or is_restart:
            found = QueueProblems(topic, queue_id, begin=int(units["queue_offset"][0]))
            self._found[topic, queue_id] = found
        last = units[-1]
        found.end = int(last["queue_offset"] + last["inner_num"])
        first, places = (
            int(units["queue_offset"][0]),
            int(last["queue_offset"] - units["queue_offset"][0]) + 1,
        )
        stored = self._index.units(topic, queue_id, first, places)
        is_of_record = (stored["queue_offset"] <= last["queue_offset"]) & (stored["size"] >= RECORD_BYTES_MIN)
        stored = stored[is_of_record]
        at = np.searchsorted(stored["queue_offset"], units["queue_offset"])
        is_there = at < len(stored)
        is_there[is_there] = stored["queue_offset"][at[is_there]] == units["queue_offset"][is_there]
        pairs = units[is_there], stored[at[is_there]]
        is_wrong = np.logical_or.reduce([pairs[0][name] != pairs[1][name] for name in _FIELDS])
        times = pairs[1]["store_timestamp"]
        is_wrong |= (times != 0) & (times != pairs[0]["store_timestamp"])
        absent = units[~is_there]
        undispatched = int((absent["phys"] >= self._frontier).sum())
        self._result.units += len(pairs[0])
        self._result.undispatched += undispatched
        found.missing += len(absent) - undispatched
        found.wrong += int(is_wrong.sum())
        found.extra += len(stored) - len(pairs[1])

    def _count_extra(self, topic: str, queue_id: int) -> None:
        """Units outside of the records' offsets. One of fewer bytes than a record marks a gap."""
        found = self._found.setdefault((topic, queue_id), QueueProblems(topic, queue_id))
        at = self._index.min_offset(topic, queue_id)
        for end in (found.begin, self._index.max_offset(topic, queue_id)):
            while at < end and len(units := self._index.units(topic, queue_id, at, _UNITS)):
                units = units[units["queue_offset"] < end]
                found.extra += int((units["size"] >= RECORD_BYTES_MIN).sum())
                at = int(units["queue_offset"][-1] + units["inner_num"][-1]) if len(units) else end
            at = max(at, found.end)
