"""A TieredFileSegment: one object opened for reading, and a cache of open ones.

One ranged GET opens a segment, one GET reads consecutive blocks. ``tiered.formats.segment_index`` decodes them.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.state import RunChunk
from tiered.formats.run_part import RunPart
from tiered.formats.segment import RowTable
from tiered.formats.segment_index import BlockSpan, KeySection, SegmentIndex
from tiered.formats.segment_layout import PART_RUNS, check_tail_length
from tiered.model.lru import Lru
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore

RANGE_BYTES_MAX = 16 * 1024 * 1024
"""Stored bytes of one GET; a larger block is read by one GET too."""
CACHE_BYTES = 64 * 1024 * 1024


class Records(NamedTuple):
    """Records of some rows: row i is ``data[starts[i] : starts[i] + sizes[i]]``."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int32]


class SegmentReader:
    """Runs of one object. Raises CorruptionError, UnsupportedFormatError, or the store's errors."""

    def __init__(self, store: ObjectStore, index: SegmentIndex) -> None:
        self._store = store
        self.index = index

    @classmethod
    def open(
        cls, store: ObjectStore, key: str, *, size_bytes: int, tail_bytes: int, part: int | None = None
    ) -> SegmentReader:
        """Open an object the catalog describes, by one ranged GET of its tail; with ``part``, only that of the tail."""
        check_tail_length(key, size_bytes, tail_bytes)
        tail = store.get_range(key, size_bytes - tail_bytes, tail_bytes)
        return cls(store, SegmentIndex(key, size_bytes, tail, part))

    @property
    def queues(self) -> list[QueueKey]:
        """Queues, indexed by ``runs["queue"]`` and the rows' ``parent``."""
        return self.index.queues

    def row_columns(self, run: int | RunPart) -> RowTable:
        """Consume-queue rows of ``run``, from the tail alone."""
        return self.index.row_columns(run)

    def read_blocks(self, run: int | RunPart, first_row: int, end_row: int) -> Records:
        """Records of rows [first_row, end_row) of ``run``: consecutive blocks, as few GETs as possible."""
        span = self.index.block_span(run, first_row, end_row)
        columns = self.row_columns(run)
        data = self._fetch(run, span)
        starts = columns.position[first_row:end_row] - span.raw_offset
        return Records(data, starts, columns.size[first_row:end_row])

    def key_hashes(self) -> KeySection:
        """Key hashes of all rows of the object, by one GET."""
        offset, length = self.index.key_span
        return self.index.decode_keys(
            self._store.get_range(self.index.key, offset, length) if length else b""
        )

    def _fetch(self, run: int | RunPart, span: BlockSpan) -> NDArray[np.uint8]:
        """The decoded bytes of consecutive blocks of ``run``, by GETs of at most RANGE_BYTES_MAX."""
        pieces = self.index.split_span(run, span, RANGE_BYTES_MAX)
        parts = [
            self.index.decode_blocks(piece, self._store.get_range(self.index.key, piece.offset, piece.length))
            for piece in pieces
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


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
