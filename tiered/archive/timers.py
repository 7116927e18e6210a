"""Reads timers of an archive: the sorted map of hours, entries in order of delivery, which of them are alive.

Memory follows objects and hours, not timers: of each object the footer stays, and a page while it is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tiered.archive.index.key_hash import xxh64
from tiered.catalog.state import CatalogState
from tiered.catalog.timer_refs import TimerRef
from tiered.errors import NotFoundError
from tiered.formats.timer_object import (
    ENTRY_DTYPE,
    SORTED_BY,
    Rows,
    TimerFooter,
    decode_footer,
    decode_page,
    united,
)
from tiered.model.queue import QueueKey
from tiered.model.tables import Table, concatenated, picked
from tiered.model.timer import CANCELS, EntryKind, TimerPlace
from tiered.object_store.interface import ObjectStore

FOOTERS_KEPT, PAGES_KEPT = 256, 32
"""So many are cached. A page is read again when the next timers of it are due."""
HOURS_KEPT = 17_520
"""The counts of so many hours are cached: two years."""
NEVER_MS = 1 << 62


class Slice(NamedTuple):
    """The entries [first, last) of the timer object ``ref``."""

    ref: TimerRef
    first: int
    last: int


class Entries(NamedTuple):
    """Entries in order of delivery. ``table["queue"]`` indexes ``queues``, ``table["topic"]`` indexes ``topics``.
    ``ends``: for each timer object, the number of its first entry that is not among these or earlier ones."""

    table: Table
    queues: Sequence[QueueKey]
    topics: Sequence[str]
    ends: Mapping[TimerRef, int] = MappingProxyType({})


class Sorted(NamedTuple):
    """What becomes of entries. ``timers``: to be sent at their time. ``cancelled``: timers that are not sent, as one of
    ``cancels``, the cancellations, has ended them. ``refused``: messages that are not delivered."""

    timers: Table
    cancelled: Table
    cancels: Table
    refused: Table


class TimerCounts(NamedTuple):
    """``hours``: hour of delivery -> timers that are pending, sorted. ``postponed``: of them, those that the broker
    refused. ``refused``: messages that are not delivered, and are listed."""

    hours: Mapping[int, int] = MappingProxyType({})
    postponed: int = 0
    refused: int = 0

    @property
    def pending(self) -> int:
        """Timers that are not handed over."""
        return sum(self.hours.values())


class TimerName(NamedTuple):
    """What users name timers by. Several timers may have the same name, as unique keys repeat."""

    topic: str
    unique_key: str

    @property
    def text(self) -> str:
        """The name of the timer in messages."""
        return f"{self.unique_key} of topic {self.topic}"


PENDING_DTYPE = np.dtype([("queue_offset", "<i8"), ("deliver_ms", "<i8")])


def hash_of(text: str) -> int:
    """The hash of the unique key ``text`` that entries have in its place."""
    return xxh64(text.encode("utf-8", "surrogatepass"))


def sort_out(entries: Entries) -> Sorted:
    """Sort the ``entries`` of timer objects into timers to be delivered, cancelled timers, cancellations, and refused
    messages. They are in order, and all entries of one time and key must be among them. Pure.

    A cancellation ends timers that came before it: those of its topic with its time and key, or the one at its place. A
    record that several log histories have is one timer.
    """
    table = entries.table
    kind, time_and_key = table["kind"], [table["deliver_ms"], table["key_hash"]]
    is_later = np.any([np.diff(table[name], prepend=table[name][:1]) != 0 for name in SORTED_BY], axis=0)
    order = np.cumsum(is_later)
    is_cancel, is_refused = np.isin(kind, CANCELS), kind == EntryKind.REFUSED
    is_timer = ~(is_cancel | is_refused)
    # An entry that is equal to the one before is the same record, of another log history.
    columns = [order, table["queue_offset"], table["queue"], kind]
    is_timer[1:] &= np.any([column[1:] != column[:-1] for column in columns], axis=0)
    is_over = np.zeros(len(table), bool)
    if is_cancel.any():
        queue_id = np.array([queue.queue_id for queue in entries.queues])[table["queue"]]
        places = [queue_id, table["queue_offset"]]
        for which, more in ((EntryKind.CANCEL, []), (EntryKind.CANCEL_PLACE, places)):
            # A group has a cancellation and the timers that it may end. The last one ends all timers before it.
            group, is_which = _groups([*time_and_key, table["topic"], *more]), kind == which
            last = np.full(len(table), -1, np.int64)
            np.maximum.at(last, group[is_which], order[is_which])
            is_over |= is_timer & (order < last[group])
    masks = is_timer & ~is_over, is_over, is_cancel, is_refused
    return Sorted(*(picked(table, mask) for mask in masks))


def _groups(columns: Sequence[Table]) -> Table:
    """Numbers rows by their values: rows that are equal in all ``columns`` get the same number."""
    order, group = np.lexsort(columns), np.empty(len(columns[0]), np.int64)
    is_new = np.any([np.diff(column[order], prepend=column[order[:1]]) != 0 for column in columns], axis=0)
    group[order] = np.cumsum(is_new)
    return group


class TimerFiles:
    """Timer objects of ``store``, the archive's. Not thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._footer = lru_cache(FOOTERS_KEPT)(self._read_footer)
        self._next_ms = lru_cache(FOOTERS_KEPT)(self._read_next_ms)
        self._page = lru_cache(PAGES_KEPT)(self._read_page)
        self._mixed = lru_cache(HOURS_KEPT)(self._read_mixed)

    def footer(self, ref: TimerRef) -> TimerFooter:
        """The footer of the timer object ``ref``, read unless it is cached. Raises CorruptionError, NotFoundError, or
        what the store raises."""
        return self._footer(ref.moved(0, 0))

    def _read_footer(self, ref: TimerRef) -> TimerFooter:
        pages_bytes = ref.size_bytes - ref.tail_bytes
        data = self._store.get_range(ref.key, pages_bytes, ref.tail_bytes)
        return decode_footer(data, source=ref.key, entries=ref.entries, pages_bytes=pages_bytes)

    def page(self, ref: TimerRef, number: int) -> Rows:
        """The page number ``number`` of the entries of ``ref``, read unless it is cached. Raises what ``footer``
        raises."""
        return self._page(ref.moved(0, 0), number)

    def _read_page(self, ref: TimerRef, number: int) -> Rows:
        footer = self.footer(ref)
        begin, end = footer.page_at[number : number + 2].tolist()
        data = self._store.get_range(ref.key, begin, end - begin)
        source = f"{ref.key} [{begin}, {end})"
        rows = int(footer.pages["rows"][number])
        return decode_page(data, source=source, rows=rows, queues=footer.queues)

    def next_ms(self, ref: TimerRef) -> int:
        """When the first entry that is not claimed is delivered; NEVER_MS: there is none."""
        return NEVER_MS if ref.claimed >= ref.entries else self._next_ms(ref.moved(0, ref.claimed))

    def _read_next_ms(self, ref: TimerRef) -> int:
        footer = self.footer(ref)
        number = int(np.searchsorted(footer.page_row, ref.claimed, side="right")) - 1
        if footer.page_row[number] == ref.claimed:
            return int(footer.pages["first_ms"][number])
        begin = int(footer.page_row[number])
        return int(self.page(ref, number)[0]["deliver_ms"][ref.claimed - begin])

    def counts(self, state: CatalogState) -> TimerCounts:
        """The numbers of pending timers in ``state``, without cancelled ones."""
        return next(found for found in self.counting(state) if found is not None)

    def counting(self, state: CatalogState) -> Iterator[TimerCounts | None]:
        """Count the pending timers of ``state`` by hour, in steps: yields None after each step, so that the caller can
        pause, and at last the counts. For hours that have timers only, footers have the counts. Hours that also have
        cancellations or refused messages (mixed) are read, and cached until their entries change."""
        parts = [np.zeros((5, 0), np.int64)]
        for number, ref in enumerate(state.timers):
            table = self.footer(ref).hours
            last = np.cumsum(table["rows"])
            first = np.maximum(last - table["rows"], ref.claimed)
            parts.append(np.stack([table["hour"], first, last, table["others"], np.full(len(table), number)]))
        found = np.concatenate(parts, axis=1)
        found = found[:, found[2] > found[1]]
        is_mixed = np.isin(found[0], found[0, found[3] > 0])
        slices: dict[int, list[Slice]] = {}
        for hour, first, last, _, number in found[:, is_mixed].T.tolist():
            slices.setdefault(hour, []).append(Slice(state.timers[number].moved(0, 0), first, last))
        plain, place = np.unique(found[0, ~is_mixed], return_inverse=True)
        counts = np.bincount(place, (found[2] - found[1])[~is_mixed], len(plain)).astype(np.int64)
        hours, postponed, refused = dict(zip(plain.tolist(), counts.tolist(), strict=True)), 0, 0
        for hour in sorted(slices):
            hours[hour], *more = self._mixed(tuple(slices[hour]))
            postponed, refused = postponed + more[0], refused + more[1]
            yield None
        yield TimerCounts({hour: hours[hour] for hour in sorted(hours) if hours[hour]}, postponed, refused)

    def _read_mixed(self, slices: tuple[Slice, ...]) -> tuple[int, int, int]:
        """How many timers ``slices`` have that are not cancelled, how many of these are postponed, and how many
        refused messages."""
        sorted_out = list(map(sort_out, self.merged(slices)))
        timers = concatenated((some.timers for some in sorted_out), ENTRY_DTYPE)
        postponed = int(np.count_nonzero(timers["kind"] == EntryKind.POSTPONED))
        return len(timers), postponed, sum(len(some.refused) for some in sorted_out)

    def merged(self, slices: Sequence[Slice], before_ms: int = NEVER_MS) -> Iterator[Entries]:
        """Merge rows of several timer objects: the entries of ``slices`` to be delivered before ``before_ms``, in the
        order of time and key, a few pages at a time. All entries of one time and key come together."""
        readers = [_SliceReader(self, part, before_ms) for part in slices if part.first < part.last]
        while readers := [reader for reader in readers if reader.fill()]:
            # Of each object, all entries before this bound are in memory.
            bound = min(reader.bound for reader in readers)
            taken = [(reader, reader.take(bound)) for reader in readers]
            table, queues, topics = united([rows for _, rows in taken])
            keys = [table[name] for name in reversed(SORTED_BY)]
            ends = {reader.ref: reader.end for reader, rows in taken if len(rows[0])}
            if len(table):
                yield Entries(table.take(np.lexsort(keys)), queues, topics, ends)

    def pending(self, state: CatalogState, begin_ms: int, end_ms: int) -> Iterator[Entries]:
        """The entries of ``state`` that are to be delivered from ``begin_ms`` on and before ``end_ms``, and are not
        handed over to the broker yet, in order, in tables."""
        slices = []
        for ref in state.timers:
            footer = self.footer(ref)
            before = int(footer.page_row[int(np.searchsorted(footer.pages["last_ms"], begin_ms))])
            slices.append(Slice(ref, max(before, ref.claimed), ref.entries))
        for entries in self.merged(slices, end_ms):
            yield entries._replace(table=picked(entries.table, entries.table["deliver_ms"] >= begin_ms))

    def find(self, state: CatalogState, name: TimerName | TimerPlace) -> Entries:
        """The pending timers that ``name`` names, by unique key and topic or by their place: not cancelled, and not
        handed over to the broker. Reads all entries. Raises NotFoundError if there is none."""
        matches = []
        for entries in self.pending(state, 0, NEVER_MS):
            timers = sort_out(entries).timers
            if isinstance(name, TimerName):
                is_named = np.array([topic == name.topic for topic in entries.topics])[timers["topic"]]
                is_named &= timers["key_hash"] == np.uint64(hash_of(name.unique_key))
            else:
                queue_id = np.array([queue.queue_id for queue in entries.queues])[timers["queue"]]
                is_named = (queue_id == name.queue_id) & (timers["queue_offset"] == name.queue_offset)
            matches.append(entries._replace(table=picked(timers, is_named)))
        named = joined(matches)
        if not len(named.table):
            raise NotFoundError(
                f"no timer {name.text} is pending",
                hint="the timer may be handed over to the broker already, or was cancelled, or is not archived yet",
            )
        return named

    def pending_times(self, state: CatalogState) -> dict[QueueKey, Table]:
        """The pending timers of each queue of the gateway topic: the offsets of their messages, ascending, with the
        times of delivery (PENDING_DTYPE). Reads all entries."""
        by_queue: dict[QueueKey, list[Table]] = {}
        for entries in self.pending(state, 0, NEVER_MS):
            timers = sort_out(entries).timers
            for number in np.unique(timers["queue"]).tolist():
                of_queue = timers[timers["queue"] == number]
                by_queue.setdefault(entries.queues[number], []).append(
                    of_queue[["queue_offset", "deliver_ms"]].astype(PENDING_DTYPE)
                )
        return {queue: np.sort(np.concatenate(tables)) for queue, tables in by_queue.items()}

    def first_offsets(self, state: CatalogState) -> dict[QueueKey, int]:
        """For each queue of the gateway topic, an offset below which no timer needs a message, so that expiry may go up
        to there. Reads footers only."""
        first: dict[QueueKey, int] = {}
        for ref in state.timers:
            footer = self.footer(ref)
            for queue, offset in zip(footer.queues, footer.min_offsets.tolist(), strict=True):
                first[queue] = min(offset, first.get(queue, offset))
        return first


def joined(parts: Sequence[Entries]) -> Entries:
    """All of ``parts``, which follow each other."""
    ends = {ref: end for part in parts for ref, end in part.ends.items()}
    return Entries(*united([part[:3] for part in parts]), ends)


class _SliceReader:
    """Reads rows of one timer object page by page, up to those that are delivered at ``before_ms`` or later."""

    def __init__(self, files: TimerFiles, part: Slice, before_ms: int) -> None:
        self._files, self._before_ms = files, before_ms
        self.ref, self._at, self._last = part
        self._footer = files.footer(part.ref)
        self._rows: Rows = np.zeros(0, ENTRY_DTYPE), (), ()
        self._is_all_read = False

    def fill(self) -> bool:
        """Read pages until the entries in memory have at least two different times or keys: then those of the first one
        are all in memory; or until the last page is read. Returns whether an entry is in memory."""
        while not self._is_all_read and not self._has_two():
            number = int(np.searchsorted(self._footer.page_row, self._at, side="right")) - 1
            begin, end = self._footer.page_row[number : number + 2].tolist()
            last = min(end, self._last)
            if self._footer.pages["first_ms"][number] >= self._before_ms:
                self._is_all_read = True
                break
            rows, queues, topics = self._files.page(self.ref, number)
            page = rows[self._at - begin : last - begin]
            count = int(np.searchsorted(page["deliver_ms"], self._before_ms))
            self._is_all_read = count < len(page) or last == self._last
            self._rows = united([self._rows, (page[:count], queues, topics)])
            self._at += count
        return bool(len(self._rows[0]))

    def _has_two(self) -> bool:
        """Whether the entries in memory have two different times or keys."""
        if len(self._rows[0]) < 2:
            return False
        first, last = self._rows[0][[0, -1]]
        return bool(first["deliver_ms"] != last["deliver_ms"] or first["key_hash"] != last["key_hash"])

    @property
    def bound(self) -> tuple[int, int]:
        """Entries before this time and key are all in memory."""
        if self._is_all_read:
            return NEVER_MS, 0
        last = self._rows[0][-1]
        return int(last["deliver_ms"]), int(last["key_hash"])

    @property
    def end(self) -> int:
        """The number of the first entry of the object that ``take`` has not returned yet."""
        return self._at - len(self._rows[0])

    def take(self, bound: tuple[int, int]) -> Rows:
        """The rows in memory before ``bound``."""
        rows, queues, topics = self._rows
        ms, key = rows["deliver_ms"], rows["key_hash"]
        count = int(np.count_nonzero((ms < bound[0]) | ((ms == bound[0]) & (key < np.uint64(bound[1])))))
        self._rows = rows[count:], queues, topics
        return rows[:count], queues, topics
