"""Pages: older runs in immutable objects, loaded on demand, so that memory follows live queues, not history.

As in a log-structured merge tree, runs in memory are *spilled* as one sequence sorted by (queue, base offset) and cut
into pages; when a level has enough sequences they are merged into one of the next level. A queue's
runs are in the one or two pages of each sequence whose range covers the queue.

Owns the encoding of a page, spilling and lookups. Merging is in page_merge.py, the schedule in page_writer.py.

The one walk over what is alive in an archive: by page, so that memory follows a page and not the archive.

Runs that are in no page yet come last. Expired and removed runs are not among them.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import dropwhile
from sys import maxsize
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.commit import check_chunk, refuse_unknown
from tiered.catalog.floors import is_expired
from tiered.catalog.json_fields import texts
from tiered.catalog.page_bytes import read_page_bytes
from tiered.catalog.state import (
    EMPTY_CHUNK,
    CatalogState,
    PageRef,
    RunChunk,
    joined_chunks,
    renumbered,
    selected,
)
from tiered.errors import CorruptionError
from tiered.formats.container import decode_container, encode_container
from tiered.formats.memory_bound import LARGE
from tiered.formats.queue_names import queues_of
from tiered.model.lru import Lru
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import selection_of, united
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE, Table, copied, picked
from tiered.object_store.interface import ObjectStore

PAGE_KIND = b"RMQTPAGE"
CACHE_BYTES = 64 << 20
WINDOW_RUNS = 1024

PutPage = Callable[[int, bytes], str]
"""(version, bytes) -> key of the durable page; raises what the object store raises."""


class Bounds(Enum):
    """What a position in a queue is: a queue offset, or a physical offset in the commitlog. Both ascend from run to
    run. The value: the columns of a run with its first position and its end."""

    OFFSET = ("base_queue_offset", "end_queue_offset")
    PHYS = ("min_phys", "end_phys")

    def hold(self, runs: Table, position: int) -> NDArray[np.bool_]:
        """Whether each of ``runs`` holds ``position``."""
        low, high = self.value
        held: NDArray[np.bool_] = (runs[low] <= position) & (position < runs[high])
        return held


@dataclass(frozen=True)
class Page:
    """Runs sorted by (queue, base offset); ``chunk.runs["queue"]`` indexes ``queues``, which are sorted."""

    queues: Sequence[QueueKey]
    chunk: RunChunk

    @property
    def nbytes(self) -> int:
        """Approximate memory size."""
        return (
            self.chunk.runs.nbytes
            + self.chunk.objects.nbytes
            + 200 * (len(self.queues) + len(self.chunk.object_keys))
        )

    @cached_property
    def _first_runs(self) -> NDArray[np.int64]:
        # Of all queues at once: a search for each would copy the column, as rows are not contiguous.
        found: NDArray[np.int64] = np.searchsorted(
            np.ascontiguousarray(self.chunk.runs["queue"]), np.arange(len(self.queues) + 1)
        )
        return found

    def runs_of(self, key: QueueKey) -> slice:
        """The runs of a queue; empty if it has none."""
        number = bisect_left(self.queues, key)
        if number == len(self.queues) or self.queues[number] != key:
            return slice(0, 0)
        return slice(int(self._first_runs[number]), int(self._first_runs[number + 1]))

    def between(self, first: QueueKey, last: QueueKey) -> Page:
        """A copy of the runs of the queues from ``first`` to ``last``."""
        low, high = bisect_left(self.queues, first), bisect_right(self.queues, last)
        chunk = selected(self.chunk, slice(int(self._first_runs[low]), int(self._first_runs[high])))
        chunk.runs["queue"] -= low
        return Page(self.queues[low:high], chunk)


# -- bytes ----------------------------------------------------------------------------------------------------


def encode_catalog_page(page: Page) -> bytes:
    """The page as one container."""
    topics, queues = selection_of(page.queues).table()
    header = {"topics": topics, "object_keys": list(page.chunk.object_keys)}
    tables = {"queues": queues, "runs": page.chunk.runs, "objects": page.chunk.objects}
    return encode_container(PAGE_KIND, header, tables, is_packed=True)


def decode_catalog_page(data: bytes, *, source: str) -> Page:
    """The page of runs whose object is ``data``. Raises CorruptionError, which names the object ``source``, if anything
    of it is damaged, and UnsupportedFormatError."""
    container = decode_container(data, PAGE_KIND, source=source, allowance=LARGE)
    refuse_unknown(container, None, source)
    try:
        queues = queues_of(container)
        chunk = RunChunk(
            container.table("runs", RUN_DTYPE),
            container.table("objects", OBJECT_DTYPE),
            tuple(texts(container.header["object_keys"])),
        )
        check_chunk(chunk, len(queues))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{source}: this page of the catalog is damaged: {error!r}") from error
    return Page(queues, chunk)


# -- spilling -------------------------------------------------------------------------------------------------


def sorted_page(keys: Sequence[QueueKey], chunk: RunChunk) -> Page:
    """The runs of ``chunk``, whose ``queue`` is an index into ``keys``, as one page of any size: sorted by queue and
    offset, with only the queues that have runs."""
    present, number = renumbered(chunk.runs["queue"], len(keys))
    queues = selection_of(keys).taken(present)
    order = queues.sorted_order()
    rank = np.empty(len(queues), np.uint32)
    rank[order] = np.arange(len(queues))
    number = rank[number]
    runs = picked(chunk.runs, _order(number, chunk.runs["base_queue_offset"]))
    runs["queue"] = np.sort(number)
    return Page(queues.taken(order), RunChunk(runs, chunk.objects, chunk.object_keys))


def union(pages: Sequence[Page]) -> Page:
    """All runs of ``pages`` as one page sorted by queue and offset."""
    queues, numbers = united([page.queues for page in pages])
    chunk = joined_chunks(tuple(page.chunk for page in pages))
    # A single chunk is not copied by the join, and pages are immutable.
    runs = chunk.runs if len(pages) > 1 else copied(chunk.runs)
    parts = [number[page.chunk.runs["queue"]] for number, page in zip(numbers, pages, strict=True)]
    runs["queue"] = np.concatenate([np.zeros(0, np.uint32), *parts])
    return sorted_page(queues, replace(chunk, runs=runs))


def _order(queue: NDArray[Any], base: NDArray[Any]) -> NDArray[np.int64]:
    """The indexes that sort runs by queue and first offset; ``queue`` and ``base`` are these columns of the runs."""
    order: NDArray[np.int64] = np.argsort(queue, kind="stable")
    queue, base = queue[order], base[order]
    if bool(((queue[1:] > queue[:-1]) | (base[1:] >= base[:-1])).all()):
        return order  # already sorted if each commit continued the one before
    return order[np.lexsort((base, queue))]


def cut(page: Page, runs_max: int) -> Iterator[Page]:
    """Cut ``page`` into pages of at most ``runs_max`` runs, each with only its own queues and objects."""
    for begin in range(0, len(page.chunk.runs), runs_max):
        piece = selected(page.chunk, slice(begin, begin + runs_max))
        used, piece.runs["queue"] = renumbered(piece.runs["queue"], len(page.queues))
        yield Page(selection_of(page.queues).taken(used), piece)


def write_pages(pages: Iterator[Page], level: int, versions: tuple[int, int], put: PutPage) -> list[PageRef]:
    """Encode and put ``pages``, which are sorted as one sequence, and return their entries for the catalog. The runs
    are of the catalog ``versions`` (first, last); ``level`` counts how often they were merged."""
    refs = []
    for page in pages:
        data = encode_catalog_page(page)
        key = put(versions[1], data)
        base = page.chunk.runs["base_queue_offset"]
        refs.append(
            PageRef(
                key,
                level,
                *versions,
                len(page.chunk.runs),
                len(data),
                page.queues[0],
                page.queues[-1],
                int(base[0]),
                int(base[-1]),
                int(page.chunk.runs["min_store_timestamp"].min()),
                int(page.chunk.runs["max_store_timestamp"].max()),
            )
        )
    return refs


def spill(state: CatalogState, runs_max: int, put: PutPage) -> list[PageRef]:
    """Put all runs of ``state`` that are in no page as pages of up to ``runs_max`` runs. Returns the entries of these
    pages, for the commit that takes the runs out of the state."""
    memory = state.memory
    versions = memory.runs["version"]
    page = sorted_page(state.queue_keys, memory)
    return write_pages(cut(page, runs_max), 0, (int(versions.min()), int(versions.max())), put)


# -- reading --------------------------------------------------------------------------------------------------

WindowSearch = Generator[PageRef, Page, tuple[PageRef, RunChunk] | None]
"""A search that yields each page to read, is sent the page, and returns a page with the runs that were found in it, or
None."""


class RunIndex:
    """Finds runs (rows of one queue with contiguous offsets inside one object) in a state and in its pages, with a
    cache of pages up to ``cache_bytes``. Thread-safe."""

    def __init__(self, store: ObjectStore, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._pages: Lru[str, Page] = Lru(cache_bytes)
        self._sequences: tuple[tuple[PageRef, ...], list[list[PageRef]]] = (), []

    def page(self, ref: PageRef) -> Page:
        """The page that ``ref`` names, from the cache or the store. Raises CorruptionError, NotFoundError (it was
        removed since the state was read) or what the store raises."""
        page = self.cached_page(ref)
        if page is None:
            page = self.read_page(ref)
            with self._lock:
                # A single one is kept even if it is larger than the cache.
                self._pages.put(ref.key, page, min(page.nbytes, self._pages.bytes_max))
        return page

    def cached_page(self, ref: PageRef) -> Page | None:
        """The page that ``ref`` names, if the cache has it, else None."""
        with self._lock:
            return self._pages.get(ref.key)

    def read_page(self, ref: PageRef) -> Page:
        """Read the page that ``ref`` names, without the cache: a pass over many pages would fill it. Raises what
        ``page`` raises."""
        source = f"{self._store.url}/{ref.key}"
        page = decode_catalog_page(read_page_bytes(self._store, ref.key), source=source)
        if len(page.chunk.runs) != ref.runs:
            raise CorruptionError(
                f"{source}: this page of the catalog has {len(page.chunk.runs)} runs, but the catalog says {ref.runs}"
            )
        return page

    def living(self, state: CatalogState, page: Page) -> Page:
        """``page`` without the runs that are removed or expired in ``state``: a page is immutable, so the state has
        tombstones (identities of removed runs) and minimum offsets instead."""
        page = _unexpired(state, page)
        if not len(state.tombstones):
            return page
        dead = {
            (state.key_of(int(run["queue"])), int(run["base_queue_offset"]), int(run["version"]))
            for run in state.tombstones
        }
        runs = page.chunk.runs
        # Only runs of a version that has tombstones are looked up one by one.
        candidates = np.flatnonzero(np.isin(runs["version"], state.tombstones["version"])).tolist()
        removed = [
            index
            for index in candidates
            if (
                page.queues[runs["queue"][index]],
                int(runs["base_queue_offset"][index]),
                int(runs["version"][index]),
            )
            in dead
        ]
        if not removed:
            return page
        kept = np.ones(len(runs), bool)
        kept[removed] = False
        return Page(page.queues, replace(page.chunk, runs=picked(runs, kept)))

    def runs_of(self, state: CatalogState, key: QueueKey) -> RunChunk:
        """All living runs of a queue by offset, with their objects; ``runs["queue"]`` is 0 everywhere. Empty for an
        unknown queue."""
        row = state.row_of(key)
        if row is None:
            return EMPTY_CHUNK
        in_pages = [self._of_page(state, ref, key) for ref in state.pages if ref.first <= key <= ref.last]
        return _by_offset([*in_pages, state.memory_chunk_of(row)])

    def runs_of_queues(self, state: CatalogState, queues: Sequence[QueueKey]) -> Page:
        """All living runs of ``queues``, which ascend, as one page; it may have runs of queues between these too."""
        first, last = queues[0], queues[-1]
        pages = [
            self.living(state, self.page(ref).between(first, last))
            for ref in state.pages
            if ref.first <= last and first <= ref.last
        ]
        rows = state.directory.rows(queues, len(state.table))
        in_memory = selected(state.memory, np.isin(state.memory.runs["queue"], rows))
        return union([*pages, sorted_page(state.queue_keys, in_memory)])

    def window(
        self, state: CatalogState, key: QueueKey, offset: int, runs_max: int = WINDOW_RUNS
    ) -> tuple[PageRef, RunChunk] | None:
        """Find the page with the message at ``offset`` of a queue, and up to ``runs_max`` living runs of the queue in
        it around that offset, as ``runs_of`` returns them. None if no page has that offset (it may be in the state)."""
        search = self.search(state, key, offset, runs_max)
        try:
            ref = next(search)
            while True:
                ref = search.send(self.page(ref))
        except StopIteration as end:
            result: tuple[PageRef, RunChunk] | None = end.value
            return result

    def few_runs(self, state: CatalogState, key: QueueKey, offset: int, runs_max: int) -> RunChunk | None:
        """The fast case of ``window``, which takes no request: the living runs of a queue in the only page that may
        have ``offset``, if that page is cached and has no more than ``runs_max`` runs of the queue; else None. The
        result has all objects of the page, so a caller must not cache it."""
        candidates = list(self._candidates(state, key, offset, Bounds.OFFSET))
        page = self.cached_page(candidates[0]) if len(candidates) == 1 else None
        queue_runs = slice(0, 0) if page is None else page.runs_of(key)
        if page is None or not 0 < queue_runs.stop - queue_runs.start <= runs_max:
            return None
        runs = copied(page.chunk.runs[queue_runs])
        runs["queue"] = 0
        return self.living(state, Page([key], replace(page.chunk, runs=runs))).chunk

    def search(
        self,
        state: CatalogState,
        key: QueueKey,
        position: int,
        runs_max: int = WINDOW_RUNS,
        bounds: Bounds = Bounds.OFFSET,
        stored_ms: int | None = None,
    ) -> WindowSearch:
        """Search the pages for the run of a queue that has ``position``, a queue or commitlog offset as ``bounds``
        says.

        A generator, so that the caller decides how pages are read: it yields the page to read next and is sent that
        page; in the end it returns what ``window`` returns. Runs of later versions have higher positions, except those
        that filled gaps: so a binary search comes first, and then the pages that it skipped. If the caller knows that
        the message was stored at ``stored_ms``, the search begins with a page of that time.
        """
        row = state.queue(key)
        candidates = list(self._candidates(state, key, position, bounds))
        searched: set[str] = set()
        remaining = candidates
        is_oldest = row is not None and bounds is Bounds.OFFSET and position <= int(row["min_queue_offset"])
        has_time = [] if stored_ms is None else [ref.min_ms <= stored_ms <= ref.max_ms for ref in remaining]
        while remaining:
            number = has_time.index(True) if True in has_time else 0 if is_oldest else len(remaining) // 2
            has_time = []  # the time only chooses the first page
            ref = remaining[number]
            searched.add(ref.key)
            result = self._search_page((yield ref), state, key, position, runs_max, bounds)
            if isinstance(result, RunChunk):
                return ref, result
            if result is None:
                remaining = [*remaining[:number], *remaining[number + 1 :]]
            else:
                remaining = remaining[:number] if result < 0 else remaining[number + 1 :]
        for ref in candidates:
            if ref.key not in searched:
                result = self._search_page((yield ref), state, key, position, runs_max, bounds)
                if isinstance(result, RunChunk):
                    return ref, result
        return None

    def _candidates(
        self, state: CatalogState, key: QueueKey, position: int, bounds: Bounds
    ) -> Iterator[PageRef]:
        """Pages that may have the message at ``position`` of a queue, the oldest first. Pages that were written
        together are sorted as one sequence, so at most one of each may have a queue offset."""
        for sequence in self.sequences(state):
            begin = bisect_left(sequence, key, key=lambda ref: ref.last)
            of_queue = sequence[begin : bisect_right(sequence, key, key=lambda ref: ref.first)]
            if bounds is Bounds.OFFSET and of_queue:
                at = bisect_right(of_queue, (key, position), key=lambda ref: (ref.first, ref.first_offset))
                of_queue = of_queue[at - 1 : at] if at else []
            yield from of_queue

    def _of_page(self, state: CatalogState, ref: PageRef, key: QueueKey) -> RunChunk:
        """The living runs of the queue ``key`` in the page that ``ref`` names; ``runs["queue"]`` is 0 everywhere."""
        page = self.page(ref)
        chunk = selected(page.chunk, page.runs_of(key))
        chunk.runs["queue"] = 0
        return self.living(state, Page([key], chunk)).chunk

    def sequences(self, state: CatalogState) -> list[list[PageRef]]:
        """The pages of ``state`` by sequence (pages that were written together and are sorted as one), oldest first.
        Caches the result for the last state's pages."""
        pages, sequences = self._sequences
        if pages is not state.pages:
            sequences = sorted(
                sequences_of(state.pages),
                key=lambda sequence: (sequence[0].from_version, sequence[0].to_version, sequence[0].level),
            )
            self._sequences = state.pages, sequences
        return sequences

    def _search_page(
        self, page: Page, state: CatalogState, key: QueueKey, position: int, runs_max: int, bounds: Bounds
    ) -> RunChunk | int | None:
        """Look for ``position`` of a queue in one page. Returns up to ``runs_max`` living runs around it; -1 if it can
        only be in older pages, 1 if only in newer ones; None if the page has no run of the queue."""
        queue_runs = page.runs_of(key)
        if queue_runs.start == queue_runs.stop:
            return None
        at = int(np.searchsorted(page.chunk.runs[queue_runs][bounds.value[0]], position, "right")) - 1
        if at < 0:
            return -1
        # Windows of a page do not overlap, so that callers can cache them.
        first = queue_runs.start + at // runs_max * runs_max
        chunk = selected(page.chunk, slice(first, min(first + runs_max, queue_runs.stop)))
        chunk.runs["queue"] = 0
        living = self.living(state, Page([key], chunk)).chunk
        return living if bounds.hold(living.runs, position).any() else 1

    def runs_from(self, state: CatalogState, key: QueueKey, timestamp_ms: int) -> RunChunk:
        """Like ``runs_of``, but pages are read only up to the first run with a message stored at or after
        ``timestamp_ms``, and none with earlier messages alone."""
        return self._runs_by_time(state, key, timestamp_ms, is_later=True)

    def runs_until(self, state: CatalogState, key: QueueKey, timestamp_ms: int) -> RunChunk:
        """Like ``runs_of``, but pages are read only back to the last run with a message stored at or before
        ``timestamp_ms``, and none with later messages alone. If a run that is in no page, and so among the newest, has
        such a message, only these runs are returned."""
        row = state.row_of(key)
        if row is not None and bool(
            (state.memory_runs_of(row).runs["min_store_timestamp"] <= timestamp_ms).any()
        ):
            return state.memory_chunk_of(row)
        return self._runs_by_time(state, key, timestamp_ms, is_later=False)

    def runs_across(self, state: CatalogState, key: QueueKey, timestamp_ms: int) -> RunChunk:
        """The runs of a queue that a search for the time ``timestamp_ms`` must look into, as ``runs_of`` returns them:
        messages before the first of them were stored earlier, and messages that are in none of them, and not before the
        first, were stored later."""
        row = state.row_of(key)
        if row is None:
            return EMPTY_CHUNK
        if not state.is_ordered(row):
            return self.runs_of(state, key)
        chunks: list[RunChunk] = []
        has_begun = False
        for ref in dropwhile(lambda ref: ref.max_ms < timestamp_ms, self._in_order(state, key)):
            # The first page with runs of the queue bounds the result, even if all of them are later.
            if ref.min_ms <= timestamp_ms or not has_begun:
                chunks.append(self._of_page(state, ref, key))
                has_begun = has_begun or bool(len(chunks[-1].runs))
        return _by_offset([*chunks, state.memory_chunk_of(row)])

    def _in_order(self, state: CatalogState, key: QueueKey) -> Iterator[PageRef]:
        """The pages that may have runs of the queue ``key``, the oldest first."""
        for sequence in self.sequences(state):
            yield from (ref for ref in sequence if ref.first <= key <= ref.last)

    def _runs_by_time(
        self, state: CatalogState, key: QueueKey, timestamp_ms: int, *, is_later: bool
    ) -> RunChunk:
        """The runs of a queue in the state, and those in its pages up to the first page that has a message stored at or
        after ``timestamp_ms``; or, unless ``is_later``, back to the last page that has one stored at or before it. Of a
        queue whose times are not in order, all runs."""
        row = state.row_of(key)
        if row is None:
            return EMPTY_CHUNK
        if not state.is_ordered(row):
            return self.runs_of(state, key)
        in_order = list(self._in_order(state, key))
        if is_later:
            refs = [ref for ref in in_order if ref.max_ms >= timestamp_ms]
        else:
            refs = [ref for ref in reversed(in_order) if ref.min_ms <= timestamp_ms]
        chunks = []
        for ref in refs:
            chunk = self._of_page(state, ref, key)
            chunks.append(chunk)
            is_reached = (
                chunk.runs["max_store_timestamp"] >= timestamp_ms
                if is_later
                else chunk.runs["min_store_timestamp"] <= timestamp_ms
            )
            if is_reached.any():
                break
        chunks.append(state.memory_chunk_of(row))
        if not any(len(chunk.runs) for chunk in chunks):
            # All runs are too early or too late: the newest ones show the caller where the queue ends.
            newest_first = (self._of_page(state, ref, key) for ref in reversed(in_order))
            chunks.append(next((chunk for chunk in newest_first if len(chunk.runs)), EMPTY_CHUNK))
        return _by_offset(chunks)


def _by_offset(chunks: Sequence[RunChunk]) -> RunChunk:
    """The runs of one queue in ``chunks``, by their first offsets."""
    chunk = joined_chunks(tuple(chunks))
    return selected(chunk, np.argsort(chunk.runs["base_queue_offset"], kind="stable"))


def sequences_of(pages: Sequence[PageRef]) -> list[list[PageRef]]:
    """A state's ``pages`` by sequence: pages that were written together and are sorted as one. Pure."""
    sequences: dict[tuple[int, int, int], list[PageRef]] = {}
    for page in pages:
        sequences.setdefault((page.level, page.from_version, page.to_version), []).append(page)
    return list(sequences.values())


def _unexpired(state: CatalogState, page: Page) -> Page:
    """``page`` without the runs that have expired in ``state`` since the page was written."""
    if not state.has_expired_runs:
        return page
    rows = state.directory.rows(page.queues, len(state.table))
    # A queue that the state does not have has no row (-1), and nothing of it counts as expired.
    minimum = np.where(rows < 0, 0, state.table["min_queue_offset"][rows])
    expired = is_expired(page.chunk.runs, minimum[page.chunk.runs["queue"]])
    if not expired.any():
        return page
    return Page(page.queues, replace(page.chunk, runs=picked(page.chunk.runs, ~expired)))


def referenced_keys(chunk: RunChunk) -> list[str]:
    """Keys of the objects that the runs of ``chunk`` name."""
    used: NDArray[Any] = np.unique(chunk.objects["key"][np.unique(chunk.runs["object"])])
    return [chunk.object_keys[index] for index in used.tolist()]


def living_runs(
    index: RunIndex,
    state: CatalogState,
    first_version: int = 0,
    last_version: int = maxsize,
    *,
    is_cached: bool = False,
) -> Iterator[Page]:
    """The living runs of ``state``, page by page: all pages that may have runs which the versions ``first_version`` to
    ``last_version`` added, and at last the runs that are in no page. Raises what reading pages raises."""
    chosen = (ref for ref in state.pages if ref.overlaps(first_version, last_version))
    yield from living_pages(index, state, chosen, is_cached=is_cached)
    yield from memory_page(state)


def living_pages(
    index: RunIndex, state: CatalogState, refs: Iterable[PageRef], *, is_cached: bool = False
) -> Iterator[Page]:
    """The living runs of the pages ``refs`` of ``state``, page by page, read through the cache if ``is_cached``. Raises
    what reading pages raises."""
    read = index.page if is_cached else index.read_page
    for ref in refs:
        yield index.living(state, read(ref))


def unsorted_memory(state: CatalogState) -> Page:
    """The runs of ``state`` that are in no page yet, in the order in which they were committed."""
    return Page(state.queue_keys, state.memory)


def memory_page(state: CatalogState) -> Iterator[Page]:
    """Yields the runs of ``state`` that are in no page yet, if there are any, as one page, sorted by queue and
    offset."""
    if state.memory_runs:
        yield sorted_page(state.queue_keys, state.memory)
