"""One uploader of the process: built from settings, run once, then closed. The process starts it in lifecycle.py."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
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
from rocketmq_tiered.process.compaction_process import ChildStore, writing_in_child
from rocketmq_tiered.process.instance import ArchiveMarker
from rocketmq_tiered.process.report import StatusReport
from rocketmq_tiered.process.reporter import Reporter
from rocketmq_tiered.sending.timer_broker import RemoteTimerBroker
from rocketmq_tiered.sending.timer_messages import TimerMessages
from tiered.broker_store.bound import BoundReason
from tiered.broker_store.conf import BrokerConf, BrokerNames
from tiered.broker_store.pins import PinKeeper, PinLimits
from tiered.catalog.claims import BACKFILL
from tiered.catalog.state import CatalogState
from tiered.console import RECORD_ATTRIBUTES, duration_text
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
    """What one process has seen of an archive that another writer owns."""

    lag_ms: int
    _progress: Progress | None = None
    _since_ms: float = 0.0
    _seen_ms: float | None = None
    """When the archive was seen without progress although the log has more; None otherwise."""
    _wait_ms: int = field(default=0)

    def may_take_over(self, state: CatalogState, *, has_lag: bool, now_ms: float) -> bool:
        """Whether the owner of ``state`` is to be fenced now. ``has_lag``: whether the master's log has messages that
        are not archived; ``now_ms``: monotonic."""
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
        """Whether the owner was silent between the last two looks, although the log here has more."""
        return self._seen_ms is not None and self._seen_ms > self._since_ms

    @property
    def plan(self) -> str:
        """When this process takes over, by what it saw last."""
        if not self.lag_ms:
            return "this one takes over only with --take-over, because process.take_over_lag_ms is 0"
        wait_ms = self._wait_ms or self.lag_ms
        if self._seen_ms is not None:
            left_ms = wait_ms - (self._seen_ms - self._since_ms)
            return f"this one takes over in {duration_text(left_ms / 1000)} unless the archive advances"
        return (
            "this one takes over once its broker is the master and has had messages to archive for "
            f"{duration_text(wait_ms / 1000)} without any progress of the archive"
        )

    def archived(self) -> None:
        """This process has archived messages: the next silence counts as the first."""
        self._wait_ms, self._progress, self._seen_ms = 0, None, None


logger = logging.getLogger(__name__)

LOSSES = frozenset({"gap recorded", "commitlog missing: its messages are lost to the archive"})
TIMER_TIMEOUT_S = 10.0
BROKER_HINT = "check the broker, its listenPort, and broker.address or --broker-conf"


class ProcessPins:
    """The pins of one process, passed from job to job: their descriptors keep files open."""

    def __init__(self) -> None:
        self.keeper: PinKeeper | None = None
        """The pins of the current job."""

    def hand_over(self, keeper: PinKeeper | None) -> PinKeeper | None:
        """``keeper`` of a new job, with the pins of the previous one; None: pins are disabled."""
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
    """None: no standby; never takes over without ``take_over``."""
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
        """Open everything an uploader needs; ``opened`` closes it in reverse order, also after a failure half-way."""
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
            environment=_with_standby(_environment(writer, archive, names), writer, self._has_standby_lag),
            options=ObjectOptions(
                settings.index, TopicRules.of(settings), _rules_to_commit(settings, writer), settings.timers
            ),
        )
        own = PrefixedStore(archive, archive_prefix(names.cluster, names.broker))
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
            gc_interval_seconds=self._tasks.expiry.status.interval_seconds,
        )
        view = open_store_of(settings, conf, pinned)
        self._reporter = Reporter(head, view, topic_filter, gc=settings.gc)
        opened.callback(self._reporter.close)

    def _add_compaction(
        self, settings: Settings, writer: Writer, metrics: StoreMetrics, opened: ExitStack
    ) -> None:
        """Adds the task of object compaction. It works in a process of its own, over connections and with a limit of
        its own, so that its large requests delay no upload."""
        in_memory = settings.archive.url.startswith("memory:")
        if writer.state_dir is None or not settings.compaction.every_ms or in_memory:
            return
        unlimited = StoreOptions(replace(settings.object_store, upload_bytes_per_s=0))
        archive = open_store(settings.archive.url, unlimited, metrics=metrics)
        opened.callback(archive.close)
        own = PrefixedStore(archive, archive_prefix(self.names.cluster, self.names.broker))
        spool = writer.state_dir / "compaction"
        place = ChildStore(own.url, unlimited, settings.compaction, settings.process.log_level)
        self._tasks.add_compaction(own, spool, lambda share: writing_in_child(place, share, metrics))
        self._tasks.add_key_compaction(
            own, spool.with_name("keys"), lambda share: writing_in_child(place, share, metrics)
        )

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
            """The broker that timers are handed over to: the one whose offsets are read, over a connection of its
            own."""
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
        status = self.offloader.status()
        if status is None:
            return Load(store_problem="starting")
        lag_bytes = self.expected_end_phys(status) - status.committed_phys
        return Load(lag_bytes, self._batch_bytes, status.store_problem, self._reads())

    def run(self, stop: threading.Event) -> None:
        """Follow the broker until ``stop``."""
        self._tasks.start(stop)
        self.offload(stop, follow=True)

    def offload(self, stop: threading.Event, *, follow: bool) -> OffloadResult:
        """Run the uploader, then close all stores. Raises what Offloader.run raises."""
        with self._opened:
            self._begin()
            try:
                return self.offloader.run(stop, follow=follow)
            except FencedError as error:
                if self._standby is None:
                    raise
                raise FencedError(error.message, hint=self._standby.plan) from error

    def _begin(self) -> None:
        """Abandon the objects of a lost archive, if that was requested."""
        if self._writer.new_archive:
            abandon(self._own, (self.names.cluster, self.names.broker), self._writer.abandons, wall_ms())

    def _has_standby_lag(self, state: CatalogState, log_end_phys: int | None) -> bool:
        """Report the lag behind another writer's archive. Whether the master's log has messages that are not archived;
        False if this is not the master's, or the broker does not answer."""
        report = self._reporter.stand_by(state, log_end_phys)
        return log_end_phys is not None and self._broker_offsets.is_master and bool(report.queues)

    def expected_end_phys(self, status: OffloadStatus) -> int:
        """The estimated end of what may be uploaded, without files that a stopped broker has only preallocated."""
        return max(status.committed_phys, min(status.bound_phys, self._log.data_end_phys()))

    def close(self) -> None:
        """Close without a run."""
        self._opened.close()

    def report(self) -> StatusReport:
        """The full report; from any thread, also before and after the run."""
        report = self._reporter.report(self.offloader.status)
        tasks = (*report.tasks, *self._tasks.statuses)
        report = replace(
            report,
            tasks=tasks,
            compaction=self._tasks.compaction,
            key_compaction=self._tasks.key_compaction,
            timers=self._tasks.timers,
            scrub=self._tasks.scrub,
            unreadable=self._tasks.unreadable,
        )
        if report.bound_reason != BoundReason.FROZEN.value:
            return report
        problem = self._broker_offsets.silence or "it reports no offsets"
        return replace(
            report, broker_address=self._broker_offsets.address, broker_problem=f"{problem}; {BROKER_HINT}"
        )


def _rules_to_commit(settings: Settings, writer: Writer) -> dict[str, Any]:
    """A backfill without rules leaves those of the archive to `tiered run`."""
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
    """Let a process on standby take over, and log when the other writer's archive stops advancing."""
    watch = writer.standby
    if watch is None:
        return environment

    def may_take_over(state: CatalogState, log_end_phys: int | None) -> bool:
        """Called with each state read from the archive while another writer owns it."""
        lags, was_silent = has_lag(state, log_end_phys), watch.is_silent
        may = watch.may_take_over(state, has_lag=lags, now_ms=time.monotonic() * 1000)
        if watch.is_silent and not was_silent:
            logger.warning("standby: the archive does not advance: %s", watch.plan)
        if may:
            owner = state.owner
            logger.warning(
                "taking over: the archive has not advanced while the log grew",
                extra={
                    "owner": owner and owner.instance,
                    "host": owner and owner.host,
                    "lag_ms": watch.lag_ms,
                },
            )
        return may

    def committed(state: CatalogState) -> None:
        watch.archived()
        environment.committed(state)

    return replace(environment, may_take_over=may_take_over, committed=committed)


def _environment(writer: Writer, archive: ObjectStore, names: BrokerNames) -> Environment:
    """What the uploader gets from its process. A state directory also has a marker of each archive that existed."""
    own = PrefixedStore(archive, archive_prefix(names.cluster, names.broker))
    environment = Environment(
        log=_log,
        retires=writer.retires,
        committed=writer.committed,
        refuse_empty=partial(require_exclusive_creates, own),
    )
    if writer.state_dir is None or archive.url.startswith("memory:"):
        return environment
    marker = ArchiveMarker(writer.state_dir, own.url)

    def refuse_empty() -> None:
        if not writer.new_archive:
            marker.refuse_empty()
        require_exclusive_creates(own)
        logger.info("beginning a new archive", extra={"archive": own.url})

    return replace(environment, archive_exists=marker.create, refuse_empty=refuse_empty)


def _pin_keeper(settings: Settings, conf: BrokerConf | None, writer: Writer) -> PinKeeper | None:
    """None if pins are disabled. Links of an earlier process are released: they occupy the broker's disk."""
    if writer.state_dir is None:
        return None
    places, former = pin_directories(settings, conf, writer.state_dir)
    broker = settings.archive.broker or (conf.broker if conf is not None else "")
    owner = f"{broker} in {os.path.realpath(store_path(settings, conf))}"
    keeper = PinKeeper(places, PinLimits().below_broker(conf or BrokerConf()), owner=owner, former=former)
    if keeper.problem:
        logger.warning(
            "commitlog files that an earlier process kept (pins) are not kept any longer",
            extra={"problem": keeper.problem},
        )
    if settings.pins.enabled:
        return keeper
    try:
        keeper.release_all()
    except OSError as error:
        logger.warning(
            "hard links to commitlog files (pins) that an earlier process made are not removed: delete them, as they "
            "take disk space",
            extra={"problem": str(error)},
        )
    return None


def _log(message: str, fields: Mapping[str, object]) -> None:
    """Log an event of the uploader: losses as errors, other events with an error as warnings."""
    level = logging.INFO
    if "error" in fields:
        level = logging.WARNING
    if message in LOSSES:
        level = logging.ERROR
    extra = {f"{name}_" if name in RECORD_ATTRIBUTES else name: value for name, value in fields.items()}
    logger.log(level, message, extra=extra)
