"""Writes the consume queues of a restored log, from the rows of the archive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.restore.records import COMPACT, TAIL_BYTES, LogOrder, OrderedRun, opened
from rocketmq_tiered.maintenance.restore.selection import RestoreSelection, ShownQueue
from tiered.archive.found_objects import READ_THREADS, few_at_a_time
from tiered.archive.object_spans import Rows, all_rows
from tiered.archive.segment_reader import SegmentCache, SegmentReader
from tiered.consume_queue.index import UNIT_DTYPE
from tiered.consume_queue.store import ConsumeQueueStore
from tiered.errors import CorruptionError, UsageError
from tiered.model.queue import QueueKey
from tiered.model.tables import Table
from tiered.object_store.interface import ObjectStore

PENDING_UNITS = 1 << 20
"""Units in memory; they are written queue by queue, as most runs have few."""
GAP_UNITS_MAX = 1 << 16
GAP_SIZE = 2

Moved = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Physical offsets in the restored log of those in the archive."""


class UnitCounts(NamedTuple):
    """``messages``: units of messages. ``gaps``: offsets between them without one. ``ended``: queues of which nothing
    was kept."""

    messages: int
    gaps: int
    ended: int


class UnitWriter:
    """Writes what ``selection`` has to ``queues``. ``only_ended``: a broker builds the others, so that only queues of
    which nothing was kept are written. ``gap_phys``: see LogLayout."""

    def __init__(
        self,
        selection: RestoreSelection,
        queues: ConsumeQueueStore,
        gap_phys: int,
        moved: Moved,
        *,
        only_ended: bool,
    ) -> None:
        self._selection, self._queues, self._only_ended = selection, queues, only_ended
        self._gap_phys, self._moved = gap_phys, moved
        self._pending: dict[QueueKey, list[Table]] = {}
        self._pending_units = 0
        self._next: dict[QueueKey, int] = {}
        self._messages = self._gaps = 0

    def write(self, store: ObjectStore, order: LogOrder) -> UnitCounts:
        """All of them. Raises what reading and writing raise."""
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="restore") as pool:
            for runs, reader in few_at_a_time(_opened(store, order, pool)):
                for item in runs:
                    self._add(item, reader.result())
        self._write_pending()
        ended = 0
        for key, queue in self._selection.queues.items():
            ended += self._end(key, queue)
        return UnitCounts(self._messages, self._gaps, ended)

    def _add(self, item: OrderedRun, reader: SegmentReader) -> None:
        part = reader.index.check_run(item.run, item.queue)
        for rows in all_rows(reader.index, part):
            kept = self._selection.rows(rows, item.queue, int(item.run["kind"]), reader.index.queues)
            if not kept.any():
                continue
            self._pending.setdefault(item.queue, []).append(self._units(rows.where(kept)))
            self._pending_units += int(kept.sum())
            if self._pending_units >= PENDING_UNITS:
                self._write_pending()

    def _units(self, rows: Rows) -> Table:
        units = np.zeros(len(rows), UNIT_DTYPE)
        for name in ("size", "tags_code", "queue_offset", "inner_num", "store_timestamp"):
            units[name] = getattr(rows, name)
        units["phys"] = self._moved(rows.phys)
        return units

    def _write_pending(self) -> None:
        for key, tables in self._pending.items():
            units = np.concatenate(tables)
            self._messages += len(units)
            for first, end in _unbroken(units):
                self._put(key, units[first:end])
        self._pending, self._pending_units = {}, 0

    def _put(self, key: QueueKey, units: Table) -> None:
        first = int(units["queue_offset"][0])
        expected = self._next.get(key, first)
        if first < expected:
            raise CorruptionError(
                f"{key}: rows at offset {first} are before {expected}",
                hint="tiered verify ARCHIVE_URL --full names what is damaged",
            )
        if first > expected and not self._selection.queues[key].is_batch:
            self._put_gap(key, expected, first)
        if not self._only_ended:
            self._queues.put(key.topic, key.queue_id, units)
        self._next[key] = int(units["queue_offset"][-1] + units["inner_num"][-1])

    def _put_gap(self, key: QueueKey, begin: int, end: int) -> None:
        """Units of offsets that no message has. Raises UsageError where the log has no place for them."""
        if self._gap_phys < 0:
            raise UsageError(
                f"offsets {begin} to {end} of {key} are missing, and the log begins at 0", hint=COMPACT
            )
        self._gaps += end - begin
        for first in range(begin, end, GAP_UNITS_MAX):
            units = np.zeros(min(GAP_UNITS_MAX, end - first), UNIT_DTYPE)
            units["phys"], units["size"], units["inner_num"] = self._gap_phys, GAP_SIZE, 1
            units["queue_offset"] = np.arange(first, first + len(units))
            if not self._only_ended:
                self._queues.put(key.topic, key.queue_id, units)

    def _end(self, key: QueueKey, queue: ShownQueue) -> int:
        """Bring the queue to its end; 1 if nothing of it was kept."""
        written = self._next.get(key)
        if written is None:
            if queue.end_offset:
                self._queues.put_empty_queue(key.topic, key.queue_id, queue.end_offset)
            return int(queue.end_offset > 0)
        if written < queue.end_offset and not queue.is_batch:
            self._put_gap(key, written, queue.end_offset)
        return 0


def _unbroken(units: Table) -> Iterator[tuple[int, int]]:
    """Bounds of units whose offsets follow each other."""
    ends = units["queue_offset"] + units["inner_num"]
    cuts = np.flatnonzero(units["queue_offset"][1:] != ends[:-1]) + 1
    bounds = [0, *cuts.tolist(), len(units)]
    yield from pairwise(bounds)


def _opened(
    store: ObjectStore, order: LogOrder, pool: ThreadPoolExecutor
) -> Iterator[tuple[list[OrderedRun], Future[SegmentReader]]]:
    """Consecutive runs of one object, and the object."""
    cache = SegmentCache(store, cache_bytes=TAIL_BYTES)
    for _, group in groupby(order.runs(), key=lambda item: item.key):
        runs = list(group)
        yield runs, pool.submit(opened, cache, runs[0])
