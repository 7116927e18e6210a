"""Garbage collection: decides which objects may be deleted, and deletes them.

Deleted are pending deletions of committed versions after the grace period, and uncommitted objects of fenced epochs:
an object carries its epoch, and no commit can refer to one of an older epoch. Age alone never makes an object garbage.
Commits and everything the head references are never deleted.

The age of a pending deletion is by the writer's clock or the bucket's timestamp of the commit, whichever is later: a
wrong writer clock cannot shorten the grace period.

The plan is pure. Deletion commits first: keys are *purged* from the pending deletions, which is final, then deleted. A
crash in between leaves an unreferenced object, which the next epoch's collection finds.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.pages import RunIndex, referenced_keys
from tiered.catalog.state import CatalogState
from tiered.errors import UsageError
from tiered.formats.keys import (
    DATA_PREFIX,
    INDEX_PREFIX,
    PAGES_PREFIX,
    SETS_PREFIX,
    STATE_PREFIX,
    catalog_key,
    epoch_of,
)
from tiered.object_store.interface import ObjectInfo, ObjectStore

CLOCK_SKEW_MS_MAX = 5 * 60_000
CLOCK_UNIT_MS = 1_000
DELETE_BATCH = 1000
COLLECTED = (DATA_PREFIX, INDEX_PREFIX, PAGES_PREFIX, SETS_PREFIX, STATE_PREFIX)


class KeySet:
    """Object keys as 8-byte digests, so that millions fit in memory; a false positive keeps an object, never deletes
    one."""

    def __init__(self, keys: Iterable[str]) -> None:
        parts: list[NDArray[np.uint64]] = [np.empty(0, np.uint64)]
        stream = iter(keys)
        while digests := [_digest(key) for key in islice(stream, 100_000)]:
            parts.append(np.unique(np.array(digests, np.uint64)))
        self._digests = np.unique(np.concatenate(parts))

    def __contains__(self, key: object) -> bool:
        digest = _digest(str(key))
        at = int(np.searchsorted(self._digests, np.uint64(digest)))
        return at < len(self._digests) and int(self._digests[at]) == digest


def _digest(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


@dataclass
class GcPlan:
    """``delete``: existing objects to delete; ``purge``: pending deletions after their grace period, existing or not.

    ``kept`` counts the remaining objects by reason; ``delete_bytes`` is the size of ``delete``.
    """

    delete: list[str] = field(default_factory=list)
    purge: list[str] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    delete_bytes: int = 0


def plan_gc(
    listing: Iterable[ObjectInfo],
    state: CatalogState,
    references: KeySet,
    *,
    now_ms: int,
    grace_ms: int,
    settled_version: int,
) -> GcPlan:
    """Plan for the listed objects. ``references``: all keys that the head references, including pages.
    ``settled_version``: see ``settled_version``."""
    plan = GcPlan()
    for key, pending in state.pending_deletions.items():
        is_over = now_ms - pending.since_ms >= grace_ms and pending.version <= settled_version
        if is_over and key not in references:
            plan.purge.append(key)
    due = set(plan.purge)
    for info in listing:
        reason = _reason_to_keep(info.key, state, references, due)
        if reason:
            plan.kept[reason] = plan.kept.get(reason, 0) + 1
        else:
            plan.delete.append(info.key)
            plan.delete_bytes += info.size_bytes
    return plan


def _reason_to_keep(key: str, state: CatalogState, references: KeySet, due: set[str]) -> str:
    if key in references:
        return "referenced by the head"
    if key in due:
        return ""
    if key in state.pending_deletions:
        return "pending deletion, within the grace period"
    epoch = epoch_of(key)
    if epoch is None:
        return "unknown object"
    return "of the current epoch" if epoch >= state.epoch else ""


def referenced_by(store: ObjectStore, state: CatalogState) -> KeySet:
    """All keys that the head references; reads every page once."""

    def keys() -> Iterator[str]:
        yield from state.catalog_keys()
        for page in RunIndex(store).all_runs(state):
            yield from referenced_keys(page)

    return KeySet(keys())


def settled_version(store: ObjectStore, version: int, before_ms: int) -> int:
    """The newest version up to ``version`` whose commit has a bucket timestamp at or before ``before_ms``; 0: none.
    Bisection: a LIST of one key for each step."""

    def stamp_ms(candidate: int) -> int:
        info = next(iter(store.list(catalog_key(candidate), limit=1)), None)
        return before_ms + 1 if info is None else info.modified_ms

    return bisect_left(range(1, version + 1), before_ms + 1, key=stamp_ms)


def run_gc(
    store: ObjectStore, state: CatalogState, *, apply: bool, grace_ms: int, clock: Callable[[], int]
) -> GcPlan:
    """Plan, and with ``apply`` delete. ``store`` is below the archive's prefix; ``clock`` gives ms since the epoch.

    Raises UsageError when the local clock and the store's differ by more than five minutes.
    """
    now_ms, bucket_ms = clock(), store.clock_ms()
    skew_ms = now_ms - bucket_ms
    if abs(skew_ms) > CLOCK_SKEW_MS_MAX:
        raise UsageError(
            f"this machine's clock is {abs(skew_ms) // 1000} s {'ahead of' if skew_ms > 0 else 'behind'} "
            f"that of {store.url}",
            hint="set the clock: the grace period depends on it",
        )
    listing = (info for prefix in COLLECTED for info in store.list(prefix))
    # Some buckets have timestamps in whole seconds.
    before_ms = max(now_ms, bucket_ms + CLOCK_UNIT_MS) - grace_ms
    settled = settled_version(store, state.version, before_ms) if state.pending_deletions else 0
    plan = plan_gc(
        listing,
        state,
        referenced_by(store, state),
        now_ms=now_ms,
        grace_ms=grace_ms,
        settled_version=settled,
    )
    if apply:
        purged = _purge(store, state, plan, clock) if plan.purge else frozenset()
        plan.delete = [key for key in plan.delete if key not in state.pending_deletions or key in purged]
        for first in range(0, len(plan.delete), DELETE_BATCH):
            store.delete(plan.delete[first : first + DELETE_BATCH])
    return plan


def _purge(store: ObjectStore, state: CatalogState, plan: GcPlan, clock: Callable[[], int]) -> frozenset[str]:
    """Commit the purge of the plan's pending deletions, except those restored since."""
    nonce = random.SystemRandom().getrandbits(48)
    writer = CatalogWriter(
        store,
        cluster=state.cluster,
        broker=state.broker,
        instance=f"gc-{nonce:012x}",
        kind="maintenance",
        clock_ms=clock,
    )
    purged: list[str] = []

    def build(newest: CatalogState) -> CommitDraft | None:
        purged[:] = [key for key in plan.purge if key in newest.pending_deletions]
        if not purged:
            return None
        return CommitDraft(CommitKind.MAINTENANCE, purged=tuple(purged), created_ms=clock())

    writer.maintain(build)
    return frozenset(purged)
