"""Blocking reads of rows by queue offset straight from an object store, for batch jobs: only tails are cached."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import InlineExecutor, run_sync
from fetcher.rows.block_fetch import Block, BufferedRows
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.pull import PullRequest
from fetcher.rows.row_reader import ReadRows, RowReader
from tiered.archive.segment_reader import RANGE_BYTES_MAX, SegmentCache
from tiered.catalog.state import CatalogState
from tiered.errors import NotFoundError
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore


class _StoreSource:
    """A BlockSource that reads in the calling thread; consecutive blocks share a request."""

    def __init__(self, store: ObjectStore, cache_bytes: int) -> None:
        self._store = store
        self._segments = SegmentCache(store, cache_bytes=cache_bytes)

    async def index(
        self, key: str, size_bytes: int, tail_bytes: int, priority: Priority, ordinal: int | None = None
    ) -> SegmentIndex:
        return self._segments.open(key, size_bytes=size_bytes, tail_bytes=tail_bytes).index

    def index_in_memory(self, key: str, ordinal: int) -> SegmentIndex | None:
        return None

    def block_in_memory(self, object_key: str, number: int) -> Block | None:
        return None

    async def blocks_at(
        self, index: SegmentIndex, run: int, numbers: Sequence[int], priority: Priority
    ) -> Sequence[Block]:
        numbers, found = list(numbers), list[Block]()
        while len(found) < len(numbers):
            at, first = len(found), numbers[len(found)]
            end, span = first + 1, index.span_of_blocks(run, first, first + 1)
            while numbers[at + end - first : at + end - first + 1] == [end]:
                longer = index.span_of_blocks(run, first, end + 1)
                if longer.length > RANGE_BYTES_MAX:
                    break
                end, span = end + 1, longer
            stored = memoryview(self._store.get_range(index.key, span.offset, span.length))
            for number in range(first, end):
                one = index.span_of_blocks(run, number, number + 1)
                begin = one.offset - span.offset
                found.append(index.decode_blocks(one, stored[begin : begin + one.length]))
        return found


class ScanReader:
    """Reads queues of the archive at ``store``, its own prefix. Not thread-safe."""

    def __init__(self, store: ObjectStore, state: CatalogState, *, cache_bytes: int) -> None:
        self._catalog = CatalogView(
            store, state, executor=InlineExecutor(), clock_s=time.monotonic, runs_bytes=cache_bytes
        )
        self._rows = RowReader(_StoreSource(store, cache_bytes), self._catalog)
        self._buffered: tuple[QueueKey | None, BufferedRows] = None, BufferedRows()

    def read(
        self, state: CatalogState, queue: QueueKey, offset: int, *, count: int, max_bytes: int
    ) -> tuple[ReadRows, CatalogState]:
        """Rows from the one that spans ``offset`` on, and their catalog version: ``state``, or the newest one if that
        names a missing object. Raises NotFoundError for a missing queue, and as RowReader.read."""

        async def read(state: CatalogState) -> tuple[ReadRows, CatalogState]:
            view = self._catalog.view(state, queue)
            if view is None:
                raise NotFoundError(f"{queue} is not in the archive")
            buffered = self._buffered[1]
            if self._buffered[0] != queue or buffered.history != state.cursor.history:
                buffered = BufferedRows()
            request = PullRequest(queue.topic, queue.queue_id, offset, count, max_bytes)
            return await self._rows.read(view, request, Priority.BACKGROUND, buffered), state

        found = run_sync(self._catalog.read(state, read, name=str(queue), queue=queue))
        self._buffered = queue, found[0].buffered
        return found
