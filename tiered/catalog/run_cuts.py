"""Divides runs where a log diverges inside them: both parts name the same object, and nothing is copied.

Compaction joins the rows of many commits into one run. The tail of its object has the physical offset of each row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.floors import is_expired
from tiered.catalog.pages import Bounds, Page
from tiered.catalog.state import RunChunk, selected
from tiered.errors import CorruptionError
from tiered.formats.run_part import cut_run
from tiered.formats.segment import RowTable
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import check_tail_length
from tiered.model.lru import Lru
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore

CACHE_BYTES = 64 << 20
"""Of tails: several pages may have runs of one object."""


class RunCuts:
    """Divides runs of objects in ``store``."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._tails: Lru[str, SegmentIndex] = Lru(CACHE_BYTES)

    def divided(
        self,
        page: Page,
        limits: NDArray[np.int64],
        floors: NDArray[np.int64],
        bounds: Bounds = Bounds.PHYS,
    ) -> tuple[RunChunk, RunChunk]:
        """The living rows of ``page`` below and above positions; ``limits`` and ``floors`` are of each run. Raises
        CorruptionError where a position is inside a record, and what the store raises."""
        chunk, (low, high) = page.chunk, bounds.value
        is_below = chunk.runs[high] <= limits
        is_cut = ~is_below & (chunk.runs[low] < limits)
        lower, upper = chunk.runs.copy(), chunk.runs.copy()
        cut = np.flatnonzero(is_cut)
        for at in cut[np.argsort(chunk.runs["object"][cut], kind="stable")].tolist():
            run, place = chunk.runs[at], chunk.objects[int(chunk.runs["object"][at])]
            rows = self.rows(chunk.object_keys[int(place["key"])], place, page.queues[int(run["queue"])], run)
            places = (rows.phys, rows.phys + rows.size)
            if bounds is Bounds.OFFSET:
                places = (rows.queue_offset, rows.queue_offset + rows.inner_num)
            count = int((places[0] < limits[at]).sum())
            if (places[0][count:] < limits[at]).any() or places[1][:count].max() > limits[at]:
                key = chunk.object_keys[int(place["key"])]
                raise CorruptionError(
                    f"{key}: {limits[at]} is between no two records of run {run['ordinal']}"
                )
            lower[at], upper[at] = cut_run(run, rows, 0, count), cut_run(run, rows, count, len(rows))
        is_below |= is_cut & ~is_expired(lower, floors)
        return (
            selected(RunChunk(lower, chunk.objects, chunk.object_keys), is_below),
            selected(RunChunk(upper, chunk.objects, chunk.object_keys), chunk.runs[high] > limits),
        )

    def rows(self, key: str, place: np.void, queue: QueueKey, run: np.void) -> RowTable:
        """The rows of a run (RUN_DTYPE) of the object ``key``; ``place`` is its row of OBJECT_DTYPE."""
        index = self._tails.get(key)
        if index is None:
            size_bytes, tail_bytes = int(place["size_bytes"]), int(place["tail_bytes"])
            check_tail_length(key, size_bytes, tail_bytes)
            tail = self._store.get_range(key, size_bytes - tail_bytes, tail_bytes)
            index = SegmentIndex(key, size_bytes, tail)
            self._tails.put(key, index, index.nbytes)
        return index.row_columns(index.check_run(run, queue))
