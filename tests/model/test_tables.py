"""Rows of tables are copied as bytes: the same rows as by indexing."""

import numpy as np
import pytest

from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE, Table, copied, picked


def table(rows: int, dtype: np.dtype[np.void]) -> Table:
    return np.frombuffer(np.random.default_rng(rows).bytes(rows * dtype.itemsize), dtype)


@pytest.mark.parametrize("dtype", [RUN_DTYPE, OBJECT_DTYPE])
def test_picked_rows_are_those_of_an_index(dtype: np.dtype[np.void]) -> None:
    rows = table(50, dtype)
    for which in (np.array([3, 0, 49, 3]), np.zeros(0, np.int64), np.arange(50) % 3 == 1, np.zeros(50, bool)):
        assert picked(rows, which).tobytes() == rows[which].tobytes()
        assert picked(rows[::2], which[::2] // 2 if which.dtype != bool else which[::2]).dtype == dtype
    with pytest.raises(IndexError):
        picked(rows, np.array([50]))


def test_a_copy_is_of_its_own() -> None:
    rows = table(9, RUN_DTYPE)
    for part in (rows, rows[2:5], rows[::2], rows[:0]):
        own = copied(part)
        assert own.tobytes() == part.tobytes()
        own["rows"] = 0
        assert rows.tobytes() == table(9, RUN_DTYPE).tobytes()
