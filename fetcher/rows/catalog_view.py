"""The catalog as readers see it: the newest version known, moved on at most every so often, or when data is missing.

A pull takes one state and answers from it alone. States are immutable, so a newer one never changes an answer under
way. Reading on is done by the executor; a reader that can go on with what is known does not wait for it.

Owns when the catalog is read, and views of queues by version. Does not own its format (tiered.catalog).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from fetcher.io.waiting import Executor, Wait, new_future
from fetcher.rows.queue_view import QueueView, RunList
from tiered.catalog.catalog_reader import refresh
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import CatalogState, RunChunk
from tiered.errors import TieredError, UnavailableError
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore

T = TypeVar("T")
P = ParamSpec("P")

REFRESH_MS = 1000
RUNS_BYTES = 32 * 1024 * 1024
VIEWS_MAX = 16_384

Name = tuple[str, int, int | None]
"""Topic, queue id, generation or None for the newest."""


class CatalogView:
    """Catalog of one archive; ``store`` is its own prefix. Thread-safe.

    ``clock_s`` is monotonic. Runs of queues are kept up to ``runs_bytes``.
    """

    def __init__(
        self,
        store: ObjectStore,
        state: CatalogState,
        *,
        executor: Executor,
        clock_s: Callable[[], float],
        refresh_ms: int = REFRESH_MS,
        runs_bytes: int = RUNS_BYTES,
    ) -> None:
        self._store = store
        self._state = state
        self._executor = executor
        self._clock_s = clock_s
        self._refresh_s = refresh_ms / 1000
        self._lock = threading.RLock()
        self._looked_s = clock_s()
        self._failure: TieredError | None = None
        self._looking: Future[CatalogState] | None = None
        self._index = RunIndex(store, cache_bytes=runs_bytes)
        self._views: tuple[CatalogState, dict[Name, QueueView]] = state, {}
        self._kept: OrderedDict[tuple[int, QueueKey], RunList] = OrderedDict()
        self._kept_bytes = 0
        self._runs_bytes = runs_bytes
        self.refreshes = 0
        self.failures = 0

    def __repr__(self) -> str:
        return f"CatalogView({self._store.url!r}, version={self._state.version})"

    # -- versions ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> CatalogState:
        """The newest version known."""
        return self._state

    def adopt(self, state: CatalogState) -> None:
        """Take over a state somebody else has read or won; an older one is ignored."""
        with self._lock:
            if state.version > self._state.version:
                self._state = state

    def look(self, now_s: float | None = None) -> None:
        """Begin to read on if the newest version is as old as it may be; never waits. ``now_s``: for who knows it."""
        if (self._clock_s() if now_s is None else now_s) - self._looked_s >= self._refresh_s:
            with self._lock:
                if self._looking is None:
                    self._begin()

    async def refreshed(self) -> CatalogState:
        """The newest version there is, by a reading that began after this call. Raises what the store raises."""
        with self._lock:
            earlier = self._looking
        if earlier is not None:
            await _ended(earlier)
            with self._lock:
                self._settle(earlier)
        with self._lock:
            future = self._looking or self._begin()
        return await self._outcome(future)

    async def recent(self) -> CatalogState:
        """A version no older than the refresh interval. Raises what the store raises, or raised within it."""
        self.look()
        with self._lock:
            future, failure = self._looking, self._failure
        if future is not None:
            return await self._outcome(future)
        if failure is not None:
            raise type(failure)(failure.message, hint=failure.hint)
        return self._state

    async def _outcome(self, future: Future[CatalogState]) -> CatalogState:
        await Wait(future)
        with self._lock:
            self._settle(future)
        return self._state

    def _begin(self) -> Future[CatalogState]:
        """Called with the lock held, which is taken again where the executor is done at once."""
        self._looked_s = self._clock_s()
        self.refreshes += 1
        future = self._looking = self._submitted(refresh, self._store, self._state)
        future.add_done_callback(self._finish)
        return future

    def _submitted(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """``work`` in the executor; where that takes none, a failure as of any other read."""
        try:
            return self._executor.submit(work, *args, **kwargs)
        except RuntimeError as error:
            failed: Future[T] = new_future()
            failed.set_exception(UnavailableError(f"the catalog of {self._store.url} is not read: {error}"))
            return failed

    def _finish(self, future: Future[CatalogState]) -> None:
        with self._lock:
            self._settle(future)

    def _settle(self, future: Future[CatalogState]) -> None:
        """Take over what ``future`` found, once; who waits for it may be woken before its callbacks run."""
        if self._looking is not future:
            return
        self._looking = None
        error = future.exception()
        self._failure = error if isinstance(error, TieredError) else None
        if error is not None:
            self.failures += 1
        elif future.result().version > self._state.version:
            self._state = future.result()

    # -- queues -----------------------------------------------------------------------------------------------

    def view(self, state: CatalogState, name: Name) -> QueueView | None:
        """The queue ``name`` in ``state``; None when it is not there."""
        version, views = self._views
        if state is version and name in views:
            return views[name]
        found = _view(state, name)
        if found is None:
            return None  # not remembered: whoever asks may name what there is not, as often and as long as he likes
        with self._lock:
            version, views = self._views
            if len(views) >= VIEWS_MAX or (state is not version and state is self._state):
                version, views = self._views = state, {}
            if state is version:
                views[name] = found
        return found

    def known_runs_of(self, view: QueueView) -> RunList | None:
        """As ``runs_of``, if they are in memory."""
        return view.runs or self._kept.get((view.state.version, view.queue))

    async def runs_of(self, view: QueueView) -> RunList:
        """Runs of the view's queue at its version. Raises what reading pages of the catalog raises."""
        if view.runs is not None:
            return view.runs
        key = view.state.version, view.queue
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is None:
            found = RunList(view.queue, await self._chunk_of(view.state, view.queue))
            with self._lock:
                if key not in self._kept:
                    self._kept[key] = found
                    self._kept_bytes += found.nbytes
                while self._kept_bytes > self._runs_bytes and len(self._kept) > 1:
                    self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        if found.nbytes <= self._runs_bytes // 1024:
            view.runs = found  # long lists are kept above only, where they are counted
        return found

    async def _chunk_of(self, state: CatalogState, queue: QueueKey) -> RunChunk:
        if any(ref.first <= queue <= ref.last for ref in state.pages):
            return await Wait(self._submitted(self._index.runs_of, state, queue))
        return self._index.runs_of(state, queue)


async def _ended(future: Future[CatalogState]) -> None:
    """Waits for ``future``, whatever comes of it."""
    ended: Future[None] = new_future()
    future.add_done_callback(lambda _: ended.set_result(None))
    await Wait(ended)


def _view(state: CatalogState, name: Name) -> QueueView | None:
    topic, queue_id, generation = name
    if generation is None:
        generation = state.current_generation(topic, queue_id)
        if generation is None:
            return None
    queue = QueueKey(topic, queue_id, generation)
    row = state.queue(queue)
    return None if row is None else QueueView(state, queue, row)
