"""Is everything the catalog names there, whole, and in order? Reads only; finds all it can, raises for nothing found.

    chain      every commit exists, follows the one before, and root pages say what replaying the commits gives
    queues     the runs and gaps of every queue cover its offsets once each
    segments   every object is there; its tail, footer and runs are what the catalog says
    index      every index file is there and covers the segments it says; full: every key of theirs is found in it
    full       every block and key section passes its checksum, and every record is the one its row describes
    leftovers  objects nothing refers to: uploads in flight, abandoned attempts, garbage not yet collected

Owns the order and the cross checks; segments are checked one by one in verify_segment.py. What cannot be asked (the
store is away) is raised, not reported: an unanswered question is no anomaly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from tiered.catalog.pages import Page, RunIndex
from tiered.catalog.reading import follow, head_version, load, read_commit, refresh
from tiered.catalog.snapshot import describe
from tiered.catalog.state import CatalogState, RunChunk, selected
from tiered.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from tiered.flat_file.verify_index import check_indexes
from tiered.flat_file.verify_segment import Anomaly, AnomalyKind, SegmentCheck, SegmentResult, check_segment
from tiered.formats.keys import (
    DATA_PREFIX,
    INDEX_PREFIX,
    PAGES_PREFIX,
    SERVE_PREFIX,
    SETS_PREFIX,
    STATE_PREFIX,
    catalog_key,
)
from tiered.model.queue import QueueKey
from tiered.model.tables import Table
from tiered.object_store.protocol import ObjectStore

__all__ = ["Anomaly", "AnomalyKind", "SegmentChecker", "VerifyReport", "verify_archive"]

READ_THREADS = 4
"""Segments checked side by side; each holds some tens of megabytes at most."""

SegmentChecker = Callable[[CatalogState, Mapping[str, SegmentCheck]], Iterable[tuple[str, SegmentResult]]]
"""Checks objects of one catalog version, by key: who has more than one machine brings its own."""

_PREFIXES = (DATA_PREFIX, SETS_PREFIX, PAGES_PREFIX, INDEX_PREFIX, STATE_PREFIX)


@dataclass
class VerifyReport:
    """What was found. ``leftovers``: keys nobody refers to, no loss, but space. ``counts``: what was looked at."""

    anomalies: list[Anomaly] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: AnomalyKind, key: str, detail: str) -> None:
        """Record an anomaly of a whole object."""
        self.anomalies.append(Anomaly(kind, key, None, detail))


def verify_archive(
    store: ObjectStore,
    *,
    full: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    segments: SegmentChecker | None = None,
) -> VerifyReport:
    """Check the archive at ``store``, which is its own prefix. ``full`` reads every byte.

    ``progress(done_bytes, total_bytes)`` is called as objects are finished. ``segments`` replaces the threads that
    check objects here. Raises NotFoundError when there is no
    archive, and UnavailableError and the like when the store cannot be asked.
    """
    report = VerifyReport()
    head = head_version(store)
    if head == 0:
        raise NotFoundError(f"{store.url} holds no archive")
    state = _check_chain(store, head, report)
    if state is None:
        return report
    pages = _readable_pages(store, state, report)
    _check_queues(state, pages, report)
    objects = _objects(pages)
    checker = segments or _threaded(store, full=full)
    _check_segments(state, objects, report, checker, full=full, progress=progress)
    found, items = check_indexes(store, state, pages, full=full)
    report.anomalies += found
    report.counts["keys"] = items
    _forgive_what_moved(store, state, report)
    _check_named(store, state, objects, report)
    report.counts = {
        "versions": head, "queues": state.queue_count, "objects": len(objects),
        "runs": sum(len(page.chunk.runs) for page in pages), **report.counts,
    }  # fmt: skip
    return report


# -- chain ----------------------------------------------------------------------------------------------------


def _check_chain(store: ObjectStore, head: int, report: VerifyReport) -> CatalogState | None:
    """The state at ``head`` as readers see it, or None when not even that can be read."""
    replayed: CatalogState | None = CatalogState()
    for version in range(1, head + 1):
        try:
            commit = read_commit(store, version)
            if replayed is not None:
                replayed = follow(store, replayed, commit)
        except NotFoundError as error:
            report.add(
                AnomalyKind.CHAIN, catalog_key(version), f"version {version} is missing: {error.message}"
            )
            replayed = None
        except (CorruptionError, UnsupportedFormatError) as error:
            report.add(AnomalyKind.CHAIN, catalog_key(version), error.message)
            replayed = None
    try:
        state = load(store, version=head)
    except (NotFoundError, CorruptionError, UnsupportedFormatError) as error:
        report.add(AnomalyKind.CHAIN, catalog_key(head), f"the head cannot be loaded: {error.message}")
        return replayed
    if replayed is not None and describe(replayed) != describe(state):
        differing = [name for name, value in describe(state).items() if describe(replayed)[name] != value]
        report.add(
            AnomalyKind.ROOT, state.root.key, f"differs from the commits replayed in {', '.join(differing)}"
        )
    return state


def _readable_pages(store: ObjectStore, state: CatalogState, report: VerifyReport) -> list[Page]:
    """Living runs, page by page. An unreadable page is an anomaly; what it held will show as holes too."""
    index = RunIndex(store)
    pages: list[Page] = []
    for ref in state.pages:
        try:
            pages.append(index.living(state, index.page(ref)))
        except (NotFoundError, CorruptionError, UnsupportedFormatError) as error:
            report.add(AnomalyKind.PAGE, ref.key, error.message)
    if state.memory_runs:
        pages.append(Page(state.directory.keys, state.memory))
    return pages


# -- queues ---------------------------------------------------------------------------------------------------


def _check_queues(state: CatalogState, pages: list[Page], report: VerifyReport) -> None:
    """Runs and gaps of a queue, sorted, must lead from its minimum to its end without hole or overlap."""
    pieces = [np.zeros((0, 3), np.int64)]
    for page in pages:
        rows = np.array([_row(state, queue) for queue in page.queues], np.int64)
        pieces.append(_intervals(rows[page.chunk.runs["queue"]], page.chunk.runs, "base_queue_offset"))
    pieces.append(_intervals(state.gaps["queue"].astype(np.int64), state.gaps, "begin_queue_offset"))
    found = np.concatenate(pieces)
    found = found[np.lexsort((found[:, 1], found[:, 0]))]
    starts = np.searchsorted(found[:, 0], np.arange(len(state.table) + 1))
    for row in range(len(state.table)):
        minimum, end = int(state.table["min_queue_offset"][row]), int(state.table["end_queue_offset"][row])
        mine = found[starts[row] : starts[row + 1]]
        expected = np.concatenate([[minimum], mine[:, 2]])
        begins = np.concatenate([mine[:, 1], [end]])
        for at in np.flatnonzero(expected != begins).tolist():
            kind = AnomalyKind.HOLE if expected[at] < begins[at] else AnomalyKind.OVERLAP
            low, high = sorted((int(expected[at]), int(begins[at])))
            what = "in no run and no gap" if kind == AnomalyKind.HOLE else "in two runs or gaps"
            report.anomalies.append(
                Anomaly(kind, _name(state.key_of(row)), (low, high), f"offsets [{low}, {high}) are {what}")
            )


def _row(state: CatalogState, queue: QueueKey) -> int:
    row = state.row_of(queue)
    return -1 if row is None else row


def _intervals(rows: np.ndarray[tuple[int], np.dtype[np.int64]], table: Table, begin: str) -> Table:
    return np.stack([rows, table[begin], table["end_queue_offset"]], axis=1).astype(np.int64)


def _name(queue: QueueKey) -> str:
    return f"{queue.topic}/{queue.queue_id}" + (f" generation {queue.generation}" if queue.generation else "")


# -- segments -------------------------------------------------------------------------------------------------


def _objects(pages: list[Page]) -> dict[str, SegmentCheck]:
    """Every object the living runs are in, with the runs the catalog expects in it."""
    found: dict[str, SegmentCheck] = {}
    for page in pages:
        chunk = page.chunk
        order = np.argsort(chunk.runs["object"], kind="stable")
        numbers = chunk.runs["object"][order]
        for mine in np.split(order, np.flatnonzero(np.diff(numbers)) + 1) if len(order) else []:
            place = chunk.objects[int(chunk.runs["object"][mine[0]])]
            key = chunk.object_keys[int(place["key"])]
            check = found.setdefault(key, SegmentCheck(key, place, [], []))
            part: RunChunk = selected(chunk, mine)
            check.runs.append(part.runs)
            check.queues.extend(page.queues[queue] for queue in part.runs["queue"].tolist())
    return found


def _check_segments(
    state: CatalogState,
    objects: dict[str, SegmentCheck],
    report: VerifyReport,
    checker: SegmentChecker,
    *,
    full: bool,
    progress: Callable[[int, int], None],
) -> None:
    cost = {key: int(check.place["size_bytes" if full else "tail_bytes"]) for key, check in objects.items()}
    total, done = sum(cost.values()), 0
    counts = {"rows": 0, "blocks": 0, "bytes": 0}
    for key, result in checker(state, objects):
        report.anomalies += result.anomalies
        for name in counts:
            counts[name] += result.counts.get(name, 0)
        done += cost[key]
        progress(done, total)
    report.counts |= counts


def _threaded(store: ObjectStore, *, full: bool) -> SegmentChecker:
    """Some objects at a time, in this process."""

    def check(
        state: CatalogState, objects: Mapping[str, SegmentCheck]
    ) -> Iterator[tuple[str, SegmentResult]]:
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="verify") as pool:
            pending = (
                (key, pool.submit(check_segment, store, state, check, full=full))
                for key, check in sorted(objects.items())
            )
            for key, outcome in _few_at_a_time(pending):
                yield key, outcome.result()

    return check


def _few_at_a_time(
    pending: Iterator[tuple[str, Future[SegmentResult]]],
) -> Iterator[tuple[str, Future[SegmentResult]]]:
    window = list(islice(pending, 2 * READ_THREADS))
    while window:
        yield window.pop(0)
        window += islice(pending, 1)


def _forgive_what_moved(store: ObjectStore, state: CatalogState, report: VerifyReport) -> None:
    """An object that is not found is missing only if the newest catalog names it still."""
    missing = {anomaly.key for anomaly in report.anomalies if anomaly.kind == AnomalyKind.MISSING}
    newest = refresh(store, state) if missing else state
    if newest.version == state.version:
        return
    named = _objects(_readable_pages(store, newest, VerifyReport())).keys()
    report.anomalies = [
        anomaly for anomaly in report.anomalies if anomaly.kind != AnomalyKind.MISSING or anomaly.key in named
    ]


# -- what is named, and what is not ---------------------------------------------------------------------------


def _check_named(
    store: ObjectStore, state: CatalogState, objects: dict[str, SegmentCheck], report: VerifyReport
) -> None:
    listed = (info for prefix in _PREFIXES for info in store.list(prefix))
    present = {info.key: info.size_bytes for info in listed if not info.key.startswith(SERVE_PREFIX)}
    wanted = state.catalog_keys()
    for key in sorted(wanted - present.keys()):
        report.add(AnomalyKind.MISSING, key, "the catalog names it, but it does not exist")
    referenced = wanted | objects.keys()
    for key in sorted(state.doomed.keys() & referenced):
        report.add(AnomalyKind.DOOMED, key, "given up for deletion, but still needed")
    report.counts["doomed"] = len(present.keys() & state.doomed.keys())
    report.leftovers = sorted(present.keys() - referenced - state.doomed.keys())
