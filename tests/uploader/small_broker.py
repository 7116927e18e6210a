"""A stopped broker's store directory of small files, which a test lets grow, lose files, be copied and put back."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

from tests.broker_store.record_bytes import BLANK_MAGIC, record, unit

FILE_BYTES = 8192
QUEUE_UNITS = 4096


class SmallBroker:
    """``first_offset``: of each queue's first message, as if earlier ones had expired."""

    def __init__(
        self,
        path: Path,
        *,
        port: int = 10911,
        start_phys: int = 0,
        first_offset: int = 0,
        store_ms: int = 1_700_000_000_000,
    ) -> None:
        self.path, self.port = path, port
        self.phys, self.store_ms = start_phys, store_ms
        self._first_offset = first_offset
        self._offsets: dict[tuple[str, int], int] = {}
        self._shift = 0
        self.lmq, self._lmq_units, self._lmq_count = "", 0, 0
        """The LMQ of "orders" from now on, its units, and how many its broker counts."""
        self.batch = 0
        """Messages of each batch of "orders", whose queue is a BatchCQ then."""
        (path / "commitlog").mkdir(parents=True)
        (path / "config").mkdir()
        (path / "lock").write_text("lock")
        topics = '{"dataVersion":{},"topicConfigTable":{}}'
        (path / "config" / "topics.json").write_text(topics)

    def recreate(self, topic: str, first_offset: int) -> None:
        """A topic was deleted and created again; the next message has ``first_offset``."""
        self._offsets[topic, 0] = first_offset

    def restart(self, lost_units: int = 0) -> None:
        """Queue 0 of "orders" counts from its units again, of which the last ``lost_units`` are gone."""
        self._offsets["orders", 0] -= self._shift + lost_units * max(self.batch, 1)
        self._shift = 0
        self._lmq_count = self._lmq_units

    def lose_unit(self) -> None:
        """A message of "orders" gets no unit: the next ones are a place lower than their headers say."""
        self.send(1, text="lost")
        self._shift += 1

    def send(self, count: int, topic: str = "orders", *, text: str = "body") -> None:
        """``count`` messages to queue 0, one a second."""
        for _ in range(count):
            offset = self._offsets.get((topic, 0), self._first_offset)
            self.store_ms += 1000
            data = self._record(topic, offset, text)
            room = FILE_BYTES - self.phys % FILE_BYTES
            if len(data) + 8 > room:
                self._write(self.phys, struct.pack(">iI", room, BLANK_MAGIC))
                self.phys += room
                data = self._record(topic, offset, text)
            self._write(self.phys, data)
            self._write_unit(topic, offset - self._shift * (topic == "orders"), unit(self.phys, len(data)))
            if self.lmq and topic == "orders":
                self._write_unit(self.lmq, self._lmq_units, unit(self.phys, len(data)))
                self._lmq_units, self._lmq_count = self._lmq_units + 1, self._lmq_count + 2
            self._offsets[topic, 0] = offset + (max(self.batch, 1) if topic == "orders" else 1)
            self.phys += len(data)

    def _record(self, topic: str, offset: int, text: str) -> bytes:
        lists = {}
        if self.lmq and topic == "orders":
            lists = {"INNER_MULTI_DISPATCH": self.lmq, "INNER_MULTI_QUEUE_OFFSET": self._lmq_count}
        if self.batch and topic == "orders":
            lists = {"INNER_BASE": offset, "INNER_NUM": self.batch}
        return record(
            self.phys,
            f"{text} {offset}".encode(),
            topic=topic,
            queue_offset=offset,
            store_ms=self.store_ms,
            port=self.port,
            properties="".join(f"{name}\1{value}\2" for name, value in lists.items()).encode(),
            sys_flag=0x80 if "INNER_NUM" in lists else 0,
        )

    def expire(self, files: int) -> None:
        """Delete the oldest commitlog files."""
        for path in sorted((self.path / "commitlog").iterdir())[:files]:
            path.unlink()

    def copy(self, path: Path) -> SmallBroker:
        """The same broker in another directory."""
        shutil.copytree(self.path, path)
        other = SmallBroker.__new__(SmallBroker)
        other.__dict__.update(self.__dict__ | {"path": path, "_offsets": dict(self._offsets)})
        return other

    def _write(self, phys: int, data: bytes) -> None:
        begin = phys - phys % FILE_BYTES
        path = self.path / "commitlog" / f"{begin:020d}"
        if not path.exists():
            path.write_bytes(bytes(FILE_BYTES))
        with path.open("r+b") as file:
            file.seek(phys - begin)
            file.write(data)

    def _write_unit(self, topic: str, offset: int, data: bytes) -> None:
        kind = "consumequeue"
        if self.batch and topic == "orders":
            kind, data = "batchconsumequeue", data + struct.pack(">qqhii", 0, offset, self.batch, -1, 0)
            offset //= self.batch
        path = self.path / kind / topic / "0" / f"{0:020d}"
        if not path.exists():
            path.parent.mkdir(parents=True)
            path.write_bytes(bytes(QUEUE_UNITS * len(data)))
        with path.open("r+b") as file:
            file.seek(offset * len(data))
            file.write(data)
