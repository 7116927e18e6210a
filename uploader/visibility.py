"""Decides which archived queues to hide because the broker deleted them. Nothing is erased. Pure.

A topic deleted before a backfill left records in the commitlog, but no consume queue. A queue without records in the
commitlog is kept: expired records have no units either.

While following, a topic is deleted once it was in the master's table, as read or as archived before the start, and is
absent from table, backup and consume queues for an hour while others are present. Losing a tenth of all topics at once
is an alarm, not a deletion.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from tiered.model.queue import LMQ_PREFIX, QueueKey

ABSENT_MS_MIN = 3_600_000
MASS_DELETION_RATIO = 0.1
MASS_DELETION_TOPICS_MIN = 3


def hidden_queues(archived: Iterable[QueueKey], shown: Set[tuple[str, int]]) -> list[QueueKey]:
    """Current generations whose queue has no consume-queue unit at the broker.

    ``shown``: (topic, queue id) of every queue with units. A queue of a recreated topic without a new message has none:
    its records belong to the earlier generation.
    """
    return [key for key in archived if (key.topic, key.queue_id) not in shown]


@dataclass(frozen=True)
class DeletionVerdict:
    """Result of one check of the topic table."""

    deleted: frozenset[str] = frozenset()
    alarm: str = ""


class DeletedTopics:
    """Detects deleted topics by the master's topic table while following."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._absent_since_ms: dict[str, int] = {}

    def adopt(self, archived: Iterable[str]) -> None:
        """Topics that were in the master's table when it was archived, before this process began."""
        self._seen |= set(archived)

    def check(
        self, table: Set[str], backup: Set[str], consume_queues: Iterable[str], now_ms: int
    ) -> DeletionVerdict:
        """One check beside a master. LMQs are never in the table: they are not checked."""
        present = set(table) | set(backup) | set(consume_queues)
        if not table:
            return DeletionVerdict()
        self._seen |= set(table)
        absent = {topic for topic in self._seen - present if not topic.startswith(LMQ_PREFIX)}
        for topic in list(self._absent_since_ms):
            if topic not in absent:
                del self._absent_since_ms[topic]
        for topic in absent:
            self._absent_since_ms.setdefault(topic, now_ms)
        due = frozenset(
            topic for topic, since_ms in self._absent_since_ms.items() if now_ms - since_ms >= ABSENT_MS_MIN
        )
        if len(absent) >= MASS_DELETION_TOPICS_MIN and len(absent) > MASS_DELETION_RATIO * len(self._seen):
            return DeletionVerdict(
                alarm=f"{len(absent)} of {len(self._seen)} topics are gone from the broker at once"
            )
        for topic in due:
            self._seen.discard(topic)
            del self._absent_since_ms[topic]
        return DeletionVerdict(deleted=due)
