"""A broker as its disk shows it: real store bytes, a log that loses its end, files that it deletes."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

from tests.fetcher.broker_store_writer import FILE_BYTES, WrittenStore

TOPICS = ("orders", "mails", "%RETRY%group")
QUEUES = 2


class BrokerModel:
    """``records``: what its queues have now. ``ever``: all that they ever had at an offset; ``stored_ms`` of each."""

    def __init__(self, path: Path, source: random.Random, begin_ms: int) -> None:
        self._random, self._begin_ms = source, begin_ms
        (path / "config").mkdir(parents=True)
        names = (f'"{name}":{{"topicName":"{name}","readQueueNums":2,"writeQueueNums":2}}' for name in TOPICS)
        (path / "config" / "topics.json").write_text(f'{{"topicConfigTable":{{{",".join(names)}}}}}')
        self.store = WrittenStore(path)
        self.ever: dict[tuple[str, int, int], dict[bytes, int]] = {}
        self._log: list[tuple[int, tuple[str, int], int]] = []
        """Physical offset, queue and queue offset of each record of the log."""
        self.starts = 0
        """A broker that starts may have cut its log."""
        self._disk: dict[str, tuple[int, int]] = {}
        self.watch()

    @property
    def records(self) -> dict[tuple[str, int], dict[int, bytes]]:
        return self.store.records

    def stored_ms(self, queue: tuple[str, int], offset: int, record: bytes) -> int:
        return self.ever[*queue, offset][record]

    def send(self, now_ms: int) -> None:
        """Some messages: plain, with tags, with keys, large."""
        for _ in range(self._random.randint(1, 12)):
            queue = self._random.choice(TOPICS), self._random.randrange(QUEUES)
            body = self._random.randbytes(self._random.choice((0, 20, 300, 3_000)))
            key = f"k{self._random.randrange(9)}" if self._random.random() < 0.5 else ""
            offset = self.store.put(
                *queue,
                body,
                tags=self._random.choice(("", "A", "B")),
                keys=key,
                later_ms=now_ms - self._begin_ms,
            )
            record = self.records[queue][offset]
            self.ever.setdefault((*queue, offset), {})[record] = now_ms
            self._log.append((self.store.phys - len(record), queue, offset))

    def delete_files(self, archived_phys: int) -> None:
        """Files of the log that are archived, as after its time. An archived one stays, which is not cut."""
        for path in sorted((self.store.path / "commitlog").iterdir()):
            if int(path.name) + 2 * FILE_BYTES <= archived_phys:
                path.unlink()

    def start_again(self, *, tears: bool, cuts: int) -> None:
        """It was killed: a record may be torn, and its last ``cuts`` records were on a disk that lost power."""
        self.starts += 1
        if tears:
            path = self.store.log_file(self.store.phys)
            if self.store.phys % FILE_BYTES + 60 < FILE_BYTES and path.exists():
                with path.open("r+b") as file:
                    file.seek(self.store.phys % FILE_BYTES)
                    file.write(struct.pack(">iI", 400, 0xDAA320A7) + self._random.randbytes(50))
        first_phys = min((int(path.name) for path in (self.store.path / "commitlog").iterdir()), default=0)
        for _ in range(cuts):
            if len(self._log) < 2 or (first_phys and self._log[-1][0] < first_phys + FILE_BYTES):
                break
            self.store.phys, queue, offset = self._log.pop()
            del self.records[queue][offset]
            self.store.put_unit(*queue, offset, bytes(20))
        if cuts:
            self._zero_tail()

    def recover(self) -> None:
        """Remove what is torn, as a start does."""
        self._zero_tail()

    def _zero_tail(self) -> None:
        for path in sorted((self.store.path / "commitlog").iterdir()):
            begin = int(path.name)
            if begin >= self.store.phys and begin:
                path.unlink()
            elif begin + FILE_BYTES > self.store.phys:
                os.truncate(path, self.store.phys - begin)
                os.truncate(path, FILE_BYTES)

    def watch(self) -> None:
        """Note what the disk is like: no other actor may write to it."""
        self._disk = self._listed()

    def disk_was_not_written_to(self) -> None:
        found = self._listed()
        assert found == self._disk, (
            f"the broker's disk was written to: {set(found.items()) ^ set(self._disk.items())}"
        )

    def _listed(self) -> dict[str, tuple[int, int]]:
        return {
            str(path): (status.st_size, status.st_mtime_ns)
            for path in self.store.path.rglob("*")
            if path.is_file() and (status := path.stat())
        }
