"""Points in time as programs and people give them: milliseconds since the epoch, datetimes, ISO 8601.

Owns reading them. Printing is in console.py.
"""

from __future__ import annotations

from datetime import UTC, datetime
from operator import index

from tiered.errors import UsageError

TimePoint = int | datetime
"""Milliseconds since the epoch, or a datetime; one without a zone is UTC."""

_EPOCH = datetime.fromtimestamp(0, UTC)


def milliseconds(time: TimePoint) -> int:
    """``time`` as ms since the epoch, rounded down. Any integer will do, such as those of a batch's arrays.

    Raises UsageError.
    """
    if not isinstance(time, datetime):
        try:
            return index(time)
        except TypeError as error:
            raise UsageError(
                f"{time!r} is no time", hint="give integer milliseconds since 1970, or a datetime"
            ) from error
    moment = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    # Whole numbers all the way: a float has no room for the milliseconds of far years.
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
            f"{text!r} is no time: use milliseconds since 1970, or 2026-11-21T07:00:00Z"
        ) from error
