"""Turns closed batches into durable objects and catalog commits, in log order.

    builder thread   batch → plan → encoded objects → PUTs started, retried     (cycles overlap here: cycle_builder.py)
    committer thread oldest cycle: all PUTs durable → one catalog commit        (strictly in order)

Data before index before visibility: a commit names only objects whose PUT was acknowledged. Owns the order of commits;
how a commit wins is in tiered.catalog.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from tiered.catalog.commit import CommitDraft
from tiered.catalog.repeated_offsets import with_repeated
from tiered.catalog.timer_refs import TimerRef
from tiered.model.queue import QueueKey
from tiered.model.tables import GapReason
from uploader.broker_state_archive import BrokerStateArchive
from uploader.cycle import Attempt, Cycle, CyclesInFlight, UploadContext, UploadCounters
from uploader.cycle_builder import IN_FLIGHT_MAX, CycleBuilder
from uploader.cycle_draft import cycle_draft, draft_in_place
from uploader.double_buffer import DoubleBuffer
from uploader.log_batch import LogBatch
from uploader.log_evidence import with_known_hosts

logger = logging.getLogger(__name__)

__all__ = ["IN_FLIGHT_MAX", "CycleUploader", "UploadContext", "UploadCounters"]

WAIT_S = 1.0
"""A wait ends with the answer of a PUT; this bounds it for a stop."""


class CycleUploader:
    """Uploads and commits closed batches: ``builder`` for the one thread, ``commit_next`` for the other."""

    def __init__(
        self,
        context: UploadContext,
        closed: DoubleBuffer[LogBatch],
        *,
        upload_threads: int,
        extend: Callable[[LogBatch], bool],
        state_archive: BrokerStateArchive,
    ) -> None:
        """``closed``: the batches that the dispatcher closes; ``extend`` adds newer data to one that is uploaded again
        (TieredDispatcher.extend_into); ``state_archive``: the broker's tables, whose copies go into the same
        commits."""
        self._context = context
        self._state_archive = state_archive
        self._in_flight = CyclesInFlight()
        self._stopping = threading.Event()
        self.counters = UploadCounters()
        self.builder = CycleBuilder(
            context, closed, self._in_flight, self.counters, upload_threads=upload_threads, extend=extend
        )

    def commit_next(self, timeout_s: float) -> bool:
        """Wait until all objects of the oldest cycle are stored, after any number of attempts, and commit it. Called
        again and again by the committer thread. False when there is no cycle within ``timeout_s``, or after ``close``.

        Raises errors that a retry cannot help: FencedError, AccessDeniedError, RefusedRequestError, NotFoundError.
        """
        changes = self._in_flight.changes
        cycle = self._in_flight.oldest()
        if cycle is None:
            self._in_flight.wait(timeout_s, after=changes)
            cycle = self._in_flight.oldest()
        attempt = None if cycle is None else self._await_durable(cycle)
        if cycle is None or attempt is None:
            return False
        self._commit(cycle, attempt)
        self._in_flight.remove_oldest()
        self._context.pool.release(cycle.batch)
        return True

    def _await_durable(self, cycle: Cycle) -> Attempt | None:
        """Wait for an attempt of ``cycle`` of which all PUTs are acknowledged, and return it; None after ``close``."""
        while not self._stopping.is_set():
            changes = self._in_flight.changes
            if (attempt := cycle.durable_attempt()) is not None:
                return attempt
            self._in_flight.wait(WAIT_S, after=changes)
        return None

    def _commit(self, cycle: Cycle, attempt: Attempt) -> None:
        """Commit a cycle whose ``attempt`` has stored all objects. Then count it, and log its gaps and what could not
        be archived: only now does the archive say the same."""
        draft = self._draft(cycle, attempt, self._state_archive.pending())
        self._context.writer.append(draft)
        self._state_archive.committed(draft.state_objects)
        self._in_flight.garbage_committed(len(draft.pending_deletions))
        counters = self.counters
        counters.commits += 1
        counters.consecutive_failures = 0
        counters.messages += cycle.plan.messages
        counters.raw_bytes += cycle.plan.raw_bytes
        counters.stored_bytes += sum(encoded.size_bytes for encoded in attempt.encoded)
        counters.objects += len(attempt.keys)
        counters.gaps += len(cycle.plan.gaps)
        counters.damaged += len(cycle.batch.damaged)
        counters.lost += len(cycle.batch.lost)
        for gap in cycle.plan.gaps:
            was_excluded = gap.reason is GapReason.EXCLUDED
            logger.log(
                logging.INFO if was_excluded else logging.ERROR,
                "gap recorded: the topic of the missing offsets was excluded"
                if was_excluded
                else "gap recorded: offsets of a queue are missing from the archive for good",
                extra={
                    "queue": str(gap.queue),
                    "begin": gap.begin_queue_offset,
                    "end": gap.end_queue_offset,
                    "reason": gap.reason.name,
                },
            )
        for key, count in self._set_aside(cycle.batch).items():
            counters.set_aside += count
            if count:
                logger.warning(
                    "messages of a queue are not archived: tiered ls counts them as set aside",
                    extra={
                        "error": "the broker used their queue offsets again, and its consume queue does not have them",
                        "queue": str(key),
                        "messages": count,
                    },
                )
        for damage in cycle.batch.damaged:
            logger.warning(
                "a range of the commitlog is damaged and not archived",
                extra={
                    "error": damage.detail,
                    "file": damage.path,
                    "begin_phys": damage.begin_phys,
                    "end_phys": damage.end_phys,
                },
            )
        for lost in cycle.batch.lost:
            logger.error(
                "a range of the commitlog is missing: its messages are lost to the archive",
                extra={"error": lost.why, "begin_phys": lost.begin_phys, "end_phys": lost.end_phys},
            )

    def _draft(self, cycle: Cycle, attempt: Attempt, state_objects: dict[str, str]) -> CommitDraft:
        """The commit of ``cycle``, whose ``attempt`` is stored: its runs, timers and settings, the copies of the
        broker's tables, and the keys of abandoned attempts as garbage."""
        batch = cycle.batch
        state = self._context.writer.state
        # The keys of segments come first; that of timers, if there are any, last.
        segment_keys = attempt.keys[: len(attempt.encoded)]
        draft = cycle_draft(cycle.plan, segment_keys, attempt.encoded, batch, state)
        return replace(
            draft,
            timers=[TimerRef.of(timers, state.epoch, attempt.timers_number) for timers in attempt.timers],
            settings=with_known_hosts(draft.settings, state)
            | self._context.new_settings(state)
            | with_repeated(state, self._set_aside(batch)),
            state_objects=state_objects,
            pending_deletions=self._in_flight.pending_deletions(),
            created_ms=self._context.clock.wall_ms(),
        )

    def _set_aside(self, batch: LogBatch) -> dict[QueueKey, int]:
        keys = {
            self._context.planner.archived_key(ordinal): count for ordinal, count in batch.repeated.items()
        }
        return {key: count for key, count in keys.items() if key is not None}

    def has_new_settings(self) -> bool:
        """Whether settings of the archive wait for a commit."""
        return bool(self._context.new_settings(self._context.writer.state))

    def commit_metadata(self, *, hide: list[QueueKey], unhide: list[QueueKey]) -> None:
        """Commit, without a part of the log, which queues are hidden and shown again, the copies of the broker's
        tables, and new settings. Raises CommitInvalidError when a cycle was committed at the same moment: retry later.
        """
        draft = replace(
            draft_in_place(self._context.writer.state, self._context.clock.wall_ms()),
            hide=hide,
            unhide=unhide,
            state_objects=self._state_archive.pending(),
            settings=self._context.new_settings(self._context.writer.state),
        )
        self._context.writer.append(draft)
        self._state_archive.committed(draft.state_objects)

    # -- life -------------------------------------------------------------------------------------------------

    @property
    def pending_deletions(self) -> tuple[str, ...]:
        """Keys of abandoned attempts that no commit names yet."""
        return tuple(self._in_flight.pending_deletions())

    def in_flight_bytes(self) -> int:
        """Encoded bytes of running PUTs, for the budget metric."""
        attempts = [cycle.attempt for cycle in self._in_flight.all()]
        return sum(
            encoded.size_bytes for attempt in attempts if attempt is not None for encoded in attempt.encoded
        )

    def close(self) -> None:
        """Release threads."""
        self._stopping.set()
        self._in_flight.notify()
        self.builder.close()
