"""Counters and status values of proxy and slave mode. The status values are also members of the status report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class RelayCounters:
    """Since the start. ``answered`` and ``relayed`` by request code, ``failed`` by outcome (relay_rules.Failure)."""

    answered: Counter[int] = field(default_factory=Counter)
    relayed: Counter[int] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class GroupReading:
    """One group: members, pulls that found messages by source, and its lag behind the end that its last replies named
    (for archived messages the archive's end)."""

    name: str
    members: int
    archive_pulls: int
    broker_pulls: int
    behind_messages: int


@dataclass(frozen=True)
class RelayStatus:
    """Current state. ``address``: advertised; ``groups``: groups with members here, and their reads;
    ``has_plain_accounts``: clients on other hosts sign requests on connections without TLS."""

    address: str
    connections: int
    is_archive_open: bool
    groups: tuple[GroupReading, ...]
    has_plain_accounts: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class ProxyStatus(RelayStatus):
    """``broker_connections``: open connections to the broker, made for clients. ``name_server_problem``: why no name
    server answers; empty if one does."""

    broker_connections: int
    name_server_problem: str = ""


@dataclass(frozen=True)
class SlaveStatus(RelayStatus):
    """``redirects``: whether the master sends slow consumers here (slaveReadEnable); None: unknown.
    ``name_servers``: (address, registration state); ``master_failure``: why the master is unavailable, if known."""

    broker_id: int
    is_master_available: bool
    redirects: bool | None
    name_servers: tuple[tuple[str, str], ...]
    master_failure: str = ""
