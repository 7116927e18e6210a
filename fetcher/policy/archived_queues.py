"""Archived offsets and physical ends of queues at one catalog version, for joining them with the broker's.

Caches them while the version is current. Never waits for a newer version.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from fetcher.policy.read_policy import OffsetRange
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_HIDDEN, QUEUE_SUPERSEDED


class KnownCatalog(Protocol):
    """The part of catalog_view.CatalogView used here. An older version only delays more pulls."""

    @property
    def state(self) -> CatalogState:
        """The newest version read."""

    def refresh_if_due(self) -> None:
        """Start a refresh if the interval has passed; never waits."""


class ArchivedQueue(NamedTuple):
    """One queue of the catalog; ``queue`` is None for a missing one."""

    queue: OffsetRange | None
    end_phys: int
    """Physical end of its last archived record."""
    dispatched_phys: int
    """Below this everything of the commitlog is archived."""
    first_phys: int = 0
    """Physical offset of the first record that was ever archived of it."""
    generation: int = 0
    earlier_end: int = 0
    """The largest end of its earlier generations."""


def archived_queue(state: CatalogState, topic: str, queue_id: int) -> ArchivedQueue:
    """The newest generation of a queue. A superseded or hidden one does not continue in the broker's queue."""
    generation = state.current_generation(topic, queue_id)
    row = state.queue(QueueKey(topic, queue_id, generation)) if generation is not None else None
    if row is None or int(row["flags"]) & (QUEUE_SUPERSEDED | QUEUE_HIDDEN):
        return ArchivedQueue(None, 0, state.cursor.phys)
    offsets = OffsetRange(int(row["min_queue_offset"]), int(row["end_queue_offset"]))
    key = QueueKey(topic, queue_id, generation or 0)
    return ArchivedQueue(
        offsets, int(row["end_phys"]), state.cursor.phys, int(row["first_phys"]), key.generation,
        earlier_end(state, key),
    )  # fmt: skip


def earlier_end(state: CatalogState, queue: QueueKey) -> int:
    """The largest end of the earlier generations of ``queue``, 0 without any. A consumer beyond the queue's end, but
    not beyond this one, read an earlier generation."""
    earlier = (state.queue(queue._replace(generation=number)) for number in range(queue.generation))
    return max((int(row["end_queue_offset"]) for row in earlier if row is not None), default=0)


class ArchivedQueues:
    """The queues of ``catalog``."""

    def __init__(self, catalog: KnownCatalog) -> None:
        self._catalog = catalog
        self._found: tuple[CatalogState | None, dict[tuple[str, int], ArchivedQueue]] = None, {}

    def find(self, topic: str, queue_id: int) -> ArchivedQueue:
        """The queue at the newest version read; starts a refresh if due."""
        # Never waits: while the object store is unreachable, the broker's messages are still served.
        self._catalog.refresh_if_due()
        state = self._catalog.state
        known, queues = self._found
        if known is not state:
            queues = {}
            self._found = state, queues
        found = queues.get((topic, queue_id))
        if found is None:
            found = archived_queue(state, topic, queue_id)
            if found.queue is not None:  # names are the clients': unknown ones are not cached
                queues[topic, queue_id] = found
        return found
