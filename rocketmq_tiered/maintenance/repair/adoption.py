"""Runs for queues that lack some, from the data objects of a bucket, by their tails alone.

Of objects with rows for the same offsets the newer log history wins, then the higher epoch, then the newer object. Rows
above the place where a newer log history began are superseded. What differs from the winner is quarantined.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.archive.found_objects import FoundObject
from tiered.archive.segment_reader import SegmentCache
from tiered.errors import CorruptionError
from tiered.formats.run_part import cut_run
from tiered.formats.segment import RowTable
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind

Span = tuple[int, int]
FOREVER = 1 << 62


@dataclass
class Adopted:
    """Runs that were found, with the queue and the object of each; keys that differ, or cannot be read."""

    runs: list[tuple[QueueKey, FoundObject, np.void]] = field(default_factory=list)
    quarantined: set[str] = field(default_factory=set)


def history_ends(objects: Iterable[FoundObject]) -> Mapping[int, int]:
    """Number of each log history (the log between two truncations) -> the physical offset from which a newer history
    has superseded it. ``objects`` say where their histories begin."""
    begins: dict[int, int] = {}
    for meta in (one.meta for one in objects):
        begin = meta.history_phys if meta.history_phys >= 0 else FOREVER
        begins[meta.log_history] = min(begins.get(meta.log_history, FOREVER), begin)
    ends, end = dict[int, int](), FOREVER
    for history in sorted(begins, reverse=True):
        ends[history], end = end, min(end, begins[history])
    return ends


def adopt(
    objects: list[FoundObject],
    wanted: Mapping[QueueKey, list[Span]] | None,
    ends: Mapping[int, int],
    segments: SegmentCache,
    may_be: Callable[[QueueKey, FoundObject, RowTable], NDArray[np.bool_]],
) -> Adopted:
    """Choose runs of ``objects``, which no readable commit names, for the offsets ``wanted`` of each queue; None: for
    all offsets that objects have. ``ends``: where each log history was superseded. ``may_be``: which rows of an object
    the archive may have. Of objects with the same offsets the best ranked one wins; objects that differ from it, or
    cannot be read, are for the quarantine."""
    adopted = Adopted()
    left: dict[QueueKey, list[Span]] = (  # offsets for which no run was found yet
        {} if wanted is None else {queue: [*spans] for queue, spans in wanted.items()}
    )
    taken: dict[QueueKey, list[_Taken]] = {}  # the rows that were adopted so far
    ranked = sorted(objects, key=lambda one: one.rank, reverse=True)
    every = [(one, number) for one in ranked for number in range(len(one.runs))]
    # Entries of LMQs come last: they need their messages.
    for one, number in sorted(every, key=lambda item: int(item[0].runs["kind"][item[1]]) == RunKind.LMQ):
        queue, run = one.queues[number], one.runs[number]
        spans = left.setdefault(queue, [(0, FOREVER)]) if wanted is None else left.get(queue, [])
        others = [other for other in taken.get(queue, []) if other.overlaps(run)]  # these must agree with it
        is_wanted = any(
            low < run["end_queue_offset"] and run["base_queue_offset"] < high for low, high in spans
        )
        if not (others or is_wanted):
            continue
        try:
            reader = one.open(segments)
            rows = reader.row_columns(number)
        except CorruptionError:
            adopted.quarantined.add(one.key)
            continue
        if not all(_agree(rows, other.rows(segments)) for other in others):
            adopted.quarantined.add(one.key)
        current = rows.phys + rows.size <= ends.get(one.meta.log_history, FOREVER)
        current &= may_be(queue, one, rows)
        if wanted is None and run["kind"] == RunKind.LMQ:
            current &= _has_parents(reader.queues, rows, taken, segments)
        for piece in _cut(run, rows, spans, current):
            adopted.runs.append((queue, one, piece))
            low, high = int(piece["base_queue_offset"]), int(piece["end_queue_offset"])
            left[queue] = [part for span in left[queue] for part in _without(span, (low, high))]
            if wanted is None:
                taken.setdefault(queue, []).append(_Taken(low, high, one, number))
    return adopted


class _Taken(NamedTuple):
    """Offsets [low, high) of a queue that are the rows of run ``number`` of ``one``."""

    low: int
    high: int
    one: FoundObject
    number: int

    def overlaps(self, run: np.void) -> bool:
        return bool(self.low < run["end_queue_offset"] and run["base_queue_offset"] < self.high)

    def rows(self, segments: SegmentCache) -> RowTable:
        return self.one.open(segments).row_columns(self.number)


def _has_parents(
    queues: Sequence[QueueKey],
    rows: RowTable,
    taken: Mapping[QueueKey, list[_Taken]],
    segments: SegmentCache,
) -> NDArray[np.bool_]:
    """Which rows of an LMQ refer to a message that was found: its queue (``rows.parent`` is a number in ``queues``) has
    it, by offset and physical offset, in ``taken``, the runs that were adopted so far."""
    has_message = np.zeros(len(rows), bool)
    for number in np.unique(rows.parent).tolist():
        for other in taken.get(queues[number], []):
            offsets = rows.parent_queue_offset
            is_inside = (rows.parent == number) & (offsets >= other.low) & (offsets < other.high)
            if is_inside.any():
                has_message |= is_inside & np.isin(rows.phys, other.rows(segments).phys)
    return has_message


def _cut(run: np.void, rows: RowTable, spans: list[Span], is_current: NDArray[np.bool_]) -> Iterator[np.void]:
    """The parts of ``run`` whose offsets are in one of ``spans``, and whose rows are current (no newer log history has
    superseded them), each as a run of its own."""
    begins, stops = _bounds(run, rows)
    for low, high in spans:
        inside = np.flatnonzero(
            is_current & (stops > low) & (begins < high) & (begins >= low) & (stops <= high)
        )
        if int(run["kind"]) == RunKind.SPARSE:
            # A row of a sparse run also covers dropped offsets before its own: another object may have those.
            inside = np.flatnonzero(is_current & (stops - 1 >= low) & (stops - 1 < high))
        for part in np.split(inside, np.flatnonzero(np.diff(inside) != 1) + 1) if len(inside) else ():
            piece = cut_run(run, rows, int(part[0]), int(part[-1]) + 1)
            if int(run["kind"]) == RunKind.SPARSE:
                piece["base_queue_offset"] = max(low, int(piece["base_queue_offset"]))
                piece["end_queue_offset"] = min(high, int(piece["end_queue_offset"]))
            yield piece


def _bounds(run: np.void, rows: RowTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and one past the last queue offset of each row."""
    stops = rows.queue_offset + rows.inner_num
    if int(run["kind"]) != RunKind.SPARSE:
        return rows.queue_offset, stops
    return np.append(int(run["base_queue_offset"]), stops[:-1]), stops


def _without(span: Span, gone: Span) -> list[Span]:
    parts = [(span[0], min(span[1], gone[0])), (max(span[0], gone[1]), span[1])]
    return [part for part in parts if part[0] < part[1]]


def _agree(mine: RowTable, other: RowTable) -> bool:
    """Whether the rows at the same offsets are the same."""
    _, own, others = np.intersect1d(mine.queue_offset, other.queue_offset, return_indices=True)
    return all(
        np.array_equal(getattr(mine, name)[own], getattr(other, name)[others])
        for name in ("phys", "size", "store_timestamp")
    )
