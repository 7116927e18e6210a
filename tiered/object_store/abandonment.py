"""Giving up requests that other threads wait for: an attempt of which one PUT failed waits for none of the others.

    abandonment = Abandonment()
    with abandonable(abandonment):      # in each thread that puts
        store.put_if_absent(…)
    abandonment.give_up()               # from any thread: their connections are closed, they end with an error

Owns who is told. A store that can end a request early registers how (s3_transport.py); others just finish.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar


class Abandonment:
    """Of any number of requests, in any threads. Cannot be taken back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_given_up = False
        self._running: dict[object, Callable[[], None]] = {}

    def begin(self, request: object, end: Callable[[], None]) -> None:
        """``end`` makes ``request`` fail soon; it is called at most once, by another thread.

        Raises TimeoutError when all was given up before.
        """
        with self._lock:
            if self._is_given_up:
                raise TimeoutError("given up")
            self._running[request] = end

    def finish(self, request: object) -> None:
        """``request`` is over; unknown ones are fine."""
        with self._lock:
            self._running.pop(request, None)

    def give_up(self) -> None:
        """End all that runs and whatever begins later. Does not wait for it."""
        with self._lock:
            self._is_given_up = True
            for end in self._running.values():
                with suppress(Exception):  # it has just ended by itself, or ends at its deadline
                    end()
            self._running.clear()


_current: ContextVar[Abandonment | None] = ContextVar("_current", default=None)


@contextmanager
def abandonable(abandonment: Abandonment | None) -> Iterator[None]:
    """Requests of this thread inside the block end when ``abandonment`` is given up; with None, they do not."""
    token = _current.set(abandonment)
    try:
        yield
    finally:
        _current.reset(token)


def current_abandonment() -> Abandonment | None:
    """What the requests of this thread end with."""
    return _current.get()
