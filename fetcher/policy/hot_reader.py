"""Pulls from the broker's own files: consume queue, then commitlog, as the broker itself would answer.

What is read is validated (local_records.py) and leaves the page cache as it was. Nothing is asked of the broker, and
nothing of its is locked. A RocksDB of a live broker shows no consume queue: then there is no hot reading.

Owns statuses and next offsets of local reads (DefaultMessageStore.getMessage), and how fresh its view is. Does not
own the choice between here and the archive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from fetcher.policy.hot_pull import HotPull, end_of, list_until
from fetcher.policy.page_residency import ByteRange, PageResidency
from fetcher.policy.read_policy import BrokerSide, LocalView, OffsetRange, Residency
from fetcher.rows.batch import EMPTY_BATCH, GetResult, GetStatus
from fetcher.rows.tag_filter import MessageFilter
from tiered.broker_store.commit_log import LogFile
from tiered.broker_store.consume_queue_index import ConsumeQueueIndex, empty_units
from tiered.broker_store.store import BrokerStore
from tiered.errors import AccessDeniedError, NotFoundError, TieredError, UnavailableError
from tiered.model.tables import Table

logger = logging.getLogger(__name__)

REFRESH_SHARE_MAX: Final = 0.05
"""Looking for new files takes at most this share of the time, however many queues there are."""


class HotReader:
    """Reads one broker's store. Thread-safe. Blocks for as long as the disk takes."""

    def __init__(
        self,
        store: BrokerStore,
        *,
        refresh_s: float = 1.0,
        clock_s: Callable[[], float] = time.monotonic,
        residency: PageResidency | None = None,
    ) -> None:
        """``refresh_s``: how often directories are looked at again. The store is this reader's own from now on."""
        self._store = store
        self._refresh_s = refresh_s
        self._clock_s = clock_s
        self._residency = residency or PageResidency()
        self._lock = threading.Lock()
        self._fresh_until_s = clock_s() + refresh_s
        self._minimums: tuple[tuple[LogFile, ...], dict[tuple[str, int], int]] = (), {}
        self._complained: set[str] = set()

    def look(self, topic: str, queue_id: int, offset: int) -> LocalView:
        """What the broker's files have of a queue. Never raises for a broker that cannot be read: that is a side."""
        try:
            queues = self._queues()
            if queues is None:
                return self._hidden()
            log = self._store.commit_log
            if not queues.contains(topic, queue_id):
                return LocalView(BrokerSide.READABLE, oldest_phys=log.broker_min_phys)
            queue = self._range(queues, topic, queue_id)
            unit = queues.units(topic, queue_id, offset, 1) if offset < queue.max_offset else empty_units()
            phys = int(unit["phys"][0]) if _holds(unit, offset) else -1
            listed = log.files
            list_until(log, phys)
            if log.files is not listed:
                queue = self._range(queues, topic, queue_id)
            is_record = phys >= 0 and log.file_at(phys) is not None
            last = queues.last_unit(topic, queue_id) if not is_record else empty_units()
            last_phys = int(last["phys"][0]) if len(last) else phys
            return LocalView(BrokerSide.READABLE, queue, is_record, phys, log.broker_min_phys, last_phys)
        except (AccessDeniedError, UnavailableError, NotFoundError) as error:
            self._complain_once(error)
            return self._hidden()

    def _hidden(self) -> LocalView:
        """Queues that cannot be seen; where the log begins may be all the same, 0 else."""
        try:
            return LocalView(BrokerSide.UNREADABLE, oldest_phys=self._store.commit_log.broker_min_phys)
        except TieredError:
            return LocalView(BrokerSide.UNREADABLE)

    def oldest_file(self) -> LogFile | None:
        """The broker's oldest commitlog file, as listed within ``refresh_s``."""
        try:
            self._queues()
        except (AccessDeniedError, UnavailableError, NotFoundError) as error:
            self._complain_once(error)
        return next((file for file in self._store.commit_log.files if not file.is_pinned), None)

    def expire(self) -> None:
        """Whoever looks next lists the directories anew."""
        with self._lock:
            self._fresh_until_s = self._clock_s()

    def offset_from(self, topic: str, queue_id: int, phys: int) -> int:
        """Offset of the queue's first record at ``phys`` or behind; its end when there is none, 0 without a queue.

        Costs a search. Raises as ``get``.
        """
        queues = self._queues()
        if queues is None or not queues.contains(topic, queue_id):
            return 0
        queue = self._range(queues, topic, queue_id)
        low, high = queue.min_offset, queue.max_offset
        while low < high:
            middle = (low + high) // 2
            unit = queues.units(topic, queue_id, middle, 1)
            if not len(unit) or int(unit["phys"][0]) >= phys:
                high = middle
            else:
                low = max(middle + 1, end_of(unit, 0))
        return low

    def residency(self, topic: str, queue_id: int, offset: int, *, count: int, max_bytes: int) -> Residency:
        """Whether a pull of ``count`` messages from ``offset`` would find all its bytes in the page cache.

        Raises NotFoundError when a file goes meanwhile, or what reading the consume queue raises.
        """
        queues = self._queues()
        units = queues.units(topic, queue_id, offset, count) if queues is not None else empty_units()
        if not len(units):
            return Residency.COLD
        units = units[: max(1, int(np.searchsorted(np.cumsum(units["size"]), max_bytes, side="right")))]
        ranges: dict[LogFile, list[ByteRange]] = {}
        for phys, size in zip(units["phys"].tolist(), units["size"].tolist(), strict=True):
            file = self._store.commit_log.file_at(phys)
            if file is None:
                return Residency.COLD
            begin = phys - file.begin_phys
            ranges.setdefault(file, []).append((begin, min(begin + size, file.size_bytes)))
        answers = {self._residency.of(file.path, inside) for file, inside in ranges.items()}
        for answer in (Residency.COLD, Residency.UNKNOWN):
            if answer in answers:
                return answer
        return Residency.RESIDENT

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        count: int,
        max_bytes: int,
        filter: MessageFilter | None = None,
        queue: OffsetRange | None = None,
    ) -> GetResult:
        """Up to ``count`` messages (those of an inner batch count each) and ``max_bytes``, at least one record.

        ``queue``: its range as ``look`` has just found it; None: it is looked for.

        Raises RecordGoneError when the record at ``offset`` cannot be believed, UnavailableError when consume queues
        cannot be seen, or what reading raises.
        """
        queues = self._queues()
        if queues is None:
            raise UnavailableError(
                f"{self._store.path}: a running broker does not show its consume queues in RocksDB",
                hint="ask the broker itself, or wait until the archive has the messages",
            )
        if not queues.contains(topic, queue_id):
            return _nothing(GetStatus.NO_MATCHED_LOGIC_QUEUE, offset, OffsetRange(0, 0))
        if queue is None:
            queue = self._range(queues, topic, queue_id)
        status = status_outside(offset, queue)
        if status is not None:
            return _nothing(status, next_outside(offset, queue), queue)
        return HotPull(self._store, queues, (topic, queue_id), queue, filter).run(offset, count, max_bytes)

    def close(self) -> None:
        """Release the store."""
        self._store.close()

    def _queues(self) -> ConsumeQueueIndex | None:
        queues = self._store.consume_queues()
        with self._lock:
            started_s = self._clock_s()
            if started_s >= self._fresh_until_s:
                self._store.commit_log.refresh()
                if queues is not None:
                    queues.refresh()
                self._minimums = (), {}
                done_s = self._clock_s()
                self._fresh_until_s = done_s + max(self._refresh_s, (done_s - started_s) / REFRESH_SHARE_MAX)
        return queues

    def _range(self, queues: ConsumeQueueIndex, topic: str, queue_id: int) -> OffsetRange:
        """The minimum moves only when files go, so it is searched for once between two looks at them."""
        maximum = queues.max_offset(topic, queue_id)
        files, minimums = self._minimums
        listed = self._store.commit_log.files
        if files is not listed:  # also a read that finds a file gone lists them
            minimums = {}
            self._minimums = listed, minimums
        minimum = minimums.get((topic, queue_id))
        if minimum is None:
            minimum = queues.min_offset(topic, queue_id)
            if minimum < maximum:
                minimums[topic, queue_id] = minimum
        return OffsetRange(min(minimum, maximum), maximum)

    def _complain_once(self, error: TieredError) -> None:
        if error.message not in self._complained and len(self._complained) < 100:
            self._complained.add(error.message)
            logger.warning("the broker's files cannot be read, pulls go to the archive: %s", error)


def status_outside(offset: int, queue: OffsetRange) -> GetStatus | None:
    """The status of an offset outside ``queue``, None inside."""
    if queue.max_offset <= 0:
        return GetStatus.NO_MESSAGE_IN_QUEUE
    if offset < queue.min_offset:
        return GetStatus.OFFSET_TOO_SMALL
    if offset == queue.max_offset:
        return GetStatus.OFFSET_OVERFLOW_ONE
    return GetStatus.OFFSET_OVERFLOW_BADLY if offset > queue.max_offset else None


def next_outside(offset: int, queue: OffsetRange) -> int:
    """Where to go on from an offset outside ``queue``."""
    if queue.max_offset <= 0:
        return offset
    return queue.min_offset if offset < queue.min_offset else queue.max_offset


def _holds(unit: Table, offset: int) -> bool:
    return bool(len(unit)) and int(unit["queue_offset"][0]) <= offset < end_of(unit, 0)


def _nothing(status: GetStatus, next_offset: int, queue: OffsetRange) -> GetResult:
    return GetResult(status, EMPTY_BATCH, next_offset, queue.min_offset, queue.max_offset)
