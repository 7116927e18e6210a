"""Small queues that are read one after the other, by name: the next ones are read together, object by object.

A queue has some rows in each of many objects, and a read of its own takes longer for each of these objects than the
rows take. Here the rows of many queues are columns, and their records are copied once, into the order of the queues.

Only whole queues of plain runs are read so, and only once readers have gone from queue to queue; more of them each
time, as a window of prefetch grows. Whatever is unusual, damaged, or does not fit is left to reads of single queues,
which have the errors. Does not own these (row_reader.py).
"""

import threading
from bisect import bisect_left
from concurrent.futures import Future
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fetcher.blocks.budget import ByteBudget
from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import Wait, gather, new_future
from fetcher.rows.block_fetch import BlockSource
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.message import MessageBatch
from fetcher.rows.run_list import QueueView
from tiered.catalog.pages import Page
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, TieredError
from tiered.formats.part_rows import in_object_order, rows_of_parts
from tiered.formats.segment_layout import PART_RUNS
from tiered.kernels.record_fields import copy_to
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, begins, picked, positions

ROWS_MAX = 4096
"""Longer queues are read alone, which takes little time for each of their rows."""
QUEUES_MIN = 4
"""Fewer queues are not read together: that two are read in order may be chance."""
QUEUES_MAX = 4096
SKIPPED_MAX = 64
"""Readers that take queues side by side come to them nearly in order, and pass long ones."""
BYTES_MAX = 64 * 1024 * 1024
PULLED_BYTES_MAX = 16 * 1024 * 1024
"""The limit for pulls of consumers, as one of them waits until all queues are read."""
MEMORY_SHARE = 8
"""At most this part of the memory for reading holds messages of neighbours."""
ROW_BYTES = 44
_COLUMNS = {
    "queue_offset": np.int64,
    "size": np.int32,
    "phys": np.int64,
    "tags_code": np.int64,
    "store_timestamp": np.int64,
}


class TogetherRead:
    """The messages of those ``queues`` that are whole, plain and, all together, within ``bytes_max``; the others have
    none here. ``page`` has the runs of all that ``state`` names."""

    def __init__(self, page: Page, state: CatalogState, bytes_max: int) -> None:
        """Choose the queues that can be read together, in the order of ``page``, which lists their runs: those that
        have only plain runs, without a gap from their minimum to their maximum, and as many as ``bytes_max`` allows.
        Nothing is read yet."""
        runs, self._page = page.chunk.runs, page
        table = state.table[state.directory.rows(page.queues, len(state.table))]
        number = runs["queue"].astype(np.int64)
        base, end = runs["base_queue_offset"], runs["end_queue_offset"]
        is_first = np.diff(number, prepend=-1) > 0  # of its queue
        first = np.flatnonzero(is_first)
        # Whether a run follows the one before it without a gap; the first one begins at the queue's minimum or below.
        follows = np.where(is_first, base <= table["min_queue_offset"][number], base == np.roll(end, 1))
        follows &= (runs["kind"] == RunKind.PLAIN) & (runs["first_row"] == 0)
        rows, sizes = (np.add.reduceat(runs[name], first) for name in ("rows", "byte_count"))
        is_whole = np.logical_and.reduceat(follows, first) & (rows <= ROWS_MAX)
        is_whole &= end[np.append(first, len(runs))[1:] - 1] == table["end_queue_offset"]
        fits = np.cumsum(np.where(is_whole, sizes, 0)) <= bytes_max
        is_whole &= fits
        self.queues = page.queues[: int(fits.sum())]
        self._runs = picked(runs, is_whole[number])
        self._bytes, self._rows = begins(self._runs["byte_count"]), begins(self._runs["rows"])
        self._of_queues = begins(np.where(is_whole, rows, 0)).tolist()
        self._columns = {name: np.empty(0, kind) for name, kind in _COLUMNS.items()}
        self._data = np.empty(0, np.uint8)

    async def read(self, source: BlockSource, budget: ByteBudget) -> dict[QueueKey, MessageBatch]:
        """Read all messages of the chosen queues, object by object, and return them by queue; nothing if there is no
        memory for them. Raises what reading objects raises, or ValueError for rows that do not fit their blocks."""
        count, byte_count = int(self._rows[-1]), int(self._bytes[-1])
        cost_bytes = byte_count + ROW_BYTES * count
        if count == 0 or not budget.try_charge(cost_bytes, Priority.USER):
            return {}
        self._data = np.empty(byte_count, np.uint8)
        budget.tie(cost_bytes, self._data)
        self._columns = {name: np.empty(count, kind) for name, kind in _COLUMNS.items()}
        part = self._runs["ordinal"] // PART_RUNS
        order = np.lexsort((self._runs["ordinal"], self._runs["object"]))
        is_other = (np.diff(self._runs["object"][order]) != 0) | (np.diff(part[order]) != 0)
        groups = np.split(order, np.flatnonzero(is_other) + 1)
        await gather(self._read_part(source, which) for which in groups)
        offset, size, phys, tags_code, stamp = self._columns.values()
        zeros, ones = np.zeros(count, np.int32), np.ones(count, np.int32)
        columns: list[Any] = [zeros, begins(size)[:-1], size, offset, ones, phys, tags_code, stamp]
        return {
            queue: MessageBatch([self._data], *(column[first:end] for column in columns), is_dense=True)
            for queue, (first, end) in zip(self.queues, pairwise(self._of_queues), strict=False)
            if end > first
        }

    async def _read_part(self, source: BlockSource, which: NDArray[np.int64]) -> None:
        """Read the runs ``which`` of one object, and copy their columns and records to the places that they have in the
        result. Raises CorruptionError if the rows do not fit their blocks."""
        runs, chunk = picked(self._runs, which), self._page.chunk
        place = chunk.objects[int(runs["object"][0])]
        key, run = chunk.object_keys[int(place["key"])], int(runs["ordinal"][0])
        index = await source.index(
            key, int(place["size_bytes"]), int(place["tail_bytes"]), Priority.USER, run
        )
        runs["ordinal"] -= index.first_run
        runs = in_object_order(index, runs, self._page.queues)
        (rows,) = rows_of_parts(index, runs, [int(runs["rows"].sum())])
        at = positions(self._rows[which], runs["rows"])
        for name, column in self._columns.items():
            column[at] = getattr(rows, name)
        # Where each record begins in the decompressed bytes of the object, and the block that has it.
        raw = index.bounds.run_raw[runs["ordinal"]][rows.part] + rows.position
        block_raw = index.bounds.block_raw
        block = np.searchsorted(block_raw, raw, side="right") - 1
        numbers, of = np.unique(block, return_inverse=True)
        blocks = await source.blocks_at(index, run, numbers.tolist(), Priority.USER)
        # The blocks are joined: how far each is moved by that. Records of one run in one block are copied as one piece.
        shift = begins(np.array([len(data) for data in blocks]))[:-1] - block_raw[numbers]
        pieces = np.flatnonzero(np.diff(rows.part, prepend=-1) | np.diff(block, prepend=-1))
        sizes = np.add.reduceat(rows.size, pieces, dtype=np.int64)
        target = (self._bytes[which][rows.part] + rows.position)[pieces].astype(np.int32)
        if (rows.size < 1).any() or (raw[pieces] + sizes > block_raw[block[pieces] + 1]).any():
            raise CorruptionError(f"{key} is damaged: rows of its index do not fit its blocks")
        copy_to(np.concatenate(blocks), (raw + shift[of])[pieces], sizes, target, self._data)


class Neighbours:
    """Reads queues together for readers that go from queue to queue. Thread-safe."""

    def __init__(self, source: BlockSource, catalog: CatalogView, budget: ByteBudget) -> None:
        """Reads nothing yet. ``budget`` makes this drop messages that were read together when other reads need
        memory."""
        self._source, self._catalog, self._budget = source, catalog, budget
        self._lock = threading.Lock()
        self._order: tuple[CatalogState, dict[QueueKey, int]] = catalog.state, {}
        """The number of each queue in the order in which a walk over all queues reads them, at a catalog version."""
        self._next, self._count = 0, 1
        """The number of the queue that such a walk reads next, and how many queues were read together last."""
        self._ready: tuple[int, dict[QueueKey, MessageBatch]] = 0, {}
        """The messages that were read together, by queue, and the log history they belong to."""
        self._loading: tuple[range, Future[None]] | None = None
        """The numbers of the group of queues that is being read together, and when it has been."""
        budget.add_reclaimer(self._reclaim)

    def _reclaim(self, _needed_bytes: int, priority: int) -> None:
        if priority == Priority.USER:
            self._ready, self._count = (0, {}), 1

    async def rest_of(self, view: QueueView, offset: int, pulled: int | None = None) -> MessageBatch | None:
        """All messages of a queue from ``offset`` on, if they were or can be read together with other queues' messages;
        None if the queue has to be read alone. ``pulled``: a consumer pulls so many of them, the others stay for its
        next pulls; queues are read together for it only from their first message on."""
        if self._order[0] is not view.state or not self._order[1]:
            queues = view.state.visible_queues()
            self._order = view.state, {queue: number for number, queue in enumerate(queues)}
        number, group = self._order[1].get(view.queue, -1), range(0)
        begins_here = pulled is None or offset == view.min_offset
        # A queue of the group that is being read, or shortly behind it, waits, as the next group begins with it.
        while begins_here and (loading := self._loading) is not None:
            group = loading[0]
            if not group.start <= number < group.stop + SKIPPED_MAX:
                break
            await Wait(loading[1])
        is_unread = number >= 0 and number not in group and view.queue not in self._ready[1]
        if begins_here and is_unread:
            await self._load(view.state, number, BYTES_MAX if pulled is None else PULLED_BYTES_MAX)
        history, ready = self._ready
        batch = ready.pop(view.queue, None)
        # Key compaction may have dropped messages since they were read.
        if batch is None or history != view.state.cursor.history or view.is_sparse:
            return None
        first = int(batch.queue_offsets[0])
        if not first <= offset < first + len(batch) == view.max_offset:
            return None
        begin, end = offset - first, len(batch)
        if pulled is not None and begin + pulled < end:
            ready[view.queue], end = batch, begin + pulled
        return batch if end - begin == len(batch) else batch.select(slice(begin, end))

    async def _load(self, state: CatalogState, number: int, bytes_max: int) -> None:
        """Read the queue with this number and the ones after it together, if readers came to it from the queues before
        it: twice as many queues as the last time, up to QUEUES_MAX and ``bytes_max``."""
        with self._lock:
            is_next = 0 <= number - self._next <= SKIPPED_MAX
            self._count = min(2 * self._count, QUEUES_MAX) if is_next else 1
            self._next = number + 1
            if self._count < QUEUES_MIN or self._loading is not None:
                return
            group, future = range(number, number + self._count), new_future()
            self._loading = group, future
        count, ready = 1, {}
        try:
            queues = list(islice(self._order[1], group.start, group.stop))
            bytes_max = min(self._budget.total_bytes // MEMORY_SHARE, bytes_max)
            page = await self._catalog.runs_of_queues(state, queues)
            together = TogetherRead(page, state, bytes_max)
            ready = await together.read(self._source, self._budget)
            count = len(queues)
            if len(together.queues) < len(page.queues):
                count = bisect_left(queues, page.queues[len(together.queues)])
        except (TieredError, ValueError):
            pass  # the read of a single queue meets the same error, and reports it with the queue's name
        finally:
            with self._lock:
                self._ready, self._loading = (state.cursor.history, ready), None
                self._next = max(self._next, number + max(1, count))
                self._count = count if ready else 1
            future.set_result(None)
