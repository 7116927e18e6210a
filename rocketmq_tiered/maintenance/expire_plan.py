"""Plans expiry: the new floor of every queue, from the rules of topics and the runs of the catalog. Pure.

- A run expires when its newest store timestamp and the bucket's time of its commit are both past: the time to live, and
  the time that messages stay after their upload. So a broker's clock that is behind expires nothing early. The newest
  store timestamp counts as no later than the commit, so that one that is ahead keeps nothing long.
- Whole runs expire, the oldest of a queue first; the first one that stays ends it. A floor only rises.
- A size limit expires the oldest messages of its topic, over all queues and generations, until the
  topic's message bytes fit. It alone may expire a message younger than its time to live, and a part of a run. Runs
  behind them follow in the next pass.
- A run of LMQ entries expires when all messages that it refers to are below the floors of their queues.

Runs arrive page by page. Memory is a few integers for each queue, and about 100 bytes for each run of a topic with a
size limit and of LMQs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.floors import is_expired, rows_below
from tiered.formats.segment import RowTable
from tiered.model.tables import FLOOR_DTYPE, RunKind, Table, picked, positions
from tiered.settings.topic_rules import TopicRule

Ints = NDArray[np.int64]

_STEPS = 1 << 16
"""Positions that are compared at a time."""

LIMITED_DTYPE = np.dtype(
    [
        ("queue", "<u4"),
        ("topic", "<u4"),
        ("kind", "<u4"),
        ("version", "<i8"),
        ("base_queue_offset", "<i8"),
        ("end_queue_offset", "<i8"),
        ("rows", "<i8"),
        ("byte_count", "<i8"),
        ("min_phys", "<i8"),
        ("end_phys", "<i8"),
    ]
)
"""A run of a topic with a size limit. (queue, base_queue_offset, version) finds it in the catalog."""
EXPIRED_DTYPE = np.dtype(
    [
        ("queue", "<u4"),
        ("end_queue_offset", "<i8"),
        ("rows", "<i8"),
        ("byte_count", "<i8"),
    ]
)
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
    """What the size limit of one topic expires of its ``runs`` (LIMITED_DTYPE, by queue and offset): the oldest rows,
    as many as exceed the limit, as rows of EXPIRED_DTYPE. ``floors``: the minimum offset of each run's queue.
    ``columns`` reads the rows of a run of which only a part expires. Raises what ``columns`` raises."""
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
        """Compute the positions [begin, end) of ``runs`` on one number line, by which the oldest expire first: physical
        offsets, where each log history gets a range behind that of the history before; then positions are raised until
        they ascend in each queue. ``floors``: the minimum offset of each run's queue."""
        self._runs, self._columns = runs, columns
        self._dead = rows_below(runs, floors)
        history = np.searchsorted(np.array(sorted(history_versions), np.int64), runs["version"], side="right")
        self._shift = np.zeros(len(runs), np.int64)  # position - physical offset, of each run
        end = 0
        for number in np.unique(history).tolist():
            is_in = history == number
            low, high = int(runs["min_phys"][is_in].min()), int(runs["end_phys"][is_in].max())
            self._shift[is_in] = end - low
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
        """Position and message bytes of each row of the run number ``at``. A run that expires only as a whole (batches,
        LMQ entries, unreadable rows) counts as one row. Rows below the queue's minimum offset have no bytes."""
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
        """The lowest position below which runs have ``excess`` message bytes; the end of all runs if they have fewer.
        Narrows an interval that contains it, in which each pass compares _STEPS positions."""
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
        """How many message bytes are below each of ``steps``, which are positions in ascending order. Only runs that a
        step divides are read row by row."""
        whole = np.searchsorted(steps, self.end, side="left")
        is_divided = np.searchsorted(steps, self.begin, side="right") < whole
        added = np.zeros(len(steps) + 1, np.int64)
        np.add.at(added, whole[~is_divided], self.sizes[~is_divided])
        for at in np.flatnonzero(is_divided).tolist():
            rows = self._rows(at)
            np.add.at(added, np.searchsorted(steps, rows.position, side="right"), rows.size)
        total: Ints = np.cumsum(added)[:-1]
        return total

    def below(self, position: int) -> Table:
        """What expires if all rows below ``position`` do, as rows of EXPIRED_DTYPE: whole runs, and the first rows of
        runs that ``position`` divides."""
        whole = np.flatnonzero(self.end <= position)
        expired = np.zeros(len(whole), EXPIRED_DTYPE)
        runs = picked(self._runs, whole)
        for name in ("queue", "end_queue_offset"):
            expired[name] = runs[name]
        expired["rows"], expired["byte_count"] = runs["rows"] - self._dead[whole], self.sizes[whole]
        parts = [expired]
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


NEVER_MS: Final = 1 << 62


@dataclass(frozen=True)
class CommitTimes:
    """The bucket's times of some commits, versions ascending. A version between two has the later one's time; versions
    after the last have none, and their runs stay."""

    versions: Ints
    times_ms: Ints

    def of(self, versions: NDArray[Any]) -> Ints:
        """The time of each version, NEVER_MS if unknown."""
        times = np.append(np.maximum.accumulate(self.times_ms), NEVER_MS)
        found: Ints = times[np.searchsorted(self.versions, versions)]
        return found


Bools = NDArray[np.bool_]

_TIME_MS_MAX: Final = 1 << 60
"""Times of damaged records are cut here, so that sums do not overflow."""
_MISSED_MAX = 1000
"""Missed passes that are counted."""
_OPEN, _STAYS, _AT_LMQ = 0, 1, 2
"""Where expiry of a queue stands: all runs so far expire; one stays; one of LMQ entries waits for its messages."""

LMQ_DTYPE = np.dtype(
    [
        ("queue", "<u4"),
        ("rows", "<i8"),
        ("base_queue_offset", "<i8"),
        ("end_queue_offset", "<i8"),
        ("version", "<i8"),
        ("byte_count", "<i8"),
        ("is_lmq", "?"),
        ("is_due", "?"),
    ]
)
"""A run of LMQ entries, or one that follows them. (queue, base_queue_offset, version) finds it in the catalog."""

PARENT_DTYPE = np.dtype(
    [
        ("run", "<i8"),  # index into the runs that were requested
        ("queue", "<i8"),  # the queue that the run refers to; -1: no longer in the archive
        ("end_queue_offset", "<i8"),  # one past the last offset that the run refers to in this queue
    ]
)
"""A queue that a run of LMQ entries refers to."""

Parents = Callable[[Table], Table]
"""LMQ_DTYPE runs of entries -> their PARENT_DTYPE rows. A run without any stays."""


@dataclass(frozen=True)
class ExpiryQueues:
    """The queues of an archive by number, hidden ones and earlier generations too. ``topic`` indexes ``rules``;
    ``floor``: their minimum offsets; ``erased``: all their runs expire, whatever their age. ``history_versions``: the
    first version of each log history but the first. ``held``: of each queue, the first offset that a timer
    needs; what lies there or after it stays."""

    rules: Sequence[TopicRule]
    topic: Ints
    floor: Ints
    erased: Bools | None = None
    history_versions: Sequence[int] = ()
    held: Ints | None = None

    def __len__(self) -> int:
        return len(self.topic)

    @cached_property
    def ttl_ms(self) -> Ints:
        """Time to live of each queue; NEVER_MS: forever."""
        return self._by_queue([NEVER_MS if rule.ttl_ms is None else rule.ttl_ms for rule in self.rules])

    @cached_property
    def min_archived_ms(self) -> Ints:
        """How long each queue's messages stay after their upload."""
        return self._by_queue([rule.min_archived_ms for rule in self.rules])

    @cached_property
    def max_bytes(self) -> Ints:
        """Size limit of each topic; -1: none."""
        return np.array([-1 if rule.max_bytes is None else rule.max_bytes for rule in self.rules], np.int64)

    @cached_property
    def is_erased(self) -> Bools:
        """Whether all runs of each queue expire."""
        return np.zeros(len(self), bool) if self.erased is None else self.erased

    def is_held(self, runs: Table) -> Bools:
        """Which of ``runs`` have messages that pending timers still need, so that they stay whatever their age."""
        return (
            np.zeros(len(runs), bool)
            if self.held is None
            else runs["end_queue_offset"] > self.held[runs["queue"]]
        )

    def _by_queue(self, values: list[int]) -> Ints:
        found: Ints = np.array(values, np.int64)[self.topic]
        return found


@dataclass(frozen=True)
class MissedPasses:
    """Passes that should have followed the one at ``last_ms``, every ``every_ms``, such as during an outage."""

    last_ms: int
    every_ms: int

    def sums(self, due_ms: Ints, sizes: Ints, now_ms: int) -> Ints:
        """For each missed pass, the sum of ``sizes`` of the runs that it should have expired: those that were due
        (``due_ms``, by run) between the pass before it and itself. The pass at ``now_ms`` is not a missed one."""
        count = min(max(0, (now_ms - self.last_ms) // self.every_ms - 1), _MISSED_MAX)
        number = (due_ms - self.last_ms - 1) // self.every_ms
        is_missed = (number >= 0) & (number < count)
        sums: Ints = np.bincount(number[is_missed], sizes[is_missed], _MISSED_MAX).astype(np.int64)
        return sums


@dataclass(frozen=True)
class ExpiryPlan:
    """``floors``: FLOOR_DTYPE rows of the queues whose floor rises, by queue number, and ``floor_bytes`` that expire of
    each. ``runs``, ``rows`` and ``byte_count`` expire; ``living_…`` is before it. ``next_due_ms``: by queue, when the
    first run that is not due will be; NEVER_MS: no such run, it never expires, or it depends on others.
    ``missed_bytes``: of ``byte_count``, by missed pass."""

    floors: Table
    floor_bytes: Ints
    runs: int
    living_rows: int
    living_bytes: int
    next_due_ms: Ints
    missed_bytes: Ints

    @property
    def rows(self) -> int:
        """Rows that expire."""
        return int(self.floors["rows"].sum())

    @property
    def byte_count(self) -> int:
        """Message bytes that expire."""
        return int(self.floor_bytes.sum())

    @property
    def share(self) -> float:
        """The part of the archive's message bytes that expires; of its rows if it has no bytes."""
        if self.living_bytes:
            return self.byte_count / self.living_bytes
        return self.rows / self.living_rows if self.living_rows else 0.0

    def exceeds(self, max_share: float) -> bool:
        """Whether more than the share ``max_share`` of the archive's message bytes expires, so that the pass must stop.
        What each missed pass should have expired does not count, up to the share that it might have expired."""
        if not self.living_bytes:
            return self.share > max_share
        excused_bytes = np.minimum(self.missed_bytes, int(max_share * self.living_bytes)).sum()
        return bool((self.byte_count - excused_bytes) / self.living_bytes > max_share)


class ExpiryPlanner:
    """Plans one pass at the bucket's time ``now_ms``: ``add`` all runs, then ``plan`` once. ``missed``: passes before
    it."""

    def __init__(
        self, queues: ExpiryQueues, commits: CommitTimes, now_ms: int, missed: MissedPasses | None = None
    ) -> None:
        """Begin a pass over all runs of ``queues``. ``commits``: when the bucket stored the commits that added them;
        ``missed``: passes that did not take place."""
        self._queues, self._commits, self._now_ms, self._missed = queues, commits, now_ms, missed
        count = len(queues)
        # For each queue: how far it has been read, and what expires of it.
        self._next_offset = np.full(count, -1, np.int64)
        self._state = np.full(count, _OPEN, np.uint8)
        self._next_due_ms = np.full(count, NEVER_MS, np.int64)
        self._floor = queues.floor.astype(np.int64)
        self._expired_rows = np.zeros(count, np.int64)
        self._expired_bytes = np.zeros(count, np.int64)
        # Runs that only ``plan`` can judge: of topics with a size limit, and of LMQ entries.
        self._limited: list[Table] = []
        self._lmqs: list[Table] = []
        # Sums: what stays of each topic, what each missed pass should have taken, what expires, what was there before.
        self._topic_bytes = np.zeros(len(queues.rules), np.int64)
        self._missed_bytes = np.zeros(_MISSED_MAX, np.int64)
        self._expired_runs = self._living_rows = self._living_bytes = 0

    def add(self, runs: Table) -> None:
        """Take some ``runs`` (RUN_DTYPE) into account, sorted by queue and offset; their field ``queue`` is a number of
        ExpiryQueues. In each queue the first runs that are due expire, up to the first that stays; runs of LMQ entries,
        and those of topics with a size limit, are judged by ``plan``.

        Calls may come in any order that keeps the offsets of each queue ascending. Raises ValueError otherwise.
        """
        queues = self._queues
        queue = runs["queue"].astype(np.int64)
        self._check_order(queue, runs)
        is_dead = is_expired(runs, queues.floor[queue])
        if is_dead.any():
            runs, queue = runs[~is_dead], queue[~is_dead]
        if not len(runs):
            return
        due_ms = self._due_ms(runs, queue)
        is_due = ((due_ms <= self._now_ms) | queues.is_erased[queue]) & ~queues.is_held(runs)
        is_lmq = (runs["kind"] == RunKind.LMQ) & ~queues.is_erased[queue]
        first = _starts(queue)  # where the runs of each queue begin
        at = queue[first]
        before = self._state[at]
        stays = ~is_due | is_lmq
        length = np.where(before == _OPEN, _prefixes(stays, first), 0)
        is_gone = _in_prefix(length, first, len(runs))
        self._expire(self._left(runs, queue), queue, is_gone)
        np.subtract.at(self._topic_bytes, queues.topic[queue[is_gone]], runs["byte_count"][is_gone])
        if self._missed is not None and is_gone.any():
            old, ttl_ms = runs[is_gone], self._queues.ttl_ms[queue[is_gone]]
            ttl_end_ms = self._newest_ms(old) + np.minimum(ttl_ms, _TIME_MS_MAX)
            self._missed_bytes += self._missed.sums(ttl_end_ms, old["byte_count"], self._now_ms)
        # The first run that stays decides how the queue is continued.
        is_ended = (before == _OPEN) & (length < np.diff(np.append(first, len(runs))))
        end = (first + length)[is_ended]
        self._state[at[is_ended]] = np.where(is_lmq[end], _AT_LMQ, _STAYS)
        self._next_due_ms[at[is_ended]] = np.where(is_lmq[end], NEVER_MS, due_ms[end])
        self._count(runs, queue)
        self._postpone(runs, queue, is_gone, is_lmq, is_due)

    def _check_order(self, queue: Ints, runs: Table) -> None:
        """Raise ValueError unless ``runs`` come by queue, and in each queue by offset without overlap, also behind
        those of earlier calls."""
        if not len(runs):
            return
        base, end = runs["base_queue_offset"], runs["end_queue_offset"]
        same = queue[1:] == queue[:-1]
        first = _starts(queue)
        if (
            bool((queue[1:] < queue[:-1]).any())
            or bool((base[1:][same] < end[:-1][same]).any())
            or bool((base[first] < self._next_offset[queue[first]]).any())
        ):
            raise ValueError(
                "the runs of a queue must be added in the order of their offsets, without overlap"
            )
        self._next_offset[queue[first]] = end[np.append(first[1:], len(runs)) - 1]

    def _due_ms(self, runs: Table, queue: Ints) -> Ints:
        """When each run expires by the rule of its topic, in ms since 1970: when its newest message is older than the
        time to live, and was archived long enough ago. NEVER_MS: never, or not known yet."""
        ttl_ms = self._queues.ttl_ms[queue]
        commit_ms = self._commits.of(runs["version"])
        stored_ms = self._newest_ms(runs) + np.minimum(ttl_ms, _TIME_MS_MAX)
        archived_ms = np.minimum(commit_ms, _TIME_MS_MAX) + self._queues.min_archived_ms[queue]
        due_ms = np.maximum(stored_ms, archived_ms)
        due: Ints = np.where((ttl_ms == NEVER_MS) | (commit_ms == NEVER_MS), NEVER_MS, due_ms)
        return due

    def _newest_ms(self, runs: Table) -> Ints:
        """The newest time of each run, no later than its commit."""
        newest_ms = np.clip(runs["max_store_timestamp"], -_TIME_MS_MAX, _TIME_MS_MAX)
        found: Ints = np.minimum(newest_ms, self._commits.of(runs["version"]))
        return found

    def _left(self, runs: Table, queue: Ints) -> Table:
        """``runs`` with rows and bytes only of what is above the minimum offset of their queue, which expiry has not
        taken before; bytes are in proportion to rows."""
        dead = rows_below(runs, self._queues.floor[queue])
        if not dead.any():
            return runs
        left = runs.copy()
        left["rows"] -= dead
        left["byte_count"] -= runs["byte_count"] * dead // np.maximum(runs["rows"], 1)
        return left

    def _expire(self, runs: Table, queue: Ints, is_gone: Bools) -> None:
        """Let the runs of the mask ``is_gone`` expire, which are the first of their queues: raise the minimum offsets
        above them, and count their rows and bytes."""
        if not is_gone.any():
            return
        queue = queue[is_gone]
        np.maximum.at(self._floor, queue, runs["end_queue_offset"][is_gone])
        np.add.at(self._expired_rows, queue, runs["rows"][is_gone])
        np.add.at(self._expired_bytes, queue, runs["byte_count"][is_gone])
        self._expired_runs += len(queue)

    def _count(self, runs: Table, queue: Ints) -> None:
        np.add.at(self._topic_bytes, self._queues.topic[queue], runs["byte_count"])
        left = self._left(runs, queue)
        self._living_rows += int(left["rows"].sum())
        self._living_bytes += int(left["byte_count"].sum())

    def _postpone(self, runs: Table, queue: Ints, is_gone: Bools, is_lmq: Bools, is_due: Bools) -> None:
        """Keep the runs that only ``plan`` can judge, once all runs are known: LMQ entries, which expire after the
        messages they refer to, with what follows them, and runs of topics with a size limit. All arguments have one
        value for each run."""
        topic = self._queues.topic[queue]
        waits = (self._state[queue] == _AT_LMQ) & ~is_gone
        has_limit = (self._queues.max_bytes[topic] >= 0) & ~waits & ~is_gone & ~self._queues.is_held(runs)
        postponed = (self._lmqs, waits, LMQ_DTYPE), (self._limited, has_limit, LIMITED_DTYPE)
        columns = {"queue": queue, "topic": topic, "is_lmq": is_lmq, "is_due": is_due}
        for tables, chosen, dtype in postponed:
            if not chosen.any():
                continue
            table = np.zeros(int(chosen.sum()), dtype)
            for name in dtype.names or ():
                table[name] = (columns[name] if name in columns else runs[name])[chosen]
            tables.append(table)

    # -- decisions after all runs -----------------------------------------------------------------------------

    def plan(self, parents: Parents, columns: Columns) -> ExpiryPlan:
        """The plan of the pass, after all runs were added. ``parents`` reads which messages LMQ entries refer to, and
        is called a few times with the runs that may expire; ``columns`` reads the rows of a run of which a size limit
        may take a part."""
        self._apply_limits(columns)
        self._apply_parents(parents)
        raised = np.flatnonzero(self._floor > self._queues.floor)
        floors = np.zeros(len(raised), FLOOR_DTYPE)
        floors["queue"], floors["min_queue_offset"] = raised, self._floor[raised]
        floors["rows"] = self._expired_rows[raised]
        return ExpiryPlan(
            floors,
            self._expired_bytes[raised],
            self._expired_runs,
            self._living_rows,
            self._living_bytes,
            self._next_due_ms,
            self._missed_bytes,
        )

    def _apply_limits(self, columns: Columns) -> None:
        """Let the oldest messages expire of each topic that exceeds its size limit. ``columns`` reads the rows of a run
        of which only a part expires."""
        limited = _by_queue(self._limited, LIMITED_DTYPE)
        # LMQ entries stay until their messages are gone, and so does what follows them in their queue.
        first, is_lmq = _starts(limited["queue"]), limited["kind"] == RunKind.LMQ
        if is_lmq.any():
            limited = limited[_in_prefix(_prefixes(is_lmq, first), first, len(limited))]
        limited = limited[np.argsort(limited["topic"], kind="stable")]
        for runs in np.split(limited, _starts(limited["topic"])[1:]) if len(limited) else ():
            topic = int(runs["topic"][0])
            limit = SizeLimit(
                int(self._queues.max_bytes[topic]),
                int(self._topic_bytes[topic]),
                self._queues.history_versions,
            )
            gone = expired_by(limit, runs, self._queues.floor[runs["queue"]], columns)
            self._expire(gone, gone["queue"].astype(np.int64), np.ones(len(gone), bool))

    def _apply_parents(self, parents: Parents) -> None:
        """Let runs of LMQ entries expire whose messages have expired, and what follows them in their queues, in order.
        ``parents`` reads which messages they refer to: of one run of each queue first, as most queues end there, then
        of twice as many, and so on."""
        waiting = _by_queue(self._lmqs, LMQ_DTYPE)
        if not len(waiting) or not (self._floor > 0).any():  # no message has ever expired
            return
        # The runs [begin, end) of each queue that are not judged yet; ``count`` of each are judged at a time.
        begin = _starts(waiting["queue"])
        end = np.append(begin[1:], len(waiting))
        count = 1
        while len(begin):
            judged = np.minimum(count, end - begin)
            runs = waiting[positions(begin, judged)]
            stays = ~self._is_dead(runs, parents)
            first = np.cumsum(judged) - judged  # where the runs of each queue begin in ``runs``
            # Those before the first one that stays expire.
            expired = _prefixes(stays, first)
            queue = runs["queue"].astype(np.int64)
            self._expire(self._left(runs, queue), queue, _in_prefix(expired, first, len(runs)))
            is_continued = (expired == judged) & (begin + judged < end)
            begin, end = (begin + judged)[is_continued], end[is_continued]
            count *= 2

    def _is_dead(self, runs: Table, parents: Parents) -> Bools:
        """Which of ``runs`` expire: those with messages if they are due, those of LMQ entries if all messages they
        refer to have expired. A run of which ``parents`` reads nothing stays."""
        dead: Bools = runs["is_due"].copy()
        lmq = np.flatnonzero(runs["is_lmq"])
        if not len(lmq):
            return dead
        parent_rows = parents(runs[lmq])
        is_below = (parent_rows["queue"] < 0) | (
            parent_rows["end_queue_offset"] <= self._floor[parent_rows["queue"]]
        )
        is_known = np.zeros(len(lmq), bool)
        is_known[parent_rows["run"]] = True
        is_known[parent_rows["run"][~is_below]] = False
        dead[lmq] = is_known
        return dead


def _by_queue(tables: list[Table], dtype: np.dtype[Any]) -> Table:
    """One table of the rows of all ``tables``, sorted by queue; rows of a queue stay in the order in which they were
    added. Empties ``tables``, so that memory holds one copy."""
    rows = np.empty(sum(map(len, tables)), dtype)
    end = len(rows)
    while tables:  # one copy in memory, not two
        table = tables.pop()
        rows[end - len(table) : end] = table
        end -= len(table)
    order = np.argsort(rows["queue"], kind="stable")
    found: Table = rows[order]
    return found


def _starts(sorted_values: NDArray[Any]) -> Ints:
    """Where each value begins."""
    if not len(sorted_values):
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.append(True, sorted_values[1:] != sorted_values[:-1]))


def _prefixes(stays: Bools, first: Ints) -> Ints:
    """How many runs of each group (the runs of a queue) are in front of the first run that stays. ``first``: where the
    groups begin."""
    index = np.arange(len(stays))
    nearest = np.minimum.reduceat(np.where(stays, index, len(stays)), first)
    found: Ints = np.minimum(nearest, np.append(first[1:], len(stays))) - first
    return found


def _in_prefix(length: Ints, first: Ints, count: int) -> Bools:
    """The first ``length`` runs of each group."""
    sizes = np.diff(np.append(first, count))
    found: Bools = np.arange(count) < np.repeat(first + length, sizes)
    return found
