"""Reads of one query, as coroutines: parts of index files, tails and key sections of segments, records, catalog pages;
and the message of an index entry, checked against the catalog: expired, superseded and hidden messages are no result.

Concurrent reads of the same part share one request, and every request is counted. Small parts are cached between
queries: objects are immutable, so these are never stale; they are checked when used, and dropped by object if a check
fails. Tails and blocks are shared with pulls.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Hashable, Iterable
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, TypeVar

import fastcrc
import numpy as np

from fetcher.blocks.budget import ByteBudget
from fetcher.io.request_scheduler import Priority, RangeReader
from fetcher.io.waiting import Wait
from fetcher.rows.block_fetch import BlockSource
from fetcher.rows.message import Message
from tiered.archive.index.layout import Shape
from tiered.archive.index.lookup import ReadRange
from tiered.archive.key_section_reader import key_bytes_guess, keys_within
from tiered.catalog.pages import Bounds, Page, RunIndex, WindowSearch, decode_catalog_page
from tiered.catalog.state import EMPTY_CHUNK, CatalogState, PageRef, RunChunk
from tiered.errors import CorruptionError
from tiered.formats.keys import parse_part_key
from tiered.formats.memory_bound import require_stored_bytes, stored_bytes_max
from tiered.formats.segment_index import KeySection, SegmentIndex
from tiered.formats.segment_layout import check_tail_length
from tiered.model.lru import Lru
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_EXPIRED, QUEUE_HIDDEN, QUEUE_SUPERSEDED, RunKind
from tiered.object_store.interface import ObjectStore

ENTRY_BYTES = 200
"""Approximate memory of an entry without its value."""


class PartCache:
    """At most ``bytes_max``; with a ``budget`` charged to it, and released when a user read needs room. Thread-safe."""

    def __init__(self, bytes_max: int, budget: ByteBudget | None = None) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._parts: Lru[tuple[str, Hashable], Any] = Lru(bytes_max)
        """By key of the object and name of the part."""
        self._charged_bytes = 0
        if budget is not None:
            budget.add_reclaimer(self._reclaim)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def held_bytes(self) -> int:
        """Bytes of all parts, about."""
        return self._parts.held_bytes

    def get(self, object_key: str, part: Hashable) -> Any | None:
        """The part, if it is kept."""
        with self._lock:
            return self._parts.get((object_key, part))

    def put(self, object_key: str, part: Hashable, value: Any, byte_count: int) -> None:
        """Cache ``value``, one decoded part of an object, unless it is larger than the whole cache or the memory budget
        that is shared with other caches has no room."""
        key, byte_count = (object_key, part), byte_count + ENTRY_BYTES
        if byte_count > self._parts.bytes_max or key in self._parts:
            return
        if self._budget is not None and not self._budget.try_charge(byte_count, Priority.PREFETCH):
            return
        with self._lock:
            self._charged_bytes += byte_count
            if key not in self._parts:  # another thread may have added it
                self._parts.add(key, value, byte_count)
        self._release()

    def drop(self, object_key: str) -> int:
        """Remove every part of an object from the cache, because one of them proved wrong. Returns their number."""
        with self._lock:
            gone = [key for key, _ in self._parts if key[0] == object_key]
            for key in gone:
                self._parts.pop(key)
        self._release()
        return len(gone)

    def evict(self, byte_count: int) -> None:
        """Drop so many bytes of parts, the longest unused first."""
        with self._lock:
            self._parts.evict(byte_count)
        self._release()

    def _reclaim(self, byte_count: int, priority: int) -> None:
        """Evict parts for a user's read only, like tails of objects."""
        if priority <= Priority.USER:
            self.evict(byte_count)

    def _release(self) -> None:
        """Return to the budget what was charged for parts that are no longer here."""
        with self._lock:
            gone_bytes = self._charged_bytes - self._parts.held_bytes
            self._charged_bytes -= gone_bytes
        if self._budget is not None and gone_bytes:
            self._budget.release(gone_bytes)


T = TypeVar("T")
INDEX_CHUNK_BYTES: Final = 16 * 1024
"""Index files are read in aligned pieces of this size: adjacent slots cost nothing extra and serve the next query."""
INDEX_WHOLE_BYTES: Final = 8 * INDEX_CHUNK_BYTES
"""All items and slots of an index file up to this size are read at once."""


class Place(NamedTuple):
    """A data object as the catalog or an index file describes it."""

    key: str
    size_bytes: int
    tail_bytes: int

    @classmethod
    def of(cls, key: str, row: np.void) -> Place:
        """The place of the object ``key``, from its row (OBJECT_DTYPE or COVERED_DTYPE)."""
        return cls(key, int(row["size_bytes"]), int(row["tail_bytes"]))


class QuerySource:
    """Reads for one query. Without ``kept`` nothing outlives the query."""

    def __init__(
        self, reader: RangeReader, store: ObjectStore, blocks: BlockSource, kept: PartCache | None = None
    ) -> None:
        """``blocks`` reads the tails and blocks of segments, which pulls share, and ``reader`` everything else.
        ``kept``: the cache of small parts that queries share."""
        self._reader = reader
        self._url = store.url
        self._catalog = RunIndex(store)
        self._kept = kept if kept is not None else PartCache(0)
        self._blocks = blocks
        self._ranges: dict[tuple[str, int, int], Future[bytes]] = {}
        self._segments: dict[str, SegmentIndex] = {}
        self._pages: dict[str, Page] = {}
        self._windows: dict[tuple[int, QueueKey], RunChunk] = {}

    async def range(self, key: str, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes; concurrent reads share a request, small parts are cached."""
        kept: bytes | None = self._kept.get(key, (offset, length))
        if kept is not None:
            return kept
        data = await self._fetched(key, offset, length)
        self._kept.put(key, (offset, length), data, length)
        return data

    async def _fetched(self, key: str, offset: int, length: int) -> bytes:
        future = self._ranges.get((key, offset, length))
        if future is None:
            future = self._ranges[key, offset, length] = self._reader.submit(key, offset, length)
        return await Wait(future)

    def release_ranges(self) -> None:
        """Drop the ranges of objects that were read so far, to bound memory; decoded tails stay."""
        self._ranges.clear()

    async def believed(self, key: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Run ``ask``, which reads and checks something of the object ``key``. If the check fails, drop what is cached
        of the object and run it once more, because the cached bytes may be the damaged ones.

        Raises CorruptionError when it fails again.
        """
        try:
            return await ask()
        except CorruptionError:
            self._kept.drop(key)
            self._segments.pop(key, None)
            for known in [known for known in self._ranges if known[0] == key]:
                del self._ranges[known]
            return await ask()

    # -- index files --------------------------------------------------------------------------------------------

    def items_reader(self, shape: Shape) -> ReadRange:
        """A function that reads ranges of one index file: of its hash slots and of its items. It reads aligned pieces
        and caches them, because neighbouring lookups need the same ones."""
        end = shape.footer_offset
        step = end if end <= INDEX_WHOLE_BYTES else INDEX_CHUNK_BYTES

        async def read(key: str, offset: int, length: int) -> bytes:
            """Reads bytes [offset, offset + length) in aligned pieces of ``step``: cached ones from memory, and all
            from the first to the last missing one in one request."""
            first, last = offset // step, -(-(offset + length) // step)
            found: dict[int, bytes] = {}
            for number in range(first, last):
                piece = self._kept.get(key, ("items", number))
                if piece is not None:
                    found[number] = piece
            missing = [number for number in range(first, last) if number not in found]
            if missing:
                begin, stop = missing[0] * step, min((missing[-1] + 1) * step, end)
                data = await self._fetched(key, begin, stop - begin)
                if len(data) != stop - begin:
                    raise CorruptionError(f"{key}: the read of [{begin}, {stop}) returned {len(data)} bytes")
                for number in range(missing[0], missing[-1] + 1):
                    piece = data[number * step - begin : (number + 1) * step - begin]
                    found[number] = piece
                    self._kept.put(key, ("items", number), piece, len(piece))
            whole = b"".join(found[number] for number in range(first, last))
            return whole[offset - first * step : offset - first * step + length]

        return read

    # -- segments -----------------------------------------------------------------------------------------------

    async def segment(self, place: Place) -> SegmentIndex:
        """The decoded tail of a data object: one request."""
        found = self._known_segment(place.key)
        if found is not None:
            return found
        return await self._blocks.index(place.key, place.size_bytes, place.tail_bytes, Priority.USER)

    def _known_segment(self, key: str) -> SegmentIndex | None:
        found = self._segments.get(key)
        if found is None:
            entry: tuple[SegmentIndex, int] | None = self._kept.get(key, "tail")
            if entry is not None and fastcrc.crc32.iscsi(entry[0].page_bytes) == entry[1]:
                found = self._segments[key] = entry[0]
        return found

    async def keys_of(self, place: Place, rows: int) -> tuple[SegmentIndex, KeySection]:
        """The decoded tail and the key section, which lies in front of it, of a data object with ``rows`` rows.

        One request reads both if the key section has the usual size for so many rows; otherwise a second one reads the
        key section.
        """
        index = self._known_segment(place.key)
        if index is not None:
            kept = self._kept.get(place.key, "keys")
            if kept is not None:
                return index, index.decode_keys(kept)
        check_tail_length(place.key, place.size_bytes, place.tail_bytes)
        room_bytes = min(place.size_bytes, stored_bytes_max()) - place.tail_bytes
        guess = min(room_bytes, key_bytes_guess(rows))
        length = place.tail_bytes + guess
        data = await self._fetched(place.key, place.size_bytes - length, length)
        if index is None:
            index = self._segments[place.key] = SegmentIndex(place.key, place.size_bytes, data)
            self._kept.put(place.key, "tail", (index, fastcrc.crc32.iscsi(index.page_bytes)), index.nbytes)
        found = keys_within(index, memoryview(data))
        if found is None:
            require_stored_bytes(index.key_span[1], place.key)
        stored = await self._fetched(place.key, *index.key_span) if found is None else bytes(found)
        keys = index.decode_keys(stored)
        self._kept.put(place.key, "keys", stored, len(stored))
        return index, keys

    async def record(self, index: SegmentIndex, run: int, row: int) -> bytes:
        """The bytes of one message: row ``row`` of run ``run`` of the segment. Takes one request, for the block that
        holds it. Raises CorruptionError if the row does not lie in the block."""
        columns = index.row_columns(run)
        span = index.block_span(run, row, row + 1)
        (data,) = await self._blocks.blocks_at(index, run, [span.first_block], Priority.USER)
        begin = int(columns.position[row]) - span.raw_offset
        size = int(columns.size[row])
        if not 0 <= begin <= begin + size <= len(data):
            raise CorruptionError(
                f"{index.key}: row {row} of run {run} does not lie in its block [{span.offset}, "
                f"{span.offset + span.length})"
            )
        return data[begin : begin + size].tobytes()

    # -- the catalog's pages ------------------------------------------------------------------------------------

    async def page(self, state: CatalogState, ref: PageRef) -> Page:
        """Living runs of one page."""
        return self._catalog.living(state, await self._page(ref))

    async def _page(self, ref: PageRef) -> Page:
        """A catalog page: one that this query read before, one from the shared cache, or from the store. Raises
        CorruptionError if its number of runs is not the one in ``ref``."""
        found: Page | None = self._pages.get(ref.key) or self._kept.get(ref.key, "page")
        if found is None:
            source = f"{self._url}/{ref.key}"
            part = parse_part_key(ref.key)
            require_stored_bytes(0 if part is None else part[2], source)
            answer = self._reader.submit_get(ref.key) if part is None else self._reader.submit(*part)
            found = decode_catalog_page(await Wait(answer), source=source)
            if len(found.chunk.runs) != ref.runs:
                raise CorruptionError(
                    f"{source} has {len(found.chunk.runs)} runs, but the catalog says {ref.runs}"
                )
            self._kept.put(ref.key, "page", found, found.nbytes)
        self._pages[ref.key] = found
        return found

    async def runs_at(
        self,
        state: CatalogState,
        queue: QueueKey,
        position: int,
        bounds: Bounds = Bounds.OFFSET,
        stored_ms: int | None = None,
    ) -> RunChunk:
        """The run of a queue that holds ``position``, with some of its neighbours in order of their first offset, and
        the objects they are in; empty if no run holds it.

        ``bounds`` says whether ``position`` is a queue offset or a physical offset. ``stored_ms``, the time of the
        message, leads to the one catalog page to read; without it a few pages are read, however long the queue's
        history is.
        """
        known = self._windows.get((state.version, queue))
        if known is not None and bounds.hold(known.runs, position).any():
            return known
        row = state.row_of(queue)
        if row is None:
            return EMPTY_CHUNK
        found = state.memory_runs_of(row)
        if not bounds.hold(found.runs, position).any():
            search = self._catalog.search(state, queue, position, bounds=bounds, stored_ms=stored_ms)
            window = await self._window(search)
            if window is None:
                return EMPTY_CHUNK
            found = window
        self._windows[state.version, queue] = found
        return found

    async def _window(self, search: WindowSearch) -> RunChunk | None:
        """Run ``search``, a generator that yields references to catalog pages and is sent the pages. Returns the runs
        it found, or None."""
        try:
            ref = next(search)
            while True:
                ref = search.send(await self._page(ref))
        except StopIteration as end:
            found: tuple[PageRef, RunChunk] | None = end.value
            return None if found is None else found[1]


ALWAYS_MS = -(1 << 63), (1 << 63) - 1
"""Store timestamps from … to: any a record can have, also those of damaged ones."""


class Entry(NamedTuple):
    """Where a message should be: what an index item says."""

    queue: QueueKey
    queue_offset: int
    store_timestamp: int


def count_within(sizes_bytes: Iterable[int], max_bytes: int) -> int:
    """How many of the first ``sizes_bytes`` add up to at most ``max_bytes``. The first one always counts, however large
    it is, so that a reader gets on."""
    count = total_bytes = 0
    for size_bytes in sizes_bytes:
        total_bytes += size_bytes
        if count and total_bytes > max_bytes:
            break
        count += 1
    return count


def is_shown(state: CatalogState, queue: QueueKey, *, with_hidden: bool) -> bool:
    """Whether messages of ``queue`` are answers: superseded generations never, deleted ones on request."""
    row = state.queue(queue)
    if row is None:
        return False
    flags = int(row["flags"])
    return not flags & QUEUE_SUPERSEDED and (with_hidden or not flags & QUEUE_HIDDEN)


def has_expired(state: CatalogState, entry: Entry) -> bool:
    """Whether the message of ``entry`` has expired."""
    row = state.queue(entry.queue)
    if row is None or entry.queue_offset >= row["min_queue_offset"]:
        return False
    return bool(row["flags"] & QUEUE_EXPIRED)


async def read_entry(source: QuerySource, state: CatalogState, entry: Entry) -> Message | None:
    """Read the message at the queue offset of ``entry``, an item of the key index.

    Returns None if that message no longer exists: it has expired, or the broker's log was truncated and another
    message has its offset. Raises CorruptionError when catalog and object contradict each other, NotFoundError when an
    object is gone.
    """
    row = state.queue(entry.queue)
    if row is None or not row["min_queue_offset"] <= entry.queue_offset < row["end_queue_offset"]:
        return None
    chunk = await source.runs_at(state, entry.queue, entry.queue_offset, stored_ms=entry.store_timestamp)
    runs = chunk.runs
    at = int(np.searchsorted(runs["base_queue_offset"], entry.queue_offset, side="right")) - 1
    if at < 0 or int(runs["end_queue_offset"][at]) <= entry.queue_offset:
        gaps = state.gaps_of(entry.queue)
        inside = (gaps["begin_queue_offset"] <= entry.queue_offset) & (
            entry.queue_offset < gaps["end_queue_offset"]
        )
        if bool(inside.any()):
            return None
        raise CorruptionError(
            f"{entry.queue}: offset {entry.queue_offset} is in no segment and in no recorded gap"
        )
    run = runs[at]
    place = chunk.objects[int(run["object"])]
    index = await source.segment(Place.of(chunk.object_keys[int(place["key"])], place))
    part = index.check_run(run, entry.queue)
    columns = index.row_columns(part)
    number = int(np.searchsorted(columns.queue_offset, entry.queue_offset, side="right")) - 1
    if (
        int(columns.queue_offset[number]) != entry.queue_offset
        or int(columns.store_timestamp[number]) != entry.store_timestamp
        or int(run["kind"]) == RunKind.LMQ
    ):
        return None
    data = await source.record(index, part.ordinal, part.first_row + number)
    return Message(
        *entry[:2],
        memoryview(data),
        entry.store_timestamp,
        inner_num=int(columns.inner_num[number]),
        is_in_batch_queue=int(run["kind"]) == RunKind.BATCH,
    )


def newest_ms(state: CatalogState) -> int:
    """Store timestamp of the newest archived message; 0 for none."""
    return int(state.table["max_store_timestamp"].max(initial=0))
