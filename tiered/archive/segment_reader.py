"""A TieredFileSegment: one object opened for reading, and a cache of open ones.

One ranged GET opens a segment, or one run group of it; another one if the tail is large. One GET reads consecutive
blocks. ``tiered.formats.segment_index`` decodes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.state import RunChunk
from tiered.formats.run_part import RunPart
from tiered.formats.segment import RowTable
from tiered.formats.segment_directory import SegmentDirectory, directory_span
from tiered.formats.segment_index import BlockSpan, KeySection, SegmentIndex
from tiered.formats.segment_layout import check_tail_length
from tiered.model.lru import Lru
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore

RANGE_BYTES_MAX = 16 * 1024 * 1024
"""Stored bytes of one GET; a larger block is read by one GET too."""
CACHE_BYTES = 64 * 1024 * 1024
WHOLE, DIRECTORY = -1, -2
T = TypeVar("T", SegmentDirectory, "SegmentReader")


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
    def open(cls, store: ObjectStore, key: str, *, size_bytes: int, tail_bytes: int) -> SegmentReader:
        """Open an object the catalog describes, by one ranged GET of its tail."""
        check_tail_length(key, size_bytes, tail_bytes)
        tail = store.get_range(key, size_bytes - tail_bytes, tail_bytes)
        return cls(store, SegmentIndex(key, size_bytes, tail))

    @classmethod
    def open_group(cls, store: ObjectStore, directory: SegmentDirectory, group: int) -> SegmentReader:
        """Open one run group of an object, by one ranged GET unless it was read with the directory."""
        stored = directory.stored(group)
        if stored is None:
            stored = memoryview(store.get_range(directory.key, *directory.span_of(group)))
        return cls(store, SegmentIndex.of_group(directory, group, stored))

    @property
    def nbytes(self) -> int:
        """Memory, roughly, for the budget of a cache."""
        return self.index.nbytes

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
        pieces = self.index.split_span(run, span, RANGE_BYTES_MAX)
        parts = [
            self.index.decode_blocks(piece, self._store.get_range(self.index.key, piece.offset, piece.length))
            for piece in pieces
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def read_directory(store: ObjectStore, key: str, size_bytes: int, tail_bytes: int) -> SegmentDirectory:
    """The directory of an object the catalog describes, by one ranged GET."""
    check_tail_length(key, size_bytes, tail_bytes)
    return SegmentDirectory(key, size_bytes, store.get_range(key, *directory_span(size_bytes, tail_bytes)))


class SegmentCache:
    """LRU cache of open segments, of at most ``cache_bytes``. Thread-safe."""

    def __init__(self, store: ObjectStore, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._parts: Lru[tuple[str, int], SegmentReader | SegmentDirectory] = Lru(cache_bytes)
        """By object and run group; of each, all of a tail under WHOLE, its directory under DIRECTORY."""

    def open(
        self, key: str, *, size_bytes: int, tail_bytes: int, ordinal: int | None = None
    ) -> SegmentReader:
        """The segment of ``key``, or its run group that has the run ``ordinal``; fetched unless cached."""
        if ordinal is None:
            return self._kept(
                (key, WHOLE),
                lambda: SegmentReader.open(self._store, key, size_bytes=size_bytes, tail_bytes=tail_bytes),
            )
        directory = self._kept(
            (key, DIRECTORY), lambda: read_directory(self._store, key, size_bytes, tail_bytes)
        )
        group = directory.group_of(ordinal)
        return self._kept((key, group), lambda: SegmentReader.open_group(self._store, directory, group))

    def _kept(self, part: tuple[str, int], fetch: Callable[[], T]) -> T:
        with self._lock:
            found = self._parts.get(part)
            if found is not None:
                return cast("T", found)
        fetched = fetch()
        with self._lock:
            # A single one is kept even if it is larger than the cache.
            self._parts.put(part, fetched, min(fetched.nbytes, self._parts.bytes_max))
        return fetched

    def of_run(self, chunk: RunChunk, run: np.void) -> SegmentReader:
        """The segment of a run of ``chunk``, or its run group."""
        place = chunk.objects[int(run["object"])]
        key, size_bytes = chunk.object_keys[int(place["key"])], int(place["size_bytes"])
        return self.open(
            key, size_bytes=size_bytes, tail_bytes=int(place["tail_bytes"]), ordinal=int(run["ordinal"])
        )

    @property
    def held_bytes(self) -> int:
        """Memory of the cached segments, roughly."""
        with self._lock:
            return self._parts.held_bytes
