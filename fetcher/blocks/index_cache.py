"""Cache of decoded tails of objects, each opened by one ranged GET and evicted by last use.

Charged to the byte budget before the GET and while the tail is referenced, as blocks are; approximately, as its size is
known only once it is decoded. Memory is not trusted: pages are checked against their CRC32C when a tail is returned, at
most once a second, and again when each page is decoded.
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import fastcrc

from fetcher.blocks.budget import ByteBudget
from fetcher.blocks.decode_queue import DecodeQueue
from fetcher.io.request_scheduler import Priority, RangeRequest, RequestScheduler
from fetcher.io.waiting import new_future
from tiered.clock import Clock
from tiered.errors import CorruptionError, TieredError, UnavailableError
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import PART_RUNS, check_tail_length
from tiered.model.lru import Lru

CHECK_S = 1.0
"""A tail handed out again within this time is not checked again: hashing it costs more than a read of a small run."""
_EXPANSION = 8
_OVERHEAD_BYTES = 64 * 1024


def tail_cost_bytes(tail_bytes: int) -> int:
    """What a tail may take in memory while it is fetched and decoded, about."""
    return tail_bytes * _EXPANSION + _OVERHEAD_BYTES


WHOLE = -1


TailPart = tuple[str, int]
"""An object's key, and which of its runs the tail is wanted for: the number of a part, or WHOLE."""


def tail_part(key: str, ordinal: int | None) -> TailPart:
    """The part that has the run ``ordinal``; None: all."""
    return key, WHOLE if ordinal is None else ordinal // PART_RUNS


@dataclass(eq=False)
class IndexLoad:
    """One tail on its way. ``request``: its GET, while there is one (a future keeps its callbacks, and they this)."""

    wanted: TailPart
    size_bytes: int
    tail_bytes: int
    request: RangeRequest | None
    turn: int
    future: Future[SegmentIndex] = field(default_factory=new_future)


@dataclass
class IndexCounts:
    """Totals since the start."""

    hits: int = 0
    misses: int = 0
    joined: int = 0
    corrupt: int = 0
    """Tails that came from the object store and failed a check."""
    corrupt_memory: int = 0


@dataclass(slots=True)
class _Entry:
    index: SegmentIndex
    pages_crc32c: int
    checked_s: float


class IndexCache:
    """Opens objects by their tails, and caches the decoded tails. Thread-safe."""

    def __init__(
        self,
        scheduler: RequestScheduler,
        budget: ByteBudget,
        *,
        decoding: DecodeQueue,
        bytes_max: int,
        clock: Clock,
    ) -> None:
        """``bytes_max``: limit for all cached tails together. ``scheduler`` sends the GETs in order of priority."""
        self._scheduler = scheduler
        self._budget = budget
        self._decoding = decoding
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: Lru[TailPart, _Entry] = Lru(bytes_max)
        self._loads: dict[TailPart, IndexLoad] = {}
        self.counts = IndexCounts()

    @property
    def held_bytes(self) -> int:
        """Memory of the tails held, about."""
        return self._entries.held_bytes

    def get(self, wanted: TailPart) -> SegmentIndex | None:
        """The cached tail of an object, or the cached part of it; None if it is not cached. At intervals of CHECK_S the
        checksum of its bytes is compared, and all parts of a damaged one are dropped."""
        with self._lock:
            entry = self._entry(wanted)
            if entry is None:
                self.counts.misses += 1
                return None
            now_s = self._clock.monotonic_s()
            is_fresh = now_s - entry.checked_s < CHECK_S
            if is_fresh or fastcrc.crc32.iscsi(entry.index.page_bytes) == entry.pages_crc32c:
                entry.checked_s = entry.checked_s if is_fresh else now_s
                self.counts.hits += 1
                return entry.index
            self.counts.corrupt_memory += 1
            self.counts.misses += 1
        self.drop(wanted[0])
        return None

    def _entry(self, wanted: TailPart) -> _Entry | None:
        """A whole tail is held for all of its parts."""
        return self._entries.get((wanted[0], WHOLE)) or self._entries.get(wanted)

    def drop(self, key: str) -> None:
        """Forget one tail: something was wrong with it, or with what it says."""
        with self._lock:
            for part in [part for part, _ in self._entries if part[0] == key]:
                self._entries.pop(part)

    def join(self, wanted: TailPart, priority: Priority) -> IndexLoad | None:
        """The load in progress of a tail, or None if it is not being loaded. Its request gets ``priority`` if that is
        higher than its own."""
        with self._lock:
            load = self._loads.get(wanted)
            if load is None:
                return None
            self.counts.joined += 1
            request = load.request
        if request is not None:
            self._scheduler.promote(request, priority)
        return load

    def start(
        self, wanted: TailPart, size_bytes: int, tail_bytes: int, priority: Priority
    ) -> IndexLoad | None:
        """Start to load a tail. The caller has charged ``tail_cost_bytes`` of memory for it, which the load releases.

        Returns None and does nothing if another read has loaded the tail, or is loading it: the caller then looks for
        it again. Raises CorruptionError for lengths that no segment has.
        """
        check_tail_length(wanted[0], size_bytes, tail_bytes)
        request = RangeRequest(wanted[0], size_bytes - tail_bytes, tail_bytes, priority)
        load = IndexLoad(wanted, size_bytes, tail_bytes, request, self._decoding.turn())
        with self._lock:
            if wanted in self._loads or self._entry(wanted) is not None:
                return None
            self._loads[wanted] = load
        self._scheduler.submit(request).add_done_callback(partial(self._on_bytes, load))
        return load

    def _on_bytes(self, load: IndexLoad, answer: Future[bytes]) -> None:
        """The GET of a tail ended: let a decode thread work on its bytes, or let the load fail with its error."""
        error = answer.exception()
        load.request = None
        if error is not None:
            self._fail(load, error)
            return
        try:
            # With a user's priority, because it is small and all reads of the object wait for it.
            self._decoding.submit(partial(self._decode, load, answer.result()), Priority.USER, load.turn)
        except RuntimeError as closed:
            self._fail(load, UnavailableError(f"cannot read {load.wanted[0]}: {closed}"))

    def _decode(self, load: IndexLoad, tail: bytes) -> None:
        """Decode and keep a tail; of a large one only the part that was wanted, as most of its runs are not read."""
        try:
            key, part = load.wanted
            index = SegmentIndex(key, load.size_bytes, tail, None if part == WHOLE else part)
            index.check_pages()
            held = (key, WHOLE) if index.is_whole else load.wanted
        except TieredError as error:
            self.counts.corrupt += isinstance(error, CorruptionError)
            # Without its traceback, which refers to the load: the error would keep itself in memory.
            self._fail(load, error.with_traceback(None))
            return
        except Exception as error:  # a defect of the program: without this, reads would wait for ever
            self._fail(load, error)
            return
        cost_bytes = tail_cost_bytes(load.tail_bytes)
        kept_bytes = min(index.nbytes, cost_bytes)
        self._budget.tie(kept_bytes, index)
        with self._lock:
            del self._loads[load.wanted]
            entry = _Entry(index, fastcrc.crc32.iscsi(index.page_bytes), self._clock.monotonic_s())
            gone = self._entries.add(held, entry, index.nbytes)
        del gone  # freed, and accounted for, outside the lock
        self._budget.release(cost_bytes - kept_bytes)
        load.future.set_result(index)

    def _fail(self, load: IndexLoad, error: BaseException) -> None:
        with self._lock:
            del self._loads[load.wanted]
        self._budget.release(tail_cost_bytes(load.tail_bytes))
        load.future.set_exception(error)

    def evict(self, byte_count: int) -> None:
        """Drop so many bytes of tails, the longest unused first."""
        with self._lock:
            gone = self._entries.evict(byte_count)
        del gone  # freed, and accounted for, outside the lock
