"""Counters and status values that proxy and slave mode share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from server.proxy.group_reads import GroupReading


@dataclass
class RelayCounters:
    """Since the start. ``answered`` and ``relayed`` by request code, ``failed`` by outcome (relay_rules.Failure)."""

    answered: Counter[int] = field(default_factory=Counter)
    relayed: Counter[int] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class RelayStatus:
    """Current state. ``address``: advertised; ``groups``: groups with members here, and their reads."""

    address: str
    connections: int
    is_archive_open: bool
    groups: tuple[GroupReading, ...]
