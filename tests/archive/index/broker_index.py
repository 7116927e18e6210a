"""RocketMQ's index files as a broker reads them (IndexFile, IndexService), and their settings in broker.conf."""

import mmap
from collections.abc import Iterator
from pathlib import Path

from tiered.archive.index.rocketmq_index_file import (
    HEADER,
    HEADER_BYTES,
    ITEM,
    SLOT,
    IndexHeader,
    broker_hash,
)


def broker_settings(directory: Path) -> tuple[int, int]:
    """maxHashSlotNum and maxIndexNum of a store's broker."""
    lines = (directory / "broker.conf").read_text().splitlines()
    conf = dict(line.split("=", 1) for line in lines if "=" in line)
    return int(conf["maxHashSlotNum"]), int(conf["maxIndexNum"])


class IndexFile:
    """One file, mapped."""

    def __init__(self, path: Path, slots: int) -> None:
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._slots = slots
        self.header = IndexHeader(*HEADER.unpack_from(self._data))

    def overlaps(self, begin_ms: int, end_ms: int) -> bool:
        """``IndexFile.isTimeMatched``."""
        first, last = self.header.begin_ms, self.header.end_ms
        return (begin_ms < first and end_ms > last) or first <= begin_ms <= last or first <= end_ms <= last

    def matches(self, hash_: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Physical offsets of items with ``hash_``, newest first (``IndexFile.selectPhyOffset``).

        Times are compared as the broker does, in whole seconds after the file's begin.
        """
        header = self.header
        (number,) = SLOT.unpack_from(self._data, HEADER_BYTES + SLOT.size * (hash_ % self._slots))
        if header.item_count <= 1:
            return
        seen = 0
        while 0 < number <= header.item_count and seen <= header.item_count:
            seen += 1
            item = HEADER_BYTES + SLOT.size * self._slots + ITEM.size * number
            found, phys, seconds, previous = ITEM.unpack_from(self._data, item)
            if seconds < 0:
                return
            stored_ms = header.begin_ms + seconds * 1000
            if found == hash_ and begin_ms <= stored_ms <= end_ms:
                yield phys
            if previous <= 0 or previous > header.item_count or previous == number or stored_ms < begin_ms:
                return
            number = previous


class BrokerIndex:
    """The index files of a store."""

    def __init__(self, directory: Path, slots: int) -> None:
        self.files = [IndexFile(path, slots) for path in sorted(directory.iterdir()) if path.name.isdigit()]

    def query(self, topic: str, key: str, begin_ms: int, end_ms: int, max_offsets: int) -> list[int]:
        """Physical offsets as ``IndexService.queryOffset`` returns them: newest file first, newest item first, at most
        ``max_offsets``, collisions included."""
        found: list[int] = []
        wanted = broker_hash(topic, key)
        for file in reversed(self.files):
            if file.overlaps(begin_ms, end_ms):
                for phys in file.matches(wanted, begin_ms, end_ms):
                    if len(found) >= max_offsets:
                        break
                    found.append(phys)
            if file.header.begin_ms < begin_ms or len(found) >= max_offsets:
                break
        return found
