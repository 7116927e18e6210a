"""A pass of expiry over a long catalog: ``python -m benchmarks.expiry --commits 20000 --out expiry.jsonl``.

The real pass over a synthetic history (synthetic_history.py) of 50 runs a commit: time, memory, requests, and the size
of its commit. Each pass expires another share. Owns the figures and their limits.
"""

import argparse
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.aging import CountingStore
from benchmarks.recording import record
from benchmarks.report import MIB, Row
from benchmarks.synthetic_history import CYCLE_MS, START_MS, SyntheticHistory
from rocketmq_tiered.maintenance.expire import commit_pass, plan_pass
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import encode_root
from tiered.clock import Clock
from tiered.formats.keys import catalog_key
from tiered.settings.topic_rules import TopicRule

PASS_S_MAX, PEAK_BYTES_MAX, COMMIT_BYTES_MAX = 60.0, 256 * MIB, MIB
MORE_REQUESTS_MAX, ROOT_RATIO_MAX = 10, 1.2


class _Clocked(CountingStore):
    """Its clock is the history's, and every commit is from its beginning."""

    def clock_ms(self, prefix: str = "") -> int:
        return self.now_ms

    now_ms = START_MS


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expiry", description=main.__doc__)
    parser.add_argument("--queues", type=int, default=10_000)
    parser.add_argument("--commits", type=int, default=20_000, help="of 50 runs each")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("expiry.jsonl"))
    options = parser.parse_args(arguments)
    return record(options.out, measured(options.queues, options.commits, options.passes), summarize, _table)


def measured(queues: int, commits: int, passes: int) -> Iterator[Row]:
    """A row for each pass; the first one traces memory, which takes time."""
    store = _Clocked()
    history = SyntheticHistory(store, queues)
    while history.writer.state.version < commits:
        history.cycle()
    age_ms = commits * CYCLE_MS
    for number in range(1, passes + 1):
        state = load(store)
        ttl_ms = age_ms - age_ms * number // (passes + 1)
        store.now_ms = START_MS + age_ms
        rule = TopicRule("", ttl_ms, 0, "", None, "", "", "")
        reads, begun = store.reads, time.process_time()
        is_traced = number == 1  # the largest
        if is_traced:
            tracemalloc.start()
        found = plan_pass(store, state, lambda topic: rule, clock=Clock(wall_ms=lambda: store.now_ms))  # noqa: B023
        after = commit_pass(store, state, found, clock=Clock(wall_ms=lambda: store.now_ms))
        row: Row = {
            "queues": queues,
            "runs": sum(page.runs for page in state.pages) + state.memory_runs,
            "pass_s": time.process_time() - begun,
            "requests": store.reads - reads,
            "pages": len(state.pages),
            "expired_runs": found.plan.runs,
            "objects": len(found.objects),
            "commit_bytes": len(store.get(catalog_key(after.version))),
            "root_bytes_before": len(encode_root(state)),
            "root_bytes": len(encode_root(after)),
            "traced_peak_bytes": tracemalloc.get_traced_memory()[1] if is_traced else 0,
        }
        if is_traced:
            tracemalloc.stop()
        yield row
        history.writer.load()


def summarize(rows: Sequence[Row]) -> list[Row]:
    """The worst of all passes, and the limits it misses."""
    figures = {
        "pass_s": (max(row["pass_s"] for row in rows[1:]), PASS_S_MAX),
        "peak_bytes": (rows[0]["traced_peak_bytes"], PEAK_BYTES_MAX),
        "commit_bytes": (max(row["commit_bytes"] for row in rows), COMMIT_BYTES_MAX),
        "requests_above_two_a_page": (
            max(row["requests"] - 2 * row["pages"] for row in rows),
            MORE_REQUESTS_MAX,
        ),
        "root_ratio": (max(row["root_bytes"] / row["root_bytes_before"] for row in rows), ROOT_RATIO_MAX),
    }
    missed = [name for name, (figure, limit) in figures.items() if figure > limit]
    shown = {name: {"figure": figure, "limit": limit} for name, (figure, limit) in figures.items()}
    return [{"name": "expiry", "runs": rows[0]["runs"], "figures": shown, "missed": missed}]


def _table(summaries: Sequence[Row]) -> str:
    lines = []
    for summary in summaries:
        lines.append(f"{summary['runs']:,} runs")
        for name, found in summary["figures"].items():
            mark = "MISSED" if name in summary["missed"] else "ok"
            lines.append(f"  {name:24} {found['figure']:>14,.1f} of {found['limit']:>14,.1f}  {mark}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
