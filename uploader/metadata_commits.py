"""Commits without messages: the broker's tables under ``state/``, and queues to hide because their topic was deleted.

Owns when tables are read and which queues are hidden. The rules of visibility are in visibility.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from tiered.broker_store.config import BrokerState, state_fingerprint, topic_names_backup
from tiered.broker_store.store import BrokerStore
from tiered.catalog.broker_facts import TABLE_NAMES
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.claims import BACKFILL
from tiered.catalog.commit import CommitInvalidError
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, TieredError, UnavailableError
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_HIDDEN, QUEUE_SUPERSEDED
from uploader.broker_state_archive import BrokerStateArchive
from uploader.cycle_upload import CycleUploader
from uploader.follow import Every
from uploader.visibility import DeletedTopics, shown_again, without_units

DELETIONS_EVERY_MS = 60_000
TABLE_ATTEMPTS = 5
TABLE_WAIT_S = 0.2
"""Wait before the first retry of a backfill; doubled each time."""


def broker_tables(state: BrokerState) -> Mapping[str, Any]:
    """The broker's readable tables as documents, by TABLE_NAMES: keys under ``state/``."""
    return {name: getattr(state, name) for name in TABLE_NAMES if name not in state.damaged}


class MetadataCommits:
    """The metadata commits of one writer. Not thread-safe.

    ``claim`` claims the epoch, ``log`` logs a message, ``wait`` sleeps between retries.
    """

    def __init__(
        self,
        store: BrokerStore,
        writer: CatalogWriter,
        uploader: CycleUploader,
        state_archive: BrokerStateArchive,
        *,
        claim: Callable[[], None],
        log: Callable[[str, Mapping[str, object]], None],
        wait: Callable[[float], object],
    ) -> None:
        self._store = store
        self._writer = writer
        self._uploader = uploader
        self._state_archive = state_archive
        self._claim = claim
        self._write_log = log
        self._wait = wait
        self._fingerprint: tuple[tuple[str, int, int], ...] = ()
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
        """Following: archive changed tables and hide queues of deleted topics, even if no message arrives."""
        if not self._has_archived_topics and not self._adopt_archived_topics():
            return  # the next step retries: the table of this broker must not replace it before
        self._refresh(following=True)
        if self._watch.is_due(now_ms):
            self._watch_deletions(now_ms)
        self._commit_when_idle()

    def finish(self, with_units: set[tuple[str, int]], proven_phys: Callable[[], int]) -> None:
        """End of a backfill: hide queues of deleted topics, show those that are back, archive the broker's tables.

        ``with_units``: (topic, queue id) of the broker's queues. Above ``proven_phys``, the end of the last unit, the
        recovery of a killed broker will add units: queues there stay visible. Called only if a queue has no unit.
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
            self._log("topic table not readable this time: no queue is hidden", error=str(error))
            return set()

    def _shown_again(self, state: CatalogState, topics: Set[str]) -> list[QueueKey]:
        """Hidden queues of ``topics`` that are back at the broker."""
        index = self._store.consume_queues()
        hidden = (
            (key, row)
            for key, row in state.current_queues()
            if row["flags"] & (QUEUE_HIDDEN | QUEUE_SUPERSEDED) == QUEUE_HIDDEN and key.topic in topics
        )
        return [] if index is None else shown_again(hidden, index)

    def _are_tables_outdated(self, state: CatalogState) -> bool:
        """Whether an earlier backfill ended between the last messages and the tables, or the tables changed since.

        Not after a writer that follows: the tables of a running broker change all the time.
        """
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
            self._log("broker tables not archived this time", error=str(error))
            return False

    def _adopt_archived_topics(self) -> bool:
        """Start from the topic table in the archive, so that a topic deleted while no process watched is noticed.
        Whether that is decided: not while the object store is unavailable."""
        state = self._writer.state_or_none
        if state is None:
            return True
        try:
            self._deleted_topics.adopt(
                self._state_archive.archived_names(state.state_objects, TABLE_NAMES[0])
            )
        except UnavailableError as error:
            self._log("archived topic table not readable this time", error=str(error))
            return False
        except TieredError as error:
            self._log(
                "archived topic table not readable: topics that were deleted before this start stay visible",
                error=str(error),
            )
        self._has_archived_topics = True
        return True

    def _watch_deletions(self, now_ms: int) -> None:
        """Hide queues of topics that the master deleted. An absent topic is not yet a deleted one: visibility.py."""
        state = self._writer.state_or_none
        if state is None or (self._store.conf is not None and self._store.conf.is_slave):
            return
        try:
            table = set(self._store.topics())
            backup = topic_names_backup(self._store.path)
        except (UnavailableError, CorruptionError) as error:
            self._log("topic table not readable this time", error=str(error))
            return
        index = self._store.consume_queues()
        with_queues = {queue.topic for queue in index.queues()} if index is not None else set()
        verdict = self._deleted_topics.check(table, backup, with_queues, now_ms)
        if verdict.alarm:
            self._log(
                "too many topics are missing from the broker's table at once: none of them is hidden",
                error=verdict.alarm,
            )
        gone = [key for key in state.visible_queues() if key.topic in verdict.deleted]
        self._hide += [key for key in gone if key not in self._hide]
        self._unhide = self._shown_again(state, with_queues)

    def _commit_when_idle(self) -> None:
        if not (self._writer.is_claimed and self._writer.state.started and self._uploader.is_idle):
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
            self._log("queues of deleted topics hidden", queues=len(self._hide))
        if self._unhide:
            self._log("hidden queues shown again: the broker has them", queues=len(self._unhide))
        self.hidden += len(self._hide)
        self.shown_again += len(self._unhide)
        self._hide, self._unhide = [], []

    def _refresh(self, *, following: bool) -> None:
        """Archive the broker's tables if they changed; the next commit names them.

        Following continues without tables that are damaged or refused: the next step retries. A backfill retries here,
        then fails.
        """
        fingerprint = state_fingerprint(self._store.path)
        if not self._writer.is_claimed or fingerprint == self._fingerprint:
            return
        for attempt in range(1 if following else TABLE_ATTEMPTS):
            try:
                self._state_archive.refresh(self._writer.state.epoch, self._uploader.next_attempt())
                self._fingerprint = fingerprint
                return
            except (UnavailableError, CorruptionError) as error:
                if not following and (isinstance(error, CorruptionError) or attempt == TABLE_ATTEMPTS - 1):
                    raise
                self._log("broker tables not archived this time", error=str(error))
                if not following:
                    self._wait(TABLE_WAIT_S * 2**attempt)

    def _log(self, message: str, **fields: object) -> None:
        self._write_log(message, fields)
