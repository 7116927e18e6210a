"""Parses points in time: milliseconds since the epoch, datetimes, ISO 8601, and times before now."""

import re
from datetime import UTC, datetime, timedelta
from operator import index
from time import time_ns

from tiered.errors import UsageError
from tiered.model.dates import PLAUSIBLE_MS

TimePoint = int | datetime
"""Milliseconds since the epoch, or a datetime; without a zone it is UTC."""

RELATIVE = re.compile(r"-(?P<count>\d{1,9})(?P<unit>[smhdw])")
"""Seconds, minutes, hours, days or weeks before now."""
_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_EPOCH = datetime.fromtimestamp(0, UTC)
_FORMS = "use milliseconds since 1970, 2026-11-21T07:00:00Z, 2026-11-21, or -1h"


def milliseconds(time: TimePoint) -> int:
    """``time``, an integer of any type or a datetime, as ms since the epoch, rounded down.

    Raises UsageError for anything else, and for an integer that is a time in seconds.
    """
    if not isinstance(time, datetime):
        try:
            found = index(time)
            return _plausible(found) if found * 1000 in PLAUSIBLE_MS else found
        except TypeError as error:
            raise UsageError(
                f"{time!r} is not a time", hint="use integer milliseconds since 1970, or a datetime"
            ) from error
    moment = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    # Integers: a float has no room for the milliseconds of far years.
    delta = moment - _EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1000 + delta.microseconds // 1000


def parse_instant(text: str) -> int:
    """Milliseconds since the epoch of ``1795227708020``, ``2026-11-21T07:00:00.5Z`` (without a zone it is UTC),
    ``2026-11-21`` or ``20261121``, or ``-90m``, which is 90 minutes ago.

    An integer is 0 or within 2000 to 2099, so that seconds are not taken for a time in 1970. Raises UsageError.
    """
    text = text.strip()
    if ago := RELATIVE.fullmatch(text):
        return wall_ms() - int(ago["count"]) * _UNIT_MS[ago["unit"]]
    if re.fullmatch(r"-?\d+", text, re.ASCII) and len(text) != len("20261121"):
        return _plausible(int(text))
    try:
        return milliseconds(datetime.fromisoformat(text))
    except ValueError as error:
        raise UsageError(f"{text or '(empty)'} is not a time: {_FORMS}") from error


def _plausible(time_ms: int) -> int:
    """``time_ms`` if it is 0 or a time of the years 2000 to 2099. Raises UsageError otherwise, as the number may be in
    seconds; the message says which time it would be."""
    if time_ms == 0 or time_ms in PLAUSIBLE_MS:
        return time_ms
    readings = [f"{time_ms} milliseconds since 1970 is {_moment(time_ms)}, which is implausible"]
    if time_ms * 1000 in PLAUSIBLE_MS:
        readings.append(f"in seconds it is {_moment(time_ms * 1000)}, so use {time_ms}000")
    else:
        readings.append(_FORMS)
    raise UsageError(": ".join(readings))


def _moment(time_ms: int) -> str:
    try:
        return (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="seconds").replace("+00:00", "Z")
    except OverflowError:
        return "outside the years 1 to 9999"


def wall_ms() -> int:
    """Now, ms since the epoch."""
    return time_ns() // 1_000_000
