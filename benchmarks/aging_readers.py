"""Readers of a long history: ``python -m benchmarks.aging_readers --history DIRECTORY --out aging-readers.jsonl``.

Reads a history that ``benchmarks.aging --keep`` left, and one of 1,000 commits of as many queues: ``status``, queues by
topic, followers of up to 1,000 queues, ``verify`` with a listing of all objects. The summary compares both. Owns the
figures and their limits.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks.aging import (
    FOLLOW_MS_MAX,
    MORE_RSS_BYTES_MAX,
    READ_RATIO_MAX,
    catalog_view,
    compared,
    measured_read,
    runs_at,
    table,
)
from benchmarks.counting_store import CountingStore, rss_bytes
from benchmarks.machine import peak_rss_bytes
from benchmarks.recording import record
from benchmarks.report import MIB, Row
from benchmarks.synthetic_history import SyntheticHistory
from fetcher.queries.queue_listing import list_queues
from rocketmq_tiered.cli.status import _report
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load, refresh
from tiered.catalog.pages import RunIndex, living_runs
from tiered.catalog.state import CatalogState

SHORT = 1_000
FOLLOWED_QUEUES, FOLLOWED_COMMITS = 1_000, 200
TOPICS = 2_500
TOPICS_S_MAX, COMMITS_A_GET_MIN, VERIFY_BYTES_MAX = 1.0, 32, 256 * MIB
NO_NEWS_MS_MAX = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aging_readers", description=main.__doc__)
    parser.add_argument("--history", type=Path, required=True, help="directory of benchmarks.aging --keep")
    parser.add_argument("--out", type=Path, default=Path("aging-readers.jsonl"))
    options = parser.parse_args(arguments)
    return record(options.out, measured(CountingStore(options.history)), summarize, table)


def measured(long: CountingStore) -> Iterator[Row]:
    """A row of a short history, and of the ``long`` one."""
    short = CountingStore()
    history = SyntheticHistory(short, load(long).queue_count)
    while history.writer.state.version < SHORT:
        history.cycle()
    for store in (short, long):
        yield _row(store)


def _row(store: CountingStore) -> Row:
    state = load(store)
    row: Row = {
        "queues": state.queue_count,
        "commits": state.version,
        **_followed(store, state.version),
        **_opened(store),
    }
    index = RunIndex(store)
    topics = sorted({key.topic for key in state.directory.roster.keys})
    wanted = [topics[number % len(topics)] for number in range(TOPICS)]
    found, _ = measured_read(store, lambda: _status(store))
    row |= {f"status_{what}": figure for what, figure in found.items()}
    begun_s = time.process_time()
    for topic in wanted:
        list_queues(state, topic=topic, hidden=False, index=index)
    row["topics_s"] = time.process_time() - begun_s
    return row | verified(store, state)


def _status(store: CountingStore) -> object:
    """`tiered status` of an archive."""
    archive = SimpleNamespace(store=store, state=load(store), url=store.url, cluster="c", broker="b")
    return _report(archive, None, None, None)  # type: ignore[arg-type]


def _opened(store: CountingStore) -> Row:
    """The first message and that in the middle of each of some queues, where it takes most requests."""
    state = load(store)
    row: Row = {}
    for key in state.directory.roster.keys[:: max(1, state.queue_count // 16)]:
        end = int(state.queue(key)["end_queue_offset"])  # type: ignore[index]
        for name, offset in (("first", 0), ("middle", end // 2)):
            found, _ = measured_read(store, partial(runs_at, catalog_view(store, state), key, offset))
            requests = f"{name}_requests"
            row[requests] = max(found["requests"], row.get(requests, 0))
    return row


def _followed(store: CountingStore, newest: int) -> Row:
    """Processor time of a reader that follows queues, for each commit: by queue with news, and by queue without."""
    store.newest = newest - FOLLOWED_COMMITS
    state = load(store)
    view = catalog_view(store, state)
    followed = state.directory.roster.keys[:FOLLOWED_QUEUES]
    ends = {key: int(state.queue(key)["end_queue_offset"]) for key in followed}  # type: ignore[index]
    news_s = quiet_s = 0.0
    news = quiet = 0
    for number in range(FOLLOWED_COMMITS):
        store.newest += 1
        begun_s = time.process_time()
        state = refresh(store, state)
        view.adopt(state)
        refreshed_s = time.process_time()
        new = []
        for key in followed:
            queue = view.view(state, key)
            assert queue is not None
            if queue.max_offset > ends[key]:
                new.append(key)
        looked_s = time.process_time()
        for key in new:
            runs_at(view, key, ends[key])
            ends[key] = view.view(state, key).max_offset  # type: ignore[union-attr]
        if number:
            news_s += time.process_time() - looked_s + refreshed_s - begun_s
            quiet_s += looked_s - refreshed_s
            news, quiet = news + len(new), quiet + len(followed)
    store.newest = None
    return {"follow_ms": news_s * 1000 / max(1, news), "no_news_ms": quiet_s * 1000 / quiet}


def verified(store: CountingStore, state: CatalogState) -> Row:
    """`tiered verify` of an archive whose data objects exist."""
    for page in living_runs(RunIndex(store), state):
        chunk = page.chunk
        for number in np.unique(chunk.runs["object"]).tolist():
            place = chunk.objects[number]
            store.name(chunk.object_keys[int(place["key"])], int(place["size_bytes"]))
    reads, listed, begun_s = store.reads, store.listed, time.process_time()
    before_bytes = rss_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    report = verify_archive(store, depth="names")
    assert report.anomalies == [] and report.counts["objects"] > state.version // 2
    return {
        "verify_requests": store.reads - reads,
        "verify_listings": store.listed - listed,
        "verify_cpu_s": time.process_time() - begun_s,
        "verify_peak_bytes": peak_rss_bytes("self") - before_bytes,
        "commits_a_get": state.version / max(1, store.reads - reads),
    }


def summarize(rows: Sequence[Row]) -> list[Row]:
    """The last row against the first, and the limits it misses."""
    first, last = rows[0], rows[-1]
    limits: dict[str, tuple[float, float]] = {
        "status_requests": (last["status_requests"] / first["status_requests"], READ_RATIO_MAX),
        "status_ms": (last["status_ms"] / first["status_ms"], READ_RATIO_MAX),
        "status_peak_bytes": (last["status_peak_bytes"] - first["status_peak_bytes"], MORE_RSS_BYTES_MAX),
        "topics_s": (last["topics_s"], TOPICS_S_MAX),
        "follow_ms": (last["follow_ms"], FOLLOW_MS_MAX),
        "no_news_ms": (last["no_news_ms"], NO_NEWS_MS_MAX),
        "gets_a_commit": (1 / last["commits_a_get"], 1 / COMMITS_A_GET_MIN),
        "verify_peak_bytes": (last["verify_peak_bytes"], VERIFY_BYTES_MAX),
    }
    return [compared("aging readers", first, last, limits)]


if __name__ == "__main__":
    sys.exit(main())
