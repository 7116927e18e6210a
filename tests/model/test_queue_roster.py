"""Selections of a roster say the same as the lists of keys they stand for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiered.catalog.queue_directory import QueueDirectory
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import QueueRoster, QueueSelection, selection_of, united

KEYS = st.builds(
    QueueKey, st.sampled_from(["b", "a", "主题", "%LMQ%x", "B"]), st.integers(-1, 3), st.integers(0, 2)
)
ROSTERS = st.lists(KEYS, unique=True, min_size=1, max_size=80)


@st.composite
def selections(draw: st.DrawFn) -> tuple[QueueRoster, list[QueueSelection]]:
    roster = QueueRoster()
    for key in draw(ROSTERS):
        roster.add(key)
    numbers = st.lists(st.integers(0, len(roster) - 1), unique=True, max_size=len(roster))
    lists = draw(st.lists(numbers, min_size=1, max_size=3))
    return roster, [QueueSelection(roster, np.array(chosen, np.int64)) for chosen in lists]


@given(selections())
def test_a_selection_is_a_sequence_of_its_keys(given_: tuple[QueueRoster, list[QueueSelection]]) -> None:
    for selection in given_[1]:
        keys = list(selection)
        assert selection == keys
        assert [selection[at] for at in range(len(selection))] == keys
        assert selection[1:] == keys[1:]
        order = selection.sorted_order()
        assert order.tolist() == sorted(range(len(keys)), key=keys.__getitem__)
        assert selection.equals(selection_of(keys)[::-1]).tolist() == [
            one == other for one, other in zip(keys, keys[::-1], strict=True)
        ]
        assert (
            list(selection_of(selection).taken(order))
            == list(selection_of(keys).taken(order))
            == sorted(keys)
        )


@given(selections())
def test_its_table_is_the_table_of_its_keys(given_: tuple[QueueRoster, list[QueueSelection]]) -> None:
    for selection in given_[1]:
        topics, table = selection.table()
        expected_topics, expected = selection_of(list(selection)).table()
        assert topics == expected_topics
        assert table.dtype == expected.dtype
        assert table.tobytes() == expected.tobytes()


@given(selections())
def test_selections_unite_as_their_lists_do(given_: tuple[QueueRoster, list[QueueSelection]]) -> None:
    lists = [list(selection) for selection in given_[1]]
    for mixed in (given_[1], [*given_[1][:-1], lists[-1]]):
        queues, places = united(mixed)
        expected, expected_places = united(lists)
        assert list(queues) == list(expected)
        assert [place.tolist() for place in places] == [place.tolist() for place in expected_places]


@given(selections(), st.lists(KEYS, unique=True, max_size=20), st.integers(0, 20))
def test_a_directory_finds_their_rows_at_every_size(
    given_: tuple[QueueRoster, list[QueueSelection]], known: list[QueueKey], split: int
) -> None:
    directory = QueueDirectory(known[:split])
    for count in (split, len(known)):
        for selection in given_[1]:
            expected = directory.rows(list(selection), count)
            assert directory.rows(selection, count).tolist() == expected.tolist()
        if len(directory) == len(known[:split]):
            directory = directory.extended(len(directory), known[split:])


def test_a_roster_that_grew_after_a_lookup_is_read_again() -> None:
    roster, directory = QueueRoster(), QueueDirectory([QueueKey("b", 0, 0)])
    roster.add(QueueKey("a", 0, 0))
    assert directory.rows(roster.first(1), 1).tolist() == [-1]
    roster.add(QueueKey("b", 0, 0))
    assert directory.rows(roster.first(2), 1).tolist() == [-1, 0]
    directory = directory.extended(1, [QueueKey("a", 0, 0)])
    assert directory.rows(roster.first(2), 2).tolist() == [1, 0]
    assert directory.rows(roster.first(2), 1).tolist() == [-1, 0], "an older state does not see the row"
    assert directory.rows([QueueKey("a", 0, 0)], 2).tolist() == [1]
