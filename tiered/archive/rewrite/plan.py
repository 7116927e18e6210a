"""What a rewrite is to do, as values: candidates, the ranges of rows of each iteration, and outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, Table

MIB = 1024 * 1024
READERS_MAX = 8
"""Sources that are read at a time."""
LMQ_ROWS_PER_CUT = 4096
"""LMQ rows have no bytes: their runs are cut at multiples of a column page."""

Selection = Callable[[QueueKey, NDArray[np.int64]], NDArray[np.bool_]]
"""Takes a queue and ascending queue offsets of its rows, and returns which of these rows are kept. Pure, and can be
pickled."""

RANGE_DTYPE = np.dtype(
    [
        ("run", "<i8"),  # index into the candidates' runs
        ("begin", "<i8"),  # in the run's bytes; of an LMQ: in its rows
        ("end", "<i8"),
    ]
)
"""A part of a run that one iteration moves to one output. The blocks that begin inside it belong to it."""


@dataclass(frozen=True)
class RewriteLimits:
    """Limits of outputs and of memory, in message bytes. ``block_bytes``: runs are cut at multiples of it; 0: never.
    ``row_bytes``, ``run_bytes``: memory that a row takes beside its message, and a run beside its rows.
    ``table_bytes``: memory of each run of the candidates, whether its messages are in memory or not;
    ``in_flight_bytes``: limit of reads in progress. ``object_rows_max``: limited as a reader fetches the columns of all
    rows of an object, 3 to 8 bytes each, before its first message."""

    memory_bytes: int = 128 * MIB
    block_bytes: int = 512 * 1024
    object_bytes_max: int = 128 * MIB
    object_rows_max: int = 131_072
    set_bytes_max: int = 128 * MIB
    row_bytes: int = 64
    run_bytes: int = 2048
    table_bytes: int = 0
    in_flight_bytes: int = 0


@dataclass(frozen=True)
class Candidates:
    """Runs (RUN_DTYPE) and objects (OBJECT_DTYPE) of whole versions of one log history, or of some queues in them.

    ``is_set`` (many queues), ``is_fixed`` (it must not be a source) and ``share`` have an entry for each object,
    ``floors`` (minimum offsets) one for each queue. ``share``: the part of the object's runs that is in ``runs``; if it
    is below 1, other runs of the catalog reference the object too. ``covers``: the first catalog version of each index
    file, ascending; no output has keys of two index files.
    """

    queues: Sequence[QueueKey]
    runs: Table
    objects: Table
    object_keys: Sequence[str]
    is_set: NDArray[np.bool_]
    floors: NDArray[np.int64]
    is_fixed: NDArray[np.bool_]
    share: NDArray[np.float64]
    covers: tuple[int, ...] = ()

    def cover(self, versions: NDArray[Any]) -> NDArray[Any]:
        """For each of ``versions``, the number of the index file that has its keys; 0: before the first one."""
        return np.searchsorted(np.array(self.covers, np.int64), versions, side="right")


@dataclass(frozen=True)
class PlannedOutput:
    """One object to write: of one queue, or a set (``is_set``) of many. ``version``: the catalog version that its runs
    get, the newest one of the plan that is in the index file of its sources."""

    is_set: bool
    ttl_class_days: int
    version: int


@dataclass(frozen=True)
class OutputPart:
    """What one iteration adds to output number ``output``: ``ranges`` (RANGE_DTYPE), in order."""

    output: int
    ranges: Table

    @property
    def message_bytes(self) -> int:
        """Bytes of its messages; of LMQs, which have none, rows."""
        return int((self.ranges["end"] - self.ranges["begin"]).sum())


@dataclass(frozen=True)
class RewritePlan:
    """Replaces ``sources`` (indexes of objects) by ``outputs``, in the catalog versions [first_version, last_version].
    A source that other runs reference stays.

    ``kept``: live runs of these versions that stay where they are. Other runs of the sources are below their floor.
    ``selection``: the rows that key compaction keeps; outputs then have sparse runs of these alone. None: all rows.
    """

    first_version: int
    last_version: int
    sources: NDArray[Any]
    kept: NDArray[Any]
    copies: bool = False
    """Outputs are whole sources, one behind the other: the store copies them."""
    outputs: list[PlannedOutput] = field(default_factory=list)
    iterations: list[list[OutputPart]] = field(default_factory=list)
    selection: Selection | None = None
    replaced: NDArray[np.bool_] | None = None
    """Which of the candidates' runs it replaces; None: all of the sources."""
    left: NDArray[np.int64] | None = None
    """How many rows of each of the candidates' runs ``selection`` keeps, about; None: all."""

    def moved(self, runs: int) -> NDArray[np.bool_]:
        """Which of the candidates' runs, of which there are so many, the outputs replace."""
        if self.replaced is not None:
            return self.replaced
        is_moved = np.zeros(runs, bool)
        for iteration in self.iterations:
            for part in iteration:
                is_moved[part.ranges["run"]] = True
        return is_moved


def kept_share(candidates: Candidates, plan: RewritePlan) -> NDArray[np.float64]:
    """Which part of each run ``plan`` keeps."""
    rows = np.maximum(candidates.runs["rows"], 1).astype(np.float64)
    share: NDArray[np.float64] = np.ones(len(rows))
    if plan.left is not None:
        np.minimum(share, plan.left / rows, out=share)
    return share


@dataclass(frozen=True)
class Sequences:
    """Sequences: runs of one queue of which each continues the one before. Sequence i is the candidates' runs
    ``order[first[i] : first[i + 1]]``; the other columns have an entry for each sequence."""

    order: NDArray[Any]
    first: NDArray[Any]
    byte_count: NDArray[Any]
    has_gap_behind: NDArray[np.bool_]
    queue: NDArray[Any]
    ttl_class: NDArray[Any]
    version: NDArray[Any]
    """The newest version of the plan that is in the index file of its runs."""

    def __len__(self) -> int:
        return len(self.byte_count)


def length_of(runs: Table) -> NDArray[Any]:
    """Length of each run in the unit of RANGE_DTYPE: bytes, or rows of an LMQ."""
    return np.where(runs["kind"] == RunKind.LMQ, runs["rows"], runs["byte_count"])


def sequence_bounds(runs: Table) -> list[tuple[int, int]]:
    """Where the sequences of ``runs``, which are sorted by queue and offset, begin and end: a sequence is runs of one
    queue of which each continues the one before."""
    before, after = runs[:-1], runs[1:]
    is_cut = ~((before["queue"] == after["queue"]) & continues(before, after))
    bounds = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(runs)]
    return [(first, last) for first, last in pairwise(bounds) if first < last]


_Columns = Table | dict[str, NDArray[Any]]


def continues(before: _Columns, after: _Columns) -> NDArray[np.bool_]:
    """Whether each run of ``after`` continues the run of ``before`` at the same place, of the same queue, so that both
    can be one run: in offsets, kind and bytes. A plain and a sparse run (with explicit offsets) can be a sparse one."""
    kind, next_kind = before["kind"], after["kind"]
    is_sparse = kind == RunKind.SPARSE
    continues = (after["base_queue_offset"] == before["end_queue_offset"]) & (
        (kind == next_kind)
        | (is_sparse & (next_kind == RunKind.PLAIN))
        | ((kind == RunKind.PLAIN) & (next_kind == RunKind.SPARSE))
    )
    continues &= (before["min_phys"] < 0) == (after["min_phys"] < 0)  # records of another log are apart
    # Sparse runs and LMQs have no contiguous place among the queue's bytes.
    all_continues: NDArray[np.bool_] = continues & (
        is_sparse | (kind == RunKind.LMQ) | (before["base_byte"] + before["byte_count"] == after["base_byte"])
    )
    return all_continues
