"""The margin: how long until the broker deletes commitlog that is not archived yet.

Pure. The broker deletes whole files, oldest first: expired ones (by the file's modification time) at its
cleaning hours, and any once its disk is fuller than its limit. Source:
DefaultMessageStore.CleanCommitLogService.
"""

from __future__ import annotations

from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True)
class Retention:
    """What the broker's configuration says about deleting."""

    reserved_s: float
    disk_max_used_ratio: float


@dataclass(frozen=True)
class DiskUse:
    """The file system of the commitlog; ``growth_bytes_per_s`` is how fast the commitlog grows, None if
    unknown."""

    used_bytes: int
    total_bytes: int
    growth_bytes_per_s: float | None


def margin_seconds(
    retention: Retention,
    disk: DiskUse,
    *,
    unarchived_file_age_s: float | None,
    bytes_before_unarchived: int,
) -> float | None:
    """Seconds until the first file with unarchived records may go; None when nothing is unarchived.

    ``unarchived_file_age_s``: age of that file by modification time. ``bytes_before_unarchived``: size of
    the older files, which the broker deletes first when its disk is too full.
    """
    if unarchived_file_age_s is None:
        return None
    by_age_s = max(0.0, retention.reserved_s - unarchived_file_age_s)
    if not disk.growth_bytes_per_s or disk.growth_bytes_per_s <= 0:
        return by_age_s
    room_bytes = disk.total_bytes * retention.disk_max_used_ratio - disk.used_bytes
    by_disk_s = max(0.0, room_bytes + bytes_before_unarchived) / disk.growth_bytes_per_s
    return min(by_age_s, by_disk_s)
