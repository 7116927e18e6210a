"""The life of `tiered run`: start the uploader, restart it after an outage, reload, drain, stop.

Owns the main loop, signals, and what each kind of failure means for the process. Does not own how the
uploader is built (a factory does) nor what it does. All waiting is on one event queue: idle costs nothing.
"""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from sidecar.event_queue import EventQueue
from sidecar.report import StatusReport
from sidecar.sighup import was_received
from tiered.errors import FencedError, TieredError, UnavailableError
from tiered.settings.load import FIELDS, LoadedSettings, changed_keys, value_of
from tiered.settings.sections import Settings

logger = logging.getLogger(__name__)

EXIT_NOT_DRAINED = 4
EXIT_INTERNAL = 70
RETRY_FIRST_S = 1.0
RETRY_MAX_S = 30.0
SETTLED_S = 60.0
"""A job that ran this long was well: the next outage starts again with the shortest wait."""


class Job(Protocol):
    """What the service runs; the uploader."""

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop`` is set (then drain) or something raises."""
        ...

    def report(self) -> StatusReport:
        """The present status; callable from any thread, also before and after the run."""
        ...


JobFactory = Callable[[Settings], Job]


class State(Enum):
    """Where the service is in its life."""

    STARTING = "starting"
    FOLLOWING = "following"
    RETRYING = "retrying"
    STANDBY = "standby"
    DRAINING = "draining"
    STOPPED = "stopped"


class Event(Enum):
    """What wakes the main loop."""

    STOP = "stop"
    RELOAD = "reload"
    JOB_ENDED = "job ended"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class RetryPlan:
    """What to do after a job failed: wait ``delay_s`` in ``state``, or end with ``exit_code``."""

    state: State
    delay_s: float
    exit_code: int | None = None


def after_failure(error: BaseException, settings: Settings, failures: int, jitter: float) -> RetryPlan:
    """The plan after the ``failures``-th failure in a row (from 1); ``jitter`` in [0, 1). Pure."""
    if isinstance(error, FencedError):
        if settings.process.when_fenced == "exit":
            return RetryPlan(State.STOPPED, 0, error.exit_code)
        return RetryPlan(State.STANDBY, settings.process.standby_retry_ms / 1000)
    if isinstance(error, UnavailableError):
        ceiling_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** min(failures - 1, 10))
        return RetryPlan(State.RETRYING, ceiling_s * (0.5 + jitter / 2))
    if isinstance(error, TieredError):
        return RetryPlan(State.STOPPED, 0, error.exit_code)
    return RetryPlan(State.STOPPED, 0, EXIT_INTERNAL)


def with_values_of(before: Settings, after: Settings, keys: Sequence[str]) -> Settings:
    """``after``, but for ``keys``, which stay as they were in ``before``. Pure."""
    for key in keys:
        section, _, name = key.partition(".")
        kept = replace(getattr(after, section), **{name: value_of(before, key)})
        after = replace(after, **{section: kept})
    return after


class Service:
    """Runs jobs built by ``factory`` until told to stop."""

    def __init__(
        self,
        loaded: LoadedSettings,
        *,
        factory: JobFactory,
        reload: Callable[[], LoadedSettings],
        on_reload: Callable[[Settings], None] = lambda _settings: None,
        monotonic_s: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._settings = loaded.settings
        self._factory = factory
        self._load = reload
        self._on_reload = on_reload
        self._monotonic_s = monotonic_s
        self._jitter = jitter
        self._events: EventQueue[tuple[Event, int]] = EventQueue()
        self._state = State.STARTING
        self._why = "starting"
        self._failures = 0
        self._retry_at_s: float | None = None
        self._started_s = 0.0
        self._job: Job | None = None
        self._job_error: BaseException | None = None
        self._job_stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._jobs_started = 0
        self._restart_when_ended = False
        self._late_at_s: float | None = None
        """When a job that drains for a reload has taken too long, until that is told."""
        self._is_built = False
        """Whether the present job came to be."""
        self._proven: Settings | None = None
        """What the last job that came to be was built with."""

    @property
    def state(self) -> State:
        """Where the service is in its life."""
        return self._state

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT drain, SIGHUP reloads, also one that came before. Main thread only."""
        self._events.wake_on_signals()
        signal.signal(signal.SIGTERM, lambda *_: self.post(Event.STOP))
        signal.signal(signal.SIGINT, lambda *_: self.post(Event.STOP))
        replaced = signal.signal(signal.SIGHUP, lambda *_: self.post(Event.RELOAD))
        if was_received(replaced):
            self.post(Event.RELOAD)

    def post(self, event: Event) -> None:
        """Wake the main loop; safe from any thread and from signal handlers."""
        self._events.put((event, 0))

    def serve(self) -> int:
        """The main loop; returns the exit code."""
        self._start_job()
        while True:
            event, job_number = self._next_event()
            if event is Event.STOP:
                return self._drain()
            if event is Event.RELOAD:
                self._reload()
            elif event is Event.TIMEOUT:
                self._due()
            elif job_number == self._jobs_started and (code := self._job_ended()) is not None:
                return code

    def close(self) -> None:
        """Stop listening to signals, after ``serve``."""
        self._events.close()

    def report(self) -> StatusReport | None:
        """The uploader's report under the service's own state; None before there is an uploader."""
        job = self._job
        if job is None:
            return None
        return replace(job.report(), state=self._state.value, fenced=self._state is State.STANDBY)

    def health(self) -> tuple[bool, str]:
        """Alive: an uploader runs, or a restart of it is planned."""
        return self._state is not State.STOPPED, f"{self._state.value}: {self._why}"

    def readiness(self) -> tuple[bool, str]:
        """Ready: the uploader runs and owns the archive."""
        report = self.report()
        owns = self._state is State.FOLLOWING and report is not None and report.epoch > 0
        return owns, f"{self._state.value}: {self._why}"

    def _next_event(self) -> tuple[Event, int]:
        due_at_s = self._late_at_s if self._retry_at_s is None else self._retry_at_s
        wait_s = None if due_at_s is None else max(0.0, due_at_s - self._monotonic_s())
        return self._events.get(wait_s) or (Event.TIMEOUT, 0)

    def _due(self) -> None:
        if self._retry_at_s is not None:
            self._start_job()
        else:
            self._late_at_s = None
            logger.error("the uploader did not drain in time; the new settings apply when it ends")

    def _start_job(self) -> None:
        self._retry_at_s = self._late_at_s = None
        self._started_s = self._monotonic_s()
        self._job_error = None
        self._is_built = False
        self._job_stop = threading.Event()
        self._restart_when_ended = False
        self._jobs_started += 1
        self._enter(State.FOLLOWING, "the uploader runs")
        self._thread = threading.Thread(
            target=self._run_job,
            args=(self._settings, self._job_stop, self._jobs_started),
            name="uploader",
            daemon=True,
        )
        self._thread.start()

    def _run_job(self, settings: Settings, stop: threading.Event, number: int) -> None:
        try:
            job = self._factory(settings)
            self._job, self._proven, self._is_built = job, settings, True
            job.run(stop)
        except BaseException as error:  # handed to the main loop, which decides and logs
            self._job_error = error
        self._events.put((Event.JOB_ENDED, number))

    def _job_ended(self) -> int | None:
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        error = self._job_error
        if self._restart_when_ended:
            self._start_job()
            return None
        if error is None:
            self._enter(State.STOPPED, "the uploader has ended")
            return 0
        if self._goes_back(error):
            return None
        if self._monotonic_s() - self._started_s >= SETTLED_S:
            self._failures = 0
        self._failures += 1
        plan = after_failure(error, self._settings, self._failures, self._jitter())
        self._log_failure(error, plan)
        self._enter(plan.state, str(error))
        if plan.exit_code is not None:
            return plan.exit_code
        self._retry_at_s = self._monotonic_s() + plan.delay_s
        return None

    def _goes_back(self, error: BaseException) -> bool:
        """Whether the settings of before are in force again: no job can be built with those that were reloaded. What
        may pass by itself is tried again with the new ones."""
        before = self._proven
        if self._is_built or before is None or before is self._settings:
            return False
        if after_failure(error, before, 1, 0.0).exit_code is None:
            return False
        logger.error("the settings reloaded cannot be used: the old ones are back", exc_info=error)
        self._put_in_force(before)
        self._start_job()
        return True

    def _put_in_force(self, settings: Settings) -> None:
        logging.getLogger().setLevel(settings.process.log_level.upper())
        self._settings = settings
        self._on_reload(settings)

    def _log_failure(self, error: BaseException, plan: RetryPlan) -> None:
        details: dict[str, Any] = {"state": plan.state.value, "failures": self._failures}
        if plan.exit_code is None:
            details["retry_in_s"] = round(plan.delay_s, 1)
        level = logging.CRITICAL if not isinstance(error, TieredError) else logging.ERROR
        logger.log(level, "the uploader stopped", exc_info=error, extra=details)

    def _reload(self) -> None:
        try:
            after = self._load().settings
        except TieredError as error:
            logger.error("settings not reloaded, the old ones stay", exc_info=error)
            return
        changed = changed_keys(self._settings, after)
        late = [key for key in changed if FIELDS[key].rule.restart]
        if late:
            logger.warning("these settings need a restart", extra={"keys": late})
        if len(changed) == len(late):
            logger.info("settings reloaded, nothing to apply")
            return
        after = with_values_of(self._settings, after, late)
        logger.info("settings reloaded", extra={"keys": [key for key in changed if key not in late]})
        if all(key in late or FIELDS[key].rule.live for key in changed):
            if self._proven is self._settings:
                self._proven = after
            self._put_in_force(after)
            return
        self._put_in_force(after)
        self._restart_job()

    def _restart_job(self) -> None:
        """A new job as soon as this one has drained. Nobody waits for that: SIGTERM may come meanwhile."""
        if self._thread is None:
            self._start_job()
            return
        self._job_stop.set()
        if not self._restart_when_ended:
            self._restart_when_ended = True
            self._late_at_s = self._monotonic_s() + self._settings.process.drain_timeout_ms / 1000

    def _drain(self) -> int:
        self._enter(State.DRAINING, "finishing what is in flight")
        was_running = self._thread is not None
        drained = self._stop_job()
        self._enter(
            State.STOPPED, "drained" if drained else "stopped before everything in flight was finished"
        )
        if drained and was_running and isinstance(self._job_error, TieredError):
            logger.error("the uploader failed while draining", exc_info=self._job_error)
            return self._job_error.exit_code
        return 0 if drained else EXIT_NOT_DRAINED

    def _stop_job(self) -> bool:
        """Ask the job to drain and wait for it; False when it takes too long."""
        if self._thread is None:
            return True
        self._job_stop.set()
        self._thread.join(self._settings.process.drain_timeout_ms / 1000)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def _enter(self, state: State, why: str) -> None:
        if state is not self._state:
            logger.info("state %s", state.value, extra={"why": why})
        self._state, self._why = state, why
