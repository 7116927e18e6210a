"""Which rows a read takes from those available. Pure: no I/O.

A filter by tag needs only columns, which come with the object's tail: blocks without a wanted row are never fetched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fetcher.rows.batch import MessageBatch

NO_END = 1 << 62


class ReadStep(NamedTuple):
    """Rows of consecutive runs that may be wanted. ``is_last``: the read ends here.

    ``lost_to``: no row was read, and the parents of those before this offset are lost; else None.
    """

    batch: MessageBatch
    next_offset: int
    is_last: bool
    covered: int
    lost_to: int | None = None


class Limits(NamedTuple):
    """What a read may still take. ``is_first``: nothing was taken yet, so one record is taken whatever its size."""

    rows: int
    bytes: int
    is_first: bool


class TakenRows(NamedTuple):
    """Rows a read takes, ascending: a slice or indexes. ``is_full``: a limit was reached; ``end_row``: rows before it
    were examined."""

    rows: slice | NDArray[np.intp]
    row_count: int
    bytes: int
    end_row: int
    is_full: bool


def take(
    sizes: NDArray[np.int32],
    ends: NDArray[np.int64],
    first: int,
    limits: Limits,
    mask: NDArray[np.bool_] | None,
) -> TakenRows:
    """Rows from ``first`` on, of those in ``mask``. ``ends``: running sum of ``sizes`` plus any constant.

    At most ``limits.rows``; the first that does not fit into ``limits.bytes`` ends it.
    """
    if mask is not None:
        return _take_masked(sizes, first, limits, mask)
    before = int(ends[first]) - int(sizes[first])
    end = min(len(sizes), first + limits.rows)
    is_full = first + limits.rows <= len(sizes)
    if int(ends[end - 1]) - before > limits.bytes:
        end = max(bisect_right(cast("Sequence[int]", ends), before + limits.bytes), first + limits.is_first)
        is_full = True
    if end <= first:
        return TakenRows(slice(first, first), 0, 0, first, True)
    return TakenRows(slice(first, end), end - first, int(ends[end - 1]) - before, end, is_full)


def _take_masked(sizes: NDArray[np.int32], first: int, limits: Limits, mask: NDArray[np.bool_]) -> TakenRows:
    rows = np.flatnonzero(mask[first:])[: limits.rows] + first
    ends = np.cumsum(sizes[rows], dtype=np.int64)
    count = int(ends.searchsorted(limits.bytes, side="right"))
    if count == 0 and limits.is_first and len(rows):
        count = 1
    is_full = count < len(rows) or count == limits.rows
    taken_bytes = int(ends[count - 1]) if count else 0
    if not is_full:
        return TakenRows(rows, count, taken_bytes, len(sizes), False)
    end_row = int(rows[count - 1]) + 1 if count else first
    return TakenRows(rows[:count], count, taken_bytes, end_row, True)
