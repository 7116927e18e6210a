"""Pacing of the dispatch loop."""

from __future__ import annotations

from uploader.follow_loop import Every


def test_once_per_period_and_the_first_time_at_once() -> None:
    every = Every(100)
    assert [every.is_due(now_ms) for now_ms in (50, 51, 149, 150, 151, 1000)] == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]


def test_a_clock_that_is_set_back_stops_nothing() -> None:
    """Else a restarted broker, its bound and its new files would go unseen until the old time comes again."""
    every = Every(100)
    assert every.is_due(3_600_000)
    assert every.is_due(0)
    assert not every.is_due(99)
    assert every.is_due(100)
