"""What a commit says besides messages: the broker's tables under ``state/``, and queues that are shown no more.

Owns when tables are read again and which queues are hidden. Does not own the order of commits (cycle_upload.py), nor
the rules of visibility (visibility.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tiered.broker_store.config import state_fingerprint, topic_names_backup
from tiered.broker_store.store import BrokerStore
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.claims import BACKFILL
from tiered.catalog.commit import CommitInvalidError
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, UnavailableError
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_HIDDEN
from uploader.broker_state_archive import BrokerStateArchive
from uploader.cycle_upload import CycleUploader
from uploader.visibility import DeletedTopics, hidden_queues

TABLE_NAMES = ("topics", "subscription_groups", "consumer_offsets", "delay_offsets", "topic_queue_mappings")
TABLE_ATTEMPTS = 5
TABLE_WAIT_S = 0.2
"""Of a back-fill, before it tries again; doubled each time."""


def broker_tables(store: BrokerStore) -> Mapping[str, Any]:
    """The broker's tables as documents, by TABLE_NAMES: keys under ``state/``."""
    state = store.state()
    return {
        "topics": state.topics,
        "subscription_groups": state.subscription_groups,
        "consumer_offsets": state.consumer_offsets,
        "delay_offsets": state.delay_offsets,
        "topic_queue_mappings": state.topic_queue_mappings,
    }


@dataclass(frozen=True)
class MetadataContext:
    """What marks are made from and where they go. ``claim`` owns the epoch, ``log`` takes a line, ``wait`` lets a store
    that refuses come to itself."""

    store: BrokerStore
    writer: CatalogWriter
    uploader: CycleUploader
    state_archive: BrokerStateArchive
    claim: Callable[[], None]
    log: Callable[[str, Mapping[str, object]], None]
    wait: Callable[[float], object]


class MetadataCommits:
    """One writer's marks. Not thread-safe: one thread looks."""

    def __init__(self, context: MetadataContext) -> None:
        self._context = context
        self._fingerprint: tuple[tuple[str, int, int], ...] = ()
        self._deleted_topics = DeletedTopics()
        self._hide: list[QueueKey] = []
        self.hidden = 0
        """Queues hidden so far."""

    def look(self, now_ms: int) -> None:
        """Following: archive tables that changed, hide what was deleted, also while no message comes."""
        self._refresh(following=True)
        self._watch_deletions(now_ms)
        self._commit_when_idle()

    def finish(self, with_units: set[tuple[str, int]], proven_phys: Callable[[], int]) -> None:
        """The end of a back-fill: show what the broker would show, and name its tables.

        ``with_units``: (topic, queue id) of queues the broker shows. Above ``proven_phys``, the end of the last unit, a
        killed broker has units still to write: its recovery will show those queues. Asked for only if a queue has none.
        """
        context = self._context
        state = context.writer.state_or_none
        if state is None:
            return
        hidden: list[QueueKey] = []
        if hidden_queues(state.visible_queues(), with_units):
            limit_phys = proven_phys()
            # A queue whose last record is no longer in the log has no unit because the broker expired it.
            context.store.commit_log.refresh()
            begin_phys = context.store.commit_log.broker_min_phys
            current = [
                key
                for key, row in state.current_queues()
                if not row["flags"] & QUEUE_HIDDEN and begin_phys < row["end_phys"] <= limit_phys
            ]
            hidden = hidden_queues(current, with_units)
        self.hidden = len(hidden)
        if not context.writer.is_claimed and self._are_tables_owed(state):
            context.claim()
        if context.writer.is_claimed:
            self._refresh(following=False)
        if hidden or context.state_archive.pending():
            context.claim()
            context.uploader.commit_metadata(hide=hidden)

    def _are_tables_owed(self, state: CatalogState) -> bool:
        """Whether an earlier back-fill ended, or lost the store, between the last messages and the tables, or these
        changed since. What a writer that follows has left is its own: beside a live broker they change all the time.
        """
        context, owner = self._context, state.owner
        if not state_fingerprint(context.store.path):
            return False  # a copy without any says nothing
        if not context.state_archive.has(TABLE_NAMES):
            return True
        if owner is None or owner.kind != BACKFILL:
            return False
        try:
            return context.state_archive.has_changes()
        except (UnavailableError, CorruptionError) as error:
            if not owner.released:
                raise
            self._log("broker tables not archived this time", error=str(error))
            return False

    def _watch_deletions(self, now_ms: int) -> None:
        """Hide queues of topics that the master has deleted (3a, Absent is not deleted)."""
        state = self._context.writer.state_or_none
        if state is None or (self._context.store.conf is not None and self._context.store.conf.is_slave):
            return
        try:
            table = set(self._context.store.state().topics)
            backup = topic_names_backup(self._context.store.path)
        except (UnavailableError, CorruptionError) as error:
            self._log("topic table not readable this time", error=str(error))
            return
        index = self._context.store.consume_queues()
        with_queues = {queue.topic for queue in index.queues()} if index is not None else set()
        verdict = self._deleted_topics.look(table, backup, with_queues, now_ms)
        if verdict.alarm:
            self._log("topics are missing, nothing is hidden", error=verdict.alarm)
        gone = [key for key in state.visible_queues() if key.topic in verdict.deleted]
        self._hide += [key for key in gone if key not in self._hide]

    def _commit_when_idle(self) -> None:
        """Broker tables and deletions reach the catalog even while no message comes."""
        if (
            not self._context.writer.is_claimed
            or not self._context.writer.state.started
            or not self._context.uploader.is_idle
        ):
            return
        if not self._hide and not self._context.state_archive.pending():
            return
        try:
            self._context.uploader.commit_metadata(hide=self._hide)
        except CommitInvalidError:
            return  # a cycle was committed at the same moment; the next look tries again
        if self._hide:
            self._log("queues of deleted topics hidden", queues=len(self._hide))
        self.hidden += len(self._hide)
        self._hide = []

    def _refresh(self, *, following: bool) -> None:
        """Archive the broker's tables when they changed; they travel with the next commit.

        Following goes on without tables that are broken now, or not taken: there is a next time. A back-fill has none:
        it tries some times, and fails.
        """
        fingerprint = state_fingerprint(self._context.store.path)
        if not self._context.writer.is_claimed or fingerprint == self._fingerprint:
            return
        for attempt in range(1 if following else TABLE_ATTEMPTS):
            try:
                self._context.state_archive.refresh(
                    self._context.writer.state.epoch, self._context.uploader.next_attempt()
                )
                self._fingerprint = fingerprint
                return
            except (UnavailableError, CorruptionError) as error:
                if not following and (isinstance(error, CorruptionError) or attempt == TABLE_ATTEMPTS - 1):
                    raise
                self._log("broker tables not archived this time", error=str(error))
                if not following:
                    self._context.wait(TABLE_WAIT_S * 2**attempt)

    def _log(self, message: str, **fields: object) -> None:
        self._context.log(message, fields)
