"""Decides which archived queues to hide because the broker deleted them, and which to show again. Nothing is erased.

A topic deleted before a backfill left records in the commitlog, but no consume queue and no row in the topic table. A
queue whose topic is in the table has lost its files: it stays visible. A queue without records in the commitlog is
kept: expired records have no units either. A hidden queue is shown again once the broker's queue refers to its last
archived record.

While following, a topic is deleted once it was in the master's table, as read or as archived before the start, and is
absent from table, backup and consume queues for an hour while others are present. Losing a tenth of all topics at once
is an alarm, not a deletion.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

import numpy as np

from tiered.consume_queue.index import ConsumeQueueIndex
from tiered.model.queue import LMQ_PREFIX, QueueKey

ABSENT_MS_MIN = 3_600_000
MASS_DELETION_RATIO = 0.1
MASS_DELETION_TOPICS_MIN = 3


def without_units(
    archived: Iterable[QueueKey], shown: Set[tuple[str, int]], topics: Set[str]
) -> tuple[list[QueueKey], list[QueueKey]]:
    """Queues without a consume-queue unit at the broker: those of deleted topics, and those that lost their files.

    ``shown``: (topic, queue id) of every queue with units. ``topics``: the broker's topic table and its backup; empty
    where they are not known, and then no topic counts as deleted. LMQs are never in the table.
    """
    deleted: list[QueueKey] = []
    missing: list[QueueKey] = []
    for key in archived:
        if (key.topic, key.queue_id) not in shown:
            is_deleted = key.topic not in topics and (bool(topics) or key.topic.startswith(LMQ_PREFIX))
            (deleted if is_deleted else missing).append(key)
    return deleted, missing


def shown_again(hidden: Iterable[tuple[QueueKey, np.void]], index: ConsumeQueueIndex) -> list[QueueKey]:
    """Hidden queues, with their rows in the catalog, to whose last archived record the broker's queue refers."""
    found = []
    for key, row in hidden:
        for unit in index.units(key.topic, key.queue_id, max(int(row["end_queue_offset"]) - 1, 0), 1):
            if unit["phys"] + unit["size"] == row["end_phys"]:
                found.append(key)
    return found


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
