"""A broker's store of one or a few queues, written the way a broker does, message by message."""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.kernels.record_builder import Message, encode, properties

FILE_BYTES = 64 * 1024
QUEUE_UNITS = 1000


@dataclass
class WrittenStore:
    """Commitlog and consume queues under ``path``. ``records``: what was stored, by topic, queue id and offset."""

    path: Path
    phys: int = 0

    def __post_init__(self) -> None:
        self.records: dict[tuple[str, int], dict[int, bytes]] = {}
        (self.path / "commitlog").mkdir(parents=True, exist_ok=True)
        (self.path / "consumequeue").mkdir(exist_ok=True)
        (self.path / "lock").write_text("lock")

    def put(
        self,
        topic: str,
        queue_id: int,
        body: bytes,
        *,
        tags: str = "",
        keys: str = "",
        with_unit: bool = True,
        later_ms: int = 0,
        more: Mapping[str, str] | None = None,
        offset: int = -1,
        sys_flag: int = 0,
    ) -> int:
        """Store one message, ``later_ms`` after the usual time; its queue offset: by default the one after the last."""
        queue = self.records.setdefault((topic, queue_id), {})
        offset = max(queue, default=-1) + 1 if offset < 0 else offset
        others = [(name.encode(), value) for name, value in (more or {}).items()]
        given = ((b"TAGS", tags), (b"KEYS", keys), *others)
        text = properties(*((name, value.encode()) for name, value in given if value))
        message = Message(topic.encode(), queue_id, offset, body, text, sys_flag)
        message = replace(message, store_timestamp=message.store_timestamp + later_ms)
        if self.phys % FILE_BYTES + len(encode(message, 0)) + 8 > FILE_BYTES:
            room = FILE_BYTES - self.phys % FILE_BYTES
            self._write_log(struct.pack(">iI", room, 0xCBD43194))
            self.phys += room
        record = encode(message, self.phys)
        self._write_log(record)
        if with_unit:
            self.put_unit(topic, queue_id, offset, struct.pack(">qiq", self.phys, len(record), _hash(tags)))
        queue[offset] = record
        self.phys += len(record)
        return offset

    def put_record(self, record: bytes) -> None:
        """Store a record made for this place, in the log alone."""
        self._write_log(record)
        self.phys += len(record)

    def put_unit(self, topic: str, queue_id: int, offset: int, unit: bytes) -> None:
        """Write (a part of) a unit in place."""
        directory = self.path / "consumequeue" / topic / str(queue_id)
        directory.mkdir(parents=True, exist_ok=True)
        first = offset // QUEUE_UNITS * QUEUE_UNITS
        _write(directory / f"{first * 20:020d}", (offset - first) * 20, unit, QUEUE_UNITS * 20)

    def log_file(self, phys: int) -> Path:
        """The commitlog file that holds ``phys``."""
        return self.path / "commitlog" / f"{phys // FILE_BYTES * FILE_BYTES:020d}"

    def _write_log(self, data: bytes) -> None:
        _write(self.log_file(self.phys), self.phys % FILE_BYTES, data, FILE_BYTES)


def _write(path: Path, at: int, data: bytes, size_bytes: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        if os.fstat(fd).st_size < size_bytes:
            os.ftruncate(fd, size_bytes)
        os.pwrite(fd, data, at)
    finally:
        os.close(fd)


def _hash(tags: str) -> int:
    code = 0
    for character in tags:
        code = (31 * code + ord(character)) & 0xFFFFFFFF
    return code - (1 << 32) if code >> 31 else code
