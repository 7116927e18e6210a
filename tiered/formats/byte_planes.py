"""Integer tables as byte planes of differences, which compress to a third of plain columns.

Each column is the differences between consecutive rows (the first: from 0) as zigzag-encoded 64-bit integers, of all
columns one behind the other. Plane 0 holds the lowest byte of each, plane 7 the highest.
"""

import sys
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.formats.page_decoder import decode_column_page
from tiered.kernels.columns import decode_planes, encode_planes
from tiered.model.tables import Table

_PLANES = 8
_VALUES_OF_KERNEL = 1 << 18
"""From so many values on a kernel saves more time than numba takes to load."""


def row_bytes(dtype: np.dtype[Any]) -> int:
    """Encoded bytes of a row."""
    return _PLANES * len(dtype.names or ())


@lru_cache(maxsize=128)
def _columns(dtype: np.dtype[Any]) -> NDArray[np.int64]:
    """For kernels, of each column its offset in a row, its bytes, and whether it is signed. Raises ValueError if one is
    not of integers as this machine has them."""
    fields = [(field[1], field[0].itemsize, field[0].kind == "i") for field in (dtype.fields or {}).values()]
    if not all(field[0].kind in "iu" and field[0].isnative for field in (dtype.fields or {}).values()):
        raise ValueError("a column is not of integers")
    return np.array(fields, np.int64)


def _has_kernel(rows: int, dtype: np.dtype[Any]) -> bool:
    is_worth_it = rows * len(dtype.names or ()) >= _VALUES_OF_KERNEL or "numba" in sys.modules
    return decode_column_page.may_load and is_worth_it


def encode(table: Table) -> bytes:
    """The bytes of ``table``, whose columns are integers of 4 or 8 bytes, in the form that compresses best: differences
    between rows, as 64-bit numbers, all lowest bytes first, then all second ones, and so on."""
    names, columns = table.dtype.names or (), _columns(table.dtype)
    assert columns[:, 1].min() >= 4
    if _has_kernel(len(table), table.dtype):
        planes = np.empty(len(table) * row_bytes(table.dtype), np.uint8)
        encode_planes(table.ctypes.data, len(table), table.strides[0], columns, planes.ctypes.data)
        return planes.tobytes()
    numbers = np.empty((len(names), len(table)), np.int64)
    for index, name in enumerate(names):
        column, row = table[name], numbers[index]
        row[:1] = column[:1].astype(np.int64)
        np.subtract(column[1:], column[:-1], out=row[1:], dtype=np.int64, casting="unsafe")
    zigzag = (numbers << 1) ^ (numbers >> 63)
    return zigzag.astype("<i8", copy=False).view(np.uint8).reshape(-1, _PLANES).T.tobytes()


def decode(data: bytes, position: int, rows: int, dtype: np.dtype[Any]) -> Table:
    """The table with ``rows`` rows of ``dtype`` that ``encode`` has written into ``data`` at ``position``. Raises
    ValueError if the data are too short, or if a column is not of integers."""
    columns, table = _columns(dtype), np.empty(rows, dtype)
    if not rows:
        return table
    planes = np.frombuffer(data, np.uint8, rows * row_bytes(dtype), position)
    if _has_kernel(rows, dtype):
        decode_planes(planes.ctypes.data, columns, rows, dtype.itemsize, table.ctypes.data)
        return table
    # Decode zigzag and sum up in place: the memory of ``is_negative`` is used again for its negative, then for sums.
    zigzag = planes.reshape(_PLANES, -1).T.copy().view("<u8").reshape(len(columns), rows)
    is_negative = zigzag & np.uint64(1)
    zigzag >>= np.uint64(1)
    zigzag ^= np.negative(is_negative, out=is_negative)
    values = np.cumsum(zigzag.view(np.int64), axis=1, out=is_negative.view(np.int64))
    for index, name in enumerate(dtype.names or ()):
        table[name] = values[index]
    return table
