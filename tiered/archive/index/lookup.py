"""Finds the items of a key in an index file: one read where its hash should be.

Hashes are uniform, so their position is known within some square roots of the number of items. In files of more than
GUESSED_ITEMS_MAX items, and where keys of many messages shift the others, a read of a slot and one of its items follow
instead. Coroutines over ``read(key, offset, length)`` serve threads and event loops alike. Bytes are checked before
use. Only a slot that holds a key of thousands of messages takes more reads: its pages are searched by bisection.
"""

from collections.abc import Awaitable, Callable
from math import isqrt
from typing import NamedTuple

import numpy as np

from tiered.archive.index.items import ITEM_DTYPE
from tiered.archive.index.layout import PAGE_ITEMS, Shape, decode_pages, decode_slot
from tiered.errors import CorruptionError
from tiered.model.tables import Table

ReadRange = Callable[[str, int, int], Awaitable[bytes]]
"""(key, offset, length) -> exactly these bytes."""

PAGES_AT_ONCE = 8
"""Pages of one read: 32 KiB."""
GUESSED_ITEMS_MAX = 1 << 20
"""In files of more items, the position of a hash is not guessed."""
GUESS_SPREAD = 2
"""A guess covers so many square roots of the number of items on each side of the expected position: at least four
standard deviations."""


class Wanted(NamedTuple):
    """What a query wants: the items with ``hash`` whose messages were stored from ``begin_ms`` to ``end_ms``, both
    included; if they are many, at least the ``items_max`` newest ones."""

    hash: int
    begin_ms: int
    end_ms: int
    items_max: int


class Matches(NamedTuple):
    """The items found, newest first. ``is_all``: the file has no others in the time range."""

    items: Table
    is_all: bool


async def find_items(read: ReadRange, shape: Shape, wanted: Wanted) -> Matches:
    """Find the items ``wanted`` in the index file ``shape.key``, newest first: by one read where they should be, or, if
    that fails, by the slot of their hash and a search in its pages. Raises CorruptionError and the errors of
    ``read``."""
    nothing = Matches(np.zeros(0, ITEM_DTYPE), True)
    if shape.items == 0:
        return nothing
    guessed = await _guessed(read, shape, wanted) if shape.items <= GUESSED_ITEMS_MAX else None
    if guessed is not None:
        return guessed
    slot = shape.slot_of(wanted.hash)
    first, count = decode_slot(shape, slot, await read(shape.key, *shape.slot_range(slot)))
    if count == 0:
        return nothing
    pages = _Pages(read, shape, slot, first, first + count)
    begin = await pages.first_at_least(wanted.hash, wanted.end_ms)
    parts: list[Table] = []
    count = 0
    while begin < pages.end_item:
        items, begin = await pages.items_from(begin)
        matches = items[
            (items["hash"] == np.uint64(wanted.hash)) & (items["store_timestamp"] >= wanted.begin_ms)
        ]
        parts.append(matches)
        count += len(matches)
        if len(matches) < len(items):
            break  # later items have another hash, or are older
        if count >= wanted.items_max and begin < pages.end_item:
            return Matches(np.concatenate(parts), False)
    return Matches(np.concatenate(parts), True) if parts else nothing


async def _guessed(read: ReadRange, shape: Shape, wanted: Wanted) -> Matches | None:
    """All items ``wanted``, by one read of the pages where their hash should be, as hashes are spread evenly; None if
    they are not all inside these pages. Raises CorruptionError."""
    middle = wanted.hash * shape.items >> 64
    spread = GUESS_SPREAD * isqrt(shape.items) + 1
    first_page = max(0, middle - spread) // PAGE_ITEMS
    end_page = min(shape.pages, (middle + spread) // PAGE_ITEMS + 1)
    data = await read(shape.key, *shape.page_range(first_page, end_page))
    items = decode_pages(shape, first_page, end_page, data)
    hashes = items["hash"]
    if bool((hashes[1:] < hashes[:-1]).any()):
        raise CorruptionError(
            f"{shape.key}: the items in the pages {first_page} to {end_page - 1} of the index file are not in order"
        )
    begin = _lower_bound(items, wanted.hash, wanted.end_ms)
    end = int(np.searchsorted(hashes, np.uint64(wanted.hash), side="right"))
    if (begin == 0 and first_page > 0) or (end == len(items) and end_page < shape.pages):
        return None
    found = items[begin:end]
    return Matches(found[found["store_timestamp"] >= wanted.begin_ms], True)


class _Pages:
    """Items [first_item, end_item) of one slot, read in pieces; the last piece is cached."""

    def __init__(self, read: ReadRange, shape: Shape, slot: int, first_item: int, end_item: int) -> None:
        self._read, self._shape, self._slot = read, shape, slot
        self.first_item, self.end_item = first_item, end_item
        self._begin = 0
        self._items = np.zeros(0, ITEM_DTYPE)

    async def items_from(self, item: int) -> tuple[Table, int]:
        """Items from number ``item`` of the file on, as many as one read gives, and the number of the item after
        them."""
        if not self._begin <= item < self._begin + len(self._items):
            await self._load(item // PAGE_ITEMS, PAGES_AT_ONCE)
        found = self._items[item - self._begin :]
        return found, item + len(found)

    async def first_at_least(self, hash_: int, end_ms: int) -> int:
        """The number of the slot's first item with the hash ``hash_`` that is not newer than ``end_ms``, or where it
        would be. A binary search, which reads a page at each step; the first read is of PAGES_AT_ONCE pages at the
        slot's begin, where the item mostly is."""
        low, high = self.first_item, self.end_item
        pages = PAGES_AT_ONCE
        while low < high:
            # The first step looks at the slot's begin.
            middle = low if pages == PAGES_AT_ONCE else (low + high) // 2
            if not self._begin <= middle < self._begin + len(self._items):
                await self._load(middle // PAGE_ITEMS, pages)
            pages = 1
            begin = max(low, self._begin)
            here = self._items[begin - self._begin : high - self._begin]
            at = _lower_bound(here, hash_, end_ms)
            if at == 0 and begin > low:
                high = begin
            elif at < len(here) or at == 0:
                return begin + at
            else:
                low = begin + at
        return low

    async def _load(self, page: int, pages: int) -> None:
        """Read ``pages`` pages of the index file, from number ``page`` on, and keep their items that should belong to
        this slot (a range of hashes). Raises CorruptionError if one belongs to another slot, or if hashes descend."""
        shape = self._shape
        end_page = min(page + pages, -(-self.end_item // PAGE_ITEMS))
        data = await self._read(shape.key, *shape.page_range(page, end_page))
        items = decode_pages(shape, page, end_page, data)
        begin = max(self.first_item, page * PAGE_ITEMS)
        mine = items[begin - page * PAGE_ITEMS : self.end_item - page * PAGE_ITEMS]
        shift = np.uint64(64 - shape.slot_bits)
        hashes = mine["hash"]
        if len(mine) == 0 or (shape.slot_bits and bool(((hashes >> shift) != np.uint64(self._slot)).any())):
            raise CorruptionError(
                f"{shape.key}: slot {self._slot} of the index file has items of another slot"
            )
        if bool((hashes[1:] < hashes[:-1]).any()):
            raise CorruptionError(
                f"{shape.key}: the items of slot {self._slot} of the index file are not in order"
            )
        self._begin, self._items = begin, mine


def _lower_bound(items: Table, hash_: int, end_ms: int) -> int:
    """Where the items with the hash ``hash_`` that are not newer than ``end_ms`` begin in ``items``, which are sorted
    by hash and then newest first."""
    low = int(np.searchsorted(items["hash"], np.uint64(hash_), side="left"))
    high = int(np.searchsorted(items["hash"], np.uint64(hash_), side="right"))
    return low + int(np.searchsorted(~items["store_timestamp"][low:high], ~end_ms, side="left"))
