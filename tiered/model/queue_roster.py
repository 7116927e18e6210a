"""Numbers for many queues, and selections of them as numpy columns.

A cycle may have runs of 10,000 queues. Names are handled once, when a queue is first seen; cycles, commits and pages
handle numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_DTYPE, Table

Ints = NDArray[Any]

_CAPACITY_MIN = 64


class QueueRoster:
    """Queues numbered from 0 in order of appearance. Append-only; one thread adds at a time, any may read."""

    def __init__(self, keys: Sequence[QueueKey] = ()) -> None:
        """A roster of ``keys``, to which others may be added."""
        self.keys: list[QueueKey] = []
        """The queues by number."""
        self.topics: list[str] = []
        self._topic_numbers: dict[str, int] = {}
        self._columns = np.zeros(_CAPACITY_MIN, QUEUE_DTYPE)
        """The queues by number, as a table with room for more."""
        self._topic_rank: Ints = np.empty(0, np.int64)
        for key in keys:
            self.add(key)

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: QueueKey) -> int:
        """Add a queue that is not in the roster yet, and return its number. Raises OverflowError for a value that
        tables cannot hold."""
        number = len(self.keys)
        topic = self._topic_numbers.setdefault(key.topic, len(self.topics))
        if topic == len(self.topics):
            self.topics.append(key.topic)
        if number == len(self._columns):  # double the capacity
            self._columns = np.concatenate([self._columns, np.zeros(number, QUEUE_DTYPE)])
        self._columns[number] = (topic, key.queue_id, key.generation)
        self.keys.append(key)
        return number

    def columns(self, numbers: Ints) -> Table:
        """QUEUE_DTYPE rows, a copy; ``topic`` indexes ``topics``."""
        rows: Table = self._columns[numbers]
        return rows

    def first(self, count: int) -> QueueSelection:
        """The first ``count`` queues."""
        return QueueSelection(self, np.arange(count))

    def topic_rank(self) -> Ints:
        """For each topic, by number, its position in the order of names. It is sorted again only after topics were
        added."""
        rank, count = self._topic_rank, len(self.topics)
        if len(rank) != count:
            rank = np.empty(count, np.int64)
            rank[sorted(range(count), key=self.topics.__getitem__)] = np.arange(count)
            self._topic_rank = rank
        return rank


class QueueSelection(Sequence[QueueKey]):
    """Some queues of a roster, in any order, as a sequence of keys and as columns."""

    def __init__(self, roster: QueueRoster, numbers: Ints) -> None:
        self.roster = roster
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> QueueKey: ...
    @overload
    def __getitem__(self, index: slice) -> QueueSelection: ...
    def __getitem__(self, index: int | slice) -> QueueKey | QueueSelection:
        if isinstance(index, slice):
            return QueueSelection(self.roster, self.numbers[index])
        return self.roster.keys[int(self.numbers[index])]

    def __iter__(self) -> Iterator[QueueKey]:
        return map(self.roster.keys.__getitem__, self.numbers.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def taken(self, index: Ints) -> QueueSelection:
        """The queues at ``index``."""
        return QueueSelection(self.roster, self.numbers[index])

    def sorted_order(self) -> Ints:
        """Indices that put the queues in order by topic, queue id, generation."""
        rows = self.roster.columns(self.numbers)
        order: Ints = np.lexsort(
            (rows["generation"], rows["queue_id"], self.roster.topic_rank()[rows["topic"]])
        )
        return order

    def table(self) -> tuple[list[str], Table]:
        """The topics of the queues, each once in order of appearance, and a QUEUE_DTYPE table of the queues, whose
        ``topic`` is an index into these topics."""
        rows = self.roster.columns(self.numbers)
        present, first, number = np.unique(rows["topic"], return_index=True, return_inverse=True)
        by_appearance = np.argsort(first)
        place = np.empty(len(present), np.uint32)
        place[by_appearance] = np.arange(len(present))
        rows["topic"] = place[number]
        return [self.roster.topics[topic] for topic in present[by_appearance].tolist()], rows


def distinct(numbers: Ints) -> Ints:
    """Each number once, in order of appearance."""
    found: Ints = numbers[np.sort(np.unique(numbers, return_index=True)[1])]
    return found


def taken(queues: Sequence[QueueKey], index: Ints) -> Sequence[QueueKey]:
    """The queues at ``index``."""
    if isinstance(queues, QueueSelection):
        return queues.taken(index)
    return [queues[at] for at in index.tolist()]


def sorted_order(queues: Sequence[QueueKey]) -> Ints:
    """Indices that put ``queues`` in order."""
    if isinstance(queues, QueueSelection):
        return queues.sorted_order()
    return np.array(sorted(range(len(queues)), key=queues.__getitem__), np.int64)


def united(lists: Sequence[Sequence[QueueKey]]) -> tuple[Sequence[QueueKey], list[Ints]]:
    """All queues of ``lists``, each once in order of appearance; and for each of the lists, at which positions of the
    result its queues are. Selections of one roster are joined by their numbers, which is much faster than by names."""
    selections = [queues for queues in lists if isinstance(queues, QueueSelection)]
    rosters = {id(queues.roster) for queues in selections}
    if len(selections) == len(lists) == 1:
        return selections[0], [np.arange(len(selections[0]), dtype=np.uint32)]
    if selections and len(selections) == len(lists) and len(rosters) == 1:
        roster = selections[0].roster
        numbers = distinct(np.concatenate([queues.numbers for queues in selections]))
        place = np.empty(len(roster), np.uint32)
        place[numbers] = np.arange(len(numbers))
        return QueueSelection(roster, numbers), [place[queues.numbers] for queues in selections]
    places: dict[QueueKey, int] = {}
    found = [
        np.array([places.setdefault(queue, len(places)) for queue in queues], np.uint32) for queues in lists
    ]
    return list(places), found
