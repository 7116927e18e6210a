"""docs/METRICS.md names every metric that a process exports, with its type, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from rocketmq_tiered.maintenance.task_figures import CompactionStatus, KeyCompactionStatus, ScrubStatus
from rocketmq_tiered.process.metrics import (
    PREFIX,
    DecodingCollector,
    ObjectStoreCollector,
    StatusCollector,
)
from rocketmq_tiered.process.mount_report import MountAdminSource
from rocketmq_tiered.process.report import QueueReport, StatusReport
from rocketmq_tiered.process.serving_metrics import ServingCollector
from rocketmq_tiered.sending.timer_status import TimerStatus
from rocketmq_tiered.server.proxy.proxy_service import ProxyCounters, ProxyService
from rocketmq_tiered.server.proxy.relay_status import ProxyStatus, SlaveStatus
from rocketmq_tiered.server.slave.slave_service import SlaveCounters, SlaveService
from tests.process.archive_admin_scene import Scene
from tests.process.status_report import REPORT
from tiered.archive.task import EXPIRY, GARBAGE_COLLECTION, TaskStatus
from tiered.object_store.request_metrics import StoreMetrics

PAGE = Path(__file__).parents[2] / "docs" / "METRICS.md"
FULL: StatusReport = replace(
    REPORT,
    retention_margin_seconds=60.0,
    queues=(QueueReport("t", 0, 1, 1, 1.0),),
    tasks=(TaskStatus(EXPIRY, last_ms=1), TaskStatus(GARBAGE_COLLECTION, last_ms=1)),
    compaction=CompactionStatus(last_ms=1),
    key_compaction=KeyCompactionStatus(last_ms=1),
    timers=TimerStatus(),
    scrub=ScrubStatus(cycle_ms=1),
)
"""A report in which nothing is unknown."""


def service(kind: type[Any], status: object, counters: object) -> Any:
    found = MagicMock(spec=kind)
    found.status.return_value, found.counters = status, counters
    found.audited, found.refused_proxy_headers = {}, 0
    return found


def exported() -> Iterator[Metric]:
    store = StoreMetrics()
    store.record("put", 0.1, 10, "ThrottledError")
    proxy = service(ProxyService, ProxyStatus("h:1", 1, True, (), 1), ProxyCounters())
    slave = service(
        SlaveService,
        SlaveStatus("h:1", 1, True, (), 7, True, None, (("h:2", "registered"),)),
        SlaveCounters(),
    )
    for collector in (
        StatusCollector(lambda: FULL),
        ObjectStoreCollector(store),
        DecodingCollector(),
        ServingCollector(proxy),
        ServingCollector(slave),
    ):
        yield from collector.collect()
    for source in (Scene().source, MountAdminSource([])):
        served = text_string_to_metric_families(source.metrics().decode())
        yield from (family for family in served if family.name.startswith(PREFIX))


def test_the_page_of_metrics_names_all_that_is_exported() -> None:
    found = {
        (family.name.removeprefix(f"{PREFIX}_") + ("_total" if family.type == "counter" else ""), family.type)
        for family in exported()
    }
    assert set(re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE.read_text("utf-8"), re.MULTILINE)) == found
