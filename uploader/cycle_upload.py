"""Turns closed batches into durable objects and catalog commits, in log order (rules: 3a Writing).

    builder thread   batch → plan → encoded objects → PUTs started         (cycles overlap here)
    committer thread oldest cycle: all PUTs durable → one catalog commit   (strictly in order)

Data before index before visibility: the commit is built only from objects whose PUT was acknowledged. A failed or
unanswered PUT abandons the whole attempt: its keys are doomed, its memory is released, and the cycle is planned and
put anew under new keys, together with whatever arrived since unless a later cycle in flight already holds that.

Owns attempts and their order. Does not own what a cycle contains (cycle_plan.py) nor how a commit wins
(tiered.catalog).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace

from tiered.catalog.commit import CommitDraft
from tiered.catalog.protocol import CatalogWriter
from tiered.catalog.state import CatalogState, LogCheck
from tiered.errors import UnansweredError
from tiered.formats.segment import BlockCodec, EncodedSegment, SegmentMeta, SegmentScratch, encode_segment
from tiered.model.queue import QueueKey
from tiered.object_store.protocol import ObjectStore
from uploader.attempts import AttemptPolicy, Stop, after_failure, attempt_timeout_ms
from uploader.broker_state_archive import BrokerStateArchive
from uploader.cycle_draft import CycleRange, cycle_draft, gap_reason, object_key
from uploader.cycle_plan import CyclePlan, CyclePlanner
from uploader.double_buffer import DoubleBuffer
from uploader.log_batch import LogBatch, LogBatchPool
from uploader.queue_tails import QueueTails

IN_FLIGHT_MAX = 2
PUT_GRACE_S = 5.0


@dataclass
class Cycle:
    """One batch on its way: planned, encoded, its PUTs running."""

    batch: LogBatch
    plan: CyclePlan
    keys: list[str] = field(default_factory=list)
    encoded: list[EncodedSegment] = field(default_factory=list)
    puts: list[Future[None]] = field(default_factory=list)
    failures: int = 0


@dataclass
class UploadCounters:
    """What was done so far; read by status and metrics without a lock."""

    messages: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    objects: int = 0
    commits: int = 0
    attempts_abandoned: int = 0
    gaps: int = 0
    damaged_ranges: int = 0
    lost_ranges: int = 0
    last_error: str = ""
    consecutive_failures: int = 0


@dataclass(frozen=True)
class UploadContext:
    """What every cycle shares."""

    archive: ObjectStore
    writer: CatalogWriter
    planner: CyclePlanner
    tails: QueueTails
    pool: LogBatchPool
    codec: BlockCodec
    policy: AttemptPolicy
    cluster: str
    broker: str
    writer_name: str
    clock_ms: Callable[[], int]
    jitter: Callable[[], float]
    claim: Callable[[], None]
    """Owns the epoch, at the latest before the first PUT."""
    log: Callable[[str, dict[str, object]], None]


class CycleUploader:
    """The builder and committer halves. ``extend`` lets a retry take newer data (TieredDispatcher.extend_into)."""

    def __init__(
        self,
        context: UploadContext,
        closed: DoubleBuffer[LogBatch],
        *,
        upload_threads: int,
        extend: Callable[[LogBatch], bool],
        state_archive: BrokerStateArchive,
    ) -> None:
        self._context = context
        self._closed = closed
        self._extend = extend
        self._state_archive = state_archive
        self._put_pool = ThreadPoolExecutor(upload_threads, thread_name_prefix="put")
        self._plan_lock = threading.Lock()
        self._in_flight: deque[Cycle] = deque()
        self._changed = threading.Condition()
        self._attempt = 0
        self._doomed: list[str] = []
        self._scratch = SegmentScratch()
        self._stopping = threading.Event()
        self.counters = UploadCounters()

    # -- builder ----------------------------------------------------------------------------------------------

    def build_next(self, timeout_s: float) -> bool:
        """Plan, encode and start putting the next closed batch; False when there was none in time."""
        with self._changed:
            if len(self._in_flight) >= IN_FLIGHT_MAX:
                self._changed.wait(timeout_s)
                return False
        if not self._closed.wait_for_request(timeout_s):
            return False
        self._context.claim()
        with self._plan_lock:
            batch = self._closed.get()
            if batch is None:
                return False
            cycle = Cycle(batch, self._plan(batch))
            self._start_attempt(cycle)
            with self._changed:
                self._in_flight.append(cycle)
                self._changed.notify_all()
        return True

    def _plan(self, batch: LogBatch) -> CyclePlan:
        reason = gap_reason(
            is_lost=bool(batch.lost),
            is_damaged=bool(batch.damaged),
            was_damaged=bool(self.counters.damaged_ranges),
            was_lost=bool(self.counters.lost_ranges),
        )
        plan = self._context.planner.plan(batch.columns, gap_reason=reason)
        self._context.tails.apply(plan.change)
        return plan

    def _start_attempt(self, cycle: Cycle) -> None:
        self._attempt += 1
        state = self._context.writer.state
        batch = cycle.batch
        meta = SegmentMeta(
            cluster=self._context.cluster,
            broker=self._context.broker,
            epoch=state.epoch,
            attempt=self._attempt,
            line=state.cursor.line,
            catalog_version=state.version,
            from_phys=batch.from_phys,
            to_phys=batch.to_phys,
            created_ms=self._context.clock_ms(),
            writer=self._context.writer_name,
        )
        cycle.keys, cycle.encoded, cycle.puts = [], [], []
        for plan in cycle.plan.objects:
            encoded = encode_segment(
                meta, plan.queues, plan.runs, plan.rows, batch.arena, self._context.codec, self._scratch
            )
            key = object_key(plan, batch.from_phys, state.epoch, self._attempt)
            timeout_ms = attempt_timeout_ms(self._context.policy, encoded.size_bytes, cycle.failures)
            cycle.keys.append(key)
            cycle.encoded.append(encoded)
            cycle.puts.append(self._put_pool.submit(self._put, key, encoded, timeout_ms))

    def _put(self, key: str, encoded: EncodedSegment, timeout_ms: int) -> None:
        self._context.archive.put_if_absent(key, encoded.body, timeout_s=timeout_ms / 1000)

    # -- committer --------------------------------------------------------------------------------------------

    def commit_next(self, timeout_s: float) -> bool:
        """See the oldest cycle through to its commit, however many attempts it takes; False when there is none.

        Raises what cannot be retried: FencedError, AccessDeniedError, RefusedRequestError, NotFoundError.
        """
        with self._changed:
            if not self._in_flight:
                self._changed.wait(timeout_s)
            if not self._in_flight:
                return False
            cycle = self._in_flight[0]
        while True:
            error = self._await_puts(cycle)
            if error is None:
                break
            if self._stopping.is_set():
                raise error
            self._retry(cycle, error)
        self._commit(cycle)
        with self._changed:
            self._in_flight.popleft()
            self._changed.notify_all()
        self._context.pool.release(cycle.batch)
        return True

    def _await_puts(self, cycle: Cycle) -> Exception | None:
        first_error: Exception | None = None
        for put, encoded in zip(cycle.puts, cycle.encoded, strict=True):
            timeout_ms = attempt_timeout_ms(self._context.policy, encoded.size_bytes, cycle.failures)
            try:
                put.result(timeout=None if first_error is None else timeout_ms / 1000 + PUT_GRACE_S)
            except FutureTimeoutError:
                first_error = first_error or UnansweredError("upload still unanswered")
            except Exception as error:
                first_error = first_error or error
        return first_error

    def _retry(self, cycle: Cycle, error: Exception) -> None:
        cycle.failures += 1
        self.counters.attempts_abandoned += len(cycle.keys)
        self.counters.last_error = str(error)
        self.counters.consecutive_failures = cycle.failures
        step = after_failure(self._context.policy, error, cycle.failures, self._context.jitter())
        self._context.log(
            "upload attempt abandoned",
            {"error": str(error), "failures": cycle.failures, "from_phys": cycle.batch.from_phys,
             "to_phys": cycle.batch.to_phys},
        )  # fmt: skip
        self._doomed += cycle.keys
        cycle.encoded, cycle.puts = [], []
        if isinstance(step, Stop):
            raise step.error
        if step.delay_ms:
            self._stopping.wait(step.delay_ms / 1000)
        with self._plan_lock:
            if self._is_newest(cycle):
                self._context.tails.revert(cycle.plan.change)
                self._extend(cycle.batch)
                cycle.plan = self._plan(cycle.batch)
            self._start_attempt(cycle)

    def _is_newest(self, cycle: Cycle) -> bool:
        """No later cycle is planned: only then may a retry take newer data. Called under the plan lock."""
        with self._changed:
            return self._in_flight[-1] is cycle and len(self._closed) == 0

    def _commit(self, cycle: Cycle) -> None:
        draft = self._draft(cycle, self._state_archive.pending())
        self._context.writer.append(draft)
        self._state_archive.committed(draft.state_objects)
        self._doomed = self._doomed[len(draft.doomed) :]
        counters = self.counters
        counters.commits += 1
        counters.consecutive_failures = 0
        counters.messages += cycle.plan.rows
        counters.raw_bytes += cycle.plan.raw_bytes
        counters.stored_bytes += sum(encoded.size_bytes for encoded in cycle.encoded)
        counters.objects += len(cycle.keys)
        counters.gaps += len(cycle.plan.gaps)
        counters.damaged_ranges += len(cycle.batch.damaged)
        counters.lost_ranges += len(cycle.batch.lost)
        for gap in cycle.plan.gaps:
            self._context.log("gap recorded", {"queue": str(gap.queue), "begin": gap.begin_queue_offset,
                              "end": gap.end_queue_offset, "reason": gap.reason.name})  # fmt: skip
        for damage in cycle.batch.damaged:
            self._context.log(
                "commitlog damaged, left out of the archive",
                {"error": damage.detail, "file": damage.path, "begin_phys": damage.begin_phys,
                 "end_phys": damage.end_phys},
            )  # fmt: skip
        for begin_phys, end_phys in cycle.batch.lost:
            self._context.log(
                "commitlog missing, its messages are lost to the archive",
                {"error": "no file holds it", "begin_phys": begin_phys, "end_phys": end_phys},
            )

    def _draft(self, cycle: Cycle, state_objects: dict[str, str]) -> CommitDraft:
        batch = cycle.batch
        state = self._context.writer.state
        check = batch.log_check() or _previous_check(state)
        place = CycleRange(state.epoch, state.cursor.line, batch.from_phys, batch.to_phys, check)
        return replace(
            cycle_draft(cycle.plan, cycle.keys, cycle.encoded, place),
            state_objects=state_objects,
            doomed=list(self._doomed),
            created_ms=self._context.clock_ms(),
        )

    def commit_marks(self, *, hide: list[QueueKey]) -> None:
        """Commit without a range: queues to hide, broker tables to name.

        Raises CommitInvalidError when a cycle was committed at the same moment: try again later.
        """
        state = self._context.writer.state
        draft = CommitDraft(
            kind="append",
            line=state.cursor.line,
            from_phys=state.cursor.phys,
            to_phys=state.cursor.phys,
            check=state.cursor.check,
            hide=hide,
            state_objects=self._state_archive.pending(),
            created_ms=self._context.clock_ms(),
        )
        self._context.writer.append(draft)
        self._state_archive.committed(draft.state_objects)

    # -- life -------------------------------------------------------------------------------------------------

    @property
    def doomed(self) -> tuple[str, ...]:
        """Keys of abandoned attempts that no commit has given up yet."""
        return tuple(self._doomed)

    @property
    def is_idle(self) -> bool:
        """Nothing closed, building or in flight."""
        with self._plan_lock, self._changed:
            return not self._in_flight and len(self._closed) == 0

    def oldest_uncommitted_ms(self) -> int | None:
        """When the oldest cycle in flight was opened."""
        with self._changed:
            return self._in_flight[0].batch.opened_ms if self._in_flight else None

    def next_attempt(self) -> int:
        """A number no other key of this epoch carries."""
        with self._plan_lock:
            self._attempt += 1
            return self._attempt

    def in_flight_bytes(self) -> int:
        """Encoded bytes whose PUT is running, for the budget metric."""
        with self._changed:
            return sum(encoded.size_bytes for cycle in self._in_flight for encoded in cycle.encoded)

    def close(self) -> None:
        """Release threads."""
        self._stopping.set()
        self._put_pool.shutdown(wait=False, cancel_futures=True)


def _previous_check(state: CatalogState) -> LogCheck:
    return state.cursor.check
