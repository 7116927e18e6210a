"""The status report behind /status.json, `tiered status` and the metrics. JSON names are camelCase. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import orjson

from rocketmq_tiered.maintenance.compaction_status import CompactionStatus
from rocketmq_tiered.maintenance.key_status import KeyCompactionStatus
from rocketmq_tiered.maintenance.scrub_status import ScrubStatus
from rocketmq_tiered.sending.timer_status import TimerStatus
from rocketmq_tiered.server.proxy.relay_status import GroupReading, ProxyStatus, SlaveStatus
from tiered.archive.task import TaskStatus
from tiered.archive.unreadable import UnreadableRange
from tiered.broker_store.retention import SHORT_S_MAX
from tiered.console import camel_name, camel_names

OLD_S = 5.0


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
class StatusReport:
    """The lag of an archive behind its broker, and its problems."""

    source: str = "instance"
    """``instance``: from a running instance; ``catalog``: from the archive (and the store)."""
    state: str = ""
    """The words of run_state.py, or of a catalog: `owned`, `no writer`."""
    why: str = ""
    """The cause of ``state``."""
    step: str = ""
    """The next step of a state that is a trouble."""
    archive_url: str = ""
    cluster: str = ""
    broker: str = ""
    writer: str = ""
    epoch: int = 0
    committed_phys: int = 0
    """The dispatch offset: physical commitlog offset up to which everything is archived."""
    bound_phys: int | None = None
    """Physical offset up to which the broker allows uploads; None if unknown."""
    bound_reason: str = ""
    lag_messages: int | None = None
    is_lag_estimated: bool = False
    """Whether ``lag_messages`` and ``queues`` are estimates from the first part of a long lag."""
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    measured_seconds: float = 0.0
    """Age of these figures. A running instance measures the lag of many queues less often than once a second."""
    retention_margin_seconds: float | None = None
    """Time until the broker deletes messages not archived yet; None without risk."""
    deletion_zone: str = ""
    """The time zone in which the broker deletes files, and where it comes from."""
    short_retention_margin_seconds: float = SHORT_S_MAX
    """Below it the retention margin is short."""
    gaps: int = 0
    """Gaps of the archive."""
    new_gaps: int = 0
    """Gaps recorded by this process."""
    excluded: tuple[str, ...] = ()
    """Topics that topics.include and topics.exclude exclude, if this process has read messages of them."""
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
    unreadable: tuple[UnreadableRange, ...] = ()
    """Archived messages that this process could not read, as their object is missing or damaged."""
    broker_min_phys: int | None = None
    """First physical offset of the broker's log; None if unknown."""
    index_files_rebuilt: int = 0
    """Damaged index files rebuilt by this process."""
    store_problem: str = ""
    """Why the object store blocks the archive: uploads or commits are being retried; empty if none is."""
    broker_address: str = ""
    broker_problem: str = ""
    """Why the broker, which runs, reports no offsets, so that uploads wait; empty if it does."""
    pending_deletions: int = 0
    """Objects that `gc` has still to delete."""
    oldest_pending_deletion_seconds: float = 0.0
    """Age of the oldest pending deletion; 0 without one."""
    garbage_overdue_seconds: float = 0.0
    """How long the oldest garbage is past its grace period."""
    gc_interval_seconds: float = 0.0
    """How often garbage should be collected."""
    tasks: tuple[TaskStatus, ...] = ()
    """Expiry, garbage collection, compaction, index building, as far as this process does them."""
    settings_problem: str = ""
    """Why changed settings are not in effect; empty if they are."""
    diverged_objects: int = 0
    """Objects of a truncated or replaced log that `gc` deletes after gc.diverged_grace_ms."""
    hidden_messages: int = 0
    """Messages that log histories begun within gc.diverged_grace_ms have hidden."""
    compaction: CompactionStatus | None = None
    """Its task, with figures. None if compaction.every_ms is 0, or from a catalog."""
    key_compaction: KeyCompactionStatus | None = None
    timers: TimerStatus | None = None
    """None if this process delivers none."""
    scrub: ScrubStatus | None = None
    commits_a_day: int | None = None
    """With the next three: growth at the rate of the newest commits (catalog), or of this process's commits of the last
    hour (instance); None if unknown."""
    objects_a_day: int | None = None
    catalog_bytes_a_day: int | None = None
    compacted_objects_a_day: int | None = None
    """Objects that `compact` joins those of a day to, about."""
    proxy: ProxyStatus | None = None
    """None if proxy mode is off."""
    slave: SlaveStatus | None = None
    """None if slave mode is off."""

    def task(self, name: str) -> TaskStatus:
        """The task of this name; an empty status if this process does not do it."""
        return next((task for task in self.tasks if task.name == name), TaskStatus(name))

    @property
    def is_old(self) -> bool:
        """Whether figures are shown with their age."""
        return self.measured_seconds > OLD_S

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
    known["excluded"] = tuple(known.get("excluded", ()))
    known["unreadable"] = tuple(
        UnreadableRange(**_members(UnreadableRange, found)) for found in known.get("unreadable", ())
    )
    known["tasks"] = tuple(TaskStatus(**_members(TaskStatus, task)) for task in known.get("tasks", ()))
    if known.get("compaction") is not None:
        known["compaction"] = CompactionStatus(**_members(CompactionStatus, known["compaction"]))
    if (keys := known.get("key_compaction")) is not None:
        known["key_compaction"] = KeyCompactionStatus(**_members(KeyCompactionStatus, keys))
    if (timers := known.get("timers")) is not None:
        known["timers"] = TimerStatus(**_members(TimerStatus, timers))
    if known.get("scrub") is not None:
        known["scrub"] = ScrubStatus(**_members(ScrubStatus, known["scrub"]))
    for name, kind in (("proxy", ProxyStatus), ("slave", SlaveStatus)):
        if known.get(name) is not None:
            mode = known[name] = _members(kind, known[name])
            mode["groups"] = tuple(GroupReading(**_members(GroupReading, group)) for group in mode["groups"])
            if "name_servers" in mode:
                mode["name_servers"] = tuple(
                    (str(address), str(state)) for address, state in mode["name_servers"]
                )
            known[name] = kind(**mode)
    return StatusReport(**known)


def _members(kind: type, document: dict[str, Any]) -> dict[str, Any]:
    """The fields of dataclass ``kind`` that ``document`` has."""
    names = {camel_name(item.name): item.name for item in fields(kind)}
    return {names[name]: value for name, value in document.items() if name in names}
