"""Values of blocks being loaded: the plan, one block, one GET and its blocks."""

from __future__ import annotations

from collections.abc import Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property

from fetcher.blocks.block_cache import Block, BlockKey
from fetcher.blocks.coalescing import PlannedGet
from fetcher.blocks.decode_queue import DecodeTask
from fetcher.io.request_scheduler import Priority, RangeRequest
from fetcher.io.waiting import new_future
from tiered.formats.segment_index import BlockSpan, SegmentIndex

DECODE_BYTES = 2 * 1024 * 1024
"""Raw bytes of a task of the decode pool: enough to hide its start, little enough to share between threads."""


@dataclass(frozen=True)
class LoadPlan:
    """Absent blocks of one object (spans of one block each, ascending) and how they are to be had."""

    index: SegmentIndex
    from_disk: Sequence[BlockSpan]
    from_store: Sequence[BlockSpan]
    gets: Sequence[PlannedGet]
    extra: Set[int] = frozenset()
    """Numbers of the adjacent blocks that were not requested."""

    @cached_property
    def cost_bytes(self) -> int:
        """Stored and raw bytes in memory at once, at most."""
        spans = [*self.from_disk, *self.from_store]
        stored = sum(get.length for get in self.gets) + sum(span.length for span in self.from_disk)
        return stored + sum(span.raw_bytes for span in spans)


@dataclass(eq=False, slots=True)
class BlockLoad:
    """One block on its way. ``arrived`` is done once the block, or an error, is there: for all decoded together.

    ``request``: the GET that brings it, while there is one; then ``task``: its place among what is to be decoded.
    """

    key: BlockKey
    span: BlockSpan
    priority: Priority
    arrived: Future[None]
    request: RangeRequest | None = None
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
class LoadGet:
    """A GET and the loads it brings, by task of the decode pool; ``tasks_left`` still need its bytes. ``turn``: when
    it was requested.

    A future keeps its callbacks, and thereby this, for ever: so loads forget their request and this its loads as
    soon as the bytes are there. A cycle would keep blocks in memory until the garbage collector comes by.
    """

    index: SegmentIndex
    offset: int
    byte_count: int
    tasks: list[list[BlockLoad]]
    turn: int
    tasks_left: int = 0


@dataclass
class LoadCounts:
    """Totals since the start."""

    joined: int = 0
    """Reads that joined a load in progress."""
    gap_bytes: int = 0
    bytes_fetched_twice: int = 0
    """Stored bytes of blocks that had been fetched before."""
    corrupt: int = 0
    """Blocks that came from the object store and failed a check."""


def block_load(index: SegmentIndex, span: BlockSpan, priority: Priority, arrived: Future[None]) -> BlockLoad:
    """One block of ``index``, about to be requested."""
    return BlockLoad(BlockKey(index.key, span.first_block), span, priority, arrived)


def planned_get(
    plan: LoadPlan, planned: PlannedGet, priority: Priority, turn: int
) -> tuple[RangeRequest, LoadGet]:
    """A request, its blocks grouped into tasks of the decode pool: requested blocks before adjacent ones."""
    index = plan.index
    request = RangeRequest(index.key, planned.offset, planned.length, priority)
    tasks: list[list[BlockLoad]] = []
    task_bytes = DECODE_BYTES
    was_requested = True
    for span in plan.from_store[planned.first : planned.end]:
        is_requested = span.first_block not in plan.extra
        if task_bytes + span.raw_bytes > DECODE_BYTES or is_requested is not was_requested:
            tasks.append([])
            task_bytes, arrived, was_requested = 0, new_future(), is_requested
        tasks[-1].append(block_load(index, span, priority if is_requested else Priority.PREFETCH, arrived))
        tasks[-1][-1].request = request
        task_bytes += span.raw_bytes
    return request, LoadGet(index, planned.offset, planned.length, tasks, turn)
