"""Numbers for many queues, and selections of them as numpy columns.

A cycle may have runs of 10,000 queues. Names are handled once, when a queue is first seen; cycles, commits, pages and
footers handle numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_DTYPE, Table, concatenated, picked

Ints = NDArray[Any]

_CAPACITY_MIN = 64
_NO_TOPIC = (1 << 31) - 1


class QueueRoster:
    """Queues numbered from 0 in order of appearance. Append-only; one thread adds at a time, any may read."""

    def __init__(self) -> None:
        """An empty roster, to which ``add`` adds queues one by one; ``of`` makes one of columns."""
        self.topics: list[str] = []
        self._topic_numbers: dict[str, int] = {}
        self._columns = np.zeros(_CAPACITY_MIN, QUEUE_DTYPE)
        """The queues by number, as a table with room for more."""
        self._count = 0
        self._keys: list[QueueKey] = []
        """Empty in a roster that was made of columns, until its keys are read."""
        self._topic_rank: Ints = np.empty(0, np.int64)
        """Of each topic, by number, its position among the sorted names."""
        self._by_code: tuple[Ints, Ints] = (np.empty(0, np.int64),) * 2
        """Codes of topic and queue id of the queues, ascending, and the number of each."""
        self.has_distinct_queues = True
        """False if a queue may be there twice, under two numbers."""

    @classmethod
    def of(cls, topics: Sequence[str], table: Table, *, has_distinct_queues: bool = False) -> QueueRoster:
        """A roster of the queues of ``table`` (QUEUE_DTYPE), whose ``topic`` indexes ``topics``. None may be added.
        ``has_distinct_queues``: no queue is there twice."""
        roster = cls()
        roster.topics, roster._columns, roster._count = list(topics), table, len(table)
        roster.has_distinct_queues = has_distinct_queues
        return roster

    def __len__(self) -> int:
        return self._count

    @property
    def keys(self) -> list[QueueKey]:
        """The queues by number."""
        if len(self._keys) < self._count:
            self._keys = self.made(np.arange(self._count))
        return self._keys

    def made(self, numbers: Ints) -> list[QueueKey]:
        """The queues ``numbers``, made of the columns."""
        rows = self.columns(numbers)
        names = map(self.topics.__getitem__, rows["topic"].tolist())
        return list(map(QueueKey, names, rows["queue_id"].tolist(), rows["generation"].tolist()))

    def key(self, number: int) -> QueueKey:
        """The queue ``number``."""
        if self._keys:
            return self._keys[number]
        topic, *numbers = self._columns[number].item()
        return QueueKey(self.topics[topic], *numbers)

    def add(self, key: QueueKey) -> int:
        """Add a queue that is not in the roster yet, and return its number. Raises OverflowError for a value that
        tables cannot hold."""
        number = self._count
        topic = self._topic_numbers.setdefault(key.topic, len(self.topics))
        if topic == len(self.topics):
            self.topics.append(key.topic)
        if number == len(self._columns):  # double the capacity
            self._columns = np.concatenate([self._columns, np.zeros(number, QUEUE_DTYPE)])
        self._columns[number] = (topic, key.queue_id, key.generation)
        self._keys.append(key)
        self._count = number + 1
        return number

    def columns(self, numbers: Ints) -> Table:
        """QUEUE_DTYPE rows, a copy; ``topic`` indexes ``topics``."""
        return picked(self._columns, numbers)

    def first(self, count: int) -> QueueSelection:
        """The first ``count`` queues."""
        return QueueSelection(self, np.arange(count))

    def places(self, queues: QueueSelection) -> Ints:
        """The number of each of ``queues``, which may be of another roster; -1 where it is not in this one, to which
        queues were added one by one."""
        by_code, count = self._by_code, self._count
        if len(by_code[0]) != count:
            codes = _codes(self._columns[:count])
            order = np.argsort(codes, kind="stable")
            by_code = self._by_code = codes[order], order
        names, rows = queues.table()
        topic = np.array([self._topic_numbers.get(name, _NO_TOPIC) for name in names], np.uint32)
        rows["topic"] = topic[rows["topic"]]
        codes = _codes(rows)
        at, end = (np.searchsorted(by_code[0], codes, side) for side in ("left", "right"))
        found = np.full(len(codes), -1)
        for step in range(int((end - at).max(initial=0))):  # generations of a queue
            number = by_code[1][np.minimum(at + step, count - 1)]
            is_same = (at + step < end) & (self._columns["generation"][number] == rows["generation"])
            found[is_same] = number[is_same]
        return found

    def topic_rank(self) -> Ints:
        """For each topic, by number, its position in the order of names. It is sorted again only after topics were
        added."""
        rank, count = self._topic_rank, len(self.topics)
        if len(rank) != count:
            position = {topic: at for at, topic in enumerate(sorted(set(self.topics)))}
            rank = np.array([position[topic] for topic in self.topics], np.int64)
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
        return self.roster.key(int(self.numbers[index]))

    def __iter__(self) -> Iterator[QueueKey]:
        return map(self.roster.keys.__getitem__, self.numbers.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def taken(self, index: Ints) -> QueueSelection:
        """The queues at ``index``."""
        return QueueSelection(self.roster, self.numbers[index])

    def equals(self, other: QueueSelection) -> NDArray[np.bool_]:
        """For each position, whether both selections, which are equally long, have the same queue there."""
        mine, theirs = self.roster.columns(self.numbers), other.roster.columns(other.numbers)
        topics, other_topics = (
            map(one.roster.topics.__getitem__, rows["topic"].tolist())
            for one, rows in ((self, mine), (other, theirs))
        )
        same = np.fromiter(map(operator.eq, topics, other_topics), bool, len(mine))
        for name in ("queue_id", "generation"):
            same &= mine[name] == theirs[name]
        return same

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
        used, number = numbered(rows["topic"])
        names = [self.roster.topics[topic] for topic in rows["topic"][used].tolist()]
        rows["topic"] = number
        return names, rows


def _codes(rows: Table) -> Ints:
    """A number for the topic and queue id of each of ``rows`` (QUEUE_DTYPE)."""
    codes: Ints = rows["topic"].astype(np.int64) << 32 | np.ascontiguousarray(rows["queue_id"]).view(
        np.uint32
    )
    return codes


def numbered(values: Ints) -> tuple[Ints, Ints]:
    """Where each different one of ``values`` appears first, in this order; and for each of ``values``, which of these
    it equals."""
    _, first, number = np.unique(values, return_index=True, return_inverse=True)
    by_appearance = np.argsort(first)
    place = np.empty(len(first), np.uint32)
    place[by_appearance] = np.arange(len(first))
    return first[by_appearance], place[number]


def selection_of(queues: Sequence[QueueKey]) -> QueueSelection:
    """``queues`` as a selection."""
    if isinstance(queues, QueueSelection):
        return queues
    table = np.zeros(len(queues), QUEUE_DTYPE)
    topics, queue_ids, generations = zip(*queues, strict=True) if queues else ((), (), ())
    number = {topic: index for index, topic in enumerate(dict.fromkeys(topics))}
    table["topic"] = np.fromiter(map(number.__getitem__, topics), np.int64, len(queues))
    table["queue_id"], table["generation"] = queue_ids, generations
    return QueueRoster.of(list(number), table).first(len(queues))


def united(lists: Sequence[Sequence[QueueKey]]) -> tuple[QueueSelection, list[Ints]]:
    """All queues of ``lists``, each once in order of appearance; and for each of the lists, at which positions of the
    result its queues are. Selections of one roster are joined by their numbers, which is much faster than by names."""
    selections = [selection_of(queues) for queues in lists]
    ends = np.cumsum([len(queues) for queues in lists])
    if len({id(queues.roster) for queues in selections}) == 1 and selections[0].roster.has_distinct_queues:
        roster = selections[0].roster
        every = np.concatenate([queues.numbers for queues in selections])
        first, number = numbered(every)
        return QueueSelection(roster, every[first]), np.split(number, ends)[:-1]
    named = [queues.table() for queues in selections]
    topics = dict.fromkeys(chain.from_iterable(names for names, _ in named))
    number_of = dict(zip(topics, count(), strict=False))
    for names, table in named:
        table["topic"] = np.fromiter(map(number_of.__getitem__, names), np.uint32, len(names))[table["topic"]]
    every = concatenated((table for _, table in named), QUEUE_DTYPE)
    code = _codes(every)
    if every["generation"].any():
        code = np.unique(code, return_inverse=True)[1] << 32 | every["generation"]
    first, number = numbered(code)
    roster = QueueRoster.of(list(topics), picked(every, first), has_distinct_queues=True)
    return roster.first(len(first)), np.split(number, ends)[:-1]
