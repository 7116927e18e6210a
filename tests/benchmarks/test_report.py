"""Medians, ratios and targets, on made-up figures."""

from __future__ import annotations

from typing import Any

from benchmarks.report import MIB, CycleSizes, Row, summarize, table

SIZES = CycleSizes(batch_bytes=32 * MIB, object_bytes=16 * MIB)


def _backfill(store: str, messages_per_s: float, **changes: Any) -> Row:
    row: Row = {
        "store": store,
        "what": "backfill",
        "target": "file",
        "twin": "",
        "messages": 1_000_000,
        "log_bytes": 320 * MIB,
        "wall_s": 1_000_000 / messages_per_s,
        "cpu_s": 2.0,
        "messages_per_s": messages_per_s,
        "mb_per_s": 300.0,
        "cpu_us_per_message": 2.0,
        "peak_rss_bytes": 400 * MIB,
        "data_objects": 10,
        "data_bytes": 80 * MIB,
        "catalog_objects": 12,
        "stored_ratio": 4.0,
        "others_cores": 0.01,
        "again_wall_s": 0.0,
        "again_new_data_objects": 0,
        "memory_growth": 1.0,
        "resident_change": 0.0,
        "is_soak": False,
        "puts_beyond_objects": 0,
    }
    return row | changes


def _peer(store: str, messages_per_s: float) -> Row:
    return {
        "store": store,
        "what": "peer",
        "target": None,
        "messages_per_s": messages_per_s * 2,
        "messages_per_s_with_index": messages_per_s,
        "cpu_us_per_message": 8.0,
    }


def _parts(store: str, messages_per_s: float) -> Row:
    return {"store": store, "what": "parts", "target": "file", "messages_per_s": messages_per_s}


def test_medians_are_compared_with_peer_and_parts() -> None:
    rows = [_backfill("A", rate) for rate in (700_000.0, 900_000.0, 100.0)]
    (summary,) = summarize([*rows, _peer("A", 200_000.0), _parts("A", 1_000_000.0)], SIZES)
    assert summary["messages_per_s"] == 700_000
    assert summary["checks"]["times_peer"] == {"value": 3.5, "limit": 3.5, "rule": ">=", "ok": True}
    assert summary["peer_commit_messages_per_s"] == 400_000
    assert summary["checks"]["cpu_of_peer"]["ok"]
    assert summary["checks"]["of_parts"]["value"] == 0.7
    assert summary["missed"] == []
    assert "MISSED" not in table([summary])


def test_missed_targets_are_named() -> None:
    slow = _backfill("A", 100_000.0, peak_rss_bytes=600 * MIB, data_objects=40, catalog_objects=40)
    (summary,) = summarize([slow, _peer("A", 200_000.0), _parts("A", 1_000_000.0)], SIZES)
    assert summary["missed"] == ["times_peer", "of_parts", "peak_rss_mib", "data_puts", "catalog_puts"]
    assert table([summary]).count("MISSED") == 5


def test_many_queues_are_compared_with_few() -> None:
    few, many = _backfill("B", 400_000.0), _backfill("E", 200_000.0, twin="B", data_objects=14)
    _, summary = summarize([few, many], SIZES)
    assert summary["checks"]["time_of_twin"]["value"] == 2.0
    assert summary["missed"] == ["time_of_twin"]
    assert summary["checks"]["objects_of_twin"]["ok"]


def test_soak_runs_must_be_flat_and_leave_the_page_cache_alone() -> None:
    row = _backfill("L", 1.0, is_soak=True, memory_growth=1.3, resident_change=0.06)
    (summary,) = summarize([row], SIZES)
    assert summary["missed"] == ["memory_growth", "resident_change"]
