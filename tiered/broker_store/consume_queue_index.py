"""What all forms of a broker's consume queues have in common: which queues exist, their offsets and units.

Plain and BatchCQ files and RocksDB answer the same questions. Owns the vocabulary; reading is in the modules
beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple, Protocol

import numpy as np

from tiered.model.tables import Table

UNIT_DTYPE: Final = np.dtype([
    ("phys", "<i8"),          # physical commitlog offset of the record
    ("size", "<i4"),          # bytes of the record
    ("tags_code", "<i8"),     # an address into consumequeue_ext is already resolved
    ("queue_offset", "<i8"),  # of the record's first message
    ("inner_num", "<i4"),     # messages of the record: 1 but in BatchCQ
])  # fmt: skip
"""One unit of a consume queue, whatever form it is stored in."""


class QueueKind(Enum):
    """How a queue's units are stored."""

    PLAIN = "consumequeue"
    BATCH = "batchconsumequeue"
    ROCKSDB = "rocksdb"


class BrokerQueue(NamedTuple):
    """One queue that the broker has units of, or had."""

    topic: str
    queue_id: int
    kind: QueueKind


class ConsumeQueueIndex(Protocol):
    """Every consume queue of one broker store. Offsets are queue offsets, ``phys`` are physical ones.

    All methods raise CorruptionError, AccessDeniedError or UnavailableError naming a file. A queue that does
    not exist is empty: minimum and maximum 0, no units.
    """

    def refresh(self) -> None:
        """Look for queues and files that came or went."""

    def queues(self) -> list[BrokerQueue]:
        """All queues, by topic and queue id."""

    def contains(self, topic: str, queue_id: int) -> bool:
        """Whether the broker has this queue."""

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Offset of the first unit whose record the commitlog still has; the maximum when none has."""

    def max_offset(self, topic: str, queue_id: int) -> int:
        """One past the last offset."""

    def units(self, topic: str, queue_id: int, from_offset: int, count: int) -> Table:
        """Up to ``count`` units (UNIT_DTYPE) from the one that holds ``from_offset``, or the first after
        it."""

    def last_unit(self, topic: str, queue_id: int) -> Table:
        """The last unit (UNIT_DTYPE, one row), or no row when the queue is empty."""

    def last_records(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(phys, size) of the last record that each queue shows; queues without units are left out, and those whose
        files cannot be read."""

    def that_end_elsewhere(self, ends: Mapping[tuple[str, int], int]) -> list[tuple[str, int]]:
        """Those of ``ends`` whose maximum is another one: they went on, or began anew. Queues that do not exist, or
        whose files cannot be read, are left out. Costs a small read for most."""

    def shown(self) -> set[tuple[str, int]]:
        """(topic, queue id) of the queues that show a unit, and of those whose files cannot be read: they may. Costs no
        read of a file where its layout on disk tells."""

    def frontier_phys(self, at_least: int | None = None) -> int:
        """Physical end of the last record that any queue shows; 0 when nothing is shown. Queues whose files cannot be
        read are left out.

        With ``at_least`` the search ends as soon as that is reached, and may end earlier still: the answer is
        then a lower bound that grows when asked again.
        """

    def units_between(self, begin_phys: int, end_phys: int) -> dict[tuple[str, int], Table]:
        """Per queue, the units whose records begin in [begin_phys, end_phys). Costs a search in every
        queue."""

    def units_of_records(self, topic: str, queue_id: int, begin_phys: int, end_phys: int) -> Table:
        """The units of one queue whose records begin in [begin_phys, end_phys). Costs a search in it."""

    def close(self) -> None:
        """Release what is open."""


def empty_units() -> Table:
    """No unit."""
    return np.zeros(0, UNIT_DTYPE)
