"""One uploader of the process: built from settings, run once, then closed. The process starts it in lifecycle.py."""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fetcher.access import open_access
from rocketmq_tiered.maintenance.repair.abandonment import abandon
from rocketmq_tiered.maintenance.throttle import Load
from rocketmq_tiered.process.archive_tasks import ArchiveTasks
from rocketmq_tiered.process.broker_side import (
    BrokerOffsetsClient,
    TlsCache,
    address_of,
    credentials_of,
    names_of,
    open_store_of,
    pin_directories,
    read_conf,
    store_path,
    topic_filter_of,
)
from rocketmq_tiered.process.compaction_process import ChildRewrite, ChildStore
from rocketmq_tiered.process.instance import ArchiveMarker
from rocketmq_tiered.process.report import StatusReport
from rocketmq_tiered.process.reporter import Reporter
from rocketmq_tiered.sending.timer_broker import RemoteTimerBroker
from rocketmq_tiered.sending.timer_messages import TimerMessages
from tiered.archive.task import EXPIRY
from tiered.broker_store.bound import BoundReason
from tiered.broker_store.conf import BrokerConf, BrokerNames
from tiered.broker_store.pins import PinKeeper, PinLimits
from tiered.catalog.claims import BACKFILL
from tiered.catalog.state import CatalogState
from tiered.console import duration_text
from tiered.errors import FencedError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.object_store.create_race import require_exclusive_creates
from tiered.object_store.interface import ObjectStore, StoreOptions
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.request_metrics import StoreMetrics
from tiered.remoting.client import BrokerClient
from tiered.remoting.tls import ClientTls
from tiered.settings.rules_in_force import rules_document
from tiered.settings.sections import Settings
from tiered.settings.topic_rules import TopicRules
from tiered.timestamps import wall_ms
from uploader.log_rule import LogLimits
from uploader.offload import (
    Environment,
    ObjectOptions,
    Offloader,
    OffloadIdentity,
    OffloadResult,
    OffloadStatus,
)

WAIT_MAX_MS = 3_600_000

Progress = tuple[int, int, int]
"""Epoch, log history and physical end of an archive."""


@dataclass
class StandbyWatch:
    """What a process on standby has seen of an archive that another process writes, and when it takes over."""

    lag_ms: int
    _progress: Progress | None = None
    _since_ms: float = 0.0
    _seen_ms: float | None = None
    """When the archive was seen without progress although the log has more; None otherwise."""
    _wait_ms: int = field(default=0)

    def may_take_over(self, state: CatalogState, *, has_lag: bool, now_ms: float) -> bool:
        """Whether this process takes the archive over now from the process that wrote ``state``: that one has made no
        progress for ``lag_ms`` although there was something to archive. ``has_lag``: whether the master's log has
        messages that are not archived; ``now_ms``: of a monotonic clock."""
        progress = state.epoch, state.cursor.history, state.cursor.phys
        self._seen_ms = now_ms if has_lag else None
        if progress != self._progress or not has_lag:
            self._progress, self._since_ms = progress, now_ms
            return False
        wait_ms = self._wait_ms or self.lag_ms
        if not self.lag_ms or now_ms - self._since_ms < wait_ms:
            return False
        # Two writers that both cannot upload must not fence each other in turn.
        self._wait_ms = min(2 * wait_ms, WAIT_MAX_MS)
        self._progress = self._seen_ms = None
        return True

    @property
    def is_silent(self) -> bool:
        """Whether the other process archived nothing between the last two looks, although the log here has more."""
        return self._seen_ms is not None and self._seen_ms > self._since_ms

    @property
    def plan(self) -> str:
        """A clause for messages: when this process takes the archive over, by what it saw last."""
        if not self.lag_ms:
            return "this process takes over only with --take-over, because process.take_over_lag_ms is 0"
        wait_ms = self._wait_ms or self.lag_ms
        if self._seen_ms is not None:
            left_ms = wait_ms - (self._seen_ms - self._since_ms)
            return f"this process takes over in {duration_text(left_ms / 1000)} unless the archive advances"
        return (
            "this process takes over once its broker is the master and has had messages to archive for "
            f"{duration_text(wait_ms / 1000)} without any progress of the archive"
        )

    def archived(self) -> None:
        """This process has archived messages: the next silence counts as the first."""
        self._wait_ms, self._progress, self._seen_ms = 0, None, None


logger = logging.getLogger(__name__)

TIMER_TIMEOUT_S = 10.0
BROKER_HINT = "check the broker, its listenPort, and broker.address or --broker-conf"


class ProcessPins:
    """The pins of one process, passed from job to job: their descriptors keep files open."""

    def __init__(self) -> None:
        self.keeper: PinKeeper | None = None
        """The pins of the current job."""

    def hand_over(self, keeper: PinKeeper | None) -> PinKeeper | None:
        """Make ``keeper`` the holder of the pins, the hard links that keep commitlog files until they are archived. It
        is of a new uploader and inherits the pins of the previous one; None, as pins are disabled now, closes them.
        Returns ``keeper``."""
        if self.keeper is not None and keeper is not None:
            keeper.inherit(self.keeper)
        elif self.keeper is not None:
            self.keeper.close()
        self.keeper = keeper
        return keeper

    def close(self) -> None:
        """Release descriptors at the end of the process."""
        self.hand_over(None)


@dataclass(frozen=True)
class Writer:
    """The writer: a stable instance id, and "run" or "backfill". ``state_dir`` None: no pins and no archive marker."""

    instance: str
    kind: str
    take_over: bool
    state_dir: Path | None = None
    committed: Callable[[CatalogState], None] = lambda state: None
    """Called with the state after each commit of this writer."""
    pins: ProcessPins = field(default_factory=ProcessPins)
    tls: TlsCache = field(default_factory=TlsCache)
    new_archive: bool = False
    """Whether an archive may begin though this instance has archived to another one."""
    abandons: int | None = None
    """So many objects of a lost archive may be abandoned for a new one."""
    standby: StandbyWatch | None = None
    """None: this process does not wait as a standby, and takes over only with ``take_over``."""
    retires: bool = False
    """Whether the archive is marked as that of a retired broker once all of its log is in it."""
    reads: Callable[[], int] = lambda: 0
    """Reads by clients of this process so far."""


class UploaderJob:
    """Builds an uploader and its stores, runs it once, and closes them."""

    def __init__(self, settings: Settings, writer: Writer, metrics: StoreMetrics) -> None:
        if not settings.archive.url:
            raise UsageError("archive.url is not set", hint="give --url file:///… or s3://…")
        with ExitStack() as opened:
            self._build(settings, writer, metrics, opened)
            self._opened = opened.pop_all()

    def _build(self, settings: Settings, writer: Writer, metrics: StoreMetrics, opened: ExitStack) -> None:
        """Open what the uploader of this job needs: broker store, archive, connection to the broker, tasks and
        reporter. ``opened`` closes it in reverse order, also after a failure half-way."""
        conf = read_conf(settings)
        timeout_s = settings.broker.request_timeout_ms / 1000
        tls = writer.tls.of(settings)
        pins = writer.pins.hand_over(_pin_keeper(settings, conf, writer))
        pinned = pins.files if pins is not None else None
        store = opened.enter_context(open_store_of(settings, conf, pinned))
        names: BrokerNames = names_of(settings, store)
        broker_offsets = BrokerOffsetsClient(
            address_of(settings, conf),
            timeout_s,
            credentials_of(settings),
            tls,
            name=conf.broker if conf is not None else "",
        )
        opened.callback(broker_offsets.close)
        self._broker_offsets, self._standby = broker_offsets, writer.standby
        topic_filter = topic_filter_of(settings, conf, names.cluster, names.broker)
        archive = open_store(settings.archive.url, StoreOptions(settings.object_store), metrics=metrics)
        opened.callback(archive.close)
        prefix = archive_prefix(names.cluster, names.broker)
        keys, own_keys = archive.keys(prefix), TopicRules.of(settings).own_keys
        keys.begin(own_keys, is_owner=writer.kind != BACKFILL)
        self.names = names
        self._log = store.commit_log
        self.offloader = Offloader(
            store,
            archive,
            OffloadIdentity(names.cluster, names.broker, writer.instance, writer.kind),
            settings.offload,
            topic_filter=topic_filter,
            offsets_source=broker_offsets.ask,
            silence=lambda: broker_offsets.silence,
            take_over=writer.take_over,
            log_limits=_log_limits(settings, writer),
            pins=pins,
            environment=replace(
                _with_standby(_environment(writer, archive, names), writer, self._has_standby_lag),
                claimed=partial(keys.own, own_keys),
            ),
            options=ObjectOptions(
                rules=TopicRules.of(settings),
                rules_document=_rules_to_commit(settings, writer),
                timers=settings.timers,
                is_encrypted=settings.object_store.encrypts,
            ),
        )
        own = PrefixedStore(archive, prefix)  # this broker's objects
        self._own, self._writer = own, writer
        self._batch_bytes, self._reads = settings.offload.batch_bytes, writer.reads
        self._tasks = ArchiveTasks(own, self.offloader.catalog_writer, settings, self._load)
        if settings.scrub.cycle_ms and writer.state_dir is not None and writer.kind == "run":
            self._tasks.add_scrub(own, writer.state_dir, store.commit_log)
        self._add_compaction(settings, writer, metrics, opened)
        if settings.timers.topic and not settings.archive.url.startswith("memory:"):
            self._add_timers(own, settings, tls, opened)
        opened.callback(self._tasks.stop)
        head = StatusReport(
            archive_url=settings.archive.url,
            cluster=names.cluster,
            broker=names.broker,
            writer=writer.instance,
            gc_interval_seconds=self._tasks.loops[EXPIRY].status.interval_seconds,
        )
        view = open_store_of(settings, conf, pinned)  # the reporter reads in other threads
        self._reporter = Reporter(head, view, topic_filter, gc=settings.gc)
        opened.callback(self._reporter.close)

    def _add_compaction(
        self, settings: Settings, writer: Writer, metrics: StoreMetrics, opened: ExitStack
    ) -> None:
        """Add the tasks that join small objects and that keep the latest message of each key, unless they are disabled
        or there is no state directory for temporary files. They write in a process and over connections of their own,
        within the limits of compaction.* and not those of uploads, so that their large requests delay no upload."""
        in_memory = settings.archive.url.startswith("memory:")  # no other process can open it
        if writer.state_dir is None or not settings.compaction.every_ms or in_memory:
            return
        unlimited = StoreOptions(replace(settings.object_store, upload_bytes_per_s=0))
        archive = open_store(settings.archive.url, unlimited, metrics=metrics)
        opened.callback(archive.close)
        own = PrefixedStore(archive, archive_prefix(self.names.cluster, self.names.broker))
        child_store = ChildStore(own.url, unlimited, settings.compaction, settings.process.log_level)
        writing = partial(ChildRewrite, child_store, metrics)
        self._tasks.add_compaction(own, writer.state_dir / "compaction", writing)
        self._tasks.add_key_compaction(own, writer.state_dir / "keys", writing)

    def _add_timers(
        self, own: ObjectStore, settings: Settings, tls: ClientTls | None, opened: ExitStack
    ) -> None:
        """Add the delivery of timers, which reads their messages from the archive and has its own connection to the
        broker."""
        credentials, offsets = credentials_of(settings), self._broker_offsets
        messages = TimerMessages(
            partial(
                open_access,
                settings.archive.url,
                cluster=self.names.cluster,
                broker=self.names.broker,
                settings=settings,
            )
        )

        def broker(is_stopped: Callable[[], bool]) -> RemoteTimerBroker:
            """The broker that timers are sent to when they are due: the one whose offsets this job reads, over a
            connection of its own, which is closed at the end of the job."""
            made = RemoteTimerBroker(
                lambda: offsets.address,
                lambda address: BrokerClient(address, TIMER_TIMEOUT_S, credentials, tls),
                is_stopped,
                settings.timers,
            )
            opened.callback(made.close)
            return made

        opened.callback(messages.close)
        self._tasks.add_timers(own, broker, messages.read)

    def _load(self) -> Load:
        """How busy uploader and clients are, for tasks that yield to them. Before the first status the tasks wait, as
        they do for an object store that blocks uploads."""
        status = self.offloader.status()
        if status is None:
            return Load(store_problem="the uploader is starting")
        lag_bytes = self.expected_end_phys(status) - status.committed_phys
        return Load(lag_bytes, self._batch_bytes, status.store_problem, self._reads())

    def run(self, stop: threading.Event) -> None:
        """Follow the broker until ``stop``."""
        self._tasks.start(stop)
        self.offload(stop, follow=True)

    def offload(self, stop: threading.Event, *, follow: bool) -> OffloadResult:
        """Run the uploader once, until ``stop`` or, without ``follow``, until the log's end is archived; then close all
        stores. Raises what Offloader.run raises; for a process on standby FencedError says when it takes over."""
        with self._opened:
            if self._writer.new_archive:  # as the operator requested for a lost archive
                abandon(self._own, (self.names.cluster, self.names.broker), self._writer.abandons, wall_ms())
            try:
                return self.offloader.run(stop, follow=follow)
            except FencedError as error:
                if self._standby is None:
                    raise
                raise FencedError(error.message, hint=self._standby.plan) from error

    def _has_standby_lag(self, state: CatalogState, log_end_phys: int | None) -> bool:
        """While another process writes the archive, whose state is ``state``: put the lag behind it into the report,
        and return whether the log here has messages that are not archived. False if the broker here is not the master
        or does not answer."""
        report = self._reporter.stand_by(state, log_end_phys)
        return log_end_phys is not None and self._broker_offsets.is_master and bool(report.queues)

    def expected_end_phys(self, status: OffloadStatus) -> int:
        """The estimated end of what may be uploaded, without files that a stopped broker has only preallocated."""
        return max(status.committed_phys, min(status.bound_phys, self._log.data_end_phys()))

    def close(self) -> None:
        """Close without a run."""
        self._opened.close()

    def report(self) -> StatusReport:
        """The status of uploader, lag and tasks, and why the broker is silent, if it is. Callable from any thread, also
        before and after the run."""
        report = self._reporter.report(self.offloader.status)
        report = replace(
            report,
            tasks=(*report.tasks, *self._tasks.statuses),
            **self._tasks.figures,
        )
        if report.bound_reason != BoundReason.FROZEN.value:
            return report
        problem = self._broker_offsets.silence or "it reports no offsets"
        return replace(
            report, broker_address=self._broker_offsets.address, broker_problem=f"{problem}; {BROKER_HINT}"
        )


def _rules_to_commit(settings: Settings, writer: Writer) -> dict[str, Any]:
    """The topic rules and retention that this writer commits to the archive. A backfill without rules of its own
    commits none, so that those of `tiered run` stay in force."""
    rules = rules_document(settings)
    return {} if writer.kind == BACKFILL and rules == rules_document(Settings()) else rules


TRUNCATE_MAX_BYTES = 256 << 20
"""`tiered run` continues with a log that was truncated by up to this, what a broker loses at a power failure; beyond it
archiving stops and asks."""


def _log_limits(settings: Settings, writer: Writer) -> LogLimits:
    truncate_max_bytes = TRUNCATE_MAX_BYTES if writer.kind == "run" else None
    return LogLimits(settings.archive.replace_log, truncate_max_bytes, settings.archive.same_broker)


def _with_standby(
    environment: Environment, writer: Writer, has_lag: Callable[[CatalogState, int | None], bool]
) -> Environment:
    """``environment`` of an uploader, which takes the archive over from another process when ``writer.standby`` says
    so, and logs when that process stops archiving; unchanged if there is no standby. ``has_lag``: whether the log here
    has more than the state it is given."""
    watch = writer.standby
    if watch is None:
        return environment

    def may_take_over(state: CatalogState, log_end_phys: int | None) -> bool:
        """Whether to take over now. Called with each state read from the archive while another process is its
        writer."""
        lags, was_silent = has_lag(state, log_end_phys), watch.is_silent
        may = watch.may_take_over(state, has_lag=lags, now_ms=time.monotonic() * 1000)
        owner = state.owner
        host = owner.host if owner is not None else "an unknown host"
        if watch.is_silent and not was_silent:
            logger.warning("the archive's writer on %s archives nothing: %s", host, watch.plan)
        if may:
            logger.warning(
                "taking the archive over: its writer on %s archived nothing while the log grew",
                host,
                extra={"owner": owner and owner.instance, "lag_ms": watch.lag_ms},
            )
        return may

    def committed(state: CatalogState) -> None:
        watch.archived()
        environment.committed(state)

    return replace(environment, may_take_over=may_take_over, committed=committed)


def _environment(writer: Writer, archive: ObjectStore, names: BrokerNames) -> Environment:
    """The functions that the uploader of ``writer`` calls for what it does not do itself, such as logging. With a state
    directory, whose markers name the archives written before, an empty archive is refused if it was not empty then."""
    own = PrefixedStore(archive, archive_prefix(names.cluster, names.broker))
    environment = Environment(
        retires=writer.retires,
        committed=writer.committed,
        refuse_empty=partial(require_exclusive_creates, own),
    )
    if writer.state_dir is None or archive.url.startswith("memory:"):
        return environment
    marker = ArchiveMarker(writer.state_dir, own.url)

    def refuse_empty() -> None:
        """Called for an archive without commits: raise if a new one must not begin there."""
        if not writer.new_archive:
            marker.refuse_empty()
        require_exclusive_creates(own)
        logger.info("a new archive begins at %s", own.url)

    return replace(environment, archive_exists=marker.create, refuse_empty=refuse_empty)


def _pin_keeper(settings: Settings, conf: BrokerConf | None, writer: Writer) -> PinKeeper | None:
    """What keeps commitlog files by hard links (pins) until they are archived; None if pins are disabled. Links that an
    earlier process left are then removed, as they occupy the broker's disk."""
    if writer.state_dir is None:
        return None
    directories, former = pin_directories(settings, conf, writer.state_dir)
    broker = settings.archive.broker or (conf.broker if conf is not None else "")
    owner = f"{broker} in {os.path.realpath(store_path(settings, conf))}"
    keeper = PinKeeper(
        directories, PinLimits().below_broker(conf or BrokerConf()), owner=owner, former=former
    )
    if keeper.problem:
        logger.warning(
            "hard links (pins) that an earlier process made are not used, so the broker may delete these commitlog "
            "files before they are archived: %s",
            keeper.problem,
        )
    if settings.pins.enabled:
        return keeper
    try:
        keeper.release_all()
    except OSError as error:
        logger.warning(
            "hard links to commitlog files (pins) in %s cannot be removed: delete them, as they take disk space: %s",
            ", ".join(map(str, directories)),
            error,
        )
    return None
