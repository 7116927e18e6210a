"""Reads what index files are built from: key sections of segments, as many as memory allows.

``IndexInput`` reads segments, and tells which are damaged. ``GatheredItems`` sorts the items of one index file with a
bounded number of them in memory: more go, sorted piece by piece, to a temporary file without a name, and are merged at
the end. A producer chooses the number of keys of a message: 32 KiB of one-letter keys are 16,000.

``stale_entries`` finds entries of the setting ``unindexed`` that are no longer needed, as the runs of a damaged segment
have expired or were replaced. The setting is bounded, so such entries are removed.
"""

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
    """The entries of the archive's setting ``unindexed`` (objects that index files do not cover, as they were damaged)
    that are no longer needed: the object's runs of a version have expired or were replaced. Reads pages that may have
    such runs; empty if one cannot be read."""
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
    stale = {key: set(recorded) - living.get(key, set()) for key, recorded in unindexed.items()}
    return {key: gone for key, gone in stale.items() if gone}


def without(unindexed: Mapping[str, tuple[int, ...]], stale: Stale) -> dict[str, tuple[int, ...]]:
    """The entries of ``unindexed`` (object → versions) that are not in ``stale``."""
    kept = {
        key: tuple(version for version in versions if version not in stale.get(key, ()))
        for key, versions in unindexed.items()
    }
    return {key: versions for key, versions in kept.items() if versions}


def _add_living(living: dict[str, set[int]], page: Page, unindexed: Mapping[str, object]) -> None:
    """Add to ``living`` the versions of the runs in ``page`` that belong to an object of ``unindexed``, by its key."""
    chunk = page.chunk
    is_unindexed = np.array([key in unindexed for key in chunk.object_keys], bool)
    if not is_unindexed.any():
        return
    keys = chunk.objects["key"][chunk.runs["object"]]
    chosen = is_unindexed[keys]
    for key, version in zip(keys[chosen].tolist(), chunk.runs["version"][chosen].tolist(), strict=True):
        living.setdefault(chunk.object_keys[key], set()).add(version)


SLICE_ITEMS = 65_536
"""Items written at once."""
_NO_META = IndexMeta(0, 0, 0, 0, 0, 0)
_NOTHING = Covered(np.zeros(0, COVERED_DTYPE), ())


class GatheredItems:
    """Items for one index file, of which at most ``items_max`` are in memory, unless one message has more. Must be
    closed."""

    def __init__(self, items_max: int) -> None:
        """``items_max``: with more items than these in memory, they are written to a temporary file."""
        self._items_max = items_max
        self._waiting: list[Table] = []
        """Items in memory, not sorted yet."""
        self._waiting_count = 0
        self._file: IO[bytes] | None = None
        """The temporary file, which has small index files one behind the other."""
        self._spilled: list[Shape] = []
        """The index files in it."""
        self._begins: dict[str, int] = {}
        """Where each begins, by its key."""
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
        """Add all items of ``pieces``; if that raises, none of them is added, and those added before stay."""
        self._spill()  # so that what is in memory afterwards is of ``pieces``
        spilled_before, count = len(self._spilled), self.count
        try:
            for piece in pieces:
                self.add(piece)
        except BaseException:
            del self._spilled[spilled_before:]
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
        """Move the items in memory, sorted, to the end of the temporary file, as an index file of their own."""
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
        """Bytes of one of the small index files in the temporary file, by its ``key``. Raises CorruptionError if the
        temporary file is shorter than what was written."""
        assert self._file is not None
        data = os.pread(self._file.fileno(), length, self._begins[key] + offset)
        if len(data) != length:
            raise CorruptionError(
                f"the temporary index file in {tempfile.gettempdir()} ends before byte "
                f"{self._begins[key] + offset + length}, which was written"
            )
        return data


def _sliced(items: Table) -> Iterator[Table]:
    return (items[at : at + SLICE_ITEMS] for at in range(0, len(items), SLICE_ITEMS))


@contextmanager
def work_disk(what: str) -> Iterator[None]:
    """While the block writes ``what`` to a temporary file, turn an error of the local disk into an UnavailableError;
    errors of the object store are no OSErrors."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"{what} cannot be written in {tempfile.gettempdir()}: {error.strerror or error}",
            hint="free space in this directory, or set TMPDIR to another one",
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
    """Reads segments of ``store``; ``writer`` knows the newest state of its catalog."""

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
        """The first of ``segments``, as many as one new index file may cover."""
        rows_max = max(1, self.items_max // KEYS_PER_ROW)
        return groups_of(segments, rows_max, FILE_OBJECTS_FACTOR * self._settings.unindexed_objects_max)[0]

    def gathered(self) -> closing[GatheredItems]:
        """An empty collection of the items of one index file."""
        return closing(GatheredItems(self.items_max))

    def read(self, group: Group, items: GatheredItems) -> tuple[Group, list[Unread], Places]:
        """Read the keys of the segments of ``group`` and add them to ``items``: those of its first catalog version, and
        of as many further versions as memory allows, which is known only now. Returns the group of these versions, the
        damaged segments in it, and the places of the messages in the others."""
        read_group, damaged, places = Group(), list[Unread](), list[Places]()
        for _, segments in groupby(group.segments, key=attrgetter("version")):
            of_version = list(segments)
            if read_group.segments:
                results = self._gather_if_few(items, of_version)
                if results is None:
                    break
            else:
                results = [
                    self._tried(segment, partial(self._gather, items, segment)) for segment in of_version
                ]
            read_group.segments += of_version
            damaged += [result for result in results if isinstance(result, Unread)]
            places += [result for result in results if isinstance(result, Places)]
        return read_group, damaged, joined_places(places)

    def _gather(
        self, items: GatheredItems, segment: Segment, index: SegmentIndex, keys: KeySection
    ) -> Places:
        """Add the keys of ``segment``, which may be more than fit into memory, to ``items``; if that fails, none of
        them. ``index`` and ``keys``: its footer and its key section. Returns the places of its messages."""
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
        """Add the keys of all ``segments`` to ``items``, if they fit into memory; otherwise add none and return None.
        Returns, for each segment, the places of its messages, or why it cannot be read."""
        room = self.items_max - items.count
        results: list[tuple[Table, Places] | Unread] = []
        for segment in segments:
            result = self._tried(segment, partial(_items_if_few, segment, room)) if room > 0 else None
            if result is None:
                return None
            results.append(result)
            room -= 0 if isinstance(result, Unread) else len(result[0])
        for result in results:
            if not isinstance(result, Unread):
                items.add(result[0])
        return [result if isinstance(result, Unread) else result[1] for result in results]

    def _tried(self, segment: Segment, use: Callable[[SegmentIndex, KeySection], T]) -> T | Unread:
        """The result of ``use``, which is called with the footer and the key section of ``segment``; or an Unread, if
        they are damaged or missing: such a segment is excluded from the index, so that all later ones can be indexed.
        Raises the error if too many are excluded already."""
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
        """Read the footer and the key section of ``segment``, and return what ``use`` makes of them. Raises
        CorruptionError, NotFoundError, or what the store raises."""
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
    """The items of ``segment``, and the places of its messages; None if it has more keys than ``room``. ``index`` and
    ``keys``: its footer and its key section."""
    if len(keys.hashes) > room:
        return None
    return items_of_segment(index, keys, segment.runs), places_of_segment(index, segment.runs)
