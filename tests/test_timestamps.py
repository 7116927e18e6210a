"""Times as people type them."""

import time
from datetime import UTC, date, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.errors import UsageError
from tiered.model.dates import PLAUSIBLE_MS
from tiered.timestamps import milliseconds, parse_instant


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1795227708020", 1795227708020),
        ("20261121", 1795219200000),
        ("2026-11-21", 1795219200000),
        ("2524608000000", 2524608000000),
        ("1970-01-01", 0),
        ("1970-01-01T00:00:01", 1_000),
        ("1970-01-01 00:00:01.5Z", 1_500),
        ("2026-11-21T02:21:48.020Z", 1795227708020),
        ("2026-11-21T04:21:48.020+02:00", 1795227708020),
    ],
)
def test_milliseconds_and_iso_8601(text: str, expected: int) -> None:
    assert parse_instant(text) == expected


@pytest.mark.parametrize(
    ("text", "ago_ms"),
    [("-30s", 30_000), ("-90m", 5_400_000), ("-2h", 7_200_000), ("-7d", 604_800_000), ("-0w", 0)],
)
def test_times_before_now(text: str, ago_ms: int) -> None:
    now_ms = time.time_ns() // 1_000_000
    assert 0 <= parse_instant(text) + ago_ms - now_ms < 10_000


@pytest.mark.parametrize(
    ("text", "understood"),
    [
        ("1795227708", "1970-01-21T18:40:27Z, .*in seconds it is 2026-11-21T02:21:48Z, so use 1795227708000"),
        ("2026", "1970-01-01T00:00:02Z"),
        ("202611", "1970-01-01T00:03:22Z"),
        ("2026112107", "in seconds it is 2034-03-16"),
        ("202611210700", "1976-06-03"),
        ("20261121070000", "2612-01-19"),
        ("1795227708020000", "outside the years 1 to 9999"),
        ("-5", "1969-12-31T23:59:59Z"),
    ],
)
def test_implausible_integers_are_refused_with_what_was_understood(text: str, understood: str) -> None:
    with pytest.raises(UsageError, match=f"^{text} milliseconds since 1970 is .*{understood}"):
        parse_instant(text)


@pytest.mark.parametrize(
    "text", ["-1y", "-h", "1h", "", "soon", "2026-13-01", "20261301", "12345678", "12:00", "1.5", "--5"]
)
def test_anything_else_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError, match="is not a time"):
        parse_instant(text)


@given(st.integers(-(10**13), 10**14).filter(lambda stamp_ms: stamp_ms * 1000 not in PLAUSIBLE_MS))
def test_a_datetime_is_the_same_millisecond(stamp_ms: int) -> None:
    """Also where a float has no room for it."""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=stamp_ms)
    assert milliseconds(moment) == stamp_ms == milliseconds(stamp_ms)
    assert milliseconds(moment.replace(tzinfo=None)) == stamp_ms
    assert parse_instant(moment.isoformat()) == stamp_ms


def test_any_integer_is_milliseconds_and_nothing_else_is() -> None:
    assert milliseconds(np.array([1795227708020])[0]) == 1795227708020
    for odd in (1.5, "2026-11-21", date(2026, 11, 21), None):
        with pytest.raises(UsageError, match="is not a time"):
            milliseconds(odd)  # type: ignore[arg-type]
