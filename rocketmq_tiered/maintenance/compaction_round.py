"""One round of compaction in an archive: choose pages, plan, announce, write, commit.

The keys of outputs and pages are announced by a commit as pending deletions, so that they are garbage if the compaction
dies. The commit that replaces the pages takes them back, and makes the sources pending deletions that no other page
references. It is refused, and the round has no effect, when the epoch, the pages, the floors or the index files have
changed.

Runs are joined inside one log history and one index file's versions, and only below the versions that the caller
allows. Where a log diverges inside joined runs, they are cut (tiered/catalog/run_cuts.py).
"""

import random
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.compaction_plan import (
    CompactionLimits,
    IsWanted,
    gains,
    plan_join,
    plan_rewrite,
)
from rocketmq_tiered.maintenance.compaction_ranges import (
    PAGE_RUNS,
    ObjectRunCounter,
    ObjectRuns,
    PageRange,
    older_versions,
    ranges_of,
)
from tiered.archive.rewrite.outputs import Rewrite, compact, rewrite
from tiered.archive.rewrite.plan import Candidates, RewritePlan
from tiered.archive.rewrite.result import OutputIdentity, RewriteOptions, RewriteResult, output_keys
from tiered.catalog.commit import CommitDraft, CommitKind, PageChange
from tiered.catalog.deletions import Reason
from tiered.catalog.floors import rows_below
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.pages import Page, RunIndex, cut, sorted_page, write_pages
from tiered.catalog.requirements import Floors, IndexBegins, Requirements, histories_of
from tiered.catalog.state import REPAIRED, CatalogState, PageRef, RunChunk
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.errors import CorruptionError
from tiered.formats.keys import SETS_PREFIX, compaction_attempts_from, page_key
from tiered.model.queue import QueueKey
from tiered.model.tables import FLOOR_DTYPE, OBJECT_DTYPE, RUN_DTYPE, Table, concatenated, copied, picked
from tiered.object_store.interface import ObjectStore, put_own


@dataclass
class PlannedRound:
    """What a round does: the pages it replaces, their runs, and the plan for them. ``copied_runs``: of its pages, that
    it only copies. Once the outputs are written, only the runs that stay where they are, and no ranges."""

    range: PageRange
    candidates: Candidates
    plan: RewritePlan
    copied_runs: int = 0

    @property
    def objects(self) -> float:
        """Sources; those that several rounds share are counted in parts."""
        return float(self.candidates.share[self.plan.sources].sum())

    @property
    def message_bytes(self) -> int:
        """What it moves, before compression."""
        return sum(part.message_bytes for iteration in self.plan.iterations for part in iteration)

    @property
    def gone(self) -> NDArray[Any]:
        """Sources that nothing references after the round."""
        sources = self.plan.sources
        found: NDArray[Any] = sources[self.candidates.share[sources] == 1]
        return found

    @property
    def versions(self) -> tuple[int, int]:
        """The first and last version that its pages cover."""
        chosen = self.range
        oldest = int(self.candidates.runs["version"].min())
        first = min([page.from_version for page in chosen.pages], default=oldest)
        return first, max([chosen.spilled_version, *(page.to_version for page in chosen.pages)])

    @property
    def staying(self) -> NDArray[np.bool_]:
        """Which of the runs stay where they are."""
        if self.plan.replaced is not None:
            return ~self.plan.replaced
        stays: NDArray[np.bool_] = ~np.isin(self.candidates.runs["object"], self.plan.sources)
        return stays

    def forget_written(self) -> None:
        """Free the tables of runs that were written to new objects, as merging pages needs the memory. Only runs that
        stay where they are remain."""
        stays = picked(self.candidates.runs, self.staying)
        self.candidates = replace(self.candidates, runs=stays)
        self.plan = replace(
            self.plan,
            iterations=[],
            replaced=None if self.plan.replaced is None else np.zeros(len(stays), bool),
        )


def plan_rounds(
    store: ObjectStore,
    state: CatalogState,
    limits: CompactionLimits,
    *,
    before_version: int,
    is_wanted: IsWanted = gains,
    counter: ObjectRunCounter | None = None,
    damaged: Set[str] = frozenset(),
) -> Iterator[PlannedRound]:
    """Plan the rounds of compaction that ``is_wanted`` accepts, the oldest catalog versions first. Of a large sequence
    of pages only the first round is planned, whose range says which share of the sequence it is. Reads pages of the
    catalog, and no data.

    Only versions below ``before_version`` take part. ``counter``: the same one for all rounds. ``damaged`` objects
    (their keys) stay where they are.
    """
    index = RunIndex(store)
    counter = counter or ObjectRunCounter()
    for ranges in ranges_of(state, before_version, limits.runs_max):
        rounds = (_planned(index, state, chosen, limits, is_wanted, counter, damaged) for chosen in ranges)
        first = next((planned for planned in rounds if planned is not None), None)
        if first is not None:
            yield first
            del first  # so that two rounds are never in memory


def _planned(
    index: RunIndex,
    state: CatalogState,
    chosen: PageRange,
    limits: CompactionLimits,
    is_wanted: IsWanted,
    counter: ObjectRunCounter,
    damaged: Set[str],
) -> PlannedRound | None:
    """Plan the round for the pages of ``chosen``: rewrite small objects and objects of many queues if that is wanted,
    else join objects of one queue; None if neither is worth its cost."""
    candidates, copied = candidates_in(index, state, chosen, counter, damaged)
    if not len(candidates.runs):
        return None
    for plan_of in (plan_rewrite, plan_join):
        plan = plan_of(candidates, limits)
        if plan is not None and is_wanted(candidates, plan):
            return PlannedRound(chosen, candidates, plan, copied)
    return None


def candidates_in(
    index: RunIndex, state: CatalogState, chosen: PageRange, counter: ObjectRunCounter, damaged: Set[str]
) -> tuple[Candidates, int]:
    """The runs of the pages of ``chosen`` that may be compacted, with their objects, and how many other runs of these
    pages are only copied to new pages."""
    # Objects that are not in the message index stay, as queries scan them by name.
    fixed = damaged | state.unindexed.keys()
    candidates = _candidates(state, chosen.compacted(index, state), chosen.runs, fixed)
    copied = 0
    if chosen.is_partial and len(candidates.runs):
        found_runs = counter.count(index, state, [*chosen.pages, *chosen.others], chosen.memory(state))
        candidates = _with_shares(candidates, found_runs)
        copied = int(found_runs.runs.sum()) - len(candidates.runs) if chosen.end is not None else 0
    if REPAIRED in state.settings and len(candidates.runs):
        # A repair adds runs of objects whose other runs are of earlier versions.
        memory = replace(chosen, spilled_version=state.version).memory(state)
        candidates = _with_shares(candidates, counter.count(index, state, state.pages, memory))
    return candidates, copied


def _with_shares(candidates: Candidates, found: ObjectRuns) -> Candidates:
    """``candidates`` with the share of each object's runs that are among them."""
    runs = np.bincount(candidates.runs["object"], minlength=len(candidates.objects))
    all_runs = found.of(candidates.object_keys)
    return replace(candidates, share=np.where(all_runs == 0, 1.0, runs / np.maximum(all_runs, 1)))


def run_round(
    store: ObjectStore,
    state: CatalogState,
    planned: PlannedRound,
    options: RewriteOptions,
    *,
    clock: Clock,
    page_runs_max: int = CatalogLimits().page_runs_max,
    write: Rewrite = rewrite,
    maintenance: MaintenanceCommit | None = None,
) -> RewriteResult | None:
    """Carry out the round ``planned``, which was planned for ``state``, and commit it. Returns None if the archive has
    changed since, so that nothing was replaced. ``write`` writes the new objects. ``maintenance``: one that is open
    already, whose page merges then wait for the round; None opens one."""
    maintenance = maintenance or MaintenanceCommit.opened(store, state, "compact", clock)
    identity = OutputIdentity(
        state.cluster,
        state.broker,
        state.epoch,
        state.cursor.history,
        state.version,
        clock.wall_ms(),
        compaction_attempts_from(random.SystemRandom().getrandbits(40)),
    )
    with maintenance.merges_paused(spills_late=planned.range.spilled_version > 0):
        return _Round(store, state, planned, maintenance, identity, page_runs_max).run(options, write)


class _Round:
    """One round being carried out."""

    def __init__(
        self,
        store: ObjectStore,
        state: CatalogState,
        planned: PlannedRound,
        maintenance: MaintenanceCommit,
        identity: OutputIdentity,
        page_runs_max: int,
    ) -> None:
        """Choose the keys of all new objects and pages, so that a commit can announce them before they are written: if
        the round is interrupted, they are garbage. ``page_runs_max``: runs in a page of the catalog."""
        self._store, self._state, self._planned = store, state, planned
        self._maintenance, self._page_runs_max = maintenance, page_runs_max
        self._identity = identity
        self._required = _required(state, planned)
        self._versions = planned.versions
        self._announced = output_keys(planned.candidates, planned.plan, identity)
        self._page_keys = _page_keys(state, planned, identity, page_runs_max)

    def run(self, options: RewriteOptions, write: Rewrite) -> RewriteResult | None:
        """Announce the new objects, write them, and commit them in the place of the replaced ones. None if the archive
        has changed since the plan, so that a commit is refused; nothing is replaced then."""
        planned = self._planned
        if not self._maintenance.announce([*self._announced, *self._page_keys], self._required):
            return None
        announcing = replace(options, announce=self._announce_more)
        try:
            result = compact(self._store, planned.candidates, planned.plan, self._identity, announcing, write)
        except _VoidError:
            return None
        queues, floors = _dropped(self._state, planned, result)
        # The tables of what was written are no longer needed; writing pages needs the memory.
        planned.forget_written()
        options.release()
        pages = _put_pages(
            self._store, self._state, planned, self._versions, result, self._page_keys, self._page_runs_max
        )
        sources = {planned.candidates.object_keys[number] for number in planned.gone.tolist()}
        announced = {*self._announced, *self._page_keys}
        taken_back = [*(key for key in result.object_keys if key in announced), *self._page_keys]
        draft = CommitDraft(
            CommitKind.MAINTENANCE,
            queues=queues,
            floors=floors,
            pages=PageChange(
                added=tuple(pages),
                removed=[page.key for page in planned.range.pages],
                # Pages of the same versions that stay may still have runs that were removed: these stay listed.
                resolved_version=0 if planned.range.others else self._state.version,
                spilled_version=planned.range.spilled_version,
            ),
            restored=tuple(taken_back),
            pending_deletions=tuple(sorted(sources | set(result.abandoned))),
            reason=Reason.COMPACTED,
        )
        required = replace(self._required, announced=frozenset(taken_back))
        return result if self._maintenance.commit(lambda _state: draft, required) else None

    def _announce_more(self, key: str) -> None:
        if not self._maintenance.announce([key], self._required):
            raise _VoidError
        self._announced.append(key)


def _dropped(
    state: CatalogState, planned: PlannedRound, result: RewriteResult
) -> tuple[list[QueueKey], Table]:
    """The queues that lose rows because the plan selects rows (key compaction does), and for each a row of FLOOR_DTYPE:
    how many it loses, with its minimum offset as it is."""
    candidates, count = planned.candidates, len(planned.candidates.queues)
    none: tuple[list[QueueKey], Table] = [], np.zeros(0, FLOOR_DTYPE)
    if planned.plan.selection is None:
        return none
    moved = picked(candidates.runs, planned.plan.moved(len(candidates.runs)))
    alive = moved["rows"] - rows_below(moved, candidates.floors[moved["queue"]])
    lost = np.bincount(moved["queue"], weights=alive, minlength=count)
    lost -= np.bincount(result.runs["queue"], weights=result.runs["rows"], minlength=count)
    numbers = np.flatnonzero(lost)
    queues = [candidates.queues[number] for number in numbers.tolist()]
    floors = np.zeros(len(queues), FLOOR_DTYPE)
    floors["queue"], floors["rows"] = np.arange(len(queues)), lost[numbers]
    floors["min_queue_offset"] = Floors.of(state, queues).minimum
    return queues, floors


class _VoidError(Exception):
    """The archive has changed: no further object is written."""


def _required(state: CatalogState, planned: PlannedRound) -> Requirements:
    """What must still be as in ``state`` when the round ``planned`` commits: epoch, log histories, pages, floors and
    index files. If another commit has changed any of it, the commit of the round is refused."""
    chosen = planned.range
    queues = list(planned.candidates.queues)
    if chosen.is_partial:
        # A source may also have runs of queues outside the range. If these expire during the round, nothing references
        # the source any longer, and this round does not list it as garbage: no floor at all may change.
        queues = list(state.directory.roster.keys[: len(state.table)])
    return Requirements(
        epoch=state.epoch,
        histories=histories_of(state),
        pages=frozenset(page.key for page in (*chosen.pages, *chosen.others)),
        tombstones=len(state.tombstones),  # runs that were removed since the pages were written
        memory=(chosen.spilled_version, len(older_versions(state, chosen.spilled_version))),
        floors=Floors.of(state, queues),
        index_begins=IndexBegins(planned.plan.last_version, frozenset(planned.candidates.covers)),
    )


def _candidates(state: CatalogState, pages: Iterable[Page], runs_max: int, fixed: Set[str]) -> Candidates:
    """One table of the runs of ``pages``, at most ``runs_max``, with queues and objects numbered through all pages.
    One page is in memory at a time. Objects with a key in ``fixed`` stay where they are."""
    queue_numbers: dict[QueueKey, int] = {}
    numbers: dict[str, int] = {}  # of objects, by key
    objects: list[Table] = []
    runs = np.empty(runs_max, RUN_DTYPE)
    count = 0
    for page in pages:
        chunk = page.chunk
        if not len(chunk.runs):
            continue
        keys = [chunk.object_keys[number] for number in chunk.objects["key"].tolist()]
        known = len(numbers)
        object_number = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.uint32)
        which, first = np.unique(object_number, return_index=True)  # pages may repeat an object
        new_objects = picked(chunk.objects, first[which >= known])
        new_objects["key"] = which[which >= known]
        objects.append(new_objects)
        queues = [queue_numbers.setdefault(queue, len(queue_numbers)) for queue in page.queues]
        page_runs = runs[count : count + len(chunk.runs)]
        # As bytes: numpy copies a structured array field by field, which takes several times as long.
        page_runs.view(np.uint8)[:] = np.ascontiguousarray(chunk.runs).view(np.uint8)
        page_runs["queue"] = np.array(queues, np.uint32)[page_runs["queue"]]
        page_runs["object"] = object_number[page_runs["object"]]
        count += len(chunk.runs)
    queues_in_order = sorted(queue_numbers)
    rank = np.empty(len(queue_numbers), np.uint32)
    rank[[queue_numbers[queue] for queue in queues_in_order]] = np.arange(len(rank), dtype=np.uint32)
    runs = runs[:count]
    runs["queue"] = rank[runs["queue"]]
    object_keys = list(numbers)
    return Candidates(
        queues=queues_in_order,
        runs=runs,
        objects=concatenated(objects, OBJECT_DTYPE),
        object_keys=object_keys,
        is_set=np.array([key.startswith(SETS_PREFIX) for key in object_keys], bool),
        floors=Floors.of(state, queues_in_order).minimum,
        is_fixed=np.array([key in fixed or key in state.pending_deletions for key in object_keys], bool),
        share=np.ones(len(object_keys)),
        covers=tuple(sorted(index.from_version for index in state.indexes)),
    )


def _put_pages(
    store: ObjectStore,
    state: CatalogState,
    planned: PlannedRound,
    versions: tuple[int, int],
    result: RewriteResult,
    page_keys: Sequence[str],
    page_runs_max: int,
) -> list[PageRef]:
    """Write the pages of the catalog that replace those of the round: with its runs that stay where they are, its new
    runs, and runs of other queues that are only copied. They take the first of ``page_keys``. Raises CorruptionError if
    the copied runs are not as many as were planned."""
    candidates = planned.candidates
    new, objects = copied(result.runs), copied(result.objects)
    new["object"] += len(candidates.objects)
    objects["key"] += len(candidates.object_keys)
    chunk = RunChunk(
        concatenated([candidates.runs, new], RUN_DTYPE),
        concatenated([candidates.objects, objects], OBJECT_DTYPE),
        (*candidates.object_keys, *result.object_keys),
    )
    unused = list(reversed(page_keys))

    def put(_version: int, data: bytes) -> str:
        key = unused.pop()
        put_own(store, key, [data])
        return key

    copied_runs = 0

    def copying(begin: int, end: int | None) -> Iterator[Page]:
        nonlocal copied_runs
        for page in planned.range.copied(RunIndex(store), state, begin, end):
            copied_runs += len(page.chunk.runs)
            yield page

    pages: Iterator[Page] = iter(())
    if len(chunk.runs):
        pages = cut(sorted_page(candidates.queues, chunk), page_runs_max)
    if planned.range.end is not None:
        pages = chain(copying(0, planned.range.begin), pages, copying(planned.range.end, None))
    refs = write_pages(pages, planned.range.level, versions, put)
    if copied_runs != planned.copied_runs:
        raise CorruptionError(
            f"a round of compaction copied {copied_runs} runs of catalog pages, not {planned.copied_runs}: nothing "
            "was replaced"
        )
    return refs


def _page_keys(
    state: CatalogState, planned: PlannedRound, identity: OutputIdentity, page_runs_max: int
) -> list[str]:
    """Keys of as many catalog pages as the round may write: each range of rows becomes at most one run."""
    stays = int(planned.staying.sum())
    ranges = sum(len(part.ranges) for iteration in planned.plan.iterations for part in iteration)
    _, last = planned.versions
    pages = -(-(stays + ranges) // page_runs_max)
    if planned.range.end is not None:
        # Copied pages before and behind, and parts of pages where they were cut.
        pages += -(-planned.copied_runs // min(page_runs_max, PAGE_RUNS)) + 3
    return [
        page_key("runs", last, state.epoch, f"{identity.first_attempt:x}_{number}")
        for number in range(1, pages + 1)
    ]
