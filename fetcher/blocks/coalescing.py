"""Plans the GETs for wanted ranges of one object: few, bounded in size, with few unwanted bytes. Pure.

1. Adjacent ranges are joined, over a gap too if the unwanted bytes stay below a ratio of the whole.
2. A span longer than a piece is cut into pieces of about equal length, fetched concurrently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True)
class CoalescingLimits:
    """``gap_ratio``: unwanted bytes of a GET over all its bytes. ``piece_bytes``: what a long span is cut into.

    ``get_bytes_max`` bounds a GET but for a single longer range.
    """

    gap_ratio: float
    piece_bytes: int
    get_bytes_max: int


class Range(NamedTuple):
    """Bytes [offset, offset + length) of an object."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.length


class PlannedGet(NamedTuple):
    """One GET. It brings the wanted ranges number [first, end); ``gap_bytes`` of it are unwanted."""

    offset: int
    length: int
    first: int
    end: int
    gap_bytes: int


def plan_gets(wanted: Sequence[Range], limits: CoalescingLimits) -> list[PlannedGet]:
    """GETs that bring every one of ``wanted`` (ascending, disjoint, not empty) exactly once.

    Raises ValueError for ranges that overlap or are not in order.
    """
    plans: list[PlannedGet] = []
    first = 0
    length = wanted[-1].end - wanted[0].offset if wanted else 0
    is_one = 0 < length <= min(limits.piece_bytes, limits.get_bytes_max)
    if is_one and all(one.offset + one.length == other.offset for one, other in pairwise(wanted)):
        return [PlannedGet(wanted[0].offset, length, 0, len(wanted), 0)]
    for number in range(1, len(wanted) + 1):
        if number < len(wanted):
            if wanted[number].offset < wanted[number - 1].end:
                raise ValueError(f"{wanted[number]} does not follow {wanted[number - 1]}")
            if _gap_fits(wanted, first, number + 1, limits.gap_ratio):
                continue
        plans += _cut(wanted, first, number, limits)
        first = number
    return plans


def _gap_fits(wanted: Sequence[Range], first: int, end: int, gap_ratio: float) -> bool:
    """Whether the GET over wanted[first:end] stays below the ratio. The gaps before the last are looked at again
    when the span is cut, so the last one alone decides here."""
    gap = wanted[end - 1].offset - wanted[end - 2].end
    if gap == 0:
        return True
    length = wanted[end - 1].end - wanted[first].offset
    return _gap_bytes(wanted, first, end) <= gap_ratio * length


def _cut(wanted: Sequence[Range], first: int, end: int, limits: CoalescingLimits) -> list[PlannedGet]:
    """wanted[first:end] in pieces of about equal length: each cut is where a range ends nearest to its goal."""
    start, stop = wanted[first].offset, wanted[end - 1].end
    pieces = max(1, round((stop - start) / limits.piece_bytes))
    goal_number, begin = 1, first
    plans: list[PlannedGet] = []
    for number in range(first + 1, end):
        goal = start + (stop - start) * goal_number / pieces
        reached, after = wanted[number - 1].end, wanted[number].end
        is_goal = goal_number < pieces and after - goal > goal - reached
        if is_goal or after - wanted[begin].offset > limits.get_bytes_max:
            plans += _within_ratio(wanted, begin, number, limits.gap_ratio)
            begin = number
            goal_number += is_goal
    return plans + _within_ratio(wanted, begin, end, limits.gap_ratio)


def _within_ratio(wanted: Sequence[Range], first: int, end: int, gap_ratio: float) -> list[PlannedGet]:
    """wanted[first:end] as one GET, or parted at its largest gap until the ratio holds in each part."""
    pending = [(first, end)]
    plans: list[PlannedGet] = []
    while pending:
        first, end = pending.pop()
        length = wanted[end - 1].end - wanted[first].offset
        gap_bytes = _gap_bytes(wanted, first, end)
        if gap_bytes <= gap_ratio * length:
            plans.append(PlannedGet(wanted[first].offset, length, first, end, gap_bytes))
            continue
        at = max(range(first + 1, end), key=lambda number: wanted[number].offset - wanted[number - 1].end)
        pending += [(at, end), (first, at)]
    return plans


def _gap_bytes(wanted: Sequence[Range], first: int, end: int) -> int:
    length = wanted[end - 1].end - wanted[first].offset
    return length - sum(wanted[number].length for number in range(first, end))
