"""The sections `compaction` and `key_compaction`. All others are in sections.py."""

from __future__ import annotations

from dataclasses import dataclass

from tiered.settings.declaration import setting

MIB = 1 << 20
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@dataclass(frozen=True)
class CompactionSettings:
    """Object compaction: `tiered run`, or `tiered compact`, joins small objects to large ones."""

    every_ms: int = setting(
        HOUR_MS,
        "how often `tiered run` looks for objects to join, and for queues whose keys to compact, while it owns the "
        "archive; 0: never",
        minimum=0,
    )
    min_age_ms: int = setting(
        DAY_MS,
        "younger commits stay as they are: most truncations are of the newest part of a log",
        minimum=0,
    )
    memory_bytes: int = setting(
        128 * MIB, "memory for messages, tables of runs, reads in progress", minimum=16 * MIB
    )
    spool_bytes: int = 4096 * MIB
    """Disk for objects that are being made, of `tiered run` in its state directory: two rounds of the default memory
    and what they read."""
    bytes_per_s: int = 32 * MIB
    """Bytes a second that `tiered run` reads and sends for compaction: a quarter of it while it uploads or clients
    read, none while it is behind. It joins what a broker with 10 MB/s sends."""
    split_bytes: int = 8 * MIB
    """Messages of a queue above this size get an object of their own."""
    object_bytes: int = 128 * MIB
    """Messages of the largest object that is made."""
    requests_per_s: int = 50
    """Requests that `tiered run` makes for compaction, at most."""


KEYLESS = ("drop", "keep")


@dataclass(frozen=True)
class KeyCompactionSettings:
    """Key compaction: `tiered run`, or `tiered compact-keys`, keeps the latest message of each key of some topics."""

    from_broker: bool = setting(
        True, "compact topics with the attribute cleanup.policy=COMPACTION, unless a rule says otherwise"
    )
    min_age_ms: int = setting(
        3 * DAY_MS,
        "younger commits stay as they are: how long consumers may lag, and a log may be truncated",
        minimum=0,
    )
    keyless: str = setting("drop", "messages without KEYS: drop, as a broker does, or keep", choices=KEYLESS)
    memory_bytes: int = 256 * MIB
    """Memory for keys: about ten million of them; more are kept in a file."""
