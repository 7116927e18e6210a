"""Builds commitlog records and logs byte by byte, valid by default."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAGIC_V1, MAGIC_V2, MAGIC_BLANK = 0xDAA320A7, 0xDAA320AB, 0xCBD43194


@dataclass(frozen=True)
class Message:
    """What goes into one record."""

    topic: bytes = b"topic"
    queue_id: int = 0
    queue_offset: int = 0
    body: bytes = b"body"
    properties: bytes = b""
    sys_flag: int = 0
    store_timestamp: int = 1_700_000_000_000
    with_record_crc: bool = False

    def with_(self, **changes: object) -> Message:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def properties(*pairs: tuple[bytes, bytes]) -> bytes:
    """A properties string."""
    return b"".join(name + b"\x01" + value + b"\x02" for name, value in pairs)


def encode(message: Message, phys: int) -> bytes:
    """The record of ``message`` at ``phys``."""
    long_topic = len(message.topic) > 127
    magic = MAGIC_V2 if long_topic else MAGIC_V1
    born = bytes(16 if message.sys_flag & 0x10 else 4) + struct.pack(">i", 1234)
    stored = bytes(16 if message.sys_flag & 0x20 else 4) + struct.pack(">i", 5678)
    text = message.properties
    tail = (
        struct.pack(">iqi", 0, 0, len(message.body))
        + message.body
        + struct.pack(">h" if long_topic else ">b", len(message.topic))
        + message.topic
        + struct.pack(">h", len(text) + (20 if message.with_record_crc else 0))
        + text
    )
    size = 48 + len(born) + 8 + len(stored) + len(tail) + (20 if message.with_record_crc else 0)
    head = struct.pack(
        ">iIIiiqqiq",
        size,
        magic,
        zlib.crc32(message.body) & 0x7FFFFFFF,
        message.queue_id,
        0,
        message.queue_offset,
        phys,
        message.sys_flag,
        message.store_timestamp - 1,
    )
    record = head + born + struct.pack(">q", message.store_timestamp) + stored + tail
    if message.with_record_crc:
        digits = f"{zlib.crc32(record) & 0x7FFFFFFF:010d}"[::-1].encode()
        record += b"__CRC32#\x01" + digits + b"\x02"
    assert len(record) == size
    return record


def build_log(messages: Sequence[Message], phys_begin: int = 0) -> bytes:
    """Records one after another."""
    parts: list[bytes] = []
    phys = phys_begin
    for message in messages:
        parts.append(encode(message, phys))
        phys += len(parts[-1])
    return b"".join(parts)


def blank(room: int) -> bytes:
    """The end-of-file marker with its padding."""
    return struct.pack(">iI", room, MAGIC_BLANK) + bytes(room - 8)
