"""Starts a new log history after the broker's log was replaced or truncated.

Records above the divergence point are superseded: they leave the visible offsets, and their objects become garbage
unless they have others too. Runs that compaction joined across the point are cut. What is superseded is named by a
state of its own (hidden_history.py). If the archive and the new log share no record, nothing is removed: every queue
ends hidden, and its next record starts a new generation.

A history may also begin where the archive ends, and only end some queues at earlier offsets, which the broker used
again: the log is the same.

Reads pages and the state at the common version. The uploader finds the divergence point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.catalog_reader import history_spans
from tiered.catalog.commit import CommitInvalidError
from tiered.catalog.deletions import PendingDeletion, Reason
from tiered.catalog.floors import rows_below
from tiered.catalog.hidden_history import ended_queues, hidden_runs, message_count
from tiered.catalog.pages import Bounds, Page, PutPage, RunIndex, cut, referenced_keys, write_pages
from tiered.catalog.queue_directory import QueueDirectory
from tiered.catalog.repeated_offsets import repeated_offsets, with_repeated
from tiered.catalog.run_cuts import RunCuts
from tiered.catalog.state import (
    EMPTY_CHUNK,
    CatalogState,
    LogCheck,
    LogCursor,
    LogHistory,
    PageRef,
    RootRef,
    RunChunk,
    joined_chunks,
)
from tiered.model.queue import QueueKey
from tiered.model.tables import (
    QUEUE_EXPIRED,
    QUEUE_FILLED,
    QUEUE_HIDDEN,
    QUEUE_SPARSE,
    QUEUE_SUPERSEDED,
    Table,
)

Ints = NDArray[Any]
ALL_PHYS = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Divergence:
    """Where the new log history begins. ``common``: the state at the last common version, or None. ``check``: of the
    log below ``phys``, where that is inside the next commit; runs are cut there. ``ends``: of a log that continues,
    offsets at which queues end."""

    phys: int
    common: CatalogState | None
    root_key: str
    hidden_key: str
    now_ms: int
    check: LogCheck | None = None
    ends: Mapping[QueueKey, int] = field(default_factory=dict)

    @property
    def is_at_commit(self) -> bool:
        """Whether it begins where the common version ends."""
        return self.common is not None and self.common.started and self.common.cursor.phys == self.phys

    @property
    def is_inside(self) -> bool:
        """Whether it begins above the common version, at checked records."""
        return self.common is not None and self.check is not None and self.common.cursor.phys <= self.phys


@dataclass(frozen=True)
class HistoryPages:
    """Reads and writes of the pages of a new log history, and cuts of their runs."""

    index: RunIndex
    put: PutPage
    runs_max: int
    cuts: RunCuts


@dataclass(frozen=True)
class NewHistory:
    """The first state of a log history, and what it hides."""

    state: CatalogState
    hidden: CatalogState


def begin_history(state: CatalogState, start: Divergence, pages: HistoryPages) -> NewHistory:
    """The first state of the new log history, one version after ``state``; its put id is not known yet.

    Raises CommitInvalidError when ``start`` is not on the current log history, and what ``pages`` raises.
    """
    version = state.version + 1
    common_version = 0 if start.common is None else start.common.version
    if start.common is not None and not (start.is_at_commit or start.is_inside):
        raise CommitInvalidError(
            f"catalog version {common_version} does not end at physical offset {start.phys}"
        )
    if common_version and not any(
        first - 1 <= common_version <= last for first, last in history_spans(state)
    ):
        raise CommitInvalidError(
            f"catalog version {common_version} belongs to a log history that was replaced"
        )
    check = LogCheck(start.phys, start.phys, 0)
    if start.common is not None:
        check = start.check or start.common.cursor.check
    base = replace(
        state,
        version=version,
        put_id="",
        cursor=LogCursor(state.cursor.history + 1, start.phys, check),
        started=True,
        advanced_ms=start.now_ms,
        created_ms=start.now_ms,
        root=RootRef(start.root_key, version),
    )
    if start.common is None:
        table = state.table.copy()
        table["flags"] |= QUEUE_HIDDEN | QUEUE_SUPERSEDED
        hidden = ended_queues(state)
        after = with_history(replace(base, table=table), state, start, common_version, hidden)
        return NewHistory(with_garbage(state, after, start.now_ms), hidden)
    walk = _Walk(state, start, pages)
    base = replace(base, settings={**state.settings, **with_repeated(state, dict.fromkeys(start.ends, 0))})
    after = _walked_back(base, state, start.common, walk)
    hidden = hidden_runs(state, walk.dropped, None if start.ends else start.common)
    if start.ends and hidden.chunks:  # the versions of these runs are current ones, but the runs are not
        hidden.memory.runs["version"] = 0
    after = with_history(after, state, start, common_version, hidden)
    return NewHistory(with_garbage(state, after, start.now_ms, walk.garbage()), hidden)


def with_history(
    after: CatalogState, state: CatalogState, start: Divergence, common_version: int, hidden: CatalogState
) -> CatalogState:
    """``after`` ``state``, with the history that hides ``hidden``."""
    history = LogHistory(
        after.cursor.history,
        start.phys,
        common_version,
        after.version,
        start.root_key,
        start.hidden_key,
        message_count(hidden),
        start.now_ms,
    )
    return replace(after, log_histories=(*state.log_histories, history))


def with_garbage(
    state: CatalogState, after: CatalogState, now_ms: int, garbage: Set[str] = frozenset()
) -> CatalogState:
    """``after`` with pending deletions of data objects without a living run, and of pages and roots that only ``state``
    names."""
    replaced = state.catalog_keys() - after.catalog_keys()
    pending_deletions = dict(after.pending_deletions)
    for keys, reason in ((garbage, Reason.DIVERGED), (replaced, Reason.REPLACED)):
        for key in sorted(keys):
            pending_deletions.setdefault(key, PendingDeletion(now_ms, after.version, reason))
    return replace(after, pending_deletions=pending_deletions)


class _Walk:
    """What stays of the runs in memory and in pages that are newer than the common version. By row of the queue:
    ``rows_gone``, and ``ends`` of runs that stay although they are newer (they filled gaps, replaced older ones, or are
    below the begin inside the next commit), named as the columns of a queue."""

    def __init__(self, state: CatalogState, start: Divergence, io: HistoryPages) -> None:
        """Prepare the walk; ``pages`` and ``memory`` then go through the runs. ``io`` reads and writes pages."""
        assert start.common is not None
        self._state, self._io, self._phys, self._ends = state, io, start.phys, start.ends
        self._common_version, self._common_phys = start.common.version, start.common.cursor.phys
        rows = {key: state.row_of(key) for key in (*start.ends, *repeated_offsets(state))}
        self._whole = {key: row for key, row in rows.items() if row is not None}
        self.is_whole = np.zeros(state.queue_count, bool)
        """Queues that ended earlier than at an earlier version: all of their runs are read."""
        self.is_whole[list(self._whole.values())] = True
        self._has_ended = state.table["flags"] & QUEUE_SUPERSEDED != 0
        self.rows_gone = np.zeros(state.queue_count, np.int64)
        self.ends = {
            name: np.zeros(state.queue_count, np.int64)
            for name in ("end_byte", "end_queue_offset", "end_phys", "max_store_timestamp")
        }
        self._before: set[str] = set()
        self._after: set[str] = set()
        self.dropped: list[Page] = []
        """Runs above the begin, counted by ``pages`` and ``memory``."""

    def pages(self) -> list[PageRef]:
        """Refs of the new history's pages; those that change are put."""
        refs: list[PageRef] = []
        for ref in self._state.pages:
            has_whole = any(ref.first <= key <= ref.last for key in self._whole)
            refs += self._page(ref) if has_whole or ref.to_version > self._common_version else [ref]
        return refs

    def memory(self) -> RunChunk:
        """The runs that stay in memory."""
        found = EMPTY_CHUNK
        for page in memory_pages(self._state):
            found = self._kept(page)
        return found

    def end_emptied(self) -> None:
        """Queues of which nothing stays continue where they end."""
        ends = self.ends["end_queue_offset"]
        for key, offset in self._ends.items():
            ends[self._whole[key]] = ends[self._whole[key]] or offset

    def garbage(self) -> set[str]:
        """Data objects of which ``pages`` and ``memory`` left nothing, after them."""
        return self._before - self._after

    def _page(self, ref: PageRef) -> list[PageRef]:
        """Refs of what stays of a page: its own one, or those of pages that are put."""
        stored = self._io.index.page(ref)
        page = self._io.index.living(self._state, stored)
        kept = self._kept(page)
        # A floor may come down to the begin: runs below it must not come back.
        limits, bounds = self._limits(stored)
        if not (stored.chunk.runs[bounds.value[1]] > limits).any():
            return [ref]
        if not len(kept.runs):
            return []
        versions = (ref.from_version, ref.to_version)
        return write_pages(cut(Page(page.queues, kept), self._io.runs_max), ref.level, versions, self._io.put)

    def _limits(self, page: Page) -> tuple[Ints, Bounds]:
        """Where each run ends: at an offset of its queue, or of the log."""
        if not self._ends:
            return np.where(compared_runs(self._state, page), self._phys, ALL_PHYS), Bounds.PHYS
        ends = np.array([self._ends.get(key, ALL_PHYS) for key in page.queues], np.int64)
        return ends[page.chunk.runs["queue"]], Bounds.OFFSET

    def _kept(self, page: Page) -> RunChunk:
        """What stays of living runs, which is counted."""
        state = self._state
        row = state.directory.rows(page.queues, len(state.table))
        limits, bounds = self._limits(page)
        kept, dropped = self._io.cuts.divided(page, limits, run_floors(state, page), bounds)
        if len(dropped.runs):
            self.dropped.append(Page(page.queues, dropped))
        self._before.update(_keys(page.chunk))
        self._after.update(_keys(kept))
        for part, sign in ((page, 1), (Page(page.queues, kept), -1)):
            at = row[part.chunk.runs["queue"]]
            np.add.at(self.rows_gone, at[at >= 0], sign * living_rows(state, part)[at >= 0])
        at, is_newer = row[kept.runs["queue"]], kept.runs["version"] > self._common_version
        newer = kept.runs[(is_newer | self.is_whole[at]) & (at >= 0)]
        np.maximum.at(self.ends["end_byte"], row[newer["queue"]], newer["base_byte"] + newer["byte_count"])
        at = row[newer["queue"]]
        above = newer[((newer["end_phys"] > self._common_phys) | self.is_whole[at]) & ~self._has_ended[at]]
        for name in ("end_queue_offset", "end_phys", "max_store_timestamp"):
            np.maximum.at(self.ends[name], row[above["queue"]], above[name])
        return kept


def compared_runs(state: CatalogState, page: Page) -> NDArray[np.bool_]:
    """Which runs of ``page`` have physical offsets of the current log: not those of queues that ended with an earlier
    one."""
    rows = state.directory.rows(page.queues, len(state.table))
    ended = (rows >= 0) & (state.table["flags"][rows] & QUEUE_SUPERSEDED != 0)
    found: NDArray[np.bool_] = ~ended[page.chunk.runs["queue"]]
    return found


def run_floors(state: CatalogState, page: Page) -> NDArray[np.int64]:
    """The minimum offset of the queue of each run."""
    rows = state.directory.rows(page.queues, len(state.table))
    found: NDArray[np.int64] = np.where(rows < 0, 0, state.table["min_queue_offset"][rows])
    of_runs: NDArray[np.int64] = found[page.chunk.runs["queue"]]
    return of_runs


def living_rows(state: CatalogState, page: Page) -> NDArray[np.int64]:
    """Rows of each run above the minimum offset of its queue."""
    found: NDArray[np.int64] = page.chunk.runs["rows"] - rows_below(page.chunk.runs, run_floors(state, page))
    return found


def memory_pages(state: CatalogState) -> list[Page]:
    """The runs in memory, not sorted."""
    return (
        [Page(state.directory.keys[: len(state.table)], joined_chunks(state.chunks))] if state.chunks else []
    )


def _keys(chunk: RunChunk) -> list[str]:
    return referenced_keys(Page((), chunk)) if len(chunk.runs) else []


def _walked_back(base: CatalogState, state: CatalogState, common: CatalogState, walk: _Walk) -> CatalogState:
    """``base`` without the part above the begin."""
    pages, memory = walk.pages(), walk.memory()
    walk.end_emptied()
    kept_rows = [
        row
        for row, (key, _) in enumerate(state.queues())
        if common.row_of(key) is not None or _ended(state, row) or walk.ends["end_phys"][row]
    ]
    row_number = np.full(state.queue_count, -1, np.int64)
    row_number[kept_rows] = np.arange(len(kept_rows))
    memory.runs["queue"] = row_number[memory.runs["queue"]]
    table = _restored(state, common, kept_rows, walk)
    gaps = state.gaps[row_number[state.gaps["queue"]] >= 0].copy()
    gaps["queue"] = row_number[gaps["queue"]]
    gaps = gaps[gaps["end_queue_offset"] <= table["end_queue_offset"][gaps["queue"]]]
    tombstones = state.tombstones[row_number[state.tombstones["queue"]] >= 0].copy()
    tombstones["queue"] = row_number[tombstones["queue"]]
    return replace(
        base,
        directory=QueueDirectory([state.key_of(row) for row in kept_rows]),
        table=table,
        gaps=gaps,
        tombstones=tombstones,
        chunks=(memory,) if len(memory.runs) else (),
        pages=tuple(pages),
    )


def _ended(state: CatalogState, row: int) -> bool:
    """Whether the queue ended with an earlier log history: its physical offsets do not compare."""
    return bool(state.table["flags"][row] & QUEUE_SUPERSEDED)


def _restored(state: CatalogState, common: CatalogState, kept_rows: Sequence[int], walk: _Walk) -> Table:
    """Queue rows that end as at the common version, or with what stays above it, with later maintenance applied."""
    table = state.table[kept_rows]
    newest: dict[tuple[str, int], int] = {}
    for row in kept_rows:
        topic, queue_id, generation = state.key_of(row)
        newest[topic, queue_id] = max(generation, newest.get((topic, queue_id), 0))
    for number, row in enumerate(kept_rows):
        key = state.key_of(row)
        before = common.queue(key)
        if _ended(state, row):
            continue
        now = table[number]
        is_newest = state.current_generation(key.topic, key.queue_id) == key.generation
        stays_hidden = is_newest or key.generation < newest[key.topic, key.queue_id]
        hidden = QUEUE_HIDDEN if stays_hidden and now["flags"] & QUEUE_HIDDEN else 0
        now["row_count"] -= walk.rows_gone[row]
        for name, ends in walk.ends.items():
            known = 0 if before is None or walk.is_whole[row] else int(before[name])
            now[name] = max(known, int(ends[row]))
        now["min_queue_offset"] = min(int(now["min_queue_offset"]), int(now["end_queue_offset"]))
        if before is not None:
            kept_flags = int(now["flags"]) & (QUEUE_EXPIRED | QUEUE_FILLED | QUEUE_SPARSE)
            now["flags"] = int(before["flags"]) | hidden | kept_flags
    return table
