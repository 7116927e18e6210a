"""A byte-bounded LRU: the only one here. Pure; does not own locks nor the weights of entries.

Where clients choose the keys, it resists floods: entries used once and entries used again are separate, so invented
names, which are used once, evict each other, while they take up to three quarters of the bytes.
"""

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
        """``resists_floods``: keep entries that were used once apart, so that many new keys evict only one another."""
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._again: OrderedDict[K, tuple[V, int]] = OrderedDict()
        """Value and weight of entries that were used again since they were added; the least recently used is first."""
        self._once: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._new = self._once if resists_floods else self._again
        """The table to which new entries go."""
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
        """The value of ``key``, which thereby becomes the most recently used; None if there is none."""
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
        """Add an entry of the weight ``byte_count`` for a new ``key``. Returns the values that were evicted to make
        room, its own included if it is too large."""
        self._new[key] = value, byte_count
        if self._new is self._once:
            self._once_bytes += byte_count
        self.held_bytes += byte_count
        return self.evict(self.held_bytes - self.bytes_max)

    def put(self, key: K, value: V, byte_count: int = 1) -> list[V]:
        """Add an entry for ``key``, or replace its value and weight, which counts as a use. Returns the values that
        were evicted to make room."""
        if self.get(key) is None:
            return self.add(key, value, byte_count)
        self.held_bytes += byte_count - self._again[key][1]
        self._again[key] = value, byte_count
        return self.evict(self.held_bytes - self.bytes_max)

    def pop(self, key: K) -> V | None:
        """Remove the entry of ``key`` and return its value; None if there is none."""
        entry = self._again.pop(key, None)
        if entry is None:
            entry = self._once.pop(key, None)
            self._once_bytes -= 0 if entry is None else entry[1]
        if entry is None:
            return None
        self.held_bytes -= entry[1]
        return entry[0]

    def evict(self, byte_count: int) -> list[V]:
        """Remove the least recently used entries until ``byte_count`` bytes are free, or none is left, and return their
        values. Entries used once go first, unless they have less than their share."""
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
