"""The status report behind /status.json, `tiered status` and the metrics. JSON names are camelCase. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import orjson

from tiered.console import camel_name, camel_names


@dataclass(frozen=True)
class QueueReport:
    """The lag of one queue; queues without lag have no report."""

    topic: str
    queue_id: int
    lag_messages: int
    lag_bytes: int
    lag_seconds: float
    """Age of the oldest message that is not archived."""


@dataclass(frozen=True)
class GroupReport:
    """A consumer group with members here: pulls that found messages, and its lag behind the end that its last replies
    named (for archived messages the archive's end)."""

    name: str
    members: int
    archive_pulls: int
    broker_pulls: int
    behind_messages: int


@dataclass(frozen=True)
class ProxyReport:
    """Proxy mode."""

    address: str
    connections: int
    broker_connections: int
    is_archive_open: bool
    groups: tuple[GroupReport, ...]


@dataclass(frozen=True)
class SlaveReport:
    """Slave mode. ``redirects``: whether the master redirects slow consumers (slaveReadEnable), None: unknown;
    ``name_servers``: (address, registration state); ``master_failure``: why the master does not answer."""

    address: str
    broker_id: int
    connections: int
    is_archive_open: bool
    is_master_available: bool
    redirects: bool | None
    name_servers: tuple[tuple[str, str], ...]
    groups: tuple[GroupReport, ...]
    master_failure: str = ""


@dataclass(frozen=True)
class StatusReport:
    """The lag of an archive behind its broker, and its problems."""

    source: str = "instance"
    """``instance``: from a running instance; ``catalog``: from the archive (and the store)."""
    state: str = ""
    archive_url: str = ""
    cluster: str = ""
    broker: str = ""
    writer: str = ""
    epoch: int = 0
    fenced: bool = False
    committed_phys: int = 0
    """The dispatch offset: physical commitlog offset up to which everything is archived."""
    bound_phys: int | None = None
    """Physical offset up to which the broker allows uploads; None if unknown."""
    bound_reason: str = ""
    lag_messages: int | None = None
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    retention_margin_seconds: float | None = None
    """Time until the broker deletes messages not archived yet; None without risk."""
    gaps: int = 0
    """Gaps recorded by this process (instance) or in the archive (catalog)."""
    errors: int = 0
    last_error: str = ""
    budget_used_bytes: int = 0
    budget_limit_bytes: int = 0
    pins: int = 0
    pin_note: str = ""
    messages: int = 0
    """Messages archived by this process (instance) or in the archive (catalog)."""
    bytes: int = 0
    queues: tuple[QueueReport, ...] = ()
    unindexed_objects: int = 0
    """Damaged data objects excluded from the message index: queries by key read them directly."""
    index_files_rebuilt: int = 0
    """Damaged index files rebuilt by this process."""
    pending_deletions: int = 0
    """Objects that `gc` has still to delete."""
    oldest_pending_deletion_seconds: float = 0.0
    """Age of the oldest pending deletion; 0 without one."""
    proxy: ProxyReport | None = None
    """None if proxy mode is off."""
    slave: SlaveReport | None = None
    """None if slave mode is off."""

    @property
    def is_up(self) -> bool:
        """Whether an instance archives or stands by. One that cannot reach its archive is not up."""
        return self.fenced or (self.epoch > 0 and self.state in ("following", "draining"))

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for orjson."""
        document: dict[str, Any] = camel_names(asdict(self))
        return document


def seconds_since(then_ms: int | None, now_ms: int) -> float:
    """Seconds since ``then_ms``; 0 for None, or after the clock was set back."""
    return 0.0 if then_ms is None else max(0, now_ms - then_ms) / 1000


def encode_report(report: StatusReport) -> bytes:
    """The /status.json body."""
    return orjson.dumps(report.to_json(), option=orjson.OPT_APPEND_NEWLINE)


def decode_report(document: dict[str, Any]) -> StatusReport:
    """The report of a /status.json body; unknown members are dropped."""
    known = _members(StatusReport, document)
    known["queues"] = tuple(QueueReport(**_members(QueueReport, queue)) for queue in known["queues"])
    if known.get("proxy") is not None:
        known["proxy"] = ProxyReport(**_with_groups(ProxyReport, known["proxy"]))
    if known.get("slave") is not None:
        slave = _with_groups(SlaveReport, known["slave"])
        slave["name_servers"] = tuple(
            (str(address), str(status)) for address, status in slave["name_servers"]
        )
        known["slave"] = SlaveReport(**slave)
    return StatusReport(**known)


def _with_groups(kind: type, document: dict[str, Any]) -> dict[str, Any]:
    known = _members(kind, document)
    known["groups"] = tuple(GroupReport(**_members(GroupReport, group)) for group in known["groups"])
    return known


def _members(kind: type, document: dict[str, Any]) -> dict[str, Any]:
    """The fields of dataclass ``kind`` that ``document`` has."""
    names = {camel_name(item.name): item.name for item in fields(kind)}
    return {names[name]: value for name, value in document.items() if name in names}
