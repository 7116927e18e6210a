"""When the catalog is read on, and that one state answers all of a reply."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fetcher.io.waiting import InlineExecutor, new_future, run_sync
from fetcher.rows.catalog_view import CatalogView
from tests.flat_file.archive_builder import ArchiveBuilder, Sent
from tests.object_store.fault_store import FaultStore
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import REMOVED_DTYPE
from tiered.catalog.writer_limits import CatalogLimits
from tiered.errors import CorruptionError, UnavailableError
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore

PLAIN = QueueKey("plain", 0, 0)


class Later:
    """An executor that runs its work when told."""

    def __init__(self) -> None:
        self.work: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = new_future()
        self.work.append((future, lambda: work(*args, **kwargs)))
        return future

    def run(self) -> None:
        """All that was submitted until now."""
        work, self.work = self.work, []
        for future, call in work:
            try:
                future.set_result(call())
            except UnavailableError as error:
                future.set_exception(error)


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def built(cycles: int = 3) -> ArchiveBuilder:
    limits = CatalogLimits(root_every=2, spill_runs=3, page_runs_max=2)
    builder = ArchiveBuilder(MemoryStore(), limits=limits)
    for _ in range(cycles):
        builder.commit([Sent(PLAIN), Sent(QueueKey("other", 1, 0))])
    return builder


def test_looking_begins_once_per_interval_and_waits_for_nobody() -> None:
    builder, clock, executor = built(), Time(), Later()
    view = CatalogView(builder.store, builder.state, executor=executor, clock_s=clock, refresh_ms=1000)
    builder.commit([Sent(PLAIN)])
    view.refresh_if_due()
    assert not executor.work
    clock.now_s = 1.0
    view.refresh_if_due()
    view.refresh_if_due()
    assert (len(executor.work), view.state.version) == (1, builder.state.version - 1)
    executor.run()
    assert view.state.version == builder.state.version
    assert view.refreshes == 1


def test_a_refresh_after_a_404_does_not_trust_one_that_began_before() -> None:
    builder, clock, executor = built(), Time(), Later()
    view = CatalogView(builder.store, builder.state, executor=executor, clock_s=clock)
    clock.now_s = 5.0
    view.refresh_if_due()
    waiting = view.refreshed()
    wait = waiting.send(None)
    early = executor.work[0][0]
    early.set_result(view.state)  # it saw nothing new
    assert wait.future.done()
    builder.commit([Sent(PLAIN)])
    executor.work.clear()
    wait = waiting.send(None)
    assert not wait.future.done()
    executor.run()
    with pytest.raises(StopIteration) as stop:
        waiting.send(None)
    assert stop.value.value.version == builder.state.version


def test_readers_share_a_refresh() -> None:
    builder = built()
    calls = 0
    gate = threading.Event()

    class Slow(MemoryStore):
        def get(self, key: str, max_bytes: int = 1 << 30) -> bytes:
            nonlocal calls
            calls += key.startswith("catalog/")
            gate.wait(5)
            return builder.store.get(key, max_bytes)

    with ThreadPoolExecutor(2) as pool, ThreadPoolExecutor(8) as readers:
        view = CatalogView(Slow(), builder.state, executor=pool, clock_s=Time())
        found = [readers.submit(run_sync, view.refreshed()) for _ in range(8)]
        gate.set()
        assert {future.result().version for future in found} == {builder.state.version}
    assert calls <= 8
    assert view.refreshes <= 8


def test_adopting_goes_forward_only() -> None:
    builder = built()
    old = builder.state
    new = builder.commit([Sent(PLAIN)])
    view = CatalogView(builder.store, old, executor=InlineExecutor(), clock_s=Time())
    view.adopt(new)
    view.adopt(old)
    assert view.state is new


def test_views_answer_by_the_state_they_are_asked_for() -> None:
    builder = built()
    old = builder.state
    new = builder.commit([Sent(PLAIN)])
    view = CatalogView(builder.store, old, executor=InlineExecutor(), clock_s=Time())
    before = view.view(old, ("plain", 0, None))
    view.adopt(new)
    after, again = view.view(new, ("plain", 0, None)), view.view(old, ("plain", 0, 0))
    assert before is not None and after is not None and again is not None
    assert (before.max_offset, again.max_offset, after.max_offset) == (3, 3, 4)
    assert view.view(new, ("plain", 0, None)) is after
    assert view.view(new, ("nobody", 0, None)) is None
    assert view.view(new, ("plain", 0, 7)) is None


def test_runs_come_from_pages_and_memory() -> None:
    builder = built(9)
    assert builder.state.pages
    view = CatalogView(builder.store, builder.state, executor=InlineExecutor(), clock_s=Time())
    queue = view.view(view.state, ("plain", 0, None))
    assert queue is not None
    runs = run_sync(view.runs_of(queue))
    expected = RunIndex(builder.store).runs_of(builder.state, PLAIN)
    assert len(runs) == len(expected.runs) == 9
    for offset in range(9):
        place = runs.place(runs.at(offset))
        assert place.base <= offset < place.end
        assert place.object_key in builder.keys
    assert runs.at(9) == runs.at(-1) == -1
    whole = runs.places(2, end=5, bytes_max=1 << 40, runs_max=100)
    assert [place.base for place in whole] == [2, 3, 4]
    assert len(runs.places(0, end=99, bytes_max=1 << 40, runs_max=4)) == 4
    assert len(runs.places(0, end=99, bytes_max=1, runs_max=100)) == 2
    with pytest.raises(CorruptionError, match="in no segment"):
        runs.places(9, end=99, bytes_max=1, runs_max=1)


def test_runs_are_kept_up_to_a_bound() -> None:
    builder = built(9)
    view = CatalogView(
        builder.store, builder.state, executor=InlineExecutor(), clock_s=Time(), runs_bytes=1500
    )
    for _ in range(3):
        for name in ("plain", "other"):
            queue = view.view(view.state, (name, name == "other", None))
            assert queue is not None
            assert len(run_sync(view.runs_of(queue))) == 9
            assert queue.runs is None  # too long to be kept beside the count
    assert len(view._lists) == 1


def test_following_a_queue_adds_the_runs_of_each_commit_without_a_request() -> None:
    builder = built(40)
    store = FaultStore(builder.store, (), wait=lambda seconds: None)
    view = CatalogView(store, builder.state, executor=InlineExecutor(), clock_s=Time())
    queue = view.view(view.state, ("plain", 0, None))
    assert queue is not None
    run_sync(view.runs_of(queue))
    requests = len(store.requests)
    for _ in range(20):
        earlier, before = queue, run_sync(view.runs_of(queue))
        view.adopt(builder.commit([Sent(PLAIN), Sent(QueueKey("other", 1, 0))]))
        queue = view.view(view.state, ("plain", 0, None))
        assert queue is not None
        runs = view.cached_runs_of(queue)
        assert runs is not None and len(runs) == len(before) + 1
        assert run_sync(view.runs_of(earlier)) in (runs, before)
    assert len(store.requests) == requests
    expected = RunIndex(builder.store).runs_of(builder.state, PLAIN)
    chunk = runs.chunk_below(1 << 40)
    assert chunk.runs["base_queue_offset"].tolist() == expected.runs["base_queue_offset"].tolist()
    assert [runs.place(number).object_key for number in range(len(runs))] == [
        expected.object_keys[expected.objects["key"][run["object"]]] for run in expected.runs
    ]
    assert len(runs.chunk_below(5).runs) == 5


def test_runs_that_were_removed_since_leave_the_list() -> None:
    builder = built(6)
    view = CatalogView(builder.store, builder.state, executor=InlineExecutor(), clock_s=Time())
    queue = view.view(view.state, ("plain", 0, None))
    assert queue is not None
    assert len(run_sync(view.runs_of(queue))) == 6
    runs = RunIndex(builder.store).runs_of(builder.state, PLAIN).runs
    removed = np.zeros(1, REMOVED_DTYPE)
    for name in ("rows", "base_queue_offset", "end_queue_offset", "version"):
        removed[name] = runs[name][0]
    builder.writer.maintain(
        lambda state: CommitDraft(CommitKind.MAINTENANCE, queues=[PLAIN], removed=removed, created_ms=1)
    )
    builder.commit([Sent(PLAIN)])
    view.adopt(builder.writer.state)
    queue = view.view(view.state, ("plain", 0, None))
    assert queue is not None
    assert view.cached_runs_of(queue) is None
    assert [run_sync(view.runs_of(queue)).bounds(number) for number in range(6)] == [
        (offset, offset + 1) for offset in range(1, 7)
    ]


@pytest.mark.parametrize("count", range(5, 8))
def test_a_list_does_not_last_when_as_many_rows_were_removed_as_spilled(count: int) -> None:
    """A reader comes back after commits were spilled and as many old rows expired."""
    builder = built(8)
    view = CatalogView(builder.store, builder.state, executor=InlineExecutor(), clock_s=Time())
    queue = view.view(view.state, ("plain", 0, None))
    assert queue is not None
    run_sync(view.runs_of(queue))
    runs = RunIndex(builder.store).runs_of(builder.state, PLAIN).runs
    for _ in range(8):
        builder.commit([Sent(PLAIN), Sent(QueueKey("other", 1, 0))])
    removed = np.zeros(count, REMOVED_DTYPE)
    for name in ("rows", "base_queue_offset", "end_queue_offset", "version"):
        removed[name] = runs[name][:count]
    builder.writer.maintain(
        lambda state: CommitDraft(CommitKind.MAINTENANCE, queues=[PLAIN], removed=removed, created_ms=1)
    )
    view.adopt(builder.writer.state)
    queue = view.view(view.state, ("plain", 0, None))
    assert queue is not None
    found = run_sync(view.runs_of(queue))
    assert [found.bounds(number)[0] for number in range(len(found))] == list(range(count, 16))
