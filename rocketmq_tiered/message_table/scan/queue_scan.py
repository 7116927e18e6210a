"""Rows read by queue offset: LMQs through their parents, and slices whose object no longer exists.

A compacted object may be deleted after the plan was made: the newest catalog names the new place of its messages.
Messages that expired since are an error, never a shorter result, unless the scan allows it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fetcher.rows.message import MessageBatch
from fetcher.rows.scan_reader import ScanReader
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.plan.partitions import OffsetRange, Slices
from rocketmq_tiered.message_table.plan.superseded_plan import KeptEnds, expired, taken_back
from rocketmq_tiered.message_table.scan.row_chunk import CorruptPlace, Lost, OnCorrupt, RowChunk
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, Table
from tiered.object_store.interface import ObjectStore

READ_ROWS = 8192
CACHE_BYTES = 16 << 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArchiveScan:
    """How the partitions of one archive are read. ``store`` is rooted at the archive."""

    store: ObjectStore
    predicate: Predicate
    with_records: bool
    window_bytes: int
    on_corrupt: OnCorrupt
    may_have_expired: bool = False

    def report(
        self, part: Slices, message: str, ranges: Sequence[Lost] = (), rows: RowChunk | None = None
    ) -> None:
        """Pass damage to ``on_corrupt``, which may raise."""
        self.on_corrupt(CorruptPlace(part.archive.cluster, part.archive.broker, message, ranges, rows))


class QueueScanner:
    """Reads slices of one partition by queue offset."""

    def __init__(self, scan: ArchiveScan, part: Slices) -> None:
        self._scan = scan
        self._store = scan.store
        self._part = part
        self._reader: ScanReader | None = None
        self._ends: KeptEnds | None = None

    def chunks(self, table: Table) -> Iterator[RowChunk]:
        """The rows of the slices in ``table``, from the catalog version of the plan."""
        if len(table):
            state = load(self._store, version=self._part.archive.version)
            for row in table:
                yield from self._read(state, row)

    def moved_chunks(self, table: Table, missing: NotFoundError) -> Iterator[RowChunk]:
        """The same from the newest version, after their object was ``missing``."""
        state = load(self._store)
        if state.version == self._part.archive.version:
            message = f"catalog version {state.version} names a missing object: {missing.message}"
            self._report(message, lost(self._part, table))
            return
        for row in table:
            queue = self._part.queues[int(row["queue"])]
            self._require(queue, int(row["begin"]), int(row["end"]), state)
            yield from self._read(state, row)

    def _require(self, queue: QueueKey, begin: int, end: int, newest: CatalogState) -> None:
        """Raises NotFoundError unless ``newest`` still has the planned messages in [begin, end).

        With ``may_have_expired`` the first of them may be missing.
        """
        version = self._part.archive.version
        row = newest.queue(queue)
        floor = end if row is None else int(row["min_queue_offset"])
        if floor > begin:
            error = expired(queue, OffsetRange(begin, min(floor, end)), version)
            if not self._scan.may_have_expired:
                raise error
            logger.warning("skipped: %s", error.message)
        if self._ends is None or self._ends.newest.version != newest.version:
            self._ends = KeptEnds(self._store, newest, version)
        if end > self._ends.of(queue):
            raise taken_back(queue, end, version)

    def _read(self, state: CatalogState, row: np.void) -> Iterator[RowChunk]:
        queue, end = self._part.queues[int(row["queue"])], int(row["end"])
        reader = self._reader = self._reader or ScanReader(self._store, state, cache_bytes=CACHE_BYTES)
        offset, rows, max_bytes = int(row["begin"]), READ_ROWS, self._scan.window_bytes
        while offset < end:
            try:
                read, state_read = reader.read(
                    state, queue, offset, count=min(rows, end - offset), max_bytes=max_bytes
                )
            except CorruptionError as error:
                if rows > 1:
                    rows = 1
                    continue
                self._report(error.message, [(queue, offset, offset + 1)])
                offset += 1
                continue
            if state_read.version != state.version:  # an object was missing
                self._require(queue, offset, end, state_read)
                state = state_read
            rows = min(rows * 2, READ_ROWS)
            if len(read.batch):
                yield self._chunk(read.batch, row)
            if read.next_offset <= offset:
                return
            offset = read.next_offset

    def _chunk(self, batch: MessageBatch, row: np.void) -> RowChunk:
        data, starts = batch.joined()
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
            is_batch=np.full(len(batch), int(row["kind"]) == RunKind.BATCH),
            data=data,
            starts=starts,
            source=f"{self._store.url} version {self._part.archive.version}",
        )
        inside = (chunk.queue_offset >= int(row["begin"])) & (chunk.queue_offset < int(row["end"]))
        chunk = chunk if inside.all() else chunk.taken(np.flatnonzero(inside))
        return chunk.matching(self._scan.predicate, is_lmq=int(row["kind"]) == RunKind.LMQ)

    def _report(self, message: str, ranges: Sequence[Lost]) -> None:
        self._scan.report(self._part, f"{self._store.url}: {message}", ranges)


def lost(part: Slices, table: Table) -> list[Lost]:
    """The messages of the slices in ``table``."""
    return [(part.queues[int(row["queue"])], int(row["begin"]), int(row["end"])) for row in table]
