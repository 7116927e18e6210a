"""The messages of a log history that a later one superseded, as a state that readers can open.

They are found in the commits that added them, which are kept; pages and roots of that time may be deleted. Where
compaction joined them they are found in pages of that time, which are garbage as the joined objects are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.append_runs import append_runs
from tiered.catalog.catalog_reader import load, read_commit
from tiered.catalog.commit import CommitKind
from tiered.catalog.deletions import PendingDeletion, Reason, read_list
from tiered.catalog.floors import raise_floors
from tiered.catalog.joined_objects import memory_pages
from tiered.catalog.pages import Page, RunIndex
from tiered.catalog.queue_directory import QueueDirectory
from tiered.catalog.replace_runs import replace_runs
from tiered.catalog.state import REMOVED_DTYPE, CatalogState, RunChunk, joined, selected
from tiered.errors import NotFoundError
from tiered.formats.keys import is_compacted, object_of
from tiered.model.queue import QueueKey
from tiered.model.tables import OBJECT_DTYPE, QUEUE_HIDDEN, QUEUE_SUPERSEDED, RUN_DTYPE, Table
from tiered.object_store.interface import ObjectStore

FIRST_HISTORY = 1


def superseded_histories(state: CatalogState) -> list[int]:
    """Numbers of the log histories of which a later one superseded messages."""
    last = max((history.number for history in state.log_histories), default=FIRST_HISTORY)
    return [number for number in range(FIRST_HISTORY, last) if _cuts(state, number)]


def superseded_state(store: ObjectStore, state: CatalogState, number: int) -> CatalogState:
    """What log history ``number`` had and later ones do not. Reads the commits that added it.

    Raises NotFoundError when there is none.
    """
    cuts = _cuts(state, number)
    if not cuts:
        raise NotFoundError(
            f"no messages of log history {number} were superseded",
            hint="`tiered ls --diverged` lists log histories; `tiered ls --hidden` lists queues that ended with theirs",
        )
    lowest = min(cuts, key=lambda cut: (cut.low, cut.phys))
    common = before = load(store, version=lowest.low)
    for version in range(lowest.low + 1, lowest.end):
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
    runs = before.memory.runs
    above = selected(before.memory, (runs["version"] > lowest.low) & (runs["min_phys"] >= lowest.phys))
    return _only(before, common, _overlaid(before, above, _joined_runs(store, state, number)), lowest.end - 1)


def superseded_pages(store: ObjectStore, state: CatalogState, number: int) -> set[str]:
    """Objects of the pages in which joined messages of log history ``number`` are found."""
    return {
        object_of(ref.key)
        for cut in _cuts(state, number)
        for ref in load(store, version=cut.last_version).pages
        if ref.to_version > cut.low
    }


def diverged_deletions(store: ObjectStore, state: CatalogState) -> dict[str, PendingDeletion]:
    """The pending deletions of superseded messages, kept ones too; reads the lists of them."""
    found = {key: entry for key, entry in state.pending_deletions.items() if entry.reason == Reason.DIVERGED}
    for listed in state.deletion_lists:
        if listed.reason == Reason.DIVERGED:
            found |= read_list(store, listed)
    return found


def shown_share(runs: Table, min_queue_offset: NDArray[Any]) -> NDArray[np.float64]:
    """Which part of each run's offsets is at or above its queue's minimum."""
    begin = np.clip(min_queue_offset, runs["base_queue_offset"], runs["end_queue_offset"])
    share: NDArray[np.float64] = (runs["end_queue_offset"] - begin) / (
        runs["end_queue_offset"] - runs["base_queue_offset"]
    )
    return share


class _Cut(NamedTuple):
    """A later log history superseded runs above ``phys`` that versions (``low``, ``end``) added, and that
    ``last_version`` named."""

    low: int
    end: int
    phys: int
    last_version: int


def _cuts(state: CatalogState, number: int) -> list[_Cut]:
    begins = {history.number: history.version for history in state.log_histories}
    if number + 1 not in begins:
        return []
    cuts = [
        _Cut(
            max(begins.get(number, 0), later.common_version),
            begins[number + 1],
            later.begin_phys,
            later.version - 1,
        )
        for later in state.log_histories
        if later.number > number and later.common_version > 0
    ]
    return [cut for cut in cuts if cut.low + 1 < cut.end]


def _joined_runs(store: ObjectStore, state: CatalogState, number: int) -> Page:
    """Runs of joined objects that are pending deletions of superseded messages; of those with one begin the longest,
    which has the rows of the others."""
    pending = {key for key in diverged_deletions(store, state) if is_compacted(key)}
    longest: dict[tuple[QueueKey, int], tuple[np.void, np.void, str]] = {}
    for cut in _cuts(state, number) if pending else ():
        for page in _readable_pages(store, load(store, version=cut.last_version), cut.low):
            chunk, runs = page.chunk, page.chunk.runs
            is_mine = (
                (runs["version"] > cut.low) & (runs["version"] < cut.end) & (runs["end_phys"] > cut.phys)
            )
            for run in runs[is_mine]:
                place = chunk.objects[int(run["object"])]
                key = chunk.object_keys[int(place["key"])]
                identity = page.queues[int(run["queue"])], int(run["base_queue_offset"])
                known = longest.get(identity)
                if key in pending and (known is None or run["rows"] > known[0]["rows"]):
                    longest[identity] = run, place, key
    return _page_of(longest)


def _page_of(found: dict[tuple[QueueKey, int], tuple[np.void, np.void, str]]) -> Page:
    queues = sorted({queue for queue, _ in found})
    numbers = {queue: number for number, queue in enumerate(queues)}
    places = {key: place for _, place, key in found.values()}
    keys = {key: number for number, key in enumerate(places)}
    runs, objects = np.zeros(len(found), RUN_DTYPE), np.zeros(len(places), OBJECT_DTYPE)
    for at, ((queue, _), (run, _, key)) in enumerate(sorted(found.items(), key=lambda item: item[0])):
        runs[at] = run
        runs["queue"][at], runs["object"][at] = numbers[queue], keys[key]
    for number, place in enumerate(places.values()):
        objects[number] = place
        objects["key"][number] = number
    return Page(queues, RunChunk(runs, objects, tuple(places)))


def _readable_pages(store: ObjectStore, state: CatalogState, version: int) -> Iterator[Page]:
    """Living runs in memory, and in pages with versions above ``version`` that are not deleted."""
    index = RunIndex(store)
    for ref in state.pages:
        if ref.to_version > version:
            with suppress(NotFoundError):
                yield index.living(state, index.read_page(ref))
    yield from memory_pages(state)


def _overlaid(state: CatalogState, added: RunChunk, joined_runs: Page) -> RunChunk:
    """``added`` with ``joined_runs`` in the place of the runs that they were joined of."""
    rows = state.directory.rows(joined_runs.queues, len(state.table))
    chunk = joined_runs.chunk
    if not len(chunk.runs):
        return added
    runs = chunk.runs.copy()
    runs["queue"] = rows[chunk.runs["queue"]]
    runs = np.sort(runs, order=["queue", "base_queue_offset"])
    is_joined = _inside(added.runs, runs)
    return joined((selected(added, ~is_joined), RunChunk(runs, chunk.objects, chunk.object_keys)))


def _inside(runs: Table, others: Table) -> NDArray[np.bool_]:
    """Which of ``runs`` lie in one of ``others``, which are sorted by queue and base offset."""
    found = np.zeros(len(runs), np.bool_)
    for queue in np.unique(others["queue"]).tolist():
        mine, theirs = np.flatnonzero(runs["queue"] == queue), others[others["queue"] == queue]
        at = np.searchsorted(theirs["base_queue_offset"], runs["base_queue_offset"][mine], side="right") - 1
        found[mine] = (at >= 0) & (theirs["end_queue_offset"][at] >= runs["end_queue_offset"][mine])
    return found


def _only(state: CatalogState, common: CatalogState, chunk: RunChunk, version: int) -> CatalogState:
    """``state`` at ``version`` with only the superseded runs of ``chunk``, and the queues that have some. Joined runs
    may have rows of ``common``: these are below the minimum of their queue."""
    rows, chunk.runs["queue"] = np.unique(chunk.runs["queue"], return_inverse=True)
    runs = chunk.runs
    queues = [state.key_of(int(row)) for row in rows]
    table = state.table[rows].copy()
    table["flags"] &= ~np.uint32(QUEUE_HIDDEN | QUEUE_SUPERSEDED)
    first = np.full(len(rows), np.iinfo(np.int64).max)
    np.minimum.at(first, runs["queue"], runs["base_queue_offset"])
    known = [common.queue(queue) for queue in queues]
    ends = np.array([0 if row is None else int(row["end_queue_offset"]) for row in known], np.int64)
    end = ends[runs["queue"]]
    has_common = (runs["base_queue_offset"] < end) & (runs["end_queue_offset"] > end)
    np.maximum.at(first, runs["queue"][has_common], end[has_common])
    table["min_queue_offset"] = np.maximum(table["min_queue_offset"], first)
    shown = np.rint(runs["rows"] * shown_share(runs, table["min_queue_offset"][runs["queue"]]))
    table["row_count"] = np.bincount(runs["queue"], shown, minlength=len(rows))
    number = np.full(state.queue_count, -1, np.int64)
    number[rows] = np.arange(len(rows))
    gaps = state.gaps[number[state.gaps["queue"]] >= 0].copy()
    gaps["queue"] = number[gaps["queue"]]
    gaps = gaps[gaps["begin_queue_offset"] >= table["min_queue_offset"][gaps["queue"]]]
    return replace(
        state,
        version=version,
        directory=QueueDirectory(queues),
        table=table,
        gaps=gaps,
        chunks=(chunk,) if len(chunk.runs) else (),
        pages=(),
        tombstones=np.zeros(0, REMOVED_DTYPE),
        indexes=(),
        log_histories=(),
    )
