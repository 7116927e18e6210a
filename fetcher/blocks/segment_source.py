"""Tails and decoded blocks of objects, from memory, disk or the object store: what all readers of an archive share.

Coroutines of the core (waiting.py), which wait only if memory does not have everything. Each block and tail is fetched
once, however many readers want it: a user read joins a prefetch in progress and raises its priority. Every byte is
charged to the budget before it is requested.

Owns the order of lookups (in memory, on its way, to be fetched now), the waiting, and what settings mean for its parts.
Does not own caches (block_cache.py, index_cache.py, disk_cache.py), requests (request_scheduler.py), loads
(block_loader.py), waiting for memory (budget.py), nor which adjacent blocks are worth loading (adjacent_prefetch.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fetcher.blocks.adjacent_prefetch import AdjacentPrefetch
from fetcher.blocks.block_cache import Block, BlockCache, BlockCacheLimits, BlockKey, DroppedUnread
from fetcher.blocks.block_loader import BlockLoad, BlockLoader, CoalescingLimits, LoadPlan
from fetcher.blocks.budget import ByteBudget, MemoryAdmission
from fetcher.blocks.decode_queue import DecodeQueue
from fetcher.blocks.disk_cache import DiskCache
from fetcher.blocks.index_cache import IndexCache, TailPart, tail_cost_bytes, tail_part
from fetcher.io.request_scheduler import (
    Priority,
    PriorityLimits,
    RangeReader,
    RequestScheduler,
    ScheduledReader,
)
from fetcher.io.waiting import Executor, Timer, Wait
from tiered.clock import Clock
from tiered.errors import CorruptionError, ObjectTooLargeError, UsageError
from tiered.formats.segment_index import SegmentIndex
from tiered.settings.sections import FetchSettings

PACED_PIECES_PER_S = 16
"""Under a bandwidth limit pieces are made so small that one is a small part of a second's bytes."""
PIECE_BYTES_MIN = 64 * 1024


def priority_limits(settings: FetchSettings) -> dict[Priority, PriorityLimits]:
    """The limits of each priority."""
    return {
        Priority.USER: PriorityLimits(settings.user_requests, settings.queue_max),
        Priority.PREFETCH: PriorityLimits(settings.prefetch_requests, settings.queue_max),
        Priority.BACKGROUND: PriorityLimits(settings.background_requests, settings.queue_max),
    }


def coalescing_limits(settings: FetchSettings) -> CoalescingLimits:
    """The limits by which ranges of an object are joined and cut into GETs, from the settings. Under a tight bandwidth
    limit GETs are smaller, so that bytes arrive evenly."""
    paced_bytes = settings.bytes_per_s // PACED_PIECES_PER_S or settings.piece_bytes
    return CoalescingLimits(
        settings.gap_ratio,
        max(min(settings.piece_bytes, paced_bytes), PIECE_BYTES_MIN),
        max(settings.get_max_bytes, PIECE_BYTES_MIN),
    )


def cache_limits(settings: FetchSettings) -> BlockCacheLimits:
    """Bounds of the blocks in memory."""
    return BlockCacheLimits(
        settings.cache_bytes, settings.unread_expiry_ms / 1000, settings.read_expiry_ms / 1000
    )


class SourceStatistics(NamedTuple):
    """Totals since the start, but for what is held and in flight now. Sizes are bytes."""

    requests: int
    bytes_fetched: int
    bytes_fetched_twice: int
    gap_bytes: int
    hits: int
    misses: int
    joined: int
    waits: int
    """User reads that waited for the store, the disk or memory."""
    memory_refused: int
    disk_hits: int
    disk_misses: int
    corrupt_fetched: int
    corrupt_memory: int
    corrupt_disk: int
    expired_unread: int
    evicted_unread: int
    cached_bytes: int
    index_bytes: int
    charged_bytes: int
    peak_bytes: int
    blocks_loading: int


ADJACENT_SHARE = 4
"""Part of the memory cache for unread adjacent blocks."""
EXPIRY_CHECKS = 16
"""Checks for expired blocks within the shortest expiry."""


@dataclass(slots=True)
class _Read:
    """Blocks ``numbers`` (ascending) of an object to be read; ``run`` is one whose rows they hold. ``blocks``: those
    in memory, ``loads``: those on their way, by number."""

    index: SegmentIndex
    run: int
    numbers: Sequence[int]
    priority: Priority
    blocks: dict[int, Block] = field(default_factory=dict)
    loads: dict[int, BlockLoad] = field(default_factory=dict)

    def clear(self) -> None:
        """Hold nothing."""
        self.blocks.clear()
        self.loads.clear()


class SegmentSource:
    """Reads tails and blocks for all readers of an archive. Thread-safe. Raises CorruptionError naming object and
    range, ThrottledError when memory or a queue is full, UsageError for a read larger than all memory, and what the
    store raises."""

    def __init__(
        self,
        reader: RangeReader,
        settings: FetchSettings,
        budget: ByteBudget,
        *,
        clock: Clock,
        decode_pool: Executor,
        timer: Timer | None = None,
        disk: DiskCache | None = None,
        on_unread_dropped: Callable[[list[DroppedUnread]], None] | None = None,
    ) -> None:
        """Reads objects through ``reader`` into caches that ``budget`` limits. ``decode_pool`` decompresses blocks. The
        ``timer`` is needed for a bandwidth limit, and to end waiting for memory. ``disk``: the disk cache, if any.
        ``on_unread_dropped`` is called with prefetched blocks that were dropped before they were read."""
        self._settings = settings
        self._budget = budget
        self._clock = clock
        self._disk = disk
        self._scheduler = RequestScheduler(
            reader, priority_limits(settings), clock=clock, timer=timer, bytes_per_s=settings.bytes_per_s
        )
        self._on_unread_dropped = on_unread_dropped
        self._cache = BlockCache(cache_limits(settings), clock=clock, on_unread_dropped=self._unread_dropped)
        decoding = DecodeQueue(decode_pool)
        self._indexes = IndexCache(
            self._scheduler,
            budget,
            decoding=decoding,
            bytes_max=settings.index_cache_bytes,
            clock=clock,
        )
        self._loads = BlockLoader(
            self._scheduler,
            self._cache,
            budget,
            decoding=decoding,
            disk=disk,
            limits=coalescing_limits(settings),
        )
        self._memory = MemoryAdmission(budget, settings.memory_wait_ms, clock=clock, timer=timer)
        self._adjacent = AdjacentPrefetch(settings.cache_bytes // ADJACENT_SHARE)
        self._waits = 0
        self._expire_s = clock.monotonic_s()
        budget.add_reclaimer(self._reclaim)

    # -- reading ----------------------------------------------------------------------------------------------

    async def index(
        self, key: str, size_bytes: int, tail_bytes: int, priority: Priority, ordinal: int | None = None
    ) -> SegmentIndex:
        """The decoded tail of an object, whose sizes the catalog gives; of a tail with many runs only the part that has
        the run ``ordinal``, if given. A corrupt one is fetched once more before CorruptionError is raised."""
        try:
            return await self._index(tail_part(key, ordinal), size_bytes, tail_bytes, priority)
        except CorruptionError:
            return await self._index(tail_part(key, ordinal), size_bytes, tail_bytes, priority)

    async def _index(
        self, wanted: TailPart, size_bytes: int, tail_bytes: int, priority: Priority
    ) -> SegmentIndex:
        """The tail, or the part ``wanted`` of it: from the cache, from a load in progress, or from a load that this
        starts after it was charged to the memory budget."""
        while True:
            found = self._indexes.get(wanted)
            if found is not None:
                return found
            load = self._indexes.join(wanted, priority)
            if load is None:
                cost_bytes = tail_cost_bytes(tail_bytes)
                await self._memory.charge(cost_bytes, priority, wanted[0])
                try:
                    load = self._indexes.start(wanted, size_bytes, tail_bytes, priority)
                except (CorruptionError, ObjectTooLargeError):
                    self._budget.release(cost_bytes)
                    raise
                if load is None:
                    self._budget.release(cost_bytes)
                    continue
            self._count_wait(priority, load.future.done())
            try:
                return await Wait(load.future)
            finally:
                del load  # an error's traceback refers to this frame, which would keep the load in memory

    async def blocks_at(
        self, index: SegmentIndex, run: int, numbers: Sequence[int], priority: Priority
    ) -> list[Block]:
        """The decompressed bytes of the blocks ``numbers``, ascending, of an object: a read-only array each.

        ``run``: a run of the object with rows in these blocks. Blocks that lie near each other share a GET. A corrupt
        block is fetched once more before CorruptionError is raised.
        """
        self._expire()
        try:
            return await self._blocks(_Read(index, run, numbers, priority))
        except CorruptionError:
            self._indexes.drop(index.key)  # the tail may be wrong: the next reader fetches it again
            return await self._blocks(_Read(index, run, numbers, priority))

    def index_in_memory(self, key: str, ordinal: int) -> SegmentIndex | None:
        """A cached tail, or its part with the run ``ordinal``, or None: then ``index`` joins or fetches it."""
        return self._indexes.get(tail_part(key, ordinal))

    def block_in_memory(self, object_key: str, number: int) -> Block | None:
        """A cached block for a user read, or None: then ``blocks_at`` joins or fetches it."""
        self._expire()
        key = BlockKey(object_key, number)
        if key not in self._cache:
            return None
        self._adjacent.were_read([key])
        return self._cache.get(key, is_read=True)

    async def _blocks(self, read: _Read) -> list[Block]:
        """Get all blocks of a read, and wait for those that are not in memory."""
        blocks, loads = read.blocks, read.loads
        try:
            await self._find(read)
            if loads:
                self._count_wait(read.priority, all(load.arrived.done() for load in loads.values()))
            # From the last one on: it arrives last as a rule, so this waits once instead of once for each.
            for arrived in dict.fromkeys(load.arrived for load in reversed(loads.values())):
                await Wait(arrived)
            for number in [*loads]:
                blocks[number] = loads.pop(number).outcome()
        except BaseException:
            # The error's traceback refers to this frame, and loads to the error: without this, blocks would stay in
            # memory until Python's garbage collector runs.
            read.clear()
            raise
        return [blocks[number] for number in read.numbers]

    async def _find(self, read: _Read) -> None:
        """Find each wanted block in memory or among the loads in progress, and start to load the others, together with
        adjacent blocks if the object is being read in order. Raises MemoryShortError and UsageError."""
        index, priority = read.index, read.priority
        charged_bytes = 0
        may_load_ahead = priority is not Priority.BACKGROUND
        try:
            while absent := self._look(read):
                plan = self._loads.plan(index, index.spans_of_single_blocks(read.run, absent))
                self._check_size(index, len(absent), plan.cost_bytes)
                if may_load_ahead:
                    may_load_ahead = False
                    larger = self._with_adjacent(read, absent)
                    if larger is not None and self._budget.try_charge(larger.cost_bytes, Priority.PREFETCH):
                        plan, charged_bytes = larger, larger.cost_bytes
                if charged_bytes == 0 and self._budget.try_charge(plan.cost_bytes, priority):
                    charged_bytes = plan.cost_bytes
                if charged_bytes < plan.cost_bytes:
                    # A read that waits for memory holds none, or reads would wait for each other. It then charges
                    # enough for all its blocks, because none may be left in memory by then.
                    read.clear()
                    self._budget.release(charged_bytes)
                    charged_bytes = 0
                    charged_bytes = await self._charge_all(read)
                    continue
                started = self._loads.start(plan, priority)
                if started is not None:
                    charged_bytes -= plan.cost_bytes
                    for load in started:
                        if load.span.first_block not in plan.extra:
                            read.loads[load.span.first_block] = load
        finally:
            self._budget.release(charged_bytes)
        if may_load_ahead:
            self._prefetch_adjacent(read)

    def _look(self, read: _Read) -> list[int]:
        """Look for the wanted blocks that the read does not have yet, in memory and among the loads in progress, and
        give these to it. Returns the numbers of the blocks that have to be loaded."""
        keys = [
            BlockKey(read.index.key, number)
            for number in read.numbers
            if number not in read.blocks and number not in read.loads
        ]
        if read.priority is Priority.USER:
            self._adjacent.were_read(keys)
        loads = self._loads.join(keys, read.priority)
        if loads:
            read.loads.update((key.block, load) for key, load in loads.items())
            keys = [key for key in keys if key not in loads]
        # The cache is searched after the loads, because a block whose load has just ended is in the cache.
        blocks = self._cache.get_all(keys, is_read=read.priority is not Priority.PREFETCH)
        absent = []
        for key, block in zip(keys, blocks, strict=True):
            if block is not None:
                read.blocks[key.block] = block
            else:
                absent.append(key.block)
        return absent

    async def _charge_all(self, read: _Read) -> int:
        """Charge the memory that all blocks of the read take if none of them is in memory, and return its bytes. Waits
        for memory as ``MemoryAdmission.charge`` does."""
        index = read.index
        spans = index.spans_of_single_blocks(read.run, read.numbers)
        cost_bytes = self._loads.cost_bytes_max(spans)
        self._check_size(index, len(spans), cost_bytes)
        await self._memory.charge(cost_bytes, read.priority, index.key)
        return cost_bytes

    def _check_size(self, index: SegmentIndex, count: int, cost_bytes: int) -> None:
        """Raise UsageError if a read of several blocks needs more memory than the budget has. A single block is always
        read, so that no message is unreadable."""
        if count > 1 and cost_bytes > self._budget.total_bytes:
            raise UsageError(
                f"{index.key} cannot be read: {count} of its blocks need {cost_bytes} bytes at once, and "
                f"fetch.memory_bytes is {self._budget.total_bytes}",
                hint="read fewer at a time, or raise fetch.memory_bytes",
            )

    # -- adjacent blocks --------------------------------------------------------------------------------------

    def _with_adjacent(self, read: _Read, absent: list[int]) -> LoadPlan | None:
        """Plan to load the blocks ``absent`` together with blocks that follow them, which the reader will want next.
        None if no further blocks should be loaded."""
        index, run = read.index, read.run
        if self._adjacent.is_full:
            self._adjacent.lost(key for key in self._adjacent.unread() if not self._is_at_hand(key))
        extra: list[int] = []
        for number in self._adjacent.to_load_with(index, run, absent[0], absent[-1]):
            if self._is_at_hand(BlockKey(index.key, number)):
                break
            extra.append(number)
        if not extra:
            return None
        spans = index.spans_of_single_blocks(run, [*absent, *extra])
        self._adjacent.are_loading(
            (BlockKey(index.key, span.first_block), span.raw_bytes) for span in spans[len(absent) :]
        )
        return self._loads.plan(index, spans, frozenset(extra))

    def _prefetch_adjacent(self, read: _Read) -> None:
        """Start to load the next blocks of an object that is being read in order, before the reader comes to them, if
        there is memory for them."""
        index = read.index
        due = self._adjacent.to_load_now(index, read.numbers[-1])
        extra = [number for number in due if not self._is_at_hand(BlockKey(index.key, number))]
        if not extra:
            return
        spans = index.spans_of_single_blocks(read.run, extra)
        plan = self._loads.plan(index, spans)
        if not self._budget.try_charge(plan.cost_bytes, Priority.PREFETCH):
            return
        self._adjacent.are_loading((BlockKey(index.key, span.first_block), span.raw_bytes) for span in spans)
        if self._loads.start(plan, Priority.PREFETCH) is None:
            self._budget.release(plan.cost_bytes)  # another reader loads one of them

    def _is_at_hand(self, key: BlockKey) -> bool:
        return key in self._cache or key in self._loads

    def _unread_dropped(self, gone: list[DroppedUnread]) -> None:
        self._adjacent.lost(drop.key for drop in gone)
        if self._on_unread_dropped is not None:
            self._on_unread_dropped(gone)

    def reader(self, priority: Priority) -> RangeReader:
        """A reader for callers with their own cache: requests in ``priority`` are counted and paced, none is cached."""
        return ScheduledReader(self._scheduler, priority)

    # -- memory -----------------------------------------------------------------------------------------------

    def _reclaim(self, byte_count: int, priority: int) -> None:
        """Free ``byte_count`` bytes for a charge of the memory budget: evict blocks that were read; for a user's read
        also prefetched blocks and tails of objects."""
        is_user = priority <= Priority.USER
        target_bytes = self._budget.charged_bytes - byte_count
        # A block that a reader still holds is not freed by evicting it, so this continues until enough is free.
        while (excess_bytes := self._budget.charged_bytes - target_bytes) > 0:
            if self._cache.reclaim(excess_bytes, unread_too=is_user) == 0:
                break
        if is_user and excess_bytes > 0:
            self._indexes.evict(excess_bytes)

    def _expire(self) -> None:
        if self._clock.monotonic_s() >= self._expire_s:
            self.expire()

    def expire(self) -> None:
        """Drop expired blocks. Reads do so too; call it when there are none."""
        settings = self._settings
        shortest_ms = min(settings.read_expiry_ms, settings.unread_expiry_ms)
        self._expire_s = self._clock.monotonic_s() + shortest_ms / 1000 / EXPIRY_CHECKS
        self._cache.expire()

    @property
    def held_bytes(self) -> int:
        """Decoded blocks in memory."""
        return self._cache.held_bytes

    def close(self) -> None:
        """Refuse what has not begun, or waits for memory, and every read from now on that needs the store. Idempotent;
        the reader, the pool and the timer are their owner's to close, after this."""
        self._scheduler.close()
        self._memory.close()

    # -- counting ---------------------------------------------------------------------------------------------

    def _count_wait(self, priority: Priority, is_done: bool) -> None:
        self._waits += priority is Priority.USER and not is_done

    def statistics(self) -> SourceStatistics:
        """The counters and sizes of all parts at this moment."""
        priorities, cache, loads = self._scheduler.counts.values(), self._cache.counts, self._loads.counts
        disk = self._disk.counts if self._disk is not None else None
        return SourceStatistics(
            requests=sum(priority.requests for priority in priorities),
            bytes_fetched=sum(priority.byte_count for priority in priorities),
            bytes_fetched_twice=loads.bytes_fetched_twice,
            gap_bytes=loads.gap_bytes,
            hits=cache.hits + self._indexes.counts.hits,
            misses=cache.misses + self._indexes.counts.misses,
            joined=loads.joined + self._indexes.counts.joined,
            waits=self._waits + self._memory.waits,
            memory_refused=self._memory.refused,
            disk_hits=disk.hits if disk else 0,
            disk_misses=disk.misses if disk else 0,
            corrupt_fetched=loads.corrupt + self._indexes.counts.corrupt,
            corrupt_memory=cache.corrupt + self._indexes.counts.corrupt_memory,
            corrupt_disk=disk.corrupt if disk else 0,
            expired_unread=cache.expired_unread,
            evicted_unread=cache.evicted_unread,
            cached_bytes=self._cache.held_bytes,
            index_bytes=self._indexes.held_bytes,
            charged_bytes=self._budget.charged_bytes,
            peak_bytes=self._budget.peak_bytes,
            blocks_loading=len(self._loads),
        )
