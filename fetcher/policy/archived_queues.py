"""What the catalog has of a queue, for who joins it with the broker's: offsets and physical ends, by one version.

Owns reading them out of the newest version known and remembering them while it stands. Never waits for a newer one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from fetcher.policy.read_policy import OffsetRange
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_HIDDEN, QUEUE_SUPERSEDED


class KnownCatalog(Protocol):
    """What of the catalog's view is needed; see catalog_view.CatalogView. An older version only holds more pulls."""

    @property
    def state(self) -> CatalogState:
        """The newest version known."""

    def refresh_if_due(self) -> None:
        """Begin to read on if it is time; never waits."""


class ArchivedQueue(NamedTuple):
    """One queue as the catalog has it. ``queue`` is None when it does not."""

    queue: OffsetRange | None
    end_phys: int
    """Physical end of its last archived record."""
    dispatched_phys: int
    """Below this everything of the commitlog is archived."""
    first_phys: int = 0
    """Physical offset of the first record that was ever archived of it."""


def archived_queue(state: CatalogState, topic: str, queue_id: int) -> ArchivedQueue:
    """The newest life of a queue. One that ended with its log line has no next offset for the broker's new one, and one
    whose topic was deleted is no part of a queue that the broker has again."""
    generation = state.current_generation(topic, queue_id)
    row = state.queue(QueueKey(topic, queue_id, generation)) if generation is not None else None
    if row is None or int(row["flags"]) & (QUEUE_SUPERSEDED | QUEUE_HIDDEN):
        return ArchivedQueue(None, 0, state.cursor.phys)
    offsets = OffsetRange(int(row["min_queue_offset"]), int(row["end_queue_offset"]))
    return ArchivedQueue(offsets, int(row["end_phys"]), state.cursor.phys, int(row["first_phys"]))


class ArchivedQueues:
    """The queues of ``catalog``."""

    def __init__(self, catalog: KnownCatalog) -> None:
        self._catalog = catalog
        self._found: tuple[CatalogState | None, dict[tuple[str, int], ArchivedQueue]] = None, {}

    def find(self, topic: str, queue_id: int) -> ArchivedQueue:
        """As the newest version known has it; a newer one is asked for when it is time."""
        # Never waits: with the object store away, what the broker has is answered all the same.
        self._catalog.refresh_if_due()
        state = self._catalog.state
        known, queues = self._found
        if known is not state:
            queues = {}
            self._found = state, queues
        found = queues.get((topic, queue_id))
        if found is None:
            found = archived_queue(state, topic, queue_id)
            if found.queue is not None:  # names that clients make up are not remembered
                queues[topic, queue_id] = found
        return found
