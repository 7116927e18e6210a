"""Reads what index files are built from: key sections of segments, as many as memory allows. Damaged segments are told
apart.

Errors of the local disk that holds temporary files, as the uploader's own errors.

Sorts the items of one index file with a bounded number of them in memory.

More are spilled, sorted piece by piece, to an unnamed temporary file, and merged at the end. A producer chooses the
number of keys of a message: 32 KiB of one-letter keys are 16,000.

Finds stale entries of the setting ``unindexed``: runs of damaged segments that expired or were replaced. The setting
is bounded, so they are removed.

Reads only pages that may still hold such runs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import IO, TypeVar

import numpy as np

from tiered.archive.index.collect import items_of_segment, pieces_of_segment
from tiered.archive.index.footer import Covered, IndexMeta
from tiered.archive.index.items import ITEM_DTYPE, Widths, widest, widths_for
from tiered.archive.index.layout import COVERED_DTYPE, Form, Shape, slot_bits_for
from tiered.archive.index.merge import merged_items
from tiered.archive.index.order import sorted_items
from tiered.archive.index.places import Places, joined_places, places_of_segment
from tiered.archive.index.writer import write_index
from tiered.archive.key_section_reader import KEYS_PER_ROW, read_keys
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.index_refs import UNINDEXED_MAX
from tiered.catalog.pages import Page, RunIndex, living_pages, memory_page
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError, TieredError, UnavailableError
from tiered.formats.segment_index import KeySection, SegmentIndex
from tiered.model.tables import Table
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import IndexSettings
from uploader.index_plan import Group, Segment, groups_of

Stale = Mapping[str, Set[int]]
"""Data object → versions whose runs in it no longer exist."""


def stale_entries(state: CatalogState, index: RunIndex) -> Stale:
    """The stale entries of ``state``; empty where a page cannot be read."""
    unindexed = state.unindexed
    versions = sorted({version for found in unindexed.values() for version in found})
    if not versions:
        return {}
    living: dict[str, set[int]] = {}
    refs = [ref for ref in state.pages if any(ref.overlaps(version, version) for version in versions)]
    try:
        for page in chain(living_pages(index, state, refs, is_cached=True), memory_page(state)):
            _add_living(living, page, unindexed)
    except (CorruptionError, NotFoundError):
        return {}
    stale = {key: set(found) - living.get(key, set()) for key, found in unindexed.items()}
    return {key: found for key, found in stale.items() if found}


def without(unindexed: Mapping[str, tuple[int, ...]], stale: Stale) -> dict[str, tuple[int, ...]]:
    """``unindexed`` but for ``stale``."""
    kept = {
        key: tuple(version for version in versions if version not in stale.get(key, ()))
        for key, versions in unindexed.items()
    }
    return {key: versions for key, versions in kept.items() if versions}


def _add_living(living: dict[str, set[int]], page: Page, unindexed: Mapping[str, object]) -> None:
    """Add, for each unindexed object that a page names, the versions of its runs that are still visible."""
    chunk = page.chunk
    is_named = np.array([key in unindexed for key in chunk.object_keys], bool)
    if not is_named.any():
        return
    keys = chunk.objects["key"][chunk.runs["object"]]
    hits = is_named[keys]
    for key, version in zip(keys[hits].tolist(), chunk.runs["version"][hits].tolist(), strict=True):
        living.setdefault(chunk.object_keys[key], set()).add(version)


SLICE_ITEMS = 65_536
"""Items written at once."""
_NO_META = IndexMeta(0, 0, 0, 0, 0, 0)
_NOTHING = Covered(np.zeros(0, COVERED_DTYPE), ())


class GatheredItems:
    """At most ``items_max`` are in memory, except those of one larger row. Must be closed."""

    def __init__(self, items_max: int) -> None:
        """``items_max``: more items than these are spilled to a temporary file."""
        self._items_max = items_max
        self._waiting: list[Table] = []
        self._waiting_count = 0
        self._file: IO[bytes] | None = None
        self._spilled: list[Shape] = []
        self._begins: dict[str, int] = {}
        self.count = 0
        """Items added, duplicates included."""

    def add(self, items: Table) -> None:
        """Add items in any order. Raises OSError when spilling fails."""
        if self._waiting_count and self._waiting_count + len(items) > self._items_max:
            self._spill()
        self._waiting.append(items)
        self._waiting_count += len(items)
        self.count += len(items)

    def add_all_or_none(self, pieces: Iterable[Table]) -> None:
        """Add all pieces; if ``pieces`` raises, none is added."""
        self._spill()
        mark, count = len(self._spilled), self.count
        try:
            for piece in pieces:
                self.add(piece)
        except BaseException:
            del self._spilled[mark:]
            self._waiting, self._waiting_count, self.count = [], 0, count
            raise

    def in_order(self) -> Iterator[Table]:
        """All items in file order, without duplicates. Nothing may be added afterwards."""
        if not self._spilled:
            yield from _sliced(self._take_sorted())
            return
        self._spill()
        yield from merged_items(self._read, self._spilled, items_in_memory=self._items_max)

    def widths(self, span_ms: int) -> Widths:
        """Field widths of a file whose times span ``span_ms``."""
        spilled = (shape.widths for shape in self._spilled)
        return widest((*spilled, *(widths_for(items, 0) for items in self._waiting)), span_ms)

    def close(self) -> None:
        """Close the temporary file."""
        self._waiting = []
        if self._file is not None:
            self._file.close()

    def _take_sorted(self) -> Table:
        items = np.concatenate(self._waiting) if self._waiting else np.zeros(0, ITEM_DTYPE)
        self._waiting, self._waiting_count = [], 0
        return sorted_items(items)

    def _spill(self) -> None:
        """Write the items in memory, sorted, as an index file of their own to the end of the temporary file."""
        if not self._waiting_count:
            return
        items = self._take_sorted()
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        times = items["store_timestamp"]
        begin_ms, end_ms = int(times.min()), int(times.max())
        form = Form(slot_bits_for(len(items)), widths_for(items, end_ms - begin_ms), begin_ms)
        key = f"piece {len(self._begins)}"
        self._begins[key] = self._file.seek(0, os.SEEK_END)
        self._spilled.append(write_index(self._file, key, _sliced(items), _NO_META, _NOTHING, form))
        self._file.flush()

    def _read(self, key: str, offset: int, length: int) -> bytes:
        assert self._file is not None
        data = os.pread(self._file.fileno(), length, self._begins[key] + offset)
        if len(data) != length:
            raise CorruptionError(f"a temporary index file is cut short at {self._begins[key] + offset}")
        return data


def _sliced(items: Table) -> Iterator[Table]:
    return (items[at : at + SLICE_ITEMS] for at in range(0, len(items), SLICE_ITEMS))


@contextmanager
def work_disk(what: str) -> Iterator[None]:
    """Translate errors of the local disk; those of the object store are translated already. ``what`` names what
    is written."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"cannot write {what} in {tempfile.gettempdir()}: {error.strerror or error}",
            hint="free space there, or set TMPDIR",
        ) from error


T = TypeVar("T")

BYTES_PER_ITEM = 3 * ITEM_DTYPE.itemsize
"""Memory of an item while it is sorted: itself, its place, its copy."""
FILE_OBJECTS_FACTOR = 4
"""A new file covers at most this many times ``unindexed_objects_max`` segments, so that a process that is often killed
makes progress."""


@dataclass(frozen=True)
class Unread:
    """A segment that is damaged or missing."""

    segment: Segment
    error: TieredError


class IndexInput:
    """Segments of ``store``, whose newest state ``writer`` knows."""

    def __init__(
        self, store: ObjectStore, writer: CatalogWriter, settings: IndexSettings, run_index: RunIndex
    ) -> None:
        """``run_index`` reads the runs of versions whose pages are no longer in memory."""
        self._store, self._writer, self._settings, self._run_index = store, writer, settings, run_index
        self.items_max = settings.memory_bytes // BYTES_PER_ITEM
        """Items in memory."""
        self.stale: Stale = {}
        """Entries of damaged segments that the next commit removes."""

    def first_group(self, segments: Sequence[Segment]) -> Group:
        """The first of ``segments``, for one file."""
        rows_max = max(1, self.items_max // KEYS_PER_ROW)
        return groups_of(segments, rows_max, FILE_OBJECTS_FACTOR * self._settings.unindexed_objects_max)[0]

    def gathered(self) -> closing[GatheredItems]:
        """Items of one file, to be read."""
        return closing(GatheredItems(self.items_max))

    def read(self, group: Group, items: GatheredItems) -> tuple[Group, list[Unread], Places]:
        """Add the items of the first versions of ``group`` to ``items``: at least one version, and as many as memory
        allows, since the number of keys is known only now. Returns these versions, the damaged segments, and the places
        of the others."""
        taken, damaged, places = Group(), list[Unread](), list[Places]()
        for _, segments in groupby(group.segments, key=attrgetter("version")):
            of_version = list(segments)
            if taken.segments:
                read = self._gather_if_few(items, of_version)
                if read is None:
                    break
            else:
                read = [self._tried(segment, partial(self._gather, items, segment)) for segment in of_version]
            taken.segments += of_version
            damaged += [found for found in read if isinstance(found, Unread)]
            places += [found for found in read if isinstance(found, Places)]
        return taken, damaged, joined_places(places)

    def _gather(
        self, items: GatheredItems, segment: Segment, index: SegmentIndex, keys: KeySection
    ) -> Places:
        """Add the items of ``segment``, which may exceed the memory; returns its places."""
        pieces = pieces_of_segment(index, keys, segment.runs, self.items_max)
        with work_disk("a temporary index file"):
            if len(keys.hashes) > self.items_max:
                items.add_all_or_none(pieces)
            else:
                for piece in list(pieces):
                    items.add(piece)
        return places_of_segment(index, segment.runs)

    def _gather_if_few(
        self, items: GatheredItems, segments: Sequence[Segment]
    ) -> list[Places | Unread] | None:
        """Add the items of all ``segments``, or, without memory for them, none: then None. Returns their places."""
        room = self.items_max - items.count
        found: list[tuple[Table, Places] | Unread] = []
        for segment in segments:
            some = self._tried(segment, partial(_items_if_few, segment, room)) if room > 0 else None
            if some is None:
                return None
            found.append(some)
            room -= 0 if isinstance(some, Unread) else len(some[0])
        for some in found:
            if not isinstance(some, Unread):
                items.add(some[0])
        return [some if isinstance(some, Unread) else some[1] for some in found]

    def _tried(self, segment: Segment, use: Callable[[SegmentIndex, KeySection], T]) -> T | Unread:
        """The result of ``use``, or why the segment is excluded from the index: a damaged or missing one must not
        keep all later ones from being indexed."""
        try:
            try:
                return self._read_keys_for(segment, use)
            except CorruptionError:
                return self._read_keys_for(segment, use)  # bytes may have been damaged in transit
        except (CorruptionError, NotFoundError) as error:
            if not self._may_exclude(segment.key):
                raise
            return Unread(segment, error)

    def _may_exclude(self, key: str) -> bool:
        """Whether the list of excluded segments has room, if necessary by removing stale entries."""
        state = self._writer.state
        if len({*state.unindexed, key}) > UNINDEXED_MAX and not self.stale:
            self.stale = stale_entries(state, self._run_index)
        return len({*without(state.unindexed, self.stale), key}) <= UNINDEXED_MAX

    def _read_keys_for(self, segment: Segment, use: Callable[[SegmentIndex, KeySection], T]) -> T:
        """Read the key section of a segment for ``use``; the caller repeats it once, and then calls the segment
        damaged."""
        place = segment.place
        index, keys = read_keys(
            self._store,
            segment.key,
            size_bytes=int(place["size_bytes"]),
            tail_bytes=int(place["tail_bytes"]),
            rows=int(place["rows"]),
        )
        return use(index, keys)


def _items_if_few(
    segment: Segment, room: int, index: SegmentIndex, keys: KeySection
) -> tuple[Table, Places] | None:
    if len(keys.hashes) > room:
        return None
    return items_of_segment(index, keys, segment.runs), places_of_segment(index, segment.runs)
