"""Keeps tables of large sources in a file, for later rounds that move other queues of the same sources.

Each round of a large sequence of pages needs some queues of all its sources. Decoding a tail of thousands of runs for
some of them takes longer than reading their part of its tables.
"""

from __future__ import annotations

import os
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.iteration_spool import ROW_DTYPE
from rocketmq_tiered.maintenance.source_tables import SOURCE_RUN_DTYPE, SourceRows, SourceTables
from tiered.formats.segment_index import SegmentBounds
from tiered.formats.segment_layout import BLOCK_DTYPE, PAGE_ROWS
from tiered.model.tables import Table, begins

RUNS_MIN = 1024
"""Tails of fewer runs are decoded again."""
_RUN_DTYPE = np.dtype([
    *SOURCE_RUN_DTYPE.descr, ("first_row", "<i8"), ("first_raw", "<i8"), ("first_block", "<i4"), ("end_block", "<i4"),
])  # fmt: skip
_BLOCK_DTYPE = np.dtype([*BLOCK_DTYPE.descr, ("offset", "<i8"), ("first_row", "<i8"), ("first_raw", "<i8")])
"""As runs, with an entry more: the end of the last."""
_DTYPES = (_RUN_DTYPE, _BLOCK_DTYPE, ROW_DTYPE, np.dtype("<i8"), np.dtype("<u8"))
"""Of the tables of a source: runs, blocks, rows, the first hash of each row and the end of the last, hashes."""
_RUNS, _BLOCKS, _ROWS, _FIRST_HASHES, _HASHES = range(len(_DTYPES))


class _Place(NamedTuple):
    """Where the file has each of the tables of a source, and their lengths."""

    positions: list[int]
    lengths: list[int]


class KeptTables:
    """Tables by object key, up to ``bytes_max`` in ``directory``, which must exist when the first ones are kept.
    Not thread-safe, except for ``in``. Its file has no name: a killed process leaves nothing."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self._directory = directory
        self.bytes_max = bytes_max
        self._file: BinaryIO | None = None
        self._places: dict[str, _Place] = {}
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.clear()

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def keep(self, source: SourceTables, hash_count: int) -> None:
        """Write the tables of a whole object with so many key hashes, unless they are small, have LMQs or exceed the
        limit. Raises OSError."""
        if len(source.runs) < RUNS_MIN or source.has_lmqs:
            return
        rows = int(source.first_row[-1])
        lengths = [len(source.runs) + 1, len(source.blocks) + 1, rows, rows + 1, hash_count]
        sizes = [length * kind.itemsize for length, kind in zip(lengths, _DTYPES, strict=True)]
        *positions, end = accumulate(sizes, initial=self.size_bytes)
        if end > self.bytes_max:
            return
        if self._file is None:
            # Not buffered: with a full disk, closing it would fail again.
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 - closed by clear
        place = _Place(positions, lengths)
        self._write(place, _RUNS, 0, _run_table(source))
        self._write(place, _BLOCKS, 0, _block_table(source))
        hashes = 0
        for first in range(0, rows, PAGE_ROWS):
            found = source.rows(first, min(first + PAGE_ROWS, rows))
            self._write(place, _ROWS, first, found.table)
            self._write(place, _FIRST_HASHES, first, hashes + begins(found.table["key_count"]))
            self._write(place, _HASHES, hashes, found.hashes)
            hashes += len(found.hashes)
        self._places[source.key], self.size_bytes = place, end

    def load(self, key: str, first_run: int, end_run: int) -> SourceTables:
        """Tables that were kept, of those of runs [first_run, end_run) that exist. Raises KeyError or OSError."""
        place = self._places[key]
        count = place.lengths[_RUNS] - 1
        first_run, end_run = min(first_run, count - 1), min(end_run, count)
        runs = self._read(place, _RUNS, first_run, end_run + 1)
        first_block, end_block = int(runs["first_block"][0]), int(runs["end_block"][-2])
        blocks = self._read(place, _BLOCKS, first_block, end_block + 1)
        own_blocks = np.empty(len(blocks) - 1, BLOCK_DTYPE)
        for name in BLOCK_DTYPE.names or ():
            own_blocks[name] = blocks[name][:-1]
        run_rows, run_raw, block_rows, block_raw = (
            np.ascontiguousarray(table[name])
            for table in (runs, blocks)
            for name in ("first_row", "first_raw")
        )

        def rows(first: int, end: int) -> SourceRows:
            hashes = self._read(place, _FIRST_HASHES, first, end + 1)
            return SourceRows(
                self._read(place, _ROWS, first, end),
                self._read(place, _HASHES, int(hashes[0]), int(hashes[-1])),
            )

        return SourceTables(
            key, first_run, runs[:-1], own_blocks, blocks["offset"][:-1], run_rows,
            SegmentBounds(run_rows, run_raw, block_rows, block_raw), rows,
        )  # fmt: skip

    def clear(self) -> None:
        """Forget all, and free the disk."""
        self._places, self.size_bytes = {}, 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, place: _Place, table: int, first: int, entries: NDArray[Any]) -> None:
        assert self._file is not None
        position = place.positions[table] + first * _DTYPES[table].itemsize
        left = np.ascontiguousarray(entries).view(np.uint8).data
        while left:
            count = os.pwrite(self._file.fileno(), left, position)
            left, position = left[count:], position + count

    def _read(self, place: _Place, table: int, first: int, end: int) -> NDArray[Any]:
        """Entries [first, end) of a table."""
        assert self._file is not None
        kind = _DTYPES[table]
        found = np.empty(end - first, kind)
        left, position = found.view(np.uint8).data, place.positions[table] + first * kind.itemsize
        while left:
            count = os.preadv(self._file.fileno(), [left], position)
            if not count:
                raise OSError(f"kept tables end at {position}")
            left, position = left[count:], position + count
        return found


def _run_table(source: SourceTables) -> Table:
    first_block, end_block = source.bounds.blocks_of_runs(np.arange(len(source.runs)))
    return _with_end(
        source.runs, SOURCE_RUN_DTYPE, _RUN_DTYPE, first_row=source.bounds.run_rows,
        first_raw=source.bounds.run_raw, first_block=first_block, end_block=end_block,
    )  # fmt: skip


def _block_table(source: SourceTables) -> Table:
    return _with_end(
        source.blocks, BLOCK_DTYPE, _BLOCK_DTYPE, first_row=source.bounds.block_rows,
        first_raw=source.bounds.block_raw, offset=source.block_offsets,
    )  # fmt: skip


def _with_end(table: Table, own: np.dtype[Any], kept: np.dtype[Any], **columns: NDArray[Any]) -> Table:
    """Fields ``own`` of ``table`` and ``columns``, as ``kept``, with an entry more."""
    found = np.zeros(len(table) + 1, kept)
    for name in own.names or ():
        found[name][:-1] = table[name]
    for name, column in columns.items():
        found[name][: len(column)] = column
    return found
