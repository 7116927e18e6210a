"""Records at known places of the broker's commitlog: read together, and believed only after a look at each.

A file may be deleted, a log cut back and written anew while it is read: a record counts only if it is the one the
consume queue speaks of. Owns which bytes are read at once, and the checks. Does not own consume queues.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.broker_store.commit_log import RECORD_MAGICS, CommitLog
from tiered.formats.record import MAGIC_V2, SYS_BORN_HOST_V6, SYS_STORE_HOST_V6
from tiered.model.queue import LMQ_PREFIX
from tiered.model.tables import Table

HOLE_BYTES_MAX: Final = 4096
"""Records no further apart than this are read at once, with what is between them."""
RECORD_BYTES_MIN: Final = 91
_HEAD = struct.Struct(">iIIiiqqi")
_TIME = struct.Struct(">q")
_LENGTH = struct.Struct(">i")
_CRC_NAME: Final = b"__CRC32#\x01"
_CRC_BYTES: Final = 20


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


def checked_timestamp(
    record: memoryview, phys: int, expected: tuple[int, bytes] | None, queue_offset: int | None = None
) -> int | None:
    """Store timestamp in ms of the record, or None when it is not the one stored at ``phys``.

    ``expected``: queue id and topic it must have, ``queue_offset``: its place there, if known; None for a light queue,
    whose records are its parents'. A log that was cut back and written anew may have another message of this very queue
    and size at ``phys``.
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
