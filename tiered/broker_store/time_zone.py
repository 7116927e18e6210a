"""The time zone in which the broker deletes files (deleteWhen): as its index files show, or this host's.

An index file is named after its creation in the broker's local time, just after the message whose store time begins it
(org.apache.rocketmq.store.index.IndexService).
"""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

_BEGIN = struct.Struct(">q")
_FILES_READ = 3
_QUARTER_MS = 900_000
_DELAY_MS_MAX = 60_000
"""Between the first message of an index file and its name. A file that was built again later shows no zone."""


@dataclass(frozen=True)
class BrokerZone:
    """A time zone, and where it comes from."""

    zone: timezone
    source: str

    def __str__(self) -> str:
        """``UTC+08:00, by the broker's index files``."""
        return f"{datetime.now(self.zone).tzname()}, {self.source}"


def broker_zone(store: Path) -> BrokerZone:
    """The zone of the broker whose store this is."""
    shown = _zone_of_index_files(store / "index")
    if shown is not None:
        return BrokerZone(shown, "by the broker's index files")
    here = timezone(timedelta(seconds=time.localtime().tm_gmtoff))
    return BrokerZone(
        here, "assumed to be this host's; set the environment variable TZ if the broker has another"
    )


def _zone_of_index_files(directory: Path) -> timezone | None:
    """The zone that the newest files agree on."""
    with suppress(OSError):
        names = sorted((path.name for path in directory.iterdir() if path.name.isdecimal()), reverse=True)
        offsets = {_offset_ms(directory / name) for name in names[:_FILES_READ]} - {None}
        if len(offsets) == 1:
            return timezone(timedelta(milliseconds=offsets.pop() or 0))
    return None


def _offset_ms(path: Path) -> int | None:
    """The offset from UTC in whole quarters of an hour; None if the name is not from just after the begin."""
    try:
        local = datetime.strptime(path.name[:14], "%Y%m%d%H%M%S").replace(tzinfo=UTC)
        with path.open("rb") as file:
            (begin_ms,) = _BEGIN.unpack(file.read(_BEGIN.size))
    except (ValueError, struct.error, OSError):
        return None
    difference_ms = int(local.timestamp() * 1000) + int(path.name[14:17] or 0) - begin_ms
    offset_ms = difference_ms // _QUARTER_MS * _QUARTER_MS
    is_near = difference_ms - offset_ms <= _DELAY_MS_MAX
    return offset_ms if begin_ms > 0 and is_near and abs(offset_ms) <= 14 * 4 * _QUARTER_MS else None
