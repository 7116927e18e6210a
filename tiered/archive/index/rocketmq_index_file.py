"""RocketMQ's own IndexFile, written byte for byte as the broker writes it.

    header 40: begin and end timestamp, begin and end physical offset (i64), slots used, next item (i32), big-endian
    slots 4 each: number of the newest item of the slot | items 20 each: hash, physical offset, seconds since the
    begin timestamp, number of the item before in the same slot; item 0 is not used

`tiered restore --index` writes it; the archive's index has another format (layout.py). Source:
org.apache.rocketmq.store.index.IndexFile, IndexHeader, IndexService.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tiered.errors import UsageError
from tiered.formats.record import Record
from tiered.model.dates import DATES_END_MS
from tiered.whole_file import file_error

HEADER = struct.Struct(">qqqqii")
ITEM = struct.Struct(">iqii")
SLOT = struct.Struct(">i")
_UTF16_UNIT = struct.Struct(">H")
HEADER_BYTES = HEADER.size
DEFAULT_SLOTS = 5_000_000
DEFAULT_ITEMS = 20_000_000
SECONDS_MAX = (1 << 31) - 1
FILE_BYTES_MAX = (1 << 31) - 1
"""A broker maps a file whole, and counts its bytes in an int."""
ALLOCATED_BYTES = 1024 * 1024


class IndexHeader(NamedTuple):
    """The first 40 bytes. ``item_count`` is the number of the next item: items 1 to item_count - 1 are there."""

    begin_ms: int
    end_ms: int
    begin_phys: int
    end_phys: int
    slots_used: int
    item_count: int


class IndexedMessage(NamedTuple):
    """What the broker's index needs of a message: its ``keys``, UNIQ_KEY first and then each of KEYS; its topic,
    physical offset and store time."""

    topic: str
    keys: Sequence[str]
    phys: int
    store_timestamp: int


def indexed_message(record: Record, *, with_tags: bool) -> IndexedMessage:
    """The keys of ``record`` that ``IndexService.buildIndex`` of a broker indexes. ``with_tags``: as in RocketMQ 5.5,
    which also indexes TAGS, as the key ``T#tag``."""
    keys = [record.uniq_key] if record.uniq_key else []
    keys += record.keys
    if with_tags and record.tags:
        keys.append(f"T#{record.tags}")
    return IndexedMessage(record.topic, keys, record.physical_offset, record.store_timestamp)


def broker_hash(topic: str, key: str) -> int:
    """``IndexFile.indexKeyHashMethod`` of ``topic#key``: the absolute Java hash, 0 for the least integer."""
    total = 0
    for (unit,) in _UTF16_UNIT.iter_unpack(f"{topic}#{key}".encode("utf-16-be", "replace")):
        total = (31 * total + unit) & 0xFFFFFFFF
    value = total - (1 << 32) if total >> 31 else total
    return 0 if value == -(1 << 31) else abs(value)


def file_bytes(slots: int, items: int) -> int:
    """Length of a file, full or not."""
    return HEADER_BYTES + SLOT.size * slots + ITEM.size * items


@dataclass
class IndexFileImage:
    """A file being written into ``data``, which is ``file_bytes(slots, items)`` long and zero."""

    data: bytearray | mmap.mmap
    slots: int
    items: int
    header: IndexHeader

    @classmethod
    def begin(
        cls, data: bytearray | mmap.mmap, slots: int, items: int, previous: IndexHeader | None
    ) -> IndexFileImage:
        """A new file. Until it has a message, its times and physical offsets are the end of the file before, whose
        header is ``previous``; 0 if there is none."""
        end_ms, end_phys = (0, 0) if previous is None else (previous.end_ms, previous.end_phys)
        return cls(data, slots, items, IndexHeader(end_ms, end_ms, end_phys, end_phys, 0, 1))

    @property
    def is_full(self) -> bool:
        """No further key fits."""
        return self.header.item_count >= self.items

    def put(self, hash_: int, phys: int, store_timestamp: int) -> None:
        """Add a key with the broker's hash ``hash_``, of the message at commitlog offset ``phys``, as the broker's
        ``IndexFile.putKey`` does: the slot of the hash then names this item, and the item the one before in the
        slot."""
        header, data = self.header, self.data
        slot_offset = HEADER_BYTES + SLOT.size * (hash_ % self.slots)
        (newest,) = SLOT.unpack_from(data, slot_offset)
        seconds = 0
        if header.begin_ms > 0:
            seconds = min(max(int((store_timestamp - header.begin_ms) / 1000), 0), SECONDS_MAX)
        number = header.item_count
        ITEM.pack_into(
            data, HEADER_BYTES + SLOT.size * self.slots + ITEM.size * number, hash_, phys, seconds, newest
        )
        SLOT.pack_into(data, slot_offset, number)
        begin_ms, begin_phys = header.begin_ms, header.begin_phys
        if number <= 1:
            begin_ms, begin_phys = store_timestamp, phys
        self.header = IndexHeader(
            begin_ms, store_timestamp, begin_phys, phys, header.slots_used + (newest == 0), number + 1
        )

    def finish(self) -> None:
        """Write the header."""
        HEADER.pack_into(self.data, 0, *self.header)


def check_sizes(slots: int, items: int) -> None:
    """Raise UsageError if no broker has RocketMQ index files with so many slots and items."""
    if slots < 1 or items < 2:
        raise UsageError(
            f"a RocketMQ index file cannot have {slots:,} slots and {items:,} items",
            hint="give maxHashSlotNum and maxIndexNum of the broker's configuration",
        )
    if file_bytes(slots, items) > FILE_BYTES_MAX:
        raise UsageError(
            f"RocketMQ index files of {slots:,} slots and {items:,} items are larger than 2 GiB, and no broker reads "
            "them",
            hint="give maxHashSlotNum and maxIndexNum of the broker's configuration",
        )


def write_files(
    messages: Iterable[IndexedMessage],
    directory: Path,
    *,
    slots: int = DEFAULT_SLOTS,
    items: int = DEFAULT_ITEMS,
) -> list[Path]:
    """Index files of ``messages`` in log order, as a broker with these settings writes them.

    Files are named as a broker names them, but by the time (UTC) of their first message. They are sparse: unused items
    take no space. Raises UsageError for sizes that no broker uses, and errors of the disk; no file is left then, as a
    part of them looks complete.
    """
    check_sizes(slots, items)
    paths: list[Path] = []
    previous: IndexHeader | None = None
    writing: _FileBeingWritten | None = None
    try:
        for message in messages:
            for key in message.keys:
                if writing is not None and writing.image.is_full:
                    previous = writing.finish()
                    writing = None
                if writing is None:
                    paths.append(directory / _file_name(message.store_timestamp, paths))
                    writing = _FileBeingWritten(paths[-1], slots, items, previous)
                writing.put(broker_hash(message.topic, key), message)
        if writing is not None:
            writing.finish()
    except BaseException:
        if writing is not None:
            writing.close()
        for path in paths:
            path.unlink(missing_ok=True)
        raise
    return paths


class _FileBeingWritten:
    """An index file, mapped. Its bytes are allocated on the disk before they are written: a full disk would end the
    process (SIGBUS)."""

    def __init__(self, path: Path, slots: int, items: int, previous: IndexHeader | None) -> None:
        """Create the file ``path``, which must not exist, with disk space for its slots, and map it into memory.
        ``previous``: the header of the index file before it. Raises the TieredError of an error of the disk."""
        length = file_bytes(slots, items)
        self._path = path
        self._slot_bytes = file_bytes(slots, 0)
        self._allocated = 0
        with _translated(path):
            self._file = path.open("x+b")
            try:
                self._file.truncate(length)
                self._allocate(self._slot_bytes)
                self._mapped = mmap.mmap(self._file.fileno(), length)
            except BaseException:
                self._file.close()
                raise
        self.image = IndexFileImage.begin(self._mapped, slots, items, previous)

    def put(self, hash_: int, message: IndexedMessage) -> None:
        """Add a key of ``message`` with the broker's hash ``hash_``. Raises the TieredError of an error of the disk."""
        end = self._slot_bytes + ITEM.size * (self.image.header.item_count + 1)
        if end > self._allocated:
            with _translated(self._path):
                self._allocate(end)
        self.image.put(hash_, message.phys, message.store_timestamp)

    def finish(self) -> IndexHeader:
        """Write the header, close the file, and return the header. Raises the TieredError of an error of the disk."""
        self.image.finish()
        with _translated(self._path):
            self._mapped.flush()
        self.close()
        return self.image.header

    def close(self) -> None:
        """Closes the file; more calls have no effect."""
        self._mapped.close()
        self._file.close()

    def _allocate(self, end: int) -> None:
        """Allocate disk space up to byte ``end`` of the file, and some more, so that few calls need any."""
        begin, self._allocated = (
            self._allocated,
            min(end + ALLOCATED_BYTES, os.fstat(self._file.fileno()).st_size),
        )
        os.posix_fallocate(self._file.fileno(), begin, self._allocated - begin)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise file_error(error, path) from error


def _file_name(begin_ms: int, before: Sequence[Path]) -> str:
    """The name of an index file whose first message was stored at ``begin_ms``: yyyyMMddHHmmssSSS, as the broker names
    it, but above the names of all files ``before``, as the broker loads files in the order of their names."""
    second, ms = divmod(min(max(begin_ms, 0), DATES_END_MS), 1000)  # damaged records may have any time
    name = f"{datetime.fromtimestamp(second, UTC):%Y%m%d%H%M%S}{ms:03d}"
    return max(name, f"{int(before[-1].name) + 1:017d}") if before else name
