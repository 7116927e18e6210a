"""Applies an append to queues: contiguity in offsets, bytes and the log, gaps, generations. Pure.

The chain, the cursor and the objects are in apply.py, replaced runs in replace_runs.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.commit import CommitDraft, CommitInvalidError
from tiered.catalog.queue_directory import QueueDirectory
from tiered.catalog.state import EMPTY_CHUNK, CatalogState, RunChunk
from tiered.model.queue import LMQ_PREFIX, QueueKey
from tiered.model.queue_roster import selection_of
from tiered.model.tables import (
    GAP_DTYPE,
    QUEUE_BATCH,
    QUEUE_HIDDEN,
    QUEUE_LMQ,
    QUEUE_STATE_DTYPE,
    QUEUE_SUPERSEDED,
    RunKind,
    Table,
    copied,
    picked,
)

Ints = NDArray[Any]

_FLAG_OF_KIND = np.array([0, QUEUE_BATCH, QUEUE_LMQ], np.uint32)
"""The flag of a queue that has a run of the kind (RunKind) with this number."""


def append_runs(
    state: CatalogState, draft: CommitDraft, version: int
) -> tuple[QueueDirectory, Table, Table, RunChunk]:
    """Apply the new runs and gaps of an append, which becomes ``version``. Returns the parts of ``state`` that they
    change: queue directory, queue table and gaps, and the new runs as a chunk. Raises CommitInvalidError unless each
    queue continues where its archived messages end."""
    runs, gaps = draft.runs, draft.gaps
    if not len(runs) and not len(gaps):
        return state.directory, state.table, state.gaps, EMPTY_CHUNK
    _check_runs(draft, version)
    rows, new_keys = _rows_of(state, draft)
    directory, table = state.directory, copied(state.table)
    succession: list[tuple[int, int]] = []
    if new_keys:
        succession = _succession(state, new_keys)
        directory, table = (
            state.directory.extended(len(table), new_keys),
            _with_new_rows(state.table, new_keys),
        )
    run_row, runs = _in_order(rows[runs["queue"]], runs)
    is_new = np.arange(len(table)) >= len(state.table)
    touched_row, ends = _check_offsets(directory, table, is_new, (run_row, runs), (rows[gaps["queue"]], gaps))
    if len(runs):
        _check_bytes_and_phys(directory, table, run_row, runs)
        _advance(table, is_new, run_row, runs)
    _end_generations(directory, table, succession)
    table["end_queue_offset"][touched_row] = ends
    runs["queue"] = run_row
    runs["version"] = version
    new_gaps = np.zeros(len(gaps), GAP_DTYPE)
    new_gaps[:] = gaps
    new_gaps["queue"] = rows[gaps["queue"]]
    chunk = RunChunk(runs, draft.objects, tuple(draft.object_keys))
    return directory, table, np.concatenate([state.gaps, new_gaps]) if len(gaps) else state.gaps, chunk


def _in_order(row: Ints, runs: Table) -> tuple[Ints, Table]:
    """Copies of ``runs`` and of ``row``, which is the row of the queue of each, sorted by row and first offset."""
    base = runs["base_queue_offset"]
    if bool(((row[1:] > row[:-1]) | ((row[1:] == row[:-1]) & (base[1:] >= base[:-1]))).all()):
        # Usually so: a writer lists runs by queue, and new queues got their rows in that order.
        return row, copied(runs)
    order = np.lexsort((base, row))
    return row[order], picked(runs, order)


def _check_runs(draft: CommitDraft, version: int) -> None:
    """Check what needs no state in a commit of ``version``: that the numbers of each run fit together, that it is
    inside the commitlog range of the commit, that every object has a run, and that no gap is empty. Raises
    CommitInvalidError."""
    runs = draft.runs
    offsets = runs["end_queue_offset"] - runs["base_queue_offset"]
    # Entries of an LMQ refer to messages of other queues, and have no bytes of their own.
    is_lmq = runs["kind"] == RunKind.LMQ
    is_wrong = (runs["rows"] < 1) | (runs["rows"] > offsets) | (runs["kind"] > RunKind.LMQ)
    is_wrong |= (runs["base_queue_offset"] < 0) | (runs["min_phys"] >= runs["end_phys"])
    is_wrong |= is_lmq & ((runs["byte_count"] != 0) | (runs["base_byte"] != 0) | (runs["rows"] != offsets))
    is_wrong |= ~is_lmq & (runs["byte_count"] < 1)
    if is_wrong.any():
        raise CommitInvalidError(
            f"catalog version {version} is invalid: the numbers of rows, offsets and bytes contradict one another in "
            f"its run {_show(draft, int(np.flatnonzero(is_wrong)[0]))}"
        )
    # A commit of an empty range adds records that were read again, for queues that had to end earlier. These may lie
    # anywhere below the range; that they follow the end of their queue is checked against the state.
    begin_phys = draft.from_phys if draft.to_phys > draft.from_phys else 0
    is_outside = (runs["min_phys"] < begin_phys) | (runs["end_phys"] > draft.to_phys)
    if is_outside.any():
        raise CommitInvalidError(
            f"catalog version {version} is invalid: its run {_show(draft, int(np.flatnonzero(is_outside)[0]))} is "
            f"outside its commitlog range [{draft.from_phys}, {draft.to_phys})"
        )
    has_runs = np.zeros(len(draft.objects), bool)
    has_runs[runs["object"]] = True
    if not has_runs.all():
        raise CommitInvalidError(
            f"catalog version {version} is invalid: it names an object that has none of its runs"
        )
    if len(draft.gaps) and bool((draft.gaps["begin_queue_offset"] >= draft.gaps["end_queue_offset"]).any()):
        raise CommitInvalidError(f"catalog version {version} is invalid: it records a gap of no offsets")


def _rows_of(state: CatalogState, draft: CommitDraft) -> tuple[Ints, list[QueueKey]]:
    """The row of each of the draft's queues in the queue table (-1: it is new and has no run), and those that are new
    and have runs: they get the rows after the present ones. Raises CommitInvalidError if a queue may not get
    messages."""
    count = len(state.table)
    rows = state.directory.rows(draft.queues, count)
    has_runs, has_gaps = np.zeros(len(draft.queues), bool), np.zeros(len(draft.queues), bool)
    has_runs[draft.runs["queue"]] = True
    has_gaps[draft.gaps["queue"]] = True
    gap_alone = np.flatnonzero(has_gaps & ~has_runs & (rows < 0))
    if len(gap_alone):
        raise CommitInvalidError(
            f"{draft.queues[int(gap_alone[0])]}: nothing was committed, as the commit records a gap in a queue that "
            "has no message"
        )
    _check_open(state, rows[(has_runs | has_gaps) & (rows >= 0)])
    # An earlier generation gets its row before the one that follows it.
    new = np.flatnonzero(has_runs & (rows < 0))
    queues = selection_of(draft.queues).taken(new)
    order = np.argsort(queues.roster.columns(queues.numbers)["generation"], kind="stable")
    new, keys = new[order], queues.roster.made(queues.numbers[order])
    if len(set(keys)) != len(keys):
        raise CommitInvalidError(f"catalog version {state.version} is invalid: it names a new queue twice")
    rows[new] = np.arange(count, count + len(keys))
    return rows, keys


def _with_new_rows(old: Table, keys: Sequence[QueueKey]) -> Table:
    """A copy of the queue table ``old`` with rows for ``keys``, queues that appear for the first time."""
    count = len(old)
    table = np.zeros(count + len(keys), QUEUE_STATE_DTYPE)
    table[:count] = old
    table["queue_id"][count:] = [key.queue_id for key in keys]
    table["generation"][count:] = [key.generation for key in keys]
    table["flags"][count:] = [QUEUE_LMQ if key.topic.startswith(LMQ_PREFIX) else 0 for key in keys]
    return table


def _succession(state: CatalogState, keys: Sequence[QueueKey]) -> list[tuple[int, int]]:
    """For each of the new queues ``keys`` that is a later generation (its topic was deleted and created again): its row
    in the queue table and that of the generation before. Raises CommitInvalidError where a generation is missing."""
    newest: dict[tuple[str, int], tuple[int, int]] = {}
    """By topic and queue id: the newest generation so far, and its row."""
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
                f"{key}: the commit adds this queue as a new generation, but the next one is generation {expected}"
            )
        newest[queue] = (key.generation, row)
        if previous is not None:
            pairs.append((row, previous[1]))
    return pairs


def _end_generations(directory: QueueDirectory, table: Table, succession: Sequence[tuple[int, int]]) -> None:
    """Hide the earlier generation of each pair (row, row of the generation before), in place. Raises CommitInvalidError
    if the later one begins in the commitlog before the earlier one ends."""
    for row, previous in succession:
        # Physical offsets of different log histories do not compare.
        if (
            not table["flags"][previous] & QUEUE_SUPERSEDED
            and table["first_phys"][row] < table["end_phys"][previous]
        ):
            raise CommitInvalidError(
                f"{directory.roster.keys[row]}: this new generation of the queue begins at commitlog offset "
                f"{table['first_phys'][row]}, which was archived before; nothing was committed"
            )
        table["flags"][previous] |= QUEUE_HIDDEN


def _check_open(state: CatalogState, rows: Ints) -> None:
    """Raise CommitInvalidError if one of the queues in these ``rows`` may not get messages: it is not the newest
    generation, or it ended when the broker's log was replaced."""
    flagged = rows[(state.table["flags"][rows] & (QUEUE_HIDDEN | QUEUE_SUPERSEDED)) != 0]
    for row in flagged.tolist():
        key = state.key_of(row)
        is_newest = state.current_generation(key.topic, key.queue_id) == key.generation
        # The queue of a deleted topic is hidden and the newest: a message shows that it exists again.
        if state.table["flags"][row] & QUEUE_SUPERSEDED or not is_newest:
            raise CommitInvalidError(
                f"{key} has ended: a later generation or log history took its place, and it gets no messages"
            )


def _check_offsets(
    directory: QueueDirectory, table: Table, is_new: Ints, runs: tuple[Ints, Table], gaps: tuple[Ints, Table]
) -> tuple[Ints, Ints]:
    """Check that the new runs and gaps of each queue continue its offsets without a hole; a new queue begins anywhere.

    ``runs`` and ``gaps``: the row of the queue of each, and the table of them; runs are sorted by row and offset.
    ``is_new``: by row. Returns the rows of these queues and the offset at which each then ends. Raises
    CommitInvalidError."""
    row = np.concatenate([runs[0], gaps[0]])
    begin = np.concatenate([runs[1]["base_queue_offset"], gaps[1]["begin_queue_offset"]])
    end = np.concatenate([runs[1]["end_queue_offset"], gaps[1]["end_queue_offset"]])
    if len(gaps[0]):
        order = np.lexsort((begin, row))
        row, begin, end = row[order], begin[order], end[order]
        is_gap = order >= len(runs[0])
    else:
        is_gap = np.zeros(len(row), bool)
    # Where each must begin: at the queue's end, or at the end of the run or gap before it in this commit.
    is_first = _firsts(row)
    expected = np.where(is_first, table["end_queue_offset"][row], np.concatenate([[0], end[:-1]]))
    begins_queue = is_first & is_new[row]
    expected[begins_queue] = begin[begins_queue]
    is_broken = expected != begin
    if is_broken.any():
        at = int(np.flatnonzero(is_broken)[0])
        raise CommitInvalidError(
            f"{directory.roster.keys[row[at]]}: the commit's {'gap' if is_gap[at] else 'run'} begins at queue offset "
            f"{begin[at]}, but the queue is archived up to {expected[at]}; nothing was committed"
        )
    gap_first = np.flatnonzero(begins_queue & is_gap)
    if len(gap_first):
        raise CommitInvalidError(
            f"{directory.roster.keys[row[gap_first[0]]]}: nothing was committed, as the commit records a gap before "
            "the queue's first message"
        )
    is_last = np.concatenate([is_first[1:], [True]])
    return row[is_last], end[is_last]


def _check_bytes_and_phys(directory: QueueDirectory, table: Table, row: Ints, runs: Table) -> None:
    """Check that the new ``runs`` (sorted by ``row``, which is the queue of each, and offset) continue the bytes of
    their queues without a break, and that no record is archived a second time. Raises CommitInvalidError."""
    is_first = _firsts(row)
    starts = np.flatnonzero(is_first)
    # Bytes that this commit has of a queue before each run: the sum so far, less the sum before the queue's first run.
    bytes_before = np.cumsum(runs["byte_count"]) - runs["byte_count"]
    bytes_before -= np.repeat(bytes_before[starts], np.diff(np.append(starts, len(row))))
    expected = table["end_byte"][row] + bytes_before
    is_broken = (runs["base_byte"] != expected) & (runs["kind"] != RunKind.LMQ)
    if is_broken.any():
        at = int(np.flatnonzero(is_broken)[0])
        raise CommitInvalidError(
            f"{directory.roster.keys[row[at]]}: nothing was committed, as the new messages do not follow the archived "
            f"ones: they begin at byte {runs['base_byte'][at]} of the queue, and the archive ends at {expected[at]}"
        )
    end_phys = np.where(is_first, table["end_phys"][row], np.concatenate([[0], runs["end_phys"][:-1]]))
    is_repeated = runs["min_phys"] < end_phys
    if is_repeated.any():
        at = int(np.flatnonzero(is_repeated)[0])
        raise CommitInvalidError(
            f"{directory.roster.keys[row[at]]}: nothing was committed, as the record at commitlog offset "
            f"{runs['min_phys'][at]} was archived before: the queue's records up to {end_phys[at]} are"
        )


def _advance(table: Table, is_new: Ints, row: Ints, runs: Table) -> None:
    """Move the queues of ``runs``, which are sorted by ``row`` (the queue of each) and offset, to the ends of these, in
    place: bytes, rows, commitlog position, times and flags of ``table``. The caller sets the end offsets, which gaps
    move too. ``is_new``: by row, whether a queue begins with this commit."""
    starts = np.flatnonzero(_firsts(row))
    touched = row[starts]
    last = np.append(starts[1:], len(row)) - 1
    table["end_byte"][touched] += np.add.reduceat(runs["byte_count"], starts)
    table["row_count"][touched] += np.add.reduceat(runs["rows"], starts)
    table["end_phys"][touched] = runs["end_phys"][last]
    newest = np.maximum.reduceat(runs["max_store_timestamp"], starts)
    begins = is_new[touched]
    table["max_store_timestamp"][touched] = np.where(
        begins, newest, np.maximum(newest, table["max_store_timestamp"][touched])
    )
    table["min_queue_offset"][touched[begins]] = runs["base_queue_offset"][starts[begins]]
    table["first_phys"][touched[begins]] = runs["min_phys"][starts[begins]]
    flags = np.bitwise_or.reduceat(_FLAG_OF_KIND[runs["kind"]], starts)
    # A new message shows that a deleted topic exists again.
    table["flags"][touched] &= ~np.uint32(QUEUE_HIDDEN)
    table["flags"][touched] |= flags


def _firsts(row: Ints) -> NDArray[np.bool_]:
    """Whether each of ``row``, which are sorted, is the first of its value."""
    first = np.ones(len(row), bool)
    first[1:] = row[1:] != row[:-1]
    return first


def _show(draft: CommitDraft, index: int) -> str:
    """The run number ``index`` of the draft as text for an error: its queue, its offsets there and in the commitlog."""
    run = draft.runs[index]
    return (
        f"of {draft.queues[run['queue']]}, offsets [{run['base_queue_offset']}, {run['end_queue_offset']}), "
        f"commitlog [{run['min_phys']}, {run['end_phys']}),"
    )
