"""Cancels requests of other threads: after one PUT of an attempt failed, the others end at once.

    abandonment = Abandonment()
    with abandonable(abandonment):      # in each thread that puts
        store.put_if_absent(…)
    abandonment.cancel()               # from any thread: closes the connections, the requests fail

A store that can cancel requests registers how (s3_transport.py); requests of others complete.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar


class Abandonment:
    """Cancellation of any number of requests in any threads. Final."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._running: dict[object, Callable[[], None]] = {}

    def begin(self, request: object, end: Callable[[], None]) -> None:
        """Called before ``request`` is sent. ``cancel`` then calls ``end``, which ends the request, from another
        thread, at most once. Raises TimeoutError if ``cancel`` was called before."""
        with self._lock:
            if self._is_cancelled:
                raise TimeoutError("the request was cancelled before it was sent")
            self._running[request] = end

    def finish(self, request: object) -> None:
        """``request`` has ended; unknown ones are ignored."""
        with self._lock:
            self._running.pop(request, None)

    def cancel(self) -> None:
        """Cancel all requests that were begun and have not ended, and all later ones. Does not wait for their end."""
        with self._lock:
            self._is_cancelled = True
            for end in self._running.values():
                with suppress(Exception):  # it has just ended, or ends at its deadline
                    end()
            self._running.clear()


_current: ContextVar[Abandonment | None] = ContextVar("_current", default=None)


@contextmanager
def abandonable(abandonment: Abandonment | None) -> Iterator[None]:
    """Requests of this thread inside the block are cancelled with ``abandonment``; None: they are not."""
    token = _current.set(abandonment)
    try:
        yield
    finally:
        _current.reset(token)


def current_abandonment() -> Abandonment | None:
    """The abandonment of this thread's requests."""
    return _current.get()
