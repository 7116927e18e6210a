"""Opening an archive for the commands that read it, and the list of its queues.

Owns the choice of one archive among those below a URL, and what `ls` shows of a queue. Does not own the
catalog.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from tiered.catalog.archives import open_archive
from tiered.catalog.reading import load
from tiered.catalog.state import CatalogState
from tiered.model.tables import QUEUE_BATCH, QUEUE_HIDDEN, QUEUE_LMQ
from tiered.object_store.options import StoreOptions
from tiered.object_store.protocol import ObjectStore
from tiered.object_store.url import open_store
from tiered.settings.sections import Settings


@dataclass(frozen=True)
class Archive:
    """One broker's archive, open for reading at one catalog version. ``store`` is rooted at the archive."""

    url: str
    cluster: str
    broker: str
    store: ObjectStore
    state: CatalogState

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.cluster}/{self.broker} in {self.url}"


@dataclass(frozen=True)
class QueueListing:
    """What `ls` shows of one queue. ``max_offset`` is one past the last, ``bytes`` are before compression."""

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

    def to_json(self) -> dict[str, Any]:
        """Names as in `cat --format jsonl` where both have the thing."""
        names = {
            "queue_id": "queueId", "min_offset": "minOffset", "max_offset": "maxOffset",
            "newest_ms": "newestStoreTimestamp",
        }  # fmt: skip
        return {names.get(name, name): value for name, value in asdict(self).items()}


@contextmanager
def open_for_reading(url: str, settings: Settings) -> Iterator[Archive]:
    """The archive that ``settings.archive`` names below ``url``, or the only one there.

    Raises NotFoundError when there is none, UsageError listing the names when there are several.
    """
    root = open_store(url, StoreOptions(settings.object_store))
    try:
        found = open_archive(root, settings.archive.cluster or None, settings.archive.broker or None)
        yield Archive(url, found.cluster, found.broker, found.store, load(found.store))
    finally:
        root.close()


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
