"""Garbage collection: plans by the catalog, commits the purge, deletes objects, and ends abandoned uploads.

A key that cannot be deleted is reported, and the rest is deleted all the same. Does not decide what is garbage
(tiered/catalog/garbage.py).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.deletions import NO_DELETION_CHANGE, DeletionChange, read_list
from tiered.catalog.garbage import COLLECTED, GcPlan, Grace, KeySet, plan_gc, referenced_by, settled_version
from tiered.catalog.state import CatalogState
from tiered.errors import AccessDeniedError, TieredError, UsageError
from tiered.formats.keys import DATA_PREFIX
from tiered.object_store.interface import ObjectStore

logger = logging.getLogger(__name__)

CLOCK_SKEW_MS_MAX = 5 * 60_000
CLOCK_UNIT_MS = 1_000
DELETE_BATCH = 1000
PROBE_KEY = f"{DATA_PREFIX}00/gc-may-delete"
"""A key that no object has: deleting it shows whether the account may delete."""


@dataclass(frozen=True)
class Deletions:
    """How to delete: at most ``keys_per_s``, reporting (done, total) to ``progress``, until ``is_stopped``."""

    keys_per_s: float = float("inf")
    progress: Callable[[int, int], object] = lambda done, total: None
    is_stopped: Callable[[], bool] = lambda: False
    sleep: Callable[[float], object] = time.sleep


def run_gc(
    store: ObjectStore,
    state: CatalogState,
    *,
    apply: bool,
    grace_ms: int,
    clock: Callable[[], int],
    diverged_grace_ms: int | None = None,
    deletions: Deletions | None = None,
) -> GcPlan:
    """Plan, and with ``apply`` delete. ``store`` is below the archive's prefix; ``clock`` gives ms since the epoch.
    ``diverged_grace_ms``: grace period of objects of a truncated log, by default ``grace_ms``.

    Raises UsageError when the local clock and the store's differ by more than five minutes, AccessDeniedError, before
    anything is purged, when the account may not delete.
    """
    now_ms = clock()
    bucket_ms = require_same_clock(store, now_ms)
    listing = (info for prefix in COLLECTED for info in store.list(prefix))
    # Some buckets have timestamps in whole seconds.
    latest_ms = max(now_ms, bucket_ms + CLOCK_UNIT_MS)
    plan = plan_gc(
        listing,
        state,
        referenced_by(store, state),
        now_ms=now_ms,
        grace=Grace(grace_ms, grace_ms if diverged_grace_ms is None else diverged_grace_ms),
        settled_version=cache(lambda grace: settled_version(store, state.version, latest_ms - grace)),
        keys_of=lambda listed: read_list(store, listed),
    )
    try:
        plan.uploads = [upload for upload in store.uploads("") if latest_ms - upload.begun_ms >= grace_ms]
    except AccessDeniedError as error:
        logger.warning("abandoned uploads are not looked for: %s", error)
    if apply and (plan.delete or plan.purge or plan.lists):
        store.delete([PROBE_KEY])  # an account that may not delete must not purge: that is final
        purged, lists = _purge(store, state, plan, clock)
        waiting = KeySet(
            key for listed in plan.lists if listed.key not in lists for key in read_list(store, listed)
        )
        plan.delete = [
            key
            for key in plan.delete
            if (key not in state.pending_deletions or key in purged) and key not in waiting
        ]
        plan.failed = _delete(store, plan.delete, deletions or Deletions())
    if apply:
        for upload in plan.uploads:
            store.abort_upload(upload)
    return plan


def require_same_clock(store: ObjectStore, now_ms: int) -> int:
    """The bucket's time. Raises UsageError when the local time ``now_ms`` differs by more than five minutes."""
    bucket_ms = store.clock_ms()
    skew_ms = now_ms - bucket_ms
    if abs(skew_ms) > CLOCK_SKEW_MS_MAX:
        raise UsageError(
            f"this machine's clock is {abs(skew_ms) // 1000} s {'ahead of' if skew_ms > 0 else 'behind'} "
            f"that of {store.url}",
            hint="set the clock: grace periods and times to live depend on it",
        )
    return bucket_ms


def _delete(store: ObjectStore, keys: Sequence[str], how: Deletions) -> dict[str, str]:
    """Delete ``keys``; returns those that could not be, with the reason."""
    failed: dict[str, str] = {}
    how.progress(0, len(keys))
    for first in range(0, len(keys), DELETE_BATCH):
        if how.is_stopped():
            break
        batch = keys[first : first + DELETE_BATCH]
        begun_s = time.monotonic()
        try:
            store.delete(batch)
        except TieredError:
            for key in batch:
                try:
                    store.delete([key])
                except TieredError as error:
                    failed[key] = error.message
            if len(failed) >= DELETE_BATCH and len(failed) == first + len(batch):
                failed |= dict.fromkeys(keys[first + len(batch) :], "not tried: none could be deleted")
                break
        how.progress(first + len(batch), len(keys))
        wait_s = len(batch) / how.keys_per_s - (time.monotonic() - begun_s)
        if wait_s > 0:
            how.sleep(wait_s)
    return failed


def _purge(
    store: ObjectStore, state: CatalogState, plan: GcPlan, clock: Callable[[], int]
) -> tuple[frozenset[str], frozenset[str]]:
    """Commit the purge of the plan's pending deletions and lists, except those restored or replaced since."""
    if not plan.purge and not plan.lists:
        return frozenset(), frozenset()
    nonce = random.SystemRandom().getrandbits(48)
    writer = CatalogWriter(
        store,
        cluster=state.cluster,
        broker=state.broker,
        instance=f"gc-{nonce:012x}",
        kind="maintenance",
        clock_ms=clock,
    ).begin_at(state)
    purged: list[str] = []
    lists: list[str] = []

    def build(newest: CatalogState) -> CommitDraft | None:
        purged[:] = [key for key in plan.purge if key in newest.pending_deletions]
        lists[:] = [listed.key for listed in plan.lists if listed in newest.deletion_lists]
        if not purged and not lists:
            return None
        return CommitDraft(
            CommitKind.MAINTENANCE,
            purged=tuple(purged),
            deletions=DeletionChange(removed=tuple(lists)) if lists else NO_DELETION_CHANGE,
            created_ms=clock(),
        )

    writer.maintain(build)
    return frozenset(purged), frozenset(lists)
