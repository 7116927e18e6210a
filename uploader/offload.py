"""Ships one broker's commitlog into one archive: builds, starts and stops the parts of the write path.

    start     load the catalog → compare the log with the archive → claim the epoch (backfill: before the first upload)
    follow    dispatch loop + compensate thread → closed batches → builder thread → committer thread; besides them
              threads for index files, merges of catalog pages, and metadata (broker tables, deleted topics)
    backfill  the same parts up to the end of the log, then hide queues that the broker no longer has
    stop      close the open batch, drain, release the epoch

Used by `tiered run` and `tiered backfill`. Owns the threads and their order. The start is in archive_owner.py, the
dispatch loop in follow_loop.py.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

from tiered.archive.task import TaskLoop
from tiered.broker_store.bound import BoundReason
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.file_sizes import commitlog_file_bytes, consume_queue_file_bytes
from tiered.broker_store.pins import PinKeeper
from tiered.broker_store.store import BrokerStore
from tiered.catalog.broker_facts import BrokerFacts, facts_to_record
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.claims import RUN
from tiered.catalog.state import CatalogState
from tiered.consume_queue.index import ConsumeQueueIndex
from tiered.errors import AccessDeniedError, CorruptionError, TieredError, UnavailableError, UnreadableError
from tiered.formats.keys import archive_prefix
from tiered.formats.segment import BlockCodec
from tiered.kernels.queue_table import QueueTable
from tiered.model.queue import TopicFilter
from tiered.model.tables import QUEUE_HIDDEN
from tiered.object_store.interface import ObjectStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.rules_in_force import RULES
from tiered.settings.sections import OffloadSettings
from uploader.archive_owner import ArchiveOwner
from uploader.attempts import AttemptPolicy
from uploader.bound_source import NO_ADDRESS, BoundSource, OffsetsSource, Silence
from uploader.broker_state_archive import BrokerStateArchive
from uploader.cycle_plan import CyclePlanner
from uploader.cycle_upload import IN_FLIGHT_MAX, CycleUploader, UploadContext
from uploader.dispatcher import StepResult, TieredDispatcher
from uploader.double_buffer import DoubleBuffer
from uploader.follow_loop import PIN_EVERY_MS, BrokerRestartedError, Every, FollowLoop
from uploader.index_builder import IndexBuilder
from uploader.log_batch import LogBatch, LogBatchPool
from uploader.log_rule import LogLimits
from uploader.metadata_commits import MetadataCommits, broker_tables
from uploader.offload_status import Environment, ObjectOptions, OffloadIdentity, OffloadResult, OffloadStatus
from uploader.queue_tails import QueueTails
from uploader.queue_ttl_classes import QueueTtlClasses
from uploader.skipped_log import SkippedLog
from uploader.store_feed import feed_of, header_check_of
from uploader.topic_selections import TopicSelections

logger = logging.getLogger(__name__)

__all__ = [
    "BrokerRestartedError",
    "Environment",
    "ObjectOptions",
    "OffloadIdentity",
    "OffloadResult",
    "OffloadStatus",
    "Offloader",
]

SHORT_WAIT_S = 0.05
IDLE_WAIT_S = 2.0
"""Longest wait of an idle part that nothing wakes; a backfill uses the short one."""
NEXT_FILE_EVERY_S = 0.25
"""How often a new file of the broker is looked for, to be pinned before it is deleted."""
TABLES_CPU_SHARE = 0.02
"""Reading and comparing the broker's tables, which takes seconds with many thousands of queues, may use this part of a
core."""
TIMER_SLACK_MS = 3_600_000
"""Timers are taken that are so much further ahead than the limit: the servers that check it may have other clocks."""
ARENA_SLACK = 0.25
"""Room beyond batch_bytes, so that a retry can include newer data."""


@contextmanager
def released_when_full(pins: PinKeeper | None, log: CommitLog, every_s: float) -> Iterator[None]:
    """While the block runs, every ``every_s`` seconds remove pins (hard links that keep commitlog files until they are
    archived) if the disk is too full. Failures are logged. Without ``pins`` this does nothing."""
    if pins is None:
        yield
        return

    def step() -> None:
        """Release pins, of the files that the broker still has as well."""
        log.refresh()
        pins.let_go([file for file in log.files if not file.is_pinned])

    with maintained(step, every_s):
        yield


@contextmanager
def maintained(step: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call ``step``, which keeps pins of commitlog files, at once and then every ``every_s`` seconds in a thread, while
    the block runs. A failed step is logged, and the next one follows."""
    ended = threading.Event()

    def try_step() -> None:
        """Do one step, and log its failure."""
        try:
            step()
        except (TieredError, OSError) as error:
            logger.warning(
                "the pins of commitlog files could not be checked and are checked again",
                extra={"error": str(error)},
            )

    def watch() -> None:
        """The work of the thread."""
        while not ended.wait(every_s):
            try_step()

    try_step()
    thread = threading.Thread(target=watch, name="pins", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def referenced_end_phys(
    index: ConsumeQueueIndex,
    state: CatalogState,
    end_phys: int,
    *,
    shown: Set[tuple[str, int]],
    topics: TopicFilter,
) -> int:
    """The commitlog offset at which the last record ends that a consume queue of the broker refers to; ``end_phys`` if
    none is above that.

    Reads the last unit of each queue that ends elsewhere in ``index`` (the broker's consume queues) than in the archive
    of ``state``, and of those of ``shown``, (topic, queue id) of the broker's queues, that the archive does not have.
    Queues of topics that ``topics`` excludes are not read; unreadable ones are skipped.
    """
    ends = {
        (key.topic, key.queue_id): int(row["end_queue_offset"])
        for key, row in state.current_queues()
        if not row["flags"] & QUEUE_HIDDEN
    }
    unknown = [queue for queue in shown - ends.keys() if topics.admits(queue[0])]
    for queue in (*index.that_end_elsewhere(ends), *unknown):
        with contextlib.suppress(UnreadableError, AccessDeniedError, CorruptionError):
            unit = index.last_unit(*queue)
            if len(unit):
                end_phys = max(end_phys, int(unit["phys"][0]) + int(unit["size"][0]))
    return end_phys


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
        offsets_source: OffsetsSource,
        silence: Silence = lambda: NO_ADDRESS,
        take_over: bool = False,
        log_limits: LogLimits | None = None,
        pins: PinKeeper | None = None,
        environment: Environment | None = None,
        options: ObjectOptions | None = None,
    ) -> None:
        """``offsets_source`` requests the broker's offsets; ``silence`` says why it gives none. ``take_over`` claims an
        archive that another writer owns; ``log_limits``: what is allowed with a log that differs from the archive."""
        self._store = broker_store
        self._log = broker_store.commit_log
        self._archive = PrefixedStore(archive, archive_prefix(identity.cluster, identity.broker))
        self._identity = identity
        self._settings = settings
        options = options or ObjectOptions()
        self._index_settings = options.index
        self._topic_filter = topic_filter
        self._rules, self._timers = dict(options.rules_document), options.timers
        self._encoded_copies = 1 + options.is_encrypted
        self._environment = environment or Environment()
        self._pins = pins
        self._bound_source = BoundSource(broker_store, offsets_source, silence)
        self._consume_queue_file_bytes = consume_queue_file_bytes(broker_store)
        self._page_merges = ThreadPoolExecutor(1, thread_name_prefix="page-merge")
        self._owner = ArchiveOwner(
            self._archive,
            broker_store,
            identity,
            self._environment,
            root_every=settings.root_every,
            take_over=take_over,
            limits=log_limits
            or LogLimits(truncate_max_bytes=None if identity.kind == "backfill" else float("inf")),
            reported_end_phys=self._bound_source.reported_end_phys,
            background=lambda work: self._page_merges.submit(self._guarded, work),
        )
        self._writer = self._owner.writer
        self._table = QueueTable()
        self._tails = QueueTails()
        self._ttl_classes = QueueTtlClasses(options.rules)
        self._failure: BaseException | None = None
        self._stop_parts = threading.Event()
        self._stop_metadata = threading.Event()
        self._behind = threading.Event()
        """Wakes the compensate thread."""
        self._started_s = time.monotonic()
        self._is_open = False
        self._excluded_before: list[str] = []
        self._damaged_tables: tuple[str, ...] = ()
        self._wait_s = SHORT_WAIT_S

    # -- start ------------------------------------------------------------------------------------------------

    def _open(self, *, claim_now: bool) -> None:
        """Load the catalog, compare the log with the archive, and build the parts that read on from where the archive
        ends. ``claim_now``: become the archive's writer at once, not only before the first upload."""
        start_phys = self._owner.open(claim_now=claim_now)
        self._owner.load_tails(self._table, self._tails)
        self._read_topic_attributes()
        self._build(start_phys)
        self._owner.note_planning()  # from now on a claim must find the state that was loaded
        self._is_open = True

    def _build(self, start_phys: int) -> None:
        """Make the parts that read the log from ``start_phys``, upload it, and build the index."""
        settings, environment, writer = self._settings, self._environment, self._writer
        arena_bytes = int(settings.batch_bytes * (1 + ARENA_SLACK))
        # The budget is for batches of log bytes, and for their encoded objects and the encrypted copies of these.
        batch_share = settings.memory_budget_bytes // ((1 + self._encoded_copies) * arena_bytes)
        count = max(2, min(IN_FLIGHT_MAX + 2, batch_share))
        self._pool = LogBatchPool(batch_bytes=arena_bytes, count=count)
        closed: DoubleBuffer[LogBatch] = DoubleBuffer(capacity=count)
        self._feed = feed_of(self._store, self._table, self._topic_filter, self._bound_source)
        self._selections = TopicSelections.at(writer.state, self._topic_filter, start_phys)
        self._dispatcher = dispatcher = TieredDispatcher(
            self._feed,
            self._pool,
            closed,
            start_phys=start_phys,
            batch_bytes=settings.batch_bytes,
            batch_age_ms=settings.batch_age_ms,
            range_bytes_max=max((file.size_bytes for file in self._log.files), default=1 << 30),
            clock=environment.clock,
        )
        state_archive = BrokerStateArchive(self._archive, self._broker_tables)
        if (state := writer.state_or_none) is not None:
            state_archive.adopt(state.state_objects)
        self._uploader = CycleUploader(
            self._upload_context(),
            closed,
            upload_threads=settings.upload_threads,
            extend=lambda batch: dispatcher.extend_into(batch, self._bound_source.feed),
            state_archive=state_archive,
        )
        self._index_builder = IndexBuilder(
            self._archive, writer, self._index_settings, clock=environment.clock
        )
        self._index_loop = TaskLoop(
            self._index_builder,
            lambda: writer.state if writer.is_claimed else None,
            clock=environment.clock,
        )
        self._metadata = MetadataCommits(
            self._store,
            writer,
            self._uploader,
            state_archive,
            claim=self._owner.claim,
            wait=environment.wait,
        )
        self._loop = FollowLoop(
            self._store,
            settings,
            self._bound_source,
            dispatcher,
            writer,
            self._pins,
            behind=self._behind,
            clock=environment.clock,
            check_failure=self._check_failure,
        )

    def _upload_context(self) -> UploadContext:
        """The stores, settings and parts that the two threads of the upload share: the one that plans and starts PUTs,
        and the one that commits."""
        settings, environment = self._settings, self._environment
        return UploadContext(
            archive=self._archive,
            writer=self._writer,
            planner=CyclePlanner(
                self._table,
                self._tails,
                split_bytes=settings.split_bytes,
                skipped=SkippedLog.of(self._writer.state),
                ttl_classes=self._ttl_classes,
                selections=self._selections,
                timer_topic=self._timers.topic,
            ),
            header_check=header_check_of(self._store, self._table, self._bound_source),
            tails=self._tails,
            pool=self._pool,
            codec=BlockCodec(settings.compression_level, settings.block_bytes, settings.compress_threads),
            policy=AttemptPolicy(timeout_ms_max=settings.attempt_timeout_ms),
            cluster=self._identity.cluster,
            broker=self._identity.broker,
            writer_name=self._identity.instance,
            clock=environment.clock,
            jitter=environment.jitter,
            claim=self._owner.claim,
            new_settings=self._new_settings,
            timers=replace(self._timers, max_delay_ms=self._timers.max_delay_ms + TIMER_SLACK_MS),
        )

    def _new_settings(self, state: CatalogState) -> dict[str, Any]:
        """The settings that the next commit must change in ``state``: which topics are archived, the rules in force,
        and the broker's version and file sizes; empty if it has all of them."""
        changed: dict[str, Any] = {
            **self._selections.setting(state),
            **facts_to_record(state, self._broker_facts()),
        }
        # A backfill does not change the rules that `tiered run` set.
        in_force = state.settings.get(RULES)
        may_change = in_force is None or self._identity.kind == RUN
        if self._rules and may_change and in_force != self._rules:
            changed[RULES] = self._rules
        return changed

    def _broker_facts(self) -> BrokerFacts:
        sizes = commitlog_file_bytes(self._store), self._consume_queue_file_bytes
        return BrokerFacts(*sizes, self._bound_source.version)

    def _broker_tables(self) -> Mapping[str, Any]:
        """The broker's tables (topics, subscription groups, consumer offsets, ...) that are to be archived, by name,
        without damaged ones, which are logged once. Takes the topics' times to live from them."""
        state = self._store.state()
        damaged = tuple(f"{name} ({why})" for name, why in state.damaged.items())
        if damaged and damaged != self._damaged_tables:
            logger.warning(
                "files of the broker's config directory are damaged: the archive keeps their last good copies",
                extra={"error": "; ".join(damaged)},
            )
        self._damaged_tables = damaged
        if "topics" not in state.damaged:
            self._ttl_classes.adopt(state.topics)
        return broker_tables(state)

    def _read_topic_attributes(self) -> None:
        """Reads the topics' attributes before the first cycle. Without them the cycle's objects are only grouped worse;
        MetadataCommits, which reads the same tables, reports what is wrong with them."""
        with suppress(TieredError):
            self._broker_tables()

    # -- run --------------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event, *, follow: bool) -> OffloadResult:
        """Archive the log until ``stop`` is set or, unless ``follow``, all of it is committed. Returns what was done.

        Raises FencedError when another writer took the archive over, UnavailableError when the store was unavailable
        while stopping, and other TieredErrors that a retry cannot cure. What was read and not committed is still in the
        commitlog, and the next start reads it again.
        """
        with released_when_full(self._pins, self._log, PIN_EVERY_MS / 1000):
            self._open(claim_now=follow)
        from_phys = self._dispatcher.cursor
        self._wait_s = IDLE_WAIT_S if follow else SHORT_WAIT_S
        threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (
                ("compensate", self._compensate_loop),
                ("builder", self._build_loop),
                ("committer", self._commit_loop),
                *((("index", self._index_loop.run), ("metadata", self._metadata_loop)) if follow else ()),
            )
        ]
        for thread in threads:
            thread.start()
        try:
            if follow:
                with self._maintained_pins():
                    with self._drained_before_unreadable():
                        self._loop.run(stop)
                    self._stop_metadata.set()  # no metadata is committed once the epoch is released
                    while threads[-1].is_alive():
                        self._check_failure()
                        threads[-1].join(SHORT_WAIT_S)
                    self._drain()
                    self._metadata.commit_when_idle()
                self._loop.step_pins()
            else:
                with self._drained_before_unreadable():
                    self._read_to_the_end(stop)
                self._drain()
                self._pool.shrink()
                self._bound_source.refuse_silent_broker()
                if not stop.is_set():
                    self._finish_backfill()
                    self._finish_index(stop)
                    self._writer.finish_merges()
            retires = self._environment.retires and not (follow or stop.is_set())
            if retires:
                self._owner.claim()
            if self._writer.is_claimed:
                self._writer.release(pending_deletions=self._uploader.pending_deletions, retires=retires)
        finally:
            self._stop_parts.set()
            self._stop_metadata.set()
            self._behind.set()
            self._index_loop.stop()
            self._uploader.close()
            self._writer.abort()  # ends every wait for the store, and a merge of pages
            self._page_merges.shutdown(wait=False, cancel_futures=True)
            for thread in threads:
                thread.join(timeout=5)
        return self._result(from_phys)

    def abort(self, error: UnavailableError) -> None:
        """End ``run`` with ``error``, or with the store's last error; from any thread."""
        self._failure = self._failure or error
        self._writer.abort()

    @contextmanager
    def _drained_before_unreadable(self) -> Iterator[None]:
        """If the block meets an unreadable place of the log, commit what was read before it, then raise the error: the
        next start would meet it first."""
        try:
            yield
        except UnreadableError:
            self._drain()
            raise

    def _maintained_pins(self) -> AbstractContextManager[None]:
        """While the block runs, pin commitlog files (keep them by hard links until they are archived) in a thread of
        its own: a file may live for a shorter time than a step of the dispatch loop takes, and the store may be
        unavailable for hours while the broker's disk fills."""
        due = Every(PIN_EVERY_MS)

        def step() -> None:
            """Pin and release files if it is time, or if the broker has begun a new file."""
            if due.is_due(self._environment.clock.wall_ms()) or self._log.has_next_file():
                self._log.refresh()
                self._loop.step_pins()

        return maintained(step, NEXT_FILE_EVERY_S)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do the work of a thread. If it fails, keep its error for ``run`` to raise, and stop all other threads: none
        may continue as if the failed one had stored its data."""
        try:
            work()
        except BaseException as error:
            if self._failure is None:
                self._failure = error
            self._stop_parts.set()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _compensate_loop(self) -> None:
        """The work of the compensate thread: it reads the log in large steps whenever the dispatch loop, which never
        waits, has fallen behind and has set ``_behind``."""
        while not self._stop_parts.is_set():
            if not self._behind.wait(self._wait_s):
                continue
            try:
                result = self._dispatcher.compensate(self._bound_source.feed)
            except UnreadableError:
                # The dispatch loop gets the same error, and ends in order.
                self._behind.clear()
                self._stop_parts.wait(SHORT_WAIT_S)
                continue
            if result == StepResult.CAUGHT_UP:
                self._behind.clear()
            elif result == StepResult.BUSY:
                self._stop_parts.wait(SHORT_WAIT_S / 5)  # all batches wait for their upload

    def _build_loop(self) -> None:
        while not self._stop_parts.is_set():
            self._uploader.builder.build_next(self._wait_s)

    def _commit_loop(self) -> None:
        while not self._stop_parts.is_set():
            if self._uploader.commit_next(self._wait_s):
                self._index_loop.wake()
                self._environment.committed(self._writer.state)

    def _metadata_loop(self) -> None:
        """The work of the metadata thread: it archives changed tables of the broker and hides queues of deleted topics,
        again and again. It takes at most TABLES_CPU_SHARE of a core, however large the tables are."""
        while not self._stop_metadata.is_set():
            began_s = time.thread_time()
            self._metadata.step(self._environment.clock.wall_ms())
            cpu_s = time.thread_time() - began_s
            self._stop_metadata.wait(max(self._settings.tables_every_ms / 1000, cpu_s / TABLES_CPU_SHARE))

    def _read_to_the_end(self, stop: threading.Event) -> None:
        """The reading of a backfill: reads the log of a stopped broker to its end, or until ``stop``. Raises
        UnavailableError if the broker starts, as what it appends is not confirmed."""
        self._bound_source.ask_early(self._dispatcher.cursor)
        while not stop.is_set():
            self._check_failure()
            self._bound_source.refuse_started_broker()
            before = self._dispatcher.cursor
            result = self._dispatcher.compensate(self._bound_source.feed)
            if result == StepResult.BUSY:
                stop.wait(SHORT_WAIT_S / 5)  # all batches wait for their upload
            elif (
                result == StepResult.CAUGHT_UP
                and self._dispatcher.cursor == before
                and self._is_end_of_log(before)
            ):
                break

    def _is_end_of_log(self, phys: int) -> bool:
        """Whether nothing valid follows ``phys``."""
        return self._log.is_blank_from(phys) or self._bound_source.settle() is None

    def _drain(self) -> None:
        """Close the open batch and wait until everything closed is committed."""
        while True:
            self._check_failure()
            self._dispatcher.close_if_due(force=True)
            if self._uploader.builder.is_idle and not self._dispatcher.has_open_range:
                return
            time.sleep(SHORT_WAIT_S / 5)

    def _finish_backfill(self) -> None:
        """End a backfill, once all of the log is committed: note topics of which nothing is archived because earlier
        starts excluded them, report a truncated log, hide queues of deleted topics, archive the broker's tables. Does
        nothing where the broker's consume queues cannot be read."""
        with_units = self._bound_source.shown_queues()
        if with_units is not None:
            self._excluded_before = self._absent_topics(with_units)
            self._report_truncation(with_units)
            self._metadata.finish(with_units, self._bound_source.proven_phys)

    def _absent_topics(self, with_units: Set[tuple[str, int]]) -> list[str]:
        """Topics of the broker that are selected now, but have no message in the archive because earlier starts
        excluded them. ``with_units``: (topic, queue id) of the broker's queues."""
        archived = {key.topic for key, _ in self._writer.state.queues()}
        topics = {topic for topic, _ in with_units} - archived
        return self._selections.absent(topics, self._dispatcher.cursor)

    def _report_truncation(self, shown: Set[tuple[str, int]]) -> None:
        """Log and count it if consume queues of the broker (``shown``, by topic and queue id) refer to records above
        the end of its log: the log has lost its last messages."""
        index, state = self._store.consume_queues(), self._writer.state_or_none
        last = self._bound_source.last
        # A running broker reports the end of its log, and may dispatch to its queues while they are read.
        if index is None or state is None or last is None or last.why is not BoundReason.DEAD:
            return
        end_phys = self._dispatcher.cursor
        referenced_phys = referenced_end_phys(index, state, end_phys, shown=shown, topics=self._topic_filter)
        if referenced_phys > end_phys:
            self._uploader.counters.lost += 1
            file = self._log.file_at(max(end_phys - 1, 0))
            logger.warning(
                "commitlog truncated: its last messages cannot be archived",
                extra={
                    "error": "consume queues refer to records beyond the end of the commitlog",
                    "file": "" if file is None else str(file.path),
                    "begin_phys": end_phys,
                    "end_phys": referenced_phys,
                },
            )

    def _finish_index(self, stop: threading.Event) -> None:
        """Build the index files that are due at the end of a backfill: during it, each would be merged with later ones.
        Few segments stay without an index, as they are searched as fast."""
        is_final = self._index_settings.after_backfill
        if self._index_builder.is_due(is_final=is_final):
            self._owner.claim()  # so that index objects left by a killed process carry an older epoch
            self._index_builder.run_to_end(stop, is_final=is_final)

    def _result(self, from_phys: int) -> OffloadResult:
        """What this process archived and met. ``from_phys``: where it began to read the log."""
        state = self._writer.state_or_none
        return OffloadResult(
            **vars(self._uploader.counters),
            from_phys=from_phys,
            to_phys=from_phys if state is None else state.cursor.phys,
            hidden=self._metadata.hidden,
            shown_again=self._metadata.shown_again,
            missing=len(self._metadata.missing),
            duration_s=time.monotonic() - self._started_s,
            excluded=tuple(sorted(self._feed.excluded)),
            excluded_before=tuple(self._excluded_before),
            damaged_tables=self._damaged_tables,
        )

    # -- status -----------------------------------------------------------------------------------------------

    @property
    def catalog_writer(self) -> CatalogWriter:
        """The writer of its commits, for others in this process that commit in its epoch."""
        return self._writer

    @property
    def is_claim_settled(self) -> bool:
        """Whether a claim of the archive was won or refused."""
        return self._owner.is_claim_settled

    @property
    def retry_reason(self) -> str:
        """Why a commit is being retried; empty if none is."""
        return self._writer.retry_reason

    def status(self) -> OffloadStatus | None:
        """A snapshot of the uploader for status and metrics, taken without a lock of its parts; None until the catalog
        is loaded."""
        if not self._is_open:
            return None
        state, counters = self._writer.state, self._uploader.counters
        committed = state.cursor.phys if state.started else self._log.min_phys
        bound = max(self._bound_source.feed.limit_phys, committed)
        return OffloadStatus(
            committed_phys=committed,
            read_phys=self._dispatcher.cursor,
            bound_phys=bound,
            written_phys=max(bound, self._bound_source.written_phys),
            epoch=state.epoch,
            memory_used_bytes=self._pool.used_bytes()
            + self._encoded_copies * self._uploader.in_flight_bytes(),
            memory_budget_bytes=self._settings.memory_budget_bytes,
            last_error=self.retry_reason or counters.last_error,
            pins=self._loop.pin_status,
            bound_reason=self._bound_source.last.why.value if self._bound_source.last is not None else "",
            counters=counters,
            index_files_rebuilt=self._index_builder.counters.rebuilt,
            index=self._index_loop.status,
            store_problem=self.retry_reason or (counters.last_error if counters.consecutive_failures else ""),
            excluded=tuple(sorted(self._feed.excluded.copy())),
            catalog=state,
            damaged_tables=self._damaged_tables,
        )
