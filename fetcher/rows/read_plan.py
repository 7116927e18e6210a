"""What to read: what a pull asks for, and which rows of those at hand it takes. Pure: no I/O.

A filter by tag looks at columns, which come with the object's tail, block by block: blocks without a wanted row are
never fetched.

Owns which rows a pull takes. Does not own rows (run_rows.py) nor requests (row_reader.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fetcher.rows.batch import MessageBatch
from fetcher.rows.tag_filter import MessageFilter

NO_END = 1 << 62


@dataclass(frozen=True)
class Wish:
    """What a pull asks for: at most ``count`` rows and ``max_bytes``, but for a single larger record, below ``end``.

    ``judges``: whether the filter's exact half is asked too; reading ahead, its columns are enough. ``rows_ahead``: of
    so many rows more the reader will want the columns.
    """

    count: int
    max_bytes: int
    filter: MessageFilter | None = None
    judges: bool = True
    end: int = NO_END
    rows_ahead: int = 0


class Step(NamedTuple):
    """Rows of some consecutive runs that may be wanted. ``is_last``: read no further for this reply.

    ``lost_to``: no row was read, and those before this offset have lost their parents; else None.
    """

    batch: MessageBatch
    next_offset: int
    is_last: bool
    covered: int
    lost_to: int | None = None


class Limits(NamedTuple):
    """What a reply may still take. ``is_first``: it has nothing yet, so one record is taken whatever its size."""

    rows: int
    bytes: int
    is_first: bool


class Taken(NamedTuple):
    """Rows a reply takes, ascending: a slice or indexes. ``is_full``: a limit was reached, look no further;
    ``end_row``: rows before it were looked at."""

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
) -> Taken:
    """Which rows from ``first`` on are taken, of those in ``mask``. ``ends``: running sum of ``sizes`` plus anything.

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
        return Taken(slice(first, first), 0, 0, first, True)
    return Taken(slice(first, end), end - first, int(ends[end - 1]) - before, end, is_full)


def _take_masked(sizes: NDArray[np.int32], first: int, limits: Limits, mask: NDArray[np.bool_]) -> Taken:
    rows = np.flatnonzero(mask[first:])[: limits.rows] + first
    ends = np.cumsum(sizes[rows], dtype=np.int64)
    count = int(ends.searchsorted(limits.bytes, side="right"))
    if count == 0 and limits.is_first and len(rows):
        count = 1
    fits = count == len(rows)
    is_full = not fits or count == limits.rows
    taken_bytes = int(ends[count - 1]) if count else 0
    if not is_full:
        return Taken(rows, count, taken_bytes, len(sizes), False)
    end_row = int(rows[count - 1]) + 1 if count else first
    return Taken(rows[:count], count, taken_bytes, end_row, True)
