"""Runs for queues that lack some, from the data objects of a bucket, by their footers alone.

Of objects with rows for the same offsets the newer log history wins, then the higher epoch, then the newer object. Rows
above the place where a newer log history began are superseded. What differs from the winner is quarantined.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import fastcrc
import numpy as np
from numpy.typing import NDArray

from tiered.archive.verify import READ_THREADS, few_at_a_time
from tiered.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from tiered.formats.keys import DATA_PREFIX, SETS_PREFIX
from tiered.formats.run_part import CatalogRun, cut_run
from tiered.formats.segment import RowTable
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import TRAILER_BYTES, decode_trailer
from tiered.model.queue import QueueKey
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE, RunKind, Table, picked
from tiered.object_store.interface import ObjectInfo, ObjectStore

Span = tuple[int, int]
FOREVER = 1 << 62
_TTL_DAYS = re.compile(r"_(\d+)d-")


@dataclass(frozen=True)
class FoundObject:
    """An object with a readable tail."""

    key: str
    index: SegmentIndex
    tail_bytes: int
    tail_crc32c: int

    @property
    def rank(self) -> tuple[int, ...]:
        """Of objects with the same rows the one of the highest rank wins."""
        meta = self.index.meta
        return meta.log_history, meta.epoch, meta.catalog_version, meta.created_ms, meta.attempt

    def row(self) -> Table:
        """Its row of OBJECT_DTYPE, whose ``key`` is 0."""
        runs, row = self.index.runs, np.zeros(1, OBJECT_DTYPE)
        row["rows"], row["size_bytes"] = int(self.index.first_row[-1]), self.index.size_bytes
        row["tail_bytes"], row["tail_crc32c"] = self.tail_bytes, self.tail_crc32c
        row["epoch"], row["raw_bytes"] = self.index.meta.epoch, int(runs["byte_count"].sum())
        row["min_phys"], row["end_phys"] = runs["min_phys"].min(), runs["end_phys"].max()
        days = _TTL_DAYS.search(self.key.rpartition("/")[2])
        row["ttl_class_days"] = int(days[1]) if days and self.key.startswith(SETS_PREFIX) else 0
        return row


@dataclass
class Adopted:
    """Runs that were found, with the queue and the object of each; keys that differ, or cannot be read."""

    runs: list[tuple[QueueKey, FoundObject, np.void]] = field(default_factory=list)
    quarantined: set[str] = field(default_factory=set)


def found_objects(store: ObjectStore, skipped: Iterable[str]) -> Iterator[tuple[str, FoundObject | None]]:
    """Every data object but ``skipped``; None: its tail cannot be read."""
    without = set(skipped)

    def opened(info: ObjectInfo) -> FoundObject | None:
        size = info.size_bytes
        try:
            if size < TRAILER_BYTES:
                return None
            trailer = store.get_range(info.key, size - TRAILER_BYTES, TRAILER_BYTES)
            length = size - decode_trailer(trailer, size, source=info.key).tail_offset
            tail = store.get_range(info.key, size - length, length)
            return FoundObject(
                info.key, SegmentIndex(info.key, size, tail), length, fastcrc.crc32.iscsi(tail)
            )
        except (CorruptionError, NotFoundError, UnsupportedFormatError):
            return None

    infos = (
        info
        for prefix in (DATA_PREFIX, SETS_PREFIX)
        for info in store.list(prefix)
        if info.key not in without
    )
    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="repair") as pool:
        for info, read in few_at_a_time((info, pool.submit(opened, info)) for info in infos):
            yield info.key, read.result()


def history_ends(objects: Iterable[FoundObject]) -> Mapping[int, int]:
    """Log history -> the physical offset from which a newer one has superseded it."""
    begins: dict[int, int] = {}
    for meta in (one.index.meta for one in objects):
        begin = meta.history_phys if meta.history_phys >= 0 else FOREVER
        begins[meta.log_history] = min(begins.get(meta.log_history, FOREVER), begin)
    ends, end = dict[int, int](), FOREVER
    for history in sorted(begins, reverse=True):
        ends[history], end = end, min(end, begins[history])
    return ends


def adopt(
    objects: list[FoundObject], wanted: Mapping[QueueKey, list[Span]] | None, ends: Mapping[int, int]
) -> Adopted:
    """Runs of ``objects`` for the offsets ``wanted`` of each queue; None: for all there are."""
    adopted = Adopted()
    left: dict[QueueKey, list[Span]] = (
        {} if wanted is None else {queue: [*spans] for queue, spans in wanted.items()}
    )
    taken: dict[QueueKey, list[tuple[int, int, RowTable]]] = {}
    ranked = sorted(objects, key=lambda one: one.rank, reverse=True)
    every = [(one, number) for one in ranked for number in range(len(one.index))]
    # Entries of LMQs come last: they need their messages.
    for one, number in sorted(
        every, key=lambda item: int(item[0].index.runs["kind"][item[1]]) == RunKind.LMQ
    ):
        queue, run = one.index.queue_of(number), _catalog_run(one.index, number)
        spans = left.setdefault(queue, [(0, FOREVER)]) if wanted is None else left.get(queue, [])
        if not _agrees(one.index, number, taken.get(queue, [])):
            adopted.quarantined.add(one.key)
        if not any(low < run["end_queue_offset"] and run["base_queue_offset"] < high for low, high in spans):
            continue
        try:
            rows = one.index.row_columns(number)
        except CorruptionError:
            adopted.quarantined.add(one.key)
            continue
        current = rows.phys + rows.size <= ends.get(one.index.meta.log_history, FOREVER)
        if wanted is None and run["kind"] == RunKind.LMQ:
            current &= _has_parents(one.index, rows, taken)
        for piece in _cut(run, rows, spans, current):
            adopted.runs.append((queue, one, piece))
            low, high = int(piece["base_queue_offset"]), int(piece["end_queue_offset"])
            left[queue] = [part for span in left[queue] for part in _without(span, (low, high))]
            if wanted is None:
                taken.setdefault(queue, []).append((low, high, rows))
    return adopted


def _has_parents(
    index: SegmentIndex, rows: RowTable, taken: Mapping[QueueKey, list[tuple[int, int, RowTable]]]
) -> NDArray[np.bool_]:
    """Which entries of an LMQ refer to rows that are there."""
    found = np.zeros(len(rows), bool)
    for number in np.unique(rows.parent).tolist():
        for low, high, parents in taken.get(index.queues[number], []):
            mine = (
                (rows.parent == number)
                & (rows.parent_queue_offset >= low)
                & (rows.parent_queue_offset < high)
            )
            found |= mine & np.isin(rows.phys, parents.phys)
    return found


def _catalog_run(index: SegmentIndex, number: int) -> np.void:
    run: np.void = picked(index.runs, np.array([number]))[list(RUN_DTYPE.names or ())].astype(RUN_DTYPE)[0]
    return run


def _cut(run: np.void, rows: RowTable, spans: list[Span], is_current: NDArray[np.bool_]) -> Iterator[np.void]:
    """The parts of ``run`` that are wanted and current."""
    begins, stops = _bounds(run, rows)
    for low, high in spans:
        inside = np.flatnonzero(
            is_current & (stops > low) & (begins < high) & (begins >= low) & (stops <= high)
        )
        if int(run["kind"]) == RunKind.SPARSE:  # what a row spans before it may be there already
            inside = np.flatnonzero(is_current & (stops - 1 >= low) & (stops - 1 < high))
        for part in np.split(inside, np.flatnonzero(np.diff(inside) != 1) + 1) if len(inside) else ():
            piece = cut_run(run, rows, int(part[0]), int(part[-1]) + 1)
            if int(run["kind"]) == RunKind.SPARSE:
                piece["base_queue_offset"] = max(low, int(piece["base_queue_offset"]))
                piece["end_queue_offset"] = min(high, int(piece["end_queue_offset"]))
            yield piece


def _bounds(run: np.void, rows: RowTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and one past the last queue offset of each row."""
    stops = rows.queue_offset + rows.inner_num
    if int(run["kind"]) != RunKind.SPARSE:
        return rows.queue_offset, stops
    return np.append(int(run["base_queue_offset"]), stops[:-1]), stops


def _without(span: Span, gone: Span) -> list[Span]:
    parts = [(span[0], min(span[1], gone[0])), (max(span[0], gone[1]), span[1])]
    return [part for part in parts if part[0] < part[1]]


def _agrees(index: SegmentIndex, number: int, taken: list[tuple[int, int, RowTable]]) -> bool:
    """Whether the rows of a run are those that are used at the same offsets, or some of them."""
    run = CatalogRun.of(_catalog_run(index, number))
    others = [rows for low, high, rows in taken if low < run.end and run.base < high]
    if not others:
        return True
    try:
        mine = index.row_columns(number)
    except CorruptionError:
        return False
    for rows in others:
        _, own, other = np.intersect1d(mine.queue_offset, rows.queue_offset, return_indices=True)
        if not all(
            np.array_equal(getattr(mine, name)[own], getattr(rows, name)[other])
            for name in ("phys", "size", "store_timestamp")
        ):
            return False
    return True
