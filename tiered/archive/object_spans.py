"""Reads one object from front to back, once: many small runs share a request, and runs in one block its decoding.

Of a run only some blocks and rows are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.archive.segment_reader import RANGE_BYTES_MAX
from tiered.formats.run_part import RunPart
from tiered.formats.segment_index import BlockSpan, SegmentIndex
from tiered.formats.segment_layout import TRAILER_BYTES
from tiered.model.tables import RunKind
from tiered.object_store.interface import ObjectStore

ROWS_MAX = 128 * 1024
SPAN_BYTES_MAX = 8 << 20


class Rows(NamedTuple):
    """Consecutive consume-queue rows of a run, and the queue's offset of each."""

    size: NDArray[Any]
    tags_code: NDArray[Any]
    store_timestamp: NDArray[Any]
    phys: NDArray[Any]
    inner_num: NDArray[Any]
    parent: NDArray[Any]
    parent_queue_offset: NDArray[Any]
    queue_offset: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.size)

    def where(self, mask: NDArray[np.bool_]) -> Rows:
        """The rows of ``mask``."""
        return Rows(*(column[mask] for column in self))


class SpanRecords(NamedTuple):
    """Rows and their records: row i is ``data[starts[i] : starts[i] + rows.size[i]]``."""

    rows: Rows
    data: NDArray[np.uint8]
    starts: NDArray[np.int64]


class ObjectSpans:
    """``end_offset``: of the object's bytes, those from there on are not read. Not thread-safe."""

    def __init__(self, store: ObjectStore, index: SegmentIndex, end_offset: int | None = None) -> None:
        self._store, self._index = store, index
        self._end_offset = index.size_bytes - TRAILER_BYTES if end_offset is None else end_offset
        self._window = memoryview(b"")
        self._window_offset = 0
        self._decoded: tuple[tuple[int, int], NDArray[np.uint8] | None] = ((-1, -1), None)

    def read(self, offset: int, length: int) -> memoryview:
        """Stored bytes. Raises what the store raises."""
        begin = offset - self._window_offset
        if begin < 0 or begin + length > len(self._window):
            end = max(offset + length, min(offset + RANGE_BYTES_MAX, self._end_offset))
            self._window = memoryview(self._store.get_range(self._index.key, offset, end - offset))
            self._window_offset, begin = offset, 0
        return self._window[begin : begin + length]

    def blocks(self, span: BlockSpan) -> NDArray[np.uint8]:
        """Raw bytes of ``span``. Raises CorruptionError."""
        numbers = (span.first_block, span.end_block)
        if self._decoded[0] != numbers or self._decoded[1] is None:
            self._decoded = (numbers, None)
            self._decoded = (numbers, self._index.decode_blocks(span, self.read(span.offset, span.length)))
        found = self._decoded[1]
        assert found is not None
        return found

    def records(self, part: RunPart) -> Iterator[SpanRecords]:
        """The records of ``part``, which is not of an LMQ, in order."""
        first, position, base = 0, 0, self._index.spans_begin(part)
        while first < part.rows:
            span = self._index.block_span(part, first, part.rows, raw_bytes_max=SPAN_BYTES_MAX)
            rows = rows_of(self._index, part, first, span.end_row, base)
            sizes = rows.size.astype(np.int64)
            ends = position + np.cumsum(sizes)
            yield SpanRecords(rows, self.blocks(span), ends - sizes - span.raw_offset)
            first, position = span.end_row, int(ends[-1])
            base = int(rows.queue_offset[-1] + rows.inner_num[-1])


def rows_of(index: SegmentIndex, part: RunPart, first: int, end: int, base: int) -> Rows:
    """Rows [first, end) of ``part``; the offsets that the first of them spans begin at ``base``."""
    begin = int(index.first_row[part.ordinal]) + part.first_row
    columns = index.stored_columns(begin + first, begin + end)
    size, tags_code, stamp, phys, inner_num, parent, parent_offset = columns
    spans = inner_num.astype(np.int64)
    offsets = base + np.cumsum(spans) - spans
    if int(index.runs["kind"][part.ordinal]) == RunKind.SPARSE:
        offsets, inner_num = base + np.cumsum(spans) - 1, np.ones(len(spans), np.int32)
    return Rows(size, tags_code, stamp, phys, inner_num, parent, parent_offset, offsets)


def all_rows(index: SegmentIndex, part: RunPart) -> Iterator[Rows]:
    """All rows of ``part``, some at a time."""
    base = index.spans_begin(part)
    for first in range(0, part.rows, ROWS_MAX):
        rows = rows_of(index, part, first, min(first + ROWS_MAX, part.rows), base)
        base = int(rows.queue_offset[-1] + rows.inner_num[-1])
        yield rows
