"""Rows of a queue with their records, read through catalog and block source.

Runs of several objects are read concurrently. Nothing is awaited but the block source and the catalog; a read never
waits when everything is in memory. Applies limits, gaps, lost parents and filters. Does not own statuses nor retries
(message_fetcher.py), the parents of LMQs (lmq_rows.py), nor prefetch (prefetcher.py).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import SlicePace
from fetcher.rows.block_fetch import BlockFetch, BlockId, BlockSource, BufferedRows, Needed
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.lmq_rows import LmqReader
from fetcher.rows.message import EMPTY_BATCH, MessageBatch, joined_batch
from fetcher.rows.pull import PullRequest
from fetcher.rows.run_list import QueueView, RunList, RunPlace
from fetcher.rows.run_rows import NO_END, Limits, ReadStep, RunRows, TakenRows, rows_of_run, take
from fetcher.rows.tag_filter import MessageFilter
from tiered.formats.segment import row_at
from tiered.formats.segment_index import SegmentIndex
from tiered.model.tables import RunKind

SCANNED_OFFSETS_MAX = 65_536
"""Offsets a filtered pull passes before it ends without a match."""
FILTERED_BYTES_MAX = 16 * 1024 * 1024
"""Record bytes a filter examines in one pull."""
ROWS_AHEAD = 8192
"""Rows after a pull's whose columns are decoded with it, for the reader's next pulls."""
BYTES_AHEAD = 8 * 1024 * 1024
"""Raw bytes of the blocks these rows may cover."""
RUNS_AT_ONCE = 64
"""Runs one pull reads concurrently."""


class ReadRows(NamedTuple):
    """Rows read, and what the reader keeps for its next read.

    ``batch``: the wanted rows in [begin, next_offset). ``gap``: offsets passed before ``begin``, or None.
    ``covered``: blocks were read up to here, whether taken or not. ``block_bytes``: raw bytes of all ``blocks`` read.
    ``bytes_per_offset``: of the run read last.
    """

    batch: MessageBatch
    next_offset: int
    gap: tuple[int, int] | None
    covered: int
    block_bytes: int
    buffered: BufferedRows
    blocks: tuple[BlockId, ...] = ()
    bytes_per_offset: float = 0.0


@dataclass
class _Reply:
    """Rows gathered for ``request`` so far, below offset ``end``."""

    request: PullRequest
    begin: int
    end: int
    rows_ahead: int
    applies_filter: bool
    rows: int = 0
    bytes: int = 0
    filtered_bytes: int = 0
    rounds: int = 0
    batches: list[MessageBatch] = field(default_factory=list)

    def needs_more(self, offset: int) -> bool:
        """Whether to read rows from ``offset`` on."""
        if self.rows >= self.request.count:
            return False
        is_exhausted = offset - self.begin >= SCANNED_OFFSETS_MAX or self.filtered_bytes >= FILTERED_BYTES_MAX
        return self.request.filter is None or not is_exhausted or self.rounds == 0

    def limits(self) -> Limits:
        """Limits of the next step. A filter that drops most rows examines more each time."""
        request = self.request
        rows = request.count - self.rows
        if self.applies_filter:
            rows = min(rows << self.rounds, SCANNED_OFFSETS_MAX)
        return Limits(rows, request.max_bytes - self.bytes, not self.batches)

    async def add(self, batch: MessageBatch) -> int | None:
        """Add the messages of ``batch`` that the filter keeps to the reply. Returns the offset at which to continue if
        that is before the end of the batch; else None."""
        self.rounds += 1
        cut: int | None = None
        message_filter = self.request.filter
        if self.applies_filter and message_filter is not None and len(batch):
            self.filtered_bytes += batch.record_bytes
            count, pace = self.request.count - self.rows, self.request.pace
            batch, cut = await _filtered(batch, message_filter, count, pace)
        if len(batch):
            self.batches.append(batch)
            self.rows += len(batch)
            self.bytes += batch.record_bytes
        return cut


class RowReader:
    """Reads rows through ``source``. Stateless: threads may share it."""

    def __init__(self, source: BlockSource, catalog: CatalogView) -> None:
        self._source = source
        self._catalog = catalog
        self._lmq = LmqReader(catalog)

    async def read(
        self,
        view: QueueView,
        request: PullRequest,
        priority: Priority,
        buffered: BufferedRows,
        *,
        end: int = NO_END,
        rows_ahead: int = 0,
        is_prefetch: bool = False,
    ) -> ReadRows:
        """Read the messages of a queue from ``request.offset`` on, which is below the queue's maximum, up to a gap or
        the limits of the request.

        ``end``: read only offsets below this one. ``buffered``: what the reader's previous read left for this one.
        ``rows_ahead``: so many rows more are kept for the next read. ``is_prefetch``: only the blocks are wanted, so a
        filter is applied by tags alone and not to the records. A read with a filter may end without a match, after
        SCANNED_OFFSETS_MAX offsets. Raises CorruptionError, NotFoundError when an object does not exist, or what the
        store raises.
        """
        fetch = BlockFetch(self._source, priority, buffered)
        at = covered = view.existing(request.offset)
        applies_filter = request.filter is not None and not is_prefetch
        reply = _Reply(request, at, min(view.max_offset, end), rows_ahead, applies_filter)
        after = BufferedRows(history=view.state.cursor.history)
        pace = request.pace
        bytes_per_offset = 0.0
        while at < reply.end and reply.needs_more(at) and view.existing(at) == at:
            if pace is not None and pace.is_over and not await pace.next_slice():
                break
            runs = await self._catalog.runs_of(view, at)
            places = _places(runs, at, reply)
            if places[0].kind == RunKind.LMQ:
                step = await self._lmq.step(
                    fetch, view, places[0], at, reply.end, reply.limits(), request.filter, after
                )
            else:
                step = await _stored_step(fetch, places, at, reply, after)
            if step.lost_to is not None:
                if at > reply.begin:
                    break
                at = covered = reply.begin = view.existing(step.lost_to)
                continue
            cut = await reply.add(step.batch)
            covered = max(covered, step.covered)
            if cut is not None:
                at = cut
                break
            at = step.next_offset
            bytes_per_offset = _last_read(places, at).bytes_per_offset
            if step.is_last:
                break
        if after.rows is not None:
            last = after.rows.object_key, after.rows.first_block
            after.blocks = {last: fetch.touched[last]}
        else:
            after.blocks = fetch.touched
        covered = max(covered, at)
        if reply.batches and request.filter is None:
            # This is the offset after the last message, where no message may be.
            at = _after(reply.batches[-1], -1)
        gap = (request.offset, reply.begin) if reply.begin > request.offset else None
        return ReadRows(
            joined_batch(reply.batches),
            at,
            gap,
            covered,
            fetch.touched_bytes,
            after,
            tuple(fetch.touched),
            bytes_per_offset,
        )

    async def first_offset(self, view: QueueView) -> int:
        """The offset of the queue's first message: its minimum, or a later one if key compaction dropped the message
        there. Raises what ``read`` raises."""
        at = view.existing(view.min_offset)
        while at < view.max_offset:
            runs = await self._catalog.runs_of(view, at)
            (place,) = runs.places(at, end=at, bytes_max=0, runs_max=1)
            if place.kind != RunKind.SPARSE:
                break
            (index,) = await BlockFetch(self._source, Priority.USER, BufferedRows()).indexes([place])
            table = index.row_columns(place)
            row = row_at(table, at)
            if row < len(table):
                return int(table.queue_offset[row])
            at = view.existing(place.end)
        return at


def _places(runs: RunList, at: int, reply: _Reply) -> list[RunPlace]:
    """Runs for the next step. A filter reads twice as many each time, as the distance to a match is unknown."""
    if reply.request.filter is None:
        limits = reply.limits()
        end = min(reply.end, at + limits.rows)
        return runs.places(at, end=end, bytes_max=max(1, limits.bytes), runs_max=RUNS_AT_ONCE)
    return runs.places(at, end=reply.end, bytes_max=NO_END, runs_max=min(1 << reply.rounds, RUNS_AT_ONCE))


def _last_read(places: list[RunPlace], end: int) -> RunPlace:
    """The run read last, by a step that ended at offset ``end``."""
    return next((place for place in reversed(places) if place.base < end), places[0])


async def _stored_step(
    fetch: BlockFetch, places: list[RunPlace], at: int, reply: _Reply, after: BufferedRows
) -> ReadStep:
    """Read messages from offset ``at`` on out of the consecutive runs ``places``, as many as the limits of ``reply``
    still allow, and fetch all their blocks at once.

    First the rows are chosen by the columns in the objects' tails, then the blocks with their records are read. Stops
    before a run of an LMQ, which LmqReader reads. ``after`` gets the rows that the reader's next pull can use.
    """
    indexes = await fetch.indexes(places)
    limits, message_filter, end = reply.limits(), reply.request.filter, reply.end
    pace = reply.request.pace
    taken: list[tuple[Needed, TakenRows]] = []
    is_full = False
    covered = at
    for place, index in zip(places, indexes, strict=True):
        if place.kind == RunKind.LMQ:
            break
        while at < place.end:
            if pace is not None and pace.is_over and not await pace.next_slice():
                break
            rows = _rows_at(fetch.buffered, index, place, at, limits, reply)
            first = rows.row_of(at)
            if first == len(rows):
                at = rows.end  # key compaction dropped everything behind the last row
                continue
            mask = None if message_filter is None else message_filter.tags_mask(rows.tags_code)
            part = take(rows.sizes, rows.ends, first, limits, mask)
            if part.row_count:
                taken.append((Needed(index, place, rows, rows.blocks_of(part.rows)), part))
                limits = Limits(limits.rows - part.row_count, limits.bytes - part.bytes, False)
                after.rows = rows.in_block_of(_last(part))
                covered = after.rows.end
                after.ahead = rows if rows.end > covered else None
            is_full = part.is_full
            if part.end_row > first:
                at = rows.end_offset(part.end_row) if part.end_row < len(rows) else rows.end
            if is_full or at >= end or limits.rows <= 0:
                break
        if is_full or at >= end or limits.rows <= 0 or at != place.end:
            break
    await fetch.fetch(need for need, _ in taken)
    batches = [need.rows.batch(part.rows, fetch.blocks(need)) for need, part in taken]
    is_last = is_full and (message_filter is None or not batches)
    return ReadStep(joined_batch(batches), at, is_last, covered)


def _rows_at(
    buffered: BufferedRows, index: SegmentIndex, place: RunPlace, at: int, limits: Limits, reply: _Reply
) -> RunRows:
    """Rows of the run ``place`` around offset ``at``: the reader's buffered rows if they have it; else the rows of as
    many blocks as the limits allow, or of one block if there is a filter, which may keep few of them."""
    is_filtered = reply.request.filter is not None
    for rows in (buffered.rows, None if is_filtered else buffered.ahead):
        if rows is not None and rows.object_key == index.key and rows.base <= at < rows.end:
            return rows
    if is_filtered:
        return rows_of_run(index, place, at)
    max_bytes = max(limits.bytes, reply.rows_ahead and BYTES_AHEAD)
    return rows_of_run(index, place, at, count=limits.rows + reply.rows_ahead, max_bytes=max_bytes)


def _last(part: TakenRows) -> int:
    return part.rows.stop - 1 if isinstance(part.rows, slice) else int(part.rows[-1])


async def _filtered(
    batch: MessageBatch, message_filter: MessageFilter, count: int, pace: SlicePace | None
) -> tuple[MessageBatch, int | None]:
    """The messages of ``batch`` that the filter keeps, at most ``count``. If it stopped before the end of the batch,
    because it has enough or the read has used its time (``pace``), also the first offset that it did not look at; else
    None."""
    kept: list[int] = []
    cut: int | None = None
    for row, record in enumerate(batch.records()):
        if pace is not None and pace.is_over and not await pace.next_slice():
            cut = int(batch.queue_offsets[row])
            break
        if message_filter.keep(record):
            kept.append(row)
            if len(kept) == count:
                cut = _after(batch, row)
                break
    if len(kept) == len(batch):
        return batch, cut
    return batch.select(np.array(kept, np.intp)) if kept else EMPTY_BATCH, cut


async def chosen_rows(batch: MessageBatch, request: PullRequest) -> ReadRows:
    """Answer ``request`` from ``batch``, which has all messages of the queue from the request's offset on, or without a
    filter no more than it may have: apply its filter and its limits."""
    end = covered = _after(batch, -1)
    if request.filter is not None:
        mask = request.filter.tags_mask(batch.tags_code)
        batch = batch if mask is None else batch.select(mask)
        batch, cut = await _filtered(batch, request.filter, request.count, request.pace)
        end = end if cut is None else cut
    return ReadRows(batch, end, None, covered, 0, BufferedRows())


def _after(batch: MessageBatch, row: int) -> int:
    return int(batch.queue_offsets[row]) + int(batch.inner_num[row])
