"""What the begin of a log history took out of the visible offsets: as a state that readers can open, and as a listing.

Each begin of a history puts such a state. It names the superseded runs, whose objects are pending deletions; or, if
old and new log share no record, the queues that ended, whose runs stay in the archive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tiered.catalog.catalog_reader import histories_to, history_spans, read_root, shared_version
from tiered.catalog.deletions import PendingDeletion, Reason, read_list
from tiered.catalog.pages import Page, RunIndex, living_runs
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


# -- written at the begin of a history ------------------------------------------------------------------------


def ended_queues(state: CatalogState) -> CatalogState:
    """The queues of ``state`` that end with its log history, with their flags until then, without runs."""
    rows = np.flatnonzero(state.table["flags"] & QUEUE_SUPERSEDED == 0).tolist()
    return _part(state, [state.key_of(row) for row in rows], state.table[rows])


def hidden_runs(
    state: CatalogState, dropped: Sequence[Page], common: CatalogState | None, ended: Sequence[QueueKey] = ()
) -> CatalogState:
    """The runs of ``dropped`` and their queues, as in ``state``, and queues that ``ended``, without runs. ``common``:
    what the new history shares; its rows are below the minimum of their queue."""
    queues = sorted(
        {page.queues[row] for page in dropped for row in np.unique(page.chunk.runs["queue"]).tolist()}
    )
    count = len(queues)
    queues += ended
    number = {queue: row for row, queue in enumerate(queues)}
    chunks = []
    for page in dropped:
        names = np.array([number.get(queue, 0) for queue in page.queues], np.int64)
        runs = page.chunk.runs.copy()
        runs["queue"] = names[runs["queue"]]
        chunks.append(RunChunk(runs, page.chunk.objects, page.chunk.object_keys))
    chunk = joined_chunks(tuple(chunks))
    table = state.table[[_row(state, queue) for queue in queues]].copy()
    table["flags"][:count] &= ~_ENDED
    before = [None if common is None else common.queue(queue) for queue in queues[:count]]
    ends = np.array([0 if row is None else int(row["end_queue_offset"]) for row in before], np.int64)
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, chunk.runs["queue"], chunk.runs["base_queue_offset"])
    table["min_queue_offset"][:count] = np.maximum(table["min_queue_offset"][:count], np.maximum(first, ends))
    found = replace(_part(state, queues, table), chunks=(chunk,) if len(chunk.runs) else ())
    table["row_count"][:count] = np.bincount(chunk.runs["queue"], _shown(found, chunk.runs), minlength=count)
    return found


def ended_keys(hidden: CatalogState) -> list[QueueKey]:
    """Queues of ``hidden`` that ended as a whole."""
    with_runs = set(np.unique(hidden.memory.runs["queue"]).tolist())
    return [key for row, (key, _) in enumerate(hidden.queues()) if row not in with_runs]


def message_count(hidden: CatalogState) -> int:
    """How many visible messages ``hidden`` took out."""
    shown = hidden.table["flags"] & QUEUE_HIDDEN == 0
    return int(hidden.table["row_count"][shown].sum())


def hidden_since(state: CatalogState, since_ms: int) -> int:
    """How many messages log histories have hidden after ``since_ms``, without those that are visible again."""
    count, shared = 0, state.version
    for history in histories_to(state.log_histories, state.version):
        # A history that continues an earlier one hides again what that one had hidden.
        if history.version <= shared and history.created_ms > since_ms:
            count += history.hidden_messages
        before, common = history.version - 1, history.common_version
        shared = min(shared, shared_version(state.log_histories, before, common)) if common else 0
    return count


def _part(state: CatalogState, queues: Sequence[QueueKey], table: Table) -> CatalogState:
    """A state of these queues alone, without runs: the caller adds those that are hidden."""
    numbers = {_row(state, queue): number for number, queue in enumerate(queues)}
    gaps = state.gaps[[row in numbers for row in state.gaps["queue"].tolist()]].copy()
    gaps["queue"] = [numbers[row] for row in gaps["queue"].tolist()]
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
    row = state.row_of(queue)
    assert row is not None
    return row


def _shown(state: CatalogState, runs: Table) -> Table:
    """Messages of each run at or above the minimum of its queue, by offsets; of sparse runs at most their rows."""
    begin = np.maximum(runs["base_queue_offset"], state.table["min_queue_offset"][runs["queue"]])
    found: Table = np.maximum(runs["end_queue_offset"] - begin, 0)
    return np.where(runs["kind"] == RunKind.SPARSE, np.minimum(found, runs["rows"]), found)


# -- read -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HistoryListing:
    """One log history. ``messages``: those that only it has, hidden ``since_ms``, of which objects are left. ``bytes``
    are before compression. ``is_kept``: gc does not delete them, as they are an earlier generation."""

    number: int
    begin_phys: int
    end_phys: int
    is_current: bool
    messages: int = 0
    bytes: int = 0
    since_ms: int | None = None
    is_kept: bool = False


def list_histories(store: ObjectStore, state: CatalogState) -> list[HistoryListing]:
    """All log histories of ``state``, oldest first. Reads what each hid."""
    lister = _Lister(state, _Left(store, state))
    begins_phys = [int(state.table["first_phys"].min()) if len(state.table) else 0]
    begins_phys += [history.begin_phys for history in state.log_histories]
    found = [HistoryListing(state.cursor.history, begins_phys[-1], state.cursor.phys, True)]
    for history in reversed(state.log_histories):
        begin_phys = begins_phys[history.number - 1 - FIRST_HISTORY]
        found.append(lister.listing(begin_phys, read_hidden(store, history), history))
    return found[::-1]


def history_state(store: ObjectStore, state: CatalogState, number: int) -> CatalogState:
    """What log history ``number`` had and later ones do not; of the current one, ``state``. Raises NotFoundError."""
    if number == state.cursor.history:
        return state
    history = next((found for found in state.log_histories if found.number == number + 1), None)
    if history is None:
        raise NotFoundError(
            f"the archive has no log history {number}", hint="`tiered ls --histories` lists log histories"
        )
    hidden = read_hidden(store, history)
    ended = ended_keys(hidden)
    if not hidden.memory_runs:
        return _unhidden(state, hidden)
    ended_rows = list(_rows_of(state, hidden, ended))
    hidden = _left(hidden, _Left(store, state))
    return _both(store, state, hidden, ended_rows) if ended_rows else hidden


def read_hidden(store: ObjectStore, history: LogHistory) -> CatalogState:
    """What the begin of ``history`` hid. Raises CorruptionError, NotFoundError, or what the store raises."""
    return read_root(store, RootRef(history.hidden, history.version - 1))


def diverged_deletions(store: ObjectStore, state: CatalogState) -> dict[str, PendingDeletion]:
    """The pending deletions of superseded messages; reads the lists of them."""
    found = {key: entry for key, entry in state.pending_deletions.items() if entry.reason == Reason.DIVERGED}
    for listed in state.deletion_lists:
        if listed.reason == Reason.DIVERGED:
            found |= read_list(store, listed)
    return found


def object_names(chunk: RunChunk) -> list[str]:
    """The object of each run."""
    return [chunk.object_keys[key] for key in chunk.objects["key"][chunk.runs["object"]].tolist()]


class _Left:
    """Which hidden runs are left: their object waits for its deletion as one of a diverged log; or it has other runs,
    which are visible or wait, and this one is not of the current history."""

    def __init__(self, store: ObjectStore, state: CatalogState) -> None:
        self._store, self._state = store, state
        self._spans = history_spans(state)
        self.pending = diverged_deletions(store, state) if state.log_histories else {}

    def has(self, run: np.void, name: str) -> bool:
        """Whether ``run`` of the object ``name`` is left."""
        if name in self.pending:
            return True
        is_visible = any(first <= run["version"] <= last for first, last in self._spans)
        return not is_visible and name in self._shared

    @cached_property
    def _shared(self) -> set[str]:
        """Objects that the state names, and those of other pending deletions."""
        found = set(self._state.pending_deletions)
        for listed in self._state.deletion_lists:
            found.update(read_list(self._store, listed))
        for page in living_runs(RunIndex(self._store), self._state):
            found.update(object_names(page.chunk))
        return found


def objects_hidden_since(store: ObjectStore, state: CatalogState, since_ms: int) -> Iterator[str]:
    """Data objects of messages that were hidden after ``since_ms``: not garbage, though all else in them may be."""
    for history in state.log_histories:
        if history.created_ms > since_ms:
            yield from object_names(read_hidden(store, history).memory)


class _Lister:
    """Lists what begins of histories hid, the newest first: messages that were hidden twice count once."""

    def __init__(self, state: CatalogState, left: _Left) -> None:
        self._state, self._left = state, left
        self._rows: set[int] = set()
        self._runs: set[tuple[QueueKey, int, str]] = set()

    def listing(self, begin_phys: int, hidden: CatalogState, history: LogHistory) -> HistoryListing:
        """Describes the log history before ``history``: what of it is hidden and still there."""
        table, pending = self._state.table, self._left.pending
        rows = [row for row in _ended_rows(self._state, hidden) if row not in self._rows]
        self._rows.update(rows)
        names = object_names(hidden.memory)
        left = hidden.memory.runs[[self._is_left(hidden, at, name) for at, name in enumerate(names)]]
        shown = _shown(hidden, left)
        share = shown / np.maximum(left["end_queue_offset"] - left["base_queue_offset"], 1)
        found = HistoryListing(
            history.number - 1,
            begin_phys,
            hidden.cursor.phys,
            False,
            int(table["row_count"][rows].sum() + shown.sum()),
            int(table["end_byte"][rows].sum() + np.rint((left["byte_count"] * share).sum())),
        )
        if not found.messages:
            return found
        since_ms = min(
            (pending[name].since_ms for name in names if name in pending), default=history.created_ms
        )
        return replace(found, since_ms=since_ms, is_kept=not len(left))

    def _is_left(self, hidden: CatalogState, at: int, name: str) -> bool:
        run = hidden.memory.runs[at]
        place = hidden.key_of(int(run["queue"])), int(run["base_queue_offset"]), name
        is_new = place not in self._runs
        self._runs.add(place)
        return is_new and self._left.has(run, name)


def _ended_rows(state: CatalogState, hidden: CatalogState) -> Iterator[int]:
    """Rows of ``state`` that were visible queues of ``hidden`` and have ended."""
    return _rows_of(state, hidden, ended_keys(hidden))


def _rows_of(state: CatalogState, hidden: CatalogState, ended: Sequence[QueueKey]) -> Iterator[int]:
    for key in ended:
        row, before = state.row_of(key), hidden.queue(key)
        is_shown = before is not None and not before["flags"] & QUEUE_HIDDEN
        if row is not None and is_shown and state.table["flags"][row] & QUEUE_SUPERSEDED:
            yield row


def _unhidden(state: CatalogState, hidden: CatalogState) -> CatalogState:
    """``state`` with only the queues that ended with ``hidden``."""
    table = state.table.copy()
    table["flags"] |= QUEUE_HIDDEN
    for row in _ended_rows(state, hidden):
        table["flags"][row] &= ~_ENDED
    return replace(state, table=table)


def _left(hidden: CatalogState, left: _Left) -> CatalogState:
    """``hidden`` with runs that are left: others are visible again, or gone."""
    chunk = hidden.memory
    names = enumerate(object_names(chunk))
    kept = selected(chunk, np.array([left.has(chunk.runs[at], name) for at, name in names], bool))
    table = hidden.table.copy()
    table["flags"] |= QUEUE_HIDDEN
    for row in np.unique(kept.runs["queue"]).tolist():
        table["flags"][row] = hidden.table["flags"][row]
        first = kept.runs["base_queue_offset"][kept.runs["queue"] == row].min()
        table["min_queue_offset"][row] = max(table["min_queue_offset"][row], first)
    return replace(hidden, table=table, chunks=(kept,) if len(kept.runs) else ())


def _both(
    store: ObjectStore, state: CatalogState, hidden: CatalogState, ended_rows: Sequence[int]
) -> CatalogState:
    """The runs of ``hidden``, and those of queues that ended, which are in ``state``; all in memory."""
    table, chunks, index = hidden.table.copy(), list(hidden.chunks), RunIndex(store)
    for row in ended_rows:
        key = state.key_of(row)
        number = _row(hidden, key)
        table[number] = state.table[row]
        table["flags"][number] &= ~_ENDED
        found = selected(index.runs_of(state, key), slice(None))
        found.runs["queue"] = number
        chunks.append(found)
    return replace(hidden, table=table, chunks=(joined_chunks(tuple(chunks)),))
