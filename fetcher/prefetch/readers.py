"""What is remembered of each reader of a queue between its pulls: the block in hand and how far ahead to fetch.

A reader is a consumer group on a queue. Sequential pulls are answered from the block in hand by slicing arrays.

Owns what is kept, and for how long. Does not own reading (row_reader.py) nor fetching ahead (prefetcher.py).
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from fetcher.blocks.budget import ByteBudget
from fetcher.blocks.segmented_lru import Remembered
from fetcher.io.request_scheduler import Lane
from fetcher.prefetch.prefetch_range import WindowLimits
from fetcher.prefetch.prefetch_window import PrefetchWindow
from fetcher.rows.batch import GetResult, GetStatus
from fetcher.rows.block_fetch import Block, Held, Slices
from fetcher.rows.queue_view import QueueView
from fetcher.rows.read_plan import Limits, Taken, take
from fetcher.rows.run_rows import RunRows
from tiered.model.queue import QueueKey

READERS_BYTES_MAX = 32 * 1024 * 1024
BUDGET_SHARE = 8
"""Of a smaller budget readers take no larger part."""
READER_BYTES = 1_280
"""A reader with its window and its places in tables, but for its group's name and what it has in hand: measured."""
ORDER_S = 0.25
"""Readers that pull from hand are in the order of their last pulls but for so much: to be exact costs each pull."""
NOTHING = Held()


class ReaderKey(NamedTuple):
    """One reader."""

    group: str
    queue: QueueKey


class InHand(NamedTuple):
    """An answer that waits for nothing: ``records`` records back to back in ``body``, views of blocks.

    [min_offset, max_offset): the queue's offsets, by the same catalog version."""

    body: Sequence[memoryview]
    records: int
    next_offset: int
    min_offset: int
    max_offset: int


class Reader:
    """State of one reader. ``held`` is replaced as a whole."""

    __slots__ = ("held", "held_bytes", "key", "name", "nbytes", "used_s", "window")

    def __init__(self, key: ReaderKey, limits: WindowLimits) -> None:
        self.key = key
        self.name = (key.group, key.queue.topic, key.queue.queue_id)
        """As events have it."""
        self.nbytes = READER_BYTES + sys.getsizeof(key.group)
        """Memory, about, but for what is in hand. Of names only the group's is the client's own."""
        self.held = NOTHING
        self.held_bytes = 0
        self.used_s = 0.0
        self.window = PrefetchWindow(limits)

    def from_hand(self, view: QueueView, offset: int, count: int, max_bytes: int) -> GetResult | None:
        """The answer to an unfiltered pull if the block in hand holds all of it; else None."""
        found = self._part(view, offset, count, max_bytes)
        if found is None:
            return None
        rows, block, part, next_offset = found
        return GetResult(
            GetStatus.FOUND,
            rows.batch(part.rows, (block,)),
            next_offset,
            view.min_offset,
            view.max_offset,
            None,
            view.state.version,
        )

    def body_from_hand(self, view: QueueView, offset: int, count: int, max_bytes: int) -> InHand | None:
        """As ``from_hand``, without columns."""
        found = self._part(view, offset, count, max_bytes)
        if found is None:
            return None
        rows, block, part, next_offset = found
        taken = part.rows
        assert isinstance(taken, slice)  # nothing was filtered out
        body = (rows.body(taken, block),)
        return InHand(body, part.row_count, next_offset, view.min_offset, view.max_offset)

    def slice(self, view: QueueView) -> None:
        """Make the next pulls from the block in hand cheap, if all its rows are visible and span one offset each."""
        held = self.held
        rows = held.rows
        if rows is None or not rows.is_plain or held.line != view.state.cursor.history:
            return
        if view.min_offset <= rows.base and rows.end <= view.max_offset:
            block = held.blocks[rows.object_key, rows.first_block]
            starts, ends = rows.starts.data, rows.ends.data
            held.slices = Slices(
                view, rows.base, cast("Sequence[int]", starts), cast("Sequence[int]", ends), block.data
            )

    def body_across(
        self,
        view: QueueView,
        offset: int,
        count: int,
        max_bytes: int,
        in_memory: Callable[[str, int], Block | None],
    ) -> tuple[InHand, Held] | None:
        """As ``body_from_hand`` where the answer reaches into blocks behind the one in hand, whose rows are known and
        whose bytes ``in_memory`` has; and what the reader has in hand then."""
        held = self.held
        rows = held.ahead
        answer = None if rows is None else _answer(held, rows, view, offset, count, max_bytes)
        if rows is None or answer is None:
            return None
        part, next_offset = answer
        taken = part.rows
        assert isinstance(taken, slice)
        numbers = rows.blocks_of(taken)
        blocks: list[Block] = []
        for number in numbers:
            block = held.blocks.get((rows.object_key, number))
            if block is None:
                block = in_memory(rows.object_key, number)
            if block is None or len(block) != rows.block_raw_bytes(number):
                return None
            blocks.append(block)
        last = rows.in_block_of(taken.stop - 1)
        after = Held(
            {(rows.object_key, numbers[-1]): blocks[-1]},
            last,
            rows if rows.end > last.end else None,
            line=held.line,
        )
        body = rows.bodies(taken, blocks)
        return InHand(body, part.row_count, next_offset, view.min_offset, view.max_offset), after

    def _part(
        self, view: QueueView, offset: int, count: int, max_bytes: int
    ) -> tuple[RunRows, Block, Taken, int] | None:
        """Rows of the block in hand that are a whole answer, and the next offset."""
        held = self.held
        rows = held.rows
        answer = None if rows is None else _answer(held, rows, view, offset, count, max_bytes)
        if rows is None or answer is None:
            return None
        part, next_offset = answer
        return rows, held.blocks[rows.object_key, rows.first_block], part, next_offset


def _answer(
    held: Held, rows: RunRows, view: QueueView, offset: int, count: int, max_bytes: int
) -> tuple[Taken, int] | None:
    """Those of ``rows``, which are of ``held``, that are a whole answer by this version of the queue too, and the next
    offset."""
    if not (
        rows.base <= offset < rows.end
        and view.min_offset <= offset
        and rows.end <= view.max_offset
        and held.line == view.state.cursor.history
    ):
        return None
    part = take(rows.sizes, rows.ends, rows.row_of(offset), Limits(count, max_bytes, True), None)
    next_offset = rows.end_offset(part.end_row)
    if not part.is_full and next_offset < view.max_offset:
        return None
    return part, next_offset


class Readers:
    """Readers by key. Blocks in hand have at most ``in_hand_bytes`` together. What is remembered of readers is set
    aside in ``budget``, at most READERS_BYTES_MAX: clients name groups as they like. Thread-safe."""

    def __init__(self, limits: WindowLimits, in_hand_bytes: int, budget: ByteBudget | None = None) -> None:
        self._limits = limits
        self._bytes_max = in_hand_bytes
        self._budget = budget
        self._lock = threading.Lock()
        self._readers: Remembered[ReaderKey, Reader] = Remembered(READERS_BYTES_MAX)
        self._holding: OrderedDict[ReaderKey, Reader] = OrderedDict()
        self.in_hand_bytes = 0
        self.on_forgotten: Callable[[Reader], None] = lambda _: None
        """Told of readers that are remembered no more; with a lock held."""

    def __len__(self) -> int:
        return len(self._readers)

    def __repr__(self) -> str:
        return f"Readers({len(self)}, {self.in_hand_bytes} bytes in hand)"

    @property
    def kept_bytes(self) -> int:
        """Memory of all readers, about, but for what is in hand."""
        return self._readers.held_bytes

    def find(self, key: ReaderKey) -> Reader | None:
        """The reader, if it has read before."""
        return self._readers.get(key)

    def open(self, key: ReaderKey, time_s: float) -> Reader:
        """The reader; a new one if it has not read before, or long ago. Without memory for it, it is not remembered."""
        reader = self._readers.get(key)
        if reader is None:
            reader = self._begun(Reader(key, self._limits))
        else:
            with self._lock:
                self._readers.used(key)
        reader.used_s = time_s
        return reader

    def _begun(self, reader: Reader) -> Reader:
        """``reader``, or who was as quick to begin. Nobody may be made room for with the lock held."""
        budget, wanted = self._budget, reader.nbytes
        is_aside = budget is None or budget.set_aside(wanted, Lane.USER)
        with self._lock:
            if budget is not None:
                self._readers.bytes_max = min(READERS_BYTES_MAX, budget.total_bytes // BUDGET_SHARE)
            before = self._readers.held_bytes + (wanted if is_aside else 0)
            known = self._readers.get(reader.key)
            forgotten = [] if is_aside or known is not None else self._readers.forget(wanted)
            if known is None and (is_aside or sum(one.nbytes for one in forgotten) >= wanted):
                forgotten += self._readers.add(reader.key, reader, wanted)
            for one in forgotten:
                self._let_go(one)
                self.on_forgotten(one)
            left_bytes = before - self._readers.held_bytes
        if budget is not None and left_bytes:
            budget.put_back(left_bytes)
        return known or reader

    def hold(self, reader: Reader, held: Held) -> None:
        """``held`` is what the reader has in hand now; others that have not pulled for longer may lose theirs."""
        with self._lock:
            self._let_go(reader)
            if self._readers.get(reader.key) is not reader:
                return
            reader.held, reader.held_bytes = held, held.nbytes
            self.in_hand_bytes += reader.held_bytes
            self._holding[reader.key] = reader
            while self.in_hand_bytes > self._bytes_max and self._holding:
                self._let_go(next(iter(self._holding.values())))

    def _let_go(self, reader: Reader) -> None:
        self.in_hand_bytes -= reader.held_bytes
        reader.held, reader.held_bytes = NOTHING, 0
        if self._holding.get(reader.key) is reader:
            del self._holding[reader.key]

    def used(self, reader: Reader, time_s: float) -> None:
        """The reader pulled from hand."""
        if time_s - reader.used_s < ORDER_S:
            return
        with self._lock:
            reader.used_s = time_s
            if self._readers.get(reader.key) is reader:
                self._readers.used(reader.key)
            if reader.key in self._holding:
                self._holding.move_to_end(reader.key)

    def reclaim(self, needed_bytes: int, priority: int) -> None:
        """Let go of about so many bytes in hand, of who has not pulled for longest: a Reclaimer of budget.py.
        Only for who waits: what is in hand is worth more than what is read ahead."""
        if priority > Lane.USER:
            return
        with self._lock:
            wanted = self.in_hand_bytes - needed_bytes
            while self._holding and self.in_hand_bytes > max(wanted, 0):
                self._let_go(next(iter(self._holding.values())))

    def let_go_unused_since(self, time_s: float) -> None:
        """Readers that have not pulled since keep nothing in hand."""
        with self._lock:
            while self._holding:
                oldest = next(iter(self._holding.values()))
                if oldest.used_s > time_s:
                    return
                self._let_go(oldest)
