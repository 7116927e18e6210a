"""Verifies an archive, read-only: every object of the catalog exists, is undamaged, and agrees with the others.

    chain      every commit exists and follows the one before; the newest root page equals the replayed commits
    queues     the runs and gaps of every queue cover its offsets once each
    names      every named object exists with its size, by listing; no request for each object
    segments   the tail, footer and runs of every object agree with the catalog
    index      every index file covers its segments; full: every key of theirs is found in it
    full       every block and key section passes its checksum, and every record agrees with its row
    leftovers  objects without a reference: uploads in flight, abandoned attempts, garbage not yet collected

A verification by names alone proves that all that the newest commit names is there, that the catalog is whole, and that
no object shows a later commit: the chain is followed from where the last clean pass ended, or from the newest root.

Anomalies are collected, not raised; so are objects that cannot be read now, unless many in a row cannot. Other errors
of the store are raised, and UnsupportedFormatError: an object of another format is not damaged. Without the key of an
object, the checksums of its stored bytes are checked, and nothing else.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

from tiered.archive.found_objects import READ_THREADS, few_at_a_time
from tiered.archive.run_passes import LivingRuns
from tiered.archive.verify_catalog import check_catalog_objects, check_state_objects, check_timers
from tiered.archive.verify_index import check_indexes
from tiered.archive.verify_listing import NamedObjects, key_digest, newest_missing
from tiered.archive.verify_progress import VerifyPass, VerifyProgress, VerifyReport
from tiered.archive.verify_segment import Anomaly, AnomalyKind, SegmentCheck, SegmentResult, check_segment
from tiered.catalog.catalog_reader import follow, head_version, load, read_commit, refresh
from tiered.catalog.commit import Commit, CommitKind, describe
from tiered.catalog.holdings import without_commits
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
"""If so many objects in a row cannot be read now, the store is taken to be unavailable, and the verification ends."""
Depth = Literal["names", "tails", "full"]
"""What of the data objects is read: nothing, the tails, every byte."""
SegmentChecker = Callable[[CatalogState, Iterable[SegmentCheck]], Iterable[tuple[str, SegmentResult]]]
"""Checks objects of one catalog version, given in order of their keys; Spark jobs pass their own."""
Progress = Callable[[int, int], object]


def verify_archive(
    store: ObjectStore,
    *,
    depth: Depth = "tails",
    sample: float = 1.0,
    progress: Progress = lambda done, total: None,
    segments: SegmentChecker | None = None,
    saved: VerifyProgress | None = None,
) -> VerifyReport:
    """Check the archive in ``store``, whose keys begin at the archive's own prefix.

    ``depth``: whether data objects are only looked for, their tails are read, or every byte. ``sample``: the share of
    the data objects that is checked, 0 to 1. ``progress(done, total)`` is called as objects are finished, with bytes of
    messages, or with numbers of objects if they are only looked for. ``segments``: checks groups of objects in place of
    this process's threads, as Spark does. ``saved``: where an interrupted pass continues. Memory is proportional to the
    live queues, and 17 bytes for each object. Raises NotFoundError without an archive, CatalogLostError, and the
    store's errors.
    """
    steps = verifying(store, saved or VerifyProgress(), depth, sample, progress, segments)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            report: VerifyReport = end.value
            return report


def verifying(
    store: ObjectStore,
    saved: VerifyProgress,
    depth: Depth,
    sample: float = 1.0,
    progress: Progress = lambda done, total: None,
    segments: SegmentChecker | None = None,
    own: CatalogState | None = None,
) -> Generator[tuple[str, SegmentResult], None, VerifyReport]:
    """Check an archive as ``verify_archive`` does, step by step: yields each data object with its result, so that the
    caller can pause, and returns the report. ``own``: the newest state of the writer of this process, whose uploads are
    in progress; None: it has none."""
    head = head_version(store)
    if head == 0:
        raise without_commits(store)
    current, report, by_names = saved.begin(head), VerifyReport(), depth == "names"
    own = own or CatalogState()
    if own.version > head:
        report.add(
            AnomalyKind.NEWEST,
            catalog_key(own.version),
            f"catalog version {own.version} is missing, though this process has committed it",
        )
    state = _load(store, current.version, report)
    if not current.is_chain_checked:
        since = saved.verified if by_names else None
        state = _check_chain(store, state, since, current, saved)
    if state is None:
        saved.end("", is_clean=False)
        return report.joined(current.anomalies)
    named, runs = NamedObjects(store, state, current, report), LivingRuns(store, state)
    report.counts["rows"] = int(state.table["row_count"].sum())
    if not by_names:
        is_whole = depth == "full" and sample >= 1
        objects = _Objects(runs, segments or _threaded(store, full=depth == "full"), sample)
        yield from objects.check(current, report, progress, saved)
        try:
            report.counts["indexed_keys"] = check_indexes(store, state, runs.between, report, full=is_whole)
            timers = check_timers(store, state, report, full=depth == "full")
            report.counts |= {"timers": timers} if timers else {}
        except UnavailableError as error:
            report.unchecked["index"] = error.message
    unlisted = named.listed(
        (lambda keep: None) if report.unchecked else saved.save,
        progress if by_names else lambda done, total: None,
    )
    report = replace(report.joined(current.anomalies), leftovers=sorted(current.leftovers))
    for key in named.missing() if by_names else ():
        report.add(
            AnomalyKind.MISSING,
            key,
            "the catalog names this object, but it does not exist, or has another size",
        )
    forgive_what_moved(store, state, report)
    report.anomalies += newest_missing(store, state, report.leftovers, own.epoch)
    for key in unlisted:
        report.add(AnomalyKind.MISSING, key, "the catalog names this object, but it does not exist")
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
    saved.end(state.put_id, is_clean=is_clean and (by_names or (depth == "full" and sample >= 1)))
    return report


# -- chain ----------------------------------------------------------------------------------------------------


def _load(store: ObjectStore, version: int, report: VerifyReport) -> CatalogState | None:
    """The state at ``version`` as readers load it; None if they cannot, which is added to ``report``."""
    try:
        return load(store, version=version)
    except (NotFoundError, CorruptionError) as error:
        report.add(
            AnomalyKind.CHAIN,
            catalog_key(version),
            f"the newest catalog version cannot be loaded: {error.message}",
        )
        return None


def _check_chain(
    store: ObjectStore,
    state: CatalogState | None,
    since: tuple[int, str] | None,
    current: VerifyPass,
    saved: VerifyProgress,
) -> CatalogState | None:
    """Check the chain of commits: that no version is missing from the newest repair on, and that each names the put id
    of the one before. Anomalies are added to the pass ``current``, which ``saved`` saves now and then.

    ``state``: as readers load it; None if they cannot: then the state to which the commits lead is returned, if they
    are whole. With ``since`` None all commits are read, and compared with ``state``. Otherwise only those after the
    version ``since`` (with its put id), up to the newest root page, are read: loading ``state`` has followed the
    rest."""
    report = VerifyReport()
    first = 1 if state is None else max(1, state.repaired_version)
    listed = listed_versions(store, first, current.version)
    expected = first
    for version in (*listed, current.version + 1):
        if version > expected:
            last = version - 1
            missing = f"versions {expected} to {last} are" if expected < last else f"version {last} is"
            report.add(AnomalyKind.CHAIN, catalog_key(last), f"{missing} missing")
        expected = version + 1
    replayed = CatalogState() if since is None and not report.anomalies else None
    if since is not None:
        since = max(since, current.chain)
        root = state.root.version if state is not None and first <= since[0] else 0
        listed = [version for version in listed if since[0] < version <= root]
    last, put_id = since or (0, "")
    for version, read in _commits(store, listed):
        try:
            commit = read.result()
            if replayed is not None:
                replayed = _followed(store, replayed, commit)
        except (NotFoundError, CorruptionError) as error:
            report.add(AnomalyKind.CHAIN, catalog_key(version), error.message)
            replayed, last, put_id = None, version, ""
            continue
        before = commit.place.predecessor_put_id
        if replayed is None and put_id and last == version - 1 and before != put_id:
            detail = f"names {before!r} as the put id of the version before, but that of version {last} is {put_id!r}"
            report.add(AnomalyKind.CHAIN, catalog_key(version), detail)
        last, put_id = version, commit.put_id
        if since is not None:
            current.chain = last, put_id
            saved.save()
    if replayed is not None and state is not None:
        wanted = describe(replayed)
        if differing := [name for name, value in describe(state).items() if wanted[name] != value]:
            detail = f"the root page differs from what the commits lead to, in: {', '.join(differing)}"
            report.add(AnomalyKind.ROOT, state.root.key, detail)
    current.anomalies, current.is_chain_checked = report.anomalies, True
    return state or replayed


def _followed(store: ObjectStore, state: CatalogState, commit: Commit) -> CatalogState | None:
    """``state`` after ``commit``; None: the commit is a repair whose root page, which has the whole state, does not
    exist. That is no anomaly: the page is garbage once another root is the newest, and the comparison with the listing
    reports a newest root that does not exist."""
    try:
        return follow(store, state, commit)
    except NotFoundError:
        if commit.draft.kind != CommitKind.REPAIR:
            raise
        return None


def listed_versions(store: ObjectStore, first: int, last: int) -> list[int]:
    """The catalog versions from ``first`` to ``last`` that exist, ascending, by listing."""
    versions = []
    for info in store.list(CATALOG_PREFIX, start_after=catalog_key(last + 1)):
        version = parse_catalog_key(info.key)
        if version is not None and version < first:
            break  # newer versions are listed first
        if version is not None:
            versions.append(version)
    return versions[::-1]


def _commits(store: ObjectStore, versions: list[int]) -> Iterator[tuple[int, Future[Commit]]]:
    """Read the commits ``versions``, a few at a time, and yield each version with its commit."""
    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="verify") as pool:
        yield from few_at_a_time((version, pool.submit(read_commit, store, version)) for version in versions)


# -- segments -------------------------------------------------------------------------------------------------


class _Objects:
    """Checks the data objects of living runs, all or a sample, a window of catalog versions at a time."""

    def __init__(self, runs: LivingRuns, checker: SegmentChecker, sample: float) -> None:
        self._runs, self._checker, self._sample = runs, checker, sample

    def check(
        self, current: VerifyPass, report: VerifyReport, progress: Progress, saved: VerifyProgress
    ) -> Iterator[tuple[str, SegmentResult]]:
        """Check all data objects, but those that the interrupted pass ``current`` has checked, and yield each with its
        result. Anomalies and counts are added to the pass, objects that cannot be read now to ``report``. Raises
        UnavailableError if UNCHECKED_MAX objects in a row cannot be read."""
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
            for key, result in self._checker(self._runs.state, map(objects.__getitem__, left)):
                current.anomalies += result.anomalies
                for name, count in result.counts.items():
                    counts[name] = counts.get(name, 0) + count
                unchecked = unchecked + 1 if result.unchecked else 0
                report.lack(result.lacks)
                if result.unchecked:
                    report.unchecked[key] = result.unchecked
                if unchecked >= UNCHECKED_MAX:
                    raise UnavailableError(
                        f"the verification ends at {key}, as {unchecked} objects in a row cannot be read: "
                        f"{result.unchecked}"
                    )
                done += objects.cost(key)
                current.checked, current.counts = (number, key), counts
                if not report.unchecked:
                    saved.save()
                progress(done, total if self._sample >= 1 else done)
                yield key, result
        report.counts |= counts

    def _is_chosen(self, key: str, salt: int) -> bool:
        """Whether the object ``key`` is in the sample, which a hash draws: another one for each ``salt``."""
        return self._sample >= 1 or key_digest(f"{salt} {key}") < self._sample * 2**64


def check_objects(
    store: ObjectStore, runs: LivingRuns, progress: Progress
) -> Iterator[tuple[str, SegmentResult]]:
    """Each data object of ``runs`` with what is wrong with it; every byte is read."""
    objects = _Objects(runs, _threaded(store, full=True), 1.0)
    current = VerifyPass(runs.state.version)
    yield from objects.check(current, VerifyReport(), progress, VerifyProgress())


def _threaded(store: ObjectStore, *, full: bool) -> SegmentChecker:
    """What checks data objects of ``store`` a few at a time, in threads of this process; ``full``: every byte, not only
    their ends."""

    def check_all(state: CatalogState, checks: Iterable[SegmentCheck]) -> Iterator[tuple[str, SegmentResult]]:
        """Check objects, and yield their keys and results in the order of ``checks``. The result of one that cannot be
        read now says so."""
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="verify") as pool:
            pending = (
                (check.key, pool.submit(check_segment, store, state, check, full=full)) for check in checks
            )
            for key, outcome in few_at_a_time(pending):
                try:
                    yield key, outcome.result()
                except (UnavailableError, AccessDeniedError, ObjectTooLargeError) as error:
                    yield key, SegmentResult(unchecked=error.message)

    return check_all


def forgive_what_moved(store: ObjectStore, state: CatalogState, report: VerifyReport) -> None:
    """Remove from ``report`` the missing objects that the catalog no longer names: they were compacted or expired, and
    deleted, while ``state`` was checked."""
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
