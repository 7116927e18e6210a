"""Applies floors: a queue's minimum offset rises, and the runs below it have expired. Pure.

A floor that does not rise says how many messages key compaction dropped from the queue.

Expired runs that are in no page are removed at once. Those in pages stay there until pages are merged, and readers skip
them by the floor.
"""

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.commit import CommitDraft, CommitInvalidError
from tiered.catalog.state import CatalogState, RunChunk, selected
from tiered.model.tables import QUEUE_EXPIRED, QUEUE_SPARSE, Table


def raise_floors(state: CatalogState, draft: CommitDraft) -> tuple[Table, Table, tuple[RunChunk, ...]]:
    """Apply the ``floors`` (new minimum offsets of queues, and how many messages are below) of a maintenance commit.

    Returns the state's queue table, its gaps, and its runs that are in no page yet, without those that have expired.
    Raises CommitInvalidError."""
    floors = draft.floors
    rows = state.directory.rows(draft.queues, len(state.table))[floors["queue"]]
    if bool((rows < 0).any()) or len(np.unique(rows)) != len(rows):
        raise CommitInvalidError(
            f"catalog version {state.version} is invalid: it raises the minimum offset of a queue that is not in the "
            "archive, or of one queue twice"
        )
    table = state.table.copy()
    minimum, new = table["min_queue_offset"][rows], floors["min_queue_offset"]
    # Key compaction drops messages without raising the minimum; a floor that does neither changes nothing.
    is_wrong = (
        (new < minimum) | ((new == minimum) & (floors["rows"] == 0)) | (new > table["end_queue_offset"][rows])
    )
    is_wrong |= (floors["rows"] < 0) | (floors["rows"] > table["row_count"][rows])
    if is_wrong.any():
        at = int(np.flatnonzero(is_wrong)[0])
        raise CommitInvalidError(
            f"{state.key_of(int(rows[at]))}: the minimum offset cannot move from {minimum[at]} to {new[at]} with "
            f"{floors['rows'][at]} expired messages"
        )
    table["min_queue_offset"][rows] = new
    table["row_count"][rows] -= floors["rows"]
    table["flags"][rows] |= np.where(new > minimum, QUEUE_EXPIRED, QUEUE_SPARSE).astype(np.uint32)
    gaps = _without_expired(table, state.gaps, rows)
    chunks = tuple(_living(chunk, table["min_queue_offset"]) for chunk in state.chunks)
    return table, gaps, tuple(chunk for chunk in chunks if len(chunk.runs))


def is_expired(runs: Table, minimum: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which ``runs`` are at or below the floor ``minimum`` of their queue."""
    expired: NDArray[np.bool_] = runs["end_queue_offset"] <= minimum
    return expired


def rows_below(runs: Table, minimum: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many rows of each of ``runs`` are below the floor ``minimum`` of its queue. A floor inside a run is set only
    where each offset has a row."""
    rows: NDArray[np.int64] = np.clip(minimum - runs["base_queue_offset"], 0, runs["rows"])
    return rows


def _living(chunk: RunChunk, minimum: NDArray[np.int64]) -> RunChunk:
    """``chunk`` without expired runs. ``minimum``: the minimum offset of each queue, by row."""
    expired = is_expired(chunk.runs, minimum[chunk.runs["queue"]])
    return selected(chunk, ~expired) if expired.any() else chunk


def _without_expired(table: Table, gaps: Table, rows: NDArray[np.int64]) -> Table:
    """The gaps (GAP_DTYPE) without those of the queues ``rows`` that are below the minimum offset in ``table``. A
    minimum offset inside a gap moves to its end, in place, as no message is there."""
    touched = np.flatnonzero(np.isin(gaps["queue"], rows))
    if not len(touched):
        return gaps
    for index in touched[np.argsort(gaps["begin_queue_offset"][touched])].tolist():
        row = gaps["queue"][index]
        if gaps["begin_queue_offset"][index] <= table["min_queue_offset"][row]:
            table["min_queue_offset"][row] = max(
                table["min_queue_offset"][row], gaps["end_queue_offset"][index]
            )
    kept = np.ones(len(gaps), bool)
    kept[touched] = gaps["begin_queue_offset"][touched] >= table["min_queue_offset"][gaps["queue"][touched]]
    return gaps[kept]
