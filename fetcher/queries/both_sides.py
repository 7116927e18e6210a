"""Queries by key and id of an archive and of its broker's files together, each message once.

The archive's word counts for what it has: it knows deleted topics, earlier lives of recreated ones and superseded log
lines, which a commitlog does not tell. The broker's files add what is not archived yet.

Owns the merge. Does not own either side's search (archive_queries.py, broker_side.py) nor who is asked what
(query_policy.py). A log that was replaced and that the archive has not seen yet shows from the archive's end on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fetcher.policy.query_policy import TimeRange, query_shares
from fetcher.policy.read_policy import ReadPolicy
from fetcher.queries.archive_queries import ArchiveQueries
from fetcher.queries.broker_side import BrokerSideQueries
from fetcher.queries.by_id import OffsetMsgId
from fetcher.queries.by_key import KeyQuery, Position
from fetcher.queries.found import FoundMessage
from tiered.catalog.state import CatalogState
from tiered.formats.record import SYS_INNER_BATCH, Record
from tiered.model.queue import QueueKey


class BothSidesQueries:
    """Asks the archive and the broker's files as ``policy`` says. Not for several threads at once."""

    def __init__(self, archive: ArchiveQueries, broker: BrokerSideQueries, policy: ReadPolicy) -> None:
        self._archive, self._broker, self._policy = archive, broker, policy

    def by_key(self, query: KeyQuery) -> list[FoundMessage]:
        """Messages with a key, newest first, at most ``query.max_messages``.

        Raises CorruptionError, UnavailableError, or what either side raises: half an answer is none.
        """
        shares = query_shares(
            self._policy, TimeRange(query.begin_ms, query.end_ms), self._broker.earliest_ms()
        )
        archived: list[FoundMessage] = []
        if shares.tiered is not None:
            archived = list(self._archive.by_key(query).messages)
        if shares.local is None:
            return archived
        is_alone = self._policy is ReadPolicy.DISABLE
        local = self._broker.by_key(
            replace(query, begin_ms=shares.local.begin_ms),
            self._is_its_own,
            archived_phys=0 if is_alone else self._archive.state.cursor.phys,
        )
        found = [_found(self._archive.state, record) for record in local]
        return merged(archived, found, query.max_messages)

    def by_id(self, wanted: OffsetMsgId) -> FoundMessage | None:
        """The message with an offsetMsgId, from the archive if it has it; None when neither side does."""
        if self._policy is not ReadPolicy.DISABLE:
            found = self._archive.by_id(wanted)
            if found is not None or self._policy is ReadPolicy.FORCE:
                return found
        record = self._broker.by_id(wanted)
        return None if record is None else _found(self._archive.state, record)

    def _is_its_own(self, record: Record) -> bool:
        """Whether it is for the broker to show: the archive does not speak for it, or is not asked."""
        return self._policy is ReadPolicy.DISABLE or not speaks_for(self._archive.state, record)


def speaks_for(state: CatalogState, record: Record) -> bool:
    """Whether the archive's answer about this record counts: it lies before the archive's end, in some life of its
    queue between the offsets that the archive knows. What it does not show then is hidden, or gone."""
    if record.physical_offset >= state.cursor.phys:
        return False
    generation = state.current_generation(record.topic, record.queue_id)
    for life in range(0 if generation is None else generation + 1):
        row = state.queue(QueueKey(record.topic, record.queue_id, life))
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
