"""Makes the status report of an uploader: its status, plus lag and retention margin from the broker's files.

Reads its own BrokerStore, because the uploader's is not thread-safe. A report is reused for REPORT_EVERY_S: each one
reads consume queues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from sidecar.lag import Lag, measure_lag
from sidecar.report import StatusReport, seconds_since
from sidecar.retention_margin import LogGrowth, retention_margin_s
from tiered.broker_store.bound import BoundReason
from tiered.broker_store.pins import PinStatus
from tiered.broker_store.store import BrokerStore
from tiered.catalog.state import CatalogState
from tiered.errors import TieredError
from tiered.model.queue import TopicFilter
from uploader.offload import OffloadStatus

REPORT_EVERY_S = 1.0


class Reporter:
    """Makes reports of one uploader. Thread-safe. Closes ``view``. ``head``: the report before there is a status."""

    def __init__(
        self,
        head: StatusReport,
        view: BrokerStore,
        topic_filter: TopicFilter,
        *,
        gc_grace_ms: int = 0,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._head = head
        self._view = view
        self._filter = topic_filter
        self._gc_grace_ms = gc_grace_ms
        self._monotonic_s = monotonic_s
        self._wall_ms = wall_ms
        self._lock = threading.Lock()
        self._last = head
        self._made_s: float | None = None
        self._growth = LogGrowth()
        self._is_closed = False

    def report(self, status: Callable[[], OffloadStatus | None]) -> StatusReport:
        """A report of ``status()``, or the last one if it is recent or the reporter is closed."""
        with self._lock:
            now_s = self._monotonic_s()
            if self._is_closed or (self._made_s is not None and now_s - self._made_s < REPORT_EVERY_S):
                return self._last
            found = status()
            if found is not None:
                self._last = self._fresh(found)
                self._made_s = now_s
            return self._last

    def stand_by(self, state: CatalogState, log_end_phys: int | None) -> StatusReport:
        """A report of the lag behind the archive of another writer, whose state is ``state``."""
        with self._lock:
            head = replace(
                self._head,
                committed_phys=state.cursor.phys,
                gaps=len(state.gaps),
                pending_deletions=state.pending_deletion_count,
                oldest_pending_deletion_seconds=seconds_since(
                    state.oldest_pending_deletion_ms, self._wall_ms()
                ),
                garbage_overdue_seconds=self._overdue_s(state.oldest_garbage_ms),
                diverged_objects=state.diverged_count,
            )
            try:
                self._view.commit_log.refresh()
                end_phys = self._view.commit_log.max_file_end if log_end_phys is None else log_end_phys
                self._last = self._with_lag(head, end_phys)
            except (TieredError, OSError) as error:
                self._last = replace(head, last_error=str(error))
            return self._last

    def close(self) -> None:
        """Stop reading; the last report stays."""
        with self._lock:
            self._is_closed = True
            self._view.close()

    def _overdue_s(self, garbage_ms: int | None) -> float:
        return seconds_since(None if garbage_ms is None else garbage_ms + self._gc_grace_ms, self._wall_ms())

    def _fresh(self, status: OffloadStatus) -> StatusReport:
        pins = status.pins if status.pins is not None else PinStatus()
        report = replace(
            self._head,
            epoch=status.epoch,
            committed_phys=status.committed_phys,
            bound_phys=status.bound_phys,
            bound_reason=status.bound_reason,
            gaps=status.gaps,
            new_gaps=status.counters.gaps,
            errors=status.counters.attempts_abandoned,
            last_error=status.last_error,
            budget_used_bytes=status.memory_used_bytes,
            budget_limit_bytes=status.memory_budget_bytes,
            pins=len(pins.pins),
            pin_note=pins.problem,
            messages=status.counters.messages,
            bytes=status.counters.raw_bytes,
            unindexed_objects=status.unindexed_objects,
            index_files_rebuilt=status.index_files_rebuilt,
            index_problem=status.index_problem,
            store_problem=status.store_problem,
            pending_deletions=status.pending_deletions,
            oldest_pending_deletion_seconds=seconds_since(status.oldest_pending_deletion_ms, self._wall_ms()),
            garbage_overdue_seconds=self._overdue_s(status.oldest_garbage_ms),
            diverged_objects=status.diverged_objects,
        )
        if not status.bound_reason:
            return replace(report, bound_phys=None)  # no bound yet
        try:
            return self._with_lag(report, status.written_phys)
        except (TieredError, OSError) as error:
            # Without a readable store the lag is unknown.
            return replace(report, last_error=str(error))

    def _with_lag(self, report: StatusReport, written_phys: int) -> StatusReport:
        index = self._view.consume_queues()
        if index is not None:
            index.refresh()
        log = self._view.commit_log
        log.refresh()
        # Beyond the bound too: what a silent broker excludes is lag as well.
        committed_phys, bound_phys = report.committed_phys, report.bound_phys
        lag = measure_lag(log, index, self._filter, committed_phys, written_phys)
        end_phys = lag.end_phys if lag.is_complete else max(lag.end_phys, bound_phys or 0)
        if bound_phys is not None and report.bound_reason == BoundReason.DEAD.value and lag.is_complete:
            bound_phys = min(bound_phys, max(end_phys, committed_phys))  # it ends where its files do
        growth = self._growth.bytes_per_s(self._monotonic_s(), end_phys)
        now_ms = self._wall_ms()
        return replace(
            report,
            bound_phys=bound_phys,
            lag_messages=lag.messages,
            lag_bytes=max(0, end_phys - committed_phys),
            lag_seconds=age_s(lag, now_ms),
            retention_margin_seconds=retention_margin_s(self._view, committed_phys, end_phys, growth),
            queues=lag.reports(now_ms),
        )


def age_s(lag: Lag, now_ms: int) -> float:
    """Age of the oldest message that is not archived; 0 without lag."""
    oldest_ms = lag.oldest_ms()
    return 0.0 if oldest_ms is None else max(0.0, (now_ms - oldest_ms) / 1000)
