"""Makes commitlog records and store directories for tests, by the layout of CommitLog's encoder."""

import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from rocksdict import Options, Rdict

MAGIC_V1 = 0xDAA320A7
BLANK_MAGIC = 0xCBD43194


def record(
    phys: int,
    body: bytes = b"body",
    *,
    topic: str = "t",
    queue_id: int = 0,
    queue_offset: int = 0,
    store_ms: int = 1_700_000_000_000,
    port: int = 10911,
    properties: bytes = b"",
    sys_flag: int = 0,
) -> bytes:
    """One IPv4 record of version 1 stored at ``phys`` by the broker at ``port``."""
    name = topic.encode()
    size = 91 + len(body) + len(name) + len(properties)
    crc = zlib.crc32(body) & 0x7FFFFFFF
    head = struct.pack(">iIiiiqqiq", size, MAGIC_V1, crc, queue_id, 0, queue_offset, phys, sys_flag, store_ms)
    host = bytes([127, 0, 0, 1]) + struct.pack(">i", port)
    middle = host + struct.pack(">q", store_ms) + host + struct.pack(">iqi", 0, 0, len(body))
    return head + middle + body + bytes([len(name)]) + name + struct.pack(">h", len(properties)) + properties


def records(phys: int, bodies: Sequence[bytes], *, topic: str = "t") -> bytes:
    """Consecutive records of one queue from ``phys`` on."""
    data = b""
    for number, body in enumerate(bodies):
        data += record(phys + len(data), body, topic=topic, queue_offset=number)
    return data


def log_file(directory: Path, begin: int, data: bytes, size_bytes: int) -> Path:
    """A commitlog file: ``data``, then nothing (sparse) up to ``size_bytes``."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{begin:020d}"
    with path.open("wb") as file:
        file.write(data)
        file.truncate(size_bytes)
    return path


def unit(phys: int, size: int, tags_code: int = 0) -> bytes:
    """A unit of a plain consume queue."""
    return struct.pack(">qiq", phys, size, tags_code)


def queue_file(
    store: Path, topic: str, queue_id: int, units: bytes, *, first: int = 0, capacity: int = 2000
) -> Path:
    """A consume queue file whose first unit has index ``first``."""
    return log_file(store / "consumequeue" / topic / str(queue_id), first * 20, units, capacity * 20)


def rocksdb_queues(
    directory: Path, units: Mapping[tuple[str, int], Sequence[tuple[int, int]]], *, first: int = 0
) -> Path:
    """Consume queues in RocksDB: (phys, size) of the units of each (topic, queue id), from offset ``first`` on."""
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    database = Rdict(str(directory), options)
    ends = database.create_column_family("offset", Options(raw_mode=True))
    for (topic, queue_id), its_units in units.items():
        name = topic.encode()
        head = struct.pack(">i", len(name)) + b"\x01" + name + b"\x01"
        for offset, (phys, size) in enumerate(its_units, first):
            key = head + struct.pack(">i", queue_id) + b"\x01" + struct.pack(">q", offset)
            database[key] = struct.pack(">qiqq", phys, size, 0, 0)
            ends[head + b"max\x01" + struct.pack(">i", queue_id)] = struct.pack(">qq", phys, offset)
    ends.close()
    database.close()
    return directory
