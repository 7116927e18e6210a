"""Verifies what the catalog says besides data objects: its roots and lists, the broker's tables, timers whose messages
must be in the archive, and that runs and gaps cover the offsets of each queue without hole or overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.archive.timers import TimerFiles
from tiered.archive.verify_progress import VerifyReport
from tiered.archive.verify_segment import Anomaly, AnomalyKind
from tiered.catalog.catalog_reader import read_root
from tiered.catalog.commit import decode_root
from tiered.catalog.deletions import Reason, read_list
from tiered.catalog.garbage import KeySet
from tiered.catalog.page_bytes import read_page_bytes
from tiered.catalog.pages import Page
from tiered.catalog.state import CatalogState, RootRef
from tiered.catalog.timer_refs import TimerRef
from tiered.errors import CorruptionError, NotFoundError
from tiered.formats.memory_bound import stored_bytes_max
from tiered.formats.state_object import decode_state
from tiered.formats.timer_object import HOUR_DTYPE, hours_of, joined_hours, sorted_entries
from tiered.model.queue import QueueKey
from tiered.model.tables import Table, picked
from tiered.model.timer import EntryKind
from tiered.object_store.interface import ObjectStore


def check_catalog_objects(store: ObjectStore, state: CatalogState, report: VerifyReport) -> None:
    """Check every root page (a copy of a whole state) that ``state`` names, and the states of what log histories hid.
    Anomalies are added to ``report``. Readers do without a damaged root page, so that only this check reports it."""
    begins = (RootRef(history.root, history.version) for history in state.log_histories)
    newest = state.unread_root if state.unread_root.key else state.root
    for root in dict.fromkeys((newest, *state.kept_roots, *begins)):
        check_root(store, root, report)
    for history in state.log_histories:
        if history.hidden:
            check_root(store, RootRef(history.hidden, 0), report)


def check_root(store: ObjectStore, root: RootRef, report: VerifyReport) -> None:
    """Check that the root page ``root`` can be read and is of its version, of any if that is 0. Anomalies are added to
    ``report``; a missing one is reported by the comparison with the listing."""
    if not root.key:
        return
    try:
        if root.version:
            read_root(store, root)
        else:
            decode_root(read_page_bytes(store, root.key), source=root.key)
    except NotFoundError:
        return  # reported with everything else that is named and does not exist
    except CorruptionError as error:
        report.add(AnomalyKind.ROOT, root.key, error.message)


def pending_of(store: ObjectStore, state: CatalogState, report: VerifyReport) -> KeySet:
    """The keys of all pending deletions of ``state``, but for objects whose messages no commit explains, which are
    kept. Reads the lists of them; a damaged list is added to ``report``."""

    def keys() -> Iterator[str]:
        """The keys, one after the other, so that they need not be in memory together."""
        pending = state.pending_deletions.items()
        yield from (key for key, entry in pending if entry.reason != Reason.UNEXPLAINED)
        for listed in state.deletion_lists:
            try:
                yield from read_list(store, listed)
            except NotFoundError:
                continue  # reported with everything else that is named and does not exist
            except CorruptionError as error:
                report.add(AnomalyKind.DELETIONS, listed.key, error.message)

    return KeySet(keys())


def check_state_objects(store: ObjectStore, state: CatalogState, report: VerifyReport) -> None:
    """Check that the archived tables of the broker (topics, groups, offsets), which archive mode needs, can be read.
    Anomalies are added to ``report``."""
    for name, key in sorted(state.state_objects.items()):
        try:
            with report.by_checksums_without_key():
                decode_state(store.get(key, stored_bytes_max()), name, source=key)
        except NotFoundError:
            continue  # reported with everything else that is named and does not exist
        except CorruptionError as error:
            report.add(AnomalyKind.DAMAGED, key, error.message)


# -- timers --------------------------------------------------------------------------------------------------


def check_timers(store: ObjectStore, state: CatalogState, report: VerifyReport, *, full: bool) -> int:
    """Check the objects with timers: their footers, and with ``full`` every entry. Anomalies are added to ``report``.
    Returns how many entries there are in all. Raises the store's errors, except for an object that is damaged or
    missing."""
    files = TimerFiles(store)
    for ref in state.timers:
        try:
            with report.by_checksums_without_key():
                files.footer(ref)
                if full:
                    _check_entries(files, state, ref)
        except NotFoundError:
            continue  # reported with everything else that is named and does not exist
        except CorruptionError as error:
            report.add(AnomalyKind.DAMAGED, ref.key, error.message)
    return sum(ref.entries for ref in state.timers)


def _check_entries(files: TimerFiles, state: CatalogState, ref: TimerRef) -> None:
    """Read all entries of the object with timers ``ref``. Raises CorruptionError if they are out of order, if the
    footer's numbers of entries per hour are wrong, or if the message of a pending timer is not in the archive of
    ``state``."""
    footer, hours, row, last = files.footer(ref), [np.zeros(0, HOUR_DTYPE)], 0, None
    for number in range(len(footer.pages)):
        page = files.page(ref, number)[0]
        joined = page if last is None else np.concatenate([last, page])
        if not (sorted_entries(joined) == joined).all():
            raise CorruptionError(f"{ref.key}: the entries of timers are not in order")
        hours.append(hours_of(page))
        _check_messages(state, ref, footer.queues, page[max(ref.done - row, 0) :])
        row, last = row + len(page), page[-1:]
    if not np.array_equal(joined_hours(hours), footer.hours):
        raise CorruptionError(
            f"{ref.key}: the numbers of timers per hour in the footer differ from those of the object's entries"
        )


def _check_messages(state: CatalogState, ref: TimerRef, queues: Sequence[QueueKey], page: Table) -> None:
    """Check that the messages of the pending timers in ``page``, entries of the object ``ref``, have not expired;
    raises CorruptionError otherwise. A message may be beyond the end of its queue, after a truncation of the log: then
    its timer is dropped when it is due."""
    for number in np.unique(page["queue"]).tolist():
        of_queue = picked(page, (page["queue"] == number) & np.isin(page["kind"], TIMERS))
        row = state.queue(queues[number])
        if row is None:
            raise CorruptionError(f"{ref.key} has timers of {queues[number]}, which is not in the archive")
        expired = of_queue[of_queue["queue_offset"] < row["min_queue_offset"]]
        if len(expired):
            offset = int(expired["queue_offset"][0])
            raise CorruptionError(
                f"{ref.key}: a timer needs the message of {queues[number]} at queue offset {offset}, but the queue has "
                f"expired up to {int(row['min_queue_offset'])}"
            )


# -- queues --------------------------------------------------------------------------------------------------

Ints = NDArray[Any]
TIMERS = (EntryKind.TIMER, EntryKind.POSTPONED)


def check_queues(state: CatalogState, pages: Iterable[Page]) -> Iterator[Anomaly]:
    """Check that runs and recorded gaps cover the offsets of each queue of ``state`` once, from its minimum offset to
    its end, and yield an anomaly for each hole and overlap. ``pages``: all living runs, by queue and offset. One page
    and one queue are in memory."""
    gaps = _Gaps(state)
    seen = np.zeros(len(state.table), bool)
    chain: _Chain | None = None
    for page in pages:
        rows = state.directory.rows(page.queues, len(state.table))
        row = rows[page.chunk.runs["queue"]]
        runs, row = picked(page.chunk.runs, row >= 0), row[row >= 0]
        if len(runs) == 0:
            continue
        begin, end = runs["base_queue_offset"].astype(np.int64), runs["end_queue_offset"].astype(np.int64)
        starts = np.flatnonzero(np.concatenate([[True], row[1:] != row[:-1]]))
        ends = np.append(starts[1:], len(row))
        seen[row] = True
        suspects = _suspects(state, gaps, row, begin, end, starts)
        # The first queue of a page may begin in the page before, the last may continue in the next.
        suspects[0] = suspects[-1] = True
        for number in np.flatnonzero(suspects).tolist():
            queue_row = int(row[starts[number]])
            if chain is None or chain.row != queue_row:
                if chain is not None:
                    yield from chain.finish()
                chain = _Chain(state, gaps, queue_row)
            of_queue = slice(starts[number], ends[number])
            yield from chain.advance(begin[of_queue], end[of_queue])
    if chain is not None:
        yield from chain.finish()
    for unseen in np.flatnonzero(~seen).tolist():
        yield from _Chain(state, gaps, unseen).finish()


def _suspects(
    state: CatalogState, gaps: _Gaps, row: Ints, begin: Ints, end: Ints, starts: Ints
) -> NDArray[np.bool_]:
    """Whether each queue of a page must be checked run by run: it has gaps, or the runs in this page alone do not cover
    its offsets. ``row``, ``begin``, ``end``: for each run, the row of its queue in the queue table, and its offsets;
    ``starts``: the first run of each queue."""
    first = np.zeros(len(row), bool)
    first[starts] = True
    last = np.roll(first, -1)
    low = state.table["min_queue_offset"][row]
    before = np.where(first, low, np.roll(end, 1))
    wrong = (before != np.maximum(begin, low)) | (last & (end != state.table["end_queue_offset"][row]))
    return np.logical_or.reduceat(wrong, starts) | gaps.has_any[row[starts]]


class _Gaps:
    """Recorded gaps by queue and offset."""

    def __init__(self, state: CatalogState) -> None:
        table = state.gaps[np.lexsort((state.gaps["begin_queue_offset"], state.gaps["queue"]))]
        self._first = np.searchsorted(table["queue"], np.arange(len(state.table) + 1))
        self._begin = table["begin_queue_offset"].astype(np.int64)
        self._end = table["end_queue_offset"].astype(np.int64)
        self.has_any = np.diff(self._first) > 0

    def of(self, row: int) -> tuple[Ints, Ints]:
        """(begin, end) of the gaps of a queue."""
        gaps = slice(self._first[row], self._first[row + 1])
        return self._begin[gaps], self._end[gaps]


class _Chain:
    """Checks the offsets of the queue in row ``row`` of the queue table, in their order: each run or gap must begin
    where the one before ends."""

    def __init__(self, state: CatalogState, gaps: _Gaps, row: int) -> None:
        self.row = row
        self._queue = state.key_of(row)
        self._floor = self._expected = int(state.table["min_queue_offset"][row])
        self._end = int(state.table["end_queue_offset"][row])
        self._gap_begin, self._gap_end = gaps.of(row)

    def advance(self, begin: Ints, end: Ints) -> Iterator[Anomaly]:
        """Take the next runs of the queue, which begin at the offsets ``begin`` and end at ``end``, together with the
        gaps recorded up to there. Yields an anomaly for offsets that neither covers, and for those covered twice."""
        due = int(np.searchsorted(self._gap_begin, begin[-1], side="right"))
        begin = np.maximum(begin, self._floor)  # a queue's minimum offset may be inside a run
        begins = np.concatenate([begin, self._gap_begin[:due]])
        ends = np.concatenate([end, self._gap_end[:due]])
        self._gap_begin, self._gap_end = self._gap_begin[due:], self._gap_end[due:]
        order = np.argsort(begins, kind="stable")
        return self._continued(begins[order], ends[order])

    def finish(self) -> Iterator[Anomaly]:
        """Take the gaps after the last run, and check that the queue is covered up to its end."""
        begins = np.append(self._gap_begin, self._end)
        return self._continued(begins, np.append(self._gap_end, self._end))

    def _continued(self, begins: Ints, ends: Ints) -> Iterator[Anomaly]:
        """Yield an anomaly for each of the next runs and gaps that does not begin where the one before ends."""
        expected = np.concatenate([[self._expected], ends[:-1]])
        self._expected = int(ends[-1])
        for at in np.flatnonzero(expected != begins).tolist():
            yield _anomaly(self._queue, int(expected[at]), int(begins[at]))


def _anomaly(queue: QueueKey, expected: int, begin: int) -> Anomaly:
    """The anomaly of a run or gap that begins at the offset ``begin``, not ``expected``."""
    kind = AnomalyKind.HOLE if expected < begin else AnomalyKind.OVERLAP
    low, high = sorted((expected, begin))
    what = "in no run and no gap" if kind == AnomalyKind.HOLE else "in two runs or gaps"
    return Anomaly(kind, queue_name(queue), (low, high), f"offsets [{low}, {high}) are {what}")


def queue_name(queue: QueueKey) -> str:
    """The queue's name in reports."""
    return f"{queue.topic}/{queue.queue_id}" + (f" generation {queue.generation}" if queue.generation else "")
