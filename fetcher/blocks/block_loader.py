"""Loads blocks: one GET or one disk read each, however many readers want them.

A load starts with a charged plan: GETs are few, bounded in size, with few unwanted bytes. Adjacent ranges are joined,
over a gap too if the unwanted bytes stay below a ratio of the whole; a span longer than a piece is cut into pieces of
about equal length, fetched concurrently. GETs leave at the priority of the first reader; the decode pool checks and
decompresses what arrives, caches it, and completes the waiting reads. A failed load leaves nothing. Runs in any thread
that completes a request; no lock is held while futures are completed. Does not own the waiting (segment_source.py) nor
when a GET starts (request_scheduler.py).
"""

import threading
from collections.abc import Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import fastcrc
import zstandard

from fetcher.blocks.block_cache import Block, BlockCache, BlockKey, NewBlock
from fetcher.blocks.budget import ByteBudget
from fetcher.blocks.decode_queue import DecodeQueue, DecodeTask
from fetcher.blocks.disk_cache import DiskCache
from fetcher.io.request_scheduler import Priority, RangeRequest, RequestScheduler
from fetcher.io.waiting import new_future
from tiered.errors import CorruptionError, TieredError, UnavailableError
from tiered.formats.segment_index import BlockSpan, SegmentIndex
from tiered.formats.segment_layout import CODEC_RAW
from tiered.model.lru import Lru


@dataclass(frozen=True)
class CoalescingLimits:
    """``gap_ratio``: unwanted bytes of a GET over all its bytes. ``piece_bytes``: what a long span is cut into.

    ``get_bytes_max`` bounds a GET but for a single longer range.
    """

    gap_ratio: float
    piece_bytes: int
    get_bytes_max: int


class Range(NamedTuple):
    """Bytes [offset, offset + length) of an object."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.length


class PlannedGet(NamedTuple):
    """One GET. It brings the wanted ranges number [first, end); ``gap_bytes`` of it are unwanted."""

    offset: int
    length: int
    first: int
    end: int
    gap_bytes: int


def plan_gets(wanted: Sequence[Range], limits: CoalescingLimits) -> list[PlannedGet]:
    """Plan the GETs that fetch every range of ``wanted`` exactly once; near ranges share a GET, and large spans are cut
    into pieces. The ranges are ascending and not empty.

    Raises ValueError for ranges that overlap or are not in order.
    """
    plans: list[PlannedGet] = []
    first = 0
    length = wanted[-1].end - wanted[0].offset if wanted else 0
    # Mostly the ranges follow each other without a gap, and one GET fetches them.
    is_one = 0 < length <= min(limits.piece_bytes, limits.get_bytes_max)
    if is_one and all(one.offset + one.length == other.offset for one, other in pairwise(wanted)):
        return [PlannedGet(wanted[0].offset, length, 0, len(wanted), 0)]
    for number in range(1, len(wanted) + 1):
        if number < len(wanted):
            if wanted[number].offset < wanted[number - 1].end:
                raise ValueError(f"{wanted[number]} does not follow {wanted[number - 1]}")
            if _gap_fits(wanted, first, number + 1, limits.gap_ratio):
                continue
        plans += _cut(wanted, first, number, limits)
        first = number
    return plans


def _gap_fits(wanted: Sequence[Range], first: int, end: int, gap_ratio: float) -> bool:
    """Whether one GET may cover wanted[first:end]: the bytes of the gaps between these ranges, which are fetched in
    vain, are at most ``gap_ratio`` of it. Always if there is no gap before the last range: gaps in front of that were
    allowed before."""
    gap = wanted[end - 1].offset - wanted[end - 2].end
    if gap == 0:
        return True
    length = wanted[end - 1].end - wanted[first].offset
    return _gap_bytes(wanted, first, end) <= gap_ratio * length


def _cut(wanted: Sequence[Range], first: int, end: int, limits: CoalescingLimits) -> list[PlannedGet]:
    """Plan GETs for wanted[first:end], which may share one: pieces of about ``piece_bytes`` and equal length, so that
    they are fetched concurrently. A piece ends at the end of the range that is nearest to its ideal end."""
    start, stop = wanted[first].offset, wanted[end - 1].end
    pieces = max(1, round((stop - start) / limits.piece_bytes))
    goal_number, begin = 1, first
    plans: list[PlannedGet] = []
    for number in range(first + 1, end):
        goal = start + (stop - start) * goal_number / pieces
        reached, after = wanted[number - 1].end, wanted[number].end
        is_goal = goal_number < pieces and after - goal > goal - reached
        if is_goal or after - wanted[begin].offset > limits.get_bytes_max:
            plans += _within_ratio(wanted, begin, number, limits.gap_ratio)
            begin = number
            goal_number += is_goal
    return plans + _within_ratio(wanted, begin, end, limits.gap_ratio)


def _within_ratio(wanted: Sequence[Range], first: int, end: int, gap_ratio: float) -> list[PlannedGet]:
    """Plan one GET for wanted[first:end], or several: as long as its gaps are more than ``gap_ratio`` of a GET, it is
    divided at its largest gap."""
    pending = [(first, end)]
    plans: list[PlannedGet] = []
    while pending:
        first, end = pending.pop()
        length = wanted[end - 1].end - wanted[first].offset
        gap_bytes = _gap_bytes(wanted, first, end)
        if gap_bytes <= gap_ratio * length:
            plans.append(PlannedGet(wanted[first].offset, length, first, end, gap_bytes))
            continue
        at = max(range(first + 1, end), key=lambda number: wanted[number].offset - wanted[number - 1].end)
        pending += [(at, end), (first, at)]
    return plans


def _gap_bytes(wanted: Sequence[Range], first: int, end: int) -> int:
    length = wanted[end - 1].end - wanted[first].offset
    return length - sum(wanted[number].length for number in range(first, end))


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
        """The block, after ``arrived`` is done. Raises the error with which loading it ended."""
        if self.block is not None:
            return self.block
        assert self.error is not None
        try:
            raise self.error
        finally:
            # The error's traceback refers to this frame: without this the error would keep itself in memory.
            del self


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
    """The request of a planned GET, and its blocks grouped into tasks of about DECODE_BYTES for the threads that
    decompress: first the blocks that a read waits for, then those loaded ahead. ``turn``: the place of the tasks in the
    queue of these threads."""
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


HISTORY_OBJECTS = 4096
"""Objects whose fetched blocks are recorded."""


class FetchHistory:
    """The blocks fetched of the objects used last, one bit each. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fetched: Lru[str, int] = Lru(HISTORY_OBJECTS)

    def note(self, key: str, spans: Sequence[BlockSpan]) -> int:
        """Note that blocks of the object ``key`` were fetched from the store; each span has one block. Returns the
        stored bytes of those that had been fetched before, for the count of bytes fetched twice."""
        again_bytes = 0
        with self._lock:
            known = self._fetched.peek(key) or 0
            for span in spans:
                bit = 1 << span.first_block
                if known & bit:
                    again_bytes += span.length
                known |= bit
            self._fetched.put(key, known)
        return again_bytes


class BlockLoader:
    """Fetches, decodes and caches blocks, and completes the reads that wait for them. Thread-safe."""

    def __init__(
        self,
        scheduler: RequestScheduler,
        cache: BlockCache,
        budget: ByteBudget,
        *,
        decoding: DecodeQueue,
        disk: DiskCache | None,
        limits: CoalescingLimits,
    ) -> None:
        """``scheduler`` sends the GETs in order of priority; ``decoding`` runs the tasks that check and decompress
        blocks; ``disk`` is None if no disk cache is configured."""
        self._scheduler = scheduler
        self._cache = cache
        self._budget = budget
        self._decoding = decoding
        self._disk = disk
        self.limits = limits
        self._lock = threading.Lock()
        self._loads: dict[BlockKey, BlockLoad] = {}
        self._history = FetchHistory()
        self.counts = LoadCounts()

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._loads

    # -- asking -----------------------------------------------------------------------------------------------

    def join(self, keys: Sequence[BlockKey], priority: Priority) -> dict[BlockKey, BlockLoad]:
        """The loads in progress of the blocks ``keys``, by key; blocks that are not being loaded are absent. Their
        requests and tasks get ``priority`` if that is higher than theirs."""
        with self._lock:
            loads = {key: load for key in keys if (load := self._loads.get(key)) is not None}
            self.counts.joined += len(loads)
            for load in loads.values():
                load.priority = min(load.priority, priority)
            waiting = [(load.request, load.task) for load in loads.values()]
        for request, task in waiting:
            if request is not None:
                self._scheduler.promote(request, priority)
            if task is not None:
                self._decoding.hurry(task, priority)
        return loads

    def plan(
        self, index: SegmentIndex, spans: Sequence[BlockSpan], extra: Set[int] = frozenset()
    ) -> LoadPlan:
        """Plan how to load blocks that are not in memory: from the disk cache or by which GETs. Each of the ascending
        spans has one block. ``extra``: the numbers of those that are loaded ahead and for which no read waits."""
        disk = self._disk
        on_disk = [disk is not None and BlockKey(index.key, span.first_block) in disk for span in spans]
        from_store = [span for span, is_there in zip(spans, on_disk, strict=True) if not is_there]
        gets = plan_gets([Range(span.offset, span.length) for span in from_store], self.limits)
        from_disk = [span for span, is_there in zip(spans, on_disk, strict=True) if is_there]
        return LoadPlan(index, from_disk, from_store, gets, extra)

    def cost_bytes_max(self, spans: Sequence[BlockSpan]) -> int:
        """What these blocks, or some of them, cost at most, however their GETs are planned."""
        stored = sum(span.length for span in spans) / (1 - self.limits.gap_ratio)
        return int(stored) + 1 + sum(span.raw_bytes for span in spans)

    def start(self, plan: LoadPlan, priority: Priority) -> list[BlockLoad] | None:
        """Start to load the blocks of ``plan`` and return their loads. The caller has charged the memory they need,
        which the loads release.

        Returns None and does nothing if another read has loaded one of the blocks, or is loading it: the caller then
        looks for its blocks again.
        """
        index = plan.index
        from_disk = [
            block_load(
                index, span, Priority.PREFETCH if span.first_block in plan.extra else priority, new_future()
            )
            for span in plan.from_disk
        ]
        gets = [planned_get(plan, planned, priority, self._decoding.turn()) for planned in plan.gets]
        from_store = [load for _, get in gets for task in get.tasks for load in task]
        loads = [*from_disk, *from_store]
        with self._lock:
            if any(load.key in self._loads or load.key in self._cache for load in loads):
                return None
            self._loads.update({load.key: load for load in loads})
            self.counts.gap_bytes += sum(planned.gap_bytes for planned in plan.gets)
        for request, get in gets:
            self._send(request, get)
        for load in from_disk:
            turn = self._decoding.turn()
            self._submit(partial(self._read_disk, index, load, turn), [load], turn, load.span.length)
        return loads

    def _send(self, request: RangeRequest, get: LoadGet) -> None:
        self._scheduler.submit(request).add_done_callback(partial(self._on_bytes, get))

    # -- arriving ---------------------------------------------------------------------------------------------

    def _on_bytes(self, get: LoadGet, answer: Future[bytes]) -> None:
        """A GET ended: let the decode threads work on its bytes, in several tasks if it has many blocks, or let all its
        loads fail with its error."""
        error = answer.exception()
        tasks, get.tasks = get.tasks, []
        loads = [load for task in tasks for load in task]
        for load in loads:
            load.request = None
        if error is not None:
            self._fail(loads, error)
            self._budget.release(get.byte_count)
            return
        again_bytes = self._history.note(get.index.key, [load.span for load in loads])
        with self._lock:
            self.counts.bytes_fetched_twice += again_bytes
        get.tasks_left = len(tasks)
        for task in tasks:
            self._submit(partial(self._decode, get, task, answer.result()), task, get.turn, 0, get)

    def _submit(
        self,
        work: partial[None],
        loads: list[BlockLoad],
        turn: int,
        byte_count: int,
        get: LoadGet | None = None,
    ) -> None:
        """Let a decode thread run ``work`` for ``loads``, at the highest of their priorities. If the threads were
        stopped, the loads fail, and ``byte_count`` bytes of the memory budget are released."""
        with self._lock:
            priority = min(load.priority for load in loads)
        try:
            task = self._decoding.submit(work, priority, turn)
        except RuntimeError as error:
            self._fail(loads, UnavailableError(f"cannot read {loads[0].key.object_key}: {error}"))
            self._budget.release(byte_count)
            if get is not None:
                self._task_done(get)
            return
        with self._lock:
            for load in loads:
                load.task = task
            priority_now = min(load.priority for load in loads)
        if priority_now < priority:  # since then a reader with a higher priority has joined a load
            self._decoding.hurry(task, priority_now)

    def _decode(self, get: LoadGet, loads: list[BlockLoad], data: bytes) -> None:
        """Decode some blocks of a GET, whose bytes are ``data``, and put them into the disk cache. Runs in a decode
        thread."""
        view = memoryview(data)
        pieces = [view[load.span.offset - get.offset :][: load.span.length] for load in loads]
        self._deliver(get.index, loads, pieces)
        if self._disk is not None:
            for load, stored in zip(loads, pieces, strict=True):
                if load.block is not None and load.priority is not Priority.BACKGROUND:
                    self._disk.put(load.key, stored)
        self._task_done(get)

    def _task_done(self, get: LoadGet) -> None:
        with self._lock:
            get.tasks_left -= 1
            is_last = get.tasks_left == 0
        if is_last:
            self._budget.release(get.byte_count)

    def _deliver(self, index: SegmentIndex, loads: Sequence[BlockLoad], pieces: Sequence[memoryview]) -> None:
        """Check and decompress blocks that arrived together, give each to its load (a corrupt one as an error), and put
        them into the cache."""
        decompressor = zstandard.ZstdDecompressor()
        landed: list[NewBlock] = []
        try:
            numbers = [load.span.first_block for load in loads]
            for load, found in zip(loads, index.decode_each(numbers, pieces, decompressor), strict=True):
                if isinstance(found, TieredError):
                    self.counts.corrupt += isinstance(found, CorruptionError)
                    load.error = found
                    continue
                block = found
                if int(index.blocks["codec"][load.span.first_block]) == CODEC_RAW:
                    # An uncompressed block is a view, which would keep the whole GET in memory.
                    block = found.copy()
                    block.flags.writeable = False
                self._budget.tie(load.span.raw_bytes, block)
                load.block = block
                if load.priority is not Priority.BACKGROUND:
                    is_read = load.priority is Priority.USER
                    landed.append(NewBlock(load.key, block, fastcrc.crc32.iscsi(block), is_read))
            self._cache.put_all(landed)
        except Exception as error:  # a defect of the program: without this, reads would wait for ever
            for load in loads:
                load.error = load.error or error
        self._land(loads, {new.key for new in landed if not new.is_read})

    def _land(self, loads: Sequence[BlockLoad], unread: Set[BlockKey]) -> None:
        """End the loads: they can no longer be joined, and the reads that wait for them continue. ``unread``: blocks
        that the cache keeps as prefetched and not read."""
        with self._lock:
            for load in loads:
                del self._loads[load.key]
            read_since = [load.key for load in loads if load.priority is Priority.USER and load.key in unread]
        for key in read_since:
            self._cache.get(key, is_read=True)  # a reader has joined the load since: count the block as read
        self._budget.release(sum(load.span.raw_bytes for load in loads if load.block is None))
        for arrived in {load.arrived for load in loads}:
            arrived.set_result(None)

    def _fail(self, loads: Sequence[BlockLoad], error: BaseException) -> None:
        for load in loads:
            load.error = error
        self._land(loads, frozenset())

    # -- disk -------------------------------------------------------------------------------------------------

    def _read_disk(self, index: SegmentIndex, load: BlockLoad, turn: int) -> None:
        """Load a block from the disk cache; if it is not there or damaged, fetch it from the store. Runs in a decode
        thread. ``turn`` numbers the reads, so that those that began first are decoded first."""
        assert self._disk is not None
        number = load.span.first_block
        stored = self._disk.get(load.key, int(index.blocks["crc32c"][number]), load.span.length)
        if stored is not None:
            self._deliver(index, [load], [memoryview(stored)])
            self._budget.release(load.span.length)
            return
        request = RangeRequest(index.key, load.span.offset, load.span.length, load.priority)
        with self._lock:  # a read that joined the load may have raised its priority
            load.request = request
            request.priority = load.priority
        self._send(request, LoadGet(index, load.span.offset, load.span.length, [[load]], turn))
