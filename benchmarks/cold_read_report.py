"""Evaluates the figures of benchmarks.cold_read: medians over runs, ratios, targets, a table.

Pure: rows in, rows and text out. Owns the targets. Does not own measuring.
"""

from collections.abc import Sequence

from benchmarks.report import Row, median_of

OF_PARTS_MIN = 0.60
TIMES_PEER_BEST_MIN = 2.0
TIMES_PEER_DEFAULT_MIN = 5.0
CPU_OF_PEER_MAX = 0.5
REQUESTS_OF_IDEAL_MAX = 1.3
FETCHED_TWICE_MAX = 0.01
COLD_REQUESTS_MAX = 2
WARM_REQUESTS_MAX = 0
TIME_REQUESTS_MAX = 2

SEQUENTIAL = ("walk-1", "walk-16", "seq-1", "seq-16")
"""Batches of the Python API; pulls of 32, as the peer makes them, by consumers of one thread as a server has them."""
SHOWN = (*SEQUENTIAL, "seq-16-threads")
"""With what is shown beside and has no target: a thread for each consumer."""
LATENCIES = ("random", "time", "key")


def summarize(rows: Sequence[Row]) -> list[Row]:
    """One summary row for each (store, target), in the order they were measured."""
    summaries: list[Row] = []
    for store in dict.fromkeys(row["store"] for row in rows):
        own = [row for row in rows if row["store"] == store]
        peer = [row for row in own if row["what"] == "peer"]
        for target in dict.fromkeys(row["target"] for row in own if row["what"] == "ours"):
            summary = _summary([row for row in own if row.get("target") == target], peer)
            checks = _checks(summary)
            missed = [name for name, check in checks.items() if not check["ok"]]
            names = {"what": "summary", "store": store, "target": target}
            summaries.append({**names, **summary, "checks": checks, "missed": missed})
    return summaries


def _summary(rows: Sequence[Row], peer: Sequence[Row]) -> Row:
    parts = [row for row in rows if row["what"] == "parts"]
    summary: Row = {
        "runs": len(parts),
        "parts_messages_per_s": median_of(parts, "messages_per_s"),
        "parts_cpu_us_per_message": median_of(parts, "cpu_us_per_message"),
        "bare_p50_ms": median_of([row["bare_get"] for row in parts], "p50_ms"),
        "bare_p99_ms": median_of([row["bare_get"] for row in parts], "p99_ms"),
        "others_cores": max((row["others_cores"] for row in (*rows, *peer)), default=0.0),
    }
    for read in SHOWN:
        ours = _of(rows, "ours", read)
        both = [_of(peer, "peer", read), _of(peer, "peer", f"{read}-cache-off")]
        rates = [median_of(found, "messages_per_s") for found in both]
        cpus = [median_of(found, "cpu_us_per_message") for found in both]
        summary[read] = {
            "messages_per_s": median_of(ours, "messages_per_s"),
            "cpu_us_per_message": median_of(ours, "cpu_us_per_message"),
            "peak_rss_mib": max((row["peak_rss_mib"] for row in ours), default=None),
            "requests_of_ideal": median_of(ours, "requests_of_ideal"),
            "requests_per_gib": median_of(ours, "requests_per_gib"),
            "fetched_twice": median_of(ours, "fetched_twice"),
            "peer_default_messages_per_s": rates[0],
            "peer_best_messages_per_s": max((rate for rate in rates if rate), default=None),
            "peer_cpu_us_per_message": min((cpu for cpu in cpus if cpu), default=None),
        }
    for read in LATENCIES:
        ours, theirs = _of(rows, "ours", read), _of(peer, "peer", read)
        names = ("p50_ms", "p99_ms", "cold_requests_max", "warm_requests_max")
        summary[read] = {name: median_of(ours, name) for name in names} | {
            f"peer_{name}": median_of(theirs, name) for name in ("p50_ms", "p99_ms")
        }
    return summary


def _of(rows: Sequence[Row], what: str, read: str) -> list[Row]:
    return [row for row in rows if (row["what"], row.get("read")) == (what, read)]


def _checks(summary: Row) -> dict[str, Row]:
    checks: dict[str, Row] = {}
    for read in SEQUENTIAL:
        own = summary[read]
        rate = own["messages_per_s"]
        if not rate:
            continue
        if summary["parts_messages_per_s"]:
            checks[f"{read} of parts"] = _at_least(rate / summary["parts_messages_per_s"], OF_PARTS_MIN)
        if own["peer_best_messages_per_s"]:
            best = rate / own["peer_best_messages_per_s"]
            default = rate / own["peer_default_messages_per_s"]
            share = own["cpu_us_per_message"] / own["peer_cpu_us_per_message"]
            checks[f"{read} times peer's best"] = _at_least(best, TIMES_PEER_BEST_MIN)
            checks[f"{read} times peer's default"] = _at_least(default, TIMES_PEER_DEFAULT_MIN)
            checks[f"{read} CPU of peer's"] = _at_most(share, CPU_OF_PEER_MAX)
        checks[f"{read} requests of ideal"] = _at_most(own["requests_of_ideal"], REQUESTS_OF_IDEAL_MAX)
        if own["fetched_twice"] is not None:
            checks[f"{read} bytes fetched twice"] = _at_most(own["fetched_twice"], FETCHED_TWICE_MAX)
    for read, cold_max in (("random", COLD_REQUESTS_MAX), ("time", TIME_REQUESTS_MAX)):
        own = summary[read]
        if own["cold_requests_max"] is not None:
            checks[f"{read} requests, cold"] = _at_most(own["cold_requests_max"], cold_max)
            checks[f"{read} requests, warm"] = _at_most(own["warm_requests_max"], WARM_REQUESTS_MAX)
    return checks


def _at_least(value: float, limit: float) -> Row:
    return {"value": round(value, 3), "limit": limit, "rule": ">=", "ok": value >= limit}


def _at_most(value: float, limit: float) -> Row:
    return {"value": round(value, 3), "limit": limit, "rule": "<=", "ok": value <= limit}


def table(summaries: Sequence[Row]) -> str:
    """Sequential figures in columns, latencies below, then every target with what was reached."""
    header = [
        "store",
        "to",
        "read",
        "msg/s",
        "parts",
        "CPU µs",
        "parts CPU",
        "RSS MiB",
        "req/GiB",
        "× ideal",
        "peer",
        "peer best",
        "peer CPU",
    ]
    cells = [header]
    for summary in summaries:
        for read in SHOWN:
            own = summary[read]
            cells.append(
                [
                    summary["store"],
                    summary["target"],
                    read,
                    _text(own["messages_per_s"], 0),
                    _text(summary["parts_messages_per_s"], 0),
                    _text(own["cpu_us_per_message"], 2),
                    _text(summary["parts_cpu_us_per_message"], 2),
                    _text(own["peak_rss_mib"], 0),
                    _text(own["requests_per_gib"], 0),
                    _text(own["requests_of_ideal"], 2),
                    _text(own["peer_default_messages_per_s"], 0),
                    _text(own["peer_best_messages_per_s"], 0),
                    _text(own["peer_cpu_us_per_message"], 2),
                ]
            )
    lines = [*_aligned(cells), ""]
    cells = [["store", "to", "one", "p50 ms", "p99 ms", "bare GET p50", "p99", "requests", "peer p50", "p99"]]
    for summary in summaries:
        for read in LATENCIES:
            own = summary[read]
            cells.append(
                [
                    summary["store"],
                    summary["target"],
                    read,
                    _text(own["p50_ms"], 2),
                    _text(own["p99_ms"], 2),
                    _text(summary["bare_p50_ms"], 2),
                    _text(summary["bare_p99_ms"], 2),
                    _text(own["cold_requests_max"], 0),
                    _text(own["peer_p50_ms"], 2),
                    _text(own["peer_p99_ms"], 2),
                ]
            )
    lines += [*_aligned(cells), ""]
    for summary in summaries:
        for name, check in summary["checks"].items():
            verdict = "ok    " if check["ok"] else "MISSED"
            where = f"{summary['store']} {summary['target']}"
            lines.append(
                f"{verdict}  {where:<8}  {name} = {check['value']:g} {check['rule']} {check['limit']:g}"
            )
    others = max((summary["others_cores"] for summary in summaries), default=0.0)
    return "\n".join([*lines, f"others used up to {others:.2f} cores"])


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
