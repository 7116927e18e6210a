"""Which archived queues the broker itself no longer shows: back-fill hides them, never erases (3a, Absent, Queues).

A topic deleted before the back-fill left its records in the commitlog but no consume queue. A queue without records
in the commitlog tells nothing: what the broker has expired loses its units as well.
Following, a queue is deleted only when its topic was
once seen in the master's table and is absent from table, backup and consume queue for an hour while others are
present; losing a tenth of all topics at once is an alarm, not a deletion.

Pure; the caller reads the broker and commits the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from tiered.model.queue import LMQ_PREFIX, QueueKey

ABSENT_MS_MIN = 3_600_000
MASS_DELETION_RATIO = 0.1
MASS_DELETION_TOPICS_MIN = 3


def hidden_queues(archived: Iterable[QueueKey], shown: Set[tuple[str, int]]) -> list[QueueKey]:
    """Current generations whose queue has no consume-queue unit left at the broker.

    ``shown``: (topic, queue id) of every queue that has one. A queue of a recreated topic that got no message in its
    new life has none either: its records belong to the life before.
    """
    return [key for key in archived if (key.topic, key.queue_id) not in shown]


@dataclass(frozen=True)
class DeletionVerdict:
    """What one look at the topic table means."""

    deleted: frozenset[str] = frozenset()
    alarm: str = ""


class DeletedTopics:
    """Watches the master's topic table while following."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._absent_since_ms: dict[str, int] = {}

    def check(
        self, table: Set[str], backup: Set[str], consume_queues: Iterable[str], now_ms: int
    ) -> DeletionVerdict:
        """One look beside a master. Light queues never stand in the table and are not judged by it."""
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
