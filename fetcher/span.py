"""Where a walk over a queue begins and how far it goes.

Pure values. Does not own reading (archive.py, async_archive.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from tiered.errors import UsageError
from tiered.timestamps import TimePoint, milliseconds

BATCH_MESSAGES = 4096
BATCH_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Span:
    """From ``start_offset``, or from the first message stored at or after ``start_ms``, or from the queue's minimum;
    at most ``count`` messages. Batches have at most ``batch_messages`` and ``batch_bytes`` but for a larger record."""

    start_offset: int | None = None
    start_ms: int | None = None
    count: int | None = None
    batch_messages: int = BATCH_MESSAGES
    batch_bytes: int = BATCH_BYTES

    def __post_init__(self) -> None:
        if self.start_offset is not None and self.start_ms is not None:
            raise UsageError("a walk begins at an offset or at a time, not at both")
        for name in ("start_offset", "count"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"{name} {value} is negative", hint="count from 0")
        for name in ("batch_messages", "batch_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} is less than 1")


def span_of(
    start: int | None, start_time: TimePoint | None, count: int | None, batch_messages: int | None
) -> Span:
    """A span as programs give it. Raises UsageError."""
    start_ms = None if start_time is None else milliseconds(start_time)
    return Span(start, start_ms, count, BATCH_MESSAGES if batch_messages is None else batch_messages)
