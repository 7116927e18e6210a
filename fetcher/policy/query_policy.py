"""Which side answers questions by time and by key: the archive, the broker's files, or both. Pure.

Owns the rules of TieredMessageStore.getOffsetInQueueByTime, getEarliestMessageTime, getMessageStoreTimeStamp, and who
is asked by queryMessage. Times are ms since the epoch; -1 is "not known", as in RocketMQ.
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
    """What each side is asked for; None: nothing."""

    local: TimeRange | None
    tiered: TimeRange | None


def is_time_in_archive(policy: ReadPolicy, timestamp_ms: int, local_earliest_ms: int) -> bool:
    """Whether an offset by time is looked for in the archive first. ``local_earliest_ms``: of all the broker has."""
    if policy is ReadPolicy.DISABLE:
        return False
    return policy is ReadPolicy.FORCE or timestamp_ms < local_earliest_ms


def asks_local_too(policy: ReadPolicy, answer: int) -> bool:
    """Whether the broker's files are asked after the archive answered -1: under FORCE its word is final."""
    return answer == UNKNOWN_MS and policy is not ReadPolicy.FORCE


def earliest_time(local_ms: int, tiered_ms: int) -> int:
    """The earlier of the times that are known; -1 when none is."""
    return min((time_ms for time_ms in (local_ms, tiered_ms) if time_ms > UNKNOWN_MS), default=UNKNOWN_MS)


def query_shares(policy: ReadPolicy, wanted: TimeRange, local_earliest_ms: int) -> QueryShares:
    """Who is asked for what of a query by key in ``wanted``. What both find is one message: merge by its place.

    Unlike the Java tiered store, which asks only the broker for times it has: after a crash the broker's index has
    holes (messageIndexSafe is off by default), which the archive fills.
    """
    if policy is ReadPolicy.FORCE:
        return QueryShares(None, wanted)
    if policy is ReadPolicy.DISABLE:
        return QueryShares(wanted, None)
    begin_ms = max(wanted.begin_ms, local_earliest_ms)
    local = TimeRange(begin_ms, wanted.end_ms) if begin_ms <= wanted.end_ms else None
    return QueryShares(local, wanted)
