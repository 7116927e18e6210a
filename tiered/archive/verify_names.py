"""Verification without reading data: names by listing, the catalog by its newest root and its pages.

    commits   versions without a hole, by listing; the chain of put ids since the newest root, or since a version
    queues    every run in order, each page of the catalog read once
    objects   each named object exists with its size, by listing; no request for each object

Proves that nothing is missing, and that the catalog is whole. Damage inside data objects, and commits before the
chain, are found by verify.py. Memory: 17 bytes for each object and what queues need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from tiered.archive.verify import READ_THREADS, few_at_a_time, forgive_what_moved
from tiered.archive.verify_catalog import check_root, check_state_objects, pending_of
from tiered.archive.verify_progress import VerifyPass, VerifyProgress
from tiered.archive.verify_queues import check_queues
from tiered.archive.verify_report import VerifyReport
from tiered.archive.verify_runs import LivingRuns
from tiered.archive.verify_segment import AnomalyKind
from tiered.catalog.catalog_reader import head_version, load, read_commit
from tiered.catalog.garbage import KeySet
from tiered.catalog.pages import Page
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from tiered.formats.keys import (
    CATALOG_PREFIX,
    DATA_PREFIX,
    INDEX_PREFIX,
    PAGES_PREFIX,
    SERVE_PREFIX,
    SETS_PREFIX,
    STATE_PREFIX,
    TIMER_PREFIX,
    catalog_key,
    parse_catalog_key,
)
from tiered.object_store.interface import ObjectInfo, ObjectStore

_PREFIXES = (DATA_PREFIX, SETS_PREFIX, PAGES_PREFIX, INDEX_PREFIX, STATE_PREFIX, TIMER_PREFIX)
Progress = Callable[[int, int], object]
"""(objects listed, objects named)."""


def verify_names(
    store: ObjectStore,
    *,
    since_version: int | None = None,
    progress: Progress = lambda done, total: None,
    saved: VerifyProgress | None = None,
) -> VerifyReport:
    """Check the archive at ``store``, which is its own prefix. ``since_version``: the chain of put ids is followed from
    there; by default from the version that ``saved`` proved, or from the newest root. Raises NotFoundError without an
    archive, and what writing ``saved`` or the store raises."""
    saved = saved or VerifyProgress()
    head = head_version(store)
    if head == 0:
        raise NotFoundError(f"{store.url} holds no archive")
    current = saved.begin(head)
    report = VerifyReport(current.anomalies, current.leftovers)
    try:
        state = load(store, version=current.version)
    except (NotFoundError, CorruptionError, UnsupportedFormatError) as error:
        _check_versions(store, 1, current, report, saved)
        report.add(
            AnomalyKind.CHAIN, catalog_key(current.version), f"the head cannot be loaded: {error.message}"
        )
        saved.end("", is_clean=False)
        return report
    first = max(1, state.repaired_version)
    _check_versions(store, first, current, report, saved)
    since = (max(first, since_version), "") if since_version is not None else saved.verified
    if since[0] and since[0] >= first:
        _check_chain(store, state, since, current, report, saved)
    checked = VerifyReport()
    """What every pass checks from the beginning, an interrupted one too."""
    check_root(store, state.unread_root if state.unread_root.key else state.root, checked)
    named = _Named()
    runs = LivingRuns(store, state, seen=named.add)
    if state.memory_runs:
        named.add(Page(state.directory.keys, state.memory))
    checked.anomalies += check_queues(state, runs.in_order())
    for key, reason in runs.unreadable.items():
        checked.add(AnomalyKind.PAGE, key, reason)
    named.close(current)
    pending = pending_of(store, state, checked)
    unlisted = _check_listing(store, state, (named, pending), current, report, progress, saved)
    for key in _missing(store, state, named):
        checked.add(AnomalyKind.MISSING, key, "is in the catalog, but does not exist, or has another size")
    checked.anomalies += report.anomalies
    report = VerifyReport(checked.anomalies, sorted(report.leftovers))
    forgive_what_moved(store, state, report)
    for key in unlisted:
        report.add(AnomalyKind.MISSING, key, "is in the catalog, but does not exist")
    check_state_objects(store, state, report)
    report.counts = {
        "versions": current.version, "queues": state.queue_count, "objects": len(named),
        "rows": int(state.table["row_count"].sum()), "pending_deletions": current.pending_deletions,
    }  # fmt: skip
    saved.end(state.put_id, is_clean=not report.anomalies)
    return report


# -- commits --------------------------------------------------------------------------------------------------


def _check_versions(
    store: ObjectStore, first: int, current: VerifyPass, report: VerifyReport, saved: VerifyProgress
) -> None:
    """Versions from ``first`` on exist."""
    if current.versions_left < first:
        return
    begun = current.versions_left < current.version
    after = catalog_key(current.versions_left + 1) if begun else ""
    for info in store.list(CATALOG_PREFIX, start_after=after):
        version = parse_catalog_key(info.key)
        if version is None or version > current.versions_left:  # a folder object, or committed since
            continue
        expected = current.versions_left
        if expected < first:
            break
        if version < expected:
            report.add(
                AnomalyKind.CHAIN,
                catalog_key(expected),
                f"versions {max(first, version + 1)} to {expected} are missing",
            )
        current.versions_left = version - 1
        saved.save()
    if (expected := current.versions_left) >= first:
        report.add(AnomalyKind.CHAIN, catalog_key(expected), f"versions {first} to {expected} are missing")
    current.versions_left = 0


def _check_chain(
    store: ObjectStore,
    state: CatalogState,
    since: tuple[int, str],
    current: VerifyPass,
    report: VerifyReport,
    saved: VerifyProgress,
) -> None:
    """Put ids from ``since`` (version, put id or empty) to the newest root, after which ``load`` has followed them."""
    known, expected = max(since, current.chain)
    if known and expected:
        known += 1
    versions = range(max(1, known), state.root.version + 1)
    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="verify") as pool:
        reads = ((version, pool.submit(read_commit, store, version)) for version in versions)
        for version, read in few_at_a_time(reads):
            try:
                commit = read.result()
            except (NotFoundError, CorruptionError, UnsupportedFormatError) as error:
                report.add(AnomalyKind.CHAIN, catalog_key(version), error.message)
                expected = ""
                continue
            if expected and commit.place.predecessor_put_id != expected:
                report.add(
                    AnomalyKind.CHAIN,
                    catalog_key(version),
                    f"follows {commit.place.predecessor_put_id!r}, but version {version - 1} is {expected!r}",
                )
            expected = commit.put_id
            current.chain = version, expected
            saved.save()


# -- objects --------------------------------------------------------------------------------------------------


class _Named:
    """Names and sizes of all objects with living runs, as digests."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.uint64], NDArray[np.int64]]] = []
        self._digests = np.empty(0, np.uint64)
        self._sizes = np.empty(0, np.int64)
        self._is_found = np.empty(0, bool)

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, page: Page) -> None:
        """The objects of a page's runs."""
        chunk = page.chunk
        used = np.unique(chunk.runs["object"])
        keys = (chunk.object_keys[number] for number in chunk.objects["key"][used].tolist())
        digests = np.fromiter(map(_digest, keys), np.uint64, len(used))
        self._parts.append((digests, chunk.objects["size_bytes"][used].astype(np.int64)))
        if len(self._parts) >= 64:
            self._join()

    def close(self, current: VerifyPass) -> None:
        """All pages were added; ``current`` says which objects an interrupted pass found."""
        self._join()
        self._is_found = current.unpack(len(self._digests))

    def keep(self, current: VerifyPass) -> None:
        """Record in ``current`` which objects were found."""
        current.pack(self._is_found)

    def found(self, key: str, size_bytes: int) -> bool:
        """Whether ``key`` is one of them; it exists with this size."""
        digest = np.uint64(_digest(key))
        at = int(np.searchsorted(self._digests, digest))
        if at == len(self._digests) or self._digests[at] != digest:
            return False
        self._is_found[at] = self._sizes[at] == size_bytes
        return True

    def is_missing(self, key: str) -> bool:
        """Whether ``key``, one of them, was not found with its size."""
        at = int(np.searchsorted(self._digests, np.uint64(_digest(key))))
        return not bool(self._is_found[at])

    @property
    def found_count(self) -> int:
        """Objects found so far."""
        return int(self._is_found.sum())

    @property
    def are_all_found(self) -> bool:
        """Whether each of them was found."""
        return bool(self._is_found.all())

    def _join(self) -> None:
        digests = np.concatenate([self._digests, *(part[0] for part in self._parts)])
        sizes = np.concatenate([self._sizes, *(part[1] for part in self._parts)])
        self._digests, first = np.unique(digests, return_index=True)
        self._sizes = sizes[first]
        self._parts = []


def _digest(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")


def _check_listing(
    store: ObjectStore,
    state: CatalogState,
    known: tuple[_Named, KeySet],
    current: VerifyPass,
    report: VerifyReport,
    progress: Progress,
    saved: VerifyProgress,
) -> list[str]:
    """Compares the listing with what is named and pending; returns objects of the catalog that are not in it."""
    (named, pending), wanted = known, state.catalog_keys()
    missing = set(current.missing if current.after else wanted)
    done = named.found_count

    def keep() -> None:
        named.keep(current)
        current.missing = sorted(missing)

    for info in _listed(store, current.after):
        missing.discard(info.key)
        is_named = named.found(info.key, info.size_bytes) or info.key in wanted
        if info.key in pending:
            current.pending_deletions += 1
            if is_named:
                report.add(
                    AnomalyKind.PENDING_DELETION, info.key, "is a pending deletion, but still referenced"
                )
        elif not is_named and not info.key.startswith(SERVE_PREFIX):
            report.leftovers.append(info.key)
        done += is_named
        if done % 1_000 == 0:
            progress(done, len(named))
        current.after = info.key
        saved.save(keep)
    return sorted(missing)


def _listed(store: ObjectStore, after: str) -> Iterator[ObjectInfo]:
    """All objects that may be named, in a fixed order; those after the object ``after`` of it."""
    at = next((number for number, prefix in enumerate(_PREFIXES) if after.startswith(prefix)), 0)
    for number, prefix in enumerate(_PREFIXES[at:]):
        yield from store.list(prefix, start_after="" if number else after)


def _missing(store: ObjectStore, state: CatalogState, named: _Named) -> Iterator[str]:
    """Names of the objects that were not listed; reads the pages again, if there are any."""
    if named.are_all_found:
        return
    seen: set[str] = set()
    for page in LivingRuns(store, replace(state)).between(0, state.version):
        for number in np.unique(page.chunk.objects["key"][np.unique(page.chunk.runs["object"])]).tolist():
            key = page.chunk.object_keys[number]
            if key not in seen and named.is_missing(key):
                seen.add(key)
                yield key
