"""The part of a queue a walk reads. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from fetcher.queries.found import ALWAYS_MS
from tiered.errors import UsageError
from tiered.timestamps import TimePoint, milliseconds

BATCH_MESSAGES = 4096
BATCH_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Span:
    """From offset ``start``, or the first message stored at or after ``since_ms``, or the queue's minimum; with
    ``until_ms`` only messages stored at or after ``since_ms`` and before it, also where times do not ascend; at most
    ``limit`` messages. Batches have at most ``batch_messages`` and ``batch_bytes``, except for a single larger
    record."""

    start: int | None = None
    since_ms: int | None = None
    limit: int | None = None
    batch_messages: int = BATCH_MESSAGES
    batch_bytes: int = BATCH_BYTES
    until_ms: int | None = None

    @property
    def range_ms(self) -> tuple[int, int] | None:
        """Store times [begin, end) of messages to find; None for all."""
        if self.since_ms is None and self.until_ms is None:
            return None
        begin_ms = ALWAYS_MS[0] if self.since_ms is None else self.since_ms
        return begin_ms, ALWAYS_MS[1] if self.until_ms is None else self.until_ms

    def __post_init__(self) -> None:
        if self.start is not None and self.since_ms is not None:
            raise UsageError("start and since exclude each other", hint="give one of them")
        for name in ("start", "limit"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"{name} {value} is negative", hint="count from 0")
        for name in ("batch_messages", "batch_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} is less than 1")


def span_of(
    start: int | None,
    since: TimePoint | None,
    until: TimePoint | None,
    limit: int | None,
    batch_messages: int | None = None,
) -> Span:
    """A span as programs give it. Raises UsageError."""
    return Span(
        start,
        None if since is None else milliseconds(since),
        limit,
        BATCH_MESSAGES if batch_messages is None else batch_messages,
        until_ms=None if until is None else milliseconds(until),
    )
