"""Encodes a retry message or dead letter as a broker does, as a commitlog record. Pure.

Queue offset and store time are set on delivery (``delivered``). Sources:
AbstractSendMessageProcessor.consumerSendMsgBack, ScheduleMessageService.messageTimeup, MessageExtEncoder.
"""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass
from typing import Final

from tiered.errors import UsageError
from tiered.formats.record import MAGIC_V1, MAGIC_V2, SYS_BORN_HOST_V6, SYS_STORE_HOST_V6, Record

RETRY_PREFIX: Final = "%RETRY%"
DEAD_PREFIX: Final = "%DLQ%"
PHYS_BASE: Final = 1 << 62
"""Physical offsets of messages written here begin above every commitlog, so that repeated retries find them."""

_DELAYS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""A broker's default messageDelayLevel; levels count from 1."""
_FIRST_LEVEL = 3
_HEAD = struct.Struct(">iIIiiqqiq")
_OFFSET_AT, _PHYS_AT = 20, 28
_PROPERTIES_BYTES_MAX = 32_767
_V1_TOPIC_BYTES_MAX = 127


@dataclass(frozen=True)
class EncodedRetry:
    """A record without its place. ``delay_ms`` is 0 for dead letters."""

    topic: str
    delay_ms: int
    data: bytes


def is_dead(source: Record, delay_level: int, times_max: int) -> bool:
    """Whether it becomes a dead letter."""
    return source.reconsume_times >= times_max or delay_level < 0


def delay_ms_of(level: int) -> int:
    """Delay of a level; higher levels mean the last."""
    return _DELAYS_S[min(max(level, 1), len(_DELAYS_S)) - 1] * 1000


def encode_retry(
    source: Record, group: str, *, delay_level: int, times_max: int, address: str | None = None
) -> EncodedRetry:
    """The retry message of ``source``. ``address``: ``ip:port`` of the server, for ids. Raises UsageError if too
    large."""
    dead = is_dead(source, delay_level, times_max)
    topic = (DEAD_PREFIX if dead else RETRY_PREFIX) + group
    properties = dict(source.properties)
    properties.setdefault("RETRY_TOPIC", source.topic)
    properties["WAIT"] = "false"
    if not properties.get("ORIGIN_MESSAGE_ID"):
        properties["ORIGIN_MESSAGE_ID"] = source.offset_msg_id
    for name in ("DELAY", "TIMER_DELIVER_MS", "TIMER_DELAY_SEC"):
        properties.pop(name, None)
    delay_ms = 0
    if dead:
        properties["DELAY"] = "0"
    else:
        level = delay_level if delay_level > 0 else _FIRST_LEVEL + source.reconsume_times
        delay_ms = delay_ms_of(level)
        properties |= {"REAL_TOPIC": topic, "REAL_QID": "0"}
    return EncodedRetry(topic, delay_ms, _encode(source, topic, properties, _host(address)))


def _host(address: str | None) -> bytes | None:
    """As stored in a record; None for a host name."""
    host, _, port = (address or "").rpartition(":")
    try:
        return ipaddress.ip_address(host.strip("[]")).packed + struct.pack(">i", int(port))
    except ValueError:
        return None


def _encode(source: Record, topic: str, properties: dict[str, str], host: bytes | None) -> bytes:
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    encoded = text.encode("utf-8", "replace")
    if len(encoded) > _PROPERTIES_BYTES_MAX:
        raise UsageError(f"properties of {len(encoded)} bytes are too large for a retry message")
    born_end = _HEAD.size + (20 if source.sys_flag & SYS_BORN_HOST_V6 else 8)
    born_host = source.data[_HEAD.size : born_end]
    is_v6 = bool(source.sys_flag & SYS_STORE_HOST_V6)
    store_host = source.data[born_end + 8 : born_end + 8 + (20 if is_v6 else 8)]
    sys_flag = source.sys_flag
    if host is not None:
        store_host = host
        sys_flag = sys_flag & ~SYS_STORE_HOST_V6 | (SYS_STORE_HOST_V6 if len(host) == 20 else 0)
    return encode_record(
        topic, encoded, source.stored_body, (born_host, store_host), flag=source.flag, sys_flag=sys_flag,
        born_ms=source.born_timestamp, body_crc=source.body_crc, times=source.reconsume_times + 1,
    )  # fmt: skip


def encode_record(
    topic: str,
    properties: bytes,
    body: bytes,
    hosts: tuple[bytes | memoryview, bytes | memoryview],
    *,
    flag: int,
    sys_flag: int,
    born_ms: int,
    body_crc: int,
    times: int = 0,
) -> bytes:
    """A record without its place, as a broker stores it. ``hosts``: born and store host; ``times``: reconsumed."""
    name = topic.encode()
    magic = MAGIC_V1 if len(name) <= _V1_TOPIC_BYTES_MAX else MAGIC_V2
    tail = b"".join((
        hosts[0], bytes(8), hosts[1], struct.pack(">iqi", times, 0, len(body)), body,
        struct.pack(">b" if magic == MAGIC_V1 else ">h", len(name)), name,
        struct.pack(">h", len(properties)), properties,
    ))  # fmt: skip
    size = _HEAD.size + len(tail)
    return _HEAD.pack(size, magic, body_crc, 0, flag, 0, PHYS_BASE, sys_flag, born_ms) + tail


def delivered(data: bytes, *, number: int, queue_offset: int, stored_ms: int) -> bytes:
    """A record with its offset and store time; ``number`` counts all retry messages."""
    record = bytearray(data)
    struct.pack_into(">qq", record, _OFFSET_AT, queue_offset, PHYS_BASE + number)
    (sys_flag,) = struct.unpack_from(">i", record, _PHYS_AT + 8)
    struct.pack_into(">q", record, _HEAD.size + (20 if sys_flag & SYS_BORN_HOST_V6 else 8), stored_ms)
    return bytes(record)
