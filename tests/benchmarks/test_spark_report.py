"""What the Spark benchmark says of its figures."""

from __future__ import annotations

from typing import Any

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
