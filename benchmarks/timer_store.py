"""Writes a stopped broker's store with one queue of timers, for benchmarks and soak tests."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

BLANK_MAGIC = 0xCBD43194
HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
STORED_MS = 1_700_000_000_000


def write_store(
    directory: Path,
    count: int,
    deliver_ms: Callable[[int], int],
    *,
    topic: str = "TIERED_TIMERS",
    target: str = "orders",
    body_bytes: int = 256,
    file_bytes: int = 64 << 20,
    first_ms: int = STORED_MS,
) -> None:
    """``count`` timers, one a millisecond from ``first_ms`` on, with keys ``T<number>``, for ``target``.

    ``deliver_ms``: number -> time of delivery."""
    body = bytes(range(32, 96)) * (body_bytes // 64 + 1)
    body, name = body[:body_bytes], topic.encode()
    crc = zlib.crc32(body) & 0x7FFFFFFF
    (directory / "commitlog").mkdir(parents=True)
    (directory / "config").mkdir()
    (directory / "config" / "topics.json").write_text('{"dataVersion":{},"topicConfigTable":{}}')
    phys, parts, units, used = 0, list[bytes](), bytearray(), 0
    for number in range(count):
        key, where = f"UNIQ_KEY\x01T{number:011d}\x02", f"TIERED_TOPIC\x01{target}\x02"
        properties = f"{key}{where}TIERED_DELIVER_MS\x01{deliver_ms(number)}\x02".encode()
        size = 91 + len(body) + len(name) + len(properties)
        if used + size + 8 > file_bytes:
            parts.append(struct.pack(">iI", file_bytes - used, BLANK_MAGIC).ljust(file_bytes - used, b"\0"))
            (directory / "commitlog" / f"{phys - used:020d}").write_bytes(b"".join(parts))
            phys, used, parts = phys - used + file_bytes, 0, []
        stored_ms = first_ms + number
        head = struct.pack(">iIiiiqqiq", size, 0xDAA320A7, crc, 0, 0, number, phys, 0, stored_ms)
        middle = HOST + struct.pack(">q", stored_ms) + HOST + struct.pack(">iqi", 0, 0, len(body))
        parts.append(
            head + middle + body + bytes([len(name)]) + name + struct.pack(">h", len(properties)) + properties
        )
        units += struct.pack(">qiq", phys, size, 0)
        phys, used = phys + size, used + size
    last = directory / "commitlog" / f"{phys - used:020d}"
    last.write_bytes(b"".join(parts))
    with last.open("r+b") as file:
        file.truncate(file_bytes)
    queue = directory / "consumequeue" / topic / "0"
    queue.mkdir(parents=True)
    file_units = 300_000
    for first in range(0, max(count, 1), file_units):
        path = queue / f"{first * 20:020d}"
        path.write_bytes(bytes(units[first * 20 : (first + file_units) * 20]))
        with path.open("r+b") as file:
            file.truncate(file_units * 20)
