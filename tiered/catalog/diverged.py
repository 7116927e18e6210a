"""The messages of a log history that a later one superseded, as a state that readers can open.

They are found in the commits that added them, which are kept; pages and roots of that time may be deleted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tiered.catalog.append_runs import append_runs
from tiered.catalog.catalog_reader import load, read_commit
from tiered.catalog.commit import CommitKind
from tiered.catalog.deletions import PendingDeletion, Reason, read_list
from tiered.catalog.floors import raise_floors
from tiered.catalog.queue_directory import QueueDirectory
from tiered.catalog.replace_runs import replace_runs
from tiered.catalog.state import REMOVED_DTYPE, CatalogState, joined, selected
from tiered.errors import NotFoundError
from tiered.model.tables import QUEUE_HIDDEN, QUEUE_SUPERSEDED
from tiered.object_store.interface import ObjectStore

FIRST_HISTORY = 1


class _Span(NamedTuple):
    """Superseded are the records at or above ``phys`` that versions (``low``, ``end``) added."""

    low: int
    end: int
    phys: int


def superseded_histories(state: CatalogState) -> list[int]:
    """Numbers of the log histories of which a later one superseded messages."""
    last = max((history.number for history in state.log_histories), default=FIRST_HISTORY)
    return [number for number in range(FIRST_HISTORY, last) if _span(state, number) is not None]


def superseded_state(store: ObjectStore, state: CatalogState, number: int) -> CatalogState:
    """What log history ``number`` had and later ones do not. Reads the commits that added it.

    Raises NotFoundError when there is none.
    """
    span = _span(state, number)
    if span is None:
        raise NotFoundError(
            f"no messages of log history {number} were superseded",
            hint="`tiered ls --diverged` lists log histories; `tiered ls --hidden` lists queues that ended with theirs",
        )
    before = load(store, version=span.low)
    for version in range(span.low + 1, span.end):
        draft = read_commit(store, version).draft
        if draft.kind == CommitKind.APPEND:
            directory, table, gaps, chunk = append_runs(before, draft, version)
            before = replace(
                before, directory=directory, table=table, gaps=gaps, chunks=(joined((*before.chunks, chunk)),)
            )
        if len(draft.floors):
            table, gaps, chunks = raise_floors(before, draft)
            before = replace(before, table=table, gaps=gaps, chunks=chunks)
        if draft.kind == CommitKind.MAINTENANCE and (len(draft.runs) or len(draft.removed)):
            changed = replace_runs(before, draft, version)
            chunks = (joined((*changed.chunks, changed.added)),)
            before = replace(
                before, table=changed.table, gaps=changed.gaps, tombstones=changed.tombstones, chunks=chunks
            )
    return _only_above(before, span)


def diverged_deletions(store: ObjectStore, state: CatalogState) -> dict[str, PendingDeletion]:
    """The pending deletions of superseded messages, kept ones too; reads the lists of them."""
    found = {key: entry for key, entry in state.pending_deletions.items() if entry.reason == Reason.DIVERGED}
    for listed in state.deletion_lists:
        if listed.reason == Reason.DIVERGED:
            found |= read_list(store, listed)
    return found


def _span(state: CatalogState, number: int) -> _Span | None:
    begins = {history.number: history.version for history in state.log_histories}
    later = [
        history for history in state.log_histories if history.number > number and history.common_version > 0
    ]
    if not later or number + 1 not in begins or number < FIRST_HISTORY:
        return None
    cut = min(later, key=lambda history: history.common_version)
    low = max(begins.get(number, 0), cut.common_version)
    return _Span(low, begins[number + 1], cut.begin_phys) if low + 1 < begins[number + 1] else None


def _only_above(state: CatalogState, span: _Span) -> CatalogState:
    """``state`` with only the superseded runs, and the queues that have some."""
    runs = state.memory.runs
    chunk = selected(state.memory, (runs["version"] > span.low) & (runs["min_phys"] >= span.phys))
    rows, chunk.runs["queue"] = np.unique(chunk.runs["queue"], return_inverse=True)
    table = state.table[rows].copy()
    table["flags"] &= ~np.uint32(QUEUE_HIDDEN | QUEUE_SUPERSEDED)
    first = np.full(len(rows), np.iinfo(np.int64).max)
    np.minimum.at(first, chunk.runs["queue"], chunk.runs["base_queue_offset"])
    table["min_queue_offset"] = np.maximum(table["min_queue_offset"], first)
    table["row_count"] = np.bincount(chunk.runs["queue"], chunk.runs["rows"], minlength=len(rows))
    number = np.full(state.queue_count, -1, np.int64)
    number[rows] = np.arange(len(rows))
    gaps = state.gaps[number[state.gaps["queue"]] >= 0].copy()
    gaps["queue"] = number[gaps["queue"]]
    gaps = gaps[gaps["begin_queue_offset"] >= table["min_queue_offset"][gaps["queue"]]]
    return replace(
        state,
        version=span.end - 1,
        directory=QueueDirectory([state.key_of(int(row)) for row in rows]),
        table=table,
        gaps=gaps,
        chunks=(chunk,) if len(chunk.runs) else (),
        pages=(),
        tombstones=np.zeros(0, REMOVED_DTYPE),
        indexes=(),
        log_histories=(),
    )
