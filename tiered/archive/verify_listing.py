"""Verification of names: the data objects that living runs name, and the objects of the catalog, against a listing.

A name is kept as a digest of eight bytes with its size: wrongly found for at most one key in 10¹². No request for each
object.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from tiered.archive.found_objects import found_objects, may_be_newest, why_unexplained
from tiered.archive.run_passes import LivingRuns
from tiered.archive.verify_catalog import check_queues, pending_of
from tiered.archive.verify_progress import VerifyPass, VerifyReport
from tiered.archive.verify_segment import Anomaly, AnomalyKind
from tiered.catalog.catalog_reader import refresh
from tiered.catalog.holdings import OBJECT_PREFIXES
from tiered.catalog.pages import Page, unsorted_memory
from tiered.catalog.state import CatalogState
from tiered.formats.keys import DATA_PREFIX, SERVE_PREFIX, SETS_PREFIX, epoch_of
from tiered.object_store.interface import ObjectInfo, ObjectStore

SETTLE_S = 1.0
SETTLE_TRIES = 5
Progress = Callable[[int, int], object]
"""(objects listed, objects named)."""
Save = Callable[[Callable[[], object]], object]
"""Saves the pass if that is due: first calls the function that it gets, which prepares the pass."""


class NamedObjects:
    """Names and sizes of all data objects with living runs of one catalog state, and which of them a listing has. The
    queues' offsets and the pages of the catalog are checked on the way."""

    def __init__(
        self, store: ObjectStore, state: CatalogState, current: VerifyPass, report: VerifyReport
    ) -> None:
        """Reads all living runs of ``state`` and collects the names and sizes of their objects. Adds to ``report``
        queues with holes or overlaps, unreadable pages, and unreadable lists of pending deletions."""
        self._store, self._state, self._current = store, state, current
        self._batches: list[tuple[NDArray[np.uint64], NDArray[np.int64]]] = []
        """Digests and sizes of pages, until ``_join`` adds them to all others."""
        self._digests = np.empty(0, np.uint64)
        self._sizes = np.empty(0, np.int64)
        """Digests of the objects' keys, ascending, and the size of each."""
        runs = LivingRuns(store, state, seen=self._add)
        if state.memory_runs:
            self._add(unsorted_memory(state))
        report.anomalies += check_queues(state, runs.in_order())
        for key, reason in runs.unreadable.items():
            report.add(AnomalyKind.PAGE, key, reason)
        self._join()
        self._is_found = current.unpack(len(self))
        """Which of them the listing has, with the right size."""
        self._pending = pending_of(store, state, report)

    def __len__(self) -> int:
        return len(self._digests)

    def _add(self, page: Page) -> None:
        """Collect the digests and sizes of the objects that have runs of ``page``."""
        chunk = page.chunk
        used = np.unique(chunk.runs["object"])
        keys = (chunk.object_keys[number] for number in chunk.objects["key"][used].tolist())
        digests = np.fromiter(map(key_digest, keys), np.uint64, len(used))
        self._batches.append((digests, chunk.objects["size_bytes"][used].astype(np.int64)))
        if len(self._batches) >= 64:
            self._join()

    def _join(self) -> None:
        """Sort the collected digests into all others, without repetitions."""
        digests = np.concatenate([self._digests, *(batch[0] for batch in self._batches)])
        sizes = np.concatenate([self._sizes, *(batch[1] for batch in self._batches)])
        self._digests, first = np.unique(digests, return_index=True)
        self._sizes = sizes[first]
        self._batches = []

    def _find(self, key: str, size_bytes: int) -> bool:
        """Whether the listed object ``key`` is one of those that runs name; then note whether its size is the expected
        one."""
        digest = np.uint64(key_digest(key))
        at = int(np.searchsorted(self._digests, digest))
        if at == len(self._digests) or self._digests[at] != digest:
            return False
        self._is_found[at] = self._sizes[at] == size_bytes
        return True

    def listed(self, save: Save, progress: Progress = lambda done, total: None) -> list[str]:
        """Compare all names with a listing of the archive's objects, from where an interrupted pass ended. Anomalies,
        and objects that nothing names ("leftovers"), are added to the pass, which ``save`` saves now and then. Returns
        the objects that the catalog itself names and that are not listed."""
        catalog_keys, current = self._state.catalog_keys(), self._current
        report = VerifyReport(current.anomalies, current.leftovers)
        missing = set(current.missing if current.after else catalog_keys)
        done = int(self._is_found.sum())

        def keep() -> None:
            """Put what was found so far into the pass, before it is saved."""
            current.pack(self._is_found)
            current.missing = sorted(missing)

        for info in _listed(self._store, current.after):
            missing.discard(info.key)
            is_named = self._find(info.key, info.size_bytes) or info.key in catalog_keys
            if info.key in self._pending:
                current.pending_deletions += 1
                if is_named:
                    report.add(
                        AnomalyKind.PENDING_DELETION,
                        info.key,
                        "the object is a pending deletion, but the catalog still names it",
                    )
            elif not is_named and not info.key.startswith(SERVE_PREFIX):
                report.leftovers.append(info.key)
            done += is_named
            if done % 1_000 == 0:
                progress(done, len(self))
            current.after = info.key
            save(keep)
        return sorted(missing)

    def missing(self) -> Iterator[str]:
        """The keys of the data objects that runs name and that were not listed with their size. If there are any, the
        pages are read again, as only digests of keys are kept."""
        if self._is_found.all():
            return
        seen: set[str] = set()
        for page in LivingRuns(self._store, self._state).between(0, self._state.version):
            used = page.chunk.objects["key"][np.unique(page.chunk.runs["object"])]
            for key in {page.chunk.object_keys[number] for number in used.tolist()} - seen:
                seen.add(key)
                if not self._is_found[np.searchsorted(self._digests, np.uint64(key_digest(key)))]:
                    yield key


def newest_missing(
    store: ObjectStore, state: CatalogState, leftovers: Iterable[str], own_epoch: int = 0
) -> list[Anomaly]:
    """An anomaly for each of the ``leftovers`` (objects that nothing names) that shows that the newest commit may be
    missing: it has messages beyond the archive's end. Not for those that a running writer will name soon, whose commits
    are awaited for some seconds, nor for those of ``own_epoch``. Reads the ends of objects of the newest epoch."""
    of_newest_epoch = [
        key
        for key in leftovers
        if key.startswith((DATA_PREFIX, SETS_PREFIX))
        and (epoch_of(key) or 0) >= state.epoch
        and epoch_of(key) != own_epoch
    ]
    infos = (info for key in of_newest_epoch for info in store.list(key, limit=1) if info.key == key)
    read = (found for _, found in found_objects(store, infos))
    suspects = [found for found in read if found is not None and may_be_newest(state, found)]
    newest, tries = refresh(store, state), SETTLE_TRIES
    while suspects and newest.version == state.version and not _is_released(newest) and tries:
        time.sleep(SETTLE_S)
        newest, tries = refresh(store, newest), tries - 1
    is_running = newest.version > state.version
    return [
        Anomaly(
            AnomalyKind.NEWEST,
            suspect.key,
            None,
            f"no commit names this object with {suspect.messages:,} messages, and {why_unexplained(newest, suspect)}: "
            "the newest commit may be missing; run tiered repair",
        )
        for suspect in suspects
        if may_be_newest(newest, suspect) and not (is_running and suspect.meta.epoch == newest.epoch)
    ]


def _is_released(state: CatalogState) -> bool:
    return state.owner is None or state.owner.released


def key_digest(key: str) -> int:
    """A hash of ``key`` of eight bytes, which stands for it in memory."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")


def _listed(store: ObjectStore, after: str) -> Iterator[ObjectInfo]:
    """List the objects below all prefixes that the catalog may name, in a fixed order, from the one after the object
    ``after`` on; empty: all."""
    at = next((number for number, prefix in enumerate(OBJECT_PREFIXES) if after.startswith(prefix)), 0)
    for number, prefix in enumerate(OBJECT_PREFIXES[at:]):
        yield from store.list(prefix, start_after="" if number else after)
