"""Object compaction as a task of `tiered run`: what is due, and rounds of it.

Rounds commit through the owner's catalog writer; what is written comes from another process (compaction_process.py).
"""

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rocketmq_tiered.maintenance.compaction_job import limits_of, planned_rounds, rewrite_options
from rocketmq_tiered.maintenance.compaction_plan import CompactionDue
from rocketmq_tiered.maintenance.compaction_ranges import ObjectRunCounter
from rocketmq_tiered.maintenance.compaction_round import PlannedRound, run_round
from rocketmq_tiered.maintenance.damaged_sources import DamagedSources
from rocketmq_tiered.maintenance.task_figures import CompactionStatus
from rocketmq_tiered.maintenance.throttle import SHARES, Level, Stopping, Throttle, YieldingStore
from tiered.archive.rewrite.outputs import Rewrite, rewrite
from tiered.archive.rewrite.result import RewriteResult, spool_bytes
from tiered.archive.task import COMPACTION, Due, StoppedError, TaskStatus
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.console import size_text
from tiered.errors import (
    AccessDeniedError,
    CorruptionError,
    NotFoundError,
    StoreFullError,
    TieredError,
    TopicKeyError,
    UnavailableError,
)
from tiered.object_store.interface import ObjectStore
from tiered.private_directory import make_private
from tiered.settings.sections import DAY_MS, CompactionSettings, Settings

logger = logging.getLogger(__name__)

FIRST_AFTER_S = 900.0
"""After the start: later than the first collection of garbage."""
VOID_MAX = 5
"""Rounds in a row that had no effect; then the pass ends."""
FULL_OBJECTS = 16
"""Small objects that fill so many large ones are joined at once. Fewer wait for another compaction.min_age_ms, and if
it passes a third time they are joined although uploads are behind."""
DAMAGED_MAX = 100
"""Damaged objects that compaction works around; with more it stops."""
GROWTH_MIN = 32
"""What a compaction wrote is written again only among so many times its bytes."""


@dataclass
class _DueRounds:
    """The first of them, and sums over all."""

    first: PlannedRound | None = None
    objects: int = 0
    message_bytes: int = 0
    is_overdue: bool = False
    is_estimated: bool = False


class CompactionTask:
    """Compacts every ``compaction.every_ms``.

    ``store`` is the archive's, ``writer`` its owner in this process. ``spool``: a directory that only this task uses.
    No request begins once it is ``stopping``. ``writing`` makes the function that writes outputs, from one that
    returns the share of the budget or raises StoppedError.
    """

    name = COMPACTION

    def __init__(
        self,
        store: ObjectStore,
        writer: CatalogWriter,
        settings: Settings,
        spool: Path,
        throttle: Throttle,
        stopping: Stopping,
        *,
        release: Callable[[], object] = lambda: None,
        clock: Clock = MACHINE_CLOCK,
        writing: Callable[[Callable[[], float]], Rewrite] = lambda share: rewrite,
    ) -> None:
        """Sends all requests within ``compaction.bytes_per_s`` and ``compaction.requests_per_s``, of which ``throttle``
        leaves a part while uploads or reads need the store. ``release`` is called when the tables of a plan have been
        freed, to return their memory to the system. ``writing`` returns the function that writes new objects; it gets
        one that returns the share of the limits to use now, or raises StoppedError."""
        own: CompactionSettings = settings.compaction
        self._settings, self._spool, self._throttle, self._stopping = settings, spool, throttle, stopping
        self._clock = clock
        self._store = YieldingStore(
            store,
            bytes_per_s=own.bytes_per_s,
            requests_per_s=own.requests_per_s,
            share=self._share,
            stopping=stopping,
        )
        self._maintenance = MaintenanceCommit(self._store, writer, clock)
        self._limits = replace(limits_of(settings, {}), growth_min=GROWTH_MIN)
        self._options = replace(rewrite_options(settings, spool), release=release, wait=stopping.wait)
        self._write, self._counter = writing(self._share_or_stop), ObjectRunCounter()
        self.damaged = DamagedSources()
        """Objects that are left where they are, checked again after each ``compaction.every_ms``."""
        self._check_ms = 0
        """When damaged objects are checked again."""
        self._is_overdue = False
        """Whether messages have waited so long that they are joined although uploads are behind."""
        self.level = Level.FULL
        self._void = 0
        """Rounds in a row that had no effect."""
        self.due = Due(every_s=own.every_ms / 1000, first_s=FIRST_AFTER_S)
        self.problem = ""
        self._figures = CompactionStatus()

    def plan(self, state: CatalogState) -> PlannedRound | None:
        """The next round of compaction that is due; None if none is. Notes how much is left to join. Raises
        UnavailableError if garbage is not collected."""
        if not state.started:  # the archive has no messages
            return None
        self._clear_spool()
        self._refuse_uncollected(state)
        self._check_damaged(state)
        due = self._due_rounds(state)
        self._change(
            backlog_objects=due.objects,
            backlog_bytes=due.message_bytes,
            is_backlog_estimated=due.is_estimated,
        )
        return due.first

    def step(self, state: CatalogState, planned: PlannedRound) -> bool:
        """Carry out the round ``planned``. A damaged object is noted, and later plans work around it. Raises
        UnavailableError after VOID_MAX rounds in a row without effect, because other commits were faster, and
        AccessDeniedError if the account may not write."""
        try:
            result = self._round(state, planned)
        except AccessDeniedError as error:
            hint = "allow the account to read and create objects, or set compaction.every_ms to 0"
            raise AccessDeniedError(str(error), hint=hint) from error
        except (CorruptionError, NotFoundError, TopicKeyError) as error:
            if len(self.damaged) >= DAMAGED_MAX or not self.damaged.add(self._store, state, planned):
                raise
            logger.error("compaction cannot read an object, and leaves it where it is: %s", error)
            return True
        self._void = self._void + 1 if result is None else 0
        if self._void == VOID_MAX:
            self._void = 0
            raise UnavailableError(
                f"{self._store.url}: no objects were joined, as the archive changed each time before the commit",
                hint="the next pass of compaction tries again",
            )
        return True

    def _check_damaged(self, state: CatalogState) -> None:
        now_ms = self._clock.wall_ms()
        if now_ms >= self._check_ms:
            self._check_ms = now_ms + self._settings.compaction.every_ms
            self.damaged.check_again(self._store, state)
            self.damaged.add_unindexed(self._store, state)

    def status(self, of_loop: TaskStatus) -> CompactionStatus:
        """``of_loop`` with what this task counts."""
        return CompactionStatus(**vars(self._figures) | vars(of_loop))

    def _change(self, **values: object) -> None:
        self._figures = replace(self._figures, **values)  # type: ignore[arg-type]

    def _share_or_stop(self) -> float:
        if self._stopping.is_set():
            raise StoppedError
        return self._share()

    def _share(self) -> float:
        self.level = self._throttle.level(is_overdue=self._is_overdue)
        return SHARES[self.level]

    def _due_rounds(self, state: CatalogState) -> _DueRounds:
        """Plan all rounds that are due, one after another: keeps the first one, and sums up the objects and message
        bytes of all, which are the backlog. Of a large sequence of pages only the first round is planned: then the sums
        are estimates."""
        own, now_ms = self._settings.compaction, self._clock.wall_ms()
        due = CompactionDue(FULL_OBJECTS * own.object_bytes, now_ms - 2 * own.min_age_ms)
        overdue = CompactionDue(1 << 62, now_ms - 3 * own.min_age_ms)  # by its age, however small it is
        rounds = _DueRounds()
        for planned in planned_rounds(
            self._store,
            state,
            self._settings,
            self._limits,
            due,
            self._counter,
            self.damaged.keys,
        ):
            rounds.first = rounds.first or planned
            share = planned.range.share
            rounds.is_estimated |= share < 1
            rounds.objects += round(planned.objects / share)
            rounds.message_bytes += round(planned.message_bytes / share)
            rounds.is_overdue |= not planned.plan.copies and overdue(planned.candidates, planned.plan)
        self._is_overdue = rounds.is_overdue
        return rounds

    def _round(self, state: CatalogState, planned: PlannedRound) -> RewriteResult | None:
        """Write and commit one round, and add it to the figures that the status shows. None if the archive changed
        after the round was planned, so that nothing was committed."""
        self._prepare_spool(planned)
        began_s = time.monotonic()
        objects, byte_count = len(planned.gone), planned.message_bytes
        result = run_round(
            self._store,
            state,
            planned,
            self._options,
            clock=self._clock,
            write=self._write,
            maintenance=self._maintenance,
        )
        seconds = time.monotonic() - began_s
        if result is None:
            logger.info(
                "a round of compaction had no effect, because the archive changed after it was planned"
            )
            return None
        now, cost = self._figures, result.cost
        self._change(
            rounds=now.rounds + 1,
            round_seconds=seconds,
            joined_objects=now.joined_objects + objects,
            made_objects=now.made_objects + len(result.object_keys),
            gets=now.gets + cost.gets,
            bytes_read=now.bytes_read + cost.bytes_read,
            bytes_sent=now.bytes_sent + cost.bytes_sent,
            bytes_copied=now.bytes_copied + cost.bytes_copied,
            backlog_objects=max(0, now.backlog_objects - objects),
            backlog_bytes=max(0, now.backlog_bytes - byte_count),
        )
        logger.info(
            "compaction wrote %s of messages to %d objects in %.1f s, and replaced %d objects",
            size_text(byte_count),
            len(result.object_keys),
            seconds,
            objects,
        )
        return result

    def _refuse_uncollected(self, state: CatalogState) -> None:
        """Raise UnavailableError if old garbage is still there: objects that were joined are garbage, so that
        compaction would double an archive whose garbage is not collected."""
        gc = self._settings.gc
        oldest_ms, late_ms = state.oldest_garbage_ms, gc.grace_ms + 3 * (gc.every_ms or DAY_MS)
        if oldest_ms is not None and self._clock.wall_ms() - oldest_ms > late_ms:
            raise UnavailableError(
                f"{self._store.url}: objects are not joined while garbage is not collected: the archive would double",
                hint="run `tiered gc ARCHIVE_URL --apply --every 24h` with an account that may delete",
            )

    # -- the spool --------------------------------------------------------------------------------------------

    def _clear_spool(self) -> None:
        """Delete temporary files that a killed process has left in the spool directory; a failure is logged."""
        try:
            if self._spool.exists():
                make_private(self._spool, "process.state_dir")
                for left in self._spool.iterdir():
                    shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        except (OSError, TieredError) as error:
            logger.warning("temporary files of compaction in %s cannot be deleted: %s", self._spool, error)

    def _prepare_spool(self, planned: PlannedRound) -> None:
        """Make the spool directory, where new objects are written first. Raises StoreFullError if its disk has less
        space than the round ``planned`` needs."""
        needed = spool_bytes(planned.candidates, planned.plan)
        try:
            make_private(self._spool, "process.state_dir")
            free = shutil.disk_usage(self._spool).free
        except OSError as error:
            raise StoreFullError(f"compaction cannot use {self._spool}: {error.strerror}") from None
        if needed > free:
            raise StoreFullError(
                f"compaction needs {size_text(needed)} in {self._spool}, where {size_text(free)} are free",
                hint="free space there, or set process.state_dir",
            )
