"""Gathers what shows whether a log whose common bytes are gone continues an archive: queue offsets, times, store hosts.

The archive's known store hosts are archive-wide settings, which commits extend. The decision is in log_rule.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from tiered.broker_store.damage import record_size
from tiered.broker_store.store import BrokerStore
from tiered.catalog.state import CatalogState
from tiered.errors import AccessDeniedError, CorruptionError, UnreadableError
from tiered.formats.record import Record, decode_record, host_of
from tiered.model.tables import QUEUE_HIDDEN
from uploader.log_batch import LogBatch
from uploader.log_rule import ArchivedEnd, LogHead

STORE_HOSTS = "store_hosts"
"""Archive-wide setting: `address:port` of brokers whose records it has, at most HOSTS_MAX, the newest last."""
HOSTS_MAX = 16
HEAD_RECORDS_MAX = 2_000
_PREPARED = 0x4
"""In the system flag of prepared and rolled back transactions, whose queue offset is 0."""


def hosts_setting(batch: LogBatch) -> dict[str, list[str]]:
    """Settings in the commit of ``batch``: the store hosts of its first and last record."""
    columns, found = batch.columns, list[str]()
    for row in sorted({0, columns.rows - 1}) if columns.rows else ():
        begin = int(columns.position[row])
        host = host_of(batch.arena[begin : begin + int(columns.size[row])].tobytes())
        found += [host] if host not in found else []
    return {STORE_HOSTS: found} if found else {}


def with_known_hosts(settings: Mapping[str, Any], state: CatalogState) -> dict[str, Any]:
    """``settings`` of a commit after ``state``, with hosts only if some are new."""
    known, new = _hosts(state), list(settings.get(STORE_HOSTS, ()))
    rest = {name: value for name, value in settings.items() if name != STORE_HOSTS}
    added = [host for host in new if host not in known]
    return rest | {STORE_HOSTS: [*known, *added][-HOSTS_MAX:]} if added else rest


def archived_end(state: CatalogState) -> ArchivedEnd:
    """Where the archive ends at ``state``. A time in the future of its commit is not believed."""
    shown = [(key, row) for key, row in state.current_queues() if not row["flags"] & QUEUE_HIDDEN]
    newest_ms = max((int(row["max_store_timestamp"]) for _, row in shown), default=0)
    ends = {(key.topic, key.queue_id): int(row["end_queue_offset"]) for key, row in shown}
    return ArchivedEnd(ends, min(newest_ms, state.advanced_ms), frozenset(_hosts(state)))


def log_head(store: BrokerStore, archived: ArchivedEnd) -> LogHead:
    """The oldest records of the broker's log, and where its queues begin; of these only queues of ``archived``."""
    records = _first_records(store)
    if not records:
        return LogHead()
    first = records[0]
    return LogHead(_begins(store, archived, records), first.store_timestamp, first.store_host)


def _first_records(store: BrokerStore) -> list[Record]:
    log = store.commit_log
    phys, found = log.min_phys, list[Record]()
    while len(found) < HEAD_RECORDS_MAX and (size := record_size(log, phys)) is not None:
        found.append(decode_record(log.read(phys, size)))
        phys += size
    return found


def _begins(store: BrokerStore, archived: ArchivedEnd, records: list[Record]) -> dict[tuple[str, int], int]:
    """By the first records, else by consume queues if they are visible."""
    found: dict[tuple[str, int], int] = {}
    for record in records:
        if not record.sys_flag & _PREPARED:
            found.setdefault((record.topic, record.queue_id), record.queue_offset)
    index = store.consume_queues()
    if index is None:
        return found
    index.refresh()
    for queue in archived.ends.keys() - found.keys():
        with contextlib.suppress(UnreadableError, AccessDeniedError, CorruptionError):
            if index.max_offset(*queue) > 0:
                found[queue] = index.min_offset(*queue)
    return found


def _hosts(state: CatalogState) -> list[str]:
    found = state.settings.get(STORE_HOSTS, ())
    return [host for host in found if isinstance(host, str)] if isinstance(found, list | tuple) else []
