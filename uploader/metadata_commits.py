"""Commits without messages: the broker's tables under ``state/``, and queues to hide because their topic was deleted.

Owns when tables are read and which queues are hidden.

Decides which archived queues to hide because the broker deleted them, and which to show again. Nothing is erased.

A topic deleted before a backfill left records in the commitlog, but no consume queue and no row in the topic table. A
queue whose topic is in the table has lost its files: it stays visible. A queue without records in the commitlog is
kept: expired records have no units either. A hidden queue is shown again once the broker's queue refers to its last
archived record.

While following, a topic is deleted once it was in the master's table, as read or as archived before the start, and is
absent from table, backup and consume queues for an hour while others are present. Losing a tenth of all topics at once
is an alarm, not a deletion.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiered.broker_store.config import BrokerState, state_fingerprint, topic_names_backup
from tiered.broker_store.store import BrokerStore
from tiered.catalog.broker_facts import TABLE_NAMES
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.claims import BACKFILL
from tiered.catalog.commit import CommitInvalidError
from tiered.catalog.state import CatalogState
from tiered.consume_queue.index import ConsumeQueueIndex
from tiered.errors import AccessDeniedError, CorruptionError, TieredError, UnavailableError
from tiered.model.queue import LMQ_PREFIX, QueueKey
from tiered.model.tables import QUEUE_HIDDEN, QUEUE_SUPERSEDED
from uploader.broker_state_archive import BrokerStateArchive
from uploader.cycle_upload import CycleUploader
from uploader.follow_loop import Every

logger = logging.getLogger(__name__)

DELETIONS_EVERY_MS = 60_000
TABLE_ATTEMPTS = 5
TABLE_WAIT_S = 0.2
"""Wait before the first retry of a backfill; doubled each time."""


def broker_tables(state: BrokerState) -> Mapping[str, Any]:
    """The broker's readable tables as documents, by TABLE_NAMES: keys under ``state/``."""
    return {name: getattr(state, name) for name in TABLE_NAMES if name not in state.damaged}


class MetadataCommits:
    """The metadata commits of one writer. Not thread-safe."""

    def __init__(
        self,
        store: BrokerStore,
        writer: CatalogWriter,
        uploader: CycleUploader,
        state_archive: BrokerStateArchive,
        *,
        claim: Callable[[], None],
        wait: Callable[[float], object],
    ) -> None:
        """``uploader`` gets tables to commit with its next cycle, so that they cost no commit of their own. ``claim``
        makes this process the archive's writer, before its first commit. ``wait`` sleeps so many seconds between two
        attempts to read a table, or until the process stops."""
        self._store = store
        self._writer = writer
        self._uploader = uploader
        self._state_archive = state_archive
        self._claim = claim
        self._wait = wait
        self._fingerprint: tuple[tuple[str, int, int], ...] = ()
        """The ``state_fingerprint`` of the broker's table files when they were last read."""
        self._deleted_topics = DeletedTopics()
        self._watch = Every(DELETIONS_EVERY_MS)
        self._has_archived_topics = False
        self._hide: list[QueueKey] = []
        self._unhide: list[QueueKey] = []
        self.hidden = 0
        """Queues hidden so far."""
        self.shown_again = 0
        """Queues shown again so far."""
        self.missing: list[QueueKey] = []
        """Queues of topics in the broker's table that have messages in the log and no consume queue."""

    def step(self, now_ms: int) -> None:
        """Beside a running broker: archive its tables if they changed, and hide queues of deleted topics, even if no
        message arrives. Called again and again."""
        if not self._has_archived_topics and not self._adopt_archived_topics():
            return  # the next step retries: the archived topic table must be read before a newer one replaces it
        self._refresh(following=True)
        if self._watch.is_due(now_ms):
            self._watch_deletions(now_ms)
        self.commit_when_idle()

    def finish(self, with_units: set[tuple[str, int]], proven_phys: Callable[[], int]) -> None:
        """At the end of a backfill: hide queues of deleted topics, show queues again that are back, and archive the
        broker's tables.

        ``with_units``: (topic, queue id) of the broker's queues that have consume-queue units. ``proven_phys`` returns
        the end of the record of the last unit: a killed broker's recovery adds units for records above it, so queues
        with such records stay visible. It is costly, and called only if an archived queue has no unit.
        """
        state = self._writer.state_or_none
        if state is None:
            return
        hidden: list[QueueKey] = []
        if any((key.topic, key.queue_id) not in with_units for key in state.visible_queues()):
            limit_phys = proven_phys()
            # A queue whose last record is no longer in the log has no unit because the broker expired it.
            self._store.commit_log.refresh()
            begin_phys = self._store.commit_log.broker_min_phys
            current = [
                key
                for key, row in state.current_queues()
                if not row["flags"] & QUEUE_HIDDEN and begin_phys < row["end_phys"] <= limit_phys
            ]
            hidden, self.missing = without_units(current, with_units, self._known_topics())
        again = self._shown_again(state, {topic for topic, _ in with_units})
        self.hidden, self.shown_again = len(hidden), len(again)
        if not self._writer.is_claimed and self._are_tables_outdated(state):
            self._claim()
        if self._writer.is_claimed:
            self._refresh(following=False)
        if hidden or again or self._state_archive.pending():
            self._claim()
            self._uploader.commit_metadata(hide=hidden, unhide=again)

    def _known_topics(self) -> set[str]:
        """The broker's topic table and its backup; empty if it cannot be read: then no topic counts as deleted."""
        try:
            table = self._store.topics()
            return table.keys() | topic_names_backup(self._store.path) if table else set()
        except (UnavailableError, CorruptionError) as error:
            logger.warning(
                "the broker's topic table cannot be read: no queue is hidden", extra={"error": str(error)}
            )
            return set()

    def _shown_again(self, state: CatalogState, topics: Set[str]) -> list[QueueKey]:
        """Hidden queues of ``state``, of the given ``topics``, that the broker has again; none if its consume queues
        cannot be read."""
        index = self._store.consume_queues()
        hidden = (
            (key, row)
            for key, row in state.current_queues()
            if row["flags"] & (QUEUE_HIDDEN | QUEUE_SUPERSEDED) == QUEUE_HIDDEN and key.topic in topics
        )
        return [] if index is None else shown_again(hidden, index)

    def _are_tables_outdated(self, state: CatalogState) -> bool:
        """Whether a backfill that has nothing else to commit must archive the broker's tables: an earlier backfill
        ended before it did, or they have changed since. Not after `tiered run`: the tables of a running broker change
        all the time."""
        owner = state.owner
        if not state_fingerprint(self._store.path):
            return False  # the store is a copy without tables
        if not self._state_archive.has(TABLE_NAMES):
            return True
        if owner is None or owner.kind != BACKFILL:
            return False
        try:
            return self._state_archive.has_changes()
        except (UnavailableError, CorruptionError) as error:
            if not owner.released:
                raise
            logger.warning(
                "tables of the broker cannot be read and are not archived", extra={"error": str(error)}
            )
            return False

    def _adopt_archived_topics(self) -> bool:
        """Read the archived copy of the broker's topic table, so that a topic which was deleted while no process
        watched is noticed. False while the object store is unavailable: then this is to be called again."""
        state = self._writer.state_or_none
        if state is None:
            return True
        try:
            self._deleted_topics.adopt(
                self._state_archive.archived_names(state.state_objects, TABLE_NAMES[0])
            )
        except UnavailableError as error:
            logger.warning(
                "the archived topic table could not be read and is read again", extra={"error": str(error)}
            )
            return False
        except TieredError as error:
            logger.warning(
                "the archived topic table cannot be read: topics that were deleted before this start stay visible",
                extra={"error": str(error)},
            )
        self._has_archived_topics = True
        return True

    def _watch_deletions(self, now_ms: int) -> None:
        """Find topics that the broker has deleted, and queues of hidden ones that are back, for the next metadata
        commit. Does nothing beside a slave, whose topic table is wiped and filled again."""
        state = self._writer.state_or_none
        if state is None or (self._store.conf is not None and self._store.conf.is_slave):
            return
        try:
            table = set(self._store.topics())
            backup = topic_names_backup(self._store.path)
        except (UnavailableError, CorruptionError) as error:
            logger.warning(
                "the broker's topic table could not be read and is read again", extra={"error": str(error)}
            )
            return
        index = self._store.consume_queues()
        with_queues = {queue.topic for queue in index.queues()} if index is not None else set()
        verdict = self._deleted_topics.check(table, backup, with_queues, now_ms)
        if verdict.alarm:
            logger.warning(
                "too many topics are missing from the broker's table at once: none of them is hidden",
                extra={"error": verdict.alarm},
            )
        deleted = [key for key in state.visible_queues() if key.topic in verdict.deleted]
        self._hide += [key for key in deleted if key not in self._hide]
        self._unhide = self._shown_again(state, with_queues)

    def commit_when_idle(self) -> None:
        """Commit what waits for a commit: stored copies of the broker's tables, queues to hide or to show again, new
        settings. Does nothing while messages are uploaded: their commit takes the tables and settings along."""
        if not (self._writer.is_claimed and self._writer.state.started and self._uploader.builder.is_idle):
            return
        if not (
            self._hide or self._unhide or self._state_archive.pending() or self._uploader.has_new_settings()
        ):
            return
        try:
            self._uploader.commit_metadata(hide=self._hide, unhide=self._unhide)
        except CommitInvalidError:
            return  # a cycle was committed at the same moment; the next step retries
        if self._hide:
            logger.info("queues of deleted topics are hidden", extra={"queues": len(self._hide)})
        if self._unhide:
            logger.info(
                "hidden queues are shown again: the broker has them", extra={"queues": len(self._unhide)}
            )
        self.hidden += len(self._hide)
        self.shown_again += len(self._unhide)
        self._hide, self._unhide = [], []

    def _refresh(self, *, following: bool) -> None:
        """Store copies of the broker's tables if they changed; the next commit names them. If that fails, a writer that
        is ``following`` a broker tries it again at its next step; a backfill tries it a few times here, and then raises
        the error. A damaged table is not tried again by a backfill.
        """
        fingerprint = state_fingerprint(self._store.path)
        if not self._writer.is_claimed or fingerprint == self._fingerprint:
            return
        if following and self._state_archive.pending():
            return  # a second copy would replace one that no commit names yet
        for attempt in range(1 if following else TABLE_ATTEMPTS):
            try:
                self._state_archive.refresh(self._writer.state.epoch, self._uploader.builder.next_attempt())
                self._fingerprint = fingerprint
                return
            except (UnavailableError, CorruptionError) as error:
                if not following and (isinstance(error, CorruptionError) or attempt == TABLE_ATTEMPTS - 1):
                    raise
                logger.warning(
                    "tables of the broker could not be archived; this is tried again",
                    extra={"error": str(error)},
                )
                if not following:
                    self._wait(TABLE_WAIT_S * 2**attempt)


ABSENT_MS_MIN = 3_600_000
"""A topic counts as deleted once it has been absent for so long."""
MASS_DELETION_RATIO = 0.1
MASS_DELETION_TOPICS_MIN = 3
"""If at least so many topics, and more than this part of all, are absent at once, that is an alarm."""


def without_units(
    archived: Iterable[QueueKey], shown: Set[tuple[str, int]], topics: Set[str]
) -> tuple[list[QueueKey], list[QueueKey]]:
    """The ``archived`` queues that have no consume-queue unit at the broker, in two lists: those of deleted topics, and
    those of existing topics, which have lost their files.

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
    """Those of the ``hidden`` queues, given with their rows in the catalog, that the broker has again: its consume
    queue refers to the last record that is archived of the queue. One whose files cannot be read stays hidden."""
    back = []
    for key, row in hidden:
        with suppress(AccessDeniedError, CorruptionError, UnavailableError):
            for unit in index.units(key.topic, key.queue_id, max(int(row["end_queue_offset"]) - 1, 0), 1):
                if unit["phys"] + unit["size"] == row["end_phys"]:
                    back.append(key)
    return back


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
        """Which topics count as deleted at ``now_ms``: a master had them in its topic table at an earlier check, and
        for ABSENT_MS_MIN neither in ``table``, nor in its ``backup``, nor in ``consume_queues``. LMQs are never in the
        table, and not checked. Too many at once are an alarm, and none of them counts as deleted."""
        present = set(table) | set(backup) | set(consume_queues)
        if not table:
            return DeletionVerdict()  # a table that was just wiped tells nothing
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
                alarm=f"{len(absent)} of {len(self._seen)} topics are missing at the broker at once"
            )
        for topic in due:
            self._seen.discard(topic)
            del self._absent_since_ms[topic]
        return DeletionVerdict(deleted=due)
