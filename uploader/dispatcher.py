"""TieredDispatcher: hands ranges of the commitlog to batches, by one cursor, without blocking the dispatch loop.

Three threads of offload.py share it:

1. dispatch step: reads the tail into the open batch. If the lock is taken, or no batch is free, it returns
   at once; the bytes stay in the commitlog.
2. compensate: takes the lock and reads in bulk what the dispatch step could not.
3. builder: drains closed batches from the double buffer (cycle_builder.py).

A batch closes when it is full or old. A batch of filtered traffic only stays open and moves its range, until a
commitlog file is crossed: then the dispatch offset is committed, so that filtered traffic never looks like lost
history.
"""

import threading
from enum import Enum

from tiered.catalog.state import LogCheck
from tiered.clock import Clock
from uploader.double_buffer import DoubleBuffer
from uploader.log_batch import LogBatch, LogBatchPool
from uploader.log_feed import FeedBound, FeedOutcome, LogFeed

STEP_BYTES = 1 << 20


class StepResult(Enum):
    """Result of a dispatch step or a compensation round."""

    HANDED_OVER = "handed over"
    BUSY = "busy"
    """Lock taken or budget spent: compensation reads the range."""
    CAUGHT_UP = "caught up"


class TieredDispatcher:
    """Owns the read cursor and the open batch. All methods are thread-safe."""

    def __init__(
        self,
        feed: LogFeed,
        pool: LogBatchPool,
        closed: DoubleBuffer[LogBatch],
        *,
        start_phys: int,
        batch_bytes: int,
        batch_age_ms: int,
        range_bytes_max: int,
        clock: Clock,
    ) -> None:
        """``feed`` reads the log from ``start_phys`` on into batches of ``pool``; full or old ones go to ``closed``.
        ``range_bytes_max``: bytes of the log that one batch may span, however few of them are archived."""
        self._feed = feed
        self._pool = pool
        self._closed = closed
        self._batch_bytes = batch_bytes
        self._batch_age_ms = batch_age_ms
        self._range_bytes_max = range_bytes_max
        self._clock = clock
        self._lock = threading.Lock()
        self._open: LogBatch | None = None
        """The batch into which the log is read at present."""
        self._cursor = start_phys
        self._closed_check: LogCheck | None = None
        """The checksum of the last bytes of the last closed batch."""

    @property
    def cursor(self) -> int:
        """Physical offset up to which the log has been handed over."""
        return self._cursor

    @property
    def has_open_range(self) -> bool:
        """Whether anything was read that is not yet closed."""
        batch = self._open
        return batch is not None and batch.to_phys > batch.from_phys

    def log_check(self) -> LogCheck | None:
        """Check of the last bytes read, which end at the cursor; None before the first."""
        with self._lock:
            check = self._open.log_check() if self._open is not None else None
            return check or self._closed_check

    def dispatch_step(self, bound: FeedBound) -> StepResult:
        """Read at most STEP_BYTES of the log below ``bound`` into the open batch. Never waits: if another thread reads
        at present, or no batch is free, the bytes stay in the log and the result is BUSY."""
        if not self._lock.acquire(blocking=False):
            return StepResult.BUSY
        try:
            return self._advance(bound, STEP_BYTES)
        finally:
            self._lock.release()

    def compensate(self, bound: FeedBound) -> StepResult:
        """Read at most one batch. Waits while another thread reads, but not for a free batch: then it is BUSY."""
        with self._lock:
            return self._advance(bound, self._batch_bytes)

    def close_if_due(self, *, force: bool = False) -> None:
        """Close the open batch if it is old, if it spans as much of the log as a file has, though few of its messages
        are archived, or if ``force``."""
        with self._lock:
            batch = self._open
            if batch is None or batch.to_phys == batch.from_phys:
                return
            # After the clock was set back the age may be negative: the batch may be old.
            is_young = 0 <= self._clock.wall_ms() - batch.opened_ms < self._batch_age_ms
            is_old = batch.is_wanted and not is_young
            is_long = batch.to_phys - batch.from_phys >= self._range_bytes_max
            if force or is_old or is_long:
                self._close(batch)

    def extend_into(self, batch: LogBatch, bound: FeedBound) -> bool:
        """Before ``batch`` is uploaded again, after its upload failed: read into it what the open batch has, as far as
        it fits; the open batch is released. Returns whether that was done: not if a later batch is closed already, as
        another upload may have its data.
        """
        with self._lock:
            newest_end = self._open.from_phys if self._open is not None else self._cursor
            if batch.to_phys != newest_end or self._open is None:
                return False
            # Only what was read already is read again.
            limit = FeedBound(self._cursor, min(self._cursor, bound.proven_phys))
            while batch.to_phys < limit.limit_phys:
                before = batch.to_phys
                if self._feed.advance(batch, limit, self._batch_bytes) != FeedOutcome.MORE:
                    break
                if batch.to_phys == before:
                    break
            self._release_open()
            self._cursor = batch.to_phys
            return True

    def _advance(self, bound: FeedBound, max_bytes: int) -> StepResult:
        """Read at most ``max_bytes`` of the log into the open batch, and close it if it is full. The caller holds the
        lock. BUSY: all batches wait for their upload, and the bytes stay in the log."""
        batch = self._open or self._open_batch()
        if batch is None:
            return StepResult.BUSY
        # The age of a batch counts from its first record that is archived.
        was_wanted = batch.is_wanted
        outcome = self._feed.advance(batch, bound, min(max_bytes, max(self._batch_bytes - batch.filled, 1)))
        self._cursor = batch.to_phys
        if batch.is_wanted and not was_wanted:
            batch.opened_ms = self._clock.wall_ms()
        if outcome == FeedOutcome.OVERSIZE:
            return self._replace_with_larger(batch)
        if outcome == FeedOutcome.FULL or batch.filled >= self._batch_bytes:
            return self._close_or_empty(batch)
        if outcome == FeedOutcome.CAUGHT_UP:
            return StepResult.CAUGHT_UP
        return StepResult.HANDED_OVER

    def _open_batch(self) -> LogBatch | None:
        batch = self._pool.try_acquire()
        if batch is not None:
            batch.reset(self._cursor, self._clock.wall_ms())
            self._open = batch
        return batch

    def _close_or_empty(self, batch: LogBatch) -> StepResult:
        if not batch.is_wanted and not batch.damaged and not batch.lost:
            batch.drop_bytes()
            return StepResult.HANDED_OVER
        return StepResult.HANDED_OVER if self._close(batch) else StepResult.BUSY

    def _close(self, batch: LogBatch) -> bool:
        check = batch.log_check()  # before the builder owns the batch
        if not self._closed.try_put(batch):
            return False
        self._open, self._closed_check = None, check
        return True

    def _replace_with_larger(self, batch: LogBatch) -> StepResult:
        """Exchange the open ``batch``, which has no record yet, for one that is large enough for the next record. That
        is read by the next step: HANDED_OVER says that there is more to read. Without a free batch the result is BUSY,
        and the range is read again later."""
        phys = batch.to_phys
        from_phys, damaged, lost = batch.from_phys, batch.damaged, batch.lost
        self._pool.release(batch)
        self._open = None
        larger = self._pool.try_acquire(at_least_bytes=self._feed.oversize_bytes)
        if larger is None:
            self._cursor = from_phys
            return StepResult.BUSY
        larger.reset(from_phys, self._clock.wall_ms())
        larger.to_phys = larger.chunk_phys = phys
        larger.damaged, larger.lost = damaged, lost
        self._open = larger
        return StepResult.HANDED_OVER

    def _release_open(self) -> None:
        if self._open is not None:
            self._pool.release(self._open)
            self._open = None
