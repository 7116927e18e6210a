"""Signals and other events that reach the main thread: a queue of them, and SIGHUP before the service handles it."""

import contextlib
import os
import queue
import select
import signal
import threading
from typing import Generic, TypeVar


class EarlySighup:
    """The handler before the service's own; counts as received once called."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self, *_: object) -> None:
        """Note the signal."""
        self.received = True


def catch_sighup() -> None:
    """Install the early handler. Main thread only."""
    signal.signal(signal.SIGHUP, EarlySighup())


def was_received(replaced: object) -> bool:
    """Whether the handler that was replaced has received SIGHUP."""
    return isinstance(replaced, EarlySighup) and replaced.received


T = TypeVar("T")


class EventQueue(Generic[T]):
    """Many senders, one receiver: the main thread."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._readable = select.poll()  # unlike select(), for descriptors above 1023 as well
        self._readable.register(self._read_fd, select.POLLIN)
        self._wakes_on_signals = False
        self._closing = threading.RLock()  # a signal handler may send while its thread does

    def wake_on_signals(self) -> None:
        """Let signals end a wait. Main thread only."""
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._wakes_on_signals = True

    def put(self, event: T) -> None:
        """Send; from any thread or signal handler. Never waits. Once the queue is closed, this does nothing."""
        self._events.put(event)
        with self._closing, contextlib.suppress(BlockingIOError):  # a full pipe wakes the receiver as well
            if self._write_fd >= 0:
                os.write(self._write_fd, b"\0")

    def get(self, timeout_s: float | None = None) -> T | None:
        """The next event, or None when none came within ``timeout_s``; None waits without limit."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._events.get_nowait()
            if not self._readable.poll(None if timeout_s is None else timeout_s * 1000):
                return None
            with contextlib.suppress(BlockingIOError):  # a byte may be of an event taken before
                os.read(self._read_fd, 4096)

    def close(self) -> None:
        """Release the pipe. A sender that has seen its event taken must not write to a file of the same number."""
        if self._wakes_on_signals:
            signal.set_wakeup_fd(-1)
        with self._closing:
            os.close(self._read_fd)
            os.close(self._write_fd)
            self._write_fd = -1
