"""Queries against history: ``python -m benchmarks.aging_queries --commits 1000,100000 --out aging-queries.jsonl``.

An archive of four queues of real messages, indexed as a running instance indexes it. At each number of commits: the
index's cost since the number before, and the requests, processor time and memory of an offset by time, of a message by
key, unique key and id. The summary compares the last with the first. Owns the figures and their limits.
"""

import argparse
import sys
import time
import tracemalloc
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from benchmarks.aging import MORE_RSS_BYTES_MAX, compared, measured_read, table
from benchmarks.counting_store import CountingStore
from benchmarks.recording import record
from benchmarks.report import MIB, Row
from benchmarks.synthetic_history import CYCLE_MS, START_MS
from fetcher.access import ArchiveAccess
from fetcher.io.request_scheduler import ThreadRangeReader
from fetcher.io.waiting import run_sync
from fetcher.queries.by_key import KeyKind, KeyQuery, find_by_key
from fetcher.queries.time_search import Boundary, TimeReader
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tiered.catalog.archives import Archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import CatalogState
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import IndexSettings, Settings
from uploader.index_builder import IndexBuilder

QUEUES = [QueueKey("topic", number, 0) for number in range(4)]
MESSAGES = 2
"""Of a cycle, in one queue."""
HALF_DAY_MS = 43_200_000
RECENT = 15
"""Index files of the last 960 commits."""
INDEX_EVERY = 64
TRACED_CYCLES = 20_000
"""More than a day, whose index files are merged into one."""
REQUESTS_RATIO_MAX, INDEX_RATIO_MAX, INDEX_BYTES_MAX = 1.5, 1.5, 128 * MIB


class RealHistory:
    """An archive of real messages; cycle n, from 0, has messages of queue n % 4 with keys of their own."""

    def __init__(self, store: CountingStore, limits: CatalogLimits, settings: IndexSettings) -> None:
        self._archive = ArchiveBuilder(store, limits=limits, codec=BlockCodec())
        self._index = IndexBuilder(
            store, self._archive.writer, settings, clock=Clock(wall_ms=lambda: START_MS)
        )
        self.recent: deque[tuple[CatalogState, int]] = deque(maxlen=RECENT)
        """After each of the newest index builds, with the number of cycles so far. Replaced files are still there."""
        self.phys = array("q")
        """Where the first message of each cycle begins."""
        self.index_s = 0.0

    @property
    def version(self) -> int:
        """The newest version of the catalog."""
        return self._archive.state.version

    def cycle(self) -> None:
        """One commit."""
        number = len(self.phys)
        queue = QUEUES[number % len(QUEUES)]
        sent = [
            Sent(
                queue,
                b'{"order": %d, "state": "paid"}' % number,
                keys=(f"order-{number}",),
                unique_key=unique_key(number, at),
                stored_ms=stored_ms(number) + at,
            )
            for at in range(MESSAGES)
        ]
        self._archive.commit(sent)
        rows = self._archive.truth[queue].rows
        self.phys.append(rows[0].phys)
        rows.clear()
        self._archive.keys.clear()

    def cycles(self, count: int) -> None:
        """Commits up to version ``count``, and what is due of the index after each ``INDEX_EVERY`` of them."""
        while self.version < count:
            for _ in range(min(INDEX_EVERY, count - self.version)):
                self.cycle()
            self.index()

    def until_indexed(self) -> None:
        """Commits until an index file has just been built."""
        while self._archive.state.indexed_version < self.version - 1:
            self.cycle()
            self.index()

    def index(self) -> None:
        """Build and merge what is due."""
        begun_s = time.process_time()
        indexed = self._archive.state.indexed_version
        while self._index.build_next():
            pass
        self.index_s += time.process_time() - begun_s
        if self._archive.state.indexed_version > indexed:
            self.recent.append((self._archive.state, len(self.phys)))


def stored_ms(cycle: int) -> int:
    """When the first message of ``cycle`` was stored."""
    return START_MS + cycle * CYCLE_MS


def unique_key(cycle: int, at: int) -> str:
    """The unique key of a message of ``cycle``."""
    return f"7F0000010000{cycle:012X}{at:08X}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aging_queries", description=main.__doc__)
    parser.add_argument("--commits", default="1000,100000", help="numbers of commits, ascending")
    parser.add_argument("--out", type=Path, default=Path("aging-queries.jsonl"))
    options = parser.parse_args(arguments)
    counts = [int(count) for count in options.commits.split(",")]
    return record(options.out, measured(counts), summarize, table)


def measured(
    counts: Sequence[int],
    *,
    traced_cycles: int = TRACED_CYCLES,
    limits: CatalogLimits | None = None,
    settings: IndexSettings | None = None,
) -> Iterator[Row]:
    """A row for each number of commits of one history; up to ``traced_cycles`` are added after each."""
    store = CountingStore()
    history = RealHistory(store, limits or CatalogLimits(), settings or IndexSettings())
    for count in counts:
        cycles, index_s = len(history.phys), history.index_s
        history.cycles(count)
        history.until_indexed()
        cycles = len(history.phys) - cycles
        yield {
            "queues": len(QUEUES),
            "commits": count,
            "index_ms_a_cycle": (history.index_s - index_s) * 1000 / cycles,
            **_queries(store, history),
            "index_peak_bytes": _index_peak_bytes(history, min(count, traced_cycles)),
        }


def _index_peak_bytes(history: RealHistory, cycles: int) -> int:
    """Peak of memory allocated by building and merging index files of the next ``cycles`` cycles."""
    peak_bytes, end = 0, len(history.phys) + cycles
    while len(history.phys) < end:
        for _ in range(INDEX_EVERY):
            history.cycle()
        tracemalloc.start()
        history.index()
        peak_bytes = max(peak_bytes, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return peak_bytes


Query = Callable[[CountingStore, CatalogState, int, int], None]
"""Reads a message of a cycle, given where in the log the cycle begins."""


def _queries(store: CountingStore, history: RealHistory) -> Row:
    """Of the beginning, the middle and the end of the history, the most expensive one; the end while the current day
    has the most index files of the last RECENT builds. Each without caches."""
    state, phys = load(store), history.phys
    widest, cycles = max(history.recent, key=lambda found: len(found[0].indexes))
    row: Row = {"index_files": len(state.indexes)}
    queries: dict[str, Query] = {
        "time": _by_time,
        "key": _by_key,
        "unique_key": _by_unique_key,
        "id": _by_id,
        "key_of_all_time": _by_key_of_all_time,
    }
    places = ((state, len(phys) // 100), (state, len(phys) // 2), (widest, cycles - INDEX_EVERY // 2))
    for name, query in queries.items():
        for at, number in places:
            found, _ = measured_read(store, partial(query, store, at, number, phys[number]))
            for what, figure in found.items():
                row[f"{name}_{what}"] = max(figure, row.get(f"{name}_{what}", 0))
    return row


def _opened(store: CountingStore, state: CatalogState) -> ArchiveAccess:
    """The archive in ``store`` at ``state``, opened as `tiered query` does."""
    place = Archive("cluster", "broker", store)
    return ArchiveAccess(store.url, MemoryStore(), place, state, ThreadRangeReader(store, 1), Settings())


def _by_time(store: CountingStore, state: CatalogState, number: int, phys: int) -> None:
    with closing(_opened(store, state)) as archive:
        times = TimeReader(archive.catalog, archive.source)
        queue = QUEUES[number % len(QUEUES)]
        found = run_sync(times.offset_by_time(queue, stored_ms(number) + 1, Boundary.LOWER))
    assert found == number // len(QUEUES) * MESSAGES + 1


def _by_key(store: CountingStore, state: CatalogState, number: int, phys: int) -> None:
    """Of the day around it: `tiered query` asks for one day by default."""
    _found(store, state, KeyQuery("topic", f"order-{number}", KeyKind.KEY, *_day(number)), MESSAGES)


def _by_key_of_all_time(store: CountingStore, state: CatalogState, number: int, phys: int) -> None:
    _found(store, state, KeyQuery("topic", f"order-{number}"), MESSAGES)


def _by_unique_key(store: CountingStore, state: CatalogState, number: int, phys: int) -> None:
    _found(store, state, KeyQuery("topic", unique_key(number, 1), KeyKind.UNIQUE, *_day(number)), 1)


def _day(number: int) -> tuple[int, int]:
    return stored_ms(number) - HALF_DAY_MS, stored_ms(number) + HALF_DAY_MS


def _found(store: CountingStore, state: CatalogState, query: KeyQuery, count: int) -> None:
    with closing(_opened(store, state)) as archive:
        page = run_sync(archive.query(state, lambda source, state: find_by_key(source, state, query)))
    assert len(page.messages) == count


def _by_id(store: CountingStore, state: CatalogState, number: int, phys: int) -> None:
    with closing(_opened(store, state)) as archive:
        found = run_sync(archive.find_at_phys(phys))
    assert found is not None and found.record.uniq_key == unique_key(number, 0)


def summarize(rows: Sequence[Row]) -> list[Row]:
    """The last row against the first, and the limits it misses."""
    first, last = rows[0], rows[-1]
    limits: dict[str, tuple[float, float]] = {
        "index_ms_a_cycle": (last["index_ms_a_cycle"] / first["index_ms_a_cycle"], INDEX_RATIO_MAX),
        "index_peak_bytes": (last["index_peak_bytes"], INDEX_BYTES_MAX),
    }
    for name in ("time", "key", "unique_key", "id"):
        limits[f"{name}_requests"] = (
            last[f"{name}_requests"] / first[f"{name}_requests"],
            REQUESTS_RATIO_MAX,
        )
        limits[f"{name}_peak_bytes"] = (
            last[f"{name}_peak_bytes"] - first[f"{name}_peak_bytes"],
            MORE_RSS_BYTES_MAX,
        )
    return [compared("aging queries", first, last, limits)]


if __name__ == "__main__":
    sys.exit(main())
