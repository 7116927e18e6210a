"""Inner batches as messages: each becomes a record of its own, with its body, properties and queue offset.

As org.apache.rocketmq.common.message.MessageDecoder.decodeMessages: hosts, times and physical offset are the batch's.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np

from rocketmq_tiered.message_table.scan.row_chunk import RowChunk
from tiered.errors import CorruptionError
from tiered.formats.record import (
    SYS_COMPRESSED,
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
    InnerMessage,
    decode_record,
    inner_messages,
    java_hash,
)
from tiered.kernels.record_fields import Number, record_fields

_HEAD = struct.Struct(">IIIiiqqiq")
"""Size, magic, body CRC, queue id, flag, queue offset, physical offset, sysFlag, born time."""
_BATCH = SYS_INNER_BATCH | SYS_NEED_UNWRAP
_COMPRESSION_TYPE = 0x700


def exploded(chunk: RowChunk) -> RowChunk:
    """``chunk`` with a row for each message of its inner batches. A batch that does not decode stays one row."""
    fields = record_fields(chunk.data, chunk.starts, chunk.size, properties=False)
    is_batch = (fields[Number.VALID] == 1) & ((fields[Number.SYS_FLAG] & _BATCH) != 0)
    found: dict[int, list[tuple[int, InnerMessage, bytes]]] = {}
    for row in np.flatnonzero(is_batch).tolist():
        begin = int(chunk.starts[row])
        stored = chunk.data[begin : begin + int(chunk.size[row])].tobytes()
        try:
            items = list(inner_messages(decode_record(stored)))
        except CorruptionError:
            continue
        last = int(chunk.inner_num[row]) - 1
        body = int(fields[Number.BODY_AT][row]) - begin, int(fields[Number.BODY_BYTES][row])
        topic_end = int(fields[Number.TOPIC_AT][row]) - begin + int(fields[Number.TOPIC_BYTES][row])
        found[row] = [
            (offset, item, _record(stored, body, topic_end, offset, item))
            for number, item in enumerate(items)
            for offset in [int(chunk.queue_offset[row]) + min(number, last)]
        ]
    return _with_items(chunk, found) if found else chunk


def _record(stored: bytes, body: tuple[int, int], topic_end: int, offset: int, item: InnerMessage) -> bytes:
    """The message as a stored record."""
    _, magic, _, queue_id, _, _, phys, sys_flag, born = _HEAD.unpack_from(stored)
    names = "".join(f"{name}\x01{value}\x02" for name, value in item.properties.items()).encode()
    rest = b"".join((
        stored[_HEAD.size : body[0] - 4], struct.pack(">i", len(item.body)), item.body,
        stored[sum(body) : topic_end], struct.pack(">H", len(names)), names,
    ))  # fmt: skip
    sys_flag &= ~(_BATCH | SYS_COMPRESSED | _COMPRESSION_TYPE)
    crc = zlib.crc32(item.body) & 0x7FFFFFFF
    size = _HEAD.size + len(rest)
    return _HEAD.pack(size, magic, crc, queue_id, item.flag, offset, phys, sys_flag, born) + rest


def _with_items(chunk: RowChunk, found: dict[int, list[tuple[int, InnerMessage, bytes]]]) -> RowChunk:
    counts = np.ones(len(chunk), np.int64)
    counts[list(found)] = [len(items) for items in found.values()]
    first = np.cumsum(counts) - counts
    wide = chunk.taken(np.repeat(np.arange(len(chunk)), counts))
    columns: dict[str, Any] = {
        name: np.array(getattr(wide, name))
        for name in ("queue_offset", "inner_num", "size", "tags_code", "starts")
    }
    parts, end = [chunk.data], len(chunk.data)
    for row, items in found.items():
        for at, (offset, item, record) in enumerate(items, int(first[row])):
            tags = item.properties.get("TAGS")
            columns["queue_offset"][at], columns["inner_num"][at] = offset, 1
            columns["size"][at], columns["starts"][at] = len(record), end
            columns["tags_code"][at] = java_hash(tags) if tags else 0
            parts.append(np.frombuffer(record, np.uint8))
            end += len(record)
    return replace(wide, data=np.concatenate(parts), **columns)
