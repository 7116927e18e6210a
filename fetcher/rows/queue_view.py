"""One queue at one catalog version: its bounds, gaps, and the runs and objects that hold an offset. Pure values."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fetcher.rows.pull import PullStatus
from tiered.catalog.queue_gaps import QueueGaps
from tiered.catalog.state import CatalogState, RunChunk
from tiered.errors import CorruptionError
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import SEGMENT_RUN_DTYPE
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_HIDDEN, RUN_DTYPE

_PLACE_FIELDS = (
    "ordinal",
    "kind",
    "base_queue_offset",
    "end_queue_offset",
    "rows",
    "base_byte",
    "byte_count",
)
# A row as one tuple, indexed by position: reading its fields one by one costs as much as a small read.
_names = RUN_DTYPE.names or ()
_OBJECT_AT, _PLACE_AT = _names.index("object"), operator.itemgetter(*map(_names.index, _PLACE_FIELDS))
_CHECKED_AT = operator.itemgetter(*map((SEGMENT_RUN_DTYPE.names or ()).index, _PLACE_FIELDS[1:]))


class RunPlace(NamedTuple):
    """A run as the catalog describes it. Offsets [base, end) are the queue's."""

    queue: QueueKey
    object_key: str
    size_bytes: int
    tail_bytes: int
    ordinal: int
    kind: int
    base: int
    end: int
    rows: int
    base_byte: int
    byte_count: int

    def check(self, index: SegmentIndex) -> None:
        """Raises CorruptionError unless the object holds this very run."""
        ordinal = self.ordinal
        is_there = ordinal < len(index.runs) and index.queue_of(ordinal) == self.queue
        if is_there and _CHECKED_AT(index.runs[ordinal].item()) == self[5:]:
            return
        raise CorruptionError(
            f"{self.object_key}: run {ordinal} differs from the catalog's entry for {self.queue} at {self.base}"
        )


class RunList:
    """All runs of a queue at one version, by base offset."""

    def __init__(self, queue: QueueKey, chunk: RunChunk) -> None:
        self._queue = queue
        self._chunk = chunk
        self._base = cast("Sequence[int]", np.ascontiguousarray(chunk.runs["base_queue_offset"]))

    def __len__(self) -> int:
        return len(self._base)

    @property
    def chunk(self) -> RunChunk:
        """The runs as the catalog's tables."""
        return self._chunk

    @property
    def nbytes(self) -> int:
        """Memory buffered, about."""
        chunk = self._chunk
        return 512 + chunk.runs.nbytes + chunk.objects.nbytes + 200 * len(chunk.object_keys)

    def at(self, offset: int) -> int:
        """Number of the run that holds ``offset``, or -1."""
        # Not numpy's, which releases the interpreter lock: taking it again costs more than the search.
        number = bisect_right(self._base, offset) - 1
        return number if number >= 0 and offset < int(self._chunk.runs["end_queue_offset"][number]) else -1

    def place(self, number: int) -> RunPlace:
        """The run of this number."""
        run = self._chunk.runs[number].item()
        place = self._chunk.objects[run[_OBJECT_AT]]
        key = self._chunk.object_keys[int(place["key"])]
        return RunPlace(self._queue, key, int(place["size_bytes"]), int(place["tail_bytes"]), *_PLACE_AT(run))

    def places(self, offset: int, *, end: int, bytes_max: int, runs_max: int) -> list[RunPlace]:
        """Consecutive runs from the one that holds ``offset``: to the one that reaches ``end`` (an offset), or has
        the last of ``bytes_max`` bytes not counting the first run's, or is the ``runs_max``-th.

        Stops before offsets no run holds. Raises CorruptionError when ``offset`` is in no run.
        """
        number = self.at(offset)
        if number < 0:
            raise CorruptionError(f"{self._queue}: offset {offset} is in no segment and in no recorded gap")
        found = [self.place(number)]
        total_bytes = 0
        while found[-1].end < end and total_bytes < bytes_max and len(found) < runs_max:
            number += 1
            if number >= len(self) or int(self._base[number]) != found[-1].end:
                break
            found.append(self.place(number))
            total_bytes += found[-1].byte_count
        return found

    def bytes_per_offset(self, offset: int) -> float:
        """Average message bytes per offset of the run that holds ``offset``; 0 if unknown (LMQs, gaps)."""
        number = self.at(offset)
        if number < 0:
            return 0.0
        run = self._chunk.runs[number]
        return int(run["byte_count"]) / (int(run["end_queue_offset"]) - int(run["base_queue_offset"]))


class QueueView:
    """Bounds and gaps of ``queue`` in ``state``: offsets [min_offset, max_offset)."""

    __slots__ = ("_gaps", "is_hidden", "max_offset", "min_offset", "queue", "runs", "state")

    def __init__(self, state: CatalogState, queue: QueueKey, row: Any) -> None:
        self.state = state
        self.queue = queue
        self.max_offset = max(0, int(row["end_queue_offset"]))
        self.min_offset = min(int(row["min_queue_offset"]), self.max_offset)
        self.is_hidden = bool(int(row["flags"]) & QUEUE_HIDDEN)
        """Of a deleted topic, or an earlier generation: read by name only, never by consumers."""
        self._gaps = QueueGaps(state.gaps_of(queue))
        self.runs: RunList | None = None
        """Set by CatalogView.runs_of."""

    def __repr__(self) -> str:
        return f"QueueView({self.queue}, [{self.min_offset}, {self.max_offset}) at {self.state.version})"

    def existing(self, offset: int) -> int:
        """The first offset from ``offset`` on that is no recorded gap and not below the minimum."""
        return self._gaps.after(max(offset, self.min_offset))

    def are_lost(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of ``offsets`` hold no record at this version."""
        lost: NDArray[np.bool_] = (offsets < self.min_offset) | self._gaps.hold(offsets)
        return lost


def status_at(view: QueueView | None, offset: int) -> tuple[PullStatus, int]:
    """The status of a pull at ``offset`` by the queue's bounds, and the next offset; FOUND when there may be a record
    (MessageStoreFetcherImpl.getMessageAsync)."""
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
