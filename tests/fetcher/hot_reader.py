"""Pulls from the broker's own files, as the broker itself would answer: the broker's side for tests of the read router.

Units are read in chunks, then the records of those that may match, then the filter is applied.

Checks of records read from the broker's commitlog.

Files may be deleted, and a truncated log written again, while they are read: a record is valid only if it is the one
its index entry or consume queue names.
"""

import struct
import zlib
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fetcher.policy.broker_files import BrokerFiles, end_of, list_until
from fetcher.policy.read_policy import HeldOffsets
from fetcher.rows.message import EMPTY_BATCH, MessageBatch, joined_batch
from fetcher.rows.pull import PullResult, PullStatus
from fetcher.rows.tag_filter import MessageFilter
from tiered.broker_store.commit_log import RECORD_MAGICS, CommitLog
from tiered.broker_store.store import BrokerStore
from tiered.consume_queue.index import ConsumeQueueIndex
from tiered.errors import UnavailableError
from tiered.formats.record import MAGIC_V2, SYS_BORN_HOST_V6, SYS_STORE_HOST_V6
from tiered.model.queue import LMQ_PREFIX
from tiered.model.tables import Table

HOLE_BYTES_MAX: Final = 4096
"""Records no further apart than this are read at once, with what is between them."""
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
        queue: HeldOffsets,
        filter: MessageFilter | None,
    ) -> None:
        self._log = store.commit_log
        self._queues = queues
        self._key = key
        self._queue = queue
        self._filter = filter
        self._parts: list[MessageBatch] = []

    def run(self, offset: int, count: int, max_bytes: int) -> PullResult:
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
        status = PullStatus.FOUND if self._parts else PullStatus.NO_MATCHED_MESSAGE
        batch = joined_batch(self._parts)
        return PullResult(
            status, position, self._queue.min_offset, self._queue.max_offset, (), len(batch), batch
        )

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
        """Messages of ``units`` that match; where to continue: ``end``, or the first unit that cannot be read."""
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
        return batch.select(np.fromiter((keep(record) for record in batch.records()), np.bool_, good)), end


class HotReader(BrokerFiles):
    """BrokerFiles with pulls."""

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        count: int,
        max_bytes: int,
        filter: MessageFilter | None = None,
        queue: HeldOffsets | None = None,
    ) -> PullResult:
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
            return _nothing(PullStatus.NO_MATCHED_LOGIC_QUEUE, offset, HeldOffsets(0, 0))
        if queue is None:
            queue = self._range(queues, topic, queue_id)
        status = status_outside(offset, queue)
        if status is not None:
            return _nothing(status, next_outside(offset, queue), queue)
        return HotPull(self._store, queues, (topic, queue_id), queue, filter).run(offset, count, max_bytes)


def status_outside(offset: int, queue: HeldOffsets) -> PullStatus | None:
    """The status of an offset outside ``queue``, None inside."""
    if queue.max_offset <= 0:
        return PullStatus.NO_MESSAGE_IN_QUEUE
    if offset < queue.min_offset:
        return PullStatus.OFFSET_TOO_SMALL
    if offset == queue.max_offset:
        return PullStatus.OFFSET_OVERFLOW_ONE
    return PullStatus.OFFSET_OVERFLOW_BADLY if offset > queue.max_offset else None


def next_outside(offset: int, queue: HeldOffsets) -> int:
    """Where to continue from an offset outside ``queue``."""
    if queue.max_offset <= 0:
        return offset
    return queue.min_offset if offset < queue.min_offset else queue.max_offset


def _nothing(status: PullStatus, next_offset: int, queue: HeldOffsets) -> PullResult:
    return PullResult(status, next_offset, queue.min_offset, queue.max_offset)


class LocalRecords(NamedTuple):
    """The leading records that are good: record i is ``data[starts[i] : starts[i] + sizes[i]]``."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    store_timestamp: NDArray[np.int64]


def read_records(log: CommitLog, units: Table, topic: str, queue_id: int) -> LocalRecords:
    """The records of ``units`` (UNIT_DTYPE), up to the first that is not there or not what it should be.

    Raises AccessDeniedError or UnavailableError naming a file.
    """
    data, starts = _read_spans(log, units["phys"].astype(np.int64), units["size"].astype(np.int64))
    lmq = topic.startswith(LMQ_PREFIX)
    expected = None if lmq else (queue_id, topic.encode("utf-8"))
    view, stored = data.data, []
    for start, phys, size, offset in zip(
        starts.tolist(),
        units["phys"].tolist(),
        units["size"].tolist(),
        units["queue_offset"].tolist(),
        strict=True,
    ):
        stored_ms = checked_timestamp(view[start : start + size], phys, expected, None if lmq else offset)
        if stored_ms is None:
            break
        stored.append(stored_ms)
    return LocalRecords(data, starts[: len(stored)], np.array(stored, np.int64))


def _read_spans(
    log: CommitLog, phys: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All records in one array and where each begins. What cannot be read is zeros, which are no record."""
    if not len(phys):
        return np.zeros(0, np.uint8), np.zeros(0, np.int64)
    ends = phys + sizes
    holes = phys[1:] - ends[:-1]
    first = np.flatnonzero(np.concatenate(([True], (holes < 0) | (holes > HOLE_BYTES_MAX))))
    last = np.append(first[1:], len(phys)) - 1
    lengths = ends[last] - phys[first]
    span_starts = np.cumsum(lengths) - lengths
    data = np.zeros(int(lengths.sum()), np.uint8)
    view = data.data
    for begin, start, length in zip(
        phys[first].tolist(), span_starts.tolist(), lengths.tolist(), strict=True
    ):
        _read_span(log, view[start : start + length], begin)
    span = np.repeat(np.arange(len(first)), last - first + 1)
    return data, span_starts[span] + phys - phys[first][span]


def _read_span(log: CommitLog, dest: memoryview, phys: int) -> None:
    filled = 0
    while filled < len(dest):
        got = log.read_into(dest[filled:], phys + filled)
        if got == 0:
            break
        filled += got


RECORD_BYTES_MIN: Final = 91
_HEAD = struct.Struct(">iIIiiqqi")
_TIME = struct.Struct(">q")
_LENGTH = struct.Struct(">i")
_CRC_NAME: Final = b"__CRC32#\x01"
_CRC_BYTES: Final = 20


def checked_timestamp(
    record: memoryview, phys: int, expected: tuple[int, bytes] | None, queue_offset: int | None = None
) -> int | None:
    """Store timestamp in ms of the record, or None if it is not the one stored at ``phys``.

    ``expected``: its queue id and topic, ``queue_offset``: its offset there; None for an LMQ, whose records are its
    parents'. A truncated log written again may have another message of the same queue and size at ``phys``.
    """
    try:
        return _checked_timestamp(record, phys, expected, queue_offset)
    except (struct.error, IndexError):
        return None


def _checked_timestamp(
    record: memoryview, phys: int, expected: tuple[int, bytes] | None, queue_offset: int | None
) -> int | None:
    size, magic, body_crc, queue_id, _, stored_offset, stored_phys, sys_flag = _HEAD.unpack_from(record)
    if queue_offset is not None and stored_offset != queue_offset:
        return None
    if size != len(record) or size < RECORD_BYTES_MIN or magic not in RECORD_MAGICS or stored_phys != phys:
        return None
    at = 48 + (20 if sys_flag & SYS_BORN_HOST_V6 else 8)
    (stored_ms,) = _TIME.unpack_from(record, at)
    at += 8 + (20 if sys_flag & SYS_STORE_HOST_V6 else 8) + 12
    body_bytes = _LENGTH.unpack_from(record, at)[0]
    body_at = at + 4
    topic_at = body_at + body_bytes
    if body_bytes < 0 or topic_at > size:
        return None
    if body_bytes and zlib.crc32(record[body_at:topic_at]) & 0x7FFFFFFF != body_crc:
        return None
    length_bytes = 2 if magic == MAGIC_V2 else 1
    topic_begin = topic_at + length_bytes
    topic_end = topic_begin + int.from_bytes(record[topic_at:topic_begin], "big", signed=True)
    if expected is not None and (queue_id != expected[0] or record[topic_begin:topic_end] != expected[1]):
        return None
    properties_bytes = int.from_bytes(record[topic_end : topic_end + 2], "big", signed=True)
    if topic_end <= topic_begin or properties_bytes < 0 or topic_end + 2 + properties_bytes != size:
        return None
    if properties_bytes >= _CRC_BYTES and not _record_crc_holds(record, size - _CRC_BYTES):
        return None
    return int(stored_ms)


def _record_crc_holds(record: memoryview, crc_at: int) -> bool:
    """True also for a record without ``__CRC32#`` as its last property."""
    tail = bytes(record[crc_at:])
    if not tail.startswith(_CRC_NAME):
        return True
    digits = tail[len(_CRC_NAME) : -1][::-1]  # least significant first
    return digits.isdigit() and int(digits) == zlib.crc32(record[:crc_at]) & 0x7FFFFFFF
