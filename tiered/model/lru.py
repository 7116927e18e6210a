"""A byte-bounded LRU: the only one here. Pure; does not own locks nor the weights of entries.

Where clients choose the keys, it resists floods: entries used once and entries used again are separate, so invented
names, which are used once, evict each other, while they take up to three quarters of the bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 300
"""Memory of an entry of these tables with its key's tuple: measured, rounded up."""
ONCE_SHARE = 4
"""Entries used once keep at least a quarter of the bytes."""


class Lru(Generic[K, V]):
    """Entries of at most ``bytes_max``, which may be changed, by the weights that ``add`` is given: bytes, or 1 each
    to bound their number. An entry as heavy as ``bytes_max`` stays alone, a heavier one is not kept."""

    def __init__(self, bytes_max: int, *, resists_floods: bool = False) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._again: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._once: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._new = self._once if resists_floods else self._again
        self._once_bytes = 0

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: K) -> bool:
        return key in self._again or key in self._once

    def __iter__(self) -> Iterator[tuple[K, V]]:
        """A snapshot, the least recently used first: entries may change during iteration."""
        for key, (value, _) in [*self._once.items(), *self._again.items()]:
            yield key, value

    def peek(self, key: K) -> V | None:
        """The value of ``key``, without counting as a use."""
        found = self._again.get(key) or self._once.get(key)
        return None if found is None else found[0]

    def get(self, key: K) -> V | None:
        """The value of ``key``, which is used again."""
        found = self._again.get(key)
        if found is not None:
            self._again.move_to_end(key)
            return found[0]
        found = self._once.pop(key, None)
        if found is None:
            return None
        self._once_bytes -= found[1]
        self._again[key] = found
        return found[0]

    def add(self, key: K, value: V, byte_count: int = 1) -> list[V]:
        """Add a new entry; returns the values evicted for it, itself included if it has no room."""
        self._new[key] = value, byte_count
        if self._new is self._once:
            self._once_bytes += byte_count
        self.held_bytes += byte_count
        return self.evict(self.held_bytes - self.bytes_max)

    def put(self, key: K, value: V, byte_count: int = 1) -> list[V]:
        """Add ``key``, or replace its value and weight and count a use; returns the values evicted for it."""
        if self.get(key) is None:
            return self.add(key, value, byte_count)
        self.held_bytes += byte_count - self._again[key][1]
        self._again[key] = value, byte_count
        return self.evict(self.held_bytes - self.bytes_max)

    def pop(self, key: K) -> V | None:
        """Forget this one; returns its value, if it is known."""
        entry = self._again.pop(key, None)
        if entry is None:
            entry = self._once.pop(key, None)
            self._once_bytes -= 0 if entry is None else entry[1]
        if entry is None:
            return None
        self.held_bytes -= entry[1]
        return entry[0]

    def evict(self, byte_count: int) -> list[V]:
        """Forget so many bytes, as far as there are any; returns what they were of."""
        evicted, left_bytes = [], self.held_bytes - byte_count
        while self.held_bytes > left_bytes and (self._once or self._again):
            takes_once = bool(self._once) and (
                not self._again or self._once_bytes * ONCE_SHARE > self.bytes_max
            )
            table = self._once if takes_once else self._again
            _, (value, weight) = table.popitem(last=False)
            self._once_bytes -= weight if takes_once else 0
            self.held_bytes -= weight
            evicted.append(value)
        return evicted
