"""Repairs an archive: plans the whole state from what is left, and commits it above every version that is named.

    survey      what the catalog still says
    rewrite     damaged data objects, from their whole parts and the broker's log
    adopt       data objects, for offsets that runs lost with the catalog had
    lost        what is left over is a gap, named in the report and in the commit

A plan that is not applied writes nothing.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.healing import PUT_TIMEOUT_S, checked, put_salvaged
from rocketmq_tiered.maintenance.repair.adoption import Span, adopt, history_ends
from rocketmq_tiered.maintenance.repair.assembled import (
    with_adopted,
    with_cursor_at,
    with_ends,
    with_log_cursor,
    with_lost,
    with_replaced,
    with_row_counts,
    without_filled_gaps,
    without_gaps,
)
from rocketmq_tiered.maintenance.repair.catalog_facts import (
    newest_tables,
    unknown_tables,
    unknown_without_root,
)
from rocketmq_tiered.maintenance.repair.survey import VERSION_STEP, Survey, survey
from tiered.archive.found_objects import (
    FoundObject,
    found_objects,
    is_own,
    may_be_newest,
    why_unexplained,
)
from tiered.archive.run_passes import LivingRuns
from tiered.archive.salvage import Lost, salvaged
from tiered.archive.segment_reader import SegmentCache
from tiered.archive.verify import check_objects
from tiered.archive.verify_catalog import (
    check_catalog_objects,
    check_queues,
    check_state_objects,
    check_timers,
    pending_of,
    queue_name,
)
from tiered.archive.verify_index import check_indexes
from tiered.archive.verify_listing import newest_missing
from tiered.archive.verify_progress import VerifyReport
from tiered.archive.verify_segment import AnomalyKind
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.commit import CommitDraft, CommitKind, CommitPlace, PageChange, encode_commit, encode_root
from tiered.catalog.deletions import KEPT_MS, PendingDeletion, Reason, read_list
from tiered.catalog.garbage import KeySet, referenced_by
from tiered.catalog.holdings import OBJECT_PREFIXES
from tiered.catalog.pages import spill
from tiered.catalog.state import NO_ROOT, REPAIRED, CatalogState, Owner, RootRef
from tiered.console import counted
from tiered.errors import FencedError, TieredError, UsageError
from tiered.formats.keys import (
    DATA_PREFIX,
    SETS_PREFIX,
    TIMER_PREFIX,
    archive_prefix,
    catalog_key,
    object_of,
    page_key,
    timer_key,
)
from tiered.formats.run_part import CatalogRun
from tiered.formats.segment import RowTable
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind
from tiered.object_store.interface import ObjectStore

NAMED_MAX = 1000
"""Lost ranges that the commit names."""
SPILL_RUNS = 50_000
PAGE_RUNS = 8192
CATALOG_OBJECTS = tuple(prefix for prefix in OBJECT_PREFIXES if prefix not in (DATA_PREFIX, SETS_PREFIX))
Progress = Callable[[int, int], None]


def lost_entries(store: ObjectStore, state: CatalogState, lost: Sequence[Lost]) -> list[Lost]:
    """The LMQ entries that refer to ``lost`` messages (queue, first offset, end of offsets), and so are lost too. Reads
    the index of each object with LMQ entries; one that cannot be read is skipped."""
    lost_of_queue: dict[QueueKey, list[tuple[int, int]]] = {}
    for queue, begin, end in lost:
        lost_of_queue.setdefault(queue, []).append((begin, end))
    entries: list[Lost] = []
    segments = SegmentCache(store)
    for page in LivingRuns(store, state).between(0, 1 << 62) if lost else ():
        chunk = page.chunk
        for run in chunk.runs[chunk.runs["kind"] == RunKind.LMQ]:
            try:
                reader = segments.of_run(chunk, run)
                rows = reader.row_columns(CatalogRun.of(run))
            except TieredError:
                continue
            is_lost = np.zeros(len(rows), bool)
            for number, parent in enumerate(reader.queues):
                for begin, end in lost_of_queue.get(parent, ()):
                    offsets = rows.parent_queue_offset
                    is_lost |= (rows.parent == number) & (begin <= offsets) & (offsets < end)
            entries += [
                (page.queues[int(run["queue"])], offset, offset + 1)
                for offset in rows.queue_offset[is_lost].tolist()
            ]
    return entries


@dataclass
class Repair:
    """A repair of the archive at ``store``. ``state``: what is committed. ``notes``: what was damaged, and what
    became of it. ``unknown``: what could not be found out."""

    store: ObjectStore
    survey: Survey
    state: CatalogState
    applies: bool
    now_ms: int
    notes: list[str] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    quarantined: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    """Objects that the repair names again: they are no garbage."""
    version: int = 0
    epoch: int = 0
    is_needed: bool = False

    def put(self, key: str, body: list[bytes]) -> None:
        """Put an object, if this repair is applied."""
        if self.applies:
            self.store.put_if_absent(key, body, timeout_s=PUT_TIMEOUT_S)

    @property
    def lost_messages(self) -> int:
        """Offsets that are lost."""
        return sum(end - begin for _, begin, end in self.lost)


def plan_repair(
    store: ObjectStore,
    names: tuple[str, str],
    now_ms: int,
    *,
    log: CommitLog | None = None,
    applies: bool = False,
    progress: Progress = lambda done, total: None,
) -> Repair:
    """Plan the repair of the archive of ``names`` (cluster, broker): read all of its data, and make a whole state of
    what is intact. ``log``: the broker's log, from which damaged messages are written again. ``applies``: also write
    the objects that the repair's commit will name. Raises the store's errors, except for single objects."""
    surveyed = survey(store)
    state = surveyed.state
    repair = Repair(
        store,
        surveyed,
        state,
        applies,
        now_ms,
        [*surveyed.notes],
        version=surveyed.version,
        epoch=surveyed.epoch,
    )
    repair.state = replace(state, cluster=state.cluster or names[0], broker=state.broker or names[1])
    report = VerifyReport()
    _drop_unreadable(repair, report)
    damaged = _damaged_objects(repair, report, progress)
    check_indexes(store, repair.state, LivingRuns(store, repair.state).between, report, full=True)
    repair.notes += [
        anomaly.text if anomaly.kind is AnomalyKind.DAMAGED else str(anomaly) for anomaly in report.anomalies
    ]
    _drop_indexes(repair, {anomaly.key for anomaly in report.anomalies})
    _fill(repair)
    _rewrite(repair, damaged, log)
    _recover_tables(repair)
    _name_unknown(repair)
    repair.quarantined = {key for key in repair.quarantined if _exists(store, key)}
    repair.is_needed = bool(repair.notes or repair.lost)
    return repair


def apply_repair(repair: Repair) -> CatalogState:
    """Write the planned state: large tables of runs as pages of the catalog, then a root page (the whole state), then
    the commit that makes it the archive's. Returns it. Raises FencedError if the archive has changed since the repair
    was planned, and the store's errors."""
    state, version, epoch = repair.state, repair.version, repair.epoch
    nonce = f"{random.SystemRandom().getrandbits(64):016x}"
    if state.memory_runs > SPILL_RUNS:

        def put(number: int, data: bytes) -> str:
            key = page_key("runs", version, epoch, f"{nonce}_{len(pages)}")
            pages.append(key)
            repair.put(key, [data])
            return key

        pages: list[str] = []
        refs = spill(replace(state, version=version), PAGE_RUNS, put)
        state = replace(state, chunks=(), pages=(*state.pages, *refs))
    root = RootRef(page_key("repair", version, epoch, nonce), version)
    actor = f"repair-{nonce}"
    # Quarantined objects are kept for good; those that the repair uses are no longer garbage.
    kept_or_used = repair.quarantined | repair.used
    pending = {key: entry for key, entry in state.pending_deletions.items() if key not in kept_or_used}
    pending |= {
        key: PendingDeletion(KEPT_MS, version, Reason.QUARANTINE)
        for key in sorted(repair.quarantined - repair.used)
    }
    if repair.survey.state.root.key and repair.survey.state.root not in state.kept_roots:
        pending.setdefault(
            repair.survey.state.root.key, PendingDeletion(repair.now_ms, version, Reason.REPLACED)
        )
    state = replace(
        state,
        version=version,
        epoch=epoch,
        put_id="",
        root=root,
        unread_root=NO_ROOT,
        created_ms=repair.now_ms,
        owner=Owner(actor, "repair", "", repair.now_ms, True),
        pending_deletions=pending,
        settings={**state.settings, REPAIRED: _record(repair)},
    )
    repair.put(root.key, [encode_root(state)])
    draft = CommitDraft(
        CommitKind.REPAIR,
        history=state.cursor.history,
        from_phys=state.cursor.phys,
        to_phys=state.cursor.phys,
        check=state.cursor.check,
        created_ms=repair.now_ms,
        pages=PageChange(root=root),
    )
    before = repair.survey.state
    place = CommitPlace(version, epoch, before.put_id, actor, state.cluster, state.broker, NO_ROOT)
    commit, data = encode_commit(draft, place, nonce)
    newer = next(iter(repair.store.list("catalog/", limit=1)), None)
    if newer is not None and newer.key <= catalog_key(version):
        raise FencedError(
            f"{repair.store.url}: the archive has changed since the repair was planned, and nothing was repaired",
            hint="stop its tiered run, then run tiered repair again",
        )
    repair.store.put_if_absent(catalog_key(version), [data], timeout_s=PUT_TIMEOUT_S)
    return replace(state, put_id=commit.put_id)


def _record(repair: Repair) -> dict[str, object]:
    """What the repaired state records about the repair: its version, the version from which commits can be followed,
    its time, what is unknown, how many messages are lost, and the first NAMED_MAX ranges of them."""
    before = repair.state.repaired_version
    return {
        "version": before if repair.survey.is_chain_whole else repair.version,
        "repair": repair.version,
        "ms": repair.now_ms,
        "unknown": repair.unknown,
        "messages": repair.lost_messages,
        "lost": [[*queue, begin, end] for queue, begin, end in repair.lost[:NAMED_MAX]],
    }


# -- what cannot be read --------------------------------------------------------------------------------------


def _drop_unreadable(repair: Repair, report: VerifyReport) -> None:
    """Drop from the planned state the pages, roots, deletion lists, tables and timers that cannot be read or do not
    exist, and add each to ``report``."""
    store, state = repair.store, repair.state
    runs = LivingRuns(store, state)
    for _ in runs.in_order():
        pass
    for key, reason in runs.unreadable.items():
        report.add(AnomalyKind.PAGE, key, reason)
    pages = {object_of(key) for key in runs.unreadable}
    pending_of(store, state, report)
    check_catalog_objects(store, state, report)
    check_state_objects(store, state, report)
    check_timers(store, state, report, full=True)
    existing = {info.key for prefix in CATALOG_OBJECTS for info in store.list(prefix)}
    for key in sorted(state.catalog_keys() - existing - pages):
        report.add(AnomalyKind.MISSING, key, "the catalog names it, but it does not exist")
    bad = {anomaly.key for anomaly in report.anomalies}
    histories = state.log_histories
    if not repair.survey.is_chain_whole or not bad.isdisjoint(
        key for history in histories for key in (history.root, history.hidden)
    ):
        histories = ()
        if state.log_histories:
            repair.unknown.append(
                "it is not known which messages were hidden when the broker's log was truncated or replaced: tiered ls "
                "--histories no longer lists them"
            )
            repair.survey.is_chain_whole = (
                False  # commits before the begin of a log history cannot be followed
            )
    timers = tuple(ref for ref in state.timers if ref.key not in bad)
    for ref in state.timers:
        if ref.key in bad:
            report.add(
                AnomalyKind.DAMAGED, ref.key, "the timers in this object are lost: they are not delivered"
            )
            repair.quarantined.add(ref.key)
    whole = tuple(page for page in state.pages if page.key not in runs.unreadable)
    repair.quarantined |= pages - {object_of(page.key) for page in whole}
    repair.state = replace(
        state,
        timers=timers,
        pages=whole,
        log_histories=histories,
        kept_roots=tuple(root for root in state.kept_roots if root.key not in bad),
        deletion_lists=tuple(one for one in state.deletion_lists if one.key not in bad),
        state_objects={name: key for name, key in state.state_objects.items() if key not in bad},
    )


def _recover_tables(repair: Repair) -> None:
    """Name in the planned state the newest readable copy of each of the broker's tables (topics, offsets, …) that the
    catalog no longer names; of all tables if the newest commits are lost."""
    state, before = repair.state, repair.survey.state
    listed = KeySet(key for one in state.deletion_lists for key in read_list(repair.store, one))
    is_whole = repair.survey.is_whole and repair.survey.is_chain_whole
    tables = newest_tables(repair.store, state.state_objects, listed, is_whole=is_whole)
    for table, key in sorted(tables.items()):
        if key != before.state_objects.get(table):
            repair.notes.append(f"the broker's table {table} is recovered from {key}")
    repair.used |= set(tables.values())
    repair.state = replace(state, state_objects=tables)
    if not is_whole or state.state_objects != before.state_objects:
        repair.unknown += unknown_tables(repair.state)


def _name_unknown(repair: Repair) -> None:
    """Add to ``repair.unknown`` the facts that only lost parts of the catalog had, and keep the objects that may still
    have them."""
    repair.quarantined |= repair.survey.unreadable
    if not repair.survey.state.version:
        repair.quarantined |= {info.key for info in repair.store.list(TIMER_PREFIX)}
        repair.unknown += unknown_without_root(repair.store, repair.state)
    elif not repair.survey.is_whole:
        repair.unknown.append(
            f"it is not known what unreadable commits after catalog version {repair.survey.state.version} changed "
            "besides messages: hidden topics, minimum offsets, rules, timers; tiered run hides deleted topics and "
            "commits its rules again"
        )


def _exists(store: ObjectStore, key: str) -> bool:
    return any(info.key == key for info in store.list(key, limit=1))


def _damaged_objects(repair: Repair, report: VerifyReport, progress: Progress) -> list[str]:
    damaged = []
    for key, result in check_objects(repair.store, LivingRuns(repair.store, repair.state), progress):
        if result.anomalies:
            report.anomalies.append(result.anomalies[0])
            damaged.append(key)
    return damaged


def _drop_indexes(repair: Repair, bad: set[str]) -> None:
    """Keep only the index files before the first of ``bad`` ones (their keys), as together they must cover catalog
    versions without a hole. The others become garbage, and are built again."""
    state = repair.state
    kept = tuple(takewhile(lambda ref: ref.key not in bad, state.indexes))
    gone = {ref.key for ref in state.indexes[len(kept) :]} - bad
    pending = dict(state.pending_deletions)
    for key in sorted(gone):
        pending[key] = PendingDeletion(repair.now_ms, repair.version, Reason.REPLACED)
    repair.state = replace(state, indexes=kept, pending_deletions=pending)


# -- what is missing ------------------------------------------------------------------------------------------


def _fill(repair: Repair) -> None:
    """Find messages for offsets that the planned state lacks: inside of queues (holes), and beyond their ends if the
    newest commits are lost. They are in data objects that no readable commit names. Offsets for which nothing is found
    are lost, and become gaps."""
    repair.state = without_gaps(repair.state)
    if not repair.survey.is_whole:
        repair.state = with_ends(repair.store, repair.state)
    state = repair.state
    holes = _holes(repair.store, state)
    is_empty = not state.version
    objects = _objects_of(repair, unnamed_only=repair.survey.is_whole and not holes)
    unnamed = _beyond_end(repair, state, objects) if repair.survey.is_whole else []
    if repair.survey.is_whole and not holes and not unnamed:
        return
    number_above(repair, objects if not repair.survey.is_whole else unnamed)
    wanted: dict[QueueKey, list[Span]] | None = None  # all offsets that objects have
    if not is_empty:
        wanted = {queue: [*spans] for queue, spans in holes.items()}
        beyond = unnamed if repair.survey.is_whole else objects
        continuing = [one for one in beyond if one.meta.log_history >= state.cursor.history]
        for queue in _queues_of(state, continuing):
            wanted.setdefault(queue, []).extend(_missing_of(state, queue))
        objects = objects if holes else continuing
    segments = SegmentCache(repair.store)
    adopted = adopt(objects, wanted, history_ends(objects), segments, partial(_may_be, repair, state))
    repair.quarantined |= adopted.quarantined
    used = {one.key: one for _, one, _ in adopted.runs}
    repair.used |= used.keys()
    filled = without_filled_gaps(state, ((queue, run) for queue, _, run in adopted.runs))
    repair.state = with_adopted(filled, adopted.runs, repair.version)
    if adopted.runs:
        messages = sum(int(run["rows"]) for _, _, run in adopted.runs)
        count = counted(len(used), "object")
        repair.notes.append(
            f"from {count} that no readable commit names, {counted(messages, 'message')} can be read again"
        )
    if is_empty:
        repair.state = with_log_cursor(segments, repair.state, objects)
    elif not _has_unnamed_timers(repair, used.values()):
        repair.state = with_cursor_at(segments, repair.state, list(used.values()))
    named = referenced_by(repair.store, repair.state) if unnamed else KeySet(())
    _quarantine_unexplained(repair, [one for one in unnamed if one.key not in named])
    for queue, spans in _holes(repair.store, repair.state).items():
        repair.lost += [(queue, begin, end) for begin, end in spans]
    repair.state = with_lost(repair.state, repair.lost)
    repair.state = with_row_counts(repair.store, repair.state)


def _has_unnamed_timers(repair: Repair, objects: Iterable[FoundObject]) -> bool:
    """Whether a lost commit that named some of ``objects`` also named timers: a writer that reads the log again
    archives these again."""
    keys = {timer_key(one.meta.epoch, one.meta.attempt) for one in objects}
    keys -= {ref.key for ref in repair.state.timers}
    return any(_exists(repair.store, key) for key in keys)


def _objects_of(repair: Repair, *, unnamed_only: bool) -> list[FoundObject]:
    """The data objects of the archive that are not garbage and whose index can be read; with ``unnamed_only`` those
    that the state does not name. Objects of other brokers are left alone, and noted as unknown. Raises UsageError if
    the catalog is lost and all objects are of others."""
    state, store = repair.state, repair.store
    known = pending_of(store, state, VerifyReport())
    named = referenced_by(store, state) if unnamed_only else KeySet(())
    infos = (
        info
        for prefix in (DATA_PREFIX, SETS_PREFIX)
        for info in store.list(prefix)
        if info.key not in named and info.key not in known
    )
    own: list[FoundObject] = []
    foreign: list[FoundObject] = []
    for info, one in found_objects(store, infos):
        if one is None:
            if unnamed_only or not state.version:
                repair.quarantined.add(info.key)
                repair.notes.append(
                    f"the index at the end of {info.key} cannot be read, so that its messages are not known"
                )
        elif not is_own(state, one):
            foreign.append(one)
        else:
            own.append(one)
    for one in foreign:
        owner = f"{one.meta.cluster}/{one.meta.broker}"
        repair.unknown.append(
            f"it is not known why {one.key}, an object of the archive {owner}, is here: it is left alone, with "
            f"{counted(one.messages, 'message')}; move it to "
            f"{archive_prefix(one.meta.cluster, one.meta.broker)}/{one.key}"
        )
    if foreign and not own and not state.version:
        raise UsageError(
            f"{store.url} has only objects of other archives, and nothing is changed: {repair.unknown[-1]}",
            hint="move them, then run tiered repair with --cluster and --broker of that archive",
        )
    return own


def _beyond_end(repair: Repair, state: CatalogState, objects: Sequence[FoundObject]) -> list[FoundObject]:
    """Those of ``objects`` that may hold messages which no commit names, but for uploads of a running writer."""
    suspects = [one for one in objects if why_unexplained(state, one)]
    newest = {anomaly.key for anomaly in newest_missing(repair.store, state, (one.key for one in suspects))}
    return [one for one in suspects if one.key in newest or one.meta.epoch < state.epoch]


def number_above(repair: Repair, objects: Iterable[FoundObject]) -> None:
    """Raise version and epoch of the repair's commit above all that ``objects`` name. Where these are beyond the newest
    known commit, commits are lost of which readers and writers may know: the version then rises by VERSION_STEP."""
    before = repair.survey.state
    for one in objects:
        version = one.meta.catalog_version
        if version >= repair.version or (repair.survey.is_whole and may_be_newest(before, one)):
            repair.survey.is_chain_whole = False
            repair.version = max(repair.version, version) + VERSION_STEP
        repair.epoch = max(repair.epoch, one.meta.epoch + 1)


def _missing_of(state: CatalogState, queue: QueueKey) -> list[Span]:
    """Offsets of a queue that no readable commit names: its gaps, and all beyond its end."""
    row = state.queue(queue)
    gaps = [(int(gap["begin_queue_offset"]), int(gap["end_queue_offset"])) for gap in state.gaps_of(queue)]
    return [*gaps, (0 if row is None else int(row["end_queue_offset"]), 1 << 62)]


def _may_be(
    repair: Repair, state: CatalogState, queue: QueueKey, one: FoundObject, rows: RowTable
) -> NDArray[np.bool_]:
    """Which ``rows`` of ``queue`` in the object ``one`` a lost commit may have named. A row beyond the queue's end was
    not named if a commit that can be read covers its part of the log without it, or if a later writer has claimed the
    archive and the newest commit can be read: then the object's upload was never committed."""
    row, meta, surveyed = state.queue(queue), one.meta, repair.survey
    is_cycle = meta.history_phys >= 0
    begins, ends = (meta.from_phys, meta.to_phys) if is_cycle else (rows.phys, rows.phys + 1)
    end = 0 if row is None else int(row["end_queue_offset"])
    is_cut = np.full(len(rows), meta.log_history == surveyed.begun.history) & (begins < surveyed.begun.phys)
    is_cut |= surveyed.is_whole and meta.epoch < state.epoch
    for draft in surveyed.appends:
        is_there = np.full(len(rows), meta.log_history == draft.history)
        is_there &= (begins < draft.to_phys) & (ends > draft.from_phys)
        for run in draft.runs[[draft.queues[number] == queue for number in draft.runs["queue"]]]:
            is_there &= (rows.queue_offset < run["base_queue_offset"]) | (
                rows.queue_offset >= run["end_queue_offset"]
            )
        is_cut |= is_there
    found: NDArray[np.bool_] = (rows.queue_offset < end) | ~is_cut
    return found


def _quarantine_unexplained(repair: Repair, unnamed: Iterable[FoundObject]) -> None:
    """Keep in quarantine those of the ``unnamed`` objects that the repaired state does not explain either."""
    after = replace(repair.state, version=repair.version, epoch=repair.epoch)
    for one in unnamed:
        if why := why_unexplained(after, one):
            repair.quarantined.add(one.key)
            repair.notes.append(
                f"{one.key} is kept in quarantine with {counted(one.messages, 'message')}: {why}"
            )


def _queues_of(state: CatalogState, objects: Iterable[FoundObject]) -> set[QueueKey]:
    """The queues of ``objects`` of which ``state`` has no newer generation, so that their messages may continue it."""
    queues = {queue for one in objects for queue in one.queues}
    return {
        queue
        for queue in queues
        if queue.generation >= (state.current_generation(queue.topic, queue.queue_id) or 0)
    }


def _holes(store: ObjectStore, state: CatalogState) -> dict[QueueKey, list[Span]]:
    names = {queue_name(queue): queue for queue, _ in state.queues()}
    found: dict[QueueKey, list[Span]] = {}
    for anomaly in check_queues(state, LivingRuns(store, state).in_order()):
        if anomaly.kind == AnomalyKind.HOLE and anomaly.range is not None:
            found.setdefault(names[anomaly.key], []).append(anomaly.range)
    return found


# -- what is damaged ------------------------------------------------------------------------------------------


def _rewrite(repair: Repair, damaged: list[str], log: CommitLog | None) -> None:
    """Write a whole object in the place of each object of ``damaged`` (their keys), of the messages that are readable
    in it or in the broker's ``log``. The others are lost, and so are the entries of LMQs that refer to them."""
    for key in damaged:
        check = checked(repair.store, repair.state, key)
        if check is None:
            continue  # no visible message is in it
        salvage = salvaged(repair.store, repair.state, check, log)
        new = put_salvaged(salvage, repair.state, repair.epoch, repair.now_ms, repair.put)
        repair.state = with_replaced(repair.state, salvage, new, repair.version)
        repair.lost += salvage.lost
        rows = sum(map(len, salvage.rows))
        repair.notes.append(
            f"damaged object {key}: {rows:,} of {int(np.concatenate(check.runs)['rows'].sum()):,} messages are written "
            "again"
        )
        repair.quarantined.add(key)
    if damaged:
        repair.lost += lost_entries(repair.store, repair.state, repair.lost)
        repair.state = with_row_counts(repair.store, repair.state)
