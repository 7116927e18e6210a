"""The catalog as readers see it: its newest version read so far, refreshed at intervals and when data is missing.

A pull reads one state. States are immutable, so a refresh never changes a pull in progress. The executor refreshes;
readers that can use the current state do not wait. A snapshot of an earlier version is never refreshed. Does not own
the catalog's format (tiered.catalog).

Runs of queues in memory, loaded by offset: the newest ones from the catalog's state, older ones a page at a time.

A reader's memory follows what it reads, not the length of a queue's history. The newest runs of a queue, its *tail*,
are extended by what each commit adds, without a request. An older *window* is a part of one catalog page, valid while
the catalog names that page. Thread-safe.
"""

import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, ParamSpec, TypeVar

from fetcher.io.waiting import Executor, Wait, new_future
from fetcher.rows.run_list import QueueView, RunList, list_at
from tiered.catalog.catalog_reader import refresh
from tiered.catalog.pages import Page, RunIndex
from tiered.catalog.state import CatalogState, PageRef, RunChunk
from tiered.clock import Clock
from tiered.errors import CorruptionError, NotFoundError, SnapshotExpiredError, TieredError, UnavailableError
from tiered.model.lru import Lru
from tiered.model.queue import QueueKey
from tiered.model.tables import Table
from tiered.object_store.interface import ObjectStore

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
        """Runs of the queue around the one with ``offset``, if they can be found without a request; else None."""
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
        """Runs of the queue around the one with ``offset``: from the catalog page that has it, or the newest runs if no
        page has it. ``page_of`` returns a page; None if it lacks a page that is needed."""
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
        """The newest runs of the queue at the view's catalog version: cached ones to which later commits are added, or
        else those that the catalog keeps in memory. Of more than TAIL_RUNS_MAX runs the oldest are dropped."""
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
        """Cache the newest runs of a queue, unless a later catalog version's are cached."""
        if runs.nbytes <= self._bytes_max // 1024:
            view.tail = runs  # longer lists are only in the cache, which counts their bytes
        with self._lock:
            before = self._tails.get(view.queue)
            if before is None or before.state.version <= view.state.version:
                self._tails.put(view.queue, _Tail(view.state, since_version, runs), self._weight(runs))

    # -- windows ----------------------------------------------------------------------------------------------

    def _window(self, view: QueueView, offset: int) -> RunList | None:
        """The cached runs around the one with ``offset``. None if there are none, or if the catalog page they were read
        from was replaced, runs were removed, or the queue's minimum offset has passed their first."""
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
        """Cache a window (consecutive runs of a queue) under the offset where it begins. The windows that have to leave
        the cache for it leave the list of begins as well."""
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


T = TypeVar("T")
P = ParamSpec("P")

REFRESH_MS = 1000
RUNS_BYTES = 32 * 1024 * 1024
VIEWS_MAX = 16_384

QueueName = tuple[str, int, int | None]
"""Topic, queue id, generation or None for the newest."""


class CatalogView:
    """Catalog of one archive; ``store`` is its own prefix. Thread-safe. Caches at most ``runs_bytes`` of runs."""

    def __init__(
        self,
        store: ObjectStore,
        state: CatalogState,
        *,
        executor: Executor,
        clock: Clock,
        refresh_ms: int = REFRESH_MS,
        runs_bytes: int = RUNS_BYTES,
        is_snapshot: bool = False,
    ) -> None:
        """A view of the catalog that begins with version ``state``. ``executor`` loads a newer one every
        ``refresh_ms``; never if this is a snapshot, which is read at one version."""
        self._store = store
        self._state = state
        self._executor = executor
        self._clock = clock
        self._refresh_s = float("inf") if is_snapshot else refresh_ms / 1000
        self._is_snapshot = is_snapshot
        self._lock = threading.RLock()
        self._refreshed_s = clock.monotonic_s()
        self._failure: TieredError | None = None
        self._refreshing: Future[CatalogState] | None = None
        self._index = RunIndex(store, cache_bytes=runs_bytes)
        self._views: tuple[CatalogState, dict[QueueName, QueueView]] = state, {}
        self._windows = RunWindows(self._index, runs_bytes)
        self.refreshes = 0
        self.failures = 0
        self.retries = 0
        """Reads repeated at a newer version, because an object was missing."""

    # -- versions ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> CatalogState:
        """The newest version read."""
        return self._state

    def adopt(self, state: CatalogState) -> None:
        """Use a state read or committed elsewhere; an older one is ignored."""
        with self._lock:
            if state.version > self._state.version:
                self._state = state

    def refresh_if_due(self, now_s: float | None = None) -> None:
        """Start a refresh if the interval has passed; never waits."""
        if (self._clock.monotonic_s() if now_s is None else now_s) - self._refreshed_s >= self._refresh_s:
            with self._lock:
                if self._refreshing is None:
                    self._begin()

    @property
    def is_recent(self) -> bool:
        """Whether ``state`` is no older than the refresh interval, after ``refresh_if_due``."""
        return self._refreshing is None and self._failure is None

    async def refreshed(self) -> CatalogState:
        """The newest catalog version: it is read from the store after this call, even if a refresh is running already.
        Raises what the store raises."""
        if self._is_snapshot:
            return self._state
        with self._lock:
            earlier = self._refreshing
        if earlier is not None:
            await _ended(earlier)
            with self._lock:
                self._settle(earlier)
        with self._lock:
            future = self._refreshing or self._begin()
        return await self._outcome(future)

    async def recent(self) -> CatalogState:
        """A catalog version that was the newest one at most one refresh interval ago. Raises what the store raises, or
        raised at the last refresh within the interval."""
        self.refresh_if_due()
        with self._lock:
            future, failure = self._refreshing, self._failure
        if future is not None:
            return await self._outcome(future)
        if failure is not None:
            raise type(failure)(failure.message, hint=failure.hint)
        return self._state

    async def read(
        self,
        state: CatalogState,
        reading: Callable[[CatalogState], Coroutine[Any, Any, T]],
        *,
        name: str = "",
        queue: QueueKey | None = None,
    ) -> T:
        """The result of ``reading`` at catalog version ``state``. If that names an object that does not exist,
        compaction or expiry has deleted it since, and ``reading`` is repeated at the newest version.

        Raises CorruptionError, which begins with ``name``, if the newest version names a missing object as well, and
        NotFoundError if it no longer has ``queue``. For a snapshot a missing object is a SnapshotExpiredError.
        """
        try:
            return await reading(state)
        except NotFoundError as error:
            if self._is_snapshot:
                raise SnapshotExpiredError(
                    f"version {state.version} of the archive is no longer whole: {error.message}",
                    hint="garbage collection deleted objects of that version; read a newer one",
                ) from error
            state = await self.refreshed()
            self.retries += 1
        if queue is not None and state.queue(queue) is None:
            raise NotFoundError(f"{queue} is not in the archive", hint="tiered ls lists the queues")
        try:
            return await reading(state)
        except NotFoundError as error:
            raise CorruptionError(
                f"{name and name + ': '}catalog version {state.version} names a missing object: {error.message}"
            ) from error

    async def _outcome(self, future: Future[CatalogState]) -> CatalogState:
        await Wait(future)
        with self._lock:
            self._settle(future)
        return self._state

    def _begin(self) -> Future[CatalogState]:
        """Called with the lock held, which an executor that runs inline takes again."""
        self._refreshed_s = self._clock.monotonic_s()
        self.refreshes += 1
        future = self._refreshing = self._submitted(refresh, self._store, self._state)
        future.add_done_callback(self._finish)
        return future

    def _submitted(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Let the executor run ``work``. If the executor is shut down, the future fails with UnavailableError, as a
        read of a closed archive does."""
        try:
            return self._executor.submit(work, *args, **kwargs)
        except RuntimeError as error:
            failed: Future[T] = new_future()
            failed.set_exception(UnavailableError(f"cannot read the catalog of {self._store.url}: {error}"))
            return failed

    def _finish(self, future: Future[CatalogState]) -> None:
        with self._lock:
            self._settle(future)

    def _settle(self, future: Future[CatalogState]) -> None:
        """Take over the catalog version that a refresh has loaded, or note its error. Done once for each refresh, by
        whichever comes first: its callback or a coroutine that waited for it. The caller holds the lock."""
        if self._refreshing is not future:
            return
        self._refreshing = None
        error = future.exception()
        self._failure = error if isinstance(error, TieredError) else None
        if error is not None:
            self.failures += 1
        elif future.result().version > self._state.version:
            self._state = future.result()

    # -- queues -----------------------------------------------------------------------------------------------

    def view(self, state: CatalogState, name: QueueName) -> QueueView | None:
        """The queue ``name`` at the catalog version ``state``; None if there is none."""
        version, views = self._views
        if state is version and name in views:
            return views[name]
        found = _view(state, name)
        if found is None:
            return None  # not cached, because clients choose the names
        with self._lock:
            version, views = self._views
            if len(views) >= VIEWS_MAX or (state is not version and state is self._state):
                version, views = self._views = state, {}
            if state is version:
                views[name] = found
        return found

    def cached_runs_of(self, view: QueueView, offset: int) -> RunList | None:
        """The result of ``runs_of`` if it takes no request."""
        return self._windows.in_memory(view, offset)

    async def runs_of(self, view: QueueView, offset: int) -> RunList:
        """Runs of the view's queue around ``offset``, at its version. Raises what reading pages of the catalog
        raises."""
        found = self._windows.in_memory(view, offset)
        if found is None:
            found = await Wait(self._submitted(self._windows.load, view, offset))
        return found

    async def runs_by_time(self, view: QueueView, timestamp_ms: int, *, is_lower: bool) -> RunChunk:
        """The runs that decide which is the first offset of the view's queue stored at or after ``timestamp_ms``, or
        the last one at or before it; without all others that take a request."""
        read = self._index.runs_from if is_lower else self._index.runs_until
        return await self._read_runs(view, read, timestamp_ms)

    async def runs_across(self, view: QueueView, timestamp_ms: int) -> RunChunk:
        """The runs of the view's queue that show which of its offsets were stored before ``timestamp_ms``, and which
        after it; see RunIndex.runs_across."""
        return await self._read_runs(view, self._index.runs_across, timestamp_ms)

    async def all_runs_of(self, view: QueueView) -> RunChunk:
        """All runs of the view's queue, at its version."""
        return await self._read_runs(view, self._index.runs_of)

    async def runs_of_queues(self, state: CatalogState, queues: Sequence[QueueKey]) -> Page:
        """All runs of ``queues``, which ascend, and perhaps of some between them."""
        return await Wait(self._submitted(self._index.runs_of_queues, state, queues))

    async def _read_runs(self, view: QueueView, read: Callable[..., RunChunk], *times: int) -> RunChunk:
        """The result of ``read``: in the executor if the queue has pages, which may take requests."""
        if any(ref.first <= view.queue <= ref.last for ref in view.state.pages):
            return await Wait(self._submitted(read, view.state, view.queue, *times))
        return read(view.state, view.queue, *times)


async def _ended(future: Future[CatalogState]) -> None:
    """Waits for ``future`` and ignores its result."""
    ended: Future[None] = new_future()
    future.add_done_callback(lambda _: ended.set_result(None))
    await Wait(ended)


def _view(state: CatalogState, name: QueueName) -> QueueView | None:
    """The queue with this topic, queue id and generation (None: the newest one) at the catalog version ``state``; None
    if there is no such queue."""
    topic, queue_id, generation = name
    if generation is None:
        generation = state.current_generation(topic, queue_id)
        if generation is None:
            return None
    queue = QueueKey(topic, queue_id, generation)
    row = state.queue(queue)
    return None if row is None else QueueView(state, queue, row)
