"""Reads one queue of an archive by queue offset (CompositeFlatFile).

A reader answers from one catalog version: minimum, maximum and data of a reply agree. Gaps are explicit, LMQ rows are
resolved through their parent queue, and an object that is not found is looked up in the newest catalog once before it
counts as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered.archive.segment_reader import Records, SegmentCache, SegmentReader
from tiered.catalog.catalog_reader import refresh
from tiered.catalog.pages import RunIndex
from tiered.catalog.queue_gaps import QueueGaps
from tiered.catalog.state import CatalogState, RunChunk
from tiered.errors import CorruptionError, NotFoundError
from tiered.formats.run_part import CatalogRun
from tiered.formats.segment import RowTable, row_at
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind
from tiered.object_store.interface import ObjectStore

T = TypeVar("T")
_NO_BYTES = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class Batch:
    """Consecutive rows: record i is ``data[starts[i] : starts[i] + sizes[i]]``, as the broker stored it.

    ``gap``: offsets [begin, end) skipped before the first row because no record has them, or None.
    ``next_offset``: where the next read starts.
    """

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int32]
    queue_offsets: NDArray[np.int64]
    inner_num: NDArray[np.int32]
    phys: NDArray[np.int64]
    tags_code: NDArray[np.int64]
    store_timestamp: NDArray[np.int64]
    next_offset: int
    gap: tuple[int, int] | None

    def __len__(self) -> int:
        return len(self.starts)


class _Part(NamedTuple):
    """Rows of one run with their records. ``is_cut``: a limit or an expired parent ended them before the run's end.

    Without rows: nothing fitted, or the parents of the rows up to ``next_offset`` expired.
    """

    rows: RowTable
    records: Records
    next_offset: int
    is_cut: bool


class QueueReader:
    """Reads one queue at the version of ``state``. Readers of one archive share ``segments`` and ``run_index``.

    Not thread-safe. Raises NotFoundError for a queue that is not in the catalog.
    """

    def __init__(
        self,
        store: ObjectStore,
        state: CatalogState,
        queue: QueueKey,
        *,
        segments: SegmentCache | None = None,
        run_index: RunIndex | None = None,
    ) -> None:
        self.queue = queue
        self._store = store
        self._segments = segments or SegmentCache(store)
        self._run_index = run_index or RunIndex(store)
        self._adopt(state)

    def _adopt(self, state: CatalogState) -> None:
        row = state.queue(self.queue)
        if row is None:
            raise NotFoundError(f"queue {self.queue} is not in version {state.version} of the catalog")
        self.state = state
        self.min_offset = int(row["min_queue_offset"])
        self.max_offset = int(row["end_queue_offset"])
        self._gaps = QueueGaps(state.gaps_of(self.queue))
        self._chunk: RunChunk | None = None
        self._parents: dict[QueueKey, QueueReader | None] = {}

    def __repr__(self) -> str:
        return f"QueueReader({self.queue}, [{self.min_offset}, {self.max_offset}) at {self.state.version})"

    def read(self, from_offset: int, *, max_rows: int, max_bytes: int) -> Batch:
        """Rows from the one that spans ``from_offset`` on: at most ``max_rows`` and ``max_bytes``, but always one.
        Ends before a gap; empty at and beyond ``max_offset``.

        Raises CorruptionError (bytes that fail a check, an offset neither stored nor a recorded gap, an object that the
        newest catalog names but the store does not have) or the store's errors.
        """
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}")
        return self._retried(lambda: self._read(from_offset, max_rows, max_bytes))

    def _retried(self, attempt: Callable[[], T]) -> T:
        try:
            return attempt()
        except NotFoundError:
            self._adopt(refresh(self._store, self.state))
        try:
            return attempt()
        except NotFoundError as error:
            raise CorruptionError(
                f"{self.queue}: an object of catalog version {self.state.version} is missing: {error.message}"
            ) from error

    # -- choosing rows ----------------------------------------------------------------------------------------

    def _read(self, from_offset: int, max_rows: int, max_bytes: int) -> Batch:
        offset = begin = self._existing(from_offset)
        parts: list[_Part] = []
        rows_left, bytes_left = max_rows, max_bytes
        while offset < self.max_offset and rows_left > 0 and self._existing(offset) == offset:
            part = self._read_run(offset, rows_left, bytes_left, is_first=not parts)
            if len(part.rows) == 0:
                if parts or part.next_offset == offset:
                    break
                offset = begin = self._existing(part.next_offset)
                continue
            parts.append(part)
            rows_left -= len(part.rows)
            bytes_left -= int(part.records.sizes.sum(dtype=np.int64))
            offset = part.next_offset
            if part.is_cut:
                break
        return _joined(parts, offset, (from_offset, begin) if begin > from_offset else None)

    def _existing(self, offset: int) -> int:
        """The first offset from ``offset`` on that is not in a recorded gap and not below the minimum."""
        return self._gaps.after(max(offset, min(self.min_offset, self.max_offset)))

    def _read_run(self, offset: int, rows_max: int, bytes_max: int, *, is_first: bool) -> _Part:
        reader, run = self._run_at(offset)
        rows = reader.row_columns(run)
        first = row_at(rows, offset)
        if first == len(rows):  # a hole at the end of a sparse run
            return _Part(
                _sliced(rows, 0, 0), Records(_NO_BYTES, rows.position[:0], rows.size[:0]), run.end, True
            )
        count = _rows_that_fit(rows.size[first:], rows_max, bytes_max)
        if count == 0 and is_first:
            count = 1
        end = first + count
        if count == 0:
            return _Part(
                _sliced(rows, 0, 0), Records(_NO_BYTES, rows.position[:0], rows.size[:0]), offset, True
            )
        if int(reader.index.runs["kind"][run.ordinal]) == RunKind.LMQ:
            return self._read_lmq(reader.queues, _sliced(rows, first, end), end < len(rows))
        records = reader.read_blocks(run, first, end)
        return _Part(_sliced(rows, first, end), records, _end_offset(rows, end), end < len(rows))

    def _run_at(self, offset: int) -> tuple[SegmentReader, CatalogRun]:
        """The open segment, and the run in it, that holds ``offset``, checked against the catalog."""
        if self._chunk is None:
            self._chunk = self._run_index.runs_of(self.state, self.queue)
        runs = self._chunk.runs
        at = int(np.searchsorted(runs["base_queue_offset"], offset, side="right")) - 1
        if at < 0 or int(runs["end_queue_offset"][at]) <= offset:
            raise CorruptionError(f"{self.queue}: offset {offset} is in no segment and in no recorded gap")
        run = runs[at]
        place = self._chunk.objects[int(run["object"])]
        key = self._chunk.object_keys[int(place["key"])]
        reader = self._segments.open(
            key, size_bytes=int(place["size_bytes"]), tail_bytes=int(place["tail_bytes"])
        )
        return reader, reader.index.check_run(run, self.queue)

    # -- LMQs -------------------------------------------------------------------------------------------------

    def _read_lmq(self, queues: list[QueueKey], rows: RowTable, is_cut: bool) -> _Part:
        """Rows of an LMQ with their parents' records, up to the first row whose parent expired."""
        lost = self._lost(queues, rows)
        if lost[0]:
            kept = int(np.argmin(lost)) if not lost.all() else len(lost)
            nothing = Records(_NO_BYTES, rows.position[:0], rows.size[:0])
            return _Part(_sliced(rows, 0, 0), nothing, _end_offset(rows, kept), True)
        if lost.any():
            rows, is_cut = _sliced(rows, 0, int(np.argmax(lost))), True
        parts: list[NDArray[np.uint8]] = []
        starts = np.empty(len(rows), np.int64)
        done = 0
        for parent in np.unique(rows.parent).tolist():
            mine = np.flatnonzero(rows.parent == parent)
            reader = self._parent(queues[parent])
            assert reader is not None
            offsets, inverse = np.unique(rows.parent_queue_offset[mine], return_inverse=True)
            records, phys = reader._records_at(offsets)
            if bool(
                (records.sizes[inverse] != rows.size[mine]).any() or (phys[inverse] != rows.phys[mine]).any()
            ):
                raise CorruptionError(
                    f"{self.queue}: rows do not agree with those of their parent {reader.queue}"
                )
            starts[mine] = records.starts[inverse] + done
            parts.append(records.data)
            done += len(records.data)
        records = Records(np.concatenate(parts), starts, rows.size)
        return _Part(rows, records, _end_offset(rows, len(rows)), is_cut)

    def _lost(self, queues: list[QueueKey], rows: RowTable) -> NDArray[np.bool_]:
        """Which rows refer to parents that expired or were never archived."""
        lost = np.zeros(len(rows), bool)
        for parent in np.unique(rows.parent).tolist():
            mine = rows.parent == parent
            reader = self._parent(queues[parent])
            offsets = rows.parent_queue_offset
            if reader is None:
                lost |= mine
                continue
            lost |= mine & ((offsets < reader.min_offset) | reader._gaps.hold(offsets))
        return lost

    def _parent(self, queue: QueueKey) -> QueueReader | None:
        if queue not in self._parents:
            known = self.state.queue(queue) is not None
            self._parents[queue] = (
                QueueReader(
                    self._store, self.state, queue, segments=self._segments, run_index=self._run_index
                )
                if known
                else None
            )
        return self._parents[queue]

    def _records_at(self, offsets: NDArray[np.int64]) -> tuple[Records, NDArray[np.int64]]:
        """Records and physical offsets of rows at ``offsets``, ascending, all of which exist."""
        parts: list[Records] = []
        phys: list[NDArray[np.int64]] = []
        at = done = 0
        while at < len(offsets):
            reader, run = self._run_at(int(offsets[at]))
            end = at + int(np.searchsorted(offsets[at:], run.end))
            rows = reader.row_columns(run)
            index = np.searchsorted(rows.queue_offset, offsets[at:end], side="right") - 1
            read = reader.read_blocks(run, int(index[0]), int(index[-1]) + 1)
            wanted = index - index[0]
            records = Records(read.data, read.starts[wanted], read.sizes[wanted])
            parts.append(records._replace(starts=records.starts + done))
            phys.append(rows.phys[index])
            done += len(records.data)
            at = end
        return _concatenated(parts), np.concatenate(phys)


def _sliced(rows: RowTable, first: int, end: int) -> RowTable:
    return RowTable(
        *(getattr(rows, name)[first:end] for name in RowTable.__dataclass_fields__ if name != "key_hashes")
    )


def _end_offset(rows: RowTable, end: int) -> int:
    """The queue offset after row ``end - 1``."""
    return int(rows.queue_offset[end - 1]) + int(rows.inner_num[end - 1])


def _concatenated(parts: list[Records]) -> Records:
    if len(parts) == 1:
        return parts[0]
    return Records(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _joined(parts: list[_Part], next_offset: int, gap: tuple[int, int] | None) -> Batch:
    shifted = []
    done = 0
    for part in parts:
        shifted.append(part.records._replace(starts=part.records.starts + done))
        done += len(part.records.data)
    empty = Records(_NO_BYTES, np.zeros(0, np.int64), np.zeros(0, np.int32))
    records = _concatenated(shifted) if shifted else empty

    def column(name: str, kind: type) -> NDArray[Any]:
        return np.concatenate([np.zeros(0, kind), *(getattr(part.rows, name) for part in parts)])

    return Batch(
        data=records.data,
        starts=records.starts,
        sizes=records.sizes,
        queue_offsets=column("queue_offset", np.int64),
        inner_num=column("inner_num", np.int32),
        phys=column("phys", np.int64),
        tags_code=column("tags_code", np.int64),
        store_timestamp=column("store_timestamp", np.int64),
        next_offset=next_offset,
        gap=gap,
    )


def _rows_that_fit(sizes: NDArray[Any], rows_max: int, bytes_max: int) -> int:
    """How many leading rows have at most ``bytes_max`` bytes together; may be 0."""
    ends = np.cumsum(sizes[: max(rows_max, 0)], dtype=np.int64)
    return int(np.searchsorted(ends, bytes_max, side="right"))


def records_of(
    reader: QueueReader, begin: int | None = None, *, max_rows: int = 1000
) -> Iterator[tuple[int, int, bytes]]:
    """(queue offset, physical offset, record) of a whole queue, or from ``begin`` on, in order."""
    offset = reader.min_offset if begin is None else begin
    while offset < reader.max_offset:
        batch = reader.read(offset, max_rows=max_rows, max_bytes=1 << 20)
        for at, phys, start, size in zip(
            batch.queue_offsets.tolist(), batch.phys.tolist(), batch.starts, batch.sizes, strict=True
        ):
            yield at, phys, batch.data[start : start + size].tobytes()
        assert batch.next_offset > offset
        offset = batch.next_offset
