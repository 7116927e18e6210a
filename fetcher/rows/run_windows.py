"""Runs of queues in memory, loaded by offset: the newest ones from the catalog's state, older ones a page at a time.

A reader's memory follows what it reads, not the length of a queue's history. The newest runs of a queue, its *tail*,
are extended by what each commit adds, without a request. An older *window* is a part of one catalog page, valid while
the catalog names that page. Thread-safe.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Callable
from typing import NamedTuple

from fetcher.rows.run_list import QueueView, RunList, list_at
from tiered.catalog.pages import Page, RunIndex
from tiered.catalog.state import CatalogState, PageRef, RunChunk
from tiered.model.lru import Lru
from tiered.model.queue import QueueKey
from tiered.model.tables import Table

FEW_RUNS = 8
"""Up to so many runs of a page are found again each time: keeping them takes longer."""
TAIL_RUNS_MAX = 4096
"""Longer tails lose their oldest runs that are in pages."""


class _Tail(NamedTuple):
    """The newest runs of a queue in ``state``. Versions from ``since_version`` on only added to them, so the list
    serves these too: a read ends at the maximum offset of its own version."""

    state: CatalogState
    since_version: int
    runs: RunList


class _Window(NamedTuple):
    queue: QueueKey
    runs: RunList
    page_key: str
    tombstones: Table


class RunWindows:
    """Caches at most about ``bytes_max`` of tails, and as many of windows."""

    def __init__(self, index: RunIndex, bytes_max: int) -> None:
        self._index = index
        self._bytes_max = bytes_max
        self._lock = threading.RLock()
        self._tails: Lru[QueueKey, _Tail] = Lru(bytes_max)
        self._windows: Lru[tuple[QueueKey, int], _Window] = Lru(bytes_max)
        self._bases: dict[QueueKey, list[int]] = {}
        self._page_keys: tuple[tuple[PageRef, ...], frozenset[str]] = (), frozenset()

    def in_memory(self, view: QueueView, offset: int) -> RunList | None:
        """Runs around ``offset`` of the view's queue, if they take no request."""
        tail = self._tail(view)
        if offset >= tail.begin and (not view.is_filled or tail.at(offset) >= 0):
            return tail
        found = self._window(view, offset)
        if found is not None:
            return found
        few = self._index.few_runs(view.state, view.queue, offset, FEW_RUNS)
        if few is not None and (runs := RunList(view.queue, few)).at(offset) >= 0:
            return runs
        return self._from_pages(view, offset, self._index.cached_page)

    def load(self, view: QueueView, offset: int) -> RunList:
        """Runs around ``offset`` from a page of the catalog. Raises what reading pages raises."""
        found = self._from_pages(view, offset, self._index.page)
        assert found is not None
        return found

    def _from_pages(
        self, view: QueueView, offset: int, page_of: Callable[[PageRef], Page | None]
    ) -> RunList | None:
        """Runs around ``offset`` from the first page that has it, or the tail if none has; None if ``page_of`` lacks a
        page."""
        search = self._index.search(view.state, view.queue, offset)
        found: tuple[PageRef, RunChunk] | None = None
        try:
            ref = next(search)
            while (page := page_of(ref)) is not None:
                ref = search.send(page)
            return None
        except StopIteration as end:
            found = end.value
        if found is None:
            return self._tail(view)
        ref, chunk = found
        runs = RunList(view.queue, chunk)
        self._keep_window(_Window(view.queue, runs, ref.key, view.state.tombstones))
        return runs

    # -- tails ------------------------------------------------------------------------------------------------

    def _tail(self, view: QueueView) -> RunList:
        if view.tail is not None:
            return view.tail
        known = self._tails.peek(view.queue)
        if known is not None and known.since_version <= view.state.version <= known.state.version:
            return known.runs
        found, since_version = None, view.state.version
        if known is not None and view.state.version > known.state.version:
            found, since_version = (
                list_at(known.runs, known.state, view.state, view.queue),
                known.since_version,
            )
        if found is None:
            found, since_version = RunList(view.queue, _memory(view)), view.state.version
        elif len(found) > TAIL_RUNS_MAX:
            memory = _memory(view).runs["base_queue_offset"]
            found = found.trimmed(TAIL_RUNS_MAX, below=int(memory[0]) if len(memory) else view.max_offset)
            since_version = view.state.version
        self._keep_tail(view, found, since_version)
        return found

    def _keep_tail(self, view: QueueView, runs: RunList, since_version: int) -> None:
        """Cache the tail of the newest version only; the least recently used leave first."""
        if runs.nbytes <= self._bytes_max // 1024:
            view.tail = runs  # longer lists are only in the cache, which counts their bytes
        with self._lock:
            before = self._tails.get(view.queue)
            if before is None or before.state.version <= view.state.version:
                self._tails.put(view.queue, _Tail(view.state, since_version, runs), self._weight(runs))

    # -- windows ----------------------------------------------------------------------------------------------

    def _window(self, view: QueueView, offset: int) -> RunList | None:
        with self._lock:
            bases = self._bases.get(view.queue, ())
            at = bisect_right(bases, offset) - 1
            if at < 0:
                return None
            key = view.queue, bases[at]
            window = self._windows.peek(key)
            assert window is not None
            is_valid = window.tombstones is view.state.tombstones and window.page_key in self._keys_of(view)
            if not is_valid or window.runs.at(offset) < 0 or window.runs.begin < view.min_offset:
                return None
            self._windows.get(key)
            return window.runs

    def _keys_of(self, view: QueueView) -> frozenset[str]:
        pages, keys = self._page_keys
        if pages is not view.state.pages:
            keys = frozenset(page.key for page in view.state.pages)
            self._page_keys = view.state.pages, keys
        return keys

    def _keep_window(self, window: _Window) -> None:
        key = window.queue, window.runs.begin
        with self._lock:
            if key not in self._windows:
                insort(self._bases.setdefault(window.queue, []), key[1])
            for gone in self._windows.put(key, window, self._weight(window.runs)):
                self._bases[gone.queue].remove(gone.runs.begin)
                if not self._bases[gone.queue]:
                    del self._bases[gone.queue]

    def _weight(self, runs: RunList) -> int:
        """The bytes that count: one list may be larger than the cache, and is kept alone."""
        return min(runs.nbytes, self._bytes_max)


def _memory(view: QueueView) -> RunChunk:
    row = view.state.row_of(view.queue)
    assert row is not None
    return view.state.memory_chunk_of(row)
