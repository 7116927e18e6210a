"""Makes a store directory from an archive, in this order; an interrupted restore continues.

    records      each at its place
    seal         fillers between them, ends of files
    queues       consume queues
    config       the broker's tables, its checkpoint, and what lets the archive continue
    rename       to the store directory

All is made in a directory beside the store's. What was finished is noted there, after it was synced.

Moves the records of a log together, file by file: they get other physical offsets, and keep everything else.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.restore.records import (
    LogLayout,
    LogOrder,
    Moved,
    Needs,
    RecordWriter,
    UnitCounts,
    UnitWriter,
    compact_layout,
    messages_left,
    same_layout,
)
from rocketmq_tiered.maintenance.restore.selection import (
    Configuration,
    RestoreSelection,
    batch_topics,
    encoded,
    has_gaps,
    restored_configuration,
    select,
)
from tiered.broker_store.restored_log import Piece, RecordBatch, RestoredLog
from tiered.catalog.broker_facts import broker_table
from tiered.catalog.restored_check import RESTORED, RestoredCheck
from tiered.catalog.state import CatalogState, LogCheck
from tiered.consume_queue.file_store import FileSizes
from tiered.consume_queue.open_store import open_for_writing
from tiered.consume_queue.store import LogView, StoreKind
from tiered.errors import NotFoundError, UnavailableError, UsageError
from tiered.kernels.log_records import relocate
from tiered.kernels.record_checks import END_OF_FILE_BYTES
from tiered.model.queue import LMQ_PREFIX
from tiered.object_store.interface import ObjectStore
from tiered.private_directory import check_files, make_private
from tiered.timestamps import wall_ms
from tiered.whole_file import file_error, replace_whole, save_whole, sync_directory


class MovedRecords:
    """Where the records of ranges of one log are in the other. Ranges are added in order."""

    def __init__(self) -> None:
        self._begins, self._moves = array("q"), array("q")

    def add(self, begin_phys: int, moved_by: int) -> None:
        """Records from ``begin_phys`` on are moved by so many bytes."""
        if not self._moves or self._moves[-1] != moved_by:
            self._begins.append(begin_phys)
            self._moves.append(moved_by)

    def __call__(self, phys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The new physical offsets of records."""
        at = np.searchsorted(np.frombuffer(self._begins, np.int64), phys, side="right") - 1
        found: NDArray[np.int64] = phys + np.frombuffer(self._moves, np.int64)[at]
        return found


class _Placed(NamedTuple):
    """Records [first, end) of a batch, from ``offset`` on, counted from the begin of the log."""

    batch: RecordBatch
    first: int
    end: int
    offset: int


def packed_bytes(source: RestoredLog, file_bytes: int) -> int:
    """The length of the log that ``compact`` makes of ``source``, up to its last record."""
    end = 0
    for placed in _placed(source, file_bytes):
        end = placed.offset + int(placed.batch.sizes[placed.first : placed.end].sum(dtype=np.int64))
    return end


def compact(source: RestoredLog, target: RestoredLog, begin_phys: int) -> MovedRecords:
    """Copy all records of ``source`` to ``target``, from ``begin_phys`` on. Raises what writing raises."""
    moved = MovedRecords()
    target.has_crc = source.has_crc
    for batch, first, end, offset in _placed(source, target.file_bytes):
        starts, sizes = batch.starts[first:end], batch.sizes[first:end]
        phys = begin_phys + offset + starts - starts[0]
        relocate(batch.data.ctypes.data, starts, sizes, phys)
        target.write([Piece(batch.data, starts, sizes, phys)])
        begin = batch.phys + int(starts[0])
        moved.add(begin, int(phys[0]) - begin)
    return moved


def _placed(source: RestoredLog, file_bytes: int) -> Iterator[_Placed]:
    """Places records one behind the other in files of ``file_bytes``. One that does not fit, with END_OF_FILE_BYTES
    left for the end mark, begins the next file."""
    offset = 0
    for batch in source.batches():
        first, ends = 0, batch.starts + batch.sizes
        while first < len(ends):
            room = file_bytes - END_OF_FILE_BYTES - offset % file_bytes
            end = int(np.searchsorted(ends, batch.starts[first] + room, side="right"))
            if end == first:
                offset = (offset // file_bytes + 1) * file_bytes
                continue
            yield _Placed(batch, first, end, offset)
            offset += int(ends[end - 1] - batch.starts[first])
            first = end


NOTES = "tiered-restoring.json"
SCATTERED = "scattered"
"""The directory of a log before it is made compact."""
SYNC_INTERVAL_S = 5.0
CHECK_BYTES_MAX = 64 * 1024
CHECKPOINT_BYTES = 4096
_CHECKPOINT = struct.Struct(">qqq")


class FileBytes(NamedTuple):
    """Sizes of the broker's files: commitlog, consume queue, BatchCQ."""

    commitlog: int
    queues: FileSizes


@dataclass(frozen=True)
class RestoreRequest:
    """What becomes of ``state`` of an archive. ``queues``: None leaves consume queues to the broker. ``topics`` are
    patterns."""

    target: Path
    state: CatalogState
    sizes: FileBytes
    queues: StoreKind | None = StoreKind.FILE
    topics: tuple[str, ...] = ("*",)
    since_ms: int = 0
    is_compact: bool = False

    @property
    def building(self) -> Path:
        """Where it is made."""
        return self.target.with_name(f"{self.target.name}.restoring")


class RestoreReport(NamedTuple):
    """The result. ``layout``: where its log is."""

    layout: LogLayout
    selection: RestoreSelection
    configuration: Configuration
    units: UnitCounts
    has_crc: bool
    continues_archive: bool


Progress = Callable[[int, int], object]


class Restoring:
    """One restore. ``finish(directory)`` adds to the store before it is renamed."""

    def __init__(
        self,
        store: ObjectStore,
        request: RestoreRequest,
        *,
        progress: Progress = lambda done, total: None,
        finish: Callable[[RestoredLog], object] = lambda log: None,
    ) -> None:
        self._store, self._request = store, request
        self._progress, self._finish = progress, finish
        self._state = request.state
        self._may_batch = request.queues is not StoreKind.ROCKSDB

    def run(self) -> RestoreReport:
        """Restore the selected messages below ``building``, which becomes the target at the end: log, queues, tables.

        Raises UsageError for what cannot be represented, and what reading and writing raise.
        """
        request, state = self._request, self._state
        _refuse_full(request.target)
        if not state.cursor.phys:
            raise NotFoundError("the archive holds no messages yet")
        selection = select(state, request.topics, request.since_ms, in_files=self._may_batch)
        selection = replace(selection, left=messages_left(self._store, state, selection))
        order = LogOrder(self._store, state, selection)
        if not request.is_compact:  # what cannot be represented is refused before anything is written
            oldest = min(order.oldest_phys, max(0, state.cursor.phys - 1))
            same_layout(oldest, state.cursor.phys, request.sizes.commitlog, self._needs(order, selection))
        tables = self._tables()
        with _only_here(request.building):
            log, layout, moved = self._written_log(order, selection)
            done, total = order.total_bytes, self._total(order)
            last_ms = log.seal(
                layout.begin_phys,
                layout.end_phys,
                wall_ms(),
                lambda phys: self._progress(min(done + phys - layout.begin_phys, total), total),
            )
            units = self._write_queues(order, selection, layout, tables, moved)
            if units.gaps:
                # Only the written queues show all gaps, those of LMQs whose messages are gone among them. The log
                # then needs a record of each gap, which lies before its first message.
                needs = self._needs(order, selection)._replace(gaps=True)
                same_layout(layout.begin_phys, layout.end_phys, layout.file_bytes, needs)
                log.seal(layout.lead_phys, layout.begin_phys, last_ms)
            found = restored_configuration(
                tables,
                selection,
                wall_ms(),
                keeps_compaction=request.queues is None,
                may_batch=self._may_batch,
            )
            self._write_rest(log, layout, found, last_ms)
            self._finish(log)
            _move(request.building, request.target)
        continues = layout.end_phys == state.cursor.phys
        return RestoreReport(layout, selection, found, units, log.has_crc, continues)

    def _written_log(
        self, order: LogOrder, selection: RestoreSelection
    ) -> tuple[RestoredLog, LogLayout, Moved]:
        """The log with all records, and where they are."""
        building, file_bytes = self._request.building, self._request.sizes.commitlog
        is_compact = self._request.is_compact
        notes = _Notes(self._request)
        log = RestoredLog(building / (SCATTERED if is_compact else "commitlog"), file_bytes)
        log.has_crc = notes.has_crc
        self._write_records(order, selection, log, notes)
        needs = self._needs(order, selection)
        end_phys = self._state.cursor.phys
        if not is_compact:
            return (
                log,
                same_layout(min(log.begins(), default=None), end_phys, file_bytes, needs),
                lambda phys: phys,
            )
        # Gaps of LMQs, whose messages may be gone, show only when queues are written.
        needs = needs._replace(
            gaps=needs.gaps or any(queue.topic.startswith(LMQ_PREFIX) for queue in selection.queues)
        )
        layout = compact_layout(packed_bytes(log, file_bytes), end_phys, file_bytes, needs)
        shutil.rmtree(building / "commitlog", ignore_errors=True)  # of an interrupted restore
        target = RestoredLog(building / "commitlog", file_bytes)
        return target, layout, compact(log, target, layout.begin_phys)

    def _needs(self, order: LogOrder, selection: RestoreSelection) -> Needs:
        is_deleted = any(queue.min_offset or not queue.is_selected for queue in selection.queues.values())
        return Needs(
            bool(self._request.since_ms) or is_deleted, order.has_holes or has_gaps(self._state, selection)
        )

    def _write_records(
        self, order: LogOrder, selection: RestoreSelection, log: RestoredLog, notes: _Notes
    ) -> None:
        """Copies the records, object by object, from the first one that the notes do not have as finished. Syncs the
        log and updates the notes every SYNC_INTERVAL_S."""
        done_bytes, synced_s, total = 0, time.monotonic(), self._total(order)

        def written(objects: int, copied_bytes: int) -> None:
            """Reports the progress; notes the finished objects once the log is synced."""
            nonlocal done_bytes, synced_s
            done_bytes += copied_bytes
            self._progress(done_bytes, total)
            if time.monotonic() - synced_s > SYNC_INTERVAL_S and objects > notes.objects:
                log.sync()
                notes.update(objects, has_crc=log.has_crc)
                synced_s = time.monotonic()

        RecordWriter(self._store, selection, log).write(order, notes.objects, written)

    def _total(self, order: LogOrder) -> int:
        """Bytes of records to write, and of the log to read again."""
        return order.total_bytes + max(0, self._state.cursor.phys - order.oldest_phys)

    def _write_queues(
        self,
        order: LogOrder,
        selection: RestoreSelection,
        layout: LogLayout,
        tables: dict[str, Any],
        moved: Moved,
    ) -> UnitCounts:
        """Write the consume queues again; without a requested kind only those that have ended and get no message."""
        request = self._request
        kind = request.queues or StoreKind.FILE
        for name in ("consumequeue", "batchconsumequeue"):
            shutil.rmtree(request.building / name, ignore_errors=True)  # of an interrupted restore
        view = LogView(lambda: layout.begin_phys, lambda phys: np.zeros(len(phys), np.int64))
        batch = batch_topics(tables.get("topics", {}))
        queues = open_for_writing(
            request.building, kind, view, sizes=request.sizes.queues, batch_topics=batch
        )
        only_ended = request.queues is None
        try:
            writer = UnitWriter(selection, queues, layout.gap_phys, moved, only_ended=only_ended)
            counts = writer.write(self._store, order)
            queues.flush(layout.end_phys)
        finally:
            queues.close()
        return counts

    def _write_rest(self, log: RestoredLog, layout: LogLayout, found: Configuration, last_ms: int) -> None:
        """Writes the broker's tables, the checkpoint with ``last_ms`` as all of its times, and the mark from which
        the archive continues. Raises the TieredError for an OSError."""
        building = self._request.building
        try:
            shutil.rmtree(building / SCATTERED, ignore_errors=True)
            (building / "config").mkdir(exist_ok=True)
            for name, document in found.documents.items():
                replace_whole(building / "config" / name, encoded(document))
            times = _CHECKPOINT.pack(last_ms, last_ms, last_ms)
            replace_whole(building / "checkpoint", times.ljust(CHECKPOINT_BYTES, b"\0"))
            if check := self._check(log, layout):
                replace_whole(building / RESTORED, check.encode())
        except OSError as error:
            raise file_error(error, building) from error

    def _check(self, log: RestoredLog, layout: LogLayout) -> RestoredCheck | None:
        """The checksum of the last bytes of the log's last file, by which the archive continues; None if the log ends
        elsewhere than the archive."""
        end = layout.end_phys
        begin = max(end - CHECK_BYTES_MAX, (end - 1) // layout.file_bytes * layout.file_bytes)
        state = self._state
        own = LogCheck(begin, end, log.crc32c(begin, end))
        if end != state.cursor.phys:
            return None  # compact, and without room below the archive's end
        return RestoredCheck(state.version, state.put_id, state.cursor.check, own)

    def _tables(self) -> dict[str, Any]:
        return {name: broker_table(self._store, key, name) for name, key in self._state.state_objects.items()}


class _Notes:
    """What is finished, in a file of the directory. Raises UsageError for the notes of another restore."""

    def __init__(self, request: RestoreRequest) -> None:
        """Reads the notes of an interrupted restore, or begins them in an empty directory. Raises UsageError for a
        directory with anything else, or of another restore."""
        self._path = request.building / NOTES
        state = request.state
        self._restore = [
            state.cluster,
            state.broker,
            state.version,
            state.put_id,
            request.sizes.commitlog,
            list(request.topics),
            request.since_ms,
            request.is_compact,
        ]
        self.objects, self.has_crc = 0, False
        if not self._path.exists():
            if any(self._path.parent.iterdir()):
                raise UsageError(
                    f"{self._path.parent} was not made by tiered restore",
                    hint="move it away: the restore uses this directory",
                )
            self.update(0, has_crc=False)
            return
        found = json.loads(self._path.read_bytes())
        if found["restore"] != self._restore:
            raise UsageError(
                f"{request.building} belongs to another restore",
                hint="remove it, or give the same archive, version, topics and time to continue",
            )
        self.objects, self.has_crc = found["objects"], found["has_crc"]

    def update(self, objects: int, *, has_crc: bool) -> None:
        """``objects`` are written and durable."""
        self.objects, self.has_crc = objects, has_crc
        document = {"restore": self._restore, "objects": objects, "has_crc": has_crc}
        save_whole(self._path, json.dumps(document).encode())


def noted_version(building: Path) -> int | None:
    """The archive's version of an interrupted restore in ``building``; None without one."""
    try:
        return int(json.loads((building / NOTES).read_bytes())["restore"][2])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (LookupError, TypeError, ValueError, OSError) as error:
        raise UsageError(f"{building / NOTES} is not readable: {error}", hint=f"remove {building}") from error


def _refuse_full(target: Path) -> None:
    try:
        if target.exists() and any(target.iterdir()):
            raise UsageError(f"{target} is not empty", hint="name a new directory, or remove what is in it")
    except OSError as error:
        raise UsageError(f"{target} cannot be a store directory: {error.strerror}") from error


@contextmanager
def _only_here(building: Path) -> Iterator[None]:
    """No other process restores into ``building``, and no other user has prepared it. Raises AccessDeniedError and
    UnavailableError."""
    try:
        make_private(building, "another STORE")
        check_files(building, "another STORE")
        lock = os.open(building, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise file_error(error, building) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UnavailableError(f"another process restores into {building}") from error
    finally:
        os.close(lock)


def _move(building: Path, target: Path) -> None:
    """Renames the finished directory to ``target``, durably, and removes the notes. Raises the TieredError for an
    OSError."""
    try:
        sync_directory(building)
        building.rename(target)
        sync_directory(target.parent)
        (target / NOTES).unlink()
    except OSError as error:
        raise file_error(error, target) from error
