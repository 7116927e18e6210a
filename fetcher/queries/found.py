"""Reads a message that a query found from its place in the catalog.

Checks index entries against the catalog: expired, superseded and hidden messages are no result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fetcher.queries.source import Place, QuerySource
from fetcher.rows.message import Message
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_EXPIRED, QUEUE_HIDDEN, QUEUE_SUPERSEDED, RunKind

ALWAYS_MS = -(1 << 63), (1 << 63) - 1
"""Store timestamps from … to: any a record can have, also those of damaged ones."""


class Entry(NamedTuple):
    """Where a message should be: what an index item says."""

    queue: QueueKey
    queue_offset: int
    store_timestamp: int


def count_within(sizes_bytes: Iterable[int], max_bytes: int) -> int:
    """How many of these, the first ones, have no more than ``max_bytes`` together; at least one, if there is any."""
    count = total_bytes = 0
    for size_bytes in sizes_bytes:
        total_bytes += size_bytes
        if count and total_bytes > max_bytes:
            break
        count += 1
    return count


def is_shown(state: CatalogState, queue: QueueKey, *, with_hidden: bool) -> bool:
    """Whether messages of ``queue`` are answers: superseded generations never, deleted ones on request."""
    row = state.queue(queue)
    if row is None:
        return False
    flags = int(row["flags"])
    return not flags & QUEUE_SUPERSEDED and (with_hidden or not flags & QUEUE_HIDDEN)


def has_expired(state: CatalogState, entry: Entry) -> bool:
    """Whether the message of ``entry`` has expired."""
    row = state.queue(entry.queue)
    if row is None or entry.queue_offset >= row["min_queue_offset"]:
        return False
    return bool(row["flags"] & QUEUE_EXPIRED)


async def read_entry(source: QuerySource, state: CatalogState, entry: Entry) -> Message | None:
    """The message of ``entry``, or None if it no longer exists (expired, superseded by another log history).

    Raises CorruptionError when catalog and object contradict each other, NotFoundError when an object is gone.
    """
    row = state.queue(entry.queue)
    if row is None or not row["min_queue_offset"] <= entry.queue_offset < row["end_queue_offset"]:
        return None
    chunk = await source.runs_at(state, entry.queue, entry.queue_offset, stored_ms=entry.store_timestamp)
    runs = chunk.runs
    at = int(np.searchsorted(runs["base_queue_offset"], entry.queue_offset, side="right")) - 1
    if at < 0 or int(runs["end_queue_offset"][at]) <= entry.queue_offset:
        gaps = state.gaps_of(entry.queue)
        inside = (gaps["begin_queue_offset"] <= entry.queue_offset) & (
            entry.queue_offset < gaps["end_queue_offset"]
        )
        if bool(inside.any()):
            return None
        raise CorruptionError(
            f"{entry.queue}: offset {entry.queue_offset} is in no segment and in no recorded gap"
        )
    run = runs[at]
    place = chunk.objects[int(run["object"])]
    index = await source.segment(Place.of(chunk.object_keys[int(place["key"])], place))
    part = index.check_run(run, entry.queue)
    columns = index.row_columns(part)
    number = int(np.searchsorted(columns.queue_offset, entry.queue_offset, side="right")) - 1
    if (
        int(columns.queue_offset[number]) != entry.queue_offset
        or int(columns.store_timestamp[number]) != entry.store_timestamp
        or int(run["kind"]) == RunKind.LMQ
    ):
        return None
    data = await source.record(index, part.ordinal, part.first_row + number)
    return Message(
        *entry[:2], memoryview(data), entry.store_timestamp,
        inner_num=int(columns.inner_num[number]), is_in_batch_queue=int(run["kind"]) == RunKind.BATCH,
    )  # fmt: skip


def newest_ms(state: CatalogState) -> int:
    """Store timestamp of the newest archived message; 0 for none."""
    return int(state.table["max_store_timestamp"].max(initial=0))
