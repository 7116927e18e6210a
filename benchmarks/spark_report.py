"""Evaluates the figures of the Spark benchmark: a table, and targets met or missed.

Owns names of measurements and targets. Does not own measuring (spark.py).
"""

import statistics
from typing import Any

FULL_SHARE_MIN = 0.50
HEADER_ROWS_PER_S_MIN = 1_000_000
RANGE_TIME_SHARE_MAX = 0.05
RANGE_BYTES_FACTOR_MAX = 1.2
WORKER_BYTES_MAX = 512 << 20
OWN_RECORDS, OWN_COLUMNS = "own reader, records", "own reader, the same columns"
OWN_COLUMNS_A_CORE = "the same, a process a core"
FULL, FULL_OF_SOURCE, BODIES, HEADER_ONLY, ONE_PERCENT, NOTHING = (
    "full scan",
    "the same by spark.read",
    "bodies and their place",
    "header-only scan",
    "1 % of the time",
    "no row: a job's start",
)
RANGE_BYTES = "bytes of 1 %"
Row = dict[str, Any]


def medians(rows: list[Row], name: str) -> dict[str, float]:
    """The median of ``name`` over the runs of each measurement."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if name in row:
            found.setdefault(row["what"], []).append(row[name])
    return {what: statistics.median(values) for what, values in found.items()}


def print_profile(rows: list[Row]) -> None:
    """One table for the rows of one profile, and its targets."""
    timed = [row for row in rows if "wall_s" in row]
    messages, raw_bytes, stored_bytes = (timed[0][name] for name in ("messages", "raw_bytes", "stored_bytes"))
    print(
        f"\n{rows[0]['profile']}: {messages:,} messages, {raw_bytes / 1e9:.2f} GB, stored {stored_bytes / 1e9:.2f} GB"
    )
    titles = (
        ("s", 8),
        ("core s", 8),
        ("JVM's", 8),
        ("rows/s", 12),
        ("MB/s", 7),
        ("MB/core s", 10),
        ("others", 7),
    )
    print("  " + " " * 29 + "".join(f"{title:>{width}}" for title, width in titles) + f"{'worker MiB':>11}")
    walls, cores, jvms = (medians(rows, name) for name in ("wall_s", "core_s", "jvm_core_s"))
    for what, wall_s in walls.items():
        some = [row for row in timed if row["what"] == what]
        per_core_s = raw_bytes / max(cores[what], 0.01) / 1e6
        rates = f"{messages / wall_s:12,.0f}{raw_bytes / wall_s / 1e6:7.0f}{per_core_s:10.0f}"
        others = max(row["others_cores"] for row in some)
        peak = max(row["worker_peak_bytes"] for row in some) >> 20
        shown = " " * len(rates) if what in (ONE_PERCENT, NOTHING) else rates
        print(f"  {what:29}{wall_s:8.2f}{cores[what]:8.2f}{jvms[what]:8.2f}{shown}{others:7.2f}{peak:11}")
    size = next(row for row in rows if row["what"] == RANGE_BYTES)
    print(
        f"  1 % of the time reads {size['read_bytes']:,} bytes: {size['block_bytes']:,} of blocks, the rest footers;"
    )
    print(f"  its messages are {size['message_bytes']:,} of them")
    for target in targets(rows):
        sign = "<=" if target["is_ceiling"] else ">="
        verdict = "ok    " if target["met"] else "MISSED"
        print(f"  {verdict} {target['what']}: {target['found']:,.3f} (target {sign} {target['target']:,})")


def targets(rows: list[Row]) -> list[Row]:
    """A row for each target of one profile: what was found, the limit, and whether it is met."""
    walls, cores = medians(rows, "wall_s"), medians(rows, "core_s")
    full_s = cores[FULL]
    size = next(row for row in rows if row["what"] == RANGE_BYTES)
    timed = [row for row in rows if "wall_s" in row]
    range_factor = size["read_bytes"] / max(size["block_bytes"], 1)
    range_share = (walls[ONE_PERCENT] - walls[NOTHING]) / walls[FULL]
    checks = [
        ("full scan per core / own reader, same columns", cores[OWN_COLUMNS] / full_s, FULL_SHARE_MIN, False),
        (
            "full scan per core / own reader on every core",
            cores[OWN_COLUMNS_A_CORE] / full_s,
            FULL_SHARE_MIN,
            False,
        ),
        ("full scan per core / own reader, records", cores[OWN_RECORDS] / full_s, FULL_SHARE_MIN, False),
        ("bodies per core / own reader, records", cores[OWN_RECORDS] / cores[BODIES], FULL_SHARE_MIN, False),
        ("header-only rows/s", timed[0]["messages"] / walls[HEADER_ONLY], HEADER_ROWS_PER_S_MIN, False),
        ("(1 % - job start) / full scan", range_share, RANGE_TIME_SHARE_MAX, True),
        ("bytes read of 1 % / its blocks", range_factor, RANGE_BYTES_FACTOR_MAX, True),
        (
            "peak of a Python worker, bytes",
            max(row["worker_peak_bytes"] for row in timed),
            WORKER_BYTES_MAX,
            True,
        ),
    ]
    return [
        {
            "profile": rows[0]["profile"],
            "what": what,
            "found": round(found, 4),
            "target": limit,
            "is_ceiling": is_ceiling,
            "met": found <= limit if is_ceiling else found >= limit,
        }
        for what, found, limit, is_ceiling in checks
    ]
