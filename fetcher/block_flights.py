"""Blocks on their way: one GET or one disk read each, however many want them.

A flight begins with a charged plan: coalesced GETs leave in the lane of who asked first, what arrives is checked and
decompressed in the decode pool, put into the cache and handed to all who wait. A failed flight leaves nothing behind.
Runs in whatever thread completes a request; no lock is held while futures are completed.

Owns blocks in flight. Does not own who waits (segment_source.py), nor when a GET starts (lanes.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import fastcrc
import zstandard

from fetcher.block_cache import Block, BlockCache, BlockKey, NewBlock
from fetcher.budget import ByteBudget
from fetcher.coalescing import CoalescingLimits, PlannedGet, Range, plan_gets
from fetcher.disk_cache import DiskCache
from fetcher.lanes import Lane, LaneRequest, Lanes
from fetcher.waiting import Executor, new_future
from tiered.errors import CorruptionError, TieredError, UnavailableError
from tiered.formats.segment_index import BlockSpan, SegmentIndex
from tiered.formats.segment_layout import CODEC_RAW

DECODE_BYTES = 2 * 1024 * 1024
"""Raw bytes of a task of the decode pool: enough to hide its start, little enough to share between threads."""
HISTORY_OBJECTS = 4096
"""Objects of which it is remembered which blocks were fetched."""


@dataclass(frozen=True)
class FlightPlan:
    """Absent blocks of one object (spans of one block each, ascending) and how they are to be had."""

    index: SegmentIndex
    from_disk: Sequence[BlockSpan]
    from_store: Sequence[BlockSpan]
    gets: Sequence[PlannedGet]

    @property
    def cost_bytes(self) -> int:
        """Stored and raw bytes in memory at once, at most."""
        spans = [*self.from_disk, *self.from_store]
        stored = sum(get.length for get in self.gets) + sum(span.length for span in self.from_disk)
        return stored + sum(span.raw_bytes for span in spans)


@dataclass(eq=False, slots=True)
class BlockFlight:
    """One block on its way. ``arrived`` is done once the block, or an error, is there: for all decoded together.

    ``request``: the GET that brings it, while there is one.
    """

    key: BlockKey
    span: BlockSpan
    lane: Lane
    arrived: Future[None]
    request: LaneRequest | None = None
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
class _Get:
    """A GET and the flights it brings, by task of the decode pool; ``tasks_left`` still need its bytes.

    A future keeps its callbacks, and thereby this, for ever: so flights forget their request and this its flights as
    soon as the bytes are there. A cycle would keep blocks in memory until the garbage collector comes by.
    """

    index: SegmentIndex
    offset: int
    byte_count: int
    tasks: list[list[BlockFlight]]
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


class BlockFlights:
    """See the module. Thread-safe."""

    def __init__(
        self,
        lanes: Lanes,
        cache: BlockCache,
        budget: ByteBudget,
        *,
        decode_pool: Executor,
        disk: DiskCache | None,
        limits: CoalescingLimits,
    ) -> None:
        self._lanes = lanes
        self._cache = cache
        self._budget = budget
        self._decode_pool = decode_pool
        self._disk = disk
        self.limits = limits
        self._lock = threading.Lock()
        self._flights: dict[BlockKey, BlockFlight] = {}
        self._fetched: OrderedDict[str, int] = OrderedDict()
        self.counts = FlightCounts()

    def __repr__(self) -> str:
        return f"BlockFlights({len(self._flights)} blocks)"

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._flights

    # -- asking -----------------------------------------------------------------------------------------------

    def join(self, key: BlockKey, lane: Lane) -> BlockFlight | None:
        """The block's flight, if there is one; it becomes as urgent as ``lane``."""
        with self._lock:
            flight = self._flights.get(key)
            if flight is None:
                return None
            self.counts.joined += 1
            flight.lane = min(flight.lane, lane)
            request = flight.request
        if request is not None:
            self._lanes.promote(request, lane)
        return flight

    def plan(self, index: SegmentIndex, spans: Sequence[BlockSpan]) -> FlightPlan:
        """How to get blocks that are not there (spans of one block each, ascending). Nothing happens yet."""
        disk = self._disk
        on_disk = [disk is not None and BlockKey(index.key, span.first_block) in disk for span in spans]
        from_store = [span for span, is_there in zip(spans, on_disk, strict=True) if not is_there]
        gets = plan_gets([Range(span.offset, span.length) for span in from_store], self.limits)
        from_disk = [span for span, is_there in zip(spans, on_disk, strict=True) if is_there]
        return FlightPlan(index, from_disk, from_store, gets)

    def cost_bytes_max(self, spans: Sequence[BlockSpan]) -> int:
        """What these blocks, or some of them, cost at most, however their GETs are planned."""
        stored = sum(span.length for span in spans) / (1 - self.limits.gap_ratio)
        return int(stored) + 1 + sum(span.raw_bytes for span in spans)

    def start(self, plan: FlightPlan, lane: Lane) -> list[BlockFlight] | None:
        """Begin what is planned; its cost is charged and belongs to the flights from now on.

        None, and nothing happened: somebody was faster with one of the blocks, so look again.
        """
        index = plan.index
        from_disk = [self._flight(index, span, lane, new_future()) for span in plan.from_disk]
        gets = [self._planned(index, planned, plan.from_store, lane) for planned in plan.gets]
        from_store = [flight for _, get in gets for task in get.tasks for flight in task]
        flights = [*from_disk, *from_store]
        with self._lock:
            if any(flight.key in self._flights or flight.key in self._cache for flight in flights):
                return None
            self._flights.update({flight.key: flight for flight in flights})
            self.counts.gap_bytes += sum(planned.gap_bytes for planned in plan.gets)
        for request, get in gets:
            self._send(request, get)
        for flight in from_disk:
            self._submit(partial(self._read_disk, index, flight), [flight], flight.span.length)
        return flights

    def _flight(self, index: SegmentIndex, span: BlockSpan, lane: Lane, arrived: Future[None]) -> BlockFlight:
        return BlockFlight(BlockKey(index.key, span.first_block), span, lane, arrived)

    def _planned(
        self, index: SegmentIndex, planned: PlannedGet, spans: Sequence[BlockSpan], lane: Lane
    ) -> tuple[LaneRequest, _Get]:
        request = LaneRequest(index.key, planned.offset, planned.length, lane)
        tasks: list[list[BlockFlight]] = []
        task_bytes = DECODE_BYTES
        for span in spans[planned.first : planned.end]:
            if task_bytes + span.raw_bytes > DECODE_BYTES:
                tasks.append([])
                task_bytes, arrived = 0, new_future()
            tasks[-1].append(self._flight(index, span, lane, arrived))
            tasks[-1][-1].request = request
            task_bytes += span.raw_bytes
        return request, _Get(index, planned.offset, planned.length, tasks)

    def _send(self, request: LaneRequest, get: _Get) -> None:
        self._lanes.submit(request).add_done_callback(partial(self._on_bytes, get))

    # -- arriving ---------------------------------------------------------------------------------------------

    def _on_bytes(self, get: _Get, answer: Future[bytes]) -> None:
        error = answer.exception()
        tasks, get.tasks = get.tasks, []
        flights = [flight for task in tasks for flight in task]
        for flight in flights:
            flight.request = None
        if error is not None:
            self._fail(flights, error)
            self._budget.release(get.byte_count)
            return
        self._note_fetched(get.index.key, flights)
        get.tasks_left = len(tasks)
        for task in tasks:
            self._submit(partial(self._decode, get, task, answer.result()), task, 0, get)

    def _submit(
        self, work: partial[None], flights: list[BlockFlight], byte_count: int, get: _Get | None = None
    ) -> None:
        """``work`` in the decode pool; a pool that is closed already fails the flights."""
        try:
            self._decode_pool.submit(work)
        except RuntimeError as error:
            self._fail(flights, UnavailableError(f"{flights[0].key.object_key} is not read: {error}"))
            self._budget.release(byte_count)
            if get is not None:
                self._task_done(get)

    def _decode(self, get: _Get, flights: list[BlockFlight], data: bytes) -> None:
        """One task of the decode pool: blocks of ``get``, whose bytes are ``data``."""
        view = memoryview(data)
        pieces = [view[flight.span.offset - get.offset :][: flight.span.length] for flight in flights]
        self._deliver(get.index, flights, pieces)
        if self._disk is not None:
            for flight, stored in zip(flights, pieces, strict=True):
                if flight.block is not None and flight.lane is not Lane.BACKGROUND:
                    self._disk.put(flight.key, stored)
        self._task_done(get)

    def _task_done(self, get: _Get) -> None:
        with self._lock:
            get.tasks_left -= 1
            is_last = get.tasks_left == 0
        if is_last:
            self._budget.release(get.byte_count)

    def _deliver(
        self, index: SegmentIndex, flights: Sequence[BlockFlight], pieces: Sequence[memoryview]
    ) -> None:
        """Check, decode and hand out blocks that arrive together; those that are corrupt as errors."""
        decompressor = zstandard.ZstdDecompressor()
        landed: list[NewBlock] = []
        try:
            for flight, stored in zip(flights, pieces, strict=True):
                try:
                    block = index.decode_blocks(flight.span, stored, decompressor)
                except TieredError as error:
                    self.counts.corrupt += isinstance(error, CorruptionError)
                    # Without the way here, which refers to the flight and so to itself.
                    flight.error = error.with_traceback(None)
                    continue
                if int(index.blocks["codec"][flight.span.first_block]) == CODEC_RAW:
                    block = block.copy()  # else a view keeps the whole GET in memory
                    block.flags.writeable = False
                self._budget.tie(flight.span.raw_bytes, block)
                flight.block = block
                if flight.lane is not Lane.BACKGROUND:
                    is_read = flight.lane is Lane.USER
                    landed.append(NewBlock(flight.key, block, fastcrc.crc32.iscsi(block), is_read))
            self._cache.put_all(landed)
        except Exception as error:  # a defect: who waits must learn of it all the same
            for flight in flights:
                flight.error = flight.error or error
        self._land(flights, {new.key for new in landed if not new.is_read})

    def _land(self, flights: Sequence[BlockFlight], unread: Set[BlockKey]) -> None:
        """Who waits may look. ``unread``: blocks the cache took as such."""
        with self._lock:
            for flight in flights:
                del self._flights[flight.key]
            read_since = [
                flight.key for flight in flights if flight.lane is Lane.USER and flight.key in unread
            ]
        for key in read_since:
            self._cache.get(key, is_read=True)  # a user came while it landed
        self._budget.release(sum(flight.span.raw_bytes for flight in flights if flight.block is None))
        for arrived in {flight.arrived for flight in flights}:
            arrived.set_result(None)

    def _fail(self, flights: Sequence[BlockFlight], error: BaseException) -> None:
        for flight in flights:
            flight.error = error
        self._land(flights, frozenset())

    # -- disk -------------------------------------------------------------------------------------------------

    def _read_disk(self, index: SegmentIndex, flight: BlockFlight) -> None:
        """One task of the decode pool. What the disk does not give, or gives damaged, is fetched after all."""
        assert self._disk is not None
        number = flight.span.first_block
        stored = self._disk.get(flight.key, int(index.blocks["crc32c"][number]), flight.span.length)
        if stored is not None:
            self._deliver(index, [flight], [memoryview(stored)])
            self._budget.release(flight.span.length)
            return
        request = LaneRequest(index.key, flight.span.offset, flight.span.length, flight.lane)
        with self._lock:
            flight.request = request
            request.lane = flight.lane
        self._send(request, _Get(index, flight.span.offset, flight.span.length, [[flight]]))

    def _note_fetched(self, key: str, flights: Sequence[BlockFlight]) -> None:
        with self._lock:
            known = self._fetched.get(key, 0)
            for flight in flights:
                bit = 1 << flight.span.first_block
                if known & bit:
                    self.counts.bytes_fetched_twice += flight.span.length
                known |= bit
            self._fetched[key] = known
            self._fetched.move_to_end(key)
            if len(self._fetched) > HISTORY_OBJECTS:
                self._fetched.popitem(last=False)
