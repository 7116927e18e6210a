"""Fillers: records of a system topic in place of log bytes that a store does not have. Pure.

A broker reads them over, and dispatches them to no consume queue and no index, because they are rolled back. Source:
org.apache.rocketmq.store.CommitLog.checkMessageAndReturnSize.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from tiered.broker_store.commit_log import BLANK_MAGIC
from tiered.formats.record import MAGIC_V1
from tiered.kernels.record_checks import END_OF_FILE_BYTES, RECORD_BYTES_MIN, RESERVED_CRC_BYTES

FILLER_TOPIC: Final = "rmq_sys_filler"
FILLER_BYTES_MAX: Final = 1 << 20
"""The broker allocates as much to read one."""
FIRST_BYTES: Final = 128
"""The filler of a file without records: a file begins with a record."""
_ROLLED_BACK = 0xC
_HEAD = struct.Struct(">iIIiiqqiq8sq8siqi")
_HOST = bytes((127, 0, 0, 1)) + (10911).to_bytes(4, "big")
_ZEROS = bytes(FILLER_BYTES_MAX)
_BLANK = struct.Struct(">iI")


class Patch(NamedTuple):
    """``data`` at physical offset ``phys``; what is between patches is zeros."""

    phys: int
    data: bytes


def filler_bytes_min(*, has_crc: bool) -> int:
    """Size of the smallest filler."""
    return RECORD_BYTES_MIN + len(FILLER_TOPIC) + (RESERVED_CRC_BYTES if has_crc else 0)


def filled(begin_phys: int, end_phys: int, stored_ms: int, *, has_crc: bool) -> Iterator[Patch]:
    """Fillers that cover [begin_phys, end_phys) of one file. Raises ValueError for fewer bytes than a filler has."""
    least = filler_bytes_min(has_crc=has_crc)
    while begin_phys < end_phys:
        left = end_phys - begin_phys
        size = min(left, FILLER_BYTES_MAX)
        if 0 < left - size < least:
            size -= least
        if size < least:
            raise ValueError(f"{size} bytes at {begin_phys} are fewer than a filler has")
        yield from _filler(begin_phys, size, stored_ms, has_crc=has_crc)
        begin_phys += size


def ended(
    begin_phys: int, end_phys: int, stored_ms: int, *, is_empty: bool, has_crc: bool
) -> Iterator[Patch]:
    """The end of a file from ``begin_phys`` on. ``is_empty``: the file begins there."""
    if is_empty:
        yield from _filler(begin_phys, FIRST_BYTES, stored_ms, has_crc=has_crc)
        begin_phys += FIRST_BYTES
    if end_phys - begin_phys < END_OF_FILE_BYTES:
        raise ValueError(f"{end_phys - begin_phys} bytes at {begin_phys} are too few for the end of a file")
    yield Patch(begin_phys, _BLANK.pack(end_phys - begin_phys, BLANK_MAGIC))


def _filler(phys: int, size: int, stored_ms: int, *, has_crc: bool) -> Iterator[Patch]:
    topic = FILLER_TOPIC.encode()
    body = size - filler_bytes_min(has_crc=has_crc)
    tail = bytes((len(topic),)) + topic + (RESERVED_CRC_BYTES if has_crc else 0).to_bytes(2, "big")
    head = _HEAD.pack(
        size,
        MAGIC_V1,
        _zeros_crc(body),
        0,
        0,
        0,
        phys,
        _ROLLED_BACK,
        stored_ms,
        _HOST,
        stored_ms,
        _HOST,
        0,
        0,
        body,
    )
    if has_crc:
        tail += crc_property(zlib.crc32(tail, zlib.crc32(memoryview(_ZEROS)[:body], zlib.crc32(head))))
    # The head last: a filler that has its head is whole.
    yield Patch(phys + size - len(tail), tail)
    yield Patch(phys, head)


@lru_cache(64)
def _zeros_crc(count: int) -> int:
    return zlib.crc32(memoryview(_ZEROS)[:count]) & 0x7FFFFFFF if count else 0


def crc_property(crc: int) -> bytes:
    """The property ``__CRC32#`` that ends a record, of the checksum of all bytes before it."""
    return b"__CRC32#\x01" + f"{crc & 0x7FFFFFFF:010d}"[::-1].encode() + b"\x02"
