"""Writes the selected records of an archive at their places in a log; objects are read side by side.

Writes the consume queues of a restored log, from the rows of the archive.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.restore.selection import RestoreSelection, ShownQueue
from tiered.archive.found_objects import READ_THREADS, few_at_a_time
from tiered.archive.kept_offsets import KeptOffsets
from tiered.archive.run_passes import LivingRuns, WindowObjects
from tiered.archive.segment_reader import SegmentCache, SegmentReader
from tiered.archive.verify_segment import SegmentCheck
from tiered.broker_store.restored_log import Piece, RestoredLog
from tiered.catalog.pages import Page, RunIndex
from tiered.catalog.state import CatalogState, renumbered, selected
from tiered.consume_queue.index import UNIT_DTYPE
from tiered.consume_queue.store import ConsumeQueueStore
from tiered.errors import CorruptionError, NotFoundError, SnapshotExpiredError, UsageError
from tiered.formats.part_rows import PartRows, in_object_order, rows_of_parts
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import selection_of
from tiered.model.tables import QUEUE_SPARSE, RUN_DTYPE, RunKind, Table, concatenated, picked, positions
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
    """The layout of a restored log in which each record keeps its physical offset. ``oldest_phys``: the offset of the
    first record, None without any. Raises UsageError if the log begins at offset 0, where consume queues cannot
    represent what ``needs`` says."""
    begin = (max(0, end_phys - 1) if oldest_phys is None else oldest_phys) // file_bytes * file_bytes
    layout = LogLayout(begin, max(end_phys, begin + 1), file_bytes)
    if needs.gaps and begin == 0:
        raise UsageError(
            "offsets are missing inside queues, and a commitlog that begins at physical offset 0 has no place for them",
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
    """The layout of a restored log with ``packed_bytes`` of records that follow one another without anything between
    them. It ends at ``end_phys``, where the archive ends, so that the archive continues there; above it if there is no
    room for that."""
    files, filled = divmod(packed_bytes, file_bytes)
    # Units of missing offsets refer to a file before the first message, and a log that begins with file 0 would tell
    # the broker that nothing was deleted.
    least = 2 if needs.gaps else 1
    # Room for a filler between the last record and the end, wherever that is in its file.
    last = (end_phys - filled - FILLER_ROOM_BYTES) // file_bytes
    begin = max(last - files, least) * file_bytes
    return LogLayout(begin, max(end_phys, begin + packed_bytes), file_bytes)


WINDOW_RUNS = 262_144
_END = np.iinfo(np.int64).max


class LogOrder:
    """``windows``: bounds [begin, end) of the runs' first physical offsets. ``oldest_phys``: of a record that is
    certainly selected. ``has_holes``: key compaction dropped rows inside runs. Raises CorruptionError if a page of the
    archive cannot be read, and what the store raises."""

    def __init__(self, store: ObjectStore, state: CatalogState, selection: RestoreSelection) -> None:
        """Read all living runs of ``state`` that ``selection`` restores, sum up their bytes, and divide their physical
        offsets into windows of about WINDOW_RUNS runs each. Raises CorruptionError for an unreadable page."""
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
                f"catalog page {key} cannot be read: {reason}",
                hint="tiered verify ARCHIVE_URL --full lists all damage",
            )

    def objects(self, window: tuple[int, int]) -> list[SegmentCheck]:
        """The objects with records in ``window`` (bounds of physical offsets), each with its selected runs, in the
        order of their first physical offsets."""
        with_bytes = (
            _some_runs(check, np.flatnonzero(check.runs[0]["kind"] != RunKind.LMQ))
            for check in WindowObjects(self._pages(*window)).values()
        )
        checks = [check for check in with_bytes if len(check.queues)]
        return sorted(checks, key=lambda check: int(check.runs[0]["min_phys"].min()))

    def runs(self) -> Iterator[SegmentCheck]:
        """All selected runs in the order of their physical offsets, so that those of a queue come in the order of their
        queue offsets. Neighbours that are in one object come together."""
        for window in self.windows:
            checks = list(WindowObjects(self._pages(*window)).values())
            counts = np.array([len(check.queues) for check in checks], np.int64)
            of, row = np.repeat(np.arange(len(checks)), counts), positions(np.zeros_like(counts), counts)
            runs = concatenated((check.runs[0] for check in checks), RUN_DTYPE)
            order = np.lexsort((runs["ordinal"], of, runs["min_phys"]))
            for neighbours in np.split(order, np.flatnonzero(np.diff(of[order])) + 1):
                if len(neighbours):
                    yield _some_runs(checks[int(of[neighbours[0]])], row[neighbours])

    def _pages(self, begin: int, end: int) -> Iterator[Page]:
        """The selected runs whose first physical offset lies in [begin, end), page by page."""
        for page in self._runs.between(0, self._version):
            runs: Table = page.chunk.runs
            wanted = self._selection.runs(page) & (runs["min_phys"] >= begin) & (runs["min_phys"] < end)
            if wanted.any():
                chunk = selected(page.chunk, wanted)
                used, chunk.runs["queue"] = renumbered(chunk.runs["queue"], len(page.queues))
                yield Page(selection_of(page.queues).taken(used), chunk)


def _some_runs(check: SegmentCheck, which: NDArray[np.int64]) -> SegmentCheck:
    """The object of ``check`` with only the runs number ``which``, in the order in which they are in the object; each
    run has a queue number of its own."""
    runs = check.runs[0]
    which = which[np.lexsort((runs["first_row"][which], runs["ordinal"][which]))]
    some = picked(runs, which)
    some["queue"] = np.arange(len(which))
    return SegmentCheck(check.key, check.place, [some], [check.queues[row] for row in which.tolist()])


TAIL_BYTES = 32 << 20

Written = Callable[[int, int], object]


class RecordWriter:
    """Copies records of ``selection`` from ``store`` to ``log``."""

    def __init__(self, store: ObjectStore, selection: RestoreSelection, log: RestoredLog) -> None:
        self._store, self._selection, self._log = store, selection, log
        self._tails = SegmentCache(store, cache_bytes=TAIL_BYTES)

    def write(self, order: LogOrder, done: int, written: Written) -> None:
        """Copy the records of all objects but the first ``done``, which an interrupted restore has copied.
        ``written`` is called each time an object is finished, in order, with the number of finished objects and the
        bytes of this one. Raises what reading and writing raise."""
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="restore") as pool:
            for number, (copied_bytes, copied) in enumerate(few_at_a_time(self._started(order, done, pool))):
                copied.result()
                written(number + 1, copied_bytes)

    def _started(
        self, order: LogOrder, done: int, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[int, Future[None]]]:
        """For each object, in order: its bytes, and the running copy of its records in ``pool``. The first ``done``
        objects were copied before."""
        objects = (check for window in order.windows for check in order.objects(window))
        for number, check in enumerate(objects):
            copied_bytes = int(check.runs[0]["byte_count"].sum())
            if number < done:
                finished: Future[None] = Future()
                finished.set_result(None)
                yield copied_bytes, finished
            else:
                yield copied_bytes, pool.submit(self._copy, check)

    def _copy(self, check: SegmentCheck) -> None:
        """Copy all selected records of one object to the log, some blocks at a time. Raises CorruptionError for rows
        that do not fit the blocks."""
        index, parts = _opened(self._tails, check)
        for rows, records in SegmentReader(self._store, index).records_of_parts(parts):
            kept = self._selection.rows(rows, check.queues, index.queues)
            self._log.write([Piece(records.data, records.starts[kept], rows.size[kept], rows.phys[kept])])


def messages_left(
    store: ObjectStore, state: CatalogState, selection: RestoreSelection
) -> dict[QueueKey, KeptOffsets]:
    """Which messages key compaction has left of each queue, by queue. Read only if LMQs are restored: their entries of
    dropped messages are not restored. Raises what reading objects raises."""
    if not any(queue.is_lmq and queue.is_selected for queue in selection.queues.values()):
        return {}
    left_of_queue: dict[QueueKey, KeptOffsets] = {}
    index = RunIndex(store)
    segments = SegmentCache(store, cache_bytes=TAIL_BYTES)
    for key, queue in selection.queues.items():
        row = state.queue(key)
        if row is None or not int(row["flags"]) & QUEUE_SPARSE:
            continue
        left_of_queue[key] = left = KeptOffsets(queue.min_offset, queue.end_offset)
        chunk = index.runs_of(state, key)
        for at in np.flatnonzero(chunk.runs["min_phys"] >= 0).tolist():
            runs = chunk.runs[at : at + 1]
            place = chunk.objects[int(runs["object"][0])]
            check = SegmentCheck(chunk.object_keys[int(place["key"])], place, [runs], [key])
            for rows in rows_of_parts(*_opened(segments, check)):
                left.keep(rows.queue_offset[rows.queue_offset >= queue.min_offset])
    return left_of_queue


def _opened(cache: SegmentCache, check: SegmentCheck) -> tuple[SegmentIndex, Table]:
    """Open the object of ``check``. Returns its index, and the runs of ``check`` as its index has them. Raises
    SnapshotExpiredError if the object was deleted."""
    try:
        sizes = {name: int(check.place[name]) for name in ("size_bytes", "tail_bytes")}
        index = cache.open(check.key, **sizes).index
    except NotFoundError as error:
        raise SnapshotExpiredError(
            f"{check.key} no longer exists: garbage collection deleted it",
            hint="restore the newest version, into a new directory; tiered verify ARCHIVE_URL lists what is missing",
        ) from error
    return index, in_object_order(index, check.runs[0], check.queues)


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
        """``moved`` turns physical offsets of the archive into those of the restored log."""
        self._selection, self._queues, self._only_ended = selection, queues, only_ended
        self._gap_phys, self._moved = gap_phys, moved
        self._pending: dict[QueueKey, list[Table]] = {}
        """Units of each queue that are not written yet."""
        self._pending_units = 0
        self._next: dict[QueueKey, int] = {}
        """The queue offset behind the last written unit of each queue."""
        self._messages = self._gaps = 0
        """Units of messages, and of offsets without one, that were written."""

    def write(self, store: ObjectStore, order: LogOrder) -> UnitCounts:
        """Write the consume queues of all selected queues, from the rows of the objects in ``order``. Raises what
        reading and writing raise."""
        cache = SegmentCache(store, cache_bytes=TAIL_BYTES)
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="restore") as pool:
            opening = ((check, pool.submit(_opened, cache, check)) for check in order.runs())
            for check, opened in few_at_a_time(opening):
                self._add(check, *opened.result())
        self._write_pending()
        ended = 0
        for key, queue in self._selection.queues.items():
            ended += self._end(key, queue)
        return UnitCounts(self._messages, self._gaps, ended)

    def _add(self, check: SegmentCheck, index: SegmentIndex, parts: Table) -> None:
        """Add the consume-queue units of an object's selected rows to the pending ones, and write these when there are
        PENDING_UNITS. ``index``: of the object; ``parts``: the runs of ``check`` in it."""
        for part_rows in rows_of_parts(index, parts):
            rows = part_rows.where(self._selection.rows(part_rows, check.queues, index.queues))
            units, cuts = self._units(rows), np.flatnonzero(np.diff(rows.part, prepend=-1))
            for first, end in pairwise([*cuts.tolist(), len(units)]):
                self._pending.setdefault(check.queues[rows.part[first]], []).append(units[first:end])
            self._pending_units += len(units)
            if self._pending_units >= PENDING_UNITS:
                self._write_pending()

    def _units(self, rows: PartRows) -> Table:
        units = np.zeros(len(rows.row), UNIT_DTYPE)
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
        """Write contiguous ``units`` of one queue, and before them units for offsets that no message has, except in a
        BatchCQ, which needs none. Raises CorruptionError if an offset comes twice."""
        first = int(units["queue_offset"][0])
        expected = self._next.get(key, first)
        if first < expected:
            raise CorruptionError(
                f"the archive has offset {first} of {key} twice: its rows up to {expected - 1} are restored already",
                hint="tiered verify ARCHIVE_URL --full lists all damage",
            )
        if first > expected and not self._selection.queues[key].is_batch:
            self._put_gap(key, expected, first)
        if not self._only_ended:
            self._queues.put(key.topic, key.queue_id, units)
        self._next[key] = int(units["queue_offset"][-1] + units["inner_num"][-1])

    def _put_gap(self, key: QueueKey, begin: int, end: int) -> None:
        """Write units for the offsets [begin, end) of a queue, which no message has: consumers pass over them. They
        point to a place in the log before the first message; raises UsageError if there is none."""
        if self._gap_phys < 0:
            raise UsageError(
                f"{key} has no messages at offsets {begin} to {end - 1}: their consume-queue units must refer to a "
                "place in front of the log, and a log that begins at physical offset 0 has none",
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
        """Bring a queue to the end that it has in the archive, so that new messages continue its offsets. Returns 1 if
        no message of the queue is restored, else 0."""
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
    yield from pairwise([0, *cuts.tolist(), len(units)])
