"""Index items from a segment's key section and row columns, one vectorised pass a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from tiered.archive.index.items import ITEM_DTYPE
from tiered.formats.run_part import RunPart
from tiered.formats.segment_index import KeySection, SegmentIndex
from tiered.model.queue import LMQ_PREFIX
from tiered.model.tables import RunKind, Table


def items_of_segment(index: SegmentIndex, keys: KeySection, runs: Iterable[RunPart]) -> Table:
    """ITEM_DTYPE rows of every key of ``runs``, in row order.

    Rows of an LMQ have none: keys are hashed with the topic of their record, and indexed in its queue.
    """
    parts = list(pieces_of_segment(index, keys, runs, max(len(keys.hashes), 1)))
    return np.concatenate(parts) if parts else np.zeros(0, ITEM_DTYPE)


def pieces_of_segment(
    index: SegmentIndex, keys: KeySection, runs: Iterable[RunPart], items_max: int
) -> Iterator[Table]:
    """Like ``items_of_segment``, at most ``items_max`` at a time; a row with more keys comes whole."""
    first_key = np.zeros(len(keys.counts) + 1, np.int64)
    np.cumsum(keys.counts, out=first_key[1:])
    for run in runs:
        if not _has_keys(index, run.ordinal):
            continue
        first = int(index.first_row[run.ordinal]) + run.first_row
        end = first + run.rows
        if first_key[first] == first_key[end]:
            continue
        rows, queue = index.row_columns(run), index.queue_of(run.ordinal)
        row = first
        while row < end:
            fitting = int(np.searchsorted(first_key, first_key[row] + items_max, side="right")) - 1
            stop = min(max(fitting, row + 1), end)
            part = slice(row - first, stop - first)
            counts = keys.counts[row:stop]
            items = np.zeros(int(first_key[stop] - first_key[row]), ITEM_DTYPE)
            items["hash"] = keys.hashes[first_key[row] : first_key[stop]]
            items["queue_offset"] = np.repeat(rows.queue_offset[part], counts)
            items["store_timestamp"] = np.repeat(rows.store_timestamp[part], counts)
            items["queue_id"] = queue.queue_id
            items["generation"] = queue.generation
            yield items
            row = stop


def _has_keys(index: SegmentIndex, run: int) -> bool:
    is_lmq = int(index.runs["kind"][run]) == RunKind.LMQ
    return not is_lmq and not index.queue_of(run).topic.startswith(LMQ_PREFIX)


def rows_with_hash(index: SegmentIndex, keys: KeySection, runs: Iterable[RunPart], wanted: int) -> Table:
    """Items of ``runs`` whose hash is ``wanted``, for queries of segments without an index file."""
    if not bool((keys.hashes == np.uint64(wanted)).any()):
        return np.zeros(0, ITEM_DTYPE)
    items = items_of_segment(index, keys, runs)
    found: Table = items[items["hash"] == np.uint64(wanted)]
    return found
