"""Messages of a truncated or replaced log: which ones wait for their deletion, and keeping them.

Kept objects move into a list of pending deletions whose grace period never ends, so that no gc of any version deletes
them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.deletions import (
    KEPT_MS,
    DeletionChange,
    DeletionList,
    PendingDeletion,
    Reason,
    encode_list,
    list_of,
    read_list,
)
from tiered.catalog.diverged import (
    diverged_deletions,
    shown_share,
    superseded_histories,
    superseded_pages,
    superseded_state,
)
from tiered.catalog.state import CatalogState
from tiered.errors import NotFoundError
from tiered.formats.keys import page_key
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore
from tiered.object_store.own_name import put_own


@dataclass(frozen=True)
class DivergedQueue:
    """Messages of one queue that only an earlier log history has. ``max_offset`` is one past the last, ``bytes`` are
    before compression, and of a joined run with older messages a share by offsets. ``since_ms``: when their objects
    became garbage, KEPT_MS if gc never deletes them."""

    log_history: int
    queue: QueueKey
    min_offset: int
    max_offset: int
    messages: int
    bytes: int
    objects: int
    since_ms: int


def diverged_queues(store: ObjectStore, state: CatalogState) -> list[DivergedQueue]:
    """All of which objects are left, by log history and queue. Reads the commits of superseded versions."""
    pending = diverged_deletions(store, state)
    if not pending:
        return []
    return [
        found
        for number in superseded_histories(state)
        for found in _queues(number, superseded_state(store, state, number), pending)
    ]


def keep_history(store: ObjectStore, state: CatalogState, number: int, *, clock: Callable[[], int]) -> int:
    """Commit that gc never deletes the objects of log history ``number``; returns how many. Raises NotFoundError when
    none is left, UsageError when the archive's owner writes an older format."""
    wanted = frozenset(superseded_state(store, state, number).memory.object_keys)
    wanted |= superseded_pages(store, state, number)
    nonce = f"{random.SystemRandom().getrandbits(40):010x}"
    writer = CatalogWriter(
        store, cluster=state.cluster, broker=state.broker, instance=f"keep-{nonce}", kind="maintenance",
        clock_ms=clock,
    ).begin_at(state)  # fmt: skip
    kept: set[str] = set()

    def build(newest: CatalogState) -> CommitDraft | None:
        recent = {
            key for key, entry in newest.pending_deletions.items()
            if entry.reason == Reason.DIVERGED and key in wanted
        }  # fmt: skip
        moved, rest, removed = set(recent), [], []
        kept.clear()
        for listed in newest.deletion_lists:
            entries = read_list(store, listed) if listed.reason == Reason.DIVERGED else {}
            mine = entries.keys() & wanted
            kept.update(mine)
            if mine and not listed.is_kept:
                moved |= mine
                removed.append(listed.key)
                rest.append({key: entry for key, entry in entries.items() if key not in mine})
        kept.update(moved)
        if not moved:
            return None
        added = [dict.fromkeys(moved, PendingDeletion(KEPT_MS, newest.version, Reason.DIVERGED)), *rest]
        return CommitDraft(
            CommitKind.MAINTENANCE,
            restored=sorted(recent),
            deletions=DeletionChange(
                added=[
                    _put(store, newest, f"{nonce}{place:02x}", entries)
                    for place, entries in enumerate(added)
                    if entries
                ],
                removed=removed,
            ),
            reason=Reason.DIVERGED,
            created_ms=clock(),
        )

    writer.maintain(build)
    if not kept:
        raise NotFoundError(
            f"no objects of log history {number} are left", hint="`tiered ls --diverged` lists log histories"
        )
    return len(kept)


def _put(
    store: ObjectStore, state: CatalogState, nonce: str, entries: Mapping[str, PendingDeletion]
) -> DeletionList:
    data = encode_list(entries)
    key = page_key("deletions", state.version, state.epoch, nonce)
    put_own(store, key, [data], timeout_s=60.0)
    return list_of(key, entries, len(data))


def _queues(
    number: int, state: CatalogState, pending: Mapping[str, PendingDeletion]
) -> Iterator[DivergedQueue]:
    for queue, row in sorted(state.queues(), key=lambda found: found[0]):
        chunk = state.memory_chunk_of(state.directory.row(queue, state.queue_count) or 0)
        keys = [chunk.object_keys[key] for key in chunk.objects["key"].tolist()]
        since = np.array([pending[key].since_ms if key in pending else -1 for key in keys], np.int64)
        left = chunk.runs[since[chunk.runs["object"]] >= 0]
        if len(left):
            share = shown_share(left, row["min_queue_offset"])
            min_offset = max(int(left["base_queue_offset"].min()), int(row["min_queue_offset"]))
            yield DivergedQueue(
                log_history=number,
                queue=queue,
                min_offset=min_offset,
                max_offset=int(left["end_queue_offset"].max()),
                messages=int(
                    (left["end_queue_offset"] - np.maximum(left["base_queue_offset"], min_offset)).sum()
                ),
                bytes=int(np.rint(left["byte_count"] * share).sum()),
                objects=len(np.unique(left["object"])),
                since_ms=int(since[np.unique(left["object"])].min()),
            )
