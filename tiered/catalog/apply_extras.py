"""Applies changes that any kind of commit may carry: queue flags, settings, pages, index files, pending deletions.
Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tiered.catalog.commit import Commit, CommitDraft, CommitInvalidError, CommitKind
from tiered.catalog.deletions import PendingDeletion, Reason
from tiered.catalog.deletions import after_change as after_deletion_change
from tiered.catalog.index_refs import after_change
from tiered.catalog.kept_roots import with_root
from tiered.catalog.state import CatalogState, RootRef, RunChunk, selected
from tiered.catalog.timer_refs import after_change as after_timer_change
from tiered.model.tables import QUEUE_HIDDEN, QUEUE_SUPERSEDED, Table

_MOVES_NOTHING = (CommitKind.CLAIM, CommitKind.RELEASE)


def with_extras(before: CatalogState, state: CatalogState, commit: Commit) -> CatalogState:
    """``state`` (``before`` with the commit's own change) with everything else the commit carries."""
    state = _with_marks(state, commit.draft)
    state = _with_pages(state, commit)
    state = _with_index(state, commit)
    state = _with_timers(state, commit)
    return _with_garbage(before, state, commit)


def _with_marks(state: CatalogState, draft: CommitDraft) -> CatalogState:
    if draft.kind in _MOVES_NOTHING and (
        len(draft.runs) or len(draft.gaps) or len(draft.removed) or len(draft.floors)
    ):
        raise CommitInvalidError(f"a {draft.kind} carries no data")
    table = state.table
    for keys, hidden in ((draft.hide, True), (draft.unhide, False)):
        rows = [state.row_of(key) for key in keys]
        if None in rows:
            raise CommitInvalidError(f"{keys[rows.index(None)]} is not in the archive")
        if rows:
            table = _flagged(table, np.array(rows, np.int64), hidden)
    return replace(
        state,
        table=table,
        state_objects={**state.state_objects, **draft.state_objects}
        if draft.state_objects
        else state.state_objects,
        settings={**state.settings, **draft.settings} if draft.settings else state.settings,
    )


def _flagged(table: Table, rows: np.ndarray[tuple[int], np.dtype[np.int64]], hidden: bool) -> Table:
    table = table.copy()
    if hidden:
        table["flags"][rows] |= QUEUE_HIDDEN
    else:
        table["flags"][rows[(table["flags"][rows] & QUEUE_SUPERSEDED) == 0]] &= ~np.uint32(QUEUE_HIDDEN)
    return table


def _with_pages(state: CatalogState, commit: Commit) -> CatalogState:
    """Spilled runs leave memory, merged pages replace older ones, a new root is the start of readers."""
    change = commit.draft.pages
    if change.root.key:
        if change.root.version != state.version - 1:
            raise CommitInvalidError(f"root of version {change.root.version} named by commit {state.version}")
        state = replace(state, root=change.root, kept_roots=with_root(state.kept_roots, change.root))
    elif commit.place.root != state.root:
        raise CommitInvalidError(f"commit points to root {commit.place.root}, the state to {state.root}")
    if change.spilled_version >= state.version:
        raise CommitInvalidError("a commit cannot spill its own runs")
    pages = state.pages
    if change.removed or change.added:
        gone = set(change.removed)
        if not gone <= {page.key for page in pages}:
            raise CommitInvalidError("a page to be merged no longer exists")
        # In the place of the first one that they replace: pages of one sequence are in the order of their queues.
        at = next((number for number, page in enumerate(pages) if page.key in gone), len(pages))
        pages = (*pages[:at], *change.added, *(page for page in pages[at:] if page.key not in gone))
    chunks = state.chunks
    if change.spilled_version:
        chunks = tuple(_without_older(chunk, change.spilled_version) for chunk in chunks)
        chunks = tuple(chunk for chunk in chunks if len(chunk.runs))
    tombstones = state.tombstones
    if change.resolved_version and change.removed and len(tombstones):
        merged = [page for page in state.pages if page.key in set(change.removed)]
        low, high = min(page.from_version for page in merged), max(page.to_version for page in merged)
        resolved = (
            (tombstones["removed_version"] <= change.resolved_version)
            & (tombstones["version"] >= low)
            & (tombstones["version"] <= high)
        )
        tombstones = tombstones[~resolved]
    return replace(state, pages=pages, chunks=chunks, tombstones=tombstones)


def _with_index(state: CatalogState, commit: Commit) -> CatalogState:
    change = commit.draft.index
    if not change:
        return state
    if commit.draft.kind != CommitKind.MAINTENANCE:
        raise CommitInvalidError(f"{commit.draft.kind} cannot change the index")
    try:
        indexes = after_change(
            state.indexes,
            change,
            epoch=commit.place.epoch,
            version=commit.version,
            pending_deletions=state.pending_deletions,
        )
    except ValueError as error:
        raise CommitInvalidError(str(error)) from error
    return replace(state, indexes=indexes)


def _with_timers(state: CatalogState, commit: Commit) -> CatalogState:
    if not commit.draft.timers:
        return state
    if commit.draft.kind not in (CommitKind.APPEND, CommitKind.MAINTENANCE):
        raise CommitInvalidError(f"{commit.draft.kind} cannot change timers")
    try:
        timers = after_timer_change(
            state.timers,
            commit.draft.timers,
            epoch=commit.place.epoch,
            may_move=commit.draft.kind == CommitKind.MAINTENANCE,
            pending_deletions={*state.pending_deletions, *commit.draft.pending_deletions},
        )
    except ValueError as error:
        raise CommitInvalidError(str(error)) from error
    return replace(state, timers=timers)


def _without_older(chunk: RunChunk, version: int) -> RunChunk:
    kept = chunk.runs["version"] > version
    return chunk if kept.all() else selected(chunk, kept)


def _with_garbage(before: CatalogState, state: CatalogState, commit: Commit) -> CatalogState:
    """Objects that the catalog no longer references become pending deletions in the same commit."""
    draft = commit.draft
    if draft.deletions:
        try:
            left, lists = after_deletion_change(
                state.pending_deletions, state.deletion_lists, draft.deletions
            )
        except ValueError as error:
            raise CommitInvalidError(str(error)) from error
        state = replace(state, pending_deletions=left, deletion_lists=lists)
    replaced: list[str] = []
    if _named(before) != _named(state):
        replaced = sorted(before.catalog_keys() - state.catalog_keys())
    taken_back = {*draft.restored, *draft.purged}
    if not draft.pending_deletions and not replaced and not taken_back:
        return state
    if not taken_back <= state.pending_deletions.keys():
        raise CommitInvalidError(
            f"{sorted(taken_back - state.pending_deletions.keys())[0]} is not pending deletion"
        )
    pending_deletions = {
        key: pending for key, pending in state.pending_deletions.items() if key not in taken_back
    }
    for keys, reason in ((draft.pending_deletions, draft.reason), (replaced, Reason.REPLACED)):
        pending = PendingDeletion(draft.created_ms, commit.version, str(reason))
        for key in keys:
            pending_deletions.setdefault(key, pending)
    return replace(state, pending_deletions=pending_deletions)


def _named(state: CatalogState) -> tuple[int | RootRef, ...]:
    """Identities of the parts that reference catalog objects; equal ones skip comparing all keys."""
    parts = (state.pages, state.state_objects, state.indexes, state.deletion_lists, state.timers)
    return state.root, *map(id, parts)
