"""Garbage: decides which objects may be deleted. Pure, but for reading pages and lists.

Two kinds of objects are deleted. Pending deletions are, after their grace period; it depends on the reason, and objects
of a truncated log wait longer. Objects that no commit names are *candidates* if they are of a fenced epoch, as no
commit can name them any more; of these, only those whose messages are explained (tiered/archive/found_objects.py) are
deleted. Age alone never makes an object garbage. Commits, and everything that the newest one names, are never deleted.
Lists of pending deletions are collected as a whole.

The age of a pending deletion is by the writer's clock or the bucket's timestamp of the commit, whichever is later: a
wrong writer clock cannot shorten the grace period.

Deletion (rocketmq_tiered/maintenance/gc.py) commits first: keys are *purged* from the pending deletions,
which is final, then deleted. A crash in between leaves an unreferenced object, which the next epoch's collection finds.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.catalog_reader import head_version
from tiered.catalog.deletions import DeletionList, Reason
from tiered.catalog.hidden_history import objects_hidden_since
from tiered.catalog.pages import RunIndex, living_runs, referenced_keys
from tiered.catalog.state import CatalogState
from tiered.formats.keys import (
    CATALOG_PREFIX,
    catalog_key,
    epoch_of,
)
from tiered.object_store.interface import ObjectInfo, ObjectStore, Upload

CURRENT = "of the current epoch"
CANDIDATE = "of another epoch"
"""Why objects that no commit names are not deleted at once; candidates are judged by what is in them."""


class KeySet:
    """Object keys as 8-byte digests, so that millions fit in memory; a false positive keeps an object, never deletes
    one."""

    def __init__(self, keys: Iterable[str]) -> None:
        batches: list[NDArray[np.uint64]] = [np.empty(0, np.uint64)]
        stream = iter(keys)
        # In batches, as Python strings of all keys would not fit in memory.
        while len(batch := digests(islice(stream, 100_000))):
            batches.append(np.unique(batch))
        self._digests = np.unique(np.concatenate(batches))

    @staticmethod
    def union(parts: Iterable[KeySet]) -> KeySet:
        """The set of all keys of ``parts``."""
        return KeySet.of_digests(keys._digests for keys in parts)

    @staticmethod
    def of_digests(parts: Iterable[NDArray[np.uint64]]) -> KeySet:
        """The set of the keys whose digests are in one of ``parts``."""
        union = KeySet(())
        union._digests = np.unique(np.concatenate([union._digests, *parts]))
        return union

    def holds(self, digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Whether the key of each of ``digests`` (of the function of that name) is in the set."""
        if not len(self._digests):
            return np.zeros(len(digests), np.bool_)
        at = np.searchsorted(self._digests, digests)
        at[at == len(self._digests)] = 0  # larger than all: any other place is compared, and differs
        return np.equal(self._digests[at], digests)

    def has_any_of(self, other: KeySet) -> bool:
        """Whether this set and ``other`` have a key in common."""
        return bool(other.holds(self._digests).any())

    def __contains__(self, key: object) -> bool:
        digest = _digest(str(key))
        at = int(np.searchsorted(self._digests, np.uint64(digest)))
        return at < len(self._digests) and int(self._digests[at]) == digest


def digests(keys: Iterable[str]) -> NDArray[np.uint64]:
    """What a KeySet keeps of each of ``keys``."""
    return np.array([_digest(key) for key in keys], np.uint64)


def _digest(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


@dataclass
class GcPlan:
    """``delete``: existing objects to delete, of ``delete_bytes`` in all. ``purge``: pending deletions whose grace
    period is over, whether the object exists or not; ``lists``: lists of such. ``kept``: how many objects are kept, by
    reason."""

    delete: list[str] = field(default_factory=list)
    purge: list[str] = field(default_factory=list)
    lists: list[DeletionList] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Objects that could not be deleted, with the reason."""
    uploads: list[Upload] = field(default_factory=list)
    """Uploads in parts that were begun before the grace period and never completed."""
    delete_bytes: int = 0
    candidates: list[ObjectInfo] = field(default_factory=list)
    """Objects of other epochs that no commit names."""
    unexplained: dict[str, Unexplained] = field(default_factory=dict)
    """Candidates that are kept, with the reason: they may be the only copy of messages."""
    halted: str = ""
    """Why nothing is deleted: the newest commit is missing."""

    def keep(self, reason: str) -> None:
        """Count an object that is kept for ``reason``."""
        self.kept[reason] = self.kept.get(reason, 0) + 1

    def to_delete(self, info: ObjectInfo) -> None:
        """Plan to delete the object."""
        self.delete.append(info.key)
        self.delete_bytes += info.size_bytes

    def halt(self, why: str) -> None:
        """Plan to delete nothing, because of ``why``."""
        self.halted = why
        self.delete, self.purge, self.lists, self.delete_bytes = [], [], [], 0

    @property
    def unexplained_messages(self) -> int:
        """Messages in the unexplained objects, of those that can be read."""
        return sum(found.messages for found in self.unexplained.values())


class Unexplained(NamedTuple):
    """Why an object is kept, and how many messages it has."""

    why: str
    messages: int


@dataclass(frozen=True)
class Grace:
    """Grace periods: ``diverged_ms`` of objects of a truncated or replaced log, ``ms`` of others."""

    ms: int
    diverged_ms: int

    def of(self, reason: str) -> int:
        """The grace period of a pending deletion with this reason, in ms."""
        return self.diverged_ms if reason == Reason.DIVERGED else self.ms


KeysOf = Callable[[DeletionList], Iterable[str]]


def plan_gc(
    listing: Iterable[ObjectInfo],
    state: CatalogState,
    references: KeySet,
    *,
    now_ms: int,
    grace: Grace,
    settled_version: Callable[[int], int],
    keys_of: KeysOf,
) -> GcPlan:
    """Decide which of the objects of ``listing`` are deleted, kept, or candidates that are yet to be explained.

    ``references``: all keys that the newest ``state`` names, also those in its pages. ``settled_version``: by a grace
    period in ms, the newest version that the bucket has had for so long. ``keys_of``: the keys in a deletion list."""
    plan = GcPlan()

    def is_over(reason: str, since_ms: int, version: int) -> bool:
        """Whether the grace period of a pending deletion is over, by the writer's clock and by the bucket's."""
        grace_ms = grace.of(reason)
        return now_ms - since_ms >= grace_ms and version <= settled_version(grace_ms)

    unexplained = {
        key for key, pending in state.pending_deletions.items() if pending.reason == Reason.UNEXPLAINED
    }
    for key, pending in state.pending_deletions.items():
        is_due = is_over(pending.reason, pending.since_ms, pending.version) and key not in unexplained
        if is_due and key not in references:
            plan.purge.append(key)
    due_keys = []
    for listed in state.deletion_lists:
        if is_over(listed.reason, listed.newest_ms, listed.version):
            keys = KeySet(keys_of(listed))
            # A list with an object that is named again, or was hidden and waits longer, is kept as a whole.
            if not keys.has_any_of(references):
                plan.lists.append(listed)
                due_keys.append(keys)
    due = (set(plan.purge), KeySet.union(due_keys))
    waiting_lists = [listed for listed in state.deletion_lists if listed not in plan.lists]
    waiting = (
        state.pending_deletions.keys() - unexplained,
        KeySet(key for listed in waiting_lists for key in keys_of(listed)),
    )
    for info in listing:
        unexplained.discard(info.key)
        reason = _reason_to_keep(info.key, state.epoch, references, due, waiting)
        if reason == CANDIDATE:
            plan.candidates.append(info)
        elif reason:
            plan.keep(reason)
        else:
            plan.to_delete(info)
    plan.purge += unexplained  # those that no longer exist: a person has deleted them
    return plan


Either = tuple[Container[str], Container[str]]
"""Keys that are in one of two collections: recent pending deletions, and those of lists."""


def _reason_to_keep(key: str, epoch_now: int, references: KeySet, due: Either, waiting: Either) -> str:
    """Why garbage collection keeps the object ``key``, as text for the counts that it prints; CANDIDATE if that is yet
    to be decided; empty if the object may be deleted. ``due`` and ``waiting``: pending deletions whose grace period is
    over, or not."""
    if key in references:
        return "referenced by the head"
    if any(key in keys for keys in due):
        return ""
    if any(key in keys for keys in waiting):
        return "pending deletion, within the grace period"
    epoch = epoch_of(key)
    if epoch is None:
        return "unknown object"
    return CURRENT if epoch == epoch_now else CANDIDATE


def referenced_by(store: ObjectStore, state: CatalogState, hidden_since_ms: int = 1 << 62) -> KeySet:
    """All keys of objects that ``state`` names, itself or in its pages, and of those whose messages a new log history
    hid after ``hidden_since_ms`` (the default: of none). Reads each page once."""
    in_pages = (key for page in living_runs(RunIndex(store), state) for key in referenced_keys(page.chunk))
    return KeySet(chain(state.catalog_keys(), objects_hidden_since(store, state, hidden_since_ms), in_pages))


def settled_version(store: ObjectStore, version: int, before_ms: int) -> int:
    """The newest version, up to ``version``, whose commit the bucket has had since ``before_ms``, by the bucket's own
    timestamps; 0: none. A binary search, with a LIST of one key for each step."""

    def modified_ms(candidate: int) -> int:
        """The bucket's time of the commit of this version, or of the one before, where a repair skipped it."""
        # Newer versions have smaller keys: this lists the candidate, or the next older one.
        info = next(iter(store.list(CATALOG_PREFIX, start_after=catalog_key(candidate + 1), limit=1)), None)
        if info is not None and info.key == catalog_key(candidate):
            return info.modified_ms
        if head_version(store) < candidate:
            return before_ms + 1  # not committed yet: too new
        return 0 if info is None else info.modified_ms

    return bisect_left(range(1, version + 1), before_ms + 1, key=modified_ms)
