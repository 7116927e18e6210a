"""Queries by key and id over an archive and its broker's files, each message once.

For archived messages the archive decides: only it has deleted topics, earlier generations and superseded log histories.
The broker's files add messages that are not archived yet. A replaced log that the archive has not seen yet is visible
from the archive's end on. Does not own either side's search (archive_queries.py, broker_files_lookup.py) nor the choice
of side (query_policy.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fetcher.policy.query_policy import TimeRange, query_shares
from fetcher.policy.read_policy import ReadPolicy
from fetcher.queries.archive_queries import ArchiveQueries
from fetcher.queries.broker_files_lookup import BrokerSideQueries
from fetcher.queries.by_id import OffsetMsgId
from fetcher.queries.by_key import KeyQuery, Position
from fetcher.queries.found import FoundMessage
from tiered.catalog.state import CatalogState
from tiered.formats.record import SYS_INNER_BATCH, Record
from tiered.model.queue import QueueKey


class BothSidesQueries:
    """Queries the archive and the broker's files by ``policy``. Not thread-safe."""

    def __init__(self, archive: ArchiveQueries, broker: BrokerSideQueries, policy: ReadPolicy) -> None:
        self._archive, self._broker, self._policy = archive, broker, policy

    def by_key(self, query: KeyQuery) -> list[FoundMessage]:
        """``by_keys`` of one query."""
        return self.by_keys([query])[0]

    def by_keys(self, queries: Sequence[KeyQuery]) -> list[list[FoundMessage]]:
        """For each query, of one topic each and all of one time range: messages with its key, newest first, at most
        ``max_messages``.

        Raises CorruptionError, UnavailableError, or what either side raises, rather than return half a result.
        """
        if not queries:
            return []
        times = TimeRange(queries[0].begin_ms, queries[0].end_ms)
        shares = query_shares(self._policy, times, self._broker.earliest_ms())
        archived: list[list[FoundMessage]] = [[] for _ in queries]
        if shares.tiered is not None:
            archived = [list(page.messages) for page in self._archive.by_keys(queries)]
        if shares.local is None:
            return archived
        begin_ms = shares.local.begin_ms
        return [
            merged(messages, self._local(query, begin_ms), query.max_messages)
            for query, messages in zip(queries, archived, strict=True)
        ]

    def _local(self, query: KeyQuery, begin_ms: int) -> list[FoundMessage]:
        is_alone = self._policy is ReadPolicy.DISABLE
        local = self._broker.by_key(
            replace(query, begin_ms=begin_ms),
            self._is_its_own,
            archived_phys=0 if is_alone else self._archive.state.cursor.phys,
        )
        return [_found(self._archive.state, record) for record in local]

    def by_id(self, wanted: OffsetMsgId) -> FoundMessage | None:
        """The message with an offsetMsgId, from the archive if it has it; None when neither side does."""
        if self._policy is not ReadPolicy.DISABLE:
            found = self._archive.by_id(wanted)
            if found is not None or self._policy is ReadPolicy.FORCE:
                return found
        record = self._broker.by_id(wanted)
        return None if record is None else _found(self._archive.state, record)

    def _is_its_own(self, record: Record) -> bool:
        """Whether the broker's files decide: the record is not archived, or the policy excludes the archive."""
        return self._policy is ReadPolicy.DISABLE or not covers(self._archive.state, record)


def covers(state: CatalogState, record: Record) -> bool:
    """Whether the archive decides about this record: it lies before the archive's end, within the archived offsets of
    a generation of its queue. If the archive does not return it, it is hidden or deleted."""
    if record.physical_offset >= state.cursor.phys:
        return False
    generation = state.current_generation(record.topic, record.queue_id)
    for number in range(0 if generation is None else generation + 1):
        row = state.queue(QueueKey(record.topic, record.queue_id, number))
        if row is not None and row["min_queue_offset"] <= record.queue_offset < row["end_queue_offset"]:
            return True
    return False


def merged(
    archived: Iterable[FoundMessage], local: Iterable[FoundMessage], max_messages: int
) -> list[FoundMessage]:
    """Both, newest first, of one millisecond the highest physical offset first; each place of the log once."""
    by_place = {message.record.physical_offset: message for message in local}
    by_place |= {message.record.physical_offset: message for message in archived}
    return sorted(by_place.values(), key=Position.of, reverse=True)[:max_messages]


def _found(state: CatalogState, record: Record) -> FoundMessage:
    generation = state.current_generation(record.topic, record.queue_id) or 0
    queue = QueueKey(record.topic, record.queue_id, generation)
    is_batch = bool(record.sys_flag & SYS_INNER_BATCH)
    return FoundMessage(queue, record.queue_offset, record.data, is_batch)
