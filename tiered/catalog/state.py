"""The catalog at one version: an immutable value.

Changes are in apply.py, root pages in snapshot.py, older runs in pages.py. Memory follows the number of live queues:
runs older than the last spill are only in pages.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.deletions import DeletionList, PendingDeletion, Reason
from tiered.catalog.index_refs import IndexRef, indexed_version, unindexed
from tiered.catalog.queue_directory import QueueDirectory
from tiered.catalog.timer_refs import TimerRef
from tiered.formats.keys import PAGES_PREFIX, object_of
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import QueueSelection
from tiered.model.tables import (
    GAP_DTYPE,
    OBJECT_DTYPE,
    QUEUE_EXPIRED,
    QUEUE_FILLED,
    QUEUE_HIDDEN,
    QUEUE_STATE_DTYPE,
    QUEUE_SUPERSEDED,
    RUN_DTYPE,
    Table,
    concatenated,
    copied,
    picked,
)

REPAIRED = "repaired"
"""Setting of an archive: `version` of the newest repair, `ms`, and what it could not bring back."""
UNKNOWN_OFFSET = -1
"""``end_queue_offset`` of a generation that begins at the offset of its first record."""

REMOVED_DTYPE = np.dtype([
    ("queue", "<u4"), ("rows", "<u4"),
    ("base_queue_offset", "<i8"), ("end_queue_offset", "<i8"),
    ("version", "<i8"),              # catalog version that had added the run
    ("removed_version", "<i8"),      # catalog version that removed it
])  # fmt: skip
"""A run that a commit removed. In the state: a tombstone over a run in a page."""


class LogCheck(NamedTuple):
    """CRC32C of commitlog bytes [begin_phys, end_phys), the last ones of a commit; empty: no check."""

    begin_phys: int
    end_phys: int
    crc32c: int


NO_CHECK = LogCheck(0, 0, 0)


@dataclass(frozen=True)
class LogCursor:
    """Everything below ``phys`` of log history ``history`` is committed: the dispatch offset."""

    history: int
    phys: int
    check: LogCheck


class Owner(NamedTuple):
    """Owner of an epoch. ``kind``: "run" or "backfill"."""

    instance: str
    kind: str
    host: str
    claimed_ms: int
    released: bool


class PageRef(NamedTuple):
    """One immutable page of runs, sorted by (queue, base offset).

    Pages with equal level and versions are one sorted sequence. ``first`` and ``last`` are queues.
    """

    key: str
    level: int
    from_version: int
    to_version: int
    runs: int
    size_bytes: int
    first: QueueKey
    last: QueueKey
    first_offset: int
    """Base offset of the first run, of queue ``first``."""
    last_offset: int
    """Base offset of the last run, of queue ``last``."""
    min_ms: int
    """The smallest store timestamp in it."""
    max_ms: int
    """The largest one."""

    def overlaps(self, first_version: int, last_version: int) -> bool:
        """Whether it may contain runs that these versions added."""
        return self.from_version <= last_version and first_version <= self.to_version


class RootRef(NamedTuple):
    """A root page: a copy of the whole state at ``version``, where a reader starts and applies the commits after it."""

    key: str
    version: int


NO_ROOT = RootRef("", 0)


class LogHistory(NamedTuple):
    """One history of the commitlog. Commits in (common_version, version) belong to an earlier history and are
    superseded. ``root`` is its first state. ``hidden`` is the state of what its begin took out of the visible offsets
    (hidden_history.py), ``hidden_messages`` how many messages that are, since ``created_ms``."""

    number: int
    begin_phys: int
    common_version: int
    version: int
    root: str
    hidden: str
    hidden_messages: int
    created_ms: int


@dataclass(frozen=True)
class RunChunk:
    """Runs with their objects. ``runs.queue`` is a row of the state, or of a page's queue list."""

    runs: Table
    objects: Table
    object_keys: tuple[str, ...]


EMPTY_CHUNK = RunChunk(np.zeros(0, RUN_DTYPE), np.zeros(0, OBJECT_DTYPE), ())


@dataclass(frozen=True)
class CatalogState:
    """The catalog at one version. Immutable; ``dataclasses.replace`` makes the next one.

    ``table`` has one QUEUE_STATE_DTYPE row for each queue of ``directory``. ``pages`` name the pages with older runs;
    ``chunks`` are all others, which are in memory alone, oldest first. ``tombstones``: removed runs that pages still
    have. ``created_ms``: time of the newest commit.
    """

    version: int = 0
    epoch: int = 0
    put_id: str = ""
    owner: Owner | None = None
    cluster: str = ""
    broker: str = ""
    cursor: LogCursor = LogCursor(1, 0, NO_CHECK)
    started: bool = False
    """Whether a commit has moved the cursor; the first may begin anywhere."""
    advanced_ms: int = 0
    """Time of the owner's last append."""
    created_ms: int = 0
    directory: QueueDirectory = field(default_factory=QueueDirectory)
    table: Table = field(default_factory=lambda: np.zeros(0, QUEUE_STATE_DTYPE))
    gaps: Table = field(default_factory=lambda: np.zeros(0, GAP_DTYPE))
    chunks: tuple[RunChunk, ...] = ()
    pages: tuple[PageRef, ...] = ()
    tombstones: Table = field(default_factory=lambda: np.zeros(0, REMOVED_DTYPE))
    root: RootRef = NO_ROOT
    kept_roots: tuple[RootRef, ...] = ()
    """Older roots from which earlier versions are read; others become garbage when the next root is named."""
    log_histories: tuple[LogHistory, ...] = ()
    state_objects: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    pending_deletions: Mapping[str, PendingDeletion] = field(default_factory=dict)
    """The newest ones; others are in ``deletion_lists``."""
    deletion_lists: tuple[DeletionList, ...] = ()
    indexes: tuple[IndexRef, ...] = ()
    """Index files, by version."""
    timers: tuple[TimerRef, ...] = ()
    """Objects of timers of which something is left."""
    unread_root: RootRef = NO_ROOT
    """The newest root page, if it could not be read, so that this was loaded from an earlier one and more commits. Not
    stored."""

    @cached_property
    def oldest_pending_deletion_ms(self) -> int | None:
        """When the oldest pending deletion became garbage, ms since the epoch; None: there is none."""
        oldest = [pending.since_ms for pending in self.pending_deletions.values()]
        listed_ms = [listed.oldest_ms for listed in self.deletion_lists]
        return min(oldest + listed_ms, default=None)

    @cached_property
    def oldest_garbage_ms(self) -> int | None:
        """When the oldest pending deletion with the usual grace period became garbage, ms since the epoch; None: there
        is none. A list is collected as a whole, so its newest entry counts."""
        oldest = [
            pending.since_ms
            for pending in self.pending_deletions.values()
            if pending.reason not in (Reason.DIVERGED, Reason.UNEXPLAINED)
        ]
        listed_ms = [listed.newest_ms for listed in self.deletion_lists if listed.reason != Reason.DIVERGED]
        return min(oldest + listed_ms, default=None)

    @property
    def pending_deletion_count(self) -> int:
        """Pending deletions, including listed ones."""
        listed = sum(listed.entries for listed in self.deletion_lists)
        return len(self.pending_deletions) + listed

    @cached_property
    def diverged_count(self) -> int:
        """Objects of a truncated or replaced log that wait for their deletion."""
        recent = sum(pending.reason == Reason.DIVERGED for pending in self.pending_deletions.values())
        return recent + sum(
            listed.entries for listed in self.deletion_lists if listed.reason == Reason.DIVERGED
        )

    # -- queues -----------------------------------------------------------------------------------------------

    @property
    def queue_count(self) -> int:
        """Queues of all generations, including hidden ones."""
        return len(self.table)

    @property
    def queue_keys(self) -> QueueSelection:
        """The queues by row of ``table``."""
        return self.directory.roster.first(len(self.table))

    def row_of(self, key: QueueKey) -> int | None:
        """Row of ``key`` in ``table``, or None."""
        return self.directory.row(key, len(self.table))

    def key_of(self, row: int) -> QueueKey:
        """The queue in ``row``."""
        return self.directory.roster.keys[row]

    def queue(self, key: QueueKey) -> np.void | None:
        """The QUEUE_STATE_DTYPE row of ``key``, or None."""
        row = self.row_of(key)
        found: np.void | None = None if row is None else self.table[row]
        return found

    def queues(self) -> Iterator[tuple[QueueKey, np.void]]:
        """All queues with their rows, in order of appearance."""
        return zip(self.directory.roster.keys[: len(self.table)], self.table, strict=True)

    def visible_queues(self) -> list[QueueKey]:
        """Queues listed by default, sorted by name."""
        shown = np.flatnonzero((self.table["flags"] & QUEUE_HIDDEN) == 0).tolist()
        return sorted(self.directory.roster.keys[row] for row in shown)

    def current_generation(self, topic: str, queue_id: int) -> int | None:
        """The newest generation of a queue, or None if it was never archived."""
        return self.directory.latest_generation(topic, queue_id, len(self.table))

    def current_queues(self) -> Iterator[tuple[QueueKey, np.void]]:
        """The queues to which a writer appends: the newest generation of each, with its row of the queue table.

        If that ended when the broker's log was replaced, the next generation, which does not exist yet: its row is
        hidden and its ``end_queue_offset`` is UNKNOWN_OFFSET.
        """
        for key, row in self.queues():
            if not self.directory.is_latest(key, len(self.table)):
                continue
            if row["flags"] & QUEUE_SUPERSEDED:
                next_row = np.zeros(1, QUEUE_STATE_DTYPE)[0]
                next_row["flags"], next_row["end_queue_offset"] = QUEUE_HIDDEN, UNKNOWN_OFFSET
                next_row["queue_id"], next_row["generation"] = key.queue_id, key.generation + 1
                yield key._replace(generation=key.generation + 1), next_row
            else:
                yield key, row

    def gaps_of(self, key: QueueKey) -> Table:
        """The gaps (offsets that are missing for good, GAP_DTYPE) of the queue ``key``, by offset; empty for an unknown
        queue."""
        row = self.row_of(key)
        if row is None or not len(self.gaps):
            return self.gaps[:0]
        gaps = self.gaps[self.gaps["queue"] == row]
        ordered: Table = gaps[np.argsort(gaps["begin_queue_offset"])]
        return ordered

    @cached_property
    def has_expired_runs(self) -> bool:
        """Whether pages may contain runs below the floor of their queue."""
        return bool((self.table["flags"] & QUEUE_EXPIRED).any())

    def is_ordered(self, row: int) -> bool:
        """Whether later versions added higher offsets of the queue only: no gap was filled."""
        return not self.table["flags"][row] & QUEUE_FILLED

    # -- runs since the last spill ----------------------------------------------------------------------------

    @cached_property
    def memory_runs(self) -> int:
        """How many runs are in no page yet."""
        return sum(len(chunk.runs) for chunk in self.chunks)

    def memory_runs_of(self, row: int) -> RunChunk:
        """The runs of the queue in ``row`` that are in no page yet, by offset, with the objects of all such runs."""
        memory, order, starts = self._memory_index
        if starts[row] == starts[row + 1]:
            return EMPTY_CHUNK
        return RunChunk(memory.runs[order[starts[row] : starts[row + 1]]], memory.objects, memory.object_keys)

    def memory_chunk_of(self, row: int) -> RunChunk:
        """Like ``memory_runs_of``, but a copy with the objects of these runs only, and ``runs["queue"]`` 0."""
        chunk = selected(self.memory_runs_of(row), slice(None))
        chunk.runs["queue"] = 0
        return chunk

    @cached_property
    def memory(self) -> RunChunk:
        """The runs that are in no page yet, as one chunk."""
        return joined_chunks(self.chunks)

    @cached_property
    def _memory_index(self) -> tuple[RunChunk, NDArray[np.int64], NDArray[np.int64]]:
        """The runs that are in no page, the indexes that sort them by queue and offset, and where each queue's begin in
        that order."""
        runs = self.memory.runs
        order = np.lexsort((runs["base_queue_offset"], runs["queue"]))
        starts = np.searchsorted(runs["queue"][order], np.arange(len(self.table) + 1))
        return self.memory, order, starts

    # -- index ------------------------------------------------------------------------------------------------

    @property
    def indexed_version(self) -> int:
        """Runs that versions up to this one added are indexed; a query scans the newer ones."""
        return indexed_version(self.indexes)

    @cached_property
    def unindexed(self) -> Mapping[str, tuple[int, ...]]:
        """Unindexed data objects and versions of their runs, which a query scans. Raises CorruptionError."""
        return unindexed(self.settings)

    # -- roots ------------------------------------------------------------------------------------------------

    @property
    def needs_root(self) -> bool:
        """Whether the next commit should name a root page (a copy of the state) early: the newest one could not be
        read, or it begins a log history or is of a repair, so that no commits lead to the same state."""
        if not self.root.key:
            return False
        is_only_copy = bool(self.log_histories) and self.log_histories[-1].root == self.root.key
        is_only_copy |= self.root.key.startswith(f"{PAGES_PREFIX}repair-")
        return is_only_copy or self.root == self.unread_root

    @property
    def repaired_version(self) -> int:
        """The version of the newest repair of a lost catalog, with which the chain of commits begins; 0: there was
        none, and it begins with version 1."""
        repair = self.settings.get(REPAIRED, {})
        version = repair.get("version", 0) if isinstance(repair, dict) else 0
        return version if isinstance(version, int) else 0

    # -- keys -------------------------------------------------------------------------------------------------

    def catalog_keys(self) -> set[str]:
        """Keys of the objects that this state names itself: pages, root pages, index files, timers, tables of the
        broker and lists; not of the data objects that runs name."""
        keys = {object_of(page.key) for page in self.pages} | {history.root for history in self.log_histories}
        keys |= {history.hidden for history in self.log_histories if history.hidden}
        keys |= set(self.state_objects.values()) | {index.key for index in self.indexes}
        keys |= {listed.key for listed in self.deletion_lists} | {timers.key for timers in self.timers}
        return keys | {root.key for root in (self.root, *self.kept_roots) if root.key}


def joined_chunks(chunks: tuple[RunChunk, ...]) -> RunChunk:
    """Several chunks as one; their queue numbers must have the same meaning."""
    if len(chunks) <= 1:
        return chunks[0] if chunks else EMPTY_CHUNK
    runs = concatenated((chunk.runs for chunk in chunks), RUN_DTYPE)
    objects = concatenated((chunk.objects for chunk in chunks), OBJECT_DTYPE)
    runs["object"] += np.repeat(_offsets([len(c.objects) for c in chunks]), [len(c.runs) for c in chunks])
    objects["key"] += np.repeat(
        _offsets([len(c.object_keys) for c in chunks]), [len(c.objects) for c in chunks]
    )
    return RunChunk(runs, objects, tuple(key for chunk in chunks for key in chunk.object_keys))


def selected(chunk: RunChunk, index: NDArray[Any] | slice) -> RunChunk:
    """A copy of the runs of ``chunk`` at ``index`` (integers, a mask, or a slice), with the objects of these only."""
    runs = copied(chunk.runs[index]) if isinstance(index, slice) else picked(chunk.runs, index)
    if not len(runs):
        return EMPTY_CHUNK
    used, runs["object"] = renumbered(runs["object"], len(chunk.objects))
    objects = picked(chunk.objects, used)
    keys, objects["key"] = renumbered(objects["key"], len(chunk.object_keys))
    return RunChunk(runs, objects, tuple(chunk.object_keys[key] for key in keys.tolist()))


def renumbered(numbers: NDArray[Any], count: int) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """Numbers ``numbers``, all of them below ``count``, without holes: returns the different ones, ascending, and for
    each of ``numbers`` its position among these."""
    if len(numbers) == 1:  # the usual case when many small commits are read
        return numbers.astype(np.int64), np.zeros(1, np.uint32)
    occurs = np.zeros(count, np.bool_)
    occurs[numbers] = True
    present = np.flatnonzero(occurs)
    position = np.zeros(count, np.uint32)
    position[present] = np.arange(len(present))
    return present, position[numbers]


def _offsets(lengths: list[int]) -> NDArray[np.uint32]:
    """Where each of consecutive parts of these ``lengths`` begins."""
    return np.cumsum([0, *lengths[:-1]], dtype=np.uint32)
