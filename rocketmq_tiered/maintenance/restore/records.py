"""Writes the selected records of an archive at their places in a log; objects are read side by side.

Writes the consume queues of a restored log, from the rows of the archive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.restore.selection import RestoreSelection, ShownQueue
from tiered.archive.found_objects import READ_THREADS, few_at_a_time
from tiered.archive.kept_offsets import KeptOffsets
from tiered.archive.object_spans import ObjectSpans, Rows, all_rows
from tiered.archive.run_passes import LivingRuns, WindowObjects
from tiered.archive.segment_reader import SegmentCache, SegmentReader
from tiered.broker_store.restored_log import Piece, RestoredLog
from tiered.catalog.pages import Page, RunIndex
from tiered.catalog.state import CatalogState, renumbered, selected
from tiered.consume_queue.index import UNIT_DTYPE
from tiered.consume_queue.store import ConsumeQueueStore
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
        raise UsageError(
            "offsets are missing inside queues, and a log from physical offset 0 has no record for them",
            hint=COMPACT,
        )
    if needs.deleted and (layout.lead_phys if needs.gaps else begin) == 0:
        raise UsageError(
            "the archive no longer has the first messages of some queues, and a commitlog that begins at physical "
            "offset 0 has no place for what was deleted",
            hint=COMPACT,
        )
    return layout


def compact_layout(packed_bytes: int, end_phys: int, file_bytes: int, needs: Needs) -> LogLayout:
    """The layout of ``packed_bytes`` of records without anything between them: it ends where the archive does, at
    ``end_phys``, so that the next message lands there, or above it if there is no room for that."""
    files, filled = divmod(packed_bytes, file_bytes)
    # Gaps are recorded before the first message, and a log from file 0 would claim that nothing was deleted.
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
        """Reads all living runs once, sums up their bytes, and divides their physical offsets into windows of about
        WINDOW_RUNS runs each."""
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
        """For each object its bytes and the copy of its records; the first ``done`` were copied before."""
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


PENDING_UNITS = 1 << 20
"""Units in memory; they are written queue by queue, as most runs have few."""
GAP_UNITS_MAX = 1 << 16
GAP_SIZE = 2

Moved = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Physical offsets in the restored log of those in the archive."""


class UnitCounts(NamedTuple):
    """``messages``: units of messages. ``gaps``: offsets between them without one. ``ended``: queues of which nothing
    was kept."""

    messages: int
    gaps: int
    ended: int


class UnitWriter:
    """Writes what ``selection`` has to ``queues``. ``only_ended``: a broker builds the others, so that only queues of
    which nothing was kept are written. ``gap_phys``: see LogLayout."""

    def __init__(
        self,
        selection: RestoreSelection,
        queues: ConsumeQueueStore,
        gap_phys: int,
        moved: Moved,
        *,
        only_ended: bool,
    ) -> None:
        self._selection, self._queues, self._only_ended = selection, queues, only_ended
        self._gap_phys, self._moved = gap_phys, moved
        self._pending: dict[QueueKey, list[Table]] = {}
        self._pending_units = 0
        self._next: dict[QueueKey, int] = {}
        self._messages = self._gaps = 0

    def write(self, store: ObjectStore, order: LogOrder) -> UnitCounts:
        """All of them. Raises what reading and writing raise."""
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="restore") as pool:
            for runs, reader in few_at_a_time(_opened(store, order, pool)):
                for item in runs:
                    self._add(item, reader.result())
        self._write_pending()
        ended = 0
        for key, queue in self._selection.queues.items():
            ended += self._end(key, queue)
        return UnitCounts(self._messages, self._gaps, ended)

    def _add(self, item: OrderedRun, reader: SegmentReader) -> None:
        """Adds the consume-queue units of the selected rows of one run to the pending ones, and writes those when
        there are PENDING_UNITS."""
        part = reader.index.check_run(item.run, item.queue)
        for rows in all_rows(reader.index, part):
            kept = self._selection.rows(rows, item.queue, int(item.run["kind"]), reader.index.queues)
            if not kept.any():
                continue
            self._pending.setdefault(item.queue, []).append(self._units(rows.where(kept)))
            self._pending_units += int(kept.sum())
            if self._pending_units >= PENDING_UNITS:
                self._write_pending()

    def _units(self, rows: Rows) -> Table:
        units = np.zeros(len(rows), UNIT_DTYPE)
        for name in ("size", "tags_code", "queue_offset", "inner_num", "store_timestamp"):
            units[name] = getattr(rows, name)
        units["phys"] = self._moved(rows.phys)
        return units

    def _write_pending(self) -> None:
        for key, tables in self._pending.items():
            units = np.concatenate(tables)
            self._messages += len(units)
            for first, end in _unbroken(units):
                self._put(key, units[first:end])
        self._pending, self._pending_units = {}, 0

    def _put(self, key: QueueKey, units: Table) -> None:
        """Writes units of one queue, and fills offsets that are missing before them, except in a BatchCQ. Raises
        CorruptionError if an offset comes twice."""
        first = int(units["queue_offset"][0])
        expected = self._next.get(key, first)
        if first < expected:
            raise CorruptionError(
                f"{key}: rows at offset {first} are before {expected}",
                hint="tiered verify ARCHIVE_URL --full names what is damaged",
            )
        if first > expected and not self._selection.queues[key].is_batch:
            self._put_gap(key, expected, first)
        if not self._only_ended:
            self._queues.put(key.topic, key.queue_id, units)
        self._next[key] = int(units["queue_offset"][-1] + units["inner_num"][-1])

    def _put_gap(self, key: QueueKey, begin: int, end: int) -> None:
        """Units of offsets that no message has. Raises UsageError where the log has no place for them."""
        if self._gap_phys < 0:
            raise UsageError(
                f"{key} has no messages at offsets {begin} to {end - 1}, and a log that begins at physical offset 0 "
                "has no place for their consume-queue units",
                hint=COMPACT,
            )
        self._gaps += end - begin
        for first in range(begin, end, GAP_UNITS_MAX):
            units = np.zeros(min(GAP_UNITS_MAX, end - first), UNIT_DTYPE)
            units["phys"], units["size"], units["inner_num"] = self._gap_phys, GAP_SIZE, 1
            units["queue_offset"] = np.arange(first, first + len(units))
            if not self._only_ended:
                self._queues.put(key.topic, key.queue_id, units)

    def _end(self, key: QueueKey, queue: ShownQueue) -> int:
        """Bring the queue to its end; 1 if nothing of it was kept."""
        written = self._next.get(key)
        if written is None:
            if queue.end_offset:
                self._queues.put_empty_queue(key.topic, key.queue_id, queue.end_offset)
            return int(queue.end_offset > 0)
        if written < queue.end_offset and not queue.is_batch:
            self._put_gap(key, written, queue.end_offset)
        return 0


def _unbroken(units: Table) -> Iterator[tuple[int, int]]:
    """Bounds of units whose offsets follow each other."""
    ends = units["queue_offset"] + units["inner_num"]
    cuts = np.flatnonzero(units["queue_offset"][1:] != ends[:-1]) + 1
    bounds = [0, *cuts.tolist(), len(units)]
    yield from pairwise(bounds)


def _opened(
    store: ObjectStore, order: LogOrder, pool: ThreadPoolExecutor
) -> Iterator[tuple[list[OrderedRun], Future[SegmentReader]]]:
    """Consecutive runs of one object, and the object."""
    cache = SegmentCache(store, cache_bytes=TAIL_BYTES)
    for _, group in groupby(order.runs(), key=lambda item: item.key):
        runs = list(group)
        yield runs, pool.submit(opened, cache, runs[0])
