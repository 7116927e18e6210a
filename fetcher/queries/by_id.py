"""A message by offsetMsgId: the broker's address and the physical offset of its record.

The catalog's memory names the objects that may hold a physical offset; for older ones the tail of one index file does.
At most four object requests if a cycle has one or two objects: an index file's tail, their tails, one block. A cycle
with large runs of several queues has an object for each, all over one range of the log: their tails are read, the
largest object's first, until one has the offset. Compacted objects, thousands of which may have records of one range,
are found by the queue that the index file names for each record: one more request, and a few pages of that queue's
runs.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from fetcher.queries.source import Entry, Place, QuerySource, is_shown
from fetcher.rows.message import Message
from tiered.archive.index.footer import Covered, decode_tail, shape_of
from tiered.archive.index.places import Places, decode_places, pages_with
from tiered.catalog.index_refs import IndexRef
from tiered.catalog.pages import Bounds
from tiered.catalog.state import CatalogState, RunChunk
from tiered.errors import CorruptionError, NotFoundError, UsageError
from tiered.formats.run_part import CatalogRun
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import LMQ_PREFIX, QueueKey
from tiered.model.tables import QUEUE_SPARSE, RunKind

logger = logging.getLogger(__name__)

_IPV4_DIGITS, _IPV6_DIGITS = 32, 56
_HEX = re.compile(r"[0-9A-Fa-f]+\Z")


@dataclass(frozen=True)
class OffsetMsgId:
    """A parsed id. ``text`` is upper-case hex: address (4 or 16 bytes), port (4), physical offset (8).

    An empty ``text`` means any address, as in a request to a broker for one of its own offsets.
    """

    text: str
    phys: int

    @classmethod
    def parse(cls, text: str) -> OffsetMsgId:
        """Parses an id in the form that clients print (MessageDecoder.decodeMessageId). Raises UsageError for
        anything else."""
        wanted = text.strip()
        if len(wanted) not in (_IPV4_DIGITS, _IPV6_DIGITS) or _HEX.match(wanted) is None:
            raise UsageError(
                f"{text[:80]} is not an offsetMsgId",
                hint=f"it has {_IPV4_DIGITS} hex digits (IPv4) or {_IPV6_DIGITS} (IPv6); "
                "a client's own id is a --unique-key",
            )
        phys = int(wanted[-16:], 16)
        if phys >= 1 << 63:
            raise UsageError(f"{text} names a negative physical offset", hint="check the id")
        return cls(wanted.upper(), phys)


class _Candidate(NamedTuple):
    """An object that may hold the wanted record. ``runs``: the parts of it that the catalog names; None if an index
    file named the object."""

    place: Place
    runs: tuple[CatalogRun, ...] | None

    def names(self, run: int, row: int) -> bool:
        """Whether the catalog names this row of a run of the object."""
        return self.runs is None or any(_has(part, run, row) for part in self.runs)


async def find_by_id(source: QuerySource, state: CatalogState, wanted: OffsetMsgId) -> Message | None:
    """The message with an offsetMsgId, or None. Messages of deleted topics are found; those that a truncation of the
    broker's log replaced are not.

    Raises CorruptionError, NotFoundError (an object was deleted after ``state``: read the catalog again), or what the
    source raises.
    """
    known = _candidates_at(state.memory, wanted.phys, -1)
    found = await _look_at_all(source, state, known, wanted)
    if found is not None:
        return found
    seen = {candidate.place.key for candidate in known}
    damaged: list[IndexRef] = []
    for index in reversed(state.indexes):
        if index.begin_phys <= wanted.phys < index.end_phys:
            try:
                covered = await source.believed(index.key, partial(_covered, source, index))
            except CorruptionError as error:
                logger.warning("reading catalog pages instead of a damaged index file: %s", error)
                damaged.append(index)
                continue
            for key, row in covered.at(wanted.phys):
                if key not in seen and key not in state.pending_deletions:
                    seen.add(key)
                    # It may have been replaced or expired since: the record's queue is read from the catalog next.
                    with suppress(NotFoundError):
                        found = await _look(source, state, _Candidate(Place.of(key, row), None), wanted)
                        if found is not None:
                            return found
            named = await _named_queues(source, index, covered, wanted.phys)
            if named is None:
                damaged.append(index)
                continue
            for queue in named:
                runs = await source.runs_at(state, queue, wanted.phys, Bounds.PHYS)
                found = await _look_at_all(source, state, _candidates_at(runs, wanted.phys, -1), wanted)
                if found is not None:
                    return found
    # Runs that are in catalog pages and in no index file. They exist only for moments, so they are looked at last.
    for ref in state.pages:
        is_indexed = not any(ref.overlaps(index.from_version, index.to_version) for index in damaged)
        if not is_indexed or ref.to_version > state.indexed_version:
            chunk = (await source.page(state, ref)).chunk
            after_version = state.indexed_version if is_indexed else -1
            found = await _look_at_all(
                source, state, _candidates_at(chunk, wanted.phys, after_version), wanted
            )
            if found is not None:
                return found
    return None


async def _look_at_all(
    source: QuerySource, state: CatalogState, candidates: list[_Candidate], wanted: OffsetMsgId
) -> Message | None:
    """The first message found in the objects of ``candidates``, which are read one after the other."""
    for candidate in candidates:
        found = await _look(source, state, candidate, wanted)
        if found is not None:
            return found
    return None


async def _covered(source: QuerySource, index: IndexRef) -> Covered:
    shape = shape_of(index)
    return decode_tail(shape, await source.range(index.key, *shape.tail_range))[1]


async def _named_queues(
    source: QuerySource, index: IndexRef, covered: Covered, phys: int
) -> list[QueueKey] | None:
    """The queues that have a record at the physical offset ``phys``, by the index file ``index``; LMQs come last.
    None if the file is damaged."""
    named: set[QueueKey] = set()
    try:
        for page in pages_with(covered.pages, phys).tolist():
            places = await source.believed(index.key, partial(_places, source, index, covered, page))
            named |= places.at(phys)
    except CorruptionError as error:
        logger.warning("reading catalog pages instead of a damaged index file: %s", error)
        return None
    return sorted(named, key=lambda queue: queue.topic.startswith(LMQ_PREFIX))


async def _places(source: QuerySource, index: IndexRef, covered: Covered, page: int) -> Places:
    offset, length = covered.page_range(shape_of(index), page)
    where = f"{index.key} places [{offset}, {offset + length})"
    return decode_places(await source.range(index.key, offset, length), where)


def _candidates_at(chunk: RunChunk, phys: int, after_version: int) -> list[_Candidate]:
    """The objects of ``chunk`` that may hold the record at ``phys``, by runs that were committed after catalog version
    ``after_version``. The largest object comes first, as it holds the record most probably."""
    runs, objects = chunk.runs, chunk.objects
    hits = (runs["min_phys"] <= phys) & (phys < runs["end_phys"]) & (runs["version"] > after_version)
    numbers = np.unique(runs["object"][hits])
    numbers = numbers[np.argsort(-objects["raw_bytes"][numbers], kind="stable")]
    return [
        _Candidate(
            Place.of(chunk.object_keys[int(objects["key"][number])], objects[number]),
            tuple(map(CatalogRun.of, runs[hits & (runs["object"] == number)])),
        )
        for number in numbers.tolist()
    ]


async def _look(
    source: QuerySource, state: CatalogState, candidate: _Candidate, wanted: OffsetMsgId
) -> Message | None:
    """The message at the physical offset ``wanted.phys`` in the object of ``candidate``, if it has not expired or
    been superseded, and has the id ``wanted.text``; else None."""
    index = await source.segment(candidate.place)
    for run, row in _rows_at(index, wanted.phys, candidate.runs):
        queue = index.queue_of(run)
        columns = index.row_columns(run)
        offset, stamp = int(columns.queue_offset[row]), int(columns.store_timestamp[row])
        if (
            not candidate.names(run, row)
            or not is_shown(state, queue, with_hidden=True)
            or not await _is_living(source, state, candidate, (run, row), Entry(queue, offset, stamp))
        ):
            continue
        data = await source.record(index, run, row)
        found = Message(
            queue,
            offset,
            memoryview(data),
            stamp,
            inner_num=int(columns.inner_num[row]),
            is_in_batch_queue=int(index.runs["kind"][run]) == RunKind.BATCH,
        )
        if wanted.text in ("", found.record.offset_msg_id):
            return found
    return None


def _has(part: CatalogRun, run: int, row: int) -> bool:
    return part.ordinal == run and part.first_row <= row < part.first_row + part.rows


def _rows_at(index: SegmentIndex, phys: int, named: tuple[CatalogRun, ...] | None) -> list[tuple[int, int]]:
    """(run, row) of each record in the segment that begins at the physical offset ``phys``; LMQs come last. With
    ``named``, only the runs of which the catalog names a part are searched."""
    runs, ordinals = index.runs, None if named is None else {part.ordinal for part in named}
    hits = np.flatnonzero(
        (runs["min_phys"] <= phys) & (phys < runs["end_phys"]) & (runs["kind"] != RunKind.LMQ)
    )
    found = []
    for run in hits.tolist():
        if ordinals is not None and run not in ordinals:
            continue
        columns = index.row_columns(run)
        row = int(np.searchsorted(columns.phys, phys))
        if row < len(columns.phys) and int(columns.phys[row]) == phys:
            found.append((run, row))
    return sorted(found, key=lambda place: index.queue_of(place[0]).topic.startswith(LMQ_PREFIX))


async def _is_living(
    source: QuerySource, state: CatalogState, candidate: _Candidate, at_row: tuple[int, int], entry: Entry
) -> bool:
    """Whether the catalog still shows this row of the object to readers; ``at_row`` is (run, row).

    Catalog pages are read only where the log has diverged or key compaction dropped messages of the queue. Otherwise
    every row between the queue's minimum and maximum is shown, if its object is not pending deletion.
    """
    row = state.queue(entry.queue)
    if row is None or not row["min_queue_offset"] <= entry.queue_offset < row["end_queue_offset"]:
        return False
    if candidate.runs is not None or not (state.log_histories or int(row["flags"]) & QUEUE_SPARSE):
        return True
    chunk = await source.runs_at(state, entry.queue, entry.queue_offset, stored_ms=entry.store_timestamp)
    at = int(np.searchsorted(chunk.runs["base_queue_offset"], entry.queue_offset, side="right")) - 1
    if at < 0:
        return False
    key = chunk.object_keys[int(chunk.objects["key"][chunk.runs["object"][at]])]
    return key == candidate.place.key and _has(CatalogRun.of(chunk.runs[at]), *at_row)
