"""Plain-Python equivalents of the scan kernels, slow and obvious, which the kernels' tests compare with."""

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiered.formats.record import decode_text, java_hash, parse_properties
from tiered.kernels.record_columns import (
    DOUBT_PLAIN,
    DOUBT_SLASH,
    DOUBT_TOPIC,
    FLAG_BATCH,
    FLAG_LMQ,
    InvalidReason,
    ScanStop,
    StopReason,
)

_V1, _V2, _BLANK = 0xDAA320A7, 0xDAA320AB, 0xCBD43194


class LmqEntry(NamedTuple):
    """An LMQ a record is dispatched to, and which brokers do not (DOUBT bits)."""

    queue: tuple[str, int]
    queue_offset: int
    doubt: int = 0


@dataclass(frozen=True)
class Row:
    """One row of the scan; its key hashes are those of ``key_texts``."""

    position: int
    phys: int
    size: int
    queue: tuple[str, int]
    queue_offset: int
    store_timestamp: int
    tags_code: int
    inner_num: int
    flags: int
    key_texts: tuple[bytes, ...]
    lmq_entries: tuple[LmqEntry, ...] = ()


@dataclass
class Scan:
    """The result of ``scan_log``."""

    rows: list[Row] = field(default_factory=list)
    skipped: int = 0
    stop: ScanStop = field(default_factory=lambda: ScanStop(StopReason.INPUT_END, 0))


@dataclass(frozen=True)
class Parsed:
    """The fields of a record that the scan reads."""

    size: int
    queue_id: int
    queue_offset: int
    sys_flag: int
    store_timestamp: int
    topic: bytes
    properties: bytes


def scan_log(
    data: bytes,
    phys_begin: int,
    file_end_phys: int,
    *,
    not_admitted: frozenset[tuple[str, int]] = frozenset(),
    delay_levels_ms: Sequence[int] = (),
) -> Scan:
    """The result of ``tiered.kernels.scan.scan_log`` for all of ``data``."""
    scan, position = Scan(), 0
    while True:
        checked = check_record(data[position:], phys_begin + position, file_end_phys)
        if isinstance(checked, Parsed) and not checked.sys_flag & 0x4:
            try:
                row = _row(checked, position, phys_begin + position, not_admitted, delay_levels_ms)
            except UnicodeDecodeError:
                checked = (StopReason.INVALID, InvalidReason.TOPIC)
            else:
                if row.queue in not_admitted and not row.lmq_entries:
                    scan.skipped += 1
                else:
                    scan.rows.append(row)
        elif isinstance(checked, Parsed):
            scan.skipped += 1
        if not isinstance(checked, Parsed):
            scan.stop = ScanStop(checked[0], position, checked[1])
            return scan
        position += checked.size


def check_record(data: bytes, phys: int, file_end_phys: int) -> Parsed | tuple[StopReason, InvalidReason]:
    """The record at the begin of ``data``, or why there is none."""
    if len(data) < 8:
        return StopReason.INPUT_END, InvalidReason.NONE
    size, magic = struct.unpack_from(">iI", data)
    room = file_end_phys - phys
    if magic == _BLANK:
        return (StopReason.FILE_END, InvalidReason.NONE) if size == room else _invalid(InvalidReason.SIZE)
    if magic not in (_V1, _V2):
        return (
            (StopReason.NO_RECORD, InvalidReason.NONE)
            if magic == size == 0
            else _invalid(InvalidReason.MAGIC)
        )
    if size < 91 or size + 8 > room:
        return _invalid(InvalidReason.SIZE)
    if len(data) >= 36 and struct.unpack_from(">q", data, 28)[0] != phys:
        return _invalid(InvalidReason.PHYSICAL_OFFSET)
    if len(data) >= 28 and not 0 <= struct.unpack_from(">q", data, 20)[0] * 20 < 1 << 63:
        return _invalid(InvalidReason.QUEUE_OFFSET)
    if size > len(data):
        return StopReason.INPUT_END, InvalidReason.NONE
    return _parse(data[:size], magic == _V2)


def _invalid(reason: InvalidReason) -> tuple[StopReason, InvalidReason]:
    return StopReason.INVALID, reason


def _parse(record: bytes, long_topic: bool) -> Parsed | tuple[StopReason, InvalidReason]:
    (sys_flag,) = struct.unpack_from(">i", record, 36)
    at = 48 + (20 if sys_flag & 0x10 else 8)
    (store_timestamp,) = struct.unpack_from(">q", record, at)
    at += 8 + (20 if sys_flag & 0x20 else 8) + 12
    if at + 4 + 1 + 2 > len(record):
        return _invalid(InvalidReason.LENGTH)
    (length,) = struct.unpack_from(">i", record, at)
    body = record[at + 4 : at + 4 + max(0, length)]
    at += 4 + length
    if length < 0 or at + 1 + 2 > len(record):
        return _invalid(InvalidReason.LENGTH)
    (length,) = struct.unpack_from(">h" if long_topic else ">b", record, at)
    at += 2 if long_topic else 1
    if length <= 0:
        return _invalid(InvalidReason.TOPIC)
    topic = record[at : at + length]
    at += length
    if at + 2 > len(record):
        return _invalid(InvalidReason.LENGTH)
    (length,) = struct.unpack_from(">h", record, at)
    at += 2
    if length < 0:
        return _invalid(InvalidReason.PROPERTIES)
    if at + length != len(record):
        return _invalid(InvalidReason.LENGTH)
    properties = record[at:]
    (body_crc,) = struct.unpack_from(">i", record, 8)
    if body and zlib.crc32(body) & 0x7FFFFFFF != body_crc:
        return _invalid(InvalidReason.BODY_CRC)
    if not _record_crc_holds(record, properties):
        return _invalid(InvalidReason.RECORD_CRC)
    queue_id, _, queue_offset = struct.unpack_from(">iiq", record, 12)
    return Parsed(len(record), queue_id, queue_offset, sys_flag, store_timestamp, topic, properties)


def _record_crc_holds(record: bytes, properties: bytes) -> bool:
    tail = properties[-20:]
    if len(tail) < 20 or tail[:9] != b"__CRC32#\x01" or tail[-1:] != b"\x02":
        return True
    digits = tail[9:19][::-1]
    if len(properties) > 20 and properties[-21:-20] != b"\x02":
        # A longer name; or the separator was damaged, which is what makes the checksum hold.
        whole = record[:-21] + b"\x02"
        return not (digits.isdigit() and zlib.crc32(whole) & 0x7FFFFFFF == int(digits))
    return digits.isdigit() and zlib.crc32(record[:-20]) & 0x7FFFFFFF == int(digits)


def _row(
    parsed: Parsed,
    position: int,
    phys: int,
    not_admitted: frozenset[tuple[str, int]],
    delay_levels_ms: Sequence[int],
) -> Row:
    properties = parse_raw_properties(parsed.properties)
    topic = parsed.topic.decode()
    lmq_entries = tuple(_lmq_entries((topic, parsed.queue_id), properties, not_admitted))
    queue_offset, inner_num = parsed.queue_offset, 1
    if parsed.sys_flag & FLAG_BATCH:
        base, number = _parse_int(properties.get(b"INNER_BASE")), _parse_int(properties.get(b"INNER_NUM"))
        queue_offset = base if base is not None and base >= 0 else queue_offset
        inner_num = number if number is not None and 1 <= number <= 0x7FFF else 1
    keys = [properties[b"UNIQ_KEY"]] if b"UNIQ_KEY" in properties else []
    keys += [key for key in properties.get(b"KEYS", b"").split(b" ") if key]
    return Row(
        position=position,
        phys=phys,
        size=parsed.size,
        queue=(topic, parsed.queue_id),
        queue_offset=queue_offset,
        store_timestamp=parsed.store_timestamp,
        tags_code=_tags_code(topic, parsed.store_timestamp, properties, delay_levels_ms),
        inner_num=inner_num,
        flags=(parsed.sys_flag & 0xFF) | (FLAG_LMQ if lmq_entries else 0),
        key_texts=tuple(parsed.topic + b"#" + key for key in keys),
        lmq_entries=lmq_entries,
    )


def parse_raw_properties(encoded: bytes) -> dict[bytes, bytes]:
    """``tiered.formats.record.parse_properties`` without decoding the text."""
    latin = parse_properties(encoded.decode("latin-1").encode())
    return {name.encode("latin-1"): value.encode("latin-1") for name, value in latin.items()}


def _tags_code(
    topic: str, store_timestamp: int, properties: Mapping[bytes, bytes], delay_levels_ms: Sequence[int]
) -> int:
    if topic == "SCHEDULE_TOPIC_XXXX" and delay_levels_ms:
        level = _parse_int(properties.get(b"DELAY"))
        if level is not None and level > 0:
            return store_timestamp + delay_levels_ms[min(level, len(delay_levels_ms)) - 1]
    return java_hash(decode_text(properties.get(b"TAGS", b"")))


def _parse_int(text: bytes | None) -> int | None:
    if text is None:
        return None
    digits = text[1:] if text[:1] in (b"+", b"-") else text
    if not digits.isdigit() or len(digits) > 18:
        return None
    return int(text)


def _lmq_entries(
    own: tuple[str, int], properties: Mapping[bytes, bytes], not_admitted: frozenset[tuple[str, int]]
) -> list[LmqEntry]:
    topic, queue_id = own
    is_doubtful = topic.startswith(("%RETRY%", "rmq_sys_")) or topic == "SCHEDULE_TOPIC_XXXX"
    names = _split_as_java(properties.get(b"INNER_MULTI_DISPATCH", b""))
    numbers = _split_as_java(properties.get(b"INNER_MULTI_QUEUE_OFFSET", b""))
    found: list[LmqEntry] = []
    if len(names) != len(numbers):
        return found
    for name, number in zip(names, numbers, strict=True):
        offset = _parse_int(number)
        if offset is None or offset < 0:
            if b"/" in name:
                continue
            break
        is_plain = not name.startswith(b"%LMQ%")
        doubt = DOUBT_TOPIC * is_doubtful | DOUBT_SLASH * (b"/" in name) | DOUBT_PLAIN * is_plain
        if name not in (b"", b"%LMQ%"):
            try:
                queue = name.decode(), queue_id if is_plain else 0
            except UnicodeDecodeError:
                continue
            if queue not in not_admitted:
                found.append(LmqEntry(queue, offset, doubt))
    return found


def _split_as_java(text: bytes) -> list[bytes]:
    """``String.split(",")``: without trailing empty items."""
    items = text.split(b",")
    while items and not items[-1]:
        items.pop()
    return items


def split_by_queue(queues: Sequence[int]) -> dict[int, list[int]]:
    """Row numbers by queue, queues ascending, rows in order."""
    rows: dict[int, list[int]] = {}
    for row, queue in enumerate(queues):
        rows.setdefault(queue, []).append(row)
    return dict(sorted(rows.items()))
