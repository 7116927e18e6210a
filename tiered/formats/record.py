"""One commitlog record as the broker stores it: decoding, properties, bodies, and its JSON form.

Plain Python for commands and queries that show single records; the hot path is in ``tiered.kernels``. Field names of
the JSON form are in ``tiered.formats.fields``. Sources: MessageDecoder.decode,
MessageDecoder.string2messageProperties, CompressorFactory.
"""

import hashlib
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import lz4.frame
import zstandard

from tiered.errors import CorruptionError, UsageError
from tiered.formats.memory_bound import out_of_memory
from tiered.model.queue import QueueKey

T = TypeVar("T")

MAGIC_V1 = 0xDAA320A7
MAGIC_V2 = 0xDAA320AB
"""The topic's length is two bytes, for topics over 127 bytes."""
RECORD_BYTES_MIN = 91

SYS_COMPRESSED = 0x1
SYS_BORN_HOST_V6 = 0x10
SYS_STORE_HOST_V6 = 0x20
SYS_NEED_UNWRAP = 0x40
SYS_INNER_BATCH = 0x80
_COMPRESSION_MASK = 0x700
_COMPRESSION_LZ4, _COMPRESSION_ZSTD, _COMPRESSION_ZLIB = 0x100, 0x200, 0x300

BODY_BYTES_MAX = 1 << 28
"""A body that decompresses to more than this is refused."""

_ZSTD_PIECE_BYTES = 1024
_ZSTD_MAGIC_BYTES = 4
_HEAD = struct.Struct(">iIIiiqqiq")
SEPARATORS = re.compile("[\x00-\x02]")
"""Characters that separate names and values of properties, and NUL."""
_INNER_HEAD = struct.Struct(">iIIii")
_MAPPED = bytes(10) + b"\xff\xff"
"""How an IPv6 address begins that stands for an IPv4 address."""
_ENCODED_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")
"""Half of a surrogate pair, which UTF-8 does not allow."""


@dataclass(frozen=True, slots=True)
class Record:
    """A decoded record. ``data``: its bytes; times are ms since the epoch."""

    data: bytes
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp: int
    born_address: bytes = field(repr=False)
    """The host as stored: an address of 4 or 16 bytes, and a port."""
    store_timestamp: int
    store_address: bytes = field(repr=False)
    reconsume_times: int
    prepared_transaction_offset: int
    stored_body: bytes
    """The body as stored, which may be compressed."""
    topic: str
    properties: dict[str, str]

    def body(self, max_bytes: int = BODY_BYTES_MAX) -> bytes:
        """The body as a Java client returns it. Raises CorruptionError if it cannot be decompressed."""
        if not self.sys_flag & SYS_COMPRESSED:
            return self.stored_body
        source = f"body of {self.topic} at physical offset {self.physical_offset}"
        return decompress_body(self.stored_body, self.sys_flag, max_bytes, source=source)

    @property
    def born_host(self) -> str:
        """``address:port`` of the producer."""
        return host_text(self.born_address)

    @property
    def store_host(self) -> str:
        """``address:port`` of the broker."""
        return host_text(self.store_address)

    @property
    def offset_msg_id(self) -> str:
        """The id the broker gave it: its address and physical offset."""
        return (self.store_address + struct.pack(">q", self.physical_offset)).hex().upper()

    @property
    def tags(self) -> str | None:
        """TAGS."""
        return self.properties.get("TAGS")

    @property
    def keys(self) -> list[str]:
        """KEYS split on single spaces, as the broker's index does."""
        return [key for key in self.properties.get("KEYS", "").split(" ") if key]

    @property
    def uniq_key(self) -> str | None:
        """UNIQ_KEY, the client's message id."""
        return self.properties.get("UNIQ_KEY")


@dataclass(frozen=True, slots=True)
class InnerMessage:
    """One message inside an inner batch."""

    flag: int
    body: bytes
    properties: dict[str, str]


def decode_record(data: bytes | bytearray | memoryview) -> Record:
    """Decode exactly one record. Raises CorruptionError unless its lengths fill ``data`` exactly.

    Checksums are not verified: the reader of the bytes verified them.
    """
    data = bytes(data)
    try:
        return _decode(data)
    except (struct.error, IndexError, ValueError) as error:
        raise CorruptionError(f"a record of {len(data)} bytes is damaged: {error}") from error


def records_in(body: bytes) -> Iterator[memoryview]:
    """The records in ``body``, one behind the other as a broker sends them, up to the first whose size is
    impossible."""
    view, begin = memoryview(body), 0
    while begin + RECORD_BYTES_MIN <= len(view):
        (size,) = struct.unpack_from(">i", view, begin)
        if size < RECORD_BYTES_MIN or begin + size > len(view):
            return
        yield view[begin : begin + size]
        begin += size


def _decode(data: bytes) -> Record:
    """The record that ``data`` is, in either of RocketMQ's two formats. Raises ValueError or struct.error unless it is
    exactly one record."""
    size, magic, body_crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born = _HEAD.unpack_from(
        data
    )
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise ValueError(f"its magic code is {magic:08x} instead of {MAGIC_V1:08x} or {MAGIC_V2:08x}")
    born_address, at = _take(data, _HEAD.size, 20 if sys_flag & SYS_BORN_HOST_V6 else 8)
    (stored,) = struct.unpack_from(">q", data, at)
    store_address, at = _take(data, at + 8, 20 if sys_flag & SYS_STORE_HOST_V6 else 8)
    reconsumed, prepared, length = struct.unpack_from(">iqi", data, at)
    body, at = _take(data, at + 16, length)
    if magic == MAGIC_V2:
        length, at = struct.unpack_from(">h", data, at)[0], at + 2
    else:
        length, at = struct.unpack_from(">b", data, at)[0], at + 1
    topic, at = _take(data, at, length)
    (length,) = struct.unpack_from(">h", data, at)
    properties, at = _take(data, at + 2, length)
    if not at == size == len(data):
        raise ValueError(f"the lengths of its parts add up to {at} bytes, but its TOTALSIZE is {size}")
    return Record(
        data=data,
        magic=magic,
        body_crc=body_crc,
        queue_id=queue_id,
        flag=flag,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        sys_flag=sys_flag,
        born_timestamp=born,
        born_address=born_address,
        store_timestamp=stored,
        store_address=store_address,
        reconsume_times=reconsumed,
        prepared_transaction_offset=prepared,
        stored_body=body,
        topic=decode_text(topic),
        properties=parse_properties(properties),
    )


def _take(data: bytes, at: int, length: int) -> tuple[bytes, int]:
    """A field of ``length`` bytes at ``at``, and where the next one begins."""
    if length < 0 or at + length > len(data):
        raise ValueError(
            f"the field at byte {at} has a length of {length} bytes; {len(data) - at} bytes are left"
        )
    return data[at : at + length], at + length


def store_host_text(data: bytes) -> str:
    """``address:port`` of the store host of the record ``data``, which is valid."""
    sys_flag = _HEAD.unpack_from(data)[7]
    at = _HEAD.size + (20 if sys_flag & SYS_BORN_HOST_V6 else 8) + 8
    return host_text(data[at : at + (20 if sys_flag & SYS_STORE_HOST_V6 else 8)])


def host_text(stored: bytes) -> str:
    """``address:port`` as Java prints it. ``stored``: the host in a record, 8 bytes for IPv4 or 20 for IPv6."""
    (port,) = struct.unpack(">i", stored[-4:])
    if len(stored) == 20 and not stored.startswith(_MAPPED):  # Java turns a mapped address into an IPv4 one
        groups = struct.unpack_from(">8H", stored)
        return f"{':'.join(format(group, 'x') for group in groups)}:{port}"
    one, two, three, four = stored[-8:-4]
    return f"{one}.{two}.{three}.{four}:{port}"


def decode_text(encoded: bytes) -> str:
    """UTF-8 as Java decodes it: U+FFFD for each maximal invalid part, one for an encoded surrogate."""
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return _ENCODED_SURROGATE.sub(b"\xef\xbf\xbd", encoded).decode("utf-8", "replace")


def parse_properties(encoded: bytes) -> dict[str, str]:
    """The properties of a message from their stored form, ``name 0x01 value 0x02 …``. A pair without name or value is
    ignored, and the last of equal names counts, as at the broker."""
    properties: dict[str, str] = {}
    for pair in decode_text(encoded).split("\x02"):
        name, _, value = pair.partition("\x01")
        if name and value:
            properties[name] = value
    return properties


def encode_properties(properties: Mapping[str, str]) -> str:
    """The stored form of a message's properties, which ``parse_properties`` reads. Raises UsageError for a name or
    value with a character that separates properties there."""
    for name, value in properties.items():
        if "\x01" in name or "\x02" in name or "\x02" in value:
            raise UsageError(
                f"the message property {ascii(name)[1:41]} contains U+0001 or U+0002, which RocketMQ puts between "
                "properties"
            )
    return "".join([f"{name}\x01{value}\x02" for name, value in properties.items()])


def decompress_body(stored: bytes, sys_flag: int, max_bytes: int, *, source: str) -> bytes:
    """The decompressed body of a message. ``sys_flag`` of its record tells how it is compressed: zlib (old clients set
    no type), LZ4 frames or zstd frames. ``source`` names the message in errors.

    Like Java's streams, it reads all frames of a body and ignores bytes behind a zlib stream. Raises CorruptionError
    for damage, an unknown type, or more than ``max_bytes``."""
    kind = sys_flag & _COMPRESSION_MASK
    try:
        if kind in (0, _COMPRESSION_ZLIB):
            inflater = zlib.decompressobj()
            body, finished = inflater.decompress(stored, max_bytes + 1), inflater.eof or not stored
        elif kind == _COMPRESSION_LZ4:
            body, finished = _decompress_lz4(stored, max_bytes)
        elif kind == _COMPRESSION_ZSTD:
            body, finished = _decompress_zstd(stored, max_bytes)
        else:
            raise CorruptionError(f"{source} has the unknown compression type {kind >> 8}")
    except (zlib.error, zstandard.ZstdError, RuntimeError, EOFError) as error:
        raise CorruptionError(f"{source} is damaged, as it does not decompress: {error}") from error
    except MemoryError:
        raise out_of_memory(source) from None
    if len(body) > max_bytes:
        raise CorruptionError(f"{source} decompresses to more than {max_bytes} bytes")
    if not finished:
        raise CorruptionError(f"{source} is damaged: its compressed data end too early")
    return bytes(body)


def _decompress_lz4(stored: bytes, max_bytes: int) -> tuple[bytes, bool]:
    """The body in the LZ4 frames of ``stored``, of which a little more than ``max_bytes`` are decompressed at most; and
    whether its last frame is complete."""
    parts, total = list[bytes](), 0
    rest, finished = stored, True
    while (rest or not parts) and finished and total <= max_bytes:
        unpacker = lz4.frame.LZ4FrameDecompressor()
        parts.append(unpacker.decompress(rest, max_bytes + 1 - total))
        total += len(parts[-1])
        rest, finished = unpacker.unused_data or b"", unpacker.eof
    return b"".join(parts), finished


def _decompress_zstd(stored: bytes, max_bytes: int) -> tuple[bytes, bool]:
    """The body in the zstd frames of ``stored``, of which not much more than ``max_bytes`` are decompressed; and
    whether its last frame is complete.

    The library gets small pieces, as it cannot limit what it returns: 1 KiB gives 32 MiB at most.
    """
    parts, total = list[bytes](), 0
    at, finished = 0, True
    while at < len(stored) and finished and total <= max_bytes:
        if 0 < at > len(stored) - _ZSTD_MAGIC_BYTES:
            break  # too short for a frame: Java's stream ends here
        decompressor, finished = zstandard.ZstdDecompressor().decompressobj(), False
        while at < len(stored) and not finished and total <= max_bytes:
            piece = stored[at : at + _ZSTD_PIECE_BYTES]
            parts.append(decompressor.decompress(piece))
            total += len(parts[-1])
            finished = decompressor.eof
            at += len(piece) - len(decompressor.unused_data)
    return b"".join(parts), finished


def inner_messages(record: Record) -> Iterator[InnerMessage]:
    """The messages inside a record that holds a batch of them (an inner batch), in order; none for any other record.
    Raises CorruptionError for a damaged one."""
    if not record.sys_flag & (SYS_INNER_BATCH | SYS_NEED_UNWRAP):
        return
    data, at = record.body(), 0
    try:
        while at < len(data):
            _, _, _, flag, length = _INNER_HEAD.unpack_from(data, at)
            body, at = _take(data, at + _INNER_HEAD.size, length)
            (length,) = struct.unpack_from(">h", data, at)
            properties, at = _take(data, at + 2, length)
            yield InnerMessage(flag, body, parse_properties(properties))
    except (struct.error, ValueError) as error:
        raise CorruptionError(
            f"the inner batch of {record.topic} at physical offset {record.physical_offset} is damaged: {error}"
        ) from error


def record_to_json(
    record: Record, *, queue: QueueKey, queue_offset: int, is_own_offset: bool = False
) -> dict[str, Any]:
    """The record as a JSON object, with the fields that FIELD_TABLE describes, in their order.

    ``queue`` and ``queue_offset``: where it was read, as a light message queue (LMQ) and its parent have the same
    record. ``is_own_offset``: the offsets of this queue are those in its records and need not be consecutive (BatchCQ,
    compacted topics). Fields of a body that does not decompress, or of an inner batch that does not decode, are null:
    the producer may have sent them so, and the record is whole."""
    body = _decoded(record.body)
    row: dict[str, Any] = {
        "topic": queue.topic,
        "queueId": queue.queue_id,
        "queueOffset": queue_offset,
        "commitLogOffset": record.physical_offset,
        "storeSize": len(record.data),
        "storeTimestamp": record.store_timestamp,
        "bornTimestamp": record.born_timestamp,
        "bornHost": record.born_host,
        "storeHost": record.store_host,
        "sysFlag": record.sys_flag,
        "flag": record.flag,
        "reconsumeTimes": record.reconsume_times,
        "ptOffset": record.prepared_transaction_offset,
        "magic": f"{record.magic:08x}",
        "tags": record.tags,
        "keys": record.properties.get("KEYS"),
        "uniqKey": record.uniq_key,
        "properties": dict(sorted(record.properties.items())),
        "bodyCRC": record.body_crc,
        "bodyLen": None if body is None else len(body),
        "bodySha256": None if body is None else hashlib.sha256(body).hexdigest(),
        "offsetMsgId": record.offset_msg_id,
        "recCrc32": zlib.crc32(record.data),
    }
    if record.sys_flag & SYS_COMPRESSED:
        row["wireBodyLen"] = len(record.stored_body)
        row["wireBodySha256"] = hashlib.sha256(record.stored_body).hexdigest()
        row["bodyDecompressedByClient"] = True
    if record.topic != queue.topic:
        row["recTopic"] = record.topic
    if record.queue_id != queue.queue_id:
        row["recQueueId"] = record.queue_id
    if record.queue_offset != queue_offset:
        row["recQueueOffset"] = record.queue_offset
    if is_own_offset:
        row["nonConsecutive"] = True
    if record.sys_flag & (SYS_INNER_BATCH | SYS_NEED_UNWRAP):
        row["inner"] = _decoded(lambda: _inner(record))
    return row


def _decoded(decode: Callable[[], T]) -> T | None:
    try:
        return decode()
    except CorruptionError:
        return None


def _inner(record: Record) -> list[dict[str, Any]]:
    return [_inner_to_json(record, index, item) for index, item in enumerate(inner_messages(record))]


def _inner_to_json(record: Record, index: int, item: InnerMessage) -> dict[str, Any]:
    """The JSON object for ``item``, the message at ``index`` of the batch inside ``record``, whose queue offset is that
    of the first."""
    return {
        "queueOffset": record.queue_offset + index,
        "tags": item.properties.get("TAGS"),
        "keys": item.properties.get("KEYS"),
        "uniqKey": item.properties.get("UNIQ_KEY"),
        "properties": dict(sorted(item.properties.items())),
        "bodyLen": len(item.body),
        "bodySha256": hashlib.sha256(item.body).hexdigest(),
        "flag": item.flag,
    }


def java_hash(text: str) -> int:
    """``String.hashCode``: over UTF-16 units, as a signed 32-bit number."""
    total = 0
    for (unit,) in struct.iter_unpack(">H", text.encode("utf-16-be")):
        total = (31 * total + unit) & 0xFFFFFFFF
    return total - (1 << 32) if total >> 31 else total
