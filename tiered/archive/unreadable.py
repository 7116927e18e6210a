"""Archived messages that cannot be read because their object is missing or damaged: what a process has found so far.

Readers of objects note it here, and take it back when the offsets can be read again. Does not read.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tiered.errors import CorruptionError
from tiered.model.queue import QueueKey

RANGES_MAX = 1000
"""So many ranges are kept; further ones are not noted."""


@dataclass(frozen=True, order=True)
class UnreadableRange:
    """Offsets [begin, end) of a queue, and the object that should hold them."""

    topic: str
    queue_id: int
    generation: int
    begin: int
    end: int
    object_key: str
    why: str
    """The error of the read."""
    min_phys: int = -1
    """Physical commitlog offset of the first of them, or one before it; -1: unknown."""

    @property
    def name(self) -> str:
        """Queue and offsets, in messages."""
        generation = f" generation {self.generation}" if self.generation else ""
        return f"{self.topic} queue {self.queue_id}{generation}: offsets {self.begin} to {self.end - 1}"

    @property
    def text(self) -> str:
        """The range and why it cannot be read, in one line."""
        return f"{self.name} cannot be read: {self.why}"


class UnreadableRanges:
    """The ranges of archived messages that this process has found unreadable. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[QueueKey, int], UnreadableRange] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self, found: UnreadableRange) -> None:
        """Note that the range ``found`` cannot be read."""
        queue = QueueKey(found.topic, found.queue_id, found.generation)
        with self._lock:
            if len(self._found) < RANGES_MAX:
                self._found[queue, found.begin] = found

    def forget_read(self, queue: QueueKey, begin: int, end: int) -> None:
        """Forget the ranges of ``queue`` that begin at an offset in [begin, end): these offsets were read."""
        with self._lock:
            for noted_queue, first in [*self._found]:
                if noted_queue == queue and begin <= first < end:
                    del self._found[noted_queue, first]

    def ranges(self) -> tuple[UnreadableRange, ...]:
        """All of them, by queue and offset."""
        with self._lock:
            return tuple(sorted(self._found.values()))


class UnreadableMessagesError(CorruptionError):
    """Messages at the offset of a read are unreadable. ``range``: all offsets that the damage makes unreadable."""

    range: UnreadableRange

    @classmethod
    def of(cls, found: UnreadableRange) -> UnreadableMessagesError:
        """The error that reports ``found``."""
        error = cls(found.text, hint="tiered verify ARCHIVE_URL --full lists all damaged objects")
        error.range = found
        return error
