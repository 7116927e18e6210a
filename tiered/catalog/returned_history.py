"""Makes an earlier log history current again, for a broker whose earlier log was put back.

The new history is a log history like others. Its first state has what the present one and the earlier one share, and
the hidden runs of the earlier one; pending deletions of their objects are taken back. What only the present history has
is hidden in turn. If something is missing, nothing changes: the caller archives it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from sys import maxsize

import numpy as np

from tiered.catalog.catalog_reader import histories_to, shared_version, spans_to
from tiered.catalog.commit import CommitInvalidError
from tiered.catalog.deletions import DeletionList, PendingDeletion
from tiered.catalog.floors import rows_below
from tiered.catalog.hidden_history import ended_keys, hidden_runs, object_names
from tiered.catalog.index_refs import whole_until
from tiered.catalog.log_histories import (
    ALL_PHYS,
    Divergence,
    HistoryPages,
    NewHistory,
    living_rows,
    memory_pages,
    run_floors,
    with_garbage,
    with_history,
)
from tiered.catalog.pages import Page, RunIndex, cut, living_runs, referenced_keys, write_pages
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

_NOTHING = -1
Added = tuple[QueueKey, np.void, np.void, str]
"""A run that returns: its queue, the run, its object, the object's key."""


@dataclass(frozen=True)
class Hidden:
    """What the begins of ``histories`` hid, the newest last, and the pending deletions that can be taken back: the
    recent ones, and by list."""

    histories: Sequence[tuple[LogHistory, CatalogState]]
    recent: Mapping[str, PendingDeletion]
    lists: Mapping[DeletionList, Mapping[str, PendingDeletion]]

    def can_return(self, key: str) -> bool:
        """Whether gc has not begun to delete the object ``key``."""
        return key in self.recent or any(key in entries for entries in self.lists.values())


def return_to(
    state: CatalogState,
    target: CatalogState,
    hidden: Hidden,
    load_state: Callable[[int], CatalogState],
    start: Divergence,
    pages: HistoryPages,
) -> NewHistory:
    """The first state of a log history that continues ``target``, an earlier version. Raises CommitInvalidError if
    messages of it are gone, and what ``pages`` and ``load_state`` raise."""
    if repeated_offsets(state).keys() - repeated_offsets(target):
        raise CommitInvalidError(
            "queues have ended at earlier offsets since: what the log has is archived again"
        )
    merge = _Return(state, target, hidden, load_state, pages.cuts)
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
    gone = hidden_runs(state, merge.dropped, None, merge.ending())
    after = with_history(after, state, start, target.version, gone)
    return NewHistory(with_garbage(state, after, start.now_ms, merge.garbage(added)), gone)


class _Return:
    """``limit``: by row of the present state, the physical offset up to which its runs stay."""

    def __init__(
        self,
        state: CatalogState,
        target: CatalogState,
        hidden: Hidden,
        load_state: Callable[[int], CatalogState],
        cuts: RunCuts,
    ) -> None:
        """``target``: the state to return to; ``hidden``: what log histories have hidden since."""
        self._cuts = cuts
        self._state, self._target, self._hidden, self._load = state, target, hidden, load_state
        self._histories = state.log_histories
        self._spans = spans_to(self._histories, target.version)
        self._loaded: dict[int, CatalogState] = {}
        self._ended_at = self._ends()
        self._is_active = state.table["flags"] & QUEUE_SUPERSEDED == 0
        self.dropped: list[Page] = []
        self._rows_gone = np.zeros(state.queue_count, np.int64)
        self._end_byte = np.zeros(state.queue_count, np.int64)
        self._kept_end = np.zeros(state.queue_count, np.int64)
        self._is_inside = False
        """Whether runs of versions that both have differ: a log history began inside a commit."""
        self._before: set[str] = set()
        self._after: set[str] = set()
        limits = [self._limit(row) for row in range(state.queue_count)]
        self._limits = np.array(limits, np.int64)

    def _ends(self) -> dict[QueueKey, int]:
        """The version up to which an ended queue has its log history."""
        return {
            key: history.version - 1
            for history, hidden in self._hidden.histories
            for key in ended_keys(hidden)
        }

    def _shared(self, key: QueueKey) -> CatalogState | None:
        """The state up to which the present runs of ``key`` are those of the target."""
        row = self._state.row_of(key)
        has_ended = row is not None and not self._is_active[row]
        version = self._ended_at.get(key, 0) if has_ended else self._state.version
        version = shared_version(self._histories, version, self._target.version) if version else 0
        if version and version not in self._loaded:
            self._loaded[version] = self._target if version == self._target.version else self._load(version)
        return self._loaded.get(version)

    def _limit(self, row: int) -> int:
        """The physical offset up to which a queue's present runs stay: what it and the wanted state share. ALL_PHYS:
        all of them."""
        key = self._state.key_of(row)
        if self._wanted(key) is None:
            is_flagged = self._target.queue(key) is not None
            return ALL_PHYS if is_flagged or not self._is_active[row] else _NOTHING
        shared = self._shared(key)
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
        """The end of what present and target share of ``key``; None: nothing."""
        shared, row = self._shared(key), self._state.row_of(key)
        known = None if shared is None else shared.queue(key)
        kept = 0 if row is None else int(self._kept_end[row])
        if known is None:
            return kept or None
        return max(kept, int(known["end_queue_offset"]))

    def _wanted(self, key: QueueKey) -> np.void | None:
        """The row of ``key`` in the target, if it is a queue of its log."""
        found = self._target.queue(key)
        return None if found is None or found["flags"] & QUEUE_SUPERSEDED else found

    def ending(self) -> list[QueueKey]:
        """Queues that end with the present history, and stay."""
        return [
            self._state.key_of(row)
            for row in np.flatnonzero(self._is_active & (self._limits == ALL_PHYS)).tolist()
        ]

    # -- runs that stay ---------------------------------------------------------------------------------------

    def page(self, ref: PageRef, pages: HistoryPages) -> list[PageRef]:
        """Refs of what stays of a page: its own, if all does."""
        if not self._is_inside and any(
            first <= ref.from_version and ref.to_version <= last for first, last in self._spans
        ):
            return [ref]
        living = pages.index.living(self._state, pages.index.page(ref))
        kept, is_changed = self._kept(living)
        if not is_changed:
            return [ref]
        if not len(kept.runs):
            return []
        versions = (ref.from_version, ref.to_version)
        return write_pages(cut(Page(living.queues, kept), pages.runs_max), ref.level, versions, pages.put)

    def memory(self) -> RunChunk:
        """The runs that stay in memory."""
        return joined_chunks(tuple(self._kept(page)[0] for page in memory_pages(self._state)))

    def _kept(self, page: Page) -> tuple[RunChunk, bool]:
        """What stays of living runs, which is counted, and whether it is something else."""
        row = self._state.directory.rows(page.queues, self._state.queue_count)
        limit = np.where(row >= 0, self._limits[row], ALL_PHYS)[page.chunk.runs["queue"]]
        kept, dropped = self._cuts.divided(page, limit, run_floors(self._state, page))
        for part, sign in ((page, 1), (Page(page.queues, kept), -1)):
            at = row[part.chunk.runs["queue"]]
            np.add.at(self._rows_gone, at[at >= 0], sign * living_rows(self._state, part)[at >= 0])
        stays = kept.runs[row[kept.runs["queue"]] >= 0]
        np.maximum.at(self._end_byte, row[stays["queue"]], stays["base_byte"] + stays["byte_count"])
        np.maximum.at(self._kept_end, row[stays["queue"]], stays["end_queue_offset"])
        self._before.update(_keys(page.chunk))
        self._after.update(_keys(kept))
        if len(dropped.runs):
            self.dropped.append(Page(page.queues, dropped))
        return kept, bool(len(dropped.runs))

    # -- runs that return -------------------------------------------------------------------------------------

    def added(self, index: RunIndex) -> list[Added]:
        """Hidden runs of the target, by queue and offset, behind what is shared and behind one another."""
        found: dict[QueueKey, list[Added]] = {}
        candidates = list(self._candidates())
        living = self._living(
            index, [run for _, run, _, name in candidates if not self._hidden.can_return(name)]
        )
        for one in candidates:
            if self._hidden.can_return(one[3]) or one[3] in living:
                found.setdefault(one[0], []).append(one)
        added: list[Added] = []
        for queue in sorted(found):
            end = self._shared_end(queue) or 0
            # Divergences may have cut one run at several offsets, or hidden it before and after it was joined.
            for one in sorted(
                found[queue], key=lambda one: (one[1]["base_queue_offset"], -one[1]["end_queue_offset"])
            ):
                if int(one[1]["base_queue_offset"]) >= end:
                    added.append(one)
                    end = int(one[1]["end_queue_offset"])
        return added

    def _candidates(self) -> Iterator[Added]:
        """Runs that begins of histories hid, the newest first, and that the target has."""
        for _, hidden in reversed(self._hidden.histories):
            chunk = hidden.memory
            runs, names = chunk.runs, object_names(chunk)
            is_mine = np.zeros(len(runs), bool)
            for first, last in self._spans:
                is_mine |= (runs["version"] >= first) & (runs["version"] <= last)
            is_mine &= runs["end_phys"] <= self._target.cursor.phys
            for at in np.flatnonzero(is_mine).tolist():
                run, queue = runs[at], hidden.key_of(int(runs["queue"][at]))
                shared = self._shared(queue)
                is_above = shared is None or run["version"] > shared.version
                if is_above and self._wanted(queue) is not None:
                    yield queue, run, chunk.objects[int(run["object"])], names[at]

    def _living(self, index: RunIndex, runs: Sequence[np.void]) -> set[str]:
        """Objects of which the present history has rows, of the versions of ``runs``."""
        found: set[str] = set()
        if runs:
            versions = [int(run["version"]) for run in runs]
            for page in living_runs(index, self._state, min(versions), max(versions), is_cached=True):
                found.update(_keys(page.chunk))
        return found

    def garbage(self, added: Sequence[Added]) -> set[str]:
        """Data objects that only the present history names."""
        return self._before - self._after - {key for *_, key in added}

    # -- the new state ----------------------------------------------------------------------------------------

    def state(self, base: CatalogState, memory: RunChunk, added: list[Added]) -> CatalogState:
        """``base`` with the queues of the target."""
        state, target = self._state, self._target
        stays = [
            row
            for row in range(state.queue_count)
            if self._limits[row] != _NOTHING or self._wanted(state.key_of(row)) is not None
        ]
        keys = [state.key_of(row) for row in stays]
        keys += [
            key for key, _ in target.queues() if self._wanted(key) is not None and state.row_of(key) is None
        ]
        numbers = {key: number for number, key in enumerate(keys)}
        table, gaps = self._table(keys, added), self._gaps(keys)
        renumbered = np.full(state.queue_count, -1, np.int64)
        renumbered[stays] = np.arange(len(stays))
        memory = selected(memory, renumbered[memory.runs["queue"]] >= 0) if len(memory.runs) else memory
        memory.runs["queue"] = renumbered[memory.runs["queue"]]
        tombstones = state.tombstones[renumbered[state.tombstones["queue"]] >= 0].copy()
        tombstones["queue"] = renumbered[tombstones["queue"]]
        chunk = joined_chunks(tuple(part for part in (memory, _chunk_of(added, numbers)) if len(part.runs)))
        return replace(
            self._taken_back(base, {key for *_, key in added}),
            directory=QueueDirectory(keys),
            table=table,
            gaps=gaps,
            tombstones=tombstones,
            chunks=(chunk,) if len(chunk.runs) else (),
        )

    def _table(self, keys: Sequence[QueueKey], added: Sequence[Added]) -> Table:
        """The queue table of the new history: wanted queues as they were, others hidden with what they have."""
        state, target = self._state, self._target
        mine: dict[QueueKey, list[np.void]] = {}
        for queue, run, *_ in added:
            mine.setdefault(queue, []).append(run)
        table = np.zeros(len(keys), state.table.dtype)
        for number, key in enumerate(keys):
            row, wanted = state.row_of(key), self._wanted(key)
            if wanted is None:
                assert row is not None
                table[number] = state.table[row]
                if target.queue(key) is not None:
                    table[number]["flags"] |= QUEUE_HIDDEN | QUEUE_SUPERSEDED
                continue
            self._check_whole(key, wanted, mine.get(key, []))
            table[number] = wanted
            now = table[number]
            runs = np.array(mine.get(key, []), RUN_DTYPE)
            now["row_count"] = 0
            if row is not None:
                before = state.table[row]
                now["row_count"] = int(before["row_count"]) - int(self._rows_gone[row])
                now["flags"] |= int(before["flags"]) & (QUEUE_EXPIRED | QUEUE_FILLED | QUEUE_SPARSE)
                now["end_byte"] = max(int(now["end_byte"]), int(self._end_byte[row]))
                first = int(runs["base_queue_offset"][0] if len(runs) else wanted["end_queue_offset"])
                now["min_queue_offset"] = max(
                    int(now["min_queue_offset"]), min(int(before["min_queue_offset"]), first)
                )
            now["row_count"] += (runs["rows"] - rows_below(runs, now["min_queue_offset"])).sum()
        return table

    def _check_whole(self, key: QueueKey, wanted: np.void, runs: Sequence[np.void]) -> None:
        """What is shared, the runs, and the target's gaps must be all that the target has of ``key``."""
        shared_end = self._shared_end(key)
        at = int(wanted["min_queue_offset"]) if shared_end is None else shared_end
        gaps = {
            int(gap["begin_queue_offset"]): int(gap["end_queue_offset"]) for gap in self._target.gaps_of(key)
        }
        ends = {int(run["base_queue_offset"]): int(run["end_queue_offset"]) for run in runs}
        if shared_end is None and runs and int(runs[0]["base_queue_offset"]) < at:
            at = int(runs[0]["base_queue_offset"])
        while at < int(wanted["end_queue_offset"]):
            after = ends.get(at, gaps.get(at))
            if after is None:
                raise CommitInvalidError(
                    f"messages of {key} from offset {at} on are no longer in the archive"
                )
            at = after

    def _gaps(self, keys: Sequence[QueueKey]) -> Table:
        """Gaps of the new history: the present ones below the shared end of a queue, the wanted ones above it."""
        parts = []
        for number, key in enumerate(keys):
            below = self._state.gaps_of(key) if self._state.row_of(key) is not None else self._state.gaps[:0]
            known = [below]
            if self._wanted(key) is not None:
                end = self._shared_end(key) or 0
                above = self._target.gaps_of(key)
                known = [below[below["end_queue_offset"] <= end], above[above["begin_queue_offset"] >= end]]
            for part in known:
                found = part.copy()
                found["queue"] = number
                parts.append(found)
        return concatenated(parts, self._state.gaps.dtype)

    def _taken_back(self, base: CatalogState, keys: set[str]) -> CatalogState:
        """``base`` without pending deletions of ``keys``; the rest of a list becomes recent again."""
        recent = {key: entry for key, entry in base.pending_deletions.items() if key not in keys}
        lists = []
        for listed in base.deletion_lists:
            entries = self._hidden.lists.get(listed, {})
            if keys.isdisjoint(entries):
                lists.append(listed)
            else:
                recent |= {key: entry for key, entry in entries.items() if key not in keys}
        return replace(base, pending_deletions=recent, deletion_lists=tuple(lists))


def _chunk_of(added: Sequence[Added], numbers: Mapping[QueueKey, int]) -> RunChunk:
    """The runs that become visible again, as runs in memory."""
    names = {key: number for number, key in enumerate(dict.fromkeys(key for *_, key in added))}
    runs = np.array([run for _, run, *_ in added], RUN_DTYPE)
    objects = np.zeros(len(names), OBJECT_DTYPE)
    for at, (queue, _, place, key) in enumerate(added):
        runs["queue"][at], runs["object"][at] = numbers[queue], names[key]
        objects[names[key]] = place
        objects["key"][names[key]] = names[key]
    return RunChunk(runs, objects, tuple(names))


def _keys(chunk: RunChunk) -> list[str]:
    return referenced_keys(Page((), chunk)) if len(chunk.runs) else []
