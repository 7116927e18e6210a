"""Rows that are read by queue offset: light queues through their parents, and slices whose object is gone.

An object may have been compacted away since the plan: then the newest catalog says where its messages are. What has
expired since is an error, never a shorter answer, unless whoever asks has said that it may be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np

from pipeline.options.predicate import Predicate
from pipeline.plan.partitions import OffsetRange, Slices
from pipeline.plan.superseded_plan import KeptEnds, expired, taken_back
from pipeline.scan.row_chunk import CorruptPlace, RowChunk
from tiered.catalog.pages import RunIndex
from tiered.catalog.reading import load
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError
from tiered.flat_file.composite_flat_file import Batch, QueueReader
from tiered.flat_file.segment_reader import SegmentCache
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, Table
from tiered.object_store.protocol import ObjectStore

READ_ROWS = 8192
CACHE_BYTES = 16 << 20
logger = logging.getLogger(__name__)

OnCorrupt = Callable[[CorruptPlace], None]


class QueueScanner:
    """Reads slices of one partition by queue offset."""

    def __init__(
        self,
        store: ObjectStore,
        part: Slices,
        predicate: Predicate,
        window_bytes: int,
        on_corrupt: OnCorrupt,
        *,
        may_have_expired: bool = False,
    ) -> None:
        self._store = store
        self._part = part
        self._may_have_expired = may_have_expired
        self._predicate = predicate
        self._window_bytes = window_bytes
        self._on_corrupt = on_corrupt
        self._segments = SegmentCache(store, cache_bytes=CACHE_BYTES)
        self._run_index = RunIndex(store, cache_bytes=CACHE_BYTES)
        self._ends: KeptEnds | None = None

    def chunks(self, table: Table) -> Iterator[RowChunk]:
        """The rows of these slices, from the catalog version of the plan."""
        if len(table):
            state = load(self._store, version=self._part.archive.version)
            for row in table:
                yield from self._read(state, row)

    def moved_chunks(self, table: Table, missing: NotFoundError) -> Iterator[RowChunk]:
        """The same from the newest version, because ``missing`` is no longer there."""
        state = load(self._store)
        if state.version == self._part.archive.version:
            message = f"catalog version {state.version} names what is not there: {missing.message}"
            self._report(None, message)
            return
        for row in table:
            queue = self._part.queues[int(row["queue"])]
            self._require(queue, int(row["begin"]), int(row["end"]), state)
            yield from self._read(state, row)

    def _require(self, queue: QueueKey, begin: int, end: int, newest: CatalogState) -> None:
        """Raises NotFoundError unless ``newest`` still has offsets [begin, end) as they were planned, or may have lost
        the first of them."""
        version = self._part.archive.version
        row = newest.queue(queue)
        floor = end if row is None else int(row["min_queue_offset"])
        if floor > begin:
            error = expired(queue, OffsetRange(begin, min(floor, end)), version)
            if not self._may_have_expired:
                raise error
            logger.warning("skipped: %s", error.message)
        if self._ends is None or self._ends.newest.version != newest.version:
            self._ends = KeptEnds(self._store, newest, version)
        if end > self._ends.of(queue):
            raise taken_back(queue, end, version)

    def _read(self, state: CatalogState, row: np.void) -> Iterator[RowChunk]:
        queue, end = self._part.queues[int(row["queue"])], int(row["end"])
        reader = QueueReader(self._store, state, queue, segments=self._segments, run_index=self._run_index)
        offset, rows = int(row["begin"]), READ_ROWS
        while offset < end:
            try:
                batch = reader.read(offset, max_rows=min(rows, end - offset), max_bytes=self._window_bytes)
            except CorruptionError as error:
                if rows > 1:
                    rows = 1
                    continue
                self._report(queue, error.message)
                offset += 1
                continue
            if reader.state.version != state.version:  # something was gone: it had to look at a newer one
                self._require(queue, offset, end, reader.state)
            rows = min(rows * 2, READ_ROWS)
            if len(batch):
                yield self._chunk(batch, row, queue)
            if batch.next_offset <= offset:
                return
            offset = batch.next_offset

    def _chunk(self, batch: Batch, row: np.void, queue: QueueKey) -> RowChunk:
        is_batch = int(row["kind"]) == RunKind.BATCH
        chunk = RowChunk(
            cluster=self._part.archive.cluster,
            broker=self._part.archive.broker,
            queues=self._part.queues,
            queue=np.full(len(batch), int(row["queue"]), np.uint32),
            queue_offset=batch.queue_offsets,
            inner_num=batch.inner_num,
            phys=batch.phys,
            size=batch.sizes,
            store_timestamp=batch.store_timestamp,
            tags_code=batch.tags_code,
            is_batch=np.full(len(batch), is_batch),
            data=batch.data,
            starts=batch.starts,
            source=f"{self._store.url} version {self._part.archive.version}",
        )
        kept = (chunk.queue_offset >= int(row["begin"])) & (chunk.queue_offset < int(row["end"]))
        columns = {
            "queueOffset": chunk.queue_offset, "storeTimestamp": chunk.store_timestamp,
            "commitLogOffset": chunk.phys, "storeSize": chunk.size, "innerNum": chunk.inner_num,
            "tagsCode": chunk.tags_code,
        }  # fmt: skip
        is_lmq = int(row["kind"]) == RunKind.LMQ
        predicate = self._predicate.for_lmq() if is_lmq else self._predicate.for_topic(queue.topic)
        passing = predicate.mask(columns)
        if passing is not None:
            kept &= passing
        return chunk if kept.all() else chunk.taken(np.flatnonzero(kept))

    def _report(self, queue: QueueKey | None, message: str) -> None:
        archive = self._part.archive
        self._on_corrupt(
            CorruptPlace(archive.cluster, archive.broker, queue, f"{self._store.url}: {message}")
        )
