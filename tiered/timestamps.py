"""Parses points in time: milliseconds since the epoch, datetimes, ISO 8601."""

from __future__ import annotations

from datetime import UTC, datetime
from operator import index

from tiered.errors import UsageError

TimePoint = int | datetime
"""Milliseconds since the epoch, or a datetime; without a zone it is UTC."""

_EPOCH = datetime.fromtimestamp(0, UTC)


def milliseconds(time: TimePoint) -> int:
    """``time`` as ms since the epoch, rounded down. Accepts any integer type, such as numpy's.

    Raises UsageError.
    """
    if not isinstance(time, datetime):
        try:
            return index(time)
        except TypeError as error:
            raise UsageError(
                f"{time} is not a time", hint="use integer milliseconds since 1970, or a datetime"
            ) from error
    moment = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    # Integers: a float has no room for the milliseconds of far years.
    delta = moment - _EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1000 + delta.microseconds // 1000


def parse_instant(text: str) -> int:
    """Milliseconds since the epoch of ``1795227708020`` or ``2026-11-21T07:00:00.5Z``; without a zone it is UTC.

    Raises UsageError.
    """
    text = text.strip()
    try:
        if text.lstrip("-").isdecimal():
            return int(text)
        return milliseconds(datetime.fromisoformat(text))
    except ValueError as error:
        raise UsageError(
            f"{text or '(empty)'} is not a time: use milliseconds since 1970, or 2026-11-21T07:00:00Z"
        ) from error
