"""Garbage collection: plans by the catalog, deletes objects, commits that they are gone, and ends abandoned uploads.

Pending deletions stay in the catalog until their objects are gone, so that a collection that was killed, or could not
delete some, is finished by the next one. What another command may take back is withdrawn by a commit first.

A key that cannot be deleted is reported, and the rest is deleted all the same, unless nothing can be
deleted. Does not decide what is garbage (tiered/catalog/garbage.py).
"""

import logging
import random
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain

from tiered.archive.found_objects import found_objects, why_unexplained
from tiered.archive.task import GARBAGE_COLLECTION, Due
from tiered.catalog.catalog_reader import refresh
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.deletions import (
    NO_DELETION_CHANGE,
    DeletionChange,
    DeletionList,
    PendingDeletion,
    Reason,
    read_list,
)
from tiered.catalog.garbage import (
    CURRENT,
    GcPlan,
    Grace,
    KeySet,
    Unexplained,
    plan_gc,
    referenced_by,
    settled_version,
)
from tiered.catalog.holdings import OBJECT_PREFIXES
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.console import counted, size_text
from tiered.errors import AccessDeniedError, RefusedRequestError, TieredError, UsageError
from tiered.formats.keys import DATA_PREFIX, SETS_PREFIX, epoch_of, page_version, parse_state_key
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import GcSettings

logger = logging.getLogger(__name__)

FIRST_AFTER_S = 600.0
"""Wait after the start: short, so that a process that restarts often collects too."""
CLOCK_SKEW_MS_MAX = 5 * 60_000
CLOCK_UNIT_MS = 1_000
DELETE_BATCH = 1000
REFUSALS_MAX = 5
"""Keys of a refused batch, one by one: after so many refusals of one kind in a row the rest of it is not tried."""
REFUSED_BATCHES_MAX = 3
"""Batches in a row of which nothing could be deleted; then the collection ends."""
PROBE_KEY = f"{DATA_PREFIX}00/gc-may-delete"
"""A key that no object has: deleting it shows whether the account may delete."""
REVOCABLE = frozenset({Reason.DIVERGED, Reason.INTENT})
"""Reasons of pending deletions that returning log histories and compactions take back."""


@dataclass(frozen=True)
class Deletions:
    """How to delete: at most ``keys_per_s``, reporting (done, total) to ``progress``, until ``is_stopped``."""

    keys_per_s: float = float("inf")
    progress: Callable[[int, int], object] = lambda done, total: None
    is_stopped: Callable[[], bool] = lambda: False
    sleep: Callable[[float], object] = time.sleep


class GcTask:
    """Collects garbage by ``settings``; ``store`` is below the archive's prefix."""

    name = GARBAGE_COLLECTION

    def __init__(
        self,
        store: ObjectStore,
        settings: GcSettings,
        *,
        clock: Clock = MACHINE_CLOCK,
        deletions: Deletions | None = None,
    ) -> None:
        """``deletions``: how objects are deleted; None: by the settings, without progress."""
        self._store, self._settings, self._clock = store, settings, clock
        self._deletions = deletions or Deletions(settings.deletes_per_s)
        self.due = Due(every_s=settings.every_ms / 1000, first_s=FIRST_AFTER_S)
        self.problem = ""

    def plan(self, state: CatalogState) -> GcPlan:
        """What is garbage in ``state``, after the grace periods of the settings. Lists the archive, and reads all pages
        of its catalog."""
        grace = Grace(self._settings.grace_ms, self._settings.diverged_grace_ms)
        return plan_collection(self._store, state, grace, self._clock)

    def step(self, state: CatalogState, plan: GcPlan) -> bool:
        """Delete the garbage of ``plan``. Afterwards ``problem`` says what could not be deleted, or is not explained by
        any commit."""
        collect(self._store, state, plan, clock=self._clock, deletions=self._deletions)
        self.problem = plan.halted
        if plan.unexplained and not plan.halted:
            count = counted(len(plan.unexplained), "object")
            messages = counted(plan.unexplained_messages, "message")
            self.problem = (
                f"{count} with {messages} that no commit explains are kept: tiered repair ARCHIVE_URL says what it "
                "would do with them"
            )
        if plan.failed:
            key, reason = next(iter(plan.failed.items()))
            count = counted(len(plan.failed), "object")
            self.problem = f"{count} could not be deleted, such as {key}: {reason}"
        count_deleted = len(plan.delete) - len(plan.failed)
        logger.info("garbage collection deleted %d objects, %s", count_deleted, size_text(plan.delete_bytes))
        return False


def plan_collection(store: ObjectStore, state: CatalogState, grace: Grace, clock: Clock) -> GcPlan:
    """What is garbage in ``state``, what is kept and why, and which multipart uploads were never finished. Lists the
    archive. Raises UsageError if the local clock and the store's differ by more than five minutes."""
    now_ms = clock.wall_ms()
    bucket_ms = require_same_clock(store, now_ms)
    # Some buckets have timestamps in whole seconds.
    latest_ms = max(now_ms, bucket_ms + CLOCK_UNIT_MS)
    plan = plan_gc(
        (info for prefix in OBJECT_PREFIXES for info in store.list(prefix)),
        state,
        referenced_by(store, state, now_ms - grace.diverged_ms),
        now_ms=now_ms,
        grace=grace,
        settled_version=cache(lambda grace: settled_version(store, state.version, latest_ms - grace)),
        keys_of=lambda listed: read_list(store, listed),
    )
    # A commit may have named some of these objects while they were listed.
    newest = refresh(store, state)
    needed = KeySet(())
    if plan.candidates and newest.version != state.version:
        needed = referenced_by(store, newest, now_ms - grace.diverged_ms)
    _explain(store, newest, plan, needed)
    try:
        plan.uploads = [upload for upload in store.uploads("") if latest_ms - upload.begun_ms >= grace.ms]
    except AccessDeniedError as error:
        logger.warning("unfinished multipart uploads cannot be listed, and are not ended: %s", error)
    return plan


def _explain(store: ObjectStore, state: CatalogState, plan: GcPlan, needed: KeySet) -> None:
    """Decide on the candidates of ``plan``, objects that no commit names: those that the newest ``state`` explains, as
    attempts of an uploader that stopped, are deleted; the others are kept, as they may be the last copy of messages.
    ``needed``: keys that were committed while the plan was made. Reads the index at the end of data objects."""
    is_data = {info.key: info.key.startswith((DATA_PREFIX, SETS_PREFIX)) for info in plan.candidates}
    others = [(info, None) for info in plan.candidates if not is_data[info.key]]
    read = found_objects(store, (info for info in plan.candidates if is_data[info.key]))
    for info, data_object in chain(others, read):
        key, epoch = info.key, epoch_of(info.key) or 0
        if epoch == state.epoch or key in needed:
            plan.keep(CURRENT)  # of the present writer, or committed while the plan was made
            continue
        why = why_unexplained(state, data_object) if is_data[key] else _why_needed(state, key)
        if why:
            plan.unexplained[key] = Unexplained(why, 0 if data_object is None else data_object.messages)
            plan.keep("that no commit explains")
        else:
            plan.to_delete(info)
            plan.purge += [key] if key in state.pending_deletions else []
        if epoch > state.epoch or (
            data_object is not None and data_object.meta.catalog_version > state.version
        ):
            plan.halt(f"the newest commit is missing, as {key} shows: {why}; run tiered repair ARCHIVE_URL")


def _why_needed(state: CatalogState, key: str) -> str:
    """Why an object of the catalog, which ``state`` does not name, is kept: it may be the last copy of something.
    Empty: it is not, and may be deleted."""
    if (epoch_of(key) or 0) > state.epoch or (page_version(key) or 0) > state.version:
        return "it was made for a later version of the catalog"
    table = parse_state_key(key)
    if table is not None and table[0] not in state.state_objects:
        return f"the catalog has no other copy of the broker's table {table[0]}"
    return ""


def collect(
    store: ObjectStore,
    state: CatalogState,
    plan: GcPlan,
    *,
    clock: Clock,
    deletions: Deletions | None = None,
) -> None:
    """Carry out ``plan``, which was made for ``state``: delete its objects, commit that they are gone, and end its
    unfinished uploads. ``deletions``: how fast, with which progress; None: at once. Raises AccessDeniedError if the
    account may not delete; then nothing was changed."""
    _quarantine(store, state, plan, clock)
    if plan.delete or plan.purge or plan.lists:
        # Asks whether this account may delete, before a commit that cannot be taken back.
        with suppress(RefusedRequestError):  # a link in a directory's place concerns the keys below it
            store.delete([PROBE_KEY])
        collection = _Collection(store, state, plan, clock)
        collection.withdraw()
        left = _delete(store, plan, deletions or Deletions())
        collection.forget(left)
    for upload in plan.uploads:
        store.abort_upload(upload)


def _quarantine(store: ObjectStore, state: CatalogState, plan: GcPlan, clock: Clock) -> None:
    """Commit which objects of ``plan`` no commit explains, so that they are listed, and kept until a later collection
    finds what explains them, or a repair uses them."""

    def change(newest: CatalogState) -> CommitDraft | None:
        added = [key for key in plan.unexplained if key not in newest.pending_deletions]
        if not added or newest.repaired_version != state.repaired_version:
            return None
        return CommitDraft(CommitKind.MAINTENANCE, pending_deletions=tuple(added), reason=Reason.UNEXPLAINED)

    if not plan.halted and plan.unexplained.keys() - state.pending_deletions:
        MaintenanceCommit.opened(store, state, "gc", clock).commit(change)


def require_same_clock(store: ObjectStore, now_ms: int) -> int:
    """The time of the bucket's clock, in ms since 1970. Raises UsageError if the local time ``now_ms`` differs from it
    by more than five minutes."""
    bucket_ms = store.clock_ms()
    skew_ms = now_ms - bucket_ms
    if abs(skew_ms) > CLOCK_SKEW_MS_MAX:
        raise UsageError(
            f"this machine's clock is {abs(skew_ms) // 1000} s {'ahead of' if skew_ms > 0 else 'behind'} "
            f"that of {store.url}",
            hint="set this machine's clock: grace periods and times to live depend on it",
        )
    return bucket_ms


def _delete(store: ObjectStore, plan: GcPlan, how: Deletions) -> set[str]:
    """Delete the objects of ``plan``, DELETE_BATCH at a time, as fast as ``how`` allows. Returns the keys of those that
    were not deleted; ``plan.failed`` has the reasons. Ends early if nothing can be deleted, or ``how`` is stopped."""
    keys, refused_batches = plan.delete, 0
    how.progress(0, len(keys))
    for first in range(0, len(keys), DELETE_BATCH):
        if how.is_stopped():
            return {*plan.failed, *keys[first:]}
        batch = keys[first : first + DELETE_BATCH]
        begun_s = time.monotonic()
        try:
            store.delete(batch)
            refused_batches = 0
        except TieredError:
            failed = _delete_singly(store, keys, first, how.progress)
            plan.failed |= failed
            refused_batches = refused_batches + 1 if len(failed) == len(batch) else 0
            if refused_batches == REFUSED_BATCHES_MAX:
                plan.failed |= dict.fromkeys(
                    keys[first + len(batch) :], "not tried, because no object before it could be deleted"
                )
                break
        how.progress(first + len(batch), len(keys))
        wait_s = len(batch) / how.keys_per_s - (time.monotonic() - begun_s)
        if wait_s > 0:
            how.sleep(wait_s)
    return set(plan.failed)


def _delete_singly(
    store: ObjectStore, keys: Sequence[str], first: int, progress: Callable[[int, int], object]
) -> dict[str, str]:
    """Delete the batch of ``keys`` that begins at ``first`` one by one, after the store has refused it as a whole.
    Returns the keys that were not deleted, with the reasons. They come in random order, so that the first ones stand
    for the others: after REFUSALS_MAX refusals of one kind in a row the rest is not tried."""
    batch = keys[first : first + DELETE_BATCH]
    failed: dict[str, str] = {}
    kinds: list[type[TieredError]] = []
    left = random.SystemRandom().sample(batch, len(batch))
    while left and not (len(kinds) >= REFUSALS_MAX and len(set(kinds[-REFUSALS_MAX:])) == 1):
        key = left.pop()
        try:
            store.delete([key])
            kinds.clear()
        except TieredError as error:
            failed[key] = error.message
            kinds.append(type(error))
        progress(first + len(batch) - len(left), len(keys))
    reason = next(reversed(failed.values()), "")
    return failed | dict.fromkeys(left, f"not tried after {REFUSALS_MAX} refusals: {reason}")


class _Collection:
    """The commits of one collection, before and after its deletions."""

    def __init__(self, store: ObjectStore, state: CatalogState, plan: GcPlan, clock: Clock) -> None:
        self._store, self._state, self._plan = store, state, plan
        self._maintenance = MaintenanceCommit.opened(store, state, "gc", clock)

    def withdraw(self) -> None:
        """Before anything is deleted: drop from the plan what other commands have taken back (used again) since it was
        made, and commit that those pending deletions which they may still take back are garbage for good."""
        newest = refresh(self._store, self._state)
        pending = newest.pending_deletions  # which may have more than the state that was planned for
        revocable = {key for key in self._plan.purge if key in pending and pending[key].reason in REVOCABLE}
        lists = {listed for listed in self._plan.lists if listed.reason in REVOCABLE}
        withdrawn, made = self._withdrawn(revocable, lists) if revocable or lists else ({}, [])
        plan = self._plan
        kept = {
            key for key in plan.purge if key not in newest.pending_deletions or key in revocable
        } - withdrawn.keys()
        kept_lists = [
            listed for listed in plan.lists if listed not in newest.deletion_lists or listed in lists
        ]
        listed_keys = KeySet(key for listed in kept_lists for key in read_list(self._store, listed))
        plan.delete = [
            key for key in plan.delete if key in withdrawn or not (key in kept or key in listed_keys)
        ]
        plan.purge = [key for key in plan.purge if key not in kept and key not in withdrawn]
        plan.lists = [listed for listed in plan.lists if listed not in kept_lists] + made

    def _withdrawn(
        self, keys: Set[str], lists: Set[DeletionList]
    ) -> tuple[dict[str, PendingDeletion], list[DeletionList]]:
        """Commit that those pending deletions of ``keys`` and ``lists`` that were not taken back are garbage for good.
        Returns them by key, and the new list (none if all were taken back)."""
        withdrawn: dict[str, PendingDeletion] = {}
        made: list[DeletionList] = []

        def change(newest: CatalogState) -> CommitDraft | None:
            """The commit that moves what ``newest`` still has of ``keys`` and ``lists`` to one new list of abandoned
            objects, which no command takes back. None if all was taken back."""
            recent = [key for key in newest.pending_deletions if key in keys]
            there = [listed for listed in newest.deletion_lists if listed in lists]
            entries = {key: newest.pending_deletions[key] for key in recent}
            for listed in there:
                entries |= read_list(self._store, listed)
            withdrawn.clear()
            withdrawn.update({key: entry._replace(reason=Reason.ABANDONED) for key, entry in entries.items()})
            made.clear()
            if not withdrawn:
                return None
            made.append(self._maintenance.put_list(newest, withdrawn))
            return CommitDraft(
                CommitKind.MAINTENANCE,
                purged=tuple(recent),
                deletions=DeletionChange(added=tuple(made), removed=tuple(listed.key for listed in there)),
            )

        self._maintenance.commit(change)
        return withdrawn, made

    def forget(self, left: Set[str]) -> None:
        """Commit that the plan's pending deletions are done, so that the catalog no longer lists them; objects ``left``
        that were not deleted stay listed for the next collection."""
        due = set(self._plan.purge) - left
        lists = [
            listed.key
            for listed in self._plan.lists
            if not left or left.isdisjoint(read_list(self._store, listed))
        ]

        def change(newest: CatalogState) -> CommitDraft | None:
            """The commit that drops the deleted keys and lists which ``newest`` still has; None if it has none."""
            purged = tuple(key for key in newest.pending_deletions if key in due)
            there = {listed.key for listed in newest.deletion_lists}
            removed = tuple(key for key in lists if key in there)
            if not purged and not removed:
                return None
            return CommitDraft(
                CommitKind.MAINTENANCE,
                purged=purged,
                deletions=DeletionChange(removed=removed) if removed else NO_DELETION_CHANGE,
            )

        if due or lists:
            self._maintenance.commit(change)
