"""Scrub as a task: reads back what was stored, new objects first, and heals what is damaged while the broker has it.

A cycle is a full verification in small steps, spread over scrub.cycle_ms; its cursor is that of `tiered verify`.
"""

import logging
import time
from collections.abc import Generator
from dataclasses import dataclass

from rocketmq_tiered.maintenance.healing import heal
from rocketmq_tiered.maintenance.task_figures import ScrubStatus
from tiered.archive.run_passes import LivingRuns, Window
from tiered.archive.task import SCRUB, Due
from tiered.archive.unreadable import UnreadableRange
from tiered.archive.verify import verifying
from tiered.archive.verify_progress import VerifyProgress, VerifyReport
from tiered.archive.verify_segment import Anomaly, SegmentResult, check_segment
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.console import counted
from tiered.settings.sections import ScrubSettings

logger = logging.getLogger(__name__)

FIRST_VERSIONS = 1024
"""So many of the newest versions count as new at the first start."""
VERSIONS_AT_ONCE = 64
STEP_S = 10.0
"""A step of the cycle: then new objects come first again."""
SPREAD = 0.8
"""The share of scrub.cycle_ms over which a cycle is spread."""


@dataclass(frozen=True)
class ScrubPart:
    """New versions to check, or a step of the cycle."""

    window: Window | None


class ScrubTask:
    """Scrubs the archive of ``commits``. ``log``: the broker's, and its pins. ``saved``: the progress, which lasts."""

    name = SCRUB

    def __init__(
        self,
        commits: MaintenanceCommit,
        settings: ScrubSettings,
        saved: VerifyProgress,
        log: CommitLog | None,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        """Read nothing yet: the first step is due after ``scrub.every_ms``, and continues where ``saved`` ended."""
        self._commits, self._settings, self._saved = commits, settings, saved
        self._log, self._clock = log, clock
        every_s = settings.every_ms / 1000
        self.due = Due(every_s=every_s, first_s=every_s)
        self.problem = ""
        self.status = ScrubStatus()
        self._lost: dict[str, tuple[UnreadableRange, ...]] = {}
        """Messages of each damaged object that could not be replaced, by its key."""
        self._steps: Generator[tuple[str, SegmentResult], None, VerifyReport] | None = None
        """The verification of the cycle in progress."""
        self._share = 0.0
        """The part of the cycle that is done."""
        self._objects = self._healed = 0
        self._others: dict[str, Anomaly] = {}
        """Anomalies of the last cycle, by key."""
        self._replaced: set[str] = set()
        """Objects that were replaced since the cycle began, which its verification may still report."""
        self._cycle_ms: int | None = None
        """When the last cycle ended."""

    @property
    def unreadable(self) -> tuple[UnreadableRange, ...]:
        """Messages of damaged objects that could not be healed."""
        return tuple(sorted(found for ranges in self._lost.values() for found in ranges))

    def plan(self, state: CatalogState) -> ScrubPart | None:
        """What to check next: objects of new catalog versions, else a step of the cycle over all objects if it is
        behind its schedule; None if it is not."""
        if not self._saved.verified[0]:
            self._saved.verified = (max(0, state.version - FIRST_VERSIONS), "")
        first = self._saved.verified[0] + 1
        if first <= state.version:
            return ScrubPart(Window(first, min(first + VERSIONS_AT_ONCE - 1, state.version)))
        return ScrubPart(None) if self._is_behind() else None

    def _is_behind(self) -> bool:
        """Whether a step of the cycle is due."""
        now_ms, spread_ms = self._clock.wall_ms(), SPREAD * self._settings.cycle_ms
        if self._saved.begun_ms is None:
            return self._cycle_ms is None or now_ms - self._cycle_ms >= self._settings.cycle_ms - spread_ms
        return self._steps is None or self._share <= (now_ms - self._saved.begun_ms) / spread_ms

    def step(self, state: CatalogState, part: ScrubPart) -> bool:
        """Read back the objects of ``part``, and replace those that are damaged, if the broker or the rest of the
        object has all their messages. ``status`` and ``problem`` then say what was found."""
        if part.window is None:
            self._advance_cycle()
        else:
            self._check_new(state, part.window)
        damaged = self._others.keys() | self._lost
        self.status = ScrubStatus(
            self._saved.verified[0], self._share, self._cycle_ms, self._objects, self._healed, len(damaged)
        )
        self.problem = ""
        if damaged:
            first = min(damaged)
            what = str(self._others[first]) if first in self._others else f"damaged object {first}"
            self.problem = (
                f"{counted(len(damaged), 'finding')}, such as {what}: run tiered repair ARCHIVE_URL"
            )
        return True

    def _check_new(self, state: CatalogState, window: Window) -> None:
        objects = LivingRuns(self._commits.store, state).objects(window)
        for key in objects:
            self._take(key, check_segment(self._commits.store, state, objects[key], full=True))
        self._saved.verified = (window.to_version, "")
        self._saved.save()

    def _advance_cycle(self) -> None:
        """Continue the cycle, which verifies the whole archive, for STEP_S, or until it is as far as its schedule. When
        it ends, its anomalies replace those of the cycle before."""

        def progress(done: int, total: int) -> None:
            self._share = done / total if total else 1.0

        begun_s = time.monotonic()
        self._steps = self._steps or verifying(
            self._commits.store, self._saved, "full", 1.0, progress, own=self._commits.refresh()
        )
        try:
            while time.monotonic() - begun_s < STEP_S and self._is_behind():
                self._take(*next(self._steps))
        except StopIteration as end:
            self._cycle_ms, self._steps, self._share = self._clock.wall_ms(), None, 0.0
            anomalies = {one.key: one for one in end.value.anomalies if one.key not in self._replaced}
            self._lost = {key: ranges for key, ranges in self._lost.items() if key in anomalies}
            self._others, self._replaced = anomalies, set()
        except Exception:
            self._steps = None  # the next step continues where it was saved
            raise

    def _take(self, key: str, result: SegmentResult) -> None:
        """Count the object ``key`` as checked. If its ``result`` has anomalies, replace it by a whole one; if messages
        would be lost, note these as unreadable instead."""
        self._objects += 1
        if not result.anomalies:
            return
        why = str(result.anomalies[0].detail)
        if self._log is not None:
            self._log.refresh()
        lost = heal(self._commits, key, self._log, self._clock)
        if lost is None:  # the catalog no longer names the object: it was compacted, or has expired
            return
        if lost:
            self._lost[key] = tuple(
                UnreadableRange(*queue, begin, end, key, why) for queue, begin, end in lost
            )
            logger.error(
                "a damaged object cannot be replaced, because messages in it are nowhere else",
                extra={"object": key, "why": why},
            )
            return
        self._healed += 1
        self._lost.pop(key, None)
        self._replaced.add(key)
        logger.warning("a damaged object was replaced by a whole one", extra={"object": key, "why": why})
