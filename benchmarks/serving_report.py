"""Evaluates the figures of benchmarks.serving: medians, beside the broker's of the same run. Pure; owns the targets."""

from collections.abc import Sequence

from benchmarks.report import MIB, Row, median_of

WARM_RATE_MIN = 1.0
WARM_CPU_MAX = 1.0
COLD_RATE_MIN = 0.7
WARM_P99_MAX = 2.0
FIELDS = ("messages_per_s", "cpu_us_per_message", "p50_us", "p99_us")


def figures(row: Row) -> Row:
    """Rates of one measurement: messages a second, server CPU a message."""
    messages = max(1, row["messages"])
    return row | {
        "messages_per_s": round(row["messages"] / row["seconds"]),
        "cpu_us_per_message": round(row["server_cpu_s"] * 1e6 / messages, 3),
    }


def summarize(rows: Sequence[Row]) -> list[Row]:
    """One summary a (client, queues), and one for the slow connections; ``checks`` and ``missed`` say what was met."""
    summaries = []
    reads = [row for row in rows if row["what"] == "read"]
    for client, queues in dict.fromkeys((row["client"], row["queues"]) for row in reads):
        own = [row for row in reads if (row["client"], row["queues"]) == (client, queues)]
        summary: Row = {"what": "summary", "client": client, "queues": queues}
        for server in ("broker", "warm", "cold"):
            measured = [row for row in own if row["server"] == server]
            summary[server] = {name: median_of(measured, name) for name in FIELDS} if measured else None
        summary["checks"] = _checks(summary)
        summaries.append(summary)
    for row in rows:
        if row["what"] == "slow":
            limit = row["budget_bytes"] / MIB
            check = _check(row["peak_rss_bytes"] / MIB, limit, is_most=True)
            summaries.append(
                {
                    "what": "summary",
                    "client": "slow",
                    "queues": row["queues"],
                    "closed": row["closed"],
                    "checks": {"peak_rss_mib": check},
                }
            )
    for summary in summaries:
        summary["missed"] = [name for name, check in summary["checks"].items() if not check["ok"]]
    return summaries


def _checks(summary: Row) -> dict[str, Row]:
    broker, warm, cold = summary["broker"], summary["warm"], summary["cold"]
    checks: dict[str, Row] = {}
    if broker and warm:
        checks["warm_rate_of_broker"] = _ratio(warm, broker, "messages_per_s", WARM_RATE_MIN, is_most=False)
        checks["warm_cpu_of_broker"] = _ratio(warm, broker, "cpu_us_per_message", WARM_CPU_MAX, is_most=True)
        if warm["p99_us"] and broker["p99_us"]:
            checks["warm_p99_of_broker"] = _ratio(warm, broker, "p99_us", WARM_P99_MAX, is_most=True)
    if warm and cold:
        checks["cold_rate_of_warm"] = _ratio(cold, warm, "messages_per_s", COLD_RATE_MIN, is_most=False)
    return checks


def _ratio(ours: Row, theirs: Row, name: str, limit: float, *, is_most: bool) -> Row:
    return _check(ours[name] / max(theirs[name], 1e-9), limit, is_most=is_most)


def _check(value: float, limit: float, *, is_most: bool) -> Row:
    is_met = value <= limit if is_most else value >= limit
    return {
        "value": round(value, 3),
        "limit": round(limit, 3),
        "rule": "<=" if is_most else ">=",
        "ok": is_met,
    }


def table(summaries: Sequence[Row]) -> str:
    """Figures in columns, then every target with what was reached."""
    lines = [
        f"{'client':8} {'queues':>6} {'server':8} {'msg/s':>10} {'CPU µs/msg':>11} {'p50 µs':>9} {'p99 µs':>9}"
    ]
    for summary in summaries:
        for server in ("broker", "warm", "cold"):
            found = summary.get(server)
            if found:
                shown = ["-" if found[name] is None else f"{found[name]:,.2f}" for name in FIELDS]
                lines.append(
                    f"{summary['client']:8} {summary['queues']:>6} {server:8} {shown[0]:>10} {shown[1]:>11} "
                    f"{shown[2]:>9} {shown[3]:>9}"
                )
    lines.append("")
    for summary in summaries:
        for name, check in summary["checks"].items():
            verdict = "ok    " if check["ok"] else "MISSED"
            where = f"{summary['client']} {summary['queues']}"
            lines.append(
                f"{verdict}  {where:<8}  {name} = {check['value']:g} {check['rule']} {check['limit']:g}"
            )
    return "\n".join(lines)
