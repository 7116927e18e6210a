"""A server under the attack of benchmarks/hostile.py, short. Its limits hold on a quiet machine; here, wide ones."""

import pytest

from benchmarks.hostile import measure
from benchmarks.report import Row
from tiered.settings.sections import Settings

pytestmark = pytest.mark.integration

MIB = 1024 * 1024
SECONDS, BATCH_AGE_MS = 6, 500
PULL_MS_MAX = 15_000
"""The same attack stopped every client for 41.8 s."""


def test_others_are_served_during_an_attack() -> None:
    rows: list[Row] = list(measure("tiered", SECONDS, BATCH_AGE_MS))
    quiet, attacked = rows
    assert quiet["pulls"] and attacked["pulls"]
    assert attacked["pull_worst_ms"] < PULL_MS_MAX, attacked
    assert attacked["commits"] > 0, "the uploader continues"
    assert attacked["rates_per_s"]["joins"] > 0 and attacked["rates_per_s"]["garbage"] > 0
    assert attacked["rss_growth_mib"] * MIB < Settings().serve.memory_bytes
