"""Prefetch of adjacent blocks for objects with many small runs that are read one after the other.

A request for some kilobytes costs as much as one for a megabyte. Once the small runs of an object are read in their
order, a GET also reads the blocks after them, twice as many each time up to a bound; blocks evicted unread halve it.
The next GET begins when the first of these blocks is read, so that readers do not wait for each. Runs of ordinary size
are left to their readers' prefetch windows.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from fetcher.blocks.block_cache import BlockKey
from tiered.formats.segment_index import SegmentIndex
from tiered.model.lru import Lru

RUN_BYTES_MAX = 2 * 1024 * 1024
"""Raw bytes of a small run: reading it costs a request more than its bytes."""
FIRST_BYTES, MOST_BYTES = 64 * 1024, 4 * 1024 * 1024
"""Stored bytes after the requested ones: the first time, and at most."""
NEXT_BLOCKS = 2
"""Requests at most this far after the previous one count as sequential."""
PROOFS = 4
"""Surplus of sequential requests before adjacent blocks are read."""
NEAR_BLOCKS = 48
"""Distance tolerated once the order is clear: concurrent readers are slightly out of order."""
OBJECTS_MAX = 4096


@dataclass
class _ScanOrder:
    """How an object is read: up to block ``end``, ``byte_count`` stored bytes further each time. The next blocks are
    to be loaded when one of ``due`` is read."""

    end: int
    byte_count: int = 0
    proofs: int = 0
    due: range = range(0)

    def is_sequential(self, first: int) -> bool:
        """Note a request for the blocks from number ``first`` on, and return whether the object is being read from
        front to back: PROOFS requests have begun where the one before ended, or shortly after."""
        distance = first - self.end
        if self.proofs >= PROOFS:
            self.proofs = PROOFS if abs(distance) <= NEAR_BLOCKS else 0
        else:
            self.proofs = self.proofs + 1 if 0 <= distance <= NEXT_BLOCKS else max(0, self.proofs - 1)
        return self.proofs >= PROOFS


class AdjacentPrefetch:
    """Chooses the blocks that a GET reads besides the requested ones, by the order in which each object is read. At
    most ``unread_bytes_max`` raw bytes of them are unread at a time. Thread-safe."""

    def __init__(self, unread_bytes_max: int) -> None:
        """Begins without any order of reading known. ``unread_bytes_max``: limit of the decompressed bytes of blocks
        that were loaded ahead and not read yet."""
        self.unread_bytes_max = unread_bytes_max
        self._lock = threading.Lock()
        self._orders: Lru[str, _ScanOrder] = Lru(OBJECTS_MAX)
        self._last_byte_count = 0
        """How many bytes ahead the object was read that was read to its end last. The next object begins with half of
        it instead of the smallest size."""
        self._unread: dict[BlockKey, int] = {}
        self._unread_bytes = 0

    @property
    def unread_bytes(self) -> int:
        """Raw bytes of adjacent blocks that are not read yet."""
        return self._unread_bytes

    @property
    def is_full(self) -> bool:
        """Whether adjacent blocks do not fit, unless some were lost unnoticed."""
        return 2 * self._unread_bytes > self.unread_bytes_max

    def unread(self) -> list[BlockKey]:
        """Unread adjacent blocks."""
        with self._lock:
            return list(self._unread)

    def to_load_with(self, index: SegmentIndex, run: int, first: int, last: int) -> range:
        """Which blocks to load together with the blocks [first, last], which a read of the run ``run`` (the rows of one
        queue in the object) needs: those that follow, if the object is being read from front to back; else none."""
        if index.byte_count_of(run) > RUN_BYTES_MAX:
            return range(0)  # the queue's own prefetch loads its next blocks
        with self._lock:
            order = self._orders.get(index.key)
            if order is None:
                order = self._begin(first)
                self._orders.add(index.key, order)
            if not order.is_sequential(first):
                order.end, order.byte_count, order.due = last + 1, 0, range(0)
                return range(0)
            return self._further(order, index, last + 1)

    def _begin(self, first: int) -> _ScanOrder:
        """The order of an object whose first request is for block ``first``."""
        if not self._last_byte_count or first > NEAR_BLOCKS:
            return _ScanOrder(first)
        byte_count, self._last_byte_count = self._last_byte_count // 2, 0
        return _ScanOrder(first, byte_count, PROOFS)

    def to_load_now(self, index: SegmentIndex, last: int) -> range:
        """Adjacent blocks to load now, when blocks up to ``last`` are read and no block is absent."""
        order = self._orders.peek(index.key)
        if order is None or last not in order.due:
            return range(0)
        with self._lock:  # another reader may have been first
            return self._further(order, index, order.end) if last in order.due else range(0)

    def _further(self, order: _ScanOrder, index: SegmentIndex, begin: int) -> range:
        """The blocks from number ``begin`` on to load ahead: twice as many bytes as the last time, between FIRST_BYTES
        and MOST_BYTES, as far as ``unread_bytes_max`` leaves room."""
        order.byte_count = min(max(FIRST_BYTES, 2 * order.byte_count), MOST_BYTES)
        room_bytes = self.unread_bytes_max - self._unread_bytes
        end, stored_bytes = begin, 0
        blocks = index.blocks[end : end + 4 * NEAR_BLOCKS]
        for stored, raw in zip(blocks["stored_bytes"].tolist(), blocks["raw_bytes"].tolist(), strict=True):
            stored_bytes += stored
            room_bytes -= raw
            if stored_bytes > order.byte_count or room_bytes < 0 or raw > RUN_BYTES_MAX:
                break
            end += 1
        order.end = max(order.end, end)
        if begin < end == len(index.blocks):
            self._last_byte_count = order.byte_count
        order.due = range(begin, order.end) if begin < end else range(0)
        return range(begin, end)

    def are_loading(self, keys: Iterable[tuple[BlockKey, int]]) -> None:
        """Note that these adjacent blocks, with their raw bytes, are being loaded."""
        with self._lock:
            for key, raw_bytes in keys:
                self._unread_bytes += raw_bytes - self._unread.get(key, 0)
                self._unread[key] = raw_bytes

    def were_read(self, keys: Iterable[BlockKey]) -> None:
        """Blocks are read."""
        if not self._unread:
            return
        with self._lock:
            self._unread_bytes -= sum(self._unread.pop(key, 0) for key in keys)

    def lost(self, keys: Iterable[BlockKey]) -> None:
        """Blocks that were loaded ahead were evicted, or could not be loaded, before they were read: of each object
        they belong to, half as much is loaded ahead from now on."""
        with self._lock:
            halved: set[str] = set()
            for key in keys:
                if key not in self._unread:
                    continue
                self._unread_bytes -= self._unread.pop(key)
                order = self._orders.peek(key.object_key)
                if order is not None and key.object_key not in halved:
                    halved.add(key.object_key)
                    order.byte_count //= 4  # it is doubled before it is used, so this halves it
