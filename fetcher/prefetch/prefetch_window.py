"""How far to prefetch for one reader: additive increase, multiplicative decrease, as TCP Tahoe. Pure: no I/O.

    the window starts at the bytes one request reads at little extra cost, if at the pace of its first pulls the reader
        reads that long before it expires; else at the smallest, one client batch
    every window the reader has consumed adds a batch
    blocks that expire unread, or are evicted unread, halve it; nothing else does
    a reader that jumps starts again; single scattered reads never prefetch
    a reader that announces its end starts before its first block is read, and then as far as its pace allows

Sizes are queue offsets, so a filter that passes many messages prefetches as far ahead as it moves. A fetch reads the
rest of the window once half of it is used, cut at the end of a nearby run: few large requests rather than many small.
Owns the decisions for one (group, queue). Does not own fetching nor the shared budget (prefetcher.py).
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple


class WindowLimits(NamedTuple):
    """``offsets_min``: smallest window when batches are smaller. ``bytes_max``: largest, in raw bytes of messages.
    ``unread_s``: how long blocks may wait to be read. ``hold_off_s``: no new attempt for so long after a failure.
    ``bytes_first``: where a window begins, in raw bytes of messages."""

    offsets_min: int
    bytes_max: int
    unread_s: float
    hold_off_s: float
    bytes_first: int = 0


class RunEnds(NamedTuple):
    """Where the run that holds the last offset of a fetch begins and ends, in offsets of the queue."""

    begin: int
    end: int


class PullProgress(NamedTuple):
    """A pull from ``offset`` to ``next_offset``; the reader has blocks up to ``covered``, ``block_bytes`` raw bytes of
    them were read. ``time_s``: now."""

    offset: int
    next_offset: int
    covered: int
    block_bytes: int
    time_s: float


@dataclass(eq=False)
class PrefetchRange:
    """Offsets [begin, end) prefetched together, or being fetched. ``bytes``: raw. ``in_memory_since_s``: while they are
    being fetched, since when they are."""

    begin: int
    end: int
    bytes: int
    in_memory_since_s: float
    is_done: bool = False
    blocks: Collection[object] = ()
    """Names of the blocks, once they are there."""

    def bytes_from(self, offset: int) -> int:
        """Raw bytes of what lies at and above ``offset``, about."""
        left = self.end - max(self.begin, offset)
        return self.bytes * max(left, 0) // max(self.end - self.begin, 1)


SEQUENTIAL_PULLS_MIN = 1
"""A pull that begins where the one before ended shows a sequential reader."""
PACED_SHARE = 1 / 8
"""A window starts at no more than is read in this share of its expiry time."""


@dataclass(eq=False, slots=True)
class PrefetchWindow:
    """State of one reader. ``size``: offsets to be ahead by. ``fetched``: everything below was fetched or requested.
    ``covered``: everything below is with the reader itself. ``block_bytes``: what a fetch takes at least.
    ``until``: the reader said that it reads on to here. ``has_begun``: its pace is known, and where to begin."""

    limits: WindowLimits
    bytes_per_offset: float = 0.0
    block_bytes: int = 0
    position: int = -1
    size: int = 0
    fetched: int = 0
    covered: int = 0
    batch: int = 1
    last_offset: int = -1
    last_s: float = float("-inf")
    until: int | None = None
    has_begun: bool = False
    sequential: int = 0
    consumed: int = 0
    not_before_s: float = float("-inf")
    halved_s: float = float("-inf")
    ranges: list[PrefetchRange] = field(default_factory=list)

    @property
    def unread_bytes(self) -> int:
        """Raw bytes fetched ahead, or being fetched, and not read yet."""
        read_end = self.read_end
        return sum(part.bytes_from(read_end) for part in self.ranges)

    @property
    def read_end(self) -> int:
        """Below this everything was read, or is with the reader itself."""
        return max(self.position, self.covered)

    @property
    def size_max(self) -> int:
        """Offsets that ``bytes_max`` allows."""
        return max(self._smallest, int(self.limits.bytes_max / max(self.bytes_per_offset, 1.0)))

    def _size_first(self, offsets_per_s: float) -> int:
        """The first size; the smallest while the bytes per offset are unknown."""
        if self.bytes_per_offset <= 0:
            return self._smallest
        bytes_first = self.limits.bytes_first if self.until is None else self.limits.bytes_max
        paced = offsets_per_s * self.limits.unread_s * PACED_SHARE
        return min(self.size_max, max(self._smallest, int(min(bytes_first / self.bytes_per_offset, paced))))

    @property
    def _smallest(self) -> int:
        return max(self.batch, self.limits.offsets_min, 1)

    # -- what the reader does ---------------------------------------------------------------------------------

    def announced(self, offset: int, until: int, time_s: float) -> None:
        """A reader says that it will read all offsets in [offset, until). Prefetch starts at once, instead of after
        several sequential pulls, and the window grows to the reader's pace after its first pull."""
        self._restart()
        self.last_s = time_s
        self.last_offset = self.position = self.covered = self.fetched = offset
        self.until = until
        self.size = min(self.size_max, int(self.limits.bytes_first / max(self.bytes_per_offset, 1.0)))
        self.sequential = SEQUENTIAL_PULLS_MIN

    def pulled(self, pull: PullProgress) -> None:
        """Note a pull that ended. A pull that continues the one before, or repeats it, counts as sequential and lets
        the window grow; any other starts the window again at its smallest size."""
        if self.position < 0 or not self.last_offset <= pull.offset <= max(self.fetched, self.position):
            self._restart()
        elif pull.next_offset > self.position:
            if not self.has_begun and float("-inf") < self.last_s < pull.time_s:
                pace = (pull.next_offset - self.position) / (pull.time_s - self.last_s)
                self.size, self.has_begun = max(self.size, self._size_first(pace)), True
            self.sequential += 1
            self.consumed += pull.next_offset - self.position
        if pull.next_offset > pull.offset:
            self.batch = pull.next_offset - pull.offset
        self.block_bytes = max(self.block_bytes, pull.block_bytes)
        self.last_offset, self.position, self.covered = pull.offset, pull.next_offset, pull.covered
        self.last_s = pull.time_s
        self.fetched = max(self.fetched, pull.covered, pull.next_offset)
        self._grow()
        self._drop_ranges_read()

    def stepped(self, offset: int, next_offset: int, time_s: float) -> bool:
        """Note a pull that ended within the block that the reader has buffered: like ``pulled``, but cheaper, as it is
        called for most pulls. Returns False, and notes nothing, for a pull that needs ``pulled``."""
        moved = next_offset - self.position
        if not (self.last_offset <= offset <= self.position and moved > 0 and next_offset <= self.covered):
            return False
        if not self.has_begun:
            return False
        self.last_offset, self.position, self.last_s = offset, next_offset, time_s
        self.batch = next_offset - offset
        self.sequential += 1
        self.consumed += moved
        if not self.consumed < self.size >= self.batch:
            self._grow()
        return True

    def _restart(self) -> None:
        self.sequential = self.consumed = 0
        self.size = self.fetched = self.block_bytes = 0
        self.until, self.has_begun = None, False
        self.ranges.clear()

    def _grow(self) -> None:
        self.size = max(self.size, self._smallest)
        while self.consumed >= self.size:
            self.consumed -= self.size
            self.size += self.batch
        self.size = min(self.size, self.size_max)

    def _drop_ranges_read(self) -> None:
        read_end = self.read_end  # fetches end in any order: a read range may follow an unfinished one
        for part in [one for one in self.ranges if one.is_done and one.end <= read_end]:
            self.ranges.remove(part)

    def _lose(self, since_s: float, time_s: float) -> bool:
        """Blocks prefetched at the time ``since_s`` were dropped from memory before the reader came to them: halve the
        window, and return True. If it has been halved since that time, do nothing and return False, because everything
        that was prefetched before counts as one loss."""
        if since_s <= self.halved_s:
            return False
        self.size = max(self.size // 2, self._smallest)
        self.consumed = 0
        self.halved_s = time_s
        return True

    # -- what to fetch ----------------------------------------------------------------------------------------

    def is_low(self, time_s: float) -> bool:
        """Whether to look for more: half of the window or more is used up, by a sequential reader."""
        if self.sequential < SEQUENTIAL_PULLS_MIN or time_s < self.not_before_s:
            return False
        return 2 * (self.fetched - self.position) <= self.size

    def wanted(self, end_offset: int, room_bytes: int) -> tuple[int, int] | None:
        """The offsets [begin, end) to prefetch next; None if nothing should be.

        ``end_offset``: the queue's maximum. ``room_bytes``: how much memory other readers leave to this one, in bytes
        of decompressed messages.
        """
        begin = max(self.fetched, self.position)
        end = min(self.position + self.size, end_offset)
        if self.until is not None:
            end = min(end, self.until)
        if room_bytes < self.block_bytes:
            return None
        begin, end = self._free(begin, end)
        if self.bytes_per_offset > 0:
            fitting = int((room_bytes - self.block_bytes) / self.bytes_per_offset)
            if begin - self.position > fitting:
                return None  # more than half of the memory waits to be read: requests would become many and small
            end = min(end, begin + max(1, fitting))  # memory limits this request, which ends inside a block
        return (begin, end) if end > begin else None

    def _free(self, begin: int, end: int) -> tuple[int, int]:
        """The first part of [begin, end) that is neither prefetched nor being prefetched. It may lie in front of later
        prefetched ranges where a fetch has failed."""
        for part in sorted(self.ranges, key=lambda one: one.begin):
            if part.begin <= begin < part.end:
                begin = part.end
            elif begin < part.begin < end:
                end = part.begin
        return begin, end

    def aligned(self, begin: int, end: int, last: RunEnds, room_bytes: int) -> int:
        """Where a fetch of [begin, end) should end, so that a run (a queue's rows in one object) takes one request.

        ``last``: the first offset and the end of the run that holds offset ``end - 1``. The result is the end of that
        run, or its begin, whichever changes the fetch by no more than half of its length and of the window; otherwise
        ``end`` as it is, so that a small window stays small.
        """
        slack = min(end - begin, self.size) // 2
        fits = (last.end - begin) * self.bytes_per_offset + self.block_bytes <= room_bytes
        fits = fits and self._free(begin, last.end) == (begin, last.end)
        if last.end - end <= slack and fits and (self.until is None or last.end <= self.until):
            return last.end
        return last.begin if begin < last.begin and end - last.begin <= slack else end

    def started(self, begin: int, end: int, time_s: float) -> PrefetchRange:
        """[begin, end) is being fetched."""
        expected = self.block_bytes + int((end - begin) * self.bytes_per_offset)
        part = PrefetchRange(begin, end, expected, time_s)
        self.ranges.append(part)
        self.fetched = max(self.fetched, end)
        return part

    def finished(self, part: PrefetchRange, covered: int, block_bytes: int, time_s: float) -> None:
        """Note that the range ``part`` has been prefetched. As whole blocks are read, all offsets up to ``covered`` are
        in memory; ``block_bytes`` is their decompressed size."""
        part.is_done = True
        part.end = max(part.begin, covered)
        part.bytes = block_bytes
        part.in_memory_since_s = time_s
        if part in self.ranges:  # unless the reader has moved elsewhere since the fetch began
            self.fetched = max(self.fetched, part.end)
        self._drop_ranges_read()

    def failed(self, part: PrefetchRange, time_s: float) -> None:
        """``part`` could not be fetched: it is requested again later, or read by a pull."""
        if part in self.ranges:
            self.ranges.remove(part)
            self.fetched = max(self.position, min(self.fetched, part.begin))
        self.not_before_s = time_s + self.limits.hold_off_s

    def expire(self, time_s: float) -> int:
        """Forget prefetched ranges that were not read in time, except the blocks that the reader has begun to read,
        which it holds itself. Returns the decompressed bytes forgotten."""
        read_end = self.read_end
        limit_s = time_s - self.limits.unread_s
        gone = [
            part
            for part in self.ranges
            if part.is_done and part.in_memory_since_s <= limit_s and part.end > read_end
        ]
        if not gone:
            return 0
        expired_bytes = 0
        for part in gone:
            lost = part.bytes_from(read_end)
            expired_bytes += lost
            if part.begin >= read_end:
                self.ranges.remove(part)
            else:
                part.bytes -= lost
                part.end = read_end
        self.fetched = max(read_end, min(part.begin for part in gone))
        self._drop_ranges_read()
        self._lose(max(part.in_memory_since_s for part in gone), time_s)
        return expired_bytes

    def lost(self, part: PrefetchRange, time_s: float) -> bool:
        """Blocks of ``part`` left the cache before they were read. True when the window was halved."""
        if part not in self.ranges or part.end <= self.read_end:
            return False
        self.ranges.remove(part)
        self.fetched = max(self.read_end, min(self.fetched, part.begin))
        return self._lose(part.in_memory_since_s, time_s)

    def ready(self, offset: int) -> PrefetchRange | None:
        """What holds ``offset``, fetched ahead and in memory."""
        for part in self.ranges:
            if part.begin <= offset < part.end and part.is_done:
                return part
        return None

    def waited(self, ready: PrefetchRange, next_offset: int, time_s: float) -> bool:
        """Note that a pull, which ended at ``next_offset``, had to wait although the prefetched range ``ready`` held
        its messages: they were evicted from memory. Returns True if the window was halved because of it."""
        if ready not in self.ranges or next_offset > ready.end:
            return False
        self.ranges.remove(ready)
        self.fetched = self.read_end
        return self._lose(ready.in_memory_since_s, time_s)
