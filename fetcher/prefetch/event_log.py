"""A bounded log of fetcher events, for analysing slow readers. Does not own metrics."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple


class EventKind(StrEnum):
    """What happened. ``value`` is in parentheses."""

    WINDOW = "window"
    """The window of a reader changed (new size, offsets); ``detail`` says why."""
    WAIT = "wait"
    """A pull waited for the object store (seconds)."""
    FETCH = "fetch"
    """A prefetch ended (raw bytes of blocks); ``detail`` is the offset range."""
    EXPIRED = "expired"
    """Prefetched blocks expired unread (raw bytes)."""
    FAILED = "failed"
    """A prefetch failed (offsets); ``detail`` is the error."""


class Event(NamedTuple):
    """One event of the reader ``group`` of a queue. ``time_s``: the fetcher's clock."""

    time_s: float
    kind: EventKind
    group: str
    topic: str
    queue_id: int
    value: float
    detail: str


class EventLog:
    """The last ``capacity`` events. Thread-safe."""

    def __init__(self, capacity: int = 4096, *, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._events: deque[Event] = deque(maxlen=capacity)
        self._lock = threading.Lock()
        self.recorded = 0

    def __repr__(self) -> str:
        return f"EventLog({len(self._events)} of {self.recorded} events)"

    def add(self, kind: EventKind, reader: tuple[str, str, int], value: float, detail: str = "") -> None:
        """Record one; ``reader`` is (group, topic, queue id)."""
        event = Event(self._clock_s(), kind, *reader, value, detail)
        with self._lock:
            self._events.append(event)
            self.recorded += 1

    def events(self, kind: EventKind | None = None, group: str | None = None) -> list[Event]:
        """The events still in memory, oldest first."""
        with self._lock:
            found = list(self._events)
        return [event for event in found if kind in (None, event.kind) and group in (None, event.group)]
