"""Rows that are read by queue offset: light queues through their parents, and slices whose object is gone.

An object may have been compacted away since the plan: then the newest catalog says where its messages are. What has
expired since is an error, never a shorter answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pipeline.partitions import Slices
from pipeline.predicate import Predicate
from pipeline.row_chunk import CorruptPlace, RowChunk
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
    ) -> None:
        self._store = store
        self._part = part
        self._predicate = predicate
        self._window_bytes = window_bytes
        self._on_corrupt = on_corrupt
        self._segments = SegmentCache(store, cache_bytes=CACHE_BYTES)
        self._run_index = RunIndex(store, cache_bytes=CACHE_BYTES)

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
            known = state.queue(queue)
            if known is None or int(known["min_queue_offset"]) > int(row["begin"]):
                raise self._gone(f"{queue} from offset {int(row['begin'])} on has expired")
            if int(row["end"]) > self._kept_end(state, queue):
                raise self._gone(f"{queue} before offset {int(row['end'])} was taken back by a replaced log")
            yield from self._read(state, row)

    def _gone(self, what: str) -> NotFoundError:
        return NotFoundError(
            f"{what} since catalog version {self._part.archive.version}",
            hint="run the job again: it plans from the newest version",
        )

    def _kept_end(self, state: CatalogState, queue: QueueKey) -> int:
        """Up to here the queue still has the messages it had when the partition was planned."""
        row = state.queue(queue)
        end = 0 if row is None else int(row["end_queue_offset"])
        for line in state.lines:
            if line.version > self._part.archive.version and line.common_version > 0:
                common = load(self._store, version=line.common_version).queue(queue)
                end = min(end, 0 if common is None else int(common["end_queue_offset"]))
        return end

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
        passing = self._predicate.for_topic(queue.topic).mask(columns)
        if passing is not None:
            kept &= passing
        return chunk if kept.all() else chunk.taken(np.flatnonzero(kept))

    def _report(self, queue: QueueKey | None, message: str) -> None:
        archive = self._part.archive
        self._on_corrupt(
            CorruptPlace(archive.cluster, archive.broker, queue, f"{self._store.url}: {message}")
        )
