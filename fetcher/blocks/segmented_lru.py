"""A table of what is remembered by names that others choose: so many bytes, and the least useful goes first.

Who came once is told from who came back. Names that are made up come once: they push out each other and leave those
alone that come back, while three quarters of the bytes are theirs.

Pure. Owns the order in which entries are evicted. Does not own locks, nor what an entry weighs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 300
"""Of an entry of these tables, with the tuple of its key: measured, and rounded up."""
ONCE_SHARE = 4
"""Those that came once keep a quarter of the bytes at least."""


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
        """As of now: entries may come and go meanwhile."""
        for key, (value, _) in [*self._once.items(), *self._again.items()]:
            yield key, value

    def get(self, key: K) -> V | None:
        """What is remembered of ``key``; that it was asked for does not count."""
        found = self._again.get(key) or self._once.get(key)
        return None if found is None else found[0]

    def used(self, key: K) -> None:
        """``key`` came back."""
        if key in self._again:
            self._again.move_to_end(key)
        elif (entry := self._once.pop(key, None)) is not None:
            self._once_bytes -= entry[1]
            self._again[key] = entry

    def add(self, key: K, value: V, byte_count: int) -> list[V]:
        """Remember what was not known; returns what is evicted for it. What has no room is evicted at once."""
        self._once[key] = value, byte_count
        self._once_bytes += byte_count
        self.held_bytes += byte_count
        return self.evict(self.held_bytes - self.bytes_max)

    def replace(self, key: K, value: V) -> None:
        """``key``, which is known, is remembered with another value of the same weight."""
        table = self._again if key in self._again else self._once
        table[key] = value, table[key][1]

    def put(self, key: K, value: V, byte_count: int) -> None:
        """``key`` came, or came back: remember this of it. ``byte_count``: its weight if it is new."""
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
