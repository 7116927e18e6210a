"""Rows of an LMQ: they refer to rows of parent queues, whose records are read at the same catalog version.

An LMQ lives no longer than its parents: rows whose parents expired, were dropped or lost, or were never
archived are passed like a gap, and a reply ends before them.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fetcher.io.waiting import gather
from fetcher.rows.block_fetch import Block, BlockFetch, BufferedRows, Needed
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.message import EMPTY_BATCH, MessageBatch
from fetcher.rows.run_list import QueueView, RunPlace
from fetcher.rows.run_rows import NO_END, Limits, ReadStep, TakenRows, blocks_of_rows, rows_of, take
from fetcher.rows.tag_filter import MessageFilter
from tiered.errors import CorruptionError
from tiered.formats.segment import RowTable, row_at
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind


class _Records(NamedTuple):
    """Records of a parent's rows: record i is ``pieces[piece[i]][starts[i] : starts[i] + sizes[i]]``."""

    pieces: list[Block]
    piece: NDArray[np.int32]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int32]
    phys: NDArray[np.int64]


class LmqReader:
    """Reads LMQ rows. Stateless: threads may share it."""

    def __init__(self, catalog: CatalogView) -> None:
        self._catalog = catalog

    async def step(
        self,
        fetch: BlockFetch,
        view: QueueView,
        place: RunPlace,
        at: int,
        end_offset: int,
        limits: Limits,
        message_filter: MessageFilter | None,
        after: BufferedRows,
    ) -> ReadStep:
        """Read rows of an LMQ's run, ``place``, from queue offset ``at`` on. A row of an LMQ refers to a message of
        another queue, its parent: the messages are read from there.

        A row whose parent message has expired or was dropped by key compaction is lost. The step ends before a lost
        row; if the first one is lost, it says up to which offset all are. ``after`` keeps what the reader's next pull
        needs.
        """
        (index,) = await fetch.indexes([place])
        known = fetch.buffered.table
        table = known[1] if known is not None and known[0] == place else index.row_columns(place)
        after.table = place, table
        first = row_at(table, at)
        end = row_at(table, min(end_offset, place.end) - 1) + 1
        if message_filter is None:
            end = min(end, first + limits.rows)
        part = _taken(rows_of(table, slice(first, end)), limits, message_filter)
        next_offset = _end_offset(table, first + part.end_row) if part.end_row else at
        if not part.row_count:
            return ReadStep(EMPTY_BATCH, next_offset, part.is_full, at)
        numbers = np.arange(first, end)[part.rows]
        rows = rows_of(table, numbers)
        parents = {
            number: self._catalog.view(view.state, index.queues[number])
            for number in np.unique(rows.parent).tolist()
        }
        lost = _lost(rows, parents)
        for number, parent in parents.items():
            if parent is not None and parent.is_sparse:
                mine = np.flatnonzero((rows.parent == number) & ~lost)
                lost[mine] = await self._dropped(fetch, parent, rows.parent_queue_offset[mine])
        if lost[0]:
            gone = len(lost) if lost.all() else int(np.argmin(lost))
            return ReadStep(EMPTY_BATCH, at, True, at, lost_to=_end_offset(rows, gone))
        is_last = part.is_full and message_filter is None
        if lost.any():
            kept = int(np.argmax(lost))
            rows, is_last = rows_of(rows, slice(0, kept)), True
            next_offset = int(table.queue_offset[numbers[kept]])
        present = [(number, parents[number]) for number in np.unique(rows.parent).tolist()]
        batch = await self._batch(
            fetch, view.queue, rows, {n: found for n, found in present if found is not None}
        )
        return ReadStep(batch, next_offset, is_last, next_offset)

    async def _dropped(
        self, fetch: BlockFetch, view: QueueView, offsets: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """For each offset of the queue ``view``, whether key compaction has dropped the message there."""
        dropped = np.zeros(len(offsets), bool)
        order = np.argsort(offsets)
        while len(order):
            first = int(offsets[order[0]])
            (place,) = (await self._catalog.runs_of(view, first)).places(
                first, end=first, bytes_max=0, runs_max=1
            )
            mine, order = order[offsets[order] < place.end], order[offsets[order] >= place.end]
            if place.kind == RunKind.SPARSE:
                (index,) = await fetch.indexes([place])
                dropped[mine] = ~np.isin(offsets[mine], index.row_columns(place).queue_offset)
        return dropped

    async def _batch(
        self, fetch: BlockFetch, queue: QueueKey, rows: RowTable, parents: dict[int, QueueView]
    ) -> MessageBatch:
        """The messages of an LMQ's ``rows``, read from the queues to which they refer. ``parents``: these queues, by
        their number in the object. A message to which several rows refer is read once. Raises CorruptionError if a row
        has another size or physical offset than its message."""
        mine = [np.flatnonzero(rows.parent == number) for number in parents]
        wanted = [np.unique(rows.parent_queue_offset[some], return_inverse=True) for some in mine]
        found = await gather(
            self._records_at(fetch, view, offsets)
            for view, (offsets, _) in zip(parents.values(), wanted, strict=True)
        )
        pieces: list[Block] = []
        piece, starts = np.empty(len(rows), np.int32), np.empty(len(rows), np.int64)
        for some, (_, inverse), records, parent in zip(mine, wanted, found, parents.values(), strict=True):
            sizes, phys = records.sizes[inverse], records.phys[inverse]
            if bool((sizes != rows.size[some]).any() or (phys != rows.phys[some]).any()):
                raise CorruptionError(
                    f"{queue}: its rows have other sizes or physical offsets than the messages of {parent} that they "
                    "refer to",
                    hint="tiered verify ARCHIVE_URL --full names what is damaged",
                )
            piece[some] = records.piece[inverse] + len(pieces)
            starts[some] = records.starts[inverse]
            pieces += records.pieces
        return MessageBatch(
            pieces,
            piece,
            starts,
            rows.size,
            rows.queue_offset,
            rows.inner_num,
            rows.phys,
            rows.tags_code,
            rows.store_timestamp,
        )

    async def _records_at(self, fetch: BlockFetch, view: QueueView, offsets: NDArray[np.int64]) -> _Records:
        """Read the records of the queue ``view`` at ``offsets``, which are ascending and all exist. Raises
        CorruptionError if that queue is an LMQ itself."""
        places: list[RunPlace] = []
        cuts = [0]
        while cuts[-1] < len(offsets):
            runs = await self._catalog.runs_of(view, int(offsets[cuts[-1]]))
            (place,) = runs.places(int(offsets[cuts[-1]]), end=NO_END, bytes_max=0, runs_max=1)
            if place.kind == RunKind.LMQ:
                raise CorruptionError(f"{view.queue} is an LMQ and the parent of another LMQ")
            places.append(place)
            cuts.append(int(offsets.searchsorted(place.end)))
        indexes = await fetch.indexes(places)
        needed: list[Needed] = []
        parts: list[NDArray[np.intp]] = []
        for number, (place, index) in enumerate(zip(places, indexes, strict=True)):
            for rows, wanted in blocks_of_rows(index, place, offsets[cuts[number] : cuts[number + 1]]):
                needed.append(Needed(index, place, rows, rows.blocks))
                parts.append(wanted)
        await fetch.fetch(needed)
        found = list(zip((need.rows for need in needed), parts, strict=True))
        return _Records(
            [block for need in needed for block in fetch.blocks(need)],
            np.repeat(np.arange(len(found), dtype=np.int32), [len(wanted) for wanted in parts]),
            np.concatenate([rows.starts[wanted] for rows, wanted in found]),
            np.concatenate([rows.sizes[wanted] for rows, wanted in found]),
            np.concatenate([rows.phys[wanted] for rows, wanted in found]),
        )


def _taken(rows: RowTable, limits: Limits, message_filter: MessageFilter | None) -> TakenRows:
    mask = None if message_filter is None else message_filter.tags_mask(rows.tags_code)
    return take(rows.size, np.cumsum(rows.size, dtype=np.int64), 0, limits, mask)


def _lost(rows: RowTable, parents: dict[int, QueueView | None]) -> NDArray[np.bool_]:
    """Which rows refer to parents that expired or were never archived."""
    lost = np.zeros(len(rows), bool)
    for number, view in parents.items():
        mine = rows.parent == number
        lost[mine] = True if view is None else view.are_lost(rows.parent_queue_offset[mine])
    return lost


def _end_offset(rows: RowTable, end: int) -> int:
    """The queue offset after row ``end - 1``."""
    return int(rows.queue_offset[end - 1]) + int(rows.inner_num[end - 1])
