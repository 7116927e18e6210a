"""Maps queue names to rows, shared by all versions of the state.

Append-only. A state sees only its first ``count`` rows, so older states stay valid while newer ones add queues; adding
to a directory that another branch has extended makes a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tiered.model.queue import QueueKey
from tiered.model.queue_roster import QueueRoster, QueueSelection, selection_of


class QueueDirectory:
    """Rows are numbered from 0 in order of appearance and never reused."""

    def __init__(self, keys: Sequence[QueueKey] = ()) -> None:
        """``keys``: the queues of the first rows."""
        self._lock = threading.Lock()
        self.roster = QueueRoster()
        """The queues by row."""
        self._rows: dict[QueueKey, int] = {}
        self._latest: dict[tuple[str, int], int] = {}
        """The highest generation of each (topic, queue id)."""
        self._by_topic: dict[str, list[int]] = {}
        """Rows of each topic, ascending."""
        self._rows_by_number: WeakKeyDictionary[QueueRoster, NDArray[np.int64]] = WeakKeyDictionary()
        """For lists of queues in other numbers (those of a log scan, say), the row of each; -1 if not yet known."""
        self._append(keys)

    def __len__(self) -> int:
        return len(self.roster)

    def extended(self, count: int, keys: Sequence[QueueKey]) -> QueueDirectory:
        """A directory with ``keys`` in the rows from ``count`` on: this one, if it has ``count`` rows, or a copy of its
        first rows, if a newer state has added other queues."""
        with self._lock:
            if len(self.roster) == count:
                self._append(keys)
                return self
        copy = QueueDirectory(self.roster.keys[:count])
        copy._append(keys)
        return copy

    def row(self, key: QueueKey, count: int) -> int | None:
        """The row of ``key`` among the first ``count``."""
        row = self._rows.get(key)
        return row if row is not None and row < count else None

    def rows(self, keys: Sequence[QueueKey], count: int) -> NDArray[np.int64]:
        """The row of each key, or -1 where it is not among the first ``count``. Keeps the rows for each roster, as the
        writer looks up the queues of the log in every cycle."""
        queues = selection_of(keys)
        roster, rows = queues.roster, queues.numbers.astype(np.int64)
        if roster is not self.roster:
            row_of = self._rows_by_number.get(roster, np.empty(0, np.int64))
            row_of = np.concatenate([row_of, np.full(len(roster) - len(row_of), -1, np.int64)])
            unknown = rows[row_of[rows] < 0]
            if len(unknown):
                row_of[unknown] = self.roster.places(QueueSelection(roster, unknown))
            # Rows never change, so concurrent writes are equally valid.
            self._rows_by_number[roster] = row_of
            rows = row_of[rows]
        return np.where(rows < count, rows, -1)

    def rows_of_topic(self, topic: str, count: int) -> list[int]:
        """Rows of a topic's queues of all generations among the first ``count``, ascending."""
        return [row for row in self._by_topic.get(topic, ()) if row < count]

    def is_latest(self, key: QueueKey, count: int) -> bool:
        """Whether ``key``, which has one of the first ``count`` rows, is the highest generation of its queue there."""
        return (
            self._latest[key[:2]] == key.generation
            or self.latest_generation(key.topic, key.queue_id, count) == key.generation
        )

    def latest_generation(self, topic: str, queue_id: int, count: int) -> int | None:
        """The highest generation of a queue among the first ``count`` rows (later ones belong to newer states); None if
        it has none there."""
        generation = self._latest.get((topic, queue_id))
        while generation is not None and generation >= 0:
            if self.row(QueueKey(topic, queue_id, generation), count) is not None:
                return generation
            generation -= 1
        return None

    def _append(self, keys: Sequence[QueueKey]) -> None:
        """Add a row for each of ``keys``. Other threads may read the directory at the same time."""
        for key in keys:
            assert key not in self._rows, f"queue {key} has a row already"
            # ``_rows`` changes last: a concurrent reader never sees a row without its key.
            row = self.roster.add(key)
            self._by_topic.setdefault(key.topic, []).append(row)
            self._latest[key[:2]] = max(key.generation, self._latest.get(key[:2], -1))
            self._rows[key] = row
