"""A virtual clock, a slow store and a driver in one thread: the reading core without threads or time.

Used by tests of the fetcher's I/O half and by simulations. Nothing here waits: events happen in order of their time.
"""

import heapq
import itertools
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from fetcher.io.waiting import Wait, new_future
from tiered.errors import NotFoundError, UnansweredError

T = TypeVar("T")


class VirtualClock:
    """Time that moves only when ``run`` takes the next event. A Timer."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now_s(self) -> float:
        """The clock."""
        return self.time_s

    def call_at(self, when_s: float, callback: Callable[[], None]) -> None:
        """See Timer."""
        heapq.heappush(self._events, (max(when_s, self.time_s), next(self._numbers), callback))

    def step(self) -> bool:
        """Let the next event happen; False when there is none."""
        if not self._events:
            return False
        self.time_s, _, callback = heapq.heappop(self._events)
        callback()
        return True

    def run(self, until_s: float = float("inf")) -> None:
        """Let events happen until none is left, or none before ``until_s``, which it is then."""
        while self._events and self._events[0][0] <= until_s:
            self.step()
        if until_s != float("inf"):
            self.time_s = max(self.time_s, until_s)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Drive a coroutine of the core as an event chain."""
        done: Future[T] = new_future()
        self.call_at(self.time_s, partial(self._drive, coroutine, done))
        return done

    def _drive(self, coroutine: Coroutine[Any, Any, Any], done: Future[Any], _: object = None) -> None:
        try:
            wait: Wait[Any] = coroutine.send(None)
        except StopIteration as stop:
            done.set_result(stop.value)
        except Exception as error:
            done.set_exception(error)
        else:
            wait.future.add_done_callback(
                lambda _: self.call_at(self.time_s, partial(self._drive, coroutine, done))
            )

    def run_one(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Drive one coroutine to its end, and what it left under way no further."""
        done = self.start(coroutine)
        while not done.done():
            assert self.step(), "it waits for something that never happens"
        return done.result()


class VirtualReader:
    """RangeReader over a dict: a GET takes ``latency_s`` and its bytes at ``bytes_per_s``, by the virtual clock."""

    def __init__(
        self,
        clock: VirtualClock,
        objects: dict[str, bytes] | None = None,
        *,
        latency_s: float = 0.05,
        bytes_per_s: float = 1e12,
    ) -> None:
        self.clock = clock
        self.objects = objects if objects is not None else {}
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.gets: list[tuple[float, str, int, int]] = []
        self.failures: dict[int, Exception] = {}
        """By number of the GET, from 0."""
        self.damage: Callable[[str, int, bytes], bytes] = lambda key, offset, data: data
        self.in_flight = 0
        self.in_flight_max = 0

    def submit(self, key: str, offset: int, length: int) -> Future[bytes]:
        """See RangeReader."""
        future: Future[bytes] = new_future()
        error = self.failures.pop(len(self.gets), None)
        self.gets.append((self.clock.time_s, key, offset, length))
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        taken_s = self.latency_s + length / self.bytes_per_s
        self.clock.call_at(
            self.clock.time_s + taken_s, partial(self._answer, future, key, offset, length, error)
        )
        return future

    def submit_get(self, key: str) -> Future[bytes]:
        """See RangeReader."""
        return self.submit(key, 0, len(self.objects[key]))

    def _answer(
        self, future: Future[bytes], key: str, offset: int, length: int, error: Exception | None
    ) -> None:
        self.in_flight -= 1
        content = self.objects.get(key)
        if error is not None:
            future.set_exception(error)
        elif content is None:
            future.set_exception(NotFoundError(f"no object {key}"))
        elif offset + length > len(content):
            future.set_exception(UnansweredError(f"{key} is shorter"))
        else:
            future.set_result(self.damage(key, offset, content[offset : offset + length]))

    def close(self) -> None:
        """Nothing to close."""


class HeldPool:
    """A pool whose threads begin when the test says so."""

    def __init__(self) -> None:
        self.runs: list[Callable[[], Any]] = []
        self.is_closed = False

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.is_closed:
            raise RuntimeError("shut down")
        self.runs.append(lambda: work(*args, **kwargs))
        return new_future()

    def run(self) -> None:
        self.runs.pop(0)()
