"""Gathers what shows whether a log whose common bytes are gone continues an archive: queue offsets, times, store hosts.

The archive's known store hosts are archive-wide settings, which commits extend. The decision is in log_rule.py.

Finds the last record that a log and an archive have in common inside a commit: the log lost a part of what that has.

Only checked bytes count: a log that has an archived record has those before it, so the last one is found by bisection,
and the records in front of it are compared too.
"""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import fastcrc
import numpy as np
from numpy.typing import NDArray

from tiered.archive.segment_reader import SegmentCache, SegmentReader
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.damage import record_size
from tiered.broker_store.store import BrokerStore
from tiered.catalog.log_histories import compared_runs
from tiered.catalog.pages import RunIndex, living_runs
from tiered.catalog.state import CatalogState, LogCheck
from tiered.errors import AccessDeniedError, CorruptionError, NotFoundError, UnreadableError
from tiered.formats.record import Record, decode_record, store_host_text
from tiered.formats.run_part import CatalogRun
from tiered.model.tables import QUEUE_HIDDEN, RunKind
from tiered.object_store.interface import ObjectStore
from uploader.log_batch import CHECK_BYTES_MAX, LogBatch
from uploader.log_rule import ArchivedEnd, LogHead

STORE_HOSTS = "store_hosts"
"""Archive-wide setting: `address:port` of brokers whose records it has, at most HOSTS_MAX, the newest last."""
HOSTS_MAX = 16
HEAD_RECORDS_MAX = 2_000
_PREPARED = 0x4
"""In the system flag of prepared and rolled back transactions, whose queue offset is 0."""


def hosts_setting(batch: LogBatch) -> dict[str, list[str]]:
    """The archive's setting of store hosts (``address:port`` of the broker in a record) in the commit of ``batch``:
    those of its first and last record; empty without records."""
    columns, hosts = batch.columns, dict[str, None]()
    for row in sorted({0, columns.rows - 1}) if columns.rows else ():
        begin = int(columns.position[row])
        hosts[store_host_text(batch.arena[begin : begin + int(columns.size[row])].tobytes())] = None
    return {STORE_HOSTS: list(hosts)} if hosts else {}


def with_known_hosts(settings: Mapping[str, Any], state: CatalogState) -> dict[str, Any]:
    """``settings`` of a commit after ``state`` in which the store hosts follow those that ``state`` has; without them
    if none is new."""
    known, hosts = _hosts(state), list(settings.get(STORE_HOSTS, ()))
    others = {name: value for name, value in settings.items() if name != STORE_HOSTS}
    added = [host for host in hosts if host not in known]
    return others | {STORE_HOSTS: [*known, *added][-HOSTS_MAX:]} if added else others


def archived_end(state: CatalogState) -> ArchivedEnd:
    """Where the archive ends at ``state``: the next offset of each visible queue, the time of the newest message, and
    the store hosts of its records."""
    visible = [(key, row) for key, row in state.current_queues() if not row["flags"] & QUEUE_HIDDEN]
    newest_ms = max((int(row["max_store_timestamp"]) for _, row in visible), default=0)
    ends = {(key.topic, key.queue_id): int(row["end_queue_offset"]) for key, row in visible}
    # A message cannot be newer than the commit that archived it.
    return ArchivedEnd(ends, min(newest_ms, state.advanced_ms), frozenset(_hosts(state)))


def log_head(store: BrokerStore, archived: ArchivedEnd) -> LogHead:
    """The oldest records of the broker's log, and where its queues begin; of these only queues of ``archived``."""
    records = _first_records(store)
    if not records:
        return LogHead()
    first = records[0]
    return LogHead(_begins(store, archived, records), first.store_timestamp, first.store_host)


def _first_records(store: BrokerStore) -> list[Record]:
    """The oldest records of the broker's log, at most HEAD_RECORDS_MAX."""
    log = store.commit_log
    phys, records = log.min_phys, list[Record]()
    while len(records) < HEAD_RECORDS_MAX and (size := record_size(log, phys)) is not None:
        records.append(decode_record(log.read(phys, size)))
        phys += size
    return records


def _begins(store: BrokerStore, archived: ArchivedEnd, records: list[Record]) -> dict[tuple[str, int], int]:
    """The offset at which each queue (topic, queue id) begins in the broker's log, whose first records are ``records``:
    that of its first record there; of an archived queue without one, the minimum of the broker's consume queue, if that
    can be read."""
    begins: dict[tuple[str, int], int] = {}
    for record in records:
        if not record.sys_flag & _PREPARED:
            begins.setdefault((record.topic, record.queue_id), record.queue_offset)
    index = store.consume_queues()
    if index is None:
        return begins
    index.refresh()
    for queue in archived.ends.keys() - begins.keys():
        with contextlib.suppress(UnreadableError, AccessDeniedError, CorruptionError):
            if index.max_offset(*queue) > 0:
                begins[queue] = index.min_offset(*queue)
    return begins


def _hosts(state: CatalogState) -> list[str]:
    recorded = state.settings.get(STORE_HOSTS, ())
    return [host for host in recorded if isinstance(host, str)] if isinstance(recorded, list | tuple) else []


logger = logging.getLogger(__name__)

_COMPARED_BELOW = 16
"""Records in front of the last common one that are compared too."""


@dataclass(frozen=True)
class CommonRecords:
    """Archived records that the log has: ``count`` of them, the last of which ends at ``end_phys``. ``check``: of the
    log below it."""

    count: int
    end_phys: int
    check: LogCheck


@dataclass(frozen=True)
class Commits:
    """The physical range [begin, end) of commits, the first and last of which are ``versions``."""

    begin_phys: int
    end_phys: int
    versions: tuple[int, int]


def common_records(
    log: CommitLog, log_end_phys: int, store: ObjectStore, state: CatalogState, commits: Commits
) -> CommonRecords | None:
    """How many records of ``commits``, from the first, the broker's ``log``, which ends at ``log_end_phys``, has as
    well; None if it has none, or the archive's objects in ``store`` cannot be read. Reads pages of ``state``, the ends
    of objects, and a block for each comparison."""
    try:
        return _Compared(log, log_end_phys, store, state, commits).last()
    except (CorruptionError, NotFoundError) as error:
        logger.warning(
            "the broker's log could not be compared with archived records, as an object of the archive cannot be read: "
            "%s",
            error,
        )
        return None


class _Compared:
    """Archived records by physical offset: parallel columns."""

    def __init__(
        self, log: CommitLog, log_end_phys: int, store: ObjectStore, state: CatalogState, commits: Commits
    ) -> None:
        """List the records that ``commits`` archived and ``log`` should have, in the order of the log. Reads pages of
        ``state`` and the ends of objects in ``store``."""
        self._log, self._log_end_phys = log, log_end_phys
        self._runs: list[tuple[SegmentReader, CatalogRun]] = []
        """Where the records of each run are read."""
        table = np.concatenate([np.zeros((0, 4), np.int64), *self._read(store, state, commits)])
        is_in_log = (table[:, 0] >= max(commits.begin_phys, log.min_phys)) & (table[:, 0] < commits.end_phys)
        table = table[is_in_log]
        table = table[np.argsort(table[:, 0], kind="stable")]
        self._phys, self._size, self._run, self._row = table.T

    def _read(self, store: ObjectStore, state: CatalogState, commits: Commits) -> list[NDArray[np.int64]]:
        """The archived records of ``commits``, one array for each run of theirs, with a line for each record: commitlog
        offset, size, number of the run, row in it. Runs of LMQs have no bytes of their own."""
        segments, arrays = SegmentCache(store), []
        for page in living_runs(RunIndex(store), state, *commits.versions):
            chunk = page.chunk
            is_chosen = compared_runs(state, page) & (chunk.runs["kind"] != RunKind.LMQ)
            is_chosen &= chunk.runs["min_phys"] < commits.end_phys
            is_chosen &= chunk.runs["end_phys"] > commits.begin_phys
            for at in np.flatnonzero(is_chosen).tolist():
                reader = segments.of_run(chunk, chunk.runs[at])
                run = CatalogRun.of(chunk.runs[at])
                rows = reader.row_columns(run)
                numbers = np.full(len(rows), len(self._runs)), np.arange(len(rows))
                arrays.append(np.stack([rows.phys, rows.size.astype(np.int64), *numbers], axis=1))
                self._runs.append((reader, run))
        return arrays

    def last(self) -> CommonRecords | None:
        """The archived records that the log has as well: their number, and the end of the last one; None if it has not
        even the first. The last is found by halving, as a log that has a record has all before it."""
        if not len(self._phys) or not self._is_same(0):
            return None
        low, high = 0, len(self._phys)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_same(middle) else (low, middle)
        # If it does not have some records before it, this is no common begin.
        if not all(self._is_same(at) for at in range(max(0, low - _COMPARED_BELOW), low)):
            return None
        end_phys = int(self._phys[low] + self._size[low])
        return CommonRecords(low + 1, end_phys, _check_below(self._log, end_phys))

    def _is_same(self, at: int) -> bool:
        """Whether the log has the archived record number ``at`` at its commitlog offset, byte for byte."""
        phys, size = int(self._phys[at]), int(self._size[at])
        if phys + size > self._log_end_phys or self._log.file_at(phys) is None:
            return False
        reader, run = self._runs[int(self._run[at])]
        records = reader.read_blocks(run, int(self._row[at]), int(self._row[at]) + 1)
        start = int(records.starts[0])
        return records.data[start : start + size].tobytes() == bytes(self._log.read(phys, size))


def _check_below(log: CommitLog, end_phys: int) -> LogCheck:
    """The checksum of the last bytes below ``end_phys`` that are in one file."""
    file = log.file_at(end_phys - 1)
    begin_phys = max(end_phys - CHECK_BYTES_MAX, end_phys if file is None else file.begin_phys)
    data = log.read(begin_phys, end_phys - begin_phys)
    return LogCheck(begin_phys, begin_phys + len(data), fastcrc.crc32.iscsi(data))
