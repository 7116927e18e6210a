"""Ends of all archived queues, as arrays indexed by the queue table's ordinal.

Cycle N+1 is planned before cycle N is committed, so the tails are ahead of the catalog. Each plan returns its change; a
change is reverted, in reverse order, when an attempt is abandoned and its range is planned again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNKNOWN = -1
TAIL_FIELDS = ("next_offset", "end_byte", "end_phys", "generation")


@dataclass(frozen=True)
class TailChange:
    """Old and new values of the changed ordinals; each row holds TAIL_FIELDS."""

    ordinals: NDArray[np.int64]
    before: NDArray[np.int64]
    after: NDArray[np.int64]


class QueueTails:
    """``next_offset`` is UNKNOWN for a queue that was never archived; its ``generation`` is 0."""

    def __init__(self) -> None:
        self._values = np.full((1024, len(TAIL_FIELDS)), 0, np.int64)
        self._values[:, 0] = UNKNOWN

    def grow(self, count: int) -> None:
        """Make room for ``count`` ordinals."""
        if count > len(self._values):
            larger = np.zeros((max(count, 2 * len(self._values)), len(TAIL_FIELDS)), np.int64)
            larger[:, 0] = UNKNOWN
            larger[: len(self._values)] = self._values
            self._values = larger

    def set(self, ordinal: int, *, next_offset: int, end_byte: int, end_phys: int, generation: int) -> None:
        """Set the tail of one queue."""
        self.grow(ordinal + 1)
        self._values[ordinal] = (next_offset, end_byte, end_phys, generation)

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
