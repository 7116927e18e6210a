"""A pass of expiry over an archive: reads the catalog, plans new floors, and commits them.

One maintenance commit raises the floors, makes objects without a living run pending deletions, in a list of their own,
and drops pages and index files of which nothing is alive. When another commit was faster, the changes are checked
again against the newest state, without a second pass. What expires is decided in expire_plan.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.expire_plan import (
    NEVER_MS,
    PARENT_DTYPE,
    CommitTimes,
    ExpiryPlan,
    ExpiryPlanner,
    ExpiryQueues,
    MissedPasses,
)
from rocketmq_tiered.maintenance.gc import require_same_clock
from tiered.archive.segment_reader import SegmentCache, SegmentReader
from tiered.archive.task import EXPIRY, Due
from tiered.archive.timers import TimerFiles
from tiered.catalog.commit import NO_PAGES, CommitDraft, CommitKind, PageChange
from tiered.catalog.deletions import DeletionChange, PendingDeletion, Reason
from tiered.catalog.floors import is_expired
from tiered.catalog.garbage import KeySet, digests, settled_version
from tiered.catalog.index_refs import NO_INDEX_CHANGE, IndexChange
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.page_merge import merged_pages
from tiered.catalog.pages import Page, RunIndex, living_pages, living_runs, memory_page, sequences_of
from tiered.catalog.requirements import LOG_HISTORY, Floors, Requirements, histories_of
from tiered.catalog.state import CatalogState, RunChunk
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.console import size_text
from tiered.errors import CorruptionError, NotFoundError, UsageError
from tiered.formats.keys import catalog_key
from tiered.formats.run_part import CatalogRun
from tiered.formats.segment import RowTable
from tiered.model.queue import QueueKey
from tiered.model.tables import OBJECT_DTYPE, Table
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import Settings
from tiered.settings.topic_rules import TopicRule

logger = logging.getLogger(__name__)

FIRST_AFTER_S = 300.0
"""Wait after the start: before the first collection of garbage."""
DAY_MS = 24 * 3_600_000
TOO_MUCH = "the pass exceeds retention.max_share"


class ExpiryTask:
    """Expires messages of ``store`` every gc.every_ms, once a day if another process collects. ``rules_of`` gives the
    rules of a state's topics."""

    name = EXPIRY

    def __init__(
        self,
        store: ObjectStore,
        settings: Settings,
        rules_of: Callable[[CatalogState], Callable[[str], TopicRule]],
        *,
        clock: Clock = MACHINE_CLOCK,
        erase: Erasure | None = None,
        is_unlimited: bool = False,
    ) -> None:
        """``erase``: the topic that expires as a whole, instead of what the rules say; ``is_unlimited``: even more than
        retention.max_share of the archive may expire."""
        self._store, self._settings, self._rules_of = store, settings, rules_of
        self._clock, self._erase, self._is_unlimited = clock, erase, is_unlimited or erase is not None
        self.due = Due(every_s=(settings.gc.every_ms or DAY_MS) / 1000, first_s=FIRST_AFTER_S)
        self.problem = ""
        self._planned_ms = 0
        self._missed: MissedPasses | None = None
        """Since the last pass of this process, unless that was stopped."""

    def plan(self, state: CatalogState) -> ExpiryPass:
        """What expires now by the rules of ``state``. Raises UsageError if the clock is off, or the topic to erase is
        unknown."""
        self._planned_ms = self._clock.wall_ms()
        return plan_pass(
            self._store,
            state,
            self._rules_of(state),
            clock=self._clock,
            erase=self._erase,
            missed=self._missed,
        )

    def is_too_much(self, found: ExpiryPass) -> bool:
        """Whether it is more than retention.max_share of the archive, and may not be."""
        return not self._is_unlimited and found.plan.exceeds(self._settings.retention.max_share)

    def step(self, state: CatalogState, found: ExpiryPass) -> bool:
        """Commit ``found``, which the method ``plan`` returned, unless it expires more than retention.max_share of the
        archive: then log that and change nothing."""
        plan, max_share = found.plan, self._settings.retention.max_share
        self.problem = TOO_MUCH if self.is_too_much(found) else ""
        self._missed = None
        if self.problem:
            logger.error(
                "no message expired: the pass would hide %.0f%% of the archive, more than retention.max_share "
                "(%.0f%%); check the rules of topics, then run `tiered expire ARCHIVE_URL --apply --yes`",
                100 * plan.share,
                100 * max_share,
            )
            return False
        commit_pass(self._store, state, found, clock=self._clock)
        self._missed = MissedPasses(self._planned_ms, max(1, int((self.due.every_s or 0) * 1000)))
        if found.is_committed:
            logger.info(
                "%d messages, %s, expired; %d objects, %s, will be deleted after gc.grace_ms",
                plan.rows,
                size_text(plan.byte_count),
                len(found.objects),
                size_text(found.object_bytes),
            )
        return False


MERGED_RUNS = 32_768
LIST_ENTRIES_MAX = 65_536
"""Objects in one list of pending deletions: gc reads one list at a time."""


@dataclass(frozen=True)
class Erasure:
    """All messages of a topic expire: of one generation, or of all."""

    topic: str
    generation: int | None = None


@dataclass
class ExpiryPass:
    """What a pass found. ``objects``, keys in order, have no living run afterwards, ``object_bytes`` in all.
    ``shared_bytes`` are of expired messages in objects that stay, before compression. ``is_committed``: the floors are
    in force."""

    plan: ExpiryPlan
    objects: NDArray[np.bytes_] = field(default_factory=lambda: np.empty(0, "S1"))
    """Keys of objects, as bytes instead of strings because there may be a million."""
    object_bytes: int = 0
    shared_bytes: int = 0
    is_committed: bool = False
    dead_pages: list[str] = field(default_factory=list)
    """Pages of the catalog without a living run."""
    oldest_version: int = 0
    """The oldest version that added a living run."""


def plan_pass(
    store: ObjectStore,
    state: CatalogState,
    rule_of: Callable[[str], TopicRule],
    *,
    clock: Clock,
    erase: Erasure | None = None,
    missed: MissedPasses | None = None,
) -> ExpiryPass:
    """What expires now, by the rules ``rule_of`` gives for topics, or all of the topic of ``erase``. ``missed``: passes
    that did not take place, whose share does not count. Reads every page of the catalog, twice if something expires,
    and the index of objects with LMQ entries that may expire, or with runs of which a size limit takes a part.

    Raises UsageError if the clock is off, or the topic of ``erase`` is unknown.
    """
    now_ms = require_same_clock(store, clock.wall_ms())
    queues = _queues(state, rule_of, erase, TimerFiles(store).first_offsets(state))
    planner = ExpiryPlanner(queues, _commit_times(store, state, queues, now_ms), now_ms, missed)
    index = RunIndex(store)
    for page in _in_order(state, index):
        rows = state.directory.rows(page.queues, len(state.table))
        runs = page.chunk.runs.copy()
        runs["queue"] = rows[runs["queue"]]
        # Pages are sorted by the queue's name, the planner takes runs by its number; offsets stay in order.
        planner.add(runs[np.argsort(runs["queue"], kind="stable")])
    reader = _CatalogRuns(store, state, index)
    found = ExpiryPass(planner.plan(reader.parents, reader.columns), oldest_version=state.version)
    del planner, queues, reader  # their memory is needed for keys of objects
    if len(found.plan.floors):
        _find_remains(state, index, found)
    return found


def commit_pass(store: ObjectStore, state: CatalogState, found: ExpiryPass, *, clock: Clock) -> CatalogState:
    """Commit the new minimum offsets that a pass over ``state`` ``found``, and the objects without living messages.
    Nothing is committed if another pass was faster, or another writer claimed the archive (``found.is_committed``).
    Raises UsageError if the broker's log was truncated since."""
    if not len(found.plan.floors):
        return state
    maintenance = MaintenanceCommit.opened(store, state, "expire", clock)
    deletions = _listed(maintenance, state, found, clock.wall_ms())
    queues = [state.key_of(int(row)) for row in found.plan.floors["queue"]]
    floors = found.plan.floors.copy()
    floors["queue"] = np.arange(len(floors))

    def change(newest: CatalogState) -> CommitDraft:
        """Drafts the commit of the pass: new floors, deletions, and those dead pages and index files that the newest
        state still has."""
        left = {page.key for page in newest.pages}
        gone = [key for key in found.dead_pages if key in left]
        index = [
            ref.key
            for ref in newest.indexes
            if ref.to_version < found.oldest_version and ref in state.indexes
        ]
        return CommitDraft(
            CommitKind.MAINTENANCE,
            queues=queues,
            floors=floors,
            deletions=deletions,
            pages=PageChange(removed=gone) if gone else NO_PAGES,
            index=IndexChange(removed=index)
            if index and len(index) < len(newest.indexes)
            else NO_INDEX_CHANGE,
            reason=Reason.EXPIRED,
        )

    required = Requirements(
        epoch=state.epoch,
        histories=histories_of(state),
        floors=Floors.of(state, queues),
        uncompacted_since=state.version,
    )
    found.is_committed = maintenance.commit(change, required)
    if maintenance.unmet == LOG_HISTORY:
        raise UsageError(
            f"{store.url}: nothing expired, because the broker's log was truncated or replaced during the pass",
            hint="run `tiered expire` again",
        )
    return maintenance.state


# -- planning -------------------------------------------------------------------------------------------------


def _queues(
    state: CatalogState,
    rule_of: Callable[[str], TopicRule],
    erase: Erasure | None,
    held: Mapping[QueueKey, int],
) -> ExpiryQueues:
    """The queues of ``state`` with their rules and minimum offsets, by their row in the state's table. With ``erase``
    only that topic expires, or one generation of it; raises UsageError if the archive does not have it. ``held``: by
    queue, the first offset of the messages that pending timers need, which do not expire."""
    rules: list[TopicRule] = []
    numbers: dict[str, int] = {}
    topic = np.zeros(state.queue_count, np.int64)
    erased = np.zeros(state.queue_count, bool)
    for row, key in enumerate(state.directory.roster.keys[: state.queue_count]):
        if key.topic not in numbers:
            numbers[key.topic] = len(rules)
            rule = rule_of(key.topic)
            rules.append(rule if erase is None else replace(rule, ttl_ms=None, max_bytes=None))
        topic[row] = numbers[key.topic]
        if erase is not None and key.topic == erase.topic:
            erased[row] = erase.generation in (None, key.generation)
    if erase is not None and not erased.any():
        generation = "" if erase.generation is None else f" in generation {erase.generation}"
        raise UsageError(
            f"the archive {state.cluster}/{state.broker} has no topic {erase.topic}{generation}",
            hint="tiered ls --hidden lists the topics",
        )
    floor = state.table["min_queue_offset"].astype(np.int64)
    versions = [history.version for history in state.log_histories]
    first = np.full(state.queue_count, NEVER_MS, np.int64)
    for key, offset in held.items():
        if (number := state.row_of(key)) is not None:
            first[number] = offset
    return ExpiryQueues(rules, topic, floor, erased, versions, first if held else None)


def _commit_times(store: ObjectStore, state: CatalogState, queues: ExpiryQueues, now_ms: int) -> CommitTimes:
    """When the bucket stored the commits by which runs are judged: the newest one that is older than a time to live of
    ``queues``, or than a time that messages stay after their upload, for each of these. All commits before one of
    them are older still, so that expiry needs no times of others."""
    times_ms: dict[int, int] = {}
    ages_ms = {*queues.min_archived_ms.tolist(), *queues.ttl_ms.tolist()} - {NEVER_MS}
    for age_ms in sorted(ages_ms, reverse=True):
        version = settled_version(store, state.version, now_ms - age_ms)
        if version:
            info = next(iter(store.list(catalog_key(version), limit=1)))
            times_ms[version] = info.modified_ms
    versions = sorted(times_ms)
    times = [times_ms[version] for version in versions]
    return CommitTimes(np.array(versions, np.int64), np.array(times, np.int64))


class _CatalogRuns:
    """Reads rows of runs from the tails of their objects. Runs are those of a plan: (queue, base_queue_offset, version)
    finds them."""

    def __init__(self, store: ObjectStore, state: CatalogState, index: RunIndex) -> None:
        self._state, self._index, self._segments = state, index, SegmentCache(store)

    def columns(self, run: np.void) -> RowTable | None:
        """The columns of the rows of ``run``; None, with a warning, if they cannot be read."""
        try:
            return self._open(run)[1]
        except (CorruptionError, NotFoundError) as error:
            logger.warning(
                "the rows of a run cannot be read, so that a size limit expires its messages all together: %s",
                error,
            )
            return None

    def parents(self, runs: Table) -> Table:
        """The queues whose messages the LMQ entries of ``runs`` refer to, as rows of PARENT_DTYPE: the number of the
        run, the row of the queue in the state's table (-1: not in the archive), and the end of the offsets there that
        the run needs."""
        rows_found: list[tuple[int, int, int]] = []
        for number, run in enumerate(runs):
            reader, rows = self._open(run)
            for parent in np.unique(rows.parent).tolist():
                last = int(rows.parent_queue_offset[rows.parent == parent].max())
                row = self._state.row_of(reader.queues[parent])
                rows_found.append((number, -1 if row is None else row, last + 1))
        return np.array(rows_found, PARENT_DTYPE)

    def _open(self, run: np.void) -> tuple[SegmentReader, RowTable]:
        """The object of a run, and the run's rows."""
        offset = int(run["base_queue_offset"])
        chunk = self._chunk(int(run["queue"]), offset)
        (at,) = np.flatnonzero(chunk.runs["base_queue_offset"] == offset)
        reader = self._segments.of_run(chunk, chunk.runs[at])
        return reader, reader.row_columns(CatalogRun.of(chunk.runs[at]))

    def _chunk(self, row: int, offset: int) -> RunChunk:
        window = self._index.window(self._state, self._state.key_of(row), offset)
        return self._state.memory_chunk_of(row) if window is None else window[1]


# -- what is left without a living run ------------------------------------------------------------------------


def _in_order(state: CatalogState, index: RunIndex) -> Iterable[Page]:
    """All living runs of ``state`` by (queue, base offset), as pages without the names of their objects."""
    streams = [living_pages(index, state, sequence) for sequence in sequences_of(state.pages)]
    return merged_pages(
        [map(_without_objects, stream) for stream in (*streams, memory_page(state))], MERGED_RUNS
    )


def _without_objects(page: Page) -> Page:
    """The same runs, all of one object without a name: merging keys of objects takes most of a pass's memory."""
    runs = page.chunk.runs.copy()
    runs["object"] = 0
    return replace(
        page, chunk=replace(page.chunk, runs=runs, objects=np.zeros(1, OBJECT_DTYPE), object_keys=("",))
    )


def _find_remains(state: CatalogState, index: RunIndex, found: ExpiryPass) -> None:
    """Fill in ``found``: which objects and pages have no living run once its new minimum offsets are in force, which
    version is the oldest with one, and how many expired bytes stay because their objects have living messages too."""
    minimum = state.table["min_queue_offset"].astype(np.int64)
    minimum[found.plan.floors["queue"]] = found.plan.floors["min_queue_offset"]
    living: list[NDArray[np.uint64]] = []
    found.shared_bytes = found.plan.byte_count
    expired = _Expired()
    for number, page in enumerate(living_runs(index, state)):
        runs, chunk = page.chunk.runs, page.chunk
        rows = state.directory.rows(page.queues, len(state.table))
        dead = is_expired(runs, minimum[rows[runs["queue"]]])
        if not dead.all():
            found.oldest_version = min(found.oldest_version, int(runs["version"][~dead].min()))
        elif number < len(state.pages):
            found.dead_pages.append(state.pages[number].key)
        names = digests(chunk.object_keys)[chunk.objects["key"]]
        living.append(names[np.unique(runs["object"][~dead])])
        if dead.any():
            expired.add(chunk, names, runs[dead])
    expired.sort_out(KeySet.of_digests(living), found)


class _Expired:
    """Objects with expired runs, as columns: there may be millions, and one may be in several pages."""

    def __init__(self) -> None:
        self._keys: list[NDArray[np.bytes_]] = []
        self._digests: list[NDArray[np.uint64]] = []
        self._object_bytes: list[NDArray[np.int64]] = []
        self._message_bytes: list[NDArray[np.int64]] = []

    def add(self, chunk: RunChunk, names: NDArray[np.uint64], runs: Table) -> None:
        """Add the objects of expired ``runs`` of one page. ``names``: digests of the keys of all the page's objects."""
        numbers = np.unique(runs["object"])
        sizes = np.bincount(runs["object"], runs["byte_count"], minlength=len(chunk.objects))
        keys = [chunk.object_keys[key] for key in chunk.objects["key"][numbers].tolist()]
        self._keys.append(np.array(keys, np.bytes_))
        self._digests.append(names[numbers])
        self._object_bytes.append(chunk.objects["size_bytes"][numbers])
        self._message_bytes.append(sizes[numbers].astype(np.int64))

    def sort_out(self, living: KeySet, found: ExpiryPass) -> None:
        """Fill in ``found``: the added objects that are not ``living``, their bytes, and the bytes of expired messages
        that stay in living objects. Columns are freed as soon as they were used, as there may be millions of rows."""
        if not self._keys:
            return
        digests = np.concatenate(self._digests)
        self._digests.clear()
        # Sort by digest: an object that several pages have is one group, which begins at one of ``starts``.
        order = np.argsort(digests, kind="stable").astype(np.uint32)
        digests = digests[order]
        starts = np.flatnonzero(np.append(True, digests[1:] != digests[:-1]))
        stays = living.holds(digests[starts])
        message_bytes = np.add.reduceat(np.concatenate(self._message_bytes)[order], starts)
        found.shared_bytes = max(0, found.shared_bytes - int(message_bytes[~stays].sum()))
        gone = order[starts[~stays]]
        found.object_bytes = int(np.concatenate(self._object_bytes)[gone].sum())
        is_gone = np.zeros(len(order), bool)
        is_gone[gone] = True
        del digests, order, starts, stays, message_bytes
        self._object_bytes.clear()
        self._message_bytes.clear()
        found.objects = np.empty(len(gone), max(keys.dtype for keys in self._keys))
        begin = filled = 0
        self._keys.reverse()
        while self._keys:  # no two copies of all keys at once
            part = self._keys.pop()
            keys = part[is_gone[begin : begin + len(part)]]
            found.objects[filled : filled + len(keys)] = keys
            begin, filled = begin + len(part), filled + len(keys)
        found.objects.sort()


# -- committing -----------------------------------------------------------------------------------------------


def _listed(
    maintenance: MaintenanceCommit, state: CatalogState, found: ExpiryPass, now_ms: int
) -> DeletionChange:
    """Store the keys of objects without a living run in list objects, LIST_ENTRIES_MAX keys in each, for the commit
    that makes them pending deletions (deleted after the grace period)."""
    pending = PendingDeletion(now_ms, state.version + 1, Reason.EXPIRED)
    parts = (
        found.objects[first : first + LIST_ENTRIES_MAX].tolist()
        for first in range(0, len(found.objects), LIST_ENTRIES_MAX)
    )
    return DeletionChange(
        added=[maintenance.put_list(state, dict.fromkeys(map(bytes.decode, keys), pending)) for keys in parts]
    )
