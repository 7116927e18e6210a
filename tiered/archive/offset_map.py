"""The latest offset of each key of a queue: a map from the MD5 of KEYS to an offset, in bounded memory.

It does what the broker's OffsetMap does, for any number of keys. When memory is full, its entries are reduced to the
last one of each key; if these are still many, they go to a temporary file, divided by digest, and each part is reduced
on its own.
"""

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered.archive.kept_offsets import KeptOffsets
from tiered.errors import CorruptionError
from tiered.kernels.record_fields import Number, record_fields
from tiered.model.tables import Table, concatenated, picked, sorted_ties

ENTRY_DTYPE: Final = np.dtype(
    [
        ("high", "<u8"),
        ("low", "<u8"),  # MD5 of KEYS
        ("offset", "<i8"),
        ("size", "<i4"),
        ("is_tombstone", "u1"),  # the body is empty: the key was deleted
        ("has_key", "u1"),
        ("queue", "<u4"),  # a number: keys of several queues may be in one map
    ]
)
"""An entry: a message with the digest of its key, its queue offset, and the ``size`` of its record in bytes."""
MEMORY_BYTES = 64 << 20
"""Of the map of a reader; more keys go to a file in the temporary directory."""
_WORK_FACTOR = 4
"""Reducing entries takes so many times their own memory."""
_PARTS = 256
_SHIFT = np.uint64(56)
"""A part is the first 8 of the 64 bits of ``high``."""


class OffsetMap:
    """Takes about ``memory_bytes``. Not thread-safe. ``close`` it: the spool is a file without a name in
    ``directory``."""

    def __init__(self, directory: Path, memory_bytes: int) -> None:
        """``directory``: where the temporary file is created when it is needed."""
        self._entries_max = max(1024, memory_bytes // (_WORK_FACTOR * ENTRY_DTYPE.itemsize))
        self._directory = directory
        self._file: Any = None
        self._places: list[list[tuple[int, int]]] = [[] for _ in range(_PARTS)]
        """Where the entries of each part are in the file: position and number."""
        self._in_memory: list[Table] = []
        self._count = 0
        """Entries in memory, and how many these are."""
        self.spooled_bytes = 0
        """Bytes in the file."""

    def add(self, entries: Table) -> None:
        """Add messages with keys (``entries``, ENTRY_DTYPE), in any order. When there are too many in memory, only the
        last of each key stays; if that are many still, they go to the temporary file.
        Raises OSError."""
        self._in_memory.append(entries)
        self._count += len(entries)
        if self._count <= self._entries_max:
            return
        latest = _latest(concatenated(self._in_memory, ENTRY_DTYPE))
        self._in_memory, self._count = [latest], len(latest)
        if self._count > self._entries_max // 2:
            self._spill(latest)

    def latest(self) -> Iterator[Table]:
        """The last message of each key (ENTRY_DTYPE), in several tables, each with all entries of its keys."""
        if self._file is None:
            yield _latest(concatenated(self._in_memory, ENTRY_DTYPE))
            return
        self._spill(concatenated(self._in_memory, ENTRY_DTYPE))
        for places in self._places:
            parts = []
            for begin, count in places:
                self._file.seek(begin)
                parts.append(np.fromfile(self._file, ENTRY_DTYPE, count))
            yield _latest(concatenated(parts, ENTRY_DTYPE))

    def close(self) -> None:
        """Remove the temporary file, if there is one."""
        if self._file is not None:
            self._file.close()

    def _spill(self, entries: Table) -> None:
        """Move ``entries``, all that are in memory, to the end of the temporary file, divided into _PARTS parts by the
        first bits of the key's digest: each part is read alone, so that it fits into memory."""
        if self._file is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
        part = (entries["high"] >> _SHIFT).astype(np.int64)
        order = np.argsort(part, kind="stable")
        ends = np.cumsum(np.bincount(part, minlength=_PARTS)).tolist()
        self._file.seek(self.spooled_bytes)
        picked(entries, order).tofile(self._file)
        begin = 0
        for number, end in enumerate(ends):
            if end > begin:
                self._places[number].append((self.spooled_bytes + begin * ENTRY_DTYPE.itemsize, end - begin))
            begin = end
        self.spooled_bytes += len(entries) * ENTRY_DTYPE.itemsize
        self._in_memory, self._count = [], 0


def keep_latest(kept: KeptOffsets, parts: Iterable[Table], *, with_tombstones: bool = False) -> None:
    """Keep of a queue's messages below ``kept.end``, which ``parts`` has in tables of ENTRY_DTYPE, the last of each
    key; only ``with_tombstones`` those that delete their key."""
    with closing(OffsetMap(Path(tempfile.gettempdir()), MEMORY_BYTES)) as keys:
        for entries in parts:
            keys.add(picked(entries, (entries["has_key"] > 0) & (entries["offset"] < kept.end)))
        for latest in keys.latest():
            kept.keep(latest["offset"][(latest["is_tombstone"] == 0) | with_tombstones].astype(np.int64))


def _latest(entries: Table) -> Table:
    """Of the entries of each key of a queue, the one with the highest queue offset."""
    high = np.ascontiguousarray(entries["high"])
    order = sorted_ties(np.argsort(high), high, entries["low"], entries["queue"], entries["offset"])
    keys = entries[["high", "low", "queue"]][order]
    is_last = np.append(keys[1:] != keys[:-1], np.ones(min(1, len(order)), bool))
    return picked(entries, order[is_last])


def entries_of(
    data: NDArray[np.uint8], starts: NDArray[Any], sizes: NDArray[Any], offsets: NDArray[Any]
) -> Table:
    """Entries (ENTRY_DTYPE) of the records ``data[starts[i] : starts[i] + sizes[i]]``, which are at ``offsets`` of
    their queue: the MD5 of their KEYS, and whether they delete the key by an empty body. Raises CorruptionError for a
    malformed record."""
    fields = record_fields(data, starts, sizes, properties=True)
    if not fields[Number.VALID].all():
        raise CorruptionError(
            f"the record at queue offset {offsets[fields[Number.VALID].argmin()]} is damaged: its lengths do not fit "
            "together"
        )
    keys_at, keys_bytes = fields[Number.KEYS_AT], fields[Number.KEYS_BYTES]
    entries = np.zeros(len(offsets), ENTRY_DTYPE)
    view, md5 = data.data, hashlib.md5
    ends = (keys_at + keys_bytes).tolist()
    keys = [view[begin:end] for begin, end in zip(keys_at.tolist(), ends, strict=True)]
    digests = b"".join([md5(key, usedforsecurity=False).digest() for key in keys])
    halves = np.frombuffer(digests, "<u8").reshape(-1, 2)
    entries["high"], entries["low"] = halves[:, 0], halves[:, 1]
    entries["offset"], entries["size"] = offsets, sizes
    entries["is_tombstone"], entries["has_key"] = fields[Number.BODY_BYTES] == 0, keys_bytes > 0
    # As in the broker (StringUtils.isNotBlank), a key of blanks is none. Only keys that begin with a blank are checked.
    with_key = np.flatnonzero(entries["has_key"])
    for row in with_key[data[keys_at[with_key]] <= ord(" ")].tolist():
        entries["has_key"][row] = bool(bytes(keys[row]).strip())
    return entries
