"""Sizes and durations as users write them: ``32MiB``, ``5s``, ``7d``, ``forever``. Pure."""

import re
from typing import Final

SIZE_UNITS: Final = {
    "": 1,
    "b": 1,
    "k": 1024,
    "kib": 1024,
    "m": 1024**2,
    "mib": 1024**2,
    "g": 1024**3,
    "gib": 1024**3,
    "t": 1024**4,
    "tib": 1024**4,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}
TIME_UNITS_MS: Final = {
    "": 1,
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}
TIME_MS_MAX: Final = 100 * 366 * 86_400_000
"""A century: the system's clocks and waits overflow at about three."""
WHOLE_MAX: Final = 1 << 53
"""Larger integers are not exact in metrics."""
FOREVER: Final = "forever"
_QUANTITY = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*\Z")


class BadValueError(ValueError):
    """An invalid value. The text is the hint to the user."""


def whole_amount(text: str, units: dict[str, int]) -> int | None:
    """The amount in the smallest of ``units``; None if it is not a number with one of them, or not whole."""
    match = _QUANTITY.match(text)
    if match is None or match[2].lower() not in units:
        return None
    amount = float(match[1].replace("_", "")) * units[match[2].lower()]
    return int(amount) if amount.is_integer() else None  # also when too large for a float


def duration_ms(text: str) -> int | None:
    """The milliseconds of a time to live such as ``7d``; None for ``forever``. Raises BadValueError for any other text,
    also for a number without a unit."""
    wanted = text.strip().lower()
    if wanted == FOREVER:
        return None
    amount = whole_amount(wanted, TIME_UNITS_MS)
    if amount is None or wanted.isdecimal() or not 0 < amount <= TIME_MS_MAX:
        raise BadValueError('use a time with its unit, such as "12h" or "7d", or "forever"')
    return amount


def written_duration(milliseconds: int | None, gap: str = "") -> str:
    """``milliseconds`` as text in the largest unit that gives a whole number, such as ``7d``; ``forever`` for None.
    ``gap``: text between number and unit. Without one, ``duration_ms`` parses the text."""
    if milliseconds is None:
        return FOREVER
    for unit in ("d", "h", "m", "s"):
        if milliseconds % TIME_UNITS_MS[unit] == 0:
            return f"{milliseconds // TIME_UNITS_MS[unit]}{gap}{unit}"
    return f"{milliseconds}{gap}ms"


def byte_count(value: object) -> int | None:
    """A size in bytes, a number or text; None if it is neither, or not positive."""
    if isinstance(value, str):
        value = whole_amount(value, SIZE_UNITS)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= WHOLE_MAX:
        return None
    return value
