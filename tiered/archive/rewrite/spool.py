"""Keeps what sources have for each iteration: in memory up to a limit, and then in a file.

Pieces come source by source, and are wanted iteration by iteration. All work is on tables, whatever the number of
ranges: a range of an archive with many queues often has one message.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from tiered.formats.segment import RowTable
from tiered.formats.segment_layout import BLOCK_DTYPE
from tiered.model.tables import Table, begins, concatenated, copied, picked, positions
from tiered.object_store.secret_file import new_secret, secret_cipher

READ_RANGE_DTYPE = np.dtype(
    [
        ("iteration", "<i4"),
        ("rows", "<i4"),
        ("chunks", "<i4"),
        ("blocks", "<i4"),
        ("hashes", "<i4"),
        ("ordinal", "<i8"),  # among the ranges of the iteration's parts
        ("base_queue_offset", "<i8"),  # of its first row
        ("begin_byte", "<i8"),  # where that row's record begins in its run
    ]
)
"""A range that was read, and how many rows, chunks, blocks and hashes of the tables beside it are its own."""
ROW_DTYPE = np.dtype(
    [
        ("size", "<i4"),
        ("tags_code", "<i8"),
        ("store_timestamp", "<i8"),
        ("phys", "<i8"),
        ("inner_num", "<i4"),
        ("parent", "<i4"),
        ("parent_queue_offset", "<i8"),
        ("key_count", "<u2"),
    ]
)
BUFFERS_MAX = 1024
"""Buffers that one system call writes: IOV_MAX."""
CHUNK_DTYPE = np.dtype([("rows", "<i4"), ("blocks", "<i4"), ("size_bytes", "<i8")])
"""Bytes of some rows: their records back to back (``blocks`` is 0), or a block as it is stored (``blocks`` is 1)."""


@dataclass(frozen=True)
class ReadRanges:
    """Ranges (READ_RANGE_DTYPE) that were read from sources and, in their order, all that they have: rows (ROW_DTYPE),
    key hashes, chunks (CHUNK_DTYPE), blocks that stay as they are stored (BLOCK_DTYPE), and the bytes of each chunk."""

    ranges: Table
    rows: Table
    hashes: NDArray[Any]
    chunks: Table
    blocks: Table
    data: Sequence[bytes | memoryview]

    @property
    def size_bytes(self) -> int:
        """Memory of all tables and bytes."""
        tables = (self.ranges, self.rows, self.hashes, self.chunks, self.blocks)
        return sum(table.nbytes for table in tables) + int(self.chunks["size_bytes"].sum())

    def selected(self, order: NDArray[Any]) -> ReadRanges:
        """The ranges with the numbers ``order``, in this order, with their rows, hashes, chunks and blocks."""
        taken = picked(self.ranges, order)
        tables = {
            name: picked(table, positions(_starts(self.ranges[name])[order], taken[name]))
            for name, table in (("rows", self.rows), ("hashes", self.hashes), ("blocks", self.blocks))
        }
        numbers = positions(_starts(self.ranges["chunks"])[order], taken["chunks"])
        data = [self.data[number] for number in numbers.tolist()]
        return ReadRanges(ranges=taken, chunks=picked(self.chunks, numbers), data=data, **tables)

    def cut(self, bounds: Sequence[int]) -> Iterator[ReadRanges]:
        """One ReadRanges for the ranges from each of ``bounds`` up to the next one. Nothing is copied."""
        ends = {name: [0, *np.cumsum(self.ranges[name], dtype=np.int64).tolist()] for name in _COUNTS}
        for first, last in pairwise(bounds):
            rows, chunks, blocks, hashes = (slice(ends[name][first], ends[name][last]) for name in _COUNTS)
            yield ReadRanges(
                self.ranges[first:last],
                self.rows[rows],
                self.hashes[hashes],
                self.chunks[chunks],
                self.blocks[blocks],
                self.data[chunks],
            )

    def without_holes(self) -> ReadRanges:
        """The same ranges, all of one sparse run (some offsets have no row), in which the first row of each range spans
        the offsets from the end of the range before on, so that no offset is missing."""
        firsts = _starts(self.ranges["rows"])
        spans = np.add.reduceat(self.rows["inner_num"], firsts, dtype=np.int64)
        hole = self.ranges["base_queue_offset"][1:] - (self.ranges["base_queue_offset"] + spans)[:-1]
        ranges, rows = copied(self.ranges), copied(self.rows)
        rows["inner_num"][firsts[1:]] += hole.astype(np.int32)
        ranges["base_queue_offset"][1:] -= hole
        return replace(self, ranges=ranges, rows=rows)

    def row_table(self, bounds: NDArray[np.int64]) -> RowTable:
        """All rows as columns, with their queue offsets. The ranges from each of ``bounds`` up to the next one are of
        one run. Raises ValueError if a range does not continue the queue offsets of the one before in its run."""
        columns = {name: np.ascontiguousarray(self.rows[name]) for name in ROW_DTYPE.names or ()}
        spans = columns["inner_num"].astype(np.int64)
        before = np.cumsum(spans) - spans
        # Offset of a row minus the offsets spanned by all rows before it: the same in all ranges of a run.
        shift = self.ranges["base_queue_offset"] - before[_starts(self.ranges["rows"])]
        is_apart = np.diff(shift) != 0
        is_apart[bounds[1:-1] - 1] = False
        if is_apart.any():
            at = int(is_apart.argmax()) + 1
            raise ValueError(
                f"rows are missing or repeated before queue offset {self.ranges['base_queue_offset'][at]} of a run "
                "that is compacted"
            )
        columns["queue_offset"] = before + np.repeat(shift, self.ranges["rows"])
        columns["position"] = np.full(len(spans), -1, np.int64)
        return RowTable(key_hashes=self.hashes, **columns)

    def batches(self, bounds: NDArray[np.int64], size_bytes: int) -> Iterator[Batch]:
        """All chunks in the order of the ranges, in batches of about ``size_bytes``, each of one run and of one kind:
        blocks that are copied as they are stored, or records. The ranges from each of ``bounds`` up to the next one are
        of one run."""
        if not len(self.chunks):
            return
        is_stored = self.chunks["blocks"] > 0  # blocks copied as they are, else records
        chunks_of_run = np.add.reduceat(self.ranges["chunks"], bounds[:-1], dtype=np.int64)
        run = np.repeat(np.arange(len(chunks_of_run)), chunks_of_run)
        part = np.cumsum(self.chunks["size_bytes"]) // size_bytes
        is_cut = (is_stored[1:] != is_stored[:-1]) | (part[1:] != part[:-1]) | (run[1:] != run[:-1])
        firsts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(is_cut) + 1])
        run = run[firsts]
        # Rows of LMQs have no chunks: ``shift`` turns a number among rows with chunks into one among all rows.
        rows = begins(self.chunks["rows"])
        shift = begins(np.add.reduceat(self.ranges["rows"], bounds[:-1], dtype=np.int64))[:-1]
        shift = (shift - rows[begins(chunks_of_run)[:-1]])[run]
        chunks = np.append(firsts, len(self.chunks))
        blocks = begins(self.chunks["blocks"])[chunks]
        for number, first_row, end_row, its_blocks, its_chunks in zip(
            run.tolist(),
            (rows[chunks[:-1]] + shift).tolist(),
            (rows[chunks[1:]] + shift).tolist(),
            pairwise(blocks.tolist()),
            pairwise(chunks.tolist()),
            strict=True,
        ):
            yield Batch(
                number, first_row, end_row, self.blocks[slice(*its_blocks)], self.data[slice(*its_chunks)]
            )


class Batch(NamedTuple):
    """Rows [first_row, end_row) of the run number ``run`` of some ranges, and their bytes: ``data`` has the stored
    ``blocks``, or, without ``blocks``, records."""

    run: int
    first_row: int
    end_row: int
    blocks: Table
    data: Sequence[bytes | memoryview]


_COUNTS = ("rows", "chunks", "blocks", "hashes")


class _SpooledPart(NamedTuple):
    """Where the temporary file has ranges of one iteration: from which byte, in how many bytes; and the numbers of rows
    of their five tables."""

    position: int
    stored_bytes: int
    lengths: tuple[int, ...]


class IterationSpool:
    """Takes what was read source by source, and returns it iteration by iteration. What exceeds a limit of memory is in
    a temporary file without a name: a killed process leaves nothing. Not thread-safe."""

    def __init__(self, path: Path, *, is_secret: bool = False) -> None:
        """Creates the file ``path`` and removes its name. ``is_secret``: the file is encrypted. Raises OSError."""
        self._is_secret = is_secret
        self._secret = new_secret() if is_secret else b""
        self._file = path.open("w+b", buffering=0)
        path.unlink()
        self._added: list[ReadRanges] = []
        self._added_bytes = 0
        """What is in memory only."""
        self._parts: dict[int, list[_SpooledPart]] = {}
        """Where the file has the ranges of each iteration."""
        self._end = 0
        """Where the next part begins in the file."""
        self._is_packed = False
        """Whether the file is compressed."""

    def add(self, read: ReadRanges, memory_bytes_max: int | None) -> None:
        """Keep ``read``. If memory has more than ``memory_bytes_max`` then, all of it goes to the file; None: there is
        no limit."""
        self._added.append(read)
        self._added_bytes += read.size_bytes
        if memory_bytes_max is not None and self._added_bytes > memory_bytes_max:
            self._flush()

    def take(self, iteration: int) -> ReadRanges:
        """The ranges of rows that were added for an iteration (a part of a rewrite that fits into memory), in the order
        in which they are written. Iterations are taken in ascending order: what earlier ones took is no longer here.
        Raises OSError."""
        if self._parts:
            self._flush()
            read = joined_ranges([self._read(part) for part in self._parts.pop(iteration, [])])
        else:
            read = joined_ranges(self._added)
            self._added = [read]
            is_mine = read.ranges["iteration"] == iteration
            if is_mine.all():
                self._added, self._added_bytes = [], 0
            else:
                read = read.selected(np.flatnonzero(is_mine))
        return read.selected(np.argsort(read.ranges["ordinal"], kind="stable"))

    def clear(self, *, is_packed: bool) -> None:
        """Forget all. ``is_packed``: what follows is compressed in the file."""
        self._is_packed = is_packed
        # Other bytes are written over the old ones: the cipher must not encrypt both with one secret.
        self._secret = new_secret() if self._is_secret else b""
        self._added, self._added_bytes = [], 0
        self._parts, self._end = {}, 0
        self._file.truncate(0)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _flush(self) -> None:
        """Move the ranges in memory to the end of the file, those of one iteration side by side, and note where these
        are."""
        if not self._added:
            return
        read = joined_ranges(self._added)
        self._added, self._added_bytes = [], 0
        number = read.ranges["iteration"]
        if (number[1:] < number[:-1]).any():  # those of one source are usually in order
            read = read.selected(np.argsort(number, kind="stable"))
        iterations, first = np.unique(read.ranges["iteration"], return_index=True)
        parts = read.cut([*first.tolist(), len(read.ranges)])
        self._file.seek(self._end)
        for iteration, part in zip(iterations.tolist(), parts, strict=True):
            tables = (part.ranges, part.rows, part.hashes, part.chunks, part.blocks)
            stored = [*(np.ascontiguousarray(table).view(np.uint8).data for table in tables), *part.data]
            if self._is_packed:
                stored = [zstandard.ZstdCompressor(level=1).compress(b"".join(stored))]
            if self._secret:
                stored = [secret_cipher(self._secret, self._end).update(b"".join(stored))]
            stored_bytes = self._write(stored)
            spooled = _SpooledPart(self._end, stored_bytes, tuple(map(len, tables)))
            self._parts.setdefault(iteration, []).append(spooled)
            self._end += stored_bytes

    def _write(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Write ``buffers`` to the file at its present position, one behind the other; returns how many bytes they
        have."""
        total = 0
        for first in range(0, len(buffers), BUFFERS_MAX):
            batch = buffers[first : first + BUFFERS_MAX]
            size = sum(map(len, batch))
            written = os.writev(self._file.fileno(), batch)
            if written < size:
                rest = memoryview(b"".join(batch))
                while written < size:
                    written += self._file.write(rest[written:])
            total += size
        return total

    def _read(self, part: _SpooledPart) -> ReadRanges:
        """The ranges that ``_flush`` wrote as ``part`` of the file: five tables, then the bytes of their chunks.
        Raises OSError if the file is too short."""
        self._file.seek(part.position)
        # Not a bytearray, which would be filled with zeros first.
        target, begin = np.empty(part.stored_bytes, np.uint8).data, 0
        while begin < part.stored_bytes:
            count = self._file.readinto(target[begin:])
            if not count:
                raise OSError(
                    f"the temporary file {self._file.name} ends at byte {part.position + begin}, although more was "
                    "written to it"
                )
            begin += count
        if self._secret:
            target = memoryview(secret_cipher(self._secret, part.position).update(target))
        raw = zstandard.ZstdDecompressor().decompress(target) if self._is_packed else target
        begin = 0
        tables: list[Table] = []
        for count, kind in zip(part.lengths, _TABLES, strict=True):
            tables.append(np.frombuffer(raw, kind, count, begin) if count else np.zeros(0, kind))
            begin += count * kind.itemsize
        view = memoryview(raw)
        ends = accumulate(tables[3]["size_bytes"].tolist(), initial=begin)
        ranges, rows, hashes, chunks, blocks = tables
        data = [view[one:end] for one, end in pairwise(ends)]
        return ReadRanges(ranges, rows, hashes, chunks, blocks, data)


_TABLES = (READ_RANGE_DTYPE, ROW_DTYPE, np.dtype("<u8"), CHUNK_DTYPE, BLOCK_DTYPE)


def joined_ranges(parts: Sequence[ReadRanges]) -> ReadRanges:
    """All ranges of ``parts``, in their order."""
    if len(parts) == 1:
        return parts[0]
    names = ("ranges", "rows", "hashes", "chunks", "blocks")
    tables = {
        name: concatenated([getattr(part, name) for part in parts], kind)
        for name, kind in zip(names, _TABLES, strict=True)
    }
    return ReadRanges(**tables, data=[one for part in parts for one in part.data])


def _starts(counts: NDArray[Any]) -> NDArray[np.int64]:
    starts: NDArray[np.int64] = np.cumsum(counts, dtype=np.int64) - counts
    return starts
