"""Verifies index files: undamaged, in order, and complete for the segments they cover.

Tails are always read; ``full`` reads every item, and every key section to look up its entries. Entries of expired
messages are no anomaly: queries compare the messages.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from tiered.archive.index.collect import items_of_segment
from tiered.archive.index.footer import Covered, decode_tail, meta_of, shape_of
from tiered.archive.index.items import ITEM_DTYPE
from tiered.archive.index.layout import HEADER_BYTES, SLOT, Shape, check_header, decode_slot
from tiered.archive.index.merge import file_items, file_places
from tiered.archive.index.order import in_order, missing_items
from tiered.archive.index.places import Places, joined_places, missing_places, places_of_segment
from tiered.archive.key_section_reader import read_keys
from tiered.archive.segment_reader import SegmentReader
from tiered.archive.verify_progress import VerifyReport
from tiered.archive.verify_segment import AnomalyKind
from tiered.catalog.index_refs import IndexRef
from tiered.catalog.pages import Page
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, EncryptionKeyError, NotFoundError
from tiered.model.tables import RUN_DTYPE, Table, concatenated, picked
from tiered.object_store.interface import ObjectStore

ITEMS_AT_ONCE = 1 << 22
"""Items in memory: 128 MiB. For each so many, all segments are read again."""
PAGES_AT_ONCE = 128
PLACE_PAGES_AT_ONCE = 64
SLOTS_AT_ONCE = 1 << 16


_PART_DTYPE = np.dtype([
    (name, RUN_DTYPE[name])
    for name in (
        "ordinal", "first_row", "rows", "base_queue_offset", "end_queue_offset", "base_byte", "byte_count"
    )
])  # fmt: skip
"""Of the runs of all objects that an index file covers, what is needed to read their rows: half the memory."""


@dataclass
class _Segment:
    """An object with the ``runs`` (_PART_DTYPE) of some versions."""

    key: str
    place: np.void
    runs: Table


PagesBetween = Callable[[int, int], Iterable[Page]]
"""(from version, to version) -> pages with the living runs that these versions, both included, added."""


def check_indexes(
    store: ObjectStore, state: CatalogState, pages: PagesBetween, report: VerifyReport, *, full: bool
) -> int:
    """Check the index files of ``state``: their footers, and with ``full`` whether they have every key of the segments
    that they cover. ``pages`` returns the living runs of a span of versions. Anomalies are added to ``report``. Returns
    how many items all files have. Raises the store's errors, except for a file that is damaged or missing."""
    for ref in state.indexes:
        segments = _segments(pages, ref)
        try:
            with report.by_checksums_without_key():
                covered = _check_tail(store, ref)
                if full:
                    indexed = [segment for segment in segments if segment.key not in state.unindexed]
                    _check_items(store, ref, indexed)
                    if len(covered.pages):
                        _check_places(store, ref, covered, indexed)
        except NotFoundError:
            continue  # reported with everything else that is named and does not exist
        except CorruptionError as error:
            kind = AnomalyKind.CONTRADICTION if isinstance(error, _IncompleteError) else AnomalyKind.DAMAGED
            report.add(kind, ref.key, error.message)
    return sum(ref.items for ref in state.indexes)


class _IncompleteError(CorruptionError):
    """The file is undamaged, but incomplete."""


def _segments(pages: PagesBetween, ref: IndexRef) -> list[_Segment]:
    """The segments (data objects) of which the index file ``ref`` must have the keys, each with its row of the object
    table and the runs that the covered versions added."""
    places: dict[str, np.void] = {}
    runs_of: dict[str, list[Table]] = {}
    for page in pages(ref.from_version, ref.to_version):
        order = np.argsort(page.chunk.runs["object"], kind="stable")
        number, runs = page.chunk.runs["object"][order], np.empty(len(order), _PART_DTYPE)
        for name in _PART_DTYPE.names or ():
            runs[name] = page.chunk.runs[name][order]
        for of_object in (
            np.split(np.arange(len(runs)), np.flatnonzero(np.diff(number)) + 1) if len(runs) else ()
        ):
            place = page.chunk.objects[int(number[of_object[0]])]
            key = page.chunk.object_keys[int(place["key"])]
            places[key] = place
            runs_of.setdefault(key, []).append(picked(runs, of_object))
    return [_Segment(key, places[key], concatenated(runs_of.pop(key), _PART_DTYPE)) for key in list(runs_of)]


def _check_tail(store: ObjectStore, ref: IndexRef) -> Covered:
    """Read the footer of an index file and return the objects that it names. Raises CorruptionError if it is damaged,
    or covers other versions than the catalog says."""
    shape = shape_of(ref)
    meta, covered = decode_tail(shape, store.get_range(ref.key, *shape.tail_range))
    expected = meta_of(ref)
    if meta != expected:
        raise _IncompleteError(f"the index file covers {meta}, but the catalog says {expected}")
    return covered


def _check_items(store: ObjectStore, ref: IndexRef, segments: Sequence[_Segment]) -> None:
    """Check every item (a key of a message) of an index file, and that it has all keys of ``segments``. Works on ranges
    of hashes, ITEMS_AT_ONCE items at a time, so that memory does not grow with the file. Raises CorruptionError."""
    shape = shape_of(ref)
    check_header(ref.key, store.get_range(ref.key, 0, HEADER_BYTES))
    slots = _check_slots(store, shape)
    passes = max(1, -(-shape.items // ITEMS_AT_ONCE))
    step = -(-(1 << 64) // passes)
    for number in range(passes):
        low, high = number * step, min((number + 1) * step, 1 << 64) - 1
        _check_pass(store, shape, segments, (low, high), slots if number == 0 else None)


def _check_places(store: ObjectStore, ref: IndexRef, covered: Covered, segments: Sequence[_Segment]) -> None:
    """Check that the pages of places of an index file, which name the queue of each record by its commitlog offset, are
    in order and have every record of ``segments``. Works on ranges of offsets, some pages at a time. Raises
    CorruptionError."""
    shape, pages = shape_of(ref), covered.pages
    ends = [*pages["first_phys"][PLACE_PAGES_AT_ONCE::PLACE_PAGES_AT_ONCE].tolist(), None]
    low: int | None = None
    streams = file_places(store.get_range, shape, covered)
    last = -1
    for number, high in enumerate(ends):
        batch = list(islice(streams, PLACE_PAGES_AT_ONCE))
        for page, first_phys in zip(
            batch, pages["first_phys"][number * PLACE_PAGES_AT_ONCE :].tolist(), strict=False
        ):
            if int(page.rows["phys"][0]) != first_phys or first_phys < last:
                raise CorruptionError(
                    f"{ref.key}: the index file's pages of places, by commitlog offset, are not in order"
                )
            last = int(page.rows["phys"][-1])
        named = joined_places(batch)
        for wanted in _recorded(store, segments, low, high):
            missing = missing_places(named, wanted)
            # Several log histories may have a record at ``low``: those of the others may be on the page before.
            if missing > (0 if low is None else int((wanted.rows["phys"] == low).sum())):
                raise _IncompleteError(
                    f"the index file lacks the places of {missing} records of the segments that it covers"
                )
        low = high


def _recorded(
    store: ObjectStore, segments: Sequence[_Segment], low: int | None, high: int | None
) -> Iterator[Places]:
    """The places (commitlog offset and queue) of the records of each segment that are at commitlog offsets from ``low``
    up to, but not including, ``high``; None: no bound. Segments that are damaged or lack a key are skipped."""
    for segment in segments:
        begin, end = int(segment.place["min_phys"]), int(segment.place["end_phys"])
        if (low is not None and end <= low) or (high is not None and begin >= high):
            continue
        try:
            size, tail = int(segment.place["size_bytes"]), int(segment.place["tail_bytes"])
            index = SegmentReader.open(store, segment.key, size_bytes=size, tail_bytes=tail).index
            places = places_of_segment(index, segment.runs)
        except (CorruptionError, EncryptionKeyError, NotFoundError):
            continue  # the check of the segment itself reports it
        phys = places.rows["phys"]
        is_in = (phys >= (begin if low is None else low)) & (phys < (end if high is None else high))
        yield Places(places.queues, places.rows[is_in])


def _check_slots(store: ObjectStore, shape: Shape) -> Table:
    """Check the slots of an index file, each of which says where the items of a range of hashes begin: they must follow
    one another and have all items. Returns the number of items of each. Raises CorruptionError."""
    counts = np.zeros(1 << shape.slot_bits, np.int64)
    expected = 0
    for begin in range(0, len(counts), SLOTS_AT_ONCE):
        end = min(begin + SLOTS_AT_ONCE, len(counts))
        data = store.get_range(shape.key, shape.slot_range(begin)[0], SLOT.size * (end - begin))
        for slot in range(begin, end):
            at = SLOT.size * (slot - begin)
            first, counts[slot] = decode_slot(shape, slot, data[at : at + SLOT.size])
            if first != expected:
                raise CorruptionError(
                    f"{shape.key}: slot {slot} of the index file begins at item {first}, but the one before ends at "
                    f"{expected}"
                )
            expected += int(counts[slot])
    if expected != shape.items:
        raise CorruptionError(
            f"{shape.key}: the slots of the index file have {expected} items, but it has {shape.items}"
        )
    return counts


def _check_pass(
    store: ObjectStore,
    shape: Shape,
    segments: Sequence[_Segment],
    hashes: tuple[int, int],
    slots: Table | None,
) -> None:
    """Read all items of an index file, and check that those with hashes in the range ``hashes`` (first, last) are all
    keys of ``segments`` in that range. With ``slots``, the number of items of each slot, also check that all items are
    in order and in their slots. Raises CorruptionError."""
    in_range = bytearray()
    last = np.zeros(0, ITEM_DTYPE)
    for items in file_items(store.get_range, shape, pages_at_once=PAGES_AT_ONCE):
        if slots is not None:
            if not in_order(concatenated([last, items], ITEM_DTYPE)):
                raise CorruptionError(f"{shape.key}: the items of the index file are not in order")
            last = items[-1:]
            shift = np.uint64(64 - shape.slot_bits)
            slot = (
                (items["hash"] >> shift).astype(np.int64)
                if shape.slot_bits
                else np.zeros(len(items), np.int64)
            )
            np.subtract.at(slots, slot, 1)
        in_range += _between(items, hashes).data
    if slots is not None and bool(slots.any()):
        raise CorruptionError(f"{shape.key}: the slots of the index file do not point to their items")
    present = np.frombuffer(in_range, ITEM_DTYPE)
    missing = sum(missing_items(present, expected) for expected in _expected(store, segments, hashes))
    if missing:
        raise _IncompleteError(f"the index file lacks {missing} keys of the segments that it covers")


def _between(items: Table, hashes: tuple[int, int]) -> Table:
    """The ``items`` whose hash is in the range ``hashes``: first and last, both included."""
    column = items["hash"]
    return picked(items, (column >= np.uint64(hashes[0])) & (column <= np.uint64(hashes[1])))


def _expected(store: ObjectStore, segments: Sequence[_Segment], hashes: tuple[int, int]) -> Iterator[Table]:
    """The items that an index file of ``segments`` must have, with hashes in the range ``hashes`` (first, last), by
    segment. Segments that are damaged or lack a key are skipped."""
    for segment in segments:
        try:
            index, keys = read_keys(
                store,
                segment.key,
                size_bytes=int(segment.place["size_bytes"]),
                tail_bytes=int(segment.place["tail_bytes"]),
                rows=int(segment.place["rows"]),
            )
            items = items_of_segment(index, keys, segment.runs)
        except (CorruptionError, EncryptionKeyError, NotFoundError):
            continue  # the check of the segment itself reports it
        yield _between(items, hashes)
