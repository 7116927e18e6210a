"""One uploader as the process runs it: built from settings, reporting, and closed again.

Owns the wiring of the write path and the translation of its status into a StatusReport. Does not own what
the uploader does, nor when it is started (lifecycle.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sidecar.broker_side import address_of, names_of, open_store_of, read_conf, store_path
from sidecar.broker_word import BrokerVoice
from sidecar.lag import Lag, measure_lag
from sidecar.margin import LogGrowth, margin_of
from sidecar.report import StatusReport
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.names import BrokerNames
from tiered.broker_store.pins import PinKeeper, PinLimits, PinStatus
from tiered.errors import TieredError, UsageError
from tiered.object_store.metrics import StoreMetrics
from tiered.object_store.options import StoreOptions
from tiered.object_store.url import open_store
from tiered.settings.sections import Settings
from uploader.offload import Environment, Offloader, OffloadIdentity, OffloadResult, OffloadStatus

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
"""Asking more often gets the same answer: a report reads consume queues."""


@dataclass(frozen=True)
class Writer:
    """Who writes: a stable instance id, and "run" or "backfill". ``state_dir`` None: nothing is kept."""

    instance: str
    kind: str
    take_over: bool
    state_dir: Path | None = None


class UploaderJob:
    """Builds everything at once (raising what that raises), then runs once."""

    def __init__(self, settings: Settings, writer: Writer, metrics: StoreMetrics) -> None:
        if not settings.archive.url:
            raise UsageError("which archive? archive.url is not set", hint="--url file:///… or s3://…")
        self._settings = settings
        self._writer = writer
        self._conf = read_conf(settings)
        self._pins = _pin_keeper(settings, self._conf, writer)
        pinned = self._pins.files if self._pins is not None else None
        self._store = open_store_of(settings, self._conf, pinned)
        self.names: BrokerNames = names_of(settings, self._store)
        self._filter = settings.topics.topic_filter(self.names.cluster, self.names.broker)
        self._archive = open_store(settings.archive.url, StoreOptions(settings.object_store), metrics=metrics)
        self._voice = BrokerVoice(address_of(settings, self._conf), settings.broker.request_timeout_ms / 1000)
        self._offloader = Offloader(
            self._store,
            self._archive,
            OffloadIdentity(self.names.cluster, self.names.broker, writer.instance, writer.kind),
            settings.offload,
            topic_filter=self._filter,
            word_source=self._voice.ask,
            take_over=writer.take_over,
            pins=self._pins,
            environment=Environment(log=_log),
        )
        # The uploader's own view of the store is not for other threads: reports read through one of their
        # own.
        self._view = open_store_of(settings, self._conf, pinned)
        self._report_lock = threading.Lock()
        self._reported: tuple[float, StatusReport] | None = None
        self._growth = LogGrowth()

    def run(self, stop: threading.Event) -> None:
        """Follow the broker until ``stop``."""
        self.offload(stop, follow=True)

    def offload(self, stop: threading.Event, *, follow: bool) -> OffloadResult:
        """Run the uploader and close everything. Raises what Offloader.run raises."""
        try:
            return self._offloader.run(stop, follow=follow)
        finally:
            with self._report_lock:
                self._view.close()
            self._store.close()
            self._voice.close()
            if self._pins is not None:
                self._pins.close()
            self._archive.close()

    def status(self) -> OffloadStatus | None:
        """The uploader's own, cheap view; None until it has loaded the catalog."""
        return self._offloader.status()

    def report(self) -> StatusReport | None:
        """The whole status, at most REPORT_EVERY_S old; None until the catalog is loaded."""
        with self._report_lock:
            now_s = time.monotonic()
            if self._reported is None or now_s - self._reported[0] >= REPORT_EVERY_S:
                status = self._offloader.status()
                if status is None:
                    return None
                self._reported = (now_s, self._fresh_report(status))
            return self._reported[1]

    def _fresh_report(self, status: OffloadStatus) -> StatusReport:
        lag, problem = self._lag(status)
        oldest_ms = lag.oldest_ms()
        now_ms = time.time_ns() // 1_000_000
        end_phys = lag.end_phys if lag.is_complete else status.bound_phys
        pins = status.pins if status.pins is not None else PinStatus()
        return StatusReport(
            source="instance",
            state="",
            archive_url=self._settings.archive.url,
            cluster=self.names.cluster,
            broker=self.names.broker,
            writer=self._writer.instance,
            epoch=status.epoch,
            fenced=status.fenced,
            committed_phys=status.committed_phys,
            bound_phys=status.bound_phys,
            bound_reason=status.bound_reason,
            lag_messages=lag.messages,
            lag_bytes=max(0, end_phys - status.committed_phys),
            lag_seconds=0.0 if oldest_ms is None else max(0.0, (now_ms - oldest_ms) / 1000),
            margin_seconds=self._margin_seconds(status.committed_phys, end_phys),
            gaps=status.counters.gaps,
            errors=status.counters.attempts_abandoned,
            last_error=status.last_error or problem,
            budget_used_bytes=status.memory_used_bytes,
            budget_limit_bytes=status.memory_budget_bytes,
            pins=len(pins.pins),
            pin_note=pins.problem,
            messages=status.counters.messages,
            bytes=status.counters.raw_bytes,
            queues=lag.reports(now_ms),
        )

    def _lag(self, status: OffloadStatus) -> tuple[Lag, str]:
        """A store that cannot be read now makes the lag unknown, not the report impossible."""
        try:
            index = self._view.consume_queues()
            if index is not None:
                index.refresh()
            self._view.commit_log.refresh()
            log = self._view.commit_log
            return measure_lag(log, index, self._filter, status.committed_phys, status.bound_phys), ""
        except TieredError as error:
            return Lag(is_complete=False), str(error)

    def _margin_seconds(self, committed_phys: int, end_phys: int) -> float | None:
        growth = self._growth.bytes_per_s(time.monotonic(), end_phys)
        return margin_of(self._view, self._conf, committed_phys, end_phys, growth)


def _pin_keeper(settings: Settings, conf: BrokerConf | None, writer: Writer) -> PinKeeper | None:
    if not settings.pins.enabled or writer.state_dir is None:
        return None
    limits = PinLimits(settings.pins.create_below_ratio, settings.pins.release_above_ratio)
    store = store_path(settings, conf)
    beside = store.with_name(f"{store.name}.tiered-pins")
    chosen = (
        [Path(settings.pins.directory)] if settings.pins.directory else [writer.state_dir / "pins", beside]
    )
    return PinKeeper(chosen, limits.below_broker(conf or BrokerConf()))


def _log(message: str, fields: Mapping[str, object]) -> None:
    level = logging.WARNING if "error" in fields else logging.INFO
    logger.log(
        level, message, extra={f"{name}_" if name in _TAKEN else name: v for name, v in fields.items()}
    )


_TAKEN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
