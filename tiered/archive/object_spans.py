"""Reads the stored bytes of one object from front to back, once: many small spans share a request."""

from __future__ import annotations

from tiered.archive.segment_reader import RANGE_BYTES_MAX
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import TRAILER_BYTES
from tiered.object_store.interface import ObjectStore


class ObjectSpans:
    """``end_offset``: of the object's bytes, those from there on are not read. Not thread-safe."""

    def __init__(self, store: ObjectStore, index: SegmentIndex, end_offset: int | None = None) -> None:
        self._store, self._index = store, index
        self._end_offset = index.size_bytes - TRAILER_BYTES if end_offset is None else end_offset
        self._window = memoryview(b"")
        self._window_offset = 0

    def read(self, offset: int, length: int) -> memoryview:
        """Stored bytes. Raises what the store raises."""
        begin = offset - self._window_offset
        if begin < 0 or begin + length > len(self._window):
            end = max(offset + length, min(offset + RANGE_BYTES_MAX, self._end_offset))
            self._window = memoryview(self._store.get_range(self._index.key, offset, end - offset))
            self._window_offset, begin = offset, 0
        return self._window[begin : begin + length]
