"""Questions by time and key go to the archive, the broker's files, or both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.policy.query_policy import (
    QueryShares,
    TimeRange,
    earliest_time,
    query_shares,
)
from fetcher.policy.read_policy import ReadPolicy

EARLIEST = 100


@pytest.mark.parametrize(
    ("local", "tiered", "expected"), [(0, 1, 0), (2, -1, 2), (-1, 5, 5), (-1, -1, -1), (9, 3, 3)]
)
def test_the_earliest_time_is_the_earlier_known_one(local: int, tiered: int, expected: int) -> None:
    assert earliest_time(local, tiered) == expected


@pytest.mark.parametrize(
    ("policy", "wanted", "shares"),
    [
        (ReadPolicy.NOT_IN_DISK, (0, 99), QueryShares(None, TimeRange(0, 99))),
        (ReadPolicy.NOT_IN_DISK, (100, 200), QueryShares(TimeRange(100, 200), TimeRange(100, 200))),
        (ReadPolicy.NOT_IN_MEM, (50, 200), QueryShares(TimeRange(100, 200), TimeRange(50, 200))),
        (ReadPolicy.FORCE, (50, 200), QueryShares(None, TimeRange(50, 200))),
        (ReadPolicy.DISABLE, (0, 99), QueryShares(TimeRange(0, 99), None)),
    ],
)
def test_a_query_goes_to_the_archive_and_for_what_the_broker_has_to_its_files_too(
    policy: ReadPolicy, wanted: tuple[int, int], shares: QueryShares
) -> None:
    assert query_shares(policy, TimeRange(*wanted), EARLIEST) == shares


@given(st.sampled_from(ReadPolicy), st.integers(0, 200), st.integers(0, 200), st.integers(-1, 200))
def test_every_time_is_searched_and_none_outside(
    policy: ReadPolicy, begin: int, end: int, earliest: int
) -> None:
    wanted = TimeRange(min(begin, end), max(begin, end))
    asked = {
        time_ms
        for share in query_shares(policy, wanted, earliest)
        if share is not None
        for time_ms in range(share.begin_ms, share.end_ms + 1)
    }
    assert asked == set(range(wanted.begin_ms, wanted.end_ms + 1))
