"""Pages: older runs in immutable objects, loaded on demand, so that memory follows live queues and not history.

Like the levels of a log-structured merge tree: runs in memory are *spilled* as one sequence sorted by (queue, base
offset) and cut into pages; when a level holds ``merge_sequences`` such sequences they are merged into one of the next
level. A queue's runs are found by reading, from each sequence, the one or two pages whose range covers the queue.

Owns the bytes of a page, spilling, merging and finding runs. Which pages count is said by the state; who writes them
when is decided in writer.py.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.commit import conformed, queue_keys
from tiered.catalog.json_fields import texts
from tiered.catalog.state import EMPTY_CHUNK, CatalogState, PageRef, RunChunk, joined, renumbered, selected
from tiered.errors import CorruptionError
from tiered.formats.container import decode_container, encode_container
from tiered.formats.queue_names import queue_table
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import sorted_order, taken
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE, Table
from tiered.object_store.protocol import ObjectStore

PAGE_KIND = b"RMQTPAGE"
CACHE_BYTES = 64 << 20
BYTES_PER_NAME = 200

PutPage = Callable[[int, bytes], str]
"""(version, bytes) -> key of the page of runs, once durable; raises what the object store raises."""


@dataclass(frozen=True)
class Page:
    """Runs sorted by (queue, base offset); ``chunk.runs["queue"]`` indexes ``queues``, which are sorted."""

    queues: Sequence[QueueKey]
    chunk: RunChunk

    @property
    def nbytes(self) -> int:
        """Memory held, about."""
        return (
            self.chunk.runs.nbytes
            + self.chunk.objects.nbytes
            + 200 * (len(self.queues) + len(self.chunk.object_keys))
        )


# -- bytes ----------------------------------------------------------------------------------------------------


def encode_page(page: Page) -> bytes:
    """The page as one container."""
    topics, queues = queue_table(page.queues)
    header = {"topics": topics, "object_keys": list(page.chunk.object_keys)}
    return encode_container(
        PAGE_KIND, header, {"queues": queues, "runs": page.chunk.runs, "objects": page.chunk.objects}
    )


def decode_page(data: bytes, *, source: str) -> Page:
    """Check and parse; raises CorruptionError naming ``source``, or UnsupportedFormatError."""
    container = decode_container(data, PAGE_KIND, source=source)
    try:
        queues = queue_keys(container.header["topics"], container.tables["queues"])
        chunk = RunChunk(
            conformed(container.tables["runs"], RUN_DTYPE),
            conformed(container.tables["objects"], OBJECT_DTYPE),
            tuple(texts(container.header["object_keys"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{source}: page does not parse: {error!r}") from error
    for table, column, size in (
        (chunk.runs, "queue", len(queues)),
        (chunk.runs, "object", len(chunk.objects)),
        (chunk.objects, "key", len(chunk.object_keys)),
    ):
        if len(table) and int(table[column].max()) >= size:
            raise CorruptionError(f"{source}: {column} points outside its table of {size}")
    return Page(queues, chunk)


# -- spilling -------------------------------------------------------------------------------------------------


def sorted_page(keys: Sequence[QueueKey], chunk: RunChunk) -> Page:
    """``chunk``, whose queue numbers index ``keys``, as one page of any size."""
    present, number = renumbered(chunk.runs["queue"], len(keys))
    names = taken(keys, present)
    order = sorted_order(names)
    rank = np.empty(len(names), np.uint32)
    rank[order] = np.arange(len(names))
    number = rank[number]
    runs = chunk.runs[_order(number, chunk.runs["base_queue_offset"])]
    runs["queue"] = np.sort(number)
    return Page(taken(names, order), RunChunk(runs, chunk.objects, chunk.object_keys))


def _order(queue: NDArray[Any], base: NDArray[Any]) -> NDArray[np.int64]:
    """Indices that sort by (queue, base offset)."""
    order: NDArray[np.int64] = np.argsort(queue, kind="stable")
    queue, base = queue[order], base[order]
    if bool(((queue[1:] > queue[:-1]) | (base[1:] >= base[:-1])).all()):
        return order  # as is where each commit only went on where the one before had ended
    return order[np.lexsort((base, queue))]


def cut(page: Page, runs_max: int) -> Iterator[Page]:
    """Pieces of at most ``runs_max`` runs, each with only the queues and objects it needs."""
    for begin in range(0, len(page.chunk.runs), runs_max):
        piece = selected(page.chunk, np.arange(begin, min(begin + runs_max, len(page.chunk.runs))))
        used, piece.runs["queue"] = renumbered(piece.runs["queue"], len(page.queues))
        yield Page(taken(page.queues, used), piece)


def write_pages(pages: Iterator[Page], level: int, versions: tuple[int, int], put: PutPage) -> list[PageRef]:
    """Put pages of one sequence that covers ``versions`` (first, last)."""
    refs = []
    for page in pages:
        data = encode_page(page)
        key = put(versions[1], data)
        refs.append(
            PageRef(key, level, *versions, len(page.chunk.runs), len(data), page.queues[0], page.queues[-1])
        )
    return refs


def spill(state: CatalogState, runs_max: int, put: PutPage) -> list[PageRef]:
    """Put all runs in memory; the refs for the commit that takes them out of memory."""
    memory = state.memory
    versions = memory.runs["version"]
    page = sorted_page(state.directory.roster.first(len(state.table)), memory)
    return write_pages(cut(page, runs_max), 0, (int(versions.min()), int(versions.max())), put)


# -- merging --------------------------------------------------------------------------------------------------


def sequence_to_merge(pages: Sequence[PageRef], merge_sequences: int) -> list[list[PageRef]]:
    """The oldest ``merge_sequences`` sequences of the lowest level that holds so many, or nothing. Pure.

    Pages of one sequence stand in ``pages`` in their order.
    """
    levels: dict[int, dict[tuple[int, int], list[PageRef]]] = {}
    for page in pages:
        levels.setdefault(page.level, {}).setdefault((page.from_version, page.to_version), []).append(page)
    for level in sorted(levels):
        sequences = levels[level]
        if len(sequences) >= merge_sequences:
            return [sequences[versions] for versions in sorted(sequences)[:merge_sequences]]
    return []


def merge(
    index: RunIndex, state: CatalogState, sequences: Sequence[Sequence[PageRef]], runs_max: int, put: PutPage
) -> list[PageRef]:
    """Put one sequence of the next level that holds all living runs of ``sequences``.

    Streams: at most one page of each sequence and one of the result are in memory.
    """
    level = sequences[0][0].level + 1
    versions = (min(s[0].from_version for s in sequences), max(s[0].to_version for s in sequences))
    streams = [
        (index.living(state, index.read_page(ref)) for ref in sequence)  # one page at a time
        for sequence in sequences
    ]
    return write_pages(merged_pages(streams, runs_max), level, versions, put)


def sequences_of(pages: Sequence[PageRef]) -> list[list[PageRef]]:
    """The sorted sequences that ``pages``, a state's, are. Pure."""
    found: dict[tuple[int, int, int], list[PageRef]] = {}
    for page in pages:
        found.setdefault((page.level, page.from_version, page.to_version), []).append(page)
    return list(found.values())


def merged_pages(streams: Sequence[Iterator[Page]], runs_max: int) -> Iterator[Page]:
    """All runs of ``streams``, each in order, as one sequence in order, in pages of up to ``runs_max`` runs.

    Holds a page of each stream, and up to three of the result.
    """
    heads: list[Page | None] = [None] * len(streams)
    pending: list[Page] = []
    while True:
        for number, stream in enumerate(streams):
            while heads[number] is None and (page := next(stream, None)) is not None:
                heads[number] = page if len(page.chunk.runs) else None
        full = [page for page in heads if page is not None]
        if not full:
            break
        # Each round takes about one page in all, however alike the pages are.
        share = max(1, runs_max // len(full))
        limit = min(_at(page, min(share, len(page.chunk.runs)) - 1) for page in full)
        for number, head in enumerate(heads):
            if head is None:
                continue
            taken = _count_up_to(head, limit)
            if taken:
                # With its own objects only: else each piece would carry along those of its whole page.
                pending.append(Page(head.queues, selected(head.chunk, np.arange(taken))))
                rest = _slice(head, taken, len(head.chunk.runs))
                heads[number] = rest if len(rest.chunk.runs) else None
        if sum(len(page.chunk.runs) for page in pending) >= 2 * runs_max:
            whole = union(pending)
            even = len(whole.chunk.runs) // runs_max * runs_max
            yield from cut(_slice(whole, 0, even), runs_max)
            pending = [_slice(whole, even, len(whole.chunk.runs))]
    if pending:
        yield from cut(union(pending), runs_max)


def union(pages: Sequence[Page]) -> Page:
    """Several pages as one sorted page."""
    names = sorted({queue for page in pages for queue in page.queues})
    number = {queue: index for index, queue in enumerate(names)}
    chunks = []
    for page in pages:
        runs = page.chunk.runs.copy()
        runs["queue"] = np.array([number[queue] for queue in page.queues], np.uint32)[runs["queue"]]
        chunks.append(replace(page.chunk, runs=runs))
    return sorted_page(names, joined(tuple(chunks)))


def _slice(page: Page, begin: int, end: int) -> Page:
    return Page(page.queues, replace(page.chunk, runs=page.chunk.runs[begin:end]))


def _at(page: Page, index: int) -> tuple[QueueKey, int]:
    run = page.chunk.runs[index]
    return page.queues[int(run["queue"])], int(run["base_queue_offset"])


def _count_up_to(page: Page, limit: tuple[QueueKey, int]) -> int:
    """How many leading runs lie at or below (queue, base offset)."""
    runs, (queue, base) = page.chunk.runs, limit
    below = bisect_left(page.queues, queue)
    at = below < len(page.queues) and page.queues[below] == queue
    begin, end = np.searchsorted(runs["queue"], [below, below + 1])
    if not at:
        return int(begin)
    return int(begin + np.searchsorted(runs["base_queue_offset"][begin:end], base, side="right"))


# -- reading --------------------------------------------------------------------------------------------------


class RunIndex:
    """Finds runs, in memory and in pages; keeps the pages last used, up to ``cache_bytes``. Thread-safe."""

    def __init__(self, store: ObjectStore, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._store = store
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._pages: OrderedDict[str, Page] = OrderedDict()
        self._held_bytes = 0

    def page(self, ref: PageRef) -> Page:
        """One page; raises CorruptionError, NotFoundError (the state is older than the last removal) or what the
        store raises."""
        with self._lock:
            found = self._pages.get(ref.key)
            if found is not None:
                self._pages.move_to_end(ref.key)
                return found
        page = self.read_page(ref)
        with self._lock:
            if ref.key not in self._pages:
                self._pages[ref.key] = page
                self._held_bytes += page.nbytes
            while self._held_bytes > self._cache_bytes and len(self._pages) > 1:
                self._held_bytes -= self._pages.popitem(last=False)[1].nbytes
        return page

    def read_page(self, ref: PageRef) -> Page:
        """As ``page``, for one pass over many: not kept."""
        source = f"{self._store.url}/{ref.key}"
        page = decode_page(self._store.get(ref.key), source=source)
        if len(page.chunk.runs) != ref.runs:
            raise CorruptionError(f"{source}: {len(page.chunk.runs)} runs, the catalog says {ref.runs}")
        return page

    def living(self, state: CatalogState, page: Page) -> Page:
        """``page`` without the runs that a later commit removed."""
        if not len(state.tombstones):
            return page
        dead = {
            (state.key_of(int(run["queue"])), int(run["base_queue_offset"]), int(run["version"]))
            for run in state.tombstones
        }
        runs = page.chunk.runs
        suspects = np.flatnonzero(np.isin(runs["version"], state.tombstones["version"])).tolist()
        gone = [
            index
            for index in suspects
            if (
                page.queues[runs["queue"][index]],
                int(runs["base_queue_offset"][index]),
                int(runs["version"][index]),
            )
            in dead
        ]
        if not gone:
            return page
        return Page(page.queues, replace(page.chunk, runs=np.delete(runs, gone)))

    def runs_of(self, state: CatalogState, key: QueueKey) -> RunChunk:
        """All living runs of a queue by base offset, with their objects; ``runs["queue"]`` is 0 everywhere."""
        row = state.row_of(key)
        if row is None:
            return EMPTY_CHUNK
        found = []
        for ref in state.pages:
            if ref.first <= key <= ref.last:
                page = self.living(state, self.page(ref))
                number = _find(page.queues, key)
                if number is not None:
                    begin, end = np.searchsorted(page.chunk.runs["queue"], [number, number + 1])
                    found.append(selected(page.chunk, np.arange(begin, end)))
        mine = state.memory_runs_of(row)
        found.append(selected(mine, np.arange(len(mine.runs))))
        chunk = joined(tuple(found))
        runs = chunk.runs[np.argsort(chunk.runs["base_queue_offset"], kind="stable")].copy()
        runs["queue"] = 0
        return replace(chunk, runs=runs)

    def all_runs(self, state: CatalogState) -> Iterator[Page]:
        """Every living run, page by page, memory last. Pages are not kept in the cache."""
        for ref in state.pages:
            yield self.living(state, self.read_page(ref))
        if state.memory_runs:
            yield sorted_page(state.directory.keys, state.memory)


def runs_of_queue(
    store: ObjectStore, state: CatalogState, key: QueueKey
) -> tuple[Table, Table, tuple[str, ...]]:
    """(runs, objects, object keys) of a queue, for a single look; many looks share a RunIndex."""
    chunk = RunIndex(store).runs_of(state, key)
    return chunk.runs, chunk.objects, chunk.object_keys


def referenced_keys(page: Page) -> list[str]:
    """Keys of the objects that the runs of ``page`` need."""
    used: NDArray[Any] = np.unique(page.chunk.objects["key"][np.unique(page.chunk.runs["object"])])
    return [page.chunk.object_keys[index] for index in used.tolist()]


def _find(queues: Sequence[QueueKey], key: QueueKey) -> int | None:
    number = bisect_left(queues, key)
    return number if number < len(queues) and queues[number] == key else None
