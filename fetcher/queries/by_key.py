"""Messages by key or unique key.

Index files whose time range overlaps the query's locate the messages with the key's hash; for segments that are not
indexed yet, were excluded, or whose index file is damaged, their key sections do. Every candidate is read and compared
with topic and key as texts, so equal hashes never answer for each other and never count towards the limit (both differ
from the broker: IndexFile.selectPhyOffset, MQAdminImpl.queryMessage).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from fetcher.io.waiting import gather
from fetcher.queries.found import (
    ALWAYS_MS,
    Entry,
    FoundMessage,
    count_within,
    has_expired,
    is_shown,
    read_entry,
)
from fetcher.queries.source import QuerySource
from fetcher.queries.unindexed_items import scan_instead, scan_unindexed, unindexed_segments
from tiered.archive.index.key_hash import key_hash
from tiered.archive.index.lookup import Matches, Wanted, find_items
from tiered.archive.index_shape import shape_of
from tiered.catalog.index_refs import IndexRef
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError
from tiered.formats.record import Record
from tiered.model.queue import QueueKey
from tiered.model.tables import Table

READ_AT_ONCE = 16
"""Candidates whose blocks are read side by side."""
ITEMS_MIN = 64
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
    def of(cls, message: FoundMessage) -> Position:
        """Where ``message`` stands."""
        return cls.of_record(message.record)

    @classmethod
    def of_record(cls, record: Record) -> Position:
        """Where a message with this record stands."""
        return cls(record.store_timestamp, record.physical_offset)


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

    def is_full(self, found: Sequence[FoundMessage]) -> bool:
        """Whether the page is full."""
        if len(found) >= self.max_messages:
            return True
        return self.max_bytes < NO_LIMIT and sum(len(one.data) for one in found) >= self.max_bytes


@dataclass(frozen=True)
class QueryPage:
    """Answers, newest first. ``next``: where the next page begins; None when there is none. ``expired``: messages with
    the key's hash that have expired, of those that were examined and are still indexed."""

    messages: Sequence[FoundMessage]
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
    """A page of answers for each query; at most one query a topic. Reads each key section once for all of them. Raises
    as ``find_by_key``."""
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
    """``scanned``: items of the query's topic with the wanted hash, from segments without an index file."""
    # Items do not know physical offsets: of the millisecond where a page ends all are looked at again.
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
    """Items newest first, each once, as far back as every source is known; whether that is all."""
    items = np.concatenate([match.items for match in matches])
    horizon = max(
        (int(match.items["store_timestamp"][-1]) for match in matches if not match.is_all), default=None
    )
    if horizon is not None:
        # A file that was not read to its end may have more of this very millisecond.
        items = items[items["store_timestamp"] > horizon]
    items = np.unique(items)
    return items[np.argsort(-items["store_timestamp"], kind="stable")], horizon is None


async def _verified(
    source: QuerySource, state: CatalogState, query: KeyQuery, candidates: Table
) -> tuple[list[FoundMessage], bool, int]:
    """Messages that carry the key, in order, at least as many as requested; whether all candidates were examined; how
    many of those have expired."""
    shown: dict[QueueKey, bool] = {}
    found: list[FoundMessage] = []
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
            end += 1  # a millisecond is read as a whole
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
            source.forget()
    found.sort(key=Position.of, reverse=True)
    return found, at >= len(candidates), expired


def _is_wanted(message: FoundMessage, query: KeyQuery) -> bool:
    """Whether it carries the key, and is not one of the pages before: those do not count as found."""
    is_behind = query.after is None or Position.of(message) < query.after
    return is_behind and carries(message.record, query)


def carries(record: Record, query: KeyQuery) -> bool:
    """Whether topic, key and time of the record match the query."""
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
