"""Interface of consume queues that are written: by a restore, a build from the commitlog, or a conversion.

The broker is stopped. Batches of units are arrays; no object exists for a unit. Source:
org.apache.rocketmq.store.queue.ConsumeQueueStoreInterface.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tiered.consume_queue.index import BrokerQueue
from tiered.errors import UsageError
from tiered.model.tables import Table

ENDED_PHYS = 1
"""``phys`` and ``size`` of the last unit of a queue of which nothing is kept: below every log, and no filler."""


UNITS_AT_ONCE = 64 * 1024
"""Units that are copied at a time."""


class StoreKind(Enum):
    """Where a broker keeps its consume queues: ``storeType``, or both with ``rocksdbCQDoubleWriteEnable``."""

    FILE = "file"
    ROCKSDB = "rocksdb"
    BOTH = "both"


BOTH_ON_5_5 = (
    "5.5 brokers start with both kinds only with combineCQUseRocksdbForLmq=true, and without BatchCQ topics"
)


class LogView(NamedTuple):
    """What consume queues need of the commitlog.

    ``min_phys``: its oldest physical offset. ``stored_at``: store timestamps in ms of the records at these offsets, 0
    where there is none.
    """

    min_phys: Callable[[], int]
    stored_at: Callable[[NDArray[Any]], NDArray[np.int64]]


class QueueReader(Protocol):
    """Reads consume queues. A queue that does not exist is empty: minimum and maximum 0."""

    def queues(self) -> list[BrokerQueue]:
        """All queues, by topic and queue id."""

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Offset of the first unit whose record is still in the commitlog; the maximum when none is."""

    def max_offset(self, topic: str, queue_id: int) -> int:
        """One past the last offset."""

    def units(self, topic: str, queue_id: int, from_offset: int, count: int) -> Table:
        """Up to ``count`` units (UNIT_DTYPE) from the one that contains ``from_offset``, or the first after it."""


class ConsumeQueueStore(QueueReader, Protocol):
    """All consume queues of one store.

    Methods raise UsageError, CorruptionError, AccessDeniedError, StoreFullError or UnavailableError naming a file.
    """

    def put(self, topic: str, queue_id: int, units: Table) -> None:
        """Write ``units`` (UNIT_DTYPE) at their queue offsets, ascending; units that are there are overwritten.

        A queue may begin anywhere, and later batches may be below earlier ones. Until a hole between units is filled,
        files may end there for their readers.
        """

    def put_empty_queue(self, topic: str, queue_id: int, end_offset: int) -> None:
        """Write a queue of which nothing is kept: minimum and maximum are ``end_offset``, above 0."""

    def delete_queue(self, topic: str, queue_id: int) -> None:
        """Remove one queue."""

    def truncate(self, phys: int) -> None:
        """Remove the units of records that begin at or above ``phys``. A queue that began above 0 keeps its begin."""

    def flush(self, dispatched_phys: int) -> None:
        """Make everything durable. All records that end at or below ``dispatched_phys`` have their units."""

    def close(self) -> None:
        """Release what is open. What was not flushed may be lost."""


def copy_queue(key: tuple[str, int], source: QueueReader, target: ConsumeQueueStore, begin: int) -> int:
    """Copy the units of the queue ``key`` = (topic, queue id), from offset ``begin`` on, whose records are still in the
    commitlog, from ``source`` to ``target``; if there are none, only where the queue ends. Returns the number of
    units."""
    at, end, count = max(begin, source.min_offset(*key)), source.max_offset(*key), 0
    if at >= end > target.max_offset(*key):
        target.put_empty_queue(*key, end)
    while len(units := source.units(*key, at, UNITS_AT_ONCE)):
        target.put(*key, units)
        count += len(units)
        at = int(units["queue_offset"][-1] + units["inner_num"][-1])
    return count


def refuse_disorder(topic: str, queue_id: int, units: Table) -> None:
    """Raise UsageError if the queue offsets of ``units`` do not ascend."""
    ends = units["queue_offset"] + units["inner_num"]
    if units["queue_offset"][0] < 0 or (units["queue_offset"][1:] < ends[:-1]).any():
        raise UsageError(
            f"consume-queue units of {topic}/{queue_id} are not in the order of their queue offsets"
        )
