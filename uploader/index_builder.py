"""Builds the archive's index from the key sections of its segments, and keeps its files few.

    commits name new segments → enough of them: read their key sections → one file → one maintenance commit
    enough files, or a day ended: merge neighbours through a temporary file → one maintenance commit
    a file to be merged is damaged, or most of its messages expired: rebuild it from its key sections → one commit

A damaged segment is excluded from the index and listed by the commit: queries read its key section and report the
damage. A file that can neither be read nor rebuilt stays, and its neighbours are merged without it.

Everything is read from the bucket, so any process may continue another's work. A crash leaves at most one file that no
commit names; its key has the epoch, and it is garbage. Without new commits nothing is requested from the store.

Decisions are in index_plan.py, but for which files have mostly expired (``mostly_expired``).
"""

import logging
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tiered.archive.index.footer import Covered, IndexMeta, decode_tail, joined, meta_of, shape_of
from tiered.archive.index.items import ITEM_DTYPE, widest
from tiered.archive.index.layout import Form, Shape, slot_bits_for
from tiered.archive.index.merge import file_items, file_places, merged_items
from tiered.archive.index.places import Places, joined_places, merged_places, pages_of
from tiered.archive.task import INDEX_BUILDING, Due
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.garbage import KeySet
from tiered.catalog.index_refs import IndexRef
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.pages import Page, RunIndex, living_runs
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import CorruptionError, NotFoundError, TieredError
from tiered.model.tables import QUEUE_EXPIRED
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import IndexSettings
from uploader.index_files import IndexFiles
from uploader.index_input import GatheredItems, IndexInput, Unread, stale_entries
from uploader.index_plan import (
    Backlog,
    Group,
    Segment,
    combined,
    mergeable,
    oldest,
    plan_merge,
    segments_of,
    weight,
)

logger = logging.getLogger(__name__)


def expired_offsets(state: CatalogState) -> int:
    """A number that grows with every pass of expiry; 0: nothing has expired yet."""
    table = state.table
    return int(table["min_queue_offset"][(table["flags"] & QUEUE_EXPIRED) > 0].sum())


def mostly_expired(
    refs: Sequence[IndexRef], pages: Iterable[Page], covered_of: Callable[[IndexRef], Covered | None]
) -> list[IndexRef]:
    """The index files of ``refs``, which are in order, of whose messages more than half, by bytes, have expired. Pure.

    ``pages``: all living runs of the versions that they cover; ``covered_of`` returns the objects of a file, None if
    its footer is damaged: such a file is skipped. An object is gone if no living run refers to it."""
    first = np.array([ref.from_version for ref in refs], np.int64)
    living = np.zeros(len(refs), np.int64)
    """Bytes of living messages, by file."""
    keys: list[KeySet] = []
    for page in pages:
        runs, chunk = page.chunk.runs, page.chunk
        file = np.searchsorted(first, runs["version"], side="right") - 1
        is_covered = (file >= 0) & (runs["version"] <= refs[-1].to_version)
        np.add.at(living, file[is_covered], runs["byte_count"][is_covered])
        used = np.unique(chunk.objects["key"][runs["object"]])
        keys.append(KeySet(chunk.object_keys[key] for key in used.tolist()))
    alive = KeySet.union(keys)
    mostly_gone = []
    for ref, living_bytes in zip(refs, living.tolist(), strict=True):
        covered = covered_of(ref)
        if covered is None:
            continue
        sizes = covered.objects["raw_bytes"].astype(np.int64)
        is_gone = np.array([covered.keys[key] not in alive for key in covered.objects["key"].tolist()], bool)
        # Compaction moves messages to other objects, so the living bytes of its versions must be few as well.
        if 2 * int(sizes[is_gone].sum()) > int(sizes.sum()) > 2 * living_bytes:
            mostly_gone.append(ref)
    return mostly_gone


PAGES_AT_ONCE = 1024
PAGES_BYTES = 16 << 20
"""Cached pages of the catalog."""
BACKLOG_RUNS_MAX = 1 << 19
"""Runs of unindexed segments found in one pass over the catalog's pages, of about 100 bytes each."""


@dataclass(frozen=True)
class IndexWork:
    """The next file: a new one, of the first segments of ``unindexed``, a merge, or files rebuilt because most of
    their messages expired."""

    unindexed: Sequence[Segment] = ()
    merging: Sequence[IndexRef] = ()
    expired: Sequence[IndexRef] = ()


class IndexBuilder:
    """One builder of one archive; its methods are called by one thread at a time. A task: the loop is woken by commits.

    ``writer`` must have loaded the catalog. ``store`` is the archive's own prefix.
    """

    name = INDEX_BUILDING

    def __init__(
        self,
        store: ObjectStore,
        writer: CatalogWriter,
        settings: IndexSettings,
        *,
        clock: Clock,
        random_source: random.Random | None = None,
    ) -> None:
        """``random_source`` makes the keys of this process's files unique."""
        self._store = store
        self._writer = writer
        self._settings = settings
        self._clock = clock
        self._run_index = RunIndex(store, cache_bytes=PAGES_BYTES)
        self._backlog = Backlog()
        self._beyond_repair: set[str] = set()
        """Index files that this process could neither read nor rebuild."""
        self._checked_offsets = 0
        """expired_offsets of the state whose index files were checked."""
        self._input = IndexInput(store, writer, settings, self._run_index)
        self._files = IndexFiles(
            MaintenanceCommit(store, writer, clock),
            settings,
            self._input,
            nonce=f"{(random_source or random.SystemRandom()).getrandbits(64):016x}",
        )
        self.counters = self._files.counters
        self.due = Due(every_s=None, retry_s=settings.retry_ms / 1000)
        self.problem = ""

    # -- when ---------------------------------------------------------------------------------------------------

    def is_due(self, *, is_final: bool) -> bool:
        """Whether a new file is due; ``is_final``: for any segment that is not covered yet. Sends no request."""
        state = self._writer.state
        return self._settings.enabled and state.started and self._is_due(state, is_final=is_final)

    def run_to_end(self, stop: threading.Event, *, is_final: bool = True) -> None:
        """Build and merge what is due, at the end of a backfill; ``is_final``: index everything and merge what is worth
        it. Raises what the store raises."""
        while not stop.is_set() and self.build_next(is_final=is_final):
            pass

    # -- one step -----------------------------------------------------------------------------------------------

    def build_next(self, *, is_final: bool = False) -> bool:
        """Make one new index file, or merge or rebuild some. Returns whether anything was due."""
        state = self._writer.state
        work = self.plan(state, is_final=is_final)
        return work is not None and self.step(state, work)

    def plan(self, state: CatalogState, *, is_final: bool = False) -> IndexWork | None:
        """What is to be done next: index new segments, merge index files, or rebuild those of which most messages have
        expired; None: nothing is due. ``is_final``: at the end of a backfill, whatever is not indexed is due. Reads
        pages of the catalog only if there is something to do."""
        if not self._settings.enabled or not state.started:
            return None
        if self._is_due(state, is_final=is_final):
            segments = self._unindexed(state)
            if segments:
                return IndexWork(unindexed=segments)
        for refs in mergeable(state.indexes, self._beyond_repair):
            merging = plan_merge(
                refs, self._settings.day_files_max, is_final=is_final, now_ms=self._clock.wall_ms()
            )
            if merging:
                return IndexWork(merging=merging)
        expired = self._mostly_expired(state)
        return IndexWork(expired=expired) if expired else None

    def step(self, state: CatalogState, work: IndexWork) -> bool:
        """Make the index file, or files, of ``work``, and commit them. Returns True: there may be
        more to do."""
        if work.unindexed:
            self._build(state, self._input.first_group(work.unindexed))
        elif work.merging:
            self._merge_or_rebuild(state, work.merging)
        else:
            for ref in work.expired:
                self._rebuild(self._writer.state, ref)
            self._checked_offsets = expired_offsets(state)
            logger.info(
                "index files were rebuilt, as most of their messages have expired",
                extra={"files": len(work.expired)},
            )
        return True

    def _unindexed_versions(self, state: CatalogState) -> int:
        """Estimated versions with segments that no file covers, from memory only."""
        covered = state.indexed_version
        in_pages = sum(1 for page in state.pages if page.to_version > covered)
        fresh = sum(int((chunk.runs["version"] > covered).any()) for chunk in state.chunks)
        return in_pages + fresh

    def _is_due(self, state: CatalogState, *, is_final: bool) -> bool:
        """Whether so many objects are not indexed that a new index file is due; ``is_final``: whether any is."""
        if is_final:
            return self._unindexed_versions(state) > 0
        covered = state.indexed_version
        if any(page.to_version > covered for page in state.pages):
            return True  # a lookup by id would read these pages: their runs are no longer in memory
        objects = 0
        for chunk in state.chunks:
            is_unindexed = chunk.runs["version"] > covered
            objects += len(np.unique(chunk.runs["object"][is_unindexed]))
        return objects >= self._settings.unindexed_objects_max

    def _unindexed(self, state: CatalogState) -> list[Segment]:
        """The oldest segments (objects with the runs that one catalog version added) that no index file covers, from
        those found before, or, when these are used up, by reading pages of the catalog: once for many index files."""
        self._backlog = self._backlog.of(state)
        if not self._backlog.segments:
            first = max(state.indexed_version, self._backlog.to_version) + 1
            segments, last = self._segments(state, first, state.version, BACKLOG_RUNS_MAX)
            self._backlog = Backlog(segments, last, Backlog.identity_of(state))
        return self._backlog.segments

    def _segments(
        self, state: CatalogState, first: int, last: int, runs_max: int = sys.maxsize
    ) -> tuple[list[Segment], int]:
        """The segments (objects with the runs that one version added) of the catalog versions from ``first`` on, and up
        to which version they are: ``last``, or an earlier one, if they would have more than about ``runs_max`` runs."""
        segments: list[Segment] = []
        for page in self._pages(state, first, last):
            segments += segments_of(page, first, last)
            if weight(segments) > 2 * runs_max:
                segments, last = oldest(combined(segments), last, runs_max)
        return oldest(combined(segments), last, runs_max)

    def _pages(self, state: CatalogState, first: int, last: int) -> Iterator[Page]:
        """Living runs that versions [first, last] added, with others."""
        return living_runs(self._run_index, state, first, last, is_cached=True)

    # -- a new file ---------------------------------------------------------------------------------------------

    def _build(self, state: CatalogState, group: Group) -> None:
        """Build one index file of the segments of ``group``, the oldest that no file covers, and commit it. If their
        keys do not fit into memory, it covers only the first of them."""
        with self._input.gathered() as items:
            group, damaged, places = self._input.read(group, items)
            meta = group.meta(state.indexed_version + 1)
            ref = self._put_items(state, meta, items, places, group, level=0)
        divided_at = None if state.indexes else state.version
        self._files.publish([ref], removed=(), damaged=damaged, divided_at=divided_at)
        self.counters.files += 1
        self.counters.items += ref.items

    def _put_items(
        self,
        state: CatalogState,
        meta: IndexMeta,
        items: GatheredItems,
        places: Places,
        group: Group,
        *,
        level: int,
    ) -> IndexRef:
        """Write and put one index file of ``items``, with fields as wide as these need, and return its entry for the
        catalog; the caller commits it. ``meta``: its versions and times; ``level``: how often it was merged."""
        form = Form(slot_bits_for(items.count), items.widths(meta.end_ms - meta.begin_ms), meta.begin_ms)
        return self._files.put(
            state, meta, items.in_order(), pages_of(places), group.covered(), form, level=level
        )

    # -- a merge ------------------------------------------------------------------------------------------------

    def _merge_or_rebuild(self, state: CatalogState, refs: Sequence[IndexRef]) -> None:
        """Merge the index files ``refs``, or, if some are damaged, rebuild these from their segments: then the next
        step merges. Raises what reading raises if none is damaged: bytes may have been damaged in transit."""
        self._input.stale = stale_entries(state, self._run_index)  # a merge leaves these out
        try:
            self._merge(state, refs, [self._footer(shape_of(ref)) for ref in refs])
        except (CorruptionError, NotFoundError):
            damaged = [(ref, damage) for ref in refs if (damage := self._damage_of(ref)) is not None]
            if not damaged:
                raise  # bytes were damaged in transit, or a file was removed
            for ref, damage in damaged:
                if self._rebuild_or_keep(ref, str(damage)):
                    self.counters.rebuilt += 1

    def _rebuild_or_keep(self, ref: IndexRef, damage: str) -> bool:
        """Rebuild a damaged index file from its segments; ``damage`` is logged. Returns whether that was done: if it
        cannot be, the file stays, and this process never merges it."""
        fields = {"file": ref.key, "error": damage}
        try:
            is_done = self._rebuild(self._writer.state, ref)
        except (CorruptionError, NotFoundError) as error:
            self._beyond_repair.add(ref.key)
            logger.warning(
                "a damaged index file cannot be rebuilt: it stays as it is, and is not merged",
                extra=fields | {"cause": str(error)},
            )
            return False
        if is_done:
            logger.warning("a damaged index file was rebuilt from its segments", extra=fields)
        return is_done

    def _mostly_expired(self, state: CatalogState) -> Sequence[IndexRef]:
        """The index files of which most messages have expired. Reads pages of the catalog, once after each pass of
        expiry; otherwise the answer is none."""
        offsets, refs = expired_offsets(state), state.indexes
        if offsets == self._checked_offsets or not refs:
            return ()
        pages = self._pages(state, refs[0].from_version, refs[-1].to_version)
        expired = mostly_expired(refs, pages, self._footer_of)
        if not expired:
            self._checked_offsets = offsets
        return expired

    def _footer_of(self, ref: IndexRef) -> Covered | None:
        """The objects that the footer of an index file names; None if it is damaged or missing."""
        try:
            return self._footer(shape_of(ref))
        except (CorruptionError, NotFoundError):
            return None

    def _damage_of(self, ref: IndexRef) -> TieredError | None:
        """The error of reading an index file; None if all that a merge needs of it can be read."""
        try:
            shape = shape_of(ref)
            for _ in file_places(self._store.get_range, shape, self._footer(shape)):
                pass
            for _ in file_items(self._store.get_range, shape, pages_at_once=PAGES_AT_ONCE):
                pass
        except (CorruptionError, NotFoundError) as error:
            return error
        return None

    def _rebuild(self, state: CatalogState, ref: IndexRef) -> bool:
        """Build the index file ``ref`` again, from the key sections of the segments that it covers, as one or more
        files as memory allows, and commit these in its place. Returns whether that was done: not if another actor has
        removed the file."""
        segments, _ = self._segments(state, ref.from_version, ref.to_version)
        made: list[IndexRef] = []
        damaged: list[Unread] = []
        while segments or not made:
            group, meta, places = Group(), meta_of(ref), joined_places([])
            with self._input.gathered() as items:
                if segments:
                    group, unread, places = self._input.read(self._input.first_group(segments), items)
                    damaged += unread
                    meta = group.meta(made[-1].to_version + 1 if made else ref.from_version)
                    segments = [segment for segment in segments if segment.version > meta.to_version]
                if not segments:
                    meta = replace(meta, to_version=ref.to_version)
                made.append(self._put_items(state, meta, items, places, group, level=ref.level))
        divided_at = state.version if len(made) > 1 else None
        return self._files.publish(made, removed=[ref.key], damaged=damaged, divided_at=divided_at)

    def _merge(self, state: CatalogState, refs: Sequence[IndexRef], footers: Sequence[Covered]) -> None:
        """Merge the neighbouring index files ``refs``, whose ``footers`` were read, into one of the next level, and
        commit it in their place. Objects that are pending deletions are not covered any longer."""
        shapes = [shape_of(ref) for ref in refs]
        covered = joined([_without_pending(state, footer) for footer in footers])
        places = merged_places(
            [
                file_places(self._store.get_range, shape, footer)
                for shape, footer in zip(shapes, footers, strict=True)
            ]
        )
        meta = IndexMeta(
            refs[0].from_version,
            refs[-1].to_version,
            min(ref.begin_ms for ref in refs),
            max(ref.end_ms for ref in refs),
            min(ref.begin_phys for ref in refs),
            max(ref.end_phys for ref in refs),
        )
        chunks = merged_items(
            self._store.get_range,
            shapes,
            items_in_memory=self._settings.memory_bytes // (4 * ITEM_DTYPE.itemsize),
        )
        form = Form(
            slot_bits_for(sum(ref.items for ref in refs)),
            widest((ref.widths for ref in refs), meta.end_ms - meta.begin_ms),
            meta.begin_ms,
        )
        level = 1 + max(ref.level for ref in refs)
        ref = self._files.put(state, meta, chunks, places, covered, form, level=level)
        self._files.publish([ref], removed=[old.key for old in refs])
        self.counters.merges += 1

    def _footer(self, shape: Shape) -> Covered:
        return decode_tail(shape, self._store.get_range(shape.key, *shape.tail_range))[1]


def _without_pending(state: CatalogState, footer: Covered) -> Covered:
    """The objects that an index file covers, by its ``footer``, without those that are pending deletions."""
    kept = [footer.keys[key] not in state.pending_deletions for key in footer.objects["key"].tolist()]
    return Covered(footer.objects[np.array(kept, bool)], footer.keys)
