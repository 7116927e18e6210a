"""A byte-bounded LRU that resists key flooding, for keys that clients choose.

Entries used once and entries used again are separate: invented names are used once and evict each other, while they
take up to three quarters of the bytes. Pure; does not own locks nor the weights of entries.
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


class SegmentedLru(Generic[K, V]):
    """Entries of at most ``bytes_max``, which may be changed, by the weights that ``add`` is given."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._once: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._again: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._once_bytes = 0

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __repr__(self) -> str:
        return f"SegmentedLru({len(self)} entries, {self.held_bytes} of {self.bytes_max} bytes)"

    def __iter__(self) -> Iterator[tuple[K, V]]:
        """A snapshot: entries may change during iteration."""
        for key, (value, _) in [*self._once.items(), *self._again.items()]:
            yield key, value

    def get(self, key: K) -> V | None:
        """The value of ``key``, without counting as a use."""
        found = self._again.get(key) or self._once.get(key)
        return None if found is None else found[0]

    def used(self, key: K) -> None:
        """``key`` was used again."""
        if key in self._again:
            self._again.move_to_end(key)
        elif (entry := self._once.pop(key, None)) is not None:
            self._once_bytes -= entry[1]
            self._again[key] = entry

    def add(self, key: K, value: V, byte_count: int) -> list[V]:
        """Add a new entry; returns the values evicted for it, itself included if it has no room."""
        self._once[key] = value, byte_count
        self._once_bytes += byte_count
        self.held_bytes += byte_count
        return self.evict(self.held_bytes - self.bytes_max)

    def replace(self, key: K, value: V) -> None:
        """Replace the value of an existing ``key``; the weight stays."""
        table = self._again if key in self._again else self._once
        table[key] = value, table[key][1]

    def put(self, key: K, value: V, byte_count: int) -> None:
        """Add ``key``, or replace its value and count a use. ``byte_count``: its weight if it is new."""
        if self.get(key) is None:
            self.add(key, value, byte_count)
        else:
            self.replace(key, value)
            self.used(key)

    def drop(self, key: K) -> None:
        """Forget this one, if it is known."""
        entry = self._again.pop(key, None)
        if entry is None and (entry := self._once.pop(key, None)) is not None:
            self._once_bytes -= entry[1]
        self.held_bytes -= 0 if entry is None else entry[1]

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
