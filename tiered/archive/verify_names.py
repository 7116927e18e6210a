"""Verification without reading data: names by listing, the catalog by its newest root and its pages.

    commits   versions without a hole, by listing; the chain of put ids since the newest root, or since a version
    queues    every run in order, each page of the catalog read once
    objects   each named object exists with its size, by listing; no request for each object

Proves that all that the newest commit names is there, that the catalog is whole, and that no object shows a later
commit. Damage inside data objects, and commits before the chain, are found by verify.py. Memory: 17 bytes for each
object and what queues need.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tiered.archive.found_objects import READ_THREADS, few_at_a_time
from tiered.archive.verify import forgive_what_moved
from tiered.archive.verify_catalog import check_root, check_state_objects
from tiered.archive.verify_listing import NamedObjects, Progress, newest_missing
from tiered.archive.verify_progress import VerifyPass, VerifyProgress
from tiered.archive.verify_report import VerifyReport
from tiered.archive.verify_segment import AnomalyKind
from tiered.catalog.catalog_reader import head_version, load, read_commit
from tiered.catalog.holdings import without_commits
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError
from tiered.formats.keys import CATALOG_PREFIX, catalog_key, parse_catalog_key
from tiered.object_store.interface import ObjectStore


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
        raise without_commits(store)
    current = saved.begin(head)
    report = VerifyReport(current.anomalies, current.leftovers)
    try:
        state = load(store, version=current.version)
    except (NotFoundError, CorruptionError) as error:
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
    named = NamedObjects(store, state, current, checked)
    unlisted = named.listed(saved.save, progress)
    for key in named.missing():
        checked.add(AnomalyKind.MISSING, key, "is in the catalog, but does not exist, or has another size")
    checked.anomalies += report.anomalies
    report = VerifyReport(checked.anomalies, sorted(report.leftovers))
    forgive_what_moved(store, state, report)
    report.anomalies += newest_missing(store, state, report.leftovers)
    for key in unlisted:
        report.add(AnomalyKind.MISSING, key, "is in the catalog, but does not exist")
    check_state_objects(store, state, report)
    report.counts = {
        "versions": current.version,
        "queues": state.queue_count,
        "objects": len(named),
        "rows": int(state.table["row_count"].sum()),
        "pending_deletions": current.pending_deletions,
    }
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
            except (NotFoundError, CorruptionError) as error:
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
