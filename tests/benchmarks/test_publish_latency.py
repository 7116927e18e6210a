"""The publish-latency experiment, short: everything written becomes visible, then no requests are sent."""

import pytest

from benchmarks.publish_latency import RATE, Experiment, measure

pytestmark = pytest.mark.integration


def test_a_live_store_is_followed_to_its_end_and_then_left_alone() -> None:
    row = measure(Experiment(seconds=2, idle_s=1, batch_age_ms=500))
    assert row["complete"]
    assert row["messages"] == 2 * RATE
    assert row["commits"] >= 2
    assert row["idle_requests"] == 0
