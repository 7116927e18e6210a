"""The states of `tiered run`, as status, readiness, metrics, log and the admin page show them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from rocketmq_tiered.process.report import StatusReport
from tiered.errors import (
    AccessDeniedError,
    EmptyCommitlogError,
    FencedError,
    LogDivergedError,
    MissingBrokerFileError,
    NotFoundError,
    RefusedRequestError,
    StoreFullError,
    StoreLayoutError,
    ThrottledError,
    TieredError,
    UnansweredError,
    UnavailableError,
    UnreadableError,
)
from tiered.settings.sections import Settings
from uploader.follow_loop import BrokerRestartedError

EXIT_INTERNAL = 70
RETRY_FIRST_S = 1.0
RETRY_MAX_S = 30.0
RETRY_LOG_S = 10.0
"""The broker's store or log may be put back: a check of the local disk."""
BEHIND_S = 60.0
"""Lag of `behind`; four batches' age if that is longer."""
OBJECT_STORE = "object store"
LOCAL_DISK = "local disk"
BROKER_STORE = "broker store"
"""Its directory, commitlog or files are not there."""
ARCHIVE = "archive"
"""Not usable as it is: empty though it has been archived to."""


class RunState(Enum):
    """One word each. `following` and `behind` archive; the others do not."""

    STARTING = "starting"
    CONNECTING = "connecting"
    FOLLOWING = "following"
    BEHIND = "behind"
    BLOCKED = "blocked"
    FROZEN = "frozen"
    DIVERGED = "diverged"
    STANDBY = "standby"
    FENCED = "fenced"
    STOPPING = "stopping"
    STOPPED = "stopped"


STARTING: Final = frozenset({RunState.STARTING, RunState.CONNECTING})
ARCHIVING: Final = frozenset({RunState.FOLLOWING, RunState.BEHIND})
UP: Final = ARCHIVING | {RunState.STANDBY, RunState.FENCED, RunState.STOPPING}
TROUBLE: Final = frozenset({RunState.BLOCKED, RunState.FROZEN, RunState.DIVERGED, RunState.FENCED})
_CHECK_STORE: Final = (
    "run tiered doctor ARCHIVE_URL; requests are repeated until the store accepts them, and nothing is lost while the "
    "broker keeps its log"
)
_CHECK_DISK: Final = "free space, or let this user read and write there; it is tried again"
_NEXT: Final = {
    OBJECT_STORE: _CHECK_STORE,
    LOCAL_DISK: _CHECK_DISK,
    BROKER_STORE: "mount its disk, or correct broker.store_path and restart; nothing is archived or hidden until then",
    ARCHIVE: "do what the cause says; it is tried again, and nothing is lost while the broker keeps its log",
}
_STEPS: Final = {
    RunState.FROZEN: "run tiered doctor; nothing is lost while the broker keeps its log",
    RunState.FENCED: "nothing after a fail-over; otherwise stop one of the two writers, or give it another archive.url",
}
_MISSING_STORE = (MissingBrokerFileError, StoreLayoutError)
_STORE_ERRORS = (ThrottledError, UnansweredError, AccessDeniedError, RefusedRequestError, NotFoundError)


@dataclass(frozen=True)
class Condition:
    """A state, what it is about (empty for most), and why it was entered. ``hint``: the next step, if the cause has one
    of its own."""

    state: RunState
    why: str
    subject: str = ""
    hint: str = ""

    @property
    def text(self) -> str:
        """`following`, `blocked: object store`, `frozen: broker 10.0.0.1:10911 does not answer`."""
        return f"{self.state.value}: {self.subject}" if self.subject else self.state.value

    @property
    def step(self) -> str:
        """The next step of a trouble; empty for other states."""
        if self.hint:
            return self.hint
        if self.state is RunState.BLOCKED:
            return _NEXT[self.subject]
        return _STEPS.get(self.state, "")

    @property
    def line(self) -> str:
        """State, cause and next step."""
        return f"{self.text}: {self.why}{f'. Next: {self.step}' if self.step else ''}"


def word_of(text: str) -> str:
    """The state's word of ``Condition.text``."""
    return text.partition(":")[0]


def while_running(report: StatusReport, before: Condition, batch_age_ms: int) -> Condition:
    """The condition of an uploader that runs; ``before`` until it has claimed its archive."""
    if report.store_problem:
        return Condition(RunState.BLOCKED, report.store_problem, OBJECT_STORE)
    if not report.epoch:
        return before
    if report.broker_problem:
        address = report.broker_address
        subject = f"broker {address} does not answer" if address else "the broker's address is unknown"
        return Condition(RunState.FROZEN, report.broker_problem, subject)
    if report.lag_seconds is not None and report.lag_seconds > max(BEHIND_S, 4 * batch_age_ms / 1000):
        return Condition(
            RunState.BEHIND, f"the oldest message not archived yet is {report.lag_seconds:.0f} s old"
        )
    return Condition(RunState.FOLLOWING, "the uploader is running")


@dataclass(frozen=True)
class RetryPlan:
    """The reaction to a failed uploader: wait ``delay_s`` in ``condition``, or end with ``exit_code``."""

    condition: Condition
    delay_s: float
    exit_code: int | None = None


def after_failure(
    error: BaseException,
    settings: Settings,
    failures: int,
    jitter: float,
    *,
    has_owned: bool = False,
    has_stood_by: bool = False,
    lasts: bool = False,
) -> RetryPlan:
    """The reaction to the ``failures``-th failure in a row (from 1); ``jitter`` in [0, 1). ``has_owned``,
    ``has_stood_by``: whether this process has owned the archive, or been its standby: then what the object store
    refuses is retried, and clients are still served. ``lasts``: whether the failure before had the same cause.
    """
    why = str(error)
    if isinstance(error, BrokerRestartedError):
        return RetryPlan(Condition(RunState.CONNECTING, why), RETRY_FIRST_S)
    if isinstance(error, FencedError):
        if settings.process.when_fenced == "exit":
            return RetryPlan(Condition(RunState.STOPPED, why), 0, error.exit_code)
        state = RunState.FENCED if has_owned else RunState.STANDBY
        return RetryPlan(Condition(state, why), settings.process.standby_retry_ms / 1000)
    if isinstance(error, LogDivergedError):  # the log may be put back
        return RetryPlan(Condition(RunState.DIVERGED, error.message, hint=error.hint), RETRY_LOG_S)
    has_worked = has_owned or has_stood_by
    if isinstance(error, EmptyCommitlogError) or (has_worked and isinstance(error, _MISSING_STORE)):
        return RetryPlan(Condition(RunState.BLOCKED, error.message, BROKER_STORE), RETRY_LOG_S)
    if isinstance(error, UnavailableError) or (has_worked and isinstance(error, _STORE_ERRORS)):
        ceiling_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** min(failures - 1, 10))
        return RetryPlan(_waiting_for(error, why, lasts=lasts), ceiling_s * (0.5 + jitter / 2))
    exit_code = error.exit_code if isinstance(error, TieredError) else EXIT_INTERNAL
    return RetryPlan(Condition(RunState.STOPPED, why), 0, exit_code)


def _waiting_for(error: BaseException, why: str, *, lasts: bool) -> Condition:
    if isinstance(error, (*_STORE_ERRORS, StoreFullError)):
        return Condition(RunState.BLOCKED, why, LOCAL_DISK if why.startswith("/") else OBJECT_STORE)
    if isinstance(error, UnreadableError):
        return Condition(RunState.BLOCKED, why, LOCAL_DISK)
    if lasts:
        return Condition(RunState.BLOCKED, why, ARCHIVE)
    return Condition(RunState.CONNECTING, why)
