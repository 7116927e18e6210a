"""Verifies one segment against the catalog and, on request, all of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import fastcrc
import numpy as np
from numpy.typing import NDArray

from tiered.archive.segment_reader import SegmentReader
from tiered.catalog.repeated_offsets import repeated_offsets
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, EncryptionKeyError, NotFoundError, TieredError
from tiered.formats.part_rows import PartRows, ends_by_blocks, in_object_order, rows_of_parts
from tiered.formats.run_part import CatalogRun, cut_run
from tiered.formats.segment_index import KeySection, SegmentIndex
from tiered.formats.segment_layout import HEADER_BYTES, TRAILER_BYTES, check_header
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.record_checks import RESERVED_CRC_BYTES
from tiered.kernels.record_columns import InvalidReason, RecordColumns
from tiered.kernels.rescan import own_phys, rescan
from tiered.model.queue import LMQ_PREFIX, SCHEDULE_TOPIC, QueueKey
from tiered.model.queue_roster import united
from tiered.model.tables import RUN_DTYPE, RunKind, Table, begins, concatenated, picked, positions
from tiered.object_store.interface import ObjectStore

WINDOW_RAW_BYTES = 4 << 20
"""Raw bytes of the blocks whose records are checked at once."""


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

    @property
    def text(self) -> str:
        """What is wrong, with its place, in one line."""
        where = "" if self.range is None else f" [{self.range[0]}, {self.range[1]})"
        return f"{self.key}{where}: {self.detail}"

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class SegmentCheck:
    """The catalog's expectation of one object: ``place``, its row (OBJECT_DTYPE); its runs, in several tables; and the
    queue of each run."""

    key: str
    place: np.void
    runs: list[Table]
    queues: Sequence[QueueKey]


@dataclass
class SegmentResult:
    """Anomalies and counts of one object. ``unchecked``: why it could not be read now; ``lacks``: which key it
    needs, so that only its checksums were checked."""

    anomalies: list[Anomaly] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    unchecked: str = ""
    lacks: str = ""

    def add(self, kind: AnomalyKind, key: str, detail: str, where: tuple[int, int] | None = None) -> None:
        """Record an anomaly."""
        self.anomalies.append(Anomaly(kind, key, where, detail))


def check_segment(
    store: ObjectStore, state: CatalogState, check: SegmentCheck, *, full: bool
) -> SegmentResult:
    """Compare one data object with what the catalog expects of it: its end, its runs and their rows; with ``full`` all
    of its bytes. Returns its anomalies and counts. Raises the store's errors, except for a damaged or missing
    object."""
    result = SegmentResult()
    key = check.key
    size_bytes, tail_bytes = int(check.place["size_bytes"]), int(check.place["tail_bytes"])
    try:
        tail = store.get_range(key, size_bytes - tail_bytes, tail_bytes)
        if fastcrc.crc32.iscsi(tail) != int(check.place["tail_crc32c"]):
            where = (size_bytes - tail_bytes, size_bytes)
            result.add(
                AnomalyKind.DAMAGED, key, "the end of the object fails the checksum in the catalog", where
            )
        index = SegmentIndex(key, size_bytes, tail)
    except NotFoundError as error:
        result.add(
            AnomalyKind.MISSING, key, f"the catalog names this object, but it does not exist: {error.message}"
        )
        return result
    except CorruptionError as error:
        result.add(AnomalyKind.DAMAGED, key, error.message)
        return result
    except EncryptionKeyError as error:
        try:
            error.check()
        except CorruptionError as damage:
            result.add(AnomalyKind.DAMAGED, key, damage.message)
        result.counts["without_key"], result.lacks = 1, error.lacks
        return result
    is_readable = np.ones(len(index), bool)

    def failed(run: np.void, error: CorruptionError) -> None:
        """Note that the rows of ``run`` cannot be read."""
        is_readable[run["ordinal"]] = False
        if all(error.message != known.detail for known in result.anomalies):  # a page holds many runs
            result.add(AnomalyKind.DAMAGED, key, error.message)

    _read_through(index, index.whole_runs, lambda runs, rows: None, failed)
    _compare(index, check, is_readable, result)
    _check_lmqs(state, index, check, is_readable, result)
    spans = index.runs["end_queue_offset"] - index.runs["base_queue_offset"]
    is_batch = index.runs["kind"] == RunKind.BATCH
    result.counts["messages"] = int(np.where(is_batch, spans, index.runs["rows"]).sum())
    if full:
        is_stored = index.runs["kind"] != RunKind.LMQ
        _FullCheck(store, index, result, repeated_offsets(state)).run(
            picked(index.whole_runs, is_readable & is_stored)
        )
    return result


def _read_through(
    index: SegmentIndex,
    runs: Table,
    seen: Callable[[Table, PartRows], None],
    failed: Callable[[np.void, CorruptionError], None],
) -> None:
    """Read the rows of ``runs``: call ``seen`` with runs and their rows, and ``failed`` with each run whose rows cannot
    be decoded. All are read together; if that fails, each half again, until the damaged ones are found, so ``seen`` may
    get rows more than once."""
    try:
        ordered = in_object_order(index, runs)
        for rows in rows_of_parts(index, ordered):
            seen(ordered, rows)
    except CorruptionError as error:
        if len(runs) == 1:
            failed(runs[0], error)
            return
        for half in (runs[: len(runs) // 2], runs[len(runs) // 2 :]):
            _read_through(index, half, seen, failed)


def _compare(
    index: SegmentIndex, check: SegmentCheck, is_readable: NDArray[np.bool_], result: SegmentResult
) -> None:
    """Compare the object and the runs that the catalog has of it with the object's footer, and add what differs to
    ``result``. A run of the catalog may be a part of one in the footer; expired runs are in the footer alone.
    ``is_readable``: for each run of the footer, whether its rows can be read."""
    place, meta = check.place, index.meta
    for name, expected, stored in (
        ("epoch", int(place["epoch"]), meta.epoch),
        ("number of rows", int(place["rows"]), int(index.first_row[-1])),
        ("number of message bytes", int(place["raw_bytes"]), int(index.runs["byte_count"].sum())),
    ):
        if expected != stored:
            result.add(
                AnomalyKind.CONTRADICTION,
                index.key,
                f"the {name} is {expected} in the catalog, but {stored} in the object",
            )
    runs = concatenated(check.runs, RUN_DTYPE)
    names = [name for name in runs.dtype.names or () if name not in ("queue", "object", "version", "ordinal")]
    is_there = runs["ordinal"] < len(index)
    in_footer = picked(index.runs, np.where(is_there, runs["ordinal"], 0))
    _, (footer_queue, catalog_queue) = united([index.queues, check.queues])
    differing = ~is_there | (footer_queue[in_footer["queue"]] != catalog_queue)
    for name in names:
        differing |= runs[name] != in_footer[name]
    for at in np.flatnonzero(differing).tolist():  # a run that is a part of the footer's differs as well
        run, queue, ordinal = runs[at], check.queues[at], int(runs["ordinal"][at])
        if not is_there[at]:
            differs = ["ordinal"]
        else:
            whole = _part_of(index, run, bool(is_readable[ordinal]))
            differs = [name for name in names if run[name] != whole[name]]
            if index.queue_of(ordinal) != queue:
                differs.append("queue")
        if differs:
            detail = f"run {ordinal} of {queue} at offset {run['base_queue_offset']} differs in {', '.join(differs)}"
            result.add(AnomalyKind.CONTRADICTION, index.key, detail)


def _part_of(index: SegmentIndex, run: np.void, is_readable: bool) -> np.void:
    """What the catalog should have in place of ``run``, by the footer of the object: the footer's run, or the same part
    of it, if ``run`` has a part of its rows."""
    ordinal, part = int(run["ordinal"]), CatalogRun.of(run)
    whole: np.void = index.whole_runs[ordinal]
    is_sparse = int(whole["kind"]) == RunKind.SPARSE
    if not is_readable or not index.has_rows_of(part) or not (is_sparse or part.rows != int(whole["rows"])):
        return whole
    columns = index.row_columns(ordinal)
    expected = cut_run(whole, columns, part.first_row, part.first_row + part.rows)
    offsets = columns.queue_offset[part.first_row : part.first_row + part.rows]
    # The catalog may give a sparse run more offsets than its rows have: key compaction dropped those at its ends.
    if is_sparse and part.base <= offsets[0] and offsets[-1] < part.end:
        expected["base_queue_offset"], expected["end_queue_offset"] = part.base, part.end
    return expected


def _check_lmqs(
    state: CatalogState,
    index: SegmentIndex,
    check: SegmentCheck,
    is_readable: NDArray[np.bool_],
    result: SegmentResult,
) -> None:
    """Check the LMQ rows of the object, which refer to messages of parent queues: add those to ``result`` that refer
    beyond the end of the parent queue in ``state``."""
    reported: set[tuple[int, int]] = set()

    def seen(runs: Table, rows: PartRows) -> None:
        """Report the first row of each LMQ and parent that refers beyond the end of the parent queue."""
        ends = np.full(len(index.queue_table), np.iinfo(np.int64).max)
        for parent in np.unique(rows.parent).tolist():
            row = state.queue(index.queues[parent])  # None: it expired with its whole queue
            ends[parent] = ends[parent] if row is None else int(row["end_queue_offset"])
        for at in np.flatnonzero(rows.parent_queue_offset >= ends[rows.parent]).tolist():
            ordinal, parent = int(runs["ordinal"][rows.part[at]]), int(rows.parent[at])
            if (ordinal, parent) not in reported:
                reported.add((ordinal, parent))
                lmq, queue = index.queue_of(ordinal), index.queues[parent]
                offset = int(rows.parent_queue_offset[at])
                detail = f"{lmq} refers to {queue} at queue offset {offset}, beyond the end of that queue"
                result.add(AnomalyKind.LMQ, index.key, detail)

    runs = concatenated(check.runs, RUN_DTYPE)
    runs = picked(runs, runs["ordinal"] < len(index))
    is_lmq = is_readable[runs["ordinal"]] & (index.runs["kind"][runs["ordinal"]] == RunKind.LMQ)
    # Rows that the catalog's runs have and the object has not are a contradiction, which _compare has reported.
    _read_through(index, picked(runs, is_lmq), seen, lambda run, error: None)


class _RowsInBlocks(NamedTuple):
    """Rows of an object; of each, the number of its queue in the footer, the number of its block, and where its record
    begins in the decoded bytes of some blocks."""

    rows: PartRows
    queue: NDArray[np.int64]
    block: NDArray[np.int64]
    start: NDArray[np.int64]

    def where(self, which: NDArray[np.bool_] | slice) -> _RowsInBlocks:
        return _RowsInBlocks(self.rows.where(which), self.queue[which], self.block[which], self.start[which])


class _FullCheck:
    """Reads an object once, some blocks at a time, with the rows of all runs in them."""

    def __init__(
        self, store: ObjectStore, index: SegmentIndex, result: SegmentResult, repeated: Collection[QueueKey]
    ) -> None:
        """``index``: the object's footer; ``result`` gets its anomalies; ``repeated``: queues in which the broker used
        offsets twice, so that records name other offsets than their rows."""
        self._store = store
        self._index = index
        self._result = result
        self._reader = SegmentReader(store, index, ahead_to=index.size_bytes - TRAILER_BYTES)
        self._table = QueueTable()
        self._own = self._table.ordinals(index.topics, index.queue_table)
        """The number of each queue of the footer in ``_table``, to which records belong."""
        self._is_repeated = np.zeros(len(index.queues), bool)
        if repeated:
            self._is_repeated[:] = [queue in repeated for queue in index.queues]
        topic = index.queue_table["topic"]
        self._is_lmq = np.array([name.startswith(LMQ_PREFIX) for name in index.topics], bool)[topic]
        self._is_scheduled = np.array([name == SCHEDULE_TOPIC for name in index.topics], bool)[topic]

    def run(self, runs: Table) -> None:
        """Check the header, all blocks, records and keys of the object. ``runs``: those of its runs that have message
        bytes and whose rows can be read."""
        index, result = self._index, self._result
        try:
            check_header(self._reader.stored(0, HEADER_BYTES), index.version, source=index.key)
        except CorruptionError as error:
            result.add(AnomalyKind.DAMAGED, index.key, error.message)
        keys = self._keys()
        self._first_key = np.zeros(0, np.int64) if keys is None else begins(keys.counts)
        if len(runs):
            for rows in rows_of_parts(index, runs, ends_by_blocks(index, runs, WINDOW_RAW_BYTES)):
                self._check_rows(runs, rows, keys)
        result.counts["blocks"] = len(index.blocks)
        result.counts["bytes"] = index.size_bytes

    def _keys(self) -> KeySection | None:
        """Reads the object's key section; None, with an anomaly, if it is damaged."""
        index = self._index
        offset, length = index.key_span
        try:
            return index.decode_keys(self._store.get_range(index.key, offset, length) if length else b"")
        except CorruptionError as error:
            self._result.add(AnomalyKind.DAMAGED, index.key, error.message, (offset, offset + length))
            return None

    def _check_rows(self, runs: Table, rows: PartRows, keys: KeySection | None) -> None:
        """Read the blocks that have the records of ``rows``, check the records, and compare them with the rows and with
        ``keys``, the object's key section; None: it is damaged. ``rows`` are of ``runs``."""
        index, bounds = self._index, self._index.bounds
        ordinal = runs["ordinal"][rows.part]
        row = bounds.run_rows[ordinal] + rows.row - index.first_row[ordinal]
        block = np.searchsorted(bounds.block_rows, row, side="right") - 1
        raw = bounds.run_raw[ordinal] + rows.position
        data, begin = self._decoded(int(block[0]), int(block[-1]) + 1)
        begin = begin[block - block[0]]
        start = begin + raw - bounds.block_raw[block]
        in_blocks = _RowsInBlocks(rows, index.runs["queue"][ordinal].astype(np.int64), block, start)
        is_inside = (raw >= bounds.block_raw[block]) & (raw + rows.size <= bounds.block_raw[block + 1])
        self._report(in_blocks, ~is_inside, "reaches beyond the compressed block that should hold it")
        in_blocks = in_blocks.where(is_inside & (begin >= 0))
        # Each round ends at a record that is no valid one, and the next begins behind it.
        while len(in_blocks.start):
            phys = in_blocks.rows.phys
            is_copied = phys < 0
            if is_copied.any():
                phys = np.where(is_copied, own_phys(data, in_blocks.start), phys)
            columns, valid, reason = rescanned(data, in_blocks.start, in_blocks.rows.size, phys, self._table)
            self._compare(in_blocks.where(slice(valid)), columns, phys[:valid], keys)
            if not reason:
                break
            self._report(in_blocks, np.arange(len(in_blocks.start)) == valid, f"fails {reason}")
            part = in_blocks.rows.part
            in_blocks = in_blocks.where(slice(int(np.searchsorted(part, part[valid], side="right")), None))

    def _decoded(self, first: int, end: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Raw bytes of the blocks [first, end) that are undamaged, and where each begins in them; -1: it is damaged."""
        whole, begin, length = [], np.full(end - first, -1), 0
        for number, raw in enumerate(self._reader.blocks(first, end)):
            if isinstance(raw, CorruptionError):
                low, high = self._index.block_offsets[first + number : first + number + 2].tolist()
                self._result.add(AnomalyKind.DAMAGED, self._index.key, raw.message, (low, high))
            elif isinstance(raw, TieredError):
                raise raw
            else:
                begin[number] = length
                length += len(raw)
                whole.append(raw)
        return np.concatenate(whole) if whole else np.zeros(0, np.uint8), begin

    def _compare(
        self,
        in_blocks: _RowsInBlocks,
        columns: RecordColumns,
        phys: NDArray[np.int64],
        keys: KeySection | None,
    ) -> None:
        """Compare rows with what their records say (``columns``, and ``phys``, their commitlog offsets), and add what
        differs to the result. A record does not determine the deliver time of a scheduled message, nor its offset in an
        LMQ whose parent is not archived, or where the broker used one twice."""
        rows, count = in_blocks.rows, len(phys)
        own, other = self._own[in_blocks.queue], columns.queue[:count]
        # The record of a message in another queue may be in this one too, as some brokers make an entry of an LMQ for
        # it and others do not (DOUBT_PLAIN): then it names this queue as its LMQ.
        is_own, is_named = other == own, np.zeros(count, bool)
        entry = columns.lmq_row[: columns.lmq_rows]
        is_named[entry[columns.lmq_queue[: columns.lmq_rows] == own[entry]]] = True
        is_full, has_offset = ~self._is_lmq[in_blocks.queue], is_own | ~is_named
        for name, wanted, applies in (
            ("size", rows.size, True),
            ("store_timestamp", rows.store_timestamp, True),
            ("queue_offset", rows.queue_offset, is_full & has_offset & ~self._is_repeated[in_blocks.queue]),
            ("inner_num", rows.inner_num, is_full & has_offset),
            ("tags_code", rows.tags_code, ~self._is_scheduled[in_blocks.queue]),
            ("phys", phys, True),
        ):
            differs = (getattr(columns, name)[:count] != wanted) & applies
            self._report(in_blocks, differs, f"differs in {name}")
        strangers = is_full & ~is_own & ~is_named
        for at in rows.first_of_parts(strangers):
            table, of = self._table, int(columns.queue[at])
            what = f"belongs to {table.topic(of)}/{table.queue_id[of]}"
            self._report(in_blocks, np.arange(count) == at, what)
        if keys is not None:
            self._compare_keys(in_blocks, columns, is_own, keys)

    def _compare_keys(
        self, in_blocks: _RowsInBlocks, columns: RecordColumns, is_own: NDArray[np.bool_], keys: KeySection
    ) -> None:
        """Compare the key hashes of records with those that the object's key section ``keys`` lists for their rows. A
        record of another queue (``is_own`` is False) has its keys listed there, and none here."""
        listed = keys.counts[in_blocks.rows.row]
        counts = columns.key_count[: len(listed)]
        differs = (listed != counts) & (is_own | (listed > 0))
        is_same = np.repeat((listed == counts) & (listed > 0), counts)
        of_records = columns.key_hashes[: columns.keys][is_same]
        which = np.flatnonzero((listed == counts) & (listed > 0))
        places = positions(self._first_key[in_blocks.rows.row[which]], listed[which])
        wrong = np.repeat(which, listed[which])[of_records != keys.hashes[places]]
        differs[wrong] = True
        self._report(in_blocks, differs, "has other keys than the key section of the object has for it")

    def _report(self, in_blocks: _RowsInBlocks, which: NDArray[np.bool_], what: str) -> None:
        """Add an anomaly for the records of the rows ``which``, of each run only for the first: ``what`` is wrong with
        them, as text after "the record of a queue at an offset"."""
        index = self._index
        for at in in_blocks.rows.first_of_parts(which) if which.any() else ():
            queue, block = index.queues[int(in_blocks.queue[at])], int(in_blocks.block[at])
            detail = f"the record of {queue} at offset {int(in_blocks.rows.queue_offset[at])} {what}"
            begin, end = index.block_offsets[block : block + 2].tolist()
            self._result.add(AnomalyKind.RECORD, index.key, detail, (begin, end))


def rescanned(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int32],
    phys: NDArray[np.int64],
    table: QueueTable,
) -> tuple[RecordColumns, int, str]:
    """Check the archived records ``data[starts[i] : starts[i] + sizes[i]]``, at commitlog offsets ``phys``. Returns
    their columns, how many are valid from the first on, and the name of the check that the next one fails; empty if all
    are valid. ``table`` gets their queues.

    A record's own checksum (``__CRC32#``) may be of an earlier copy of the message, as a broker accepts it. The
    block's checksum was verified, so a record with a wrong one is scanned as if it had none.
    """
    columns, valid, is_copy = RecordColumns(rows=len(starts) or 1), 0, False
    while True:
        left = slice(valid, None)
        count, reason = rescan(data, starts[left], sizes[left], phys[left], table, columns)
        valid += count
        if reason != InvalidReason.RECORD_CRC.name:
            return columns, valid, reason
        if not is_copy:
            data, is_copy = data.copy(), True
        # Rename the property, so that the scan does not check it.
        data[int(starts[valid]) + int(sizes[valid]) - RESERVED_CRC_BYTES] = 0
