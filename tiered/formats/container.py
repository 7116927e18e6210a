"""The container: a checked envelope around one JSON header and named numpy tables.

Commits, pages, state snapshots and the footers of segments are containers, told apart by an 8-byte kind: one decoder
checks them all, and versions are decided in one place.

    kind 8 | major u16 | minor u16 | flags u32 | raw length u64 | stored length u64 | CRC32C of stored u32 |
    CRC32C of the 36 bytes before u32
    stored payload: one zstd frame (flags bit 0) or raw
    payload: header length u32, header (UTF-8 JSON); table count u32; per table:
             name length u16, name, dtype length u16, dtype (JSON list of [field, type]), rows u64,
             then every field's column in turn, little-endian, contiguous

Containers of the catalog are packed (flags bit 1): the frame has the dictionary DICTIONARY, and tables
are byte planes of differences (byte_planes.py).
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import fastcrc
import numpy as np
import zstandard

from tiered.errors import CorruptionError, UnsupportedFormatError
from tiered.formats import byte_planes
from tiered.formats.memory_bound import SMALL, Allowance, MemoryBound, out_of_memory
from tiered.formats.version import FORMAT_MAJOR, FORMAT_MINOR, require_major
from tiered.model.tables import Table

DICTIONARY = (
    b'[["since_ms","<i8"],["version","<i8"]][["queue","<u4"],["min_queue_offset","<i8"],["rows","<'
    b'i8"]][["queue","<u4"],["reason","<u4"],["begin_queue_offset","<i8"],["end_queue_offset","<i8'
    b'"]][["queue","<u4"],["rows","<u4"],["base_queue_offset","<i8"],["end_queue_offset","<i8"],["'
    b'version","<i8"],["removed_version","<i8"]][["topic","<u4"],["queue_id","<i4"],["generation",'
    b'"<u4"],["flags","<u4"],["min_queue_offset","<i8"],["end_queue_offset","<i8"],["end_byte","<i'
    b'8"],["first_phys","<i8"],["end_phys","<i8"],["max_store_timestamp","<i8"],["row_count","<i8"'
    b']]tombstones{"":["abandoned","compacted","diverged","expired","intent","replaced"],"reason":'
    b'""}[["pages/runs-00000000000000000000-1-"],["%RETRY%","%LMQ%","%DLQ%","SCHEDULE_TOPIC_XXXX"]'
    b']{"advanced_ms":1700000000000,"broker":"broker-a","check":[0,0,0],"cluster":"DefaultCluster"'
    b',"created_ms":1700000000000,"deletion_lists":[],"pending_deletions":{"pages/root-00000000000'
    b'000000000-1-":[1700000000000,0,"replaced"]},"epoch":1,"indexes":[["index/0000000000000-00000'
    b'00000000-1_.idx",0,1]],"kept_roots":[["pages/root-00000000000000000000-1-",0]],"log_historie'
    b's":[],"log_history":1,"object_keys":[],"owner":["","run","host",1700000000000,false],"pages"'
    b':[],"phys":0,"put_id":"","root":["pages/root-00000000000000000000-1-",0],"settings":{"uninde'
    b'xed":{},"log_damaged":[],"log_lost":[]},"started":true,"state_objects":{"consumer_offsets":"'
    b'","subscription_groups":"","topics":"state/topics-1-0-"},"topics":[],"version":0}{"actor":"r'
    b'un-","broker":"broker-a","check":[0,0,0],"cluster":"DefaultCluster","common_version":0,"crea'
    b'ted_ms":1700000000000,"deletions":{"added":[],"removed":[],"spilled":[]},"pending_deletions"'
    b':[],"epoch":1,"from_phys":0,"hide":[],"index":{"added":[],"removed":[]},"kept_root":["",0],"'
    b'kind":"append","log_history":1,"object_keys":["data/00/0/0/00000000000000000000-1-0.so","set'
    b's/00/00000000000000000000-1-0.sso"],"owner":null,"pages":{"added":[],"removed":[],"resolved_'
    b'version":0,"root":["",0],"spilled_version":0},"predecessor_put_id":"","purged":[],"put_id":"'
    b'","reason":"abandoned","root":["pages/root-00000000000000000000-1-",0],"settings":{},"state_'
    b'objects":{},"to_phys":0,"topics":[],"restored":[],"unhide":[],"version":0}queues[["topic","<'
    b'u4"],["queue_id","<i4"],["generation","<u4"]]runs[["queue","<u4"],["object","<u4"],["ordinal'
    b'","<u4"],["kind","<u4"],["version","<i8"],["base_queue_offset","<i8"],["end_queue_offset","<'
    b'i8"],["rows","<i8"],["base_byte","<i8"],["byte_count","<i8"],["min_store_timestamp","<i8"],['
    b'"max_store_timestamp","<i8"],["min_phys","<i8"],["end_phys","<i8"]]removed[["queue","<u4"],['
    b'"rows","<u4"],["base_queue_offset","<i8"],["end_queue_offset","<i8"],["version","<i8"],["rem'
    b'oved_version","<i8"]]objects[["key","<u4"],["rows","<u4"],["size_bytes","<i8"],["tail_bytes"'
    b',"<i8"],["tail_crc32c","<u4"],["epoch","<u4"],["min_phys","<i8"],["end_phys","<i8"],["raw_by'
    b'tes","<i8"],["ttl_class_days","<u4"]]gaps[["queue","<u4"],["reason","<u4"],["begin_queue_off'
    b'set","<i8"],["end_queue_offset","<i8"]]floors[["queue","<u4"],["min_queue_offset","<i8"],["r'
    b'ows","<i8"]]'
)


HEADER = struct.Struct("<8sHHIQQII")
_FIELDS = struct.Struct("<8sHHIQQI")
"""The header without its last field, which is the CRC32C of these."""
PAYLOAD_BYTES_MAX = 1 << 31
TABLES_MAX = 64
QUEUE_COST_BYTES = 160
"""A queue's key in memory, without its topic."""
_FLAG_ZSTD = 1
_FLAG_PACKED = 2
_PACKED_LEVEL = 6
_DICTIONARY = zstandard.ZstdCompressionDict(DICTIONARY, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


@dataclass(frozen=True)
class Container:
    """A decoded container. Its tables never share memory with the input. ``memory``: what may be allocated to decode
    the content further."""

    header: dict[str, Any]
    tables: dict[str, Table]
    memory: MemoryBound = field(compare=False)

    def table(self, name: str, dtype: np.dtype[Any]) -> Table:
        """The table ``name`` with the columns of ``dtype``: those that only a newer minor format has are dropped, those
        that an older one lacks are zero. Raises KeyError if there is no such table, and ValueError if it takes too much
        memory."""
        stored = self.tables[name]
        if stored.dtype == dtype:
            return stored
        self.memory.charge(len(stored) * dtype.itemsize, f"table {name}")
        result = np.zeros(len(stored), dtype)
        for column in dtype.names or ():
            if column in (stored.dtype.names or ()):
                result[column] = stored[column]
        return result

    def charge_queues(self) -> None:
        """Charge the table ``queues`` before it becomes keys. Raises KeyError or ValueError."""
        self.memory.charge(QUEUE_COST_BYTES * len(self.tables["queues"]), "table queues")


def encode_container(
    kind: bytes,
    header: Mapping[str, Any],
    tables: Mapping[str, Table],
    *,
    is_packed: bool = False,
    level: int = 0,
) -> bytes:
    """The bytes of a container, the form of commits, catalog pages and footers: a fixed header with checksums, then the
    JSON ``header`` and the ``tables``, compressed. Equal input gives equal bytes. ``kind``: eight bytes that name what
    it is; ``is_packed``: tables of integers are stored as differences by bytes, which compresses better; ``level`` of
    zstd, 0 for the usual one."""
    assert len(kind) == 8
    head = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    parts = [struct.pack("<I", len(head)), head, struct.pack("<I", len(tables))]
    for name, table in tables.items():
        descr = json.dumps(
            [[field, table.dtype[field].str] for field in table.dtype.names or ()], separators=(",", ":")
        ).encode()
        encoded_name = name.encode()
        parts += [struct.pack("<H", len(encoded_name)), encoded_name, struct.pack("<H", len(descr)), descr]
        parts.append(struct.pack("<Q", len(table)))
        if is_packed:
            parts.append(byte_planes.encode(table))
        else:
            parts += [np.ascontiguousarray(table[field]).tobytes() for field in table.dtype.names or ()]
    raw = b"".join(parts)
    compressor = zstandard.ZstdCompressor(
        level=level or (_PACKED_LEVEL if is_packed else 1), dict_data=_DICTIONARY if is_packed else None
    )
    stored, flags = compressor.compress(raw), _FLAG_ZSTD
    if len(stored) >= len(raw):
        stored, flags = raw, 0
    flags |= _FLAG_PACKED * is_packed
    fields = _FIELDS.pack(
        kind, FORMAT_MAJOR, FORMAT_MINOR, flags, len(raw), len(stored), fastcrc.crc32.iscsi(stored)
    )
    own_crc: int = fastcrc.crc32.iscsi(fields)
    return fields + own_crc.to_bytes(4, "little") + stored


def check_header(data: bytes | memoryview, source: str) -> bytes:
    """The kind, eight bytes, of the container that ``data`` begins with. Raises CorruptionError if its header is
    damaged, and UnsupportedFormatError for another major version. ``source`` names the object in messages."""
    if len(data) < HEADER.size:
        raise CorruptionError(f"{source} is damaged: it has only {len(data)} bytes, less than its header")
    kind: bytes
    kind, major, minor, _, _, _, _, header_crc = HEADER.unpack_from(data)
    if fastcrc.crc32.iscsi(bytes(data[: _FIELDS.size])) != header_crc:
        raise CorruptionError(f"{source} is damaged: its header does not match its CRC32C checksum")
    require_major(major, minor, f"{source}: {_text(kind)} container")
    return kind


def decode_container(
    data: bytes | memoryview, kind: bytes, *, source: str, allowance: Allowance = SMALL
) -> Container:
    """Check and decode a container, within the memory that ``allowance`` gives for its size. ``kind``: what it has to
    be; ``source``: the object key and range, for messages.

    Raises CorruptionError for damage or another kind, OutOfMemoryError, and UnsupportedFormatError.
    """
    own_kind = check_header(data, source)
    if own_kind != kind:
        raise CorruptionError(
            f"{source} is damaged: it has the kind {_text(own_kind)} instead of {_text(kind)}"
        )
    _, _, _, flags, raw_length, stored_length, crc, _ = HEADER.unpack_from(data)
    if flags & ~(_FLAG_ZSTD | _FLAG_PACKED):
        raise UnsupportedFormatError(
            f"{source} has format flags {flags:#x}, which this version of rocketmq-tiered does not know",
            hint="use a newer version of rocketmq-tiered",
        )
    if len(data) - HEADER.size < stored_length or raw_length > PAYLOAD_BYTES_MAX:
        raise CorruptionError(
            f"{source} is damaged: it is shorter than its header says, or has an impossible length"
        )
    stored = memoryview(data)[HEADER.size : HEADER.size + stored_length]
    if fastcrc.crc32.iscsi(stored) != crc:
        raise CorruptionError(f"{source} is damaged: its bytes do not match their CRC32C checksum")
    try:
        memory = MemoryBound(stored_length, allowance, source)
        memory.charge(2 * raw_length, "payload")  # once inflated, once as tables
        is_packed = bool(flags & _FLAG_PACKED)
        raw = _inflated(stored, raw_length, is_packed=is_packed) if flags & _FLAG_ZSTD else bytes(stored)
        return _parse_payload(raw, raw_length, memory, is_packed=is_packed)
    except MemoryError:
        raise out_of_memory(source) from None
    except (zstandard.ZstdError, struct.error, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptionError(f"{source} is damaged: its content does not decode: {error}") from error


def _text(kind: bytes) -> str:
    return kind.decode("ascii", "backslashreplace").strip()


def _inflated(stored: memoryview, raw_length: int, *, is_packed: bool) -> bytes:
    """The decompressed content of a container. Raises ValueError if its length is not ``raw_length``, before memory for
    it is allocated. ``is_packed``: as it was encoded."""
    if zstandard.frame_content_size(stored) != raw_length:
        raise ValueError("the content does not have the length that the header says")
    decompressor = zstandard.ZstdDecompressor(dict_data=_DICTIONARY if is_packed else None)
    raw: bytes = decompressor.decompress(stored, max_output_size=raw_length)
    return raw


def _parse_payload(raw: bytes, raw_length: int, memory: MemoryBound, *, is_packed: bool) -> Container:
    """Decode the header and the tables in ``raw``, the decompressed content of a container. ``is_packed``: as it was
    encoded. Raises ValueError if a length does not fit, and what ``memory`` raises if they take more than it allows."""
    if len(raw) != raw_length:
        raise ValueError(f"the content has {len(raw)} bytes instead of {raw_length}")
    (head_length,) = struct.unpack_from("<I", raw)
    position = 4 + head_length
    text = raw[4:position]
    memory.charge_json(text, "header")
    header = json.loads(text, parse_constant=_refuse)
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    (count,) = struct.unpack_from("<I", raw, position)
    position += 4
    if count > TABLES_MAX:
        raise ValueError(f"it claims to have {count} tables")
    tables: dict[str, Table] = {}
    for _ in range(count):
        name, position = _short_text(raw, position)
        descr, position = _short_text(raw, position)
        dtype = _dtype_of(descr)
        (rows,) = struct.unpack_from("<Q", raw, position)
        position += 8
        stored_bytes = rows * (byte_planes.row_bytes(dtype) if is_packed else dtype.itemsize)
        if dtype.itemsize == 0 or stored_bytes > len(raw) - position:
            raise ValueError(f"table {name} has {rows} rows, more than its bytes can hold")
        if is_packed:
            memory.charge(2 * stored_bytes, f"table {name}")
            tables[name] = byte_planes.decode(raw, position, rows, dtype)
        else:
            tables[name] = _columns(raw, position, rows, dtype)
        position += stored_bytes
    return Container(header, tables, memory)


@lru_cache(maxsize=128)
def _dtype_of(descr: str) -> np.dtype[Any]:
    return np.dtype([(field, kind) for field, kind in json.loads(descr)])


def _columns(raw: bytes, position: int, rows: int, dtype: np.dtype[Any]) -> Table:
    table = np.empty(rows, dtype)
    for column in dtype.names or ():
        table[column] = np.frombuffer(raw, dtype[column], rows, position)
        position += rows * dtype[column].itemsize
    return table


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _short_text(raw: bytes, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<H", raw, position)
    position += 2
    return raw[position : position + length].decode(), position + length
