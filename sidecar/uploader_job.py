"""One uploader as the process runs it: built from settings, reporting, and closed again.

Owns the wiring of the write path and the translation of its status into a StatusReport. Does not own what
the uploader does, nor when it is started (lifecycle.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta, timezone
from pathlib import Path

from sidecar.broker_side import address_of, names_of, open_store_of, read_conf, store_path
from sidecar.broker_word import BrokerVoice
from sidecar.lag import Lag, measure_lag
from sidecar.report import QueueReport, StatusReport
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.names import BrokerNames
from tiered.broker_store.pins import PinKeeper, PinLimits, PinStatus, measure_disk
from tiered.broker_store.retention import deletion_margin
from tiered.broker_store.store import BrokerStore
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
        self._growth = _Growth()

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

    def status(self) -> OffloadStatus:
        """The uploader's own, cheap view."""
        return self._offloader.status()

    def report(self) -> StatusReport:
        """The whole status, at most REPORT_EVERY_S old."""
        with self._report_lock:
            now_s = time.monotonic()
            if self._reported is None or now_s - self._reported[0] >= REPORT_EVERY_S:
                self._reported = (now_s, self._fresh_report(self._offloader.status()))
            return self._reported[1]

    def _fresh_report(self, status: OffloadStatus) -> StatusReport:
        lag, problem = self._lag(status)
        oldest_ms = lag.oldest_ms()
        now_ms = time.time_ns() // 1_000_000
        queues = tuple(
            QueueReport(topic, queue_id, queue.messages, queue.bytes, _age_s(now_ms, queue.oldest_ms))
            for (topic, queue_id), queue in sorted(lag.queues.items())
        )
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
            lag_bytes=status.lag_bytes,
            lag_seconds=0.0 if oldest_ms is None else _age_s(now_ms, oldest_ms),
            margin_seconds=self._margin_seconds(status),
            gaps=status.counters.gaps,
            errors=status.counters.attempts_abandoned,
            last_error=status.last_error or problem,
            budget_used_bytes=status.memory_used_bytes,
            budget_limit_bytes=status.memory_budget_bytes,
            pins=len(pins.pins),
            pin_note=pins.problem,
            messages=status.counters.messages,
            bytes=status.counters.raw_bytes,
            queues=queues,
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

    def _margin_seconds(self, status: OffloadStatus) -> float | None:
        growth = self._growth.sample(time.monotonic(), status.bound_phys)
        return margin_of(self._view, self._conf, status.committed_phys, growth)


def margin_of(
    store: BrokerStore, conf: BrokerConf | None, committed_phys: int, growth_bytes_per_s: float
) -> float | None:
    """Seconds until the broker deletes unarchived log; None when nothing is at risk or nothing can be
    told."""
    files = []
    for file in store.commit_log.files:
        try:
            files.append((file, int(file.path.stat().st_mtime * 1000)))
        except FileNotFoundError:  # the broker deleted it since the listing
            continue
    files = [(file, mtime_ms) for file, mtime_ms in files if not file.is_pinned]
    if not files:
        return None
    disk = replace(measure_disk(files[-1][0].path), growth_bytes_per_s=growth_bytes_per_s)
    now_ms = time.time_ns() // 1_000_000
    zone = time.localtime().tm_gmtoff
    return deletion_margin(
        files,
        committed_phys,
        conf or BrokerConf(),
        disk,
        now_ms=now_ms,
        zone=timezone(timedelta(seconds=zone)),
    ).seconds


class _Growth:
    """How fast the commitlog grows, over at least ten seconds."""

    def __init__(self) -> None:
        self._since: tuple[float, int] | None = None
        self._rate = 0.0

    def sample(self, now_s: float, end_phys: int) -> float:
        if self._since is None:
            self._since = (now_s, end_phys)
        elif now_s - self._since[0] >= 10:
            self._rate = max(0.0, (end_phys - self._since[1]) / (now_s - self._since[0]))
            self._since = (now_s, end_phys)
        return self._rate


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


def _age_s(now_ms: int, then_ms: int) -> float:
    return max(0.0, (now_ms - then_ms) / 1000)


def _log(message: str, fields: Mapping[str, object]) -> None:
    level = logging.WARNING if "error" in fields else logging.INFO
    logger.log(
        level, message, extra={f"{name}_" if name in _TAKEN else name: v for name, v in fields.items()}
    )


_TAKEN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
