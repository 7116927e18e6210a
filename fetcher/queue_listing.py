"""The queues of an archive at one catalog version, as people and programs list them.

Owns what is said of a queue. Does not own the catalog (tiered.catalog.state).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_BATCH, QUEUE_HIDDEN, QUEUE_LMQ


@dataclass(frozen=True)
class QueueListing:
    """One queue. ``max_offset`` is one past the last, ``bytes`` are before compression, ``newest_ms`` is the store
    timestamp of the last message, ``kind`` is plain, batch or lmq."""

    topic: str
    queue_id: int
    generation: int
    min_offset: int
    max_offset: int
    messages: int
    bytes: int
    newest_ms: int
    kind: str
    hidden: bool

    @property
    def key(self) -> QueueKey:
        """Its name in the catalog."""
        return QueueKey(self.topic, self.queue_id, self.generation)

    def to_json(self) -> dict[str, Any]:
        """Names as in `cat --format jsonl` where both have the thing."""
        names = {
            "queue_id": "queueId", "min_offset": "minOffset", "max_offset": "maxOffset",
            "newest_ms": "newestStoreTimestamp",
        }  # fmt: skip
        return {names.get(name, name): value for name, value in asdict(self).items()}


def list_queues(state: CatalogState, *, hidden: bool) -> list[QueueListing]:
    """All queues by topic, queue id and generation; those of deleted topics only with ``hidden``."""
    found = []
    for key, row in state.queues():
        flags = int(row["flags"])
        if flags & QUEUE_HIDDEN and not hidden:
            continue
        low, high = int(row["min_queue_offset"]), int(row["end_queue_offset"])
        is_batch = bool(flags & QUEUE_BATCH)
        found.append(
            QueueListing(
                topic=key.topic,
                queue_id=key.queue_id,
                generation=key.generation,
                min_offset=low,
                max_offset=high,
                messages=high - low if is_batch else int(row["row_count"]),
                bytes=int(row["end_byte"]),
                newest_ms=int(row["max_store_timestamp"]),
                kind="lmq" if flags & QUEUE_LMQ else "batch" if is_batch else "plain",
                hidden=bool(flags & QUEUE_HIDDEN),
            )
        )
    return sorted(found, key=lambda queue: (queue.topic, queue.queue_id, queue.generation))
