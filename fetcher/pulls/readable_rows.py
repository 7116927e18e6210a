"""Reads what a pull can return where an object is missing or damaged: the records before the damage.

Owns what is known to be unreadable. A pull that fails is repeated with the rest of its first run, then with the first
block of that; when not even this can be read, the error names the unreadable offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

from fetcher.io.request_scheduler import Priority
from fetcher.rows.block_fetch import BlockFetch, BlockSource, BufferedRows
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.pull import PullRequest
from fetcher.rows.queue_view import QueueView
from fetcher.rows.row_reader import ReadRows, RowReader
from fetcher.rows.run_list import RunPlace
from fetcher.rows.run_rows import rows_of_run
from tiered.archive.unreadable import UnreadableMessagesError, UnreadableRange, UnreadableRanges
from tiered.errors import CorruptionError, NotFoundError
from tiered.model.tables import RunKind


@dataclass(frozen=True)
class ReadableRows:
    """Reads with ``rows`` what other reads failed at. ``unreadable``: what nothing could be read of."""

    source: BlockSource
    catalog: CatalogView
    rows: RowReader
    unreadable: UnreadableRanges

    async def read(self, request: PullRequest, view: QueueView, failure: CorruptionError) -> ReadRows:
        """The first records of ``request``, which failed with ``failure``. Raises UnreadableMessagesError when the
        first one cannot be read, ``failure`` when no object should hold it, or what the store raises."""
        at = view.existing(request.offset)
        runs = await self.catalog.runs_of(view, at)
        number = runs.at(at)
        if at >= view.max_offset or number < 0:
            raise failure
        place = runs.place(number)
        end = place.end
        why: CorruptionError | NotFoundError = failure
        try:
            return await self._rows(request, view, end)
        except (CorruptionError, NotFoundError) as error:
            why = error
        try:
            end = min(end, await self._block_end(place, at))
            return await self._rows(request, view, end)
        except (CorruptionError, NotFoundError) as error:
            why = error
        queue = view.queue
        found = UnreadableRange(*queue, at, end, place.object_key, why.message, runs.min_phys(number))
        self.unreadable.note(found)
        raise UnreadableMessagesError.of(found) from failure

    async def _rows(self, request: PullRequest, view: QueueView, end: int) -> ReadRows:
        return await self.rows.read(view, request, Priority.USER, BufferedRows(), end=end)

    async def _block_end(self, place: RunPlace, at: int) -> int:
        """One past the last offset of the block that holds ``at``; of LMQs, whose blocks are other queues', ``at``."""
        if place.kind == RunKind.LMQ:
            return at + 1
        (index,) = await BlockFetch(self.source, Priority.USER, BufferedRows()).indexes([place])
        return rows_of_run(index, place, at).end
