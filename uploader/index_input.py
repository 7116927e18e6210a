"""Reads what index files are built from: key sections of segments, as many as memory allows. Damaged segments are told
apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

from tiered.archive.index.collect import items_of_segment, pieces_of_segment
from tiered.archive.index.items import ITEM_DTYPE
from tiered.archive.index.places import Places, joined_places, places_of_segment
from tiered.archive.key_section_reader import KEYS_PER_ROW, read_keys
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.index_refs import UNINDEXED_MAX
from tiered.catalog.pages import RunIndex
from tiered.errors import CorruptionError, NotFoundError, TieredError
from tiered.formats.segment_index import KeySection, SegmentIndex
from tiered.model.tables import Table
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import IndexSettings
from uploader.gathered_items import GatheredItems
from uploader.index_plan import Group, Segment, groups_of
from uploader.unindexed import Stale, stale_entries, without
from uploader.work_disk import work_disk

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
        """Without this, one damaged or missing segment would keep all later ones from being indexed."""
        try:
            try:
                return self._used(segment, use)
            except CorruptionError:
                return self._used(segment, use)  # bytes may have been damaged in transit
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

    def _used(self, segment: Segment, use: Callable[[SegmentIndex, KeySection], T]) -> T:
        place = segment.place
        index, keys = read_keys(
            self._store,
            segment.key,
            size_bytes=int(place["size_bytes"]),
            tail_bytes=int(place["tail_bytes"]),
            rows=int(place["rows"]),
        )
        if not all(map(index.has_rows_of, segment.runs)):
            raise CorruptionError(f"{segment.key}: the catalog names runs that are not in it")
        return use(index, keys)


def _items_if_few(
    segment: Segment, room: int, index: SegmentIndex, keys: KeySection
) -> tuple[Table, Places] | None:
    if len(keys.hashes) > room:
        return None
    return items_of_segment(index, keys, segment.runs), places_of_segment(index, segment.runs)
