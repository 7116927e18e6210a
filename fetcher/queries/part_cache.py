"""Cache of small parts of an archive between queries: parts of index files, key sections, footers, catalog pages.

Objects are immutable, so cached parts are never stale; they are checked when used, and dropped by object if a check
fails.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from fetcher.blocks.budget import ByteBudget
from fetcher.io.request_scheduler import Priority
from tiered.model.lru import Lru

ENTRY_BYTES = 200
"""Approximate memory of an entry without its value."""


class PartKey(NamedTuple):
    """``part`` of the object ``object_key``."""

    object_key: str
    part: Hashable


class _Part(NamedTuple):
    value: Any
    byte_count: int


class PartCache:
    """At most ``bytes_max``; with a ``budget`` charged to it, and released when a user read needs room. Thread-safe."""

    def __init__(self, bytes_max: int, budget: ByteBudget | None = None) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._parts: Lru[PartKey, _Part] = Lru(bytes_max)
        if budget is not None:
            budget.add_reclaimer(self._reclaim)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def held_bytes(self) -> int:
        """Bytes of all parts, about."""
        return self._parts.held_bytes

    def get(self, object_key: str, part: Hashable) -> Any | None:
        """The part, if it is kept."""
        with self._lock:
            found = self._parts.get(PartKey(object_key, part))
            return None if found is None else found.value

    def put(self, object_key: str, part: Hashable, value: Any, byte_count: int) -> None:
        """Cache ``value`` unless it is too large or the budget has no room."""
        key, byte_count = PartKey(object_key, part), byte_count + ENTRY_BYTES
        if byte_count > self._parts.bytes_max or key in self._parts:
            return
        if self._budget is not None and not self._budget.try_charge(byte_count, Priority.PREFETCH):
            return
        with self._lock:
            gone = [_Part(value, byte_count)]  # unless it is new
            if key not in self._parts:
                gone = self._parts.add(key, gone[0], byte_count)
        self._release(gone)

    def drop(self, object_key: str) -> int:
        """Forget every part of an object, because one was wrong; returns how many there were."""
        with self._lock:
            gone = [part for key, part in self._parts if key.object_key == object_key]
            for key in [key for key, _ in self._parts if key.object_key == object_key]:
                self._parts.pop(key)
        self._release(gone)
        return len(gone)

    def evict(self, byte_count: int) -> None:
        """Drop so many bytes of parts, the longest unused first."""
        with self._lock:
            gone = self._parts.evict(byte_count)
        self._release(gone)

    def _reclaim(self, byte_count: int, priority: int) -> None:
        """Evict parts for a user's read only, like tails of objects."""
        if priority <= Priority.USER:
            self.evict(byte_count)

    def _release(self, parts: Sequence[_Part]) -> None:
        if self._budget is not None and parts:
            self._budget.release(sum(part.byte_count for part in parts))
