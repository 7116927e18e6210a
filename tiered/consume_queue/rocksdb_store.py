"""Writes consume queues in RocksDB, as a broker of ``storeType=defaultRocksDB`` does.

Writes go to the memtable in batches and without a log, because the commitlog can rebuild everything; ``flush`` makes
them durable. Units come before the maxima that show them. A broker frees the space of expired units in its compaction
filter, which Python cannot have; here a range delete does. Sources:
org.apache.rocketmq.store.queue.RocksDBConsumeQueueStore, org.apache.rocketmq.store.rocksdb.RocksDBOptionsFactory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from tiered.consume_queue.rocksdb_units import (
    CTRL_0,
    CTRL_2,
    DISPATCHED_TOPIC,
    MAX,
    MIN,
    OFFSETS,
    VALUE_DTYPE,
    RocksdbUnits,
    offset_key,
    queue_prefix,
    unit_prefix,
)
from tiered.consume_queue.store import ENDED_PHYS, LogView, refuse_disorder
from tiered.errors import UnavailableError
from tiered.model.tables import Table

BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
_FORMAT_VERSION: Final = 5
"""Brokers' RocksDB of 2023 does not read a later one."""
_BLOCK_BYTES: Final = 32 * 1024
_LIBRARY_FILE: Final = "rocksdict-config.json"
_Key = tuple[str, int]


class RocksdbQueueStore(RocksdbUnits):
    """ConsumeQueueStore over the RocksDB ``directory``, which is created. Not thread-safe."""

    def __init__(self, directory: Path, log: LogView) -> None:
        """Open the database, or create it. ``log``: the commitlog whose records the units refer to. Raises
        UnavailableError if it cannot be written."""
        from rocksdict import WriteOptions  # slow to import, and most commands do not need it

        self._log = log
        with self._errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._db = _open(directory)
        self._offset_family: Any = self._db.get_column_family_handle("offset")
        self._families = {"default": self._db, "offset": self._db.get_column_family("offset")}
        self._unlogged = WriteOptions()
        self._unlogged.disable_wal = True
        self._max: dict[_Key, tuple[int, int]] = {}
        """Physical offset and queue offset of the last unit of each queue that has new units in the open batch."""
        self._batch: Any = self._new_batch()
        super().__init__(directory, log.min_phys)

    def items(self, family: str, from_key: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._commit()  # what is read must include what was put
        found: Iterator[tuple[bytes, bytes]] = self._families[family].items(from_key=from_key or None)
        return found

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The offset of the first unit of a queue whose record is still in the commitlog. It is stored in the database,
        as brokers do, and is searched again only when that record has expired."""
        key = offset_key(topic, queue_id, MIN)
        self._commit()
        stored = self._families["offset"].get(key)
        if stored is not None:
            phys, offset = OFFSETS.unpack(stored)
            unit = self.units(topic, queue_id, offset, 1)
            if phys >= self.min_phys() and len(unit) and unit["queue_offset"][0] == offset:
                return int(offset)
        found = super().min_offset(topic, queue_id)
        unit = self.units(topic, queue_id, found, 1)
        if len(unit):
            self._batch.put(key, OFFSETS.pack(int(unit["phys"][0]), found), self._offset_family)
        return found

    def put(self, topic: str, queue_id: int, units: Table) -> None:
        """Write ``units`` at their queue offsets. Those without a store timestamp get that of their records. They are
        written to the database in batches; ``flush`` makes them durable."""
        if len(units) == 0:
            return
        refuse_disorder(topic, queue_id, units)
        stored = np.zeros(len(units), VALUE_DTYPE)
        for name in VALUE_DTYPE.names or ():
            stored[name] = units[name]
        untimed = np.flatnonzero(units["store_timestamp"] == 0)
        if len(untimed):
            stored["store_timestamp"][untimed] = self._log.stored_at(units["phys"][untimed])
        keys, prefix = units["queue_offset"].astype(">i8").tobytes(), unit_prefix(topic, queue_id)
        values, width = stored.tobytes(), VALUE_DTYPE.itemsize
        put = self._batch.put
        for i in range(len(units)):
            put(prefix + keys[8 * i : 8 * i + 8], values[width * i : width * (i + 1)])
        last = int(units["queue_offset"][-1])
        if last > self.last.get((topic, queue_id), -1):
            self._put_last(topic, queue_id, int(units["phys"][-1]), last)
        if self._batch.size_in_bytes() >= BATCH_BYTES_MAX:
            self._commit()

    def put_empty_queue(self, topic: str, queue_id: int, end_offset: int) -> None:
        self.delete_queue(topic, queue_id)
        self._put_last(topic, queue_id, ENDED_PHYS, end_offset - 1)

    def delete_queue(self, topic: str, queue_id: int) -> None:
        prefix = queue_prefix(topic, queue_id)
        self._batch.delete_range(prefix + CTRL_0, prefix + CTRL_2)
        for which in (MAX, MIN):
            self._batch.delete(offset_key(topic, queue_id, which), self._offset_family)
        self.last.pop((topic, queue_id), None)
        self._max.pop((topic, queue_id), None)

    def truncate(self, phys: int) -> None:
        """Remove the units of all records that begin at or above physical offset ``phys``. A queue that has no others,
        and did not begin at 0, becomes an empty queue whose next message gets the first removed offset."""
        for topic, queue_id in list(self.last):
            first = self.lower_bound(topic, queue_id, phys)
            if len(self.units(topic, queue_id, first, 1)) == 0:  # nothing to remove
                continue
            begin = self.units(topic, queue_id, 0, 1)
            prefix = unit_prefix(topic, queue_id)
            if begin["queue_offset"][0] == first:
                self.delete_queue(topic, queue_id)
                if first > 0:
                    self.put_empty_queue(topic, queue_id, first)
                continue
            self._batch.delete_range(
                prefix + first.to_bytes(8, "big"), queue_prefix(topic, queue_id) + CTRL_2
            )
            kept = self._last_before(topic, queue_id, first)
            self._put_last(topic, queue_id, int(kept["phys"][0]), int(kept["queue_offset"][0]))

    def flush(self, dispatched_phys: int) -> None:
        """Make everything durable: the units first, then the maximum of each queue and, as brokers store it, the
        physical offset up to which all records have their units."""
        self._commit()
        with self._errors(self.directory):
            self._families["default"].flush()
            key = offset_key(DISPATCHED_TOPIC, 0, MAX)
            self._batch.put(key, dispatched_phys.to_bytes(8, "big"), self._offset_family)
            self._commit()
            self._families["offset"].flush()

    def close(self) -> None:
        """Close the database and release its lock; what was not flushed may be lost."""
        if self._batch is None:
            return
        with self._errors(self.directory):
            self._max.clear()
            self._families.clear()
            self._batch = self._offset_family = None  # they would keep the database locked
            self._db.close()
            (self.directory / _LIBRARY_FILE).unlink(missing_ok=True)

    def _last_before(self, topic: str, queue_id: int, offset: int) -> Table:
        """The unit before ``offset``, which exists; there may be a hole between them."""
        step = 1
        while not len(before := self._below(topic, queue_id, offset, step)):
            step *= 2
        return before

    def _below(self, topic: str, queue_id: int, offset: int, count: int) -> Table:
        """The last unit at one of the ``count`` offsets below ``offset``; an empty table if there is none."""
        units = self.units(topic, queue_id, max(offset - count, 0), count)
        return units[units["queue_offset"] < offset][-1:]

    def _put_last(self, topic: str, queue_id: int, phys: int, last: int) -> None:
        """Note that a queue's last unit has the queue offset ``last``, and its record the physical offset ``phys``."""
        self.last[topic, queue_id] = last
        self._max[topic, queue_id] = phys, last

    def _commit(self) -> None:
        """Write the open batch to the database, with the new maximum of each queue that has units in it, and open
        another one."""
        for key, phys_and_offset in self._max.items():
            self._batch.put(offset_key(*key, MAX), OFFSETS.pack(*phys_and_offset), self._offset_family)
        self._max.clear()
        if self._batch.is_empty():
            return
        with self._errors(self.directory):
            self._db.write(self._batch, self._unlogged)
        self._batch = self._new_batch()

    def _new_batch(self) -> Any:
        from rocksdict import WriteBatch

        return WriteBatch(raw_mode=True)

    @contextmanager
    def _errors(self, directory: Path) -> Iterator[None]:
        """Raise UnavailableError for any exception in the block: the library raises plain Exception. ``directory``: of
        the database."""
        try:
            yield
        except Exception as error:
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UnavailableError(
                f"RocksDB {directory} cannot be written: {what}",
                hint="check free space and permissions of its directory",
            ) from error


def _open(directory: Path) -> Any:
    """Open the database in ``directory``, or create it, with the options that brokers use, as a broker continues it."""
    from rocksdict import BlockBasedOptions, DBCompressionType, Options, Rdict

    table = BlockBasedOptions()
    table.set_format_version(_FORMAT_VERSION)
    table.set_block_size(_BLOCK_BYTES)
    table.set_bloom_filter(16, False)
    families = {}
    for name, compression in (("default", DBCompressionType.lz4()), ("offset", DBCompressionType.none())):
        families[name] = options = Options(raw_mode=True)
        options.set_block_based_table_factory(table)
        options.set_compression_type(compression)
    whole = Options(raw_mode=True)
    whole.create_if_missing(True)
    whole.create_missing_column_families(True)
    whole.set_atomic_flush(True)
    return Rdict(str(directory), whole, column_families=families)
