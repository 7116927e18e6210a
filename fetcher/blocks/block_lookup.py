"""Where blocks that a read wants are: in memory, on their way, or to be fetched now, memory permitting.

Each block is fetched once however many want it. Owns the order of places to look in. Does not own caches, what is on
its way (block_loader.py), waiting for memory (memory_admission.py) nor who waits for blocks (segment_source.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fetcher.blocks.block_cache import Block, BlockCache, BlockKey
from fetcher.blocks.block_loader import BlockFlights
from fetcher.blocks.budget import ByteBudget
from fetcher.blocks.inflight import BlockFlight, FlightPlan
from fetcher.blocks.memory_admission import MemoryAdmission
from fetcher.blocks.neighbours import Neighbours
from fetcher.io.request_scheduler import Lane
from tiered.errors import UsageError
from tiered.formats.segment_index import SegmentIndex


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks ``numbers`` (ascending) of an object, for a reader in ``lane``; ``run`` is one whose rows they hold."""

    index: SegmentIndex
    run: int
    numbers: Sequence[int]
    lane: Lane


class Found(NamedTuple):
    """By number: what is in memory, and what will be."""

    blocks: dict[int, Block]
    flights: dict[int, BlockFlight]

    def clear(self) -> None:
        """Hold nothing."""
        self.blocks.clear()
        self.flights.clear()


class BlockSearch:
    """See the module. Holds no state of its own but the neighbours' trails. Thread-safe."""

    def __init__(
        self,
        cache: BlockCache,
        flights: BlockFlights,
        budget: ByteBudget,
        memory: MemoryAdmission,
        neighbours: Neighbours,
    ) -> None:
        self._cache = cache
        self._flights = flights
        self._budget = budget
        self._memory = memory
        self._neighbours = neighbours

    def __repr__(self) -> str:
        return f"BlockSearch({self._cache!r}, {self._flights!r})"

    async def find(self, wanted: Wanted, found: Found) -> None:
        """Have each of the wanted blocks in ``found``. Raises ThrottledError, UsageError."""
        index, run, lane = wanted.index, wanted.run, wanted.lane
        charged_bytes = 0
        may_reach = lane is not Lane.BACKGROUND
        try:
            while absent := self._look(wanted, found):
                spans = [index.span_of_blocks(run, number, number + 1) for number in absent]
                plan = self._flights.plan(index, spans)
                self._check_size(index, len(absent), plan.cost_bytes)
                if may_reach:
                    may_reach = False
                    further = self._with_neighbours(wanted, absent)
                    if further is not None and self._budget.try_charge(further.cost_bytes, Lane.PREFETCH):
                        plan, charged_bytes = further, further.cost_bytes
                if charged_bytes == 0 and self._budget.try_charge(plan.cost_bytes, lane):
                    charged_bytes = plan.cost_bytes
                if charged_bytes < plan.cost_bytes:
                    # Who waits for memory holds none, or those who wait would wait for each other. Once admitted,
                    # there is enough for all blocks, whatever is left of them in memory by then.
                    found.clear()
                    self._budget.release(charged_bytes)
                    charged_bytes = 0
                    charged_bytes = await self._charge_all(wanted)
                    continue
                started = self._flights.start(plan, lane)
                if started is not None:
                    charged_bytes -= plan.cost_bytes
                    found.flights.update(
                        (flight.span.first_block, flight)
                        for flight in started
                        if flight.span.first_block not in plan.unasked
                    )
        finally:
            self._budget.release(charged_bytes)

    def in_memory(self, key: BlockKey) -> Block | None:
        """The block for a user, if it is in memory."""
        if key not in self._cache:
            return None
        self._neighbours.taken(key)
        return self._cache.get(key, is_read=True)

    def _look(self, wanted: Wanted, found: Found) -> list[int]:
        """Sort ``numbers`` into what is in memory, what is on its way, and the rest, which is returned."""
        absent = []
        lane = wanted.lane
        for number in wanted.numbers:
            if number in found.blocks or number in found.flights:
                continue
            key = BlockKey(wanted.index.key, number)
            if lane is Lane.USER:
                self._neighbours.taken(key)
            flight = self._flights.join(key, lane)
            if flight is not None:
                found.flights[number] = flight
                continue
            block = self._cache.get(key, is_read=lane is not Lane.PREFETCH)
            if block is not None:
                found.blocks[number] = block
            else:
                absent.append(number)
        return absent

    def _with_neighbours(self, wanted: Wanted, absent: list[int]) -> FlightPlan | None:
        """The plan for ``absent`` and blocks behind that are worth to come along; None where there are none."""
        index, run = wanted.index, wanted.run
        if self._neighbours.is_full:
            self._neighbours.lost(key for key in self._neighbours.awaited() if not self._is_at_hand(key))
        unasked: list[int] = []
        for number in self._neighbours.behind(index, run, absent[0], absent[-1]):
            if self._is_at_hand(BlockKey(index.key, number)):
                break
            unasked.append(number)
        if not unasked:
            return None
        spans = [index.span_of_blocks(run, number, number + 1) for number in (*absent, *unasked)]
        self._neighbours.brought(
            (BlockKey(index.key, span.first_block), span.raw_bytes) for span in spans[len(absent) :]
        )
        return self._flights.plan(index, spans, frozenset(unasked))

    def _is_at_hand(self, key: BlockKey) -> bool:
        return key in self._cache or key in self._flights

    async def _charge_all(self, wanted: Wanted) -> int:
        """Charge what all blocks take at most, none of them being in memory; returns that."""
        index = wanted.index
        spans = [index.span_of_blocks(wanted.run, number, number + 1) for number in wanted.numbers]
        cost_bytes = self._flights.cost_bytes_max(spans)
        self._check_size(index, len(spans), cost_bytes)
        await self._memory.charge(cost_bytes, wanted.lane, index.key)
        return cost_bytes

    def _check_size(self, index: SegmentIndex, count: int, cost_bytes: int) -> None:
        """A single block is read whatever it takes, several only if they fit."""
        if count > 1 and cost_bytes > self._budget.total_bytes:
            raise UsageError(
                f"{index.key}: {count} blocks take {cost_bytes} bytes at once, "
                f"memory is {self._budget.total_bytes}",
                hint="read fewer at a time, or raise fetch.memory_bytes",
            )
