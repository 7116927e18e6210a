"""The queues of an archive at one catalog version, as listings for people and programs."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tiered.catalog.floors import rows_below
from tiered.catalog.pages import RunIndex
from tiered.catalog.repeated_offsets import repeated_offsets
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_BATCH, QUEUE_EXPIRED, QUEUE_HIDDEN, QUEUE_LMQ, GapReason, Table

_REASONS = {
    GapReason.BROKER_DELETED: "deleted by the broker",
    GapReason.DAMAGED: "damaged",
    GapReason.NEVER_WRITTEN: "never written",
    GapReason.EXCLUDED: "excluded",
    GapReason.LOST: "lost by damage",
}


@dataclass(frozen=True)
class GapListing:
    """Offsets [begin_offset, end_offset) of a queue that no message has, and why."""

    begin_offset: int
    end_offset: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Named as in the listing of its queue."""
        return {"beginOffset": self.begin_offset, "endOffset": self.end_offset, "reason": self.reason}


@dataclass(frozen=True)
class QueueListing:
    """One queue. ``max_offset`` is one past the last, ``bytes`` are before compression (and include expired
    messages in front of living ones unless the listing read a page), ``newest_ms`` is the store timestamp of the
    last message, ``kind`` is plain, batch or lmq, ``gaps`` are by offset, ``set_aside`` are messages that the broker's
    queue does not have, as their offsets were used again."""

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
    gaps: tuple[GapListing, ...] = ()
    set_aside: int = 0

    @property
    def key(self) -> QueueKey:
        """Its name in the catalog."""
        return QueueKey(self.topic, self.queue_id, self.generation)

    def to_json(self) -> dict[str, Any]:
        """The values for ``tiered ls --json``, with the names that ``tiered cat --format jsonl`` uses for the same
        values."""
        names = {
            "queue_id": "queueId",
            "min_offset": "minOffset",
            "max_offset": "maxOffset",
            "newest_ms": "newestStoreTimestamp",
            "set_aside": "setAsideMessages",
        }
        values: dict[str, Any] = asdict(self) | {"gaps": [gap.to_json() for gap in self.gaps]}
        return {names.get(name, name): value for name, value in values.items()}


def list_queues(
    state: CatalogState, *, hidden: bool, topic: str | None = None, index: RunIndex | None = None
) -> list[QueueListing]:
    """All queues of the archive, or those of ``topic``, in order of topic, queue id and generation. Queues of deleted
    topics are included only with ``hidden``.

    With ``index``, the bytes of a queue of which a part has expired are exact: a catalog page is read for each such
    queue, which raises what the store raises. Without it, expired messages count as long as others of the queue live.
    """
    rows = (
        range(state.queue_count) if topic is None else state.directory.rows_of_topic(topic, state.queue_count)
    )
    found = []
    set_aside = repeated_offsets(state)
    gaps = _gaps_by_row(state.gaps if topic is None else state.gaps[np.isin(state.gaps["queue"], rows)])
    for number in rows:
        key, row = state.key_of(number), state.table[number]
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
                bytes=int(row["end_byte"]) - expired_bytes(state, number, index),
                newest_ms=int(row["max_store_timestamp"]),
                kind="lmq" if flags & QUEUE_LMQ else "batch" if is_batch else "plain",
                hidden=bool(flags & QUEUE_HIDDEN),
                gaps=gaps.get(number, ()),
                set_aside=set_aside.get(key, 0),
            )
        )
    return sorted(found, key=lambda queue: (queue.topic, queue.queue_id, queue.generation))


def expired_bytes(state: CatalogState, number: int, index: RunIndex | None) -> int:
    """Bytes of the expired messages of a queue: row ``number`` of the catalog's queue table.

    Where only a part of the queue has expired, ``index`` finds the run (rows in one object) that the queue's minimum
    offset cuts, whose bytes are shared out by rows; without ``index`` the result is 0 then.
    """
    key, row = state.key_of(number), state.table[number]
    if not row["flags"] & QUEUE_EXPIRED:
        return 0
    low = int(row["min_queue_offset"])
    if low == int(row["end_queue_offset"]):
        return int(row["end_byte"])
    if index is None:
        return 0
    first = _first_run(state, key, low, index)
    (dead,), (run,) = rows_below(first, np.array([low])), first
    return int(run["base_byte"]) + int(run["byte_count"]) * int(dead) // max(1, int(run["rows"]))


def oldest_ms(state: CatalogState, key: QueueKey, low: int, index: RunIndex) -> int | None:
    """When the oldest message of a queue, whose minimum offset is ``low``, was stored, in ms since 1970; None without
    messages. The catalog alone says it, by the run with the lowest offsets: of a run that expired in part it is the
    time of the oldest message that expired."""
    first = _first_run(state, key, low, index)
    return int(first["min_store_timestamp"][0]) if len(first) else None


def _first_run(state: CatalogState, key: QueueKey, low: int, index: RunIndex) -> Table:
    """The run (rows in one object) of a queue with the message at offset ``low`` or, if that is missing, with the next
    one; an empty table if there is none."""
    found = index.window(state, key, low)
    # The search by offset finds no run if the minimum lies in a gap, or if the run is in no page yet.
    runs = index.runs_of(state, key).runs if found is None else found[1].runs
    return runs[runs["end_queue_offset"] > low][:1]


def _gaps_by_row(gaps: Table) -> dict[int, tuple[GapListing, ...]]:
    """The recorded gaps of each queue, by its row in the queue table. All are sorted in one pass, because there may be
    as many gaps as queues."""
    rows = np.sort(gaps, order=["queue", "begin_queue_offset"])
    found: dict[int, list[GapListing]] = {}
    for queue, reason, begin, end in rows.tolist():
        why = _REASONS.get(reason, f"reason {reason}")
        found.setdefault(queue, []).append(GapListing(begin, end, why))
    return {queue: tuple(gaps) for queue, gaps in found.items()}
