"""Values an uploader reports: a snapshot while it runs, and the result of a run."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiered.archive.task import TaskStatus
from tiered.broker_store.pins import PinStatus
from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.console import counted, duration_text, names_text, size_text
from tiered.settings.sections import IndexSettings, TimerSettings
from tiered.settings.topic_rules import TopicRules
from uploader.cycle_upload import UploadCounters


@dataclass(kw_only=True)
class OffloadResult(UploadCounters):
    """Counts of one run; offsets are physical."""

    from_phys: int
    to_phys: int
    hidden: int
    shown_again: int
    missing: int
    duration_s: float
    excluded: tuple[str, ...] = ()
    """Topics that topics.include and topics.exclude exclude, if the log has messages of them."""
    excluded_before: tuple[str, ...] = ()
    """Topics that are selected now, and are not archived because earlier starts excluded them."""
    damaged_tables: tuple[str, ...] = ()
    """The broker's tables that could not be read, each with the reason."""


@dataclass(frozen=True)
class OffloadStatus:
    """A snapshot for status, metrics and progress; sizes in bytes, offsets physical."""

    committed_phys: int
    read_phys: int
    bound_phys: int
    written_phys: int
    """Where the log ends, as far as is known; at least ``bound_phys``, up to where it may be archived."""
    epoch: int
    memory_used_bytes: int
    memory_budget_bytes: int
    last_error: str
    pins: PinStatus | None
    bound_reason: str
    counters: UploadCounters
    catalog: CatalogState
    index: TaskStatus | None = None
    """Index building."""
    index_files_rebuilt: int = 0
    """Damaged index files rebuilt by this process."""
    excluded: tuple[str, ...] = ()
    """Topics that topics.include and topics.exclude exclude, if messages of them were read."""
    damaged_tables: tuple[str, ...] = ()
    """The broker's tables that could not be read, each with the reason."""
    store_problem: str = ""
    """Why uploads or commits are being retried; empty if none is."""


DAMAGED_TABLES = "DAMAGED tables of the broker NOT archived (an earlier copy in the archive stays current)"


def outcome_text(outcome: OffloadResult) -> str:
    """What a backfill did, as the line that the command prints: ``1,000 messages, 1.0 MiB as 200.0 KiB in 3 objects,
    1.2s (850.0 KiB/s)``, followed by what an operator must know of gaps, damage and hidden queues."""
    rate = outcome.raw_bytes / outcome.duration_s if outcome.duration_s > 0 else 0.0
    parts = [
        f"{counted(outcome.messages, 'message')}, {size_text(outcome.raw_bytes)} as {size_text(outcome.stored_bytes)}"
        f" in {counted(outcome.objects, 'object')}, {duration_text(outcome.duration_s)} ({size_text(rate)}/s)"
    ]
    if outcome.commits == 0 and outcome.messages == 0:
        parts = [f"nothing to do, everything up to physical offset {outcome.to_phys:,} is archived"]
    for count, what, result in (
        (outcome.hidden, "queue", "hidden (deleted at the broker)"),
        (outcome.shown_again, "hidden queue", "shown again (the broker has it)"),
        (outcome.missing, "queue", "MISSING at the broker, whose table has the topic: archived all the same"),
        (outcome.gaps, "gap", "recorded"),
        (outcome.damaged, "DAMAGED range", "of the commitlog skipped"),
        (outcome.lost, "range", "of the commitlog MISSING"),
        (
            outcome.set_aside,
            "message",
            "SET ASIDE, which the broker's queue does not have (it used offsets again)",
        ),
    ):
        if count:
            parts.append(f"{counted(count, what)} {result}")
    if outcome.damaged_tables:
        parts.append(f"{DAMAGED_TABLES}: {'; '.join(outcome.damaged_tables)}")
    if outcome.excluded:
        parts.append(f"topics excluded by topics.include and topics.exclude: {names_text(outcome.excluded)}")
    if outcome.excluded_before:
        parts.append(
            f"topics NOT archived, because an earlier start excluded them: {names_text(outcome.excluded_before)}; to "
            "archive what the broker still has of them, use --include and another archive URL"
        )
    return "; ".join(parts)


@dataclass(frozen=True)
class OffloadIdentity:
    """The archive, and its writer. ``kind``: "run" or "backfill"."""

    cluster: str
    broker: str
    instance: str
    kind: str


@dataclass(frozen=True)
class ObjectOptions:
    """Which index files are built, and which runs share objects. ``rules_document``: the rules in force, which the
    owner commits (tiered/settings/rules_in_force.py); empty: none. ``is_encrypted``: a copy of each object that is
    being uploaded is in memory, encrypted."""

    index: IndexSettings = field(default_factory=IndexSettings)
    rules: TopicRules = field(default_factory=TopicRules)
    rules_document: Mapping[str, Any] = field(default_factory=dict)
    timers: TimerSettings = field(default_factory=TimerSettings)
    is_encrypted: bool = False


@dataclass(frozen=True)
class Environment:
    """Clock, randomness, waits and callbacks, injected."""

    clock: Clock = MACHINE_CLOCK
    jitter: Callable[[], float] = random.random
    wait: Callable[[float], object] = time.sleep
    """Seconds between retries in the foreground."""
    committed: Callable[[CatalogState], None] = lambda state: None
    """Called with every state that this writer committed messages with; must not block."""
    may_take_over: Callable[[CatalogState, int | None], bool] = lambda state, log_end_phys: False
    """Whether the archive may be taken from the owner that a state names: it archives nothing while the log grows,
    which ends at the given offset (None: unknown)."""
    retires: bool = False
    """Whether the broker is retired once a backfill has committed everything."""
    archive_exists: Callable[[], None] = lambda: None
    """Called once the archive is known to have commits."""
    claimed: Callable[[], None] = lambda: None
    """Called once this is the archive's only writer, before it uploads; again if it raises."""
    refuse_empty: Callable[[], None] = lambda: None
    """Called when the archive has no commits, before the first one. Raises UnavailableError if it had some before, and
    RefusedRequestError if the object store cannot keep two writers apart."""
