"""Cache of decoded tails of objects, or of their directories and single run groups; each takes one ranged GET, and is
evicted by last use.

Charged to the byte budget before the GET and while the tail is referenced, as blocks are; approximately, as its size is
known only once it is decoded. Memory is not trusted: pages are checked against their CRC32C when a tail is returned, at
most once a second, and again when each page is decoded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

import fastcrc

from fetcher.blocks.budget import ByteBudget
from fetcher.blocks.decode_queue import DecodeQueue
from fetcher.io.request_scheduler import Priority, RangeRequest, RequestScheduler
from fetcher.io.waiting import new_future
from tiered.errors import CorruptionError, TieredError, UnavailableError
from tiered.formats.segment_directory import SegmentDirectory, directory_span
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import check_tail_length
from tiered.model.lru import Lru

CHECK_S = 1.0
"""A tail handed out again within this time is not checked again: hashing it costs more than a read of a small run."""
_EXPANSION = 8
_OVERHEAD_BYTES = 64 * 1024


WHOLE, DIRECTORY = -1, -2

TailPart = tuple[str, int]
"""An object's key, and what of its tail: the number of a run group, WHOLE or DIRECTORY."""


class TailRead(NamedTuple):
    """Bytes of an object that are ``part`` of its tail. ``directory``: the one that a run group is found by."""

    part: TailPart
    size_bytes: int
    offset: int
    length: int
    directory: SegmentDirectory | None = None

    @classmethod
    def of_all(cls, key: str, size_bytes: int, tail_bytes: int) -> TailRead:
        """The whole tail."""
        return cls((key, WHOLE), size_bytes, size_bytes - tail_bytes, tail_bytes)

    @classmethod
    def of_directory(cls, key: str, size_bytes: int, tail_bytes: int) -> TailRead:
        """The directory."""
        return cls((key, DIRECTORY), size_bytes, *directory_span(size_bytes, tail_bytes))

    @classmethod
    def of_group(cls, directory: SegmentDirectory, ordinal: int) -> TailRead:
        """The group of the run ``ordinal``. Raises CorruptionError if there is none."""
        group = directory.group_of(ordinal)
        return cls((directory.key, group), directory.size_bytes, *directory.span_of(group), directory)

    @property
    def cost_bytes(self) -> int:
        """What it may take in memory while it is fetched and decoded, about."""
        return self.length * _EXPANSION + _OVERHEAD_BYTES

    def decoded(self, stored: bytes | memoryview) -> SegmentIndex | SegmentDirectory:
        """What the bytes say. Raises CorruptionError or UnsupportedFormatError."""
        key, number = self.part
        if number == DIRECTORY:
            return SegmentDirectory(key, self.size_bytes, stored)
        if self.directory is not None:
            found = SegmentIndex.of_group(self.directory, number, stored)
        else:
            found = SegmentIndex(key, self.size_bytes, stored)
        found.check_pages()
        return found


@dataclass(eq=False)
class IndexLoad:
    """One tail on its way. ``request``: its GET, while there is one (a future keeps its callbacks, and they this)."""

    wanted: TailRead
    request: RangeRequest | None
    turn: int
    future: Future[SegmentIndex | SegmentDirectory] = field(default_factory=new_future)


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
    index: SegmentIndex | SegmentDirectory
    pages_crc32c: int
    checked_s: float


class IndexCache:
    """See the module. Thread-safe."""

    def __init__(
        self,
        priorities: RequestScheduler,
        budget: ByteBudget,
        *,
        decoding: DecodeQueue,
        bytes_max: int,
        clock_s: Callable[[], float],
    ) -> None:
        """``bytes_max``: of all tails that are kept; ``priorities`` sends the GETs."""
        self._scheduler = priorities
        self._budget = budget
        self._decoding = decoding
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._entries: Lru[TailPart, _Entry] = Lru(bytes_max)
        self._loads: dict[TailPart, IndexLoad] = {}
        self.counts = IndexCounts()

    @property
    def held_bytes(self) -> int:
        """Memory of the tails held, about."""
        return self._entries.held_bytes

    def of_run(self, key: str, ordinal: int | None) -> SegmentIndex | None:
        """The tail, or its group that has the run ``ordinal``, if it is held."""
        with self._lock:
            part = WHOLE
            if ordinal is not None and (key, WHOLE) not in self._entries:
                known = self._entries.get((key, DIRECTORY))
                if known is not None:
                    part = cast("SegmentDirectory", known.index).group_of(ordinal)
        return cast("SegmentIndex | None", self.get((key, part)))

    def get(self, wanted: TailPart) -> SegmentIndex | SegmentDirectory | None:
        """This part of a tail, if it is held and its pages are still what they were."""
        with self._lock:
            entry = self._entries.get(wanted)
            if entry is None:
                self.counts.misses += 1
                return None
            now_s = self._clock_s()
            is_fresh = now_s - entry.checked_s < CHECK_S
            if is_fresh or fastcrc.crc32.iscsi(entry.index.page_bytes) == entry.pages_crc32c:
                entry.checked_s = entry.checked_s if is_fresh else now_s
                self.counts.hits += 1
                return entry.index
            self.counts.corrupt_memory += 1
            self.counts.misses += 1
        self.drop(wanted[0])
        return None

    def drop(self, key: str) -> None:
        """Forget one tail: something was wrong with it, or with what it says."""
        with self._lock:
            for part in [part for part, _ in self._entries if part[0] == key]:
                self._entries.pop(part)

    def join(self, wanted: TailPart, priority: Priority) -> IndexLoad | None:
        """The tail's load, if there is one; it becomes as urgent as ``priority``."""
        with self._lock:
            load = self._loads.get(wanted)
            if load is None:
                return None
            self.counts.joined += 1
            request = load.request
        if request is not None:
            self._scheduler.promote(request, priority)
        return load

    def start(self, wanted: TailRead, priority: Priority) -> IndexLoad | None:
        """Begin to fetch it; ``wanted.cost_bytes`` are charged and belong to the load from now on.

        None, without an effect: another read loads it, so look again. Raises CorruptionError for lengths no segment
        has.
        """
        part, directory = wanted.part, wanted.directory
        check_tail_length(part[0], wanted.size_bytes, wanted.length)
        stored = None if directory is None else directory.stored(part[1])
        request = None
        if stored is None:
            request = RangeRequest(part[0], wanted.offset, wanted.length, priority)
        load = IndexLoad(wanted, request, self._decoding.turn())
        with self._lock:
            if part in self._loads or part in self._entries:
                return None
            self._loads[part] = load
        if request is not None:
            self._scheduler.submit(request).add_done_callback(partial(self._on_bytes, load))
        elif stored is not None:
            self._submit(load, stored)
        return load

    def _on_bytes(self, load: IndexLoad, answer: Future[bytes]) -> None:
        """Have the bytes of a tail decoded, or fail all that wait for it."""
        error = answer.exception()
        load.request = None
        if error is not None:
            self._fail(load, error)
            return
        self._submit(load, answer.result())

    def _submit(self, load: IndexLoad, stored: bytes | memoryview) -> None:
        try:
            # At user priority: it is small, and all reads of the object wait for it.
            self._decoding.submit(partial(self._decode, load, stored), Priority.USER, load.turn)
        except RuntimeError as closed:
            self._fail(load, UnavailableError(f"cannot read {load.wanted.part[0]}: {closed}"))

    def _decode(self, load: IndexLoad, tail: bytes | memoryview) -> None:
        """Decode and keep a tail, or the part of it that was wanted: most runs of a large one are not read."""
        try:
            index = load.wanted.decoded(tail)
        except TieredError as error:
            self.counts.corrupt += isinstance(error, CorruptionError)
            # Without the way here, which refers to the load and so to itself.
            self._fail(load, error.with_traceback(None))
            return
        except Exception as error:  # a defect: waiting reads must fail, too
            self._fail(load, error)
            return
        cost_bytes = load.wanted.cost_bytes
        kept_bytes = min(index.nbytes, cost_bytes)
        self._budget.tie(kept_bytes, index)
        with self._lock:
            del self._loads[load.wanted.part]
            entry = _Entry(index, fastcrc.crc32.iscsi(index.page_bytes), self._clock_s())
            gone = self._entries.add(load.wanted.part, entry, index.nbytes)
        del gone  # freed, and accounted for, outside the lock
        self._budget.release(cost_bytes - kept_bytes)
        load.future.set_result(index)

    def _fail(self, load: IndexLoad, error: BaseException) -> None:
        with self._lock:
            del self._loads[load.wanted.part]
        self._budget.release(load.wanted.cost_bytes)
        load.future.set_exception(error)

    def evict(self, byte_count: int) -> None:
        """Drop so many bytes of tails, the longest unused first."""
        with self._lock:
            gone = self._entries.evict(byte_count)
        del gone  # freed, and accounted for, outside the lock
