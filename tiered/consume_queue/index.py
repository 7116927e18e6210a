"""Interface of a broker's consume queues, whatever form they are stored in: plain and BatchCQ files, RocksDB."""

from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple, Protocol

import numpy as np

from tiered.model.tables import Table

UNIT_DTYPE: Final = np.dtype([
    ("phys", "<i8"),          # physical commitlog offset of the record
    ("size", "<i4"),          # bytes of the record
    ("tags_code", "<i8"),     # consumequeue_ext addresses are resolved
    ("queue_offset", "<i8"),  # of the record's first message
    ("inner_num", "<i4"),     # messages of the record: 1 but in BatchCQ
    ("store_timestamp", "<i8"),  # ms; 0 in plain files, which do not keep it
])  # fmt: skip
"""One unit of a consume queue."""


class QueueKind(Enum):
    """Storage form of a queue's units."""

    PLAIN = "consumequeue"
    BATCH = "batchconsumequeue"
    ROCKSDB = "rocksdb"


class BrokerQueue(NamedTuple):
    """One queue of the broker, with units now or earlier."""

    topic: str
    queue_id: int
    kind: QueueKind


class ConsumeQueueIndex(Protocol):
    """All consume queues of one broker store. Offsets are queue offsets, ``phys`` are physical ones.

    All methods raise CorruptionError, AccessDeniedError or UnavailableError naming a file. A queue that does not exist
    is empty: minimum and maximum 0, no units.
    """

    def refresh(self) -> None:
        """Find queues and files that were added or removed."""

    def queues(self) -> list[BrokerQueue]:
        """All queues, by topic and queue id."""

    def contains(self, topic: str, queue_id: int) -> bool:
        """Whether the broker has this queue."""

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Offset of the first unit whose record is still in the commitlog; the maximum when none is."""

    def max_offset(self, topic: str, queue_id: int) -> int:
        """One past the last offset."""

    def units(self, topic: str, queue_id: int, from_offset: int, count: int) -> Table:
        """Up to ``count`` units (UNIT_DTYPE) from the one that contains ``from_offset``, or the first after it."""

    def last_unit(self, topic: str, queue_id: int) -> Table:
        """The last unit (UNIT_DTYPE, one row); no row when the queue is empty."""

    def last_records(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(phys, size) of the last record of each queue; queues without units or with unreadable files are skipped."""

    def that_end_elsewhere(self, ends: Mapping[tuple[str, int], int]) -> list[tuple[str, int]]:
        """Queues of ``ends`` whose maximum differs: they grew or restarted. Queues that do not exist or are unreadable
        are skipped. Costs a small read for most."""

    def shown(self) -> set[tuple[str, int]]:
        """(topic, queue id) of the queues that contain a unit, and of unreadable ones, which may. Costs no read of a
        file where its layout on disk suffices."""

    def frontier_phys(self, at_least: int | None = None) -> int:
        """Physical end of the last record of any queue; 0 without units. Unreadable queues are skipped.

        With ``at_least`` the search ends once that is reached, and may end earlier: the result is a lower bound that
        grows with later calls.
        """

    def units_between(self, begin_phys: int, end_phys: int) -> dict[tuple[str, int], Table]:
        """Per queue, the units whose records begin in [begin_phys, end_phys). Costs a search in every queue."""

    def units_of_records(self, topic: str, queue_id: int, begin_phys: int, end_phys: int) -> Table:
        """The units of one queue whose records begin in [begin_phys, end_phys). Costs a search in it."""

    def close(self) -> None:
        """Release what is open."""


def empty_units() -> Table:
    """An empty table of units."""
    return np.zeros(0, UNIT_DTYPE)
