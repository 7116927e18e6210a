"""Distributes sequences of runs over outputs, and their rows over iterations of bounded memory. Pure.

A sequence is a queue's runs that become one run. An iteration is what is read and written at a time: it takes
sequences until memory is full, and what does not fit begins the next one. An output, which is an object to write, has
the messages of one queue alone and ends with its iteration, or it is a set of many queues, which the next iteration
continues.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.archive.rewrite.plan import (
    LMQ_ROWS_PER_CUT,
    RANGE_DTYPE,
    READERS_MAX,
    Candidates,
    OutputPart,
    PlannedOutput,
    RewriteLimits,
    RewritePlan,
    Sequences,
    kept_share,
)
from tiered.model.tables import RunKind, Table, concatenated

SELECTED_ROW_BYTES = 512
"""Memory of a row that a selection keeps, as it may be a range of its own."""


def with_iterations(
    plan: RewritePlan,
    candidates: Candidates,
    limits: RewriteLimits,
    sequences: Sequences,
    is_alone: NDArray[np.bool_],
) -> RewritePlan:
    """``plan`` with its outputs (objects to write) and iterations (what is in memory at a time), so that all
    ``sequences`` of runs are moved; each one that ``is_alone`` gets an output of its own. Raises ValueError if a run
    that cannot be cut exceeds the memory."""
    return _Filling(candidates, limits, sequences, kept_share(candidates, plan)).fill(plan, is_alone)


class _Filling:
    """Distributes sequences (the runs of a queue that are joined, by offset) over outputs and iterations."""

    def __init__(
        self, candidates: Candidates, limits: RewriteLimits, sequences: Sequences, share: NDArray[np.float64]
    ) -> None:
        """``share``: by run, the part of its rows that the rewrite keeps, from 0 to 1. Memory, bytes and rows of the
        runs are summed up in the order of ``sequences``, so that those of any range are a difference of two sums. A run
        is cut by its bytes; one of an LMQ, whose messages are those of other queues, by its rows."""
        self._limits = limits
        tables = len(candidates.runs) * limits.table_bytes
        largest = int(candidates.objects["size_bytes"].max(initial=0))
        in_flight = min(limits.in_flight_bytes, READERS_MAX * largest)
        self._memory_bytes = max(limits.memory_bytes // 4, limits.memory_bytes - tables - in_flight)
        self._sequences = sequences
        self._candidates = candidates
        size, rows, kind = (candidates.runs[name][sequences.order] for name in ("byte_count", "rows", "kind"))
        self._is_lmq = kind == RunKind.LMQ
        self._cut_length = np.where(self._is_lmq, rows, size)
        left = share[sequences.order]
        size, rows = size * left, rows * left
        row_bytes = limits.row_bytes + np.where(left < 1, SELECTED_ROW_BYTES, 0)
        memory = size + rows * row_bytes + limits.run_bytes
        # Sums are floats: numpy would convert whole arrays of integers at each search.
        self._memory, self._size, self._rows = (
            np.concatenate([[0.0], np.cumsum(column, dtype=np.float64)]) for column in (memory, size, rows)
        )
        self._sequence_sums = self._size[sequences.first], self._rows[sequences.first]
        self._outputs: list[PlannedOutput] = []
        self._iterations: list[list[OutputPart]] = []
        self._alone: list[OutputPart] = []
        self._shared: dict[int, list[Table]] = {}
        """Parts of the present iteration: of outputs of one queue, and of sets, by output."""
        self._used_bytes = 0.0
        """Memory of the present iteration."""
        self._set_bytes = self._set_rows = 0.0
        self._set: int | None = None
        """The present set (an object of many queues): its output, and what it has."""
        self._set_queue = -1

    def fill(self, plan: RewritePlan, is_alone: NDArray[np.bool_]) -> RewritePlan:
        """``plan`` with the outputs and iterations that move all sequences."""
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
        """Place the sequences from ``number`` up to, but not including, ``last`` in sets (objects of many queues), in
        as many as the limits of one require. A queue is in one set only."""
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
        """Add ``output``, a set, to the plan; following sequences are placed in it."""
        self._set, self._set_bytes, self._set_rows = self._new_output(output), 0.0, 0.0

    def _place_all(self, number: int, last: int) -> None:
        """Place the sequences from ``number`` up to, but not including, ``last`` in the present set: as many whole ones
        at once as fit into the memory that is left, others in parts."""
        first, shared = self._sequences.first, self._set
        assert shared is not None
        while number < last:
            at = int(first[number])
            room = self._memory_bytes - self._used_bytes
            end_at = self._whole_runs(self._memory, at, 0.0, room, int(first[last]))
            whole = int(np.searchsorted(first, end_at, side="right")) - 1
            if whole > number:
                end_at = int(first[whole])
                self._add(OutputPart(shared, self._ranges(at, 0, end_at, 0)), is_set=True)
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
        """Place all runs of one sequence, in as many iterations as their memory requires. ``shared``: the set to which
        they belong; None: they get outputs of their own, several if one would be too large."""
        at, last = int(self._sequences.first[number]), int(self._sequences.first[number + 1])
        begin = 0
        while at < last:
            end_at, end = self._fitting(at, begin, last, is_set=shared is not None)
            if (end_at, end) == (at, begin):
                self._end_iteration()
                continue
            ranges = self._ranges(at, begin, end_at, end)
            output = self._new_output(self._output(number, is_set=False)) if shared is None else shared
            self._add(OutputPart(output, ranges), is_set=shared is not None)
            self._used_bytes += self._cost_of(at, begin, end_at, end)
            at, begin = end_at, end

    def _fitting(self, at: int, begin: int, last: int, *, is_set: bool) -> tuple[int, int]:
        """Up to where runs fit into the memory of the present iteration, and into an output unless ``is_set``: from the
        byte (of an LMQ: row) ``begin`` of run ``at`` on, before run ``last``. Returns a run, and a position inside it
        where it is cut, 0 if it is not. Raises ValueError if a run that cannot be cut does not fit into an empty
        iteration."""
        room = self._memory_bytes - self._used_bytes
        end_at = self._whole_runs(self._memory, at, begin * self._each(self._memory, at), room, last)
        if not is_set:
            size_room = self._limits.object_bytes_max
            end_at = min(
                end_at, self._whole_runs(self._size, at, begin * self._each(self._size, at), size_room, last)
            )
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
            each = max(self._each(self._size, end_at), 1e-9)
            fits = min(room / max(self._each(self._memory, end_at), 1e-9), max(0, size_room) / each)
            if not is_set:
                rows = float(self._rows[end_at] - self._rows[at]) - (rows_before if end_at > at else 0.0)
                rows_room = self._limits.object_rows_max - rows
                fits = min(fits, max(0.0, rows_room) / max(self._each(self._rows, end_at), 1e-9))
            cut = int((begin + fits) // unit) * unit
            if cut > begin:
                return (end_at, cut) if cut < self._cut_length[end_at] else (end_at + 1, 0)
        if end_at == at and self._used_bytes == 0:
            if not unit:
                raise ValueError(
                    f"a run of {int(self._cut_length[at])} bytes cannot be compacted in {self._memory_bytes} bytes"
                )
            forced = begin // unit * unit + unit
            return (at, forced) if forced < self._cut_length[at] else (at + 1, 0)
        return end_at, begin

    def _whole_runs(self, sums: NDArray[Any], at: int, used: float, room: float, last: int) -> int:
        """The first run from ``at`` on that does not fit as a whole into ``room``."""
        end = int(np.searchsorted(sums, sums[at] + used + room, side="right")) - 1
        return max(at, min(end, last))

    def _each(self, sums: NDArray[Any], at: int) -> float:
        """The part of ``sums`` for each byte of run ``at``, or row of an LMQ."""
        return float(sums[at + 1] - sums[at]) / max(int(self._cut_length[at]), 1)

    def _cost_of(self, at: int, begin: int, end_at: int, end: int) -> float:
        """Memory of the runs from the position ``begin`` of run ``at`` up to the position ``end`` of run ``end_at``."""
        cost = float(self._memory[end_at] - self._memory[at]) - begin * self._each(self._memory, at)
        return cost + (end * self._each(self._memory, end_at) if end else 0.0)

    def _ranges(self, at: int, begin: int, end_at: int, end: int) -> Table:
        """The ranges (RANGE_DTYPE) of the runs number ``at`` up to, but not including, ``end_at`` in the order of the
        sequences: of the first one from ``begin`` on, and then the first ``end`` of run ``end_at``, if that is not 0.
        These are bytes, of runs of LMQs rows."""
        count = end_at - at + (1 if end else 0)
        ranges = np.zeros(count, RANGE_DTYPE)
        ranges["run"] = self._sequences.order[at : at + count]
        ranges["end"] = self._cut_length[at : at + count]
        ranges["begin"][0] = begin
        if end:
            ranges["end"][-1] = end
        return ranges

    def _add(self, part: OutputPart, *, is_set: bool) -> None:
        if is_set:
            self._shared.setdefault(part.output, []).append(part.ranges)
        else:
            self._alone.append(part)

    def _end_iteration(self) -> None:
        """Add the present iteration to the plan, and begin the next one."""
        if self._alone or self._shared:
            shared = [
                OutputPart(output, concatenated(ranges, RANGE_DTYPE))
                for output, ranges in self._shared.items()
            ]
            self._iterations.append(self._alone + shared)
        self._alone, self._shared, self._used_bytes = [], {}, 0.0
