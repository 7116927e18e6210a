"""From a segment's key section and row columns to index items: one vectorised pass a run.

Owns that translation. Does not own reading segments nor writing files.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tiered.formats.segment_index import KeySection, SegmentIndex
from tiered.index.items import ITEM_DTYPE
from tiered.model.queue import LMQ_PREFIX
from tiered.model.tables import RunKind, Table


def items_of_segment(index: SegmentIndex, keys: KeySection, runs: Iterable[int]) -> Table:
    """ITEM_DTYPE rows of every key of ``runs``, in row order.

    Rows of a light queue carry none: a key is hashed with the topic of its record, where it is found.
    """
    first_key = np.zeros(len(keys.counts) + 1, np.int64)
    np.cumsum(keys.counts, out=first_key[1:])
    parts = [_items_of_run(index, keys, first_key, run) for run in runs if _has_keys(index, run)]
    return np.concatenate(parts) if parts else np.zeros(0, ITEM_DTYPE)


def _has_keys(index: SegmentIndex, run: int) -> bool:
    is_light = int(index.runs["kind"][run]) == RunKind.LMQ
    return not is_light and not index.queue_of(run).topic.startswith(LMQ_PREFIX)


def _items_of_run(index: SegmentIndex, keys: KeySection, first_key: NDArray[np.int64], run: int) -> Table:
    first, end = int(index.first_row[run]), int(index.first_row[run + 1])
    begin, stop = int(first_key[first]), int(first_key[end])
    items = np.zeros(stop - begin, ITEM_DTYPE)
    if len(items) == 0:
        return items
    rows = index.row_columns(run)
    queue = index.queue_of(run)
    counts = keys.counts[first:end]
    items["hash"] = keys.hashes[begin:stop]
    items["queue_offset"] = np.repeat(rows.queue_offset, counts)
    items["store_timestamp"] = np.repeat(rows.store_timestamp, counts)
    items["queue_id"] = queue.queue_id
    items["generation"] = queue.generation
    return items


def rows_with_hash(index: SegmentIndex, keys: KeySection, runs: Iterable[int], wanted: int) -> Table:
    """Items of ``runs`` whose hash is ``wanted``: what a query looks for in a segment no index file covers."""
    if not bool((keys.hashes == np.uint64(wanted)).any()):
        return np.zeros(0, ITEM_DTYPE)
    items = items_of_segment(index, keys, runs)
    found: Table = items[items["hash"] == np.uint64(wanted)]
    return found
