"""The section `compaction`. All others are in sections.py."""

from __future__ import annotations

from dataclasses import dataclass

from tiered.settings.declaration import setting

MIB = 1 << 20
DAY_MS = 24 * 3_600_000


@dataclass(frozen=True)
class CompactionSettings:
    """Object compaction: `tiered compact` joins small objects to large ones."""

    min_age_ms: int = setting(
        DAY_MS,
        "younger commits stay as they are: a truncated log is followed back to a commit, not into a joined object",
        minimum=0,
    )
    memory_bytes: int = setting(128 * MIB, "messages in memory at a time", minimum=16 * MIB)
    spool_bytes: int = setting(4096 * MIB, "disk for objects that are being made", minimum=256 * MIB)
    split_bytes: int = 8 * MIB
    """Messages of a queue above this size get an object of their own."""
    object_bytes: int = 128 * MIB
    """Messages of the largest object that is made."""
