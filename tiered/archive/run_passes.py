"""The live runs of an archive in passes, so that verification takes memory for live queues, not for history.

    in_order     all runs by (queue, base offset): the catalog's sorted sequences merged, a page of each in memory
    between      runs that a span of versions added, page by page
    windows      spans of versions with up to WINDOW_RUNS runs each, object by object

A window is a pass over the pages that may hold runs of it: more history means more passes, not more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiered.archive.verify_segment import SegmentCheck
from tiered.catalog.page_merge import merged_pages
from tiered.catalog.pages import Page, RunIndex, living_pages, memory_page, sequences_of, unsorted_memory
from tiered.catalog.state import CatalogState, PageRef, RunChunk, selected
from tiered.errors import CorruptionError, NotFoundError
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import united
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE, Table, concatenated, copied, picked
from tiered.object_store.interface import ObjectStore

WINDOW_RUNS = 262_144
"""Runs of 112 bytes, and at most as many objects, in memory at a time."""
MERGED_RUNS = 32_768


@dataclass(frozen=True)
class Window:
    """A span of catalog versions: the first and the last, both included."""

    from_version: int
    to_version: int


@dataclass
class LivingRuns:
    """The runs of one state. ``unreadable``: pages that could not be read, with the reason; their runs are missing.
    ``seen`` is called with every page as it is read."""

    store: ObjectStore
    state: CatalogState
    unreadable: dict[str, str] = field(default_factory=dict)
    seen: Callable[[Page], object] = lambda page: None

    def in_order(self) -> Iterator[Page]:
        """Every run once, by (queue, base offset), without the objects they are in."""
        streams = [map(_bare, self._pages(sequence)) for sequence in sequences_of(self.state.pages)]
        streams.append(map(_bare, memory_page(self.state)))
        return merged_pages(streams, MERGED_RUNS)

    def between(self, from_version: int, to_version: int) -> Iterator[Page]:
        """Pages with the runs that these versions, both included, added."""
        refs = [page for page in self.state.pages if page.overlaps(from_version, to_version)]
        for page in self._pages(refs):
            yield _of_versions(page, from_version, to_version)
        if self.state.memory_runs:
            yield _of_versions(unsorted_memory(self.state), from_version, to_version)

    def windows(self) -> tuple[list[Window], int]:
        """Spans of versions that together cover all runs, and the cost of all runs, in the unit of ``run_cost``."""
        counts = np.zeros(self.state.version + 1, np.int64)
        cost = 0
        for page in self.between(0, self.state.version):
            counts += np.bincount(page.chunk.runs["version"], minlength=len(counts))
            cost += run_cost(page.chunk.runs)
        return cut_windows(counts, WINDOW_RUNS), cost

    def objects(self, window: Window) -> WindowObjects:
        """The objects that runs of ``window`` are in."""
        return WindowObjects(self.between(window.from_version, window.to_version))

    def of_objects(self, keys: Collection[str]) -> dict[str, SegmentCheck]:
        """What the catalog expects of the objects ``keys``, with all of their runs; without those that it does not
        name."""
        pages = [
            Page(page.queues, selected(page.chunk, np.isin(page.chunk.runs["object"], numbers)))
            for page in self.between(0, self.state.version)
            if len(numbers := _numbers_of(page.chunk, keys))
        ]
        return dict(WindowObjects(pages))

    def _pages(self, refs: Iterable[PageRef]) -> Iterator[Page]:
        """The living runs of each of the pages ``refs``; ``seen`` is called with them first. Pages that cannot be read
        are skipped, and noted in ``unreadable`` with the reason."""
        index = RunIndex(self.store)
        for ref in refs:
            try:
                page = next(living_pages(index, self.state, [ref]))
            except (NotFoundError, CorruptionError) as error:
                self.unreadable[ref.key] = error.message
                continue
            self.seen(page)
            yield page


def cut_windows(counts: NDArray[np.int64], runs_max: int) -> list[Window]:
    """Divide the catalog versions into spans, of at most ``runs_max`` runs each; a version with more is one of its own.
    ``counts``: how many runs each version added, by version. Pure."""
    windows: list[Window] = []
    begin = runs = 0
    for version in np.flatnonzero(counts).tolist():
        if runs and runs + int(counts[version]) > runs_max:
            windows.append(Window(begin, version - 1))
            begin, runs = version, 0
        runs += int(counts[version])
    if runs:
        windows.append(Window(begin, len(counts) - 1))
    return windows


class WindowObjects(Mapping[str, SegmentCheck]):
    """Objects by key. The catalog's expectation of an object is assembled on access."""

    def __init__(self, pages: Iterable[Page]) -> None:
        """Joins the runs and objects of ``pages``: numbers of queues and objects become valid for all pages, and runs
        are sorted by object."""
        objects: dict[str, int] = {}
        names: list[Sequence[QueueKey]] = []
        places: list[Table] = [np.zeros(0, OBJECT_DTYPE)]
        tables: list[Table] = [np.zeros(0, RUN_DTYPE)]
        for page in pages:
            chunk, of_pages_before = page.chunk, len(objects)
            numbers = np.array([objects.setdefault(key, len(objects)) for key in chunk.object_keys], np.int64)
            number = numbers[chunk.objects["key"]]
            _, first = np.unique(number, return_index=True)
            places.append(picked(chunk.objects, first[number[first] >= of_pages_before]))
            runs = copied(chunk.runs)
            runs["object"] = number[chunk.runs["object"]]
            tables.append(runs)
            names.append(page.queues)
        self._queues, of_pages = united(names)
        for runs, number in zip(tables[1:], of_pages, strict=True):
            runs["queue"] = number[runs["queue"]]
        runs = concatenated(tables, RUN_DTYPE)
        tables.clear()
        self._runs = picked(runs, np.argsort(runs["object"], kind="stable"))
        self._first = np.searchsorted(self._runs["object"], np.arange(len(objects) + 1))
        self._places = concatenated(places, OBJECT_DTYPE)
        self._numbers = objects

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._numbers))

    def __getitem__(self, key: str) -> SegmentCheck:
        runs = self._runs_of(key)
        return SegmentCheck(key, self._places[self._numbers[key]], [runs], self._queues.taken(runs["queue"]))

    @property
    def runs(self) -> int:
        """Runs in all of them."""
        return len(self._runs)

    def cost(self, key: str) -> int:
        """The cost of checking the object ``key``, in the unit of ``run_cost``."""
        return run_cost(self._runs_of(key))

    def _runs_of(self, key: str) -> Table:
        number = self._numbers[key]
        return self._runs[self._first[number] : self._first[number + 1]]


def run_cost(runs: Table) -> int:
    """The cost of checking ``runs``, in which progress is counted: their message bytes, and one for each row."""
    return int(runs["byte_count"].sum()) + int(runs["rows"].sum(dtype=np.int64))


def _numbers_of(chunk: RunChunk, keys: Collection[str]) -> NDArray[np.int64]:
    """The rows of the object table of ``chunk`` that are objects with one of ``keys``."""
    wanted = [number for number, key in enumerate(chunk.object_keys) if key in keys]
    return np.flatnonzero(np.isin(chunk.objects["key"], wanted))


_NO_OBJECT = np.zeros(1, OBJECT_DTYPE)


def _bare(page: Page) -> Page:
    """``page`` with the names of its objects dropped, as these would take most of the memory of merged pages."""
    runs = copied(page.chunk.runs)
    runs["object"] = 0
    return Page(page.queues, RunChunk(runs, _NO_OBJECT, ("",)))


def _of_versions(page: Page, from_version: int, to_version: int) -> Page:
    """The runs of ``page`` that the catalog versions from ``from_version`` to ``to_version``, both included, added."""
    version = page.chunk.runs["version"]
    wanted = (version >= from_version) & (version <= to_version)
    return Page(page.queues, selected(page.chunk, wanted))
