"""Blocks on their way: one GET or one disk read each, however many want them.

A flight begins with a charged plan: coalesced GETs leave in the lane of who asked first, what arrives is checked and
decompressed in the decode pool, put into the cache and handed to all who wait. A failed flight leaves nothing behind.
Runs in whatever thread completes a request; no lock is held while futures are completed.

Owns blocks in flight. Does not own who waits (segment_source.py), nor when a GET starts (request_scheduler.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from concurrent.futures import Future
from functools import partial

import fastcrc
import zstandard

from fetcher.blocks.block_cache import BlockCache, BlockKey, NewBlock
from fetcher.blocks.budget import ByteBudget
from fetcher.blocks.coalescing import CoalescingLimits, Range, plan_gets
from fetcher.blocks.decode_queue import DecodeQueue
from fetcher.blocks.disk_cache import DiskCache
from fetcher.blocks.fetch_history import FetchHistory
from fetcher.blocks.inflight import BlockFlight, FlightCounts, FlightGet, FlightPlan, flight_of, planned_get
from fetcher.io.request_scheduler import Lane, LaneRequest, Lanes
from fetcher.io.waiting import new_future
from tiered.errors import CorruptionError, TieredError, UnavailableError
from tiered.formats.segment_index import BlockSpan, SegmentIndex
from tiered.formats.segment_layout import CODEC_RAW


class BlockFlights:
    """See the module. Thread-safe."""

    def __init__(
        self,
        lanes: Lanes,
        cache: BlockCache,
        budget: ByteBudget,
        *,
        decoding: DecodeQueue,
        disk: DiskCache | None,
        limits: CoalescingLimits,
    ) -> None:
        self._lanes = lanes
        self._cache = cache
        self._budget = budget
        self._decoding = decoding
        self._disk = disk
        self.limits = limits
        self._lock = threading.Lock()
        self._flights: dict[BlockKey, BlockFlight] = {}
        self._history = FetchHistory()
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
            request, task = flight.request, flight.task
        if request is not None:
            self._lanes.promote(request, lane)
        if task is not None:
            self._decoding.hurry(task, lane)
        return flight

    def plan(
        self, index: SegmentIndex, spans: Sequence[BlockSpan], unasked: Set[int] = frozenset()
    ) -> FlightPlan:
        """How to get blocks that are not there (spans of one block each, ascending). Nothing happens yet. ``unasked``:
        numbers of those among them that nobody waits for."""
        disk = self._disk
        on_disk = [disk is not None and BlockKey(index.key, span.first_block) in disk for span in spans]
        from_store = [span for span, is_there in zip(spans, on_disk, strict=True) if not is_there]
        gets = plan_gets([Range(span.offset, span.length) for span in from_store], self.limits)
        from_disk = [span for span, is_there in zip(spans, on_disk, strict=True) if is_there]
        return FlightPlan(index, from_disk, from_store, gets, unasked)

    def cost_bytes_max(self, spans: Sequence[BlockSpan]) -> int:
        """What these blocks, or some of them, cost at most, however their GETs are planned."""
        stored = sum(span.length for span in spans) / (1 - self.limits.gap_ratio)
        return int(stored) + 1 + sum(span.raw_bytes for span in spans)

    def start(self, plan: FlightPlan, lane: Lane) -> list[BlockFlight] | None:
        """Begin what is planned; its cost is charged and belongs to the flights from now on.

        None, and nothing happened: somebody was faster with one of the blocks, so look again.
        """
        index = plan.index
        from_disk = [
            flight_of(index, span, Lane.PREFETCH if span.first_block in plan.unasked else lane, new_future())
            for span in plan.from_disk
        ]
        gets = [planned_get(plan, planned, lane, self._decoding.turn()) for planned in plan.gets]
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
            turn = self._decoding.turn()
            self._submit(partial(self._read_disk, index, flight, turn), [flight], turn, flight.span.length)
        return flights

    def _send(self, request: LaneRequest, get: FlightGet) -> None:
        self._lanes.submit(request).add_done_callback(partial(self._on_bytes, get))

    # -- arriving ---------------------------------------------------------------------------------------------

    def _on_bytes(self, get: FlightGet, answer: Future[bytes]) -> None:
        error = answer.exception()
        tasks, get.tasks = get.tasks, []
        flights = [flight for task in tasks for flight in task]
        for flight in flights:
            flight.request = None
        if error is not None:
            self._fail(flights, error)
            self._budget.release(get.byte_count)
            return
        again_bytes = self._history.note(get.index.key, [flight.span for flight in flights])
        with self._lock:
            self.counts.bytes_fetched_twice += again_bytes
        get.tasks_left = len(tasks)
        for task in tasks:
            self._submit(partial(self._decode, get, task, answer.result()), task, get.turn, 0, get)

    def _submit(
        self,
        work: partial[None],
        flights: list[BlockFlight],
        turn: int,
        byte_count: int,
        get: FlightGet | None = None,
    ) -> None:
        """``work`` in the decode pool; a pool that is closed already fails the flights."""
        with self._lock:
            lane = min(flight.lane for flight in flights)
        try:
            task = self._decoding.submit(work, lane, turn)
        except RuntimeError as error:
            self._fail(flights, UnavailableError(f"{flights[0].key.object_key} is not read: {error}"))
            self._budget.release(byte_count)
            if get is not None:
                self._task_done(get)
            return
        with self._lock:
            for flight in flights:
                flight.task = task
            lane_now = min(flight.lane for flight in flights)
        if lane_now < lane:  # a user came in between
            self._decoding.hurry(task, lane_now)

    def _decode(self, get: FlightGet, flights: list[BlockFlight], data: bytes) -> None:
        """One task of the decode pool: blocks of ``get``, whose bytes are ``data``."""
        view = memoryview(data)
        pieces = [view[flight.span.offset - get.offset :][: flight.span.length] for flight in flights]
        self._deliver(get.index, flights, pieces)
        if self._disk is not None:
            for flight, stored in zip(flights, pieces, strict=True):
                if flight.block is not None and flight.lane is not Lane.BACKGROUND:
                    self._disk.put(flight.key, stored)
        self._task_done(get)

    def _task_done(self, get: FlightGet) -> None:
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

    def _read_disk(self, index: SegmentIndex, flight: BlockFlight, turn: int) -> None:
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
        self._send(request, FlightGet(index, flight.span.offset, flight.span.length, [[flight]], turn))
