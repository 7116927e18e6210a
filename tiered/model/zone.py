"""Time zones as users write them."""

from __future__ import annotations

import re
from datetime import timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_OFFSET = re.compile(r"([+-])(\d\d):(\d\d)")


def parse_zone(text: str) -> tzinfo:
    """A name such as ``Asia/Shanghai``, or an offset such as ``+08:00``. Raises ValueError."""
    found = _OFFSET.fullmatch(text)
    if found is not None and int(found[2]) < 24 and int(found[3]) < 60:
        offset = timedelta(hours=int(found[2]), minutes=int(found[3]))
        return timezone(-offset if found[1] == "-" else offset)
    try:
        return ZoneInfo(text)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError("use a name such as Asia/Shanghai, or an offset such as +08:00") from None
