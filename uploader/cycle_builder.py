"""Turns closed batches into cycles and starts their attempts. One thread's work.

A failed or unanswered PUT abandons the whole attempt: its keys become garbage, its memory is released, and the cycle is
uploaded again under new keys, together with newer data unless a later cycle in flight has it. Each cycle is retried on
its own, even while an older one waits or the catalog is unavailable: stalls do not add up.

Cycles are planned in cycle_plan.py and committed in cycle_upload.py.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from tiered.catalog.repeated_offsets import repeated_offsets
from tiered.errors import UnavailableError
from tiered.formats.keys import timer_key
from tiered.formats.segment import EncodedSegment, SegmentMeta, SegmentScratch, encode_segment
from tiered.formats.timer_object import EncodedTimers
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_LMQ, GapReason
from tiered.object_store.abandonment import Abandonment, abandonable
from tiered.object_store.interface import Body, put_own
from uploader.attempts import attempt_timeout_ms, retry_delay_ms
from uploader.cycle import Attempt, Cycle, CyclesInFlight, UploadContext, UploadCounters
from uploader.cycle_draft import gap_reason, object_key
from uploader.cycle_plan import CyclePlan
from uploader.double_buffer import DoubleBuffer
from uploader.log_batch import LogBatch
from uploader.timer_entries import encoded_body, timer_entries

logger = logging.getLogger(__name__)

IN_FLIGHT_MAX = 2
LMQS_MAX = 1000
"""If an archive has more LMQs than this, queues whose offsets the broker used again are left as they are: all LMQs
would have to be read again with them."""
RETRY_LOOK_S = 0.25
"""How often cycles in flight are looked at for a retry."""


class CycleBuilder:
    """Plans cycles, and starts and repeats their uploads. One thread calls ``build_next``."""

    def __init__(
        self,
        context: UploadContext,
        closed: DoubleBuffer[LogBatch],
        in_flight: CyclesInFlight,
        counters: UploadCounters,
        *,
        upload_threads: int,
        extend: Callable[[LogBatch], bool],
    ) -> None:
        """``closed``: the batches to build cycles of; ``in_flight``: cycles until their commit, shared with the
        committer. ``extend`` adds newer data to a batch that is uploaded again (TieredDispatcher.extend_into)."""
        self._context = context
        self._closed = closed
        self._in_flight = in_flight
        self._counters = counters
        self._extend = extend
        self._put_pool = ThreadPoolExecutor(upload_threads, thread_name_prefix="put")
        self._plan_lock = threading.RLock()
        """Held while a cycle is planned: cycles are planned in the order of the log."""
        self._stopping = threading.Event()
        self._attempt = 0
        """The number of the newest attempt, a part of its keys."""
        self._was_damaged = self._was_lost = False
        """Whether any planned cycle, committed or not, had damaged or lost parts."""
        self._scratch = SegmentScratch()

    def build_next(self, timeout_s: float) -> bool:
        """Upload failed cycles again that are due, and plan, encode and start uploading the next closed batch. Waits
        for one up to ``timeout_s``, and returns whether there was one.

        Raises errors that a retry cannot help, once older cycles are committed: AccessDeniedError, RefusedRequestError,
        NotFoundError.
        """
        changes = self._in_flight.changes
        self._retry_failed()
        timeout_s = min(timeout_s, RETRY_LOOK_S) if len(self._in_flight) else timeout_s
        if len(self._in_flight) >= IN_FLIGHT_MAX:
            self._in_flight.wait(timeout_s, after=changes)
            return False
        if not self._closed.wait_for_request(timeout_s):
            return False
        self._context.claim()
        with self._plan_lock:
            batch = self._closed.get()
            if batch is None:
                return False
            self._hide_messages_above(batch)
            cycle = Cycle(batch, self._plan(batch))
            self._start_attempt(cycle)
            self._in_flight.append(cycle)
        return True

    def _plan(self, batch: LogBatch) -> CyclePlan:
        while self._resolve_repeated_offsets(plan := self._planned(batch), batch):
            pass
        self._context.tails.apply(plan.change)
        return plan

    def _planned(self, batch: LogBatch) -> CyclePlan:
        plan = self._context.header_check.plan(self._context.planner, batch, self._gap_reason)
        self._was_damaged = self._was_damaged or bool(batch.damaged)
        self._was_lost = self._was_lost or bool(batch.lost)
        return plan

    def _hide_messages_above(self, batch: LogBatch) -> None:
        """Before ``batch`` is archived: where a repair found messages above the place in the log from which on it lets
        the log be read, hide them. What the log has of them is archived again; what it lost, before the repair or
        since, has no place in it. Those of parts of the log that cannot be read stay."""
        phys = batch.from_phys
        unread = [(one.begin_phys, one.end_phys) for parts in (batch.lost, batch.damaged) for one in parts]
        for begin_phys, end_phys in sorted(unread):
            phys = end_phys if begin_phys <= phys else phys
        if ends := self._context.writer.ends_below(phys):
            self._await_commits()
            self._end_queues(ends, batch, "a part of the commitlog that was archived before is read again")

    def _resolve_repeated_offsets(self, plan: CyclePlan, batch: LogBatch) -> bool:
        """Before ``batch`` is archived by ``plan``: if the broker has used offsets of a queue again, end the archived
        queue in front of these by a commit, and archive again what the broker's consume queue has from there on.
        Returns whether that changed something, so that ``batch`` must be planned again.

        Raises UnavailableError when stopping, or if ``batch`` is in flight already: the next start reads its range
        again."""
        context, state = self._context, self._context.writer.state
        gaps = [gap for gap in plan.gaps if gap.queue in repeated_offsets(state)]
        has_many = np.count_nonzero(state.table["flags"] & QUEUE_LMQ) > LMQS_MAX
        if not (plan.ends or gaps) or has_many:
            return False
        if any(cycle.batch is batch for cycle in self._in_flight.all()):
            queue = next(iter(plan.ends), None) or gaps[0].queue
            raise UnavailableError(
                f"the broker has used offsets of {queue} again while its messages were uploaded",
                hint="the next start archives them again",
            )
        self._await_commits()
        if plan.ends:
            gaps = context.header_check.to_read_again(context.writer.state, plan.ends)
            ends = {gap.queue: gap.begin_queue_offset for gap in gaps}
            self._end_queues(ends, batch, "the broker used queue offsets again")
        has_changed = bool(plan.ends)
        for gap in gaps:
            ordinal = context.planner.ordinal_of(gap.queue)
            for again in context.header_check.read_again(ordinal, gap, batch.from_phys):
                cycle = Cycle(again, context.planner.plan(again.columns, gap_reason=self._gap_reason(again)))
                context.tails.apply(cycle.plan.change)
                self._start_attempt(cycle)
                self._in_flight.append(cycle)
                self._await_commits()
                has_changed = True
        return has_changed

    def _end_queues(self, ends: Mapping[QueueKey, int], batch: LogBatch, why: str) -> None:
        """Commit, before ``batch`` is archived, that queues end at the offsets ``ends``; their archived messages from
        there on are hidden. The planner then continues the queues from there."""
        context = self._context
        state = context.writer.end_queues(ends, batch.from_phys)
        logger.warning(
            "archived messages are hidden, as others with their offsets are archived: tiered ls --histories lists them",
            extra={
                "error": why,
                "queues": ", ".join(f"{key} from {offset} on" for key, offset in ends.items()),
                "messages": state.log_histories[-1].hidden_messages,
            },
        )
        context.planner.reload(state, ends)

    def _await_commits(self) -> None:
        """Wait until all cycles in flight are committed, and retry failed ones. Raises UnavailableError when
        stopping."""
        while len(self._in_flight):
            if self._stopping.is_set():
                raise UnavailableError(
                    "this writer was stopped before all uploads in flight were committed: the next start archives them "
                    "again from the commitlog"
                )
            changes = self._in_flight.changes
            self._retry_failed()
            self._in_flight.wait(1.0, after=changes)

    def _gap_reason(self, batch: LogBatch) -> GapReason:
        return gap_reason(
            is_lost=bool(batch.lost),
            is_damaged=bool(batch.damaged),
            was_damaged=self._was_damaged,
            was_lost=self._was_lost,
        )

    def _start_attempt(self, cycle: Cycle) -> None:
        """Encode the objects of ``cycle``, and start the PUT of each under a key that no other attempt has. The encoded
        objects stay in memory until the commit, or until the attempt is abandoned."""
        context, batch = self._context, cycle.batch
        self._attempt += 1
        state = context.writer.state
        meta = SegmentMeta(
            cluster=context.cluster,
            broker=context.broker,
            epoch=state.epoch,
            attempt=self._attempt,
            log_history=state.cursor.history,
            catalog_version=state.version,
            from_phys=batch.from_phys,
            to_phys=batch.to_phys,
            created_ms=context.clock.wall_ms(),
            writer=context.writer_name,
            history_phys=state.log_histories[-1].begin_phys if state.log_histories else 0,
        )
        keys: list[str] = []
        encoded: list[EncodedSegment] = []
        puts: list[Future[None]] = []
        longest_ms = 0
        abandonment = Abandonment()
        for plan in cycle.plan.objects:
            segment = encode_segment(
                meta, plan.queues, plan.runs, plan.rows, batch.arena, context.codec, self._scratch
            )
            key = object_key(plan, batch.from_phys, state.epoch, self._attempt)
            timeout_ms = attempt_timeout_ms(context.policy, segment.size_bytes, cycle.failures)
            longest_ms = max(longest_ms, timeout_ms)
            keys.append(key)
            encoded.append(segment)
            body = partial(self._body, encoded, len(encoded) - 1)
            puts.append(self._put_pool.submit(self._put, key, body, timeout_ms, abandonment))
        timers = list[EncodedTimers]()
        if (rows := cycle.plan.timers) is not None:
            keys.append(timer_key(state.epoch, self._attempt))
            entries = timer_entries(rows, batch.arena, context.timers, context.clock.wall_ms())
            timeout_ms = attempt_timeout_ms(context.policy, entries[0].nbytes, cycle.failures)
            longest_ms = max(longest_ms, timeout_ms)
            body = partial(encoded_body, entries, timers)
            puts.append(self._put_pool.submit(self._put, keys[-1], body, timeout_ms, abandonment))
        cycle.attempt = Attempt(keys, encoded, puts, longest_ms / 1000, abandonment, timers, self._attempt)
        for put in puts:
            put.add_done_callback(lambda _: self._in_flight.notify())

    @staticmethod
    def _body(encoded: list[EncodedSegment], number: int) -> Body:
        """Looked up when it is sent: memory of an abandoned attempt is free before."""
        return encoded[number].body

    def _put(self, key: str, body: Callable[[], Body], timeout_ms: int, abandonment: Abandonment) -> None:
        with abandonable(abandonment):
            put_own(self._context.archive, key, body(), timeout_s=timeout_ms / 1000)

    # -- retries ----------------------------------------------------------------------------------------------

    def _retry_failed(self) -> None:
        now_s = self._context.clock.monotonic_s()
        for cycle in self._in_flight.all():
            self._abandon_if_failed(cycle, now_s)
            if cycle.attempt is None and now_s >= cycle.retry_at_s:
                self._start_again(cycle)

    def _abandon_if_failed(self, cycle: Cycle, now_s: float) -> None:
        """If the attempt of ``cycle`` has failed, abandon it: its keys become garbage, its memory is released, and a
        time for the next attempt is set. An error that only an operator can correct is raised, once all older cycles
        are committed."""
        attempt = cycle.attempt
        error = None if attempt is None else attempt.failure(now_s)
        if attempt is None or error is None:
            return
        context, counters = self._context, self._counters
        delay_ms = retry_delay_ms(context.policy, error, cycle.failures + 1, context.jitter())
        if delay_ms is None and self._in_flight.oldest() is not cycle:
            return  # older cycles are committed first
        cycle.failures += 1
        counters.attempts_abandoned += len(attempt.keys)
        counters.last_error = str(error)
        counters.consecutive_failures = cycle.failures
        logger.warning(
            "the upload of a part of the commitlog failed, and is tried again under new keys",
            extra={
                "error": str(error),
                "failures": cycle.failures,
                "from_phys": cycle.batch.from_phys,
                "to_phys": cycle.batch.to_phys,
            },
        )
        self._in_flight.add_garbage(attempt.keys_that_may_exist())
        attempt.encoded.clear()
        attempt.timers.clear()
        cycle.attempt = None
        if delay_ms is None:
            raise error
        cycle.retry_at_s = now_s + delay_ms / 1000

    def _start_again(self, cycle: Cycle) -> None:
        """Start the next attempt of a cycle that failed: the newest one together with newer data, so planned again."""
        with self._plan_lock:
            if self._is_newest(cycle) and cycle.batch.to_phys > cycle.batch.from_phys:
                self._context.tails.revert(cycle.plan.change)
                self._extend(cycle.batch)
                cycle.plan = self._plan(cycle.batch)
            self._start_attempt(cycle)

    def _is_newest(self, cycle: Cycle) -> bool:
        """No later cycle is planned: only then may a retry include newer data. Called under the plan lock."""
        return self._in_flight.all()[-1] is cycle and len(self._closed) == 0

    # -- life -------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether every closed batch is committed."""
        if not self._plan_lock.acquire(blocking=False):
            return False  # a cycle is being planned
        try:
            return not len(self._in_flight) and len(self._closed) == 0
        finally:
            self._plan_lock.release()

    def next_attempt(self) -> int:
        """A number that no other key of this epoch has."""
        with self._plan_lock:
            self._attempt += 1
            return self._attempt

    def close(self) -> None:
        """Release threads."""
        self._stopping.set()
        self._closed.wake()
        self._put_pool.shutdown(wait=False, cancel_futures=True)
        self._scratch.close()
