"""What queries read, as coroutines: ranges of objects, tails of segments, single records, pages of older runs.

One source serves one query (or one page of its results): what it fetched is kept until ``forget``, so that nothing is
asked twice, and every request is counted.

Owns requests and their sharing. Does not own what is looked for.
"""

from __future__ import annotations

from bisect import bisect_left
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from fetcher.range_reader import RangeReader
from fetcher.waiting import Wait
from tiered.catalog.pages import Page, RunIndex, decode_page
from tiered.catalog.state import EMPTY_CHUNK, CatalogState, PageRef, RunChunk, joined, selected
from tiered.errors import CorruptionError
from tiered.flat_file.key_section_reader import key_bytes_guess
from tiered.formats.segment_index import KeySection, SegmentIndex
from tiered.formats.segment_layout import TRAILER_BYTES
from tiered.model.queue import QueueKey
from tiered.object_store.protocol import ObjectStore


class Place(NamedTuple):
    """A data object as the catalog or an index file describes it."""

    key: str
    size_bytes: int
    tail_bytes: int

    @classmethod
    def of(cls, key: str, row: np.void) -> Place:
        """From an OBJECT_DTYPE or COVERED_DTYPE row."""
        return cls(key, int(row["size_bytes"]), int(row["tail_bytes"]))


class QuerySource:
    """Reads for one query over ``reader``. ``run_index`` keeps pages of older runs between queries."""

    def __init__(self, reader: RangeReader, store: ObjectStore) -> None:
        self._reader = reader
        self._url = store.url
        self._living = RunIndex(store)
        self._ranges: dict[tuple[str, int, int], Future[bytes]] = {}
        self._segments: dict[str, SegmentIndex] = {}
        self._pages: dict[str, Page] = {}
        self._chunks: dict[tuple[int, QueueKey], RunChunk] = {}
        self.requests = 0

    async def range(self, key: str, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes; asked once however many want them."""
        future = self._ranges.get((key, offset, length))
        if future is None:
            self.requests += 1
            future = self._ranges[key, offset, length] = self._reader.submit(key, offset, length)
        return await Wait(future)

    def forget(self) -> None:
        """Drop ranges read so far, to bound memory; decoded tails stay."""
        self._ranges.clear()

    async def segment(self, place: Place) -> SegmentIndex:
        """The decoded tail of a data object: one request."""
        found = self._segments.get(place.key)
        if found is None:
            _check(place)
            tail = await self.range(place.key, place.size_bytes - place.tail_bytes, place.tail_bytes)
            found = self._segments[place.key] = SegmentIndex(place.key, place.size_bytes, tail)
        return found

    async def keys_of(self, place: Place, rows: int) -> tuple[SegmentIndex, KeySection]:
        """Tail and key section of a data object of ``rows`` rows: one request where keys are as many as usual."""
        _check(place)
        guess = min(place.size_bytes - place.tail_bytes, key_bytes_guess(rows))
        length = place.tail_bytes + guess
        begin = place.size_bytes - length
        data = await self.range(place.key, begin, length)
        index = self._segments.get(place.key)
        if index is None:
            index = self._segments[place.key] = SegmentIndex(place.key, place.size_bytes, data)
        offset, size = index.key_span
        if offset >= begin:
            stored: bytes | memoryview = memoryview(data)[offset - begin : offset - begin + size]
        else:
            stored = await self.range(place.key, offset, size)
        return index, index.decode_keys(stored)

    async def record(self, index: SegmentIndex, run: int, row: int) -> bytes:
        """One record: the block that holds it is read, one request."""
        columns = index.row_columns(run)
        span = index.block_span(run, row, row + 1)
        data = index.decode_blocks(span, await self.range(index.key, span.offset, span.length))
        begin = int(columns.position[row]) - span.raw_offset
        return data[begin : begin + int(columns.size[row])].tobytes()

    # -- the catalog's pages ------------------------------------------------------------------------------------

    async def page(self, state: CatalogState, ref: PageRef) -> Page:
        """Living runs of one page."""
        found = self._pages.get(ref.key)
        if found is None:
            self.requests += 1
            source = f"{self._url}/{ref.key}"
            found = decode_page(await Wait(self._reader.submit_get(ref.key)), source=source)
            if len(found.chunk.runs) != ref.runs:
                raise CorruptionError(f"{source}: {len(found.chunk.runs)} runs, the catalog says {ref.runs}")
            self._pages[ref.key] = found
        return self._living.living(state, found)

    async def runs_of(self, state: CatalogState, queue: QueueKey) -> RunChunk:
        """As RunIndex.runs_of: living runs of a queue by base offset, with their objects."""
        known = self._chunks.get((state.version, queue))
        if known is not None:
            return known
        row = state.row_of(queue)
        if row is None:
            return EMPTY_CHUNK
        found = []
        for ref in state.pages:
            if ref.first <= queue <= ref.last:
                page = await self.page(state, ref)
                number = bisect_left(page.queues, queue)
                if number < len(page.queues) and page.queues[number] == queue:
                    begin, end = np.searchsorted(page.chunk.runs["queue"], [number, number + 1])
                    found.append(selected(page.chunk, np.arange(begin, end)))
        mine = state.memory_runs_of(row)
        found.append(selected(mine, np.arange(len(mine.runs))))
        chunk = joined(tuple(found))
        runs = chunk.runs[np.argsort(chunk.runs["base_queue_offset"], kind="stable")]
        result = self._chunks[state.version, queue] = RunChunk(runs, chunk.objects, chunk.object_keys)
        return result


def _check(place: Place) -> None:
    if not TRAILER_BYTES <= place.tail_bytes <= place.size_bytes:
        raise CorruptionError(
            f"{place.key}: a tail of {place.tail_bytes} of {place.size_bytes} bytes is impossible"
        )
