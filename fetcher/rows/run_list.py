"""A queue at one catalog version: its bounds and gaps, its runs by offset, and the objects that hold them. Pure values.

A list of a later catalog version shares the runs of the earlier one: extending it costs what a commit adds, however
long the history is.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fetcher.rows.pull import PullStatus
from tiered.catalog.queue_gaps import QueueGaps
from tiered.catalog.state import EMPTY_CHUNK, CatalogState, PageRef, RunChunk, joined_chunks, selected
from tiered.errors import CorruptionError
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_BATCH, QUEUE_FILLED, QUEUE_HIDDEN, QUEUE_SPARSE, RUN_DTYPE

_PLACE_FIELDS = (
    "ordinal",
    "kind",
    "base_queue_offset",
    "end_queue_offset",
    "first_row",
    "rows",
    "base_byte",
    "byte_count",
)
# A row as one tuple, indexed by position: reading its fields one by one costs as much as a small read.
_names = RUN_DTYPE.names or ()
_OBJECT_AT, _PLACE_AT = _names.index("object"), operator.itemgetter(*map(_names.index, _PLACE_FIELDS))


class RunPlace(NamedTuple):
    """A run as the catalog describes it, which is a RunPart. Offsets [base, end) are the queue's."""

    queue: QueueKey
    object_key: str
    size_bytes: int
    tail_bytes: int
    ordinal: int
    kind: int
    base: int
    end: int
    first_row: int
    rows: int
    base_byte: int
    byte_count: int

    @property
    def bytes_per_offset(self) -> float:
        """Average message bytes per offset; 0 of an LMQ."""
        return self.byte_count / (self.end - self.base)

    def check(self, index: SegmentIndex) -> None:
        """Raises CorruptionError unless the object holds this very run."""
        index.check_part(self, self.kind, self.queue)


class _Part:
    """Consecutive runs of a list; ``first`` is the number of the first of them."""

    __slots__ = ("base", "chunk", "first")

    def __init__(self, first: int, chunk: RunChunk) -> None:
        self.first = first
        self.chunk = chunk
        self.base = cast("Sequence[int]", np.ascontiguousarray(chunk.runs["base_queue_offset"]))

    @property
    def nbytes(self) -> int:
        chunk = self.chunk
        return 512 + chunk.runs.nbytes + chunk.objects.nbytes + 200 * len(chunk.object_keys)


class RunList:
    """Runs of a queue by base offset. ``chunk``: all of them, sorted. Threads may share it."""

    def __init__(self, queue: QueueKey, chunk: RunChunk) -> None:
        self._queue = queue
        self._parts: tuple[_Part, ...] = (_Part(0, chunk),) if len(chunk.runs) else ()

    def __len__(self) -> int:
        parts = self._parts
        return parts[-1].first + len(parts[-1].base) if parts else 0

    @property
    def nbytes(self) -> int:
        """Memory used, about."""
        return 512 + sum(part.nbytes for part in self._parts)

    def extended(self, chunk: RunChunk) -> RunList:
        """A list with the runs of this one and, behind them, those of ``chunk``, which are sorted and have higher
        offsets."""
        parts = list(self._parts)
        # Parts that are not longer than the new one are joined with it, so that each run is copied only a logarithmic
        # number of times as a list grows.
        while parts and len(parts[-1].base) <= len(chunk.runs):
            chunk = joined_chunks((parts.pop().chunk, chunk))
        first = parts[-1].first + len(parts[-1].base) if parts else 0
        longer = RunList(self._queue, EMPTY_CHUNK)
        longer._parts = (*parts, _Part(first, chunk))
        return longer

    def trimmed(self, runs_max: int, *, below: int) -> RunList:
        """A list without the oldest parts of this one: they are removed as long as more than ``runs_max`` runs remain
        and the oldest part ends at or below offset ``below``."""
        parts = list(self._parts)
        left = len(self)
        while (
            len(parts) > 1 and left > runs_max and int(parts[0].chunk.runs["end_queue_offset"][-1]) <= below
        ):
            left -= len(parts.pop(0).base)
        shorter = RunList(self._queue, EMPTY_CHUNK)
        first = parts[0].first if parts else 0
        shorter._parts = tuple(_Part(part.first - first, part.chunk) for part in parts)
        return shorter

    @property
    def begin(self) -> int:
        """The first offset in it; the largest possible if it is empty."""
        return self._parts[0].base[0] if self._parts else 1 << 63

    @property
    def end(self) -> int:
        """One past the last offset in it; 0 if it is empty."""
        return int(self._parts[-1].chunk.runs["end_queue_offset"][-1]) if self._parts else 0

    def at(self, offset: int) -> int:
        """Number of the run that holds ``offset``, or -1."""
        for part in reversed(self._parts):
            # bisect instead of numpy's search, which releases the interpreter lock: to get that again costs more.
            index = bisect_right(part.base, offset) - 1
            if index >= 0:
                is_inside = offset < int(part.chunk.runs["end_queue_offset"][index])
                return part.first + index if is_inside else -1
        return -1

    def around(self, offset: int) -> RunChunk:
        """The run that holds ``offset`` and others next to it, as the catalog's tables; none if none holds it."""
        if self.at(offset) < 0:
            return EMPTY_CHUNK
        return next(part.chunk for part in reversed(self._parts) if part.base[0] <= offset)

    def place(self, number: int) -> RunPlace:
        """The run of this number."""
        chunk, index = self._row(number)
        run = chunk.runs[index].item()
        place = chunk.objects[run[_OBJECT_AT]]
        key = chunk.object_keys[int(place["key"])]
        return RunPlace(self._queue, key, int(place["size_bytes"]), int(place["tail_bytes"]), *_PLACE_AT(run))

    def bounds(self, number: int) -> tuple[int, int]:
        """First offset of the run of this number, and one past its last."""
        chunk, index = self._row(number)
        return int(chunk.runs["base_queue_offset"][index]), int(chunk.runs["end_queue_offset"][index])

    def min_phys(self, number: int) -> int:
        """Physical commitlog offset of the first record of the run of this number."""
        chunk, index = self._row(number)
        return int(chunk.runs["min_phys"][index])

    def places(self, offset: int, *, end: int, bytes_max: int, runs_max: int) -> list[RunPlace]:
        """Where consecutive runs lie, from the one that holds ``offset`` on. The list ends with the run that reaches
        the offset ``end``, with the run in which the runs behind the first one reach ``bytes_max`` bytes, or after
        ``runs_max`` runs, whichever is first, and always in front of offsets that no run holds.

        Raises CorruptionError when no run holds ``offset``.
        """
        number = self.at(offset)
        if number < 0:
            raise CorruptionError(f"{self._queue}: offset {offset} is in no segment and in no recorded gap")
        found = [self.place(number)]
        total_bytes = 0
        while found[-1].end < end and total_bytes < bytes_max and len(found) < runs_max:
            number += 1
            if number >= len(self) or self.bounds(number)[0] != found[-1].end:
                break
            found.append(self.place(number))
            total_bytes += found[-1].byte_count
        return found

    def bytes_per_offset(self, offset: int) -> float:
        """Average message bytes per offset of the run that holds ``offset``; 0 if unknown (LMQs, gaps)."""
        number = self.at(offset)
        return 0.0 if number < 0 else self.place(number).bytes_per_offset

    def _row(self, number: int) -> tuple[RunChunk, int]:
        for part in reversed(self._parts):
            if number >= part.first:
                return part.chunk, number - part.first
        raise IndexError(number)


def list_at(
    known: RunList, known_state: CatalogState, state: CatalogState, queue: QueueKey
) -> RunList | None:
    """The runs of ``queue`` at catalog version ``state``: the ``known`` ones of an earlier version, and those added
    since.

    None if the runs added since are not all in memory, if runs were removed, or if a catalog page of the queue was
    replaced, which may have moved runs to other objects. That no run was removed is seen from the queue's number of
    rows, which has grown by exactly the rows that were added.
    """
    before, after, row = known_state.queue(queue), state.queue(queue), state.row_of(queue)
    if before is None or after is None or row is None:
        return None
    if state.pages is not known_state.pages:
        changed = _changed(_Same(known_state.pages), _Same(state.pages), known_state.version)
        if any(page.first <= queue <= page.last for page in changed):
            return None
    added = joined_chunks(tuple(_added(state.chunks, row, known_state.version)))
    if int(added.runs["rows"].sum()) != int(after["row_count"]) - int(before["row_count"]):
        return None
    if not len(added.runs):
        return known
    runs = added.runs[np.argsort(added.runs["base_queue_offset"], kind="stable")]
    runs["queue"] = 0
    if int(runs["base_queue_offset"][0]) < known.end:
        return None  # a run fills a gap, so it does not belong at the end of the list
    return known.extended(RunChunk(runs, added.objects, added.object_keys))


@lru_cache(maxsize=4)
def _changed(before: _Same, after: _Same, version: int) -> tuple[PageRef, ...]:
    kept = {page.key for page in after.pages}
    newer = (page for page in after.pages if page.to_version > version)
    return (*(page for page in before.pages if page.key not in kept), *newer)


@dataclass(frozen=True, eq=False)
class _Same:
    """Pages compared by identity: there may be thousands."""

    pages: tuple[PageRef, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.pages is other.pages

    def __hash__(self) -> int:
        return id(self.pages)


def _added(chunks: Iterable[RunChunk], row: int, version: int) -> Iterator[RunChunk]:
    """The runs of a queue (row ``row`` of the queue table) that catalog versions after ``version`` added, oldest
    first."""
    found = []
    for chunk in reversed(tuple(chunks)):
        is_newer = chunk.runs["version"] > version
        if not is_newer.any():
            break
        mine = np.flatnonzero(is_newer & (chunk.runs["queue"] == row))
        if len(mine):
            found.append(selected(chunk, mine))
    return reversed(found)


class QueueView:
    """Bounds and gaps of ``queue`` in ``state``: offsets [min_offset, max_offset)."""

    __slots__ = (
        "_gaps",
        "first_offset",
        "is_batch",
        "is_filled",
        "is_hidden",
        "is_sparse",
        "max_offset",
        "min_offset",
        "queue",
        "state",
        "tail",
    )

    def __init__(self, state: CatalogState, queue: QueueKey, row: Any) -> None:
        """A queue at catalog version ``state``; ``row`` is its row in the queue table."""
        self.state = state
        self.queue = queue
        self.max_offset = max(0, int(row["end_queue_offset"]))
        self.min_offset = min(int(row["min_queue_offset"]), self.max_offset)
        self.is_hidden = bool(int(row["flags"]) & QUEUE_HIDDEN)
        """The queue is of a deleted topic, or an earlier generation: read by name only, never by consumers."""
        self.is_batch = bool(int(row["flags"]) & QUEUE_BATCH)
        self.is_filled = bool(int(row["flags"]) & QUEUE_FILLED)
        """A later version may have added lower offsets."""
        self.is_sparse = bool(int(row["flags"]) & QUEUE_SPARSE)
        self.first_offset = None if self.is_sparse else self.min_offset
        """The minimum offset that replies name. Where key compaction dropped messages it is the offset of the first one
        left, which is None until it was read."""
        self._gaps = QueueGaps(state.gaps_of(queue))
        self.tail: RunList | None = None
        """The newest runs, kept by RunWindows."""

    def existing(self, offset: int) -> int:
        """The first offset from ``offset`` on that is no recorded gap and not below the minimum."""
        return self._gaps.after(max(offset, self.min_offset))

    def are_lost(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of ``offsets`` hold no record at this version."""
        lost: NDArray[np.bool_] = (offsets < self.min_offset) | self._gaps.hold(offsets)
        return lost


def status_at(view: QueueView | None, offset: int) -> tuple[PullStatus, int]:
    """The status of a pull at ``offset``, decided by the queue's bounds alone, and the next offset. FOUND means that
    there may be a message, which has to be read. The rules are those of MessageStoreFetcherImpl.getMessageAsync."""
    if view is None:
        return PullStatus.NO_MATCHED_LOGIC_QUEUE, offset
    if view.max_offset <= 0:
        return PullStatus.NO_MESSAGE_IN_QUEUE, offset
    if offset < view.min_offset:
        return PullStatus.OFFSET_TOO_SMALL, view.min_offset
    if offset == view.max_offset:
        return PullStatus.OFFSET_OVERFLOW_ONE, offset
    if offset > view.max_offset:
        return PullStatus.OFFSET_OVERFLOW_BADLY, view.max_offset
    return PullStatus.FOUND, offset
