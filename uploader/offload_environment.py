"""Values a writer of one archive is built from: whose archive, clock, randomness, log and callbacks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiered.catalog.state import CatalogState
from tiered.settings.sections import IndexSettings
from tiered.settings.timer_section import TimerSettings
from tiered.settings.topic_rules import TopicRules
from tiered.timestamps import wall_ms


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
    owner commits (tiered/settings/rules_in_force.py); empty: none."""

    index: IndexSettings = field(default_factory=IndexSettings)
    rules: TopicRules = field(default_factory=TopicRules)
    rules_document: Mapping[str, Any] = field(default_factory=dict)
    timers: TimerSettings = field(default_factory=TimerSettings)


@dataclass(frozen=True)
class Environment:
    """Clock, randomness, waits, log and callbacks, injected."""

    clock_ms: Callable[[], int] = wall_ms
    jitter: Callable[[], float] = random.random
    wait: Callable[[float], object] = time.sleep
    """Seconds between retries in the foreground."""
    log: Callable[[str, Mapping[str, object]], None] = lambda message, fields: None
    committed: Callable[[CatalogState], None] = lambda state: None
    """Called with every state that this writer committed messages with; must not block."""
    may_take_over: Callable[[CatalogState, int | None], bool] = lambda state, log_end_phys: False
    """Whether the owner of a state may be fenced, because it is silent while the log, which ends there, grows."""
    retires: bool = False
    """Whether the broker is retired once a backfill has committed everything."""
    archive_exists: Callable[[], None] = lambda: None
    """Called once the archive is known to have commits."""
    refuse_empty: Callable[[], None] = lambda: None
    """Called when the archive has no commits, before the first one. Raises UnavailableError if it had some before, and
    RefusedRequestError if the object store cannot keep two writers apart."""
