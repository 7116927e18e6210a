"""Starts a new log history after the broker's log was replaced or truncated.

Records above the divergence point are superseded: they leave the visible offsets, and their objects become garbage
unless they have others too. Runs that compaction joined across the point are cut. What is superseded is named by a
state of its own (hidden_history.py). If the archive and the new log share no record, nothing is removed: every queue
ends hidden, and its next record starts a new generation.

A history may also begin where the archive ends, and only end some queues at earlier offsets, which the broker used
again: the log is the same.

Reads pages and the state at the common version. The uploader finds the divergence point.
"""

import contextlib
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
from tiered.catalog.pages import (
    Bounds,
    Page,
    PutPage,
    RunIndex,
    cut,
    living_pages,
    living_runs,
    referenced_keys,
    unsorted_memory,
    write_pages,
)
from tiered.catalog.queue_directory import QueueDirectory
from tiered.catalog.repeated_offsets import repeated_offsets, with_repeated
from tiered.catalog.requirements import Floors
from tiered.catalog.run_cuts import RunCuts
from tiered.catalog.state import (
    CatalogState,
    LogCheck,
    LogCursor,
    LogHistory,
    PageRef,
    RootRef,
    RunChunk,
    selected,
)
from tiered.errors import NotFoundError
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
GOES = -1
"""A queue that does not end at an offset, but goes: it is of a later generation that does not exist yet."""


@dataclass(frozen=True)
class Divergence:
    """Where the new log history begins. ``common``: the state at the last common version, or None. ``check``: of the
    log below ``phys``, where that is inside the next commit of the log, which led to the state ``above``; runs are cut
    there. ``ends``: of a log that continues, offsets at which queues end, or GOES."""

    phys: int
    common: CatalogState | None
    root_key: str
    hidden_key: str
    now_ms: int
    check: LogCheck | None = None
    above: CatalogState | None = None
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
    """The first state of the log history that begins at ``start``, one version after ``state``, and what it hides of
    ``state``. Puts changed pages. Its put id is not known yet.

    Raises CommitInvalidError when ``start`` is not on the current log history, and what ``pages`` raises.
    """
    version = state.version + 1
    common_version = 0 if start.common is None else start.common.version
    if start.common is not None and not (start.is_at_commit or start.is_inside or start.ends):
        raise CommitInvalidError(
            f"a log history cannot begin at commitlog offset {start.phys}: catalog version {common_version} does not "
            "end at it"
        )
    if common_version not in (0, state.version) and not any(
        first - 1 <= common_version <= last for first, last in history_spans(state)
    ):
        raise CommitInvalidError(
            f"a log history cannot continue catalog version {common_version}, which belongs to a log history that was "
            "replaced"
        )
    check = (
        LogCheck(start.phys, start.phys, 0)
        if start.common is None
        else start.check or start.common.cursor.check
    )
    base = replace(
        state,
        version=version,
        put_id="",
        cursor=LogCursor(state.cursor.history + 1, start.phys, check),
        started=True,
        advanced_ms=start.now_ms,
        created_ms=start.now_ms,
        root=RootRef(start.root_key, version),
        settings={**state.settings, **with_repeated(state, dict.fromkeys(start.ends, 0))},
    )
    if start.common is None:
        # Nothing is shared: no run is hidden, but every queue ends.
        table = state.table.copy()
        table["flags"] |= QUEUE_HIDDEN | QUEUE_SUPERSEDED
        hidden = ended_queues(state)
        after = with_history(replace(base, table=table), state, start, common_version, hidden)
        return NewHistory(with_garbage(state, after, start.now_ms), hidden)
    walk = _Walk(state, start, pages)
    after = _walked_back(base, state, start, walk)
    hidden = hidden_runs(state, walk.divided.dropped, None if start.ends else start.common)
    if start.ends and hidden.chunks:  # the versions of these runs are current ones, but the runs are not
        hidden.memory.runs["version"] = 0
    after = with_history(after, state, start, common_version, hidden)
    return NewHistory(with_garbage(state, after, start.now_ms, walk.garbage()), hidden)


def with_history(
    after: CatalogState, state: CatalogState, start: Divergence, common_version: int, hidden: CatalogState
) -> CatalogState:
    """``after``, the first state of a new log history, with that history's entry added to the earlier ones of
    ``state``. ``hidden``: what it takes out of the visible offsets."""
    return replace(
        after,
        log_histories=(
            *state.log_histories,
            LogHistory(
                after.cursor.history,
                start.phys,
                common_version,
                after.version,
                start.root_key,
                start.hidden_key,
                message_count(hidden),
                start.now_ms,
            ),
        ),
    )


def with_garbage(
    state: CatalogState, after: CatalogState, now_ms: int, garbage: Set[str] = frozenset()
) -> CatalogState:
    """``after``, the first state of a new log history, with more pending deletions: the data objects ``garbage``, of
    which it has no messages, and the pages and root pages that only the state before, ``state``, names."""
    replaced = state.catalog_keys() - after.catalog_keys()
    added = {
        key: PendingDeletion(now_ms, after.version, reason)
        for keys, reason in ((garbage, Reason.DIVERGED), (replaced, Reason.REPLACED))
        for key in sorted(keys)
    }
    return replace(after, pending_deletions={**added, **after.pending_deletions})


class DividedRuns:
    """Divides the runs of ``state`` at the begin of a new log history, page by page, and counts what that changes."""

    def __init__(self, state: CatalogState, cuts: RunCuts) -> None:
        """``state``: the one before the new log history; ``cuts`` divides single runs. Nothing is read yet."""
        self._state, self._cuts = state, cuts
        self.rows_gone = np.zeros(state.queue_count, np.int64)
        """By row of the queue: how many of its messages are dropped."""
        self.dropped: list[Page] = []
        """The runs that are dropped."""
        self._keys_before: set[str] = set()
        self._keys_after: set[str] = set()
        """Data objects that were named before, and those that the new history names."""

    def kept(self, page: Page, limits: Ints, bounds: Bounds = Bounds.PHYS) -> RunChunk:
        """The runs of ``page``, all of them living, below ``limits`` (one for each run; ``bounds`` says whether in the
        commitlog or in the queue). Runs across a limit are cut; all others are dropped. Raises what the cut raises."""
        row = self._state.directory.rows(page.queues, self._state.queue_count)
        kept, dropped = self._cuts.divided(page, limits, _run_minimums(self._state, page), bounds)
        if len(dropped.runs):
            self.dropped.append(Page(page.queues, dropped))
        self._keys_before.update(referenced_keys(page.chunk))
        self._keys_after.update(referenced_keys(kept))
        for part, sign in ((page, 1), (Page(page.queues, kept), -1)):
            at = row[part.chunk.runs["queue"]]
            np.add.at(self.rows_gone, at[at >= 0], sign * living_rows(self._state, part)[at >= 0])
        return kept

    def garbage(self) -> set[str]:
        """Data objects of which no run was kept, once all pages are divided."""
        return self._keys_before - self._keys_after


class _Walk:
    """Goes through the runs that are newer than the common version, and finds what stays of them. By row of the queue,
    ``ends`` are those of runs that stay although they are newer (they filled gaps, replaced older ones, or are below
    the begin inside the next commit), named as the columns of a queue."""

    def __init__(self, state: CatalogState, start: Divergence, pages: HistoryPages) -> None:
        """Prepare the walk from ``start``; ``pages`` and ``memory`` then go through the runs."""
        assert start.common is not None
        self._state, self._pages, self._phys, self._ends = state, pages, start.phys, start.ends
        self._common_version, self._common_phys = start.common.version, start.common.cursor.phys
        rows = {key: state.row_of(key) for key in (*start.ends, *repeated_offsets(state))}
        self._repeated = {key: row for key, row in rows.items() if row is not None}
        """Queues, with their rows, in which the broker used offsets twice: they ended earlier than at an earlier
        version, so all of their runs are read."""
        self.is_repeated = np.zeros(state.queue_count, bool)
        self.is_repeated[list(self._repeated.values())] = True
        self._has_ended = state.table["flags"] & QUEUE_SUPERSEDED != 0
        self.divided = DividedRuns(state, pages.cuts)
        self.ends = {
            name: np.zeros(state.queue_count, np.int64)
            for name in ("end_byte", "end_queue_offset", "end_phys", "max_store_timestamp")
        }

    def pages(self) -> list[PageRef]:
        """The entries of the new history's pages; those that change are put."""
        return [
            new for ref in self._state.pages for new in (self._page(ref) if self._is_read(ref) else [ref])
        ]

    def _is_read(self, ref: PageRef) -> bool:
        has_repeated = any(ref.first <= key <= ref.last for key in self._repeated)
        return has_repeated or ref.to_version > self._common_version

    def garbage(self) -> set[str]:
        """Data objects of which no run stays. Where only some queues end, pages of others name the same objects."""
        found = self.divided.garbage()
        others = [ref for ref in self._state.pages if not self._is_read(ref)] if self._ends and found else []
        for page in living_pages(self._pages.index, self._state, others):
            found.difference_update(referenced_keys(page.chunk))
        return found

    def memory(self) -> RunChunk:
        """The runs that stay, of those that are in no page yet."""
        return self._kept(unsorted_memory(self._state))

    def end_emptied(self, common: CatalogState) -> None:
        """Queues that end at an earlier offset and of which nothing stays continue at that offset. Other ones in which
        the broker used offsets twice end behind what the state ``common`` has of them and has expired since."""
        ends, minimums = self.ends["end_queue_offset"], self._state.table["min_queue_offset"]
        for key, row in self._repeated.items():
            before = common.queue(key)
            if key in self._ends:
                ends[row] = ends[row] or max(self._ends[key], 0)
            elif before is not None and not ends[row]:
                for name in (
                    self.ends if before["end_queue_offset"] <= minimums[row] else ("end_queue_offset",)
                ):
                    self.ends[name][row] = before[name]
                ends[row] = min(ends[row], minimums[row])

    def _page(self, ref: PageRef) -> list[PageRef]:
        """The entries of the pages that hold what stays of the page ``ref``: its own one, if all stays, or those of new
        pages, which are put."""
        stored = self._pages.index.page(ref)
        page = self._pages.index.living(self._state, stored)
        kept = self._kept(page)
        # Expired runs are still in the page. A queue's minimum offset may go down to the begin of the history, and
        # then they would be visible again: so all runs of the page are compared, not only the living ones.
        limits, bounds = self._limits(stored)
        if not (stored.chunk.runs[bounds.value[1]] > limits).any():
            return [ref]
        if not len(kept.runs):
            return []
        new_pages = cut(Page(page.queues, kept), self._pages.runs_max)
        return write_pages(new_pages, ref.level, (ref.from_version, ref.to_version), self._pages.put)

    def _limits(self, page: Page) -> tuple[Ints, Bounds]:
        """Up to where each run of ``page`` stays, and what these numbers are: queue offsets if only some queues end
        earlier, else commitlog offsets."""
        if not self._ends:
            return np.where(compared_runs(self._state, page), self._phys, ALL_PHYS), Bounds.PHYS
        ends = np.array([self._ends.get(key, ALL_PHYS) for key in page.queues], np.int64)
        return ends[page.chunk.runs["queue"]], Bounds.OFFSET

    def _kept(self, page: Page) -> RunChunk:
        """The runs of ``page``, all of them living, that stay in the new history. Notes where the newer ones end."""
        kept = self.divided.kept(page, *self._limits(page))
        self._note_ends(page.queues, kept.runs)
        return kept

    def note_expired(self, above: CatalogState) -> None:
        """Note where queues end whose messages expired after the commit that led to ``above``, inside which the new
        history begins: the log has them. Of an object that is deleted already nothing is noted if the history begins
        inside its run."""
        for page in living_runs(self._pages.index, above, above.version, above.version):
            runs = page.chunk.runs
            is_expired = runs["end_queue_offset"] <= _run_minimums(self._state, page)
            is_chosen = is_expired & (runs["version"] == above.version) & (runs["min_phys"] < self._phys)
            for at in np.flatnonzero(is_chosen).tolist():
                one = Page(page.queues, selected(page.chunk, np.arange(len(runs)) == at))
                with contextlib.suppress(NotFoundError):
                    below, _ = self._pages.cuts.divided(one, np.array([self._phys]), np.zeros(1, np.int64))
                    self._note_ends(page.queues, below.runs)

    def _note_ends(self, queues: Sequence[QueueKey], runs: Table) -> None:
        """Note where the newer ones of ``runs``, whose column ``queue`` indexes ``queues``, end."""
        row = self._state.directory.rows(queues, self._state.queue_count)
        at, is_newer = row[runs["queue"]], runs["version"] > self._common_version
        newer = runs[(is_newer | self.is_repeated[at]) & (at >= 0)]
        np.maximum.at(self.ends["end_byte"], row[newer["queue"]], newer["base_byte"] + newer["byte_count"])
        at = row[newer["queue"]]
        # A newer run below the common end has replaced older ones there, and does not move the queue's end. Commitlog
        # offsets of queues that ended with an earlier log do not compare.
        is_above = (newer["end_phys"] > self._common_phys) | self.is_repeated[at]
        above = newer[is_above & ~self._has_ended[at]]
        for name in ("end_queue_offset", "end_phys", "max_store_timestamp"):
            np.maximum.at(self.ends[name], row[above["queue"]], above[name])


def compared_runs(state: CatalogState, page: Page) -> NDArray[np.bool_]:
    """Which runs of ``page`` have physical offsets of the current log: not those of queues that ended with an earlier
    one."""
    rows = state.directory.rows(page.queues, len(state.table))
    is_compared = (rows < 0) | (state.table["flags"][rows] & QUEUE_SUPERSEDED == 0)
    found: NDArray[np.bool_] = is_compared[page.chunk.runs["queue"]]
    return found


def ends_below(state: CatalogState, phys: int, pages: HistoryPages) -> dict[QueueKey, int]:
    """The queues of ``state`` with messages of the current log at or above ``phys``, and the first offset of these;
    GOES for a generation that begins there."""
    found: dict[QueueKey, int] = {}
    is_above = (state.table["end_phys"] > phys) & (state.table["flags"] & QUEUE_SUPERSEDED == 0)
    for page in living_runs(pages.index, state) if is_above.any() else ():
        limits = np.where(compared_runs(state, page), phys, ALL_PHYS)
        _, above = pages.cuts.divided(page, limits, _run_minimums(state, page))
        for run in above.runs:
            key, offset = page.queues[int(run["queue"])], int(run["base_queue_offset"])
            is_new = key.generation > 0 and state.table["first_phys"][state.row_of(key)] >= phys
            found[key] = GOES if is_new else min(offset, found.get(key, offset))
    return found


def _run_minimums(state: CatalogState, page: Page) -> NDArray[np.int64]:
    """The minimum offset of the queue of each run."""
    of_runs: NDArray[np.int64] = Floors.of(state, page.queues).minimum[page.chunk.runs["queue"]]
    return of_runs


def living_rows(state: CatalogState, page: Page) -> NDArray[np.int64]:
    """Rows of each run above the minimum offset of its queue."""
    runs = page.chunk.runs
    rows: NDArray[np.int64] = runs["rows"] - rows_below(runs, _run_minimums(state, page))
    return rows


def _walked_back(base: CatalogState, state: CatalogState, start: Divergence, walk: _Walk) -> CatalogState:
    """``base``, the first state of the history that begins at ``start``, but for its queues and runs, with those of
    ``state`` that stay: what the common state has, and what ``walk``, which this carries out, finds above it."""
    common, above = start.common, start.above
    assert common is not None
    pages, memory = walk.pages(), walk.memory()
    walk.end_emptied(common)
    if above is not None:
        walk.note_expired(above)
    kept_rows = [
        row
        for row, (key, _) in enumerate(state.queues())
        if (common.row_of(key) is not None and start.ends.get(key) != GOES)
        or _ended(state, row)
        or walk.ends["end_phys"][row]
    ]
    new_row = np.full(state.queue_count, -1, np.int64)
    new_row[kept_rows] = np.arange(len(kept_rows))
    memory.runs["queue"] = new_row[memory.runs["queue"]]
    table = _restored(state, common, kept_rows, walk)
    gaps = state.gaps[new_row[state.gaps["queue"]] >= 0].copy()
    gaps["queue"] = new_row[gaps["queue"]]
    gaps = gaps[gaps["end_queue_offset"] <= table["end_queue_offset"][gaps["queue"]]]
    tombstones = state.tombstones[new_row[state.tombstones["queue"]] >= 0].copy()
    tombstones["queue"] = new_row[tombstones["queue"]]
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
    """The queue table of the new history: the queues in ``kept_rows`` of ``state``, which end as in the state
    ``common``, or with what ``walk`` found to stay above it; what maintenance changed since stays so."""
    table = state.table[kept_rows]
    newest = {key[:2]: key.generation for key in sorted(map(state.key_of, kept_rows))}
    """The newest generation that stays, of each queue."""
    for number, row in enumerate(kept_rows):
        key = state.key_of(row)
        before = common.queue(key)
        new = table[number]
        if _ended(state, row):
            continue
        # A queue is visible again if it was hidden only because of a later generation, which goes.
        stays_hidden = (
            state.current_generation(key.topic, key.queue_id) == key.generation
            or key.generation < newest[key[:2]]
        )
        hidden = QUEUE_HIDDEN if stays_hidden and new["flags"] & QUEUE_HIDDEN else 0
        new["row_count"] -= walk.divided.rows_gone[row]
        for name, ends in walk.ends.items():
            common_end = 0 if before is None or walk.is_repeated[row] else int(before[name])
            new[name] = max(common_end, int(ends[row]))
        new["min_queue_offset"] = min(int(new["min_queue_offset"]), int(new["end_queue_offset"]))
        if before is not None:
            new["flags"] &= QUEUE_EXPIRED | QUEUE_FILLED | QUEUE_SPARSE
            new["flags"] |= int(before["flags"]) | hidden
    return table
