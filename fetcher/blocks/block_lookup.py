"""Finds the blocks of a read: in memory, in flight, or to be fetched now, memory permitting.

Each block is fetched once, however many readers want it. Owns the order of these lookups. Does not own caches, loads
(block_loader.py), waiting for memory (memory_admission.py) nor for blocks (segment_source.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fetcher.blocks.adjacent_prefetch import AdjacentPrefetch
from fetcher.blocks.block_cache import Block, BlockCache, BlockKey
from fetcher.blocks.block_loader import BlockLoader
from fetcher.blocks.budget import ByteBudget
from fetcher.blocks.inflight import BlockLoad, LoadPlan
from fetcher.blocks.memory_admission import MemoryAdmission
from fetcher.io.request_scheduler import Priority
from tiered.errors import UsageError
from tiered.formats.segment_index import SegmentIndex


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks ``numbers`` (ascending) of an object, to be read at ``priority``; ``run`` is one whose rows they hold."""

    index: SegmentIndex
    run: int
    numbers: Sequence[int]
    priority: Priority


class Found(NamedTuple):
    """Blocks by number: those in memory, and those being loaded."""

    blocks: dict[int, Block]
    loads: dict[int, BlockLoad]

    def clear(self) -> None:
        """Hold nothing."""
        self.blocks.clear()
        self.loads.clear()


class BlockLookup:
    """See the module. Holds no state of its own but the neighbours' trails. Thread-safe."""

    def __init__(
        self,
        cache: BlockCache,
        loads: BlockLoader,
        budget: ByteBudget,
        memory: MemoryAdmission,
        neighbours: AdjacentPrefetch,
    ) -> None:
        self._cache = cache
        self._loads = loads
        self._budget = budget
        self._memory = memory
        self._adjacent = neighbours

    def __repr__(self) -> str:
        return f"BlockLookup({self._cache!r}, {self._loads!r})"

    async def find(self, wanted: Wanted, found: Found) -> None:
        """Have each of the wanted blocks in ``found``. Raises ThrottledError, UsageError."""
        index, run, priority = wanted.index, wanted.run, wanted.priority
        charged_bytes = 0
        may_reach = priority is not Priority.BACKGROUND
        try:
            while absent := self._look(wanted, found):
                spans = index.spans_of_single_blocks(run, absent)
                plan = self._loads.plan(index, spans)
                self._check_size(index, len(absent), plan.cost_bytes)
                if may_reach:
                    may_reach = False
                    further = self._with_adjacent(wanted, absent)
                    if further is not None and self._budget.try_charge(further.cost_bytes, Priority.PREFETCH):
                        plan, charged_bytes = further, further.cost_bytes
                if charged_bytes == 0 and self._budget.try_charge(plan.cost_bytes, priority):
                    charged_bytes = plan.cost_bytes
                if charged_bytes < plan.cost_bytes:
                    # A waiting read holds no memory, or reads would wait for each other. Once admitted, it has
                    # enough for all blocks, even if none is left in memory.
                    found.clear()
                    self._budget.release(charged_bytes)
                    charged_bytes = 0
                    charged_bytes = await self._charge_all(wanted)
                    continue
                started = self._loads.start(plan, priority)
                if started is not None:
                    charged_bytes -= plan.cost_bytes
                    found.loads.update(
                        (load.span.first_block, load)
                        for load in started
                        if load.span.first_block not in plan.extra
                    )
        finally:
            self._budget.release(charged_bytes)
        if may_reach:
            self._prefetch_adjacent(wanted)

    def in_memory(self, key: BlockKey) -> Block | None:
        """The block for a user, if it is in memory."""
        if key not in self._cache:
            return None
        self._adjacent.taken([key])
        return self._cache.get(key, is_read=True)

    def _look(self, wanted: Wanted, found: Found) -> list[int]:
        """Sort ``numbers`` into what is in memory, what is on its way, and the rest, which is returned."""
        priority = wanted.priority
        keys = [
            BlockKey(wanted.index.key, number)
            for number in wanted.numbers
            if number not in found.blocks and number not in found.loads
        ]
        if priority is Priority.USER:
            self._adjacent.taken(keys)
        loads = self._loads.join(keys, priority)
        found.loads.update((key.block, load) for key, load in loads.items())
        if loads:
            keys = [key for key in keys if key not in loads]
        # After the loads: a block that has just landed is in the cache.
        blocks = self._cache.get_all(keys, is_read=priority is not Priority.PREFETCH)
        absent = []
        for key, block in zip(keys, blocks, strict=True):
            if block is not None:
                found.blocks[key.block] = block
            else:
                absent.append(key.block)
        return absent

    def _with_adjacent(self, wanted: Wanted, absent: list[int]) -> LoadPlan | None:
        """The plan for ``absent`` and the adjacent blocks worth loading with them; None without any."""
        index, run = wanted.index, wanted.run
        if self._adjacent.is_full:
            self._adjacent.lost(key for key in self._adjacent.awaited() if not self._is_at_hand(key))
        extra: list[int] = []
        for number in self._adjacent.behind(index, run, absent[0], absent[-1]):
            if self._is_at_hand(BlockKey(index.key, number)):
                break
            extra.append(number)
        if not extra:
            return None
        spans = index.spans_of_single_blocks(run, [*absent, *extra])
        self._adjacent.brought(
            (BlockKey(index.key, span.first_block), span.raw_bytes) for span in spans[len(absent) :]
        )
        return self._loads.plan(index, spans, frozenset(extra))

    def _prefetch_adjacent(self, wanted: Wanted) -> None:
        """Begin to load the next adjacent blocks, if they are due and memory has room."""
        index = wanted.index
        extra = [
            number
            for number in self._adjacent.ahead(index, wanted.numbers[-1])
            if not self._is_at_hand(BlockKey(index.key, number))
        ]
        if not extra:
            return
        spans = index.spans_of_single_blocks(wanted.run, extra)
        plan = self._loads.plan(index, spans)
        if not self._budget.try_charge(plan.cost_bytes, Priority.PREFETCH):
            return
        self._adjacent.brought((BlockKey(index.key, span.first_block), span.raw_bytes) for span in spans)
        if self._loads.start(plan, Priority.PREFETCH) is None:
            self._budget.release(plan.cost_bytes)  # another reader loads one of them

    def _is_at_hand(self, key: BlockKey) -> bool:
        return key in self._cache or key in self._loads

    async def _charge_all(self, wanted: Wanted) -> int:
        """Charge what all blocks take at most, none of them being in memory; returns that."""
        index = wanted.index
        spans = index.spans_of_single_blocks(wanted.run, wanted.numbers)
        cost_bytes = self._loads.cost_bytes_max(spans)
        self._check_size(index, len(spans), cost_bytes)
        await self._memory.charge(cost_bytes, wanted.priority, index.key)
        return cost_bytes

    def _check_size(self, index: SegmentIndex, count: int, cost_bytes: int) -> None:
        """A single block is read whatever it takes, several only if they fit."""
        if count > 1 and cost_bytes > self._budget.total_bytes:
            raise UsageError(
                f"{index.key}: {count} blocks need {cost_bytes} bytes at once, "
                f"fetch.memory_bytes is {self._budget.total_bytes}",
                hint="read fewer at a time, or raise fetch.memory_bytes",
            )
