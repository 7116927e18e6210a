"""Consume queues in RocksDB (``storeType=defaultRocksDB``) of a stopped broker, read without a trace.

A running broker's database shows nothing new: its entries are in a memtable without a log, so the commitlog must be
followed instead.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tiered.consume_queue.rocksdb_copy import RocksdbCopy
from tiered.consume_queue.rocksdb_units import RocksdbUnits
from tiered.model.tables import Table

_Key = tuple[str, int]


class RocksdbConsumeQueues(RocksdbUnits):
    """ConsumeQueueIndex over a RocksDB, as it was when it was opened. Reading is thread-safe, ``refresh`` is not."""

    def __init__(self, directory: Path, min_phys: Callable[[], int]) -> None:
        self._database = RocksdbCopy(directory, link_tables=True)
        super().__init__(directory, min_phys)

    def refresh(self) -> None:
        """Open the database again, to see what was written since."""
        self._database.close()
        self._database = RocksdbCopy(self.directory, link_tables=True)
        self.read_offsets()

    def items(self, family: str, from_key: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._database.items(family, from_key=from_key)

    def last_records(self) -> dict[_Key, tuple[int, int]]:
        lasts = {key: self.last_unit(*key) for key in self.last}
        return {key: (int(last["phys"][0]), int(last["size"][0])) for key, last in lasts.items() if len(last)}

    def that_end_elsewhere(self, ends: Mapping[_Key, int]) -> list[_Key]:
        return [key for key, end in ends.items() if key in self.last and self.max_offset(*key) != end]

    def shown(self) -> set[_Key]:
        return set(self.last_records())

    def frontier_phys(self, at_least: int | None = None) -> int:
        """The physical end of the newest record of any queue; 0 without units. The search ends as soon as ``at_least``
        is reached, if it is given."""
        frontier = 0
        for key in self.last:
            last = self.last_unit(*key)
            if len(last):
                frontier = max(frontier, int(last["phys"][0] + last["size"][0]))
                if at_least is not None and frontier >= at_least:
                    break
        return frontier

    def units_between(self, begin_phys: int, end_phys: int) -> dict[_Key, Table]:
        units_of_queues = {}
        for key in sorted(self.last):
            units = self.units_of_records(*key, begin_phys, end_phys)
            if len(units):
                units_of_queues[key] = units
        return units_of_queues

    def units_of_records(self, topic: str, queue_id: int, begin_phys: int, end_phys: int) -> Table:
        first = self.lower_bound(topic, queue_id, begin_phys)
        # An LMQ may lack units between the two offsets, so that so many units may reach beyond the second.
        units = self.units(topic, queue_id, first, self.lower_bound(topic, queue_id, end_phys) - first)
        below: Table = units[units["phys"] < end_phys]
        return below

    def close(self) -> None:
        self._database.close()
