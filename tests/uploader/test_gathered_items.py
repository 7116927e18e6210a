"""Items come in file order, whatever of them had to be put aside."""

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.archive.index.items import ITEM_DTYPE, Widths, encode_items
from tiered.archive.index.order import sorted_items
from tiered.model.tables import Table
from uploader.index_input import GatheredItems


def items_of(*rows: tuple[int, int, int]) -> Table:
    """Of (hash, queue offset, store timestamp)."""
    items = np.zeros(len(rows), ITEM_DTYPE)
    for number, row in enumerate(rows):
        items[number] = (*row, -1, 3)
    return items


ROW = st.tuples(
    st.integers(0, (1 << 64) - 1) | st.integers(0, 9), st.integers(0, 9), st.integers(-5, 1 << 40)
)


@given(st.lists(st.tuples(st.booleans(), st.lists(ROW, max_size=9)), max_size=9), st.integers(1, 20))
def test_in_order_equal_ones_once(
    additions: list[tuple[bool, list[tuple[int, int, int]]]], items_max: int
) -> None:
    with closing(GatheredItems(items_max)) as gathered:
        for at_once, rows in additions:
            if at_once:
                gathered.add_all_or_none(items_of(row) for row in rows)
            else:
                gathered.add(items_of(*rows))
        everything = [row for _, rows in additions for row in rows]
        assert gathered.count == len(everything)
        times = [row[2] for row in everything] or [0]
        widths = gathered.widths(max(times) - min(times))
        found = np.concatenate([np.zeros(0, ITEM_DTYPE), *gathered.in_order()])
        assert found.tolist() == sorted_items(items_of(*everything)).tolist()
        encode_items(found, widths, min(times))  # raises what does not fit
        assert widths <= Widths(1, 8, 1, 1)


def test_of_a_segment_that_turns_out_damaged_nothing_is_left() -> None:
    def damaged() -> Iterator[Table]:
        for number in range(7):
            yield items_of((number, number, 5), (number, 8, 5))
        raise ValueError("damaged")

    with closing(GatheredItems(5)) as gathered:
        gathered.add(items_of((1, 1, 1), (2, 2, 2)))
        with pytest.raises(ValueError, match="damaged"):
            gathered.add_all_or_none(damaged())
        gathered.add(items_of((3, 3, 3)))
        assert gathered.count == 3
        found = np.concatenate(list(gathered.in_order()))
    assert found["hash"].tolist() == [1, 2, 3]


def test_what_is_put_aside_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with closing(GatheredItems(1)) as gathered:
        gathered.add(items_of((1, 1, 1)))
        gathered.add(items_of((2, 2, 2)))
        assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "away"))
    with closing(GatheredItems(1)) as gathered, pytest.raises(OSError, match="away"):
        gathered.add(items_of((1, 1, 1)))
        gathered.add(items_of((2, 2, 2)))
