"""Plans of GETs: every wanted byte once, gaps below the ratio, pieces near their size, few requests."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.blocks.block_loader import CoalescingLimits, Range, plan_gets

MIB = 1024 * 1024
LIMITS = CoalescingLimits(gap_ratio=0.125, piece_bytes=4 * MIB, get_bytes_max=16 * MIB)


@st.composite
def _wanted(draw: st.DrawFn) -> list[Range]:
    ranges, at = [], draw(st.integers(0, 1000))
    for _ in range(draw(st.integers(0, 60))):
        at += draw(st.one_of(st.just(0), st.integers(0, 2000)))
        length = draw(st.integers(1, 3000))
        ranges.append(Range(at, length))
        at += length
    return ranges


_limits = st.builds(
    lambda ratio, piece, more: CoalescingLimits(ratio, piece, piece + more),
    st.floats(0, 0.9),
    st.integers(1, 8000),
    st.integers(0, 8000),
)


@given(_wanted(), _limits)
def test_every_plan_keeps_its_promises(wanted: list[Range], limits: CoalescingLimits) -> None:
    plans = plan_gets(wanted, limits)
    assert [number for plan in plans for number in range(plan.first, plan.end)] == list(range(len(wanted)))
    for plan in plans:
        mine = wanted[plan.first : plan.end]
        assert plan.offset == mine[0].offset
        assert plan.offset + plan.length == mine[-1].end
        assert plan.gap_bytes == plan.length - sum(item.length for item in mine)
        assert plan.gap_bytes <= limits.gap_ratio * plan.length
        assert plan.length <= limits.get_bytes_max or len(mine) == 1
    assert all(before.offset + before.length <= after.offset for before, after in pairwise(plans))


@given(st.lists(st.integers(1, 512 * 1024), min_size=1, max_size=200))
def test_a_span_without_gaps_is_cut_into_about_equal_pieces(lengths: list[int]) -> None:
    wanted, at = [], 16
    for length in lengths:
        wanted.append(Range(at, length))
        at += length
    plans = plan_gets(wanted, LIMITS)
    total = sum(lengths)
    assert sum(plan.length for plan in plans) == total
    assert len(plans) == max(1, round(total / LIMITS.piece_bytes))
    assert max(plan.length for plan in plans) - min(plan.length for plan in plans) <= 2 * max(lengths)


def test_what_is_little_longer_than_a_piece_stays_one_request() -> None:
    blocks = [Range(16 + 100_000 * number, 100_000) for number in range(50)]  # 4.8 MiB
    assert len(plan_gets(blocks, LIMITS)) == 1


def test_a_small_gap_is_read_over_and_a_large_one_is_not() -> None:
    small = [Range(0, 900), Range(1000, 900)]
    large = [Range(0, 900), Range(1300, 900)]
    assert len(plan_gets(small, LIMITS)) == 1
    assert len(plan_gets(large, LIMITS)) == 2
    assert plan_gets(small, CoalescingLimits(0.0, MIB, MIB))[1].offset == 1000


def test_a_long_start_does_not_pay_for_a_gap_in_its_last_piece() -> None:
    """One ratio over all would let a gap of a MiB ride on 16 MiB before it; each request must be worth it."""
    wanted = [Range(number * MIB, MIB) for number in range(16)] + [Range(17 * MIB, 1000)]
    assert all(plan.gap_bytes <= plan.length / 8 for plan in plan_gets(wanted, LIMITS))


def test_a_range_above_the_bound_goes_alone() -> None:
    plans = plan_gets([Range(0, 10), Range(10, 40 * MIB), Range(40 * MIB + 10, 10)], LIMITS)
    assert [plan.length for plan in plans] == [10, 40 * MIB, 10]


@pytest.mark.parametrize("wanted", [[Range(0, 10), Range(5, 10)], [Range(10, 1), Range(0, 1)]])
def test_ranges_out_of_order_are_refused(wanted: list[Range]) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        plan_gets(wanted, LIMITS)
