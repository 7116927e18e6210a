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
    """The older root pages that stay for readers of earlier versions, once ``root`` is the newest: ``kept``, and
    ``root`` if it is the first of the next KEEP_EVERY versions."""
    if kept and root.version // KEEP_EVERY <= kept[-1].version // KEEP_EVERY:
        return tuple(kept)
    kept = (*kept, root)
    if len(kept) <= KEPT_MAX:
        return kept
    # Too many: every second one of the older half leaves.
    half = KEPT_MAX // 2
    return (*kept[:half:2], *kept[half:])


_MOVES_NOTHING = (CommitKind.CLAIM, CommitKind.RELEASE)
"""Commits that add and remove no messages."""


def with_extras(before: CatalogState, state: CatalogState, commit: Commit) -> CatalogState:
    """Apply what commits of several kinds may carry: settings, pages, index files, timers, pending deletions.
    ``state``: the state ``before`` the commit, with what is special to its kind already applied. Raises
    CommitInvalidError."""
    state = _with_marks(state, commit.draft)
    state = _with_pages(state, commit)
    try:
        state = _with_index(state, commit)
        state = _with_timers(state, commit)
        return _with_garbage(before, state, commit)
    except ValueError as error:
        raise CommitInvalidError(f"catalog version {commit.version} is invalid: {error}") from error


def _with_marks(state: CatalogState, draft: CommitDraft) -> CatalogState:
    """Apply what any kind of commit may carry: hidden queues, tables of the broker, settings. Raises
    CommitInvalidError."""
    if draft.kind in _MOVES_NOTHING and (
        len(draft.runs) or len(draft.gaps) or len(draft.removed) or len(draft.floors)
    ):
        raise CommitInvalidError(
            f"catalog version {state.version} is invalid: a commit of the kind {draft.kind} may not add or remove "
            "messages, and this one does"
        )
    table = state.table
    for keys, hidden in ((draft.hide, True), (draft.unhide, False)):
        rows = [state.row_of(key) for key in keys]
        if None in rows:
            raise CommitInvalidError(
                f"catalog version {state.version} is invalid: it hides or shows {keys[rows.index(None)]}, a queue that "
                "is not in the archive"
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
    """A copy of the queue table in which the queues in ``rows`` are hidden, or visible again."""
    table = table.copy()
    if hidden:
        table["flags"][rows] |= QUEUE_HIDDEN
    else:
        # A queue that ended with a replaced log stays hidden.
        table["flags"][rows[(table["flags"][rows] & QUEUE_SUPERSEDED) == 0]] &= ~np.uint32(QUEUE_HIDDEN)
    return table


def _with_pages(state: CatalogState, commit: Commit) -> CatalogState:
    """Apply a commit's change of catalog pages: runs that moved from the state into pages leave it, merged pages
    replace older ones, and a new root page (a copy of the whole state) becomes the one where readers start. Raises
    CommitInvalidError."""
    change = commit.draft.pages
    if change.root.key:
        if change.root.version != state.version - 1:
            raise CommitInvalidError(
                f"catalog version {state.version} is invalid: it names a root page of version {change.root.version}, "
                f"and must name one of version {state.version - 1}"
            )
        state = replace(state, root=change.root, kept_roots=with_root(state.kept_roots, change.root))
    elif commit.place.root != state.root:
        raise CommitInvalidError(
            f"catalog version {state.version} is invalid: it names the root page {commit.place.root.key!r}, but the "
            f"version before has {state.root.key!r}"
        )
    if change.spilled_version >= state.version:
        raise CommitInvalidError(
            f"catalog version {state.version} is invalid: it moves its own runs into pages, which only a later version "
            "may do"
        )
    pages = state.pages
    removed = [page for page in pages if page.key in set(change.removed)]
    if change.removed or change.added:
        gone = set(change.removed)
        if len(removed) != len(gone):
            raise CommitInvalidError(
                "the commit merges a catalog page that another commit has replaced; nothing was committed"
            )
        # The new pages take the place of the first one that they replace, as the pages of one sequence must stay in the
        # order of their queues.
        at = next((number for number, page in enumerate(pages) if page.key in gone), len(pages))
        pages = (*pages[:at], *change.added, *(page for page in pages[at:] if page.key not in gone))
    chunks = state.chunks
    if change.spilled_version:
        chunks = tuple(_without_older(chunk, change.spilled_version) for chunk in chunks)
        chunks = tuple(chunk for chunk in chunks if len(chunk.runs))
    tombstones = state.tombstones
    if change.resolved_version and removed and len(tombstones):
        # The merge has dropped the runs of these pages that had a tombstone when it began.
        first, last = min(page.from_version for page in removed), max(page.to_version for page in removed)
        is_resolved = (
            (tombstones["removed_version"] <= change.resolved_version)
            & (tombstones["version"] >= first)
            & (tombstones["version"] <= last)
        )
        tombstones = tombstones[~is_resolved]
    return replace(state, pages=pages, chunks=chunks, tombstones=tombstones)


def _with_index(state: CatalogState, commit: Commit) -> CatalogState:
    """Apply the index files that a commit adds and removes, which only a maintenance commit may. Raises
    CommitInvalidError, or ValueError if the files do not fit."""
    change = commit.draft.index
    if not change:
        return state
    if commit.draft.kind != CommitKind.MAINTENANCE:
        raise CommitInvalidError(
            f"catalog version {commit.version} is invalid: a commit of the kind {commit.draft.kind} may not change "
            "the index files, and this one does"
        )
    indexes = after_change(
        state.indexes,
        change,
        epoch=commit.place.epoch,
        version=commit.version,
        pending_deletions=state.pending_deletions,
    )
    return replace(state, indexes=indexes)


def _with_timers(state: CatalogState, commit: Commit) -> CatalogState:
    """Apply a commit's change of the objects with timers: an append adds some, a maintenance commit replaces them and
    moves their progress. Raises CommitInvalidError, or ValueError if the change does not fit."""
    if not commit.draft.timers:
        return state
    if commit.draft.kind not in (CommitKind.APPEND, CommitKind.MAINTENANCE):
        raise CommitInvalidError(
            f"catalog version {commit.version} is invalid: a commit of the kind {commit.draft.kind} may not change "
            "timers, and this one does"
        )
    timers = after_timer_change(
        state.timers,
        commit.draft.timers,
        epoch=commit.place.epoch,
        may_move=commit.draft.kind == CommitKind.MAINTENANCE,
        pending_deletions={*state.pending_deletions, *commit.draft.pending_deletions},
    )
    return replace(state, timers=timers)


def _without_older(chunk: RunChunk, version: int) -> RunChunk:
    """``chunk`` without the runs that ``version`` and earlier ones added."""
    kept = chunk.runs["version"] > version
    return chunk if kept.all() else selected(chunk, kept)


def _with_garbage(before: CatalogState, state: CatalogState, commit: Commit) -> CatalogState:
    """Apply a commit's change of the pending deletions, and make objects one that the catalog named ``before`` and no
    longer names in ``state``. Raises CommitInvalidError, or ValueError if lists of deletions do not fit."""
    draft = commit.draft
    if draft.deletions:
        recent, lists = after_deletion_change(state.pending_deletions, state.deletion_lists, draft.deletions)
        state = replace(state, pending_deletions=recent, deletion_lists=lists)
    replaced: list[str] = []
    if _named(before) != _named(state):
        replaced = sorted(before.catalog_keys() - state.catalog_keys())
    taken_back = {*draft.restored, *draft.purged}
    if not draft.pending_deletions and not replaced and not taken_back:
        return state
    unknown = taken_back - state.pending_deletions.keys()
    if unknown:
        raise CommitInvalidError(
            f"catalog version {commit.version} is invalid: it takes {sorted(unknown)[0]} out of the pending deletions, "
            "but this object is none"
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
    """What identifies the parts of ``state`` that name catalog objects. Two states with equal ones name the same
    objects, so that their keys need not be compared."""
    parts = (state.pages, state.state_objects, state.indexes, state.deletion_lists, state.timers)
    return state.root, *map(id, parts)


CHUNKS_MAX = 64
"""Chunks in memory are joined above this number: lookups touch few arrays at a low average cost."""

_OWNERS_ONLY = (CommitKind.APPEND, CommitKind.LOG_HISTORY, CommitKind.RELEASE)
"""Commits that only the archive's owner may make."""


def apply(state: CatalogState, commit: Commit, history_state: CatalogState | None = None) -> CatalogState:
    """The state of the catalog after ``commit``. Raises CommitInvalidError if it does not follow ``state``.

    ``history_state``: of a commit that starts a log history or repairs the archive, the state that its root page has.
    """
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
    """Check that the commit follows this very state, and that its author may make a commit of its kind. Raises
    CommitInvalidError."""
    draft, place = commit.draft, commit.place
    invalid = f"catalog version {place.version} is invalid"
    if place.version != state.version + 1:
        raise CommitInvalidError(f"{invalid}: it does not follow the version before, {state.version}")
    if place.predecessor_put_id != state.put_id:
        raise CommitInvalidError(
            f"{invalid}: it follows a commit with put id {place.predecessor_put_id!r}, but version {state.version} has "
            f"put id {state.put_id!r}"
        )
    is_claim = draft.kind == CommitKind.CLAIM
    if place.epoch != state.epoch + is_claim:
        raise CommitInvalidError(
            f"{invalid}: a commit of the kind {draft.kind} after epoch {state.epoch} has epoch {place.epoch}"
        )
    if (state.cluster and place.cluster != state.cluster) or (state.broker and place.broker != state.broker):
        raise CommitInvalidError(
            f"{invalid}: it is for {place.cluster}/{place.broker}, but the archive is of "
            f"{state.cluster}/{state.broker}"
        )
    if is_claim:
        if draft.owner is None or draft.owner.instance != place.actor or draft.owner.released:
            raise CommitInvalidError(
                f"{invalid}: it claims the archive, but does not name its author as the owner"
            )
        return
    if state.version == 0 or state.owner is None:
        raise CommitInvalidError(f"{invalid}: it is a {draft.kind} commit in an archive that has no owner")
    if draft.kind in _OWNERS_ONLY and (state.owner.released or state.owner.instance != place.actor):
        raise CommitInvalidError(
            f"{invalid}: only the owner of epoch {state.epoch} may make a {draft.kind} commit, and its author "
            f"{place.actor} is not the owner"
        )
    if draft.owner is not None:
        raise CommitInvalidError(f"{invalid}: it names an owner of the archive, which only a claim may do")


# -- kinds ----------------------------------------------------------------------------------------------------


def _append(state: CatalogState, commit: Commit) -> CatalogState:
    """Apply the writer's commit of a commitlog range: it begins where the archive ends, at the cursor, and moves the
    cursor to its own end. Raises CommitInvalidError."""
    draft = commit.draft
    cursor = state.cursor
    invalid = f"catalog version {commit.version} is invalid"
    if draft.history != cursor.history:
        raise CommitInvalidError(
            f"{invalid}: it continues log history {draft.history}, but the archive is at history {cursor.history}"
        )
    if state.started and draft.from_phys != cursor.phys:
        raise CommitInvalidError(
            f"{invalid}: it begins at commitlog offset {draft.from_phys}, but the log is archived up to {cursor.phys}"
        )
    if draft.to_phys < draft.from_phys or draft.check.end_phys > draft.to_phys:
        raise CommitInvalidError(
            f"{invalid}: its commitlog range [{draft.from_phys}, {draft.to_phys}) ends before it begins, or before the "
            f"end of its checksum's bytes, {draft.check.end_phys}"
        )
    if len(draft.removed) or len(draft.floors) or draft.restored or draft.purged:
        raise CommitInvalidError(
            f"{invalid}: it appends messages, but also removes archived ones, raises minimum offsets or takes back "
            "pending deletions, which only a maintenance commit may do"
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
    """Apply a maintenance commit, which does not archive a further part of the log: raised minimum offsets, replaced
    runs. Raises CommitInvalidError."""
    draft = commit.draft
    if len(draft.gaps):
        raise CommitInvalidError(
            f"catalog version {commit.version} is invalid: a maintenance commit may not record gaps, and this one does"
        )
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
    """The first state of a log history (the broker's log was replaced, or continues differently): ``history_state``,
    which its root page has, if that is what the commit says of it. Raises CommitInvalidError."""
    draft = commit.draft
    invalid = f"catalog version {commit.version} is invalid"
    if history_state is None or commit.draft.pages.root.version != commit.version:
        raise CommitInvalidError(
            f"{invalid}: it starts a log history, but names no readable root page of this version"
        )
    if draft.history != state.cursor.history + 1 or not 0 <= draft.common_version <= state.version:
        raise CommitInvalidError(
            f"{invalid}: log history {draft.history}, which continues version {draft.common_version}, cannot follow "
            f"history {state.cursor.history} at version {state.version}"
        )
    if len(draft.runs) or len(draft.gaps) or len(draft.removed) or len(draft.floors):
        raise CommitInvalidError(
            f"{invalid}: a commit that starts a log history may not add or remove messages, and this one does"
        )
    root = draft.pages.root
    history = (draft.history, draft.to_phys, draft.common_version, commit.version, root.key)
    cursor = history_state.cursor
    expected = (commit.version, state.epoch, state.owner, history, root, draft.check, draft.created_ms)
    stored = (
        history_state.version,
        history_state.epoch,
        history_state.owner,
        history_state.log_histories[-1][:5] if history_state.log_histories else None,
        history_state.root,
        cursor.check,
        history_state.created_ms,
    )
    if expected != stored or (cursor.history, cursor.phys) != (draft.history, draft.to_phys):
        raise CommitInvalidError(
            f"{invalid}: its root page {root.key} has {stored}, but the commit says {expected}"
        )
    return replace(history_state, put_id=commit.put_id)


def _repaired(state: CatalogState, commit: Commit, repaired: CatalogState | None) -> CatalogState:
    """The state after a repair, which is what its root page has, whatever the state before was. Raises
    CommitInvalidError if the root page is of another version, or the repair is not newer than ``state``."""
    place, root = commit.place, commit.draft.pages.root
    if repaired is None or (repaired.version, repaired.epoch, repaired.root) != (
        place.version,
        place.epoch,
        root,
    ):
        raise CommitInvalidError(
            f"catalog version {place.version} is invalid: it is a repair, but its root page {root.key!r} is of another "
            "version or epoch"
        )
    if place.version <= state.version or place.epoch <= state.epoch:
        raise CommitInvalidError(
            f"catalog version {place.version} is invalid: a repair must be above all versions and epochs, but version "
            f"{state.version} and epoch {state.epoch} exist"
        )
    return replace(repaired, put_id=commit.put_id)


def _check_objects(state: CatalogState, commit: Commit) -> None:
    """Check the data objects that a commit adds: each was put in the present epoch, or is taken back from the pending
    deletions, and none is a pending deletion, which may be deleted at any time. Raises CommitInvalidError."""
    draft = commit.draft
    if len(set(draft.object_keys)) != len(draft.object_keys) or len(draft.objects) != len(draft.object_keys):
        raise CommitInvalidError(
            f"catalog version {commit.version} is invalid: it names an object twice, or one that it does not describe"
        )
    taken_back, abandoned = {*draft.restored}, {*draft.pending_deletions}
    for index in np.flatnonzero(draft.objects["epoch"] != commit.place.epoch).tolist():
        key = draft.object_keys[int(draft.objects["key"][index])]
        if key not in taken_back:
            raise CommitInvalidError(
                f"catalog version {commit.version} is invalid: the object {key}, which it adds, was uploaded by a "
                f"writer of another epoch than {commit.place.epoch}, which has lost the archive"
            )
    garbage = [
        key
        for key in draft.object_keys
        if (key in state.pending_deletions and key not in taken_back) or key in abandoned
    ]
    if garbage:
        raise CommitInvalidError(
            f"catalog version {commit.version} is invalid: it adds the object {garbage[0]}, which is a pending "
            "deletion: garbage collection may delete it at any time"
        )


def _with_chunk(chunks: tuple[RunChunk, ...], chunk: RunChunk) -> tuple[RunChunk, ...]:
    """``chunks`` with ``chunk`` added, unless it is empty; too many are joined to one."""
    if not len(chunk.runs):
        return chunks
    chunks = (*chunks, chunk)
    return (joined_chunks(chunks),) if len(chunks) > CHUNKS_MAX else chunks
