"""Key compaction queue by queue, as a task of `tiered run` and `tiered compact-keys`, and its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rocketmq_tiered.maintenance.compaction_job import limits_of
from rocketmq_tiered.maintenance.compaction_round import PlannedRound, run_round
from rocketmq_tiered.maintenance.key_queues import KeyedQueue, keyed_queues, page_ranges
from rocketmq_tiered.maintenance.key_rounds import (
    KeyFigures,
    KeyPass,
    passes_of,
    planned_key_rounds,
    read_queue,
)
from rocketmq_tiered.maintenance.key_status import KeyCompactionStatus
from tiered.archive.rewrite.outputs import Rewrite, rewrite
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.task import KEY_COMPACTION, Due, TaskStatus
from tiered.catalog.garbage import settled_version
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.pages import RunIndex
from tiered.catalog.requirements import histories_of
from tiered.catalog.state import CatalogState
from tiered.console import camel_names, counted, size_text
from tiered.errors import UnavailableError
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import Settings

FIRST_AFTER_S = 1200.0
"""After the start: later than the first round of object compaction."""
CHANGED_MAX = 5
"""Rounds in a row without effect, because another actor has changed the archive."""
MAP_SHARE = 2
"""Part of the memory that the map of keys takes."""
IsKeyed = Callable[[str], bool]


@dataclass(frozen=True)
class KeyCompactionReport:
    """``figures``: of all queues with something new; ``kept`` are what stays. ``rounds``: that were committed."""

    is_applied: bool
    figures: KeyFigures
    rounds: int = 0

    def document(self) -> dict[str, Any]:
        """As `--json` prints it."""
        found: dict[str, Any] = camel_names(asdict(self.figures))
        return found | {"rounds": self.rounds, "applied": self.is_applied}

    def lines(self, title: str) -> list[str]:
        """For people."""
        own = self.figures
        if not own.queues:
            return [f"{title}: nothing to compact"]
        verb = "compacted" if self.is_applied else "dry run, add --apply to compact:"
        return [
            f"{title}: {verb} {counted(own.queues, 'queue')}, {counted(own.keys, 'key')}",
            f"messages: {own.messages:,} before, {own.new_messages:,} after; "
            f"bytes: {size_text(own.bytes)} before, {size_text(own.new_bytes)} after",
            f"deleted keys: {own.tombstones:,}; messages without a key dropped: {own.keyless:,}",
        ]


class KeyCompaction:
    """Queue after queue until none has anything new, as a task. ``is_due`` chooses among those that have. ``options``
    and ``write`` as for object compaction."""

    name = KEY_COMPACTION
    problem = ""

    def __init__(
        self,
        maintenance: MaintenanceCommit,
        settings: Settings,
        options: RewriteOptions,
        rules: Callable[[CatalogState], IsKeyed],
        *,
        is_due: Callable[[KeyedQueue], bool] = lambda one: True,
        write: Rewrite = rewrite,
    ) -> None:
        self._maintenance, self._settings, self._options = maintenance, settings, options
        self._store, self._rules, self._is_due, self._write = maintenance.store, rules, is_due, write
        self.due = Due(every_s=settings.key_compaction.every_ms / 1000 or None, first_s=FIRST_AFTER_S)
        self.backlog = KeyFigures()
        """Queues that are due, and their new bytes."""
        self.figures = KeyFigures()
        self.rounds = 0
        self._pass: KeyPass | None = None
        self._done: set[QueueKey] = set()
        self._seen: dict[QueueKey, int] = {}
        """Cuts up to which queues were read: where nothing was dropped, runs stay as they are."""
        self._before_version = self._changed = 0

    def plan(self, state: CatalogState) -> PlannedRound | None:
        """The next round; reads the messages of queues that were not read yet. Raises what reading them raises."""
        while True:
            if self._pass is None:
                self._pass = self._read(state)
            if self._pass is None:
                self._done.clear()
                return None
            rounds = planned_key_rounds(
                RunIndex(self._store), state, self._pass, limits_of(self._settings),
                before_version=self._before_version,
            )  # fmt: skip
            planned = next(rounds, None)
            if planned is not None:
                return planned
            self.figures += self._pass.figures
            self._pass = None

    def step(self, state: CatalogState, planned: PlannedRound) -> bool:
        """Carry it out. Raises UnavailableError after some rounds without effect."""
        result = run_round(
            self._store, state, planned, self._options, clock=self._store.clock_ms, write=self._write,
            maintenance=self._maintenance,
        )  # fmt: skip
        self._changed = self._changed + 1 if result is None else 0
        if self._changed == CHANGED_MAX:
            self._changed, self._pass = 0, None
            raise UnavailableError(
                "the archive's pages change faster than keys are compacted", hint="try later"
            )
        if result is not None and self._pass is not None:
            self._pass.made |= set(result.object_keys)
            self.rounds += 1
        return True

    def forecast(self, state: CatalogState) -> KeyFigures:
        """What `plan` and `step` would do to all queues."""
        while (found := self._read(state)) is not None:
            self.figures += found.figures
        return self.figures

    def status(self, of_loop: TaskStatus) -> KeyCompactionStatus:
        """``of_loop`` with what this task counts; from any thread."""
        done, backlog = self.figures, self.backlog
        return KeyCompactionStatus(
            **vars(of_loop), rounds=self.rounds, keys=done.keys, read_messages=done.messages,
            kept_messages=done.new_messages, read_bytes=done.bytes, kept_bytes=done.new_bytes,
            spooled_bytes=done.spooled_bytes, backlog_queues=backlog.queues, backlog_bytes=backlog.bytes,
        )  # fmt: skip

    def _read(self, state: CatalogState) -> KeyPass | None:
        """What stays of the next queues, or None."""
        own = self._settings.key_compaction
        before_ms = self._store.clock_ms() - own.min_age_ms
        self._before_version = settled_version(self._store, state.version, before_ms) + 1
        limits = limits_of(self._settings)
        queues = keyed_queues(
            RunIndex(self._store), state, self._rules(state),
            before_version=self._before_version, runs_max=limits.runs_max,
        )  # fmt: skip
        queues = [replace(one, seen=self._seen.get(one.queue, 0)) for one in queues]
        due = [one for one in queues if one.queue not in self._done and one.new_bytes and self._is_due(one)]
        self.backlog = KeyFigures(queues=len(due), bytes=sum(one.new_bytes for one in due))
        part = next(passes_of(due, own.memory_bytes // 4), None)
        if part is None:
            return None
        filled = any(one.is_filled for one in part)
        is_one = filled and len(page_ranges(state, self._before_version, limits.runs_max)) == 1
        found = KeyPass(histories_of(state), in_one_round=is_one)
        for one in part:
            self._done.add(one.queue)
            self._seen[one.queue] = one.cut
            read_queue(
                self._store, one, found, self._options.spool_directory, own.memory_bytes // MAP_SHARE,
                keeps_keyless=own.keyless == "keep", keeps_tombstones=one.is_filled and not is_one,
            )  # fmt: skip
        return found


def is_mostly_new(one: KeyedQueue) -> bool:
    """Whether `tiered run` compacts the queue: at least half as much is new as an earlier round left."""
    return 2 * one.new_bytes >= one.old_bytes


def compact_keys(
    store: ObjectStore, state: CatalogState, settings: Settings, options: RewriteOptions, is_keyed: IsKeyed,
    *, apply: bool,
) -> KeyCompactionReport:  # fmt: skip
    """One pass from ``state`` on, or what it would do. Raises as ``KeyCompaction``."""
    maintenance = MaintenanceCommit.opened(store, state, "compact-keys", store.clock_ms)
    task = KeyCompaction(maintenance, settings, options, lambda _: is_keyed)
    if not apply:
        return KeyCompactionReport(False, task.forecast(state))
    while (planned := task.plan(maintenance.refresh())) is not None:
        task.step(maintenance.state, planned)
    return KeyCompactionReport(True, task.figures, task.rounds)
