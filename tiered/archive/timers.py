"""Reads timers of an archive: the sorted map of hours, entries in order of delivery, which of them are alive.

Memory follows objects and hours, not timers: of each object the footer stays, and a page while it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tiered.archive.index.key_hash import xxh64
from tiered.catalog.state import CatalogState
from tiered.catalog.timer_refs import TimerRef
from tiered.formats.timer_object import ENTRY_DTYPE, TimerFooter, decode_footer, decode_page
from tiered.model.queue import QueueKey
from tiered.model.tables import Table, concatenated, picked
from tiered.model.timer import EntryKind
from tiered.object_store.interface import ObjectStore

FOOTERS_KEPT, PAGES_KEPT = 256, 32
"""Of pages, those of the objects that are read side by side: the next claim reads on in them."""
NEVER_MS = 1 << 62


class Slice(NamedTuple):
    """Rows [first, last) of an object."""

    ref: TimerRef
    first: int
    last: int


class Entries(NamedTuple):
    """Entries in order of delivery. ``table.queue`` indexes ``queues``. ``slices``: the rows they come from."""

    table: Table
    queues: Sequence[QueueKey]
    slices: Sequence[Slice] = ()


class Sorted(NamedTuple):
    """What becomes of entries. ``timers``: to be sent. ``cancelled``: timers that are not, as they were cancelled.
    ``repeated``: timers with the key and the time of another one. ``late``: cancellations without a timer."""

    timers: Table
    cancelled: Table
    repeated: Table
    late: Table
    refused: Table


def hash_of(unique_key: str) -> int:
    """What entries have of a unique key."""
    return xxh64(unique_key.encode("utf-8", "surrogatepass"))


def sort_out(entries: Table) -> Sorted:
    """What becomes of ``entries``, which are in order and have all of each (time, key). Pure.

    A cancellation ends the timers before it. Of several timers with one key and time the first is sent: a producer
    sent it again.
    """
    kind, order = entries["kind"], entries["order"]
    is_timer, is_cancel = kind == EntryKind.TIMER, kind == EntryKind.CANCEL
    if not len(entries):
        return Sorted(entries, entries, entries, entries, entries)
    begins = np.ones(len(entries), bool)
    begins[1:] = (entries["deliver_ms"][1:] != entries["deliver_ms"][:-1]) | (
        entries["key_hash"][1:] != entries["key_hash"][:-1]
    )
    group = np.cumsum(begins) - 1
    last_cancel = np.full(int(group[-1]) + 1, -1, np.int64)
    np.maximum.at(last_cancel, group[is_cancel], order[is_cancel])
    is_cancelled = is_timer & (order < last_cancel[group])
    is_alive = np.flatnonzero(is_timer & ~is_cancelled)
    is_first = np.zeros(len(entries), bool)
    is_first[is_alive[np.unique(group[is_alive], return_index=True)[1]]] = True
    has_timer = np.zeros(int(group[-1]) + 1, bool)
    has_timer[group[is_cancelled]] = True
    masks = (
        is_first,
        is_cancelled,
        is_timer & ~is_cancelled & ~is_first,
        is_cancel & ~has_timer[group],
        kind == EntryKind.REFUSED,
    )
    return Sorted(*(picked(entries, mask) for mask in masks))


class TimerFiles:
    """Timer objects of ``store``, the archive's. Not thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._footer = lru_cache(FOOTERS_KEPT)(self._read_footer)
        self._next_ms = lru_cache(FOOTERS_KEPT)(self._read_next_ms)
        self._page = lru_cache(PAGES_KEPT)(self._read_page)

    def footer(self, ref: TimerRef) -> TimerFooter:
        """What ``ref`` has. Raises CorruptionError, NotFoundError, or what the store raises."""
        return self._footer(ref.moved(0, 0))

    def _read_footer(self, ref: TimerRef) -> TimerFooter:
        pages_bytes = ref.size_bytes - ref.tail_bytes
        data = self._store.get_range(ref.key, pages_bytes, ref.tail_bytes)
        return decode_footer(data, source=ref.key, entries=ref.entries, pages_bytes=pages_bytes)

    def page(self, ref: TimerRef, number: int) -> Table:
        """Entries of one page."""
        return self._page(ref.moved(0, 0), number)

    def _read_page(self, ref: TimerRef, number: int) -> Table:
        footer = self.footer(ref)
        begin, end = footer.page_at[number : number + 2].tolist()
        data = self._store.get_range(ref.key, begin, end - begin)
        source = f"{ref.key} [{begin}, {end})"
        rows = int(footer.pages["rows"][number])
        return decode_page(data, source=source, rows=rows, queues=len(footer.queues))

    def rows(self, ref: TimerRef, first: int, last: int) -> Table:
        """Rows [first, last)."""
        footer = self.footer(ref)
        number = int(np.searchsorted(footer.page_row, first, side="right")) - 1
        parts = []
        while number < len(footer.pages) and footer.page_row[number] < last:
            begin = int(footer.page_row[number])
            parts.append(self.page(ref, number)[max(first - begin, 0) : last - begin])
            number += 1
        return concatenated(parts, ENTRY_DTYPE)

    def next_ms(self, ref: TimerRef) -> int:
        """When the first entry that is not claimed is delivered; NEVER_MS: there is none."""
        return NEVER_MS if ref.claimed >= ref.entries else self._next_ms(ref.moved(0, ref.claimed))

    def _read_next_ms(self, ref: TimerRef) -> int:
        footer = self.footer(ref)
        number = int(np.searchsorted(footer.page_row, ref.claimed, side="right")) - 1
        if footer.page_row[number] == ref.claimed:
            return int(footer.pages["first_ms"][number])
        begin = int(footer.page_row[number])
        return int(self.page(ref, number)["deliver_ms"][ref.claimed - begin])

    def hours(self, state: CatalogState) -> Mapping[int, int]:
        """Hour of delivery -> entries that are not handed over, sorted. Hours that are partly over count from the
        claimed row on."""
        hours, left = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for ref in state.timers:
            table = self.footer(ref).hours
            hours.append(table["hour"])
            left.append(np.clip(np.cumsum(table["rows"]) - ref.claimed, 0, table["rows"]))
        distinct, place = np.unique(np.concatenate(hours), return_inverse=True)
        counts = np.bincount(place, np.concatenate(left), len(distinct)).astype(np.int64)
        return {hour: count for hour, count in zip(distinct.tolist(), counts.tolist(), strict=True) if count}

    def merged(self, slices: Sequence[Slice], before_ms: int = NEVER_MS) -> Iterator[Entries]:
        """Entries of ``slices`` delivered before ``before_ms``, in order, a few pages at a time; all of a (time, key)
        come together."""
        places: dict[QueueKey, int] = {}
        heads = [_Head(self, part, before_ms, places) for part in slices if part.first < part.last]
        while heads := [head for head in heads if head.fill()]:
            # What lies before the least of the last entries in memory is known of all objects.
            bound = min(head.bound for head in heads)
            taken = [(head, head.take(bound)) for head in heads]
            table = concatenated([rows for _, rows in taken], ENTRY_DTYPE)
            keys = table["order"], table["key_hash"], table["deliver_ms"]
            parts = [head.taken for head, rows in taken if len(rows)]
            if len(table):
                yield Entries(table.take(np.lexsort(keys)), list(places), parts)

    def pending(self, state: CatalogState, begin_ms: int, end_ms: int) -> Iterator[Entries]:
        """Entries not handed over that are delivered in [begin_ms, end_ms), in order."""
        slices = []
        for ref in state.timers:
            footer = self.footer(ref)
            before = int(footer.page_row[int(np.searchsorted(footer.pages["last_ms"], begin_ms))])
            slices.append(Slice(ref, max(before, ref.claimed), ref.entries))
        for some in self.merged(slices, end_ms):
            yield some._replace(table=picked(some.table, some.table["deliver_ms"] >= begin_ms))

    def find(self, state: CatalogState, unique_key: str, deliver_ms: int | None = None) -> Entries:
        """The timer with a key that is not handed over and alive; empty: there is none. See ``with_key``."""
        found = self.with_key(state, unique_key, deliver_ms)
        return found._replace(table=sort_out(found.table).timers)

    def with_key(self, state: CatalogState, unique_key: str, deliver_ms: int | None = None) -> Entries:
        """Entries of a key that are not handed over, without ``deliver_ms`` by reading all."""
        begin_ms, end_ms = (0, NEVER_MS) if deliver_ms is None else (deliver_ms, deliver_ms + 1)
        wanted = np.uint64(hash_of(unique_key))
        found, queues = [], list[QueueKey]()
        for some in self.pending(state, begin_ms, end_ms):
            found.append(picked(some.table, some.table["key_hash"] == wanted))
            queues = list(some.queues)
        return Entries(concatenated(found, ENTRY_DTYPE), queues)

    def pending_offsets(self, state: CatalogState) -> dict[QueueKey, Table]:
        """Of each queue, the messages whose timers are not handed over and alive, sorted."""
        found: dict[QueueKey, list[Table]] = {}
        for some in self.pending(state, 0, NEVER_MS):
            timers = sort_out(some.table).timers
            for number in np.unique(timers["queue"]).tolist():
                offsets = timers["queue_offset"][timers["queue"] == number]
                found.setdefault(some.queues[number], []).append(offsets)
        return {queue: np.sort(np.concatenate(parts)) for queue, parts in found.items()}

    def first_offsets(self, state: CatalogState) -> dict[QueueKey, int]:
        """Of each queue, an offset before which no timer needs a message."""
        found: dict[QueueKey, int] = {}
        for ref in state.timers:
            footer = self.footer(ref)
            for queue, offset in zip(footer.queues, footer.min_offsets.tolist(), strict=True):
                found[queue] = min(offset, found.get(queue, offset))
        return found


class _Head:
    """A slice that is read page by page; queues are renumbered to ``places``."""

    def __init__(self, files: TimerFiles, part: Slice, before_ms: int, places: dict[QueueKey, int]) -> None:
        self._files, self._part, self._before_ms = files, part, before_ms
        footer = files.footer(part.ref)
        self._footer = footer
        self._place = np.array([places.setdefault(queue, len(places)) for queue in footer.queues], np.uint32)
        self._at = self._first = part.first
        self._rows = np.zeros(0, ENTRY_DTYPE)
        self._is_over = False

    def fill(self) -> bool:
        """Read on until memory has entries of two keys, or the end. False: nothing is left."""
        while not self._is_over and not self._has_two():
            number = int(np.searchsorted(self._footer.page_row, self._at, side="right")) - 1
            begin, end = self._footer.page_row[number : number + 2].tolist()
            last = min(end, self._part.last)
            if self._footer.pages["first_ms"][number] >= self._before_ms:
                self._is_over = True
                break
            page = self._files.page(self._part.ref, number)[self._at - begin : last - begin]
            count = int(np.searchsorted(page["deliver_ms"], self._before_ms))
            self._is_over = count < len(page) or last == self._part.last
            rows = page[:count].copy()
            rows["queue"] = self._place[rows["queue"]]
            self._rows = np.concatenate([self._rows, rows]) if len(self._rows) else rows
            self._at += count
        return bool(len(self._rows))

    def _has_two(self) -> bool:
        if len(self._rows) < 2:
            return False
        first, last = self._rows[0], self._rows[-1]
        return bool(first["deliver_ms"] != last["deliver_ms"] or first["key_hash"] != last["key_hash"])

    @property
    def bound(self) -> tuple[int, int]:
        """Entries before this time and key are all in memory."""
        if self._is_over:
            return NEVER_MS, 0
        last = self._rows[-1]
        return int(last["deliver_ms"]), int(last["key_hash"])

    def take(self, bound: tuple[int, int]) -> Table:
        """The rows in memory before ``bound``."""
        ms, key = self._rows["deliver_ms"], self._rows["key_hash"]
        count = int(np.count_nonzero((ms < bound[0]) | ((ms == bound[0]) & (key < np.uint64(bound[1])))))
        found, self._rows = self._rows[:count], self._rows[count:]
        last = self._at - len(self._rows)
        self.taken, self._first = Slice(self._part.ref, self._first, last), last
        return found
