"""Verifies an archive, read-only: every object of the catalog exists, is undamaged, and agrees with the others.

    chain      every commit exists and follows the one before; the newest root page equals the replayed commits
    queues     the runs and gaps of every queue cover its offsets once each
    segments   every object exists; its tail, footer and runs agree with the catalog
    index      every index file exists and covers its segments; full: every key of theirs is found in it
    full       every block and key section passes its checksum, and every record agrees with its row
    leftovers  objects without a reference: uploads in flight, abandoned attempts, garbage not yet collected

Anomalies are collected, not raised; so are objects that cannot be read now, unless many in a row cannot. Other errors
of the store are raised.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from tiered.archive.found_objects import READ_THREADS, few_at_a_time
from tiered.archive.verify_catalog import check_catalog_objects, check_state_objects
from tiered.archive.verify_index import check_indexes
from tiered.archive.verify_listing import NamedObjects, key_digest, newest_missing
from tiered.archive.verify_progress import VerifyPass, VerifyProgress
from tiered.archive.verify_report import VerifyReport
from tiered.archive.verify_runs import LivingRuns, WindowObjects
from tiered.archive.verify_segment import Anomaly, AnomalyKind, SegmentCheck, SegmentResult, check_segment
from tiered.archive.verify_timers import check_timers
from tiered.catalog.catalog_reader import follow, head_version, load, read_commit, refresh
from tiered.catalog.commit import Commit
from tiered.catalog.holdings import without_commits
from tiered.catalog.snapshot import describe
from tiered.catalog.state import CatalogState
from tiered.errors import (
    AccessDeniedError,
    CorruptionError,
    NotFoundError,
    ObjectTooLargeError,
    UnavailableError,
)
from tiered.formats.keys import CATALOG_PREFIX, catalog_key, parse_catalog_key
from tiered.object_store.interface import ObjectStore

__all__ = ["Anomaly", "AnomalyKind", "SegmentChecker", "VerifyReport", "verify_archive"]

UNCHECKED_MAX = 16
"""If so many objects in a row cannot be read now, none can."""

SegmentChecker = Callable[[CatalogState, Mapping[str, SegmentCheck]], Iterable[tuple[str, SegmentResult]]]
"""Checks objects of one catalog version, given in order of their keys; Spark jobs pass their own."""


def verify_archive(
    store: ObjectStore,
    *,
    full: bool = False,
    sample: float = 1.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    segments: SegmentChecker | None = None,
    saved: VerifyProgress | None = None,
) -> VerifyReport:
    """Check the archive at ``store``, which is its own prefix. ``full`` reads every byte, of a ``sample`` of the data
    objects (0 to 1).

    ``progress(done_bytes, total_bytes)``, of messages, is called as objects are finished. ``segments`` replaces the
    threads that check objects here, and gets some of the objects at a time. ``saved`` continues an interrupted pass.
    Memory is proportional to the live queues, not to the length of history. Raises NotFoundError without an archive,
    and the store's errors.
    """
    steps = verifying(store, saved or VerifyProgress(), sample if full else None, progress, segments)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: VerifyReport = end.value
            return found


def verifying(
    store: ObjectStore,
    saved: VerifyProgress,
    sample: float | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    segments: SegmentChecker | None = None,
    own_epoch: int = 0,
) -> Generator[tuple[str, SegmentResult], None, VerifyReport]:
    """The steps of ``verify_archive``: each data object with its result, and the report in the end. ``sample`` None: no
    data is read. ``own_epoch``: of the writer of this process, whose uploads are in progress."""
    full, share = sample is not None, 1.0 if sample is None else sample
    head = head_version(store)
    if head == 0:
        raise without_commits(store)
    current = saved.begin(head)
    report = VerifyReport()
    state = _load(store, current.version, report)
    if not current.is_chain_checked:
        chain = VerifyReport()
        replayed = _check_chain(store, current.version, state, chain)
        state = state or replayed
        current.anomalies, current.is_chain_checked = chain.anomalies, True
    if state is None:
        saved.end("", is_clean=False)
        return report.joined(current.anomalies)
    named = NamedObjects(store, state, current, report)
    runs = LivingRuns(store, state)
    objects = _Objects(runs, segments or _threaded(store, full=full), share)
    yield from objects.check(current, report, progress, saved)
    try:
        found, items = check_indexes(store, state, runs.between, full=full and share >= 1)
        report.anomalies += found
        report.counts["keys"] = items
        found, timers = check_timers(store, state, full=full)
        report.anomalies += found
        report.counts |= {"timers": timers} if timers else {}
    except UnavailableError as error:
        report.unchecked["index"] = error.message
    unlisted = named.listed((lambda keep: None) if report.unchecked else saved.save)
    report = replace(report.joined(current.anomalies), leftovers=sorted(current.leftovers))
    forgive_what_moved(store, state, report)
    report.anomalies += newest_missing(store, state, report.leftovers, own_epoch)
    for key in unlisted:
        report.add(AnomalyKind.MISSING, key, "is in the catalog, but does not exist")
    check_catalog_objects(store, state, report)
    check_state_objects(store, state, report)
    report.counts = {
        "versions": current.version,
        "queues": state.queue_count,
        "objects": len(named),
        **report.counts,
        "pending_deletions": current.pending_deletions,
    }
    is_clean = not report.anomalies and not report.unchecked
    saved.end(state.put_id, is_clean=is_clean and full and share >= 1)
    return report


# -- chain ----------------------------------------------------------------------------------------------------


def _load(store: ObjectStore, version: int, report: VerifyReport) -> CatalogState | None:
    """The state at ``version`` as readers load it."""
    try:
        return load(store, version=version)
    except (NotFoundError, CorruptionError) as error:
        report.add(AnomalyKind.CHAIN, catalog_key(version), f"the head cannot be loaded: {error.message}")
        return None


def _check_chain(
    store: ObjectStore, head: int, state: CatalogState | None, report: VerifyReport
) -> CatalogState | None:
    """The state at ``head`` by its commits, from the newest repair on; None if they do not give one. ``state``: as
    readers load it."""
    replayed: CatalogState | None = CatalogState()
    first = 1 if state is None else max(1, state.repaired_version)
    listed = listed_versions(store, first, head)
    expected = first
    for version, read in _commits(store, listed):
        if version > expected:
            missing = (
                f"version {expected} is"
                if version == expected + 1
                else f"versions {expected} to {version - 1} are"
            )
            report.add(AnomalyKind.CHAIN, catalog_key(expected), f"{missing} missing")
            replayed = None
        expected = version + 1
        try:
            commit = read.result()
            if replayed is not None:
                replayed = follow(store, replayed, commit)
        except (NotFoundError, CorruptionError) as error:
            report.add(AnomalyKind.CHAIN, catalog_key(version), error.message)
            replayed = None
    if replayed is not None and state is not None and describe(replayed) != describe(state):
        differing = [name for name, value in describe(state).items() if describe(replayed)[name] != value]
        report.add(
            AnomalyKind.ROOT, state.root.key, f"differs from the commits replayed in {', '.join(differing)}"
        )
    return replayed


def listed_versions(store: ObjectStore, first: int, last: int) -> list[int]:
    """Versions in [first, last] that exist, ascending, by listing."""
    found = (
        parse_catalog_key(info.key) for info in store.list(CATALOG_PREFIX, start_after=catalog_key(last + 1))
    )
    versions = []
    for version in (one for one in found if one is not None):
        if version < first:
            break
        versions.append(version)
    return versions[::-1]


def _commits(store: ObjectStore, versions: list[int]) -> Iterator[tuple[int, Future[Commit]]]:
    """These commits, some at a time."""
    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="verify") as pool:
        yield from few_at_a_time((version, pool.submit(read_commit, store, version)) for version in versions)


# -- segments -------------------------------------------------------------------------------------------------


class _Objects:
    """All objects, or a ``sample``, a window of versions at a time."""

    def __init__(self, runs: LivingRuns, checker: SegmentChecker, sample: float) -> None:
        self._runs, self._checker, self._sample = runs, checker, sample

    def check(
        self,
        current: VerifyPass,
        report: VerifyReport,
        progress: Callable[[int, int], None],
        saved: VerifyProgress,
    ) -> Iterator[tuple[str, SegmentResult]]:
        """Each of them, but those that an interrupted pass has checked."""
        counts = {"runs": 0, "messages": 0, "blocks": 0, "bytes": 0} | current.counts
        windows, total = self._runs.windows()
        done = unchecked = 0
        for number, window in enumerate(windows):
            objects = self._runs.objects(window)
            keys = [key for key in objects if self._is_chosen(key, current.version)]
            left = [key for key in keys if (number, key) > current.checked]
            done += sum(objects.cost(key) for key in keys) - sum(objects.cost(key) for key in left)
            if number > current.checked[0]:
                counts["runs"] += objects.runs
            for key, result in self._checker(self._runs.state, _Chosen(objects, left)):
                current.anomalies += result.anomalies
                for name, count in result.counts.items():
                    counts[name] += count
                unchecked = unchecked + 1 if result.unchecked else 0
                if result.unchecked:
                    report.unchecked[key] = result.unchecked
                if unchecked >= UNCHECKED_MAX:
                    raise UnavailableError(f"{unchecked} objects in a row cannot be read: {result.unchecked}")
                done += objects.cost(key)
                current.checked, current.counts = (number, key), counts
                if not report.unchecked:
                    saved.save()
                progress(done, total if self._sample >= 1 else done)
                yield key, result
        report.counts |= counts

    def _is_chosen(self, key: str, salt: int) -> bool:
        return self._sample >= 1 or key_digest(f"{salt} {key}") < self._sample * 2**64


def check_objects(
    store: ObjectStore, runs: LivingRuns, progress: Callable[[int, int], None]
) -> Iterator[tuple[str, SegmentResult]]:
    """Each data object of ``runs`` with what is wrong with it; every byte is read."""
    objects = _Objects(runs, _threaded(store, full=True), 1.0)
    current = VerifyPass(runs.state.version)
    yield from objects.check(current, VerifyReport(), progress, VerifyProgress())


class _Chosen(Mapping[str, SegmentCheck]):
    """Some of the objects of a window."""

    def __init__(self, objects: WindowObjects, keys: list[str]) -> None:
        self._objects, self._keys = objects, keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __getitem__(self, key: str) -> SegmentCheck:
        return self._objects[key]


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
                try:
                    yield key, outcome.result()
                except (UnavailableError, AccessDeniedError, ObjectTooLargeError) as error:
                    yield key, SegmentResult(unchecked=error.message)

    return check_all


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
