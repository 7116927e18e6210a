"""The commit state machine: checks whether a commit may follow a state, and computes the next state. Pure.

The same function checks a commit before its PUT and applies it when read, so a writer cannot commit what a reader
would refuse. Rules (each has a test of its name):

- the chain: next version, put id of its predecessor, same epoch (a claim: one more);
- one cursor: an append begins where the last one ended, in the same log history;
- contiguity: every run starts at its queue's end, in offsets and bytes, unless a gap of the commit bridges the
  offsets, or a new queue or generation begins;
- a record below its queue's physical end was read before and is refused;
- new objects carry the epoch of the commit, so an attempt of a fenced epoch can never become visible;
- a floor rises, and stays within its queue;
- a removed run exists; added runs cover the same offsets as removed ones, or the removed ones were the queue's oldest,
  or the added run is inside a recorded gap, or sparse and right before a queue's begin of which nothing expired.

Costs a few numpy passes over the commit's runs and one copy of the queue table; Python loops run only over new queues,
gaps and removals.

Which older roots are kept, so that earlier versions can be read without the whole chain of commits. Pure.

Roots are replaced often, and replaced ones are garbage. One of every KEEP_EVERY versions is kept; above KEPT_MAX every
second one of the older half leaves, so that the distance grows with age.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tiered.catalog.append_runs import append_runs
from tiered.catalog.commit import Commit, CommitDraft, CommitInvalidError, CommitKind
from tiered.catalog.deletions import PendingDeletion, Reason
from tiered.catalog.deletions import after_change as after_deletion_change
from tiered.catalog.floors import raise_floors
from tiered.catalog.index_refs import after_change
from tiered.catalog.replace_runs import replace_runs
from tiered.catalog.state import CatalogState, LogCursor, RootRef, RunChunk, joined_chunks, selected
from tiered.catalog.timer_refs import after_change as after_timer_change
from tiered.model.tables import QUEUE_HIDDEN, QUEUE_SUPERSEDED, Table

KEEP_EVERY = 4096
KEPT_MAX = 64


def with_root(kept: Sequence[RootRef], root: RootRef) -> tuple[RootRef, ...]:
    """The kept roots once ``root`` is the newest."""
    if kept and root.version // KEEP_EVERY <= kept[-1].version // KEEP_EVERY:
        return tuple(kept)
    kept = (*kept, root)
    if len(kept) <= KEPT_MAX:
        return kept
    half = KEPT_MAX // 2
    return (*kept[:half:2], *kept[half:])


_MOVES_NOTHING = (CommitKind.CLAIM, CommitKind.RELEASE)


def with_extras(before: CatalogState, state: CatalogState, commit: Commit) -> CatalogState:
    """``state`` (``before`` with the commit's own change) with everything else the commit carries."""
    state = _with_marks(state, commit.draft)
    state = _with_pages(state, commit)
    state = _with_index(state, commit)
    state = _with_timers(state, commit)
    return _with_garbage(before, state, commit)


def _with_marks(state: CatalogState, draft: CommitDraft) -> CatalogState:
    """Apply what any kind of commit may carry: hidden queues, tables of the broker, settings."""
    if draft.kind in _MOVES_NOTHING and (
        len(draft.runs) or len(draft.gaps) or len(draft.removed) or len(draft.floors)
    ):
        raise CommitInvalidError(f"a commit of kind {draft.kind} adds or removes messages, which it may not")
    table = state.table
    for keys, hidden in ((draft.hide, True), (draft.unhide, False)):
        rows = [state.row_of(key) for key in keys]
        if None in rows:
            raise CommitInvalidError(
                f"the commit hides or shows {keys[rows.index(None)]}, which is not in the archive"
            )
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
            raise CommitInvalidError(
                f"commit {state.version} names a root page of version {change.root.version}"
            )
        state = replace(state, root=change.root, kept_roots=with_root(state.kept_roots, change.root))
    elif commit.place.root != state.root:
        raise CommitInvalidError(
            f"the commit names the root page {commit.place.root.key}, and the version before {state.root.key}"
        )
    if change.spilled_version >= state.version:
        raise CommitInvalidError("the commit moves its own runs into pages, which only later ones may")
    pages = state.pages
    if change.removed or change.added:
        gone = set(change.removed)
        if not gone <= {page.key for page in pages}:
            raise CommitInvalidError(
                "this commit merges a catalog page that another commit has replaced; nothing was committed"
            )
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
    """Apply a change of the index, which only maintenance may make."""
    change = commit.draft.index
    if not change:
        return state
    if commit.draft.kind != CommitKind.MAINTENANCE:
        raise CommitInvalidError(
            f"a commit of kind {commit.draft.kind} changes the index, which only maintenance may"
        )
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
    """Apply a change of the timers: an append adds some, maintenance replaces and moves them."""
    if not commit.draft.timers:
        return state
    if commit.draft.kind not in (CommitKind.APPEND, CommitKind.MAINTENANCE):
        raise CommitInvalidError(
            f"a commit of kind {commit.draft.kind} changes timers, which only appends and maintenance may"
        )
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
            f"the commit takes back {sorted(taken_back - state.pending_deletions.keys())[0]}, or says that it was "
            "deleted, but it is no pending deletion"
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


CHUNKS_MAX = 64
"""Chunks in memory are joined above this number: lookups touch few arrays at a low average cost."""

_OWNERS_ONLY = (CommitKind.APPEND, CommitKind.LOG_HISTORY, CommitKind.RELEASE)


def apply(state: CatalogState, commit: Commit, history_state: CatalogState | None = None) -> CatalogState:
    """The state after ``commit``, or CommitInvalidError. ``history_state``: the root page that starts a log history, or
    of a repair."""
    if commit.draft.kind == CommitKind.REPAIR:
        return _repaired(state, commit, history_state)
    _check_chain(state, commit)
    if commit.draft.kind == CommitKind.LOG_HISTORY:
        return _new_history(state, commit, history_state)
    draft = commit.draft
    next_state = replace(
        state,
        version=commit.version,
        epoch=commit.place.epoch,
        put_id=commit.put_id,
        cluster=commit.place.cluster or state.cluster,
        broker=commit.place.broker or state.broker,
        created_ms=draft.created_ms,
    )
    if draft.kind == CommitKind.CLAIM:
        next_state = replace(next_state, owner=draft.owner)
    elif draft.kind == CommitKind.RELEASE:
        assert next_state.owner is not None
        next_state = replace(next_state, owner=next_state.owner._replace(released=True))
    elif draft.kind == CommitKind.APPEND:
        next_state = _append(next_state, commit)
    else:
        next_state = _maintain(next_state, commit)
    return with_extras(state, next_state, commit)


def _check_chain(state: CatalogState, commit: Commit) -> None:
    """Check that the commit follows this very state, and that its actor may make a commit of its kind."""
    draft, place = commit.draft, commit.place
    if place.version != state.version + 1:
        raise CommitInvalidError(f"a commit of version {place.version} follows version {state.version}")
    if place.predecessor_put_id != state.put_id:
        raise CommitInvalidError(
            f"the commit names put id {place.predecessor_put_id!r} as that of its predecessor, "
            f"but version {state.version} has {state.put_id!r}"
        )
    is_claim = draft.kind == CommitKind.CLAIM
    if place.epoch != state.epoch + is_claim:
        raise CommitInvalidError(
            f"the commit, a {draft.kind}, has epoch {place.epoch}, and the version before has {state.epoch}"
        )
    if (state.cluster and place.cluster != state.cluster) or (state.broker and place.broker != state.broker):
        raise CommitInvalidError(
            f"commit of {place.cluster}/{place.broker} in the archive of {state.cluster}/{state.broker}"
        )
    if is_claim:
        if draft.owner is None or draft.owner.instance != place.actor or draft.owner.released:
            raise CommitInvalidError("a claim must name its actor as the owner")
        return
    if state.version == 0 or state.owner is None:
        raise CommitInvalidError(f"{draft.kind} in an archive without an owner")
    if draft.kind in _OWNERS_ONLY and (state.owner.released or state.owner.instance != place.actor):
        raise CommitInvalidError(f"{draft.kind} by {place.actor}, which does not own epoch {state.epoch}")
    if draft.owner is not None:
        raise CommitInvalidError("the commit changes the archive's owner, which only a claim may")


# -- kinds ----------------------------------------------------------------------------------------------------


def _append(state: CatalogState, commit: Commit) -> CatalogState:
    """Apply a writer's commit: it begins where the cursor stands, and moves it to its own end."""
    draft = commit.draft
    cursor = state.cursor
    if draft.history != cursor.history:
        raise CommitInvalidError(
            f"append to log history {draft.history}, but the archive is at history {cursor.history}"
        )
    if state.started and draft.from_phys != cursor.phys:
        raise CommitInvalidError(f"append begins at {draft.from_phys}, but the cursor is at {cursor.phys}")
    if draft.to_phys < draft.from_phys or draft.check.end_phys > draft.to_phys:
        what = f"the commit's range of the log, [{draft.from_phys}, {draft.to_phys}),"
        raise CommitInvalidError(
            f"{what} ends before it begins, or before the bytes of its check, at {draft.check.end_phys}"
        )
    if len(draft.removed) or len(draft.floors) or draft.restored or draft.purged:
        raise CommitInvalidError(
            "an append removes runs, raises a minimum offset, or changes what is garbage, which only maintenance may"
        )
    _check_objects(state, commit)
    directory, table, gaps, chunk = append_runs(state, draft, commit.version)
    return replace(
        state,
        cursor=LogCursor(cursor.history, draft.to_phys, draft.check),
        started=state.started or draft.to_phys > draft.from_phys,
        advanced_ms=draft.created_ms,
        directory=directory,
        table=table,
        gaps=gaps,
        chunks=_with_chunk(state.chunks, chunk),
    )


def _maintain(state: CatalogState, commit: Commit) -> CatalogState:
    """Apply a commit of maintenance, which moves no cursor: raised minimum offsets, replaced runs."""
    draft = commit.draft
    if len(draft.gaps):
        raise CommitInvalidError("a commit of maintenance records gaps, which only one that appends may")
    if len(draft.floors):
        table, gaps, chunks = raise_floors(state, draft)
        state = replace(state, table=table, gaps=gaps, chunks=chunks)
    if not len(draft.runs) and not len(draft.removed):
        return state
    _check_objects(state, commit)
    changed = replace_runs(state, draft, commit.version)
    return replace(
        state,
        table=changed.table,
        gaps=changed.gaps,
        tombstones=changed.tombstones,
        chunks=_with_chunk(changed.chunks, changed.added),
    )


def _new_history(state: CatalogState, commit: Commit, history_state: CatalogState | None) -> CatalogState:
    """Check the first state of a log history, which comes from its root page, against what the commit says of it."""
    draft = commit.draft
    if history_state is None or commit.draft.pages.root.version != commit.version:
        raise CommitInvalidError("a new log history must name the root page of its first state")
    if draft.history != state.cursor.history + 1 or not 0 <= draft.common_version <= state.version:
        raise CommitInvalidError(
            f"log history {draft.history} with common version {draft.common_version} cannot follow history "
            f"{state.cursor.history} at version {state.version}"
        )
    if len(draft.runs) or len(draft.gaps) or len(draft.removed) or len(draft.floors):
        raise CommitInvalidError(
            "a commit that starts a log history adds or removes messages, which it may not"
        )
    root = draft.pages.root
    history = (draft.history, draft.to_phys, draft.common_version, commit.version, root.key)
    cursor = history_state.cursor
    wanted = (commit.version, state.epoch, state.owner, history, root, draft.check, draft.created_ms)
    found = (
        history_state.version,
        history_state.epoch,
        history_state.owner,
        history_state.log_histories[-1][:5] if history_state.log_histories else None,
        history_state.root,
        cursor.check,
        history_state.created_ms,
    )
    if wanted != found or (cursor.history, cursor.phys) != (draft.history, draft.to_phys):
        raise CommitInvalidError(f"root page of the new log history is {found}, expected {wanted}")
    return replace(history_state, put_id=commit.put_id)


def _repaired(state: CatalogState, commit: Commit, whole: CatalogState | None) -> CatalogState:
    """The state that a repair names, whatever was before."""
    place, root = commit.place, commit.draft.pages.root
    if whole is None or (whole.version, whole.epoch, whole.root) != (place.version, place.epoch, root):
        raise CommitInvalidError("a repair must name the root page of its state")
    if place.version <= state.version or place.epoch <= state.epoch:
        raise CommitInvalidError(f"a repair of version {place.version} follows version {state.version}")
    return replace(whole, put_id=commit.put_id)


def _check_objects(state: CatalogState, commit: Commit) -> None:
    """Check that every object is of the present epoch, or was taken back, and is not garbage that may be deleted at
    any time."""
    draft = commit.draft
    if len(set(draft.object_keys)) != len(draft.object_keys) or len(draft.objects) != len(draft.object_keys):
        raise CommitInvalidError("the commit names an object twice, or one that it does not describe")
    taken_back, abandoned = {*draft.restored}, {*draft.pending_deletions}
    for index in np.flatnonzero(draft.objects["epoch"] != commit.place.epoch).tolist():
        key = draft.object_keys[int(draft.objects["key"][index])]
        if key not in taken_back:
            raise CommitInvalidError(
                f"{key} was uploaded by a writer that is fenced: it is not of epoch {commit.place.epoch}"
            )
    garbage = [
        key
        for key in draft.object_keys
        if (key in state.pending_deletions and key not in taken_back) or key in abandoned
    ]
    if garbage:
        raise CommitInvalidError(
            f"{garbage[0]} is a pending deletion, which garbage collection may delete at any time"
        )


def _with_chunk(chunks: tuple[RunChunk, ...], chunk: RunChunk) -> tuple[RunChunk, ...]:
    if not len(chunk.runs):
        return chunks
    chunks = (*chunks, chunk)
    return (joined_chunks(chunks),) if len(chunks) > CHUNKS_MAX else chunks
