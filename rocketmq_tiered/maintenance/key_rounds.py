"""Key compaction of an archive: the latest message of each key of a queue stays, older ones and tombstones are dropped.

    read a queue's runs once → the latest offset of each key → rounds that write what stays, the oldest pages first

Everything of a queue up to its cut takes part, so that a tombstone goes only with all that is older of its key:
rounds go from old to new, and a later pass drops what a killed one has left. Queue offsets never change.
As org.apache.rocketmq.store.kv.CompactionLog.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits, sequences_of_runs
from rocketmq_tiered.maintenance.compaction_ranges import ObjectRunCounter, PageRange, ranges_of
from rocketmq_tiered.maintenance.compaction_round import PlannedRound, candidates_in
from tiered.archive.kept_offsets import KeptOffsets, KeptRows
from tiered.archive.offset_map import OffsetMap, entries_of
from tiered.archive.rewrite.iterations import with_iterations
from tiered.archive.rewrite.plan import Candidates, RewritePlan
from tiered.archive.segment_reader import SegmentReader
from tiered.catalog.pages import Page, RunIndex, living_pages, sorted_page, union
from tiered.catalog.requirements import Histories, histories_of
from tiered.catalog.state import CatalogState, RunChunk, selected
from tiered.formats.part_rows import in_object_order
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.tables import (
    QUEUE_BATCH,
    QUEUE_FILLED,
    QUEUE_HIDDEN,
    QUEUE_LMQ,
    RUN_DTYPE,
    RunKind,
    Table,
    begins,
    concatenated,
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

    @cached_property
    def new_bytes(self) -> int:
        """Message bytes that were not compacted yet."""
        runs = self.chunk.runs
        is_new = (runs["kind"] == RunKind.PLAIN) & (runs["base_queue_offset"] >= self.seen)
        return int(runs["byte_count"][is_new].sum())

    @property
    def rows(self) -> int:
        """Messages."""
        return int(self.chunk.runs["rows"].sum())

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
ROW_BYTES = 400
"""Memory for each message of queues whose keys are read together."""
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
    known = state.queue_keys
    is_wanted = np.array([is_keyed(topic) for topic in known.roster.topics], bool)
    excluded: list[KeyedQueue | Waiting] = []
    rows = np.flatnonzero(is_wanted[known.roster.columns(known.numbers)["topic"]])
    for flag, reason in _EXCLUDED:
        is_flagged = (state.table["flags"][rows] & flag) != 0
        excluded += (Waiting(queue, reason) for queue in known.taken(rows[is_flagged]))
        rows = rows[~is_flagged]
    if not len(rows):
        return excluded
    rows = rows[known.taken(rows).sorted_order()]
    names = list(known.taken(rows))
    number_of = {queue: number for number, queue in enumerate(names)}
    ranges = page_ranges(state, before_version, runs_max)
    last_versions = {page.key: 1 << 62 for chosen in ranges for page in chosen.pages}
    spilled = max((chosen.spilled_version for chosen in ranges), default=0)
    refs = [ref for ref in state.pages if bisect_left(names, ref.first) < bisect_right(names, ref.last)]
    pages = zip(
        (last_versions.get(ref.key, -1) for ref in refs), living_pages(index, state, refs), strict=True
    )
    divided = [
        _divided(page, number_of, fixed, last_version)
        for last_version, page in chain(pages, [(spilled, sorted_page(known, state.memory))])
    ]
    older, others = map(union, zip(*divided, strict=True))
    return excluded + _keyed(state.table[rows], number_of, (older, others), before_version)


def _divided(
    page: Page, number_of: Mapping[QueueKey, int], fixed: Set[str], last_version: int
) -> tuple[Page, Page]:
    """The runs in ``page`` of the queues in ``number_of``: those up to ``last_version`` whose objects are not
    ``fixed``, which may be replaced, and the others."""
    chunk = page.chunk
    is_wanted = np.fromiter(map(number_of.__contains__, page.queues), bool, len(page.queues))
    is_fixed = np.array([key in fixed for key in chunk.object_keys], bool)[chunk.objects["key"]]
    mine = is_wanted[chunk.runs["queue"]]
    is_old = (chunk.runs["version"] <= last_version) & ~is_fixed[chunk.runs["object"]]
    older, others = (Page(page.queues, selected(chunk, mine & which)) for which in (is_old, ~is_old))
    return older, others


def _keyed(
    table: Table, number_of: Mapping[QueueKey, int], divided: tuple[Page, Page], before_version: int
) -> list[KeyedQueue | Waiting]:
    """What of the queues in ``number_of``, each a row of ``table``, is compacted: those of the runs that may
    be replaced, the first page of ``divided``, that are below the cut, the offset from which messages stay; or why the
    queue waits. The cut is the begin of the newest run, or of the first run in the other page, which may not be
    replaced."""
    numbers = [
        np.fromiter(map(number_of.__getitem__, page.queues), np.int64, len(page.queues))[
            page.chunk.runs["queue"]
        ]
        for page in divided
    ]
    runs, others = (page.chunk.runs for page in divided)
    cut, kept_version = np.full(len(table), 1 << 62), np.zeros(len(table), np.int64)
    first = np.flatnonzero(np.diff(numbers[1], prepend=-1))
    cut[numbers[1][first]], kept_version[numbers[1][first]] = (
        others["base_queue_offset"][first],
        others["version"][first],
    )
    is_newest = runs["end_queue_offset"] == table["end_queue_offset"][numbers[0]]
    np.minimum.at(cut, numbers[0][is_newest], runs["base_queue_offset"][is_newest])
    below = np.flatnonzero(runs["base_queue_offset"] < cut[numbers[0]])
    number, chunk = numbers[0][below], replace(divided[0].chunk, runs=picked(runs, below))
    chunk.runs["queue"] = 0
    counts = np.bincount(number, minlength=len(table))
    plain = np.bincount(number[chunk.runs["kind"] == RunKind.PLAIN], minlength=len(table))
    found: list[KeyedQueue | Waiting] = []
    bounds = pairwise(begins(counts).tolist())
    for queue, row, version, new, (begin, end) in zip(
        number_of, table, kept_version.tolist(), plain.tolist(), bounds, strict=True
    ):
        if end - begin < RUNS_MIN or not new:
            # A run that is old enough and must stay is not indexed yet, or damaged.
            reason = UNINDEXED if version else COMPACTED if end > begin and not new else FEW
            found.append(
                Waiting(queue, YOUNG, version) if version >= before_version else Waiting(queue, reason)
            )
            continue
        own = replace(chunk, runs=chunk.runs[begin:end])
        above, minimum = int(own.runs["end_queue_offset"][-1]), int(row["min_queue_offset"])
        found.append(KeyedQueue(queue, own, above, minimum, is_filled=bool(int(row["flags"]) & QUEUE_FILLED)))
    return found


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
    """What was read of some ``queues``, of one state: what stays of those that lose messages, and the last row of each
    sparse run, by its begin.
    ``made``: objects that rounds of this pass have written. ``in_one_round``: a tombstone may go only with all that is
    older. ``with_tombstones``: queues whose last messages of deleted keys stay; ``doubtful``: others of which a round
    would leave the last row of a run that it empties, which may be an older value of a deleted key. ``report`` gets the
    bytes of messages as they are read."""

    histories: Histories
    queues: Set[QueueKey] = frozenset()
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


def read_queues(
    store: ObjectStore,
    queues: Sequence[KeyedQueue],
    found: KeyPass,
    spool: Path,
    memory_bytes: int,
    *,
    keeps_keyless: bool,
) -> None:
    """Read the keys of the messages of ``queues``, and add to ``found`` which of them stay: the latest of each key,
    with ``keeps_keyless`` those without a key, and latest ones that delete their key where ``found`` keeps these.
    Queues with few keys are read together; keys that exceed ``memory_bytes`` are kept in the directory ``spool``.
    Raises OSError if that fails, and what reading objects raises."""
    for some in parts_of(queues, (one.rows for one in queues), memory_bytes // ROW_BYTES):
        kept = [KeptOffsets(one.begin, one.cut) for one in some]
        keeps_tombstones = np.array([found.keeps_tombstones(one) for one in some])
        left = np.array([one.rows for one in some])  # rows that do not stay
        with closing(OffsetMap(spool, memory_bytes)) as keys:
            for entries in queue_entries(store, some, found.last_rows, found.report):
                keyed, free, figures = divided(entries, keeps_keyless=keeps_keyless)
                keys.add(keyed)
                _keep(kept, left, free)
                found.figures += figures
            for latest in keys.latest():
                values, figures = surviving(latest, keeps_tombstones=keeps_tombstones[latest["queue"]])
                _keep(kept, left, values)
                found.figures += figures
            found.figures += KeyFigures(queues=len(some), spooled_bytes=keys.spooled_bytes)
        found.kept.update(
            (one.queue, offsets) for one, offsets, rows in zip(some, kept, left, strict=True) if rows
        )


def _keep(kept: Sequence[KeptOffsets], left: NDArray[np.int64], entries: Table) -> None:
    """Note in ``kept`` that the messages ``entries`` of the queues with these numbers stay, and count them in
    ``left``."""
    entries = picked(entries, np.argsort(entries["queue"], kind="stable"))
    counts = np.bincount(entries["queue"], minlength=len(kept))
    left -= counts
    bounds = begins(counts)
    for number in np.flatnonzero(counts).tolist():
        kept[number].keep(entries["offset"][bounds[number] : bounds[number + 1]])


def queue_entries(
    store: ObjectStore,
    queues: Sequence[KeyedQueue],
    last_rows: dict[tuple[QueueKey, int], int],
    report: Callable[[int], object] = lambda size_bytes: None,
) -> Iterator[Table]:
    """Key, offset and size of the messages of ``queues`` that are compacted, as tables of ENTRY_DTYPE, some megabytes
    at a time, object by object; ``queue`` is the number of a queue among these, all of which name the same objects.
    ``last_rows`` gets the offset of the last row of each sparse run (rows of a queue in one object, between which key
    compaction dropped some), ``report`` the bytes of messages."""
    names = [one.queue for one in queues]
    begin, cut = (np.array([getattr(one, name) for one in queues]) for name in ("begin", "cut"))
    runs = concatenated([one.chunk.runs for one in queues], RUN_DTYPE)
    queue = np.repeat(np.arange(len(queues)), [len(one.chunk.runs) for one in queues])
    order = np.argsort(runs["object"], kind="stable")
    for mine in np.split(order, np.flatnonzero(np.diff(runs["object"][order])) + 1):
        chunk = selected(replace(queues[0].chunk, runs=runs), mine)
        chunk.runs["queue"], place = queue[mine], chunk.objects[0]
        sizes = {"size_bytes": int(place["size_bytes"]), "tail_bytes": int(place["tail_bytes"])}
        reader = SegmentReader.open(store, chunk.object_keys[0], **sizes)
        parts = in_object_order(reader.index, chunk.runs, names)
        for some in _adjacent(reader.index, parts):
            for rows, records in reader.records_of_parts(some):
                entries = entries_of(*records, rows.queue_offset)
                entries["queue"] = number = some["queue"][rows.part]
                last = np.flatnonzero(np.diff(rows.part, append=-1))
                for row in last[some["kind"][rows.part[last]] == RunKind.SPARSE].tolist():
                    base = int(some["base_queue_offset"][rows.part[row]])
                    last_rows[names[int(number[row])], base] = int(rows.queue_offset[row])
                yield picked(
                    entries, (entries["offset"] >= begin[number]) & (entries["offset"] < cut[number])
                )
                report(int(rows.size.sum(dtype=np.int64)))


def _adjacent(index: SegmentIndex, parts: Table) -> list[Table]:
    """``parts`` of an object, in its order, divided where blocks without rows of them lie between two."""
    row = index.bounds.run_rows[parts["ordinal"]] + parts["first_row"]
    first = np.searchsorted(index.bounds.block_rows, row, side="right") - 1
    end = np.searchsorted(index.bounds.block_rows, row + parts["rows"])
    return np.split(parts, np.flatnonzero(first[1:] > end[:-1]) + 1)


def divided(entries: Table, *, keeps_keyless: bool) -> tuple[Table, Table, KeyFigures]:
    """Divide messages (``entries``) by whether they have a key. Returns those with a key, those without one that stay
    (all, or none), and figures."""
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
    return picked(entries, has_key), free, figures


def surviving(latest: Table, *, keeps_tombstones: NDArray[np.bool_] | bool) -> tuple[Table, KeyFigures]:
    """Which of the ``latest`` messages of keys stay, and figures. Tombstones, which delete their key, stay with
    ``keeps_tombstones`` only, which may be of each message."""
    values = picked(latest, (latest["is_tombstone"] == 0) | keeps_tombstones)
    figures = KeyFigures(
        keys=len(latest),
        new_messages=len(values),
        new_bytes=_size(values),
        tombstones=len(latest) - len(values),
    )
    return values, figures


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
    queue = candidates.runs["queue"]
    order = np.lexsort((candidates.runs["base_queue_offset"], queue))
    for of_queue in np.split(order, np.flatnonzero(np.diff(queue[order])) + 1):
        kept = found.kept.get(candidates.queues[int(queue[of_queue[0]])]) if len(of_queue) else None
        if kept is not None:
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
    keys, number = candidates.object_keys, runs["object"][of_queue]
    is_made = np.array([keys[key] in found.made for key in candidates.objects["key"][number].tolist()], bool)
    begin, end = runs["base_queue_offset"][of_queue], runs["end_queue_offset"][of_queue]
    # Rows above what was read stay; a sparse run may have fewer.
    above = np.maximum(0, end - np.maximum(begin, kept.end))
    left[of_queue] = above + [
        kept.count(*bounds) for bounds in zip(begin.tolist(), end.tolist(), strict=True)
    ]
    is_inside = (begin < kept.end) & (kept.begin < end) & ~candidates.is_fixed[number] & ~is_made
    replaced[of_queue] = is_inside & (left[of_queue] < runs["rows"][of_queue])
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
            if run["kind"] == RunKind.PLAIN:
                row = int(run["end_queue_offset"]) - 1
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


def parts_of(queues: Sequence[KeyedQueue], sizes: Iterable[int], size_max: int) -> Iterator[list[KeyedQueue]]:
    """Divide ``queues`` of these ``sizes`` into lists of up to ``size_max`` together. A larger queue is alone."""
    part: list[KeyedQueue] = []
    used = 0
    for one, size in zip(queues, sizes, strict=True):
        if part and used + size > size_max:
            yield part
            part, used = [], 0
        part.append(one)
        used += size
    if part:
        yield part
