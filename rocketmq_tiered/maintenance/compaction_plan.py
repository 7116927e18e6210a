"""Plans object compaction: which runs become which objects, in iterations of bounded memory.

Pure; tables in, plan out. A plan rewrites or joins. Rewriting turns stream set objects, and small stream objects, into
stream objects and few stream set objects. Runs are ordered by queue and offset. Runs that follow one another without a
gap are one *sequence*: it becomes a stream object (SO) if it has more than the split size, or if a gap follows it; all
others share stream set objects (SSOs). An iteration takes sequences until memory is full; what does not fit begins the
next one. An SO ends with its iteration, an SSO continues.

Joining makes larger SOs of the small ones of a queue, of at most a day each; the store copies them.

What compaction wrote is moved again only as a small part of a round (``growth_min``), so that a byte is written twice
in years; or when most of its messages are dead.

A plan covers whole versions of one log history, or some queues in them, and needs no request: the tables of the catalog
are enough. A run below the floor of its queue is in no output.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.archive.rewrite.iterations import with_iterations
from tiered.archive.rewrite.plan import (
    RANGE_DTYPE,
    Candidates,
    OutputPart,
    PlannedOutput,
    RewriteLimits,
    RewritePlan,
    Sequences,
    continues,
    length_of,
)
from tiered.formats.keys import is_compacted
from tiered.model.tables import RunKind, Table, concatenated, picked

MIB = 1024 * 1024
DAY_MS = 24 * 3600 * 1000

_SEQUENCE_COLUMNS = (
    "queue",
    "kind",
    "base_queue_offset",
    "end_queue_offset",
    "base_byte",
    "byte_count",
    "version",
    "min_phys",
)


@dataclass(frozen=True)
class CompactionLimits(RewriteLimits):
    """``runs_max``: of a round, unless one sequence of pages has more. ``sources_min``: objects that are joined at
    least. ``growth_min``: what an earlier compaction wrote is moved only among so many times its bytes; 1:
    always. ``dead_share_min``: it moves sets of which so much is below floors; above 1: none."""

    split_bytes: int = 8 * MIB
    runs_max: int = 1 << 20
    outputs_max: int = 10_000
    set_queues_max: int = 20_000
    joined_bytes_min: int = 64 * MIB
    sources_min: int = 2
    growth_min: int = 1
    dead_share_min: float = 2.0
    is_alone: Callable[[str], bool] | None = None
    """Topics whose queues share no object; None: there are none."""


def plan_rewrite(candidates: Candidates, limits: CompactionLimits) -> RewritePlan | None:
    """Plan which small objects, and objects of many queues, are rewritten to fewer; None when there is nothing to gain.
    A sequence of contiguous rows gets an object of its own if it is large or sparse, if a gap follows it, or if its
    topic shares no object (``limits.is_alone``); the others share objects.

    Above ``outputs_max`` or ``set_queues_max`` the newest versions wait for the next plan. Raises ValueError for runs
    that overlap.
    """
    versions = np.unique(candidates.runs["version"])
    while len(versions):
        is_in = candidates.runs["version"] <= versions[-1]
        sources, dead = _small_sources(candidates, is_in, limits)
        if not sources.any() and not dead.any():
            return None
        moved = np.flatnonzero(is_in & _live(candidates) & sources[candidates.runs["object"]])
        sequences = sequences_of_runs(candidates, moved)
        is_sparse = candidates.runs["kind"][sequences.order] == RunKind.SPARSE
        is_alone = (sequences.byte_count > limits.split_bytes) | sequences.has_gap_behind
        if limits.is_alone is not None:
            queues = [limits.is_alone(queue.topic) for queue in candidates.queues]
            is_alone |= np.array(queues, np.bool_)[sequences.queue]
        if len(sequences):
            is_alone |= np.logical_or.reduceat(is_sparse, sequences.first[:-1])
        set_queues = len(np.unique(sequences.queue[~is_alone]))
        if int(is_alone.sum()) <= limits.outputs_max and set_queues <= limits.set_queues_max:
            plan = _plan_of(candidates, is_in, sources | dead)
            return with_iterations(plan, candidates, limits, sequences, is_alone)
        versions = versions[: -max(1, len(versions) // 16)]
    return None


def plan_join(candidates: Candidates, limits: CompactionLimits) -> RewritePlan | None:
    """Plans to join neighbouring objects of one queue each (stream objects); None if there are none to join. The store
    copies their bytes, so that no messages are in memory."""
    is_in = np.ones(len(candidates.runs), bool)
    runs_of_object = np.bincount(candidates.runs["object"], minlength=len(candidates.objects))
    # Only an object with one run, all of whose rows are that run, can be copied as a whole.
    alone = ~candidates.is_set & ~candidates.is_fixed & (runs_of_object == 1) & (candidates.share == 1)
    whole = candidates.runs["rows"] == candidates.objects["rows"][candidates.runs["object"]]
    # Offsets that key compaction dropped belong to the next row of a sparse run: joining would change that.
    whole &= candidates.runs["kind"] != RunKind.SPARSE
    movable = np.flatnonzero(_live(candidates) & alone[candidates.runs["object"]] & whole)
    sequences = sequences_of_runs(candidates, movable)
    groups: list[NDArray[Any]] = []
    for number in range(len(sequences)):
        ordered = sequences.order[sequences.first[number] : sequences.first[number + 1]]
        groups += _joinable(picked(candidates.runs, ordered), ordered, limits)
    if not groups:
        return None
    sources = np.zeros(len(candidates.objects), bool)
    sources[candidates.runs["object"][np.concatenate(groups)]] = True
    plan = _plan_of(candidates, is_in, sources)
    outputs = [
        PlannedOutput(
            False,
            int(candidates.objects["ttl_class_days"][candidates.runs["object"][group[0]]]),
            int(candidates.runs["version"][group].max()),
        )
        for group in groups
    ]
    parts = [OutputPart(number, _whole(candidates, group)) for number, group in enumerate(groups)]
    return replace(plan, copies=True, outputs=outputs, iterations=[[part] for part in parts])


def _live(candidates: Candidates) -> NDArray[np.bool_]:
    """Which runs have rows above the minimum offset of their queue, in objects that may be moved."""
    runs = candidates.runs
    above: NDArray[np.bool_] = runs["end_queue_offset"] > candidates.floors[runs["queue"]]
    fixed: NDArray[np.bool_] = candidates.is_fixed[runs["object"]]
    return above & ~fixed


def _small_sources(
    candidates: Candidates, is_in: NDArray[np.bool_], limits: CompactionLimits
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Two masks of the objects that a plan may rewrite: objects with a queue that another one has too, so that their
    rows can be joined, and objects without any living row, which are only dropped. ``is_in``: the runs of the versions
    that take part. Objects of many queues (sets) and small ones of one queue are rewritten: if the latter stayed, the
    rows around them would not be contiguous."""
    runs, count = candidates.runs, len(candidates.objects)
    sizes = np.bincount(runs["object"], weights=runs["byte_count"], minlength=count)
    candidate = (candidates.is_set | (sizes <= limits.split_bytes)) & ~candidates.is_fixed
    has_runs, has_live = np.zeros(count, bool), np.zeros(count, bool)
    has_runs[runs["object"][is_in]] = True
    live = is_in & _live(candidates) & candidate[runs["object"]]
    dead_shares = dead_share(candidates)
    if limits.growth_min > 1:
        candidate &= _may_be_moved(candidates, candidate, sizes, limits) | (
            dead_shares >= limits.dead_share_min
        )
        live &= candidate[runs["object"]]
    has_live[runs["object"][live]] = True
    queues, objects = (runs[name][live].astype(np.intp) for name in ("queue", "object"))
    # A queue has several objects if the lowest and the highest of their numbers differ.
    first, last = np.full(len(candidates.queues), count), np.zeros(len(candidates.queues), np.intp)
    np.minimum.at(first, queues, objects)
    np.maximum.at(last, queues, objects)
    shares = np.zeros(count, bool)
    shares[objects[(first < last)[queues]]] = True
    shares |= candidates.is_set & candidate & has_live & (dead_shares >= limits.dead_share_min)
    return shares, candidate & has_runs & ~has_live


def dead_share(candidates: Candidates) -> NDArray[Any]:
    """For each object, the share (0 to 1) of its message bytes that has expired: they are in runs below the minimum
    offset of their queue."""
    runs, count = candidates.runs, len(candidates.objects)
    dead = runs["end_queue_offset"] <= candidates.floors[runs["queue"]]
    weight = runs["byte_count"] + 1  # runs of LMQ entries have no bytes of their own, and count too
    dead_bytes = np.bincount(runs["object"], weights=weight * dead, minlength=count)
    all_bytes = np.bincount(runs["object"], weights=weight, minlength=count)
    shares: NDArray[Any] = dead_bytes / np.maximum(all_bytes, 1)
    return shares


def _may_be_moved(
    candidates: Candidates, candidate: NDArray[np.bool_], sizes: NDArray[Any], limits: CompactionLimits
) -> NDArray[np.bool_]:
    """Which objects of the mask ``candidate`` may be moved. What one earlier compaction wrote is moved only if it is no
    more than 1/``growth_min`` of all moved bytes (``sizes``, by object), so that a byte is written again only a few
    times. Else its objects stay, and so does every object with a run in front of theirs, so that moved runs remain
    contiguous."""
    runs = candidates.runs
    compacted = np.array([is_compacted(key) for key in candidates.object_keys], bool)
    newest = np.zeros(len(sizes), np.int64)
    np.maximum.at(newest, runs["object"], runs["version"])
    moves = candidate.copy()
    while moves.any():
        # Objects of one compaction have the same newest version; 0 stands for all objects of the uploader.
        compactions, compaction = np.unique(np.where(compacted, newest, 0), return_inverse=True)
        moved_bytes = np.bincount(compaction, weights=sizes * moves)
        total_bytes = moved_bytes.sum()
        moved_bytes[compactions == 0] = 0
        largest = int(moved_bytes.argmax())
        if moved_bytes[largest] * limits.growth_min <= total_bytes:
            break
        stays = moves & (compaction == largest)
        run_stays = stays[runs["object"]]
        highest_offset = np.full(len(candidates.queues), -1, np.int64)
        np.maximum.at(highest_offset, runs["queue"][run_stays], runs["base_queue_offset"][run_stays])
        moves[runs["object"][runs["base_queue_offset"] <= highest_offset[runs["queue"]]]] = False
    return moves


def _plan_of(candidates: Candidates, is_in: NDArray[np.bool_], sources: NDArray[np.bool_]) -> RewritePlan:
    runs = candidates.runs
    kept = np.flatnonzero(is_in & _live(candidates) & ~sources[runs["object"]])
    versions = runs["version"][is_in]
    return RewritePlan(int(versions.min()), int(versions.max()), np.flatnonzero(sources), kept)


def sequences_of_runs(candidates: Candidates, moved: NDArray[Any]) -> Sequences:
    """Sort the runs ``moved`` (indexes into the candidates' runs), and cut them into sequences: runs of one queue whose
    offsets are contiguous, of one kind (plain, batch, sparse, LMQ), and of objects with one time to live that the same
    index file covers. Raises ValueError for runs of a queue that overlap."""
    keys = sorted(range(len(candidates.queues)), key=lambda number: candidates.queues[number])
    rank = np.empty(len(keys), np.int64)
    rank[keys] = np.arange(len(keys))
    table = candidates.runs
    ttl_class = candidates.objects["ttl_class_days"][table["object"][moved]]
    cover = candidates.cover(table["version"][moved])
    order = np.lexsort((table["base_queue_offset"][moved], rank[table["queue"][moved]], ttl_class, cover))
    moved, ttl_class, cover = moved[order], ttl_class[order], cover[order]
    # Only the columns that are compared are copied.
    runs = {name: table[name][moved] for name in _SEQUENCE_COLUMNS}
    before = {name: column[:-1] for name, column in runs.items()}
    after = {name: column[1:] for name, column in runs.items()}
    same = (before["queue"] == after["queue"]) & (ttl_class[:-1] == ttl_class[1:]) & (cover[:-1] == cover[1:])
    newest = np.zeros(len(candidates.covers) + 1, np.int64)
    np.maximum.at(newest, cover, runs["version"])
    overlap = np.flatnonzero(same & (after["base_queue_offset"] < before["end_queue_offset"]))
    if len(overlap):
        first_overlap = int(overlap[0])
        raise ValueError(
            f"the catalog is inconsistent: runs of {candidates.queues[int(before['queue'][first_overlap])]} overlap at "
            f"queue offset {int(after['base_queue_offset'][first_overlap])}"
        )
    has_gap = same & (after["base_queue_offset"] > before["end_queue_offset"])
    cuts = np.flatnonzero(~(same & continues(before, after))) + 1
    first = np.concatenate([[0], cuts, [len(moved)]]) if len(moved) else np.zeros(1, np.int64)
    ends = first[1:] - 1
    gap_behind = np.append(has_gap, False)
    return Sequences(
        order=moved,
        first=first,
        byte_count=np.add.reduceat(runs["byte_count"], first[:-1]) if len(moved) else np.zeros(0, np.int64),
        has_gap_behind=gap_behind[ends],
        queue=runs["queue"][first[:-1]],
        ttl_class=ttl_class[first[:-1]],
        version=newest[cover[first[:-1]]],
    )


def _joinable(runs: Table, numbers: NDArray[Any], limits: CompactionLimits) -> list[NDArray[Any]]:
    """Groups of neighbouring objects to join, as ``numbers`` of their runs. ``runs`` are those of one queue, in order,
    each alone in its object. A group ends at a large object, at another day, and where it would exceed the limits of an
    object; groups of less than ``sources_min`` objects are not worth it."""
    groups: list[list[int]] = [[]]
    size, rows, day = 0, 0, -1
    for number, run in zip(numbers.tolist(), runs, strict=True):
        length, run_day = int(run["byte_count"]), int(run["min_store_timestamp"]) // DAY_MS
        is_large = length >= limits.joined_bytes_min or 2 * int(run["rows"]) >= limits.object_rows_max
        is_full = size + length > limits.object_bytes_max or rows + int(run["rows"]) > limits.object_rows_max
        if is_large or is_full or run_day != day:
            groups.append([])
            size, rows = 0, 0
        if is_large:
            day = -1
            continue
        groups[-1].append(number)
        size, rows, day = size + length, rows + int(run["rows"]), run_day
    return [np.array(group) for group in groups if len(group) >= max(2, limits.sources_min)]


def _whole(candidates: Candidates, numbers: NDArray[Any]) -> Table:
    ranges = np.zeros(len(numbers), RANGE_DTYPE)
    ranges["run"] = numbers
    ranges["end"] = length_of(picked(candidates.runs, numbers))
    return ranges


READ_BYTES = 4 * 1024 * 1024


def reader_gets(candidates: Candidates, plan: RewritePlan) -> tuple[int, int]:
    """How many GETs it takes to read every queue that ``plan`` moves once: from the objects it replaces, and from the
    objects it writes."""
    runs = candidates.runs
    is_source = np.zeros(len(candidates.objects), bool)
    is_source[plan.sources] = True
    moved = is_source[runs["object"]]
    before = _gets(runs["queue"][moved], runs["object"][moved], stored_bytes(candidates)[moved])
    output, run, size_bytes = moved_bytes(candidates, plan)
    return before, _gets(runs["queue"][run], output, size_bytes)


def stored_bytes(candidates: Candidates) -> NDArray[np.float64]:
    """For each run, the bytes that it has in its object, estimated by the object's ratio of compression."""
    runs, objects = candidates.runs, candidates.objects
    ratio = objects["size_bytes"] / np.maximum(objects["raw_bytes"], 1)
    found: NDArray[np.float64] = runs["byte_count"] * ratio[runs["object"]]
    return found


def moved_bytes(
    candidates: Candidates, plan: RewritePlan
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Three columns, with a row for each range of rows that ``plan`` moves: the number of the object it is written to,
    the number of its run, and its bytes in the object store, estimated."""
    parts = [part for iteration in plan.iterations for part in iteration]
    if not parts:
        none = np.zeros(0, np.int64)
        return none, none, none.astype(float)
    ranges = concatenated((part.ranges for part in parts), RANGE_DTYPE)
    output = np.repeat([part.output for part in parts], [len(part.ranges) for part in parts])
    length = np.maximum(candidates.runs["byte_count"][ranges["run"]], 1)
    share = np.minimum(1.0, (ranges["end"] - ranges["begin"]) / length)
    return output, ranges["run"], stored_bytes(candidates)[ranges["run"]] * share


def _gets(queue: NDArray[Any], object_number: NDArray[np.int64], stored: NDArray[np.float64]) -> int:
    """How many GETs it takes to read runs once, queue by queue: one to open each object of a queue, and one for each
    READ_BYTES in it. By run: its ``queue``, the number of its object, and its ``stored`` bytes."""
    if not len(queue):
        return 0
    pairs, number = np.unique(queue.astype(np.int64) << 32 | object_number, return_inverse=True)
    sizes = np.bincount(number, weights=stored)
    return int(len(pairs) + np.ceil(np.maximum(sizes, 1) / READ_BYTES).sum())


IsWanted = Callable[[Candidates, RewritePlan], bool]
GAIN_MIN = 2
"""A plan has at most one output for so many sources, or readers take so many times fewer GETs."""
BUSY_GAIN_MIN = 4
"""So many times fewer GETs in `tiered run`: a busy broker writes objects with over a megabyte of each queue, and moving
all of them would save half of the GETs at best."""
RUNS_FULL = 1 << 17
"""Cycles of 10,000 queues have so many runs after thirteen objects: readers of each queue open all of these."""
DEAD_SHARE = 0.5
"""Sources of which so much is dead are rewritten for the space."""


def gains(candidates: Candidates, plan: RewritePlan, gets_min: int = GAIN_MIN) -> bool:
    """Whether the plan saves objects, GETs or space."""
    if len(plan.outputs) * GAIN_MIN <= candidates.share[plan.sources].sum():
        return True
    before, after = reader_gets(candidates, plan)
    return after * gets_min <= before or _is_mostly_dead(candidates, plan)


@dataclass(frozen=True)
class CompactionDue:
    """Due is a plan that gains, and moves new objects with ``full_bytes`` of messages or RUNS_FULL runs, or with one
    from before ``before_ms``; or only what compaction wrote; or mostly dead messages."""

    full_bytes: int
    before_ms: int

    def __call__(self, candidates: Candidates, plan: RewritePlan) -> bool:
        """Whether ``plan`` is due in `tiered run`: it must gain enough, and move enough new messages or some that have
        waited long enough; what only joins earlier outputs, or frees space of expired messages, does not wait."""
        if not gains(candidates, plan, BUSY_GAIN_MIN):
            return False
        new = [number for number in plan.sources.tolist() if not is_compacted(candidates.object_keys[number])]
        if plan.copies or not new or _is_mostly_dead(candidates, plan):
            return True
        is_new = np.isin(candidates.runs["object"], new)
        is_full = int(candidates.runs["byte_count"][is_new].sum()) >= self.full_bytes
        is_full |= int(is_new.sum()) >= RUNS_FULL
        return is_full or int(candidates.runs["min_store_timestamp"][is_new].min()) < self.before_ms


def _is_mostly_dead(candidates: Candidates, plan: RewritePlan) -> bool:
    sizes = candidates.objects["raw_bytes"][plan.sources] + 1
    dead = (dead_share(candidates)[plan.sources] * sizes).sum()
    return bool(dead >= DEAD_SHARE * sizes.sum())
