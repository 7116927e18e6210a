"""A TieredFileSegment: one object opened for reading, and a cache of open ones.

One ranged GET opens a segment, one GET reads consecutive blocks. ``tiered.formats.segment_index`` decodes them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from tiered.catalog.state import RunChunk
from tiered.errors import CorruptionError, TieredError
from tiered.formats.memory_bound import memory_contained
from tiered.formats.part_rows import PartRows, ends_by_blocks, rows_of_parts
from tiered.formats.run_part import RunPart
from tiered.formats.segment import RowTable
from tiered.formats.segment_index import KeySection, SegmentIndex
from tiered.formats.segment_layout import PART_RUNS, check_tail_length
from tiered.model.lru import Lru
from tiered.model.queue import QueueKey
from tiered.model.tables import Table
from tiered.object_store.interface import ObjectStore

RANGE_BYTES_MAX = 16 * 1024 * 1024
"""Stored bytes of one GET; a larger block is read by one GET too."""
RAW_BYTES_AT_ONCE = 4 * 1024 * 1024
CACHE_BYTES = 64 * 1024 * 1024


class Records(NamedTuple):
    """Records of some rows: row i is ``data[starts[i] : starts[i] + sizes[i]]``."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int32]


class SegmentReader:
    """Reads runs of one open data object. Its methods raise CorruptionError, UnsupportedFormatError, or the store's
    errors."""

    def __init__(self, store: ObjectStore, index: SegmentIndex, ahead_to: int = 0) -> None:
        """``ahead_to``: blocks are read from front to back, so that a GET may fetch those that come next too, up to
        that offset of the object; the reader is then not thread-safe."""
        self._store = store
        self.index = index
        self._ahead_to = ahead_to
        self._window, self._window_offset = memoryview(b""), 0

    @classmethod
    def open(
        cls, store: ObjectStore, key: str, *, size_bytes: int, tail_bytes: int, part: int | None = None
    ) -> SegmentReader:
        """Open the data object ``key``, whose sizes the catalog has, by one ranged GET of its tail. ``part``: only that
        part of the tail, which describes PART_RUNS runs, is decoded."""
        check_tail_length(key, size_bytes, tail_bytes)
        tail = store.get_range(key, size_bytes - tail_bytes, tail_bytes)
        return cls(store, SegmentIndex(key, size_bytes, tail, part))

    @property
    def queues(self) -> Sequence[QueueKey]:
        """Queues, indexed by ``runs["queue"]`` and the rows' ``parent``."""
        return self.index.queues

    def row_columns(self, run: int | RunPart) -> RowTable:
        """Consume-queue rows of ``run``, from the tail alone."""
        return self.index.row_columns(run)

    def read_blocks(self, run: int | RunPart, first_row: int, end_row: int) -> Records:
        """Records of rows [first_row, end_row) of ``run``: consecutive blocks, as few GETs as possible."""
        span = self.index.block_span(run, first_row, end_row)
        columns = self.row_columns(run)
        data = self.raw(span.first_block, span.end_block)
        starts = columns.position[first_row:end_row] - span.raw_offset
        return Records(data, starts, columns.size[first_row:end_row])

    def records_of_parts(self, parts: Table) -> Iterator[tuple[PartRows, Records]]:
        """Rows of ``parts``, runs of rows in the order of ``in_object_order`` and none of them of an LMQ, with their
        records: the whole blocks of about RAW_BYTES_AT_ONCE at a time. Raises CorruptionError for rows that do not fit
        the blocks."""
        index, ordinal, blocks = self.index, parts["ordinal"], self.index.bounds.block_raw
        raw = index.bounds.run_raw[ordinal] + parts["base_byte"] - index.runs["base_byte"][ordinal]
        end = int(np.searchsorted(blocks, raw[-1] + int(parts["byte_count"][-1])))
        ahead = SegmentReader(self._store, index, ahead_to=int(index.block_offsets[end]))
        for rows in rows_of_parts(index, parts, ends_by_blocks(index, parts, RAW_BYTES_AT_ONCE)):
            begin = raw[rows.part] + rows.position
            first = int(np.searchsorted(blocks, begin[0], side="right")) - 1
            last = int(np.searchsorted(blocks, begin[-1] + rows.size[-1]))
            found = Records(ahead.raw(first, last), begin - blocks[first], rows.size)
            if (
                (found.starts < 0).any()
                or (found.sizes < 1).any()
                or (found.starts + found.sizes > len(found.data)).any()
            ):
                raise CorruptionError(
                    f"{index.key}: rows of its index point outside blocks {first} to {last - 1}",
                    hint="tiered verify ARCHIVE_URL --full lists all damage",
                )
            yield rows, found

    def key_hashes(self) -> KeySection:
        """Key hashes of all rows of the object, by one GET."""
        offset, length = self.index.key_span
        return self.index.decode_keys(
            self._store.get_range(self.index.key, offset, length) if length else b""
        )

    def raw(self, first: int, end: int) -> NDArray[np.uint8]:
        """The records of blocks [first, end) of the object, back to back; those of one block are read-only."""
        blocks = self.whole_blocks(first, end)
        if len(blocks) == 1:
            return blocks[0]
        with memory_contained(f"the messages of the blocks {first} to {end - 1} of {self.index.key}"):
            return np.concatenate(blocks)

    def whole_blocks(self, first: int, end: int) -> list[NDArray[np.uint8]]:
        """The records of each of the blocks [first, end) of the object."""
        whole = []
        for block in self.blocks(first, end):
            if isinstance(block, TieredError):
                raise block
            whole.append(block)
        return whole

    def blocks(self, first: int, end: int) -> Iterator[NDArray[np.uint8] | TieredError]:
        """The records of each of the blocks [first, end) of the object, or why they do not decode, by GETs of at most
        RANGE_BYTES_MAX. Raises what the store raises."""
        index, decompressor = self.index, zstandard.ZstdDecompressor()
        for low, high in pairwise(index.cuts(first, end, RANGE_BYTES_MAX)):
            at = index.block_offsets[low : high + 1].tolist()
            try:
                stored = self.stored(at[0], at[-1] - at[0])
            except CorruptionError as error:
                # Encrypted bytes are checked as they are read: find the damaged block.
                yield from (
                    [error]
                    if high == low + 1
                    else chain.from_iterable(self.blocks(block, block + 1) for block in range(low, high))
                )
                continue
            pieces = [stored[begin - at[0] : stop - at[0]] for begin, stop in pairwise(at)]
            yield from index.decode_each(range(low, high), pieces, decompressor)

    def stored(self, offset: int, length: int) -> memoryview:
        """The ``length`` bytes of the object from byte ``offset`` on, as they are stored, with which the bytes that
        come next may be fetched too (``ahead_to``). Raises what the store raises."""
        begin = offset - self._window_offset
        if begin < 0 or begin + length > len(self._window):
            end = max(offset + length, min(offset + RANGE_BYTES_MAX, self._ahead_to))
            try:
                window = memoryview(self._store.get_range(self.index.key, offset, end - offset))
            except CorruptionError:  # perhaps only the bytes fetched in advance are damaged
                return memoryview(self._store.get_range(self.index.key, offset, length))
            if not self._ahead_to:
                return window
            self._window, self._window_offset, begin = window, offset, 0
        return self._window[begin : begin + length]


class SegmentCache:
    """LRU cache of open segments, of at most ``cache_bytes``. Thread-safe."""

    def __init__(self, store: ObjectStore, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._readers: Lru[tuple[str, int | None], SegmentReader] = Lru(cache_bytes)

    def open(
        self, key: str, *, size_bytes: int, tail_bytes: int, ordinal: int | None = None
    ) -> SegmentReader:
        """The data object ``key``, opened for reading, or the part of its tail that has the run ``ordinal``: its end
        is read, unless it is cached. Raises what that raises."""
        part = None if ordinal is None else ordinal // PART_RUNS
        with self._lock:
            cached = self._readers.get((key, None)) or self._readers.get((key, part))
            if cached is not None:
                return cached
        reader = SegmentReader.open(self._store, key, size_bytes=size_bytes, tail_bytes=tail_bytes, part=part)
        with self._lock:
            # A single one is kept even if it is larger than the cache.
            held = key, None if reader.index.is_whole else part
            self._readers.put(held, reader, min(reader.index.nbytes, self._readers.bytes_max))
        return reader

    def of_run(self, chunk: RunChunk, run: np.void) -> SegmentReader:
        """The segment of a run of ``chunk``, or the part that has it."""
        place, ordinal = chunk.objects[int(run["object"])], int(run["ordinal"])
        key, size_bytes = chunk.object_keys[int(place["key"])], int(place["size_bytes"])
        return self.open(key, size_bytes=size_bytes, tail_bytes=int(place["tail_bytes"]), ordinal=ordinal)

    @property
    def held_bytes(self) -> int:
        """Memory of the cached segments, roughly."""
        with self._lock:
            return self._readers.held_bytes
