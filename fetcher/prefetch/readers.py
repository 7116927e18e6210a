"""State of each reader of a queue between its pulls: buffered rows and the prefetch window.

A reader is a consumer group on a queue. Sequential pulls are slices of the buffered rows. Owns which readers and rows
are kept. Does not own reading (row_reader.py) nor prefetch (prefetcher.py).
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from fetcher.blocks.budget import ByteBudget
from fetcher.io.request_scheduler import Priority
from fetcher.prefetch.prefetch_window import PrefetchWindow, WindowLimits
from fetcher.rows.block_fetch import BlockSlices, BufferedRows
from fetcher.rows.run_list import QueueView
from tiered.model.lru import Lru
from tiered.model.queue import QueueKey

READERS_BYTES_MAX = 32 * 1024 * 1024
BUDGET_SHARE = 8
"""Part of a smaller budget that readers may take."""
READER_BYTES = 1_280
"""A reader with its window and table entries, without its group's name and buffered rows: measured."""
ORDER_S = 0.25
"""Precision of the order in which readers last pulled from memory: exactness would cost each pull."""
NOTHING_BUFFERED = BufferedRows()


class ReaderKey(NamedTuple):
    """One reader."""

    group: str
    queue: QueueKey


class Reader:
    """State of one reader. ``buffered`` is replaced as a whole."""

    __slots__ = ("buffered", "buffered_bytes", "key", "name", "nbytes", "used_s", "window")

    def __init__(self, key: ReaderKey, limits: WindowLimits) -> None:
        """A reader without buffered rows and prefetched ranges."""
        self.key = key
        self.name = (key.group, key.queue.topic, key.queue.queue_id)
        """What names the reader in metrics and status: group, topic, queue id."""
        self.nbytes = READER_BYTES + sys.getsizeof(key.group)
        """Memory of this object without its buffered rows, roughly. The names of topics are shared between readers, the
        group's is not."""
        self.buffered = NOTHING_BUFFERED
        self.buffered_bytes = 0
        self.used_s = 0.0
        self.window = PrefetchWindow(limits)

    def slice(self, view: QueueView) -> None:
        """Prepare the buffered rows so that the next pulls can be cut out of their block directly. Does so only if each
        row has one queue offset and all are between the minimum and maximum of the queue at ``view``."""
        buffered = self.buffered
        rows = buffered.rows
        if rows is None or not rows.is_plain or buffered.history != view.state.cursor.history:
            return
        if view.min_offset <= rows.base and rows.end <= view.max_offset:
            block = buffered.blocks[rows.object_key, rows.first_block]
            starts, ends = rows.starts.data, rows.ends.data
            buffered.slices = BlockSlices(
                view, rows.base, cast("Sequence[int]", starts), cast("Sequence[int]", ends), block.data
            )


class Readers:
    """Readers by key, with at most ``bytes_max`` of buffered blocks. ``budget`` reserves memory for at most
    READERS_BYTES_MAX of readers, as group names are the clients'. Thread-safe."""

    def __init__(self, limits: WindowLimits, bytes_max: int, budget: ByteBudget | None = None) -> None:
        """Has no readers yet: ``open`` makes them. ``limits`` apply to the prefetch window of each."""
        self._limits = limits
        self._bytes_max = bytes_max
        self._budget = budget
        self._lock = threading.Lock()
        self._readers: Lru[ReaderKey, Reader] = Lru(READERS_BYTES_MAX, resists_floods=True)
        self._buffering: OrderedDict[ReaderKey, Reader] = OrderedDict()
        self.buffered_bytes = 0
        self.on_evicted: Callable[[Reader], None] = lambda _: None
        """Called for each evicted reader, with a lock held."""

    def __len__(self) -> int:
        return len(self._readers)

    @property
    def kept_bytes(self) -> int:
        """Approximate memory of all readers without buffered rows."""
        return self._readers.held_bytes

    def find(self, key: ReaderKey) -> Reader | None:
        """The reader, if it is cached."""
        return self._readers.peek(key)

    def open(self, key: ReaderKey, time_s: float) -> Reader:
        """The reader with this key, or a new one. A new one is not kept if there is no memory for it; it then serves
        only this pull. ``time_s``: now."""
        reader = self._readers.peek(key)
        if reader is None:
            reader = self._add(Reader(key, self._limits))
        else:
            with self._lock:
                self._readers.get(key)
        reader.used_s = time_s
        return reader

    def _add(self, reader: Reader) -> Reader:
        """Keep a new reader, and return it, or the one with the same key that another thread has kept since.

        Its memory is reserved before the lock is taken, because the budget may call ``reclaim``, which takes the lock.
        If none can be reserved, readers that have not pulled for longest are removed to make room.
        """
        budget, wanted = self._budget, reader.nbytes
        is_reserved = budget is None or budget.reserve(wanted, Priority.USER)
        with self._lock:
            if budget is not None:
                self._readers.bytes_max = min(READERS_BYTES_MAX, budget.total_bytes // BUDGET_SHARE)
            before = self._readers.held_bytes + (wanted if is_reserved else 0)
            existing = self._readers.peek(reader.key)
            evicted = [] if is_reserved or existing is not None else self._readers.evict(wanted)
            if existing is None and (is_reserved or sum(one.nbytes for one in evicted) >= wanted):
                evicted += self._readers.add(reader.key, reader, wanted)
            for one in evicted:
                self._drop(one)
                self.on_evicted(one)
            left_bytes = before - self._readers.held_bytes
        if budget is not None and left_bytes:
            budget.unreserve(left_bytes)
        return existing or reader

    def buffer(self, reader: Reader, buffered: BufferedRows) -> None:
        """Keep the rows ``buffered`` for the reader's next pull. If all buffered rows exceed their limit, the readers
        that have not pulled for longest lose theirs."""
        with self._lock:
            self._drop(reader)
            if self._readers.peek(reader.key) is not reader:
                return
            reader.buffered, reader.buffered_bytes = buffered, buffered.nbytes
            self.buffered_bytes += reader.buffered_bytes
            self._buffering[reader.key] = reader
            while self.buffered_bytes > self._bytes_max and self._buffering:
                self._drop(next(iter(self._buffering.values())))

    def _drop(self, reader: Reader) -> None:
        self.buffered_bytes -= reader.buffered_bytes
        reader.buffered, reader.buffered_bytes = NOTHING_BUFFERED, 0
        if self._buffering.get(reader.key) is reader:
            del self._buffering[reader.key]

    def used(self, reader: Reader, time_s: float) -> None:
        """Note that the reader pulled from its buffered rows, so that it loses them last. Done at most every ORDER_S
        seconds, as it takes a lock."""
        if time_s - reader.used_s < ORDER_S:
            return
        with self._lock:
            reader.used_s = time_s
            if self._readers.peek(reader.key) is reader:
                self._readers.get(reader.key)
            if reader.key in self._buffering:
                self._buffering.move_to_end(reader.key)

    def reclaim(self, needed_bytes: int, priority: int) -> None:
        """Free about ``needed_bytes`` of buffered rows of the readers that have not pulled for longest. The memory
        budget calls this when it is short. Only a reader's own read (Priority.USER) may take them: buffered rows are
        worth more than prefetched blocks."""
        if priority > Priority.USER:
            return
        with self._lock:
            wanted = self.buffered_bytes - needed_bytes
            while self._buffering and self.buffered_bytes > max(wanted, 0):
                self._drop(next(iter(self._buffering.values())))

    def drop_unused_since(self, time_s: float) -> None:
        """Drop the buffered rows of all readers whose last pull was before ``time_s``."""
        with self._lock:
            while self._buffering:
                oldest = next(iter(self._buffering.values()))
                if oldest.used_s > time_s:
                    return
                self._drop(oldest)
