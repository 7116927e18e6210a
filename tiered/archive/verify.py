"""Verifies an archive, read-only: every object of the catalog exists, is undamaged, and agrees with the others.

    chain      every commit exists and follows the one before; the newest root page equals the replayed commits
    queues     the runs and gaps of every queue cover its offsets once each
    segments   every object exists; its tail, footer and runs agree with the catalog
    index      every index file exists and covers its segments; full: every key of theirs is found in it
    full       every block and key section passes its checksum, and every record agrees with its row
    leftovers  objects without a reference: uploads in flight, abandoned attempts, garbage not yet collected

Anomalies are collected, not raised. Errors of the store, such as UnavailableError, are raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered.archive.verify_index import check_indexes
from tiered.archive.verify_queues import check_queues
from tiered.archive.verify_runs import LivingRuns, WindowObjects
from tiered.archive.verify_segment import Anomaly, AnomalyKind, SegmentCheck, SegmentResult, check_segment
from tiered.catalog.catalog_reader import follow, head_version, load, read_commit, read_root, refresh
from tiered.catalog.commit import Commit
from tiered.catalog.garbage import pending_keys
from tiered.catalog.snapshot import describe
from tiered.catalog.state import NO_ROOT, CatalogState, RootRef
from tiered.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from tiered.formats.keys import (
    DATA_PREFIX,
    INDEX_PREFIX,
    PAGES_PREFIX,
    SERVE_PREFIX,
    SETS_PREFIX,
    STATE_PREFIX,
    catalog_key,
)
from tiered.formats.memory_bound import stored_bytes_max
from tiered.formats.state_object import decode_state
from tiered.object_store.interface import ObjectStore

__all__ = ["Anomaly", "AnomalyKind", "SegmentChecker", "VerifyReport", "verify_archive"]

K = TypeVar("K")
T = TypeVar("T")
READ_THREADS = 4
"""Segments checked in parallel; each takes some tens of megabytes at most."""

SegmentChecker = Callable[[CatalogState, Mapping[str, SegmentCheck]], Iterable[tuple[str, SegmentResult]]]
"""Checks objects of one catalog version, given in order of their keys; Spark jobs pass their own."""

_PREFIXES = (DATA_PREFIX, SETS_PREFIX, PAGES_PREFIX, INDEX_PREFIX, STATE_PREFIX)


@dataclass
class VerifyReport:
    """Result. ``leftovers``: keys without a reference, which only take space. ``counts``: objects checked, by kind."""

    anomalies: list[Anomaly] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: AnomalyKind, key: str, detail: str) -> None:
        """Record an anomaly of a whole object."""
        self.anomalies.append(Anomaly(kind, key, None, detail))

    def lines(self, title: str) -> Iterator[str]:
        """The report as text: each anomaly, each leftover, then a summary that starts with ``title``."""
        yield from (f"anomaly: {anomaly}" for anomaly in self.anomalies)
        yield from (f"leftover: {key}" for key in self.leftovers)
        counts = ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
        verdict = "clean" if not self.anomalies else f"{len(self.anomalies)} ANOMALIES"
        yield f"{title}: {verdict}; {counts}; leftovers {len(self.leftovers)}"


def verify_archive(
    store: ObjectStore,
    *,
    full: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    segments: SegmentChecker | None = None,
) -> VerifyReport:
    """Check the archive at ``store``, which is its own prefix. ``full`` reads every byte.

    ``progress(done_bytes, total_bytes)``, of messages, is called as objects are finished. ``segments`` replaces the
    threads that check objects here, and gets some of the objects at a time. Memory is proportional to the live queues,
    not to the length of history. Raises NotFoundError without an archive, and the store's errors.
    """
    report = VerifyReport()
    head = head_version(store)
    if head == 0:
        raise NotFoundError(f"{store.url} holds no archive")
    state = _check_chain(store, head, report)
    if state is None:
        return report
    runs = LivingRuns(store, state)
    report.anomalies += check_queues(state, runs.in_order())
    objects = _Objects(runs, segments or _threaded(store, full=full))
    objects.check(report, progress)
    found, items = check_indexes(store, state, runs.between, full=full)
    report.anomalies += found
    report.counts["keys"] = items
    forgive_what_moved(store, state, report)
    for key, reason in runs.unreadable.items():
        report.add(AnomalyKind.PAGE, key, reason)
    _check_named(store, state, objects.referenced(), report)
    check_state_objects(store, state, report)
    report.counts = {
        "versions": head, "queues": state.queue_count, "objects": objects.count, **report.counts,
    }  # fmt: skip
    return report


# -- chain ----------------------------------------------------------------------------------------------------


def _check_chain(store: ObjectStore, head: int, report: VerifyReport) -> CatalogState | None:
    """The state at ``head`` as readers load it, or None when it cannot be loaded."""
    replayed: CatalogState | None = CatalogState()
    root = NO_ROOT
    for version, read in _commits(store, head):
        try:
            commit = read.result()
            root = commit.root
            if replayed is not None:
                replayed = follow(store, replayed, commit)
        except NotFoundError as error:
            report.add(
                AnomalyKind.CHAIN, catalog_key(version), f"version {version} is missing: {error.message}"
            )
            replayed = None
        except (CorruptionError, UnsupportedFormatError) as error:
            report.add(AnomalyKind.CHAIN, catalog_key(version), error.message)
            replayed = None
    check_root(store, root, report)
    try:
        state = load(store, version=head)
    except (NotFoundError, CorruptionError, UnsupportedFormatError) as error:
        report.add(AnomalyKind.CHAIN, catalog_key(head), f"the head cannot be loaded: {error.message}")
        return replayed
    if replayed is not None and describe(replayed) != describe(state):
        differing = [name for name, value in describe(state).items() if describe(replayed)[name] != value]
        report.add(
            AnomalyKind.ROOT, state.root.key, f"differs from the commits replayed in {', '.join(differing)}"
        )
    return state


def _commits(store: ObjectStore, head: int) -> Iterator[tuple[int, Future[Commit]]]:
    """All commits in order, some at a time."""
    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="verify") as pool:
        versions = range(1, head + 1)
        yield from few_at_a_time((version, pool.submit(read_commit, store, version)) for version in versions)


def check_root(store: ObjectStore, root: RootRef, report: VerifyReport) -> None:
    """Readers do without a damaged root, so that only this check reports it."""
    if not root.key:
        return
    try:
        read_root(store, root)
    except NotFoundError:
        return  # reported with everything else that is named and does not exist
    except (CorruptionError, UnsupportedFormatError) as error:
        report.add(AnomalyKind.ROOT, root.key, error.message)


# -- segments -------------------------------------------------------------------------------------------------


class _Objects:
    """All objects, a window of versions at a time. A hash of eight bytes of each is kept."""

    def __init__(self, runs: LivingRuns, checker: SegmentChecker) -> None:
        self._runs, self._checker = runs, checker
        self._pending = pending_keys(runs.store, runs.state)
        self._hashes: list[NDArray[np.uint64]] = []
        self.count = 0

    def check(self, report: VerifyReport, progress: Callable[[int, int], None]) -> None:
        """Each of them."""
        counts = {"runs": 0, "rows": 0, "blocks": 0, "bytes": 0}
        windows, total = self._runs.windows()
        done = 0
        for window in windows:
            objects = self._runs.objects(window)
            self._note(objects, report)
            counts["runs"] += objects.runs
            for key, result in self._checker(self._runs.state, objects):
                report.anomalies += result.anomalies
                for name, count in result.counts.items():
                    counts[name] += count
                done += objects.cost(key)
                progress(done, total)
        report.counts |= counts

    def _note(self, objects: WindowObjects, report: VerifyReport) -> None:
        for key in sorted(key for key in objects if key in self._pending):
            report.add(AnomalyKind.PENDING_DELETION, key, "is a pending deletion, but still referenced")
        self.count += len(objects)
        self._hashes.append(np.fromiter(map(_hash, objects), np.uint64, len(objects)))

    def referenced(self) -> Callable[[str], bool]:
        """Whether a key is one of theirs; wrongly true for at most one key in 10¹²."""
        hashes = np.unique(np.concatenate([np.zeros(0, np.uint64), *self._hashes]))

        def is_referenced(key: str) -> bool:
            wanted = np.uint64(_hash(key))
            at = int(np.searchsorted(hashes, wanted))
            return at < len(hashes) and bool(hashes[at] == wanted)

        return is_referenced


def _hash(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")


def _threaded(store: ObjectStore, *, full: bool) -> SegmentChecker:
    """A checker that reads a few objects at a time, in threads of this process."""

    def check_all(
        state: CatalogState, objects: Mapping[str, SegmentCheck]
    ) -> Iterator[tuple[str, SegmentResult]]:
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="verify") as pool:
            pending = (
                (key, pool.submit(check_segment, store, state, check, full=full))
                for key, check in objects.items()
            )
            for key, outcome in few_at_a_time(pending):
                yield key, outcome.result()

    return check_all


def few_at_a_time(pending: Iterator[tuple[K, Future[T]]]) -> Iterator[tuple[K, Future[T]]]:
    """Yield ``pending`` in order, and start the next few while the caller waits for the first."""
    window = list(islice(pending, 2 * READ_THREADS))
    while window:
        yield window.pop(0)
        window += islice(pending, 1)


def forgive_what_moved(store: ObjectStore, state: CatalogState, report: VerifyReport) -> None:
    """Drop missing objects that the newest catalog no longer names."""
    missing = {anomaly.key for anomaly in report.anomalies if anomaly.kind == AnomalyKind.MISSING}
    newest = refresh(store, state) if missing else state
    if newest.version == state.version:
        return
    runs = LivingRuns(store, newest)
    named = {
        key
        for page in runs.between(0, newest.version)
        for key in missing.intersection(page.chunk.object_keys)
    }
    report.anomalies = [
        anomaly for anomaly in report.anomalies if anomaly.kind != AnomalyKind.MISSING or anomaly.key in named
    ]


# -- references -----------------------------------------------------------------------------------------------


def _check_named(
    store: ObjectStore, state: CatalogState, is_referenced: Callable[[str], bool], report: VerifyReport
) -> None:
    wanted = state.catalog_keys()
    missing = set(wanted)
    pending, pending_deletions = pending_keys(store, state), 0
    for info in (info for prefix in _PREFIXES for info in store.list(prefix)):
        missing.discard(info.key)
        if info.key in pending:
            pending_deletions += 1
        elif not (info.key in wanted or info.key.startswith(SERVE_PREFIX) or is_referenced(info.key)):
            report.leftovers.append(info.key)
    for key in sorted(missing):
        report.add(AnomalyKind.MISSING, key, "is in the catalog, but does not exist")
    for key in sorted(key for key in wanted if key in pending):
        report.add(AnomalyKind.PENDING_DELETION, key, "is a pending deletion, but still referenced")
    report.counts["pending_deletions"] = pending_deletions
    report.leftovers.sort()


def check_state_objects(store: ObjectStore, state: CatalogState, report: VerifyReport) -> None:
    """The broker's tables, which archive mode needs. They are few and small."""
    for name, key in sorted(state.state_objects.items()):
        try:
            decode_state(store.get(key, stored_bytes_max()), name, source=key)
        except NotFoundError:
            continue  # reported by _check_named
        except (CorruptionError, UnsupportedFormatError) as error:
            report.add(AnomalyKind.DAMAGED, key, error.message)
