"""Rows of a queue with their records: from a view of the queue to blocks of objects and back.

Runs of several objects are read side by side. Awaits nothing but the block source and the catalog; with all in memory
it never waits.

Owns the rules of reading on: limits, gaps, lost parents, filters. Does not own statuses nor retries
(message_fetcher.py), light queues' parents (lmq_rows.py), nor what is read ahead (prefetcher.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fetcher.io.request_scheduler import Lane
from fetcher.rows.batch import EMPTY_BATCH, MessageBatch, joined_batch
from fetcher.rows.block_fetch import BlockFetch, BlockId, BlockSource, Held, Needed
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.lmq_rows import LmqReader
from fetcher.rows.queue_view import QueueView, RunList, RunPlace
from fetcher.rows.read_plan import NO_END, Limits, Step, Taken, Wish, take
from fetcher.rows.run_rows import RunRows, rows_of_run
from fetcher.rows.tag_filter import MessageFilter
from tiered.formats.segment_index import SegmentIndex
from tiered.model.tables import RunKind

SCANNED_OFFSETS_MAX = 65_536
"""Offsets a filtered pull passes before it answers that it found nothing yet."""
JUDGED_BYTES_MAX = 16 * 1024 * 1024
"""Record bytes a filter judges in one pull."""
ROWS_AHEAD = 8192
"""Rows behind a pull's that are looked at with it: who goes on gets them without another look."""
BYTES_AHEAD = 8 * 1024 * 1024
"""Raw bytes of blocks whose rows are looked at because the reader will want them too."""
RUNS_AT_ONCE = 64
"""Runs of which one pull reads side by side."""


class ReadRows(NamedTuple):
    """``batch``: the rows wanted in [begin, next_offset). ``gap``: offsets passed before ``begin``, or None.

    ``covered``: up to here blocks were read, whether taken or not. ``block_bytes``: raw bytes of all blocks touched.
    ``held``: for the next read of the same reader. ``blocks``: all blocks touched.
    """

    batch: MessageBatch
    next_offset: int
    gap: tuple[int, int] | None
    covered: int
    block_bytes: int
    held: Held
    blocks: tuple[BlockId, ...] = ()


@dataclass
class _Reply:
    """What has been gathered for ``wish``."""

    wish: Wish
    begin: int
    rows: int = 0
    bytes: int = 0
    judged_bytes: int = 0
    rounds: int = 0
    batches: list[MessageBatch] = field(default_factory=list)

    def goes_on_at(self, offset: int) -> bool:
        """Whether more rows may be looked at."""
        if self.rows >= self.wish.count:
            return False
        tired = offset - self.begin >= SCANNED_OFFSETS_MAX or self.judged_bytes >= JUDGED_BYTES_MAX
        return self.wish.filter is None or not tired or self.rounds == 0

    def limits(self) -> Limits:
        """For the next step. A filter that drops most of what it sees is given more to look at each time."""
        wish = self.wish
        rows = wish.count - self.rows
        if wish.filter is not None and wish.judges:
            rows = min(rows << self.rounds, SCANNED_OFFSETS_MAX)
        return Limits(rows, wish.max_bytes - self.bytes, not self.batches)

    def add(self, batch: MessageBatch) -> int | None:
        """Take what the filter keeps; where to go on if the last wanted row came before the end of ``batch``."""
        self.rounds += 1
        cut: int | None = None
        if self.wish.filter is not None and self.wish.judges and len(batch):
            self.judged_bytes += batch.record_bytes
            batch, cut = _judged(batch, self.wish.filter, self.wish.count - self.rows)
        if len(batch):
            self.batches.append(batch)
            self.rows += len(batch)
            self.bytes += batch.record_bytes
        return cut


class RowReader:
    """Reads rows through ``source``. Holds no state: threads may share it."""

    def __init__(self, source: BlockSource, catalog: CatalogView) -> None:
        self._source = source
        self._catalog = catalog
        self._lmq = LmqReader(catalog)

    def __repr__(self) -> str:
        return f"RowReader({self._source!r})"

    async def read(self, view: QueueView, offset: int, wish: Wish, lane: Lane, held: Held) -> ReadRows:
        """Rows from the one that spans ``offset`` on, ending before a gap. ``offset`` is below the maximum.

        A filtered read may end early, having found nothing (SCANNED_OFFSETS_MAX). ``held``: what the read before left.
        Raises CorruptionError, NotFoundError when an object is gone, or what the store raises.
        """
        runs = await self._catalog.runs_of(view)
        fetch = BlockFetch(self._source, lane, held)
        end = min(view.max_offset, wish.end)
        at = covered = view.existing(offset)
        reply = _Reply(wish, at)
        after = Held(line=view.state.cursor.history)
        while at < end and reply.goes_on_at(at) and view.existing(at) == at:
            places = _places(runs, at, end, reply)
            if places[0].kind == RunKind.LMQ:
                step = await self._lmq.step(fetch, view, places[0], at, reply.limits(), wish, after)
            else:
                step = await _stored_step(fetch, places, at, end, reply.limits(), wish, after)
            if step.lost_to is not None:
                if at > reply.begin:
                    break
                at = covered = reply.begin = view.existing(step.lost_to)
                continue
            cut = reply.add(step.batch)
            covered = max(covered, step.covered)
            if cut is not None:
                at = cut
                break
            at = step.next_offset
            if step.is_last:
                break
        if after.rows is not None:
            last = after.rows.object_key, after.rows.first_block
            after.blocks = {last: fetch.touched[last]}
        else:
            after.blocks = fetch.touched
        gap = (offset, reply.begin) if reply.begin > offset else None
        return ReadRows(
            joined_batch(reply.batches),
            at,
            gap,
            max(covered, at),
            fetch.touched_bytes,
            after,
            tuple(fetch.touched),
        )


def _places(runs: RunList, at: int, end: int, reply: _Reply) -> list[RunPlace]:
    """Runs for the next step. How far a filter must look is not known: twice as many runs each time."""
    limits = reply.limits()
    if reply.wish.filter is None:
        end = min(end, at + limits.rows)
        return runs.places(at, end=end, bytes_max=max(1, limits.bytes), runs_max=RUNS_AT_ONCE)
    return runs.places(at, end=end, bytes_max=NO_END, runs_max=min(1 << reply.rounds, RUNS_AT_ONCE))


async def _stored_step(
    fetch: BlockFetch,
    places: list[RunPlace],
    at: int,
    end: int,
    limits: Limits,
    wish: Wish,
    after: Held,
) -> Step:
    """Rows of ``places`` from ``at`` on that may be wanted, with their records."""
    indexes = await fetch.indexes(places)
    message_filter = wish.filter
    taken: list[tuple[Needed, Taken]] = []
    is_full = False
    covered = at
    for place, index in zip(places, indexes, strict=True):
        if place.kind == RunKind.LMQ:
            break
        while at < place.end:
            rows = _rows_at(fetch.held, index, place, at, limits, wish)
            mask = None if message_filter is None else message_filter.tags_mask(rows.tags_code)
            part = take(rows.sizes, rows.ends, rows.row_of(at), limits, mask)
            if part.row_count:
                taken.append((Needed(index, place, rows, rows.blocks_of(part.rows)), part))
                limits = Limits(limits.rows - part.row_count, limits.bytes - part.bytes, False)
                after.rows = rows.in_block_of(_last(part))
                covered = after.rows.end
                after.ahead = rows if rows.end > covered else None
            is_full = part.is_full
            if part.end_row > rows.row_of(at):
                at = rows.end_offset(part.end_row)
            if is_full or at >= end or limits.rows <= 0:
                break
        if is_full or at >= end or limits.rows <= 0 or at != place.end:
            break
    await fetch.fetch(need for need, _ in taken)
    batches = [need.rows.batch(part.rows, fetch.blocks(need)) for need, part in taken]
    is_last = is_full and (message_filter is None or not batches)
    return Step(joined_batch(batches), at, is_last, covered)


def _rows_at(
    held: Held,
    index: SegmentIndex,
    place: RunPlace,
    at: int,
    limits: Limits,
    wish: Wish,
) -> RunRows:
    """What is in hand, if ``at`` is in it; else as many blocks as the limits allow, with a filter one."""
    for rows in (held.rows, None if wish.filter is not None else held.ahead):
        if rows is not None and rows.object_key == index.key and rows.base <= at < rows.end:
            return rows
    if wish.filter is not None:
        return rows_of_run(index, place, at)
    max_bytes = max(limits.bytes, wish.rows_ahead and BYTES_AHEAD)
    return rows_of_run(index, place, at, count=limits.rows + wish.rows_ahead, max_bytes=max_bytes)


def _last(part: Taken) -> int:
    return part.rows.stop - 1 if isinstance(part.rows, slice) else int(part.rows[-1])


def _judged(
    batch: MessageBatch, message_filter: MessageFilter, count: int
) -> tuple[MessageBatch, int | None]:
    """Rows of ``batch`` the filter keeps, at most ``count``; the offset behind the last if more were left."""
    kept: list[int] = []
    for row, record in enumerate(batch.records()):
        if message_filter.keep(record):
            kept.append(row)
            if len(kept) == count:
                break
    if len(kept) == len(batch):
        return batch, None if len(kept) < count else _behind(batch, kept[-1])
    if not kept:
        return EMPTY_BATCH, None
    cut = _behind(batch, kept[-1]) if len(kept) == count else None
    return batch.taken(np.array(kept, np.intp)), cut


def _behind(batch: MessageBatch, row: int) -> int:
    return int(batch.queue_offsets[row]) + int(batch.inner_num[row])
