"""The order of work in the decode pool: by priority, then in the order of the requests.

Concurrent GETs arrive in any order and few threads decode them. In order of arrival, a reader would wait for its next
block until later ones and other readers' prefetched ones are decoded. Does not own the threads.
"""

import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import Executor


@dataclass(eq=False, slots=True)
class DecodeTask:
    """One piece of work that waits for a thread. ``work`` is None once taken: what it refers to may refer to this."""

    work: Callable[[], None] | None
    turn: int


class DecodeQueue:
    """Runs decode work in ``pool``, the most urgent first. Thread-safe. Each submission lets the pool run the work
    that is then first, not the one that was submitted."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._waiting: list[tuple[Priority, int, int, DecodeTask]] = []  # what was hurried is here twice
        self._left = 0
        self._turns = itertools.count()
        self._entries = itertools.count()

    def turn(self) -> int:
        """A place in the order, taken when bytes are requested, as they arrive later and out of order."""
        return next(self._turns)

    def submit(self, work: Callable[[], None], priority: Priority, turn: int) -> DecodeTask:
        """Let a thread of the pool run ``work``: of the tasks that wait, the one with the highest priority runs first,
        and of equal ones the one with the lowest ``turn``. Raises RuntimeError, and does not run it, if the pool is
        shut down."""
        task = DecodeTask(work, turn)
        with self._lock:
            self._left += 1
            self._push(task, priority)
        try:
            self._pool.submit(self._run_first)
        except RuntimeError:
            with self._lock:
                was_taken = task.work is None
                if not was_taken:
                    self._take(task)
            if not was_taken:
                raise
            self._run_first()  # another submission's thread took this task: run one in its place, or none would be
        return task

    def hurry(self, task: DecodeTask, priority: Priority) -> None:
        """A reader of a faster ``priority`` waits for ``task``."""
        with self._lock:
            if task.work is not None:
                self._push(task, priority)

    def _push(self, task: DecodeTask, priority: Priority) -> None:
        heapq.heappush(self._waiting, (priority, task.turn, next(self._entries), task))

    def _take(self, task: DecodeTask) -> Callable[[], None] | None:
        work, task.work = task.work, None
        self._left -= work is not None
        if self._left == 0:
            self._waiting.clear()
        return work

    def _run_first(self) -> None:
        with self._lock:
            work = None
            while work is None:
                work = self._take(heapq.heappop(self._waiting)[-1])
        work()
