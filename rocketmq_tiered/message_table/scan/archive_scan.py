"""Reads the slices of a partition: footers first, then only the blocks with matching rows.

Rows of consecutive runs are read together, so that an object of 100,000 small runs costs as much as one large run.
Requests run a few windows ahead; memory is bounded by windows of ``window_bytes`` message bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.message_table.plan.partitions import ObjectRef, Slices
from rocketmq_tiered.message_table.scan.object_rows import ObjectRows, Window
from rocketmq_tiered.message_table.scan.queue_scan import ArchiveScan, QueueScanner, lost
from rocketmq_tiered.message_table.scan.row_chunk import NO_BYTES, Lost, RowChunk
from rocketmq_tiered.message_table.scan.row_prefetch import ahead, ahead_with
from tiered.archive.segment_reader import SegmentReader
from tiered.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from tiered.formats.segment_index import BlockSpan, SegmentIndex
from tiered.model.tables import RunKind, Table
from tiered.object_store.interface import ObjectStore

WINDOWS_AHEAD = 2
OBJECTS_AHEAD = 2


def archive_chunks(scan: ArchiveScan, part: Slices) -> Iterator[RowChunk]:
    """All matching rows of ``part``, one window at a time.

    Raises CorruptionError naming object and range unless ``on_corrupt`` returns, and what the store raises.
    """
    lmq = part.table["kind"] == RunKind.LMQ
    queues = QueueScanner(scan, part)
    yield from queues.chunks(part.table[lmq])
    table = part.table[~lmq]
    groups = [group for group in np.split(table, np.flatnonzero(np.diff(table["object"])) + 1) if len(group)]
    refs = [part.objects[int(group["object"][0])] for group in groups]
    with ThreadPoolExecutor(WINDOWS_AHEAD + OBJECTS_AHEAD, thread_name_prefix="scan") as pool:
        opened = ahead(pool, lambda ref: _open(scan.store, ref), refs, OBJECTS_AHEAD)
        for group, ref, index in zip(groups, refs, opened, strict=True):
            if isinstance(index, SegmentIndex):
                yield from _ObjectScan(scan, pool, part, group, index).chunks()
            elif isinstance(index, NotFoundError):
                yield from queues.moved_chunks(group, index)
            else:
                scan.report(part, f"{scan.store.url}/{ref.key}: {index.message}", lost(part, group))


def _open(store: ObjectStore, ref: ObjectRef) -> SegmentIndex | NotFoundError | CorruptionError:
    try:
        reader = SegmentReader.open(store, ref.key, size_bytes=ref.size_bytes, tail_bytes=ref.tail_bytes)
    except (NotFoundError, CorruptionError) as error:
        return error
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{store.url}/{ref.key}: {error.message}") from error
    return reader.index


class _ObjectScan:
    """The slices of one open object."""

    def __init__(
        self, scan: ArchiveScan, pool: ThreadPoolExecutor, part: Slices, table: Table, index: SegmentIndex
    ) -> None:
        self._scan = scan
        self._pool = pool
        self._part = part
        self._table = table
        self._index = index
        self._rows = ObjectRows(
            part, table, index, scan.predicate, with_records=scan.with_records, window_bytes=scan.window_bytes
        )

    def chunks(self) -> Iterator[RowChunk]:
        """Matching rows, window after window."""
        try:
            self._rows.check_runs()
        except CorruptionError as error:
            self._report(error.message, lost(self._part, self._table))
            return
        windows = self._rows.windows(self._report)
        if not self._scan.with_records:
            for window in windows:
                yield self._chunk(window, NO_BYTES, np.zeros(0, np.int64))
            return
        for window, (pieces, corrupt) in ahead_with(self._pool, self._fetch, windows, WINDOWS_AHEAD):
            for span, message in corrupt:
                inside = _between(window.position, span.raw_offset, span.raw_offset + span.raw_bytes)
                rows = self._chunk(window, NO_BYTES, np.zeros(0, np.int64), inside)
                self._scan.report(self._part, self._named(message), rows=rows)
            for span, data in pieces:
                inside = _between(window.position, span.raw_offset, span.raw_offset + span.raw_bytes)
                chunk = self._chunk(window, data, window.position - span.raw_offset, inside)
                if len(chunk):
                    yield chunk

    def _report(self, message: str, ranges: Sequence[Lost]) -> None:
        self._scan.report(self._part, self._named(message), ranges)

    def _named(self, message: str) -> str:
        return f"{self._scan.store.url}/{message}"

    def _fetch(
        self, window: Window
    ) -> tuple[list[tuple[BlockSpan, NDArray[np.uint8]]], list[tuple[BlockSpan, str]]]:
        """(decoded spans, damaged blocks with their errors). Runs in the pool."""
        pieces: list[tuple[BlockSpan, NDArray[np.uint8]]] = []
        corrupt: list[tuple[BlockSpan, str]] = []
        for span in window.spans:
            stored = memoryview(self._scan.store.get_range(self._index.key, span.offset, span.length))
            try:
                pieces.append((span, self._index.decode_blocks(span, stored)))
            except CorruptionError:
                for block in range(span.first_block, span.end_block):
                    one = self._rows.span(block, block + 1)
                    begin = one.offset - span.offset
                    try:
                        data = self._index.decode_blocks(one, stored[begin : begin + one.length])
                        pieces.append((one, data))
                    except CorruptionError as error:
                        corrupt.append((one, error.message))
        return pieces, corrupt

    def _chunk(
        self,
        window: Window,
        data: NDArray[np.uint8],
        starts: NDArray[np.int64],
        at: slice = slice(None),
    ) -> RowChunk:
        size, tags_code, stamp, phys, inner = (column[at] for column in window.columns[:5])
        run = window.run[at]
        return RowChunk(
            cluster=self._part.archive.cluster,
            broker=self._part.archive.broker,
            queues=self._part.queues,
            queue=self._rows.queue_of_run[run],
            queue_offset=window.offset[at],
            inner_num=inner,
            phys=phys,
            size=size,
            store_timestamp=stamp,
            tags_code=tags_code,
            is_batch=self._index.runs["kind"][run] == RunKind.BATCH,
            data=data,
            starts=starts[at] if len(starts) else starts,
            source=f"{self._scan.store.url}/{self._index.key}",
        )


def _between(position: NDArray[np.int64], low: int, high: int) -> slice:
    """Ascending ``position`` in [low, high)."""
    return slice(int(np.searchsorted(position, low)), int(np.searchsorted(position, high)))
