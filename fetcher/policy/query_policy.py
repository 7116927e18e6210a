"""Which side answers queries by time and by key: the archive, the broker's files, or both. Pure.

Sources: TieredMessageStore.getOffsetInQueueByTime, getEarliestMessageTime, getMessageStoreTimeStamp, queryMessage.
Times are ms since the epoch; -1 is "unknown", as in RocketMQ.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fetcher.policy.read_policy import ReadPolicy

UNKNOWN_MS: Final = -1


class TimeRange(NamedTuple):
    """Both ends included."""

    begin_ms: int
    end_ms: int


class QueryShares(NamedTuple):
    """The time range each side is queried for, or None."""

    local: TimeRange | None
    tiered: TimeRange | None


def earliest_time(local_ms: int, tiered_ms: int) -> int:
    """The earlier known time; -1 if none is known."""
    return min((time_ms for time_ms in (local_ms, tiered_ms) if time_ms > UNKNOWN_MS), default=UNKNOWN_MS)


def query_shares(policy: ReadPolicy, wanted: TimeRange, local_earliest_ms: int) -> QueryShares:
    """The time ranges of a query by key in ``wanted``. Messages found by both are merged by their place.

    The Java tiered store queries only the broker for times it has; but after a crash the broker's index has holes
    (messageIndexSafe is off by default), which the archive fills.
    """
    if policy is ReadPolicy.FORCE:
        return QueryShares(None, wanted)
    if policy is ReadPolicy.DISABLE:
        return QueryShares(wanted, None)
    begin_ms = max(wanted.begin_ms, local_earliest_ms)
    local = TimeRange(begin_ms, wanted.end_ms) if begin_ms <= wanted.end_ms else None
    return QueryShares(local, wanted)
