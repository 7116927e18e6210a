"""Builds the archive's index from the key sections of its segments, and keeps its files few.

    commits name new segments → enough of them: read their key sections → one file → one maintenance commit
    enough files, or a day ended: merge neighbours through a temporary file → one maintenance commit
    a file to be merged is damaged, or most of its messages expired: rebuild it from its key sections → one commit

A damaged segment is excluded from the index and listed by the commit: queries read its key section and report the
damage. A file that can neither be read nor rebuilt stays, and its neighbours are merged without it.

Everything is read from the bucket, so any process may continue another's work. A crash leaves at most one file that no
commit names; it carries its epoch and is garbage. Without commits there are no requests.

Decisions are in index_plan.py.

Finds index files of which most messages have expired. Pure.

An object counts as gone when no living run refers to it. Compaction moves runs to other objects under their versions,
so the living bytes of a file's versions decide too. A file that was just rebuilt covers no such object.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from uploader.index_plan import Backlog, Group, Segment, combined, mergeable, oldest, plan_merge, segments_of


def expired_offsets(state: CatalogState) -> int:
    """A number that grows with every pass of expiry; 0: nothing has expired yet."""
    table = state.table
    return int(table["min_queue_offset"][(table["flags"] & QUEUE_EXPIRED) > 0].sum())


def mostly_expired(
    refs: Sequence[IndexRef], pages: Iterable[Page], covered_of: Callable[[IndexRef], Covered | None]
) -> list[IndexRef]:
    """The files of ``refs``, which are in order, with less than half of their message bytes alive. ``pages``: all
    living runs of their versions; ``covered_of``: a file's objects, None if its footer is damaged."""
    first = np.array([ref.from_version for ref in refs], np.int64)
    living = np.zeros(len(refs), np.int64)
    keys: list[KeySet] = []
    for page in pages:
        runs, chunk = page.chunk.runs, page.chunk
        file = np.searchsorted(first, runs["version"], side="right") - 1
        is_covered = (file >= 0) & (runs["version"] <= refs[-1].to_version)
        np.add.at(living, file[is_covered], runs["byte_count"][is_covered])
        used = np.unique(chunk.objects["key"][runs["object"]])
        keys.append(KeySet(chunk.object_keys[key] for key in used.tolist()))
    alive = KeySet.union(keys)
    found = []
    for ref, living_bytes in zip(refs, living.tolist(), strict=True):
        covered = covered_of(ref)
        if covered is None:
            continue
        sizes = covered.objects["raw_bytes"].astype(np.int64)
        is_gone = np.array([covered.keys[key] not in alive for key in covered.objects["key"].tolist()], bool)
        if 2 * int(sizes[is_gone].sum()) > int(sizes.sum()) > 2 * living_bytes:
            found.append(ref)
    return found


PAGES_AT_ONCE = 1024
PAGES_BYTES = 16 << 20
"""Cached pages of the catalog."""
BACKLOG_SEGMENTS_MAX = 32_768
"""Unindexed segments found in one pass over the catalog's pages, of about 1 KB each."""


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
        log: Callable[[str, Mapping[str, object]], None],
        random_source: random.Random | None = None,
    ) -> None:
        """``random_source`` makes the keys of this process's files its own."""
        self._store = store
        self._writer = writer
        self._settings = settings
        self._clock = clock
        self._log = log
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
            log=log,
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
        """Make one new file or one merge; False when nothing is due."""
        state = self._writer.state
        work = self.plan(state, is_final=is_final)
        return work is not None and self.step(state, work)

    def plan(self, state: CatalogState, *, is_final: bool = False) -> IndexWork | None:
        """The next file; None: nothing is due. Reads pages only if there is something to do."""
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
        """Make it, and commit."""
        if work.unindexed:
            self._build(state, self._input.first_group(work.unindexed))
        elif work.merging:
            self._merge_or_rebuild(state, work.merging)
        else:
            for ref in work.expired:
                self._rebuild(self._writer.state, ref)
            self._checked_offsets = expired_offsets(state)
            self._log("index files of expired messages rebuilt", {"files": len(work.expired)})
        return True

    def _unindexed_versions(self, state: CatalogState) -> int:
        """Estimated versions with segments that no file covers, from memory only."""
        covered = state.indexed_version
        in_pages = sum(1 for page in state.pages if page.to_version > covered)
        fresh = sum(int((chunk.runs["version"] > covered).any()) for chunk in state.chunks)
        return in_pages + fresh

    def _is_due(self, state: CatalogState, *, is_final: bool) -> bool:
        """Whether there is enough to index; at a final run, whether there is anything."""
        if is_final:
            return self._unindexed_versions(state) > 0
        covered = state.indexed_version
        if any(page.to_version > covered for page in state.pages):
            return True  # a lookup by id would read these pages: their runs are no longer in memory
        objects = 0
        for chunk in state.chunks:
            fresh = chunk.runs["version"] > covered
            objects += len(np.unique(chunk.runs["object"][fresh]))
        return objects >= self._settings.unindexed_objects_max

    def _unindexed(self, state: CatalogState) -> list[Segment]:
        """The oldest unindexed segments: each page of the catalog is read once for many files."""
        self._backlog = self._backlog.of(state)
        if not self._backlog.segments:
            first = max(state.indexed_version, self._backlog.to_version) + 1
            segments, last = self._segments(state, first, state.version, BACKLOG_SEGMENTS_MAX)
            self._backlog = Backlog(segments, last, Backlog.identity_of(state))
        return self._backlog.segments

    def _segments(
        self, state: CatalogState, first: int, last: int, count_max: int = sys.maxsize
    ) -> tuple[list[Segment], int]:
        """Segments with runs that versions from ``first`` on added, and the last of these versions: ``last``, or the
        one with which they would be more than about ``count_max``."""
        found: list[Segment] = []
        for page in self._pages(state, first, last):
            found += segments_of(page, first, last)
            if len(found) > 2 * count_max:
                found, last = oldest(combined(found), last, count_max)
        return oldest(combined(found), last, count_max)

    def _pages(self, state: CatalogState, first: int, last: int) -> Iterator[Page]:
        """Living runs that versions [first, last] added, with others."""
        return living_runs(self._run_index, state, first, last, is_cached=True)

    # -- a new file ---------------------------------------------------------------------------------------------

    def _build(self, state: CatalogState, group: Group) -> None:
        """Build and commit one index file over the first unindexed segments; ``read`` returns a smaller group if
        they do not fit."""
        with self._input.gathered() as items:
            group, damaged, places = self._input.read(group, items)
            meta = group.meta(state.indexed_version + 1)
            ref = self._put_items(state, meta, items, places, group, level=0)
        self._files.publish([ref], removed=(), damaged=damaged)
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
        """Write and upload one index file, with fields as wide as its items need; the caller commits it."""
        form = Form(slot_bits_for(items.count), items.widths(meta.end_ms - meta.begin_ms), meta.begin_ms)
        return self._files.put(
            state, meta, items.in_order(), pages_of(places), group.covered(), form, level=level
        )

    # -- a merge ------------------------------------------------------------------------------------------------

    def _merge_or_rebuild(self, state: CatalogState, refs: Sequence[IndexRef]) -> None:
        """Merge, or rebuild the damaged files that prevent merging."""
        self._input.stale = stale_entries(state, self._run_index)
        try:
            self._merge(state, refs, [self._footer(shape_of(ref)) for ref in refs])
        except (CorruptionError, NotFoundError):
            damaged = [(ref, why) for ref in refs if (why := self._damage_of(ref)) is not None]
            if not damaged:
                raise  # bytes were damaged in transit, or a file was removed
            for ref, why in damaged:
                self.counters.rebuilt += self._try_to_rebuild(ref, str(why))

    def _try_to_rebuild(self, ref: IndexRef, why: str) -> bool:
        """Whether the file was rebuilt; if it cannot be, it stays, and is never merged by this process."""
        fields = {"file": ref.key, "error": why}
        try:
            is_done = self._rebuild(self._writer.state, ref)
        except (CorruptionError, NotFoundError) as error:
            self._beyond_repair.add(ref.key)
            self._log("damaged index file not rebuilt", fields | {"cause": str(error)})
            return False
        if is_done:
            self._log("damaged index file rebuilt", fields)
        return is_done

    def _mostly_expired(self, state: CatalogState) -> Sequence[IndexRef]:
        """Files of which most expired; looked for once after each pass of expiry."""
        offsets, refs = expired_offsets(state), state.indexes
        if offsets == self._checked_offsets or not refs:
            return ()
        pages = self._pages(state, refs[0].from_version, refs[-1].to_version)
        found = mostly_expired(refs, pages, self._footer_of)
        if not found:
            self._checked_offsets = offsets
        return found

    def _footer_of(self, ref: IndexRef) -> Covered | None:
        """None if it is damaged."""
        shape = shape_of(ref)
        try:
            return decode_tail(shape, self._store.get_range(shape.key, *shape.tail_range))[1]
        except (CorruptionError, NotFoundError):
            return None

    def _damage_of(self, ref: IndexRef) -> TieredError | None:
        """Why a file cannot be merged, or None; reads as much of it as merging does."""
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
        """Replace ``ref`` by files built from the key sections of its segments, each as large as memory allows. False
        if another actor removed it."""
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
        return self._files.publish(made, removed=[ref.key], damaged=damaged)

    def _merge(self, state: CatalogState, refs: Sequence[IndexRef], footers: Sequence[Covered]) -> None:
        """Merge neighbouring index files into one of the next level, and commit it in their place."""
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
    """Objects of one file that are not pending deletion."""
    kept = [footer.keys[key] not in state.pending_deletions for key in footer.objects["key"].tolist()]
    return Covered(footer.objects[np.array(kept, bool)], footer.keys)
