"""Fetches the blocks of a range of a queue, for prefetch.

The catalog and the objects' tables name the blocks of plain runs, so no row is decoded. A filter by tag, rows that span
several offsets and LMQs need columns, and are read as by a pull.
"""

from __future__ import annotations

from typing import NamedTuple

from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import gather
from fetcher.prefetch.prefetch_range import RunEnds
from fetcher.rows.block_fetch import BlockFetch, BlockId, BlockSource, BufferedRows
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.pull import PullRequest
from fetcher.rows.queue_view import QueueView
from fetcher.rows.read_plan import NO_END
from fetcher.rows.row_reader import RUNS_AT_ONCE, RowReader
from fetcher.rows.run_list import RunList, RunPlace
from fetcher.rows.tag_filter import MessageFilter
from tiered.formats.segment_index import BlockSpan
from tiered.model.tables import RunKind


class FetchedBlocks(NamedTuple):
    """Blocks now in memory, up to offset ``covered``, with ``block_bytes`` raw bytes."""

    covered: int
    block_bytes: int
    blocks: tuple[BlockId, ...]


def run_ends(runs: RunList, offset: int) -> RunEnds | None:
    """Ends of the run that holds ``offset``; None where there is none."""
    number = runs.at(offset)
    if number < 0:
        return None
    return RunEnds(*runs.bounds(number))


class RangeFetcher:
    """Fetches ranges of queues at prefetch priority. Stateless: threads may share it."""

    def __init__(self, source: BlockSource, catalog: CatalogView, rows: RowReader) -> None:
        self._source = source
        self._catalog = catalog
        self._rows = rows

    async def read(
        self, view: QueueView, begin: int, end: int, message_filter: MessageFilter | None
    ) -> FetchedBlocks:
        """Load the blocks of offsets [begin, end), up to a gap. Raises as RowReader.read."""
        if message_filter is None:
            at = view.existing(begin)
            if at >= end:
                return FetchedBlocks(end, 0, ())
            places = await self._places(view, at, end)
            if all(place.kind == RunKind.PLAIN for place in places):
                return await self._plain(places, at, min(end, places[-1].end))
        topic, queue_id, _ = view.queue
        request = PullRequest(topic, queue_id, begin, end - begin, NO_END, filter=message_filter)
        read = await self._rows.read(
            view, request, Priority.PREFETCH, BufferedRows(), end=end, is_prefetch=True
        )
        return FetchedBlocks(read.covered, read.block_bytes, read.blocks)

    async def _places(self, view: QueueView, begin: int, end: int) -> list[RunPlace]:
        """Consecutive runs from the one that holds ``begin`` on, up to ``end`` or a gap."""
        places: list[RunPlace] = []
        at = begin
        while at < end and len(places) < RUNS_AT_ONCE and view.existing(at) == at:
            runs = await self._catalog.runs_of(view, at)
            places += runs.places(at, end=end, bytes_max=NO_END, runs_max=RUNS_AT_ONCE - len(places))
            at = places[-1].end
        return places

    async def open(self, view: QueueView, offset: int) -> None:
        """Load the tail of the object that holds ``offset``: then ``read`` requests its blocks at once."""
        at = view.existing(offset)
        if at < view.max_offset:
            runs = await self._catalog.runs_of(view, at)
            places = runs.places(at, end=at + 1, bytes_max=0, runs_max=1)
            await BlockFetch(self._source, Priority.USER, BufferedRows()).indexes(places)

    async def _plain(self, places: list[RunPlace], begin: int, end: int) -> FetchedBlocks:
        if len(places) == 1:
            found = [await self._place(places[0], begin, end)]
        else:
            found = await gather(self._place(place, begin, end) for place in places)
        blocks = [
            (place.object_key, number)
            for place, span in zip(places, found, strict=True)
            for number in range(span.first_block, span.end_block)
        ]
        covered = places[-1].base + found[-1].end_row
        return FetchedBlocks(covered, sum(span.raw_bytes for span in found), tuple(blocks))

    async def _place(self, place: RunPlace, begin: int, end: int) -> BlockSpan:
        """Blocks of one run, without waiting for other tails."""
        (index,) = await BlockFetch(self._source, Priority.PREFETCH, BufferedRows()).indexes([place])
        first, last = max(0, begin - place.base), min(place.rows, end - place.base)
        span = index.block_span(place, first, last)
        numbers = range(span.first_block, span.end_block)
        await self._source.blocks_at(index, place.ordinal, numbers, Priority.PREFETCH)
        return span
