"""What the proxy says of itself: its counters since the start, and a moment's view. Values only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from server.proxy.group_reads import GroupReading


@dataclass
class ProxyCounters:
    """Since the start. ``relayed`` and ``answered`` by request code, ``failed`` by what clients were told instead."""

    relayed: Counter[int] = field(default_factory=Counter)
    answered: Counter[int] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    routes: int = 0
    """Routes given out with us in them."""


@dataclass(frozen=True)
class ProxyStatus:
    """A moment's view. ``groups``: (name, members here)."""

    address: str
    connections: int
    broker_connections: int
    is_archive_open: bool
    groups: list[tuple[str, int]]
    readings: tuple[GroupReading, ...] = ()
    """What those groups read."""
