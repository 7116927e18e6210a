"""Estimates when the broker deletes unarchived files, always on the early side. Pure.

The broker deletes a file older than fileReservedTime at the hour deleteWhen or when disk usage exceeds
diskMaxUsedSpaceRatio; regardless of age when it exceeds diskSpaceCleanForciblyRatio. It never deletes the last file.
Pins are not considered. Source: org.apache.rocketmq.store.DefaultMessageStore.CleanCommitLogService.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import NamedTuple

from tiered.broker_store.commit_log import LogFile
from tiered.broker_store.conf import BrokerConf

_HOUR_MS = 3_600_000
SHORT_S_MIN, SHORT_S_MAX = 600.0, 6 * 3600.0
"""A retention margin below the first is always short, one above the second never."""


FORESEEN_TIMES = 36
"""A rate is taken to last for so many times the time over which it was measured: six hours, if it was ten minutes."""


class Growth(NamedTuple):
    """How fast the used part of the disk grows: by ``bytes_per_s``, measured over ``seconds``."""

    bytes_per_s: float
    seconds: float


@dataclass(frozen=True)
class DiskUse:
    """Disk usage as the broker computes it: share used (0 to 1), capacity in bytes, and growth over some times."""

    used_ratio: float
    capacity_bytes: int
    growth: Sequence[Growth] = ()


@dataclass(frozen=True)
class DeletionMargin:
    """``seconds`` until the oldest file with unarchived records may be deleted; None: not foreseeable."""

    seconds: float | None
    file: LogFile | None
    why: str


def deletion_margin(
    files: Sequence[tuple[LogFile, int]],
    archived_phys: int,
    conf: BrokerConf,
    disk: DiskUse,
    *,
    now_ms: int,
    zone: tzinfo = UTC,
) -> DeletionMargin:
    """When the broker may delete the first commitlog file with records that are not archived, and why: at the hour of
    ``deleteWhen`` after it is old enough, or when the disk is full. ``files``: the broker's files with the time of
    their last change in ms, oldest first; ``archived_phys``: everything below is archived; ``zone``: the broker's time
    zone."""
    at_risk = next(((file, mtime) for file, mtime in files[:-1] if file.end_phys > archived_phys), None)
    if at_risk is None:
        return DeletionMargin(None, None, "all files except the last are archived")
    file, mtime_ms = at_risk
    if disk.used_ratio > disk_limit(conf):
        return DeletionMargin(0.0, file, "the disk is so full that the broker deletes files of any age")
    due_ms = max(now_ms, mtime_ms + conf.file_reserved_hours * _HOUR_MS)
    why = f"the file's age: fileReservedTime={conf.file_reserved_hours}"
    if disk.used_ratio <= conf.disk_max_used_ratio:
        due_ms = _next_deletion_hour_ms(due_ms, conf.delete_when_hours, zone)
    seconds = (due_ms - now_ms) / 1000
    room_bytes = (disk_limit(conf) - disk.used_ratio) * disk.capacity_bytes
    for growth in disk.growth:
        until_full = room_bytes / growth.bytes_per_s
        if until_full < min(seconds, FORESEEN_TIMES * growth.seconds):
            seconds, why = until_full, "the disk fills up until the broker deletes regardless of age"
    return DeletionMargin(seconds, file, why)


def short_margin_s(conf: BrokerConf) -> float:
    """The seconds below which a retention margin is short: half of the time that the broker keeps its files, but at
    least SHORT_S_MIN and at most SHORT_S_MAX."""
    return min(SHORT_S_MAX, max(SHORT_S_MIN, conf.file_reserved_hours * 1800.0))


def disk_limit(conf: BrokerConf) -> float:
    """Share of the disk above which the broker deletes files regardless of age."""
    return min(conf.disk_clean_forcibly_ratio, conf.disk_warning_ratio)


def _next_deletion_hour_ms(from_ms: int, hours: Sequence[int], zone: tzinfo) -> int:
    """``from_ms`` if its hour of the day in ``zone`` is one of ``hours`` (or if there are none), else the beginning of
    the next such hour; in ms since the epoch."""
    moment = datetime.fromtimestamp(from_ms / 1000, zone)
    if not hours or moment.hour in hours:
        return from_ms
    start = moment.replace(minute=0, second=0, microsecond=0)
    later = (start + timedelta(hours=step) for step in range(1, 25))
    return int(next(at for at in later if at.hour in hours).timestamp() * 1000)
