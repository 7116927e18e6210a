"""The lifecycle of `tiered run`: start the uploader, restart it after an outage, reload, drain, stop.

Owns the main loop, signals, and the reaction to each kind of failure. All waiting is on one event queue: an idle
process costs nothing.
"""

import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Protocol

from rocketmq_tiered.process.event_queue import EventQueue, was_received
from rocketmq_tiered.process.findings import (
    ARCHIVING,
    REFUSED,
    STARTING,
    TROUBLE,
    Condition,
    Finding,
    RunState,
    after_failure,
    of_report,
    while_running,
)
from rocketmq_tiered.process.report import StatusReport
from tiered.errors import FencedError, TieredError
from tiered.kernels.jit import compiling
from tiered.settings.load import FIELDS, LoadedSettings, changed_keys, value_of
from tiered.settings.sections import Settings

logger = logging.getLogger(__name__)

EXIT_NOT_DRAINED = 4
OBSERVE_S = 5.0
"""Within this time a changed state is logged."""
OBSERVE_START_S = 0.5
"""While a start is not finished, a changed state is logged within this time."""
SETTLED_S = 60.0
"""After a job has run this long, the next outage starts with the shortest wait."""


class Job(Protocol):
    """A job of the service: the uploader."""

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop`` is set, then drain; raises failures."""
        ...

    def report(self) -> StatusReport:
        """The present status; callable from any thread, also before and after the run."""
        ...


JobFactory = Callable[[Settings], Job]


class Event(Enum):
    """Events of the main loop."""

    STOP = "stop"
    RELOAD = "reload"
    JOB_ENDED = "job ended"
    TIMEOUT = "timeout"


def with_values_of(before: Settings, after: Settings, keys: Sequence[str]) -> Settings:
    """``after`` with the values of ``keys`` from ``before``. Pure."""
    for key in keys:
        section, _, name = key.partition(".")
        kept = replace(getattr(after, section), **{name: value_of(before, key)})
        after = replace(after, **{section: kept})
    return after


class Surroundings(Protocol):
    """The process around a service."""

    def loaded(self) -> LoadedSettings:
        """The settings, read again. Raises what reading them raises."""

    def apply(self, settings: Settings) -> None:
        """Note that ``settings`` are in effect now."""

    def extended(self, report: StatusReport) -> StatusReport:
        """``report`` with what other parts of the process add."""


class UploaderService:
    """Runs jobs built by ``factory`` until a stop."""

    def __init__(
        self,
        loaded: LoadedSettings,
        *,
        factory: JobFactory,
        surroundings: Surroundings,
    ) -> None:
        """``factory`` makes an uploader (a job) for the settings of each start; ``surroundings`` reads the settings
        and takes part in applying and reporting them."""
        self._settings = loaded.settings
        self._factory = factory
        self._surroundings = surroundings
        self._settings_problem = ""
        """Why settings that were read again are not in force; empty if they are."""
        self._findings: dict[str, Finding] = {}
        """The findings that were logged last, by what they are about."""
        self._events: EventQueue[tuple[Event, int]] = EventQueue()
        self._condition = Condition(RunState.STARTING, "reading settings")
        """The condition that is shown until the uploader has claimed its archive."""
        self._is_running = False
        self._has_owned = self._has_stood_by = False
        """Whether a job of this process has been the archive's writer, or has waited while another process was."""
        self._logged = self._condition
        self._logged_s = time.monotonic()
        self._failures = 0
        """Failed jobs in a row."""
        self._last_failure = ""
        self._retry_at_s: float | None = None
        """When the next job starts after a failure; None if none is planned."""
        self._started_s = 0.0
        self._job: Job | None = None
        self._job_error: BaseException | None = None
        self._job_stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._jobs_started = 0
        self._restart_when_ended = False
        """Whether the job is stopped because of a reload: the next one starts as soon as it has ended."""
        self._late_at_s: float | None = None
        """When a job that finishes its uploads for a reload will be late; None once logged."""
        self._is_built = False
        """Whether the current job opened its stores with its settings."""
        self._settings_that_work: Settings | None = None
        """The settings of the last job that opened its stores: those of a rollback."""

    @property
    def condition(self) -> Condition:
        """The present state and its cause; callable from any thread."""
        return self._observed()[0]

    def handle_signals(self) -> None:
        """Let SIGTERM and SIGINT end the process once uploads in flight are finished, and SIGHUP read the settings
        again, also one that came before this call. Main thread only."""
        self._events.wake_on_signals()
        signal.signal(signal.SIGTERM, lambda *_: self.post(Event.STOP))
        signal.signal(signal.SIGINT, lambda *_: self.post(Event.STOP))
        if was_received(signal.signal(signal.SIGHUP, lambda *_: self.post(Event.RELOAD))):
            self.post(Event.RELOAD)

    def post(self, event: Event) -> None:
        """Wake the main loop; safe from any thread and from signal handlers."""
        self._events.put((event, 0))

    def serve(self) -> int:
        """The main loop: start an uploader and react to signals, to its end and to the clock, until the process has to
        end. Returns the exit code."""
        self._start_job()
        while True:
            event, job_number = self._next_event()
            if event is Event.STOP:
                return self._drain()
            if event is Event.RELOAD:
                self._reload()
            elif event is Event.TIMEOUT:
                self._act_when_due()
            elif job_number == self._jobs_started and (code := self._job_ended()) is not None:
                return code  # the end of an uploader before the current one needs no reaction

    def close(self) -> None:
        """Stop listening to signals, after ``serve``."""
        self._events.close()

    def report(self) -> StatusReport:
        """The uploader's report, with the state of this service and the reason for it. Before the first uploader the
        report has nothing else."""
        condition, report = self._observed()
        return self._surroundings.extended(
            replace(
                report or StatusReport(),
                state=condition.text,
                why=condition.why,
                step=condition.step,
                settings_problem=self._settings_problem,
            )
        )

    def health(self) -> tuple[bool, str]:
        """Alive: an uploader runs, or a restart of it is planned."""
        condition = self.condition
        return condition.state is not RunState.STOPPED, f"{condition.text}: {condition.why}"

    def readiness(self) -> tuple[bool, str]:
        """The answer of /ready: whether messages are being archived, which they are not while the object store or a
        silent broker holds the uploader up; and a text with the state and each problem to look at, a line each."""
        condition = self.condition
        lines = [condition.line, *(found.text for found in of_report(self.report()))]
        return condition.state in ARCHIVING, "\n".join(lines)

    def _observed(self) -> tuple[Condition, StatusReport | None]:
        """The state to show now, and the report of the uploader, None before the first one. While an uploader runs its
        report decides the state; otherwise the state is the one that the main loop entered when the last one ended."""
        job, condition = self._job, self._condition
        if condition.state in STARTING and (kernel := compiling()):
            condition = Condition(RunState.STARTING, f"compiling {kernel}")
        report = None if job is None else job.report()
        if report is None:
            return condition, None
        if self._is_running and self._is_built:
            condition = while_running(report, condition, self._settings.offload.batch_age_ms)
        return condition, report

    def _next_event(self) -> tuple[Event, int]:
        """Wait for the next event, and return it with the number of the job that it concerns. TIMEOUT comes when
        something is due, and every few seconds for the log, which shows changes of the state here."""
        self._log_changes()
        due_at_s = self._late_at_s if self._retry_at_s is None else self._retry_at_s
        wait_s = OBSERVE_START_S if self._logged.state in STARTING else OBSERVE_S
        if due_at_s is not None:
            wait_s = min(wait_s, max(0.0, due_at_s - time.monotonic()))
        return self._events.get(wait_s) or (Event.TIMEOUT, 0)

    def _act_when_due(self) -> None:
        """Start the next uploader once its wait is over, or log that the present one, stopped for new settings, has
        not finished its uploads in time. Does nothing before."""
        now_s = time.monotonic()
        if self._retry_at_s is not None:
            if now_s >= self._retry_at_s:
                self._start_job()
        elif self._late_at_s is not None and now_s >= self._late_at_s:
            self._late_at_s = None
            logger.error(
                "the uploader has not finished its uploads within process.drain_timeout_ms: the reloaded settings are "
                "in effect once it has"
            )

    def _start_job(self) -> None:
        """Start an uploader (a job) in a thread of its own. The event of its end carries its number, so that the main
        loop can tell it from the end of an earlier one."""
        self._retry_at_s = self._late_at_s = None
        self._started_s = time.monotonic()
        self._job_error = None
        self._is_built = False
        self._job_stop = threading.Event()
        self._restart_when_ended = False
        self._jobs_started += 1
        if self._condition.state not in TROUBLE | {RunState.STANDBY}:
            self._condition = Condition(RunState.CONNECTING, "opening the broker's store and the archive")
        self._is_running = True
        self._thread = threading.Thread(
            target=self._run_job,
            args=(self._settings, self._job_stop, self._jobs_started),
            name="uploader",
            daemon=True,
        )
        self._thread.start()

    def _run_job(self, settings: Settings, stop: threading.Event, number: int) -> None:
        """The thread of one uploader: open its stores, then run it. However that ends, the main loop gets an event with
        the uploader's number, and finds the error, if any, in ``_job_error``."""
        try:
            job = self._factory(settings)
            self._job, self._settings_that_work, self._is_built = job, settings, True
            job.run(stop)
        except BaseException as error:  # the main loop decides and logs
            self._job_error = error
        self._events.put((Event.JOB_ENDED, number))

    def _job_ended(self) -> int | None:
        """React to the end of the uploader's thread. Returns the exit code if the process has to end; None if another
        uploader was started, or will be after a wait."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        error = self._job_error
        condition, report = self._observed()
        self._has_owned = self._has_owned or (report is not None and report.epoch > 0)
        self._is_running = False
        if condition.state in ARCHIVING:
            self._condition = Condition(RunState.CONNECTING, "starting again")
        if self._restart_when_ended:
            self._start_job()
            return None
        if error is None:
            self._enter(Condition(RunState.STOPPED, "the uploader has ended"))
            return 0
        if self._rolls_back(error):
            return None
        if time.monotonic() - self._started_s >= SETTLED_S:
            self._failures = 0
        self._failures += 1
        lasts, self._last_failure = str(error) == self._last_failure, str(error)
        plan = after_failure(
            error,
            self._settings,
            self._failures,
            random.random(),  # nosec B311 - jitter
            has_owned=self._has_owned,
            has_stood_by=self._has_stood_by,
            lasts=lasts,
        )
        self._has_stood_by = self._has_stood_by or plan.condition.state is RunState.STANDBY
        if plan.exit_code is not None:  # failures that a retry may cure are logged as states
            level = logging.ERROR if isinstance(error, TieredError) else logging.CRITICAL
            logger.log(level, "the uploader has failed", exc_info=error, extra={"failures": self._failures})
        self._enter(plan.condition)
        if plan.exit_code is not None:
            return plan.exit_code
        self._retry_at_s = time.monotonic() + plan.delay_s
        return None

    def _rolls_back(self, error: BaseException) -> bool:
        """Go back to the previous settings if ``error`` shows that no uploader can start with those of a reload, and
        start one with them. Returns whether it did: an error that a retry may cure is no reason to."""
        before = self._settings_that_work
        if self._is_built or before is None or before is self._settings:
            return False
        if after_failure(error, before, 1, 0.0).exit_code is None:
            return False
        logger.error(
            "the uploader does not start with the reloaded settings: the previous ones are in force again",
            exc_info=error,
        )
        self._settings_problem = str(error)
        self._apply(before)
        self._start_job()
        return True

    def _apply(self, settings: Settings) -> None:
        logging.getLogger().setLevel(settings.process.log_level.upper())
        self._settings = settings
        self._surroundings.apply(settings)

    def _reload(self) -> None:
        """Read the settings again, as SIGHUP requests, and use those that changed. The uploader is restarted if one
        changed that it cannot take while it runs; changes that need a new process are only logged."""
        try:
            after = self._surroundings.loaded().settings
        except TieredError as error:
            logger.error(
                "settings not reloaded, the previous ones stay in force: correct them and send SIGHUP again",
                exc_info=error,
            )
            self._settings_problem = str(error)
            return
        self._settings_problem = ""
        changed = changed_keys(self._settings, after)
        for_next_process = [key for key in changed if FIELDS[key].rule.restart]
        if for_next_process:
            logger.warning(
                "these changed settings take effect when tiered run is restarted: %s",
                ", ".join(for_next_process),
            )
        now = [key for key in changed if key not in for_next_process]
        if not now:
            logger.info("settings reloaded: no setting changed that takes effect without a restart")
            return
        after = with_values_of(self._settings, after, for_next_process)
        logger.info("settings reloaded", extra={"keys": now})
        is_live = all(FIELDS[key].rule.live for key in now)
        if is_live and self._settings_that_work is self._settings:
            self._settings_that_work = after
        self._apply(after)
        if not is_live:
            self._restart_job()

    def _restart_job(self) -> None:
        """Let the uploader (the job) finish its uploads and end, and have another one started after it: at once if none
        runs, else by the event of its end, as the main loop must not miss a SIGTERM."""
        if self._thread is None:
            self._start_job()
            return
        self._job_stop.set()
        if not self._restart_when_ended:
            self._restart_when_ended = True
            self._late_at_s = time.monotonic() + self._settings.process.drain_timeout_ms / 1000

    def _drain(self) -> int:
        """Let the uploader finish what is in flight, and return the exit code for the end of the process: that of a
        failure in between, that of a state that waits for an operator, or that of uploads that took too long."""
        before = self.condition.state
        self._enter(Condition(RunState.STOPPING, "finishing uploads in flight"))
        was_running = self._thread is not None
        drained = self._stop_job()
        why = "all uploads are finished" if drained else "stopped before all uploads in flight were finished"
        self._enter(Condition(RunState.STOPPED, why))
        # That another process is the writer is the normal state of a standby, not a failure of the stop.
        is_standby = before in (RunState.STANDBY, RunState.FENCED) and isinstance(
            self._job_error, FencedError
        )
        if drained and was_running and isinstance(self._job_error, TieredError) and not is_standby:
            logger.error(
                "the uploader failed while it finished what was in flight: the next start archives the rest",
                exc_info=self._job_error,
            )
            return self._job_error.exit_code
        if before in REFUSED:
            return REFUSED[before].exit_code
        return 0 if drained else EXIT_NOT_DRAINED

    def _stop_job(self) -> bool:
        """Let the uploader (the job) finish its uploads. Returns whether it ended within process.drain_timeout_ms, and
        True if none ran."""
        if self._thread is None:
            return True
        self._job_stop.set()
        self._thread.join(self._settings.process.drain_timeout_ms / 1000)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def _enter(self, condition: Condition) -> None:
        self._condition, self._is_running = condition, False
        self._log_changes()

    def _log_changes(self) -> None:
        """Log one line for a changed state, and for each problem that an operator should look at when it appears or
        ends."""
        self._log_state()
        found = {finding.about: finding for finding in of_report(self.report())}
        for about, finding in found.items():
            if about not in self._findings:
                level = logging.ERROR if finding.is_bad else logging.WARNING
                logger.log(level, "attention: %s", finding.what, extra={"about": about, "next": finding.step})
        for about in self._findings.keys() - found.keys():
            logger.info("attention ended: %s", self._findings[about].what, extra={"about": about})
        self._findings = found

    def _log_state(self) -> None:
        """Log the state of the process if it has changed since the last call, with its reason and next step. If the
        state before was trouble, the line has it and its duration too."""
        now, before = self.condition, self._logged
        if now.text == before.text:
            return
        now_s = time.monotonic()
        details = {"why": now.why} | ({"next": now.step} if now.step else {})
        if before.state in TROUBLE:
            details |= {"before": before.text, "after": f"{now_s - self._logged_s:.0f} s"}
        logger.log(
            logging.ERROR if now.state in TROUBLE else logging.INFO, "state %s", now.text, extra=details
        )
        self._logged, self._logged_s = now, now_s
