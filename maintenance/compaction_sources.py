"""Reads what one iteration of a compaction needs: rows, keys, stored blocks and records of pieces of runs.

A block that only one piece uses stays as it is stored. Any other one is decoded, one at a time, and its records are
distributed over the pieces. Sources are opened by one GET, whose bytes a file keeps for later iterations.

Iterations are as large as memory, and a source has a few kilobytes for each. So its bytes for many iterations, a
*window* as large as the disk allows, are read together and kept in another file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import fastcrc
import numpy as np
import zstandard
from numpy.typing import NDArray

from maintenance.compaction_plan import Candidates, OutputPart
from tiered.errors import CorruptionError
from tiered.flat_file.key_section_reader import key_bytes_guess
from tiered.formats.segment import SHARED_BLOCK_BYTES, RowTable
from tiered.formats.segment_index import BlockSpan, KeySection, SegmentIndex, expand_block
from tiered.formats.segment_layout import check_tail_length
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, Table
from tiered.object_store.interface import ObjectStore

MIB = 1024 * 1024
READ_BYTES_MAX = 16 * MIB
"""Limit of one GET; a larger block is read by one GET too."""
HOLE_BYTES_MAX = MIB
"""Unneeded bytes between two ranges that one GET reads too."""
WHOLE_BYTES_MAX = MIB
"""Sources up to this size are read by one GET as a whole."""
IN_FLIGHT_BYTES = 24 * MIB
READERS_MAX = 8
COPIED_RAW_BYTES_MIN = SHARED_BLOCK_BYTES // 2
"""Smaller blocks are packed again, except at an object's end: an object of many small blocks is slow to read."""


@dataclass(frozen=True)
class StoredBlocks:
    """Blocks (BLOCK_DTYPE) that one piece alone uses, as they are stored."""

    blocks: Table
    data: bytes


@dataclass(frozen=True)
class PieceRecords:
    """Records of a piece, back to back."""

    data: bytes
    sizes: NDArray[Any]


@dataclass(frozen=True)
class SourceColumns:
    """Columns of neighbouring rows of one source, across runs, in the order of ROW_COLUMNS; then parents and keys.

    ``hash_ends`` has one entry more than there are rows.
    """

    size: NDArray[Any]
    tags_code: NDArray[Any]
    store_timestamp: NDArray[Any]
    phys: NDArray[Any]
    inner_num: NDArray[Any]
    parent: NDArray[Any]
    parent_queue_offset: NDArray[Any]
    key_count: NDArray[Any]
    hash_ends: NDArray[Any]
    key_hashes: NDArray[Any]


@dataclass(frozen=True, slots=True)
class PieceRows:
    """The rows [begin, end) of ``columns``. ``base_queue_offset``: of the first one; ``begin_byte``: where its record
    begins in its run."""

    columns: SourceColumns
    begin: int
    end: int
    base_queue_offset: int
    begin_byte: int
    chunks: list[StoredBlocks | PieceRecords]

    @property
    def end_queue_offset(self) -> int:
        """One past its last row."""
        return self.base_queue_offset + int(self.columns.inner_num[self.begin : self.end].sum(dtype=np.int64))


PieceName = tuple[int, int]
"""Run and begin of a piece."""


class _Bounds(NamedTuple):
    """Where the rows and blocks of a piece are in its object."""

    run: int
    first_row: int
    end_row: int
    span: BlockSpan | None

    def place_in(self, index: SegmentIndex) -> tuple[int, int]:
        """Its rows [first, end) in the object."""
        begin = int(index.first_row[self.run])
        return begin + self.first_row, begin + self.end_row


class CompactionSources:
    """The objects that a compaction reads. ``spooled``: a file that keeps what opened them, up to half of
    ``spool_bytes_max``; the other half is for windows."""

    def __init__(
        self, store: ObjectStore, candidates: Candidates, spooled: Path, spool_bytes_max: int
    ) -> None:
        self._store = store
        self._candidates = candidates
        self._file = spooled.open("w+b")
        self._spool_bytes_max = spool_bytes_max // 2
        self._window_file = spooled.with_suffix(".window").open("w+b")
        self._window_bytes_max = spool_bytes_max - self._spool_bytes_max
        self._window_bytes = 0
        self._windows: Iterator[list[list[OutputPart]]] = iter(())
        self._left: list[list[OutputPart]] = []
        self._window_pieces: dict[int, list[tuple[int, int, int]]] = {}
        self._kept: dict[int, list[tuple[int, int, int]]] = {}
        """Object -> (offset in it, length, position in the file) of what was read for the window."""
        self._spool_bytes = 0
        self._places: dict[int, tuple[int, int]] = {}
        """Object -> (position in the file, length) of its last bytes."""
        self._lock = threading.Lock()
        self.parents: list[QueueKey] = list(candidates.queues)
        """What ``parent`` of LMQ rows indexes."""
        self._parent_numbers = {queue: number for number, queue in enumerate(self.parents)}
        self.gets = 0
        self.bytes_read = 0

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._file.close()
        self._window_file.close()

    def expect(self, iterations: Sequence[list[OutputPart]]) -> None:
        """``read`` will be called for each of ``iterations``, in this order."""
        self._windows = self._cut_windows(iterations)
        self._left = []

    def _cut_windows(self, iterations: Sequence[list[OutputPart]]) -> Iterator[list[list[OutputPart]]]:
        """Consecutive iterations whose stored bytes fit on the disk."""
        objects, runs = self._candidates.objects, self._candidates.runs
        ratio = objects["size_bytes"] / np.maximum(objects["raw_bytes"], 1)
        window: list[list[OutputPart]] = []
        size = 0.0
        for iteration in iterations:
            mine = sum(
                float(
                    (
                        (part.pieces["end"] - part.pieces["begin"])
                        * ratio[runs["object"][part.pieces["run"]]]
                    ).sum()
                )
                for part in iteration
            )
            if window and size + mine > self._window_bytes_max:
                yield window
                window, size = [], 0.0
            window.append(iteration)
            size += mine
        if window:
            yield window

    def _enter_window(self) -> None:
        """The window of the next iteration, if that begins one."""
        if not self._left:
            self._left = next(self._windows, [])
            self._kept, self._window_bytes = {}, 0
            # A window of one iteration is read as it is needed.
            self._window_pieces = _by_object(
                self._candidates, (part for one in self._left for part in one) if len(self._left) > 1 else ()
            )
        self._left = self._left[1:]

    def open(self, number: int) -> tuple[SegmentIndex, KeySection, memoryview]:
        """Index and keys of an object, and its last bytes, with which it was opened."""
        row = self._candidates.objects[number]
        key = self._candidates.object_keys[int(row["key"])]
        size, tail = int(row["size_bytes"]), int(row["tail_bytes"])
        check_tail_length(key, size, tail)
        length = size if size <= WHOLE_BYTES_MAX else min(size, tail + key_bytes_guess(int(row["rows"])))
        last_bytes = self._last_bytes(number, key, size, length)
        index, end = SegmentIndex(key, size, last_bytes), memoryview(last_bytes)
        offset, stored_bytes = index.key_span
        keys = index.decode_keys(self._range(key, size, end, offset, stored_bytes))
        return index, keys, end

    def read(self, parts: Iterable[OutputPart]) -> dict[PieceName, PieceRows]:
        """The pieces of one iteration that have rows."""
        self._enter_window()
        wanted = _by_object(self._candidates, parts)
        found: dict[PieceName, PieceRows] = {}
        largest = max((int(self._candidates.objects["size_bytes"][number]) for number in wanted), default=1)
        readers = max(1, min(READERS_MAX, IN_FLIGHT_BYTES // min(READ_BYTES_MAX, largest)))
        with ThreadPoolExecutor(readers, thread_name_prefix="compaction-read") as pool:
            for pieces in pool.map(lambda item: self._pieces_of(*item), wanted.items()):
                found.update(pieces)
        return found

    def whole_run(self, index: SegmentIndex, keys: KeySection, run: int) -> PieceRows:
        """All rows of a run of the candidates, without its blocks."""
        self._check_runs(index, [run])
        row = self._candidates.runs[run]
        place = _Bounds(int(row["ordinal"]), 0, int(row["rows"]), None)
        columns = self._columns(index, keys, place.place_in(index))
        return PieceRows(columns, 0, place.end_row, int(row["base_queue_offset"]), 0, [])

    # -- one source -----------------------------------------

    def _pieces_of(self, number: int, pieces: list[tuple[int, int, int]]) -> dict[PieceName, PieceRows]:
        index, keys, end = self.open(number)
        self._check_runs(index, [run for run, _, _ in pieces])
        ordinals = self._candidates.runs["ordinal"]
        bounds: list[tuple[PieceName, _Bounds]] = []
        for run, begin, piece_end in pieces:
            place = _bounds(index, int(ordinals[run]), begin, piece_end)
            if place.end_row > place.first_row:
                bounds.append(((run, begin), place))
        if not bounds:
            return {}
        bounds.sort(key=lambda item: (item[1].run, item[1].first_row))
        first, _ = bounds[0][1].place_in(index)
        _, last = bounds[-1][1].place_in(index)
        columns = self._columns(index, keys, (first, last))
        taking = _Taking(index, self._data(number, index, end, [place for _, place in bounds]))
        found = {}
        for name, place in bounds:
            begin_row, end_row = (row - first for row in place.place_in(index))
            span = place.span
            found[name] = PieceRows(
                columns, begin_row, end_row, _offset_at(index, place.run, place.first_row),
                max(0, span.raw_offset) if span is not None else 0,
                [] if span is None else taking.chunks(place, span, columns.size[begin_row:end_row]),
            )  # fmt: skip
        return found

    def _check_runs(self, index: SegmentIndex, runs: list[int]) -> None:
        """The catalog and the object must agree on the runs."""
        rows = self._candidates.runs[runs]
        ordinals = rows["ordinal"]
        if int(ordinals.max()) >= len(index.runs):
            raise CorruptionError(f"{index.key}: has no run {int(ordinals.max())}")
        own = index.runs[ordinals]
        differs = np.zeros(len(rows), bool)
        for name in ("kind", "base_queue_offset", "end_queue_offset", "rows", "base_byte", "byte_count"):
            differs |= own[name] != rows[name]
        queues = self._candidates.queues
        for at, (queue, ordinal) in enumerate(zip(rows["queue"].tolist(), ordinals.tolist(), strict=True)):
            if differs[at] or index.queue_of(ordinal) != queues[queue]:
                raise CorruptionError(f"{index.key}: run {ordinal} is not the catalog's of {queues[queue]}")

    def _columns(self, index: SegmentIndex, keys: KeySection, place: tuple[int, int]) -> SourceColumns:
        """The rows [first, last) of the object: copies, which keep nothing else in memory."""
        first, last = place
        size, tags, stamp, phys, inner, parent, parent_offset = map(
            np.array, index.stored_columns(first, last)
        )
        kinds = index.runs["kind"][_runs_between(index, first, last)]
        if bool((kinds == RunKind.LMQ).any()):
            parent = self._parent_column(index.queues, parent)
        counts = np.array(keys.counts[first:last])
        hash_ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        before = int(keys.counts[:first].sum(dtype=np.int64))
        hashes = np.array(keys.hashes[before : before + int(hash_ends[-1])])
        return SourceColumns(
            size, tags, stamp, phys, inner, parent, parent_offset, counts, hash_ends, hashes
        )  # fmt: skip

    def _parent_column(self, queues: Sequence[QueueKey], parent: NDArray[Any]) -> NDArray[np.int32]:
        if int(parent.max(initial=-1)) >= len(queues):
            raise CorruptionError("the parent of an LMQ row is not in the footer")
        with self._lock:
            numbers = np.full(len(queues) + 1, -1, np.int32)
            for local in np.unique(parent[parent >= 0]).tolist():
                number = self._parent_numbers.setdefault(queues[local], len(self.parents))
                if number == len(self.parents):
                    self.parents.append(queues[local])
                numbers[local] = number
            found: NDArray[np.int32] = numbers[parent]
        return found

    # -- bytes -----------------------------------------

    def _last_bytes(self, number: int, key: str, size: int, length: int) -> bytes:
        with self._lock:
            place = self._places.get(number)
            if place is not None:
                self._file.seek(place[0])
                return self._file.read(place[1])
        data = self._get(key, size - length, length)
        with self._lock:
            if number not in self._places and self._spool_bytes + length <= self._spool_bytes_max:
                self._file.seek(self._spool_bytes)
                self._file.write(data)
                self._places[number] = (self._spool_bytes, length)
                self._spool_bytes += length
        return data

    def _get(self, key: str, offset: int, length: int) -> bytes:
        data = self._store.get_range(key, offset, length)
        with self._lock:
            self.gets += 1
            self.bytes_read += length
        return data

    def _range(self, key: str, size: int, end: memoryview, offset: int, length: int) -> memoryview:
        """Bytes of an object of which ``end`` is known."""
        known = size - len(end)
        if offset >= known:
            return end[offset - known : offset - known + length]
        return memoryview(self._get(key, offset, length)) if length else memoryview(b"")

    def _data(
        self, number: int, index: SegmentIndex, end: memoryview, places: Iterable[_Bounds]
    ) -> list[tuple[int, memoryview]]:
        """(offset, bytes) that cover all blocks of ``places``."""
        wanted = _ranges(index, places)
        if all(offset >= index.size_bytes - len(end) for offset, _ in wanted):
            return [
                (offset, self._range(index.key, index.size_bytes, end, offset, length))
                for offset, length in wanted
            ]
        kept = self._window_of(number, index)
        found = []
        for offset, length in wanted if kept else joined_ranges(wanted):
            data = self._from_window(kept, offset, length)
            if data is None:
                data = self._range(index.key, index.size_bytes, end, offset, length)
            found.append((offset, data))
        return found

    def _window_of(self, number: int, index: SegmentIndex) -> list[tuple[int, int, int]]:
        """What the file has of an object for this window; read now unless it was, as far as the disk allows."""
        pieces = self._window_pieces.get(number)
        if pieces is None:
            return []
        if number in self._kept:  # one thread reads an object
            return self._kept[number]
        ordinals = self._candidates.runs["ordinal"]
        places = [_bounds(index, int(ordinals[run]), begin, end) for run, begin, end in pieces]
        kept: list[tuple[int, int, int]] = []
        for offset, length in joined_ranges(_ranges(index, places)):
            with self._lock:
                position = self._window_bytes
                if position + length > self._window_bytes_max:
                    break
                self._window_bytes += length
            os.pwrite(self._window_file.fileno(), self._get(index.key, offset, length), position)
            kept.append((offset, length, position))
        self._kept[number] = kept
        return kept

    def _from_window(self, kept: list[tuple[int, int, int]], offset: int, length: int) -> memoryview | None:
        for begin, size, position in kept:
            if begin <= offset and offset + length <= begin + size:
                data = os.pread(self._window_file.fileno(), length, position + offset - begin)
                if len(data) == length:
                    return memoryview(data)
        return None


class _Taking:
    """Takes the chunks of pieces, in the order of the object, out of its bytes."""

    def __init__(self, index: SegmentIndex, data: list[tuple[int, memoryview]]) -> None:
        self._index = index
        self._data = data
        self._decompressor = zstandard.ZstdDecompressor()
        self._decoded = -1
        self._raw: bytes | memoryview = b""

    def chunks(
        self, place: _Bounds, span: BlockSpan, sizes: NDArray[Any]
    ) -> list[StoredBlocks | PieceRecords]:
        """Stored blocks and records of one piece."""
        found: list[StoredBlocks | PieceRecords] = []
        rows, raw = self._index.bounds_of_blocks(place.run, span)
        blocks = self._index.blocks[span.first_block : span.end_block]
        offsets = span.offset + np.concatenate([[0], np.cumsum(blocks["stored_bytes"], dtype=np.int64)])
        ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        at = 0
        while at < len(blocks):
            last = at
            while last < len(blocks) and self._is_own(blocks[last], rows[last + 1] - rows[last]):
                last += 1
            if last > at:
                stored = self._checked(blocks[at:last], offsets[at : last + 1])
                found.append(StoredBlocks(blocks[at:last], stored))
                at = last
                continue
            first_row, end_row = rows[at], rows[at + 1]
            decoded = self._decode(span.first_block + at, blocks[at], int(offsets[at]))
            # The block may begin with records of other runs: then the piece begins inside it.
            begin = int(ends[first_row]) - (span.raw_offset + raw[at] - max(0, span.raw_offset))
            records = bytes(memoryview(decoded)[begin : begin + int(ends[end_row] - ends[first_row])])
            found.append(PieceRecords(records, sizes[first_row:end_row]))
            at += 1
        return found

    def _is_own(self, block: Any, rows: int) -> bool:
        return int(block["rows"]) == rows and int(block["raw_bytes"]) >= COPIED_RAW_BYTES_MIN

    def _stored(self, offset: int, length: int) -> memoryview:
        for begin, data in self._data:
            if begin <= offset and offset + length <= begin + len(data):
                return data[offset - begin : offset - begin + length]
        raise CorruptionError(f"{self._index.key}: [{offset}, {offset + length}) was not read")

    def _checked(self, blocks: Table, offsets: NDArray[Any]) -> bytes:
        """Neighbouring blocks as stored, each with its CRC32C checked."""
        pieces = []
        for number, crc32c in enumerate(blocks["crc32c"].tolist()):
            begin, end = int(offsets[number]), int(offsets[number + 1])
            piece = self._stored(begin, end - begin)
            if fastcrc.crc32.iscsi(piece) != crc32c:
                raise CorruptionError(f"{self._index.key}: block [{begin}, {end}) fails its CRC32C")
            pieces.append(piece)
        return b"".join(pieces)

    def _decode(self, number: int, block: Any, offset: int) -> bytes | memoryview:
        if number != self._decoded:
            length = int(block["stored_bytes"])
            where = f"{self._index.key}: block {number} [{offset}, {offset + length})"
            self._raw = expand_block(self._stored(offset, length), block, self._decompressor, where)
            self._decoded = number
        return self._raw


def _by_object(candidates: Candidates, parts: Iterable[OutputPart]) -> dict[int, list[tuple[int, int, int]]]:
    """Pieces by the object of their run."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for part in parts:
        objects = candidates.runs["object"][part.pieces["run"]].tolist()
        for number, piece in zip(objects, part.pieces.tolist(), strict=True):
            found.setdefault(number, []).append(piece)
    return found


def _ranges(index: SegmentIndex, places: Iterable[_Bounds]) -> list[tuple[int, int]]:
    """(offset, length) of the blocks of ``places``, in pieces of one GET."""
    return [
        (span.offset, span.length)
        for place in places
        if place.span is not None
        for span in index.split_span(place.run, place.span, READ_BYTES_MAX)
    ]


def joined_ranges(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(offset, length) of GETs that cover ``ranges``: neighbours in one, up to READ_BYTES_MAX."""
    found: list[list[int]] = []
    for offset, length in sorted(ranges):
        end = offset + length
        is_near = bool(found) and offset - found[-1][1] <= HOLE_BYTES_MAX
        if is_near and (end <= found[-1][1] or end - found[-1][0] <= READ_BYTES_MAX):
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([offset, end])
    return [(begin, end - begin) for begin, end in found]


def joined_rows(pieces: Sequence[PieceRows]) -> RowTable:
    """The rows of consecutive pieces of one run."""

    def joined(name: str) -> NDArray[Any]:
        parts = [getattr(piece.columns, name)[piece.begin : piece.end] for piece in pieces]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    inner = joined("inner_num")
    spans = inner.astype(np.int64)
    hashes = [
        piece.columns.key_hashes[piece.columns.hash_ends[piece.begin] : piece.columns.hash_ends[piece.end]]
        for piece in pieces
    ]
    return RowTable(
        position=np.full(len(inner), -1, np.int64),
        size=joined("size"),
        tags_code=joined("tags_code"),
        store_timestamp=joined("store_timestamp"),
        phys=joined("phys"),
        queue_offset=pieces[0].base_queue_offset + np.cumsum(spans) - spans,
        inner_num=inner,
        key_count=joined("key_count"),
        parent=joined("parent"),
        parent_queue_offset=joined("parent_queue_offset"),
        key_hashes=np.concatenate(hashes),
    )


def _runs_between(index: SegmentIndex, first_row: int, end_row: int) -> slice:
    """The runs that rows [first_row, end_row) of the object belong to."""
    first = int(np.searchsorted(index.first_row, first_row, side="right")) - 1
    return slice(first, int(np.searchsorted(index.first_row, end_row, side="left")))


def _bounds(index: SegmentIndex, run: int, begin: int, end: int) -> _Bounds:
    """The rows of a piece: those of the blocks that begin inside [begin, end) of the run."""
    rows = int(index.runs["rows"][run])
    if int(index.runs["kind"][run]) == RunKind.LMQ:
        return _Bounds(run, begin, min(end, rows), None)
    whole = index.block_span(run, 0, rows)
    if begin == 0 and end == int(index.runs["byte_count"][run]):
        return _Bounds(run, 0, rows, whole)
    block_rows, block_raw = index.bounds_of_blocks(run, whole)
    starts = np.array(block_raw[:-1]) + whole.raw_offset
    first_row = 0 if begin == 0 else _row_from(block_rows, starts, begin)
    end_row = rows if end >= int(index.runs["byte_count"][run]) else _row_from(block_rows, starts, end)
    if end_row <= first_row:
        return _Bounds(run, first_row, first_row, None)
    return _Bounds(run, first_row, end_row, index.block_span(run, first_row, end_row))


def _row_from(block_rows: list[int], starts: NDArray[Any], position: int) -> int:
    """The first row of the first block that begins at ``position`` of the run or behind it."""
    return block_rows[int(np.searchsorted(starts, position, side="left"))]


def _offset_at(index: SegmentIndex, run: int, row: int) -> int:
    """The queue offset of a row of ``run``."""
    base = int(index.runs["base_queue_offset"][run])
    if row == 0:
        return base
    if int(index.runs["kind"][run]) != RunKind.BATCH:
        return base + row
    first = int(index.first_row[run])
    return base + int(index.stored_columns(first, first + row)[4].sum(dtype=np.int64))
