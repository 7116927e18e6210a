"""Ships one broker's commitlog into one archive: starts, wires and stops the parts of the write path.

    start     load the catalog → check the log line → claim the epoch (back-fill: only when there is something to put)
    follow    dispatch loop + compensate thread → closed batches → builder thread → committer thread; beside them
              index files, and marks (broker tables, deleted topics)
    back-fill the same parts until the end of the log, then hide what the broker no longer shows
    stop      close the open batch, drain, release the epoch

Used alike by `tiered run` and `tiered backfill`. Owns threads and their order; decisions live in the other modules, the
start in archive_owner.py, how the parts hold together in backfill_parts.py, the dispatch loop in follow_loop.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

from tiered.broker_store.bound import BoundReason
from tiered.broker_store.pins import PinKeeper
from tiered.broker_store.store import BrokerStore
from tiered.errors import FencedError, UnavailableError, UnreadableError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import TopicFilter
from tiered.object_store.interface import ObjectStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import IndexSettings, OffloadSettings
from uploader.archive_owner import ArchiveOwner
from uploader.bound_source import BoundSource, OffsetsSource
from uploader.cycle_upload import CycleUploader
from uploader.dispatcher import StepResult, TieredDispatcher
from uploader.follow_loop import PIN_EVERY_MS, BrokerRestartedError, FollowLoop
from uploader.index_builder import IndexBuilder
from uploader.log_batch import LogBatchPool
from uploader.metadata_commits import MetadataCommits
from uploader.offload_environment import Environment, OffloadIdentity
from uploader.offload_parts import OffloadGiven, wire
from uploader.offload_status import OffloadResult, OffloadStatus
from uploader.pin_watch import kept_up, watched_pins
from uploader.truncation import referenced_end_phys

__all__ = [
    "BrokerRestartedError",
    "Environment",
    "OffloadIdentity",
    "OffloadResult",
    "OffloadStatus",
    "Offloader",
]

SHORT_WAIT_S = 0.05
IDLE_WAIT_S = 0.25
"""Of parts that are woken when there is something to do: how late they notice the end. A back-fill ends sooner."""
MARKS_EVERY_S = 60.0


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
        take_over: bool = False,
        replace_log: bool = False,
        pins: PinKeeper | None = None,
        environment: Environment | None = None,
        index_settings: IndexSettings | None = None,
    ) -> None:
        environment = environment or Environment()
        self._log = broker_store.commit_log
        self._settings = settings
        self._environment = environment
        self._bound_source = BoundSource(broker_store, offsets_source)
        prefixed = PrefixedStore(archive, archive_prefix(identity.cluster, identity.broker))
        self._owner = ArchiveOwner(
            prefixed, self._log, identity, environment, root_every=settings.root_every, take_over=take_over,
            may_replace_log=replace_log or identity.kind == "run",
            reported_end_phys=self._bound_source.reported_end_phys,
        )  # fmt: skip
        self._writer = self._owner.writer
        self._given = OffloadGiven(
            store=broker_store,
            archive=prefixed,
            identity=identity,
            settings=settings,
            index_settings=index_settings or IndexSettings(),
            topic_filter=topic_filter,
            environment=environment,
            owner=self._owner,
            bound_source=self._bound_source,
            pins=pins,
        )
        self._failure: BaseException | None = None
        self._stop_parts = threading.Event()
        self._stop_marks = threading.Event()
        self._behind = threading.Event()
        self._started_s = time.monotonic()
        self._is_wired = False
        self._wait_s = SHORT_WAIT_S
        self._pool: LogBatchPool
        self._dispatcher: TieredDispatcher
        self._uploader: CycleUploader
        self._index_builder: IndexBuilder
        self._marks: MetadataCommits
        self._loop: FollowLoop

    # -- start ------------------------------------------------------------------------------------------------

    def _open(self, *, claim_now: bool) -> None:
        """Load the catalog, settle the log line, place the cursor."""
        start_phys = self._owner.open(claim_now=claim_now)
        self._owner.load_tails(self._given.table, self._given.tails)
        self._wire(start_phys)
        self._owner.planning_begins()
        self._is_wired = True

    def _wire(self, start_phys: int) -> None:
        parts = wire(self._given, start_phys, behind=self._behind, check_failure=self._check_failure)
        self._pool, self._dispatcher, self._uploader = parts.pool, parts.dispatcher, parts.uploader
        self._index_builder, self._marks, self._loop = parts.index_builder, parts.marks, parts.loop

    # -- run --------------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event, *, follow: bool) -> OffloadResult:
        """Work until ``stop`` is set or, without ``follow``, the end of the log is committed.

        Raises FencedError when another writer took over, UnavailableError when the store stayed away while
        stopping, and the other TieredErrors that repeating cannot help. Everything read and not committed stays in
        the commitlog.
        """
        given = self._given
        with watched_pins(given.pins, self._log, PIN_EVERY_MS / 1000, given.environment.log):
            self._open(claim_now=follow)
        from_phys = self._dispatcher.cursor
        self._wait_s = IDLE_WAIT_S if follow else SHORT_WAIT_S
        threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (
                ("compensate", self._compensate_loop),
                ("builder", self._build_loop),
                ("committer", self._commit_loop),
                *((("index", self._index_loop), ("marks", self._marks_loop)) if follow else ()),
            )
        ]
        for thread in threads:
            thread.start()
        try:
            if follow:
                with self._archived_before_raised():
                    self._loop.run(stop)
                with kept_up(self._look_after_pins, PIN_EVERY_MS / 1000, given.environment.log):
                    self._await_marks(threads[-1])
                    self._drain()
                self._loop.step_pins()
            else:
                with self._archived_before_raised():
                    self._read_to_the_end(stop)
                self._drain()
            if not follow and not stop.is_set():
                self._finish_backfill()
                self._finish_index(stop)
            if self._writer.is_claimed:
                self._writer.release(pending_deletions=self._uploader.pending_deletions)
        finally:
            self._stop_parts.set()
            self._stop_marks.set()
            self._behind.set()
            self._index_builder.committed()
            self._uploader.close()
            self._writer.abort()  # who still waits for the store gives up
            for thread in threads:
                thread.join(timeout=5)
        return self._result(from_phys)

    def give_up(self, error: UnavailableError) -> None:
        """End ``run``, whatever it waits for, with ``error`` or with what the store said last; from any thread."""
        self._failure = self._failure or error
        self._writer.abort()

    @contextmanager
    def _archived_before_raised(self) -> Iterator[None]:
        """What stands before a place that the disk does not give is committed, then the failure raised: the next start
        would read no further, and read it for nothing."""
        try:
            yield
        except UnreadableError:
            with kept_up(self._look_after_pins, PIN_EVERY_MS / 1000, self._given.environment.log):
                self._drain()
            raise

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

    def _compensate_loop(self) -> None:
        while not self._stop_parts.is_set():
            if not self._behind.wait(self._wait_s):
                continue
            try:
                result = self._dispatcher.compensate(self._bound_source.feed)
            except UnreadableError:
                # The dispatch loop meets it as well, once it gets at the reader, and ends in order.
                self._behind.clear()
                self._stop_parts.wait(IDLE_WAIT_S)
                continue
            if result == StepResult.CAUGHT_UP:
                self._behind.clear()
            elif result == StepResult.BUSY:
                self._stop_parts.wait(SHORT_WAIT_S / 5)

    def _build_loop(self) -> None:
        while not self._stop_parts.is_set():
            self._uploader.build_next(self._wait_s)

    def _commit_loop(self) -> None:
        while not self._stop_parts.is_set():
            if self._uploader.commit_next(self._wait_s):
                self._index_builder.committed()
                self._environment.committed(self._writer.state)

    def _marks_loop(self) -> None:
        """Apart from the dispatch loop: these commits wait for the object store, following does not."""
        while not self._stop_marks.is_set():
            self._marks.look(self._environment.clock_ms())
            self._stop_marks.wait(MARKS_EVERY_S)

    def _await_marks(self, thread: threading.Thread) -> None:
        """No mark is committed once the epoch is released."""
        self._stop_marks.set()
        while thread.is_alive():
            self._check_failure()
            thread.join(SHORT_WAIT_S)

    def _index_loop(self) -> None:
        self._index_builder.committed()  # an earlier process may have left something to do
        self._index_builder.run(self._stop_parts)

    def _read_to_the_end(self, stop: threading.Event) -> None:
        self._bound_source.ask_early(self._dispatcher.cursor)
        while not stop.is_set():
            self._check_failure()
            self._bound_source.refuse_started_broker()
            before = self._dispatcher.cursor
            result = self._dispatcher.compensate(self._bound_source.feed)
            if result == StepResult.BUSY:
                stop.wait(SHORT_WAIT_S / 5)
            elif (
                result == StepResult.CAUGHT_UP
                and self._dispatcher.cursor == before
                and self._is_end_of_log(before)
            ):
                break

    def _is_end_of_log(self, phys: int) -> bool:
        """Whether nothing follows ``phys``: nothing was ever written there, or what was does not count."""
        return self._log.is_blank_from(phys) or self._bound_source.settle() is None

    def _drain(self) -> None:
        """Close the open batch and wait until everything closed is committed."""
        while True:
            self._check_failure()
            self._dispatcher.close_if_due(force=True)
            if self._uploader.is_idle and not self._dispatcher.has_open_range:
                return
            time.sleep(SHORT_WAIT_S / 5)

    def _look_after_pins(self) -> None:
        """While draining: a store that is away may take hours, and the broker's disk fills meanwhile."""
        self._log.refresh()
        self._loop.step_pins()

    def _finish_backfill(self) -> None:
        """Show what the broker would show, and say what its log lost."""
        with_units = self._bound_source.shown_queues()
        if with_units is not None:
            self._find_lost_end(with_units)
            self._marks.finish(with_units, self._bound_source.proven_phys)

    def _find_lost_end(self, shown: Set[tuple[str, int]]) -> None:
        """Of a broker proven dead: a live one has its word for where its log ends."""
        index, state = self._given.store.consume_queues(), self._writer.state_or_none
        last = self._bound_source.last
        if index is None or state is None or last is None or last.why is not BoundReason.DEAD:
            return
        end_phys = self._dispatcher.cursor
        named_phys = referenced_end_phys(index, state, end_phys, shown=shown, topics=self._given.topic_filter)
        if named_phys > end_phys:
            self._uploader.counters.lost_ranges += 1
            file = self._log.file_at(max(end_phys - 1, 0))
            self._environment.log(
                "commitlog lost its end, its last messages are lost to the archive",
                {
                    "error": "consume queues name records behind it",
                    "file": "" if file is None else str(file.path),
                    "begin_phys": end_phys,
                    "end_phys": named_phys,
                },
            )

    def _finish_index(self, stop: threading.Event) -> None:
        """Make every key findable from index files, if that is wanted: few segments are searched as fast."""
        settings = self._given.index_settings
        if not settings.enabled or not settings.after_backfill or not self._index_builder.has_unindexed():
            return
        self._owner.claim()  # what a killed process left of the index carries an older epoch than what is made now
        self._index_builder.run_to_end(stop)

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
            hidden=self._marks.hidden,
            duration_s=time.monotonic() - self._started_s,
        )

    # -- status -----------------------------------------------------------------------------------------------

    @property
    def is_claim_settled(self) -> bool:
        """Whether a claim of the archive was won or refused."""
        return self._owner.is_claim_settled

    @property
    def retry_reason(self) -> str:
        """Why a commit, also the first one, is tried again; empty when none is."""
        return self._writer.retry_reason

    def status(self) -> OffloadStatus | None:
        """A consistent enough view for people and metrics; never blocks the parts. None until the catalog is loaded."""
        if not self._is_wired:
            return None
        state = self._writer.state
        committed = state.cursor.phys if state.started else self._log.min_phys
        bound = max(self._bound_source.feed.limit_phys, committed)
        since_ms = self._uploader.oldest_uncommitted_ms() or self._dispatcher.open_since_ms
        return OffloadStatus(
            committed_phys=committed,
            read_phys=self._dispatcher.cursor,
            bound_phys=bound,
            log_min_phys=self._log.min_phys,
            written_phys=max(bound, self._bound_source.written_phys),
            lag_bytes=bound - committed,
            lag_ms=0 if since_ms is None else max(0, self._environment.clock_ms() - since_ms),
            epoch=state.epoch,
            version=state.version,
            fenced=isinstance(self._failure, FencedError),
            memory_used_bytes=self._pool.used_bytes() + self._uploader.in_flight_bytes(),
            memory_budget_bytes=self._settings.memory_budget_bytes,
            last_error=self.retry_reason or self._uploader.counters.last_error,
            pins=self._loop.pin_status,
            bound_reason=self._bound_source.last.why.value if self._bound_source.last is not None else "",
            counters=self._uploader.counters,
            unindexed_objects=len(state.unindexed),
            pending_deletions=len(state.pending_deletions),
            oldest_pending_deletion_ms=state.oldest_pending_deletion_ms,
            index_files_rebuilt=self._index_builder.counters.remade,
        )
