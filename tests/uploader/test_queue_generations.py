"""Numbers and order of queues' names, of a table that a scan makes grow at any moment."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiered.kernels.queue_table import QueueTable
from tiered.model.queue import QueueKey
from uploader.queue_tails import QueueGenerations


class GrowingTable(QueueTable):
    """Gets another queue right after a thread read how many there are, as by a scan in another thread."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, int]] = []
        super().__init__()

    def __len__(self) -> int:
        count = super().__len__()
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            self.ordinal(*waiting.pop())
            self.waiting = waiting
        return count


queues = st.lists(
    st.tuples(st.text("abc", min_size=1, max_size=3), st.integers(0, 5)), unique=True, max_size=80
)


@given(queues, queues)
def test_the_order_is_that_of_names_although_the_table_grows(
    first: list[tuple[str, int]], later: list[tuple[str, int]]
) -> None:
    table = GrowingTable()
    for queue in first:
        table.ordinal(*queue)
    table.waiting = [*later]
    lives = QueueGenerations(table)
    rank = lives.rank()
    table.waiting = []
    assert [first[at] for at in np.argsort(rank).tolist()] == sorted(first)
    names = [(table.topic(ordinal), int(table.queue_id[ordinal])) for ordinal in range(len(table))]
    assert [names[at] for at in np.argsort(lives.rank()).tolist()] == sorted(names)


@given(queues, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=40))
def test_each_life_has_one_number(named: list[tuple[str, int]], asked: list[tuple[int, int]]) -> None:
    table = QueueTable()
    for queue in named:
        table.ordinal(*queue)
    lives = QueueGenerations(table)
    asked = [(ordinal, generation) for ordinal, generation in asked if ordinal < len(table)]
    ordinal, generation = (np.array([life[i] for life in asked], np.int64) for i in (0, 1))
    for _ in range(2):
        numbers = lives.numbers(ordinal, generation).tolist()
        expected = [QueueKey(*named[at], life) for at, life in asked]
        assert [lives.roster.keys[number] for number in numbers] == expected
        assert len(lives.roster) == len(set(asked))
    assert [lives.key(*life) for life in asked] == expected
