"""Ships one broker's commitlog into one archive: starts, wires and stops the parts of the write path.

    start     load the catalog → check the log line → claim the epoch (back-fill: only when there is something to put)
    follow    dispatch thread + compensate thread → closed batches → builder thread → committer thread
    back-fill the same parts until the end of the log, then hide what the broker no longer shows
    stop      close the open batch, drain, release the epoch

Used alike by `tiered run` and `tiered backfill`. Owns threads and their order; decisions live in the other modules.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.config import state_fingerprint, topic_names_backup
from tiered.broker_store.liveness import LivenessReport
from tiered.broker_store.pins import PinKeeper, PinStatus
from tiered.broker_store.store import BrokerStore
from tiered.catalog.commit import CommitInvalidError
from tiered.catalog.protocol import CatalogWriter, log_checks
from tiered.errors import CorruptionError, FencedError, UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.formats.segment import BlockCodec
from tiered.kernels.queue_table import QueueTable
from tiered.model.queue import SCHEDULE_TOPIC, QueueKey, TopicFilter
from tiered.model.tables import QUEUE_HIDDEN
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.protocol import ObjectStore
from tiered.settings.sections import OffloadSettings
from uploader.attempts import AttemptPolicy
from uploader.bound_source import BoundSource, WordSource
from uploader.broker_state_archive import BrokerStateArchive
from uploader.cycle_plan import CyclePlanner
from uploader.cycle_upload import IN_FLIGHT_MAX, CycleUploader, UploadContext, UploadCounters
from uploader.dispatcher import StepResult, TieredDispatcher
from uploader.double_buffer import DoubleBuffer
from uploader.follow import ASK_EVERY_MS, REFRESH_FILES_EVERY_MS, AdaptivePoll, Every
from uploader.log_batch import LogBatch, LogBatchPool
from uploader.log_feed import FeedBound, LogFeed
from uploader.log_line import CheckResult, compare, find_new_line
from uploader.queue_tails import QueueTails
from uploader.visibility import DeletedTopics, hidden_queues

ARENA_SLACK = 0.25
"""Room beyond batch_bytes, so that a retry can take newer data along."""
SHORT_WAIT_S = 0.05
STATE_EVERY_MS = 60_000
PIN_EVERY_MS = 5_000


@dataclass(frozen=True)
class OffloadResult:
    """What one run did."""

    messages: int
    raw_bytes: int
    stored_bytes: int
    commits: int
    objects: int
    from_phys: int
    to_phys: int
    gaps: int
    damaged: int
    lost: int
    hidden: int
    duration_s: float


@dataclass(frozen=True)
class OffloadStatus:
    """A moment's view, for status, metrics and progress; sizes in bytes, physical offsets in the commitlog."""

    committed_phys: int
    read_phys: int
    bound_phys: int
    log_min_phys: int
    log_end_phys: int
    lag_bytes: int
    lag_ms: int
    epoch: int
    version: int
    fenced: bool
    memory_used_bytes: int
    memory_budget_bytes: int
    last_error: str
    pins: PinStatus | None
    bound_reason: str
    counters: UploadCounters


@dataclass(frozen=True)
class OffloadIdentity:
    """Whose archive, and who writes it."""

    cluster: str
    broker: str
    instance: str
    kind: str
    """"run" or "backfill"."""


@dataclass(frozen=True)
class Environment:
    """Clock, randomness and log lines, injected."""

    clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    jitter: Callable[[], float] = random.random
    log: Callable[[str, Mapping[str, object]], None] = lambda message, fields: None


class BrokerRestartedError(UnavailableError):
    """The broker went away, came back or cut its log: start again; nothing is lost."""


class Offloader:
    """One writer of one archive. ``run`` once; ``status`` from any thread."""

    def __init__(
        self,
        broker_store: BrokerStore,
        archive: ObjectStore,
        identity: OffloadIdentity,
        settings: OffloadSettings,
        *,
        topic_filter: TopicFilter,
        word_source: WordSource,
        take_over: bool = False,
        pins: PinKeeper | None = None,
        environment: Environment | None = None,
    ) -> None:
        self._store = broker_store
        self._log = broker_store.commit_log
        self._identity = identity
        self._settings = settings
        self._environment = environment or Environment()
        self._bound_source = BoundSource(broker_store, word_source)
        self._take_over = take_over
        self._pins = pins
        self._pin_status: PinStatus | None = None
        self._archive = PrefixedStore(archive, archive_prefix(identity.cluster, identity.broker))
        self._table = QueueTable()
        self._tails = QueueTails()
        self._feed = LogFeed(
            self._log,
            self._table,
            topic_filter,
            delay_levels_ms=_delay_levels_ms(broker_store) if topic_filter.admits(SCHEDULE_TOPIC) else None,
            next_record=self._bound_source.next_record,
        )
        self._bound = FeedBound(0, 0)
        self._failure: BaseException | None = None
        self._stop_parts = threading.Event()
        self._behind = threading.Event()
        self._started_s = time.monotonic()
        self._hidden = 0
        self._is_wired = False
        self._state_fingerprint: tuple[tuple[str, int, int], ...] = ()
        self._has_claimed = False
        self._is_wired = False
        self._deleted_topics = DeletedTopics()
        self._hide: list[QueueKey] = []
        self._writer: CatalogWriter
        self._dispatcher: TieredDispatcher
        self._uploader: CycleUploader

    # -- start ------------------------------------------------------------------------------------------------

    def _open(self, *, claim_now: bool) -> None:
        """Load the catalog, settle the log line, place the cursor."""
        self._log.refresh()
        self._writer = CatalogWriter(
            self._archive,
            cluster=self._identity.cluster,
            broker=self._identity.broker,
            instance=self._identity.instance,
            kind=self._identity.kind,
            host=os.uname().nodename,
            clock_ms=self._environment.clock_ms,
            root_every=self._settings.root_every,
        )
        state = self._writer.load()
        if claim_now:
            # The owner before may commit until the claim is won: compare with what is there after it.
            self._claim()
            state = self._writer.state_or_none
        start_phys = self._log.min_phys if state is None else state.cursor.phys
        if state is not None and compare(self._log, state.cursor.check) == CheckResult.DIFFERENT:
            self._claim()
            start_phys = self._start_new_line()
        self._load_tails()
        self._wire(start_phys)
        self._is_wired = True

    def _claim(self) -> None:
        """Own the epoch. Once only: who lost it has planned from tails that are no longer true."""
        if self._writer.is_claimed:
            return
        if self._has_claimed:
            raise FencedError(
                "another writer has claimed the archive", hint="this writer stops; reading goes on"
            )
        before = self._writer.state_or_none
        self._writer.claim(take_over=self._take_over)
        self._has_claimed = True
        self._log_line("epoch claimed", epoch=self._writer.state.epoch)
        after = self._writer.state_or_none
        if self._is_wired and after is not None and (before is None or before.cursor != after.cursor):
            raise UnavailableError("another writer committed just before the claim", hint="run again")

    def _start_new_line(self) -> int:
        new_line = find_new_line(self._log, log_checks(self._archive, self._writer.state))
        self._writer.append_line(common_version=new_line.version, phys=new_line.phys)
        self._log_line("the broker's log differs from the archive: new log line", from_phys=new_line.phys,
                       common_version=new_line.version)  # fmt: skip
        return new_line.phys

    def _load_tails(self) -> None:
        """Every queue's current generation, from the catalog."""
        self._tails.clear()
        state = self._writer.state_or_none
        if state is None:
            return
        for key, row in state.current_queues():
            self._tails.set(
                self._table.ordinal(key.topic, key.queue_id),
                next_offset=int(row["end_queue_offset"]),
                end_byte=int(row["end_byte"]),
                end_phys=int(row["end_phys"]),
                generation=key.generation,
            )

    def _wire(self, start_phys: int) -> None:
        settings, environment = self._settings, self._environment
        arena_bytes = int(settings.batch_bytes * (1 + ARENA_SLACK))
        count = max(2, min(IN_FLIGHT_MAX + 2, settings.memory_budget_bytes // (2 * arena_bytes)))
        pool = LogBatchPool(batch_bytes=arena_bytes, count=count)
        closed: DoubleBuffer[LogBatch] = DoubleBuffer(capacity=count)
        self._pool = pool
        self._dispatcher = TieredDispatcher(
            self._feed, pool, closed,
            start_phys=start_phys,
            batch_bytes=settings.batch_bytes,
            batch_age_ms=settings.batch_age_ms,
            range_bytes_max=max((file.size_bytes for file in self._log.files), default=1 << 30),
            clock_ms=environment.clock_ms,
        )  # fmt: skip
        self._state_archive = BrokerStateArchive(self._archive, self._broker_tables)
        state = self._writer.state_or_none
        if state is not None:
            self._state_archive.adopt(state.state_objects)
        context = UploadContext(
            archive=self._archive,
            writer=self._writer,
            planner=CyclePlanner(self._table, self._tails, split_bytes=settings.split_bytes),
            tails=self._tails,
            pool=pool,
            codec=BlockCodec(settings.compression_level, settings.block_bytes, settings.compress_threads),
            policy=AttemptPolicy(timeout_ms_max=settings.attempt_timeout_ms),
            cluster=self._identity.cluster,
            broker=self._identity.broker,
            writer_name=self._identity.instance,
            clock_ms=environment.clock_ms,
            jitter=environment.jitter,
            claim=self._claim,
            log=environment.log,
        )
        self._uploader = CycleUploader(
            context, closed,
            upload_threads=settings.upload_threads,
            extend=lambda batch: self._dispatcher.extend_into(batch, self._bound),
            state_archive=self._state_archive,
        )  # fmt: skip
        self._is_wired = True

    # -- run --------------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event, *, follow: bool) -> OffloadResult:
        """Work until ``stop`` is set or, without ``follow``, the end of the log is committed.

        Raises FencedError when another writer took over, UnavailableError when the store stayed away while
        stopping, and the other TieredErrors that repeating cannot help. Everything read and not committed stays in
        the commitlog.
        """
        self._open(claim_now=follow)
        from_phys = self._dispatcher.cursor
        threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (
                ("compensate", self._compensate_loop),
                ("builder", self._build_loop),
                ("committer", self._commit_loop),
            )
        ]
        for thread in threads:
            thread.start()
        try:
            if follow:
                self._follow(stop)
            else:
                self._read_to_the_end(stop)
            self._drain()
            if not follow and not stop.is_set():
                self._finish_backfill()
            if self._writer.is_claimed:
                self._writer.release(doomed=self._uploader.doomed)
        finally:
            self._stop_parts.set()
            self._behind.set()
            self._uploader.close()
            for thread in threads:
                thread.join(timeout=5)
        return self._result(from_phys)

    def _guarded(self, work: Callable[[], None]) -> None:
        """A part that fails stops the whole: nothing may go on as if it had been stored."""
        try:
            work()
        except BaseException as error:
            if self._failure is None:
                self._failure = error
            self._stop_parts.set()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _follow(self, stop: threading.Event) -> None:
        poll = AdaptivePoll(min_ms=self._settings.poll_min_ms, max_ms=self._settings.poll_max_ms)
        ask, refresh = Every(ASK_EVERY_MS), Every(REFRESH_FILES_EVERY_MS)
        alive, state, pin = Every(ASK_EVERY_MS), Every(STATE_EVERY_MS), Every(PIN_EVERY_MS)
        broker = self._store.liveness()
        while not stop.is_set():
            self._check_failure()
            now_ms = self._environment.clock_ms()
            if alive.is_due(now_ms):
                self._refuse_restarted_broker(broker)
            if refresh.is_due(now_ms):
                self._log.refresh()
            wants_more = self._dispatcher.cursor >= self._bound.limit_phys and self._has_new_bytes()
            if wants_more and ask.is_due(now_ms):
                self._bound = self._ask_bound()
            has_more = self._dispatcher.cursor < self._bound.limit_phys and self._has_new_bytes()
            result = self._dispatcher.dispatch_step(self._bound) if has_more else StepResult.CAUGHT_UP
            if result == StepResult.BUSY or self._is_behind():
                self._behind.set()
            self._dispatcher.close_if_due()
            if state.is_due(now_ms):
                self._refresh_state(following=True)
                self._watch_deletions(now_ms)
                self._commit_marks_when_idle()
            if pin.is_due(now_ms):
                self._step_pins()
            stop.wait(poll.next_wait_ms(progressed=result == StepResult.HANDED_OVER) / 1000)
        self._behind.clear()

    def _refuse_restarted_broker(self, before: LivenessReport) -> None:
        """A broker that started or ended since may have cut or replaced its log: begin again from the archive's end,
        with the log-line check, rather than trust what was read before."""
        now = self._store.liveness()
        if (now.liveness, now.pid) != (before.liveness, before.pid):
            raise BrokerRestartedError(
                f"the broker is {now.liveness.value} now (was {before.liveness.value}): the log is checked again"
            )
        last = self._bound_source.last
        if last is not None and last.has_retreated:
            raise BrokerRestartedError(f"the broker's log ends at {last.phys} now, lower than before")

    def _ask_bound(self) -> FeedBound:
        bound = self._bound_source.ask(self._dispatcher.cursor)
        return FeedBound(bound.phys, bound.proven_phys)

    def _has_new_bytes(self) -> bool:
        """Whether anything but zeros stands at the cursor; costs one small read of a hot page."""
        return any(self._log.read(self._dispatcher.cursor, 8))

    def _step_pins(self) -> None:
        """Keep files that are not archived yet, within the disk rules."""
        if self._pins is None:
            return
        state = self._writer.state_or_none
        archived = state.cursor.phys if state is not None else self._log.min_phys
        own = [file for file in self._log.files if not file.is_pinned]
        self._pin_status = self._pins.step(own, archived)

    def _is_behind(self) -> bool:
        return self._bound.limit_phys - self._dispatcher.cursor > self._settings.batch_bytes // 4

    def _compensate_loop(self) -> None:
        while not self._stop_parts.is_set():
            if not self._behind.wait(SHORT_WAIT_S):
                continue
            result = self._dispatcher.compensate(self._bound)
            if result == StepResult.CAUGHT_UP:
                self._behind.clear()
            elif result == StepResult.BUSY:
                self._stop_parts.wait(SHORT_WAIT_S / 5)

    def _build_loop(self) -> None:
        while not self._stop_parts.is_set():
            self._uploader.build_next(SHORT_WAIT_S)

    def _commit_loop(self) -> None:
        while not self._stop_parts.is_set():
            self._uploader.commit_next(SHORT_WAIT_S)

    def _read_to_the_end(self, stop: threading.Event) -> None:
        self._bound = self._ask_bound()
        while not stop.is_set():
            self._check_failure()
            before = self._dispatcher.cursor
            result = self._dispatcher.compensate(self._bound)
            if result == StepResult.BUSY:
                stop.wait(SHORT_WAIT_S / 5)
            elif result == StepResult.CAUGHT_UP and self._dispatcher.cursor == before:
                break

    def _drain(self) -> None:
        """Close the open batch and wait until everything closed is committed."""
        while True:
            self._check_failure()
            self._dispatcher.close_if_due(force=True)
            if self._uploader.is_idle and not self._dispatcher.has_open_range:
                return
            time.sleep(SHORT_WAIT_S / 5)

    def _finish_backfill(self) -> None:
        """Show what the broker would show: hide queues it deleted, and name the broker's tables."""
        index = self._store.consume_queues()
        state = self._writer.state_or_none
        if state is None or index is None:
            return
        with_units = self._bound_source.shown_queues
        if with_units is None:
            with_units = set(index.last_records())
        # Above the last unit a killed broker has units still to write: its recovery will show those queues.
        proven_phys = self._bound.proven_phys
        current = [
            key
            for key, row in state.current_queues()
            if not row["flags"] & QUEUE_HIDDEN and row["end_phys"] <= proven_phys
        ]
        hidden = hidden_queues(current, with_units)
        self._hidden = len(hidden)
        if self._writer.is_claimed:
            self._refresh_state()
        if hidden or self._state_archive.pending():
            self._claim()
            self._uploader.commit_marks(hide=hidden)

    def _broker_tables(self) -> Mapping[str, Any]:
        """The broker's tables as documents; names are keys under ``state/``."""
        state = self._store.state()
        return {
            "topics": state.topics,
            "subscription_groups": state.subscription_groups,
            "consumer_offsets": state.consumer_offsets,
            "delay_offsets": state.delay_offsets,
        }

    def _watch_deletions(self, now_ms: int) -> None:
        """Hide queues of topics that the master has deleted (3a, Absent is not deleted)."""
        state = self._writer.state_or_none
        if state is None or (self._store.conf is not None and self._store.conf.is_slave):
            return
        try:
            table = set(self._store.state().topics)
            backup = topic_names_backup(self._store.path)
        except (UnavailableError, CorruptionError) as error:
            self._log_line("topic table not readable this time", error=str(error))
            return
        index = self._store.consume_queues()
        with_queues = {queue.topic for queue in index.queues()} if index is not None else set()
        verdict = self._deleted_topics.look(table, backup, with_queues, now_ms)
        if verdict.alarm:
            self._log_line("topics are missing, nothing is hidden", error=verdict.alarm)
        gone = [key for key in state.visible_queues() if key.topic in verdict.deleted]
        self._hide += [key for key in gone if key not in self._hide]

    def _commit_marks_when_idle(self) -> None:
        """Broker tables and deletions reach the catalog even while no message comes."""
        if not self._writer.is_claimed or not self._writer.state.started or not self._uploader.is_idle:
            return
        if not self._hide and not self._state_archive.pending():
            return
        try:
            self._uploader.commit_marks(hide=self._hide)
        except CommitInvalidError:
            return  # a cycle was committed at the same moment; the next look tries again
        if self._hide:
            self._log_line("queues of deleted topics hidden", queues=len(self._hide))
        self._hidden += len(self._hide)
        self._hide = []

    def _refresh_state(self, *, following: bool = False) -> None:
        """Archive the broker's tables when they changed; they travel with the next commit.

        Following goes on without tables that are broken now: the broker rewrites them, messages do not wait.
        """
        fingerprint = state_fingerprint(self._store.path)
        if not self._writer.is_claimed or fingerprint == self._state_fingerprint:
            return
        try:
            self._state_archive.refresh(self._writer.state.epoch, self._uploader.next_attempt())
            self._state_fingerprint = fingerprint
        except (UnavailableError, CorruptionError) as error:
            if not following and isinstance(error, CorruptionError):
                raise
            self._log_line("broker tables not archived this time", error=str(error))

    def _result(self, from_phys: int) -> OffloadResult:
        counters = self._uploader.counters
        state = self._writer.state_or_none
        return OffloadResult(
            messages=counters.messages,
            raw_bytes=counters.raw_bytes,
            stored_bytes=counters.stored_bytes,
            commits=counters.commits,
            objects=counters.objects,
            from_phys=from_phys,
            to_phys=from_phys if state is None else state.cursor.phys,
            gaps=counters.gaps,
            damaged=counters.damaged_ranges,
            lost=counters.lost_ranges,
            hidden=self._hidden,
            duration_s=time.monotonic() - self._started_s,
        )

    # -- status -----------------------------------------------------------------------------------------------

    def status(self) -> OffloadStatus | None:
        """A consistent enough view for people and metrics; never blocks the parts. None until the catalog is loaded."""
        if not self._is_wired:
            return None
        state = self._writer.state_or_none
        committed = state.cursor.phys if state is not None else self._log.min_phys
        bound = max(self._bound.limit_phys, committed)
        since_ms = self._uploader.oldest_uncommitted_ms() or self._dispatcher.open_since_ms
        return OffloadStatus(
            committed_phys=committed,
            read_phys=self._dispatcher.cursor,
            bound_phys=bound,
            log_min_phys=self._log.min_phys,
            log_end_phys=self._log.max_file_end,
            lag_bytes=bound - committed,
            lag_ms=0 if since_ms is None else max(0, self._environment.clock_ms() - since_ms),
            epoch=0 if state is None else state.epoch,
            version=0 if state is None else state.version,
            fenced=isinstance(self._failure, FencedError),
            memory_used_bytes=self._pool.used_bytes() + self._uploader.in_flight_bytes(),
            memory_budget_bytes=self._settings.memory_budget_bytes,
            last_error=self._uploader.counters.last_error,
            pins=self._pin_status,
            bound_reason=self._bound_source.last.why.value if self._bound_source.last is not None else "",
            counters=self._uploader.counters,
        )

    def _log_line(self, message: str, **fields: object) -> None:
        self._environment.log(message, fields)


def _delay_levels_ms(store: BrokerStore) -> NDArray[np.int64]:
    """The broker's own levels, or RocketMQ's defaults without its configuration."""
    conf = store.conf if store.conf is not None else BrokerConf()
    return conf.delay_levels_ms
