"""Object compaction inside `tiered run`, while this process owns the archive: when, how fast, and what became of it.

Plans and commits in a thread of its own, through the owner's catalog writer; what is written comes from another process
(compaction_process.py). Uploads and reads go first: see ``level_of``.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from rocketmq_tiered.maintenance.compaction_due import Due
from rocketmq_tiered.maintenance.compaction_job import in_flight_bytes, limits_of, planned_rounds
from rocketmq_tiered.maintenance.compaction_round import PlannedRound, run_round
from rocketmq_tiered.maintenance.compaction_run import (
    CompactionOptions,
    CompactionResult,
    WriteOutputs,
    spool_bytes,
    write_outputs,
)
from rocketmq_tiered.maintenance.object_runs import ObjectRunCounter
from rocketmq_tiered.maintenance.yielding_store import StoppedError, YieldingStore
from rocketmq_tiered.process.allocator import trim
from rocketmq_tiered.process.report import CompactionStatus
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.state import CatalogState
from tiered.console import size_text
from tiered.errors import AccessDeniedError, StoreFullError, TieredError, UnavailableError
from tiered.formats.segment import BlockCodec
from tiered.object_store.interface import ObjectStore
from tiered.private_directory import make_private
from tiered.settings.compaction_section import DAY_MS, CompactionSettings
from tiered.settings.sections import Settings

logger = logging.getLogger(__name__)

FIRST_AFTER_S = 900.0
"""After the start: later than the first collection of garbage."""
READING_S = 5.0
"""Clients read if one has read in so many seconds."""
VOID_MAX = 5
"""Rounds in a row that had no effect; then the pass ends."""
FULL_OBJECTS = 16
"""Small objects that fill so many large ones are joined at once. Fewer wait for another compaction.min_age_ms, and if
it passes a third time they are joined although uploads are behind."""
GROWTH_MIN = 32
"""What a compaction wrote is written again only among so many times its bytes."""


class Level(Enum):
    """How much of its budget compaction uses."""

    FULL = "full"
    REDUCED = "reduced"
    PAUSED = "paused"
    FORCED = "forced"
    """Would be paused, but is overdue: slow."""


SHARES = {Level.FULL: 1.0, Level.REDUCED: 0.25, Level.PAUSED: 0.0, Level.FORCED: 0.0625}


@dataclass(frozen=True)
class Load:
    """What else the process does: ``lag_bytes`` of the log to upload, ``batch_bytes`` at a time."""

    lag_bytes: int = 0
    batch_bytes: int = 1
    store_problem: str = ""
    reads: int = 0
    """Reads by clients so far."""


def level_of(load: Load, *, is_reading: bool, is_overdue: bool) -> Level:
    """Compaction pauses while uploads fall behind or the object store has a problem, and slows down beside work."""
    if load.store_problem or load.lag_bytes > 4 * load.batch_bytes:
        return Level.FORCED if is_overdue and not load.store_problem else Level.PAUSED
    if is_reading or load.lag_bytes > load.batch_bytes // 4:
        return Level.REDUCED
    return Level.FULL


@dataclass
class _DueRounds:
    """The first of them, and sums over all."""

    first: PlannedRound | None = None
    objects: int = 0
    message_bytes: int = 0
    is_overdue: bool = False
    is_estimated: bool = False


class CompactionSchedule:
    """Compacts every ``compaction.every_ms`` in a thread, between ``start`` and ``stop``.

    ``store`` is the archive's, ``writer`` its owner in this process. ``spool``: a directory that only this schedule
    uses. ``load``: what else the process does, called several times a second. ``writing`` makes the function that
    writes outputs, from one that returns the share of the budget or raises StoppedError.
    """

    def __init__(
        self,
        store: ObjectStore,
        writer: CatalogWriter,
        settings: Settings,
        spool: Path,
        load: Callable[[], Load],
        *,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        monotonic_s: Callable[[], float] = time.monotonic,
        writing: Callable[[Callable[[], float]], WriteOutputs] = lambda share: write_outputs,
    ) -> None:
        own: CompactionSettings = settings.compaction
        self._writer, self._settings, self._spool, self._load = writer, settings, spool, load
        self._clock_ms, self._monotonic_s = clock_ms, monotonic_s
        self._stopped = threading.Event()
        self._store = YieldingStore(
            store, bytes_per_s=own.bytes_per_s, requests_per_s=own.requests_per_s, share=self._share,
            is_stopped=self._is_stopped, clock_s=monotonic_s, sleep=self._stopped.wait,
        )  # fmt: skip
        self._limits = replace(limits_of(settings), growth_min=GROWTH_MIN)
        self._options = CompactionOptions(
            spool, own.spool_bytes,
            BlockCodec(settings.offload.compression_level, settings.offload.block_bytes),
            in_flight_bytes(settings), release=trim, wait=self._stopped.wait,
        )  # fmt: skip
        self._write, self._counter = writing(self._share_or_stop), ObjectRunCounter()
        self._drain = threading.Event()
        self._is_overdue = False
        self._reads, self._read_s = 0, -READING_S
        self._well_s = monotonic_s()
        """When a pass ended well, or the process did not own the archive, last; or the start."""
        self._report = CompactionStatus(interval_seconds=own.every_ms / 1000)
        self._thread = threading.Thread(target=self._run, name="compaction", daemon=True)

    def start(self, drain: threading.Event) -> None:
        """Does nothing if the schedule is off. ``drain``: no request begins once it is set."""
        if self._settings.compaction.every_ms:
            self._drain = drain
            self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Waits for a request in progress, not longer than ``timeout_s``: what is uncommitted is garbage."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def report(self) -> CompactionStatus:
        """What became of it so far."""
        return replace(self._report, idle_seconds=self._monotonic_s() - self._well_s)

    def _is_stopped(self) -> bool:
        return self._stopped.is_set() or self._drain.is_set()

    def _run(self) -> None:
        wait_s = min(FIRST_AFTER_S, self._settings.compaction.every_ms / 1000)
        while not self._stopped.wait(wait_s) and not self._is_stopped():
            wait_s = self._settings.compaction.every_ms / 1000
            self._clear_spool()
            try:
                self.compact()
            except StoppedError:
                return
            except TieredError as error:
                self._failed(error)
            except Exception as error:  # never the uploader's end
                logger.exception("compaction has not run")
                self._change(problem=f"internal error: {error!r}", failures=self._report.failures + 1)
            finally:
                self._change(level="")

    def _failed(self, error: TieredError) -> None:
        hint = ""
        if isinstance(error, AccessDeniedError):
            hint = "; allow the account to read and create objects, or set compaction.every_ms to 0"
        self._change(problem=f"{error}{hint}", failures=self._report.failures + 1)
        logger.warning("compaction has not run: %s%s", error, hint)

    def _change(self, **values: object) -> None:
        self._report = replace(self._report, **values)  # type: ignore[arg-type]

    # -- one pass ---------------------------------------------------------------------------------------------

    def compact(self) -> None:
        """Carry out all rounds that are due, if this process owns the archive. Raises StoppedError, TieredError."""
        state = self._writer.refresh()
        if not self._writer.is_claimed or not state.started:
            self._well_s = self._monotonic_s()
            return
        self._refuse_uncollected(state)
        due = self._due_rounds(state)
        self._change(
            backlog_objects=due.objects, backlog_bytes=due.message_bytes, is_backlog_estimated=due.is_estimated
        )  # fmt: skip
        void = 0
        while due.first is not None and void < VOID_MAX:
            result = self._round(state, due.first)
            void = void + 1 if result is None else 0
            state = self._writer.state
            due = _DueRounds()  # not beside the next ones
            due = self._due_rounds(state)
        if void:
            raise UnavailableError(
                "the archive's pages change faster than objects are joined", hint="the next pass tries again"
            )
        self._well_s = self._monotonic_s()
        self._change(
            last_ms=self._clock_ms(),
            problem="",
            backlog_objects=0,
            backlog_bytes=0,
            is_backlog_estimated=False,
        )

    def _due_rounds(self, state: CatalogState) -> _DueRounds:
        own, now_ms = self._settings.compaction, self._clock_ms()
        due = Due(FULL_OBJECTS * own.object_bytes, now_ms - 2 * own.min_age_ms)
        overdue = Due(1 << 62, now_ms - 3 * own.min_age_ms)
        found = _DueRounds()
        for planned in planned_rounds(self._store, state, self._settings, self._limits, due, self._counter):
            found.first = found.first or planned
            share = planned.range.share
            found.is_estimated |= share < 1
            found.objects += round(planned.objects / share)
            found.message_bytes += round(planned.message_bytes / share)
            found.is_overdue |= not planned.plan.copies and overdue(planned.candidates, planned.plan)
        self._is_overdue = found.is_overdue
        return found

    def _round(self, state: CatalogState, planned: PlannedRound) -> CompactionResult | None:
        self._prepare_spool(planned)
        began_s = self._monotonic_s()
        objects, byte_count = len(planned.gone), planned.message_bytes
        result = run_round(
            self._store, state, planned, self._options, clock=self._clock_ms, write=self._write,
            maintenance=MaintenanceCommit(self._store, self._writer, self._clock_ms),
        )  # fmt: skip
        seconds = self._monotonic_s() - began_s
        if result is None:
            logger.info("a round of compaction had no effect: the archive has changed since its plan")
            return None
        now, cost = self._report, result.cost
        self._change(
            rounds=now.rounds + 1, round_seconds=seconds, joined_objects=now.joined_objects + objects,
            made_objects=now.made_objects + len(result.object_keys), gets=now.gets + cost.gets,
            bytes_read=now.bytes_read + cost.bytes_read, bytes_sent=now.bytes_sent + cost.bytes_sent,
            bytes_copied=now.bytes_copied + cost.bytes_copied,
            backlog_objects=max(0, now.backlog_objects - objects),
            backlog_bytes=max(0, now.backlog_bytes - byte_count),
        )  # fmt: skip
        logger.info(
            "compaction wrote %s of messages to %d objects in %.1f s, and replaced %d",
            size_text(byte_count), len(result.object_keys), seconds, objects,
        )  # fmt: skip
        return result

    def _refuse_uncollected(self, state: CatalogState) -> None:
        """Joined objects are garbage: where it is not collected, compaction would double the archive."""
        gc = self._settings.gc
        oldest_ms, late_ms = state.oldest_garbage_ms, gc.grace_ms + 3 * (gc.every_ms or DAY_MS)
        if oldest_ms is not None and self._clock_ms() - oldest_ms > late_ms:
            raise UnavailableError(
                "garbage is not collected",
                hint="run `tiered gc --apply --every 24h` with an account that may delete",
            )

    # -- the spool --------------------------------------------------------------------------------------------

    def _clear_spool(self) -> None:
        """Remove what a killed process left."""
        try:
            if self._spool.exists():
                make_private(self._spool, "process.state_dir")
                for left in self._spool.iterdir():
                    shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        except (OSError, TieredError) as error:
            logger.warning("%s is not cleared: %s", self._spool, error)

    def _prepare_spool(self, planned: PlannedRound) -> None:
        """Raises StoreFullError where the disk has less than the round needs."""
        needed = spool_bytes(planned.candidates, planned.plan)
        try:
            make_private(self._spool, "process.state_dir")
            free = shutil.disk_usage(self._spool).free
        except OSError as error:
            raise StoreFullError(f"cannot use {self._spool}: {error.strerror}") from None
        if needed > free:
            raise StoreFullError(
                f"{self._spool} has {size_text(free)} free of {size_text(needed)} for objects in progress",
                hint="free space there, or set process.state_dir",
            )

    # -- yielding ---------------------------------------------------------------------------------------------

    def _share_or_stop(self) -> float:
        if self._is_stopped():
            raise StoppedError
        return self._share()

    def _share(self) -> float:
        load, now_s = self._load(), self._monotonic_s()
        if load.reads != self._reads:
            self._reads, self._read_s = load.reads, now_s
        level = level_of(load, is_reading=now_s - self._read_s < READING_S, is_overdue=self._is_overdue)
        if self._report.level != level.value:
            self._change(level=level.value)
        return SHARES[level]
