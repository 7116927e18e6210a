"""What the begin of a log history took out of the visible offsets: as a state that readers can open, and as a listing.

Each begin of a history puts such a state. It names the superseded runs, whose objects are pending deletions; or, if
old and new log share no record, the queues that ended, whose runs stay in the archive.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tiered.catalog.catalog_reader import histories_to, history_spans, read_root, shared_version
from tiered.catalog.deletions import PendingDeletion, Reason, read_list
from tiered.catalog.pages import Page, RunIndex, living_runs, union
from tiered.catalog.queue_directory import QueueDirectory
from tiered.catalog.state import (
    NO_ROOT,
    REMOVED_DTYPE,
    CatalogState,
    LogHistory,
    RootRef,
    RunChunk,
    joined_chunks,
    selected,
)
from tiered.errors import NotFoundError
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_HIDDEN, QUEUE_SUPERSEDED, RunKind, Table
from tiered.object_store.interface import ObjectStore

FIRST_HISTORY = 1
_ENDED = np.uint32(QUEUE_HIDDEN | QUEUE_SUPERSEDED)
"""The flags of a queue that ended with its log history."""


# -- written at the begin of a history ------------------------------------------------------------------------


def ended_queues(state: CatalogState) -> CatalogState:
    """The queues of ``state`` that end with its log history, with their flags until then, without runs."""
    rows = np.flatnonzero(state.table["flags"] & QUEUE_SUPERSEDED == 0).tolist()
    return _only_queues(state, [state.key_of(row) for row in rows], state.table[rows])


def hidden_runs(
    state: CatalogState, dropped: Sequence[Page], common: CatalogState | None, ended: Sequence[QueueKey] = ()
) -> CatalogState:
    """A state that names only what a new log history hides of ``state``: the runs of ``dropped``, with their queues,
    and the queues that ``ended`` as a whole, without runs.

    ``common``: the last state that the new history continues; messages that its queues have are not hidden, even if
    they are in a dropped run too. None: the new history continues no state."""
    page = union(dropped)
    chunk, count = page.chunk, len(page.queues)
    queues = [*page.queues, *ended]
    table = state.table[[_row(state, queue) for queue in queues]].copy()
    table["flags"][:count] &= ~_ENDED
    common_rows = [None if common is None else common.queue(queue) for queue in queues[:count]]
    ends = np.array([0 if row is None else int(row["end_queue_offset"]) for row in common_rows], np.int64)
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, chunk.runs["queue"], chunk.runs["base_queue_offset"])
    table["min_queue_offset"][:count] = np.maximum(table["min_queue_offset"][:count], np.maximum(first, ends))
    hidden = replace(_only_queues(state, queues, table), chunks=(chunk,) if len(chunk.runs) else ())
    counts = _visible_messages(hidden, chunk.runs)
    table["row_count"][:count] = np.bincount(chunk.runs["queue"], counts, minlength=count)
    return hidden


def ended_keys(hidden: CatalogState) -> list[QueueKey]:
    """The queues of ``hidden`` that ended as a whole: those without runs in it."""
    with_runs = set(np.unique(hidden.memory.runs["queue"]).tolist())
    return [key for row, (key, _) in enumerate(hidden.queues()) if row not in with_runs]


def message_count(hidden: CatalogState) -> int:
    """How many messages of ``hidden``, a state of what a log history hid, were visible before."""
    shown = hidden.table["flags"] & QUEUE_HIDDEN == 0
    return int(hidden.table["row_count"][shown].sum())


def hidden_since(state: CatalogState, since_ms: int) -> int:
    """How many messages were hidden after ``since_ms`` because the broker's log was truncated or replaced, without
    those that are visible again."""
    # ``shared``: the newest version whose messages are in the present log history and in all others seen so far.
    count, shared = 0, state.version
    for history in histories_to(state.log_histories, state.version):
        # A history that continues an earlier one hides again what that one had hidden.
        if history.version <= shared and history.created_ms > since_ms:
            count += history.hidden_messages
        before, common = history.version - 1, history.common_version
        shared = min(shared, shared_version(state.log_histories, before, common)) if common else 0
    return count


def _only_queues(state: CatalogState, queues: Sequence[QueueKey], table: Table) -> CatalogState:
    """``state`` with ``queues`` alone, whose rows are ``table``, and their gaps; without runs, pages, and all else that
    names objects. The caller adds runs."""
    new_row = {_row(state, queue): number for number, queue in enumerate(queues)}
    gaps = state.gaps[[row in new_row for row in state.gaps["queue"].tolist()]].copy()
    gaps["queue"] = [new_row[row] for row in gaps["queue"].tolist()]
    return replace(
        state,
        directory=QueueDirectory(queues),
        table=table,
        gaps=gaps,
        chunks=(),
        pages=(),
        tombstones=np.zeros(0, REMOVED_DTYPE),
        root=NO_ROOT,
        kept_roots=(),
        log_histories=(),
        state_objects={},
        pending_deletions={},
        deletion_lists=(),
        indexes=(),
        timers=(),
    )


def _row(state: CatalogState, queue: QueueKey) -> int:
    """The row of ``queue``, which ``state`` has."""
    row = state.row_of(queue)
    assert row is not None
    return row


def _visible_messages(state: CatalogState, runs: Table) -> Table:
    """How many messages of each run are at or above the minimum offset of its queue. A sparse run (key compaction
    dropped some of its offsets) has no more than its rows."""
    begin = np.maximum(runs["base_queue_offset"], state.table["min_queue_offset"][runs["queue"]])
    offsets: Table = np.maximum(runs["end_queue_offset"] - begin, 0)
    return np.where(runs["kind"] == RunKind.SPARSE, np.minimum(offsets, runs["rows"]), offsets)


# -- read -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HistoryListing:
    """One log history. ``messages``: how many messages that later histories do not have can still be read; hidden since
    ``since_ms``, and of ``bytes`` before compression. ``is_kept``: garbage collection never deletes them, as their
    queues stay in the archive as earlier generations."""

    number: int
    begin_phys: int
    end_phys: int
    is_current: bool
    messages: int = 0
    bytes: int = 0
    since_ms: int | None = None
    is_kept: bool = False


def list_histories(store: ObjectStore, state: CatalogState) -> list[HistoryListing]:
    """All log histories of ``state`` (the broker's log before and after each truncation or replacement), oldest first,
    with what is hidden of each and still there. Reads what each of them hid."""
    lister = _Lister(state, _RemainingRuns(store, state))
    begins_phys = [int(state.table["first_phys"].min()) if len(state.table) else 0]
    begins_phys += [history.begin_phys for history in state.log_histories]
    listings = [HistoryListing(state.cursor.history, begins_phys[-1], state.cursor.phys, is_current=True)]
    for history in reversed(state.log_histories):
        begin_phys = begins_phys[history.number - 1 - FIRST_HISTORY]
        listings.append(lister.listing(begin_phys, read_hidden(store, history), history))
    return listings[::-1]


def history_state(store: ObjectStore, state: CatalogState, number: int) -> CatalogState:
    """A state from which a reader gets the messages that log history ``number`` had and later ones do not; of the
    current history, ``state``. Raises NotFoundError if there is no such history, and what reading raises."""
    if number == state.cursor.history:
        return state
    # The next history hid what only this one had.
    history = next((after for after in state.log_histories if after.number == number + 1), None)
    if history is None:
        raise NotFoundError(
            f"the archive {store.url} has no log history {number}",
            hint="`tiered ls --histories` lists log histories",
        )
    hidden = read_hidden(store, history)
    if not hidden.memory_runs:
        return _with_only_ended(state, hidden)
    ended_rows = list(_ended_rows(state, hidden))
    hidden = _with_remaining(hidden, _RemainingRuns(store, state))
    return _with_ended_queues(store, state, hidden, ended_rows) if ended_rows else hidden


def read_hidden(store: ObjectStore, history: LogHistory) -> CatalogState:
    """What the begin of ``history`` hid. Raises CorruptionError, NotFoundError, or what the store raises."""
    return read_root(store, RootRef(history.hidden, history.version - 1))


def diverged_deletions(store: ObjectStore, state: CatalogState) -> dict[str, PendingDeletion]:
    """The pending deletions of objects whose messages a new log history hid. Reads the lists of them."""
    pending = {
        key: entry for key, entry in state.pending_deletions.items() if entry.reason == Reason.DIVERGED
    }
    for listed in state.deletion_lists:
        if listed.reason == Reason.DIVERGED:
            pending |= read_list(store, listed)
    return pending


def object_names(chunk: RunChunk) -> list[str]:
    """For each run of ``chunk``, the key of its object."""
    return [chunk.object_keys[key] for key in chunk.objects["key"][chunk.runs["object"]].tolist()]


class _RemainingRuns:
    """Which hidden runs can still be read and are not visible again. Either the run's object is a pending deletion of a
    diverged log; or the object still exists for other runs, and the version that added the run is not a part of the
    current log history."""

    def __init__(self, store: ObjectStore, state: CatalogState) -> None:
        self._store, self._state = store, state
        self._spans = history_spans(state)
        """Versions (first, last) of the current log history."""
        self.pending = diverged_deletions(store, state) if state.log_histories else {}

    def has(self, run: np.void, key: str) -> bool:
        """Whether the hidden ``run`` of the object ``key`` can still be read, and is not visible again."""
        if key in self.pending:
            return True
        is_visible = any(first <= run["version"] <= last for first, last in self._spans)
        return not is_visible and key in self._named_objects

    @cached_property
    def _named_objects(self) -> set[str]:
        """Keys of the data objects that are still in the store because a visible run names them, or because their grace
        period has not ended."""
        keys = set(self._state.pending_deletions)
        for listed in self._state.deletion_lists:
            keys.update(read_list(self._store, listed))
        for page in living_runs(RunIndex(self._store), self._state):
            keys.update(object_names(page.chunk))
        return keys


def objects_hidden_since(store: ObjectStore, state: CatalogState, since_ms: int) -> Iterator[str]:
    """Keys of the data objects with messages that were hidden after ``since_ms``. They are not garbage, even if all
    other messages in them are."""
    for history in state.log_histories:
        if history.created_ms > since_ms:
            yield from object_names(read_hidden(store, history).memory)


class _Lister:
    """Lists what log histories hid, beginning with the newest history: messages that were hidden twice count once."""

    def __init__(self, state: CatalogState, remaining: _RemainingRuns) -> None:
        self._state, self._remaining = state, remaining
        self._listed_rows: set[int] = set()
        """Ended queues that were listed, by row of the state."""
        self._listed_runs: set[tuple[QueueKey, int, str]] = set()
        """Runs that were listed: queue, first offset, key of the object."""

    def listing(self, begin_phys: int, hidden: CatalogState, history: LogHistory) -> HistoryListing:
        """Describes the log history before ``history``, which hid the runs and queues of ``hidden``: how many messages
        and bytes of it can still be read, without those that were listed before."""
        table, pending = self._state.table, self._remaining.pending
        rows = [row for row in _ended_rows(self._state, hidden) if row not in self._listed_rows]
        self._listed_rows.update(rows)
        keys = object_names(hidden.memory)
        runs = hidden.memory.runs[[self._is_to_list(hidden, at, key) for at, key in enumerate(keys)]]
        messages = _visible_messages(hidden, runs)
        # A run of which some messages have expired counts with the bytes of the others.
        share = messages / np.maximum(runs["end_queue_offset"] - runs["base_queue_offset"], 1)
        listing = HistoryListing(
            history.number - 1,
            begin_phys,
            hidden.cursor.phys,
            is_current=False,
            messages=int(table["row_count"][rows].sum() + messages.sum()),
            bytes=int(table["end_byte"][rows].sum() + np.rint((runs["byte_count"] * share).sum())),
        )
        if not listing.messages:
            return listing
        since_ms = min((pending[key].since_ms for key in keys if key in pending), default=history.created_ms)
        # Queues that ended as a whole stay in the archive as earlier generations.
        return replace(listing, since_ms=since_ms, is_kept=not len(runs))

    def _is_to_list(self, hidden: CatalogState, at: int, key: str) -> bool:
        """Whether the hidden run number ``at``, of the object ``key``, can be read and was not listed before."""
        run = hidden.memory.runs[at]
        identity = hidden.key_of(int(run["queue"])), int(run["base_queue_offset"]), key
        is_new = identity not in self._listed_runs
        self._listed_runs.add(identity)
        return is_new and self._remaining.has(run, key)


def _ended_rows(state: CatalogState, hidden: CatalogState) -> Iterator[int]:
    """Rows of ``state`` with queues that ended as a whole when ``hidden`` was hidden, and were visible until then."""
    for key in ended_keys(hidden):
        row, before = state.row_of(key), hidden.queue(key)
        was_visible = before is not None and not before["flags"] & QUEUE_HIDDEN
        if row is not None and was_visible and state.table["flags"][row] & QUEUE_SUPERSEDED:
            yield row


def _with_only_ended(state: CatalogState, hidden: CatalogState) -> CatalogState:
    """``state`` in which only the queues are visible that ended when ``hidden`` was hidden."""
    table = state.table.copy()
    table["flags"] |= QUEUE_HIDDEN
    for row in _ended_rows(state, hidden):
        table["flags"][row] &= ~_ENDED
    return replace(state, table=table)


def _with_remaining(hidden: CatalogState, remaining: _RemainingRuns) -> CatalogState:
    """``hidden`` with only the runs that can still be read: others are visible again, or their objects are deleted.
    The minimum offset of a queue is that of its first remaining run."""
    chunk = hidden.memory
    keys = enumerate(object_names(chunk))
    kept = selected(chunk, np.array([remaining.has(chunk.runs[at], key) for at, key in keys], bool))
    table = hidden.table.copy()
    table["flags"] |= QUEUE_HIDDEN
    for row in np.unique(kept.runs["queue"]).tolist():
        table["flags"][row] = hidden.table["flags"][row]
        first = kept.runs["base_queue_offset"][kept.runs["queue"] == row].min()
        table["min_queue_offset"][row] = max(table["min_queue_offset"][row], first)
    return replace(hidden, table=table, chunks=(kept,) if len(kept.runs) else ())


def _with_ended_queues(
    store: ObjectStore, state: CatalogState, hidden: CatalogState, ended_rows: Sequence[int]
) -> CatalogState:
    """``hidden`` with, besides its own runs, those of the queues in ``ended_rows`` of ``state``, which ended as a whole
    and whose runs only ``state`` names. Reads pages of ``state``."""
    table, chunks, index = hidden.table.copy(), list(hidden.chunks), RunIndex(store)
    for row in ended_rows:
        key = state.key_of(row)
        hidden_row = _row(hidden, key)
        table[hidden_row] = state.table[row]
        table["flags"][hidden_row] &= ~_ENDED
        runs = selected(index.runs_of(state, key), slice(None))
        runs.runs["queue"] = hidden_row
        chunks.append(runs)
    return replace(hidden, table=table, chunks=(joined_chunks(tuple(chunks)),))
