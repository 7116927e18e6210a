"""Splits a pull's body into records with their offsets, and encodes the offset fields of a POP reply.

Pure. Sources: org.apache.rocketmq.remoting.protocol.header.ExtraInfoUtil, MQClientAPIImpl.processPopResponse.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tiered.errors import CorruptionError, UsageError
from tiered.formats.record import (
    SYS_BORN_HOST_V6,
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
    SYS_STORE_HOST_V6,
    decode_record,
)

LMQ_PREFIX: Final = "%LMQ%"
_QUEUE_OFFSET_AT, _SYS_FLAG_AT, _BORN_HOST_AT = 20, 36, 48


@dataclass(frozen=True)
class Popped:
    """A record and its offset in the popped queue."""

    offset: int
    data: bytes


@dataclass(frozen=True)
class Handle:
    """A receipt: ``startOffset popTime invisible revive retry broker queue offset``."""

    popped_ms: int
    queue_id: int
    offset: int


def handle_of(text: str) -> Handle:
    """Parse a receipt. Raises UsageError if it is not one."""
    parts = text.split(" ")
    try:
        return Handle(int(parts[1]), int(parts[6]), int(parts[7]))
    except (IndexError, ValueError) as error:
        raise UsageError(f"extraInfo {text[:80]} is not a receipt") from error


def records(body: Sequence[bytes | bytearray | memoryview], topic: str) -> Iterator[Popped]:
    """The records of a pull of ``topic``. Raises CorruptionError, and UsageError for an inner batch."""
    data, at = b"".join(body), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size <= _BORN_HOST_AT or at + size > len(data):
            raise CorruptionError(f"{topic}: record size {size} is impossible")
        record = data[at : at + size]
        (offset,), (sys_flag,) = (
            struct.unpack_from(">q", record, _QUEUE_OFFSET_AT),
            struct.unpack_from(">i", record, _SYS_FLAG_AT),
        )
        if sys_flag & (SYS_INNER_BATCH | SYS_NEED_UNWRAP):
            raise UsageError(
                f"{topic} holds inner batches, which cannot be popped", hint="use a push consumer"
            )
        if topic.startswith(LMQ_PREFIX):
            offset = _lmq_offset(record, topic, offset)
        yield Popped(offset, record)
        at += size


def _lmq_offset(record: bytes, topic: str, otherwise: int) -> int:
    properties = decode_record(record).properties
    names = properties.get("INNER_MULTI_DISPATCH", "").split(",")
    offsets = properties.get("INNER_MULTI_QUEUE_OFFSET", "").split(",")
    found = dict(zip(names, offsets, strict=False)).get(topic)
    return int(found) if found is not None and found.isdecimal() else otherwise


def redelivered(data: bytes, times: int) -> bytes:
    """A record with ``times`` added to its reconsume count, as a redelivery from a retry topic has."""
    (sys_flag,) = struct.unpack_from(">i", data, _SYS_FLAG_AT)
    at = (
        _BORN_HOST_AT
        + (20 if sys_flag & SYS_BORN_HOST_V6 else 8)
        + 8
        + (20 if sys_flag & SYS_STORE_HOST_V6 else 8)
    )
    record = bytearray(data)
    (before,) = struct.unpack_from(">i", record, at)
    struct.pack_into(">i", record, at, before + times)
    return bytes(record)


def offset_fields(found: Mapping[int, Sequence[int]]) -> dict[str, str]:
    """``startOffsetInfo`` and ``msgOffsetInfo`` of a reply. ``found``: queue id -> offsets in the order of records."""
    return {
        "startOffsetInfo": ";".join(f"0 {queue_id} {min(offsets)}" for queue_id, offsets in found.items()),
        "msgOffsetInfo": ";".join(
            f"0 {queue_id} {','.join(map(str, offsets))}" for queue_id, offsets in found.items()
        ),
        "orderCountInfo": "",
    }
