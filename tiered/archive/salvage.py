"""Messages of a damaged object from what is left: its whole blocks, and the broker's log while that has them.

    tail readable     rows from the tail, records from each block that passes its checksum
    tail unreadable   zstd frames and records follow one another from the header on: each says where it ends
    other objects     messages to which missing entries of LMQs refer
    broker's log      records of the missing rows, by queue, queue offset and physical offset

``salvaged`` gathers rows for the runs that the catalog expects; ``Salvage.written`` makes a new object of them, in
which a run ends where a row is lost. Commits nothing.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from tiered.archive.run_passes import LivingRuns
from tiered.archive.segment_reader import RANGE_BYTES_MAX, SegmentCache, SegmentReader
from tiered.archive.verify_segment import SegmentCheck, rescanned
from tiered.broker_store.commit_log import RECORD_MAGICS, CommitLog
from tiered.broker_store.damage import find_next_record
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError, TieredError, UnavailableError
from tiered.formats.memory_bound import require_stored_bytes
from tiered.formats.run_part import CatalogRun
from tiered.formats.segment import BlockCodec, RowTable, SegmentMeta
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import HEADER_BYTES, RECORD_BYTES_MAX
from tiered.formats.segment_writer import SegmentWriter, WrittenSegment
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.record_columns import RecordColumns, StopReason
from tiered.kernels.scan import scan_log
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_SUPERSEDED, RUN_DTYPE, RunKind, Table
from tiered.object_store.interface import ObjectStore

LOG_BYTES = 32 << 20
"""Bytes of the broker's log in memory at a time."""
RECORD_HEAD = np.dtype([("size", ">i4"), ("magic", ">u4"), ("rest", "V20"), ("phys", ">i8")])
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

ROW_DTYPE = np.dtype(
    [
        ("begin", "<i8"),
        ("end", "<i8"),  # queue offsets that it spans, of a sparse run with the hole before it
        ("position", "<i8"),  # in the salvaged records; -1: an LMQ row
        ("size", "<i4"),
        ("tags_code", "<i8"),
        ("store_timestamp", "<i8"),
        ("phys", "<i8"),
        ("key_first", "<i8"),
        ("key_count", "<u2"),
        ("parent", "<i4"),
        ("parent_queue_offset", "<i8"),
    ]
)
NO_ROWS = np.zeros(0, ROW_DTYPE)
Lost = tuple[QueueKey, int, int]
"""Offsets of a queue whose messages were not found: the queue, the first offset, one past the last."""


@dataclass
class Salvage:
    """The ``rows`` (ROW_DTYPE) found for each of the ``runs`` that the catalog expects in the object of ``check``;
    their records, back to back, and key hashes. ``wanted``: for each run, the rows that the object had, if its tail
    can be read. ``parents``: the numbers of the queues to which LMQ rows refer."""

    check: SegmentCheck
    runs: Table
    rows: list[Table]
    wanted: list[Table | None]
    records: bytearray = field(default_factory=bytearray)
    hashes: list[NDArray[Any]] = field(default_factory=list)
    hash_count: int = 0
    parents: dict[QueueKey, int] = field(default_factory=dict)
    generations: dict[tuple[str, int], int] = field(default_factory=dict)
    """The generation of the queue, by (topic, queue id), to which scanned records belong."""

    @classmethod
    def of(cls, check: SegmentCheck) -> Salvage:
        """A salvage of the object that ``check`` describes, for which nothing was found yet."""
        runs = np.concatenate(check.runs)
        salvage = cls(check, runs, [NO_ROWS] * len(runs), [None] * len(runs))
        salvage.generations.update((queue[:2], queue.generation) for queue in sorted(check.queues))
        return salvage

    def missing(self, run: int) -> list[tuple[int, int]]:
        """The queue offsets [begin, end) of the run number ``run`` for which no row was found yet."""
        known, row = self.rows[run], self.runs[run]
        begins = np.append(known["begin"], row["end_queue_offset"])
        ends = np.append(row["base_queue_offset"], known["end"])
        holes = np.flatnonzero(begins > ends).tolist()
        return [(int(ends[at]), int(begins[at])) for at in holes]

    @property
    def lost(self) -> list[Lost]:
        """The offsets of all runs for which no row was found."""
        return [
            (queue, *hole) for number, queue in enumerate(self.check.queues) for hole in self.missing(number)
        ]

    def add(self, run: int, rows: Table) -> None:
        """Add rows that were found of the run number ``run``; those that were found before are dropped."""
        all_rows = np.concatenate([self.rows[run], rows])
        _, first = np.unique(all_rows[["end", "phys"]], return_index=True)
        all_rows = all_rows[first]
        if self.runs["kind"][run] == RunKind.SPARSE and self.wanted[run] is None:
            # Which offsets the run's rows had is unknown: each row spans those that are missing before it.
            all_rows["begin"][1:] = all_rows["end"][:-1]
            all_rows["begin"][:1] = self.runs["base_queue_offset"][run]
            if len(all_rows) == int(self.runs["rows"][run]):
                all_rows["end"][-1:] = self.runs["end_queue_offset"][run]
        self.rows[run] = all_rows

    def take_records(self, data: NDArray[np.uint8], columns: RecordColumns, rows: NDArray[np.int64]) -> Table:
        """Copy the records in the ``rows`` of ``columns``, whose bytes are in ``data``, to the salvaged ones, and
        return them as rows (ROW_DTYPE) of a plain run."""
        salvaged_rows = np.zeros(len(rows), ROW_DTYPE)
        salvaged_rows["begin"] = columns.queue_offset[rows]
        salvaged_rows["end"] = salvaged_rows["begin"] + columns.inner_num[rows]
        for name in ("size", "tags_code", "store_timestamp", "phys", "key_count"):
            salvaged_rows[name] = getattr(columns, name)[rows]
        salvaged_rows["parent"] = salvaged_rows["parent_queue_offset"] = -1
        firsts = (
            np.cumsum(columns.key_count[: columns.rows], dtype=np.int64) - columns.key_count[: columns.rows]
        )
        salvaged_rows["key_first"] = firsts[rows] + self.hash_count
        self.hashes.append(columns.key_hashes[: columns.keys].copy())
        self.hash_count += columns.keys
        for at, row in enumerate(rows.tolist()):
            begin = int(columns.position[row])
            salvaged_rows["position"][at] = len(self.records)
            self.records += data[begin : begin + int(columns.size[row])].data
        return salvaged_rows

    def written(self, codec: BlockCodec, meta: SegmentMeta) -> tuple[bytes, WrittenSegment, Table] | None:
        """A new object of all rows that were found: its header and blocks, what follows them, and its runs for the
        catalog, whose ``queue`` is an index into the segment's queues. None if no row was found."""
        blocks = io.BytesIO()
        writer = SegmentWriter(blocks, codec)
        hashes = np.concatenate([np.zeros(0, np.uint64), *self.hashes])
        bounds: list[tuple[int, int]] = []
        for number, queue in enumerate(self.check.queues):
            byte = int(self.runs["base_byte"][number])
            for piece in _pieces(self.rows[number]):
                head = np.zeros(1, RUN_DTYPE)
                kind = int(self.runs["kind"][number])
                head["kind"], head["base_queue_offset"] = kind, piece["begin"][0]
                head["base_byte"] = 0 if kind == RunKind.LMQ else byte
                head["min_store_timestamp"], head["min_phys"] = (
                    piece["store_timestamp"].min(),
                    piece["phys"].min(),
                )
                byte += int(piece["size"].sum(dtype=np.int64))
                bounds.append((int(piece["begin"][0]), int(piece["end"][-1])))
                writer.begin_runs([queue], head)
                writer.add_rows(_row_table(piece, hashes), list(self.parents))
                if kind != RunKind.LMQ:
                    view = memoryview(self.records)
                    spans = zip(piece["position"].tolist(), piece["size"].tolist(), strict=True)
                    writer.add_records([view[at : at + size] for at, size in spans], piece["size"])
        if not bounds:
            return None
        segment = writer.finish(meta)
        runs = segment.runs.copy()
        runs["base_queue_offset"], runs["end_queue_offset"] = np.array(bounds, np.int64).T
        return blocks.getvalue(), segment, runs


def _row_table(rows: Table, hashes: NDArray[Any]) -> RowTable:
    """``rows`` (ROW_DTYPE) as columns, with the key hashes that belong to them."""
    counts = rows["key_count"].astype(np.int64)
    places = np.repeat(rows["key_first"] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return RowTable(
        rows["position"],
        rows["size"],
        rows["tags_code"],
        rows["store_timestamp"],
        rows["phys"],
        rows["begin"],
        (rows["end"] - rows["begin"]).astype(np.int32),
        rows["key_count"],
        rows["parent"],
        rows["parent_queue_offset"],
        hashes[places],
    )


def _pieces(rows: Table) -> list[Table]:
    """``rows`` divided where offsets are missing between two of them."""
    if not len(rows):
        return []
    return np.split(rows, np.flatnonzero(rows["begin"][1:] != rows["end"][:-1]) + 1)


# -- from the object ------------------------------------------------------------------------------------------


def salvaged(
    store: ObjectStore, state: CatalogState, check: SegmentCheck, log: CommitLog | None = None
) -> Salvage:
    """Save what can be saved of a damaged data object, which ``check`` describes: what is whole in it, entries of LMQs
    from the messages in other objects of ``state``, and what the broker's ``log``, if there is one, still has. Raises
    the store's errors, except for objects that cannot be read."""
    salvage = Salvage.of(check)
    try:
        size_bytes, tail_bytes = int(check.place["size_bytes"]), int(check.place["tail_bytes"])
        try:
            tail = store.get_range(check.key, size_bytes - tail_bytes, tail_bytes)
            _add_indexed(store, SegmentIndex(check.key, size_bytes, tail), salvage)
        except CorruptionError:
            pass
        if any(wanted is None for wanted in salvage.wanted):
            require_stored_bytes(size_bytes, check.key)
            _add_scanned(store.get(check.key, size_bytes), salvage)
    except (CorruptionError, NotFoundError):
        pass
    entries = [
        number
        for number in np.flatnonzero(salvage.runs["kind"] == RunKind.LMQ).tolist()
        if salvage.missing(number)
    ]
    if entries:
        _add_entries(store, state, salvage, entries)
    if log is not None and salvage.lost:
        _add_logged(log, salvage, [not _has_ended(state, queue) for queue in check.queues])
    _drop_contradicted(salvage)
    return salvage


def _drop_contradicted(salvage: Salvage) -> None:
    """Drop the rows of runs that the object's tail does not describe, if records were found in two places for one
    offset, or the first or last one in another place than the catalog has for the run: the broker used offsets twice
    or lost units of the consume queue, so that it served messages at other offsets than their records say. Rows of
    sparse runs come from the object alone, and span offsets of others."""
    for number, (run, rows) in enumerate(zip(salvage.runs, salvage.rows, strict=True)):
        is_first = (rows["begin"] == run["base_queue_offset"]) != (rows["phys"] == run["min_phys"])
        is_last = (rows["end"] == run["end_queue_offset"]) != (rows["phys"] + rows["size"] == run["end_phys"])
        has_repeated = len(np.unique(rows["end"])) < len(rows)
        is_described = run["kind"] == RunKind.SPARSE or salvage.wanted[number] is not None
        if not is_described and (has_repeated or is_first.any() or is_last.any()):
            salvage.rows[number] = NO_ROWS


def _add_indexed(store: ObjectStore, index: SegmentIndex, salvage: Salvage) -> None:
    """Add to ``salvage`` the rows of the damaged object that its footer ``index`` describes, with the records of those
    whose blocks are whole. Runs whose rows cannot be read, or that are not the catalog's, are skipped."""
    reader, blocks = SegmentReader(store, index), dict[int, NDArray[np.uint8] | TieredError]()
    for number, (run, queue) in enumerate(zip(salvage.runs, salvage.check.queues, strict=True)):
        part = CatalogRun.of(run)
        try:
            if (
                part.ordinal >= len(index)
                or index.queue_of(part.ordinal) != queue
                or not index.has_rows_of(part)
            ):
                continue
            rows = index.row_columns(part)
        except CorruptionError:
            continue
        known = _known_rows(run, rows)
        salvage.wanted[number] = known
        if int(run["kind"]) == RunKind.LMQ:
            parents = [salvage.parents.setdefault(one, len(salvage.parents)) for one in index.queues]
            salvage.generations.update((queue[:2], queue.generation) for queue in sorted(index.queues))
            known["position"], known["parent"] = -1, np.array(parents, np.int32)[rows.parent]
            known["parent_queue_offset"] = rows.parent_queue_offset
            salvage.add(number, known)
            continue
        span = index.block_span(part, 0, len(rows))
        for block in range(span.first_block, span.end_block):
            one = index.span_of_blocks(part, block, block + 1)
            if block not in blocks:
                (blocks[block],) = reader.blocks(block, block + 1)
            data = blocks[block]
            if isinstance(data, np.ndarray):
                _add_block(
                    salvage,
                    number,
                    known[one.first_row : one.end_row],
                    rows,
                    one.first_row,
                    data,
                    one.raw_offset,
                )
            elif not isinstance(data, CorruptionError):
                raise data


def _add_entries(store: ObjectStore, state: CatalogState, salvage: Salvage, runs: Sequence[int]) -> None:
    """Add to ``salvage`` the missing entries of LMQs, of the ``runs`` with these numbers, from the messages to which
    they refer, in other objects of ``state``. Objects that cannot be read are skipped, and messages of another log
    history than the run's, as their physical offsets do not compare."""
    low, high = int(salvage.runs["min_phys"][runs].min()), int(salvage.runs["end_phys"][runs].max())
    segments, of_log = SegmentCache(store), {True: list[int](), False: list[int]()}
    for number in runs:
        of_log[_has_ended(state, salvage.check.queues[number])].append(number)
    for page in LivingRuns(store, state).between(0, state.version):
        chunk = page.chunk
        is_near = (chunk.runs["min_phys"] < high) & (chunk.runs["end_phys"] > low)
        for run in chunk.runs[is_near & (chunk.runs["kind"] != RunKind.LMQ)]:
            key, part = chunk.object_keys[int(chunk.objects["key"][run["object"]])], CatalogRun.of(run)
            queue = page.queues[int(run["queue"])]
            if not (mine := of_log[_has_ended(state, queue)]):
                continue
            salvage.generations[queue[:2]] = queue.generation
            if key == salvage.check.key:
                continue  # the damaged object itself
            try:
                reader = segments.of_run(chunk, run)
                index, rows = reader.index, reader.row_columns(part)
                inside = np.flatnonzero((rows.phys >= low) & (rows.phys < high))
                if not len(inside):
                    continue
                span = index.block_span(part, int(inside[0]), int(inside[-1]) + 1)
                for one in index.split_span(part, span, RANGE_BYTES_MAX):
                    data = reader.raw(one.first_block, one.end_block)
                    own = slice(one.first_row, one.end_row)
                    starts = rows.position[own] - one.raw_offset
                    table = QueueTable()
                    columns, _, _ = rescanned(data, starts, rows.size[own], rows.phys[own], table)
                    _match(salvage, data, table, columns, mine)
            except (CorruptionError, NotFoundError):
                continue  # entries are searched in the other objects


def _has_ended(state: CatalogState, queue: QueueKey) -> bool:
    """Whether ``queue`` ended with an earlier log, so that its physical offsets do not compare with those of the
    present one."""
    row = state.queue(queue)
    return row is not None and bool(row["flags"] & QUEUE_SUPERSEDED)


def _known_rows(run: np.void, rows: RowTable) -> Table:
    """The rows that the footer describes of ``run``, as a table (ROW_DTYPE) without parents. In a sparse run, from
    which key compaction dropped messages, each row begins where the one before ends, so that they cover all offsets."""
    known = np.zeros(len(rows), ROW_DTYPE)
    for name in ("size", "tags_code", "store_timestamp", "phys"):
        known[name] = getattr(rows, name)
    known["begin"], known["end"] = rows.queue_offset, rows.queue_offset + rows.inner_num
    known["parent"] = known["parent_queue_offset"] = -1
    if int(run["kind"]) == RunKind.SPARSE:
        known["begin"][0], known["begin"][1:] = run["base_queue_offset"], known["end"][:-1]
        known["end"][-1] = run["end_queue_offset"]
    return known


def _add_block(
    salvage: Salvage,
    number: int,
    known: Table,
    rows: RowTable,
    first: int,
    data: NDArray[np.uint8],
    raw_offset: int,
) -> None:
    """Add to ``salvage`` the rows of one block of the run number ``number``: ``known`` are its rows, the first of which
    is number ``first`` of ``rows``, and ``data`` its bytes, which begin at ``raw_offset`` of the run's. Records that
    are damaged are skipped."""
    starts = rows.position[first : first + len(known)] - raw_offset
    unchecked = np.arange(len(known))
    while len(unchecked):
        sizes, phys = known["size"][unchecked], known["phys"][unchecked]
        columns, valid, _ = rescanned(data, starts[unchecked], sizes, phys, QueueTable())
        taken = salvage.take_records(data, columns, np.arange(valid))
        for name in ("begin", "end", "tags_code", "store_timestamp"):
            taken[name] = known[name][unchecked[:valid]]
        salvage.add(number, taken)
        unchecked = unchecked[valid + 1 :]  # the record after the valid ones is damaged


def _add_scanned(data: bytes, salvage: Salvage) -> None:
    """Add to ``salvage`` rows by the records in the object's bytes ``data`` alone, for the runs of which the damaged
    footer says nothing."""
    for raw in _chunks(data):
        view = np.frombuffer(raw, np.uint8)
        starts, sizes, phys = _records(view)
        while len(starts):
            table = QueueTable()
            columns, valid, _ = rescanned(view, starts, sizes, phys, table)
            _match(
                salvage, view, table, columns, [at for at, one in enumerate(salvage.wanted) if one is None]
            )
            starts, sizes, phys = starts[valid + 1 :], sizes[valid + 1 :], phys[valid + 1 :]


def _chunks(data: bytes) -> Iterator[bytes | memoryview]:
    """The decoded bytes of the blocks in a damaged object's bytes ``data``, from the header on: blocks are compressed
    frames of zstd, or plain records. Behind a damaged one the next frame is searched."""
    position = HEADER_BYTES
    while position < len(data):
        view = memoryview(data)[position:]
        if view[:4] == ZSTD_MAGIC:
            try:
                size = zstandard.frame_content_size(view)
                frame = zstandard.ZstdDecompressor().decompressobj()
                raw = frame.decompress(view)
                if frame.eof and 0 < size == len(raw) <= RECORD_BYTES_MAX:
                    yield raw
                    position = len(data) - len(frame.unused_data)
                    continue
            except (zstandard.ZstdError, MemoryError):
                pass
        elif ends := _record_ends(view):
            yield view[: ends[-1]]
            position += ends[-1]
            continue
        following = data.find(ZSTD_MAGIC, position + 1)
        if following < 0:
            return
        position = following


def _record_ends(view: memoryview) -> list[int]:
    """Where the records end that follow one another from the begin of ``view``, by their sizes and magic numbers."""
    ends, position = list[int](), 0
    while position + RECORD_HEAD.itemsize <= len(view):
        head = np.frombuffer(view, RECORD_HEAD, 1, position)[0]
        size = int(head["size"])
        if int(head["magic"]) not in RECORD_MAGICS or not RECORD_HEAD.itemsize < size <= len(view) - position:
            break
        position += size
        ends.append(position)
    return ends


def _records(data: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Where the records begin that follow one another in ``data``, their sizes, and the commitlog offsets in them."""
    ends = np.array(_record_ends(data.data), np.int64)
    starts = np.append(0, ends)[:-1] if len(ends) else ends
    phys = [int(np.frombuffer(data, RECORD_HEAD, 1, at)[0]["phys"]) for at in starts.tolist()]
    return starts, (ends - starts).astype(np.int32), np.array(phys, np.int64)


# -- by their content -----------------------------------------------------------------------------------------


def _match(
    salvage: Salvage, data: NDArray[np.uint8], table: QueueTable, columns: RecordColumns, runs: Sequence[int]
) -> None:
    """Add scanned records (``columns``, whose bytes are in ``data`` and whose queues ``table`` numbers) to those of the
    ``runs`` with these numbers to which they belong: by queue, offset and place in the commitlog."""
    count, entries = columns.rows, columns.lmq_rows
    phys = columns.phys[:count]
    for number in runs:
        run, queue = salvage.runs[number], salvage.check.queues[number]
        ordinal = table.find(queue.topic, queue.queue_id)
        if ordinal is None:
            continue
        low, high = int(run["base_queue_offset"]), int(run["end_queue_offset"])
        is_inside = (phys >= run["min_phys"]) & (phys < run["end_phys"])
        own = np.flatnonzero(
            is_inside
            & (columns.queue[:count] == ordinal)
            & (columns.queue_offset[:count] >= low)
            & (columns.queue_offset[:count] < high)
        )
        taken = NO_ROWS
        if int(run["kind"]) != RunKind.LMQ and len(own):
            taken = salvage.take_records(data, columns, own)
        lmq = np.flatnonzero(columns.lmq_queue[:entries] == ordinal)
        offsets, records = columns.lmq_queue_offset[lmq], columns.lmq_row[lmq].astype(np.int64)
        is_own = is_inside[records] & (offsets >= low) & (offsets < high)
        if is_own.any():
            entry = salvage.take_records(data, columns, records[is_own])
            entry["begin"], entry["end"], entry["key_count"] = offsets[is_own], offsets[is_own] + 1, 0
            if int(run["kind"]) == RunKind.LMQ:
                entry["position"] = -1
                entry["parent_queue_offset"] = columns.queue_offset[records[is_own]]
                entry["parent"] = [
                    _parent(salvage, table, int(columns.queue[row])) for row in records[is_own]
                ]
            taken = np.concatenate([taken, entry])
        wanted = salvage.wanted[number]
        if wanted is not None and len(taken):
            # The footer says which rows the run has, and which offsets each spans.
            place = np.searchsorted(wanted["phys"], taken["phys"])
            place[place == len(wanted)] = 0
            is_known = wanted["phys"][place] == taken["phys"]
            taken, place = taken[is_known], place[is_known]
            for name in ("begin", "end", "tags_code"):
                taken[name] = wanted[name][place]
        if len(taken):
            salvage.add(number, taken)


def _parent(salvage: Salvage, table: QueueTable, ordinal: int) -> int:
    """The number in ``salvage.parents`` of the queue number ``ordinal`` of ``table``."""
    topic, queue_id = table.topic(ordinal), int(table.queue_id[ordinal])
    queue = QueueKey(topic, queue_id, salvage.generations.get((topic, queue_id), 0))
    return salvage.parents.setdefault(queue, len(salvage.parents))


def _add_logged(log: CommitLog, salvage: Salvage, is_of_log: Sequence[bool]) -> None:
    """Add to ``salvage`` the rows that are missing, from the broker's commitlog or the pins (hard links) of its files.
    ``is_of_log``: for each run, whether it is of this log; others are skipped, and sparse runs whose rows the object's
    tail does not tell, as the log has the messages that key compaction dropped too. Ends early if the log cannot be
    read now."""
    runs = [
        number
        for number in range(len(salvage.runs))
        if is_of_log[number]
        and salvage.missing(number)
        and (salvage.runs["kind"][number] != RunKind.SPARSE or salvage.wanted[number] is not None)
    ]
    if not runs:
        return
    phys, end_phys = int(salvage.runs["min_phys"][runs].min()), int(salvage.runs["end_phys"][runs].max())
    length = LOG_BYTES
    while phys < end_phys:
        file = log.file_at(phys)
        if file is None:
            following = [one.begin_phys for one in log.files if one.begin_phys > phys]
            phys = min(following, default=end_phys)
            continue
        data = np.empty(min(length, file.end_phys - phys), np.uint8)
        try:
            got = log.read_into(data.data, phys)
        except UnavailableError:
            return
        table, columns = QueueTable(), RecordColumns()
        stop = scan_log(data, 0, got, phys, file.end_phys, table, columns, delay_levels_ms=None)
        _match(salvage, data, table, columns, runs)
        phys += stop.position
        if stop.reason == StopReason.FILE_END:
            phys = file.end_phys
        elif stop.position == 0:
            if stop.reason == StopReason.INPUT_END and length < file.size_bytes and got == len(data):
                length = file.size_bytes  # a large record
                continue
            phys = find_next_record(log, phys, end_phys) or end_phys
        length = LOG_BYTES
