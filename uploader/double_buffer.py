"""Double buffer: producers append to one side while the consumer drains the other.

The sides swap when the read side is empty: the lock is held for an append or a swap only. ``try_put`` refuses instead
of waiting, because the dispatch step must not block.
"""

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class DoubleBuffer(Generic[T]):
    """A bounded two-sided queue with one consumer."""

    def __init__(self, *, capacity: int) -> None:
        self._capacity = capacity
        self._write: deque[T] = deque()
        self._read: deque[T] = deque()
        self._not_empty = threading.Condition()

    def __len__(self) -> int:
        return len(self._write) + len(self._read)

    def try_put(self, request: T) -> bool:
        """Append ``request`` for the consumer. False, without waiting, if as many wait as the capacity allows."""
        with self._not_empty:
            if len(self._write) >= self._capacity:
                return False
            self._write.append(request)
            self._not_empty.notify()
            return True

    def wake(self) -> None:
        """End a wait for a request."""
        with self._not_empty:
            self._not_empty.notify()

    def wait_for_request(self, timeout_s: float) -> bool:
        """Wait until ``get`` would return a request; False when none came in time, or ``wake`` was called. For the
        consumer's thread."""
        if self._read:
            return True  # only this thread takes from the read side
        with self._not_empty:
            if not self._write:
                self._not_empty.wait(timeout_s)
            return bool(self._write)

    def get(self) -> T | None:
        """The next request in order, or None. Swaps the sides when the read side is empty."""
        if not self._read:
            with self._not_empty:
                self._write, self._read = self._read, self._write
        return self._read.popleft() if self._read else None
