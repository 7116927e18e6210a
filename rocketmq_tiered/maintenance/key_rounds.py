"""Key compaction of an archive: the latest message of each key of a queue stays, older ones and tombstones are dropped.

    read a queue's runs once → the latest offset of each key → rounds that write what stays, the oldest pages first

Everything of a queue up to its cut takes part, so that a tombstone goes only with all that is older of its key:
rounds go from old to new, and a later pass drops what a killed one has left. Queue offsets never change.
As org.apache.rocketmq.store.kv.CompactionLog.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits, sequences_of_runs
from rocketmq_tiered.maintenance.compaction_ranges import ObjectRunCounter, PageRange, ranges_of
from rocketmq_tiered.maintenance.compaction_round import PlannedRound, candidates_in
from tiered.archive.kept_offsets import KeptOffsets, KeptRows
from tiered.archive.offset_map import OffsetMap, key_entries
from tiered.archive.rewrite.iterations import with_iterations
from tiered.archive.rewrite.plan import Candidates, RewritePlan
from tiered.archive.segment_reader import SegmentCache
from tiered.catalog.pages import Page, RunIndex, living_pages, memory_page
from tiered.catalog.requirements import Histories, histories_of
from tiered.catalog.state import CatalogState, RunChunk, joined_chunks, selected
from tiered.formats.run_part import CatalogRun
from tiered.model.queue import QueueKey
from tiered.model.tables import (
    QUEUE_BATCH,
    QUEUE_FILLED,
    QUEUE_HIDDEN,
    QUEUE_LMQ,
    RunKind,
    Table,
    copied,
    picked,
)
from tiered.object_store.interface import ObjectStore

RUNS_MIN = 2
"""Runs of a queue that are compacted together at least; the newest, which stays, does not count."""


@dataclass(frozen=True)
class KeyedQueue:
    """``chunk``: its runs below offset ``cut``, by offset, all of which may be replaced. ``floor``: its minimum offset.
    ``seen``: a cut up to which they were read before, and all stayed that is plain."""

    queue: QueueKey
    chunk: RunChunk
    cut: int
    floor: int = 0
    seen: int = 0
    is_filled: bool = False
    """A later commit may have added lower offsets: where rounds are several, a tombstone could go before them."""

    @property
    def begin(self) -> int:
        """The first offset that counts."""
        return max(self.floor, int(self.chunk.runs["base_queue_offset"][0]))

    @property
    def new_bytes(self) -> int:
        """Message bytes that were not compacted yet."""
        runs = self.chunk.runs
        is_new = (runs["kind"] == RunKind.PLAIN) & (runs["base_queue_offset"] >= self.seen)
        return int(runs["byte_count"][is_new].sum())

    @property
    def old_bytes(self) -> int:
        """Message bytes that an earlier round left."""
        return int(self.chunk.runs["byte_count"].sum()) - self.new_bytes


class Waiting(NamedTuple):
    """A queue of which nothing is compacted now, and why. ``version``: the first that is too young, or 0."""

    queue: QueueKey
    reason: str
    version: int = 0


YOUNG, UNINDEXED, FEW, COMPACTED = (
    "committed less than key_compaction.min_age_ms ago",
    "not in the message index yet",
    f"fewer than {RUNS_MIN} runs below the newest one",
    "nothing new since the last round",
)
_EXCLUDED = (
    (QUEUE_LMQ, "an LMQ"),
    (QUEUE_BATCH, "a queue of batches"),
    (QUEUE_HIDDEN, "of a deleted topic, or an earlier generation"),
)


def page_ranges(state: CatalogState, before_version: int, runs_max: int) -> list[PageRange]:
    """All ranges of versions below ``before_version``, the oldest first."""
    return [one for found in ranges_of(state, before_version, runs_max) for one in found]


def keyed_queues(
    index: RunIndex,
    state: CatalogState,
    is_keyed: Callable[[str], bool],
    *,
    before_version: int,
    runs_max: int,
    damaged: Set[str] = frozenset(),
) -> list[KeyedQueue | Waiting]:
    """The queues of topics whose keys are compacted (``is_keyed``): those that can be compacted, with their runs, and
    why the others wait. Only catalog versions below ``before_version`` take part. ``damaged`` objects stay, and all
    that is above them in their queues. Raises what reading pages of the catalog raises."""
    fixed = damaged | state.unindexed.keys()
    wanted: set[QueueKey] = set()
    excluded: list[KeyedQueue | Waiting] = []
    for row, queue in enumerate(state.directory.roster.keys[: len(state.table)]):
        if is_keyed(queue.topic):
            flags = int(state.table["flags"][row])
            why = next((reason for flag, reason in _EXCLUDED if flags & flag), "")
            if why:
                excluded.append(Waiting(queue, why))
            else:
                wanted.add(queue)
    if not wanted:
        return excluded
    ranges = page_ranges(state, before_version, runs_max)
    keys = {page.key for chosen in ranges for page in chosen.pages}
    spilled = max((chosen.spilled_version for chosen in ranges), default=0)
    found: dict[QueueKey, list[RunChunk]] = {}  # runs that may be replaced
    stays: dict[QueueKey, tuple[int, int]] = {}  # offset and version of the first run that may not
    names = sorted(wanted)
    for ref in state.pages:
        if any(ref.first <= queue <= ref.last for queue in names):
            for page in living_pages(index, state, [ref]):
                _sort(
                    page, wanted, found, stays, fixed=fixed, last_version=1 << 62 if ref.key in keys else -1
                )
    for page in memory_page(state):
        _sort(page, wanted, found, stays, fixed=fixed, last_version=spilled)
    return excluded + [
        _keyed(state, queue, found.get(queue, []), stays.get(queue, (1 << 62, 0)), before_version)
        for queue in names
    ]


def _sort(
    page: Page,
    wanted: set[QueueKey],
    found: dict[QueueKey, list[RunChunk]],
    stays: dict[QueueKey, tuple[int, int]],
    *,
    fixed: Set[str],
    last_version: int,
) -> None:
    """Sort the runs of the ``wanted`` queues in ``page``: those up to ``last_version`` whose objects are not ``fixed``
    may be replaced, and are added to ``found``; of the others ``stays`` gets offset and version of the first one."""
    for number in (at for at, queue in enumerate(page.queues) if queue in wanted):
        queue, runs = page.queues[number], page.chunk.runs
        mine = np.flatnonzero(runs["queue"] == number)
        keys = [page.chunk.object_keys[key] for key in page.chunk.objects["key"].tolist()]
        is_fixed = np.array([key in fixed for key in keys], bool)
        is_old = (runs["version"][mine] <= last_version) & ~is_fixed[runs["object"][mine]]
        if is_old.any():
            found.setdefault(queue, []).append(selected(page.chunk, mine[is_old]))
        if not is_old.all():
            others = runs[mine[~is_old]]
            first = others[others["base_queue_offset"].argmin()]
            place = int(first["base_queue_offset"]), int(first["version"])
            stays[queue] = min(place, stays.get(queue, place))


def _keyed(
    state: CatalogState, queue: QueueKey, found: list[RunChunk], stays: tuple[int, int], before_version: int
) -> KeyedQueue | Waiting:
    """What of a queue is compacted: those of its runs ``found`` that are below the cut, the offset from which messages
    stay; or why the queue waits. The cut is the begin of the newest run, or of the first run that may not be replaced,
    whose offset and version are ``stays`` (version 0: there is none)."""
    chunk = joined_chunks(tuple(found))
    row = state.queue(queue)
    assert row is not None
    runs = chunk.runs
    runs["queue"] = 0
    newest = runs["end_queue_offset"] == row["end_queue_offset"]
    cut = min([stays[0], *runs["base_queue_offset"][newest].tolist()])
    order = np.argsort(runs["base_queue_offset"], kind="stable")
    order = order[runs["base_queue_offset"][order] < cut]
    chunk = selected(chunk, order)
    is_new = bool((chunk.runs["kind"] == RunKind.PLAIN).any())
    if len(order) < RUNS_MIN or not is_new:
        _, kept_version = stays
        if kept_version >= before_version:
            return Waiting(queue, YOUNG, kept_version)
        # A run that is old enough and must stay is not indexed yet, or damaged.
        is_compacted = bool(len(order)) and not is_new
        return Waiting(queue, UNINDEXED if kept_version else COMPACTED if is_compacted else FEW)
    is_filled = bool(int(row["flags"]) & QUEUE_FILLED)
    end, minimum = int(chunk.runs["end_queue_offset"][-1]), int(row["min_queue_offset"])
    return KeyedQueue(queue, chunk, end, minimum, is_filled=is_filled)


CACHE_BYTES = 16 << 20


@dataclass(frozen=True)
class KeyFigures:
    """Of queues up to their cuts: keys, messages and message bytes before and after. ``tombstones`` and ``keyless``
    messages are among those dropped; ``spooled_bytes``: of the map of keys."""

    queues: int = 0
    keys: int = 0
    messages: int = 0
    bytes: int = 0
    new_messages: int = 0
    new_bytes: int = 0
    tombstones: int = 0
    keyless: int = 0
    spooled_bytes: int = 0

    def __add__(self, other: KeyFigures) -> KeyFigures:
        return KeyFigures(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


@dataclass
class KeyPass:
    """What was read of some queues, of one state: what stays of them, and the last row of each run, by its begin.
    ``made``: objects that rounds of this pass have written. ``in_one_round``: a tombstone may go only with all that is
    older. ``with_tombstones``: queues whose last messages of deleted keys stay; ``doubtful``: others of which a round
    would leave the last row of a run that it empties, which may be an older value of a deleted key. ``report`` gets the
    bytes of messages as they are read."""

    histories: Histories
    kept: dict[QueueKey, KeptOffsets] = field(default_factory=dict)
    last_rows: dict[tuple[QueueKey, int], int] = field(default_factory=dict)
    figures: KeyFigures = KeyFigures()
    made: set[str] = field(default_factory=set)
    in_one_round: bool = False
    report: Callable[[int], object] = lambda size_bytes: None
    with_tombstones: Collection[QueueKey] = ()
    doubtful: set[QueueKey] = field(default_factory=set)

    def keeps_tombstones(self, one: KeyedQueue) -> bool:
        """Whether the last messages of deleted keys stay: rounds would leave older ones."""
        return one.queue in self.with_tombstones or (one.is_filled and not self.in_one_round)


def read_queue(
    store: ObjectStore,
    one: KeyedQueue,
    found: KeyPass,
    spool: Path,
    memory_bytes: int,
    *,
    keeps_keyless: bool,
    keeps_tombstones: bool = False,
) -> None:
    """Read the keys of a queue's messages, and add to ``found`` which of them stay: the latest of each key, with
    ``keeps_keyless`` those without a key, and with ``keeps_tombstones`` latest ones that delete their key. Keys that
    exceed ``memory_bytes`` are kept in the directory ``spool``. Raises OSError if that fails, and what reading objects
    raises."""
    kept, keys = KeptOffsets(one.begin, one.cut), OffsetMap(spool, memory_bytes)
    found.figures += KeyFigures(queues=1)
    try:
        for entries in queue_entries(store, one, found.last_rows, found.report):
            keyed, free, figures = divided(entries, keeps_keyless=keeps_keyless)
            kept.keep(free)
            keys.add(keyed)
            found.figures += figures
        for latest in keys.latest():
            values, figures = surviving(latest, keeps_tombstones=keeps_tombstones)
            kept.keep(values)
            found.figures += figures
        found.figures += KeyFigures(spooled_bytes=keys.spooled_bytes)
    finally:
        keys.close()
    found.kept[one.queue] = kept


def queue_entries(
    store: ObjectStore,
    one: KeyedQueue,
    last_rows: dict[tuple[QueueKey, int], int],
    report: Callable[[int], object] = lambda size_bytes: None,
) -> Iterator[Table]:
    """Key, offset and size of the queue's messages that are compacted, as tables of ENTRY_DTYPE, some megabytes at a
    time. ``last_rows`` gets the offset of the last row of each run (rows of the queue in one object), ``report`` its
    bytes."""
    segments = SegmentCache(store, cache_bytes=CACHE_BYTES)
    for run in one.chunk.runs:
        reader = segments.of_run(one.chunk, run)
        reader.index.check_run(run, one.queue)
        last = one.begin
        for entries in key_entries(reader, CatalogRun.of(run)):
            last = int(entries["offset"][-1])
            yield picked(entries, (entries["offset"] >= one.begin) & (entries["offset"] < one.cut))
        report(int(run["byte_count"]))
        last_rows[one.queue, int(run["base_queue_offset"])] = last


def divided(entries: Table, *, keeps_keyless: bool) -> tuple[Table, NDArray[np.int64], KeyFigures]:
    """Divide messages (``entries``) by whether they have a key. Returns those with a key, the offsets of those without
    one that stay (all, or none), and figures."""
    has_key = entries["has_key"] > 0
    without = picked(entries, ~has_key)
    free = without if keeps_keyless else without[:0]
    figures = KeyFigures(
        messages=len(entries),
        bytes=_size(entries),
        new_messages=len(free),
        new_bytes=_size(free),
        keyless=len(without) - len(free),
    )
    return picked(entries, has_key), free["offset"].astype(np.int64), figures


def surviving(latest: Table, *, keeps_tombstones: bool = False) -> tuple[NDArray[np.int64], KeyFigures]:
    """Which of the ``latest`` messages of keys stay: returns their offsets, and figures. Tombstones, which delete their
    key, stay with ``keeps_tombstones`` only."""
    values = picked(latest, (latest["is_tombstone"] == 0) | keeps_tombstones)
    figures = KeyFigures(
        keys=len(latest),
        new_messages=len(values),
        new_bytes=_size(values),
        tombstones=len(latest) - len(values),
    )
    return values["offset"].astype(np.int64), figures


def _size(entries: Table) -> int:
    return int(entries["size"].sum(dtype=np.int64))


def planned_key_rounds(
    index: RunIndex,
    state: CatalogState,
    found: KeyPass,
    limits: CompactionLimits,
    *,
    before_version: int,
    damaged: Set[str] = frozenset(),
) -> Iterator[PlannedRound]:
    """Plan the rounds that drop the messages which ``found`` does not keep, the oldest pages of the catalog first. One
    round is in memory at a time; once it is carried out, ``state`` is no longer the newest. There are none if the log
    histories changed since the messages were read, as the log may have lost what replaces them, or if messages that
    must go in one round would take several."""
    if histories_of(state) != found.histories:
        return
    counter = ObjectRunCounter()
    first, last = min(found.kept, default=None), max(found.kept, default=None)
    if first is None or last is None:
        return
    ranges = page_ranges(state, before_version, limits.runs_max)
    if found.in_one_round and len(ranges) > 1:
        return
    for chosen in ranges:
        if not chosen.spilled_version and not any(
            page.first <= last and first <= page.last for page in chosen.pages
        ):
            continue
        candidates, copied = candidates_in(index, state, chosen, counter, damaged)
        plan = _plan(candidates, limits, found)
        if plan is not None:
            replaced = plan.replaced
            assert replaced is not None
            # An object is only partly moved, as runs of other queues in it stay.
            count = len(candidates.objects)
            moved = np.bincount(candidates.runs["object"][replaced], minlength=count)
            here = np.bincount(candidates.runs["object"], minlength=count)
            share = candidates.share * moved / np.maximum(here, 1)
            yield PlannedRound(chosen, replace(candidates, share=share), plan, copied)


def _plan(candidates: Candidates, limits: CompactionLimits, found: KeyPass) -> RewritePlan | None:
    """Plan the rewrite of those runs of ``candidates`` that lose rows, because ``found.kept`` does not keep them; each
    keeps the other rows. None if no run loses any."""
    replaced = np.zeros(len(candidates.runs), bool)  # by run: whether it is rewritten
    left = np.zeros(len(candidates.runs), np.int64)  # by run: how many rows it keeps
    for number, queue in enumerate(candidates.queues):
        kept = found.kept.get(queue)
        if kept is not None:
            of_queue = np.flatnonzero(candidates.runs["queue"] == number)
            of_queue = of_queue[np.argsort(candidates.runs["base_queue_offset"][of_queue])]
            _choose(candidates, of_queue, kept, found, replaced, left)
    if not replaced.any():
        return None
    runs = candidates.runs
    sources = np.unique(runs["object"][replaced]).astype(np.int64)
    widened = _without_empty(candidates, replaced, left)
    sequences = sequences_of_runs(widened, np.flatnonzero(replaced & (left > 0)))
    plan = RewritePlan(
        int(runs["version"].min()),
        int(runs["version"].max()),
        sources,
        np.flatnonzero(~replaced),
        selection=KeptRows(found.kept),
        replaced=replaced,
        left=left,
    )
    return with_iterations(plan, widened, limits, sequences, np.ones(len(sequences), bool))


def _without_empty(
    candidates: Candidates, replaced: NDArray[np.bool_], left: NDArray[np.int64]
) -> Candidates:
    """``candidates`` in which each replaced run extends over those behind it of which nothing is ``left``, so that the
    runs of a queue remain contiguous."""
    runs = copied(candidates.runs)
    runs["kind"][replaced] = RunKind.SPARSE
    order = np.flatnonzero(replaced)
    order = order[np.lexsort((runs["base_queue_offset"][order], runs["queue"][order]))]
    last_kept: int | None = None  # the last run with rows
    for at in order.tolist():
        if left[at]:
            last_kept = at
        elif (
            last_kept is not None
            and runs["queue"][last_kept] == runs["queue"][at]
            and runs["end_queue_offset"][last_kept] == runs["base_queue_offset"][at]
        ):
            runs["end_queue_offset"][last_kept] = runs["end_queue_offset"][at]
    return replace(candidates, runs=runs)


def _choose(
    candidates: Candidates,
    of_queue: NDArray[np.int64],
    kept: KeptOffsets,
    found: KeyPass,
    replaced: NDArray[np.bool_],
    left: NDArray[np.int64],
) -> None:
    """Decide for the runs ``of_queue`` of one queue, which are in the order of offsets: mark in ``replaced`` which lose
    rows, because ``kept`` does not have these, and set in ``left`` how many rows each keeps. Of contiguous runs some
    must remain to cover their offsets: where neighbours lose all rows, the run behind or before them is rewritten to
    extend over their offsets; without such a run their last row stays."""
    runs = candidates.runs
    keys = candidates.object_keys
    is_made = [
        keys[int(candidates.objects["key"][runs["object"][at]])] in found.made for at in of_queue.tolist()
    ]
    for at, is_done in zip(of_queue.tolist(), is_made, strict=True):
        run = runs[at]
        begin, end, rows = int(run["base_queue_offset"]), int(run["end_queue_offset"]), int(run["rows"])
        above = max(
            0, end - max(begin, kept.end)
        )  # rows above what was read stay; a sparse run may have fewer
        left[at] = kept.count(begin, end) + above
        is_inside = kept.begin < end and begin < kept.end and not candidates.is_fixed[run["object"]]
        replaced[at] = is_inside and not is_done and left[at] < rows
    for group in np.split(of_queue, np.flatnonzero(~_continue(candidates, of_queue)) + 1):
        while (emptied := _empty(group, replaced, left)) is not None:
            first, last = emptied
            behind = [group[last + 1]] if last + 1 < len(group) else []
            before = [group[first - 1]] if first else []
            near = [at for at in (*behind, *before) if not candidates.is_fixed[runs["object"][at]]]
            if near:
                replaced[near[0]] = True
                left[near[0]] = max(left[near[0]], 1)
                continue
            # The row that stays may be an older value of a deleted key: unless the tombstone stays too, read again.
            run = runs[group[last]]
            queue = candidates.queues[int(run["queue"])]
            row = found.last_rows.get((queue, int(run["base_queue_offset"])))
            if queue not in found.with_tombstones:
                found.doubtful.add(queue)
            if row is None:
                replaced[group[first : last + 1]] = False
            else:
                kept.keep(np.array([row], np.int64))
                left[group[last]] = 1


def _continue(candidates: Candidates, mine: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each run but the first begins where the one before ends."""
    runs = candidates.runs
    found: NDArray[np.bool_] = runs["base_queue_offset"][mine[1:]] == runs["end_queue_offset"][mine[:-1]]
    return found


def _empty(
    group: NDArray[np.int64], replaced: NDArray[np.bool_], left: NDArray[np.int64]
) -> tuple[int, int] | None:
    """The first and last of neighbouring runs in ``group`` that are all replaced and have no row ``left``; None if
    there are none."""
    edges = np.flatnonzero(np.diff(replaced[group].astype(np.int8), prepend=0, append=0))
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if not left[group[first:end]].any():
            return first, end - 1
    return None


def passes_of(queues: Sequence[KeyedQueue], memory_bytes: int) -> Iterator[list[KeyedQueue]]:
    """Divide ``queues`` into lists whose messages can be tracked in ``memory_bytes``: a few bits for each offset. A
    queue that needs more is alone."""
    part: list[KeyedQueue] = []
    used = 0
    for one in queues:
        size = KeptOffsets.bytes_of(one.begin, one.cut)
        if part and used + size > memory_bytes:
            yield part
            part, used = [], 0
        part.append(one)
        used += size
    if part:
        yield part
