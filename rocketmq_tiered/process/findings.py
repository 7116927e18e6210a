"""What an operator should look at although the process archives or serves: what, and the next step. Pure.

Status, /ready, the metric `attention`, the log and the admin page name the same findings. The state is no finding:
the words below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from rocketmq_tiered.process.report import StatusReport, catalog_figures
from rocketmq_tiered.sending.timer_status import TimerStatus
from rocketmq_tiered.server.proxy.relay_status import ProxyStatus, RelayStatus, SlaveStatus
from tiered.archive.task import COMPACTION, EXPIRY, GARBAGE_COLLECTION, INDEX_BUILDING, SCRUB
from tiered.archive.unreadable import UnreadableRange
from tiered.broker_store.bound import BoundReason
from tiered.catalog.state import CatalogState
from tiered.console import counted, duration_text
from tiered.errors import (
    AccessDeniedError,
    ArchiveDamagedError,
    CatalogLostError,
    EmptyCommitlogError,
    EncryptionKeyError,
    FencedError,
    KeyRingAwayError,
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
    UnsupportedFormatError,
)
from tiered.settings.sections import GcSettings, Settings
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
KEY_RING = "key ring"
BROKER_STORE = "broker store"
"""The broker's store directory, its commitlog or its files are not there."""
ARCHIVE = "archive"
"""The archive is not usable as it is: it is empty although it has been archived to."""


class RunState(Enum):
    """One word each. `following` and `behind` archive; the others do not."""

    STARTING = "starting"
    CONNECTING = "connecting"
    FOLLOWING = "following"
    BEHIND = "behind"
    BLOCKED = "blocked"
    FROZEN = "frozen"
    DIVERGED = "diverged"
    CATALOG_LOST = "catalog lost"
    DAMAGED = "damaged"
    FOREIGN = "foreign format"
    STANDBY = "standby"
    FENCED = "fenced"
    STOPPING = "stopping"
    STOPPED = "stopped"


STARTING: Final = frozenset({RunState.STARTING, RunState.CONNECTING})
ARCHIVING: Final = frozenset({RunState.FOLLOWING, RunState.BEHIND})
UP: Final = ARCHIVING | {RunState.STANDBY, RunState.FENCED, RunState.STOPPING}
REFUSED: Final[Mapping[RunState, type[TieredError]]] = {
    RunState.DIVERGED: LogDivergedError,
    RunState.CATALOG_LOST: CatalogLostError,
    RunState.DAMAGED: ArchiveDamagedError,
    RunState.FOREIGN: UnsupportedFormatError,
}
"""States that wait for a person, and their errors: nothing is archived, hidden or deleted."""
TROUBLE: Final = frozenset({RunState.BLOCKED, RunState.FROZEN, RunState.FENCED, *REFUSED})
_CHECK_STORE: Final = (
    "run tiered doctor ARCHIVE_URL; requests are repeated until the store accepts them, and nothing is lost while the "
    "broker keeps its log"
)
_CHECK_DISK: Final = "free space, or let this user read and write there; it is tried again"
_NEXT: Final = {
    OBJECT_STORE: _CHECK_STORE,
    LOCAL_DISK: _CHECK_DISK,
    KEY_RING: "run tiered keys check ARCHIVE_URL; nothing is written without its key, and it is tried again",
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
    """The state of a running uploader, by its report, with the reason; ``before`` until the uploader has become the
    archive's writer. It is behind when its oldest message waits for longer than a minute and four batches' age."""
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
    """The reaction to the ``failures``-th failed uploader in a row (from 1): wait in some state and start another one,
    or end the process. ``jitter`` in [0, 1) spreads the waits. ``has_owned``, ``has_stood_by``: whether this process
    has been the archive's writer, or has waited while another was: then refusals of the object store are no wrong
    settings but an outage, which is waited out. ``lasts``: whether the failure before had the same cause.
    """
    why = str(error)
    if isinstance(error, BrokerRestartedError):
        return RetryPlan(Condition(RunState.CONNECTING, why), RETRY_FIRST_S)
    if isinstance(error, FencedError):
        if settings.process.when_fenced == "exit":
            return RetryPlan(Condition(RunState.STOPPED, why), 0, error.exit_code)
        state = RunState.FENCED if has_owned else RunState.STANDBY
        return RetryPlan(Condition(state, why), settings.process.standby_retry_ms / 1000)
    has_worked = has_owned or has_stood_by
    if isinstance(error, EncryptionKeyError):
        if has_worked:
            return RetryPlan(Condition(RunState.BLOCKED, error.message, KEY_RING, error.hint), RETRY_LOG_S)
        return RetryPlan(Condition(RunState.STOPPED, why), 0, error.exit_code)
    for state, error_type in REFUSED.items():
        if isinstance(error, error_type):  # the log may be put back, or the archive repaired
            return RetryPlan(Condition(state, error.message, hint=error.hint), RETRY_LOG_S)
    if isinstance(error, EmptyCommitlogError) or (has_worked and isinstance(error, _MISSING_STORE)):
        return RetryPlan(Condition(RunState.BLOCKED, error.message, BROKER_STORE), RETRY_LOG_S)
    if isinstance(error, UnavailableError) or (has_worked and isinstance(error, _STORE_ERRORS)):
        ceiling_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** min(failures - 1, 10))
        return RetryPlan(_waiting_for(error, why, lasts=lasts), ceiling_s * (0.5 + jitter / 2))
    exit_code = error.exit_code if isinstance(error, TieredError) else EXIT_INTERNAL
    return RetryPlan(Condition(RunState.STOPPED, why), 0, exit_code)


def _waiting_for(error: BaseException, why: str, *, lasts: bool) -> Condition:
    """The state that is shown while a failed uploader waits to be started again: connecting, or blocked by the disk or
    store of ``error``. ``lasts``: the failure before had the same cause, so that the operator has to act."""
    if isinstance(error, KeyRingAwayError):
        return Condition(RunState.BLOCKED, why, KEY_RING)
    if isinstance(error, (*_STORE_ERRORS, StoreFullError)):  # local files are named by absolute paths
        return Condition(RunState.BLOCKED, why, LOCAL_DISK if why.startswith("/") else OBJECT_STORE)
    if isinstance(error, UnreadableError):
        return Condition(RunState.BLOCKED, why, LOCAL_DISK)
    if lasts:
        return Condition(RunState.BLOCKED, why, ARCHIVE)
    return Condition(RunState.CONNECTING, why)


MARGIN_BAD_SHARE = 6
"""A retention margin is bad below 1/6 of a short one: an hour where files are kept for half a day or longer."""
TIMER_LATE_S = 60.0
GARBAGE_LATE_S = 86_400
"""How long after its grace period garbage counts as late."""
ABOUT = (
    "unreadable",
    "broker-down",
    "retention-margin",
    "gaps",
    "set-aside",
    "broker-tables",
    "clock",
    "diverged-log",
    "expiry",
    "garbage",
    "compaction",
    "scrub",
    "pins",
    "index",
    "settings",
    "name-servers",
    "master",
    "plain-accounts",
    "mount",
    "mount-lease",
    "timers",
)


@dataclass(frozen=True)
class Finding:
    """``what`` is wrong, and the next ``step``. ``about``: one of ABOUT."""

    about: str
    what: str
    step: str
    is_bad: bool = False

    @property
    def text(self) -> str:
        """What was found and what to do, in one line."""
        return f"{self.what}. Next: {self.step}"


def of_report(report: StatusReport) -> list[Finding]:
    """What an operator of `tiered run` should look at, by ``report``: each problem with the next step."""
    found = [*_of_the_broker(report), *_of_the_archive(report)]
    if report.pin_note:
        step = "set pins.directory, or free space"
        found.append(
            Finding(
                "pins",
                "hard links (pins) do not keep all commitlog files until they are archived: "
                + report.pin_note,
                step,
            )
        )
    if report.settings_problem:
        what = f"changed settings are not in effect: {report.settings_problem}"
        found.append(Finding("settings", what, "correct the settings, and send SIGHUP again"))
    if report.timers is not None:
        found += _of_timers(report.timers)
    for relay in (report.proxy, report.slave):
        found += [] if relay is None else of_relay(relay)
    return found


def _of_timers(timers: TimerStatus) -> list[Finding]:
    """Problems of delayed messages (timers) that this process delivers: they are late, the broker refuses them, they
    cannot be delivered, or their messages are gone."""
    why = f": {timers.problem}" if timers.problem else ""
    due, is_late = duration_text(timers.overdue_seconds), timers.overdue_seconds > TIMER_LATE_S
    found = (
        (
            is_late,
            f"timers are not delivered: the first has been due for {due}{why}",
            "check that the broker runs and takes messages; they are delivered in order as soon as it does",
        ),
        (
            timers.postponed,
            f"the broker refuses {counted(timers.postponed, 'timer')}, sent again every ten minutes{why}",
            "correct the topic, or run tiered timers cancel: tiered timers ls lists them",
        ),
        (
            timers.refused,
            f"{counted(timers.refused, 'message')} to the gateway topic will not be delivered",
            "tiered timers ls --refused lists them, and why",
        ),
        (
            timers.dropped,
            f"{counted(timers.dropped, 'timer')} not delivered, as other messages have their queue offsets{why}",
            "send them again: the log names the last of each batch",
        ),
    )
    return [Finding("timers", what, step) for is_present, what, step in found if is_present]


def _of_the_broker(report: StatusReport) -> list[Finding]:
    """Problems of the broker: it is down, its clock is wrong, or it soon deletes messages that are not archived."""
    found = []
    # A report without a state is of a process that archives.
    is_archiving = not report.state or word_of(report.state) in {state.value for state in ARCHIVING}
    if report.bound_reason == BoundReason.DEAD.value and is_archiving:
        step = "start the broker; its log is archived to the end, and archiving continues with it"
        found.append(Finding("broker-down", "the broker does not run", step))
    if report.clock_off_seconds:
        off = duration_text(report.clock_off_seconds)
        what = f"the broker has stored messages {off} in the future by this host's clock: one of the two is wrong"
        found.append(
            Finding("clock", what, "set the clocks by NTP; until then ages of messages are not known")
        )
    margin_s = report.retention_margin_seconds
    if margin_s is not None and margin_s < report.short_retention_margin_seconds:
        found.append(
            Finding(
                "retention-margin",
                f"in {duration_text(margin_s)} the broker deletes messages that are not archived",
                "find out why uploads are slow or stopped, and raise the broker's fileReservedTime or free space there",
                is_bad=margin_s < report.short_retention_margin_seconds / MARGIN_BAD_SHARE,
            )
        )
    return found


TASKS = {
    EXPIRY: (
        "expiry",
        "nothing expires",
        "check the rules with tiered expire ARCHIVE_URL; if they are right, add --apply --yes",
    ),
    GARBAGE_COLLECTION: (
        "garbage",
        "garbage is not deleted",
        "let this account delete, or run tiered gc --every with one that may and set gc.every_ms to 0",
    ),
    COMPACTION: (
        "compaction",
        "small objects are not joined",
        "correct the cause, or set compaction.every_ms to 0; until then reads cost more requests",
    ),
    SCRUB: ("scrub", "the archive is not whole, or cannot be read back", "tiered repair ARCHIVE_URL"),
    INDEX_BUILDING: (
        "index",
        "the message index is not updated",
        "run tiered doctor ARCHIVE_URL; queries by key read the messages themselves until it is updated",
    ),
}
"""What a problem of a task is about, and the next step."""


def _of_the_archive(report: StatusReport) -> list[Finding]:
    """Problems of the archive: messages that are damaged, lost or hidden, garbage that is not deleted, tasks that
    fail. Messages were set aside (not archived) where the broker used their queue offsets again."""
    found = [of_unreadable(report.unreadable, report.broker_min_phys)] if report.unreadable else []
    hidden = counted(report.hidden_messages, "archived message") if report.hidden_messages else "messages"
    overdue_s = report.garbage_overdue_seconds
    collects = not report.task(GARBAGE_COLLECTION).problem
    indexes = not report.task(INDEX_BUILDING).problem
    conditions = (
        (
            report.gaps,
            "gaps",
            f"{counted(report.gaps, 'gap')}: messages that neither the broker's log nor the archive has any more",
            "tiered ls ARCHIVE_URL lists them with their reasons",
        ),
        (
            report.set_aside_messages,
            "set-aside",
            f"{counted(report.set_aside_messages, 'message')} not archived (set aside): the broker used their queue "
            "offsets again, and serves other messages there",
            "tiered ls ARCHIVE_URL lists their queues; only the broker's log has them, until it deletes its files",
        ),
        (
            report.damaged_tables,
            "broker-tables",
            f"damaged tables of the broker are not archived: {'; '.join(report.damaged_tables)}",
            "let the broker write them again, or put back their .bak files",
        ),
        (
            report.hidden_messages or report.diverged_objects,
            "diverged-log",
            f"the broker's log was truncated or replaced: {hidden} that it lacks "
            f"{'is' if report.hidden_messages == 1 else 'are'} hidden",
            "tiered ls ARCHIVE_URL --histories lists them; put the broker's earlier log back, or do nothing",
        ),
        (
            collects and overdue_s > GARBAGE_LATE_S,
            "garbage",
            f"garbage is not deleted: the oldest is {duration_text(overdue_s)} past its grace period",
            "tiered gc ARCHIVE_URL --apply, with an account that may delete",
        ),
        (
            indexes and report.unindexed_objects,
            "index",
            f"not in the message index: {counted(report.unindexed_objects, 'damaged object')}",
            "tiered verify ARCHIVE_URL --full names them",
        ),
    )
    found += [Finding(about, what, step) for is_present, about, what, step in conditions if is_present]
    for task in report.tasks:
        if task.problem:
            about, what, step = TASKS.get(task.name, (task.name, f"{task.name} has not run", "see the log"))
            if task.is_outage:
                step = "run tiered doctor ARCHIVE_URL; it is tried again every minute"
            elif task.name == EXPIRY and "retention.max_share" not in task.problem:
                step = "correct the cause; it is tried again at the next pass"
            found.append(Finding(about, f"{what}: {task.problem}", step))
    return found


def of_catalog(
    state: CatalogState, now_ms: int, gc: GcSettings, unreadable: Sequence[UnreadableRange] = ()
) -> list[Finding]:
    """What an operator should look at in an archive, by its catalog state alone, for a process that does not write it.
    ``unreadable``: the messages that the process could not read."""
    return _of_the_archive(StatusReport(unreadable=tuple(unreadable), **catalog_figures(state, now_ms, gc)))


def of_unreadable(ranges: Sequence[UnreadableRange], broker_min_phys: int | None = None) -> Finding:
    """The problem of archived messages that cannot be read, in one or more ``ranges``, and whether the broker still has
    them. ``broker_min_phys``: where the broker's log begins; None if unknown."""
    first, others = ranges[0], len(ranges) - 1
    more = f" and {counted(others, 'more range')}" if others else ""
    what = (
        f"{counted(unreadable_messages(ranges), 'archived message')} cannot be read: {first.name}{more}, because "
        f"{first.object_key} is missing or damaged"
    )
    if broker_min_phys is not None:
        count = sum(found.min_phys >= broker_min_phys for found in ranges)
        has = {0: "no longer has them", len(ranges): "still has them"}
        what += f"; the broker {has.get(count, f'still has those of {count} of {len(ranges)} ranges')}"
    step = "restore the object from a version or a copy of the bucket, or run tiered repair ARCHIVE_URL"
    return Finding("unreadable", what, step, is_bad=True)


def unreadable_messages(ranges: Sequence[UnreadableRange]) -> int:
    """How many offsets ``ranges`` have."""
    return sum(found.end - found.begin for found in ranges)


def of_relay(relay: RelayStatus) -> list[Finding]:
    """What an operator of proxy or slave mode should look at: clients without TLS, name servers or a master that do not
    answer."""
    found = []
    if relay.has_plain_accounts:
        what = "clients send signed requests over connections without TLS"
        found.append(Finding("plain-accounts", what, "set serve.tls_certificate"))
    if isinstance(relay, ProxyStatus) and relay.name_server_problem:
        what = f"no name server answers, so that clients find no route: {relay.name_server_problem}"
        found.append(Finding("name-servers", what, "start a name server, or correct broker.name_servers"))
    if isinstance(relay, SlaveStatus) and not relay.is_master_available:
        why = f": {relay.master_failure}" if relay.master_failure else ""
        what = f"the master is not available{why}"
        found.append(Finding("master", what, "check that the broker runs, and that broker.address is right"))
    return found
