"""Cache of small parts of an archive between queries: parts of index files, key sections, footers, catalog pages.

Objects are immutable, so cached parts are never stale; they are checked when used, and dropped by object if a check
fails.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

from fetcher.blocks.budget import ByteBudget
from fetcher.io.request_scheduler import Priority

ENTRY_BYTES = 200
"""Approximate memory of an entry without its value."""


class PartKey(NamedTuple):
    """``part`` of the object ``object_key``."""

    object_key: str
    part: Hashable


class _Entry(NamedTuple):
    value: Any
    byte_count: int


class PartCache:
    """At most ``bytes_max``; with a ``budget`` charged to it, and released when a user read needs room. Thread-safe."""

    def __init__(self, bytes_max: int, budget: ByteBudget | None = None) -> None:
        self._bytes_max = bytes_max
        self._budget = budget
        self._lock = threading.Lock()
        self._entries: OrderedDict[PartKey, _Entry] = OrderedDict()
        self._held_bytes = 0
        if budget is not None:
            budget.add_reclaimer(self._reclaim)

    def __repr__(self) -> str:
        return f"PartCache({len(self._entries)} parts, {self._held_bytes} of {self._bytes_max} bytes)"

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def held_bytes(self) -> int:
        """Bytes of all parts, about."""
        return self._held_bytes

    def get(self, object_key: str, part: Hashable) -> Any | None:
        """The part, if it is kept."""
        key = PartKey(object_key, part)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry.value

    def put(self, object_key: str, part: Hashable, value: Any, byte_count: int) -> None:
        """Cache ``value`` unless it is too large or the budget has no room."""
        key, byte_count = PartKey(object_key, part), byte_count + ENTRY_BYTES
        if byte_count > self._bytes_max or key in self._entries:
            return
        if self._budget is not None and not self._budget.try_charge(byte_count, Priority.PREFETCH):
            return
        with self._lock:
            is_new = key not in self._entries
            if is_new:
                self._entries[key] = _Entry(value, byte_count)
                self._held_bytes += byte_count
        if not is_new:
            self._release(byte_count)
        self.shrink(self._bytes_max)

    def drop(self, object_key: str) -> int:
        """Forget every part of an object, because one was wrong; returns how many there were."""
        with self._lock:
            keys = [key for key in self._entries if key.object_key == object_key]
            gone = sum(self._entries.pop(key).byte_count for key in keys)
            self._held_bytes -= gone
        self._release(gone)
        return len(keys)

    def shrink(self, bytes_max: int) -> None:
        """Drop parts, the longest unused first, until at most ``bytes_max`` are held."""
        gone = 0
        with self._lock:
            while self._held_bytes > bytes_max and self._entries:
                byte_count = self._entries.popitem(last=False)[1].byte_count
                self._held_bytes -= byte_count
                gone += byte_count
        self._release(gone)

    def _reclaim(self, byte_count: int, priority: int) -> None:
        """As tails of objects: only for a user."""
        if priority <= Priority.USER:
            self.shrink(max(0, self._held_bytes - byte_count))

    def _release(self, byte_count: int) -> None:
        if self._budget is not None and byte_count:
            self._budget.release(byte_count)
