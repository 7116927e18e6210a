"""Applies an append to queues: contiguity in offsets, bytes and the log, gaps, generations. Pure.

The chain, the cursor and the objects are in apply.py, replaced runs in replace_runs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.commit import CommitDraft, CommitInvalidError
from tiered.catalog.queue_directory import QueueDirectory
from tiered.catalog.state import EMPTY_CHUNK, CatalogState, RunChunk
from tiered.model.queue import LMQ_PREFIX, QueueKey
from tiered.model.tables import (
    GAP_DTYPE,
    QUEUE_BATCH,
    QUEUE_HIDDEN,
    QUEUE_LMQ,
    QUEUE_STATE_DTYPE,
    QUEUE_SUPERSEDED,
    RunKind,
    Table,
)

Ints = NDArray[Any]

_FLAG_OF_KIND = np.array([0, QUEUE_BATCH, QUEUE_LMQ], np.uint32)


def append_runs(
    state: CatalogState, draft: CommitDraft, version: int
) -> tuple[QueueDirectory, Table, Table, RunChunk]:
    """Directory, queue table, gaps and the new chunk after an append."""
    runs, gaps = draft.runs, draft.gaps
    if not len(runs) and not len(gaps):
        return state.directory, state.table, state.gaps, EMPTY_CHUNK
    _check_runs(draft)
    rows, new_keys = _rows_of(state, draft)
    directory, table = state.directory, state.table.copy()
    succession: list[tuple[int, int]] = []
    if new_keys:
        succession = _succession(state, new_keys)
        directory, table = (
            state.directory.extended(len(table), new_keys),
            _with_new_rows(state.table, new_keys),
        )
    run_row = rows[runs["queue"]]
    run_row, runs = _in_order(run_row, runs)
    fresh = np.zeros(len(table), bool)
    fresh[len(state.table) :] = True
    ends_row, ends = _check_offsets(directory, table, fresh, (run_row, runs), (rows[gaps["queue"]], gaps))
    if len(runs):
        _check_bytes_and_phys(directory, table, run_row, runs)
        _advance(table, fresh, run_row, runs)
    _end_generations(directory, table, succession)
    table["end_queue_offset"][ends_row] = ends
    runs["queue"] = run_row
    runs["version"] = version
    new_gaps = np.zeros(len(gaps), GAP_DTYPE)
    new_gaps[:] = gaps
    new_gaps["queue"] = rows[gaps["queue"]]
    chunk = RunChunk(runs, draft.objects, tuple(draft.object_keys))
    return directory, table, np.concatenate([state.gaps, new_gaps]) if len(gaps) else state.gaps, chunk


def _in_order(row: Ints, runs: Table) -> tuple[Ints, Table]:
    """Both sorted by (row, base offset), copied."""
    base = runs["base_queue_offset"]
    if bool(((row[1:] > row[:-1]) | ((row[1:] == row[:-1]) & (base[1:] >= base[:-1]))).all()):
        return row, runs.copy()  # the queues were sorted when they were new
    order = np.lexsort((base, row))
    return row[order], runs[order]


def _check_runs(draft: CommitDraft) -> None:
    """Check what needs no state: each run alone, its place in the commit's range, and that every object has a run."""
    runs = draft.runs
    offsets = runs["end_queue_offset"] - runs["base_queue_offset"]
    is_lmq = runs["kind"] == RunKind.LMQ
    wrong = (runs["rows"] < 1) | (runs["rows"] > offsets) | (runs["kind"] > RunKind.LMQ)
    wrong |= (runs["base_queue_offset"] < 0) | (runs["min_phys"] >= runs["end_phys"])
    wrong |= is_lmq & ((runs["byte_count"] != 0) | (runs["base_byte"] != 0) | (runs["rows"] != offsets))
    wrong |= ~is_lmq & (runs["byte_count"] < 1)
    if wrong.any():
        raise CommitInvalidError(
            "rows, offsets and bytes do not fit together in the commit's run "
            f"{_show(draft, int(np.flatnonzero(wrong)[0]))}"
        )
    # A commit in place has records that were read again for queues that ended earlier: not below their ends.
    begin_phys = draft.from_phys if draft.to_phys > draft.from_phys else 0
    outside = (runs["min_phys"] < begin_phys) | (runs["end_phys"] > draft.to_phys)
    if outside.any():
        raise CommitInvalidError(
            f"run {_show(draft, int(np.flatnonzero(outside)[0]))} lies outside "
            f"the range [{draft.from_phys}, {draft.to_phys})"
        )
    used = np.zeros(len(draft.objects), bool)
    used[runs["object"]] = True
    if not used.all():
        raise CommitInvalidError("the commit names an object that has none of its runs")
    if len(draft.gaps) and bool((draft.gaps["begin_queue_offset"] >= draft.gaps["end_queue_offset"]).any()):
        raise CommitInvalidError("the commit records a gap of no offsets")


def _rows_of(state: CatalogState, draft: CommitDraft) -> tuple[Ints, list[QueueKey]]:
    """Rows of the draft's queues and the new queues among them; -1 where a queue has neither runs nor gaps."""
    count = len(state.table)
    rows = state.directory.rows(draft.queues, count)
    has_runs, has_gaps = np.zeros(len(draft.queues), bool), np.zeros(len(draft.queues), bool)
    has_runs[draft.runs["queue"]] = True
    has_gaps[draft.gaps["queue"]] = True
    if bool((has_gaps & ~has_runs & (rows < 0)).any()):
        raise CommitInvalidError("the commit records a gap in a queue that has no record")
    _check_open(state, rows[(has_runs | has_gaps) & (rows >= 0)])
    unknown = np.flatnonzero(has_runs & (rows < 0)).tolist()
    unknown.sort(key=lambda index: draft.queues[index].generation)
    keys = [draft.queues[index] for index in unknown]
    if len(set(keys)) != len(keys):
        raise CommitInvalidError("the commit names a new queue twice")
    rows[unknown] = np.arange(count, count + len(keys))
    return rows, keys


def _with_new_rows(old: Table, keys: Sequence[QueueKey]) -> Table:
    """The queue table with rows for queues that appear for the first time."""
    count = len(old)
    table = np.zeros(count + len(keys), QUEUE_STATE_DTYPE)
    table[:count] = old
    table["queue_id"][count:] = [key.queue_id for key in keys]
    table["generation"][count:] = [key.generation for key in keys]
    table["flags"][count:] = [QUEUE_LMQ if key.topic.startswith(LMQ_PREFIX) else 0 for key in keys]
    return table


def _succession(state: CatalogState, keys: Sequence[QueueKey]) -> list[tuple[int, int]]:
    """(row, row of the preceding generation) of new queues; each is the first generation or follows the newest."""
    newest: dict[tuple[str, int], tuple[int, int]] = {}
    pairs = []
    for row, key in enumerate(keys, len(state.table)):
        queue = key[:2]
        previous = newest.get(queue)
        if previous is None and (generation := state.current_generation(*queue)) is not None:
            previous_row = state.row_of(QueueKey(*queue, generation))
            assert previous_row is not None
            previous = generation, previous_row
        expected = 0 if previous is None else previous[0] + 1
        if key.generation != expected:
            raise CommitInvalidError(
                f"{key} is a new generation, and the next one of its queue is {expected}"
            )
        newest[queue] = (key.generation, row)
        if previous is not None:
            pairs.append((row, previous[1]))
    return pairs


def _end_generations(directory: QueueDirectory, table: Table, succession: Sequence[tuple[int, int]]) -> None:
    """A generation with a successor is hidden, and ends in the log before the successor begins."""
    for row, previous in succession:
        # Physical offsets of different log histories do not compare.
        if (
            not table["flags"][previous] & QUEUE_SUPERSEDED
            and table["first_phys"][row] < table["end_phys"][previous]
        ):
            raise CommitInvalidError(
                f"{directory.keys[row]}: its new generation begins at a commitlog offset that was archived before; "
                "nothing was committed"
            )
        table["flags"][previous] |= QUEUE_HIDDEN


def _check_open(state: CatalogState, rows: Ints) -> None:
    """Records go to the newest generation only, unless it ended with its log history."""
    flagged = rows[(state.table["flags"][rows] & (QUEUE_HIDDEN | QUEUE_SUPERSEDED)) != 0]
    for row in flagged.tolist():
        key = state.key_of(row)
        is_newest = state.current_generation(key.topic, key.queue_id) == key.generation
        if state.table["flags"][row] & QUEUE_SUPERSEDED or not is_newest:
            raise CommitInvalidError(
                f"{key} has ended: a later generation or log history took its place, and it gets no messages"
            )


def _check_offsets(
    directory: QueueDirectory, table: Table, fresh: Ints, runs: tuple[Ints, Table], gaps: tuple[Ints, Table]
) -> tuple[Ints, Ints]:
    """Runs and gaps of each queue must continue it without a hole. Returns the touched rows and their ends."""
    row = np.concatenate([runs[0], gaps[0]])
    begin = np.concatenate([runs[1]["base_queue_offset"], gaps[1]["begin_queue_offset"]])
    end = np.concatenate([runs[1]["end_queue_offset"], gaps[1]["end_queue_offset"]])
    if len(gaps[0]):
        order = np.lexsort((begin, row))
        row, begin, end = row[order], begin[order], end[order]
        is_gap = order >= len(runs[0])
    else:
        is_gap = np.zeros(len(row), bool)
    first = _firsts(row)
    expected = np.where(first, table["end_queue_offset"][row], np.concatenate([[0], end[:-1]]))
    starts_queue = first & fresh[row]
    expected[starts_queue] = begin[starts_queue]
    broken = expected != begin
    if broken.any():
        at = int(np.flatnonzero(broken)[0])
        raise CommitInvalidError(
            f"{directory.keys[row[at]]}: a {'gap' if is_gap[at] else 'run'} begins at queue offset {begin[at]}, "
            f"but the archive ends at {expected[at]}"
        )
    if (starts_queue & is_gap).any():
        raise CommitInvalidError("the commit records a gap where a queue begins")
    last = np.concatenate([first[1:], [True]])
    return row[last], end[last]


def _check_bytes_and_phys(directory: QueueDirectory, table: Table, row: Ints, runs: Table) -> None:
    """Check that each queue's bytes continue without a break, and that no record is archived a second time."""
    first = _firsts(row)
    starts = np.flatnonzero(first)
    before = np.cumsum(runs["byte_count"]) - runs["byte_count"]
    before -= np.repeat(before[starts], np.diff(np.append(starts, len(row))))
    expected = table["end_byte"][row] + before
    broken = (runs["base_byte"] != expected) & (runs["kind"] != RunKind.LMQ)
    if broken.any():
        at = int(np.flatnonzero(broken)[0])
        raise CommitInvalidError(
            f"{directory.keys[row[at]]}: a run begins at byte {runs['base_byte'][at]}, "
            f"but the TieredCommitLog ends at {expected[at]}"
        )
    floor = np.where(first, table["end_phys"][row], np.concatenate([[0], runs["end_phys"][:-1]]))
    reread = runs["min_phys"] < floor
    if reread.any():
        at = int(np.flatnonzero(reread)[0])
        raise CommitInvalidError(
            f"{directory.keys[row[at]]}: the record at commitlog offset {runs['min_phys'][at]} was archived before, as "
            f"the queue is archived up to {floor[at]}; nothing was committed"
        )


def _advance(table: Table, fresh: Ints, row: Ints, runs: Table) -> None:
    """Advance the touched rows of ``table``, in place, to the end of their runs; the caller sets offsets."""
    starts = np.flatnonzero(_firsts(row))
    touched = row[starts]
    last = np.append(starts[1:], len(row)) - 1
    table["end_byte"][touched] += np.add.reduceat(runs["byte_count"], starts)
    table["row_count"][touched] += np.add.reduceat(runs["rows"], starts)
    table["end_phys"][touched] = runs["end_phys"][last]
    newest = np.maximum.reduceat(runs["max_store_timestamp"], starts)
    begins = fresh[touched]
    table["max_store_timestamp"][touched] = np.where(
        begins, newest, np.maximum(newest, table["max_store_timestamp"][touched])
    )
    table["min_queue_offset"][touched[begins]] = runs["base_queue_offset"][starts[begins]]
    table["first_phys"][touched[begins]] = runs["min_phys"][starts[begins]]
    flags = np.bitwise_or.reduceat(_FLAG_OF_KIND[runs["kind"]], starts)
    # New records unhide the queue.
    table["flags"][touched] &= ~np.uint32(QUEUE_HIDDEN)
    table["flags"][touched] |= flags


def _firsts(row: Ints) -> NDArray[np.bool_]:
    first = np.ones(len(row), bool)
    first[1:] = row[1:] != row[:-1]
    return first


def _show(draft: CommitDraft, index: int) -> str:
    run = draft.runs[index]
    return (
        f"{draft.queues[run['queue']]} offsets [{run['base_queue_offset']}, {run['end_queue_offset']}) "
        f"phys [{run['min_phys']}, {run['end_phys']})"
    )
