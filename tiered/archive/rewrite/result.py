"""What a rewrite gets and gives beside its plan: the identity and keys of outputs, options, costs, and their check."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiered.archive.rewrite.plan import Candidates, RewritePlan, kept_share
from tiered.archive.rewrite.sources import IN_FLIGHT_BYTES
from tiered.errors import CorruptionError
from tiered.formats.keys import data_key, set_key
from tiered.formats.segment import BlockCodec
from tiered.model.tables import RunKind, Table, copied


@dataclass(frozen=True)
class OutputIdentity:
    """What the keys and footers of outputs contain. ``history``: the number of the log history; ``catalog_version``:
    the newest version that the writer has seen; ``created_ms``: now. ``first_attempt``: the number of the first attempt
    to put an object; no other writer of this epoch uses this or a higher one."""

    cluster: str
    broker: str
    epoch: int
    history: int
    catalog_version: int
    created_ms: int
    first_attempt: int


@dataclass(frozen=True)
class RewriteOptions:
    """``spool_directory`` holds up to ``spool_bytes_max`` of temporary files, encrypted if ``is_secret``;
    ``in_flight_bytes``: limit of reads in progress. ``wait`` sleeps for so many seconds. ``report`` gets the message
    bytes that are done so far; ``release`` is called when tables have been freed. ``announce`` gets the key of a second
    or later attempt before it is put, as its object is garbage if the process dies."""

    spool_directory: Path
    spool_bytes_max: int
    codec: BlockCodec = field(default_factory=BlockCodec)
    in_flight_bytes: int = IN_FLIGHT_BYTES
    release: Callable[[], object] = lambda: None
    wait: Callable[[float], object] = time.sleep
    report: Callable[[int], None] = lambda done_bytes: None
    announce: Callable[[str], object] = lambda key: None
    is_secret: bool = False


@dataclass
class RewriteCost:
    """Requests and bytes of a rewrite."""

    gets: int = 0
    bytes_read: int = 0
    bytes_sent: int = 0
    bytes_copied: int = 0

    def __add__(self, other: RewriteCost) -> RewriteCost:
        return RewriteCost(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


@dataclass(frozen=True)
class RewriteResult:
    """The runs (RUN_DTYPE) and objects (OBJECT_DTYPE) that were written. ``runs["queue"]`` indexes the queues of the
    candidates; ``runs["version"]`` is the planned output's. ``abandoned``: keys of PUTs without a response."""

    runs: Table
    objects: Table
    object_keys: list[str]
    abandoned: list[str]
    cost: RewriteCost


def output_keys(candidates: Candidates, plan: RewritePlan, identity: OutputIdentity) -> list[str]:
    """The key under which each output of a compaction is put first, so that all keys can be announced in the catalog
    before anything is written. A later attempt has another key."""
    first_run: dict[int, int] = {}
    for iteration in plan.iterations:
        for part in iteration:
            first_run.setdefault(part.output, int(part.ranges["run"][0]))
    return [
        key_of(candidates, plan, identity, output, first_run[output], output)
        for output in range(len(plan.outputs))
    ]


def spool_bytes(candidates: Candidates, plan: RewritePlan) -> int:
    """How many bytes of disk the outputs of ``plan`` take at most while they are written: objects of many queues are
    there side by side, objects of one queue one after the other."""
    if plan.copies:
        return 0  # the store copies whole objects
    alone = 0
    shared: dict[int, int] = {}
    sizes = candidates.runs["byte_count"] * kept_share(candidates, plan)
    for iteration in plan.iterations:
        for part in iteration:
            size = int(sizes[part.ranges["run"]].sum())
            if plan.outputs[part.output].is_set:
                shared[part.output] = shared.get(part.output, 0) + size
            else:
                alone = max(alone, size)
    return alone + max(shared.values(), default=0)


def check_totals(candidates: Candidates, plan: RewritePlan, new: Table) -> None:
    """Check, before a compaction is committed, that each queue has the same first offset, end, number of offsets, rows
    and bytes in the ``new`` runs as in those that the plan moves; after key compaction, which drops messages, no more
    rows and bytes. Raises CorruptionError."""
    moved, queues = plan.moved(len(candidates.runs)), len(candidates.queues)
    old = copied(candidates.runs)
    old["base_queue_offset"] = _begins(candidates, plan)
    before, after = _totals(old, moved, queues), _totals(new, np.ones(len(new), bool), queues)
    differs = before != after
    if plan.selection is not None:
        differs[:, 3:] = after[:, 3:] > before[:, 3:]
    changed = np.flatnonzero(differs.any(axis=1))
    if len(changed):
        number = int(changed[0])
        raise CorruptionError(
            f"the compaction is not committed, as it would change {candidates.queues[number]} from "
            f"{before[number].tolist()} to {after[number].tolist()} (first offset, end, offsets, rows, bytes)"
        )


def _begins(candidates: Candidates, plan: RewritePlan) -> NDArray[np.int64]:
    """The first offset of each of the candidates' runs. A plan with a selection drops what is below the floor of a
    queue (its minimum offset): there, no run begins below it."""
    base: NDArray[np.int64] = candidates.runs["base_queue_offset"]
    return base if plan.selection is None else np.maximum(base, candidates.floors[candidates.runs["queue"]])


def cover_holes(candidates: Candidates, plan: RewritePlan, new: Table) -> None:
    """Widen the sparse runs of ``new`` (key compaction dropped messages from them), in place, so that the new runs
    cover all offsets of the runs that the plan moves. Plain runs, which have all their offsets, stay as they are.

    If the offsets [10, 50) are moved, and the new runs are [12, 20) sparse, [30, 40) plain and [42, 45) sparse, the
    sparse runs become [10, 30) and [40, 50)."""
    for queue in np.unique(new["queue"][new["kind"] == RunKind.SPARSE]).tolist():
        of_queue = np.flatnonzero(new["queue"] == queue)
        of_queue = of_queue[np.argsort(new["base_queue_offset"][of_queue])]
        is_moved = plan.moved(len(candidates.runs)) & (candidates.runs["queue"] == queue)
        # The intervals [begin, end) of moved offsets: runs without a gap between them are one interval.
        begin = np.sort(_begins(candidates, plan)[is_moved])
        end = np.sort(candidates.runs["end_queue_offset"][is_moved])
        begins_interval = np.append(True, begin[1:] != end[:-1])
        begin, end = begin[begins_interval], end[np.append(begins_interval[1:], True)]
        base, last = new["base_queue_offset"][of_queue], new["end_queue_offset"][of_queue]
        interval = np.searchsorted(begin, base, side="right") - 1
        is_first = np.append(True, interval[1:] != interval[:-1])
        is_sparse = new["kind"][of_queue] == RunKind.SPARSE
        # The first run of an interval begins with it, others where the plain run before them ends. After a sparse run
        # they stay: that one is widened up to them.
        widened = np.where(is_first, begin[interval], np.where(np.roll(is_sparse, 1), base, np.roll(last, 1)))
        base = np.where(is_sparse, widened, base)
        following = np.where(np.append(is_first[1:], True), end[interval], np.append(base[1:], 0))
        new["base_queue_offset"][of_queue] = base
        new["end_queue_offset"][of_queue] = np.where(is_sparse, following, last)


def _totals(runs: Table, moved: NDArray[np.bool_], queues: int) -> NDArray[np.int64]:
    """For each of so many ``queues``, of the runs that are ``moved``: first offset, end, number of offsets, rows and
    bytes. The first offset of a queue without any is the largest integer, the others are 0."""
    queue = runs["queue"][moved].astype(np.intp)  # numpy is slow at other indexes, and at columns of a matrix
    begin, end, offsets, rows, byte_count = totals = np.zeros((5, queues), np.int64)
    base, last = runs["base_queue_offset"][moved], runs["end_queue_offset"][moved]
    begin[queue] = np.iinfo(np.int64).max
    np.minimum.at(begin, queue, base)
    np.maximum.at(end, queue, last)
    np.add.at(offsets, queue, last - base)
    np.add.at(rows, queue, runs["rows"][moved])
    np.add.at(byte_count, queue, runs["byte_count"][moved])
    return totals.T


def key_of(
    candidates: Candidates, plan: RewritePlan, identity: OutputIdentity, output: int, run: int, number: int
) -> str:
    """The key of the attempt ``number`` to put the output number ``output``, which begins in the run number ``run`` of
    the candidates."""
    attempt = identity.first_attempt + number
    row = candidates.runs[run]
    if plan.outputs[output].is_set:
        batch = f"{plan.first_version}_{plan.last_version}_{output}"
        return set_key(batch, identity.epoch, attempt)
    queue = candidates.queues[int(row["queue"])]
    return data_key(queue, int(row["base_queue_offset"]), identity.epoch, attempt)
