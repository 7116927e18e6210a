"""What the decode pool does next: by example with a pool that runs on demand, and as a property of any course.

Batches: rows, records and buffers over several pieces.
"""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.blocks.decode_queue import DecodeQueue, DecodeTask
from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import InlineExecutor, Threads
from fetcher.rows.message import EMPTY_BATCH, MessageBatch, joined_batch
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


def batch_of(rows: list[tuple[int, int, int]], pieces: list[bytes], first: int = 0) -> MessageBatch:
    """``rows``: (piece, start, size)."""
    count = len(rows)
    offsets = np.arange(first, first + count)
    piece, starts, sizes = (
        np.array([row[at] for row in rows], kind) for at, kind in enumerate((np.int32, np.int64, np.int32))
    )
    ones = np.ones(count, np.int32)
    return MessageBatch(
        [np.frombuffer(data, np.uint8) for data in pieces],
        piece,
        starts,
        sizes,
        offsets,
        ones,
        offsets * 100,
        offsets * 7,
        offsets + 1000,
    )


ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 90), st.integers(1, 10)), max_size=12)
PIECES = [bytes(range(100)), bytes(range(100, 200)), bytes(reversed(range(100)))]


@given(rows=ROWS)
def test_buffers_are_the_records_back_to_back(rows: list[tuple[int, int, int]]) -> None:
    batch = batch_of(rows, PIECES)
    records = [PIECES[piece][start : start + size] for piece, start, size in rows]
    assert list(map(bytes, batch.records())) == records
    assert [bytes(batch.record(row)) for row in range(len(batch))] == records
    assert b"".join(batch.buffers()) == b"".join(records)
    assert batch.record_bytes == sum(map(len, records))


def test_neighbours_share_a_buffer() -> None:
    batch = batch_of([(0, 0, 5), (0, 5, 5), (0, 20, 5), (1, 25, 5)], PIECES)
    assert list(map(len, batch.buffers())) == [10, 5, 5]


@given(
    pieces=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4),
    data=st.data(),
)
def test_buffers_of_records_that_fill_their_pieces(pieces: list[list[int]], data: st.DataObject) -> None:
    before, after = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    content = [bytes(range(10 * at, 10 * at + sum(sizes))) for at, sizes in enumerate(pieces)]
    rows = [
        (at, sum(sizes[:row]) + (before if at == 0 else 0), size)
        for at, sizes in enumerate(pieces)
        for row, size in enumerate(sizes)
    ]
    content[0] = bytes(before) + content[0]
    content[-1] += bytes(after)
    batch = batch_of(rows, content)
    batch.is_dense = True
    assert b"".join(batch.buffers()) == b"".join(batch.records())
    assert len(batch.buffers()) == len(pieces)
    assert batch.record_bytes == sum(map(sum, pieces))


@given(first=ROWS, second=ROWS, data=st.data())
def test_joined_and_taken_are_what_lists_would_be(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    parts = [batch_of(first, PIECES), EMPTY_BATCH, batch_of(second, PIECES[::-1], first=len(first))]
    joined = joined_batch(parts)
    records = [bytes(record) for part in parts for record in part.records()]
    assert list(map(bytes, joined.records())) == records
    assert joined.queue_offsets.tolist() == list(range(len(records)))
    chosen = sorted(data.draw(st.sets(st.integers(0, max(0, len(records) - 1)), max_size=len(records))))
    taken = joined.select(np.array(chosen, np.intp))
    assert list(map(bytes, taken.records())) == [records[row] for row in chosen]
    assert taken.phys.tolist() == [int(joined.phys[row]) for row in chosen]


def test_an_empty_batch_is_empty() -> None:
    assert len(EMPTY_BATCH) == 0 and EMPTY_BATCH.buffers() == [] and EMPTY_BATCH.record_bytes == 0
    assert joined_batch([]) is EMPTY_BATCH
    assert repr(EMPTY_BATCH) == "MessageBatch(empty)"


def test_memoryviews_are_pieces_too() -> None:
    batch = batch_of([(0, 1, 3)], PIECES)
    batch.pieces = [memoryview(b"abcdef")]
    assert bytes(batch.record(0)) == b"bcd"
