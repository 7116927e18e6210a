"""Pacing of the dispatch loop."""

from __future__ import annotations

from uploader.follow import Every


def test_once_per_period_and_the_first_time_at_once() -> None:
    every = Every(100)
    assert [every.is_due(now_ms) for now_ms in (50, 51, 149, 150, 151, 1000)] == [
        True, False, False, True, False, True,
    ]  # fmt: skip
