"""Medians, ratios and targets, on made-up figures.

The Markdown of results: the newest counts, a missed limit is loud and is the exit code.

What the Spark benchmark says of its figures.

What a benchmark writes down, and how it ends.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recording
from benchmarks.recording import record
from benchmarks.report import MIB, CycleSizes, Row, summarize, table
from benchmarks.results_table import main
from benchmarks.spark_report import (
    BODIES,
    FULL,
    HEADER_ONLY,
    NOTHING,
    ONE_PERCENT,
    OWN_COLUMNS,
    OWN_COLUMNS_A_CORE,
    OWN_RECORDS,
    RANGE_BYTES,
    targets,
)

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


ROW = {
    "what": "idle",
    "at": "2026-01-02T03:04:05Z",
    "ok": False,
    "missed": ["cores"],
    "cores": 0.02,
    "asked": ["GET a|b"],
}


def test_a_missed_limit_is_named_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "soak.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    assert main([str(path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "| result | at | limits |",
        "|---|---|---|",
        "| idle | 2026-01-02T03:04:05Z | **missed: cores** |",
        "",
        "### idle",
        "",
        "| figure | value |",
        "|---|---|",
        "| cores | 0.02 |",
        "| asked | GET a\\|b |",
    ]
    path.write_text(json.dumps({**ROW, "ok": True, "missed": []}) + "\n")
    assert main([str(path)]) == 0
    assert "| held |" in capsys.readouterr().out


def rows_of(core_s: dict[str, float], wall_s: dict[str, float]) -> list[dict[str, Any]]:
    timed = [
        {
            "profile": "small",
            "what": what,
            "run": run,
            "wall_s": wall_s[what] * factor,
            "core_s": core * factor,
            "jvm_core_s": core / 2,
            "others_cores": 0.1,
            "messages": 1_000_000,
            "raw_bytes": 290_000_000,
            "stored_bytes": 66_000_000,
            "worker_peak_bytes": 300 << 20,
        }
        for what, core in core_s.items()
        for run, factor in enumerate((1.0, 3.0, 0.5))
    ]
    size = {
        "profile": "small",
        "what": RANGE_BYTES,
        "read_bytes": 130,
        "block_bytes": 100,
        "message_bytes": 90,
    }
    return [*timed, size]


CORES = {
    OWN_RECORDS: 0.4,
    OWN_COLUMNS: 1.2,
    OWN_COLUMNS_A_CORE: 1.8,
    FULL: 2.4,
    BODIES: 0.8,
    HEADER_ONLY: 0.3,
    ONE_PERCENT: 0.3,
    NOTHING: 0.2,
}
WALLS = CORES | {FULL: 2.0, HEADER_ONLY: 0.8, ONE_PERCENT: 0.4}


def test_targets_are_judged_by_medians() -> None:
    found = {row["what"]: (row["found"], row["met"]) for row in targets(rows_of(CORES, WALLS))}
    assert found == {
        "full scan per core / own reader, same columns": (0.5, True),
        "full scan per core / own reader on every core": (0.75, True),
        "full scan per core / own reader, records": (0.1667, False),
        "bodies per core / own reader, records": (0.5, True),
        "header-only rows/s": (1_250_000, True),
        "(1 % - job start) / full scan": (0.1, False),
        "bytes read of 1 % / its blocks": (1.3, False),
        "peak of a Python worker, bytes": (300 << 20, True),
    }


def _table(summaries: Sequence[Row]) -> str:
    return f"{len(summaries)} summaries"


@pytest.mark.parametrize("missed", [[], ["rate"]])
def test_rows_summaries_and_the_verdict(
    tmp_path: Path, missed: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([0.4, 1.5])
    monkeypatch.setattr(recording.os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    out = tmp_path / "out.jsonl"
    out.write_text('{"of": "the run before"}\n')
    rows: list[Row] = [{"n": 1, "requests": {"PutObject": 3}}, {"n": 2}]

    def summarize(measured: Sequence[Row]) -> list[Row]:
        return [{"sum": sum(row["n"] for row in measured), "missed": missed}]

    assert record(out, rows, summarize, _table, quiet=("requests",)) == len(missed)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    first, second = rows[0] | {"load": 0.4}, rows[1] | {"load": 1.5, "busy": True}
    assert lines == [{"of": "the run before"}, first, second, {"sum": 3, "missed": missed}]
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "1 summaries",
        "1 of 2 figures were measured on a busy machine (load above 1)",
    ]
    assert [json.loads(line) for line in shown.err.splitlines()] == [{"n": 1, "load": 0.4}, second]
