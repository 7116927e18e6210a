"""The offload benchmark on a tiny store, from making it to the table."""

from pathlib import Path

import pytest

from benchmarks.offload import Plan, measure
from benchmarks.report import MIB, CycleSizes, summarize, table
from benchmarks.stores import PROFILES, ensure_store


@pytest.mark.integration
def test_a_tiny_store_goes_through_every_measurement(tmp_path: Path) -> None:
    profiles = [PROFILES["C"].scaled(0.01)]
    rows = list(measure(Plan(profiles, ["file"], runs=1, work=tmp_path, peer=None, verify=True)))
    assert [row["what"] for row in rows] == ["start", "copy", "parts", "backfill"]
    _, _, parts, backfill = rows
    assert parts["messages"] == backfill["messages"] == 2_000
    assert backfill["data_objects"] == 1
    assert backfill["again_new_data_objects"] == 0
    assert backfill["verify_wall_s"] > 0
    (summary,) = summarize(rows, CycleSizes(32 * MIB, 16 * MIB))
    assert "C" in table([summary])


def test_a_store_is_made_once(tmp_path: Path) -> None:
    first = ensure_store(tmp_path, PROFILES["A"].scaled(0.0001))
    stamp = (first.path / "bench.properties").stat().st_mtime_ns
    second = ensure_store(tmp_path, PROFILES["A"].scaled(0.0001))
    assert second == first
    assert (second.path / "bench.properties").stat().st_mtime_ns == stamp
