"""Reads what the iterations of a rewrite need: rows, keys, stored blocks and records of ranges of runs.

Iterations are as large as memory, and a source has a few kilobytes for each. So a source is read and opened once
for as many iterations as the disk has room for, and a spool keeps what each of them gets.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.archive.key_section_reader import key_bytes_guess, keys_within
from tiered.archive.rewrite.opened import (
    COPIED_RAW_BYTES_MIN,
    WANTED_DTYPE,
    ChunkReader,
    Chunks,
    OpenedSource,
    OpenedSources,
    Parents,
    queue_hashes,
)
from tiered.archive.rewrite.plan import (
    RANGE_DTYPE,
    READERS_MAX,
    Candidates,
    OutputPart,
    RewritePlan,
    kept_share,
    length_of,
)
from tiered.archive.rewrite.spool import IterationSpool, ReadRanges
from tiered.errors import CorruptionError
from tiered.formats.segment import RowTable
from tiered.formats.segment_index import KeySection, SegmentIndex
from tiered.formats.segment_layout import check_tail_length
from tiered.model.tables import Table, concatenated, picked
from tiered.object_store.interface import ObjectStore

MIB = 1024 * 1024
READ_BYTES_MAX = 16 * MIB
"""Limit of one GET; a larger block is read by one GET too."""
HOLE_BYTES_MAX = MIB
"""So many unneeded bytes between two spans are read, so that one GET reads both."""
WHOLE_BYTES_MAX = MIB
"""Sources up to this size are read by one GET as a whole."""
IN_FLIGHT_BYTES = 24 * MIB
"""Limit of reads in progress."""
GROUP_BYTES_MAX, GROUP_SOURCES_MAX = MIB // 2, 16
"""So many bytes and objects of small sources are opened together: a call for each would cost more than its bytes."""
BATCH_BYTES = 2 * MIB
"""Messages of a source that are taken out of it together, unless a range has more."""
SPOOLED_BYTES_MAX = 3 * MIB // 2
"""What the spool keeps in memory at most."""
ROW_BYTES, RANGE_BYTES = 64, 64
"""What a row and a range take in the spool, beside messages."""


class RewriteSources:
    """The objects that a compaction reads, each once for as many iterations as its temporary file has room for."""

    def __init__(
        self,
        store: ObjectStore,
        candidates: Candidates,
        spool: IterationSpool,
        spool_bytes_max: int,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
        plan: RewritePlan | None = None,
    ) -> None:
        """``candidates``: the runs that may be read; ``spool``: the temporary file, of up to ``spool_bytes_max``, which
        ``close`` closes too; ``in_flight_bytes``: limit of reads in progress. ``plan`` may select rows; without a plan
        all are kept. Nothing is read yet."""
        self._selection = None if plan is None else plan.selection
        self._share = None if plan is None else kept_share(candidates, plan)
        self._in_flight_bytes = in_flight_bytes
        # Half of what may be in flight: one read is used while the next one is made.
        self.read_bytes_max = min(READ_BYTES_MAX, in_flight_bytes // 2)
        self._store = store
        self._candidates = candidates
        self._spool = spool
        self._spool_bytes_max = spool_bytes_max
        self._readers = ThreadPoolExecutor(READERS_MAX, thread_name_prefix="compaction-read")
        self._lock = threading.Lock()
        self.parents = Parents(candidates.queues)
        self._queue_hashes = queue_hashes(candidates.queues)
        self._group_bytes_max = min(GROUP_BYTES_MAX, in_flight_bytes // READERS_MAX)
        self.gets = 0
        self.bytes_read = 0

    def close(self) -> None:
        """Cancel reads that have not begun, wait for the others, and close the file. Idempotent."""
        self._readers.shutdown(cancel_futures=True)
        self._spool.close()

    def read(self, iterations: Sequence[list[OutputPart]]) -> Iterator[ReadRanges]:
        """Read what the ``iterations`` of a compaction move: yields, for each of them, its ranges that have rows, with
        these rows and their bytes. Sources are read once for as many iterations (a reading) as fit into the temporary
        file."""
        readings, is_packed = readings_of(self._candidates, iterations, self._spool_bytes_max, self._share)
        while readings:
            reading = readings.pop(0)
            count = len(reading)
            self._spool.clear(is_packed=is_packed)
            self._distribute(reading)
            for number in range(count):
                yield self._spool.take(number)

    def _distribute(self, reading: list[Table]) -> None:
        """Read the sources of several iterations, whose ranges are ``reading``, each source once, and put what was read
        into the spool. The list is emptied, as the sources take its memory."""
        wanted = _by_object(self._candidates, reading)
        groups = _groups_of(self._candidates, wanted, self._group_bytes_max)
        largest = max((group.size_bytes for group in groups), default=1)
        readers = self._in_flight_bytes // min(self.read_bytes_max, max(1, largest)) - 1
        spooled_bytes_max = None  # no limit: one iteration is in memory anyway
        if len(reading) > 1:
            spooled_bytes_max = min(
                SPOOLED_BYTES_MAX,
                self._in_flight_bytes // 4,
                max(int((one["end"] - one["begin"]).sum()) for one in reading),
            )
        reading.clear()
        for group in self._open_ahead(groups, max(1, min(READERS_MAX, readers))):
            for read in self._read_wanted(group):
                self._spool.add(read, spooled_bytes_max)

    def _open_ahead(self, groups: Sequence[_Group], readers: int) -> Iterator[_OpenGroup]:
        """All ``groups`` of sources in order, opened, while threads read the ends of the next ``readers`` groups.
        Threads only read: decoding in them would make all of them wait for the interpreter's lock."""
        waiting: deque[tuple[_Group, Future[list[bytes]]]] = deque()
        for group in groups:
            waiting.append((group, self._readers.submit(self._ends, group.objects)))
            if len(waiting) > readers:
                yield self._opened(*waiting.popleft())
        while waiting:
            yield self._opened(*waiting.popleft())

    def open(self, number: int) -> tuple[SegmentIndex, KeySection]:
        """Read the footer and the key section of the candidates' object number ``number``."""
        return self._decoded(number, memoryview(self._last_bytes(number)))

    def _key(self, number: int) -> str:
        return self._candidates.object_keys[int(self._candidates.objects["key"][number])]

    def _ends(self, numbers: Sequence[int]) -> list[bytes]:
        """The last bytes of each object."""
        return list(map(self._last_bytes, numbers))

    def _last_bytes(self, number: int) -> bytes:
        """Read the end of the object number ``number``: its footer and, nearly always, its key section; all of a small
        object."""
        key, row = self._key(number), self._candidates.objects[number]
        size, tail = int(row["size_bytes"]), int(row["tail_bytes"])
        check_tail_length(key, size, tail)
        length = size if size <= WHOLE_BYTES_MAX else min(size, tail + key_bytes_guess(int(row["rows"])))
        return self.get(key, size - length, length)

    def _decoded(self, number: int, end: memoryview) -> tuple[SegmentIndex, KeySection]:
        """Decode an object's index and keys from ``end``, its last bytes; keys that begin before them are fetched."""
        key, size = self._key(number), int(self._candidates.objects["size_bytes"][number])
        index = SegmentIndex(key, size, bytes(end))
        stored = keys_within(index, end)
        return index, index.decode_keys(self.get(key, *index.key_span) if stored is None else stored)

    def whole_run(self, index: SegmentIndex, keys: KeySection, run: int) -> RowTable:
        """All rows of the run number ``run`` of the candidates, which is in the object of ``index`` and ``keys``,
        without their messages."""
        wanted = np.zeros(1, WANTED_DTYPE)
        wanted["run"], wanted["end"] = run, length_of(self._candidates.runs[run : run + 1])
        opened = OpenedSources([OpenedSource(index, keys, self.parents)])
        located = opened.locate(self._candidates, self._queue_hashes, wanted)
        return opened.read_ranges(located, Chunks.without_bytes(1)).row_table(np.array([0, 1]))

    def get(self, key: str, offset: int, length: int) -> bytes:
        """One GET, counted."""
        data = self._store.get_range(key, offset, length)
        with self._lock:
            self.gets += 1
            self.bytes_read += length
        return data

    # -- sources -----------------------------------------

    def _opened(self, group: _Group, last_bytes: Future[list[bytes]]) -> _OpenGroup:
        """Open the objects of ``group``, whose ``last_bytes`` a thread has read: find the rows and blocks that are
        wanted of them. Raises CorruptionError if catalog and objects differ, and what reading raised."""
        ends = [memoryview(end) for end in last_bytes.result()]
        sizes = self._candidates.objects["size_bytes"]
        opened = OpenedSources(
            [
                OpenedSource(*self._decoded(number, end), self.parents)
                for number, end in zip(group.objects, ends, strict=True)
            ]
        )
        located = opened.locate(self._candidates, self._queue_hashes, group.wanted)
        if self._selection is not None:
            located = opened.selected(self._candidates, located, self._selection)
        stored = [
            _ObjectBytes(self, self._key(number), int(sizes[number]), end, spans)
            for number, end, spans in zip(group.objects, ends, opened.spans_of(located), strict=True)
        ]
        return _OpenGroup(opened, located, stored)

    def _read_wanted(self, group: _OpenGroup) -> Iterator[ReadRanges]:
        """Read what is wanted of the opened objects ``group``: rows and messages, some megabytes at a time."""
        opened, located, stored = group
        reader = ChunkReader(opened, stored)
        sizes = np.maximum(
            located["raw_end"] - located["raw_begin"], ROW_BYTES * (located["end_row"] - located["first_row"])
        )
        batch = (np.cumsum(sizes) - sizes) // BATCH_BYTES
        bounds = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(located)]
        for first, last in pairwise(bounds):
            if last > first:
                mine = located[first:last]
                yield opened.read_ranges(mine, reader.chunks(mine))


class _Group(NamedTuple):
    """A large object, or small ones that are opened together, and the ranges (WANTED_DTYPE) that are wanted of them,
    object by object."""

    objects: list[int]
    wanted: Table
    size_bytes: int


class _OpenGroup(NamedTuple):
    """Open objects, the ranges (LOCATED_DTYPE) that are wanted of them, and the bytes of each object."""

    opened: OpenedSources
    located: Table
    stored: list[_ObjectBytes]


class _ObjectBytes:
    """Bytes of an object: its ``end``, and the blocks ``wanted``, as (offset, length). Read in ascending order."""

    def __init__(
        self,
        sources: RewriteSources,
        key: str,
        size_bytes: int,
        end: memoryview,
        wanted: list[tuple[int, int]],
    ) -> None:
        """Reads nothing yet. ``end``: the last bytes of the object, which were read. Blocks of ``wanted`` that are
        close together are joined to reads of up to ``read_bytes_max``; those inside ``end`` need none."""
        self._sources, self._key = sources, key
        end_begin = size_bytes - len(end)
        if not wanted or wanted[0][0] >= end_begin:
            self._unread: deque[tuple[int, int]] = deque()
            self._begin, self._data = end_begin, end
        else:
            self._unread = deque(joined_spans(wanted, sources.read_bytes_max))
            self._begin, self._data = 0, memoryview(b"")

    def _read(self) -> None:
        self._data = memoryview(b"")  # memory is freed before the next bytes are read
        self._begin, length = self._unread.popleft()
        self._data = memoryview(self._sources.get(self._key, self._begin, length))

    def at(self, offset: int, length: int) -> memoryview:
        """The bytes of one block of the object. Blocks are taken in ascending order, and the next ones are read when
        they are needed. Raises CorruptionError for a block that is none of the wanted ones."""
        while self._unread and offset + length > self._begin + len(self._data):
            self._read()
        if not self._begin <= offset <= offset + length <= self._begin + len(self._data):
            raise CorruptionError(
                f"{self._key}: its footer refers to bytes [{offset}, {offset + length}), which hold no block that the "
                "compaction planned to read"
            )
        return self._data[offset - self._begin : offset - self._begin + length]


def readings_of(
    candidates: Candidates,
    iterations: Sequence[list[OutputPart]],
    spool_bytes_max: int,
    share: NDArray[np.float64] | None = None,
) -> tuple[list[list[Table]], bool]:
    """Divide the ``iterations`` of a compaction into groups of consecutive ones, whose ranges fit into a temporary file
    of ``spool_bytes_max`` together, so that sources are read once for each group. Returns the ranges of the iterations
    of each group, and whether they are to be compressed in the file: only if all of them do not fit as they are.
    ``share``: the part of each run that is kept; None: all of it."""
    objects, runs = candidates.objects, candidates.runs
    ratio = np.minimum(1.0, objects["size_bytes"] / np.maximum(objects["raw_bytes"], 1))
    steps: list[Table] = []
    decoded, packed = [], []
    for iteration in iterations:
        ranges = concatenated((part.ranges for part in iteration), RANGE_DTYPE)
        run = picked(runs, ranges["run"])
        length = ranges["end"] - ranges["begin"]
        if share is not None:
            length = length * share[ranges["run"]]
        stored = length * ratio[run["object"]]
        rows = run["rows"] * (length / np.maximum(length_of(run), 1))
        tables = float((rows * ROW_BYTES + RANGE_BYTES).sum())
        # At both ends of a range, blocks may be decoded.
        decoded.append(float(np.minimum(length, stored + 2 * COPIED_RAW_BYTES_MIN).sum()) + tables)
        packed.append(float(stored.sum()) + tables)
        steps.append(ranges)
    is_packed = sum(decoded) > spool_bytes_max
    readings: list[list[Table]] = []
    used = 0.0
    for ranges, size in zip(steps, packed if is_packed else decoded, strict=True):
        if not readings or used + size > spool_bytes_max:
            readings.append([])
            used = 0.0
        readings[-1].append(ranges)
        used += size
    return readings, is_packed


def _by_object(candidates: Candidates, reading: Sequence[Table]) -> Table:
    """The ranges of several iterations (``reading``) as one table (WANTED_DTYPE), in the order of the objects that they
    are read from."""
    ranges = np.zeros(sum(map(len, reading)), WANTED_DTYPE)
    at = 0
    for number, mine in enumerate(reading):
        rows = ranges[at : at + len(mine)]
        for name in RANGE_DTYPE.names or ():
            rows[name] = mine[name]
        rows["iteration"], rows["ordinal"] = number, np.arange(len(mine))
        at += len(mine)
    return picked(ranges, np.argsort(candidates.runs["object"][ranges["run"]], kind="stable"))


def _groups_of(candidates: Candidates, ranges: Table, group_bytes_max: int) -> list[_Group]:
    """Divide ``ranges``, which are in the order of their objects, into groups of objects that are opened together: a
    large object alone, small neighbours up to ``group_bytes_max`` bytes and GROUP_SOURCES_MAX objects."""
    numbers, first = np.unique(candidates.runs["object"][ranges["run"]], return_index=True)
    sizes = candidates.objects["size_bytes"][numbers].tolist()
    ends = [*first[1:].tolist(), len(ranges)]
    groups: list[_Group] = []
    objects: list[int] = []
    begin = used = 0
    for at, (number, size) in enumerate(zip(numbers.tolist(), sizes, strict=True)):
        objects.append(number)
        used += size
        is_last = at + 1 == len(sizes)
        if is_last or len(objects) == GROUP_SOURCES_MAX or used + sizes[at + 1] > group_bytes_max:
            groups.append(_Group(objects, ranges[begin : ends[at]], used))
            objects, begin, used = [], ends[at], 0
    return groups


def joined_spans(spans: list[tuple[int, int]], read_bytes_max: int = READ_BYTES_MAX) -> list[tuple[int, int]]:
    """The reads (offset, length) that cover ``spans`` (offset, length) of one object: spans that are close together are
    one read, of up to ``read_bytes_max``."""
    reads: list[list[int]] = []
    for offset, length in sorted(spans):
        end = offset + length
        is_near = bool(reads) and offset - reads[-1][1] <= HOLE_BYTES_MAX
        if is_near and (end <= reads[-1][1] or end - reads[-1][0] <= read_bytes_max):
            reads[-1][1] = max(reads[-1][1], end)
        else:
            reads.append([offset, end])
    return [(begin, end - begin) for begin, end in reads]
