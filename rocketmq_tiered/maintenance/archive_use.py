"""Measures what an archive stores, by kind of object and topic, and what it wrote lately, from one listing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tiered.formats.keys import (
    CATALOG_PREFIX,
    DATA_PREFIX,
    INDEX_PREFIX,
    PAGES_PREFIX,
    SETS_PREFIX,
    STATE_PREFIX,
    TIMER_PREFIX,
    parse_data_key,
)
from tiered.object_store.interface import ObjectInfo

DAY_MS = 86_400_000
WINDOW_DAYS = 7.0
YOUNG_DAYS = 1 / 24
"""A younger archive has no rate: its first burst is none."""

KINDS = {
    DATA_PREFIX: "data of one queue",
    SETS_PREFIX: "data of many queues",
    CATALOG_PREFIX: "commits",
    PAGES_PREFIX: "catalog pages",
    INDEX_PREFIX: "message index",
    STATE_PREFIX: "broker tables and group offsets",
    TIMER_PREFIX: "timers",
}
OTHER = "others"


@dataclass
class Use:
    """Objects, their bytes, and the PUTs that made them."""

    objects: int = 0
    bytes: int = 0
    puts: int = 0

    def add(self, size_bytes: int, puts: int) -> None:
        """Count one object."""
        self.objects += 1
        self.bytes += size_bytes
        self.puts += puts


@dataclass
class ArchiveUse:
    """What is stored, and what was written during the last ``observed_days``, by prefix. ``topics``: objects with data
    of one queue only. Objects that were written and deleted in that time are not known."""

    stored: dict[str, Use] = field(default_factory=dict)
    written: dict[str, Use] = field(default_factory=dict)
    topics: dict[str, Use] = field(default_factory=dict)
    observed_days: float = WINDOW_DAYS

    @property
    def is_young(self) -> bool:
        """Whether rates say nothing yet."""
        return self.observed_days < YOUNG_DAYS

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(use.bytes for use in self.stored.values())

    @property
    def stored_objects(self) -> int:
        """All of them."""
        return sum(use.objects for use in self.stored.values())

    @property
    def bytes_a_day(self) -> float:
        """Bytes of all objects written."""
        return sum(use.bytes for use in self.written.values()) / self.observed_days

    @property
    def puts_a_day(self) -> float:
        """PUTs of all objects written."""
        return sum(use.puts for use in self.written.values()) / self.observed_days

    @property
    def commits_a_day(self) -> float:
        """Commits written."""
        return self.written.get(CATALOG_PREFIX, Use()).objects / self.observed_days


@dataclass(frozen=True)
class PartSizes:
    """The size from which objects are uploaded in parts, and the size of a part."""

    threshold_bytes: int
    part_bytes: int

    def puts(self, size_bytes: int) -> int:
        """PUTs of one object: in parts, also the start and the end."""
        return 1 if size_bytes <= self.threshold_bytes else 2 + -(-size_bytes // self.part_bytes)


def measure(listing: Iterable[ObjectInfo], now_ms: int, parts: PartSizes) -> ArchiveUse:
    """Sum up ``listing``, all objects of one archive. ``now_ms``: by the store's clock."""
    use = ArchiveUse()
    since_ms = now_ms - WINDOW_DAYS * DAY_MS
    oldest_ms = now_ms
    for info in listing:
        prefix = info.key.partition("/")[0] + "/"
        kind = prefix if prefix in KINDS else ""
        puts = parts.puts(info.size_bytes)
        use.stored.setdefault(kind, Use()).add(info.size_bytes, puts)
        oldest_ms = min(oldest_ms, info.modified_ms)
        if info.modified_ms >= since_ms:
            use.written.setdefault(kind, Use()).add(info.size_bytes, puts)
        if kind == DATA_PREFIX and (parsed := parse_data_key(info.key)) is not None:
            name = info.key.split("/")[2] if parsed.topic is None else parsed.topic
            use.topics.setdefault(name, Use()).add(info.size_bytes, puts)
    use.observed_days = min(WINDOW_DAYS, max(1, now_ms - oldest_ms) / DAY_MS)
    return use
