"""Integer tables as byte planes of differences, which compress to a third of plain columns.

Each column is the differences between consecutive rows (the first: from 0) as zigzag-encoded 64-bit integers, of all
columns one behind the other. Plane 0 holds the lowest byte of each, plane 7 the highest.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tiered.model.tables import Table

_PLANES = 8


def row_bytes(dtype: np.dtype[Any]) -> int:
    """Encoded bytes of a row."""
    return _PLANES * len(dtype.names or ())


@lru_cache(maxsize=128)
def _is_of_integers(dtype: np.dtype[Any]) -> bool:
    return all(dtype[name].kind in "iu" for name in dtype.names or ())


def encode(table: Table) -> bytes:
    """The bytes of ``table``, whose columns are integers, in the form that compresses best: differences between rows,
    as 64-bit numbers, all lowest bytes first, then all second ones, and so on."""
    names = table.dtype.names or ()
    numbers = np.empty((len(names), len(table)), np.int64)
    for index, name in enumerate(names):
        column, row = table[name], numbers[index]
        assert column.dtype.kind in "iu"
        row[:1] = column[:1].astype(np.int64)
        np.subtract(column[1:], column[:-1], out=row[1:], dtype=np.int64, casting="unsafe")
    zigzag = (numbers << 1) ^ (numbers >> 63)
    return zigzag.astype("<i8", copy=False).view(np.uint8).reshape(-1, _PLANES).T.tobytes()


def decode(data: bytes, position: int, rows: int, dtype: np.dtype[Any]) -> Table:
    """The table with ``rows`` rows of ``dtype`` that ``encode`` has written into ``data`` at ``position``. Raises
    ValueError if the data are too short, or if a column is not of integers."""
    if not _is_of_integers(dtype):
        raise ValueError("a column is not of integers")
    names, table = dtype.names or (), np.empty(rows, dtype)
    if not rows:
        return table
    planes = np.frombuffer(data, np.uint8, rows * row_bytes(dtype), position)
    zigzag = planes.reshape(_PLANES, -1).T.copy().view("<u8").reshape(len(names), rows)
    is_negative = zigzag & np.uint64(1)
    zigzag >>= np.uint64(1)
    zigzag ^= np.negative(is_negative, out=is_negative)
    values = np.cumsum(zigzag.view(np.int64), axis=1, out=is_negative.view(np.int64))
    for index, name in enumerate(names):
        table[name] = values[index]
    return table
