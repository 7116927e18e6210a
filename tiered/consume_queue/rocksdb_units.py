"""Tables of consume queues in RocksDB, and how units are found in them.

Family ``default``, the units: {topic length 4, CTRL_1, topic, CTRL_1, queue id 4, CTRL_1, queue offset 8} -> {phys 8,
size 4, tagsCode 8, store time 8}. Family ``offset``: {topic length 4, CTRL_1, topic, CTRL_1, "max" or "min", CTRL_1,
queue id 4} -> {phys 8, queue offset 8}. "max" is the queue's *last* offset. "min" is its first one, written when a
broker first needs it, and valid while that record is in the commitlog. LMQs are queues like others, but may lack
offsets. "max" of CHECKPOINT_TOPIC, which is no topic, is the physical offset up to which the log is dispatched (8
bytes).

Sources: org.apache.rocketmq.store.queue.RocksDBConsumeQueueTable, RocksDBConsumeQueueOffsetTable.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Final

import numpy as np

from tiered.consume_queue.index import UNIT_DTYPE, BrokerQueue, QueueKind, empty_units
from tiered.errors import CorruptionError
from tiered.model.tables import Table

CTRL_0: Final = b"\x00"
CTRL_1: Final = b"\x01"
CTRL_2: Final = b"\x02"
MAX: Final = b"max"
MIN: Final = b"min"
DISPATCHED_TOPIC: Final = "CHECKPOINT_TOPIC"
OFFSETS: Final = struct.Struct(">qq")
VALUE_DTYPE: Final = np.dtype([
    ("phys", ">i8"), ("size", ">i4"), ("tags_code", ">i8"), ("store_timestamp", ">i8")
])  # fmt: skip
_OFFSET_TAIL_BYTES: Final = 1 + 3 + 1 + 4
_OFFSET_BYTES: Final = 8


class RocksdbUnits(ABC):
    """Reads the consume queues in a RocksDB, through ``items``, which a subclass has. ``last``: the last offset of each
    queue; ``min_phys`` returns the commitlog's lowest physical offset."""

    def __init__(self, directory: Path, min_phys: Callable[[], int]) -> None:
        self.directory = directory
        self.min_phys = min_phys
        self.last: dict[tuple[str, int], int] = {}
        self.read_offsets()

    @abstractmethod
    def items(self, family: str, from_key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of a family from ``from_key`` on, in key order."""

    def read_offsets(self) -> None:
        """Read the last offset of each queue again, from the entries of family ``offset``. Raises CorruptionError for
        an entry that is none."""
        self.last = {}
        for key, value in self.items("offset", b""):
            length = int.from_bytes(key[:4], "big")
            topic, tail = key[5 : 5 + length], key[5 + length :]
            if topic == DISPATCHED_TOPIC.encode():
                continue
            if len(tail) != _OFFSET_TAIL_BYTES or len(value) < OFFSETS.size:
                raise CorruptionError(
                    f"RocksDB {self.directory} is damaged, or of another RocketMQ version: an entry of its column "
                    f"family offset has a key of {len(key)} bytes and a value of {len(value)}"
                )
            if tail[1:4] == MAX:
                self.last[topic.decode("utf-8"), int.from_bytes(tail[5:], "big")] = OFFSETS.unpack_from(
                    value
                )[1]

    def queues(self) -> list[BrokerQueue]:
        return [BrokerQueue(*key, QueueKind.ROCKSDB) for key in sorted(self.last)]

    def contains(self, topic: str, queue_id: int) -> bool:
        return (topic, queue_id) in self.last

    def min_offset(self, topic: str, queue_id: int) -> int:
        return self.lower_bound(topic, queue_id, self.min_phys())

    def max_offset(self, topic: str, queue_id: int) -> int:
        return self.last.get((topic, queue_id), -1) + 1

    def units(self, topic: str, queue_id: int, from_offset: int, count: int) -> Table:
        """Up to ``count`` units of a queue whose offsets are at or above ``from_offset``, as a table of UNIT_DTYPE. The
        queue may have none at some offsets between them. Raises CorruptionError for an entry that is no unit."""
        prefix = unit_prefix(topic, queue_id)
        first = prefix + max(from_offset, 0).to_bytes(_OFFSET_BYTES, "big")
        found = takewhile(lambda item: item[0].startswith(prefix), self.items("default", first))
        keys, values = list[bytes](), list[bytes]()
        for key, value in islice(found, max(count, 0)):
            if len(value) < VALUE_DTYPE.itemsize or len(key) != len(prefix) + _OFFSET_BYTES:
                raise CorruptionError(
                    f"RocksDB {self.directory} is damaged, or of another RocketMQ version: a consume-queue unit of "
                    f"{topic}/{queue_id} has {len(value)} bytes and a key of {len(key)}, not "
                    f"{VALUE_DTYPE.itemsize} and {len(prefix) + _OFFSET_BYTES}"
                )
            keys.append(key[-_OFFSET_BYTES:])
            values.append(value[: VALUE_DTYPE.itemsize])
        units = np.zeros(len(keys), UNIT_DTYPE)
        stored = np.frombuffer(b"".join(values), VALUE_DTYPE)
        for name in VALUE_DTYPE.names or ():
            units[name] = stored[name]
        units["queue_offset"] = np.frombuffer(b"".join(keys), ">i8")
        units["inner_num"] = 1
        return units

    def last_unit(self, topic: str, queue_id: int) -> Table:
        last = self.last.get((topic, queue_id))
        return self.units(topic, queue_id, last, 1) if last is not None else empty_units()

    def lower_bound(self, topic: str, queue_id: int, phys: int) -> int:
        """The first offset of a queue whose record begins at or above physical offset ``phys``; the queue's maximum if
        there is none. By bisection, in which missing units count as later ones."""
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


def topic_prefix(topic: str) -> bytes:
    """What the keys of a topic begin with in both families, without the control character behind the name."""
    name = topic.encode("utf-8")
    return len(name).to_bytes(4, "big") + CTRL_1 + name


def queue_prefix(topic: str, queue_id: int) -> bytes:
    """What the keys of a queue's units begin with, without the last control character."""
    return topic_prefix(topic) + CTRL_1 + queue_id.to_bytes(4, "big")


def unit_prefix(topic: str, queue_id: int) -> bytes:
    """The key of a unit without its queue offset."""
    return queue_prefix(topic, queue_id) + CTRL_1


def offset_key(topic: str, queue_id: int, which: bytes) -> bytes:
    """The key of a queue's MAX or MIN."""
    return b"".join((topic_prefix(topic), CTRL_1, which, CTRL_1, queue_id.to_bytes(4, "big")))
