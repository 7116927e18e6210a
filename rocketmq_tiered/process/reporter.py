"""Makes the status report of an uploader: its status, plus lag and retention margin from the broker's files.

Reads its own BrokerStore, because the uploader's is not thread-safe. A report is reused for REPORT_EVERY_S, and longer
where it costs much: each one reads the log that is not archived. Such a
report is made by a thread of its own, and until it is there the last one is returned.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from rocketmq_tiered.process.lag import LogGrowth, measure_lag, retention_margin_s
from rocketmq_tiered.process.report import StatusReport, catalog_figures
from tiered.broker_store.bound import BoundReason
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.pins import PinStatus
from tiered.broker_store.retention import short_margin_s
from tiered.broker_store.store import BrokerStore
from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import TieredError
from tiered.model.queue import TopicFilter
from tiered.settings.sections import GcSettings
from uploader.offload import OffloadStatus

REPORT_EVERY_S = 1.0
COSTLY_S = 0.05
"""From this processor time on a report is made by a thread of its own."""
_GRACES: Final = GcSettings()
COST_SHARE = 4.0
"""A report is reused for so many times the processor time that it took: reports take a fifth of a core at most."""


class Reporter:
    """Makes reports of one uploader. Thread-safe. Closes ``view``. ``head``: the report before there is a status."""

    def __init__(
        self,
        head: StatusReport,
        view: BrokerStore,
        topic_filter: TopicFilter,
        *,
        gc: GcSettings = _GRACES,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        """``head``: the members that never change; ``view``: the broker's store, which nothing else reads;
        ``topic_filter``: topics whose messages count as lag; ``gc``: the grace periods after which garbage is
        overdue."""
        self._head = head
        self._view = view
        self._filter = topic_filter
        self._gc = gc
        self._clock = clock
        self._lock = threading.Lock()
        self._last = head
        self._status: Callable[[], OffloadStatus | None] = lambda: None
        self._cost_s = 0.0
        """Processor time that the last report took."""
        self._measured_s: float | None = None
        """When the figures of the last report were measured; None: none were."""
        self._due_s: float | None = None
        """When the last report is too old; None: none was made."""
        self._growth = LogGrowth()
        self._is_closed = False

    def report(self, status: Callable[[], OffloadStatus | None]) -> StatusReport:
        """A report of ``status()``; the last one while that is recent, another is made, or the reporter is closed."""
        self._status = status
        self._renew()
        age_s = 0.0 if self._measured_s is None else self._clock.monotonic_s() - self._measured_s
        return self._last if age_s <= REPORT_EVERY_S else replace(self._last, measured_seconds=age_s)

    def _renew(self) -> None:
        """Make a new report if the last one is too old: here, or in a thread of its own if the last one took long. Does
        nothing while another thread makes one."""
        if not self._lock.acquire(blocking=self._due_s is None):  # the first report is waited for
            return
        if self._is_closed or (self._due_s is not None and self._clock.monotonic_s() < self._due_s):
            self._lock.release()
        elif self._cost_s < COSTLY_S:
            self._make()
        else:  # the thread releases the lock
            try:
                threading.Thread(target=self._make, name="report", daemon=True).start()
            except RuntimeError:  # no thread can be started
                self._make()

    def _make(self) -> None:
        """Make a report of the present status, keep it as the last one, and note when the next one is due: later if
        this one took long. Releases the lock, which the caller has taken."""
        # If this raises in a thread, where it is not seen, the caller of the next report makes it itself.
        cost_s, self._cost_s = 0.0, 0.0
        try:
            found, began_s = self._status(), self._clock.cpu_s()
            if found is not None:
                measured_s = self._clock.monotonic_s()
                self._last = self._fresh(found)
                self._measured_s = measured_s
                cost_s = self._clock.cpu_s() - began_s
                self._due_s = self._clock.monotonic_s() + max(REPORT_EVERY_S, COST_SHARE * cost_s)
            self._cost_s = cost_s
        finally:
            self._lock.release()

    def stand_by(self, state: CatalogState, log_end_phys: int | None) -> StatusReport:
        """The report of a process on standby: the lag of its broker's log behind an archive that another process
        writes, and that is at ``state``. ``log_end_phys``: the end of the log by the broker; None if it does not
        answer, and the files tell it. The report is the last one from here on."""
        with self._lock:
            figures = catalog_figures(state, self._clock.wall_ms(), self._gc)
            head = replace(self._head, committed_phys=state.cursor.phys, **figures)
            try:
                self._view.commit_log.refresh()
                end_phys = self._view.commit_log.max_file_end if log_end_phys is None else log_end_phys
                self._last = self._with_lag(head, end_phys)
            except (TieredError, OSError) as error:
                self._last = replace(head, last_error=str(error))
            self._measured_s = self._clock.monotonic_s()
            return self._last

    def close(self) -> None:
        """Stop reading; the last report stays."""
        with self._lock:
            self._is_closed = True
            self._view.close()

    def _fresh(self, status: OffloadStatus) -> StatusReport:
        """A report of the uploader's ``status``, the archive's catalog and the broker's log at this moment. If the
        broker's store cannot be read, it has neither lag nor retention margin."""
        pins = status.pins if status.pins is not None else PinStatus()
        report = replace(
            self._head,
            epoch=status.epoch,
            committed_phys=status.committed_phys,
            bound_phys=status.bound_phys,
            bound_reason=status.bound_reason,
            new_gaps=status.counters.gaps,
            excluded=status.excluded,
            damaged_tables=status.damaged_tables,
            errors=status.counters.attempts_abandoned,
            last_error=status.last_error,
            budget_used_bytes=status.memory_used_bytes,
            budget_limit_bytes=status.memory_budget_bytes,
            pins=len(pins.pins),
            pin_note=pins.problem,
            messages=status.counters.messages,
            bytes=status.counters.raw_bytes,
            index_files_rebuilt=status.index_files_rebuilt,
            tasks=() if status.index is None else (status.index,),
            store_problem=status.store_problem,
            **catalog_figures(status.catalog, self._clock.wall_ms(), self._gc),
        )
        if not status.bound_reason:
            return replace(report, bound_phys=None)  # what may be uploaded is not known yet
        try:
            return self._with_lag(report, status.written_phys)
        except (TieredError, OSError) as error:
            return replace(report, last_error=str(error))

    def _with_lag(self, report: StatusReport, written_phys: int) -> StatusReport:
        """``report`` with what the broker's log tells: the lag up to ``written_phys``, and when the broker deletes what
        is not archived."""
        log = self._view.commit_log
        log.refresh()
        # Messages above the bound are lag as well, although a silent broker allows no upload of them.
        committed_phys, bound_phys = report.committed_phys, report.bound_phys
        lag = measure_lag(log, self._filter, committed_phys, written_phys)
        end_phys = lag.end_phys
        if bound_phys is not None and report.bound_reason == BoundReason.DEAD.value:
            # The log of a stopped broker ends where its records do.
            bound_phys = min(bound_phys, max(end_phys, committed_phys))
        growth = self._growth.rates(self._clock.monotonic_s(), end_phys)
        now_ms = self._clock.wall_ms()
        return replace(
            report,
            bound_phys=bound_phys,
            broker_min_phys=log.broker_min_phys if log.files else None,
            lag_messages=lag.messages,
            is_lag_estimated=lag.estimated_from < 1,
            lag_bytes=max(0, end_phys - committed_phys),
            **lag.ages(now_ms),
            retention_margin_seconds=retention_margin_s(self._view, committed_phys, end_phys, growth),
            deletion_zone=str(self._view.zone()),
            short_retention_margin_seconds=short_margin_s(self._view.conf or BrokerConf()),
            queues=lag.reports(now_ms),
        )
