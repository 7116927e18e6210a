"""Consume queues in RocksDB (``storeType=defaultRocksDB``) of a stopped broker.

A running broker's database shows nothing new: its entries are in a memtable without a log, so the commitlog must be
followed instead. Family ``default``: {topic length 4, 1, topic, 1, queue id 4, 1, queue offset 8} -> {phys 8, size 4,
tagsCode 8, store time 8}. Family ``offset``: {topic length 4, 1, topic, 1, "max" or "min", 1, queue id 4} -> {phys 8,
queue offset 8}, where max is the *last* offset.

Sources: org.apache.rocketmq.store.queue.RocksDBConsumeQueueTable, RocksDBConsumeQueueOffsetTable.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from tiered.broker_store.consume_queue_index import UNIT_DTYPE, BrokerQueue, QueueKind, empty_units
from tiered.broker_store.rocksdb_copy import RocksdbCopy
from tiered.errors import CorruptionError
from tiered.model.tables import Table

_MARK: Final = b"\x01"
_OFFSETS = struct.Struct(">qq")
_OFFSET_TAIL_BYTES: Final = 1 + 3 + 1 + 4
_VALUE_BYTES: Final = 28
_DISPATCHED_TOPIC: Final = b"CHECKPOINT_TOPIC"
"""Not a topic: its "max" is the physical offset of the last dispatched record."""
_Key = tuple[str, int]


class RocksdbConsumeQueues:
    """ConsumeQueueIndex over a RocksDB as of its opening. Reading is thread-safe, ``refresh`` is not."""

    def __init__(self, directory: Path, min_phys: Callable[[], int]) -> None:
        self._directory = directory
        self._min_phys = min_phys
        self._database = RocksdbCopy(directory, link_tables=True)
        self._last: dict[_Key, int] = {}
        self._read_offsets()

    def refresh(self) -> None:
        """See ConsumeQueueIndex: opens the database again."""
        self._database.close()
        self._database = RocksdbCopy(self._directory, link_tables=True)
        self._read_offsets()

    def queues(self) -> list[BrokerQueue]:
        """See ConsumeQueueIndex."""
        return [BrokerQueue(*key, QueueKind.ROCKSDB) for key in sorted(self._last)]

    def contains(self, topic: str, queue_id: int) -> bool:
        """See ConsumeQueueIndex."""
        return (topic, queue_id) in self._last

    def min_offset(self, topic: str, queue_id: int) -> int:
        """See ConsumeQueueIndex."""
        return self._lower_bound(topic, queue_id, self._min_phys())

    def max_offset(self, topic: str, queue_id: int) -> int:
        """See ConsumeQueueIndex."""
        return self._last.get((topic, queue_id), -1) + 1

    def units(self, topic: str, queue_id: int, from_offset: int, count: int) -> Table:
        """See ConsumeQueueIndex."""
        prefix = _prefix(topic, queue_id)
        found: list[tuple[int, int, int, int, int]] = []
        first = prefix + max(from_offset, 0).to_bytes(8, "big")
        for key, value in islice(self._database.items(from_key=first), max(count, 0)):
            if not key.startswith(prefix):
                break
            if len(value) < _VALUE_BYTES or len(key) != len(prefix) + 8:
                raise CorruptionError(f"{self._directory}: unit of {topic}/{queue_id} has {len(value)} bytes")
            phys, size, tags_code = struct.unpack_from(">qiq", value)
            found.append((phys, size, tags_code, int.from_bytes(key[-8:], "big"), 1))
        return np.array(found, UNIT_DTYPE)

    def last_unit(self, topic: str, queue_id: int) -> Table:
        """See ConsumeQueueIndex."""
        last = self._last.get((topic, queue_id))
        return self.units(topic, queue_id, last, 1) if last is not None else empty_units()

    def last_records(self) -> dict[_Key, tuple[int, int]]:
        """See ConsumeQueueIndex."""
        lasts = {key: self.last_unit(*key) for key in self._last}
        return {key: (int(last["phys"][0]), int(last["size"][0])) for key, last in lasts.items() if len(last)}

    def that_end_elsewhere(self, ends: Mapping[_Key, int]) -> list[_Key]:
        """See ConsumeQueueIndex."""
        return [key for key, end in ends.items() if key in self._last and self.max_offset(*key) != end]

    def shown(self) -> set[_Key]:
        """See ConsumeQueueIndex."""
        return set(self.last_records())

    def frontier_phys(self, at_least: int | None = None) -> int:
        """See ConsumeQueueIndex."""
        frontier = 0
        for key in self._last:
            last = self.last_unit(*key)
            if len(last):
                frontier = max(frontier, int(last["phys"][0] + last["size"][0]))
                if at_least is not None and frontier >= at_least:
                    break
        return frontier

    def units_between(self, begin_phys: int, end_phys: int) -> dict[_Key, Table]:
        """See ConsumeQueueIndex."""
        found = {}
        for key in sorted(self._last):
            units = self.units_of_records(*key, begin_phys, end_phys)
            if len(units):
                found[key] = units
        return found

    def units_of_records(self, topic: str, queue_id: int, begin_phys: int, end_phys: int) -> Table:
        """See ConsumeQueueIndex."""
        first = self._lower_bound(topic, queue_id, begin_phys)
        units = self.units(topic, queue_id, first, self._lower_bound(topic, queue_id, end_phys) - first)
        below: Table = units[units["phys"] < end_phys]  # LMQs have holes
        return below

    def close(self) -> None:
        """See ConsumeQueueIndex."""
        self._database.close()

    def _lower_bound(self, topic: str, queue_id: int, phys: int) -> int:
        """First offset whose record begins at or above ``phys``; the maximum when there is none."""
        low, high = 0, self.max_offset(topic, queue_id)
        while low < high:
            middle = (low + high) // 2
            unit = self.units(topic, queue_id, middle, 1)
            if len(unit) == 0 or unit["phys"][0] >= phys:
                high = middle
            else:
                low = int(unit["queue_offset"][0]) + 1
        unit = self.units(topic, queue_id, low, 1)
        return int(unit["queue_offset"][0]) if len(unit) else self.max_offset(topic, queue_id)

    def _read_offsets(self) -> None:
        self._last = {}
        for key, value in self._database.items("offset"):
            length = int.from_bytes(key[:4], "big")
            topic, tail = key[5 : 5 + length], key[5 + length :]
            if topic == _DISPATCHED_TOPIC:
                continue
            if len(tail) != _OFFSET_TAIL_BYTES or len(value) < _OFFSETS.size:
                raise CorruptionError(f"{self._directory}: an entry of family offset has {len(key)} bytes")
            if tail[1:4] == b"max":
                self._last[topic.decode("utf-8"), int.from_bytes(tail[5:], "big")] = _OFFSETS.unpack_from(
                    value
                )[1]


def _prefix(topic: str, queue_id: int) -> bytes:
    name = topic.encode("utf-8")
    return b"".join((len(name).to_bytes(4, "big"), _MARK, name, _MARK, queue_id.to_bytes(4, "big"), _MARK))
