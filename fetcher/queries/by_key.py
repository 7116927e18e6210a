"""Messages by key or unique key.

Index files whose time range overlaps the query's locate the messages with the key's hash; for segments that are not
indexed yet, were excluded, or whose index file is damaged, their key sections do, each read once for all topics of a
query. Every candidate is read and compared with topic and key as texts, so equal hashes never answer for each other and
never count towards the limit (both differ from the broker: IndexFile.selectPhyOffset, MQAdminImpl.queryMessage).
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fetcher.io.waiting import gather
from fetcher.queries.source import (
    ALWAYS_MS,
    Entry,
    Place,
    QuerySource,
    count_within,
    has_expired,
    is_shown,
    read_entry,
)
from fetcher.rows.message import Message
from tiered.archive.index.collect import rows_with_hash
from tiered.archive.index.footer import shape_of
from tiered.archive.index.items import ITEM_DTYPE
from tiered.archive.index.key_hash import key_hash
from tiered.archive.index.lookup import Matches, Wanted, find_items
from tiered.catalog.index_refs import IndexRef
from tiered.catalog.pages import Page, sorted_page
from tiered.catalog.state import CatalogState, PageRef, RunChunk
from tiered.errors import CorruptionError
from tiered.formats.record import Record
from tiered.model.queue import QueueKey
from tiered.model.tables import RUN_DTYPE, Table, concatenated, picked

logger = logging.getLogger(__name__)

READ_AT_ONCE = 16
"""Segments read side by side."""
SEGMENTS_INSTEAD_MAX = 2048
"""Up to so many segments are read instead of a damaged index file. If it covers more, the query fails."""

TimeRange = tuple[int, int]
"""Store timestamps, both included, in milliseconds."""


@dataclass(frozen=True)
class Segment:
    """A segment to read, and by topic the runs (RUN_DTYPE) whose keys count."""

    place: Place
    rows: int
    runs: Mapping[str, Table]


async def scan_unindexed(
    source: QuerySource, state: CatalogState, hashes: Mapping[str, int], times: TimeRange
) -> dict[str, Table]:
    """By topic of ``hashes``: the items (ITEM_DTYPE) with its hash, from key sections that no index file has."""
    return await _scan_all(source, await unindexed_segments(source, state, hashes, times), hashes, times)


async def scan_instead(
    source: QuerySource,
    state: CatalogState,
    topic: str,
    wanted_hash: int,
    times: TimeRange,
    damaged: tuple[IndexRef, CorruptionError],
) -> Table:
    """Answer for a damaged key index file: find the key's items in the segments that the file was built from.

    ``damaged``: the file, and the error of reading it, which is raised if there are more than SEGMENTS_INSTEAD_MAX
    segments to read instead.
    """
    ref, error = damaged
    hashes = {topic: wanted_hash}
    segments = await unindexed_segments(source, state, hashes, times, instead=ref)
    if len(segments) > SEGMENTS_INSTEAD_MAX:
        raise error
    logger.warning("%s segments are read instead of a damaged index file: %s", len(segments), error)
    return (await _scan_all(source, segments, hashes, times))[topic]


async def _scan_all(
    source: QuerySource, segments: Sequence[Segment], hashes: Mapping[str, int], times: TimeRange
) -> dict[str, Table]:
    """Look for a key in the key sections of ``segments``, READ_AT_ONCE of them at a time.

    ``hashes``: for each topic, the hash of topic and key. Returns for each topic the items (queue, offset and time of
    a message) with that hash that were stored within ``times``.
    """
    parts: dict[str, list[Table]] = {topic: [np.zeros(0, ITEM_DTYPE)] for topic in hashes}
    for first in range(0, len(segments), READ_AT_ONCE):
        some = segments[first : first + READ_AT_ONCE]
        for found in await gather([_scan(source, segment, hashes, times) for segment in some]):
            for topic, items in found.items():
                parts[topic].append(items)
        source.release_ranges()
    return {topic: np.concatenate(tables) for topic, tables in parts.items()}


async def _scan(
    source: QuerySource, segment: Segment, hashes: Mapping[str, int], times: TimeRange
) -> dict[str, Table]:
    """Look for a key in the key section of one segment; ``hashes`` and the result are those of ``_scan_all``."""
    index, keys = await source.believed(
        segment.place.key, lambda: source.keys_of(segment.place, segment.rows)
    )
    found = {}
    for topic, runs in segment.runs.items():
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
    """The segments in which a search for keys has to read the key section, because no key index file covers them.

    Only segments with messages of the topics in ``hashes`` that were stored within ``times`` are returned. With
    ``instead``, an index file that is damaged: the segments that this file covers.
    """
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
                    both = [before, of_topics.get(topic, before[:0])]
                    of_topics[topic] = concatenated(both, RUN_DTYPE)
            found[place.key] = Segment(place, int(row["rows"]), of_topics)
    return list(found.values())


def _by_topic(page: Page, which: NDArray[np.int64]) -> dict[str, Table]:
    """These runs of one segment by topic."""
    runs = picked(page.chunk.runs, which)
    topics = [page.queues[number].topic for number in runs["queue"].tolist()]
    return {topic: picked(runs, np.array(topics) == topic) for topic in set(topics)}


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
    """For each run of ``chunk`` (messages of one queue in one object), whether no key index file covers it, so that
    the object itself has to be searched. With ``instead``, an index file that is damaged: whether that file covers
    it."""
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
    return sorted_page(state.queue_keys, memory)


ITEMS_MIN = 64  # a search of the key index asks for at least this many entries
NO_LIMIT = 1 << 62


class KeyKind(Enum):
    """What the key of a query must be equal to."""

    KEY = "key"
    """One of KEYS, split at single spaces: what MQAdminImpl.queryMessage keeps of the broker's answer."""
    UNIQUE = "unique key"
    """UNIQ_KEY, the id the producer's client made."""
    ANY = "any key"
    """Either: what the broker indexes."""


class Position(NamedTuple):
    """A place in the order of answers: newest first, of one millisecond the highest physical offset first, which is
    the order in which a broker chains them."""

    store_timestamp: int
    physical_offset: int

    @classmethod
    def of(cls, message: Message) -> Position:
        """Where ``message`` stands."""
        return cls(message.record.store_timestamp, message.record.physical_offset)


@dataclass(frozen=True)
class KeyQuery:
    """Messages of ``topic`` with ``key``, stored in [begin_ms, end_ms], at most ``max_messages``.

    ``after``: only those after this position, from the page before. ``with_hidden``: of deleted topics and earlier
    generations of recreated ones too.
    """

    topic: str
    key: str
    kind: KeyKind = KeyKind.KEY
    begin_ms: int = ALWAYS_MS[0]
    end_ms: int = ALWAYS_MS[1]
    max_messages: int = 64
    after: Position | None = None
    with_hidden: bool = False
    max_bytes: int = NO_LIMIT
    """Limit for all messages of a page; a single larger one comes alone."""

    def is_full(self, found: Sequence[Message]) -> bool:
        """Whether the page is full."""
        if len(found) >= self.max_messages:
            return True
        return self.max_bytes < NO_LIMIT and sum(len(one.data) for one in found) >= self.max_bytes


@dataclass(frozen=True)
class QueryPage:
    """Answers, newest first. ``next``: where the next page begins; None when there is none. ``expired``: messages with
    the key's hash that have expired, of those that were examined and are still indexed."""

    messages: Sequence[Message]
    next: Position | None
    expired: int = 0


class QueryCost(NamedTuple):
    """The reads of a key query before those of messages."""

    index_files: int
    segments: int
    topics: int

    @property
    def requests(self) -> int:
        """About so many object requests: one for each index file and topic, and for each segment."""
        return self.index_files * self.topics + self.segments


async def find_by_key(source: QuerySource, state: CatalogState, query: KeyQuery) -> QueryPage:
    """One page of answers. Raises CorruptionError, NotFoundError (the state is older than a removal: refresh it), or
    what the source raises."""
    return (await find_by_keys(source, state, [query]))[0]


async def find_by_keys(
    source: QuerySource, state: CatalogState, queries: Sequence[KeyQuery]
) -> list[QueryPage]:
    """Answer several queries, at most one for each topic, with a page of messages each. Every key section is read once
    for all of them, which is why this is cheaper than ``find_by_key`` for each. Raises what ``find_by_key`` raises."""
    wanted = [query for query in queries if query.max_messages > 0 and query.begin_ms <= query.end_ms]
    scanned = await scan_unindexed(source, state, _hashes(wanted), _range(wanted))
    return [
        await _find(source, state, query, scanned[query.topic]) if query in wanted else QueryPage((), None)
        for query in queries
    ]


def _hashes(queries: Sequence[KeyQuery]) -> dict[str, int]:
    return {query.topic: key_hash(query.topic, query.key) for query in queries}


def _range(queries: Sequence[KeyQuery]) -> tuple[int, int]:
    """A range with the times of all queries."""
    begin_ms = min((query.begin_ms for query in queries), default=0)
    return begin_ms, max((query.end_ms for query in queries), default=0)


def _files(state: CatalogState, begin_ms: int, end_ms: int) -> list[IndexRef]:
    return [ref for ref in state.indexes if ref.begin_ms <= end_ms and ref.end_ms >= begin_ms]


async def _find(source: QuerySource, state: CatalogState, query: KeyQuery, scanned: Table) -> QueryPage:
    """Answer one query: find candidates in the index files, read the messages, and keep those that have the key.

    ``scanned``: the candidates that were found already, in segments that no index file covers. If too few candidates
    prove to be messages with the key, the index files are searched for eight times as many.
    """
    # The next page begins after the last message returned, by time and physical offset. Index items lack the latter,
    # so all items of that message's millisecond are looked at again.
    end_ms = query.end_ms if query.after is None else min(query.end_ms, query.after.store_timestamp)
    wanted = Wanted(
        key_hash(query.topic, query.key), query.begin_ms, end_ms, max(ITEMS_MIN, 2 * query.max_messages)
    )
    stamp = scanned["store_timestamp"]
    scanned = scanned[(stamp >= wanted.begin_ms) & (stamp <= wanted.end_ms)]
    files = _files(state, wanted.begin_ms, wanted.end_ms)
    while True:
        answers = await gather([_items_or_error(source, ref, wanted) for ref in files])
        for ref, answer in zip(files, answers, strict=True):
            if isinstance(answer, CorruptionError):
                times = wanted.begin_ms, wanted.end_ms
                instead = await scan_instead(source, state, query.topic, wanted.hash, times, (ref, answer))
                scanned = np.concatenate([scanned, instead])
        files = [ref for ref, answer in zip(files, answers, strict=True) if isinstance(answer, Matches)]
        matches = [answer for answer in answers if isinstance(answer, Matches)]
        candidates, is_all = _candidates([*matches, Matches(scanned, True)])
        found, is_exhausted, expired = await _verified(source, state, query, candidates)
        if is_all or query.is_full(found):
            break
        wanted = wanted._replace(items_max=8 * wanted.items_max)
    messages = found[: query.max_messages]
    messages = messages[: count_within((len(message.data) for message in messages), query.max_bytes)]
    is_last = is_all and is_exhausted and len(found) == len(messages)
    return QueryPage(messages, None if is_last or not messages else Position.of(messages[-1]), expired)


async def _items_or_error(source: QuerySource, ref: IndexRef, wanted: Wanted) -> Matches | CorruptionError:
    """What one index file says, or how it is damaged."""
    try:
        shape = shape_of(ref)
        return await source.believed(ref.key, lambda: find_items(source.items_reader(shape), shape, wanted))
    except CorruptionError as error:
        return error


def _candidates(matches: Sequence[Matches]) -> tuple[Table, bool]:
    """Merge the items found in index files and segments: newest first, and each once.

    An index file returns a limited number of items, so the result stops at the latest time at which any file stopped:
    before that time, items may be missing. Returns the items, and True if no file stopped early.
    """
    items = np.concatenate([match.items for match in matches])
    horizon = max(
        (int(match.items["store_timestamp"][-1]) for match in matches if not match.is_all), default=None
    )
    if horizon is not None:
        # A file that stopped at this millisecond may have more items of it.
        items = items[items["store_timestamp"] > horizon]
    items = np.unique(items)
    return items[np.argsort(-items["store_timestamp"], kind="stable")], horizon is None


async def _verified(
    source: QuerySource, state: CatalogState, query: KeyQuery, candidates: Table
) -> tuple[list[Message], bool, int]:
    """Read the messages of ``candidates``, which share the hash of the key but need not have the key, until the query
    has enough messages.

    Returns the messages with the key, newest first; whether all candidates were read; and how many of them have
    expired.
    """
    shown: dict[
        QueueKey, bool
    ] = {}  # whether the query may see the queue: not, for example, of a deleted topic
    found: list[Message] = []
    at = expired = 0
    while at < len(candidates):
        if query.is_full(found) and int(candidates["store_timestamp"][at]) < int(
            candidates["store_timestamp"][at - 1]
        ):
            break
        end = at + READ_AT_ONCE
        while (
            end < len(candidates)
            and candidates["store_timestamp"][end] == candidates["store_timestamp"][end - 1]
        ):
            end += 1  # all messages of one millisecond are read, because the next page begins after it
        entries = []
        for item in candidates[at:end]:
            queue = QueueKey(query.topic, int(item["queue_id"]), int(item["generation"]))
            if queue not in shown:
                shown[queue] = is_shown(state, queue, with_hidden=query.with_hidden)
            if shown[queue]:
                entries.append(Entry(queue, int(item["queue_offset"]), int(item["store_timestamp"])))
        at = end
        expired += sum(has_expired(state, entry) for entry in entries)
        for first in range(0, len(entries), READ_AT_ONCE):
            some = entries[first : first + READ_AT_ONCE]
            read = await gather([read_entry(source, state, entry) for entry in some])
            found += [message for message in read if message is not None and _is_wanted(message, query)]
            source.release_ranges()
    found.sort(key=Position.of, reverse=True)
    return found, at >= len(candidates), expired


def _is_wanted(message: Message, query: KeyQuery) -> bool:
    """Whether it carries the key, and is not one of the pages before: those do not count as found."""
    is_behind = query.after is None or Position.of(message) < query.after
    return is_behind and carries(message.record, query)


def carries(record: Record, query: KeyQuery) -> bool:
    """Whether the record has the topic and the key (or unique key) of the query, and was stored within its times."""
    if record.topic != query.topic or not query.begin_ms <= record.store_timestamp <= query.end_ms:
        return False
    is_key, is_unique = query.key in record.keys, query.key == record.uniq_key
    if query.kind is KeyKind.ANY:
        return is_key or is_unique
    return is_unique if query.kind is KeyKind.UNIQUE else is_key


async def cost_of(source: QuerySource, state: CatalogState, queries: Sequence[KeyQuery]) -> QueryCost:
    """What ``find_by_keys`` will read. Reads pages of the catalog at most."""
    times = _range(queries)
    segments = await unindexed_segments(source, state, _hashes(queries), times)
    return QueryCost(len(_files(state, *times)), len(segments), len(queries))
