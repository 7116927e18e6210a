"""What a slave says of itself: its counters since the start, and a moment's view. Values only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from server.proxy.group_reads import GroupReading
from server.slave.pull_redirect import RedirectCounters
from server.slave.registrar import NameServerStatus


@dataclass
class SlaveCounters:
    """Since the start. ``answered``, ``relayed`` by request code, ``failed`` by what clients were told instead;
    ``commits_dropped``: offsets that came while the master was away."""

    answered: Counter[int] = field(default_factory=Counter)
    relayed: Counter[int] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    commits_dropped: int = 0
    pulls: RedirectCounters = field(default_factory=RedirectCounters)


@dataclass(frozen=True)
class SlaveStatus:
    """A moment's view. ``redirects``: whether the master sends slow consumers here; None: it does not tell.
    ``master_failure``: why it does not answer, as far as is known."""

    address: str
    broker_id: int
    connections: int
    is_archive_open: bool
    is_master_well: bool
    redirects: bool | None
    standings: tuple[NameServerStatus, ...]
    readings: tuple[GroupReading, ...] = ()
    master_failure: str = ""
