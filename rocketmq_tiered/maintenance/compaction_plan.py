"""Plans object compaction: which runs become which objects, in iterations of bounded memory.

Pure; tables in, plan out. Level 1 turns stream set objects, and small stream objects, into stream objects and few
stream set objects. Runs are ordered by queue and offset. Runs that follow one another without a gap are one
*sequence*: it becomes a stream object (SO) if it has more than the split size, or if a gap follows it; all others
share stream set objects (SSOs). An iteration takes sequences until memory is full; what does not fit begins the next
one. An SO ends with its iteration, an SSO continues.

Level 2 joins the SOs of a queue to larger ones, of at most a day each.

What compaction wrote is moved again only as a small part of a round (``growth_min``), so that a byte is written twice
in years; or when most of its messages are dead.

A plan covers whole versions of one log history, or some queues in them, and needs no request: the tables of the catalog
are enough. A run below the floor of its queue is in no output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.formats.keys import is_compacted
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, Table, concatenated, picked

MIB = 1024 * 1024
DAY_MS = 24 * 3600 * 1000
READERS_MAX = 8
"""Sources that are read at a time."""
LMQ_ROWS_PER_CUT = 4096
"""LMQ rows have no bytes: their runs are cut at multiples of a column page."""

PIECE_DTYPE = np.dtype([
    ("run", "<i8"),   # index into the candidates' runs
    ("begin", "<i8"), # in the run's bytes; of an LMQ: in its rows
    ("end", "<i8"),
])  # fmt: skip
"""A part of a run that one iteration moves to one output. The blocks that begin inside it belong to it."""


_SEQUENCE_COLUMNS = (
    "queue", "kind", "base_queue_offset", "end_queue_offset", "base_byte", "byte_count", "version",
)  # fmt: skip


@dataclass(frozen=True)
class CompactionLimits:
    """Sizes in message bytes. ``block_bytes``: runs are cut at its multiples; 0: never. ``row_bytes``, ``run_bytes``:
    memory of a row's columns and keys beside its message, and of a run. ``table_bytes``: memory of a run of the round,
    whether its messages are in memory or not; ``in_flight_bytes``: of reads in progress, at most. ``runs_max``: of a
    round, unless one sequence of pages has more. ``object_rows_max``: a reader fetches the columns of all rows of an
    object before its first message, 3 to 8 bytes each. ``sources_min``: objects that level 2 joins at least.
    ``growth_min``: level 1 moves what a compaction wrote, a *layer*, only among so many times its bytes; 1: always.
    ``dead_share_min``: it moves sets of which so much is below floors; above 1: none."""

    memory_bytes: int = 128 * MIB
    split_bytes: int = 8 * MIB
    block_bytes: int = 512 * 1024
    object_bytes_max: int = 128 * MIB
    object_rows_max: int = 131_072
    set_bytes_max: int = 128 * MIB
    row_bytes: int = 64
    run_bytes: int = 2048
    table_bytes: int = 0
    in_flight_bytes: int = 0
    runs_max: int = 1 << 20
    outputs_max: int = 10_000
    set_queues_max: int = 20_000
    joined_bytes_min: int = 64 * MIB
    sources_min: int = 2
    growth_min: int = 1
    dead_share_min: float = 2.0


@dataclass(frozen=True)
class Candidates:
    """Runs (RUN_DTYPE) and objects (OBJECT_DTYPE) of whole versions of one log history, or of some queues in them.

    ``is_set``, ``is_pending`` (deletion) and ``share`` have an entry for each object, ``floors`` one for each queue.
    ``share``: of the object's runs, that are in ``runs``; below 1 the catalog references it elsewhere too. ``covers``:
    first versions of index files, ascending; an output never has keys of two of them.
    """

    queues: Sequence[QueueKey]
    runs: Table
    objects: Table
    object_keys: Sequence[str]
    is_set: NDArray[np.bool_]
    floors: NDArray[np.int64]
    is_pending: NDArray[np.bool_]
    share: NDArray[np.float64]
    covers: tuple[int, ...] = ()

    def cover(self, versions: NDArray[Any]) -> NDArray[Any]:
        """A number for each of ``versions``: equal for those of one index file."""
        return np.searchsorted(np.array(self.covers, np.int64), versions, side="right")


@dataclass(frozen=True)
class PlannedOutput:
    """One object to write: of one queue, or a set of many. ``version``: what its runs carry, the newest of the plan
    that the index file of its sources covers."""

    is_set: bool
    ttl_class_days: int
    version: int


@dataclass(frozen=True)
class OutputPart:
    """What one iteration adds to output number ``output``: ``pieces`` (PIECE_DTYPE), in order."""

    output: int
    pieces: Table

    @property
    def message_bytes(self) -> int:
        """Bytes of its messages; of LMQs, which have none, rows."""
        return int((self.pieces["end"] - self.pieces["begin"]).sum())


@dataclass(frozen=True)
class CompactionPlan:
    """Replaces ``sources`` (indexes of objects) by ``outputs``, in versions [first_version, last_version]. A source
    that is referenced elsewhere stays.

    ``kept``: live runs of these versions that stay where they are. Other runs of the sources are below their floor.
    """

    first_version: int
    last_version: int
    sources: NDArray[Any]
    kept: NDArray[Any]
    copies: bool = False
    """Outputs are whole sources, one behind the other: the store copies them."""
    outputs: list[PlannedOutput] = field(default_factory=list)
    iterations: list[list[OutputPart]] = field(default_factory=list)


@dataclass(frozen=True)
class _Sequences:
    """Runs by queue and offset: ``order`` indexes the candidates' runs, sequence i is its [first[i], first[i + 1])."""

    order: NDArray[Any]
    first: NDArray[Any]
    byte_count: NDArray[Any]
    has_gap_behind: NDArray[np.bool_]
    queue: NDArray[Any]
    ttl_class: NDArray[Any]
    version: NDArray[Any]
    """The newest of its index file's."""

    def __len__(self) -> int:
        return len(self.byte_count)


def plan_level_1(candidates: Candidates, limits: CompactionLimits) -> CompactionPlan | None:
    """Compacts stream set objects and small stream objects; None when there is nothing to gain.

    Above ``outputs_max`` or ``set_queues_max`` the newest versions wait for the next plan. Raises ValueError for runs
    that overlap.
    """
    versions = np.unique(candidates.runs["version"])
    while len(versions):
        is_in = candidates.runs["version"] <= versions[-1]
        sources, dead = _level_1_sources(candidates, is_in, limits)
        if not sources.any() and not dead.any():
            return None
        moved = np.flatnonzero(is_in & _live(candidates) & sources[candidates.runs["object"]])
        sequences = _sequences(candidates, moved)
        is_alone = (sequences.byte_count > limits.split_bytes) | sequences.has_gap_behind
        set_queues = len(np.unique(sequences.queue[~is_alone]))
        if int(is_alone.sum()) <= limits.outputs_max and set_queues <= limits.set_queues_max:
            plan = _plan_of(candidates, is_in, sources | dead)
            return _Filling(candidates, limits, sequences).fill(plan, is_alone)
        versions = versions[: -max(1, len(versions) // 16)]
    return None


def plan_level_2(candidates: Candidates, limits: CompactionLimits) -> CompactionPlan | None:
    """Joins stream objects; None when there is nothing to gain. The store copies them: no iteration, no memory."""
    is_in = np.ones(len(candidates.runs), bool)
    runs_of_object = np.bincount(candidates.runs["object"], minlength=len(candidates.objects))
    alone = ~candidates.is_set & ~candidates.is_pending & (runs_of_object == 1) & (candidates.share == 1)
    movable = np.flatnonzero(_live(candidates) & alone[candidates.runs["object"]])
    sequences = _sequences(candidates, movable)
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


def length_of(runs: Table) -> NDArray[Any]:
    """Length of each run in the unit of PIECE_DTYPE."""
    return np.where(runs["kind"] == RunKind.LMQ, runs["rows"], runs["byte_count"])


def _live(candidates: Candidates) -> NDArray[np.bool_]:
    runs = candidates.runs
    above: NDArray[np.bool_] = runs["end_queue_offset"] > candidates.floors[runs["queue"]]
    pending: NDArray[np.bool_] = candidates.is_pending[runs["object"]]
    return above & ~pending


def _level_1_sources(
    candidates: Candidates, is_in: NDArray[np.bool_], limits: CompactionLimits
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Objects that share a queue with another one, and those without a live run: sets, and SOs of cycles with one
    queue, which else would tear gaps into sequences."""
    runs, count = candidates.runs, len(candidates.objects)
    sizes = np.bincount(runs["object"], weights=runs["byte_count"], minlength=count)
    candidate = (candidates.is_set | (sizes <= limits.split_bytes)) & ~candidates.is_pending
    has_runs, has_live = np.zeros(count, bool), np.zeros(count, bool)
    has_runs[runs["object"][is_in]] = True
    live = is_in & _live(candidates) & candidate[runs["object"]]
    dead_shares = dead_share(candidates)
    if limits.growth_min > 1:
        candidate &= _grows(candidates, candidate, sizes, limits) | (dead_shares >= limits.dead_share_min)
        live &= candidate[runs["object"]]
    has_live[runs["object"][live]] = True
    queues, objects = (runs[name][live].astype(np.intp) for name in ("queue", "object"))
    first, last = np.full(len(candidates.queues), count), np.zeros(len(candidates.queues), np.intp)
    np.minimum.at(first, queues, objects)
    np.maximum.at(last, queues, objects)
    shares = np.zeros(count, bool)
    shares[objects[(first < last)[queues]]] = True
    shares |= candidates.is_set & candidate & has_live & (dead_shares >= limits.dead_share_min)
    return shares, candidate & has_runs & ~has_live


def dead_share(candidates: Candidates) -> NDArray[Any]:
    """By object: the share of its bytes in runs below the floors of their queues."""
    runs, count = candidates.runs, len(candidates.objects)
    dead = runs["end_queue_offset"] <= candidates.floors[runs["queue"]]
    weight = runs["byte_count"] + 1  # LMQ runs have none
    found: NDArray[Any] = np.bincount(runs["object"], weights=weight * dead, minlength=count) / np.maximum(
        np.bincount(runs["object"], weights=weight, minlength=count), 1
    )
    return found


def _grows(
    candidates: Candidates, candidate: NDArray[np.bool_], sizes: NDArray[Any], limits: CompactionLimits
) -> NDArray[np.bool_]:
    """Which objects to move: no layer with more than its share of the bytes, and no object with a run in front of one
    of such a layer, so that no gap appears between moved runs."""
    runs = candidates.runs
    compacted = np.array([is_compacted(key) for key in candidates.object_keys], bool)
    newest = np.zeros(len(sizes), np.int64)
    np.maximum.at(newest, runs["object"], runs["version"])
    found = candidate.copy()
    while found.any():
        layers, layer = np.unique(np.where(compacted, newest, 0), return_inverse=True)
        moved_bytes = np.bincount(layer, weights=sizes * found)
        total_bytes = moved_bytes.sum()
        moved_bytes[layers == 0] = 0  # of the uploader
        largest = int(moved_bytes.argmax())
        if moved_bytes[largest] * limits.growth_min <= total_bytes:
            break
        stays = found & (layer == largest)
        held = stays[runs["object"]]
        ceiling = np.full(len(candidates.queues), -1, np.int64)
        np.maximum.at(ceiling, runs["queue"][held], runs["base_queue_offset"][held])
        found[runs["object"][runs["base_queue_offset"] <= ceiling[runs["queue"]]]] = False
    return found


def _plan_of(candidates: Candidates, is_in: NDArray[np.bool_], sources: NDArray[np.bool_]) -> CompactionPlan:
    runs = candidates.runs
    kept = np.flatnonzero(is_in & _live(candidates) & ~sources[runs["object"]])
    versions = runs["version"][is_in]
    return CompactionPlan(int(versions.min()), int(versions.max()), np.flatnonzero(sources), kept)


def _sequences(candidates: Candidates, moved: NDArray[Any]) -> _Sequences:
    """``moved`` runs by index file, TTL class, queue and offset, cut at gaps and where the kind changes."""
    keys = sorted(range(len(candidates.queues)), key=lambda number: candidates.queues[number])
    rank = np.empty(len(keys), np.int64)
    rank[keys] = np.arange(len(keys))
    table = candidates.runs
    ttl_class = candidates.objects["ttl_class_days"][table["object"][moved]]
    cover = candidates.cover(table["version"][moved])
    order = np.lexsort((table["base_queue_offset"][moved], rank[table["queue"][moved]], ttl_class, cover))
    moved, ttl_class, cover = moved[order], ttl_class[order], cover[order]
    runs = {name: table[name][moved] for name in _SEQUENCE_COLUMNS}  # not all of a row's bytes
    before = {name: column[:-1] for name, column in runs.items()}
    after = {name: column[1:] for name, column in runs.items()}
    same = (before["queue"] == after["queue"]) & (ttl_class[:-1] == ttl_class[1:]) & (cover[:-1] == cover[1:])
    newest = np.zeros(len(candidates.covers) + 1, np.int64)
    np.maximum.at(newest, cover, runs["version"])
    overlap = np.flatnonzero(same & (after["base_queue_offset"] < before["end_queue_offset"]))
    if len(overlap):
        one = int(overlap[0])
        raise ValueError(
            f"runs of {candidates.queues[int(before['queue'][one])]} overlap at {int(after['base_queue_offset'][one])}"
        )
    has_gap = same & (after["base_queue_offset"] > before["end_queue_offset"])
    cuts = np.flatnonzero(~(same & _continues(before, after))) + 1
    first = np.concatenate([[0], cuts, [len(moved)]]) if len(moved) else np.zeros(1, np.int64)
    ends = first[1:] - 1
    gap_behind = np.append(has_gap, False)
    return _Sequences(
        order=moved,
        first=first,
        byte_count=np.add.reduceat(runs["byte_count"], first[:-1]) if len(moved) else np.zeros(0, np.int64),
        has_gap_behind=gap_behind[ends],
        queue=runs["queue"][first[:-1]],
        ttl_class=ttl_class[first[:-1]],
        version=newest[cover[first[:-1]]],
    )


def sequence_bounds(runs: Table) -> list[tuple[int, int]]:
    """[first, last) of each sequence in ``runs`` by queue and offset."""
    before, after = runs[:-1], runs[1:]
    is_cut = ~((before["queue"] == after["queue"]) & _continues(before, after))
    bounds = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(runs)]
    return [(first, last) for first, last in pairwise(bounds) if first < last]


_Columns = Table | dict[str, NDArray[Any]]


def _continues(before: _Columns, after: _Columns) -> NDArray[np.bool_]:
    """Whether each run continues the one before it, of the same queue."""
    continues = (after["base_queue_offset"] == before["end_queue_offset"]) & (before["kind"] == after["kind"])
    is_lmq = before["kind"] == RunKind.LMQ
    found: NDArray[np.bool_] = continues & (
        is_lmq | (before["base_byte"] + before["byte_count"] == after["base_byte"])
    )
    return found


class _Filling:
    """Distributes sequences over outputs and iterations."""

    def __init__(self, candidates: Candidates, limits: CompactionLimits, sequences: _Sequences) -> None:
        self._limits = limits
        tables = len(candidates.runs) * limits.table_bytes
        largest = int(candidates.objects["size_bytes"].max(initial=0))
        in_flight = min(limits.in_flight_bytes, READERS_MAX * largest)
        self._memory_bytes = max(limits.memory_bytes // 4, limits.memory_bytes - tables - in_flight)
        self._sequences = sequences
        self._candidates = candidates
        size, rows, kind = (candidates.runs[name][sequences.order] for name in ("byte_count", "rows", "kind"))
        self._is_lmq = kind == RunKind.LMQ
        self._length = np.where(self._is_lmq, rows, size)
        memory = size + rows * limits.row_bytes + limits.run_bytes
        # Sums are floats: numpy would convert whole arrays of integers at each search.
        self._memory, self._size, self._rows = (
            np.concatenate([[0.0], np.cumsum(column, dtype=np.float64)]) for column in (memory, size, rows)
        )
        self._sequence_sums = self._size[sequences.first], self._rows[sequences.first]
        self._outputs: list[PlannedOutput] = []
        self._iterations: list[list[OutputPart]] = []
        self._alone: list[OutputPart] = []
        self._shared: dict[int, list[Table]] = {}
        self._used_bytes = 0.0
        self._set_bytes = self._set_rows = 0.0
        self._set: int | None = None
        self._set_queue = -1

    def fill(self, plan: CompactionPlan, is_alone: NDArray[np.bool_]) -> CompactionPlan:
        """``plan`` with outputs and iterations."""
        sequences = self._sequences
        # Consecutive sequences of one kind of output are placed together: an archive may have thousands of queues.
        kinds = np.stack([is_alone, sequences.ttl_class, sequences.version])
        cuts = np.flatnonzero((kinds[:, 1:] != kinds[:, :-1]).any(axis=0)) + 1
        for first, last in pairwise([0, *cuts.tolist(), len(sequences)]):
            if first < last and is_alone[first]:
                for number in range(first, last):
                    self._place(number, None)
            elif first < last:
                self._fill_sets(first, last)
        self._end_iteration()
        return replace(plan, outputs=self._outputs, iterations=self._iterations)

    def _fill_sets(self, number: int, last: int) -> None:
        """Place sequences [number, last) in sets, each of which begins with another queue than the one before."""
        sequences, limits = self._sequences, self._limits
        wanted = self._output(number, is_set=True)
        queue = sequences.queue[number:last]
        begins = number + np.flatnonzero(np.diff(queue.astype(np.int64), prepend=self._set_queue))
        self._set_queue = int(queue[-1])
        size, rows = self._sequence_sums
        if self._set is None or self._outputs[self._set] != wanted:
            self._begin_set(wanted)
        while number < last:
            # The first sequence that does not fit, at least one of a new set; the set ends before the next queue.
            rooms = (
                (size, limits.set_bytes_max - self._set_bytes),
                (rows, limits.object_rows_max - self._set_rows),
            )
            fits = (int(np.searchsorted(sums, sums[number] + room, side="right")) - 1 for sums, room in rooms)
            end_min = number if self._set_rows or self._set_bytes else number + 1
            at = int(np.searchsorted(begins, max(end_min, min(fits))))
            end = int(begins[at]) if at < len(begins) else last
            self._place_all(number, end)
            self._set_bytes += size[end] - size[number]
            self._set_rows += rows[end] - rows[number]
            number = end
            if number < last:
                self._begin_set(wanted)

    def _begin_set(self, output: PlannedOutput) -> None:
        self._set, self._set_bytes, self._set_rows = self._new_output(output), 0.0, 0.0

    def _place_all(self, number: int, last: int) -> None:
        """All runs of sequences [number, last) in the set, whole ones together."""
        first, shared = self._sequences.first, self._set
        assert shared is not None
        while number < last:
            at = int(first[number])
            room = self._memory_bytes - self._used_bytes
            end_at = self._whole_runs(self._memory, at, 0.0, room, int(first[last]))
            whole = int(np.searchsorted(first, end_at, side="right")) - 1
            if whole > number:
                end_at = int(first[whole])
                self._add(OutputPart(shared, self._pieces(at, 0, end_at, 0)), is_set=True)
                self._used_bytes += self._cost_of(at, 0, end_at, 0)
                number = whole
            else:
                self._place(number, shared)
                number += 1

    def _output(self, number: int, *, is_set: bool) -> PlannedOutput:
        sequences = self._sequences
        return PlannedOutput(is_set, int(sequences.ttl_class[number]), int(sequences.version[number]))

    def _new_output(self, output: PlannedOutput) -> int:
        self._outputs.append(output)
        return len(self._outputs) - 1

    def _place(self, number: int, shared: int | None) -> None:
        """All runs of a sequence, from the room that is left on. ``shared``: the set output they belong to."""
        at, last = int(self._sequences.first[number]), int(self._sequences.first[number + 1])
        begin = 0
        while at < last:
            end_at, end = self._fitting(at, begin, last, is_set=shared is not None)
            if (end_at, end) == (at, begin):
                self._end_iteration()
                continue
            pieces = self._pieces(at, begin, end_at, end)
            output = self._new_output(self._output(number, is_set=False)) if shared is None else shared
            self._add(OutputPart(output, pieces), is_set=shared is not None)
            self._used_bytes += self._cost_of(at, begin, end_at, end)
            at, begin = end_at, end

    def _fitting(self, at: int, begin: int, last: int, *, is_set: bool) -> tuple[int, int]:
        """Where the runs from ``at``, ``begin`` on no longer fit: whole runs, then a cut inside one."""
        room = self._memory_bytes - self._used_bytes
        end_at = self._whole_runs(self._memory, at, begin * self._each(self._memory, at), room, last)
        if not is_set:
            size_room = self._limits.object_bytes_max
            end_at = min(end_at, self._whole_runs(self._size, at, float(begin), size_room, last))
            rows_before = begin * self._each(self._rows, at)
            end_at = min(
                end_at, self._whole_runs(self._rows, at, rows_before, self._limits.object_rows_max, last)
            )
        else:
            size_room = self._memory_bytes
        if end_at > at:
            begin, room = 0, room - self._cost_of(at, begin, end_at, 0)
            size_room -= int(self._size[end_at] - self._size[at])
        if end_at == last:
            return last, 0
        unit = LMQ_ROWS_PER_CUT if self._is_lmq[end_at] else self._limits.block_bytes
        if unit:
            fits = min(room / max(self._each(self._memory, end_at), 1e-9), max(0, size_room))
            if not is_set:
                rows = float(self._rows[end_at] - self._rows[at]) - (rows_before if end_at > at else 0.0)
                rows_room = self._limits.object_rows_max - rows
                fits = min(fits, max(0.0, rows_room) / max(self._each(self._rows, end_at), 1e-9))
            cut = int((begin + fits) // unit) * unit
            if cut > begin:
                return (end_at, cut) if cut < self._length[end_at] else (end_at + 1, 0)
        if end_at == at and self._used_bytes == 0:
            if not unit:
                raise ValueError(
                    f"a run of {int(self._length[at])} bytes exceeds the memory of {self._memory_bytes} bytes"
                )
            forced = begin // unit * unit + unit
            return (at, forced) if forced < self._length[at] else (at + 1, 0)
        return end_at, begin

    def _whole_runs(self, sums: NDArray[Any], at: int, used: float, room: float, last: int) -> int:
        """The first run from ``at`` on that does not fit as a whole into ``room``."""
        end = int(np.searchsorted(sums, sums[at] + used + room, side="right")) - 1
        return max(at, min(end, last))

    def _each(self, sums: NDArray[Any], at: int) -> float:
        """Of ``sums``, for each byte of run ``at``, or row of an LMQ."""
        return float(sums[at + 1] - sums[at]) / max(int(self._length[at]), 1)

    def _cost_of(self, at: int, begin: int, end_at: int, end: int) -> float:
        cost = float(self._memory[end_at] - self._memory[at]) - begin * self._each(self._memory, at)
        return cost + (end * self._each(self._memory, end_at) if end else 0.0)

    def _pieces(self, at: int, begin: int, end_at: int, end: int) -> Table:
        count = end_at - at + (1 if end else 0)
        pieces = np.zeros(count, PIECE_DTYPE)
        pieces["run"] = self._sequences.order[at : at + count]
        pieces["end"] = self._length[at : at + count]
        pieces["begin"][0] = begin
        if end:
            pieces["end"][-1] = end
        return pieces

    def _add(self, part: OutputPart, *, is_set: bool) -> None:
        if is_set:
            self._shared.setdefault(part.output, []).append(part.pieces)
        else:
            self._alone.append(part)

    def _end_iteration(self) -> None:
        if self._alone or self._shared:
            shared = [
                OutputPart(output, concatenated(found, PIECE_DTYPE)) for output, found in self._shared.items()
            ]
            self._iterations.append(self._alone + shared)
        self._alone, self._shared, self._used_bytes = [], {}, 0.0


def _joinable(runs: Table, numbers: NDArray[Any], limits: CompactionLimits) -> list[NDArray[Any]]:
    """Neighbouring SOs to join, from the runs of one sequence."""
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
    pieces = np.zeros(len(numbers), PIECE_DTYPE)
    pieces["run"] = numbers
    pieces["end"] = length_of(picked(candidates.runs, numbers))
    return pieces
