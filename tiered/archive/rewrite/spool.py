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

FOUND_DTYPE = np.dtype(
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
"""A range that was read, and how much of the other tables is its own."""
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
"""Records back to back, or one of ``blocks`` as it is stored."""


@dataclass(frozen=True)
class FoundRanges:
    """Pieces (FOUND_DTYPE) and what they have, one behind the other: rows (ROW_DTYPE), key hashes, chunks
    (CHUNK_DTYPE), stored blocks (BLOCK_DTYPE), and the bytes of each chunk."""

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

    def selected(self, order: NDArray[Any]) -> FoundRanges:
        """The ranges with the numbers ``order``, in this order, with their rows, hashes, chunks and blocks."""
        taken = picked(self.ranges, order)
        tables = {
            name: picked(table, positions(_starts(self.ranges[name])[order], taken[name]))
            for name, table in (("rows", self.rows), ("hashes", self.hashes), ("blocks", self.blocks))
        }
        places = positions(_starts(self.ranges["chunks"])[order], taken["chunks"])
        data = [self.data[place] for place in places.tolist()]
        return FoundRanges(ranges=taken, chunks=picked(self.chunks, places), data=data, **tables)

    def cut(self, bounds: Sequence[int]) -> Iterator[FoundRanges]:
        """The ranges from each of ``bounds`` up to the next one, with what they have. Nothing is copied."""
        ends = {name: [0, *np.cumsum(self.ranges[name], dtype=np.int64).tolist()] for name in _COUNTS}
        for first, last in pairwise(bounds):
            rows, chunks, blocks, hashes = (slice(ends[name][first], ends[name][last]) for name in _COUNTS)
            yield FoundRanges(
                self.ranges[first:last],
                self.rows[rows],
                self.hashes[hashes],
                self.chunks[chunks],
                self.blocks[blocks],
                self.data[chunks],
            )

    def without_holes(self) -> FoundRanges:
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
        """All rows as columns. The ranges from each of ``bounds`` up to the next one are of one run. Raises ValueError
        if a range does not continue the queue offsets of the one before in its run."""
        columns = {name: np.ascontiguousarray(self.rows[name]) for name in ROW_DTYPE.names or ()}
        spans = columns["inner_num"].astype(np.int64)
        before = np.cumsum(spans) - spans
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
        for number, first_row, end_row, own, place in zip(
            run.tolist(),
            (rows[chunks[:-1]] + shift).tolist(),
            (rows[chunks[1:]] + shift).tolist(),
            pairwise(blocks.tolist()),
            pairwise(chunks.tolist()),
            strict=True,
        ):
            yield Batch(number, first_row, end_row, self.blocks[slice(*own)], self.data[slice(*place)])


class Batch(NamedTuple):
    """Rows of one run, and their stored blocks, or none if these are records, and bytes. ``run``: its number among
    those of the ranges."""

    run: int
    first_row: int
    end_row: int
    blocks: Table
    data: Sequence[bytes | memoryview]


_COUNTS = ("rows", "chunks", "blocks", "hashes")


class _Place(NamedTuple):
    """Where the file has ranges of an iteration, in how many bytes, and the lengths of their tables."""

    position: int
    stored_bytes: int
    lengths: tuple[int, ...]


class IterationSpool:
    """Not thread-safe. Its file has no name: a killed process leaves nothing, and close writes nothing to the disk.
    ``is_secret``: it is encrypted."""

    def __init__(self, path: Path, *, is_secret: bool = False) -> None:
        """Creates the file ``path`` and removes its name. Raises OSError."""
        self._is_secret = is_secret
        self._secret = new_secret() if is_secret else b""
        self._file = path.open("w+b", buffering=0)
        path.unlink()
        self._added: list[FoundRanges] = []
        self._added_bytes = 0
        """What is in memory only."""
        self._places: dict[int, list[_Place]] = {}
        """Where the file has the ranges of each iteration."""
        self._end = 0
        self._is_packed = False
        """Whether the file is compressed."""

    def add(self, found: FoundRanges, memory_bytes_max: int | None) -> None:
        """Keep ``found``; everything goes to the file above ``memory_bytes_max``, if there is one."""
        self._added.append(found)
        self._added_bytes += found.size_bytes
        if memory_bytes_max is not None and self._added_bytes > memory_bytes_max:
            self._flush()

    def take(self, iteration: int) -> FoundRanges:
        """The ranges of rows that were added for an iteration (a part of a rewrite that fits into memory), in the order
        in which they are written. Iterations are taken in ascending order: what earlier ones took is no longer here.
        Raises OSError."""
        if self._places:
            self._flush()
            found = joined_ranges([self._read(place) for place in self._places.pop(iteration, [])])
        else:
            found = joined_ranges(self._added)
            self._added = [found]
            is_mine = found.ranges["iteration"] == iteration
            if is_mine.all():
                self._added, self._added_bytes = [], 0
            else:
                found = found.selected(np.flatnonzero(is_mine))
        return found.selected(np.argsort(found.ranges["ordinal"], kind="stable"))

    def clear(self, *, is_packed: bool) -> None:
        """Forget all. ``is_packed``: what follows is compressed in the file."""
        self._is_packed = is_packed
        self._secret = new_secret() if self._is_secret else b""  # the same places get other bytes
        self._added, self._added_bytes = [], 0
        self._places, self._end = {}, 0
        self._file.truncate(0)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _flush(self) -> None:
        """Move the ranges in memory to the end of the file, those of one iteration side by side, and note where these
        are."""
        if not self._added:
            return
        found = joined_ranges(self._added)
        self._added, self._added_bytes = [], 0
        number = found.ranges["iteration"]
        if (number[1:] < number[:-1]).any():  # those of one source are usually in order
            found = found.selected(np.argsort(number, kind="stable"))
        iterations, first = np.unique(found.ranges["iteration"], return_index=True)
        parts = found.cut([*first.tolist(), len(found.ranges)])
        self._file.seek(self._end)
        for iteration, part in zip(iterations.tolist(), parts, strict=True):
            tables = (part.ranges, part.rows, part.hashes, part.chunks, part.blocks)
            stored = [*(np.ascontiguousarray(table).view(np.uint8).data for table in tables), *part.data]
            if self._is_packed:
                stored = [zstandard.ZstdCompressor(level=1).compress(b"".join(stored))]
            if self._secret:
                stored = [secret_cipher(self._secret, self._end).update(b"".join(stored))]
            stored_bytes = self._write(stored)
            place = _Place(self._end, stored_bytes, tuple(map(len, tables)))
            self._places.setdefault(iteration, []).append(place)
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

    def _read(self, place: _Place) -> FoundRanges:
        """The ranges that ``_flush`` wrote at ``place`` of the file: five tables, then the bytes of their chunks.
        Raises OSError if the file is too short."""
        self._file.seek(place.position)
        target, begin = np.empty(place.stored_bytes, np.uint8).data, 0  # a bytearray would be filled first
        while begin < place.stored_bytes:
            count = self._file.readinto(target[begin:])
            if not count:
                raise OSError(
                    f"the temporary file {self._file.name} ends at byte {place.position + begin}, and more was written"
                )
            begin += count
        if self._secret:
            target = memoryview(secret_cipher(self._secret, place.position).update(target))
        raw = zstandard.ZstdDecompressor().decompress(target) if self._is_packed else target
        begin = 0
        tables: list[Table] = []
        for count, kind in zip(place.lengths, _TABLES, strict=True):
            tables.append(np.frombuffer(raw, kind, count, begin) if count else np.zeros(0, kind))
            begin += count * kind.itemsize
        view = memoryview(raw)
        ends = accumulate(tables[3]["size_bytes"].tolist(), initial=begin)
        ranges, rows, hashes, chunks, blocks = tables
        data = [view[one:end] for one, end in pairwise(ends)]
        return FoundRanges(ranges, rows, hashes, chunks, blocks, data)


_TABLES = (FOUND_DTYPE, ROW_DTYPE, np.dtype("<u8"), CHUNK_DTYPE, BLOCK_DTYPE)


def joined_ranges(parts: Sequence[FoundRanges]) -> FoundRanges:
    """All ranges of ``parts``, in their order."""
    if len(parts) == 1:
        return parts[0]
    names = ("ranges", "rows", "hashes", "chunks", "blocks")
    tables = {
        name: concatenated([getattr(part, name) for part in parts], kind)
        for name, kind in zip(names, _TABLES, strict=True)
    }
    return FoundRanges(**tables, data=[one for part in parts for one in part.data])


def _starts(counts: NDArray[Any]) -> NDArray[np.int64]:
    starts: NDArray[np.int64] = np.cumsum(counts, dtype=np.int64) - counts
    return starts
