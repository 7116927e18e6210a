"""Reads what the iterations of a compaction need: rows, keys, stored blocks and records of pieces of runs.

A block that only one piece uses stays as it is stored. Any other one is decoded, one at a time, and its records are
distributed over the pieces.

Iterations are as large as memory, and a source has a few kilobytes for each. So a source is read and opened once for a
*window*, as many iterations as the disk has room for, and a spool keeps what each of them gets.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import fastcrc
import numpy as np
import zstandard
from numpy.typing import NDArray

from maintenance.compaction_plan import (
    PIECE_DTYPE,
    READERS_MAX,
    Candidates,
    OutputPart,
    length_of,
)
from maintenance.iteration_spool import (
    CHUNK_DTYPE,
    FOUND_DTYPE,
    ROW_DTYPE,
    FoundPieces,
    IterationSpool,
)
from tiered.errors import CorruptionError
from tiered.flat_file.key_section_reader import key_bytes_guess
from tiered.formats.segment import SHARED_BLOCK_BYTES, RowTable
from tiered.formats.segment_index import CATALOG_RUN_FIELDS, KeySection, SegmentIndex, expand_block
from tiered.formats.segment_layout import check_tail_length
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, Table, concatenated, positions
from tiered.object_store.interface import ObjectStore

MIB = 1024 * 1024
READ_BYTES_MAX = 16 * MIB
"""Limit of one GET; a larger block is read by one GET too."""
HOLE_BYTES_MAX = MIB
"""Unneeded bytes between two ranges that one GET reads too."""
WHOLE_BYTES_MAX = MIB
"""Sources up to this size are read by one GET as a whole."""
IN_FLIGHT_BYTES = 24 * MIB
"""Limit of reads in progress."""
COPIED_RAW_BYTES_MIN = SHARED_BLOCK_BYTES // 2
"""Smaller blocks are packed again, except at an object's end: an object of many small blocks is slow to read."""
BATCH_BYTES = 4 * MIB
"""Messages of a source that are taken out of it together, unless a piece has more."""
SPOOLED_BYTES_MAX = 8 * MIB
"""What the spool keeps in memory, and not more than an iteration has."""
ROW_BYTES, PIECE_BYTES = 64, 64
"""In the spool, beside messages."""

_WANTED_DTYPE = np.dtype([*PIECE_DTYPE.descr, ("iteration", "<i4"), ("ordinal", "<i8")])
"""A piece, its iteration, and its number there."""
_PLACE_DTYPE = np.dtype([
    *_WANTED_DTYPE.descr,
    ("in_object", "<i8"),  # ordinal of the run
    ("first_row", "<i8"), ("end_row", "<i8"),  # in the run
    ("first_block", "<i8"), ("end_block", "<i8"),  # in the object; equal for an LMQ
    ("raw_begin", "<i8"), ("raw_end", "<i8"),  # in the raw bytes of the object
])  # fmt: skip
"""Where the rows and blocks of a piece are in its object."""


class CompactionSources:
    """The objects that a compaction reads. ``spooled``: a file of up to ``spool_bytes_max``. ``in_flight_bytes``: of
    reads in progress, at most."""

    def __init__(
        self,
        store: ObjectStore,
        candidates: Candidates,
        spooled: Path,
        spool_bytes_max: int,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
    ) -> None:
        self._in_flight_bytes = in_flight_bytes
        self.read_bytes_max = min(READ_BYTES_MAX, in_flight_bytes // 2)  # one is used, one on its way
        self._store = store
        self._candidates = candidates
        self._spool = IterationSpool(spooled)
        self._spool_bytes_max = spool_bytes_max
        self._lock = threading.Lock()
        self.parents: list[QueueKey] = list(candidates.queues)
        """What ``parent`` of LMQ rows indexes."""
        self._parent_numbers = {queue: number for number, queue in enumerate(self.parents)}
        self.gets = 0
        self.bytes_read = 0

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._spool.close()

    def read(self, iterations: Sequence[list[OutputPart]]) -> Iterator[FoundPieces]:
        """For each iteration the pieces that have rows, by their number among all pieces of its parts."""
        windows, is_packed = windows_of(self._candidates, iterations, self._spool_bytes_max)
        for window in windows:
            self._spool.clear(is_packed=is_packed)
            self._distribute(window)
            for number in range(len(window)):
                yield self._spool.take(number)

    def _distribute(self, window: Sequence[Table]) -> None:
        """Read the sources of all iterations of ``window``, each once."""
        wanted = _by_object(self._candidates, window)
        largest = max((int(self._candidates.objects["size_bytes"][number]) for number in wanted), default=1)
        readers = self._in_flight_bytes // min(self.read_bytes_max, max(1, largest)) - 1
        kept = None  # one iteration is in memory anyway
        if len(window) > 1:
            kept = min(SPOOLED_BYTES_MAX, max(int((one["end"] - one["begin"]).sum()) for one in window))
        readers = max(1, min(READERS_MAX, readers))
        with ThreadPoolExecutor(readers, thread_name_prefix="compaction-read") as pool:
            try:
                for source in self._ahead(pool, wanted, readers):
                    for found in self._found(source):
                        self._spool.add(found, kept)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _ahead(self, pool: ThreadPoolExecutor, wanted: dict[int, Table], readers: int) -> Iterator[_Source]:
        """All sources in order, of which up to so many wait in memory. Threads only read: decoding in them would make
        all of them wait for the interpreter's lock."""
        ends: deque[tuple[int, Future[bytes]]] = deque()
        opened: deque[_Source] = deque()
        for number in wanted:
            ends.append((number, pool.submit(self._last_bytes, number)))
            if len(ends) + len(opened) > readers:
                yield from self._next(pool, wanted, ends, opened)
        while ends or opened:
            yield from self._next(pool, wanted, ends, opened)

    def _next(
        self,
        pool: ThreadPoolExecutor,
        wanted: dict[int, Table],
        ends: deque[tuple[int, Future[bytes]]],
        opened: deque[_Source],
    ) -> Iterator[_Source]:
        """The first of ``opened``; half of the others are opened before."""
        while ends and len(opened) <= len(ends):
            number, last_bytes = ends.popleft()
            opened.append(self._opened(pool, number, last_bytes.result(), wanted[number]))
        yield opened.popleft()

    def open(self, number: int) -> tuple[SegmentIndex, KeySection]:
        """Index and keys of an object."""
        index, keys, _ = self._decoded(number, self._last_bytes(number))
        return index, keys

    def _last_bytes(self, number: int) -> bytes:
        """The end of an object with its tail and, nearly always, its keys; all of a small one."""
        row = self._candidates.objects[number]
        key = self._candidates.object_keys[int(row["key"])]
        size, tail = int(row["size_bytes"]), int(row["tail_bytes"])
        check_tail_length(key, size, tail)
        length = size if size <= WHOLE_BYTES_MAX else min(size, tail + key_bytes_guess(int(row["rows"])))
        return self.get(key, size - length, length)

    def _decoded(self, number: int, last_bytes: bytes) -> tuple[SegmentIndex, KeySection, memoryview]:
        row = self._candidates.objects[number]
        key = self._candidates.object_keys[int(row["key"])]
        size, length = int(row["size_bytes"]), len(last_bytes)
        index, end = SegmentIndex(key, size, last_bytes), memoryview(last_bytes)
        offset, stored_bytes = index.key_span
        known = size - length
        stored = (
            end[offset - known : offset - known + stored_bytes]
            if offset >= known
            else self.get(key, offset, stored_bytes)
        )
        return index, index.decode_keys(stored), end

    def whole_run(self, index: SegmentIndex, keys: KeySection, run: int) -> RowTable:
        """All rows of a run of the candidates."""
        wanted = np.zeros(1, _WANTED_DTYPE)
        wanted["run"], wanted["end"] = run, length_of(self._candidates.runs[run : run + 1])
        self._check_runs(index, wanted["run"])
        places = _places_of(index, self._candidates.runs, wanted)
        nothing = _Chunks(
            np.zeros(0, CHUNK_DTYPE), index.blocks[:0], [], np.zeros(1, np.int64), np.zeros(1, np.int64)
        )
        return self._with_rows(index, keys, places, nothing).row_table()

    def get(self, key: str, offset: int, length: int) -> bytes:
        """One GET, counted."""
        data = self._store.get_range(key, offset, length)
        with self._lock:
            self.gets += 1
            self.bytes_read += length
        return data

    # -- one source -----------------------------------------

    def _opened(self, pool: ThreadPoolExecutor, number: int, last_bytes: bytes, wanted: Table) -> _Source:
        """An object, of which the first bytes that ``wanted`` (_WANTED_DTYPE) needs are being read."""
        index, keys, end = self._decoded(number, last_bytes)
        self._check_runs(index, wanted["run"])
        places = _places_of(index, self._candidates.runs, wanted)
        return _Source(index, keys, places, _ObjectBytes(self, pool, index, end, places))

    def _found(self, source: _Source) -> Iterator[FoundPieces]:
        """What was wanted of a source, some megabytes at a time."""
        places = source.places
        taking = _Taking(source.index, source.data)
        sizes = places["end"] - places["begin"]
        batch = (np.cumsum(sizes) - sizes) // BATCH_BYTES
        bounds = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(places)]
        for first, last in pairwise(bounds):
            if last > first:
                mine = places[first:last]
                yield self._with_rows(source.index, source.keys, mine, taking.chunks(mine))

    def _with_rows(
        self, index: SegmentIndex, keys: KeySection, places: Table, chunks: _Chunks
    ) -> FoundPieces:
        """``chunks`` with the rows and keys of their pieces, as copies."""
        counts = places["end_row"] - places["first_row"]
        begins = index.first_row[places["in_object"]] + places["first_row"]
        first, last = int(begins[0]), int(begins[-1] + counts[-1])
        which: slice | NDArray[np.int64] = slice(None)
        if last - first != int(counts.sum()):
            which = positions(begins - first, counts)
        columns = index.stored_columns(first, last)
        rows = np.empty(int(counts.sum()), ROW_DTYPE)
        for name, column in zip(ROW_DTYPE.names or (), columns, strict=False):
            rows[name] = column[which]
        if bool((index.runs["kind"][places["in_object"]] == RunKind.LMQ).any()):
            rows["parent"] = self._parent_column(index.queues, rows["parent"])
        key_counts = keys.counts[first:last]
        rows["key_count"] = key_counts[which]
        before = int(keys.counts[:first].sum(dtype=np.int64))
        hash_ends = before + np.cumsum(key_counts, dtype=np.int64)
        own_keys = (hash_ends - key_counts)[which]
        row_begins = np.cumsum(counts) - counts
        found = np.zeros(len(places), FOUND_DTYPE)
        for name in ("iteration", "ordinal"):
            found[name] = places[name]
        found["rows"], found["chunks"], found["blocks"] = counts, chunks.of_piece, chunks.blocks_of_piece
        found["hashes"] = np.add.reduceat(rows["key_count"], row_begins, dtype=np.int64)
        found["begin_byte"] = places["raw_begin"] - index.bounds.run_raw[places["in_object"]]
        found["base_queue_offset"] = index.runs["base_queue_offset"][places["in_object"]]
        for at in np.flatnonzero(places["first_row"]).tolist():
            place = places[at]
            found["base_queue_offset"][at] = _offset_at(
                index, int(place["in_object"]), int(place["first_row"])
            )
        return FoundPieces(
            pieces=found, rows=rows, hashes=keys.hashes[positions(own_keys, rows["key_count"])],
            chunks=chunks.table, blocks=chunks.blocks, data=chunks.data,
        )  # fmt: skip

    def _check_runs(self, index: SegmentIndex, runs: NDArray[Any]) -> None:
        """The catalog and the object must agree on the runs."""
        rows = self._candidates.runs[runs]
        ordinals = rows["ordinal"]
        if int(ordinals.max()) >= len(index.runs):
            raise CorruptionError(f"{index.key}: has no run {int(ordinals.max())}")
        own = index.runs[ordinals]
        differs = np.zeros(len(rows), bool)
        for name in CATALOG_RUN_FIELDS:
            differs |= own[name] != rows[name]
        queues, own_queues = self._candidates.queues, index.queues
        pairs = zip(rows["queue"].tolist(), own["queue"].tolist(), strict=True)
        wrong = [
            at for at, (one, other) in enumerate(pairs) if differs[at] or queues[one] != own_queues[other]
        ]
        if wrong:
            queue = queues[int(rows["queue"][wrong[0]])]
            raise CorruptionError(
                f"{index.key}: run {int(ordinals[wrong[0]])} is not the catalog's of {queue}"
            )

    def _parent_column(self, queues: Sequence[QueueKey], parent: NDArray[Any]) -> NDArray[np.int32]:
        if int(parent.max(initial=-1)) >= len(queues):
            raise CorruptionError("the parent of an LMQ row is not in the footer")
        numbers = np.full(len(queues) + 1, -1, np.int32)
        for local in np.unique(parent[parent >= 0]).tolist():
            number = self._parent_numbers.setdefault(queues[local], len(self.parents))
            if number == len(self.parents):
                self.parents.append(queues[local])
            numbers[local] = number
        found: NDArray[np.int32] = numbers[parent]
        return found


@dataclass(frozen=True)
class _Source:
    """An open object, the places (_PLACE_DTYPE) that are wanted of it, and their bytes."""

    index: SegmentIndex
    keys: KeySection
    places: Table
    data: _ObjectBytes


class _ObjectBytes:
    """Bytes of an object from ``end`` and from GETs of all blocks of ``places``, the first of which begins now. They
    are used in ascending order."""

    def __init__(
        self,
        sources: CompactionSources,
        pool: ThreadPoolExecutor,
        index: SegmentIndex,
        end: memoryview,
        places: Table,
    ) -> None:
        self._sources, self._key = sources, index.key
        self._first: Future[bytes] | None = None
        known = index.size_bytes - len(end)
        wanted = _ranges(index, places)
        if not wanted or wanted[0][0] >= known:
            self._left: deque[tuple[int, int]] = deque()
            self._begin, self._data = known, end
        else:
            self._left = deque(joined_ranges(wanted, sources.read_bytes_max))
            self._begin, self._data = 0, memoryview(b"")
            self._first = pool.submit(sources.get, self._key, *self._left[0])

    def _read(self) -> None:
        self._data = memoryview(b"")  # not beside the next ones
        self._begin, length = self._left.popleft()
        first, self._first = self._first, None
        data = first.result() if first is not None else self._sources.get(self._key, self._begin, length)
        self._data = memoryview(data)

    def at(self, offset: int, length: int) -> memoryview:
        """Bytes of one block."""
        while self._left and offset + length > self._begin + len(self._data):
            self._read()
        if not self._begin <= offset <= offset + length <= self._begin + len(self._data):
            raise CorruptionError(f"{self._key}: [{offset}, {offset + length}) was not read")
        return self._data[offset - self._begin : offset - self._begin + length]


class _Chunks(NamedTuple):
    """Chunks (CHUNK_DTYPE) of pieces, stored blocks and bytes; and how many each piece has."""

    table: Table
    blocks: Table
    data: list[bytes]
    of_piece: NDArray[np.int64]
    blocks_of_piece: NDArray[np.int64]


class _Taking:
    """Takes the chunks of pieces, in the order of the object, out of its bytes."""

    def __init__(self, index: SegmentIndex, data: _ObjectBytes) -> None:
        self._index = index
        self._data = data
        self._decompressor = zstandard.ZstdDecompressor()
        self._decoded = -1
        self._raw = b""
        self._offsets = index.block_offsets.tolist()
        self._crc32c = index.blocks["crc32c"].tolist()
        self._is_large = index.blocks["raw_bytes"] >= COPIED_RAW_BYTES_MIN

    def chunks(self, places: Table) -> _Chunks:
        """Stored blocks and records of ``places``: a chunk for each block of each of them."""
        counts = places["end_block"] - places["first_block"]
        of = np.repeat(np.arange(len(places)), counts)
        block = positions(places["first_block"], counts)
        rows, raw = self._index.bounds.block_rows, self._index.bounds.block_raw
        run_rows = self._index.bounds.run_rows[places["in_object"]]
        first_row, end_row = (run_rows + places["first_row"])[of], (run_rows + places["end_row"])[of]
        begin, end = rows[block], rows[block + 1]
        is_own = self._is_large[block] & (begin >= first_row) & (end <= end_row)
        raw_begin = np.maximum(places["raw_begin"][of], raw[block]) - raw[block]
        raw_end = np.minimum(places["raw_end"][of], raw[block + 1]) - raw[block]
        table = np.zeros(len(block), CHUNK_DTYPE)
        table["rows"] = np.minimum(end_row, end) - np.maximum(first_row, begin)
        table["blocks"] = is_own
        table["size_bytes"] = np.where(is_own, self._index.blocks["stored_bytes"][block], raw_end - raw_begin)
        which = zip(block.tolist(), is_own.tolist(), raw_begin.tolist(), raw_end.tolist(), strict=True)
        data = [
            self._stored(number) if is_stored else self._decode(number)[first:last]
            for number, is_stored, first, last in which
        ]
        before, ends = np.cumsum([0, *is_own]), np.cumsum(counts)
        return _Chunks(
            table, self._index.blocks[block[is_own]], data, counts, before[ends] - before[ends - counts]
        )

    def _stored(self, number: int) -> bytes:
        """A block as stored; its CRC32C is checked."""
        offset, end = self._offsets[number], self._offsets[number + 1]
        stored = bytes(self._data.at(offset, end - offset))
        if fastcrc.crc32.iscsi(stored) != self._crc32c[number]:
            raise CorruptionError(f"{self._index.key}: block {number} [{offset}, {end}) fails its CRC32C")
        return stored

    def _decode(self, number: int) -> bytes:
        if number != self._decoded:
            offset, end = self._offsets[number], self._offsets[number + 1]
            where = f"{self._index.key}: block {number} [{offset}, {end})"
            stored = self._data.at(offset, end - offset)
            self._raw = bytes(expand_block(stored, self._index.blocks[number], self._decompressor, where))
            self._decoded = number
        return self._raw


def windows_of(
    candidates: Candidates, iterations: Sequence[list[OutputPart]], spool_bytes_max: int
) -> tuple[list[list[Table]], bool]:
    """Pieces of consecutive iterations that fit on the disk, and whether they are compressed there: only if all of
    them do not fit as they are."""
    objects, runs = candidates.objects, candidates.runs
    ratio = np.minimum(1.0, objects["size_bytes"] / np.maximum(objects["raw_bytes"], 1))
    steps: list[Table] = []
    decoded, packed = [], []
    for iteration in iterations:
        pieces = concatenated((part.pieces for part in iteration), PIECE_DTYPE)
        run = runs[pieces["run"]]
        length = pieces["end"] - pieces["begin"]
        stored = length * ratio[run["object"]]
        rows = run["rows"] * (length / np.maximum(length_of(run), 1))
        tables = float((rows * ROW_BYTES + PIECE_BYTES).sum())
        # At both ends of a piece, blocks may be decoded.
        decoded.append(float(np.minimum(length, stored + 2 * COPIED_RAW_BYTES_MIN).sum()) + tables)
        packed.append(float(stored.sum()) + tables)
        steps.append(pieces)
    is_packed = sum(decoded) > spool_bytes_max
    windows: list[list[Table]] = []
    used = 0.0
    for pieces, size in zip(steps, packed if is_packed else decoded, strict=True):
        if not windows or used + size > spool_bytes_max:
            windows.append([])
            used = 0.0
        windows[-1].append(pieces)
        used += size
    return windows, is_packed


def _by_object(candidates: Candidates, window: Sequence[Table]) -> dict[int, Table]:
    """Pieces of all iterations (_WANTED_DTYPE) by the object of their run."""
    pieces = np.zeros(sum(map(len, window)), _WANTED_DTYPE)
    at = 0
    for number, mine in enumerate(window):
        rows = pieces[at : at + len(mine)]
        for name in PIECE_DTYPE.names or ():
            rows[name] = mine[name]
        rows["iteration"], rows["ordinal"] = number, np.arange(len(mine))
        at += len(mine)
    objects = candidates.runs["object"][pieces["run"]]
    order = np.argsort(objects, kind="stable")
    numbers, first = np.unique(objects[order], return_index=True)
    bounds = pairwise([*first.tolist(), len(pieces)])
    return {
        number: pieces[order[begin:end]]
        for number, (begin, end) in zip(numbers.tolist(), bounds, strict=True)
    }


def _places_of(index: SegmentIndex, runs: Table, wanted: Table) -> Table:
    """Where pieces that have rows are (_PLACE_DTYPE), in the order of the object. Blocks that begin inside a piece
    belong to it, and to the first one of a run also a block that begins before."""
    found = np.zeros(len(wanted), _PLACE_DTYPE)
    for name in _WANTED_DTYPE.names or ():
        found[name] = wanted[name]
    begin, end = wanted["begin"], wanted["end"]
    ordinal = found["in_object"] = runs["ordinal"][wanted["run"]]
    bounds = index.bounds
    rows = index.runs["rows"][ordinal].astype(np.int64)
    is_lmq = index.runs["kind"][ordinal] == RunKind.LMQ
    run_rows, run_raw, run_end = (
        bounds.run_rows[ordinal],
        bounds.run_raw[ordinal],
        bounds.run_raw[ordinal + 1],
    )
    first_block, end_block = index.blocks_of_runs(ordinal)
    is_first, is_last = begin == 0, end >= index.runs["byte_count"][ordinal]
    cuts = np.searchsorted(bounds.block_raw, run_raw + np.stack([begin, end]))
    first, last = np.clip(cuts, first_block, end_block)
    first, last = np.where(is_first, first_block, first), np.where(is_last, end_block, last)

    def row_of(block: NDArray[Any]) -> NDArray[Any]:
        inside = np.maximum(0, bounds.block_rows[block] - run_rows)
        row: NDArray[Any] = np.where(block >= end_block, rows, inside)
        return row

    found["first_row"] = np.where(is_lmq, begin, np.where(is_first, 0, row_of(first)))
    found["end_row"] = np.where(is_lmq, np.minimum(end, rows), row_of(last))
    found["first_block"], found["end_block"] = np.where(is_lmq, 0, first), np.where(is_lmq, 0, last)
    found["raw_begin"] = np.where(is_first | is_lmq, run_raw, bounds.block_raw[first])
    found["raw_end"] = np.where(last >= end_block, run_end, bounds.block_raw[last])
    found = found[found["end_row"] > found["first_row"]]
    return found[np.lexsort((found["first_row"], found["in_object"]))]


def _ranges(index: SegmentIndex, places: Table) -> list[tuple[int, int]]:
    """(offset, length) of each block of ``places``, in the order of the object."""
    steps = np.zeros(len(index.blocks) + 1, np.int64)
    np.add.at(steps, places["first_block"], 1)
    np.subtract.at(steps, places["end_block"], 1)
    blocks = np.flatnonzero(np.cumsum(steps)[:-1])
    offsets = index.block_offsets[blocks].tolist()
    return list(zip(offsets, index.blocks["stored_bytes"][blocks].tolist(), strict=True))


def joined_ranges(
    ranges: list[tuple[int, int]], read_bytes_max: int = READ_BYTES_MAX
) -> list[tuple[int, int]]:
    """(offset, length) of GETs that cover ``ranges``: neighbours in one, up to ``read_bytes_max``."""
    found: list[list[int]] = []
    for offset, length in sorted(ranges):
        end = offset + length
        is_near = bool(found) and offset - found[-1][1] <= HOLE_BYTES_MAX
        if is_near and (end <= found[-1][1] or end - found[-1][0] <= read_bytes_max):
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([offset, end])
    return [(begin, end - begin) for begin, end in found]


def _offset_at(index: SegmentIndex, run: int, row: int) -> int:
    """The queue offset of a row of ``run``."""
    base = int(index.runs["base_queue_offset"][run])
    if row == 0:
        return base
    if int(index.runs["kind"][run]) != RunKind.BATCH:
        return base + row
    first = int(index.first_row[run])
    return base + int(index.stored_columns(first, first + row)[4].sum(dtype=np.int64))
