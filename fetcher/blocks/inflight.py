"""Blocks on their way, as values: what is planned, one block, one GET and the blocks it brings.

Owns what these know of each other. Does not own what happens to them (block_loader.py).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property

from fetcher.blocks.block_cache import Block, BlockKey
from fetcher.blocks.coalescing import PlannedGet
from fetcher.blocks.decode_queue import DecodeTask
from fetcher.io.request_scheduler import Lane, LaneRequest
from fetcher.io.waiting import new_future
from tiered.formats.segment_index import BlockSpan, SegmentIndex

DECODE_BYTES = 2 * 1024 * 1024
"""Raw bytes of a task of the decode pool: enough to hide its start, little enough to share between threads."""


@dataclass(frozen=True)
class FlightPlan:
    """Absent blocks of one object (spans of one block each, ascending) and how they are to be had."""

    index: SegmentIndex
    from_disk: Sequence[BlockSpan]
    from_store: Sequence[BlockSpan]
    gets: Sequence[PlannedGet]
    unasked: Set[int] = frozenset()
    """Numbers of those that come along though nobody asked for them."""

    @cached_property
    def cost_bytes(self) -> int:
        """Stored and raw bytes in memory at once, at most."""
        spans = [*self.from_disk, *self.from_store]
        stored = sum(get.length for get in self.gets) + sum(span.length for span in self.from_disk)
        return stored + sum(span.raw_bytes for span in spans)


@dataclass(eq=False, slots=True)
class BlockFlight:
    """One block on its way. ``arrived`` is done once the block, or an error, is there: for all decoded together.

    ``request``: the GET that brings it, while there is one; then ``task``: its place among what is to be decoded.
    """

    key: BlockKey
    span: BlockSpan
    lane: Lane
    arrived: Future[None]
    request: LaneRequest | None = None
    task: DecodeTask | None = None
    block: Block | None = None
    error: BaseException | None = None

    def outcome(self) -> Block:
        """The block, once arrived. Raises why it is not there."""
        if self.block is not None:
            return self.block
        assert self.error is not None
        try:
            raise self.error
        finally:
            del self  # the error refers to this frame from now on: it would refer to itself


@dataclass(eq=False)
class FlightGet:
    """A GET and the flights it brings, by task of the decode pool; ``tasks_left`` still need its bytes. ``turn``: when
    it was asked for.

    A future keeps its callbacks, and thereby this, for ever: so flights forget their request and this its flights as
    soon as the bytes are there. A cycle would keep blocks in memory until the garbage collector comes by.
    """

    index: SegmentIndex
    offset: int
    byte_count: int
    tasks: list[list[BlockFlight]]
    turn: int
    tasks_left: int = 0


@dataclass
class FlightCounts:
    """Totals since the start."""

    joined: int = 0
    """Blocks that were on their way already when somebody asked."""
    gap_bytes: int = 0
    bytes_fetched_twice: int = 0
    """Stored bytes of blocks that had been fetched before."""
    corrupt: int = 0
    """Blocks that came from the object store and failed a check."""


def flight_of(index: SegmentIndex, span: BlockSpan, lane: Lane, arrived: Future[None]) -> BlockFlight:
    """One block of ``index``, about to be asked for."""
    return BlockFlight(BlockKey(index.key, span.first_block), span, lane, arrived)


def planned_get(
    plan: FlightPlan, planned: PlannedGet, lane: Lane, turn: int
) -> tuple[LaneRequest, FlightGet]:
    """A request, its blocks grouped into tasks of the decode pool: those asked for before those nobody waits for."""
    index = plan.index
    request = LaneRequest(index.key, planned.offset, planned.length, lane)
    tasks: list[list[BlockFlight]] = []
    task_bytes = DECODE_BYTES
    was_asked = True
    for span in plan.from_store[planned.first : planned.end]:
        is_asked = span.first_block not in plan.unasked
        if task_bytes + span.raw_bytes > DECODE_BYTES or is_asked is not was_asked:
            tasks.append([])
            task_bytes, arrived, was_asked = 0, new_future(), is_asked
        tasks[-1].append(flight_of(index, span, lane if is_asked else Lane.PREFETCH, arrived))
        tasks[-1][-1].request = request
        task_bytes += span.raw_bytes
    return request, FlightGet(index, planned.offset, planned.length, tasks, turn)
