"""Divides runs where a log diverges inside them: both parts name the same object, and nothing is copied.

Compaction joins the rows of many commits into one run. The tail of its object has the physical offset of each row.
"""

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
"""So much memory caches tails of objects, as several pages may have runs of one object."""


class RunCuts:
    """Divides runs (rows of one queue with contiguous offsets inside one object) of objects in ``store``."""

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
        """The runs of ``page`` below and above a limit, where a run that the limit is inside of is cut in two. Of the
        cut ones, the lower part is dropped if it is below the queue's minimum offset.

        ``limits`` and ``floors`` (minimum offsets) have one number for each run; ``bounds`` says whether limits are
        commitlog or queue offsets. Raises CorruptionError where a limit is inside a record, and what the store
        raises."""
        chunk, (begin_name, end_name) = page.chunk, bounds.value
        is_below = chunk.runs[end_name] <= limits
        is_cut = ~is_below & (chunk.runs[begin_name] < limits)
        lower, upper = chunk.runs.copy(), chunk.runs.copy()
        cut = np.flatnonzero(is_cut)
        # By object, so that the cache has the tail of each.
        for at in cut[np.argsort(chunk.runs["object"][cut], kind="stable")].tolist():
            run, object_row = chunk.runs[at], chunk.objects[int(chunk.runs["object"][at])]
            key = chunk.object_keys[int(object_row["key"])]
            rows = self.rows(key, object_row, page.queues[int(run["queue"])], run)
            begins, ends = rows.phys, rows.phys + rows.size
            if bounds is Bounds.OFFSET:
                begins, ends = rows.queue_offset, rows.queue_offset + rows.inner_num
            count = int((begins < limits[at]).sum())
            if (begins[count:] < limits[at]).any() or ends[:count].max() > limits[at]:
                raise CorruptionError(
                    f"{self._store.url}/{key}: run {run['ordinal']} of {page.queues[int(run['queue'])]} cannot be cut "
                    f"at the {'queue' if bounds is Bounds.OFFSET else 'commitlog'} offset {limits[at]}, which is "
                    "inside a record"
                )
            lower[at], upper[at] = cut_run(run, rows, 0, count), cut_run(run, rows, count, len(rows))
        is_below |= is_cut & ~is_expired(lower, floors)
        return (
            selected(RunChunk(lower, chunk.objects, chunk.object_keys), is_below),
            selected(RunChunk(upper, chunk.objects, chunk.object_keys), chunk.runs[end_name] > limits),
        )

    def rows(self, key: str, object_row: np.void, queue: QueueKey, run: np.void) -> RowTable:
        """The rows of a run (RUN_DTYPE) of ``queue`` in the object ``key``, which ``object_row`` (OBJECT_DTYPE)
        describes. Reads the end of the object, where its index is, unless it is cached."""
        index = self._tails.get(key)
        if index is None:
            size_bytes, tail_bytes = int(object_row["size_bytes"]), int(object_row["tail_bytes"])
            check_tail_length(key, size_bytes, tail_bytes)
            tail = self._store.get_range(key, size_bytes - tail_bytes, tail_bytes)
            index = SegmentIndex(key, size_bytes, tail)
            self._tails.put(key, index, index.nbytes)
        return index.row_columns(index.check_run(run, queue))
