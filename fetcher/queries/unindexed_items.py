"""Items with a key's hash from the key sections of segments that no index file covers, or whose index file is damaged.

Each key section is read once, for all topics of a query.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fetcher.io.waiting import gather
from fetcher.queries.source import Place, QuerySource
from tiered.archive.index.collect import rows_with_hash
from tiered.archive.index.items import ITEM_DTYPE
from tiered.catalog.index_refs import IndexRef
from tiered.catalog.pages import Page, sorted_page
from tiered.catalog.state import CatalogState, PageRef, RunChunk
from tiered.errors import CorruptionError
from tiered.formats.run_part import CatalogRun
from tiered.model.tables import Table

logger = logging.getLogger(__name__)

READ_AT_ONCE = 16
"""Segments read side by side."""
SEGMENTS_INSTEAD_MAX = 2048
"""Up to so many segments are read instead of a damaged index file. If it covers more, the query fails."""

TimeRange = tuple[int, int]
"""Store timestamps, both included, in milliseconds."""


@dataclass(frozen=True)
class Segment:
    """A segment to read, and by topic the runs whose keys count."""

    place: Place
    rows: int
    runs: Mapping[str, tuple[CatalogRun, ...]]


async def scan_unindexed(
    source: QuerySource, state: CatalogState, hashes: Mapping[str, int], times: TimeRange
) -> dict[str, Table]:
    """For each topic of ``hashes``, the ITEM_DTYPE items with its hash from key sections that no index file has."""
    return await _scan_all(source, await unindexed_segments(source, state, hashes, times), hashes, times)


async def scan_instead(
    source: QuerySource,
    state: CatalogState,
    topic: str,
    wanted_hash: int,
    times: TimeRange,
    damaged: tuple[IndexRef, CorruptionError],
) -> Table:
    """What a damaged index file would have said, from the key sections it was made of. Raises its error where these are
    too many."""
    ref, error = damaged
    hashes = {topic: wanted_hash}
    segments = await unindexed_segments(source, state, hashes, times, instead=ref)
    if len(segments) > SEGMENTS_INSTEAD_MAX:
        raise error
    logger.warning("reading %s segments instead of a damaged index file: %s", len(segments), error)
    return (await _scan_all(source, segments, hashes, times))[topic]


async def _scan_all(
    source: QuerySource, segments: Sequence[Segment], hashes: Mapping[str, int], times: TimeRange
) -> dict[str, Table]:
    parts: dict[str, list[Table]] = {topic: [np.zeros(0, ITEM_DTYPE)] for topic in hashes}
    for first in range(0, len(segments), READ_AT_ONCE):
        some = segments[first : first + READ_AT_ONCE]
        for found in await gather([_scan(source, segment, hashes, times) for segment in some]):
            for topic, items in found.items():
                parts[topic].append(items)
        source.forget()
    return {topic: np.concatenate(tables) for topic, tables in parts.items()}


async def _scan(
    source: QuerySource, segment: Segment, hashes: Mapping[str, int], times: TimeRange
) -> dict[str, Table]:
    index, keys = await source.believed(
        segment.place.key, lambda: source.keys_of(segment.place, segment.rows)
    )
    found = {}
    for topic, runs in segment.runs.items():
        if not all(map(index.has_rows_of, runs)):
            raise CorruptionError(f"{index.key}: the catalog names runs that are not in it")
        items = rows_with_hash(index, keys, runs, hashes[topic])
        stamp = items["store_timestamp"]
        inside: NDArray[np.bool_] = (stamp >= times[0]) & (stamp <= times[1])
        found[topic] = items[inside]
    return found


async def unindexed_segments(
    source: QuerySource,
    state: CatalogState,
    hashes: Mapping[str, int],
    times: TimeRange,
    *,
    instead: IndexRef | None = None,
) -> list[Segment]:
    """Segments above the coverage, or excluded from it, with runs of the topics of ``hashes`` in the time range; or
    those covered by the file ``instead``."""
    if not hashes:
        return []
    topics = sorted(hashes)
    excluded = sorted(version for versions in state.unindexed.values() for version in versions)
    pages = await gather(
        [
            source.page(state, ref)
            for ref in state.pages
            if _has_topic(ref, topics) and _may_hold(ref, state, excluded, instead)
        ]
    )
    if state.memory_runs:
        pages.append(_memory_page(state, instead))
    found: dict[str, Segment] = {}
    for page in pages:
        runs = page.chunk.runs
        mine = np.array([queue.topic in hashes for queue in page.queues], bool)
        fresh = np.flatnonzero(
            mine[runs["queue"]]
            & _is_unindexed(state, page.chunk, instead)
            & (runs["min_store_timestamp"] <= times[1])
            & (runs["max_store_timestamp"] >= times[0])
        )
        fresh = fresh[np.argsort(runs["object"][fresh], kind="stable")]
        numbers, first = np.unique(runs["object"][fresh], return_index=True)
        for number, part in zip(numbers.tolist(), np.split(fresh, first[1:]), strict=bool(len(fresh))):
            row = page.chunk.objects[number]
            place = Place.of(page.chunk.object_keys[int(row["key"])], row)
            of_topics = _by_topic(page, part)
            if place.key in found:  # the runs of one object may be in several pages
                for topic, before in found[place.key].runs.items():
                    of_topics[topic] = before + of_topics.get(topic, ())
            found[place.key] = Segment(place, int(row["rows"]), of_topics)
    return list(found.values())


def _by_topic(page: Page, which: NDArray[np.int64]) -> dict[str, tuple[CatalogRun, ...]]:
    """These runs of one segment by topic."""
    found: dict[str, list[CatalogRun]] = {}
    for run in page.chunk.runs[which]:
        found.setdefault(page.queues[int(run["queue"])].topic, []).append(CatalogRun.of(run))
    return {topic: tuple(runs) for topic, runs in found.items()}


def _has_topic(ref: PageRef, topics: Sequence[str]) -> bool:
    """Whether one of ``topics``, ascending, is between the page's first and last."""
    at = bisect_left(topics, ref.first.topic)
    return at < len(topics) and topics[at] <= ref.last.topic


def _may_hold(ref: PageRef, state: CatalogState, excluded: Sequence[int], instead: IndexRef | None) -> bool:
    """``excluded``: versions with unindexed segments, ascending."""
    if instead is not None:
        return ref.overlaps(instead.from_version, instead.to_version)
    return ref.to_version > state.indexed_version or (
        bisect_left(excluded, ref.from_version) < bisect_right(excluded, ref.to_version)
    )


def _is_unindexed(state: CatalogState, chunk: RunChunk, instead: IndexRef | None) -> NDArray[np.bool_]:
    """For each run of ``chunk``, whether no index file has its keys; or whether ``instead`` should have them."""
    version = chunk.runs["version"]
    if instead is not None:
        is_covered: NDArray[np.bool_] = (version >= instead.from_version) & (version <= instead.to_version)
        return is_covered
    is_newer: NDArray[np.bool_] = version > state.indexed_version
    if not state.unindexed:
        return is_newer
    is_named = np.array([key in state.unindexed for key in chunk.object_keys], bool)
    is_excluded: NDArray[np.bool_] = is_named[chunk.objects["key"]][chunk.runs["object"]]
    return is_newer | is_excluded


def _memory_page(state: CatalogState, instead: IndexRef | None) -> Page:
    """Runs in memory as a page; empty quickly when all are covered."""
    memory = state.memory
    if not bool(_is_unindexed(state, memory, instead).any()):
        return Page((), replace(memory, runs=memory.runs[:0]))
    return sorted_page(state.directory.keys, memory)
