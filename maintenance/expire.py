"""A pass of expiry over an archive: reads the catalog, plans new floors, and commits them.

One maintenance commit raises the floors, makes objects without a living run pending deletions, in a list of their own,
and drops pages and index files of which nothing is alive. When another commit was faster, the changes are checked
again against the newest state, without a second pass. What expires is decided in expire_plan.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from maintenance.expire_plan import (
    PARENT_DTYPE,
    CommitTimes,
    ExpiryPlan,
    ExpiryPlanner,
    ExpiryQueues,
)
from maintenance.gc import require_same_clock
from tiered.catalog.catalog_reader import read_commit
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import NO_PAGES, CommitDraft, CommitKind, PageChange
from tiered.catalog.deletions import DeletionChange, PendingDeletion, Reason, encode_list, list_of
from tiered.catalog.floors import is_expired
from tiered.catalog.garbage import KeySet, settled_version
from tiered.catalog.index_refs import NO_INDEX_CHANGE, IndexChange
from tiered.catalog.page_merge import merged_pages, sequences_of
from tiered.catalog.pages import Page, RunIndex, sorted_page
from tiered.catalog.state import CatalogState, PageRef, RunChunk
from tiered.errors import UsageError
from tiered.flat_file.segment_reader import SegmentCache
from tiered.formats.container import CATALOG_MAJOR
from tiered.formats.keys import catalog_key, page_key
from tiered.model.tables import Table
from tiered.object_store.interface import ObjectStore
from tiered.object_store.own_name import put_own
from tiered.settings.topic_rules import TopicRule

MERGED_RUNS = 32_768
HELD_BYTES = 96 << 20
"""What is needed of a page after all of them were read; pages beyond are read twice. About 3 million runs."""
_HELD_DTYPE = np.dtype([
    ("row", "<u4"), ("object", "<u4"), ("end_queue_offset", "<i8"), ("byte_count", "<i8"), ("version", "<i8"),
])  # fmt: skip
"""A run whose queue is number ``row`` of the state."""


@dataclass(frozen=True)
class Erasure:
    """All messages of a topic expire: of one generation, or of all."""

    topic: str
    generation: int | None = None


@dataclass
class ExpiryPass:
    """What a pass found. ``objects`` have no living run afterwards, ``object_bytes`` in all; ``shared_bytes`` are of
    expired messages in objects that stay, before compression. ``is_committed``: the floors are in force."""

    plan: ExpiryPlan
    objects: list[str] = field(default_factory=list)
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
    clock: Callable[[], int],
    erase: Erasure | None = None,
) -> ExpiryPass:
    """What expires now. Reads every page of the catalog once, twice beyond HELD_BYTES, and tails of objects with LMQ
    runs that may expire.

    Raises UsageError when the owner writes an older format, the clock is off, or the topic of ``erase`` is unknown.
    """
    if state.major < CATALOG_MAJOR:
        raise UsageError(
            "the archive's owner writes an older format", hint="restart `tiered run` with this version first"
        )
    now_ms = require_same_clock(store, clock())
    queues = _queues(state, rule_of, erase)
    planner = ExpiryPlanner(queues, _commit_times(store, state, queues, now_ms), now_ms)
    index = RunIndex(store)
    pages = _Pages(state, index)
    for page in pages.in_order():
        rows = state.directory.rows(page.queues, len(state.table))
        runs = page.chunk.runs.copy()
        runs["queue"] = rows[runs["queue"]]
        for piece in _by_row(runs):
            planner.add(piece)
    found = ExpiryPass(planner.plan(_Parents(store, state, index)), oldest_version=state.version)
    _find_remains(state, pages, found)
    return found


def commit_pass(
    store: ObjectStore, state: CatalogState, found: ExpiryPass, *, clock: Callable[[], int]
) -> CatalogState:
    """Commit the floors of a pass over ``state``, unless another pass was faster. Raises UsageError when the log was
    truncated since."""
    if not len(found.plan.floors):
        return state
    nonce = random.SystemRandom().getrandbits(40)
    writer = CatalogWriter(
        store, cluster=state.cluster, broker=state.broker, instance=f"expire-{nonce:010x}", kind="maintenance",
        clock_ms=clock,
    ).begin_at(state)  # fmt: skip
    deletions = _listed(store, state, found, f"{nonce:010x}", clock())

    def build(newest: CatalogState) -> CommitDraft | None:
        if newest.cursor.history != state.cursor.history or newest.log_histories != state.log_histories:
            raise UsageError("the log was truncated during the pass", hint="run `tiered expire` again")
        found.is_committed = _is_current(store, state, newest, found.plan.floors)
        if not found.is_committed:
            return None
        floors = found.plan.floors.copy()
        left = {page.key for page in newest.pages}
        gone = [key for key in found.dead_pages if key in left]
        queues = [state.key_of(int(row)) for row in floors["queue"]]
        floors["queue"] = np.arange(len(floors))
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
            created_ms=clock(),
        )

    return writer.maintain(build)


# -- planning -------------------------------------------------------------------------------------------------


def _queues(state: CatalogState, rule_of: Callable[[str], TopicRule], erase: Erasure | None) -> ExpiryQueues:
    rules: list[TopicRule] = []
    numbers: dict[str, int] = {}
    topic = np.zeros(state.queue_count, np.int64)
    erased = np.zeros(state.queue_count, bool)
    for row, key in enumerate(state.directory.keys[: state.queue_count]):
        if key.topic not in numbers:
            numbers[key.topic] = len(rules)
            rule = rule_of(key.topic)
            rules.append(rule if erase is None else replace(rule, ttl_ms=None, max_bytes=None))
        topic[row] = numbers[key.topic]
        if erase is not None and key.topic == erase.topic:
            erased[row] = erase.generation in (None, key.generation)
    if erase is not None and not erased.any():
        raise UsageError(f"topic {erase.topic} is not in the archive", hint="check the name with `tiered ls`")
    floor = state.table["min_queue_offset"].astype(np.int64)
    return ExpiryQueues(rules, topic, floor, erased)


def _commit_times(store: ObjectStore, state: CatalogState, queues: ExpiryQueues, now_ms: int) -> CommitTimes:
    """The bucket's time of the newest commit that is older than each time that messages stay after their upload."""
    found: dict[int, int] = {}
    for archived_ms in sorted(set(queues.min_archived_ms.tolist()), reverse=True):
        version = settled_version(store, state.version, now_ms - archived_ms)
        if version:
            info = next(iter(store.list(catalog_key(version), limit=1)))
            found[version] = info.modified_ms
    versions = sorted(found)
    times = [found[version] for version in versions]
    return CommitTimes(np.array(versions, np.int64), np.array(times, np.int64))


def _by_row(runs: Table) -> list[Table]:
    """Sorted by the queue's row: pages are sorted by the queue's name. Offsets of a queue stay in order."""
    return [runs[np.argsort(runs["queue"], kind="stable")]] if len(runs) else []


@dataclass(frozen=True)
class _Parents:
    """Reads which queues the runs of LMQ entries refer to, from the tails of their objects."""

    store: ObjectStore
    state: CatalogState
    index: RunIndex

    def __call__(self, runs: Table) -> Table:
        segments = SegmentCache(self.store)
        found: list[tuple[int, int, int]] = []
        for number, run in enumerate(runs):
            offset = int(run["base_queue_offset"])
            chunk = self._chunk(int(run["queue"]), offset)
            (at,) = np.flatnonzero(chunk.runs["base_queue_offset"] == offset)
            place = chunk.objects[chunk.runs["object"][at]]
            reader = segments.open(
                chunk.object_keys[int(place["key"])],
                size_bytes=int(place["size_bytes"]),
                tail_bytes=int(place["tail_bytes"]),
            )
            rows = reader.row_columns(int(chunk.runs["ordinal"][at]))
            for parent in np.unique(rows.parent).tolist():
                last = int(rows.parent_queue_offset[rows.parent == parent].max())
                row = self.state.row_of(reader.queues[parent])
                found.append((number, -1 if row is None else row, last + 1))
        return np.array(found, PARENT_DTYPE)

    def _chunk(self, row: int, offset: int) -> RunChunk:
        window = self.index.window(self.state, self.state.key_of(row), offset)
        return self.state.memory_chunk_of(row) if window is None else window[1]


# -- what is left without a living run ------------------------------------------------------------------------


@dataclass(frozen=True)
class _HeldPage:
    """Living runs (_HELD_DTYPE) of the page ``key``, empty if they are in no page yet, and their objects."""

    key: str
    runs: Table
    objects: Table
    object_keys: Sequence[str]

    @property
    def nbytes(self) -> int:
        """Approximate memory size."""
        return self.runs.nbytes + self.objects.nbytes + 200 * len(self.object_keys)


class _Pages:
    """The pages of a state, each read once if their runs fit into HELD_BYTES."""

    def __init__(self, state: CatalogState, index: RunIndex) -> None:
        self._state, self._index = state, index
        self._held: dict[str, _HeldPage] = {}
        self._held_bytes = 0

    def in_order(self) -> Iterable[Page]:
        """All living runs by (queue, base offset)."""
        streams: list[Iterator[Page]] = [
            map(self._read, sequence) for sequence in sequences_of(self._state.pages)
        ]
        if self._state.memory_runs:
            memory = sorted_page(self._state.directory.keys, self._state.memory)
            streams.append(iter((memory,)))
        return merged_pages(streams, MERGED_RUNS)

    def all(self) -> Iterator[_HeldPage]:
        """Each page in turn, after ``in_order``, and the runs that are in none."""
        for ref in self._state.pages:
            found = self._held.get(ref.key)
            yield self._page(ref.key, self._living(ref)) if found is None else found
        if self._state.memory_runs:
            keys = self._state.directory.keys[: self._state.queue_count]
            yield self._page("", Page(keys, self._state.memory))

    def _read(self, ref: PageRef) -> Page:
        page = self._living(ref)
        if self._held_bytes < HELD_BYTES:
            self._held[ref.key] = held = self._page(ref.key, page)
            self._held_bytes += held.nbytes
        return page

    def _living(self, ref: PageRef) -> Page:
        return self._index.living(self._state, self._index.read_page(ref))

    def _page(self, key: str, page: Page) -> _HeldPage:
        rows, chunk = self._state.directory.rows(page.queues, len(self._state.table)), page.chunk
        runs = np.empty(len(chunk.runs), _HELD_DTYPE)
        runs["row"] = rows[chunk.runs["queue"]]
        for name in ("object", "end_queue_offset", "byte_count", "version"):
            runs[name] = chunk.runs[name]
        return _HeldPage(key, runs, chunk.objects, chunk.object_keys)


def _find_remains(state: CatalogState, pages: _Pages, found: ExpiryPass) -> None:
    """Objects, pages and versions of which nothing is alive, and what stays because it shares an object."""
    if not len(found.plan.floors):
        return
    minimum = state.table["min_queue_offset"].astype(np.int64)
    minimum[found.plan.floors["queue"]] = found.plan.floors["min_queue_offset"]
    living = _Living()
    expired: dict[str, tuple[int, int]] = {}
    for page in pages.all():
        runs = page.runs
        dead = is_expired(runs, minimum[runs["row"]])
        if dead.all():
            found.dead_pages += [page.key] if page.key else []
        else:
            found.oldest_version = min(found.oldest_version, int(runs["version"][~dead].min()))
        keys = page.objects["key"]
        living.add(page.object_keys[number] for number in np.unique(keys[runs["object"][~dead]]).tolist())
        gone = runs[dead]
        sizes = np.bincount(gone["object"], gone["byte_count"], minlength=len(page.objects))
        for number in np.unique(gone["object"]).tolist():
            key = page.object_keys[int(keys[number])]
            known = expired.get(key, (0, 0))[1]
            expired[key] = int(page.objects["size_bytes"][number]), known + int(sizes[number])
    still = living.keys()
    for key, (size_bytes, message_bytes) in expired.items():
        if key in still:
            found.shared_bytes += message_bytes
        else:
            found.objects.append(key)
            found.object_bytes += size_bytes
    found.objects.sort()


class _Living:
    """Keys of objects with a living run, as digests: there may be millions."""

    def __init__(self) -> None:
        self._parts: list[KeySet] = []

    def add(self, keys: Iterable[str]) -> None:
        """Add the keys of one page."""
        self._parts.append(KeySet(keys))

    def keys(self) -> KeySet:
        """All added keys."""
        return KeySet.union(self._parts)


# -- committing -----------------------------------------------------------------------------------------------


def _listed(
    store: ObjectStore, state: CatalogState, found: ExpiryPass, nonce: str, now_ms: int
) -> DeletionChange:
    if not found.objects:
        return DeletionChange()
    pending = PendingDeletion(now_ms, state.version + 1, Reason.EXPIRED)
    entries = dict.fromkeys(found.objects, pending)
    data = encode_list(entries)
    key = page_key("deletions", state.version, state.epoch, nonce)
    put_own(store, key, [data], timeout_s=60.0)
    return DeletionChange(added=[list_of(key, entries, len(data))])


def _is_current(store: ObjectStore, state: CatalogState, newest: CatalogState, floors: Table) -> bool:
    """Whether no other pass has changed the minimum of a queue, and no compaction has joined runs."""
    for version in range(state.version + 1, newest.version + 1):
        if read_commit(store, version).draft.reason == Reason.COMPACTED:
            return False
    for floor in floors:
        now = newest.queue(state.key_of(int(floor["queue"])))
        if now is None or now["min_queue_offset"] != state.table["min_queue_offset"][floor["queue"]]:
            return False
    return True
