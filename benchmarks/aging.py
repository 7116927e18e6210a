"""Costs against history: ``python -m benchmarks.aging --queues 16 --commits 1000,100000 --out aging.jsonl``.

The real CatalogWriter and readers on a synthetic history (synthetic_history.py); ``--keep`` keeps it in a directory for
a later call, which continues it. At each number of commits the same figures: a cycle, catalog bytes, opening before the
next root, when it takes most requests, the first and the middle message, listing a topic, following. The summary
compares the last with the first. Owns the figures and their limits.
"""

import argparse
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.counting_store import CountingStore, rss_bytes
from benchmarks.recording import record
from benchmarks.report import MIB, Row
from benchmarks.synthetic_history import SyntheticHistory
from fetcher.io.waiting import InlineExecutor, run_sync
from fetcher.queries.queue_listing import list_queues
from fetcher.rows.catalog_view import CatalogView
from tiered.catalog.catalog_reader import load, refresh
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore

T = TypeVar("T")

CYCLES = 400
"""Cycles that are timed at the end of each number of commits."""
FOLLOWED_COMMITS = 100
CYCLE_RATIO_MAX, READ_RATIO_MAX, FIRST_REQUESTS_MAX = 1.2, 2.0, 6
CATALOG_BYTES_MAX, DATA_SHARE_MAX = 1_500, 0.1
LOCK_S_MAX, MORE_RSS_BYTES_MAX, FOLLOW_MS_MAX = 0.1, 64 * MIB, 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aging", description=main.__doc__)
    parser.add_argument("--queues", type=int, default=16)
    parser.add_argument("--commits", default="1000,100000", help="numbers of commits, ascending")
    parser.add_argument("--out", type=Path, default=Path("aging.jsonl"))
    parser.add_argument("--keep", type=Path, help="directory for the history, for later measurements")
    options = parser.parse_args(arguments)
    counts = [int(count) for count in options.commits.split(",")]
    return record(options.out, measured(options.queues, counts, options.keep), summarize, table)


def measured(queues: int, counts: Sequence[int], directory: Path | None = None) -> Iterator[Row]:
    """A row for each number of commits of one history."""
    store = CountingStore(directory)
    history = SyntheticHistory(store, queues)
    history.stored_bytes = store.data_bytes
    for count in counts:
        while history.writer.state.version < count - CYCLES:
            history.cycle()
        store.data_bytes = history.stored_bytes
        store.keep()
        yield {"queues": queues, "commits": count, **_cycles(store, history, count), **_reads(store, history)}


def _cycles(store: CountingStore, history: SyntheticHistory, count: int) -> Row:
    puts, done = store.puts, count - history.writer.state.version
    spent_s, cpu_s = zip(*(history.cycle() for _ in range(done)), strict=True)
    return {
        "cycle_ms": statistics.median(spent_s) * 1000,
        "cycle_cpu_ms": statistics.median(cpu_s) * 1000,
        "longest_cycle_s": max(spent_s),
        "longest_cycle_cpu_s": max(cpu_s),
        "merge_ms_a_cycle": history.merge_s / count * 1000,
        "longest_merge_s": history.longest_merge_s,
        "puts_a_cycle": (store.puts - puts) / done,
        "catalog_bytes_a_cycle": store.put_bytes / count,
        "stored_bytes_a_cycle": history.stored_bytes / count,
        "writer_rss_bytes": rss_bytes(),
        "peak_rss_bytes": store.peak_rss_bytes,
    }


def _reads(store: CountingStore, history: SyntheticHistory) -> Row:
    version = _before_root(history)
    opened, _ = measured_read(store, lambda: load(store, version=version))
    state = load(store)
    key = history.keys[0]
    end = int(state.queue(key)["end_queue_offset"])  # type: ignore[index]
    first, _ = measured_read(store, lambda: runs_at(catalog_view(store, state), key, 0))
    middle, _ = measured_read(store, lambda: runs_at(catalog_view(store, state), key, end // 2))
    listed, _ = measured_read(store, lambda: list_queues(state, topic=key.topic, hidden=False))
    followed = _followed(store, history, state)
    rows: Row = {}
    for name, found in (("open", opened), ("first", first), ("middle", middle), ("list", listed)):
        rows |= {f"{name}_{what}": figure for what, figure in found.items()}
    return rows | followed


def _before_root(history: SyntheticHistory) -> int:
    """Commit until the next root; the version before the commit that names it."""
    root = history.writer.state.root
    while history.writer.state.root == root:
        history.cycle()
    return history.writer.state.version - 1


def measured_read(store: CountingStore, work: Callable[[], T]) -> tuple[Row, T]:
    """Requests, processor time and peak of memory, the latter of a second execution: counting it takes time."""
    reads, begun = store.reads, time.process_time()
    found = work()
    figures: Row = {"requests": store.reads - reads, "ms": (time.process_time() - begun) * 1000}
    tracemalloc.start()
    work()
    figures["peak_bytes"] = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return figures, found


def catalog_view(store: MemoryStore, state: CatalogState) -> CatalogView:
    """A reader's view without threads."""
    return CatalogView(store, state, executor=InlineExecutor(), clock=Clock())


def runs_at(view: CatalogView, key: QueueKey, offset: int) -> object:
    """Where a reader of ``key`` finds ``offset``."""
    queue = view.view(view.state, key)
    assert queue is not None
    places = run_sync(view.runs_of(queue, offset)).places(offset, end=offset + 1, bytes_max=1, runs_max=1)
    assert places[0].base <= offset < places[0].end
    return places


def _followed(store: CountingStore, history: SyntheticHistory, state: CatalogState) -> Row:
    """Processor time of a reader of up to 1,000 queues, for each commit and queue with news."""
    followed = set(history.keys[:1000])
    view = catalog_view(store, state)
    newest = state
    spent_s, news = 0.0, 0
    for number in range(FOLLOWED_COMMITS):
        history.cycle()
        begun = time.process_time()
        newest = refresh(store, newest)
        view.adopt(newest)
        for run in newest.chunks[-1].runs:
            key = newest.key_of(int(run["queue"]))
            if key in followed:
                runs_at(view, key, int(run["base_queue_offset"]))
                news += number > 0
        spent_s += (time.process_time() - begun) * (number > 0)
    return {"follow_ms": spent_s * 1000 / max(1, news)}


def summarize(rows: Sequence[Row]) -> list[Row]:
    """The last row against the first, and the limits it misses."""
    first, last = rows[0], rows[-1]

    def ratio(name: str) -> float:
        return float(last[name]) / max(float(first[name]), 1e-9)

    limits: dict[str, tuple[float, float]] = {
        "cycle_cpu_ms": (ratio("cycle_cpu_ms"), CYCLE_RATIO_MAX),
        "longest_cycle_cpu_s": (last["longest_cycle_cpu_s"], LOCK_S_MAX),
        "puts_a_cycle": (ratio("puts_a_cycle"), CYCLE_RATIO_MAX),
        "peak_rss_bytes": (last["peak_rss_bytes"] - first["writer_rss_bytes"], 2 * MORE_RSS_BYTES_MAX),
        "catalog_bytes_a_cycle": (
            last["catalog_bytes_a_cycle"],
            CATALOG_BYTES_MAX + DATA_SHARE_MAX * last["stored_bytes_a_cycle"],
        ),
        "first_requests": (last["first_requests"] + 2, FIRST_REQUESTS_MAX),  # the object's tail and a block
        "follow_ms": (last["follow_ms"], FOLLOW_MS_MAX),
    }
    for name in ("open", "list"):
        limits[f"{name}_requests"] = (
            ratio(f"{name}_requests") if last[f"{name}_requests"] else 0.0,
            READ_RATIO_MAX,
        )
        limits[f"{name}_ms"] = (ratio(f"{name}_ms"), READ_RATIO_MAX)
    for name in ("open", "first", "middle", "list"):
        more = last[f"{name}_peak_bytes"] - first[f"{name}_peak_bytes"]
        limits[f"{name}_peak_bytes"] = (more, MORE_RSS_BYTES_MAX)
    return [compared("aging", first, last, limits)]


def compared(name: str, first: Row, last: Row, limits: Mapping[str, tuple[float, float]]) -> Row:
    """The summary of a history from its first and last row; ``limits``: (figure, limit) by name."""
    return {
        "name": name,
        "queues": last["queues"],
        "commits": [first["commits"], last["commits"]],
        "figures": {
            name: {"figure": round(figure, 3), "limit": limit} for name, (figure, limit) in limits.items()
        },
        "missed": [name for name, (figure, limit) in limits.items() if figure > limit],
    }


def table(summaries: Sequence[Row]) -> str:
    """Figures and limits, a line each."""
    lines = []
    for summary in summaries:
        lines.append(
            f"{summary['queues']} queues, {summary['commits'][0]:,} to {summary['commits'][1]:,} commits"
        )
        figures: dict[str, Any] = summary["figures"]
        for name, found in figures.items():
            mark = "MISSED" if name in summary["missed"] else "ok"
            lines.append(f"  {name:24} {found['figure']:>14,.3f} of {found['limit']:>14,.3f}  {mark}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
