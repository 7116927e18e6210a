"""Starts a new log history after the broker's log was replaced or truncated.

Records above the divergence point are superseded: they leave the visible offsets and their objects become garbage.
They stay findable in the commits that added them, which are kept. If the archive and the new log share no record,
nothing is removed: every queue ends hidden, and its next record starts a new generation.

Reads pages and the state at the common version. The uploader finds the divergence point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.commit import CommitInvalidError
from tiered.catalog.deletions import PendingDeletion, Reason
from tiered.catalog.pages import Page, PutPage, RunIndex, cut, referenced_keys, write_pages
from tiered.catalog.queue_directory import QueueDirectory
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
from tiered.model.tables import QUEUE_EXPIRED, QUEUE_FILLED, QUEUE_HIDDEN, QUEUE_SUPERSEDED, Table

Ints = NDArray[Any]


@dataclass(frozen=True)
class Divergence:
    """Where the new log history begins. ``common``: the state at the last common version, or None."""

    phys: int
    common: CatalogState | None
    root_key: str
    now_ms: int


def begin_history(
    state: CatalogState, start: Divergence, index: RunIndex, put: PutPage, runs_max: int
) -> CatalogState:
    """The first state of the new log history, one version after ``state``; its put id is not known yet.

    Raises CommitInvalidError when ``start`` is not on the current log history, or inside a run that compaction joined.
    """
    version = state.version + 1
    common_version = 0 if start.common is None else start.common.version
    if start.common is not None and not (start.common.started and start.common.cursor.phys == start.phys):
        raise CommitInvalidError(f"version {common_version} does not end at {start.phys}")
    if any(history.common_version < common_version < history.version for history in state.log_histories):
        raise CommitInvalidError(f"version {common_version} belongs to an abandoned log history")
    history = LogHistory(state.cursor.history + 1, start.phys, common_version, version, start.root_key)
    check = LogCheck(start.phys, start.phys, 0) if start.common is None else start.common.cursor.check
    base = replace(
        state,
        version=version,
        put_id="",
        cursor=LogCursor(history.number, start.phys, check),
        started=True,
        advanced_ms=start.now_ms,
        created_ms=start.now_ms,
        root=RootRef(start.root_key, version),
        log_histories=(*state.log_histories, history),
    )
    if start.common is None:
        table = state.table.copy()
        table["flags"] |= QUEUE_HIDDEN | QUEUE_SUPERSEDED
        after = replace(base, table=table)
        superseded: list[str] = []
    else:
        after, superseded = _walked_back(base, state, start.common, _Cut(index, put, runs_max, start.phys))
    replaced = sorted(state.catalog_keys() - after.catalog_keys())
    pending_deletions = dict(state.pending_deletions)
    for keys, reason in ((superseded, Reason.DIVERGED), (replaced, Reason.REPLACED)):
        for key in keys:
            pending_deletions.setdefault(key, PendingDeletion(start.now_ms, version, reason))
    return replace(after, pending_deletions=pending_deletions)


@dataclass(frozen=True)
class _Cut:
    index: RunIndex
    put: PutPage
    runs_max: int
    phys: int


def _walked_back(
    base: CatalogState, state: CatalogState, common: CatalogState, at: _Cut
) -> tuple[CatalogState, list[str]]:
    """``base`` without the part above the cut, and the keys of unreferenced objects."""
    kept_rows = [
        row
        for row, (key, _) in enumerate(state.queues())
        if common.row_of(key) is not None or _ended(state, row)
    ]
    row_number = np.full(state.queue_count, -1, np.int64)
    row_number[kept_rows] = np.arange(len(kept_rows))
    ended = np.flatnonzero(state.table["flags"] & QUEUE_SUPERSEDED)
    pages, lost = _cut_pages(state, common.version, at)
    chunks = []
    for chunk in state.chunks:
        above = _above(chunk.runs, at.phys, np.isin(chunk.runs["queue"], ended))
        lost += _only_in(chunk, above)
        kept = selected(chunk, ~above)
        kept.runs["queue"] = row_number[kept.runs["queue"]]
        if len(kept.runs):
            chunks.append(kept)
    table = _restored(state, common, kept_rows, _since(state, common, at))
    gaps = state.gaps[row_number[state.gaps["queue"]] >= 0].copy()
    gaps["queue"] = row_number[gaps["queue"]]
    gaps = gaps[gaps["end_queue_offset"] <= table["end_queue_offset"][gaps["queue"]]]
    tombstones = state.tombstones[row_number[state.tombstones["queue"]] >= 0].copy()
    tombstones["queue"] = row_number[tombstones["queue"]]
    after = replace(
        base,
        directory=QueueDirectory([state.key_of(row) for row in kept_rows]),
        table=table,
        gaps=gaps,
        tombstones=tombstones,
        chunks=tuple(chunks),
        pages=tuple(pages),
    )
    return after, sorted(set(lost))


def _ended(state: CatalogState, row: int) -> bool:
    """Whether the queue ended with an earlier log history: its physical offsets do not compare."""
    return bool(state.table["flags"][row] & QUEUE_SUPERSEDED)


def _above(runs: Table, phys: int, ended: Ints) -> Ints:
    """Which runs are above the cut; never those of queues that ``ended`` with an earlier log history."""
    straddling = ~ended & (runs["min_phys"] < phys) & (runs["end_phys"] > phys)
    if straddling.any():
        raise CommitInvalidError(
            f"the broker's log diverges at {phys} from the archive, inside runs that compaction joined",
            hint="start the broker with its newer log, or archive to another archive.url; this archive stays readable",
        )
    above: Ints = ~ended & (runs["min_phys"] >= phys)
    return above


def _page_above(state: CatalogState, page: Page, phys: int) -> Ints:
    rows = [state.row_of(key) for key in page.queues]
    ended = np.array([row is not None and _ended(state, row) for row in rows], bool)
    return _above(page.chunk.runs, phys, ended[page.chunk.runs["queue"]])


def _cut_pages(state: CatalogState, common_version: int, at: _Cut) -> tuple[list[PageRef], list[str]]:
    """Page refs without superseded runs: pages that contain some are rewritten."""
    refs: list[PageRef] = []
    lost: list[str] = []
    for ref in state.pages:
        if ref.to_version <= common_version:
            refs.append(ref)
            continue
        page = at.index.page(ref)
        above = _page_above(state, page, at.phys)
        if not above.any():
            refs.append(ref)
            continue
        lost += _only_in(page.chunk, above)
        if not above.all():
            rest = Page(page.queues, replace(page.chunk, runs=page.chunk.runs[~above]))
            refs += write_pages(cut(rest, at.runs_max), ref.level, (ref.from_version, ref.to_version), at.put)
    return refs, lost


def _only_in(chunk: RunChunk, above: Ints) -> list[str]:
    """Keys of objects that only runs in ``above`` reference."""
    if not above.any():
        return []
    gone = set(referenced_keys(Page((), replace(chunk, runs=chunk.runs[above]))))
    return sorted(gone - set(referenced_keys(Page((), replace(chunk, runs=chunk.runs[~above])))))


@dataclass(frozen=True)
class _Since:
    """Changes after the common version, by queue row: consume queue rows removed now, and the end in bytes of runs
    that stay although they are newer (they filled gaps, or replaced older runs)."""

    rows_gone: dict[int, int]
    end_byte: dict[int, int]


def _since(state: CatalogState, common: CatalogState, at: _Cut) -> _Since:
    since = _Since({}, {})
    ended = np.flatnonzero(state.table["flags"] & QUEUE_SUPERSEDED)
    for chunk in state.chunks:
        above = _above(chunk.runs, at.phys, np.isin(chunk.runs["queue"], ended))
        _count(since, range(state.queue_count), chunk.runs, above, common.version)
    for ref in state.pages:
        if ref.to_version > common.version:
            page = at.index.living(state, at.index.page(ref))
            rows = [state.row_of(key) for key in page.queues]
            _count(since, rows, page.chunk.runs, _page_above(state, page, at.phys), common.version)
    return since


def _count(since: _Since, rows: Sequence[int | None], runs: Table, above: Ints, common_version: int) -> None:
    for run in runs[above]:
        row = rows[int(run["queue"])]
        if row is not None:
            since.rows_gone[row] = since.rows_gone.get(row, 0) + int(run["rows"])
    for run in runs[~above & (runs["version"] > common_version)]:
        row = rows[int(run["queue"])]
        if row is not None:
            since.end_byte[row] = max(since.end_byte.get(row, 0), int(run["base_byte"] + run["byte_count"]))


def _restored(state: CatalogState, common: CatalogState, kept_rows: Sequence[int], since: _Since) -> Table:
    """Queue rows that end as at the common version, with later maintenance applied."""
    table = state.table[kept_rows]
    for number, row in enumerate(kept_rows):
        key = state.key_of(row)
        before = common.queue(key)
        if before is None or _ended(state, row):
            continue
        now = table[number]
        is_newest = state.current_generation(key.topic, key.queue_id) == key.generation
        hidden = QUEUE_HIDDEN if is_newest and now["flags"] & QUEUE_HIDDEN else 0
        now["row_count"] -= since.rows_gone.get(row, 0)
        for name in ("end_queue_offset", "end_phys", "max_store_timestamp"):
            now[name] = before[name]
        now["end_byte"] = max(int(before["end_byte"]), since.end_byte.get(row, 0))
        now["min_queue_offset"] = min(int(now["min_queue_offset"]), int(before["end_queue_offset"]))
        now["flags"] = int(before["flags"]) | hidden | (int(now["flags"]) & (QUEUE_EXPIRED | QUEUE_FILLED))
    return table
