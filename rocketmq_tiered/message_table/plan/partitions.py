"""Partitions: slices of runs with their objects, selected by predicate and sized by bytes. Pure.

A partition is plain data. It names its catalog version, and reading it requires only the source's options.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.message_table.options.predicate import Predicate
from tiered.catalog.pages import Page
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import selection_of, united
from tiered.model.tables import RunKind, Table, concatenated, copied, picked, positions

ROW_BYTES = 64
"""Weight of a row besides its message."""
LMQ_ROW_BYTES = 1024
"""Minimum weight of an LMQ row, whose message is in another run and of unknown size."""

SLICE_DTYPE = np.dtype(
    [
        ("queue", "<u4"),  # index into the partition's queues
        ("object", "<u4"),  # index into the partition's objects
        ("ordinal", "<u4"),  # run in the object
        ("kind", "<u4"),  # RunKind
        ("begin", "<i8"),  # rows whose queue offset is in [begin, end)
        ("end", "<i8"),
        ("weight", "<i8"),  # approximate bytes
    ]
)


@dataclass(frozen=True)
class ObjectRef:
    """An object as the catalog describes it."""

    key: str
    size_bytes: int
    tail_bytes: int


@dataclass(frozen=True)
class ArchiveRef:
    """One archive at one catalog version."""

    cluster: str
    broker: str
    version: int


@dataclass(frozen=True)
class Slices:
    """Parts of runs of one archive: a SLICE_DTYPE table, and the queues and objects it refers to."""

    archive: ArchiveRef
    table: Table
    queues: Sequence[QueueKey] = field(repr=False)
    objects: tuple[ObjectRef, ...] = field(repr=False)


@dataclass(frozen=True)
class OffsetRange:
    """Queue offsets [begin, end)."""

    begin: int
    end: int


def slices_of_page(
    archive: ArchiveRef,
    page: Page,
    wanted: dict[QueueKey, OffsetRange],
    predicate: Predicate,
    *,
    is_header_only: bool,
    lmq_row_bytes: int = LMQ_ROW_BYTES,
) -> Slices | None:
    """The parts of the runs of one catalog page that lie in the offsets ``wanted``, of queues that ``fit``,
    and may have rows that match the predicate, by what the catalog says of each run; None if there are none."""
    runs = page.chunk.runs
    ranges = [wanted.get(queue) for queue in page.queues]
    low = np.array([one.begin if one else 0 for one in ranges], np.int64)[runs["queue"]]
    high = np.array([one.end if one else 0 for one in ranges], np.int64)[runs["queue"]]
    begin, end = np.maximum(runs["base_queue_offset"], low), np.minimum(runs["end_queue_offset"], high)
    offsets = predicate.allowed("queueOffset")
    # A BatchCQ row starts at its first offset: the range may end inside a row, but not start inside one.
    begin = np.where(runs["kind"] == RunKind.BATCH, begin, np.maximum(begin, offsets.low))
    end = np.minimum(end, min(offsets.high, (1 << 62)) + 1)
    times = predicate.allowed("storeTimestamp")
    kept = (begin < end) & offsets.may_hold(runs["base_queue_offset"], runs["end_queue_offset"] - 1)
    kept &= times.may_hold(runs["min_store_timestamp"], runs["max_store_timestamp"])
    kept &= predicate.allowed("commitLogOffset").may_hold(runs["min_phys"], runs["end_phys"])
    if not kept.any():
        return None
    with_bytes = runs[runs["kind"] != RunKind.LMQ]
    here = int(with_bytes["byte_count"].sum()) // max(int(with_bytes["rows"].sum()), 1)
    row_bytes = 0 if is_header_only else max(lmq_row_bytes, here)
    return _sliced(archive, page, np.flatnonzero(kept), begin, end, is_header_only, row_bytes)


def lmq_row_bytes(queues: Table) -> int:
    """The average record size of an archive with these ``queues``, or less: offsets never archived count."""
    with_bytes = queues[queues["end_byte"] > 0]
    offsets = int(with_bytes["end_queue_offset"].sum())
    return max(LMQ_ROW_BYTES, int(with_bytes["end_byte"].sum()) // max(offsets, 1))


def fit(wanted: dict[QueueKey, OffsetRange], predicate: Predicate) -> dict[QueueKey, OffsetRange]:
    """Those of ``wanted`` whose queues may have rows that match the predicate."""
    ids, generations = predicate.allowed("queueId"), predicate.allowed("generation")
    return {
        queue: one
        for queue, one in wanted.items()
        if predicate.admits_topic(queue.topic)
        and ids.admits(queue.queue_id)
        and generations.admits(queue.generation)
    }


def _sliced(
    archive: ArchiveRef,
    page: Page,
    index: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    is_header_only: bool,
    lmq_row_bytes: int,
) -> Slices:
    """Parts of the runs ``index`` of a page: the offsets [begin, end) of each. The weight of a part is the number of
    bytes to read for it, estimated by its share of the run; a row of an LMQ, which has no bytes of its own, counts as
    ``lmq_row_bytes``."""
    runs = picked(page.chunk.runs, index)
    table = np.zeros(len(index), SLICE_DTYPE)
    queues, table["queue"] = np.unique(runs["queue"], return_inverse=True)
    objects, table["object"] = np.unique(runs["object"], return_inverse=True)
    table["ordinal"], table["kind"] = runs["ordinal"], runs["kind"]
    table["begin"], table["end"] = begin[index], end[index]
    span = np.maximum(runs["end_queue_offset"] - runs["base_queue_offset"], 1)
    share = (table["end"] - table["begin"]) / span
    message_bytes = np.where(runs["kind"] == RunKind.LMQ, runs["rows"] * lmq_row_bytes, runs["byte_count"])
    whole = runs["rows"] * ROW_BYTES + (0 if is_header_only else message_bytes)
    table["weight"] = np.maximum(whole * share, 1).astype(np.int64)
    places = page.chunk.objects[objects]
    refs = tuple(
        ObjectRef(
            page.chunk.object_keys[int(place["key"])], int(place["size_bytes"]), int(place["tail_bytes"])
        )
        for place in places
    )
    return Slices(archive, table, selection_of(page.queues).taken(queues), refs)


def cut(parts: Iterable[Slices], partition_bytes: int) -> list[Slices]:
    """Partitions of about ``partition_bytes``: large runs are split, small runs of an object stay together.

    The same input gives the same partitions.
    """
    found: list[Slices] = []
    for part in _by_archive(parts):
        table = _split_large(part.table, partition_bytes)
        _, rank = np.unique([one.key for one in part.objects], return_inverse=True)
        order = np.lexsort((table["begin"], table["ordinal"], rank[table["object"]]))
        table = picked(table, order)
        ends = np.cumsum(table["weight"])
        number = (ends - table["weight"]) // partition_bytes
        for piece in np.split(table, np.flatnonzero(np.diff(number)) + 1):
            found.append(_compact(part, piece))
    return found


def by_queue(parts: Iterable[Slices]) -> list[Slices]:
    """One partition for each queue."""
    found: list[Slices] = []
    for part in _by_archive(parts):
        table = picked(part.table, np.argsort(part.table["queue"], kind="stable"))
        pieces = np.split(table, np.flatnonzero(np.diff(table["queue"])) + 1)
        found += [_compact(part, piece) for piece in pieces]
    return found


def _by_archive(parts: Iterable[Slices]) -> list[Slices]:
    """``parts`` joined by archive."""
    groups: dict[ArchiveRef, list[Slices]] = {}
    for part in parts:
        groups.setdefault(part.archive, []).append(part)
    return [_joined(group) for group in groups.values()]


def _joined(group: Sequence[Slices]) -> Slices:
    """Join parts of one archive's runs into one partition, in which each queue and each object has one number."""
    queues, queue_numbers = united([part.queues for part in group])
    objects = {one: None for part in group for one in part.objects}
    object_number = {one: number for number, one in enumerate(objects)}
    table = concatenated((part.table for part in group), SLICE_DTYPE)
    numbers = ([object_number[one] for one in part.objects] for part in group)
    for name, of_part in (("queue", queue_numbers), ("object", map(np.array, numbers))):
        table[name] = np.concatenate(
            [number[part.table[name]] for number, part in zip(of_part, group, strict=True)]
        )
    return Slices(group[0].archive, table, queues, tuple(objects))


def _split_large(table: Table, partition_bytes: int) -> Table:
    """Split runs that are larger than a partition into pieces of equally many offsets; other runs stay as they are."""
    offsets = table["end"] - table["begin"]
    pieces = np.minimum(np.maximum(-(-table["weight"] // partition_bytes), 1), offsets)
    if not len(table) or int(pieces.max()) == 1:
        return table
    split: Table = np.repeat(table, pieces)
    number = positions(np.zeros(len(pieces), np.int64), pieces)
    count, base, length = np.repeat(pieces, pieces), split["begin"].copy(), np.repeat(offsets, pieces)
    split["begin"] = base + length * number // count
    split["end"] = base + length * (number + 1) // count
    split["weight"] = split["weight"] // count
    return split


def _compact(part: Slices, table: Table) -> Slices:
    """A partition with the runs of ``table`` and only those queues and objects of ``part`` to which they refer."""
    table = copied(table)
    queues, table["queue"] = np.unique(table["queue"], return_inverse=True)
    objects, table["object"] = np.unique(table["object"], return_inverse=True)
    return Slices(
        part.archive,
        table,
        tuple(selection_of(part.queues).taken(queues)),
        tuple(part.objects[number] for number in objects.tolist()),
    )
