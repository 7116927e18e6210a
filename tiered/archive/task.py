"""Background work on an archive: what a task is, and the one loop that runs it.

    wait until it is due → plan on the newest state → a step → plan again, until nothing is left

A feature that works on an archive again and again is a task, and has no loop of its own. Starts no thread: `tiered run`
has one for each task, so that a long step of one holds up no other.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import FencedError, TieredError, UnavailableError

logger = logging.getLogger(__name__)

EXPIRY, GARBAGE_COLLECTION, COMPACTION, KEY_COMPACTION, INDEX_BUILDING, TIMER_DELIVERY, SCRUB = (
    "expiry",
    "garbage collection",
    "compaction",
    "key compaction",
    "index building",
    "timer delivery",
    "scrub",
)
"""Names of tasks."""

P = TypeVar("P")
OUTAGE_S = 600.0
"""Failures because something is unavailable are a problem only if they last longer: shorter ones pass."""
OUTAGE_RETRY_S = 60.0
StateOf = Callable[[], CatalogState | None]
"""The newest state, or None while this process does not own the archive."""


class StoppedError(Exception):
    """The work is to stop."""


@dataclass(frozen=True)
class Due:
    """When a pass begins: ``first_s`` after the start, ``every_s`` after the end of the pass before (None: only when
    the loop is woken), ``retry_s`` after a pass that failed (None: ``every_s``)."""

    every_s: float | None
    first_s: float = 0.0
    retry_s: float | None = None


class Task(Protocol[P]):
    """One kind of work on an archive."""

    @property
    def name(self) -> str:
        """The name in messages and of threads."""

    @property
    def due(self) -> Due:
        """When to run."""

    @property
    def problem(self) -> str:
        """Why the last pass, which has not failed, did less than it should; empty if it did all."""

    def plan(self, state: CatalogState) -> P | None:
        """What to do next in ``state``; None: nothing. Changes nothing in the archive."""

    def step(self, state: CatalogState, plan: P) -> bool:
        """Carry out ``plan``, a bounded part of the work. Returns whether to plan again in this pass. Raises
        StoppedError when it is to stop, or TieredErrors."""


@dataclass(frozen=True)
class TaskStatus:
    """A task of this process since its start: one shape for all of them."""

    name: str = ""
    interval_seconds: float = 0.0
    level: str = ""
    """How fast a pass is: `full`, `reduced` beside uploads and reads, `paused`, `forced`; empty between passes."""
    last_ms: int | None = None
    """When a pass last ended well, in ms since the epoch; None: not since the start."""
    idle_seconds: float = 0.0
    """Time since a pass ended well, or since the start."""
    problem: str = ""
    """Why the last pass did not end well; empty if it did."""
    is_outage: bool = False
    """Whether ``problem`` is that something is unavailable."""
    failures: int = 0


def run_pass(task: Task[P], state_of: StateOf) -> bool:
    """Carry out one pass of ``task``: plan and do steps until nothing is left. ``state_of`` returns the newest state,
    or None while this process does not own the archive: then this returns False."""
    state = state_of()
    if state is None:
        return False
    while state is not None and (plan := task.plan(state)) is not None:
        if not task.step(state, plan):
            break
        del plan  # not beside the next one
        state = state_of()
    return True


class TaskLoop(Generic[P]):
    """Runs ``task`` pass after pass. ``level``: how fast, during a pass."""

    def __init__(
        self,
        task: Task[P],
        state_of: StateOf,
        *,
        clock: Clock = MACHINE_CLOCK,
        level: Callable[[], str] = lambda: "",
    ) -> None:
        """Starts nothing. ``state_of`` returns the newest catalog state, or None while this process does not own the
        archive; ``level`` returns how fast the present pass is, for the status (TaskStatus)."""
        self.task = task
        self._state_of, self._level = state_of, level
        self._clock = clock
        self._woken, self._stopped = threading.Event(), threading.Event()
        self._is_in_pass = False
        self._well_s = time.monotonic()
        """When a pass last ended well, or when this process last did not own the archive; at first, the start."""
        self._failing_s: float | None = None
        """When the first of the present failures was; None after a pass that ended well."""
        self._status = TaskStatus(task.name, task.due.every_s or 0.0)

    @property
    def status(self) -> TaskStatus:
        """The status of the task; may be called from any thread."""
        level = self._level() if self._is_in_pass else ""
        return replace(self._status, idle_seconds=time.monotonic() - self._well_s, level=level)

    def wake(self) -> None:
        """Begin a pass at once, or another one after the present one. From any thread."""
        self._woken.set()

    def stop(self) -> None:
        """No pass begins any more. From any thread."""
        self._stopped.set()
        self._woken.set()

    def run(self) -> None:
        """Run passes when they are due, until ``stop``. A failure is logged and becomes the ``problem`` of the status,
        and the pass is tried again: the process continues."""
        due = self.task.due
        wait_s: float | None = due.first_s if due.every_s is None else min(due.first_s, due.every_s)
        while self._waited(wait_s):
            wait_s = due.every_s
            try:
                self.make_pass()
            except StoppedError:
                return
            except FencedError as error:
                logger.info(
                    "%s ends here, as another process has taken the archive over: %s",
                    self.task.name,
                    error.message,
                )
            except TieredError as error:
                is_outage = isinstance(error, UnavailableError)
                is_repeated = is_outage and self._failing_s is not None
                self._failed(str(error), is_outage=is_outage)
                level = logging.DEBUG if is_repeated else logging.WARNING
                logger.log(level, "%s has not run, and is tried again: %s", self.task.name, error)
                wait_s = due.every_s if due.retry_s is None else due.retry_s
                if is_outage and (wait_s is None or wait_s > OUTAGE_RETRY_S):
                    wait_s = OUTAGE_RETRY_S
            except Exception as error:
                logger.exception(
                    "%s has not run because of an internal error, and is tried again", self.task.name
                )
                self._failed(f"internal error: {error!r}")

    def make_pass(self) -> None:
        """Carry out one pass at once, and note in the status that it ended well. Raises StoppedError, TieredError."""
        self._is_in_pass = True
        try:
            is_owner = run_pass(self.task, lambda: None if self._stopped.is_set() else self._state_of())
        finally:
            self._is_in_pass = False
        self._well_s = time.monotonic()
        self._failing_s = None
        if is_owner:
            self._status = replace(
                self._status, last_ms=self._clock.wall_ms(), problem=self.task.problem, is_outage=False
            )
            if self.task.problem:
                logger.error("%s: %s", self.task.name, self.task.problem)

    def _failed(self, problem: str, *, is_outage: bool = False) -> None:
        """Count a pass that failed because of ``problem``. The status names the problem at once, or, if something was
        unavailable (``is_outage``), only when passes have failed for OUTAGE_S."""
        now_s = time.monotonic()
        self._failing_s = now_s if self._failing_s is None else self._failing_s
        self._status = replace(self._status, failures=self._status.failures + 1)
        if not is_outage or now_s - self._failing_s >= OUTAGE_S:
            self._status = replace(self._status, problem=problem, is_outage=is_outage)

    def _waited(self, wait_s: float | None) -> bool:
        """Wait for ``wait_s`` (None: without limit), or until the loop is woken. Returns whether a pass begins now;
        False: the loop ends."""
        self._woken.wait(wait_s)
        self._woken.clear()
        return not self._stopped.is_set()
