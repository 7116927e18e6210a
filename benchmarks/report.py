"""Evaluates the figures of benchmarks.offload: medians over runs, ratios, targets, a table.

Pure: rows in, rows and text out. Owns the targets. Does not own measuring.

Neither the peer's figures nor the sum of the parts count the start of a process, so they are compared with
ours without it ("work": the run less one of a nearly empty store); the whole process stands beside.

The peer ends with its key index, because ours is part of every object. Its time until the last commit, with index work
queued, is shown too (decision 0047).
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 1024 * 1024
Row = dict[str, Any]
"""One measurement or one summary, as written to the results file."""

OF_PARTS_MIN = 0.60
PEAK_RSS_BYTES_MAX = 512 * MIB
MEMORY_GROWTH_MAX = 1.10
RESIDENT_CHANGE_MAX = 0.05
OF_TWIN_MAX = 1.5
WORK_S_MIN = 0.001
DATA_PUTS_FACTOR = 1.2
EXTRA_COMMITS = 4
"""Claim and release of the epoch, the broker's tables at the end, and the question whether an object store refuses a
name that is taken: once a run, not once a cycle."""


@dataclass(frozen=True)
class PeerTarget:
    """How much better than the tuned peer, in the same run."""

    rate_times_min: float
    cpu_share_max: float | None


PEER_TARGETS = {
    "A": PeerTarget(3.5, 1 / 4),
    "B": PeerTarget(2.5, 1 / 3),
    "C": PeerTarget(100.0, None),
}


@dataclass(frozen=True)
class CycleSizes:
    """The archiver's batching in force, for the bounds on requests."""

    batch_bytes: int
    object_bytes: int


def median_of(rows: Iterable[Row], field: str) -> float | None:
    """Median of ``field`` over ``rows`` that have it."""
    values = [float(row[field]) for row in rows if row.get(field) is not None]
    return statistics.median(values) if values else None


def summarize(rows: Sequence[Row], sizes: CycleSizes) -> list[Row]:
    """One summary row for each (store, target), stores in the order they were measured."""
    summaries: list[Row] = []
    starts = [row for row in rows if row["what"] == "start"]
    for store in dict.fromkeys(row["store"] for row in rows if row["what"] != "start"):
        own = [row for row in rows if row["store"] == store]
        for target in dict.fromkeys(row["target"] for row in own if row["what"] == "backfill"):
            start = [row for row in starts if row["target"] == target]
            summaries.append(_summary(store, target, [*start, *own], sizes))
    for summary in summaries:
        _compare_with_twin(summary, summaries)
        summary["missed"] = [name for name, check in summary["checks"].items() if not check["ok"]]
    return summaries


def _summary(store: str, target: str, rows: Sequence[Row], sizes: CycleSizes) -> Row:
    backfill = [row for row in rows if row["what"] == "backfill" and row["target"] == target]
    peer = [row for row in rows if row["what"] == "peer"]
    parts = [row for row in rows if row["what"] == "parts" and row["target"] == target]
    start = [row for row in rows if row["what"] == "start"]
    messages = backfill[0]["messages"]
    wall_s, cpu_s = median_of(backfill, "wall_s"), median_of(backfill, "cpu_s")
    assert wall_s is not None and cpu_s is not None
    start_wall_s, start_cpu_s = median_of(start, "wall_s") or 0.0, median_of(start, "cpu_s") or 0.0
    summary: Row = {
        "what": "summary",
        "store": store,
        "target": target,
        "twin": backfill[0].get("twin", ""),
        "runs": len(backfill),
        "messages": messages,
        "log_mb": round(backfill[0]["log_bytes"] / 1e6, 1),
        "wall_s": wall_s,
        "start_wall_s": start_wall_s,
        "messages_per_s": round(messages / wall_s),
        "mb_per_s": median_of(backfill, "mb_per_s"),
        "cpu_us_per_message": round(cpu_s * 1e6 / messages, 3),
        "work_messages_per_s": round(messages / max(WORK_S_MIN, wall_s - start_wall_s)),
        "work_cpu_us_per_message": round(max(WORK_S_MIN, cpu_s - start_cpu_s) * 1e6 / messages, 3),
        "again_wall_s": median_of(backfill, "again_wall_s"),
        "peak_rss_mib": round(max(row["peak_rss_bytes"] for row in backfill) / MIB, 1),
        "data_objects": median_of(backfill, "data_objects"),
        "catalog_objects": median_of(backfill, "catalog_objects"),
        "stored_ratio": median_of(backfill, "stored_ratio"),
        "others_cores": max(row["others_cores"] for row in backfill),
        "copy_mb_per_s": median_of([row for row in rows if row["what"] == "copy"], "mb_per_s"),
        "parts_messages_per_s": median_of(parts, "messages_per_s"),
        "peer_messages_per_s": median_of(peer, "messages_per_s_with_index"),
        "peer_commit_messages_per_s": median_of(peer, "messages_per_s"),
        "peer_cpu_us_per_message": median_of(peer, "cpu_us_per_message"),
    }
    summary["checks"] = _checks(summary, backfill, sizes)
    return summary


def _checks(summary: Row, backfill: Sequence[Row], sizes: CycleSizes) -> dict[str, Row]:
    checks: dict[str, Row] = {}
    rate, peer_rate = summary["work_messages_per_s"], summary["peer_messages_per_s"]
    target = PEER_TARGETS.get(summary["store"])
    if peer_rate and target:
        checks["times_peer"] = _at_least(rate / peer_rate, target.rate_times_min)
        if target.cpu_share_max is not None:
            share = summary["work_cpu_us_per_message"] / summary["peer_cpu_us_per_message"]
            checks["cpu_of_peer"] = _at_most(share, target.cpu_share_max)
    if summary["parts_messages_per_s"]:
        checks["of_parts"] = _at_least(rate / summary["parts_messages_per_s"], OF_PARTS_MIN)
    checks["again_new_objects"] = _at_most(max(row["again_new_data_objects"] for row in backfill), 0)
    checks["peak_rss_mib"] = _at_most(summary["peak_rss_mib"], PEAK_RSS_BYTES_MAX / MIB)
    cycles = -(-backfill[0]["log_bytes"] // sizes.batch_bytes)
    puts_max = DATA_PUTS_FACTOR * backfill[0]["data_bytes"] / sizes.object_bytes + cycles
    checks["data_puts"] = _at_most(_puts(backfill, "data"), round(puts_max, 1))
    checks["catalog_puts"] = _at_most(_puts(backfill, "catalog"), cycles + EXTRA_COMMITS)
    if backfill[0].get("is_soak"):
        checks["memory_growth"] = _at_most(max(row["memory_growth"] for row in backfill), MEMORY_GROWTH_MAX)
        checks["resident_change"] = _at_most(
            max(row["resident_change"] for row in backfill), RESIDENT_CHANGE_MAX
        )
    return checks


def _puts(backfill: Sequence[Row], kind: str) -> float:
    """Objects of a kind are its PUTs, unless the server counted more PUTs than there are objects."""
    return float(max(row[f"{kind}_objects"] + row.get("puts_beyond_objects", 0) for row in backfill))


def _compare_with_twin(summary: Row, summaries: Sequence[Row]) -> None:
    """10,000 queues against 16: time and objects of the same messages."""
    twins = [s for s in summaries if s["store"] == summary["twin"] and s["target"] == summary["target"]]
    for twin in twins:
        per_message = summary["wall_s"] / summary["messages"]
        twin_per_message = twin["wall_s"] / twin["messages"]
        summary["checks"]["time_of_twin"] = _at_most(per_message / twin_per_message, OF_TWIN_MAX)
        summary["checks"]["objects_of_twin"] = _at_most(
            summary["data_objects"] / max(1, twin["data_objects"]), OF_TWIN_MAX
        )


def _at_least(value: float, limit: float) -> Row:
    return {"value": round(value, 3), "limit": limit, "rule": ">=", "ok": value >= limit}


def _at_most(value: float, limit: float) -> Row:
    return {"value": round(value, 3), "limit": round(limit, 3), "rule": "<=", "ok": value <= limit}


_COLUMNS = (
    ("store", "store", "{}"),
    ("target", "to", "{}"),
    ("log_mb", "MB", "{:,.0f}"),
    ("copy_mb_per_s", "cp MB/s", "{:,.0f}"),
    ("parts_messages_per_s", "parts msg/s", "{:,.0f}"),
    ("messages_per_s", "msg/s", "{:,.0f}"),
    ("work_messages_per_s", "work msg/s", "{:,.0f}"),
    ("mb_per_s", "MB/s", "{:,.0f}"),
    ("cpu_us_per_message", "CPU µs/msg", "{:.2f}"),
    ("work_cpu_us_per_message", "work CPU", "{:.2f}"),
    ("peak_rss_mib", "RSS MiB", "{:,.0f}"),
    ("data_objects", "objects", "{:,.0f}"),
    ("catalog_objects", "commits", "{:,.0f}"),
    ("stored_ratio", "ratio", "{:.2f}"),
    ("peer_messages_per_s", "peer msg/s", "{:,.0f}"),
    ("peer_commit_messages_per_s", "no index", "{:,.0f}"),
    ("peer_cpu_us_per_message", "peer CPU", "{:.1f}"),
    ("others_cores", "others", "{:.2f}"),
)


def table(summaries: Sequence[Row]) -> str:
    """Figures in columns, then every target with what was reached."""
    cells = [[header for _, header, _ in _COLUMNS]]
    for summary in summaries:
        cells.append(
            ["-" if summary[field] is None else form.format(summary[field]) for field, _, form in _COLUMNS]
        )
    widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    lines.append("")
    for summary in summaries:
        for name, check in summary["checks"].items():
            verdict = "ok    " if check["ok"] else "MISSED"
            where = f"{summary['store']} {summary['target']}"
            lines.append(
                f"{verdict}  {where:<8}  {name} = {check['value']:g} {check['rule']} {check['limit']:g}"
            )
    return "\n".join(lines)
