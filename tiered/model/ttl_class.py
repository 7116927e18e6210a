"""TTL classes: messages whose time to live is similar share objects, so that an object's messages expire together.

A class is a number of days; FOREVER_CLASS holds what never expires or stays longer than every class. Expiry never
depends on classes: they only decide how much space a dead message occupies until its object is deleted.
"""

from __future__ import annotations

from typing import Final

TTL_CLASS_DAYS: Final = (1, 3, 7, 14, 30, 90, 365)
FOREVER_CLASS: Final = 0
"""Also the class of objects from before there were classes."""
_DAY_MS: Final = 86_400_000


def ttl_class(ttl_ms: int | None) -> int:
    """The smallest class that is not shorter than a time to live; None: forever."""
    if ttl_ms is None:
        return FOREVER_CLASS
    return next((days for days in TTL_CLASS_DAYS if ttl_ms <= days * _DAY_MS), FOREVER_CLASS)
