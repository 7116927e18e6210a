"""Applies maintenance to queues: runs replaced, expired, filling a recorded gap, or before the first offset. Pure.

The chain and the objects are in apply.py, appends in append_runs.py.
"""

from dataclasses import dataclass

import numpy as np

from tiered.catalog.commit import CommitDraft, CommitInvalidError
from tiered.catalog.state import REMOVED_DTYPE, CatalogState, RunChunk, selected
from tiered.model.queue import QueueKey
from tiered.model.tables import GAP_DTYPE, QUEUE_EXPIRED, QUEUE_FILLED, QUEUE_SPARSE, RunKind, Table

Interval = tuple[int, int]


@dataclass(frozen=True)
class Replacement:
    """The parts of a state that replaced runs change: ``chunks`` without removed runs, and ``added``, the new ones."""

    table: Table
    gaps: Table
    tombstones: Table
    chunks: tuple[RunChunk, ...]
    added: RunChunk


def replace_runs(state: CatalogState, draft: CommitDraft, version: int) -> Replacement:
    """Apply the removed and the new runs of a maintenance commit, which becomes ``version``: returns the parts of
    ``state`` that they change. Raises CommitInvalidError."""
    rows = state.directory.rows(draft.queues, len(state.table))
    touched = np.concatenate([draft.runs["queue"], draft.removed["queue"]])
    unknown = touched[rows[touched] < 0]
    if len(unknown):
        raise CommitInvalidError(
            f"catalog version {version} is invalid: it replaces runs of {draft.queues[int(unknown[0])]}, a queue that "
            "is not in the archive"
        )
    removed = draft.removed.copy()
    removed["queue"], removed["removed_version"] = rows[draft.removed["queue"]], version
    chunks, tombstones = take_out(state, removed)
    runs = draft.runs.copy()
    runs["queue"], runs["version"] = rows[draft.runs["queue"]], version
    runs = np.sort(runs, order=["queue", "base_queue_offset"])
    table, gaps = state.table.copy(), state.gaps
    for row in np.union1d(runs["queue"], removed["queue"]).tolist():
        new, old = runs[runs["queue"] == row], removed[removed["queue"] == row]
        gaps = _replace_in_queue(state.key_of(row), row, table, gaps, new, old)
        if len(new):
            # Later versions no longer have later offsets only: searches must look at all pages.
            table["flags"][row] |= QUEUE_FILLED
    added = RunChunk(runs, draft.objects, tuple(draft.object_keys))
    return Replacement(table, gaps, tombstones, chunks, added)


def take_out(state: CatalogState, removed: Table) -> tuple[tuple[RunChunk, ...], Table]:
    """Remove the runs ``removed`` (REMOVED_DTYPE, by row of the queue) from ``state``.

    Returns the runs that are in no page yet, without these, and the tombstones (runs of pages that count as removed),
    with those of ``removed`` that are in pages. Raises CommitInvalidError unless each run exists exactly once."""
    identities = {_identity(run) for run in removed}
    if len(identities) != len(removed):
        raise CommitInvalidError(f"catalog version {state.version} is invalid: it removes a run twice")
    chunks, in_memory = [], set()
    for chunk in state.chunks:
        gone = [_identity(run) in identities for run in chunk.runs] if identities else []
        in_memory |= {_identity(run) for run in chunk.runs[gone]} if any(gone) else set()
        left = selected(chunk, ~np.array(gone)) if any(gone) else chunk
        if len(left.runs):
            chunks.append(left)
    dead = {_identity(run) for run in state.tombstones}
    in_pages = np.zeros(len(removed), bool)
    for index, run in enumerate(removed):
        identity = _identity(run)
        if identity in in_memory:
            continue
        version = int(run["version"])
        key = state.key_of(int(run["queue"]))
        # The pages are not read: one that covers the version and the queue is taken to have the run.
        if identity in dead or not any(
            page.from_version <= version <= page.to_version and page.first <= key <= page.last
            for page in state.pages
        ):
            raise CommitInvalidError(
                f"{key}: the run at queue offset {run['base_queue_offset']}, which the commit removes, no longer exists"
            )
        in_pages[index] = True
    new = removed[in_pages].astype(REMOVED_DTYPE)
    return tuple(chunks), np.concatenate([state.tombstones, new]) if len(new) else state.tombstones


def _identity(run: np.void) -> tuple[int, int, int, int]:
    """What identifies a run: its queue, its offsets, and the version that added it."""
    return int(run["queue"]), int(run["base_queue_offset"]), int(run["end_queue_offset"]), int(run["version"])


def _replace_in_queue(
    key: QueueKey, row: int, table: Table, gaps: Table, runs: Table, removed: Table
) -> Table:
    """Checks and applies the change of one queue: ``runs`` replace ``removed`` ones of the same offsets, or fill gaps,
    or come before its minimum offset; or ``removed`` ones are its oldest, which expire.

    Changes the queue's ``row`` of ``table`` in place, and returns the gaps of all queues. Raises CommitInvalidError."""
    added, gone = _intervals(key, runs), _intervals(key, removed)
    if added and gone:
        if added != gone or int(runs["rows"].sum()) != int(removed["rows"].sum()):
            raise CommitInvalidError(
                f"{key}: nothing was committed, as {runs['rows'].sum()} messages at the offsets {added} would replace "
                f"{removed['rows'].sum()} messages at {gone}"
            )
        return gaps
    if gone:
        table["row_count"][row] -= removed["rows"].sum()
        return _expire(key, row, table, gaps, gone)
    minimum, is_sparse = int(table["min_queue_offset"][row]), bool((runs["kind"] == RunKind.SPARSE).all())
    if is_sparse and len(added) == 1 and added[0][1] == minimum and not table["flags"][row] & QUEUE_EXPIRED:
        # Messages that the queue had before the archive began. Sparse runs have no place among the queue's bytes.
        table["min_queue_offset"][row], table["flags"][row] = added[0][0], table["flags"][row] | QUEUE_SPARSE
        table["row_count"][row] += runs["rows"].sum()
        return gaps
    for run in runs:
        gaps = _fill(key, row, gaps, int(run["base_queue_offset"]), int(run["end_queue_offset"]))
    # Their bytes come after all others of the queue, wherever their offsets are.
    expected = table["end_byte"][row] + np.cumsum(runs["byte_count"]) - runs["byte_count"]
    if bool(((runs["base_byte"] != expected) & (runs["kind"] != RunKind.LMQ)).any()):
        raise CommitInvalidError(
            f"{key}: the messages that fill a gap must follow the queue's last archived byte, "
            f"{table['end_byte'][row]}, and do not"
        )
    table["end_byte"][row] += runs["byte_count"].sum()
    table["row_count"][row] += runs["rows"].sum()
    table["max_store_timestamp"][row] = max(
        table["max_store_timestamp"][row], runs["max_store_timestamp"].max()
    )
    return gaps


def _intervals(key: QueueKey, runs: Table) -> list[Interval]:
    """The queue offsets [begin, end) that ``runs`` of the queue ``key`` cover, adjacent ones as one interval. Raises
    CommitInvalidError where runs overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(
        zip(runs["base_queue_offset"].tolist(), runs["end_queue_offset"].tolist(), strict=True)
    ):
        if begin >= end or (merged and begin < merged[-1][1]):
            raise CommitInvalidError(
                f"{key}: runs of the commit overlap at queue offset {begin}, or are empty"
            )
        if merged and begin == merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def _expire(key: QueueKey, row: int, table: Table, gaps: Table, gone: list[Interval]) -> Table:
    """Raise the minimum offset of the queue ``key`` over its oldest messages, the intervals ``gone``, and the gaps
    between and after them.

    Changes the queue's ``row`` of ``table`` in place, and returns the ``gaps`` without those. Raises CommitInvalidError
    if older messages than ``gone`` stay."""
    minimum, end = int(table["min_queue_offset"][row]), int(table["end_queue_offset"][row])
    gap_at = {int(gap["begin_queue_offset"]): index for index, gap in enumerate(gaps) if gap["queue"] == row}
    kept = np.ones(len(gaps), bool)
    while minimum < end:
        if gone and gone[0][0] == minimum:
            minimum = gone.pop(0)[1]
        elif minimum in gap_at:
            kept[gap_at[minimum]] = False
            minimum = int(gaps["end_queue_offset"][gap_at[minimum]])
        else:
            break
    if gone:
        raise CommitInvalidError(
            f"{key}: only the oldest messages can expire, but the commit removes the offsets {gone} and keeps {minimum}"
        )
    table["min_queue_offset"][row] = minimum
    return gaps[kept]


def _fill(key: QueueKey, row: int, gaps: Table, begin: int, end: int) -> Table:
    """The gaps after the queue ``key``, which has ``row``, got the messages [begin, end): the gap around them shrinks,
    or is cut in two. Raises CommitInvalidError if no gap contains them."""
    around = np.flatnonzero(
        (gaps["queue"] == row) & (gaps["begin_queue_offset"] <= begin) & (gaps["end_queue_offset"] >= end)
    )
    if not len(around):
        raise CommitInvalidError(
            f"{key}: the commit adds messages at the offsets [{begin}, {end}), which are in no recorded gap"
        )
    gap = gaps[around[0]]
    rest = np.array([gap, gap], GAP_DTYPE)
    rest["end_queue_offset"][0], rest["begin_queue_offset"][1] = begin, end
    rest = rest[rest["begin_queue_offset"] < rest["end_queue_offset"]]
    return np.concatenate([np.delete(gaps, around[0]), rest])
