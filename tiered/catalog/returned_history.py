"""Makes an earlier log history current again, for a broker whose earlier log was put back.

The new history is a log history like others. Its first state has what the present one and the earlier one share, and
the hidden runs of the earlier one; pending deletions of their objects are taken back. What only the present history has
is hidden in turn. If something is missing, nothing changes: the caller archives it again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from sys import maxsize

import numpy as np

from tiered.catalog.catalog_reader import histories_to, load, shared_version, spans_to
from tiered.catalog.commit import CommitInvalidError
from tiered.catalog.deletions import DeletionList, PendingDeletion
from tiered.catalog.floors import rows_below
from tiered.catalog.hidden_history import ended_keys, hidden_runs, object_names
from tiered.catalog.index_refs import whole_until
from tiered.catalog.log_histories import (
    ALL_PHYS,
    Divergence,
    DividedRuns,
    HistoryPages,
    NewHistory,
    with_garbage,
    with_history,
)
from tiered.catalog.pages import (
    Page,
    RunIndex,
    cut,
    living_runs,
    referenced_keys,
    unsorted_memory,
    write_pages,
)
from tiered.catalog.queue_directory import QueueDirectory
from tiered.catalog.repeated_offsets import repeated_offsets
from tiered.catalog.run_cuts import RunCuts
from tiered.catalog.state import (
    CatalogState,
    LogCursor,
    LogHistory,
    PageRef,
    RootRef,
    RunChunk,
    joined_chunks,
    selected,
)
from tiered.model.queue import QueueKey
from tiered.model.tables import (
    OBJECT_DTYPE,
    QUEUE_EXPIRED,
    QUEUE_FILLED,
    QUEUE_HIDDEN,
    QUEUE_SPARSE,
    QUEUE_SUPERSEDED,
    RUN_DTYPE,
    Table,
    concatenated,
)
from tiered.object_store.interface import ObjectStore

_NOTHING = -1
"""In place of a commitlog offset: below all of them, so that no run stays."""
Added = tuple[QueueKey, np.void, np.void, str]
"""A run that returns: its queue, the run, its object, the object's key."""


@dataclass(frozen=True)
class Hidden:
    """For each of ``histories``, the newest last, the state of what its begin hid. The pending deletions of hidden
    messages' objects, which can be taken back: ``recent`` ones by key, and those of ``lists`` by list and key."""

    histories: Sequence[tuple[LogHistory, CatalogState]]
    recent: Mapping[str, PendingDeletion]
    lists: Mapping[DeletionList, Mapping[str, PendingDeletion]]

    def can_return(self, key: str) -> bool:
        """Whether the object ``key`` is still a pending deletion, so that it can be taken back."""
        return key in self.recent or any(key in entries for entries in self.lists.values())


def return_to(
    state: CatalogState,
    target: CatalogState,
    hidden: Hidden,
    store: ObjectStore,
    start: Divergence,
    pages: HistoryPages,
) -> NewHistory:
    """The first state of a log history that continues ``target``, the state at an earlier version than ``state``:
    what later histories had hidden of it is visible again, and what it does not have is hidden.

    Reads further versions from ``store``, and puts changed pages. Raises CommitInvalidError if messages of ``target``
    are gone, and what reading and putting raise."""
    repeated = repeated_offsets(state).keys() - repeated_offsets(target)
    if repeated:
        raise CommitInvalidError(
            f"catalog version {target.version} cannot be continued: the broker has used offsets of "
            f"{sorted(repeated)[0]} again since; what its log has is archived again"
        )
    merge = _Return(state, target, hidden, store, pages.cuts)
    refs = [new for ref in state.pages for new in merge.page(ref, pages)]
    memory = merge.memory()
    added = merge.added(pages.index)
    base = replace(
        state,
        version=state.version + 1,
        put_id="",
        cursor=LogCursor(state.cursor.history + 1, target.cursor.phys, target.cursor.check),
        advanced_ms=start.now_ms,
        created_ms=start.now_ms,
        root=RootRef(start.root_key, state.version + 1),
        pages=tuple(refs),
        indexes=whole_until(
            state.indexes, min((int(run["version"]) for _, run, *_ in added), default=maxsize), target.indexes
        ),
    )
    after = merge.state(base, memory, added)
    newly_hidden = hidden_runs(state, merge.divided.dropped, None, merge.ending())
    after = with_history(after, state, start, target.version, newly_hidden)
    return NewHistory(with_garbage(state, after, start.now_ms, merge.garbage(added)), newly_hidden)


class _Return:
    """What the first state of a history that continues ``target`` takes of the present ``state``, and what it takes of
    the hidden runs."""

    def __init__(
        self, state: CatalogState, target: CatalogState, hidden: Hidden, store: ObjectStore, cuts: RunCuts
    ) -> None:
        """``target``: the earlier state to continue; ``hidden``: what log histories have hidden since; ``store``: where
        further versions are read; ``cuts`` divides runs."""
        self._state, self._target, self._hidden, self._store = state, target, hidden, store
        self._histories = state.log_histories
        self._spans = spans_to(self._histories, target.version)
        """Versions (first, last) whose messages the target has."""
        self._loaded: dict[int, CatalogState] = {target.version: target}
        self._ended_at = {
            key: history.version - 1
            for history, hidden_by_it in hidden.histories
            for key in ended_keys(hidden_by_it)
        }
        """The last version in which a queue that ended with its log history had it."""
        self._is_active = state.table["flags"] & QUEUE_SUPERSEDED == 0
        """By row: whether the queue belongs to the present log history."""
        self.divided = DividedRuns(state, cuts)
        self._end_byte = np.zeros(state.queue_count, np.int64)
        self._kept_end = np.zeros(state.queue_count, np.int64)
        """By row: the ends of the runs that stay, in bytes and in queue offsets."""
        self._is_inside = False
        """Whether runs of versions that both have differ: a log history began inside a commit."""
        self._limits = np.array([self._limit(row) for row in range(state.queue_count)], np.int64)
        """By row: the commitlog offset up to which the queue's present runs stay."""

    def _common_state(self, key: QueueKey) -> CatalogState | None:
        """The newest state up to which the queue ``key`` has the same messages in the present state and the target;
        None: there is none. Reads it from the store the first time."""
        row = self._state.row_of(key)
        has_ended = row is not None and not self._is_active[row]
        version = self._ended_at.get(key, 0) if has_ended else self._state.version
        version = shared_version(self._histories, version, self._target.version) if version else 0
        if version and version not in self._loaded:
            self._loaded[version] = load(self._store, version=version)
        return self._loaded.get(version)

    def _limit(self, row: int) -> int:
        """The commitlog offset up to which the present runs of the queue in ``row`` stay, as the target has them too:
        ALL_PHYS: all stay; _NOTHING: none."""
        key = self._state.key_of(row)
        if self._returning(key) is None:
            # A queue that ended before the target stays as it is; one that began after it goes.
            is_in_target = self._target.queue(key) is not None
            return ALL_PHYS if is_in_target or not self._is_active[row] else _NOTHING
        shared = self._common_state(key)
        if shared is None:
            return _NOTHING
        version = self._state.version if self._is_active[row] else self._ended_at.get(key, 0)
        if shared.version in (version, self._target.version):
            return shared.cursor.phys
        # The log history that begins after it may begin inside the next commit.
        begins = [
            history.begin_phys
            for last in (version, self._target.version)
            for history in histories_to(self._histories, last)
            if history.common_version == shared.version
        ]
        phys = max(shared.cursor.phys, min(begins, default=0))
        self._is_inside |= phys > shared.cursor.phys
        return phys

    def _shared_end(self, key: QueueKey) -> int | None:
        """The queue offset up to which the queue ``key`` has the same messages in the present state and the target;
        None: it has none in common."""
        shared, row = self._common_state(key), self._state.row_of(key)
        shared_row = None if shared is None else shared.queue(key)
        kept_end = 0 if row is None else int(self._kept_end[row])
        if shared_row is None:
            return kept_end or None
        return max(kept_end, int(shared_row["end_queue_offset"]))

    def _returning(self, key: QueueKey) -> np.void | None:
        """The row of the queue ``key`` in the target, if it belongs to the target's log: not None, and not ended with
        an earlier log."""
        row = self._target.queue(key)
        return None if row is None or row["flags"] & QUEUE_SUPERSEDED else row

    def ending(self) -> list[QueueKey]:
        """Queues whose messages stay in the archive, but which the new history hides as a whole."""
        return [
            self._state.key_of(row)
            for row in np.flatnonzero(self._is_active & (self._limits == ALL_PHYS)).tolist()
        ]

    # -- runs that stay ---------------------------------------------------------------------------------------

    def page(self, ref: PageRef, pages: HistoryPages) -> list[PageRef]:
        """The entries of the pages that hold what stays of the page ``ref``: its own one, if all stays, or those of
        new pages, which are put."""
        if not self._is_inside and any(
            first <= ref.from_version and ref.to_version <= last for first, last in self._spans
        ):
            return [ref]
        living = pages.index.living(self._state, pages.index.page(ref))
        dropped_before = len(self.divided.dropped)
        kept = self._kept(living)
        if len(self.divided.dropped) == dropped_before:
            return [ref]
        if not len(kept.runs):
            return []
        versions = (ref.from_version, ref.to_version)
        return write_pages(cut(Page(living.queues, kept), pages.runs_max), ref.level, versions, pages.put)

    def memory(self) -> RunChunk:
        """The runs that stay, of those that are in no page yet."""
        return self._kept(unsorted_memory(self._state))

    def _kept(self, page: Page) -> RunChunk:
        """The runs of ``page``, which are visible now, that stay visible when the earlier log history returns: those in
        front of the offset of their queue at which the two histories part. Notes where they end in each queue."""
        # A queue that the present state does not have has no such offset, so that all its runs stay.
        row = self._state.directory.rows(page.queues, self._state.queue_count)
        limits = np.where(row >= 0, self._limits[row], ALL_PHYS)[page.chunk.runs["queue"]]
        kept = self.divided.kept(page, limits)
        of_known_queues = kept.runs[row[kept.runs["queue"]] >= 0]
        np.maximum.at(
            self._end_byte,
            row[of_known_queues["queue"]],
            of_known_queues["base_byte"] + of_known_queues["byte_count"],
        )
        np.maximum.at(self._kept_end, row[of_known_queues["queue"]], of_known_queues["end_queue_offset"])
        return kept

    # -- runs that return -------------------------------------------------------------------------------------

    def added(self, index: RunIndex) -> list[Added]:
        """The hidden runs that become visible again, by queue and offset: those of the target above what it shares with
        the present state, whose objects still exist. None overlaps another."""
        by_queue: dict[QueueKey, list[Added]] = {}
        candidates = list(self._candidates())
        living = self._living(
            index, [run for _, run, _, key in candidates if not self._hidden.can_return(key)]
        )
        for candidate in candidates:
            queue, _, _, key = candidate
            if self._hidden.can_return(key) or key in living:
                by_queue.setdefault(queue, []).append(candidate)
        added: list[Added] = []
        for queue in sorted(by_queue):
            end = self._shared_end(queue) or 0
            # Divergences may have cut one run at several offsets, or hidden it before and after it was joined.
            for candidate in sorted(
                by_queue[queue],
                key=lambda added: (added[1]["base_queue_offset"], -added[1]["end_queue_offset"]),
            ):
                run = candidate[1]
                if int(run["base_queue_offset"]) >= end:
                    added.append(candidate)
                    end = int(run["end_queue_offset"])
        return added

    def _candidates(self) -> Iterator[Added]:
        """Runs that later log histories hid and that the target (the earlier state that the log has returned to) had:
        of queues that return, and not among the messages that the present state has in common with the target. The
        newest history comes first. Objects of some may no longer exist."""
        for _, hidden in reversed(self._hidden.histories):
            chunk = hidden.memory
            runs, keys = chunk.runs, object_names(chunk)
            is_in_target = np.zeros(len(runs), bool)
            for first, last in self._spans:
                is_in_target |= (runs["version"] >= first) & (runs["version"] <= last)
            # The target may end inside a version: where a log history began inside a commit.
            is_in_target &= runs["end_phys"] <= self._target.cursor.phys
            for at in np.flatnonzero(is_in_target).tolist():
                run, queue = runs[at], hidden.key_of(int(runs["queue"][at]))
                common = self._common_state(queue)
                is_hidden_now = common is None or run["version"] > common.version
                if is_hidden_now and self._returning(queue) is not None:
                    yield queue, run, chunk.objects[int(run["object"])], keys[at]

    def _living(self, index: RunIndex, runs: Sequence[np.void]) -> set[str]:
        """Keys of the objects that the present history names for runs of the same versions as ``runs``. These objects
        exist, though they are no pending deletions."""
        keys: set[str] = set()
        if runs:
            versions = [int(run["version"]) for run in runs]
            for page in living_runs(index, self._state, min(versions), max(versions), is_cached=True):
                keys.update(referenced_keys(page.chunk))
        return keys

    def garbage(self, added: Sequence[Added]) -> set[str]:
        """Data objects that only the present history names."""
        return self.divided.garbage() - {key for *_, key in added}

    # -- the new state ----------------------------------------------------------------------------------------

    def state(self, base: CatalogState, memory: RunChunk, added: list[Added]) -> CatalogState:
        """``base``, the new history's state without queues, with its queues: those of the target, and hidden ones of
        the present state. ``memory``: the runs that stay and are in no page; ``added``: those that return."""
        state, target = self._state, self._target
        staying_rows = [
            row
            for row in range(state.queue_count)
            if self._limits[row] != _NOTHING or self._returning(state.key_of(row)) is not None
        ]
        keys = [state.key_of(row) for row in staying_rows]
        keys += [
            key
            for key, _ in target.queues()
            if self._returning(key) is not None and state.row_of(key) is None
        ]
        table, gaps = self._table(keys, added), self._gaps(keys)
        new_row = np.full(state.queue_count, -1, np.int64)
        new_row[staying_rows] = np.arange(len(staying_rows))
        memory = selected(memory, new_row[memory.runs["queue"]] >= 0) if len(memory.runs) else memory
        memory.runs["queue"] = new_row[memory.runs["queue"]]
        tombstones = state.tombstones[new_row[state.tombstones["queue"]] >= 0].copy()
        tombstones["queue"] = new_row[tombstones["queue"]]
        returned = _chunk_of(added, {key: row for row, key in enumerate(keys)})
        chunk = joined_chunks(tuple(runs for runs in (memory, returned) if len(runs.runs)))
        return replace(
            self._taken_back(base, {key for *_, key in added}),
            directory=QueueDirectory(keys),
            table=table,
            gaps=gaps,
            tombstones=tombstones,
            chunks=(chunk,) if len(chunk.runs) else (),
        )

    def _table(self, keys: Sequence[QueueKey], added: Sequence[Added]) -> Table:
        """The queue table of the new history, a row for each of ``keys``: queues of the target as it had them, with
        what maintenance changed since, and others as they are now, hidden. ``added``: the runs that return. Raises
        CommitInvalidError if messages of a queue of the target are gone."""
        state, target = self._state, self._target
        returned: dict[QueueKey, list[np.void]] = {}
        for queue, run, *_ in added:
            returned.setdefault(queue, []).append(run)
        table = np.zeros(len(keys), state.table.dtype)
        for number, key in enumerate(keys):
            row, target_row = state.row_of(key), self._returning(key)
            if target_row is None:
                assert row is not None
                table[number] = state.table[row]
                if target.queue(key) is not None:
                    table[number]["flags"] |= QUEUE_HIDDEN | QUEUE_SUPERSEDED
                continue
            self._check_whole(key, target_row, returned.get(key, []))
            table[number] = target_row
            new = table[number]
            runs = np.array(returned.get(key, []), RUN_DTYPE)
            new["row_count"] = 0
            if row is not None:
                present = state.table[row]
                new["row_count"] = int(present["row_count"]) - int(self.divided.rows_gone[row])
                new["flags"] |= int(present["flags"]) & (QUEUE_EXPIRED | QUEUE_FILLED | QUEUE_SPARSE)
                new["end_byte"] = max(int(new["end_byte"]), int(self._end_byte[row]))
                # Messages that have expired since stay expired, but not those that return.
                first = int(runs["base_queue_offset"][0] if len(runs) else target_row["end_queue_offset"])
                new["min_queue_offset"] = max(
                    int(new["min_queue_offset"]), min(int(present["min_queue_offset"]), first)
                )
            new["row_count"] += (runs["rows"] - rows_below(runs, new["min_queue_offset"])).sum()
        return table

    def _check_whole(self, key: QueueKey, wanted: np.void, runs: Sequence[np.void]) -> None:
        """Raise CommitInvalidError unless the new history gets all that the target had of the queue ``key``, whose row
        there is ``wanted``: what both states share, then ``runs`` that return and the target's gaps, without a hole."""
        shared_end = self._shared_end(key)
        at = int(wanted["min_queue_offset"]) if shared_end is None else shared_end
        gaps = {
            int(gap["begin_queue_offset"]): int(gap["end_queue_offset"]) for gap in self._target.gaps_of(key)
        }
        ends = {int(run["base_queue_offset"]): int(run["end_queue_offset"]) for run in runs}
        if shared_end is None and runs and int(runs[0]["base_queue_offset"]) < at:
            at = int(runs[0]["base_queue_offset"])
        while at < int(wanted["end_queue_offset"]):
            end = ends.get(at, gaps.get(at))
            if end is None:
                raise CommitInvalidError(
                    f"catalog version {self._target.version} cannot be continued: messages of {key} from queue offset "
                    f"{at} on are no longer in the archive"
                )
            at = end

    def _gaps(self, keys: Sequence[QueueKey]) -> Table:
        """The gaps of the new history, by number of the queue in ``keys``: those of the present state up to where it
        and the target have the same messages, and those of the target above."""
        tables = []
        for number, key in enumerate(keys):
            gaps = [self._state.gaps_of(key)]
            if self._returning(key) is not None:
                end = self._shared_end(key) or 0
                below, above = gaps[0], self._target.gaps_of(key)
                gaps = [below[below["end_queue_offset"] <= end], above[above["begin_queue_offset"] >= end]]
            for table in gaps:
                numbered = table.copy()
                numbered["queue"] = number
                tables.append(numbered)
        return concatenated(tables, self._state.gaps.dtype)

    def _taken_back(self, base: CatalogState, keys: set[str]) -> CatalogState:
        """``base`` in which the objects ``keys`` are no longer pending deletions. A list that names one of them is
        dissolved: its other entries are single ones again."""
        recent = {key: entry for key, entry in base.pending_deletions.items() if key not in keys}
        lists = []
        for listed in base.deletion_lists:
            entries = self._hidden.lists.get(listed, {})
            if keys.isdisjoint(entries):
                lists.append(listed)
            else:
                recent |= {key: entry for key, entry in entries.items() if key not in keys}
        return replace(base, pending_deletions=recent, deletion_lists=tuple(lists))


def _chunk_of(added: Sequence[Added], row_of: Mapping[QueueKey, int]) -> RunChunk:
    """The runs that become visible again, with their objects, as runs that are in no page. ``row_of``: the rows of the
    new history's queues."""
    number_of = {key: number for number, key in enumerate(dict.fromkeys(key for *_, key in added))}
    runs = np.array([run for _, run, *_ in added], RUN_DTYPE)
    objects = np.zeros(len(number_of), OBJECT_DTYPE)
    for at, (queue, _, object_row, key) in enumerate(added):
        runs["queue"][at], runs["object"][at] = row_of[queue], number_of[key]
        objects[number_of[key]] = object_row
        objects["key"][number_of[key]] = number_of[key]
    return RunChunk(runs, objects, tuple(number_of))
