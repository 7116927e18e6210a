"""Applies maintenance to queues: runs replaced, expired, filling a recorded gap, or
before the begin. Pure.

The chain and the objects are in apply.py, appends in append_runs.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tiered.catalog.commit import CommitDraft, CommitInvalidError
from tiered.catalog.state import REMOVED_DTYPE, CatalogState, RunChunk, selected
from tiered.model.queue import QueueKey
from tiered.model.tables import GAP_DTYPE, QUEUE_EXPIRED, QUEUE_FILLED, QUEUE_SPARSE, RunKind, Table

Interval = tuple[int, int]


@dataclass(frozen=True)
class Replacement:
    """The changed parts of a state."""

    table: Table
    gaps: Table
    tombstones: Table
    chunks: tuple[RunChunk, ...]
    added: RunChunk


def replace_runs(state: CatalogState, draft: CommitDraft, version: int) -> Replacement:
    """The state's parts after a maintenance commit's ``removed`` and ``runs``."""
    rows = state.directory.rows(draft.queues, len(state.table))
    if bool((rows[draft.runs["queue"]] < 0).any()) or bool((rows[draft.removed["queue"]] < 0).any()):
        raise CommitInvalidError("the commit replaces runs of a queue that is not in the archive")
    removed = draft.removed.copy()
    removed["queue"], removed["removed_version"] = rows[draft.removed["queue"]], version
    chunks, tombstones = take_out(state, removed)
    runs = draft.runs.copy()
    runs["queue"], runs["version"] = rows[draft.runs["queue"]], version
    runs = np.sort(runs, order=["queue", "base_queue_offset"])
    table, gaps = state.table.copy(), state.gaps
    for row in np.union1d(runs["queue"], removed["queue"]).tolist():
        mine, gone = runs[runs["queue"] == row], removed[removed["queue"] == row]
        gaps = _replace_in_queue(state.key_of(row), row, table, gaps, mine, gone)
        if len(mine):
            table["flags"][row] |= QUEUE_FILLED
    added = RunChunk(runs, draft.objects, tuple(draft.object_keys))
    return Replacement(table, gaps, tombstones, chunks, added)


def take_out(state: CatalogState, removed: Table) -> tuple[tuple[RunChunk, ...], Table]:
    """Remove runs from memory; those in pages get a tombstone. Each must exist exactly once."""
    wanted = {_identity(run) for run in removed}
    if len(wanted) != len(removed):
        raise CommitInvalidError("the commit removes a run twice")
    chunks, found = [], set()
    for chunk in state.chunks:
        hit = [index for index, run in enumerate(chunk.runs) if _identity(run) in wanted] if wanted else []
        found |= {_identity(chunk.runs[index]) for index in hit}
        if hit:
            kept = np.ones(len(chunk.runs), bool)
            kept[hit] = False
            chunk = selected(chunk, kept)  # noqa: PLW2901
        if len(chunk.runs):
            chunks.append(chunk)
    dead = {_identity(run) for run in state.tombstones}
    in_pages = np.zeros(len(removed), bool)
    for index, run in enumerate(removed):
        identity = _identity(run)
        if identity in found:
            continue
        version = int(run["version"])
        key = state.key_of(int(run["queue"]))
        if identity in dead or not any(
            page.from_version <= version <= page.to_version and page.first <= key <= page.last
            for page in state.pages
        ):
            raise CommitInvalidError(f"{key}: the run at {run['base_queue_offset']} no longer exists")
        in_pages[index] = True
    new = removed[in_pages].astype(REMOVED_DTYPE)
    return tuple(chunks), np.concatenate([state.tombstones, new]) if len(new) else state.tombstones


def _identity(run: np.void) -> tuple[int, int, int, int]:
    return int(run["queue"]), int(run["base_queue_offset"]), int(run["end_queue_offset"]), int(run["version"])


def _replace_in_queue(
    key: QueueKey, row: int, table: Table, gaps: Table, runs: Table, removed: Table
) -> Table:
    """Checks the change of one queue: ``runs`` replace ``removed`` ones, fill gaps, or come before its minimum.
    Changes its row of ``table`` in place, and returns the gaps. Raises CommitInvalidError."""
    added, gone = _intervals(key, runs), _intervals(key, removed)
    if added and gone:
        if added != gone or int(runs["rows"].sum()) != int(removed["rows"].sum()):
            raise CommitInvalidError(
                f"{key}: the messages {added} are not those of {gone}, which they would replace; nothing was committed"
            )
        return gaps
    if gone:
        table["row_count"][row] -= removed["rows"].sum()
        return _expire(key, row, table, gaps, gone)
    minimum, is_begin = int(table["min_queue_offset"][row]), bool((runs["kind"] == RunKind.SPARSE).all())
    if is_begin and len(added) == 1 and added[0][1] == minimum and not table["flags"][row] & QUEUE_EXPIRED:
        # What the queue had before the archive began. Such runs have no place in the TieredCommitLog.
        table["min_queue_offset"][row], table["flags"][row] = added[0][0], table["flags"][row] | QUEUE_SPARSE
        table["row_count"][row] += runs["rows"].sum()
        return gaps
    for run in runs:
        gaps = _fill(key, row, gaps, int(run["base_queue_offset"]), int(run["end_queue_offset"]))
    expected = table["end_byte"][row] + np.cumsum(runs["byte_count"]) - runs["byte_count"]
    if bool(((runs["base_byte"] != expected) & (runs["kind"] != RunKind.LMQ)).any()):
        raise CommitInvalidError(f"{key}: bytes that fill a gap must be at the end of the TieredCommitLog")
    table["end_byte"][row] += runs["byte_count"].sum()
    table["row_count"][row] += runs["rows"].sum()
    table["max_store_timestamp"][row] = max(
        table["max_store_timestamp"][row], runs["max_store_timestamp"].max()
    )
    return gaps


def _intervals(key: QueueKey, runs: Table) -> list[Interval]:
    """Maximal intervals of queue offsets; runs must not overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(
        zip(runs["base_queue_offset"].tolist(), runs["end_queue_offset"].tolist(), strict=True)
    ):
        if begin >= end or (merged and begin < merged[-1][1]):
            raise CommitInvalidError(f"{key}: runs overlap at {begin}")
        if merged and begin == merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def _expire(key: QueueKey, row: int, table: Table, gaps: Table, gone: list[Interval]) -> Table:
    """Remove the oldest runs with the gaps between and after them; the minimum moves up."""
    floor, end = int(table["min_queue_offset"][row]), int(table["end_queue_offset"][row])
    own = {int(gap["begin_queue_offset"]): index for index, gap in enumerate(gaps) if gap["queue"] == row}
    kept = np.ones(len(gaps), bool)
    while floor < end:
        if gone and gone[0][0] == floor:
            floor = gone.pop(0)[1]
        elif floor in own:
            kept[own[floor]] = False
            floor = int(gaps["end_queue_offset"][own[floor]])
        else:
            break
    if gone:
        raise CommitInvalidError(f"{key}: only the oldest runs can expire, not {gone} above {floor}")
    table["min_queue_offset"][row] = floor
    return gaps[kept]


def _fill(key: QueueKey, row: int, gaps: Table, begin: int, end: int) -> Table:
    """Cut [begin, end) out of the gap that contains it."""
    around = np.flatnonzero(
        (gaps["queue"] == row) & (gaps["begin_queue_offset"] <= begin) & (gaps["end_queue_offset"] >= end)
    )
    if not len(around):
        raise CommitInvalidError(f"{key}: [{begin}, {end}) is in no recorded gap")
    gap = gaps[around[0]]
    rest = np.array([gap, gap], GAP_DTYPE)
    rest["end_queue_offset"][0], rest["begin_queue_offset"][1] = begin, end
    rest = rest[rest["begin_queue_offset"] < rest["end_queue_offset"]]
    return np.concatenate([np.delete(gaps, around[0]), rest])
