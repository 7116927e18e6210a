"""Checks of records read from the broker's commitlog.

Files may be deleted, and a truncated log written again, while they are read: a record is valid only if it is the one
its index entry or consume queue names.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

from tiered.broker_store.commit_log import RECORD_MAGICS
from tiered.formats.record import MAGIC_V2, SYS_BORN_HOST_V6, SYS_STORE_HOST_V6

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
