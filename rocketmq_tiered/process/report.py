"""The status report behind /status.json, `tiered status` and the metrics. JSON names are camelCase. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import orjson

from rocketmq_tiered.maintenance.task_figures import CompactionStatus, KeyCompactionStatus, ScrubStatus
from rocketmq_tiered.sending.timer_status import TimerStatus
from rocketmq_tiered.server.proxy.relay_status import ProxyStatus, SlaveStatus
from tiered.archive.task import TaskStatus
from tiered.archive.unreadable import UnreadableRange
from tiered.broker_store.retention import SHORT_S_MAX
from tiered.catalog.hidden_history import hidden_since
from tiered.catalog.repeated_offsets import set_aside_messages
from tiered.catalog.state import CatalogState
from tiered.console import camel_name, camel_names
from tiered.settings.sections import GcSettings

T = TypeVar("T")
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
    """The words of findings.py, or of a catalog: `owned`, `no writer`."""
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
    clock_off_seconds: float = 0.0
    """How far in the future the oldest message that is not archived was stored; ``lag_seconds`` is then unknown."""
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
    set_aside_messages: int = 0
    """Messages that no queue of the broker has, as it used their offsets again: not archived."""
    new_gaps: int = 0
    """Gaps recorded by this process."""
    excluded: tuple[str, ...] = ()
    """Topics that topics.include and topics.exclude exclude, if this process has read messages of them."""
    damaged_tables: tuple[str, ...] = ()
    """The broker's tables that cannot be read, each with the reason."""
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
    """Figures of the compaction task. None if compaction.every_ms is 0, or if the report is made from a catalog."""
    key_compaction: KeyCompactionStatus | None = None
    timers: TimerStatus | None = None
    """None if this process delivers none."""
    scrub: ScrubStatus | None = None
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


def catalog_figures(state: CatalogState, now_ms: int, gc: GcSettings) -> dict[str, Any]:
    """The members of a status report that the catalog state of an archive tells, by name; ``now_ms`` for ages, ``gc``
    for grace periods."""
    garbage_ms = state.oldest_garbage_ms
    return {
        "gaps": len(state.gaps),
        "set_aside_messages": set_aside_messages(state),
        "unindexed_objects": len(state.unindexed),
        "pending_deletions": state.pending_deletion_count,
        "oldest_pending_deletion_seconds": seconds_since(state.oldest_pending_deletion_ms, now_ms),
        "garbage_overdue_seconds": seconds_since(
            None if garbage_ms is None else garbage_ms + gc.grace_ms, now_ms
        ),
        "diverged_objects": state.diverged_count,
        "hidden_messages": hidden_since(state, now_ms - gc.diverged_grace_ms),
    }


def seconds_since(then_ms: int | None, now_ms: int) -> float:
    """Seconds since ``then_ms``; 0 for None, or after the clock was set back."""
    return 0.0 if then_ms is None else max(0, now_ms - then_ms) / 1000


def encode_report(report: StatusReport) -> bytes:
    """The /status.json body."""
    return orjson.dumps(report.to_json(), option=orjson.OPT_APPEND_NEWLINE)


def decode_report(document: Mapping[str, Any]) -> StatusReport:
    """The report of a /status.json body; unknown members are dropped."""
    return _decoded(StatusReport, document)


def _decoded(dataclass_type: type[T], document: Mapping[str, Any]) -> T:
    """A ``dataclass_type`` from the JSON object that it was encoded to. Members that it has not are ignored; those that
    the object lacks get their default."""
    hints = get_type_hints(dataclass_type)
    json_names = {name: camel_name(name) for name in hints}
    return dataclass_type(
        **{
            name: _value(hints[name], document[json_name])
            for name, json_name in json_names.items()
            if json_name in document
        }
    )


def _value(hint: Any, value: Any) -> Any:
    """``value``, as JSON has it, as a value of the type ``hint``: JSON objects become dataclasses, lists become
    tuples."""
    if isinstance(hint, UnionType):  # such as ScrubStatus | None
        return None if value is None else _value(get_args(hint)[0], value)
    if get_origin(hint) is tuple:
        member, *_ = get_args(hint)
        return tuple(_value(member, item) for item in value)
    return _decoded(hint, value) if is_dataclass(hint) and isinstance(hint, type) else value
