"""Costs against history: ``python -m benchmarks.aging --queues 16 --commits 1000,100000 --out aging.jsonl``.

The real CatalogWriter and readers on a synthetic history (synthetic_history.py) in memory. At each number of commits
the same figures: a cycle, catalog bytes, opening, the first and the middle message, listing a topic, following. The
summary compares the last with the first. Owns the figures and their limits.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import finalize

from benchmarks.recording import record
from benchmarks.report import MIB, Row
from benchmarks.synthetic_history import START_MS, SyntheticHistory
from fetcher.io.waiting import new_future, run_sync
from fetcher.queries.queue_listing import list_queues
from fetcher.rows.catalog_view import CatalogView
from tiered.catalog.catalog_reader import load, refresh
from tiered.catalog.state import CatalogState
from tiered.errors import AlreadyExistsError, NotFoundError
from tiered.formats.keys import CATALOG_PREFIX, catalog_key, parse_catalog_key
from tiered.model.queue import QueueKey
from tiered.object_store.interface import GET_BYTES_MAX, Body, ObjectInfo
from tiered.object_store.memory import MemoryStore

T = TypeVar("T")
P = ParamSpec("P")

CYCLES = 400
"""Cycles that are timed at the end of each number of commits."""
FOLLOWED_COMMITS = 100
CYCLE_RATIO_MAX, READ_RATIO_MAX, FIRST_REQUESTS_MAX = 1.2, 2.0, 6
CATALOG_BYTES_MAX, DATA_SHARE_MAX = 1_500, 0.1
LOCK_S_MAX, MORE_RSS_BYTES_MAX, FOLLOW_MS_MAX = 0.1, 64 * MIB, 1.0


class CountingStore(MemoryStore):
    """Counts requests. Content is in a file, so that the process has the memory of writer and readers; keys are sorted
    when they are listed. ``directory`` keeps the history for later measurements; default: none does."""

    def __init__(self, directory: Path | None = None) -> None:
        self.reads = self.puts = self.put_bytes = self.peak_rss_bytes = 0
        self._commits = array("q")  # bytes of version n + 1, at n
        self._begins = array("q")
        self._others: dict[str, tuple[int, int]] = {}
        self._names = None if directory is None else directory / "names.json"
        if directory is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the store
        else:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = (directory / "content").open("a+b")
        finalize(self, self._file.close)
        if self._names is not None and self._names.exists():
            begins, commits, others, self.put_bytes = json.loads(self._names.read_bytes())
            self._begins.extend(begins)
            self._commits.extend(commits)
            self._others = {key: (begin, length) for key, (begin, length) in others.items()}
        os.ftruncate(self._file.fileno(), self.put_bytes)
        super().__init__()

    def keep(self) -> None:
        """Write where each object is, if there is a directory for it."""
        if self._names is not None:
            places = [self._begins.tolist(), self._commits.tolist(), self._others, self.put_bytes]
            self._names.write_text(json.dumps(places))

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        content = b"".join(body)
        begin = self.put_bytes
        version = parse_catalog_key(key)
        if self._place(key) is not None:
            raise AlreadyExistsError(f"{key} exists")
        if version is None:
            self._others[key] = begin, len(content)
            self.peak_rss_bytes = max(self.peak_rss_bytes, _rss_bytes())  # pages are put during merges
        else:
            assert version == len(self._begins) + 1
            self._begins.append(begin)
            self._commits.append(len(content))
        os.write(self._file.fileno(), content)  # at its end
        self.puts += 1
        self.put_bytes += len(content)

    def _place(self, key: str) -> tuple[int, int] | None:
        version = parse_catalog_key(key)
        if version is None:
            return self._others.get(key)
        return (
            (self._begins[version - 1], self._commits[version - 1]) if version <= len(self._begins) else None
        )

    def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        self.reads += 1
        place = self._place(key)
        if place is None:
            raise NotFoundError(f"{key} does not exist")
        begin, length = place
        return os.pread(self._file.fileno(), length, begin)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        if prefix.startswith(CATALOG_PREFIX):
            wanted = parse_catalog_key(prefix)
            newest = len(self._begins) if wanted is None else wanted
            versions = range(newest, 0, -1)
            keys = map(catalog_key, versions[:limit])
        else:
            keys = iter(
                sorted(key for key in self._others if key.startswith(prefix) and key > start_after)[:limit]
            )
        return (ObjectInfo(key, self._length(key), START_MS) for key in keys)

    def _length(self, key: str) -> int:
        place = self._place(key)
        assert place is not None
        return place[1]


class _Inline:
    """Runs work at once, for CatalogView."""

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = new_future()
        future.set_result(work(*args, **kwargs))
        return future


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aging", description=main.__doc__)
    parser.add_argument("--queues", type=int, default=16)
    parser.add_argument("--commits", default="1000,100000", help="numbers of commits, ascending")
    parser.add_argument("--out", type=Path, default=Path("aging.jsonl"))
    parser.add_argument("--keep", type=Path, help="directory for the history, for later measurements")
    options = parser.parse_args(arguments)
    counts = [int(count) for count in options.commits.split(",")]
    return record(options.out, measured(options.queues, counts, options.keep), summarize, _table)


def measured(queues: int, counts: Sequence[int], directory: Path | None = None) -> Iterator[Row]:
    """A row for each number of commits of one history."""
    store = CountingStore(directory)
    history = SyntheticHistory(store, queues)
    for count in counts:
        while history.writer.state.version < count - CYCLES:
            history.cycle()
        store.keep()
        yield {"queues": queues, "commits": count, **_cycles(store, history, count), **_reads(store, history)}


def _cycles(store: CountingStore, history: SyntheticHistory, count: int) -> Row:
    puts, done = store.puts, count - history.writer.state.version
    spent_s = [history.cycle() for _ in range(done)]
    return {
        "cycle_ms": statistics.median(spent_s) * 1000,
        "longest_cycle_s": max(spent_s),
        "merge_ms_a_cycle": history.merge_s / count * 1000,
        "longest_merge_s": history.longest_merge_s,
        "puts_a_cycle": (store.puts - puts) / done,
        "catalog_bytes_a_cycle": store.put_bytes / count,
        "stored_bytes_a_cycle": history.stored_bytes / count,
        "writer_rss_bytes": _rss_bytes(),
        "peak_rss_bytes": store.peak_rss_bytes,
    }


def _reads(store: CountingStore, history: SyntheticHistory) -> Row:
    opened, state = _measured(store, lambda: load(store))
    key = history.keys[0]
    end = int(state.queue(key)["end_queue_offset"])  # type: ignore[index]
    first, _ = _measured(store, lambda: _runs_at(_view(store, state), key, 0))
    middle, _ = _measured(store, lambda: _runs_at(_view(store, state), key, end // 2))
    listed, _ = _measured(store, lambda: list_queues(state, topic=key.topic, hidden=False))
    followed = _followed(store, history, state)
    rows: Row = {}
    for name, found in (("open", opened), ("first", first), ("middle", middle), ("list", listed)):
        rows |= {f"{name}_{what}": figure for what, figure in found.items()}
    return rows | followed


def _measured(store: CountingStore, work: Callable[[], T]) -> tuple[Row, T]:
    """Requests, processor time and peak of memory, the latter of a second execution: counting it takes time."""
    reads, begun = store.reads, time.process_time()
    found = work()
    figures: Row = {"requests": store.reads - reads, "ms": (time.process_time() - begun) * 1000}
    tracemalloc.start()
    work()
    figures["peak_bytes"] = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return figures, found


def _view(store: MemoryStore, state: CatalogState) -> CatalogView:
    return CatalogView(store, state, executor=_Inline(), clock_s=time.monotonic)  # type: ignore[arg-type]


def _runs_at(view: CatalogView, key: QueueKey, offset: int) -> object:
    queue = view.view(view.state, key)
    assert queue is not None
    places = run_sync(view.runs_of(queue, offset)).places(offset, end=offset + 1, bytes_max=1, runs_max=1)
    assert places[0].base <= offset < places[0].end
    return places


def _followed(store: CountingStore, history: SyntheticHistory, state: CatalogState) -> Row:
    """Processor time of a reader of up to 1,000 queues, for each commit and queue with news."""
    followed = set(history.keys[:1000])
    view = _view(store, state)
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
                _runs_at(view, key, int(run["base_queue_offset"]))
                news += number > 0
        spent_s += (time.process_time() - begun) * (number > 0)
    return {"follow_ms": spent_s * 1000 / max(1, news)}


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def summarize(rows: Sequence[Row]) -> list[Row]:
    """The last row against the first, and the limits it misses."""
    first, last = rows[0], rows[-1]

    def ratio(name: str) -> float:
        return float(last[name]) / max(float(first[name]), 1e-9)

    limits: dict[str, tuple[float, float]] = {
        "cycle_ms": (ratio("cycle_ms"), CYCLE_RATIO_MAX),
        "longest_cycle_s": (last["longest_cycle_s"], LOCK_S_MAX),
        "puts_a_cycle": (ratio("puts_a_cycle"), CYCLE_RATIO_MAX),
        "peak_rss_bytes": (last["peak_rss_bytes"] - first["writer_rss_bytes"], 2 * MORE_RSS_BYTES_MAX),
        "catalog_bytes_a_cycle": (
            last["catalog_bytes_a_cycle"], CATALOG_BYTES_MAX + DATA_SHARE_MAX * last["stored_bytes_a_cycle"],
        ),
        "first_requests": (last["first_requests"] + 2, FIRST_REQUESTS_MAX),  # the object's tail and a block
        "follow_ms": (last["follow_ms"], FOLLOW_MS_MAX),
    }  # fmt: skip
    for name in ("open", "list"):
        limits[f"{name}_requests"] = (
            ratio(f"{name}_requests") if last[f"{name}_requests"] else 0.0,
            READ_RATIO_MAX,
        )
        limits[f"{name}_ms"] = (ratio(f"{name}_ms"), READ_RATIO_MAX)
    for name in ("open", "first", "middle", "list"):
        more = last[f"{name}_peak_bytes"] - first[f"{name}_peak_bytes"]
        limits[f"{name}_peak_bytes"] = (more, MORE_RSS_BYTES_MAX)
    missed = [name for name, (figure, limit) in limits.items() if figure > limit]
    return [
        {
            "name": "aging", "queues": last["queues"], "commits": [first["commits"], last["commits"]],
            "figures": {name: {"figure": round(figure, 3), "limit": limit} for name, (figure, limit) in limits.items()},
            "missed": missed,
        }
    ]  # fmt: skip


def _table(summaries: Sequence[Row]) -> str:
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
