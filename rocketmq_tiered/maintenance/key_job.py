"""Key compaction queue by queue, as a task of `tiered run` and `tiered compact-keys`, and its report."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rocketmq_tiered.maintenance.compaction_job import limits_of
from rocketmq_tiered.maintenance.compaction_round import PlannedRound, run_round
from rocketmq_tiered.maintenance.key_rounds import (
    COMPACTED,
    KeyedQueue,
    KeyFigures,
    KeyPass,
    Waiting,
    keyed_queues,
    page_ranges,
    parts_of,
    planned_key_rounds,
    read_queues,
)
from rocketmq_tiered.maintenance.task_figures import KeyCompactionStatus
from tiered.archive.kept_offsets import KeptOffsets
from tiered.archive.rewrite.outputs import Rewrite, rewrite
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.task import KEY_COMPACTION, Due, TaskStatus
from tiered.catalog.garbage import settled_version
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.pages import RunIndex
from tiered.catalog.requirements import histories_of
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.console import camel_names, counted, names_text, size_text, time_text
from tiered.errors import UnavailableError
from tiered.formats.keys import catalog_key
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import Settings

FIRST_AFTER_S = 1200.0
"""After the start: later than the first round of object compaction."""
CHANGED_MAX = 5
"""Rounds in a row without effect, because another actor has changed the archive."""
MAP_SHARE = 2
"""Part of the memory that the map of keys takes."""
TIMES_MAX = 100
"""Commits whose times are looked up for a report."""
READ, WRITTEN = "keys read", "rewritten"
Report = Callable[[str, int, int], None]
"""What is done: READ or WRITTEN, and how many of all message bytes."""
IsKeyed = Callable[[str], bool]
ReadQueues = Callable[[Sequence[KeyedQueue], KeyPass], None]
"""Adds what stays of queues to a pass."""


@dataclass(frozen=True)
class KeyCompactionReport:
    """``figures``: of all queues with something new; ``kept`` are what stays. ``rounds``: that were committed."""

    is_applied: bool
    figures: KeyFigures
    rounds: int = 0
    waiting: tuple[tuple[Waiting, int | None], ...] = ()
    """Queues of which nothing was compacted, and when more of them is old enough (ms)."""

    def document(self) -> dict[str, Any]:
        """The report as the JSON that ``--json`` prints; ``waiting`` has the queues of which nothing was compacted."""
        document: dict[str, Any] = camel_names(asdict(self.figures))
        waiting = [
            {**camel_names(queue.queue._asdict()), "reason": queue.reason, "fromMs": from_ms}
            for queue, from_ms in self.waiting
        ]
        return document | {"rounds": self.rounds, "applied": self.is_applied, "waiting": waiting}

    def lines(self, title: str) -> list[str]:
        """The report as lines to print: what key compaction dropped, or would with ``--apply``, and why other queues
        wait."""
        own = self.figures
        if not own.queues:
            return [f"{title}: nothing to compact", *self._reasons()]
        verb = "compacted" if self.is_applied else "dry run, add --apply to compact:"
        if own.new_messages == own.messages:
            verb = "nothing is dropped from"
        return [
            f"{title}: {verb} {counted(own.queues, 'queue')}, {counted(own.keys, 'key')}",
            f"messages: {own.messages:,} before, {own.new_messages:,} after; "
            f"bytes: {size_text(own.bytes)} before, {size_text(own.new_bytes)} after",
            f"deleted keys: {own.tombstones:,}; messages without a key dropped: {own.keyless:,}",
            *self._reasons(),
        ]

    def _reasons(self) -> list[str]:
        """One line for each reason why nothing of a queue was compacted, with the names of these queues."""
        names: dict[str, list[str]] = {}
        for one, from_ms in self.waiting:
            reason = one.reason if from_ms is None else f"{one.reason}; next at {time_text(from_ms)}"
            names.setdefault(reason, []).append(f"{one.queue.topic}/{one.queue.queue_id}")
        return [f"not compacted: {names_text(some)}: {reason}" for reason, some in names.items()]


class KeyCompaction:
    """Queue after queue until none has anything new, as a task: passes over the archive, each of rounds, which replace
    the messages of some queues by one commit."""

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
        report: Report = lambda what, done, total: None,
        read: ReadQueues | None = None,
    ) -> None:
        """Read nothing yet. ``rules`` returns which topics' keys are compacted, at a state of the catalog; ``is_due``
        chooses among the queues that have something new. ``write`` writes the new objects as ``options`` say, and
        ``read`` reads queues, in other processes if a caller has these. ``report`` gets the progress: READ or WRITTEN,
        bytes done, bytes in all."""
        self._report, self._read_bytes = report, 0
        self._read_queues = read or self._read_here
        self._maintenance, self._settings, self._options = maintenance, settings, options
        self._store, self._rules, self._is_due, self._write = maintenance.store, rules, is_due, write
        self.due = Due(every_s=settings.compaction.every_ms / 1000 or None, first_s=FIRST_AFTER_S)
        self.backlog = KeyFigures()
        """Queues that are due, and their new bytes."""
        self.figures = KeyFigures()
        """Figures of all queues that were compacted since the start."""
        self.rounds = 0
        """Rounds that were committed since the start."""
        self.waiting: list[Waiting] = []
        """Queues of which nothing is compacted now."""
        self._pass: KeyPass | None = None
        """What was read of the queues whose rounds are being carried out."""
        self._done: set[QueueKey] = set()
        """Queues that were read in this pass over the archive."""
        self._seen: dict[QueueKey, int] = {}
        """Offsets up to which queues were read: where nothing was dropped below, messages are not read again."""
        self._with_tombstones: set[QueueKey] = set()
        """Queues where a row of an emptied run stays: without its tombstone a deleted key would have a value again."""
        self._before_version = self._changed = 0

    def plan(self, state: CatalogState) -> PlannedRound | None:
        """The next round, which drops messages of queues that were read; if there is none, read the keys of the next
        queues. None if no queue has anything new to compact. Raises what reading messages raises."""
        while True:
            if self._pass is None:
                self._pass = self._read(state)
            if self._pass is None:
                self._done.clear()
                self._with_tombstones.clear()
                return None
            rounds = planned_key_rounds(
                RunIndex(self._store),
                state,
                self._pass,
                limits_of(self._settings, state.settings),
                before_version=self._before_version,
            )
            planned = next(rounds, None)
            # A round would leave the last message of an emptied run, perhaps an older value of a deleted key: read
            # these queues again, and let their tombstones (messages that delete a key) stay.
            if self._pass.doubtful:
                self._with_tombstones |= self._pass.doubtful
                self._done -= self._pass.queues
                self._seen = {
                    queue: cut for queue, cut in self._seen.items() if queue not in self._pass.queues
                }
                self._pass = None
                continue
            if planned is not None:
                return planned
            self.figures += self._pass.figures
            self._pass = None

    def step(self, state: CatalogState, planned: PlannedRound) -> bool:
        """Carry out the round ``planned``. Raises UnavailableError after CHANGED_MAX rounds in a row without effect,
        because other commits were faster."""
        moved = planned.message_bytes
        options = replace(self._options, report=lambda done: self._report(WRITTEN, done, moved))
        result = run_round(
            self._store,
            state,
            planned,
            options,
            clock=Clock(wall_ms=self._store.clock_ms),
            write=self._write,
            maintenance=self._maintenance,
        )
        self._changed = self._changed + 1 if result is None else 0
        if self._changed == CHANGED_MAX:
            self._changed, self._pass = 0, None
            raise UnavailableError(
                f"{self._store.url}: the archive changes faster than its keys are compacted",
                hint="run tiered compact-keys again later",
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
        """The status of the task: what the loop that runs it knows (``of_loop``), and what it counts itself. May be
        called from any thread."""
        done, backlog = self.figures, self.backlog
        return KeyCompactionStatus(
            **vars(of_loop),
            rounds=self.rounds,
            keys=done.keys,
            read_messages=done.messages,
            kept_messages=done.new_messages,
            read_bytes=done.bytes,
            kept_bytes=done.new_bytes,
            spooled_bytes=done.spooled_bytes,
            backlog_queues=backlog.queues,
            backlog_bytes=backlog.bytes,
        )

    def _read(self, state: CatalogState) -> KeyPass | None:
        """Read the keys of the next queues that are due, as many as fit into memory. Returns which of their messages
        stay; None if no queue is due. Notes how much is due, and why other queues wait."""
        own = self._settings.key_compaction
        before_ms = self._store.clock_ms() - own.min_age_ms
        self._before_version = settled_version(self._store, state.version, before_ms) + 1
        limits = limits_of(self._settings, state.settings)
        keyed = keyed_queues(
            RunIndex(self._store),
            state,
            self._rules(state),
            before_version=self._before_version,
            runs_max=limits.runs_max,
        )
        left = [one for one in keyed if one.queue not in self._done]
        queues = [
            replace(one, seen=self._seen.get(one.queue, 0)) for one in left if isinstance(one, KeyedQueue)
        ]
        self.waiting = [one for one in left if isinstance(one, Waiting)]
        self.waiting += [Waiting(one.queue, COMPACTED) for one in queues if not one.new_bytes]
        due = [one for one in queues if one.new_bytes and self._is_due(one)]
        self.backlog = KeyFigures(queues=len(due), bytes=sum(one.new_bytes for one in due))
        next_queues = next(
            parts_of(due, (KeptOffsets.bytes_of(one.begin, one.cut) for one in due), own.memory_bytes // 4),
            None,
        )
        if next_queues is None:
            return None
        # Where older messages were archived later, a tombstone may be dropped only in the round that drops all older
        # messages of its key: only if one round has all pages.
        is_filled = any(one.is_filled for one in next_queues)
        is_one = is_filled and len(page_ranges(state, self._before_version, limits.runs_max)) == 1
        total = self._read_bytes + sum(one.new_bytes + one.old_bytes for one in due)

        def report(size_bytes: int) -> None:
            self._read_bytes += size_bytes
            self._report(READ, self._read_bytes, total)

        read = KeyPass(
            histories_of(state),
            frozenset(one.queue for one in next_queues),
            in_one_round=is_one,
            report=report,
            with_tombstones=self._with_tombstones,
        )
        self._done |= read.queues
        self._seen |= {one.queue: one.cut for one in next_queues}
        self._read_queues(next_queues, read)
        return read

    def _read_here(self, queues: Sequence[KeyedQueue], found: KeyPass) -> None:
        """Read the keys of ``queues`` in this process, and add to ``found`` which messages of each
        stay."""
        own = self._settings.key_compaction
        read_queues(
            self._store,
            queues,
            found,
            self._options.spool_directory,
            own.memory_bytes // MAP_SHARE,
            keeps_keyless=own.keyless == "keep",
        )


def is_mostly_new(one: KeyedQueue) -> bool:
    """Whether `tiered run` compacts the queue: at least half as much is new as an earlier round left."""
    return 2 * one.new_bytes >= one.old_bytes


def compact_keys(
    store: ObjectStore,
    state: CatalogState,
    settings: Settings,
    options: RewriteOptions,
    is_keyed: IsKeyed,
    *,
    apply: bool,
    report: Report = lambda what, done, total: None,
    write: Rewrite = rewrite,
    read: ReadQueues | None = None,
) -> KeyCompactionReport:
    """Compact the keys of all queues of topics that ``is_keyed``, once, or without ``apply`` read what that would drop.
    ``report`` gets the progress; ``write`` writes new objects, ``read`` reads queues (None: in this process). Raises
    UnavailableError if the archive changes too fast, and what reading and writing raise."""
    maintenance = MaintenanceCommit.opened(store, state, "compact-keys", Clock(wall_ms=store.clock_ms))
    task = KeyCompaction(
        maintenance, settings, options, lambda _: is_keyed, write=write, report=report, read=read
    )
    if not apply:
        return KeyCompactionReport(False, task.forecast(state), 0, _times(store, settings, task.waiting))
    while (planned := task.plan(maintenance.refresh())) is not None:
        task.step(maintenance.state, planned)
    return KeyCompactionReport(True, task.figures, task.rounds, _times(store, settings, task.waiting))


def _times(
    store: ObjectStore, settings: Settings, waiting: Sequence[Waiting]
) -> tuple[tuple[Waiting, int | None], ...]:
    """The queues that wait, each with the time from which its messages are old enough to be compacted (None: they wait
    for another reason). Times of the first TIMES_MAX commits are looked up."""
    versions = sorted({one.version for one in waiting if one.version})[:TIMES_MAX]
    commits = {version: next(iter(store.list(catalog_key(version), limit=1)), None) for version in versions}
    age_ms = settings.key_compaction.min_age_ms
    times = {version: commit.modified_ms + age_ms for version, commit in commits.items() if commit}
    return tuple((one, times.get(one.version)) for one in waiting)
