"""Ends of all archived queues (tails), as arrays indexed by the queue table's ordinal; and the numbers of generations.

Cycle N+1 is planned before cycle N is committed, so the tails are ahead of the catalog. Each plan returns its change; a
change is reverted, in reverse order, when an attempt is abandoned and its range is planned again.

Each generation of a queue gets a number in a roster when it is first seen, so that a cycle of 10,000 runs looks them up
in a few numpy passes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.queue_table import QueueTable
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import QueueRoster

UNKNOWN = -1
TAIL_FIELDS = ("next_offset", "end_byte", "end_phys", "generation")


@dataclass(frozen=True)
class TailChange:
    """How a cycle changes the tails of the queues ``ordinals``: a row of TAIL_FIELDS for each, ``before`` and
    ``after``."""

    ordinals: NDArray[np.int64]
    before: NDArray[np.int64]
    after: NDArray[np.int64]


class QueueTails:
    """Where each queue ends: a row of TAIL_FIELDS by its ordinal. ``next_offset`` is UNKNOWN for a queue that was never
    archived, and its ``generation`` 0."""

    def __init__(self) -> None:
        self._values = np.full((1024, len(TAIL_FIELDS)), 0, np.int64)
        self._values[:, 0] = UNKNOWN

    def grow(self, count: int) -> None:
        """Make room for ``count`` queues. Those that are new are UNKNOWN."""
        if count > len(self._values):
            larger = np.zeros((max(count, 2 * len(self._values)), len(TAIL_FIELDS)), np.int64)
            larger[:, 0] = UNKNOWN
            larger[: len(self._values)] = self._values
            self._values = larger

    def set(self, ordinal: int, generation: int, row: np.void) -> None:
        """Set the tail of one queue as its ``row`` (QUEUE_STATE_DTYPE) in the catalog."""
        self.grow(ordinal + 1)
        self._values[ordinal] = (row["end_queue_offset"], row["end_byte"], row["end_phys"], generation)

    def clear(self) -> None:
        """Reset all tails, before loading another catalog version."""
        self._values[:] = 0
        self._values[:, 0] = UNKNOWN

    def of(self, ordinals: NDArray[Any]) -> NDArray[np.int64]:
        """Rows of TAIL_FIELDS, a copy."""
        rows: NDArray[np.int64] = self._values[ordinals]
        return rows

    def apply(self, change: TailChange) -> None:
        """Apply a change; the tails must be those it was planned from."""
        assert np.array_equal(self._values[change.ordinals], change.before), "tails moved under a plan"
        self._values[change.ordinals] = change.after

    def revert(self, change: TailChange) -> None:
        """Undo ``apply``; the last applied change first."""
        assert np.array_equal(self._values[change.ordinals], change.after), "changes reverted out of order"
        self._values[change.ordinals] = change.before


Ints = NDArray[Any]


class QueueGenerations:
    """Generations of one queue table, which may grow. Not thread-safe."""

    def __init__(self, table: QueueTable) -> None:
        self._table = table
        self.roster = QueueRoster()
        self._numbers: dict[tuple[int, int], int] = {}
        self._newest = np.empty((0, 2), np.int64)  # by ordinal: last generation, its number
        self._rank: Ints = np.empty(0, np.int64)

    def numbers(self, ordinal: Ints, generation: Ints) -> Ints:
        """The numbers in ``roster`` of the queues with these ordinals in these generations; new ones are added. Most
        are the last generation seen of their queue, and need no search."""
        missing = len(self._table) - len(self._newest)
        if missing > 0:
            self._newest = np.concatenate([self._newest, np.full((missing, 2), -1, np.int64)])
        newest = self._newest[ordinal]
        numbers = np.where(newest[:, 0] == generation, newest[:, 1], -1)
        for at in np.flatnonzero(numbers < 0).tolist():
            numbers[at] = self._number(int(ordinal[at]), int(generation[at]))
        return numbers

    def key(self, ordinal: int, generation: int) -> QueueKey:
        """The key of one generation."""
        return self.roster.keys[self._number(ordinal, generation)]

    def _number(self, ordinal: int, generation: int) -> int:
        """The number of one generation of a queue in ``roster``, to which it is added the first time."""
        number = self._numbers.get((ordinal, generation))
        if number is None:
            key = QueueKey(self._table.topic(ordinal), int(self._table.queue_id[ordinal]), generation)
            number = self._numbers[ordinal, generation] = self.roster.add(key)
        if ordinal < len(self._newest):
            self._newest[ordinal] = generation, number
        return number

    def rank(self) -> Ints:
        """By ordinal, the position of each queue when all are sorted by topic and queue id. Computed again only when
        queues were added."""
        count = len(self._table)
        if len(self._rank) != count:
            topics = map(self._table.topic, range(count))
            # The scan of the next batch may add queues at the same time: they are ranked next time.
            names = list(zip(topics, self._table.queue_id[:count].tolist(), strict=True))
            self._rank = np.empty(count, np.int64)
            self._rank[sorted(range(count), key=names.__getitem__)] = np.arange(count)
        return self._rank
