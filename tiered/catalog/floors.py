"""Applies floors: a queue's minimum offset rises, and the runs below it have expired. Pure.

Where it does not rise, key compaction dropped rows, and only their number changes.

Runs in memory leave at once. Those in pages stay there until a merge; readers skip them by the floor.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.commit import CommitDraft, CommitInvalidError
from tiered.catalog.state import CatalogState, RunChunk, selected
from tiered.model.tables import QUEUE_EXPIRED, QUEUE_SPARSE, Table


def raise_floors(state: CatalogState, draft: CommitDraft) -> tuple[Table, Table, tuple[RunChunk, ...]]:
    """Queue table, gaps and chunks in memory after the floors of ``draft``. Raises CommitInvalidError."""
    floors = draft.floors
    rows = state.directory.rows(draft.queues, len(state.table))[floors["queue"]]
    if bool((rows < 0).any()) or len(np.unique(rows)) != len(rows):
        raise CommitInvalidError(
            "the commit raises the minimum offset of a queue that is not in the archive, or of one queue twice"
        )
    table = state.table.copy()
    minimum, new = table["min_queue_offset"][rows], floors["min_queue_offset"]
    wrong = (
        (new < minimum) | ((new == minimum) & (floors["rows"] == 0)) | (new > table["end_queue_offset"][rows])
    )
    wrong |= (floors["rows"] < 0) | (floors["rows"] > table["row_count"][rows])
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise CommitInvalidError(
            f"{state.key_of(int(rows[at]))}: the floor cannot move from {minimum[at]} to {new[at]} over "
            f"{floors['rows'][at]} rows"
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
    found: NDArray[np.int64] = np.clip(minimum - runs["base_queue_offset"], 0, runs["rows"])
    return found


def _living(chunk: RunChunk, minimum: NDArray[np.int64]) -> RunChunk:
    expired = is_expired(chunk.runs, minimum[chunk.runs["queue"]])
    return selected(chunk, ~expired) if expired.any() else chunk


def _without_expired(table: Table, gaps: Table, rows: NDArray[np.int64]) -> Table:
    """Gaps above the floors. A floor at the beginning of a gap moves to its end."""
    touched = np.flatnonzero(np.isin(gaps["queue"], rows))
    if not len(touched):
        return gaps
    gaps = gaps.copy()
    for index in touched[np.argsort(gaps["begin_queue_offset"][touched])].tolist():
        row = gaps["queue"][index]
        if gaps["begin_queue_offset"][index] <= table["min_queue_offset"][row]:
            table["min_queue_offset"][row] = max(
                table["min_queue_offset"][row], gaps["end_queue_offset"][index]
            )
    kept = np.ones(len(gaps), bool)
    kept[touched] = gaps["begin_queue_offset"][touched] >= table["min_queue_offset"][gaps["queue"][touched]]
    return gaps[kept]
