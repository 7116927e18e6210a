"""One pull from the broker's own files: units in chunks, those that may match, their records, those that do match.

Owns what a pull reads and where it goes on. Does not own views of queues nor bounds (hot_reader.py).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fetcher.policy.local_records import read_records
from fetcher.policy.read_policy import OffsetRange
from fetcher.rows.batch import EMPTY_BATCH, GetResult, GetStatus, MessageBatch, joined_batch
from fetcher.rows.tag_filter import MessageFilter
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.consume_queue_index import ConsumeQueueIndex
from tiered.broker_store.store import BrokerStore
from tiered.errors import UnavailableError
from tiered.model.tables import Table

SCAN_UNITS_MAX: Final = 4096
"""Units looked at in one pull, matching or not."""
FILTER_CHUNK_UNITS: Final = 256


class RecordGoneError(UnavailableError):
    """The consume queue speaks of a record that the commitlog does not have, or no longer."""


class HotPull:
    """One pull of ``key`` = (topic, queue id), whose range was just looked up."""

    def __init__(
        self,
        store: BrokerStore,
        queues: ConsumeQueueIndex,
        key: tuple[str, int],
        queue: OffsetRange,
        filter: MessageFilter | None,
    ) -> None:
        self._log = store.commit_log
        self._queues = queues
        self._key = key
        self._queue = queue
        self._filter = filter
        self._parts: list[MessageBatch] = []

    def run(self, offset: int, count: int, max_bytes: int) -> GetResult:
        """See HotReader.get. Raises RecordGoneError when there is nothing to believe at ``offset``."""
        position, scanned = offset, 0
        has_room = True  # for one record, whatever its size
        while count > 0 and has_room and scanned < SCAN_UNITS_MAX and position < self._queue.max_offset:
            units = self._units(position, count if self._filter is None else FILTER_CHUNK_UNITS)
            if not len(units) or int(units["queue_offset"][0]) > position:
                break  # cut back, or a hole
            scanned += len(units)
            wanted, end = self._fitting(units, count, max_bytes)
            batch, end = self._read(wanted, end)
            if len(batch):
                self._parts.append(batch)
                count -= int(batch.inner_num.sum())
                max_bytes -= batch.record_bytes
                has_room = max_bytes > 0
            if end <= position:
                break
            position = end
        if position <= offset:
            raise RecordGoneError(
                f"{self._key[0]} queue {self._key[1]}: no record at offset {offset} of the broker"
            )
        status = GetStatus.FOUND if self._parts else GetStatus.NO_MATCHED_MESSAGE
        batch = joined_batch(self._parts)
        return GetResult(status, batch, position, self._queue.min_offset, self._queue.max_offset)

    def _units(self, position: int, count: int) -> Table:
        """The broker writes a unit at its queue's end while we read it: what differs at a second look comes later."""
        units = self._queues.units(*self._key, position, min(count, SCAN_UNITS_MAX))
        if len(units):
            list_until(self._log, int(units["phys"][-1]))
        if len(units) and end_of(units, len(units) - 1) >= self._queue.max_offset:
            again = self._queues.units(*self._key, int(units["queue_offset"][-1]), 1)
            if not np.array_equal(again, units[-1:]):
                units = units[:-1]
        return units

    def _fitting(self, units: Table, count: int, max_bytes: int) -> tuple[Table, int]:
        """The units that may match, as many as are wanted and fit, and the offset after the last one looked at."""
        mask = self._filter.tags_mask(units["tags_code"]) if self._filter is not None else None
        chosen = np.arange(len(units)) if mask is None else np.flatnonzero(mask)
        messages = np.cumsum(units["inner_num"][chosen].astype(np.int64))
        bytes_ = np.cumsum(units["size"][chosen].astype(np.int64))
        fit = int(min(np.searchsorted(messages, count, "right"), np.searchsorted(bytes_, max_bytes, "right")))
        if fit == 0 and not self._parts:
            fit = 1
        if fit < len(chosen):
            return units[chosen[:fit]], int(units["queue_offset"][chosen[fit]])
        return units[chosen], end_of(units, len(units) - 1)

    def _read(self, units: Table, end: int) -> tuple[MessageBatch, int]:
        """Messages of ``units`` that match; where to go on: ``end``, or the first unit that cannot be read."""
        if not len(units):
            return EMPTY_BATCH, end
        records = read_records(self._log, units, *self._key)
        good = len(records.starts)
        if good < len(units):
            units, end = units[:good], int(units["queue_offset"][good])
        batch = MessageBatch(
            [records.data],
            np.zeros(good, np.int32),
            records.starts,
            units["size"].astype(np.int32),
            units["queue_offset"].astype(np.int64),
            units["inner_num"].astype(np.int32),
            units["phys"].astype(np.int64),
            units["tags_code"].astype(np.int64),
            records.store_timestamp,
        )
        if self._filter is None:
            return batch, end
        keep = self._filter.keep
        return batch.taken(np.fromiter((keep(record) for record in batch.records()), np.bool_, good)), end


def list_until(log: CommitLog, phys: int) -> None:
    """The broker goes on to a new file before anybody looks for one."""
    if phys >= log.max_file_end:
        log.refresh()


def end_of(units: Table, row: int) -> int:
    """The offset after the messages of unit ``row``."""
    return int(units["queue_offset"][row]) + int(units["inner_num"][row])
