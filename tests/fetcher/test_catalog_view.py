"""When the catalog is read on, and that one state answers all of a reply.

Which topics count as compacted, and when the broker's table is read again.
"""

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fetcher.io.waiting import InlineExecutor, new_future, run_sync
from fetcher.policy.broker_files import CompactionTopics
from fetcher.policy.read_policy import ReadPolicy
from fetcher.policy.read_router import ReadRouter
from fetcher.rows import catalog_view
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.run_list import QueueView
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.object_store.fault_store import FaultStore
from tiered.broker_store.store import open_broker_store
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import REMOVED_DTYPE
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.errors import CorruptionError, UnavailableError
from tiered.model.queue import QueueKey
from tiered.model.tables import FLOOR_DTYPE
from tiered.object_store.memory import MemoryStore
from tiered.settings.topic_rules import is_compacted

PLAIN = QueueKey("plain", 0, 0)


class Later:
    """An executor that runs its work on demand."""

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


def test_looking_begins_once_per_interval_and_blocks_no_caller() -> None:
    builder, clock, executor = built(), Time(), Later()
    view = CatalogView(
        builder.store, builder.state, executor=executor, clock=Clock(monotonic_s=clock), refresh_ms=1000
    )
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
    view = CatalogView(builder.store, builder.state, executor=executor, clock=Clock(monotonic_s=clock))
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
        view = CatalogView(Slow(), builder.state, executor=pool, clock=Clock(monotonic_s=Time()))
        found = [readers.submit(run_sync, view.refreshed()) for _ in range(8)]
        gate.set()
        assert {future.result().version for future in found} == {builder.state.version}
    assert calls <= 8
    assert view.refreshes <= 8


def test_adopting_goes_forward_only() -> None:
    builder = built()
    old = builder.state
    new = builder.commit([Sent(PLAIN)])
    view = CatalogView(builder.store, old, executor=InlineExecutor(), clock=Clock(monotonic_s=Time()))
    view.adopt(new)
    view.adopt(old)
    assert view.state is new


def test_views_answer_by_the_requested_state() -> None:
    builder = built()
    old = builder.state
    new = builder.commit([Sent(PLAIN)])
    view = CatalogView(builder.store, old, executor=InlineExecutor(), clock=Clock(monotonic_s=Time()))
    before = view.view(old, ("plain", 0, None))
    view.adopt(new)
    after, again = view.view(new, ("plain", 0, None)), view.view(old, ("plain", 0, 0))
    assert before is not None and after is not None and again is not None
    assert (before.max_offset, again.max_offset, after.max_offset) == (3, 3, 4)
    assert view.view(new, ("plain", 0, None)) is after
    assert view.view(new, ("unknown", 0, None)) is None
    assert view.view(new, ("plain", 0, 7)) is None


def runs_read(view: CatalogView, queue: QueueView) -> list[tuple[int, str]]:
    """(base offset, object) of every run, as a reader meets them."""
    found = []
    at = queue.existing(queue.min_offset)
    while at < queue.max_offset:
        runs = run_sync(view.runs_of(queue, at))
        for place in runs.places(at, end=queue.max_offset, bytes_max=1 << 40, runs_max=100):
            found.append((place.base, place.object_key))
            at = place.end
        at = queue.existing(at)
    return found


def runs_expected(builder: ArchiveBuilder, queue: QueueKey = PLAIN) -> list[tuple[int, str]]:
    chunk = RunIndex(builder.store).runs_of(builder.writer.state, queue)
    keys = [chunk.object_keys[number] for number in chunk.objects["key"][chunk.runs["object"]].tolist()]
    return list(zip(chunk.runs["base_queue_offset"].tolist(), keys, strict=True))


def plain_view(view: CatalogView) -> QueueView:
    queue = view.view(view.state, ("plain", 0, None))
    assert queue is not None
    return queue


def test_runs_come_from_pages_and_memory() -> None:
    builder = built(9)
    assert builder.state.pages and builder.state.memory_runs
    view = CatalogView(
        builder.store, builder.state, executor=InlineExecutor(), clock=Clock(monotonic_s=Time())
    )
    queue = plain_view(view)
    assert runs_read(view, queue) == runs_expected(builder)
    assert len(runs_expected(builder)) == 9
    runs = run_sync(view.runs_of(queue, 8))
    assert runs.at(8) >= 0 and runs.at(9) == runs.at(-1) == -1
    assert len(runs.places(8, end=99, bytes_max=1, runs_max=100)) == 1
    with pytest.raises(CorruptionError, match="in no segment"):
        runs.places(9, end=99, bytes_max=1, runs_max=1)


def test_runs_of_a_page_in_memory_need_no_thread() -> None:
    builder = ArchiveBuilder(MemoryStore(), limits=CatalogLimits(spill_runs=4, page_runs_max=9))
    queues = [QueueKey("plain", number, 0) for number in range(3)]
    for _ in range(3):
        builder.commit([Sent(queue) for queue in queues])
    state, executor = builder.state, Later()
    assert len(state.pages) == 1
    view = CatalogView(builder.store, state, executor=executor, clock=Clock(monotonic_s=Time()))
    views = [view.view(state, tuple(queue)) for queue in queues]
    assert views[0] is not None
    assert view.cached_runs_of(views[0], 0) is None
    reading = view.runs_of(views[0], 0)
    reading.send(None)
    executor.run()
    with pytest.raises(StopIteration):
        reading.send(None)
    for queue, one in zip(queues, views, strict=True):
        assert one is not None
        found = run_sync(view.runs_of(one, 0))
        assert found.place(0).queue == queue
        assert found.place(0).object_key == dict(runs_expected(builder, queue))[0]
    assert not executor.work
    assert len(view._windows._windows) == 1, "few runs are not kept"


def test_an_offset_takes_a_page_or_two_whatever_the_history() -> None:
    """Not the whole list of runs: a reader's memory follows what it reads."""
    limits = CatalogLimits(
        root_every=8, root_runs_max=16, page_runs_max=64, merge_sequences=4, merge_spills=4
    )
    builder = ArchiveBuilder(MemoryStore(), limits=limits)
    for _ in range(400):
        builder.commit([Sent(PLAIN), Sent(QueueKey("other", 1, 0))])
    store = FaultStore(builder.store, (), wait=lambda seconds: None)
    pages = [page for page in builder.state.pages if page.first <= PLAIN <= page.last]
    assert len(pages) > 8
    for offset in (0, 1, 130, 255, 399):
        view = CatalogView(store, builder.state, executor=InlineExecutor(), clock=Clock(monotonic_s=Time()))
        before = len(store.requests)
        (place,) = run_sync(view.runs_of(plain_view(view), offset)).places(
            offset, end=offset + 1, bytes_max=1, runs_max=1
        )
        assert place.base == offset
        assert len(store.requests) - before <= (1 if offset == 0 else 4)


@pytest.mark.parametrize("runs_bytes", [1500, 1 << 20])
def test_runs_are_kept_up_to_a_bound(runs_bytes: int) -> None:
    builder = built(40)
    view = CatalogView(
        builder.store,
        builder.state,
        executor=InlineExecutor(),
        clock=Clock(monotonic_s=Time()),
        runs_bytes=runs_bytes,
    )
    for _ in range(2):
        for name, number in (("plain", 0), ("other", 1)):
            queue = view.view(view.state, (name, number, None))
            assert queue is not None
            assert runs_read(view, queue) == runs_expected(builder, queue.queue)
    windows = view._windows
    assert windows._windows.held_bytes <= runs_bytes
    assert {name: sorted(found) for name, found in windows._bases.items()} == windows._bases
    assert sum(map(len, windows._bases.values())) == len(windows._windows)
    assert (len(windows._windows) == 1) == (runs_bytes == 1500)


def test_following_a_queue_adds_the_runs_of_each_commit_without_a_request() -> None:
    builder = ArchiveBuilder(MemoryStore(), limits=CatalogLimits(root_every=100))
    for _ in range(30):
        builder.commit([Sent(PLAIN), Sent(QueueKey("other", 1, 0))])
    store = FaultStore(builder.store, (), wait=lambda seconds: None)
    view = CatalogView(store, builder.state, executor=InlineExecutor(), clock=Clock(monotonic_s=Time()))
    queue = plain_view(view)
    for _ in range(20):
        earlier, before = queue, run_sync(view.runs_of(queue, 0))
        view.adopt(builder.commit([Sent(PLAIN), Sent(QueueKey("other", 1, 0))]))
        queue = plain_view(view)
        runs = view.cached_runs_of(queue, 0)
        assert runs is not None and len(runs) == len(before) + 1
        assert run_sync(view.runs_of(earlier, 0)) in (runs, before)
    assert not store.requests
    assert runs_read(view, queue) == runs_expected(builder)


def test_a_tail_stays_over_a_spill_and_loses_what_is_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_view, "TAIL_RUNS_MAX", 12)
    limits = CatalogLimits(root_every=4, root_runs_max=8, merge_sequences=1000)
    builder = ArchiveBuilder(MemoryStore(), limits=limits)
    builder.commit([Sent(PLAIN)])
    store = FaultStore(builder.store, (), wait=lambda seconds: None)
    view = CatalogView(store, builder.state, executor=InlineExecutor(), clock=Clock(monotonic_s=Time()))
    longest = 0
    for _ in range(200):
        view.adopt(builder.commit([Sent(PLAIN)]))
        queue = plain_view(view)
        runs = view.cached_runs_of(queue, queue.max_offset - 1)
        assert runs is not None and runs.end == queue.max_offset
        longest = max(longest, len(runs))
    assert len(builder.state.pages) > 10 and not store.requests
    assert longest <= 64
    assert runs_read(view, queue) == runs_expected(builder)


def remove(builder: ArchiveBuilder, count: int) -> None:
    """The oldest runs leave by tombstones, as another program may do it."""
    runs = RunIndex(builder.store).runs_of(builder.writer.state, PLAIN).runs
    removed = np.zeros(count, REMOVED_DTYPE)
    for name in ("rows", "base_queue_offset", "end_queue_offset", "version"):
        removed[name] = runs[name][:count]
    builder.writer.maintain(
        lambda state: CommitDraft(CommitKind.MAINTENANCE, queues=[PLAIN], removed=removed, created_ms=1)
    )


def expire(builder: ArchiveBuilder, count: int) -> None:
    """The oldest runs leave by a floor."""
    floors = np.array([(0, count, count)], FLOOR_DTYPE)
    builder.writer.maintain(
        lambda state: CommitDraft(CommitKind.MAINTENANCE, queues=[PLAIN], floors=floors, created_ms=1)
    )


@pytest.mark.parametrize("leave", [remove, expire])
@pytest.mark.parametrize("count", range(1, 8))
def test_runs_that_were_removed_since_leave_the_lists(
    leave: Callable[[ArchiveBuilder, int], None], count: int
) -> None:
    """A reader comes back after commits were spilled and as many old rows expired."""
    builder = built(8)
    view = CatalogView(
        builder.store, builder.state, executor=InlineExecutor(), clock=Clock(monotonic_s=Time())
    )
    assert runs_read(view, plain_view(view)) == runs_expected(builder)
    for _ in range(count):
        builder.commit([Sent(PLAIN), Sent(QueueKey("other", 1, 0))])
    leave(builder, count)
    view.adopt(builder.writer.state)
    queue = plain_view(view)
    assert queue.min_offset == count
    assert runs_read(view, queue) == runs_expected(builder)
    builder.commit([Sent(PLAIN)])
    view.adopt(builder.writer.state)
    assert runs_read(view, plain_view(view)) == runs_expected(builder)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"attributes": {"cleanup.policy": "COMPACTION"}}, True),
        ({"attributes": {"cleanup.policy": "DELETE"}}, False),
        ({"attributes": {"cleanup.policy": 7}}, False),
        ({"attributes": None}, False),
        ({}, False),
        ("not a document", False),
    ],
)
def test_the_attribute_decides(config: object, expected: bool) -> None:
    assert is_compacted(config) is expected


def test_topics_of_a_store_are_read_again_when_the_broker_writes_them(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    original = real_store("H2") / "store"
    (tmp_path / "config").mkdir()
    (tmp_path / "commitlog").symlink_to(original / "commitlog")
    table = json.loads((original / "config" / "topics.json").read_text())
    path = tmp_path / "config" / "topics.json"
    path.write_text(json.dumps(table))
    with open_broker_store(tmp_path) as store:
        compacted = CompactionTopics(store)
        router = ReadRouter(None, compacted=compacted)  # type: ignore[arg-type]
        compacted.refresh()
        assert "t_compact_hot" in compacted and "t_plain" not in compacted
        assert router.policy_of("t_compact_hot") is ReadPolicy.DISABLE
        assert router.policy_of("t_plain") is ReadPolicy.NOT_IN_DISK
        path.write_text('{"topicConfigTable":')
        with pytest.raises(CorruptionError):
            compacted.refresh()
        assert "t_compact_hot" in compacted, "the last table that could be read stays"
        table["topicConfigTable"]["t_new"] = {"attributes": {"cleanup.policy": "COMPACTION"}}
        path.write_text(json.dumps(table))
        compacted.refresh()
        assert "t_new" in compacted and "t_compact_hot" in compacted
