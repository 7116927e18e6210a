"""Size limits of topics: which messages expire, the oldest first over a topic's queues, and no more than needed. Pure.

The order is that of the log: by log history, then by physical offset. Times do not count, as clocks jump. The position
where the limit is met is found from the runs of the catalog. Rows are read only of runs that it may divide, such as
those that compaction joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.floors import rows_below
from tiered.formats.segment import RowTable
from tiered.model.tables import RunKind, Table, picked

Ints = NDArray[np.int64]

_STEPS = 1 << 16
"""Positions that are compared at a time."""

LIMITED_DTYPE = np.dtype([
    ("queue", "<u4"), ("topic", "<u4"), ("kind", "<u4"),
    ("version", "<i8"), ("base_queue_offset", "<i8"), ("end_queue_offset", "<i8"),
    ("rows", "<i8"), ("byte_count", "<i8"), ("min_phys", "<i8"), ("end_phys", "<i8"),
])  # fmt: skip
"""A run of a topic with a size limit. (queue, base_queue_offset, version) finds it in the catalog."""
EXPIRED_DTYPE = np.dtype([
    ("queue", "<u4"), ("end_queue_offset", "<i8"), ("rows", "<i8"), ("byte_count", "<i8"),
])  # fmt: skip
"""What expires of a run: its first rows."""

Columns = Callable[[np.void], RowTable | None]
"""A run (LIMITED_DTYPE) -> its columns; None if they cannot be read: then it expires as a whole."""


@dataclass(frozen=True)
class SizeLimit:
    """``byte_count``: message bytes of the topic, also of runs that may not expire, and of whole runs at floors.
    ``history_versions``: the first version of each log history but the first."""

    max_bytes: int
    byte_count: int
    history_versions: Sequence[int] = ()


def expired_by(limit: SizeLimit, runs: Table, floors: Ints, columns: Columns) -> Table:
    """EXPIRED_DTYPE rows of the ``runs`` (LIMITED_DTYPE, by queue and offset) of one topic that exceed its limit.
    ``floors``: the minimum offset of each run's queue. Raises what ``columns`` raises."""
    if limit.byte_count <= limit.max_bytes or not len(runs):
        return np.zeros(0, EXPIRED_DTYPE)
    ordered = _Ordered(runs, floors, columns, limit.history_versions)
    excess = limit.byte_count - limit.max_bytes - int((runs["byte_count"] - ordered.sizes).sum())
    return ordered.below(ordered.position(excess)) if excess > 0 else np.zeros(0, EXPIRED_DTYPE)


class _Rows(NamedTuple):
    """Rows of a run in order: ``position`` ascends."""

    position: Ints
    size: Ints


class _Ordered:
    """Runs of one topic with positions: one number line for all log histories and physical offsets. A row cannot expire
    before those in front of it in its queue, so its position is above theirs, also where a gap was filled later."""

    def __init__(self, runs: Table, floors: Ints, columns: Columns, history_versions: Sequence[int]) -> None:
        self._runs, self._columns = runs, columns
        self._dead = rows_below(runs, floors)
        history = np.searchsorted(np.array(sorted(history_versions), np.int64), runs["version"], side="right")
        self._shift = np.zeros(len(runs), np.int64)
        end = 0
        for number in np.unique(history).tolist():
            mine = history == number
            low, high = int(runs["min_phys"][mine].min()), int(runs["end_phys"][mine].max())
            self._shift[mine] = end - low
            end += high - low
        self.begin = runs["min_phys"] + self._shift
        self.end = runs["end_phys"] + self._shift
        first = np.flatnonzero(np.append(True, runs["queue"][1:] != runs["queue"][:-1]))
        for one, after in zip(first.tolist(), [*first[1:].tolist(), len(runs)], strict=True):
            self.end[one:after] = _ascending(self.end[one:after], np.cumsum(runs["rows"][one:after]))
            self.begin[one + 1 : after] = np.maximum(self.begin[one + 1 : after], self.end[one : after - 1])

    @cached_property
    def sizes(self) -> Ints:
        """Message bytes of each run above the floor."""
        found: Ints = self._runs["byte_count"].astype(np.int64)
        for at in np.flatnonzero(self._dead).tolist():
            found[at] = int(self._rows(at).size.sum())
        return found

    def _rows(self, at: int) -> _Rows:
        """The rows of a run; one for all if it is not divided. Rows below the floor have no bytes."""
        run = self._runs[at]
        is_plain = int(run["kind"]) == RunKind.PLAIN
        rows = self._columns(run) if is_plain and int(run["rows"]) > 1 else None
        if rows is None or len(rows) != int(run["rows"]):
            share = (int(run["rows"]) - int(self._dead[at])) / max(1, int(run["rows"]))
            return _Rows(np.array([self.end[at] - 1]), np.array([int(run["byte_count"] * share)]))
        position = np.clip(rows.phys + self._shift[at], self.begin[at], self.end[at] - 1)
        size = rows.size.astype(np.int64)
        size[: self._dead[at]] = 0
        return _Rows(_ascending(position, np.arange(len(rows))), size)

    def position(self, excess: int) -> int:
        """The lowest position below which there are ``excess`` bytes; the end if there are fewer."""
        if int(self.sizes.sum()) <= excess:
            return int(self.end.max())
        by_begin, by_end = np.argsort(self.begin, kind="stable"), np.argsort(self.end, kind="stable")
        # Fewer bytes are below ``low``, even if all runs that begin below it were whole; enough are below ``high``.
        low = int(self.begin[by_begin[np.searchsorted(np.cumsum(self.sizes[by_begin]), excess)]])
        high = int(self.end[by_end[np.searchsorted(np.cumsum(self.sizes[by_end]), excess)]])
        while high - low > 1:
            steps = np.unique(np.linspace(low, high, _STEPS + 1).astype(np.int64))
            at = int(np.argmax(self._bytes_below(steps) >= excess))
            low, high = int(steps[at - 1]), int(steps[at])
        return high

    def _bytes_below(self, steps: Ints) -> Ints:
        """Bytes below each of ``steps``, which ascend."""
        whole = np.searchsorted(steps, self.end, side="left")
        is_divided = np.searchsorted(steps, self.begin, side="right") < whole
        found = np.zeros(len(steps) + 1, np.int64)
        np.add.at(found, whole[~is_divided], self.sizes[~is_divided])
        for at in np.flatnonzero(is_divided).tolist():
            rows = self._rows(at)
            np.add.at(found, np.searchsorted(steps, rows.position, side="right"), rows.size)
        total: Ints = np.cumsum(found)[:-1]
        return total

    def below(self, position: int) -> Table:
        """What is below ``position``."""
        whole = np.flatnonzero(self.end <= position)
        found = np.zeros(len(whole), EXPIRED_DTYPE)
        runs = picked(self._runs, whole)
        for name in ("queue", "end_queue_offset"):
            found[name] = runs[name]
        found["rows"], found["byte_count"] = runs["rows"] - self._dead[whole], self.sizes[whole]
        parts = [found]
        for at in np.flatnonzero((self.begin < position) & (self.end > position)).tolist():
            run, rows = self._runs[at], self._rows(at)
            count = int((rows.position < position).sum())
            if len(rows.position) == int(run["rows"]) and count > self._dead[at]:
                end, bytes_gone = int(run["base_queue_offset"]) + count, int(rows.size[:count].sum())
                gone = (run["queue"], end, count - self._dead[at], bytes_gone)
                parts.append(np.array([gone], EXPIRED_DTYPE))
        return np.concatenate(parts)


def _ascending(values: Ints, steps: Ints) -> Ints:
    """The lowest values, at least ``values``, of which each is above the one before by the difference of ``steps``."""
    found: Ints = np.maximum.accumulate(values - steps) + steps
    return found
