"""Verifies one segment against the catalog and, on request, all of its bytes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

import fastcrc
import numpy as np
from numpy.typing import NDArray

from tiered.archive.object_spans import ObjectSpans
from tiered.archive.segment_reader import RANGE_BYTES_MAX
from tiered.catalog.repeated_offsets import repeated_offsets
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError
from tiered.formats.run_part import CatalogRun, cut_run
from tiered.formats.segment import RowTable
from tiered.formats.segment_index import BlockSpan, SegmentIndex
from tiered.formats.segment_layout import HEADER_BYTES, check_header
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.record_checks import RESERVED_CRC_BYTES
from tiered.kernels.record_columns import InvalidReason, RecordColumns
from tiered.kernels.rescan import own_phys, rescan
from tiered.model.queue import LMQ_PREFIX, SCHEDULE_TOPIC, QueueKey
from tiered.model.tables import RUN_DTYPE, RunKind, Table, picked
from tiered.object_store.interface import ObjectStore


class AnomalyKind(StrEnum):
    """Kinds of anomalies."""

    CHAIN = "chain"
    """A commit is missing, damaged, or does not follow the one before."""
    NEWEST = "newest"
    """An object that no commit names has messages beyond the archive's end: the newest commit may be missing."""
    ROOT = "root"
    """A root page is damaged, or differs from the commits."""
    PAGE = "page"
    """A page of older runs is missing or damaged."""
    HOLE = "hole"
    """Offsets that are in no run and in no recorded gap."""
    OVERLAP = "overlap"
    """Offsets that are in two runs or gaps."""
    MISSING = "missing"
    """The catalog names an object that does not exist."""
    DAMAGED = "damaged"
    """Bytes fail a check of length, checksum or structure."""
    CONTRADICTION = "contradiction"
    """Object and catalog are both undamaged, but differ."""
    RECORD = "record"
    """A stored record differs from its row."""
    LMQ = "lmq"
    """An LMQ row refers to a parent row that neither exists nor expired."""
    DELETIONS = "deletions"
    """A list of pending deletions is damaged."""
    PENDING_DELETION = "pending-deletion"
    """A pending deletion names an object that is still referenced."""


@dataclass(frozen=True)
class Anomaly:
    """``range`` are bytes of the object ``key``, or offsets of the queue ``key``; None: all of it."""

    kind: AnomalyKind
    key: str
    range: tuple[int, int] | None
    detail: str

    def __str__(self) -> str:
        where = "" if self.range is None else f" [{self.range[0]}, {self.range[1]})"
        return f"{self.kind}: {self.key}{where}: {self.detail}"


@dataclass(frozen=True)
class SegmentCheck:
    """The catalog's expectation of one object: its OBJECT_DTYPE row, its runs in pieces, the queue of each run."""

    key: str
    place: np.void
    runs: list[Table]
    queues: list[QueueKey]


@dataclass
class SegmentResult:
    """Anomalies and counts of one object. ``unchecked``: why it could not be read now."""

    anomalies: list[Anomaly] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    unchecked: str = ""

    def add(self, kind: AnomalyKind, key: str, detail: str, where: tuple[int, int] | None = None) -> None:
        """Record an anomaly."""
        self.anomalies.append(Anomaly(kind, key, where, detail))


def check_segment(
    store: ObjectStore, state: CatalogState, check: SegmentCheck, *, full: bool
) -> SegmentResult:
    """All anomalies of one object. Raises the store's errors, except for the object itself."""
    result = SegmentResult()
    key = check.key
    size_bytes, tail_bytes = int(check.place["size_bytes"]), int(check.place["tail_bytes"])
    try:
        tail = store.get_range(key, size_bytes - tail_bytes, tail_bytes)
        if fastcrc.crc32.iscsi(tail) != int(check.place["tail_crc32c"]):
            where = (size_bytes - tail_bytes, size_bytes)
            result.add(AnomalyKind.DAMAGED, key, "the tail fails the CRC32C in the catalog", where)
        index = SegmentIndex(key, size_bytes, tail)
    except NotFoundError as error:
        result.add(AnomalyKind.MISSING, key, f"is in the catalog, but does not exist: {error.message}")
        return result
    except CorruptionError as error:
        result.add(AnomalyKind.DAMAGED, key, error.message)
        return result
    columns = _columns(index, result)
    _compare(index, check, columns, result)
    for run in np.concatenate(check.runs):
        if int(run["ordinal"]) in columns and int(index.runs["kind"][run["ordinal"]]) == RunKind.LMQ:
            _check_lmq(state, index, run, columns[int(run["ordinal"])], result)
    spans = index.runs["end_queue_offset"] - index.runs["base_queue_offset"]
    is_batch = index.runs["kind"] == RunKind.BATCH
    result.counts["messages"] = int(np.where(is_batch, spans, index.runs["rows"]).sum())
    if full:
        _FullCheck(store, index, result, repeated_offsets(state)).run(columns)
    return result


def _compare(
    index: SegmentIndex, check: SegmentCheck, columns: dict[int, RowTable], result: SegmentResult
) -> None:
    """Catalog and footer must agree on every run of the catalog, which may be a part of one; expired runs may be in the
    footer alone."""
    place, meta = check.place, index.meta
    for name, wanted, found in (
        ("epoch", int(place["epoch"]), meta.epoch),
        ("rows", int(place["rows"]), int(index.first_row[-1])),
        ("raw bytes", int(place["raw_bytes"]), int(index.runs["byte_count"].sum())),
    ):
        if wanted != found:
            result.add(
                AnomalyKind.CONTRADICTION,
                index.key,
                f"{name}: {wanted} in the catalog, {found} in the object",
            )
    runs = np.concatenate(check.runs)
    names = [name for name in runs.dtype.names or () if name not in ("queue", "object", "version", "ordinal")]
    for run, queue in zip(runs, check.queues, strict=True):
        ordinal = int(run["ordinal"])
        if ordinal >= len(index):
            differs = ["ordinal"]
        else:
            whole = _part_of(index, run, columns)
            differs = [name for name in names if run[name] != whole[name]]
            if index.queue_of(ordinal) != queue:
                differs.append("queue")
        if differs:
            detail = f"run {ordinal} of {queue} at offset {run['base_queue_offset']} differs in {', '.join(differs)}"
            result.add(AnomalyKind.CONTRADICTION, index.key, detail)


def _part_of(index: SegmentIndex, run: np.void, columns: dict[int, RowTable]) -> np.void:
    """The run that the catalog should name: the object's, or the same part of it."""
    ordinal = int(run["ordinal"])
    whole: np.void = picked(index.runs, np.array([ordinal]))[list(RUN_DTYPE.names or ())].astype(RUN_DTYPE)[0]
    part = CatalogRun.of(run)
    if int(whole["kind"]) == RunKind.SPARSE and ordinal in columns and index.has_rows_of(part):
        return _sparse_part(whole, part, columns[ordinal])
    if part.rows == int(whole["rows"]) or ordinal not in columns or not index.has_rows_of(part):
        return whole
    return cut_run(whole, columns[ordinal], part.first_row, part.first_row + part.rows)


def _sparse_part(whole: np.void, part: CatalogRun, rows: RowTable) -> np.void:
    """The part of a sparse run, with the catalog's offsets if all of its rows are inside."""
    found = cut_run(whole, rows, part.first_row, part.first_row + part.rows)
    offsets = rows.queue_offset[part.first_row : part.first_row + part.rows]
    if part.base <= offsets[0] and offsets[-1] < part.end:
        found["base_queue_offset"], found["end_queue_offset"] = part.base, part.end
    return found


def _columns(index: SegmentIndex, result: SegmentResult) -> dict[int, RowTable]:
    columns: dict[int, RowTable] = {}
    failed: set[str] = set()
    for run in range(len(index)):
        try:
            columns[run] = index.row_columns(run)
        except CorruptionError as error:
            if error.message not in failed:  # a page holds many runs
                result.add(AnomalyKind.DAMAGED, index.key, error.message)
                failed.add(error.message)
    return columns


def _check_lmq(
    state: CatalogState, index: SegmentIndex, run: np.void, rows: RowTable, result: SegmentResult
) -> None:
    """Parents of the catalog's ``run`` must be archived, or have expired, or be in a recorded gap."""
    first = int(run["first_row"])
    parents, parent_offsets = (
        column[first : first + int(run["rows"])] for column in (rows.parent, rows.parent_queue_offset)
    )
    for parent in np.unique(parents).tolist():
        queue = index.queues[parent]
        row = state.queue(queue)
        offsets = parent_offsets[parents == parent]
        if row is None:
            continue  # expired with its whole queue
        beyond = offsets[offsets >= int(row["end_queue_offset"])]
        if len(beyond):
            lmq = index.queue_of(int(run["ordinal"]))
            detail = f"{lmq} refers to {queue} at offset {int(beyond[0])}, beyond its end"
            result.add(AnomalyKind.LMQ, index.key, detail)


class _FullCheck:
    """Reads an object once."""

    def __init__(
        self, store: ObjectStore, index: SegmentIndex, result: SegmentResult, repeated: Collection[QueueKey]
    ) -> None:
        self._store = store
        self._index = index
        self._result = result
        self._repeated = repeated
        self._spans = ObjectSpans(store, index)
        self._damaged = (-1, -1)

    def run(self, columns: dict[int, RowTable]) -> None:
        """Header, blocks, records, keys."""
        index, result = self._index, self._result
        try:
            check_header(self._spans.read(0, HEADER_BYTES), index.version, source=index.key)
        except CorruptionError as error:
            result.add(AnomalyKind.DAMAGED, index.key, error.message)
        hashes = self._keys()
        for run, rows in columns.items():
            if int(index.runs["kind"][run]) != RunKind.LMQ:
                whole = index.block_span(run, 0, len(rows))
                for span in index.split_span(run, whole, RANGE_BYTES_MAX):
                    self._check_span(run, span, rows, hashes)
        result.counts["blocks"] = len(index.blocks)
        result.counts["bytes"] = index.size_bytes

    def _keys(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]] | None:
        """First hash of every row (one entry more than rows), and the hashes."""
        index = self._index
        offset, length = index.key_span
        try:
            section = index.decode_keys(self._store.get_range(index.key, offset, length) if length else b"")
        except CorruptionError as error:
            self._result.add(AnomalyKind.DAMAGED, index.key, error.message, (offset, offset + length))
            return None
        return np.concatenate([[0], np.cumsum(section.counts, dtype=np.int64)]), section.hashes

    def _records(self, span: BlockSpan) -> NDArray[np.uint8] | None:
        """Raw bytes of ``span``; None for damage, which is reported once."""
        blocks = (span.first_block, span.end_block)
        if self._damaged == blocks:
            return None
        try:
            return self._spans.blocks(span)
        except CorruptionError as error:
            where = (span.offset, span.offset + span.length)
            self._result.add(AnomalyKind.DAMAGED, self._index.key, error.message, where)
            self._damaged = blocks
            return None

    def _check_span(
        self,
        run: int,
        span: BlockSpan,
        rows: RowTable,
        keys: tuple[NDArray[np.int64], NDArray[np.uint64]] | None,
    ) -> None:
        index = self._index
        data = self._records(span)
        if data is None:
            return
        part = slice(span.first_row, span.end_row)
        starts = rows.position[part] - span.raw_offset
        phys = rows.phys[part]
        if len(phys) and phys[0] < 0:
            phys = own_phys(data, starts)
        table, found, valid, reason = rescanned(data, starts, rows.size[part], phys)
        queue = index.queue_of(run)
        if reason:
            self._report(queue, rows, span.first_row + valid, f"fails {reason}", span)
            return
        own = table.ordinal(queue.topic, queue.queue_id)
        # A record of another queue may be in this one too, as an LMQ entry that only some brokers make (DOUBT_PLAIN).
        is_own, is_named = found.queue[:valid] == own, np.zeros(valid, bool)
        is_named[found.lmq_row[: found.lmq_rows][found.lmq_queue[: found.lmq_rows] == own]] = True
        for name, wanted in (self._expected(queue, rows, part) | {"phys": phys}).items():
            differs = getattr(found, name)[:valid] != wanted
            if name in ("queue_offset", "inner_num"):
                differs &= is_own | ~is_named
            if differs.any():
                row = span.first_row + int(np.flatnonzero(differs)[0])
                self._report(queue, rows, row, f"differs in {name}", span)
        if not queue.topic.startswith(LMQ_PREFIX):
            strangers = np.flatnonzero(~is_own & ~is_named)
            if len(strangers):
                other = int(found.queue[strangers[0]])
                what = f"belongs to {table.topic(other)}/{table.queue_id[other]}"
                self._report(queue, rows, span.first_row + int(strangers[0]), what, span)
        if keys is not None:
            first, hashes = keys
            base = int(index.first_row[run])
            low, high = int(first[base + span.first_row]), int(first[base + span.end_row])
            of_records = found.key_hashes[: found.keys]
            if not is_own.all():  # a record of another queue has its keys there
                counts = np.diff(first[base + span.first_row : base + span.end_row + 1])
                of_records = of_records[np.repeat(counts > 0, found.key_count[:valid])]
            if not np.array_equal(of_records, hashes[low:high]):
                what = "or a later one of its block has other keys than the object lists"
                self._report(queue, rows, span.first_row, what, span)

    def _expected(self, queue: QueueKey, rows: RowTable, part: slice) -> dict[str, NDArray[np.generic]]:
        """Columns that a record determines. Not so: the deliver time of scheduled messages, the offset of an LMQ whose
        parent is not archived, and where the broker used an offset twice."""
        expected: dict[str, NDArray[np.generic]] = {
            "size": rows.size[part],
            "store_timestamp": rows.store_timestamp[part],
        }
        if not queue.topic.startswith(LMQ_PREFIX):
            expected["inner_num"] = rows.inner_num[part]
            if queue not in self._repeated:
                expected["queue_offset"] = rows.queue_offset[part]
        if queue.topic != SCHEDULE_TOPIC:
            expected["tags_code"] = rows.tags_code[part]
        return expected

    def _report(self, queue: QueueKey, rows: RowTable, row: int, what: str, span: BlockSpan) -> None:
        detail = f"the record of {queue} at offset {int(rows.queue_offset[row])} {what}"
        where = (span.offset, span.offset + span.length)
        self._result.add(AnomalyKind.RECORD, self._index.key, detail, where)


def rescanned(
    data: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int32], phys: NDArray[np.int64]
) -> tuple[QueueTable, RecordColumns, int, str]:
    """Columns of the records, how many are valid, and the check that the next fails.

    A record's own checksum may be of an earlier generation of the message (broker_store.damage.accepted_size). The
    block's checksum was verified, so a record with a wrong one is scanned as if it had none.
    """
    own_copy = False
    while True:
        table, found = QueueTable(), RecordColumns(rows=len(starts) or 1)
        valid, reason = rescan(data, starts, sizes, phys, table, found)
        if reason != InvalidReason.RECORD_CRC.name:
            return table, found, valid, reason
        if not own_copy:
            data, own_copy = data.copy(), True
        data[int(starts[valid]) + int(sizes[valid]) - RESERVED_CRC_BYTES] = 0
