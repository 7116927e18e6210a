"""Writes the selected records of an archive at their places in a log; objects are read side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rocketmq_tiered.maintenance.restore.selection import RestoreSelection
from tiered.archive.found_objects import READ_THREADS, few_at_a_time
from tiered.archive.kept_offsets import KeptOffsets
from tiered.archive.object_spans import ObjectSpans
from tiered.archive.run_passes import LivingRuns, WindowObjects
from tiered.archive.segment_reader import SegmentCache, SegmentReader
from tiered.broker_store.restored_log import Piece, RestoredLog
from tiered.catalog.pages import Page, RunIndex
from tiered.catalog.state import CatalogState, renumbered, selected
from tiered.errors import CorruptionError, NotFoundError, SnapshotExpiredError, UsageError
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import taken
from tiered.model.tables import QUEUE_SPARSE, RunKind, Table
from tiered.object_store.interface import ObjectStore

FILLER_ROOM_BYTES = 1024
COMPACT = "use --layout compact: messages get other physical offsets, and so other offsetMsgIds"


class LogLayout(NamedTuple):
    """The log is [``begin_phys``, ``end_phys``) in files of ``file_bytes``; ``begin_phys`` begins a file.

    ``gap_phys``: the position in the units of missing offsets. It is the end of a file without messages before the
    log, where a pull continues with the next file.
    """

    begin_phys: int
    end_phys: int
    file_bytes: int

    @property
    def gap_phys(self) -> int:
        return self.begin_phys - 1

    @property
    def lead_phys(self) -> int:
        """Where the file without messages begins."""
        return self.begin_phys - self.file_bytes


class Needs(NamedTuple):
    """What consume queues must represent. ``deleted``: offsets below a queue's first message. ``gaps``: offsets between
    messages."""

    deleted: bool
    gaps: bool


def same_layout(oldest_phys: int | None, end_phys: int, file_bytes: int, needs: Needs) -> LogLayout:
    """The layout in which each record keeps its physical offset. ``oldest_phys``: of the first record, None without
    any. Raises UsageError if ``needs`` cannot be met."""
    begin = (max(0, end_phys - 1) if oldest_phys is None else oldest_phys) // file_bytes * file_bytes
    layout = LogLayout(begin, max(end_phys, begin + 1), file_bytes)
    if needs.gaps and begin == 0:
        raise UsageError("offsets are missing inside queues, and the log begins at 0", hint=COMPACT)
    if needs.deleted and (layout.lead_phys if needs.gaps else begin) == 0:
        raise UsageError("queues begin above offset 0, but the log at physical offset 0", hint=COMPACT)
    return layout


def compact_layout(packed_bytes: int, end_phys: int, file_bytes: int, needs: Needs) -> LogLayout:
    """The layout of ``packed_bytes`` of records without anything between them: it ends where the archive does, at
    ``end_phys``, so that the next message lands there, or above it if there is no room for that."""
    files, filled = divmod(packed_bytes, file_bytes)
    least = 2 if needs.gaps else 1
    # Room for a filler between the last record and the end, wherever that is in its file.
    last = (end_phys - filled - FILLER_ROOM_BYTES) // file_bytes
    begin = max(last - files, least) * file_bytes
    return LogLayout(begin, max(end_phys, begin + packed_bytes), file_bytes)


WINDOW_RUNS = 262_144
_END = np.iinfo(np.int64).max


class OrderedRun(NamedTuple):
    """A run, the object that has it (size and tail in bytes), and its queue."""

    min_phys: int
    key: str
    size_bytes: int
    tail_bytes: int
    run: np.void
    queue: QueueKey


class LogOrder:
    """``windows``: bounds [begin, end) of the runs' first physical offsets. ``oldest_phys``: of a record that is
    certainly selected. ``has_holes``: key compaction dropped rows inside runs. Raises CorruptionError if a page of the
    archive cannot be read, and what the store raises."""

    def __init__(self, store: ObjectStore, state: CatalogState, selection: RestoreSelection) -> None:
        self._runs = LivingRuns(store, state)
        self._version, self._selection = state.version, selection
        starts = [np.zeros(0, np.int64)]
        self.total_bytes, self.oldest_phys, self.has_holes = 0, _END, False
        for page in self._pages(0, _END):
            runs = page.chunk.runs
            starts.append(np.array(runs["min_phys"]))
            self.total_bytes += int(runs["byte_count"].sum())
            self.has_holes |= bool((runs["kind"] == RunKind.SPARSE).any())
            whole = runs["min_phys"][selection.whole_runs(page)]
            self.oldest_phys = min(self.oldest_phys, int(whole.min(initial=_END)))
        first = np.sort(np.concatenate(starts))
        cuts = [0, *np.unique(first[WINDOW_RUNS::WINDOW_RUNS]).tolist(), _END]
        self.windows = [(begin, end) for begin, end in pairwise(cuts) if len(first)]
        if self._runs.unreadable:
            key, reason = next(iter(self._runs.unreadable.items()))
            raise CorruptionError(
                f"{key}: {reason}", hint="tiered verify ARCHIVE_URL --full lists all damage"
            )

    def objects(self, window: tuple[int, int]) -> list[list[OrderedRun]]:
        """The runs with bytes of ``window``, object by object, the one that begins first first."""
        found: dict[str, list[OrderedRun]] = {}
        for item in self._ordered(window):
            if int(item.run["kind"]) != RunKind.LMQ:
                found.setdefault(item.key, []).append(item)
        return list(found.values())

    def runs(self) -> Iterator[OrderedRun]:
        """All runs, so that those of one queue come in the order of their offsets."""
        for window in self.windows:
            yield from self._ordered(window)

    def _ordered(self, window: tuple[int, int]) -> list[OrderedRun]:
        objects = WindowObjects(self._pages(*window))
        found = []
        for key, check in objects.items():
            size_bytes, tail_bytes = int(check.place["size_bytes"]), int(check.place["tail_bytes"])
            (runs,) = check.runs
            found += [
                OrderedRun(int(run["min_phys"]), key, size_bytes, tail_bytes, run, queue)
                for run, queue in zip(runs, check.queues, strict=True)
            ]
        return sorted(found, key=lambda item: (item.min_phys, item.key, int(item.run["ordinal"])))

    def _pages(self, begin: int, end: int) -> Iterator[Page]:
        for page in self._runs.between(0, self._version):
            runs: Table = page.chunk.runs
            wanted = self._selection.runs(page) & (runs["min_phys"] >= begin) & (runs["min_phys"] < end)
            if wanted.any():
                chunk = selected(page.chunk, wanted)
                used, chunk.runs["queue"] = renumbered(chunk.runs["queue"], len(page.queues))
                yield Page(taken(page.queues, used), chunk)


PENDING_BYTES = 4 << 20
"""Of decoded records before they are written."""

TAIL_BYTES = 32 << 20

Written = Callable[[int, int], object]


class RecordWriter:
    """Copies records of ``selection`` from ``store`` to ``log``."""

    def __init__(self, store: ObjectStore, selection: RestoreSelection, log: RestoredLog) -> None:
        self._store, self._selection, self._log = store, selection, log
        self._tails = SegmentCache(store, cache_bytes=TAIL_BYTES)

    def write(self, order: LogOrder, done: int, written: Written) -> None:
        """Write all objects but the first ``done``. ``written(objects, bytes)`` is called as they are finished, in
        order. Raises what reading and writing raise."""
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="restore") as pool:
            for number, (copied_bytes, copied) in enumerate(few_at_a_time(self._started(order, done, pool))):
                copied.result()
                written(number + 1, copied_bytes)

    def _started(
        self, order: LogOrder, done: int, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[int, Future[None]]]:
        objects = (runs for window in order.windows for runs in order.objects(window))
        for number, runs in enumerate(objects):
            copied_bytes = sum(int(item.run["byte_count"]) for item in runs)
            if number < done:
                finished: Future[None] = Future()
                finished.set_result(None)
                yield copied_bytes, finished
            else:
                yield copied_bytes, pool.submit(self._copy, runs)

    def _copy(self, runs: Sequence[OrderedRun]) -> None:
        """All of one object."""
        index = opened(self._tails, runs[0]).index
        runs = sorted(runs, key=lambda item: (int(item.run["ordinal"]), int(item.run["first_row"])))
        parts = [index.check_run(item.run, item.queue) for item in runs]
        ends = [index.block_span(part, part.rows - 1, part.rows) for part in parts]
        spans = ObjectSpans(self._store, index, max(span.offset + span.length for span in ends))
        pieces, pending = list[Piece](), 0
        for item, part in zip(runs, parts, strict=True):
            for found in spans.records(part):
                rows = found.rows
                kept = self._selection.rows(rows, item.queue, int(item.run["kind"]), index.queues)
                pieces.append(Piece(found.data, found.starts[kept], rows.size[kept], rows.phys[kept]))
                pending += int(pieces[-1].sizes.sum())
                if pending >= PENDING_BYTES:
                    self._log.write(pieces)
                    pieces, pending = [], 0
        self._log.write(pieces)


def messages_left(
    store: ObjectStore, state: CatalogState, selection: RestoreSelection
) -> dict[QueueKey, KeptOffsets]:
    """What key compaction left of each queue, if LMQs are selected: their other entries are of no message. Raises what
    reading objects raises."""
    if not any(queue.is_lmq and queue.is_selected for queue in selection.queues.values()):
        return {}
    found: dict[QueueKey, KeptOffsets] = {}
    index = RunIndex(store)
    segments = SegmentCache(store, cache_bytes=TAIL_BYTES)
    for key, queue in selection.queues.items():
        row = state.queue(key)
        if row is None or not int(row["flags"]) & QUEUE_SPARSE:
            continue
        found[key] = left = KeptOffsets(queue.min_offset, queue.end_offset)
        chunk = index.runs_of(state, key)
        for run in chunk.runs[chunk.runs["min_phys"] >= 0]:
            place = chunk.objects[int(run["object"])]
            name, sizes = (
                chunk.object_keys[int(place["key"])],
                (int(place["size_bytes"]), int(place["tail_bytes"])),
            )
            reader = opened(segments, OrderedRun(0, name, *sizes, run, key))
            offsets = reader.row_columns(reader.index.check_run(run, key)).queue_offset
            left.keep(offsets[offsets >= queue.min_offset])
    return found


def opened(cache: SegmentCache, item: OrderedRun) -> SegmentReader:
    """The object of a run. Raises SnapshotExpiredError if it is gone."""
    try:
        return cache.open(item.key, size_bytes=item.size_bytes, tail_bytes=item.tail_bytes)
    except NotFoundError as error:
        raise SnapshotExpiredError(
            f"{item.key} no longer exists: garbage collection deleted it",
            hint="restore the newest version, into a new directory; tiered verify ARCHIVE_URL lists what is missing",
        ) from error
