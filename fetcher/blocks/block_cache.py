"""Cache of decoded blocks, bounded in bytes and by age.

Unread blocks expire by age since they arrived, read ones by age since the last read. Evicted first are read blocks,
least recently used first, then unread ones, oldest first. The CRC32C of the decoded bytes is checked on every read, as
memory is not trusted either. Does not own the memory's account (budget.py) nor fetching (segment_source.py).
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import fastcrc
import numpy as np
from numpy.typing import NDArray

from tiered.clock import Clock

Block = NDArray[np.uint8]


class BlockKey(NamedTuple):
    """Object key and number of the block in the object: objects are immutable, so this names bytes for ever."""

    object_key: str
    block: int


class NewBlock(NamedTuple):
    """A block to be held; ``crc32c`` is of its bytes, ``is_read``: a reader has it already."""

    key: BlockKey
    block: Block
    crc32c: int
    is_read: bool


class DropReason(Enum):
    """Why an unread block left the cache."""

    EXPIRED = "expired"
    EVICTED = "evicted"


class DroppedUnread(NamedTuple):
    """A block that left the cache unread."""

    key: BlockKey
    byte_count: int
    reason: DropReason


@dataclass(frozen=True)
class BlockCacheLimits:
    """How much and for how long."""

    bytes_max: int
    unread_expiry_s: float = 180.0
    read_expiry_s: float = 10.0


@dataclass(slots=True)
class _Entry:
    block: Block
    crc32c: int
    since_s: float


@dataclass
class BlockCacheCounts:
    """Totals since the start."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    expired_unread: int = 0
    evicted_unread: int = 0


class BlockCache:
    """Blocks by key. Thread-safe. ``on_unread_dropped`` is called without a lock held."""

    def __init__(
        self,
        limits: BlockCacheLimits,
        *,
        clock: Clock,
        on_unread_dropped: Callable[[list[DroppedUnread]], None] | None = None,
    ) -> None:
        """``on_unread_dropped`` is called with the prefetched blocks that were dropped before they were read, so that
        less is prefetched from then on."""
        self._limits = limits
        self._clock = clock
        self._on_unread_dropped = on_unread_dropped
        self._lock = threading.Lock()
        # Both in order of ``since_s``, so what expires or goes first is in front.
        self._unread: OrderedDict[BlockKey, _Entry] = OrderedDict()
        self._read: OrderedDict[BlockKey, _Entry] = OrderedDict()
        self._held_bytes = 0
        self.counts = BlockCacheCounts()

    def __len__(self) -> int:
        return len(self._unread) + len(self._read)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._unread or key in self._read

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks held."""
        return self._held_bytes

    # -- blocks -----------------------------------------------------------------------------------------------

    def get(self, key: BlockKey, *, is_read: bool) -> Block | None:
        """The block or None. ``is_read``: a reader takes it, its checksum verified; a prefetch only looks if it is
        there."""
        return self.get_all([key], is_read=is_read)[0]

    def get_all(self, keys: Sequence[BlockKey], *, is_read: bool) -> list[Block | None]:
        """The cached block of each key, or None where there is none, like ``get`` for each key but with one turn of the
        lock."""
        with self._lock:
            entries = [self._read.get(key) or self._unread.get(key) for key in keys]
            self.counts.misses += entries.count(None)
        return [
            None if entry is None else self._taken(key, entry, is_read=is_read)
            for key, entry in zip(keys, entries, strict=True)
        ]

    def _taken(self, key: BlockKey, entry: _Entry, *, is_read: bool) -> Block | None:
        """The block of ``entry``. With ``is_read`` a reader takes it: its checksum is compared first, and the block is
        then kept among those that were read. None if the checksum differs, because memory was damaged."""
        if is_read and fastcrc.crc32.iscsi(entry.block) != entry.crc32c:
            with self._lock:
                self.counts.corrupt += 1
                self.counts.misses += 1
            self.drop([key])
            return None
        with self._lock:
            self.counts.hits += 1
            # An entry that another thread has evicted since stays evicted, though this reader gets the block.
            if is_read and (self._read.get(key) is entry or self._unread.get(key) is entry):
                self._unread.pop(key, None)
                entry.since_s = self._clock.monotonic_s()
                self._read[key] = entry
                self._read.move_to_end(key)
        return entry.block

    def put(self, key: BlockKey, block: Block, crc32c: int, *, is_read: bool) -> None:
        """Hold ``block`` (``crc32c`` is of its bytes); one that is held already is replaced."""
        self.put_all([NewBlock(key, block, crc32c, is_read)])

    def put_all(self, blocks: Sequence[NewBlock]) -> None:
        """Add ``blocks`` to the cache. If there is no room for all, the oldest are evicted."""
        now_s = self._clock.monotonic_s()
        gone: list[_Entry] = []
        with self._lock:
            for key, block, crc32c, is_read in blocks:
                self._remove(key, gone)
                if block.nbytes <= self._limits.bytes_max:
                    (self._read if is_read else self._unread)[key] = _Entry(block, crc32c, now_s)
                    self._held_bytes += block.nbytes
            dropped = self._evict(self._held_bytes - self._limits.bytes_max, gone, unread_too=True)
        gone.clear()  # frees memory without the lock
        self._report(dropped)

    def drop(self, keys: Iterable[BlockKey]) -> int:
        """Drop blocks, read or not, without a report; returns bytes."""
        gone: list[_Entry] = []
        with self._lock:
            return sum(self._remove(key, gone) for key in keys)

    # -- room -------------------------------------------------------------------------------------------------

    def reclaim(self, byte_count: int, *, unread_too: bool) -> int:
        """Evict blocks of at least ``byte_count`` bytes together, or all there are, to free memory for other uses. Only
        with ``unread_too`` are prefetched blocks evicted that were not read yet. Returns the bytes evicted."""
        gone: list[_Entry] = []
        with self._lock:
            before = self._held_bytes
            dropped = self._evict(byte_count, gone, unread_too=unread_too)
            freed = before - self._held_bytes
        gone.clear()
        self._report(dropped)
        return freed

    def expire(self) -> None:
        """Drop the blocks that were read too long ago, and the prefetched ones that were not read in time."""
        now_s = self._clock.monotonic_s()
        gone: list[_Entry] = []
        dropped: list[DroppedUnread] = []
        with self._lock:
            for entries, age_s in (
                (self._read, self._limits.read_expiry_s),
                (self._unread, self._limits.unread_expiry_s),
            ):
                while entries:
                    key, entry = next(iter(entries.items()))
                    if entry.since_s + age_s > now_s:
                        break
                    if entries is self._unread:
                        dropped.append(DroppedUnread(key, entry.block.nbytes, DropReason.EXPIRED))
                    self._remove(key, gone)
            self.counts.expired_unread += len(dropped)
        gone.clear()
        self._report(dropped)

    def _evict(self, byte_count: int, gone: list[_Entry], *, unread_too: bool) -> list[DroppedUnread]:
        """Remove blocks of ``byte_count`` bytes together, those that were read first; return the prefetched ones among
        them that were not. All are appended to ``gone``, which the caller drops without the lock: freeing the memory
        then does not delay other threads."""
        dropped: list[DroppedUnread] = []
        while byte_count > 0 and self._read:
            byte_count -= self._remove(next(iter(self._read)), gone)
        while byte_count > 0 and unread_too and self._unread:
            key = next(iter(self._unread))
            dropped.append(DroppedUnread(key, self._unread[key].block.nbytes, DropReason.EVICTED))
            byte_count -= self._remove(key, gone)
        self.counts.evicted_unread += len(dropped)
        return dropped

    def _remove(self, key: BlockKey, gone: list[_Entry]) -> int:
        """Remove the block ``key``, if it is cached, and return its bytes. The entry is appended to ``gone``, which the
        caller drops without the lock, because freeing it informs the memory budget."""
        entry = self._unread.pop(key, None) or self._read.pop(key, None)
        if entry is None:
            return 0
        gone.append(entry)
        self._held_bytes -= entry.block.nbytes
        return entry.block.nbytes

    def _report(self, dropped: list[DroppedUnread]) -> None:
        if dropped and self._on_unread_dropped is not None:
            self._on_unread_dropped(dropped)
