"""What the decode pool does next: by example with a pool that runs on demand, and as a property of any course."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.blocks.decode_queue import DecodeQueue, DecodeTask
from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import InlineExecutor, Threads
from tests.fetcher.virtual import HeldPool


def test_users_go_first_then_the_oldest_request() -> None:
    pool, done = HeldPool(), list[str]()
    queue = DecodeQueue(pool)
    turns = [queue.turn() for _ in range(4)]
    queue.submit(lambda: done.append("ahead 2"), Priority.PREFETCH, turns[2])
    queue.submit(lambda: done.append("ahead 1, first blocks"), Priority.PREFETCH, turns[1])
    queue.submit(lambda: done.append("ahead 1, blocks behind"), Priority.PREFETCH, turns[1])
    queue.submit(lambda: done.append("background"), Priority.BACKGROUND, turns[0])
    queue.submit(lambda: done.append("user"), Priority.USER, turns[3])
    while pool.runs:
        pool.run()
    assert done == ["user", "ahead 1, first blocks", "ahead 1, blocks behind", "ahead 2", "background"]


def test_what_a_user_comes_for_is_hurried_and_done_once() -> None:
    pool, done = HeldPool(), list[str]()
    queue = DecodeQueue(pool)
    queue.submit(lambda: done.append("first"), Priority.PREFETCH, queue.turn())
    wanted = queue.submit(lambda: done.append("wanted"), Priority.PREFETCH, queue.turn())
    queue.hurry(wanted, Priority.USER)
    queue.hurry(wanted, Priority.USER)
    pool.run()
    assert done == ["wanted"]
    queue.hurry(wanted, Priority.USER)
    while pool.runs:
        pool.run()
    assert done == ["wanted", "first"]
    queue.submit(lambda: done.append("last"), Priority.BACKGROUND, queue.turn())
    pool.run()
    assert done == ["wanted", "first", "last"]


def test_it_runs_at_once_where_the_pool_does_also_from_within() -> None:
    done = list[str]()
    queue = DecodeQueue(InlineExecutor())

    def outer() -> None:
        queue.submit(lambda: done.append("inner"), Priority.PREFETCH, queue.turn())
        done.append("outer")

    queue.submit(outer, Priority.USER, queue.turn())
    assert done == ["inner", "outer"]


def test_a_closed_pool_refuses_and_what_came_before_still_runs() -> None:
    pool, done = HeldPool(), list[str]()
    queue = DecodeQueue(pool)
    queue.submit(lambda: done.append("before"), Priority.BACKGROUND, queue.turn())
    pool.is_closed = True
    with pytest.raises(RuntimeError, match="shut down"):
        queue.submit(lambda: done.append("refused"), Priority.USER, queue.turn())
    pool.run()
    assert done == ["before"]


def test_a_thread_that_took_the_refused_one_leaves_no_other_behind() -> None:
    """Before it is refused, a last thread of the pool may have come for another and taken it."""
    done = list[str]()

    class Closing(HeldPool):
        def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if self.is_closed:
                self.run()
            return super().submit(work, *args, **kwargs)

    pool = Closing()
    queue = DecodeQueue(pool)
    queue.submit(lambda: done.append("before"), Priority.PREFETCH, queue.turn())
    pool.is_closed = True
    queue.submit(lambda: done.append("late"), Priority.USER, queue.turn())
    assert done == ["late", "before"]


def test_what_was_done_is_not_kept() -> None:
    """A block's load knows its task and the task its loads: that would stay until garbage is collected."""

    class Kept:
        task: DecodeTask | None = None

    pool = HeldPool()
    queue = DecodeQueue(pool)
    kept = Kept()

    def work(kept: Kept = kept) -> None:
        assert kept.task is not None

    kept.task = queue.submit(work, Priority.PREFETCH, queue.turn())
    queue.hurry(kept.task, Priority.USER)
    gone = weakref.ref(kept)
    gc.disable()
    try:
        pool.run()
        del kept, work
        assert gone() is None
    finally:
        gc.enable()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.sampled_from(Priority)),
            st.tuples(st.just("hurry"), st.integers(0, 30)),
            st.tuples(st.just("run"), st.none()),
        ),
        max_size=60,
    )
)
def test_everything_is_done_once_and_the_most_urgent_next(course: list[tuple[str, Any]]) -> None:
    pool, done = HeldPool(), list[int]()
    queue = DecodeQueue(pool)
    tasks: list[DecodeTask] = []
    left: dict[int, Priority] = {}

    def run() -> None:
        pool.run()
        assert done[-1] == min(left, key=lambda number: (left[number], number))
        del left[done[-1]]

    for what, how in course:
        if what == "submit":
            number = len(tasks)
            left[number] = how
            tasks.append(queue.submit(lambda number=number: done.append(number), how, queue.turn()))  # type: ignore[misc]
        elif what == "hurry" and how < len(tasks):
            queue.hurry(tasks[how], Priority.USER)
            if how in left:
                left[how] = Priority.USER
        elif what == "run" and pool.runs:
            run()
    while pool.runs:
        run()
    assert sorted(done) == list(range(len(tasks)))
    assert not queue._waiting


def test_threads_do_all_of_it() -> None:
    pool, done, lock = Threads(3, name="decode"), list[int](), threading.Lock()
    queue = DecodeQueue(pool)

    def work(number: int) -> None:
        with lock:
            done.append(number)

    def submit(first: int) -> None:
        for number in range(first, 2_000, 4):
            priority = Priority(number % 3)
            task = queue.submit(lambda number=number: work(number), priority, queue.turn())  # type: ignore[misc]
            if number % 5 == 0:
                queue.hurry(task, Priority.USER)

    submitters = [threading.Thread(target=submit, args=(first,)) for first in range(4)]
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join()
    until_s = time.monotonic() + 20
    while len(done) < 2_000 and time.monotonic() < until_s:
        time.sleep(0.01)
    pool.shutdown()
    assert sorted(done) == list(range(2_000))
